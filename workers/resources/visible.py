"""Before a replica starts: what `CUDA_VISIBLE_DEVICES` names. Asks no driver whether a device of that name is there.

A process counts the devices it sees from 0, in the order in which the variable names them, whatever their numbers on
the machine are. Ray gives every actor its devices by this variable: as numbers or, where the machine's own variable
holds them, as UUIDs of GPUs or of MIG slices. So no part of it may be taken for a number, and a rank is none of them.

Source: CUDA C++ Programming Guide, environment variables; MIG User Guide, "Device Enumeration".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_KINDS: tuple[tuple[Literal["index", "gpu", "mig"], re.Pattern[str]], ...] = (
    ("index", re.compile(r"\d+")),
    ("gpu", re.compile(r"GPU-[0-9a-fA-F][0-9a-fA-F-]*")),  # a UUID, or as much of it as tells it from others
    ("mig", re.compile(r"MIG-(GPU-[0-9a-fA-F-]+/\d+/\d+|[0-9a-fA-F][0-9a-fA-F-]*)")),
)


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """Devices that a process is given.

    Attributes:
        ids: Numbers and UUIDs as they are written; the process's device `i` is `ids[i]`.
        kinds: What each of them is.
        fault: What the driver stops at, so that it and all after it are not seen; None where all is well.
    """

    ids: tuple[str, ...]
    kinds: tuple[Literal["index", "gpu", "mig"], ...]
    fault: str | None = None


def parse_visible(value: str) -> VisibleDevices:
    """Take `CUDA_VISIBLE_DEVICES` apart, as the driver does: it reads up to the first entry that names no device.

    Args:
        value: What the variable holds; an empty text names no device, and is no fault.
    """
    ids: list[str] = []
    kinds: list[Literal["index", "gpu", "mig"]] = []
    fault = None
    for entry in [] if not value.strip() else [entry.strip() for entry in value.split(",")]:
        kind = next((kind for kind, pattern in _KINDS if pattern.fullmatch(entry)), None)
        if kind is None:
            fault = f"no number, GPU or MIG UUID: `{entry}`"
        elif _canonical(entry) in map(_canonical, ids):
            fault = f"named twice: `{entry}`"
        if kind is None or fault is not None:
            break
        ids.append(entry)
        kinds.append(kind)
    return VisibleDevices(tuple(ids), tuple(kinds), fault)


def _canonical(entry: str) -> str:
    return str(int(entry)) if entry.isdecimal() else entry.lower()
