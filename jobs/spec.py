"""What the user asked for: a YAML file or keyword arguments become a validated, frozen JobSpec. Looks at no data.

pydantic is used at this edge only; further in, frozen dataclasses carry what is needed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
)

from jobs.errors import SpecError
from jobs.spec_task import MOST, AutoCount, Count, CountFromZero, Section, TaskSpec, as_tuple
from jobs.spec_yaml import Loc, apply_overrides, locate, nearest_key, parse_yaml
from sharding.errors import NotFoundError


def _as_bytes(value: object) -> object:
    return int(_BYTE_SIZE.validate_python(value)) if isinstance(value, str) else value


_BYTE_SIZE = TypeAdapter(ByteSize)
Bytes = Annotated[int, BeforeValidator(_as_bytes), Field(ge=1, le=MOST)]
Paths = Annotated[tuple[str, ...], BeforeValidator(as_tuple), Field(min_length=1)]


class ModelSpec(Section):
    """The model, and how it is held."""

    source: str = Field(
        min_length=1, description="A local folder, a Hub id (org/name), or package:NAME/PATH: data of a package."
    )
    revision: str | None = Field(None, description="Hub: branch, tag or commit; the plan pins the commit.")
    dtype: Literal["auto", "float32", "bfloat16", "int8"] = Field(
        "auto",
        description="How weights are held; auto: float32. bfloat16 takes half the memory, and vectors keep a cosine "
        "of 0.9999 to the exact ones. int8, on CPUs alone, takes little more than a quarter for matrices, half for "
        "embeddings, is faster with VNNI, and keeps 0.999.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where build and machine have one.")
    tensor_parallel: Count = Field(
        1, description="Ranks that share one model, each a process with its own CPUs or GPU, all on one node."
    )


class InputSpec(Section):
    """Where the rows come from."""

    path: Paths = Field(description="Path, glob, folder, or a list of them; local, s3://, gs://, az://, hf://.")
    columns: tuple[str, ...] | None = Field(None, description="Columns to pass through; null: all.")

    @field_validator("columns")
    @classmethod
    def _columns_once(cls, columns: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if columns is not None and len(set(columns)) < len(columns):
            raise ValueError("a column is named twice")
        return columns


class OutputSpec(Section):
    """Where the rows go."""

    path: str = Field(min_length=1, description="Folder of the output; its job state lives in `_candelabra/` there.")
    column: str = Field(
        "auto", min_length=1, description="Name of the main result column; auto: embedding, label, score or text."
    )
    on_conflict: Literal["error", "overwrite"] = Field(
        "error", description="When the input has a column of a result's name: stop, or let the result replace it."
    )


class ShardingSpec(Section):
    """How the rows are cut. Larger shards: fewer files and less overhead; smaller: less lost with a worker."""

    target_rows: Count = Field(20_000, description="Most rows of a shard.")
    target_bytes: Bytes = Field(128 << 20, description="Most bytes of a shard, as stored in the source: `128MiB`.")


class WorkersSpec(Section):
    """The pool of model replicas."""

    replicas: AutoCount = Field("auto", description="Copies of the model; auto: as many as the cluster has room for.")
    cpus: AutoCount = Field("auto", description="CPUs of each rank of a replica; auto: up to 8. Also its threads.")
    gpus: CountFromZero | Literal["auto"] = Field("auto", description="GPUs of each rank of a replica.")
    rank_timeout_s: Annotated[float, Field(ge=1, le=86_400)] = Field(
        60.0, description="model.tensor_parallel: a rank that is silent for so long is lost, and its replica with it."
    )
    max_attempts: Count = Field(3, description="Tries of a shard before it counts as failed.")


class BatchSpec(Section):
    """How rows are put together for the engine; never changes a result."""

    budget_tokens: AutoCount = Field("auto", description="Most tokens of one batch. More memory, hardly more speed.")
    rows: AutoCount = Field(
        "auto", description="generate: texts that grow at the same time; auto: 64. More is faster and needs cache."
    )
    cache_bytes: Bytes | Literal["auto"] = Field(
        "auto", description="generate: memory of the key/value cache, `2GiB`; auto: what the engine finds enough."
    )


class ErrorsSpec(Section):
    """How many bad rows a job may have."""

    max_row_error_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        0.05, description="Above this share of bad rows the job ends with exit 1 and no `_SUCCESS`; rows are written."
    )


class RaySpec(Section):
    """Which Ray cluster."""

    address: str | None = Field(None, description="null: an embedded Ray on this machine; else a cluster's address.")
    placement_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = Field(
        300.0, description="model.tensor_parallel: so long a job waits where no node has room for a replica's ranks."
    )


class JobSpec(Section):
    """A whole job. `name` is for people; what decides the output is in `task`, `model`, `input`, `output`."""

    name: str = Field(min_length=1, max_length=200)
    task: TaskSpec
    model: ModelSpec
    input: InputSpec
    output: OutputSpec
    sharding: ShardingSpec = ShardingSpec()
    workers: WorkersSpec = WorkersSpec()
    batch: BatchSpec = BatchSpec()
    errors: ErrorsSpec = ErrorsSpec()
    backend: Literal["ray", "local"] = Field("ray", description="ray, or local: one worker in this process, no Ray.")
    ray: RaySpec = RaySpec()


def load_spec(path: str | Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a job from a YAML file.

    Args:
        path: The file.
        overrides: `section.field=value` each; the value is read as YAML.

    Raises:
        NotFoundError: There is no such file.
        SpecError: It is not a valid spec; the message names line, key and value, and the nearest known key.
    """
    file = Path(path)
    if not file.is_file():
        raise NotFoundError(f"no spec file at: `{path}`")
    document = parse_yaml(file)
    data = apply_overrides(document.data, overrides)
    given = [tuple(override.partition("=")[0].strip().split(".")) for override in overrides]
    return parse_spec(data, where=str(path), lines=document.lines, overridden=given)


