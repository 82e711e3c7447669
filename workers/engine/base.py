"""The contract between the pipeline and an engine. No engine lives here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.batch import TokenBatch


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the plan and the pipeline need to know of a model.

    Attributes:
        architecture: Name from the model's config, such as `BertModel`.
        max_positions: Longest sequence the model's positions allow, in tokens.
        vocab_size: Rows of the token embedding.
        width: Values per row that `Engine.forward` gives for the task asked for.
        labels: Names of a classifier's outputs, or None.
        pooling: Pooling modes that the model's own files ask for, joined by `+`, or None when they say nothing.
        normalize: The model's own files list a Normalize module.
        include_prompt: The prompt's tokens take part in pooling.
        weight_bytes: Size of the weights in memory.
    """

    architecture: str
    max_positions: int
    vocab_size: int
    hidden_size: int
    layers: int
    width: int
    labels: tuple[str, ...] | None
    pooling: str | None
    normalize: bool
    include_prompt: bool
    dtype: str
    device: str
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """Results of one batch.

    Attributes:
        values: float32 (rows, width): embeddings, or logits of a classifier.
        bad_rows: Rows whose values are not finite, or all zero where a direction was asked for.
    """

    values: NDArray[np.float32]
    bad_rows: tuple[int, ...]


class Engine(Protocol):
    """A loaded model, ready for one kind of task."""

    @property
    def info(self) -> EngineInfo:
        """What was loaded."""

    def forward(self, batch: TokenBatch) -> BatchOutput:
        """Compute one batch.

        Args:
            batch: Ragged token ids, at least one row, no row empty.

        Raises:
            RecordRow: The batch holds a row that the model cannot take (an id outside its vocabulary, say).
            RetryShard: The engine failed in a way that another attempt may not.
        """
