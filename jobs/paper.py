"""`plan` where a model folder holds `config.json` and the weights' index but no weights: what a rank would hold.

For deciding which machine to rent before fetching 15 GB. Input and output are looked at as for any plan; rows are not
read, since nothing here tokenises them, and no device is asked.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from jobs.batching import decide_batching
from jobs.hazards import input_hazards, no_room
from jobs.prepare_decoder import read_schema
from jobs.prepare_input import (
    OutputColumns,
    PreparedInput,
    check_dimensions,
    decide_columns,
    main_column,
    prepare_input,
)
from jobs.spec import JobSpec
from jobs.split import Dimensions, Load, SplitPlan, check_ranks, describe_replicas, place_here, plan_split
from jobs.weight_bytes import stored_bytes, weight_bytes, weight_bytes_on_gpus
from sharding.errors import InfrastructureError, NotFoundError
from sharding.plan import plan_shards
from sharding.plan_file import check_empty, read_plan
from sharding.tensor import check_world
from sharding.tensor_shapes import DecoderShapes, decoder_shapes
from sharding.words import counted
from workers.config import DeviceKind
from workers.errors import ModelError
from workers.generation.sampling import DEFAULT_MAX_NEW_TOKENS
from workers.model.jsonfile import read_object
from workers.model.layout import CONFIG, WEIGHTS_INDEX
from workers.results import fields_of_kind

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class PaperPreview:
    """A job whose model nobody has seen yet. `split` holds estimates."""

    job: str
    output: str
    files: int
    rows: int
    input_bytes: int
    shards: int
    columns: tuple[str, ...]
    model: str
    architecture: str
    dtype: str
    replicas: str
    split: SplitPlan
    hazards: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `--json` shows it."""
        return asdict(self)


def preview_on_paper(spec: JobSpec) -> PaperPreview | None:
    """Plan a job's ranks from a model's config and index; None where there are weights, or no such folder.

    Raises:
        InputError: Input, columns and output do not fit together, as for any plan.
        InputError: The model cannot be split over so many ranks; the hint names the numbers that work.
        ModelError: Config and index contradict each other.
        InfrastructureError: The job may run on GPUs, and none holds a rank.
    """
    folder = Path(spec.model.source).expanduser()
    index = read_object(folder / WEIGHTS_INDEX)
    named = index.get("weight_map")
    if not isinstance(named, dict) or any((folder / str(file)).exists() for file in named.values()):
        return None
    hazards = ["the weights are not here: no row was tokenised, and nothing timed"]
    ahead = None
    try:
        ahead = prepare_input(spec)
    except NotFoundError as error:
        hazards.append(f"input, columns and output were not looked at, submit would end with exit 6: {error}")
    config = read_object(folder / CONFIG)
    found, ranks = decoder_shapes(config), spec.model.tensor_parallel
    _check_index(found, set(map(str, named)), folder / WEIGHTS_INDEX)
    hazards += _size_hazards(found, config, index)
    check_ranks(spec)
    check_world(found.sizes, ranks)
    read_schema(spec.task)
    check_dimensions(spec, found.hidden_size)
    columns = _look_at_input(spec, ahead, found.hidden_size, hazards) if ahead is not None else ()
    files, cut = ahead.listing.files if ahead is not None else (), spec.sharding
    device: DeviceKind = "cuda" if spec.model.device == "cuda" else "cpu"
    on_gpus = weight_bytes_on_gpus(_dtype(spec), spec.model.device)
    split = plan_split(Dimensions.of_shapes(found), _load(spec, found, device), ranks, on_gpus)
    try:
        least = split.rank_bytes if device == "cpu" else 0
        replicas = describe_replicas(spec, place_here(spec, device, least))
    except InfrastructureError as error:
        replicas = f"of {counted(ranks, 'rank')} on one node each"
        hazards.append(no_room(error))
    return PaperPreview(
        job=spec.name,
        output=ahead.output.uri if ahead is not None else spec.output.path,
        files=len(files),
        rows=sum(file.rows for file in files),
        input_bytes=sum(file.size_bytes for file in files),
        shards=len(plan_shards(files, target_rows=cut.target_rows, target_bytes=cut.target_bytes)),
        columns=columns,
        model=spec.model.source,
        architecture=str((config.get("architectures") or [config["model_type"]])[0]),
        dtype=_dtype(spec),
        replicas=replicas,
        split=split,
        hazards=tuple(hazards),
    )


def _look_at_input(spec: JobSpec, ahead: PreparedInput, width: int, hazards: list[str]) -> tuple[str, ...]:
    """Names of the output's columns; adds what may go wrong."""
    listing = ahead.listing
    if read_plan(ahead.output) is None:
        check_empty(ahead.output)
    else:
        hazards.append("the output already holds a plan: submit would resume it, or refuse if it differs")
    columns = _columns(spec, listing.schema, width)
    rows = sum(file.rows for file in listing.files)
    hazards += input_hazards(spec, listing.schema, rows, columns.results, None)
    return tuple(columns.schema.names)


def _columns(spec: JobSpec, schema: pa.Schema, width: int) -> OutputColumns:
    task = spec.task
    fields = fields_of_kind(task.kind, main_column(spec), width=task.dimensions or width, n=task.generation.n)
    return decide_columns(spec, schema, fields)


def _check_index(found: DecoderShapes, named: set[str], path: Path) -> None:
    missing, strange = sorted(found.shapes.keys() - named), sorted(named - found.shapes.keys())
    if missing or strange:
        clauses = [
            f"{word} {', '.join(names[:_SHOWN])}" for word, names in (("lacks", missing), ("has", strange)) if names
        ]
        raise ModelError(f"the weights' index does not fit {CONFIG}, it {' and '.join(clauses)}: `{path}`")


def _size_hazards(found: DecoderShapes, config: dict[str, Any], index: dict[str, Any]) -> list[str]:
    total = (index.get("metadata") or {}).get("total_size")
    number_bytes = stored_bytes(str(config.get("torch_dtype", config.get("dtype"))))
    size = Dimensions.of_shapes(found).parameters * (number_bytes or 0)
    if number_bytes is None or not isinstance(total, int) or total == size:
        return []
    return [f"the index tells of {total:,} bytes, the config of {size:,}"]


def _dtype(spec: JobSpec) -> str:
    return "float32" if spec.model.dtype == "auto" else spec.model.dtype


def _load(spec: JobSpec, found: DecoderShapes, device: DeviceKind) -> Load:
    """What the job keeps beside the weights, of what no file here says the most."""
    held, task = weight_bytes(_dtype(spec), device), spec.task
    if task.kind != "generate":
        return Load.of_batching(held, decide_batching(spec.batch))
    asked = task.generation
    new_tokens = asked.max_new_tokens if isinstance(asked.max_new_tokens, int) else DEFAULT_MAX_NEW_TOKENS
    beams = asked.beams if isinstance(asked.beams, int) else 1
    prompt = found.max_positions if task.max_tokens == "auto" else task.max_tokens
    row = min(prompt + new_tokens, found.max_positions) * beams
    return Load.of_batching(held, decide_batching(spec.batch, beams), row)
