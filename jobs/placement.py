"""How many replicas, and how large: arithmetic over what the nodes have. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sharding.errors import InfrastructureError
from workers.config import WorkerConfig

_MOST_CPUS_PER_REPLICA = 8


@dataclass(frozen=True, slots=True)
class Placement:
    """Replicas of one size."""

    replicas: int
    cpus: int
    gpus: int

    def configure(self, config: WorkerConfig) -> WorkerConfig:
        """The workers' settings with the engine's threads set to the CPUs granted."""
        return replace(config, threads=self.cpus)


def place_replicas(
    nodes: Sequence[Mapping[str, float]], replicas: int | None, cpus: int | None, gpus: int | None, *, device: str
) -> Placement:
    """Decide the size of a replica and how many there are room for.

    Args:
        nodes: Resources of each live node, as Ray reports them.
        replicas, cpus, gpus: What the spec asks for; None for auto.
        device: `cpu` or `cuda`.

    Raises:
        InfrastructureError: They do not fit; the message says what is needed and what each node has.
    """
    need_gpus = gpus if gpus is not None else (1 if device == "cuda" else 0)
    if cpus is None:
        largest = max((int(node.get("CPU", 0)) for node in nodes), default=0)
        share = largest if not need_gpus else max(1, largest // max(1, max(int(node.get("GPU", 0)) for node in nodes)))
        cpus = max(1, min(_MOST_CPUS_PER_REPLICA, share))
        if replicas is not None and len(nodes) == 1:
            cpus = max(1, min(cpus, largest // replicas))
    room = sum(_room(node, cpus, need_gpus) for node in nodes)
    wanted = replicas if replicas is not None else room
    if room < max(1, wanted):
        have = "; ".join(f"{int(node.get('CPU', 0))} CPUs, {int(node.get('GPU', 0))} GPUs" for node in nodes)
        raise InfrastructureError(
            f"{max(1, wanted)} replicas of {cpus} CPUs and {need_gpus} GPUs do not fit; "
            f"the nodes have: `{have or 'none'}`",
            hint="lower workers.replicas, workers.cpus or workers.gpus, or use a larger cluster",
        )
    return Placement(wanted, cpus, need_gpus)


def _room(node: Mapping[str, float], cpus: int, gpus: int) -> int:
    by_cpu = int(node.get("CPU", 0)) // cpus
    return min(by_cpu, int(node.get("GPU", 0)) // gpus) if gpus else by_cpu
