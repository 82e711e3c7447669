"""Last station: receipts become a report, for people and for programs. Reads no Parquet; state O(shards)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from jobs.dispatch import FailedShard
from jobs.errors import ExitCode
from sharding.manifest import ShardReceipt
from sharding.plan import ShardPlan

State = Literal["complete", "failed", "too_many_row_errors", "interrupted", "incomplete"]


@dataclass(frozen=True, slots=True)
class JobReport:
    """What became of a job.

    Attributes:
        state: `complete`; `failed`: shards without a result; `too_many_row_errors`; `interrupted`; `incomplete`.
        rows, row_errors, tokens, size_bytes: Over all shards that have a receipt, of this run or an earlier one.
        error_counts: Row errors by message.
        seconds, computed_rows, computed_tokens: Of this run alone.
    """

    job: str
    output: str
    state: State
    exit_code: int
    shards: int
    shards_done: int
    failed_shards: tuple[FailedShard, ...]
    rows_planned: int
    rows: int
    row_errors: int
    error_counts: dict[str, int]
    tokens: int
    size_bytes: int
    seconds: float = 0.0
    computed_rows: int = 0
    computed_tokens: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def tokens_per_s(self) -> float:
        """Tokens computed per second of this run."""
        return self.computed_tokens / self.seconds if self.seconds else 0.0

    @property
    def row_error_rate(self) -> float:
        """Share of the finished rows that have an error."""
        return self.row_errors / self.rows if self.rows else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `report.json` and `--json` show it."""
        return asdict(self) | {"tokens_per_s": round(self.tokens_per_s, 1), "row_error_rate": self.row_error_rate}


@dataclass(frozen=True, slots=True)
class Run:
    """Figures of one run of the driver."""

    seconds: float = 0.0
    rows: int = 0
    tokens: int = 0
    interrupted: ExitCode | None = None


def build_report(
    plan: ShardPlan,
    output: str,
    receipts: Mapping[int, ShardReceipt],
    failed: Iterable[FailedShard],
    *,
    max_row_error_rate: float,
    run: Run | None = None,
) -> JobReport:
    """Sum receipts up.

    Args:
        plan: The plan on disk.
        output: URI of the output.
        receipts: The receipt in force of every finished shard.
        failed: Shards that ran out of attempts.
        max_row_error_rate: Share of bad rows above which the job does not count as complete.
        run: Figures of this run, or None when only looking.
    """
    run = run or Run()
    done = list(receipts.values())
    failed = tuple(failed)
    rows, errors = sum(receipt.rows for receipt in done), sum(receipt.row_errors for receipt in done)
    counts: Counter[str] = Counter()
    for receipt in done:
        counts.update(receipt.error_counts)
    state, code = _state(len(plan.shards), len(done), len(failed), rows, errors, max_row_error_rate, run)
    return JobReport(
        job=plan.job,
        output=output,
        state=state,
        exit_code=int(code),
        shards=len(plan.shards),
        shards_done=len(done),
        failed_shards=failed,
        rows_planned=plan.rows,
        rows=rows,
        row_errors=errors,
        error_counts=dict(counts.most_common()),
        tokens=sum(receipt.tokens for receipt in done),
        size_bytes=sum(receipt.size_bytes for receipt in done),
        seconds=run.seconds,
        computed_rows=run.rows,
        computed_tokens=run.tokens,
        notes=tuple(plan.notes),
    )


def _state(
    shards: int, done: int, failed: int, rows: int, errors: int, max_rate: float, run: Run
) -> tuple[State, ExitCode]:
    if run.interrupted is not None and done < shards:
        return "interrupted", run.interrupted
    if failed:
        return "failed", ExitCode.FAILED_ROWS
    if done < shards:
        return "incomplete", ExitCode.FAILED_ROWS
    if rows and errors / rows > max_rate:
        return "too_many_row_errors", ExitCode.FAILED_ROWS
    return "complete", ExitCode.COMPLETE
