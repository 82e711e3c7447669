"""Before anything starts: how much a worker computes at a time, where the spec leaves it to `auto`. Knows no model.

One rule for jobs that start and for plans without weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from jobs.spec import BatchSpec
from sharding.errors import InputError

_BUDGET_TOKENS = 16_384
_STEP_TOKENS = 512
_GENERATE_ROWS = 64


@dataclass(frozen=True, slots=True)
class Batching:
    """Attributes as in `workers.config.WorkerConfig`."""

    budget_tokens: int
    step_tokens: int
    generate_rows: int
    cache_bytes: int | None


def decide_batching(batch: BatchSpec, beams: int = 1) -> Batching:
    """Decide what is `auto`.

    Args:
        batch: What was asked.
        beams: Of a search; each is a text that grows, all of a row at the same time.

    Raises:
        InputError: There are to be fewer texts than beams.
    """
    rows = max(_GENERATE_ROWS, beams) if batch.rows == "auto" else batch.rows
    if rows < beams:
        raise InputError(
            f"each of the {beams} beams of a row takes a place, more than there are: `batch.rows: {rows}`",
            hint="raise batch.rows, or lower task.generation.beams",
        )
    return Batching(
        budget_tokens=_BUDGET_TOKENS if batch.budget_tokens == "auto" else batch.budget_tokens,
        step_tokens=_STEP_TOKENS if batch.budget_tokens == "auto" else batch.budget_tokens,
        generate_rows=rows,
        cache_bytes=None if batch.cache_bytes == "auto" else batch.cache_bytes,
    )
