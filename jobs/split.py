"""What a model's split over ranks costs, for `plan`: memory of a rank, room for its cache, bytes between ranks.

Arithmetic over sizes; loads and starts nothing. Estimates are of the engine as it is: sums in float32, keys and values
as `jobs.weight_bytes` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path

from jobs.batching import Batching
from jobs.placement import Placement, place_replicas
from jobs.spec import JobSpec
from jobs.weight_bytes import WeightBytes, matrix_names, weight_bytes
from sharding.errors import InfrastructureError, InputError
from sharding.tensor import ModelSizes, rank_numbers
from sharding.tensor_shapes import MODEL_TYPES, DecoderShapes, decoder_shapes
from sharding.words import counted
from workers.config import DeviceKind, WorkerConfig
from workers.engine.base import EngineInfo
from workers.engine.fake import is_fake
from workers.model.jsonfile import read_object
from workers.model.layout import CONFIG, text_folder
from workers.resources.devices import probe_cuda
from workers.resources.limits import available_threads, memory_limit_bytes

DEVICES_GB = (24, 40, 80, 141)
_GB = 10**9
_USABLE = 0.9
"""Share of a device that is counted on; the rest is the runtime's and what lies between blocks."""
_FLOAT_BYTES = 4
_WIDTHS_AT_WORK = 8
"""Rows of the hidden size that a token takes while it is computed, about."""


@dataclass(frozen=True, slots=True)
class Dimensions:
    """What the arithmetic needs of a model.

    Attributes:
        parameters: Numbers of the whole model.
        rest: Those that are in no layer's matrix.
        decoder: Sizes and shapes, or None where only the rest is known: ranks then count as equal parts.
    """

    hidden_size: int
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    parameters: int
    rest: int
    decoder: tuple[ModelSizes, Mapping[str, tuple[int, ...]]] | None

    @classmethod
    def of_shapes(cls, found: DecoderShapes) -> Dimensions:
        """Those of a decoder whose config is known."""
        sizes, matrices = found.sizes, matrix_names(found.shapes)
        return cls(
            found.hidden_size,
            found.layers,
            sizes.kv_heads,
            sizes.head_dim,
            sizes.vocab_size,
            sum(map(prod, found.shapes.values())),
            sum(prod(shape) for name, shape in found.shapes.items() if name not in matrices),
            (sizes, found.shapes),
        )

    @classmethod
    def of_model(cls, path: Path, info: EngineInfo) -> Dimensions:
        """Those of a model whose files are here."""
        config = read_object(text_folder(path) / CONFIG) if path.is_dir() else {}
        if config.get("model_type") in MODEL_TYPES:
            return cls.of_shapes(decoder_shapes(config))
        return cls.of_info(info)

    @classmethod
    def of_info(cls, info: EngineInfo) -> Dimensions:
        """Those that a model tells of itself; of the rest only its token table is known, if that is no head, too."""
        numbers = info.weight_bytes // _FLOAT_BYTES
        table = 0 if info.tied else info.vocab_size * info.hidden_size
        rest = min(numbers, table)
        return cls(info.hidden_size, info.layers, info.kv_heads, info.head_dim, info.vocab_size, numbers, rest, None)

    def weight_bytes(self, ranks: int, held: WeightBytes) -> int:
        """Weights of the rank that has most."""
        if self.decoder is None:
            return ceil(held.size(self.parameters - self.rest, self.rest) / ranks)
        sizes, shapes = self.decoder
        names = matrix_names(shapes)
        matrices = [(name, shape) for name, shape in shapes.items() if name in names]
        rest = [(name, shape) for name, shape in shapes.items() if name not in names]
        return max(
            held.size(*(rank_numbers(part, sizes, rank=rank, world=ranks) for part in (matrices, rest)))
            for rank in range(ranks)
        )

    def cache_token_bytes(self, ranks: int, held: WeightBytes) -> int:
        """Keys and values of one token on each rank."""
        return 2 * self.layers * ceil(self.kv_heads / ranks) * self.head_dim * held.cache_bytes


