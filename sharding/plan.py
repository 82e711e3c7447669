"""From shards to the plan: files, shards, schemas and everything that decides the output, with one digest over it.

Cuts nothing (`sharding.cut`) and stores nothing (`sharding.plan_file`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from sharding.cut import Piece, Shard, plan_shards
from sharding.layout import part_name, shard_digits
from sharding.manifest import FORMAT, now
from sharding.source import SourceFile

__all__ = ["Piece", "PlannedFile", "Shard", "ShardPlan", "make_plan", "plan_digest", "plan_shards"]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A source file as it was when the plan was made."""

    path: str
    rows: int
    size_bytes: int
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """The plan of one output, as it stands in `plan.json`.

    Attributes:
        format: Version of the file's layout.
        job: Name of the job.
        created_at: UTC, ISO 8601; not part of the digest.
        identity: Fields that decide the output (model revision, prompt, dtype, ...), flattened: name to value.
        digest: sha256 over identity, files and shards, hexadecimal.
        input_schema: Columns and types of the sources.
        output_schema: Columns and types of every part.
        files: Sources, in input order.
        shards: In input order; together they hold every source row exactly once.
        notes: What a person should know, such as which rule set the maximum length; not part of the digest.
    """

    format: int
    job: str
    created_at: str
    identity: dict[str, str]
    digest: str
    input_schema: pa.Schema
    output_schema: pa.Schema
    files: tuple[PlannedFile, ...]
    shards: tuple[Shard, ...]
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of all shards together."""
        return sum(shard.rows for shard in self.shards)

    def part_name(self, shard: int) -> str:
        """Final name of a shard's part, relative to the output."""
        return part_name(shard, shard_digits(len(self.shards)))


def make_plan(
    *,
    job: str,
    identity: Mapping[str, str],
    input_schema: pa.Schema,
    output_schema: pa.Schema,
    files: Sequence[SourceFile],
    shards: Sequence[Shard],
    notes: Sequence[str] = (),
) -> ShardPlan:
    """Puts a plan together and computes its digest; arguments as `ShardPlan` describes them."""
    planned = tuple(PlannedFile(file.path, file.rows, file.size_bytes, file.version) for file in files)
    return ShardPlan(
        format=FORMAT,
        job=job,
        created_at=now(),
        identity=dict(sorted(identity.items())),
        digest=plan_digest(identity, planned, shards),
        input_schema=input_schema,
        output_schema=output_schema,
        files=planned,
        shards=tuple(shards),
        notes=tuple(notes),
    )


def plan_digest(identity: Mapping[str, str], files: Sequence[PlannedFile], shards: Sequence[Shard]) -> str:
    """sha256 over what decides the output, hexadecimal; whatever the order of the identity's fields."""
    content = {
        "identity": dict(identity),
        "files": [[file.path, file.rows, file.size_bytes, file.version] for file in files],
        "shards": [[[piece.file, piece.start, piece.stop] for piece in shard.pieces] for shard in shards],
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
