"""Overlap helpers: order, errors, and no thread left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from workers.flow import Ahead, Behind


def thread_names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_items_come_in_order_and_the_thread_ends() -> None:
    with Ahead(iter(range(100)), "ahead-test") as items:
        assert list(items) == list(range(100))
    assert "ahead-test" not in thread_names()


def test_an_error_of_the_source_is_raised_after_the_items_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("broken")

    seen = []
    with pytest.raises(KeyError, match="broken"), Ahead(source(), "ahead-test") as items:
        seen.extend(items)
        raise AssertionError("the error was swallowed")
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

    with pytest.raises(OSError, match="disk"), Behind(consume, "behind-test") as sink:
        for number in range(1000):
            sink.put(number)
    assert "behind-test" not in thread_names()


def test_an_error_on_the_last_item_is_not_lost() -> None:
    def consume(number: int) -> None:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"), Behind(consume, "behind-test") as sink:
        sink.put(1)
