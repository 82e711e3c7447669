"""Signals of a driver: who asks for them while it lends the process out does not get them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from jobs.errors import ExitCode
from jobs.interrupts import Interrupts, keeping_signals


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Both signals are afterwards whose they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)]
)
def test_a_signal_is_counted_though_others_ask_for_it_meanwhile(number: signal.Signals, code: ExitCode) -> None:
    taken: list[int] = []
    with Interrupts() as interrupts, keeping_signals():
        ours = signal.getsignal(number)
        assert signal.signal(number, lambda *_: taken.append(1)) == ours
        os.kill(os.getpid(), number)
        assert (interrupts.code, interrupts.wind_down, interrupts.abort) == (code, True, False)
        os.kill(os.getpid(), number)
        assert interrupts.abort
    assert taken == []


def test_other_signals_are_free_and_everything_is_as_before_after_an_error() -> None:
    plain, before = signal.signal, signal.getsignal(signal.SIGUSR1)
    with contextlib.suppress(ValueError), keeping_signals():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise ValueError("broken")
    assert signal.signal is plain
    assert signal.signal(signal.SIGUSR1, before) == signal.SIG_IGN


def test_a_thread_leaves_signals_alone() -> None:
    seen: list[object] = []

    def look() -> None:
        with keeping_signals():
            seen.append(signal.signal)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.signal]
