"""`plan` where a model folder holds `config.json` and the weights' index but no weights: what a rank would hold.

For deciding which machine to rent before fetching 15 GB. Looks at no input, no device and no tokenizer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs.prepare import BUDGET_TOKENS, GENERATE_ROWS, STEP_TOKENS
from jobs.spec import JobSpec
from jobs.split import Dimensions, Load, SplitPlan, check_ranks, describe_replicas, place_here, plan_split
from sharding.errors import InfrastructureError
from sharding.tensor import check_world
from sharding.tensor_shapes import DecoderShapes, decoder_shapes
from sharding.words import counted
from workers.config import DeviceKind
from workers.errors import ModelError
from workers.generation_config import DEFAULT_MAX_NEW_TOKENS
from workers.model.jsonfile import read_object
from workers.model.layout import CONFIG, WEIGHTS_INDEX

_SHOWN = 5
_NUMBER_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class PaperPreview:
    """A job's model on ranks that nobody has seen yet. `split` holds estimates."""

    job: str
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
        InputError: The model cannot be split over so many ranks; the hint names the numbers that work.
        ModelError: Config and index contradict each other.
        InfrastructureError: No device holds a rank.
    """
    folder = Path(spec.model.source).expanduser()
    index = read_object(folder / WEIGHTS_INDEX)
    named = index.get("weight_map")
    if not isinstance(named, dict) or any((folder / str(file)).exists() for file in named.values()):
        return None
    config = read_object(folder / CONFIG)
    found, ranks = decoder_shapes(config), spec.model.tensor_parallel
    hazards = ["the weights are not here: nothing but sizes was looked at"]
    _check_index(found, set(map(str, named)), folder / WEIGHTS_INDEX)
    hazards += _size_hazards(found, config, index)
    check_ranks(spec)
    check_world(found.sizes, ranks)
    split = plan_split(Dimensions.of_shapes(found), _load(spec, found), ranks)
    try:
        device: DeviceKind = "cuda" if spec.model.device == "cuda" else "cpu"
        least = split.rank_weight_bytes if device == "cpu" else 0
        replicas = describe_replicas(spec, place_here(spec, device, least))
    except InfrastructureError as error:
        replicas = f"of {counted(ranks, 'rank')} on one node each"
        hazards.append(f"on this machine submit would end with exit 5: {error}")
    return PaperPreview(
        job=spec.name,
        model=spec.model.source,
        architecture=str((config.get("architectures") or [config["model_type"]])[0]),
        dtype=_dtype(spec),
        replicas=replicas,
        split=split,
        hazards=tuple(hazards),
    )


def _check_index(found: DecoderShapes, named: set[str], path: Path) -> None:
    missing, strange = sorted(found.shapes.keys() - named), sorted(named - found.shapes.keys())
    if missing or strange:
        clauses = [
            f"{word} {', '.join(names[:_SHOWN])}" for word, names in (("lacks", missing), ("has", strange)) if names
        ]
        raise ModelError(f"the weights' index does not fit {CONFIG}, it {' and '.join(clauses)}: `{path}`")


def _size_hazards(found: DecoderShapes, config: dict[str, Any], index: dict[str, Any]) -> list[str]:
    total = (index.get("metadata") or {}).get("total_size")
    number_bytes = _NUMBER_BYTES.get(str(config.get("torch_dtype", config.get("dtype"))))
    size = Dimensions.of_shapes(found).parameters * (number_bytes or 0)
    if number_bytes is None or not isinstance(total, int) or total == size:
        return []
    return [f"the index tells of {total:,} bytes, the config of {size:,}"]


def _dtype(spec: JobSpec) -> str:
    return "float32" if spec.model.dtype == "auto" else spec.model.dtype


def _load(spec: JobSpec, found: DecoderShapes) -> Load:
    """What the job keeps beside the weights, of what no file here says the most."""
    batch, task = spec.batch, spec.task
    number_bytes = _NUMBER_BYTES[_dtype(spec)]
    if task.kind != "generate":
        return Load(number_bytes, BUDGET_TOKENS if batch.budget_tokens == "auto" else batch.budget_tokens, 0, 0, 0)
    asked = task.generation
    new_tokens = asked.max_new_tokens if isinstance(asked.max_new_tokens, int) else DEFAULT_MAX_NEW_TOKENS
    beams = asked.beams if isinstance(asked.beams, int) else 1
    prompt = found.max_positions if task.max_tokens == "auto" else task.max_tokens
    return Load(
        number_bytes,
        STEP_TOKENS if batch.budget_tokens == "auto" else batch.budget_tokens,
        GENERATE_ROWS if batch.rows == "auto" else batch.rows,
        min(prompt + new_tokens, found.max_positions) * beams,
        0 if batch.cache_bytes == "auto" else batch.cache_bytes,
    )
