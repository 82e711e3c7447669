"""A generator for tests of everything but generators: the next token is a hash of all tokens before it.

Greedy texts are a function of the prompt, sampled ones of prompt and seed, whatever else grows beside them. A text
ends with its first end token after some 20 tokens on average. Prompts with the words that `workers.engine.fake` knows
misbehave as there. Texts grow in places as in the real one: those that come late wait.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sharding.errors import RecordRow
from workers.config import Sampling
from workers.engine.base import Constraint

_END_ONE_IN = 20


@dataclass(frozen=True, slots=True)
class FakeEvent:
    """See `workers.engine.base.Event`."""

    request_id: int
    ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length", "stopped", "error"] | None = None
    error: str | None = None


@dataclass(slots=True)
class _Text:
    request_id: int
    prompt: tuple[int, ...]
    sampling: Sampling
    max_new_tokens: int
    seed: int
    constraint: Constraint | None
    new: list[int] = field(default_factory=list)


class FakeGenerator:
    """See `workers.engine.base.Generator`.

    Args:
        vocab_size: Tokens to choose from.
        rows: Texts that grow at the same time.
        words: Ids of the words `nan`, `crash` and `oom`.
        max_positions: Longest prompt and text together.
    """

    def __init__(self, vocab_size: int, rows: int, words: tuple[int, int, int], max_positions: int) -> None:
        self._vocab_size = vocab_size
        self._rows = rows
        self._nan, self._crash, self._oom = words
        self._max_positions = max_positions
        self._growing: list[_Text] = []
        self._waiting: deque[_Text] = deque()
        self.most_held = 0
        self.cache_bytes = 0

    def add(
        self,
        request_id: int,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        seed: int = 0,
        constraint: Constraint | None = None,
    ) -> None:
        """See `workers.engine.base.Generator.add`."""
        prompt = tuple(ids)
        if self._oom in prompt:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._crash in prompt:
            raise RecordRow("the model cannot take this row: `crash`")
        if not prompt or len(prompt) + max_new_tokens > self._max_positions:
            raise RecordRow(f"the prompt does not fit: `{len(prompt)}`")
        chosen = 0 if sampling.greedy else seed
        self._waiting.append(_Text(request_id, prompt, sampling, max_new_tokens, chosen, constraint))
        self.most_held = max(self.most_held, len(self._waiting) + len(self._growing))

    def step(self) -> list[FakeEvent]:
        """See `workers.engine.base.Generator.step`."""
        while self._waiting and len(self._growing) < self._rows:
            self._growing.append(self._waiting.popleft())
        events = [self._grow(text) for text in self._growing]
        ended = {event.request_id for event in events if event.finish is not None}
        self._growing = [text for text in self._growing if text.request_id not in ended]
        return events

    def stop(self, request_id: int) -> None:
        """See `workers.engine.base.Generator.stop`."""
        self._growing = [text for text in self._growing if text.request_id != request_id]

    def _grow(self, text: _Text) -> FakeEvent:
        if self._nan in text.prompt:
            return FakeEvent(text.request_id, [], [], "error", "the model gave logits that are not finite")
        allowed: Callable[[int], bool] = lambda _: True  # noqa: E731
        if text.constraint is not None:
            try:
                mask = text.constraint.mask(text.new[-1:])
            except RecordRow as error:
                return FakeEvent(text.request_id, [], [], "error", str(error))
            if mask is None:
                return FakeEvent(text.request_id, [], [], "stopped")
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            allowed = lambda token: bool(bits[token])  # noqa: E731
        token, chance = self._next(text, allowed)
        if token in text.sampling.stop_ids:
            return FakeEvent(text.request_id, [], [], "stop")
        text.new.append(token)
        logprob = -float(chance % 1000) / 500
        finish: Literal["length"] | None = "length" if len(text.new) >= text.max_new_tokens else None
        return FakeEvent(text.request_id, [token], [logprob], finish)

    def _next(self, text: _Text, allowed: Callable[[int], bool]) -> tuple[int, int]:
        content = np.array([text.seed, *text.prompt, *text.new], np.uint64).tobytes()
        chance = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
        stop_ids = text.sampling.stop_ids
        early = len(text.new) < min(text.sampling.min_new_tokens, text.max_new_tokens)
        ends: Collection[int] = () if early else [token for token in stop_ids if allowed(token)]
        if ends and chance % _END_ONE_IN == 0:
            return next(iter(ends)), chance
        first = chance // _END_ONE_IN % self._vocab_size
        for offset in range(self._vocab_size):
            token = (first + offset) % self._vocab_size
            if token not in stop_ids and allowed(token):
                return token, chance
        if ends:
            return next(iter(ends)), chance
        raise RecordRow("no token is allowed")
