"""An engine for tests of everything but engines: vectors made of token ids by arithmetic, and words that misbehave.

`model.source: fake:8` gives 8 values per row. The words `nan`, `crash` and `oom` in a text make the engine return NaN,
fail the batch, or kill its own process the way the kernel's memory killer does.
"""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sharding.errors import InputError, RecordRow
from workers.batch import TokenBatch, row_lengths
from workers.config import TaskConfig
from workers.engine.base import BatchOutput, EngineInfo
from workers.tokenize import TokenRows

_PREFIX = "fake:"
_VOCAB_SIZE = 1 << 20
_MAX_POSITIONS = 512
_LABELS = ("negative", "neutral", "positive")


def is_fake(source: str) -> bool:
    """Whether a model source names this engine."""
    return source.startswith(_PREFIX)


def _word_id(word: str) -> int:
    return zlib.crc32(word.encode()) % _VOCAB_SIZE


_NAN, _CRASH, _OOM = (_word_id(word) for word in ("nan", "crash", "oom"))


class FakeTokenizer:
    """Splits on white space; one id per word, one closing id."""

    prompt_tokens = 0

    def __init__(self, *, max_tokens: int, prompt: str) -> None:
        self._max_tokens = max_tokens
        self._prompt = prompt

    def tokenize(self, texts: Sequence[str | None]) -> TokenRows:
        """Token rows of texts; see `workers.tokenize.TextTokenizer.tokenize`."""
        return self._rows([text if text is None else self._prompt + text for text in texts])

    def tokenize_pairs(self, queries: Sequence[str | None], texts: Sequence[str | None]) -> TokenRows:
        """Token rows of pairs; see `workers.tokenize.TextTokenizer.tokenize_pairs`."""
        pairs = zip(queries, texts, strict=True)
        return self._rows([None if q is None or t is None else f"{q} | {t}" for q, t in pairs])

    def _rows(self, texts: Sequence[str | None]) -> TokenRows:
        ids: list[int] = []
        offsets, truncated, errors = [0], [], {}
        for row, text in enumerate(texts):
            words = [] if text is None else text.split()
            if text is None:
                errors[row] = "null text"
            else:
                ids += [_word_id(word) for word in words[: self._max_tokens - 1]] + [1]
            truncated.append(len(words) > self._max_tokens - 1)
            offsets.append(len(ids))
        return TokenRows(
            ids=np.array(ids, np.uint32),
            offsets=np.array(offsets, np.uint32),
            truncated=np.array(truncated, np.bool_),
            errors=errors,
            type_ids=None,
        )


class FakeEngine:
    """Row value j = sum of sin(id * (j + 1)) over the row's ids, L2-normalised for embeddings."""

    def __init__(self, source: str, task: TaskConfig) -> None:
        self._task = task
        self._info = replace(self.inspect(source, task.kind), width=task.width)

    @property
    def info(self) -> EngineInfo:
        """What was loaded."""
        return self._info

    @staticmethod
    def inspect(source: str, kind: str) -> EngineInfo:
        """The facts of a fake model.

        Raises:
            InputError: The source does not name a width.
        """
        width = source.removeprefix(_PREFIX)
        if not width.isdigit() or int(width) < 1:
            raise InputError(f"a fake model needs a width, such as `fake:8`: `{source}`")
        return EngineInfo(
            architecture="Fake",
            max_positions=_MAX_POSITIONS,
            vocab_size=_VOCAB_SIZE,
            hidden_size=int(width),
            layers=1,
            width={"embed": int(width), "classify": len(_LABELS)}.get(kind, 1),
            labels=_LABELS if kind == "classify" else None,
            pooling="mean",
            normalize=True,
            include_prompt=True,
            dtype="float32",
            device="cpu",
            weight_bytes=0,
        )

    def forward(self, batch: TokenBatch) -> BatchOutput:
        """Compute one batch; see `workers.engine.base.Engine.forward`."""
        if _OOM in batch.ids:
            os.kill(os.getpid(), signal.SIGKILL)
        if _CRASH in batch.ids:
            raise RecordRow("the model cannot take this row: `crash`")
        factors = np.arange(1, self._info.width + 1, dtype=np.float64)
        waves = np.sin(batch.ids.astype(np.float64)[:, None] * factors)
        values: NDArray[np.float32] = np.add.reduceat(waves, batch.offsets[:-1].astype(np.int64)).astype(np.float32)
        if self._task.kind == "embed" and self._task.normalize:
            values /= np.linalg.norm(values, axis=1, keepdims=True)
        rows_of_ids = np.repeat(np.arange(len(batch)), row_lengths(batch.offsets))
        bad = tuple(int(row) for row in np.unique(rows_of_ids[batch.ids == _NAN]))
        values[list(bad)] = np.nan
        return BatchOutput(values, bad)
