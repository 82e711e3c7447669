"""How many replicas, and how large: arithmetic over what the nodes have. Starts nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sharding.errors import InfrastructureError
from sharding.words import counted
from workers.config import WorkerConfig

_MOST_CPUS_PER_REPLICA = 8
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Placement:
    """Replicas of one size.

    Attributes:
        cpus: CPUs of each rank.
        gpus: GPUs of each rank.
        ranks: Processes that hold one model together, all on one node.
        rank_bytes: Memory of a node that each rank takes at least; 0 where nobody counts it.
    """

    replicas: int
    cpus: int
    gpus: int
    ranks: int = 1
    rank_bytes: int = 0

    @property
    def size(self) -> str:
        """One replica in words."""
        cpus, gpus = counted(self.cpus, "CPU"), counted(self.gpus, "GPU")
        each = f"{cpus} and {gpus}"
        if self.rank_bytes:
            each = f"{cpus}, {gpus} and {_mebibytes(self.rank_bytes)} of memory"
        return each if self.ranks == 1 else f"{counted(self.ranks, 'rank')} on one node, each with {each}"

    def configure(self, config: WorkerConfig) -> WorkerConfig:
        """The workers' settings with the engine's threads set to the CPUs granted."""
        return replace(config, threads=self.cpus)


def place_replicas(
    nodes: Sequence[Mapping[str, float]],
    replicas: int | None,
    cpus: int | None,
    gpus: int | None,
    *,
    device: str,
    ranks: int = 1,
    rank_bytes: int = 0,
) -> Placement:
    """Decide the size of a replica and how many there are room for.

    Args:
        nodes: Resources of each live node, as Ray reports them.
        replicas, cpus, gpus: What the spec asks for, the latter two for each rank; None for auto.
        device: `cpu` or `cuda`.
        ranks: Processes of one replica.
        rank_bytes: Memory of a node that each of them takes at least; 0 counts none.

    Raises:
        InfrastructureError: They do not fit; the message says what is needed and what each node has.
    """
    need_gpus = gpus if gpus is not None else (1 if device == "cuda" else 0)
    if cpus is None:
        largest = max((int(node.get("CPU", 0)) for node in nodes), default=0)
        share = largest // ranks
        if need_gpus:  # as many as keep no GPU of a node waiting for CPUs
            full = [(int(node.get("CPU", 0)), int(node.get("GPU", 0)) // need_gpus) for node in nodes]
            share = min((cpu // gpu_ranks for cpu, gpu_ranks in full if gpu_ranks), default=1)
        cpus = max(1, min(_MOST_CPUS_PER_REPLICA, share))
        if replicas is not None and len(nodes) == 1:
            cpus = max(1, min(cpus, largest // (replicas * ranks)))
    room = sum(_room(node, cpus * ranks, need_gpus * ranks, rank_bytes * ranks) for node in nodes)
    wanted = replicas if replicas is not None else room
    placement = Placement(wanted, cpus, need_gpus, ranks, rank_bytes)
    if room < max(1, wanted):
        lower = "workers.replicas, workers.cpus or workers.gpus"
        needed = max(1, wanted)
        raise InfrastructureError(
            f"{counted(needed, 'replica')} of {placement.size} {'does' if needed == 1 else 'do'} not fit; "
            f"the nodes have: `{describe_nodes(nodes)}`",
            hint=f"lower {lower if ranks == 1 else f'model.tensor_parallel, {lower}'}, or use a larger cluster",
        )
    return placement


def describe_nodes(nodes: Sequence[Mapping[str, float]]) -> str:
    """What each node has, in words."""
    return "; ".join(map(_describe, nodes)) or "none"


def _describe(node: Mapping[str, float]) -> str:
    memory = f", {_mebibytes(node['memory'])} of memory" if "memory" in node else ""
    return f"{counted(int(node.get('CPU', 0)), 'CPU')}, {counted(int(node.get('GPU', 0)), 'GPU')}{memory}"


def _mebibytes(size_bytes: float) -> str:
    return f"{math.ceil(size_bytes / _MIB):,} MiB"


def _room(node: Mapping[str, float], cpus: int, gpus: int, memory_bytes: int) -> int:
    rooms = [int(node.get("CPU", 0)) // cpus]
    if gpus:
        rooms.append(int(node.get("GPU", 0)) // gpus)
    if memory_bytes and "memory" in node:
        rooms.append(int(node["memory"]) // memory_bytes)
    return min(rooms)