@dataclass(frozen=True, slots=True)
class Load:
    """What a job keeps in memory beside the weights.

    Attributes:
        held: How weights are held.
        step_tokens: Tokens that are computed at a time.
        rows: Texts that grow at a time; 0 where none do.
        row_tokens: Cache of the longest row, in tokens.
        cache_bytes: Size of the cache, where the spec says.
    """

    held: WeightBytes
    step_tokens: int
    rows: int
    row_tokens: int
    cache_bytes: int

    @classmethod
    def of_job(cls, config: WorkerConfig) -> Load:
        """That of a prepared job."""
        held = weight_bytes(config.model.dtype, config.model.device)
        batching = Batching(config.budget_tokens, config.step_tokens, config.generate_rows, config.cache_bytes)
        sampling = None if config.task.decoder is None else config.task.decoder.sampling
        if config.task.decoder is None or sampling is None:
            return cls.of_batching(held, batching)
        row = min(config.task.max_tokens + sampling.max_new_tokens, config.task.decoder.max_positions)
        return cls.of_batching(held, batching, row * sampling.beams)

    @classmethod
    def of_batching(cls, held: WeightBytes, batching: Batching, row_tokens: int | None = None) -> Load:
        """The same from parts; without `row_tokens` no text grows."""
        if row_tokens is None:
            return cls(held, batching.budget_tokens, 0, 0, 0)
        return cls(held, batching.step_tokens, batching.generate_rows, row_tokens, batching.cache_bytes or 0)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """A replica of several ranks on paper. Sizes are estimates, in bytes.

    Attributes:
        rank_weight_bytes: Weights of the rank that has most.
        cache_token_bytes: Keys and values of one token on each rank.
        cache_dtype: Their format.
        rank_bytes: Weights, work and the smallest cache that the job can do with, on each rank.
        cache_tokens: Size of a GPU in GB -> tokens of float32 cache that fit beside the rest; None: no room.
            Empty for a job that never runs on one.
        all_reduces: Sums over the ranks for each step, which gives every running text one token.
        all_reduce_bytes: Bytes of one of them for each token of the step.
        one_device_gb: The smallest of these GPUs that holds the whole model; None: none does.
    """

    ranks: int
    weight_bytes: int
    rank_weight_bytes: int
    cache_token_bytes: int
    cache_dtype: str
    rank_bytes: int
    cache_tokens: dict[str, int | None]
    all_reduces: int
    all_reduce_bytes: int
    one_device_gb: int | None


def plan_split(model: Dimensions, load: Load, ranks: int, on_gpus: WeightBytes | None) -> SplitPlan:
    """What a replica of so many ranks needs; `sharding.tensor.check_world` has passed.

    Args:
        model: Its sizes.
        load: What the job keeps where it runs.
        ranks: Of one replica.
        on_gpus: How GPUs would hold the weights; None for a job that never runs on one.

    Raises:
        InfrastructureError: No GPU of `DEVICES_GB` holds a rank; the hint names numbers of ranks that fit one.
    """

    def tokens(world: int) -> dict[int, int | None]:
        return {gb: _cache_tokens(model, gpu, world, gb) for gb in sizes}

    sizes = () if on_gpus is None else DEVICES_GB
    gpu = load if on_gpus is None else replace(load, held=on_gpus)
    found = tokens(ranks)
    if found and all(count is None for count in found.values()):
        worlds = () if model.decoder is None else model.decoder[0].fitting_worlds()
        fitting = [str(one) for one in worlds if tokens(one)[DEVICES_GB[-1]] is not None]
        raise InfrastructureError(
            f"a rank needs {_needed(model, gpu, ranks) / _GB:.1f} GB and a tenth to spare, more than the largest "
            f"device counted on has: `{DEVICES_GB[-1]} GB`",
            hint=f"model.tensor_parallel that fits: {', '.join(fitting) or 'none'}; or a smaller cache or dtype; or "
            "model.device: cpu, of which no size is counted on",
        )
    return SplitPlan(
        ranks=ranks,
        weight_bytes=model.weight_bytes(1, load.held),
        rank_weight_bytes=model.weight_bytes(ranks, load.held),
        cache_token_bytes=model.cache_token_bytes(ranks, load.held),
        cache_dtype=load.held.cache,
        rank_bytes=_needed(model, load, ranks),
        cache_tokens={str(gb): count for gb, count in found.items()},
        all_reduces=1 + 2 * model.layers if ranks > 1 else 0,
        all_reduce_bytes=model.hidden_size * _FLOAT_BYTES if ranks > 1 else 0,
        one_device_gb=next((gb for gb, count in tokens(1).items() if count is not None), None),
    )


