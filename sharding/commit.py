"""From attempts to a sealed dataset: receipts, promotion, `_SUCCESS`. Decides nothing about retries.

One shard goes through three atomic steps. A worker publishes its whole part under `attempts/`, where no reader looks.
The driver writes the receipt, create-if-absent: the first one for a (shard, generation) counts, and a later attempt is
removed. Then the driver promotes the attempt to its final name, which depends on the shard alone. A crash between any
two steps leaves something that the next driver finishes or removes; a driver or worker that should be dead can add
invisible attempts only, and no receipt twice.

An attempt is removed only when its shard has a receipt that names another. Until then a driver that was declared dead
might still write a receipt for it, and a receipt must never name a file that is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sharding import layout
from sharding.errors import CorruptStateError, IncompleteError, NotFoundError, RowErrorLimitError
from sharding.failpoints import failpoint
from sharding.manifest import ShardReceipt, SuccessRecord, decode, encode, now
from sharding.plan import ShardPlan
from sharding.storage import Storage
from sharding.words import counted

_WORKERS = 16


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """Whose receipt counts.

    Attributes:
        won: True when it is the one that was passed in.
        receipt: The receipt in force.
    """

    won: bool
    receipt: ShardReceipt


def commit_shard(storage: Storage, receipt: ShardReceipt) -> CommitOutcome:
    """Writes the receipt unless the shard has one in this generation; a losing attempt's file is removed.

    Raises:
        CorruptStateError: The receipt that is there cannot be read, or belongs to another plan.
    """
    failpoint("receipt.before")
    path = layout.receipt_path(receipt.shard, receipt.generation)
    if storage.create(path, encode(receipt)):
        failpoint("receipt.after")
        return CommitOutcome(True, receipt)
    winner = decode(ShardReceipt, storage.read_bytes(path), storage.full_uri(path))
    _check_plan(winner, receipt.plan_digest, storage.full_uri(path))
    if winner.attempt_file == receipt.attempt_file:  # the same attempt, committed before
        return CommitOutcome(True, winner)
    storage.delete(receipt.attempt_file)
    return CommitOutcome(False, winner)


def promote(storage: Storage, receipt: ShardReceipt) -> None:
    """Moves a receipt's attempt to the final name. May be repeated: done already counts as success.

    Raises:
        CorruptStateError: Neither the attempt nor a part of the receipt's size is there.
    """
    failpoint("promote.before")
    try:
        storage.move(receipt.attempt_file, receipt.part)
    except NotFoundError as error:
        raise _missing_part(storage, receipt) from error
    entry = storage.head(receipt.part)
    if entry is None or entry.size_bytes != receipt.size_bytes:
        raise _missing_part(storage, receipt)
    failpoint("promote.after")


def promote_pending(storage: Storage, receipts: Mapping[int, ShardReceipt]) -> list[int]:
    """Promotes what an earlier driver committed and did not promote; for the start of a resumed job.

    Returns:
        The shards that were promoted.
    """
    waiting = {entry.path for entry in storage.list(layout.ATTEMPTS)}
    pending = [receipt for receipt in receipts.values() if receipt.attempt_file in waiting]
    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="promote") as pool:
        for _ in pool.map(lambda receipt: promote(storage, receipt), pending):
            pass
    return sorted(receipt.shard for receipt in pending)


def read_receipts(storage: Storage, *, plan_digest: str | None = None) -> dict[int, ShardReceipt]:
    """The receipt in force of every shard that has one: the latest generation.

    Args:
        storage: The output.
        plan_digest: When given, a receipt of another plan is refused.

    Raises:
        CorruptStateError: A receipt cannot be read, contradicts its name, or belongs to another plan.
    """
    latest: dict[int, tuple[int, str]] = {}
    for entry in storage.list(layout.RECEIPTS):
        key = layout.parse_receipt_path(entry.path)
        if key is None:
            raise CorruptStateError(f"an unknown file lies among the receipts: `{storage.full_uri(entry.path)}`")
        shard, generation = key
        if shard not in latest or generation > latest[shard][0]:
            latest[shard] = (generation, entry.path)

    def read(item: tuple[int, tuple[int, str]]) -> ShardReceipt:
        shard, (generation, path) = item
        receipt = decode(ShardReceipt, storage.read_bytes(path), storage.full_uri(path))
        if (receipt.shard, receipt.generation) != (shard, generation):
            raise CorruptStateError(f"a receipt contradicts its name: `{storage.full_uri(path)}`")
        if plan_digest is not None:
            _check_plan(receipt, plan_digest, storage.full_uri(path))
        return receipt

    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="receipts") as pool:
        return {receipt.shard: receipt for receipt in pool.map(read, sorted(latest.items()))}


def remove_orphans(storage: Storage, receipts: Mapping[int, ShardReceipt]) -> list[str]:
    """Removes attempts that can no longer count, and what dead processes left in the local scratch folder.

    For the driver that holds the lease, while none of its workers is writing: before the first assignment, or at the
    end. An attempt goes when its shard has a receipt of the same or a later generation that names another file.

    Returns:
        The paths that were removed.
    """
    orphans = [entry.path for entry in storage.list(layout.ATTEMPTS) if _is_orphan(entry.path, receipts)]
    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="orphans") as pool:
        for _ in pool.map(storage.delete, orphans):
            pass
    storage.clear_scratch()
    return orphans


def _is_orphan(path: str, receipts: Mapping[int, ShardReceipt]) -> bool:
    name = layout.parse_attempt_path(path)
    if name is None:
        return False
    receipt = receipts.get(name.shard)
    return receipt is not None and name.generation <= receipt.generation and receipt.attempt_file != path


def seal_job(
    storage: Storage, plan: ShardPlan, receipts: Mapping[int, ShardReceipt], *, max_row_error_rate: float
) -> SuccessRecord:
    """Checks that every planned row is in a part exactly once, removes orphans, writes `_SUCCESS`. Last step of a job.

    Args:
        storage: The output.
        plan: The plan on disk.
        receipts: What `read_receipts` gives.
        max_row_error_rate: Most bad rows, as a fraction of all rows; above it nothing is sealed.

    Raises:
        IncompleteError: A shard has no receipt.
        RowErrorLimitError: Too many bad rows; the parts stay.
        CorruptStateError: A part is missing or has another size, or a receipt does not fit the plan.
    """
    missing = [shard.index for shard in plan.shards if shard.index not in receipts]
    if missing:
        raise IncompleteError(
            f"{len(missing)} of {counted(len(plan.shards), 'shard')} without a receipt, the first is: `{missing[0]}`",
            hint="submit the same spec again to resume",
        )
    _check_receipts(storage, plan, receipts)
    check_parts(storage, receipts)
    rows, row_errors = plan.rows, sum(receipt.row_errors for receipt in receipts.values())
    if row_errors > max_row_error_rate * rows:
        raise RowErrorLimitError(
            f"more rows have an error than errors.max_row_error_rate {max_row_error_rate} allows: "
            f"`{row_errors} of {rows}`",
            hint="see the `error` column of the parts; retry-failed runs only those rows again",
        )
    remove_orphans(storage, receipts)
    record = SuccessRecord(
        job=plan.job,
        plan_digest=plan.digest,
        shards=len(plan.shards),
        rows=rows,
        row_errors=row_errors,
        error_counts=add_counts(receipt.error_counts for receipt in receipts.values()),
        tokens=sum(receipt.tokens for receipt in receipts.values()),
        size_bytes=sum(receipt.size_bytes for receipt in receipts.values()),
        sealed_at=now(),
    )
    failpoint("seal.before")
    storage.write_bytes(layout.SUCCESS, encode(record))
    return record


def read_success(storage: Storage) -> SuccessRecord | None:
    """What `_SUCCESS` says, or None when the job is not sealed."""
    if not storage.exists(layout.SUCCESS):
        return None
    return decode(SuccessRecord, storage.read_bytes(layout.SUCCESS), storage.full_uri(layout.SUCCESS))


def add_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of several `error_counts`, sorted by kind."""
    total: dict[str, int] = {}
    for count in counts:
        for kind, number in count.items():
            total[kind] = total.get(kind, 0) + number
    return dict(sorted(total.items()))


