"""Overlap between stations: an iterator that runs ahead, a sink that works behind. Moves items, reads none."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")
_DEPTH = 2
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class _Failure:
    error: BaseException


class _End:
    pass


class Ahead(Generic[T]):
    """Iterates another iterator from a thread of its own, at most two items ahead.

    An exception of the iterator is raised here, at its item. Leaving the `with` block stops the thread.
    """

    def __init__(self, items: Iterator[T], name: str) -> None:
        self._items = items
        self._queue: queue.Queue[T | _Failure | _End] = queue.Queue(_DEPTH)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    return
            self._put(_End())
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, which raises it
            self._put(_Failure(error))

    def _put(self, item: T | _Failure | _End) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

    def __iter__(self) -> Iterator[T]:
        while True:
            item = self._queue.get()
            if isinstance(item, _End):
                return
            if isinstance(item, _Failure):
                raise item.error
            yield item

    def __enter__(self) -> Ahead[T]:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()


class Behind(Generic[T]):
    """Hands items to a function that runs in a thread of its own, at most two items behind.

    An exception of the function is raised by the next `put`, or by leaving the `with` block, which waits for all items.
    """

    def __init__(self, consume: Callable[[T], None], name: str) -> None:
        self._consume = consume
        self._queue: queue.Queue[T | _End] = queue.Queue(_DEPTH)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        while not isinstance(item := self._queue.get(), _End):
            if self._failure is None:
                try:
                    self._consume(item)
                except BaseException as error:  # noqa: BLE001 - handed to the producer, which raises it
                    self._failure = error

    def put(self, item: T) -> None:
        """Queue one item; waits while two are queued."""
        if self._failure is not None:
            raise self._failure
        self._queue.put(item)

    def __enter__(self) -> Behind[T]:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.put(_End())
        self._thread.join()
        if error is None and self._failure is not None:
            raise self._failure
