"""How far a running job is, for the person in front of it and for `status`. Decides nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class JobProgress:
    """A moment of a running job.

    Attributes:
        rows_done: Rows committed or computed so far, earlier runs included.
        rows_per_s, tokens_per_s: Of this run.
        remaining_s: Seconds left at the pace of this run, or None while it is unknown.
    """

    job: str
    phase: str
    rows_done: int
    rows_total: int
    row_errors: int
    shards_done: int
    shards_total: int
    shards_failed: int
    replicas: int
    rows_per_s: float
    tokens_per_s: float
    remaining_s: float | None

    def to_json(self) -> bytes:
        """As `progress.json` keeps it."""
        return json.dumps(asdict(self), indent=2).encode()


ProgressListener = Callable[[JobProgress], None]
