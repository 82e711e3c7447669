"""What the result columns are and how an engine's values become them. Knows Arrow and tasks, no engine and no files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from workers.config import TaskConfig, TaskKind

FACT_FIELDS = (
    pa.field("n_tokens", pa.int32()),
    pa.field("truncated", pa.bool_()),
    pa.field("error", pa.string()),
)


def result_fields(task: TaskConfig, column: str) -> tuple[pa.Field, ...]:
    """The columns a task adds, before `n_tokens`, `truncated` and `error`.

    Args:
        task: The task.
        column: Name of the main column: the embedding, the label, the score, the text.
    """
    sampling = None if task.decoder is None else task.decoder.sampling
    return fields_of_kind(task.kind, column, width=task.width, n=1 if sampling is None else sampling.n)


def fields_of_kind(kind: TaskKind, column: str, *, width: int, n: int) -> tuple[pa.Field, ...]:
    """The same from parts: values of an embedding, completions of a row."""
    if kind == "generate":
        return completion_fields(column, n)
    if kind == "embed":
        return (pa.field(column, pa.list_(pa.field("element", pa.float32()), width)),)
    if kind == "classify":
        return (pa.field(column, pa.string()), pa.field("score", pa.float32()))
    if kind == "score":
        counted = pa.field("n_answer_tokens", pa.int32())
        return (pa.field(column, pa.float32()), counted, pa.field("perplexity", pa.float32()))
    return (pa.field(column, pa.float32()),)


def completion_fields(column: str, n: int) -> tuple[pa.Field, ...]:
    """Result columns of generate before `n_tokens`, `truncated` and `error`; lists where a row has several texts."""
    kinds = [
        (column, pa.string()),
        ("finish_reason", pa.string()),
        ("n_new_tokens", pa.int32()),
        ("logprob", pa.float32()),
    ]
    return tuple(pa.field(name, kind if n == 1 else pa.list_(pa.field("element", kind))) for name, kind in kinds)


def activate_logits(logits: NDArray[np.float32], activation: str) -> NDArray[np.float32]:
    """Scores from logits (rows, labels): one label: sigmoid; several: softmax; `none`: as they are."""
    if activation == "none":
        return logits
    wide = logits.astype(np.float64)
    if logits.shape[1] == 1:
        small = np.exp(-np.abs(wide))
        return np.where(wide >= 0, 1 / (1 + small), small / (1 + small)).astype(np.float32)
    powers = np.exp(wide - wide.max(axis=1, keepdims=True))
    scores: NDArray[np.float32] = (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)
    return scores


def result_arrays(
    task: TaskConfig, labels: Sequence[str] | None, values: NDArray[np.float32], ok: NDArray[np.bool_]
) -> list[pa.Array]:
    """Arrow columns of a task's results, null where `ok` is false.

    Args:
        task: The task.
        labels: The classifier's label names, one per value.
        values: float32 (rows, width); rows that are not ok may hold anything.
        ok: bool (rows,).
    """
    null = pa.array(~ok)
    if task.kind == "embed":
        flat = pa.array(np.where(ok[:, None], values, 0).reshape(-1), pa.float32())
        kind = pa.list_(pa.field("element", pa.float32()), values.shape[1])
        return [pa.FixedSizeListArray.from_arrays(flat, type=kind, mask=null)]
    if task.kind == "score":
        return _score_arrays(values, ok)
    scores = activate_logits(np.where(ok[:, None], values, 0), task.activation)
    if task.kind == "rerank":
        return [pa.array(scores[:, 0], pa.float32(), mask=~ok)]
    best = scores.argmax(axis=1)
    names = np.array(labels or [f"LABEL_{i}" for i in range(values.shape[1])], dtype=object)
    return [
        pa.array(names[best], pa.string(), mask=~ok),
        pa.array(scores[np.arange(len(best)), best], pa.float32(), mask=~ok),
    ]


def _score_arrays(values: NDArray[np.float32], ok: NDArray[np.bool_]) -> list[pa.Array]:
    """Sum of log-probabilities, how many tokens it is of, and the perplexity (at most the largest float32)."""
    sums = np.where(ok, values[:, 0], 0).astype(np.float64)
    counted = np.where(ok, values[:, 1], 1).astype(np.int32)
    with np.errstate(over="ignore"):
        perplexity = np.minimum(np.exp(-sums / counted), np.finfo(np.float32).max)
    return [
        pa.array(sums.astype(np.float32), pa.float32(), mask=~ok),
        pa.array(counted, pa.int32(), mask=~ok),
        pa.array(perplexity.astype(np.float32), pa.float32(), mask=~ok),
    ]


def fact_arrays(
    n_tokens: NDArray[np.int32],
    truncated: NDArray[np.bool_],
    tokenized: NDArray[np.bool_],
    errors: Sequence[str | None],
) -> list[pa.Array]:
    """The columns `n_tokens`, `truncated` (both null where the row was never tokenised) and `error`."""
    return [
        pa.array(n_tokens, pa.int32(), mask=~tokenized),
        pa.array(truncated, pa.bool_(), mask=~tokenized),
        pa.array(errors, pa.string()),
    ]
