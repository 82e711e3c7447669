"""What a worker is told: the job's frozen settings, and one assignment at a time. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

TaskKind = Literal["embed", "classify", "rerank"]
DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """One task with every `auto` already decided by the plan.

    Attributes:
        kind: What is computed.
        text: A column name, or a template over columns such as `{title}\\n\\n{body}`.
        query: The same for the first text of a pair (rerank), else None.
        activation: `auto` or `none` (classify, rerank).
        prompt: Literal text put before every text; empty for none.
        include_prompt: The prompt's tokens take part in pooling.
        pooling: Pooling modes joined by `+`, or None where the task has none.
        normalize: L2-normalise embeddings.
        dimensions: Cut embeddings to this many leading values first, or None.
        width: Values that the engine gives per row: of the embedding, or logits.
        max_tokens: Most tokens of one row, special tokens included.
        truncate: Cut longer texts at the end, or make them row errors.
    """

    kind: TaskKind
    text: str
    query: str | None
    activation: Literal["auto", "none"]
    prompt: str
    include_prompt: bool
    pooling: str | None
    normalize: bool
    dimensions: int | None
    width: int
    max_tokens: int
    truncate: Literal["end", "error"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model as the plan pinned it: `digest` is checked again on every node."""

    source: str
    revision: str | None
    digest: str
    dtype: str
    device: DeviceKind


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything a worker needs that does not change from shard to shard.

    Attributes:
        columns: Input columns passed through, in output order.
        output_schema: Schema of every part.
        result_columns: Names of the result columns, in order (see `workers.results`).
        threads: Engine threads, or None for all that the process may use.
        budget_tokens: Most tokens of one batch (a longer single row is a batch of its own).
    """

    task: TaskConfig
    model: ModelConfig
    output_uri: str
    columns: tuple[str, ...]
    output_schema: pa.Schema
    result_columns: tuple[str, ...]
    threads: int | None
    budget_tokens: int


@dataclass(frozen=True, slots=True)
class AssignedPiece:
    """Rows `start <= row < stop` of one source file, whose version must still be the planned one."""

    path: str
    version: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """One attempt at one shard.

    Attributes:
        generation: 0 for the first result of a shard; each `retry-failed` adds one.
        epoch: Epoch of the driver's lease.
        poison_rows: Rows of the shard that killed workers before; they become row errors unseen.
        probe: Compute only these rows and publish nothing, to find out which of them kill the worker.
        repair_part: Final part whose rows without error are kept (`retry-failed`), or None.
    """

    shard: int
    pieces: tuple[AssignedPiece, ...]
    rows: int
    generation: int
    epoch: int
    attempt: int
    poison_rows: tuple[int, ...] = ()
    probe: tuple[int, int] | None = None
    repair_part: str | None = None


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What a worker says of a finished attempt. `attempt_file` is empty for a probe."""

    shard: int
    generation: int
    attempt: int
    attempt_file: str
    rows: int
    row_errors: int
    error_counts: dict[str, int]
    tokens: int
    size_bytes: int
    sha256: str
    seconds: float
