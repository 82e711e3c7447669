"""Beside the remote stores: how long to try again. Knows no store; what is worth a retry is said by the caller."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from sharding.errors import StorageError

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How a store's failures are met.

    Attributes:
        request_retries: Retries of one request inside the store's client (429, 5xx, dropped connections).
        initial_s: First pause; each next one is drawn at random up to `base` times the last (jitter).
        longest_s: Longest pause.
        total_s: Time after which nothing is tried again.
        call_tries: How often a whole call is tried, for what its client does not retry itself (a listing cut short).
        request_timeout_s: Longest time of one request, body included.
    """

    request_retries: int = 10
    initial_s: float = 0.1
    base: float = 2.0
    longest_s: float = 10.0
    total_s: float = 90.0
    call_tries: int = 8
    request_timeout_s: float = 60.0


def call_with_retries(
    call: Callable[[], _Result],
    translate: Callable[[Exception], Exception | None],
    policy: RetryPolicy,
) -> _Result:
    """Calls until it works, the error is final, or tries or time are used up.

    Args:
        call: What to do; must be safe to repeat.
        translate: The error to raise for an exception of `call`. A `StorageError` means "worth another try"; None means
            that the exception is not the store's and passes as it is.
        policy: Pauses and tries.
    """
    deadline = time.monotonic() + policy.total_s
    pause = policy.initial_s
    left = policy.call_tries
    while True:
        try:
            return call()
        except Exception as error:
            left -= 1
            translated = translate(error)
            if translated is None:
                raise
            if left <= 0 or time.monotonic() > deadline or not isinstance(translated, StorageError):
                raise translated from error
        time.sleep(pause)
        pause = min(policy.longest_s, random.uniform(policy.initial_s, pause * policy.base))
