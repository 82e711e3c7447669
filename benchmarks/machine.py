"""What every figure is printed with: the machine, the seed and how it was summed up. Measures nothing itself."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.facts import gather_facts

SEED = 20_251


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of one thing."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.values)


def spread(values: Sequence[float]) -> Spread:
    """Measurements as a `Spread`."""
    return Spread(tuple(values))


def describe_machine() -> list[tuple[str, str]]:
    """Rows that say where figures come from."""
    facts = gather_facts()
    engine = facts.engine
    built = f"candle-py {engine.version}, path {engine.cpu}" if engine is not None else "no engine"
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return [
        ("processor", f"{facts.cpu_model}, {facts.affinity} of {facts.cores} cores, {platform.machine()}"),
        ("memory", f"{facts.memory_bytes / 2**30:.1f} GiB"),
        ("system", f"{platform.system()} {platform.release()}, Python {facts.python}"),
        ("versions", f"candelabra {facts.version}, {built}, Ray {facts.ray}"),
        ("load before", f"{load} (a busy machine gives worthless figures)"),
        ("seed", str(SEED)),
    ]


def peak_memory_bytes() -> int:
    """Largest resident size of this process so far, its children left out."""
    return _status_bytes("VmHWM:")


def resident_memory_bytes() -> int:
    """Resident size of this process now, its children left out."""
    return _status_bytes("VmRSS:")


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise OSError(f"the kernel does not tell of this process: `{key}`")
