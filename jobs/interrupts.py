"""Signals become a question the driver can ask: finish what is in flight, or give up now? Handles nothing else."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from jobs.errors import ExitCode

_SIGNALS = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED}


class Interrupts:
    """While entered, SIGINT and SIGTERM are counted: once means wind down, twice means abort.

    In a thread other than the main one (a driver embedded in a service) signals are left to their owner.
    """

    def __init__(self) -> None:
        self._count = 0
        self._code: ExitCode | None = None
        self._before: dict[signal.Signals, object] = {}

    @property
    def code(self) -> ExitCode | None:
        """Exit code of the first signal, or None while there was none."""
        return self._code

    @property
    def wind_down(self) -> bool:
        """At least one signal came: start nothing new."""
        return self._count >= 1

    @property
    def abort(self) -> bool:
        """A second signal came: do not wait for anything."""
        return self._count >= 2

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self._code = self._code or _SIGNALS[signal.Signals(number)]

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


@contextlib.contextmanager
def keeping_signals() -> Iterator[None]:
    """Meanwhile nobody gets SIGINT and SIGTERM who asks for them, as Ray does while it starts; a signal stays ours."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    plain = signal.signal

    def keep(number: int, handler: Any) -> Any:
        return signal.getsignal(number) if number in before else plain(number, handler)

    signal.signal = keep  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = plain
        for number, handler in before.items():
            if handler is not None:  # else it was not Python's
                signal.signal(number, handler)  # what is not Python may have taken it: Ray's core does
