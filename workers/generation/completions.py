"""One text in the making, and finished texts as result columns. Chooses no token; `generate` moves rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from workers.engine.base import Event
from workers.forward import NOT_FINITE
from workers.generation.detokenize import TextStream
from workers.results import completion_fields
from workers.tokenization.codec import TextCodec

CONSTRAINT_FAILED = "the JSON schema cannot be followed"
FINISH_ERROR = "error"
_ENDINGS = {"stop": "stop", "stopped": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished text.

    Attributes:
        finish_reason: `stop`, `length` or `error`.
        n_new_tokens: Tokens the model gave before its end token, those of a stop string among them.
        logprob: Sum of their log-probabilities under the model's own distribution.
        error: Why there is no text, or None.
    """

    text: str
    finish_reason: str
    n_new_tokens: int
    logprob: float
    error: str | None = None


def failed(error: str) -> Completion:
    """What stands for a text that could not be made."""
    return Completion("", FINISH_ERROR, 0, 0.0, error)


class Growing:
    """Gathers the events of one request."""

    def __init__(self, codec: TextCodec, stop: Sequence[str]) -> None:
        self._stream = TextStream(codec, stop)
        self._tokens = 0
        self._logprob = 0.0

    def take(self, event: Event) -> Completion | None:
        """Take an event.

        Returns:
            The finished text, or None while it goes on. A text may be finished although the event says that it goes
            on: then it holds a stop string.
        """
        if event.finish == "error":
            return failed(_told(event.error or "the engine gives no reason"))
        for token, logprob in zip(event.ids, event.logprobs, strict=True):
            self._tokens += 1
            self._logprob += logprob
            if self._stream.push(token):
                return self._finished("stop")
        return None if event.finish is None else self._finished(_ENDINGS[event.finish])

    def _finished(self, reason: str) -> Completion:
        if not math.isfinite(self._logprob):
            return failed(NOT_FINITE)
        return Completion(self._stream.text(), reason, self._tokens, self._logprob)


def completion_arrays(rows: Sequence[Sequence[Completion] | None], n: int) -> list[pa.Array]:
    """Arrow columns of `completion_fields`.

    Args:
        rows: The texts of each row, or None for a row that has an error; so has one with a failed text.
        n: Texts of a row.
    """
    columns: list[list[Any]] = [[], [], [], []]
    for texts in rows:
        if texts is None or row_error(texts) is not None:
            values: tuple[Any, ...] = (None, FINISH_ERROR if n == 1 else [FINISH_ERROR] * n, None, None)
        elif n == 1:
            (text,) = texts
            values = (text.text, text.finish_reason, text.n_new_tokens, text.logprob)
        else:
            values = tuple(
                [getattr(text, name) for text in texts] for name in ("text", "finish_reason", "n_new_tokens", "logprob")
            )
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    fields = completion_fields("text", n)
    return [pa.array(column, field.type) for column, field in zip(columns, fields, strict=True)]


def _told(error: str) -> str:
    """An error in a user's words: of a constraint, what it says itself, without the engine's frame around it."""
    start = error.find(CONSTRAINT_FAILED)
    return error if start < 0 else error[start:].removesuffix("`").rstrip()


def row_error(texts: Sequence[Completion]) -> str | None:
    """The error of a row: that of its first failed text."""
    return next((text.error for text in texts if text.error is not None), None)
