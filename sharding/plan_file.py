"""From the plan to `plan.json` and back, and the check that it still holds. Written once; a text viewer can read it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from sharding import layout
from sharding.cut import Piece, Shard
from sharding.errors import CorruptStateError, DriftError, InputError
from sharding.manifest import check_format
from sharding.plan import PlannedFile, ShardPlan, plan_digest
from sharding.storage import Storage
from sharding.words import counted

_SHOWN = 20


def write_plan(storage: Storage, plan: ShardPlan) -> ShardPlan:
    """Writes the plan if there is none yet.

    Returns:
        The plan on disk: this one, or the one that was there first (see `check_drift`).

    Raises:
        InputError: There is no plan, but the folder holds Parquet files: a reader would take them for our parts.
    """
    if not storage.exists(layout.PLAN):
        check_empty(storage)
    if storage.create(layout.PLAN, _encode(plan)):
        return plan
    earlier = read_plan(storage)
    if earlier is None:
        raise CorruptStateError(f"the plan was removed while it was read: `{storage.full_uri(layout.PLAN)}`")
    return earlier


def read_plan(storage: Storage) -> ShardPlan | None:
    """The plan on disk, or None when this output has none.

    Raises:
        CorruptStateError: It cannot be read, or its digest does not match its content.
    """
    if not storage.exists(layout.PLAN):
        return None
    return _decode(storage.read_bytes(layout.PLAN), storage.full_uri(layout.PLAN))


def check_drift(on_disk: ShardPlan, wanted: ShardPlan) -> None:
    """Refuses to go on when the plan on disk no longer is what is asked for.

    Args:
        on_disk: The plan of this output.
        wanted: The plan as it would be made now, from the spec and the source files as they are.

    Raises:
        DriftError: Naming each field and each file that differs, with both values.
    """
    found = [*_identity_drift(on_disk.identity, wanted.identity), *_file_drift(on_disk.files, wanted.files)]
    if not found:
        return
    shown = found[:_SHOWN]
    if len(found) > _SHOWN:
        shown.append(f"and {len(found) - _SHOWN} more")
    lines = "".join(f"\n  {line}" for line in shown)
    raise DriftError(
        f"this output was planned with other values, {counted(len(found), 'difference')}:{lines}",
        hint="restore the old values to resume, or choose another output path",
    )


def check_empty(storage: Storage) -> None:
    """Refuse a new output where a reader would find somebody else's rows too.

    Raises:
        InputError: Parquet files lie in the folder or below it.
    """
    for entry in storage.list():
        if layout.is_visible_parquet(entry.path):
            raise InputError(
                f"the output folder holds Parquet files of something else: `{storage.full_uri(entry.path)}`",
                hint="choose an empty folder, or move them away",
            )


def _identity_drift(plan: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    names = sorted(plan.keys() | wanted.keys())
    return [
        f"{name}: plan {_quoted(plan.get(name))}, now {_quoted(wanted.get(name))}"
        for name in names
        if plan.get(name) != wanted.get(name)
    ]


def _file_drift(plan: Sequence[PlannedFile], current: Sequence[PlannedFile]) -> list[str]:
    old = {file.path: file for file in plan}
    new = {file.path: file for file in current}
    found: list[str] = []
    for path, file in old.items():
        match = new.get(path)
        if match is None:
            found.append(f"file `{path}`: plan version `{file.version}`, now absent")
        elif (match.version, match.size_bytes, match.rows) != (file.version, file.size_bytes, file.rows):
            before = f"version `{file.version}`, {counted(file.rows, 'row')}, {counted(file.size_bytes, 'byte')}"
            after = f"version `{match.version}`, {counted(match.rows, 'row')}, {counted(match.size_bytes, 'byte')}"
            found.append(f"file `{path}`: plan {before}; now {after}")
    found += [f"file `{path}`: plan absent, now version `{new[path].version}`" for path in new if path not in old]
    if not found and [*old] != [*new]:
        place = next(index for index, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1])
        found.append(f"order of the files, at {place}: plan `{[*old][place]}`, now `{[*new][place]}`")
    return found


def _quoted(value: str | None) -> str:
    return "absent" if value is None else f"`{value}`"


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class _PlanFile:
    """The JSON of a plan. Files and shards are lists of values, one per line, in the order of the classes' fields."""

    format: int
    job: str
    created_at: str
    digest: str
    notes: tuple[str, ...]
    identity: dict[str, str]
    input_columns: dict[str, str]
    output_columns: dict[str, str]
    input_schema: str
    output_schema: str
    files: tuple[tuple[str, int, int, str], ...]
    shards: tuple[tuple[int, tuple[tuple[int, int, int], ...]], ...]


def _encode(plan: ShardPlan) -> bytes:
    head = {
        "format": plan.format,
        "job": plan.job,
        "created_at": plan.created_at,
        "digest": plan.digest,
        "notes": list(plan.notes),
        "identity": plan.identity,
        "input_columns": {field.name: str(field.type) for field in plan.input_schema},
        "output_columns": {field.name: str(field.type) for field in plan.output_schema},
        "input_schema": _encode_schema(plan.input_schema),
        "output_schema": _encode_schema(plan.output_schema),
    }
    files = _lines([file.path, file.rows, file.size_bytes, file.version] for file in plan.files)
    shards = _lines(
        [shard.rows, [[piece.file, piece.start, piece.stop] for piece in shard.pieces]] for shard in plan.shards
    )
    text = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
    return f'{text},\n "files": {files},\n "shards": {shards}\n}}\n'.encode()


def _lines(rows: Iterable[object]) -> str:
    text = ",\n  ".join(json.dumps(row, separators=(",", ":"), ensure_ascii=False) for row in rows)
    return f"[\n  {text}\n ]" if text else "[]"


def _decode(data: bytes, path: str) -> ShardPlan:
    check_format(data, path)
    try:
        content = _ADAPTER.validate_json(data)
        input_schema, output_schema = _decode_schema(content.input_schema), _decode_schema(content.output_schema)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(item) for item in first["loc"])
        raise CorruptStateError(f"unreadable plan (`{where}`: {first['msg'].lower()}): `{path}`") from error
    except (ValueError, pa.ArrowException) as error:
        raise CorruptStateError(f"unreadable schema in the plan: `{path}`") from error
    files = tuple(PlannedFile(*values) for values in content.files)
    shards = tuple(
        Shard(index, tuple(Piece(*piece) for piece in pieces), rows)
        for index, (rows, pieces) in enumerate(content.shards)
    )
    if plan_digest(content.identity, files, shards) != content.digest:
        raise CorruptStateError(f"the plan's digest does not match its content (edited by hand?): `{path}`")
    return ShardPlan(
        format=content.format,
        job=content.job,
        created_at=content.created_at,
        identity=content.identity,
        digest=content.digest,
        input_schema=input_schema,
        output_schema=output_schema,
        files=files,
        shards=shards,
        notes=content.notes,
    )


def _encode_schema(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def _decode_schema(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text, validate=True)))


_ADAPTER = TypeAdapter(_PlanFile)
