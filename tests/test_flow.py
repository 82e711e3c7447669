"""Overlap helpers: order, errors, and no thread left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from workers.flow import Ahead, Behind


def thread_names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def put_all(consume: Callable[[int], None], count: int) -> None:
    with Behind(consume, "behind-test") as sink:
        for number in range(count):
            sink.put(number)


def test_items_come_in_order_and_the_thread_ends() -> None:
    with Ahead(iter(range(100)), "ahead-test") as items:
        assert list(items) == list(range(100))
    assert "ahead-test" not in thread_names()


def test_an_error_of_the_source_is_raised_after_the_items_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("broken")

    seen: list[int] = []
    with Ahead(source(), "ahead-test") as items, pytest.raises(KeyError, match="broken"):
        seen.extend(items)
    assert "ahead-test" not in thread_names()


def test_leaving_early_stops_a_source_without_end() -> None:
    def endless() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    with Ahead(endless(), "ahead-test") as items:
        assert next(iter(items)) == 0
    assert "ahead-test" not in thread_names()


def test_everything_put_is_consumed_in_order_before_leaving() -> None:
    seen: list[int] = []
    with Behind(seen.append, "behind-test") as sink:
        for number in range(100):
            sink.put(number)
    assert seen == list(range(100))
    assert "behind-test" not in thread_names()


def test_an_error_of_the_consumer_reaches_the_producer() -> None:
    def consume(number: int) -> None:
        if number == 3:
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        put_all(consume, 1000)
    assert "behind-test" not in thread_names()


def test_an_error_on_the_last_item_is_not_lost() -> None:
    def consume(number: int) -> None:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        put_all(consume, 1)