def _check_receipts(storage: Storage, plan: ShardPlan, receipts: Mapping[int, ShardReceipt]) -> None:
    for index, receipt in receipts.items():
        uri = storage.full_uri(layout.receipt_path(index, receipt.generation))
        _check_plan(receipt, plan.digest, uri)
        if index >= len(plan.shards) or receipt.part != plan.part_name(index):
            raise CorruptStateError(f"a receipt names a part that the plan does not have: `{uri}`")
        if receipt.rows != plan.shards[index].rows:
            raise CorruptStateError(
                f"a part has {counted(receipt.rows, 'row')}, its shard {plan.shards[index].rows:,}, "
                f"by the receipt: `{uri}`"
            )


def check_parts(storage: Storage, receipts: Mapping[int, ShardReceipt]) -> None:
    """Checks that the folder shows the receipts' parts, whole by their size, and no other Parquet file.

    Raises:
        CorruptStateError: Naming the first part that is missing or has another size, or the first stranger.
    """
    sizes = {entry.path: entry.size_bytes for entry in storage.list_folder().files}
    for receipt in receipts.values():
        if sizes.get(receipt.part) != receipt.size_bytes:
            raise _missing_part(storage, receipt)
    known = {receipt.part for receipt in receipts.values()}
    strangers = [path for path in sizes if path not in known and layout.is_visible_parquet(path)]
    if strangers:
        raise CorruptStateError(
            f"a file that this job did not write lies among the parts: `{storage.full_uri(strangers[0])}`",
            hint="move it away: whoever reads the folder would read its rows too",
        )


def _check_plan(receipt: ShardReceipt, plan_digest: str, uri: str) -> None:
    if receipt.plan_digest != plan_digest:
        raise CorruptStateError(
            f"a receipt belongs to plan `{receipt.plan_digest[:12]}`, this job to plan `{plan_digest[:12]}`: `{uri}`"
        )


def _missing_part(storage: Storage, receipt: ShardReceipt) -> CorruptStateError:
    entry = storage.head(receipt.part)
    found = "is missing" if entry is None else f"has {counted(entry.size_bytes, 'byte')}"
    return CorruptStateError(
        f"a part {found} although its receipt promises {receipt.size_bytes}: `{storage.full_uri(receipt.part)}`",
        hint=f"remove `{layout.receipt_path(receipt.shard, receipt.generation)}` and submit again to make it anew",
    )
