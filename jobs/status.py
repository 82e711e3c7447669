"""What the files of an output say about its job, without cluster or driver. Changes nothing but in `gc`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from jobs.dispatch import FailedShard
from jobs.errors import ExitCode
from jobs.keeper import LEASE_TIMEOUT_S
from jobs.report import JobReport, build_report
from sharding import layout
from sharding.commit import check_parts, promote_pending, read_receipts, read_success, remove_orphans
from sharding.errors import CorruptStateError, NotFoundError
from sharding.lease import Lease, is_gone, read_lease
from sharding.manifest import LeaseRecord, ShardFailure, ShardReceipt, decode
from sharding.plan import ShardPlan
from sharding.plan_file import read_plan
from sharding.storage import Storage, open_storage


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job as its files tell it.

    Attributes:
        state: `complete`, `running`, `failed`, `interrupted` (nobody works on it and it is not complete), `damaged`
            (complete once, but a part is gone or has another size, or a stranger lies among the parts) or `not planned`
            (its driver went away while its workers started).
        driver: Who holds the lease, or None.
        progress: What the running driver last wrote, or None.
    """

    job: str
    output: str
    state: str
    shards: int
    shards_done: int
    shards_failed: int
    rows: int
    rows_done: int
    row_errors: int
    driver: str | None
    progress: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `--json` shows it."""
        return asdict(self)


def job_status(output: str) -> JobStatus:
    """How far the job of an output is.

    Raises:
        NotFoundError: There is no job.
        CorruptStateError: Its records cannot be read.
    """
    storage = open_storage(output)
    lease = read_lease(storage)
    held = lease is not None and not lease.released and not is_gone(lease)
    plan = read_plan(storage)
    if plan is None:
        if lease is None:
            raise _no_job(storage)
        return _starting(storage, lease, held=held)
    receipts = read_receipts(storage, plan_digest=plan.digest)
    failures = read_failures(storage)
    return JobStatus(
        job=plan.job,
        output=storage.uri,
        state=_state(storage, plan, receipts, len(failures), lease if held else None),
        shards=len(plan.shards),
        shards_done=len(receipts),
        shards_failed=len(failures),
        rows=plan.rows,
        rows_done=sum(receipt.rows for receipt in receipts.values()),
        row_errors=sum(receipt.row_errors for receipt in receipts.values()),
        driver=_driver(lease) if lease is not None and held else None,
        progress=_progress(storage) if held else None,
    )


def has_plan(output: str) -> bool:
    """Whether the output holds a job already."""
    return open_storage(output).exists(layout.PLAN)


def job_report(output: str) -> JobReport:
    """What became of the job of an output, by its receipts and its seal: what is not sealed is not complete."""
    storage = open_storage(output)
    plan = _plan(storage)
    receipts = read_receipts(storage, plan_digest=plan.digest)
    sealed = read_success(storage) is not None
    found = build_report(plan, storage.uri, receipts, read_failures(storage), max_row_error_rate=1.0 if sealed else 0.0)
    if found.state == "complete" and not sealed:  # killed between the last receipt and the seal
        return replace(found, state="incomplete", exit_code=int(ExitCode.FAILED_ROWS))
    return found


def find_jobs(folder: str) -> list[JobStatus]:
    """The jobs whose outputs are this folder or lie directly in it, by name."""
    storage = open_storage(folder)
    if storage.local_root is not None and not storage.local_root.is_dir():
        raise NotFoundError(f"there is no such folder: `{folder}`")
    places = [storage.uri, *(storage.full_uri(child) for child in storage.list_folder().folders)]
    return [found for found in map(_status_or_damage, places) if found is not None]


def _status_or_damage(place: str) -> JobStatus | None:
    """A job's status, None where there is no job; one whose records cannot be read does not hide the others."""
    try:
        return job_status(place)
    except NotFoundError:
        return None
    except CorruptStateError as error:
        return JobStatus("?", place, f"unreadable: {error}", 0, 0, 0, 0, 0, 0, None, None)


def collect_garbage(output: str) -> list[str]:
    """Remove what dead drivers and workers left; takes the lease while it does.

    Returns:
        Paths of the removed files.

    Raises:
        LeaseHeldError: A driver works on this output.
    """
    storage = open_storage(output)
    plan = _plan(storage)
    lease = Lease.acquire(storage, owner="gc", timeout_s=LEASE_TIMEOUT_S)
    try:
        receipts = read_receipts(storage, plan_digest=plan.digest)
        promote_pending(storage, receipts)
        return remove_orphans(storage, receipts)
    finally:
        lease.release()


def read_failures(storage: Storage) -> list[FailedShard]:
    """The shards that ran out of attempts."""
    records = [
        decode(ShardFailure, storage.read_bytes(entry.path), storage.full_uri(entry.path))
        for entry in storage.list(layout.FAILURES)
        if layout.parse_numbered_path(entry.path) is not None
    ]
    return [FailedShard(record.shard, record.attempts, record.error, record.hint) for record in records]


def _plan(storage: Storage) -> ShardPlan:
    plan = read_plan(storage)
    if plan is None:
        raise _no_job(storage)
    return plan


def _no_job(storage: Storage) -> NotFoundError:
    return NotFoundError(f"there is no job at this output: `{storage.uri}`")


def _driver(lease: LeaseRecord) -> str:
    return f"{lease.owner} on {lease.host}, process {lease.pid}, last seen {lease.at}"


def _starting(storage: Storage, lease: LeaseRecord, *, held: bool) -> JobStatus:
    """A job whose workers are not there yet, or never were: its plan is not written before."""
    progress = _progress(storage)
    told = ((progress or {}).get(key) for key in ("shards_total", "rows_total"))
    shards, rows = (number if isinstance(number, int) else 0 for number in told)
    state, driver = ("running", _driver(lease)) if held else ("not planned", None)
    return JobStatus(lease.owner, storage.uri, state, shards, 0, 0, rows, 0, 0, driver, progress if held else None)


def _state(
    storage: Storage, plan: ShardPlan, receipts: Mapping[int, ShardReceipt], failed: int, lease: LeaseRecord | None
) -> str:
    if lease is not None:
        return "running"
    if storage.exists(layout.SUCCESS):
        try:
            check_parts(storage, receipts)
        except CorruptStateError:
            return "damaged"
        return "complete"
    bad_rows = any(receipt.row_errors for receipt in receipts.values())
    return "failed" if failed or (len(receipts) == len(plan.shards) and bad_rows) else "interrupted"


def _progress(storage: Storage) -> dict[str, Any] | None:
    if not storage.exists(layout.PROGRESS):
        return None
    try:
        content = json.loads(storage.read_bytes(layout.PROGRESS))
    except (ValueError, RecursionError, NotFoundError):  # only for eyes: a damaged or vanished one is no progress
        return None
    return content if isinstance(content, dict) else None
