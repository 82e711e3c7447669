"""An engine for tests of everything but engines: vectors made of token ids by arithmetic, and words that misbehave.

`model.source: fake:8` gives 8 values per row. The words `nan`, `crash` and `oom` in a text make the engine return NaN,
fail the batch, or kill its own process the way the kernel's memory killer does. `fake:8:FOLDER` takes tokenizer, chat
template and generation defaults of a decoder task from a model folder; only the model is made up.
"""

from __future__ import annotations

import os
import signal
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from sharding.errors import InputError, RecordRow
from workers.batch import TokenBatch, row_lengths
from workers.config import TaskConfig
from workers.engine.base import BatchOutput, EngineInfo
from workers.engine.fake_generator import FakeGenerator
from workers.engine.likelihood import compute_likelihoods

_PREFIX = "fake:"
_VOCAB_SIZE = 1 << 20
_MAX_POSITIONS = 512
END_ID = 1
_LABELS = ("negative", "neutral", "positive")


def is_fake(source: str) -> bool:
    """Whether a model source names this engine."""
    return source.startswith(_PREFIX)


def fake_folder(source: str) -> Path | None:
    """The folder whose text side a fake model has, or None."""
    folder = source.removeprefix(_PREFIX).partition(":")[2]
    return Path(folder) if folder else None


def word_id(word: str) -> int:
    """The token of a word, where a fake model has no tokenizer of its own."""
    return zlib.crc32(word.encode()) % _VOCAB_SIZE


_MISBEHAVING = ("nan", "crash", "oom")


def _ids_of_words(source: str) -> list[int]:
    folder = fake_folder(source)
    if folder is None:
        return [word_id(word) for word in _MISBEHAVING]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [-1 if (found := tokenizer.token_to_id(word)) is None else found for word in _MISBEHAVING]


def _vocab_size(source: str) -> int:
    folder = fake_folder(source)
    if folder is None:
        return _VOCAB_SIZE
    return max(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab(with_added_tokens=True).values()) + 1


class FakeEngine:
    """Row value j = sum of sin(id * (j + 1)) over the row's ids, L2-normalised for embeddings."""

    def __init__(self, source: str, task: TaskConfig) -> None:
        self._task = task
        self._words = tuple(_ids_of_words(source))
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
        width = source.removeprefix(_PREFIX).partition(":")[0]
        if not width.isdigit() or int(width) < 1:
            raise InputError(f"a fake model needs a width, such as `fake:8`: `{source}`")
        return EngineInfo(
            architecture="Fake",
            max_positions=_MAX_POSITIONS,
            vocab_size=_vocab_size(source),
            hidden_size=int(width),
            layers=1,
            width={"embed": int(width), "classify": len(_LABELS), "score": 2}.get(kind, 1),
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
        nan, crash, oom = self._words
        if oom in batch.ids:
            os.kill(os.getpid(), signal.SIGKILL)
        if crash in batch.ids:
            raise RecordRow("the model cannot take this row: `crash`")
        if self._task.decoder is not None:
            scored = self._task.kind == "score"
            return compute_likelihoods(batch, self._info.width, self._logprobs, scored=scored)
        factors = np.arange(1, self._info.width + 1, dtype=np.float64)
        waves = np.sin(batch.ids.astype(np.float64)[:, None] * factors)
        values: NDArray[np.float32] = np.add.reduceat(waves, batch.offsets[:-1].astype(np.int64)).astype(np.float32)
        if self._task.kind == "embed" and self._task.normalize:
            values /= np.linalg.norm(values, axis=1, keepdims=True)
        rows_of_ids = np.repeat(np.arange(len(batch)), row_lengths(batch.offsets))
        bad = tuple(int(row) for row in np.unique(rows_of_ids[batch.ids == nan]))
        values[list(bad)] = np.nan
        return BatchOutput(values, bad)

    def generator(self, *, rows: int, cache_bytes: int | None, step_tokens: int) -> FakeGenerator:
        """See `workers.engine.base.Engine.generator`."""
        nan, crash, oom = self._words
        return FakeGenerator(self._info.vocab_size, rows, (nan, crash, oom), _MAX_POSITIONS)

    def _logprobs(self, ids: NDArray[np.uint32], offsets: NDArray[np.uint32]) -> NDArray[np.float32]:
        """A wave of a token and the one before it, never above 0; NaN for `nan` and the word after it."""
        before = np.concatenate([[0], ids[:-1]]).astype(np.float64)
        found = (np.sin(ids.astype(np.float64) + 0.5 * before) - 1.5).astype(np.float32)
        found[(ids == self._words[0]) | (before == self._words[0])] = np.nan
        found[offsets[:-1].astype(np.int64)] = 0
        return found
