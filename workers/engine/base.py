"""The contract between the pipeline and an engine. No engine lives here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from workers.batch import TokenBatch
from workers.config import Sampling


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
        weight_bytes: Size of the weights in memory, held in float32.
        kv_heads, head_dim: Keys and values of a token in one layer are so many heads of so many numbers; 0: no cache.
        tied: The token embedding is a decoder's head, too.
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
    kv_heads: int = 0
    head_dim: int = 0
    tied: bool = False


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """Results of one batch.

    Attributes:
        values: float32 (rows, width): embeddings, or logits of a classifier.
        bad_rows: Rows whose values are not finite, or all zero where a direction was asked for.
    """

    values: NDArray[np.float32]
    bad_rows: tuple[int, ...]


class Constraint(Protocol):
    """Restricts the next token of one text; see `workers.generation.constrain.TextConstraint`."""

    def mask(self, new_ids: Sequence[int]) -> bytes | None:
        """One bit per token that may come next after `new_ids`; None ends the text."""


class Event(Protocol):
    """What became of one request in one step.

    Attributes:
        request_id: As given to `Generator.add`.
        ids: New tokens, never an end token.
        logprobs: Log-probability of each, of the model's own distribution before temperature and the like.
        finish: None while the text goes on. `stop`: an end token. `length`: `max_new_tokens`. `stopped`: its constraint
            or its caller ended it. `error`: see `error`.
    """

    @property
    def request_id(self) -> int: ...
    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def finish(self) -> Literal["stop", "length", "stopped", "error"] | None: ...
    @property
    def error(self) -> str | None: ...


class Generator(Protocol):
    """Texts that grow together, one token each in a step; more may be added at any time and wait for a place."""

    @property
    def cache_bytes(self) -> int:
        """Size of the key/value cache."""

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
        """Add a prompt.

        Args:
            request_id: The caller's, of no other text on its way.
            ids: Tokens of the prompt.
            sampling: How tokens are chosen. Its `n`, `seed` and `stop` are the caller's affair.
            max_new_tokens: Room for new tokens, where that is less than the task's.
            seed: Of this text's random numbers.
            constraint: What its tokens have to keep to, or None.

        Raises:
            RecordRow: The model cannot take it.
        """

    def step(self) -> Sequence[Event]:
        """One step of the model.

        Raises:
            RetryShard: The engine failed in a way that another attempt may not.
        """

    def stop(self, request_id: int) -> None:
        """End a text that has not ended: its caller found a stop string."""


class Engine(Protocol):
    """A loaded model, ready for one kind of task."""

    @property
    def info(self) -> EngineInfo:
        """What was loaded."""

    def forward(self, batch: TokenBatch) -> BatchOutput:
        """Compute one batch.

        Args:
            batch: Ragged token ids, at least one row, no row empty. For score and labels with `type_ids` as
                `workers.tokenization.prompt_tokenizer.PromptTokenizer` gives them.

        Raises:
            RecordRow: The batch holds a row that the model cannot take (an id outside its vocabulary, say).
            RetryShard: The engine failed in a way that another attempt may not.
        """

    def generator(self, *, rows: int, cache_bytes: int | None, step_tokens: int) -> Generator:
        """A generator of this model, empty; the one before it is not used any more.

        Args:
            rows: Texts that grow at the same time.
            cache_bytes: Size of the key/value cache, or what the task's longest text needs where that is more; None
                leaves it to the engine.
            step_tokens: Most tokens that enter the model in one step.
        """