def parse_spec(
    data: object,
    *,
    where: str = "spec",
    lines: Mapping[Loc, int] | None = None,
    overridden: Collection[Loc] = (),
) -> JobSpec:
    """Validate plain data as a job.

    Args:
        data: Mapping as YAML gives it.
        where: Name of the file, for messages.
        lines: Line of each key path, for messages.
        overridden: Key paths that are not as the file has them.

    Raises:
        SpecError: As `load_spec`.
    """
    try:
        return JobSpec.model_validate(_lists_to_tuples(data))
    except ValidationError as error:
        problems = error.errors(include_url=False)
        clauses: dict[str, str] = {}
        for problem in problems:
            key = _key(problem["loc"])
            place = _place(problem["loc"], where, lines or {}, overridden)
            clause = _clause(problem["type"], problem["loc"], problem["msg"], problem["input"], place)
            clauses.setdefault(key, clause)  # one mistake in a union of types is one clause
        raise SpecError(
            "\n".join(clauses.values()), hint="`candelabra schema` prints every field and what it means"
        ) from None


def _lists_to_tuples(data: object) -> object:
    if isinstance(data, dict):
        return {key: _lists_to_tuples(value) for key, value in data.items()}
    return tuple(_lists_to_tuples(value) for value in data) if isinstance(data, list) else data


def _key(loc: Loc) -> str:
    """Dotted path of a field, without pydantic's notes on which type of a union it tried."""
    notes = ("literal[", "constrained-", "int", "bool", "str", "float", "function-", "dict[", "tuple[")
    return ".".join(str(part) for part in loc if not str(part).startswith(notes))


def _place(loc: Loc, where: str, lines: Mapping[Loc, int], overridden: Collection[Loc]) -> str:
    """Where a key stands: the line of the file, or the command line."""
    if any(loc[: len(path)] == path for path in overridden):
        return "command line: "
    return f"{where}:{locate(loc, lines)}: " if lines else f"{where}: "


def _clause(kind: str, loc: Loc, message: str, value: object, place: str) -> str:
    key = _key(loc)
    if kind == "extra_forbidden":
        known = nearest_key(JobSpec, loc)
        return f"{place}unknown key{f' (did you mean `{known}`?)' if known else ''}: `{key}`"
    if kind == "missing":
        return f"{place}a needed key is missing: `{key}`"
    text = message.removeprefix("Value error, ").replace("a valid tuple", "a list").replace(" after validation", "")
    shown = "a mapping" if isinstance(value, dict | BaseModel) else json.dumps(value, ensure_ascii=False, default=str)
    return f"{place}{key or 'spec'}: {text[0].lower()}{text[1:]}: `{shown if len(shown) <= 80 else shown[:77] + '...'}`"
