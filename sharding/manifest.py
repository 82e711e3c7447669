"""Between commit and disk: the records of a job, versioned and strict. Turns them into bytes and back; stores nothing.

Reading refuses what it does not know (a key, a type, a newer format) instead of guessing: these records decide whether
a row has been written. Times (`at`, `sealed_at`) are UTC, ISO 8601, and only for people: nothing compares them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from sharding.errors import CorruptStateError

FORMAT = 1
_STRICT = ConfigDict(extra="forbid", strict=True)
Record = TypeVar("Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReceipt:
    """Proof that one shard is done, and by which attempt. The first one written for a (shard, generation) counts.

    Attributes:
        shard: Index in the plan.
        generation: 0, or how many times `retry-failed` has replaced the part.
        epoch: Lease epoch of the driver that accepted the attempt.
        attempt: Number of the attempt, from 1.
        attempt_file: Path of the published attempt, relative to the output; gone once it is promoted.
        part: Final path, relative to the output.
        rows: Rows in the part; equals the rows of the shard.
        row_errors: Rows with a non-null `error`.
        error_counts: The same by kind.
        tokens: Tokens that went through the model.
        size_bytes: Size of the part.
        sha256: Digest of the part's bytes, hexadecimal.
        plan_digest: Digest of the plan that this shard belongs to.
        seconds: Wall time of the attempt.
        poison_rows: Rows (counted within the shard) that were set aside because they kill the worker.
    """

    shard: int
    generation: int
    epoch: int
    attempt: int
    attempt_file: str
    part: str
    rows: int
    row_errors: int
    error_counts: dict[str, int]
    tokens: int
    size_bytes: int
    sha256: str
    plan_digest: str
    seconds: float
    poison_rows: tuple[int, ...] = ()
    format: int = FORMAT

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFailure:
    """A shard that ran out of attempts: the last error, and what to do about it. Removed when the shard succeeds."""

    shard: int
    attempts: int
    error: str
    hint: str | None
    at: str
    format: int = FORMAT

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """Who drives the job in one epoch. The owner overwrites its own file to beat; a higher epoch ends it.

    Attributes:
        epoch: From 1; the file's name carries it too.
        owner: Free text for people, such as a user and a job name.
        nonce: Distinguishes two owners that are otherwise alike.
        host, pid, process_start, boot_id, pid_namespace: Where the owner runs, precisely enough to ask the kernel.
        beat: Counts up; only a change matters, never the time.
        released: The owner is done; the next one may start at once.
    """

    epoch: int
    owner: str
    nonce: str
    host: str
    pid: int
    process_start: str
    boot_id: str
    pid_namespace: str
    beat: int
    at: str
    released: bool = False
    format: int = FORMAT

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessRecord:
    """Content of `_SUCCESS`: the job is complete, every planned row is in a part exactly once."""

    job: str
    plan_digest: str
    shards: int
    rows: int
    row_errors: int
    error_counts: dict[str, int]
    tokens: int
    size_bytes: int
    sealed_at: str
    format: int = FORMAT

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT


def now() -> str:
    """The time for a record: UTC, ISO 8601, whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


_ADAPTERS: dict[type[object], TypeAdapter[Any]] = {}


def _adapter(kind: type[object]) -> TypeAdapter[Any]:
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def encode(record: object) -> bytes:
    """Indented JSON with sorted keys, ending in a newline: equal records give equal bytes."""
    data = _adapter(type(record)).dump_python(record, mode="json")
    return (json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def decode(kind: type[Record], data: bytes, path: str) -> Record:
    """Reads one record.

    Args:
        kind: The record's class.
        data: Content of its file.
        path: Where it came from, for the message.

    Raises:
        CorruptStateError: Not JSON, an unknown key, a missing or mistyped one, or a format from a newer version.
    """
    check_format(data, path)
    try:
        record: Record = _adapter(kind).validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(item) for item in first["loc"])
        raise CorruptStateError(f"unreadable record (`{where}`: {first['msg'].lower()}): `{path}`") from error
    return record


def check_format(data: bytes, path: str) -> None:
    """Raises `CorruptStateError` unless `data` is a JSON object in this version's format."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptStateError(f"a record is not JSON (cut short?): `{path}`") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        newer = isinstance(found, int) and found > FORMAT
        raise CorruptStateError(
            f"a record has format `{found}`, this version reads `{FORMAT}`: `{path}`",
            hint="it was written by a newer version: upgrade" if newer else None,
        )
