"""Small jobs for the tests of plan, commit and lease: a plan, parts and receipts without any model. Tests nothing."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pyarrow as pa

from sharding.commit import commit_shard, promote, promote_pending, read_receipts, remove_orphans, seal_job
from sharding.failpoints import failpoint
from sharding.layout import AttemptName, attempt_path
from sharding.manifest import ShardReceipt
from sharding.plan import ShardPlan, make_plan, plan_shards
from sharding.plan_file import write_plan
from sharding.source import RowGroup, SourceFile
from sharding.storage import Storage, open_storage

SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("doc", pa.string())])


def source(path: str = "/data/a.parquet", groups: tuple[int, ...] = (10, 10, 10), version: str = "v1") -> SourceFile:
    """A source file with these row groups, a hundred bytes for each row. It need not exist."""
    row_groups = tuple(RowGroup(rows, rows * 100) for rows in groups)
    return SourceFile(path, sum(groups) * 100, sum(groups), version, row_groups)


def plan_of(
    files: tuple[SourceFile, ...] = (source(),), target_rows: int = 10, identity: dict[str, str] | None = None
) -> ShardPlan:
    """A plan over `files`; by default three shards of ten rows."""
    return make_plan(
        job="test",
        identity=identity or {"model.revision": "abc", "task.prompt": ""},
        input_schema=SCHEMA,
        output_schema=SCHEMA,
        files=files,
        shards=plan_shards(files, target_rows=target_rows, target_bytes=1 << 30),
        notes=("max_tokens 256: sentence_bert_config.json",),
    )


def start_job(storage: Storage) -> ShardPlan:
    """Writes the default plan."""
    return write_plan(storage, plan_of())


def content(shard: int, text: str = "rows") -> bytes:
    """What the part of a shard holds; stands for a Parquet file."""
    return f"{text} of shard {shard}\n".encode() * 20


def publish(storage: Storage, plan: ShardPlan, shard: int, data: bytes | None = None, **changes: Any) -> ShardReceipt:
    """Publishes one attempt as a worker does; returns the receipt that the driver would write for it."""
    data = content(shard) if data is None else data
    name = AttemptName(
        shard,
        changes.get("generation", 0),
        changes.get("epoch", 1),
        changes.get("attempt", 1),
        changes.pop("nonce", "abc"),
    )
    local = Path(storage.scratch_dir()) / f"{shard}-{name.generation}-{name.attempt}-{name.nonce}.parquet"
    local.write_bytes(data)
    failpoint("publish.before")
    storage.publish_file(local, attempt_path(name))
    failpoint("publish.after")
    return receipt_of(plan, shard, attempt_path(name), data, **changes)


def receipt_of(plan: ShardPlan, shard: int, attempt_file: str, data: bytes, **changes: Any) -> ShardReceipt:
    """A receipt without any file."""
    values: dict[str, Any] = {
        "shard": shard,
        "generation": 0,
        "epoch": 1,
        "attempt": 1,
        "attempt_file": attempt_file,
        "part": plan.part_name(shard),
        "rows": plan.shards[shard].rows,
        "row_errors": 0,
        "error_counts": {},
        "tokens": 100,
        "size_bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "plan_digest": plan.digest,
        "seconds": 0.5,
    }
    return ShardReceipt(**{**values, **changes})


def paths(storage: Storage, prefix: str = "") -> list[str]:
    """Every path in the storage, in order."""
    return [entry.path for entry in storage.list(prefix)]


def drive(uri: str, nonce: str = "abc") -> list[str]:
    """A whole driver without engine: plan, recover, commit what is missing, seal. Returns the orphans it removed."""
    storage = open_storage(uri)
    plan = start_job(storage)
    failpoint("plan.after")
    receipts = read_receipts(storage, plan_digest=plan.digest)
    promote_pending(storage, receipts)
    orphans = remove_orphans(storage, receipts)
    for shard in plan.shards:
        if shard.index not in receipts:
            outcome = commit_shard(storage, publish(storage, plan, shard.index, nonce=nonce))
            promote(storage, outcome.receipt)
            receipts[shard.index] = outcome.receipt
    before = set(paths(storage, "_candelabra/attempts"))
    seal_job(storage, plan, receipts, max_row_error_rate=0.05)
    return [*orphans, *sorted(before - set(paths(storage, "_candelabra/attempts")))]