def check_tensor_parallel(spec: JobSpec, path: Path) -> None:
    """Check that a job can split its model at all; that its ranks have room is the cluster's matter.

    Raises:
        InputError: It cannot: heads and sizes do not divide, or models of this kind, or this backend, are never split.
    """
    ranks = spec.model.tensor_parallel
    if ranks == 1:
        return
    check_ranks(spec)
    from workers.engine.candle import check_split

    check_split(path, ranks)


def check_ranks(spec: JobSpec) -> None:
    """Check what the spec alone says of a job's ranks.

    Raises:
        InputError: Its backend runs one process, or its model is one that tests make up.
    """
    ranks = spec.model.tensor_parallel
    if ranks == 1:
        return
    if spec.backend == "local":
        raise InputError(
            f"model.tensor_parallel above 1 needs `backend: ray`, which runs a process for each rank: `{ranks}`",
            hint="leave backend out, or set model.tensor_parallel to 1",
        )
    if is_fake(spec.model.source):
        raise InputError(f"model.tensor_parallel above 1 needs a model of a real kind: `{spec.model.source}`")


def rank_bytes(spec: JobSpec, path: Path, info: EngineInfo, config: WorkerConfig) -> int:
    """Memory of a node that each rank takes at least; 0 for whole models, and on GPUs."""
    ranks = spec.model.tensor_parallel
    if ranks == 1 or config.model.device != "cpu":
        return 0
    return _needed(Dimensions.of_model(path, info), Load.of_job(config), ranks)


def place_here(spec: JobSpec, device: DeviceKind, rank_bytes: int) -> Placement | None:
    """How replicas would be placed on this machine; None for a cluster, whose nodes only it knows.

    Args:
        spec: The job.
        device: Where ranks compute.
        rank_bytes: As the function of that name says.

    Raises:
        InfrastructureError: Not even one fits; the message says what is needed and what is here.
    """
    if spec.ray.address is not None:
        return None
    workers = spec.workers
    here = {"CPU": available_threads(), "GPU": len(probe_cuda().gpus), "memory": memory_limit_bytes()}
    replicas, cpus, gpus = (None if n == "auto" else n for n in (workers.replicas, workers.cpus, workers.gpus))
    ranks = spec.model.tensor_parallel
    return place_replicas([here], replicas, cpus, gpus, device=device, ranks=ranks, rank_bytes=rank_bytes)


def describe_replicas(spec: JobSpec, placement: Placement | None) -> str:
    """How many replicas of how many ranks a job has."""
    ranks = spec.model.tensor_parallel
    if placement is not None:
        return f"{placement.replicas} here, each {placement.size}"
    many = "as many as the cluster's nodes have room for" if spec.workers.replicas == "auto" else spec.workers.replicas
    return f"{many}, each {counted(ranks, 'rank')} on one node; submit says at once if they do not fit"


def _needed(model: Dimensions, load: Load, ranks: int) -> int:
    cache = max(load.cache_bytes, load.row_tokens * model.cache_token_bytes(ranks, load.held))
    return _beside_cache(model, load, ranks) + cache


def _beside_cache(model: Dimensions, load: Load, ranks: int) -> int:
    work = load.step_tokens * model.hidden_size * _WIDTHS_AT_WORK + load.rows * model.vocab_size * 2
    return model.weight_bytes(ranks, load.held) + work * _FLOAT_BYTES


def _cache_tokens(model: Dimensions, load: Load, ranks: int, gb: int) -> int | None:
    usable = int(gb * _GB * _USABLE)
    if usable < _needed(model, load, ranks):
        return None
    token_bytes = model.cache_token_bytes(ranks, load.held)
    return (usable - _beside_cache(model, load, ranks)) // token_bytes if token_bytes else 0
