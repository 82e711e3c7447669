"""Before a replica starts: how many threads and how much memory this process may really use. Reserves nothing.

A container sees every core of its host, and a Ray worker sees every core of its node; what they were granted is
written elsewhere. The least of the three counts: the affinity mask, the cgroup's CPU quota, and what the caller was
given. Both cgroup generations are read, each from where it is mounted, from the process's own group up to the root,
because a limit of any ancestor binds as well.

Sources: Linux kernel documentation, admin-guide/cgroup-v2 (`cpu.max`, `memory.max`) and admin-guide/cgroup-v1
(`cpu.cfs_quota_us`, `cpu.cfs_period_us`, `memory.limit_in_bytes`); proc(5) for `mountinfo`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED_BYTES = 1 << 60  # cgroup v1 says "no limit" with the largest page-aligned signed 64-bit number


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """What the control groups of this process grant.

    Attributes:
        cpu_quota: CPUs per wall second, or None for no quota.
        memory_bytes: Memory limit, or None for none.
        version: 1 or 2: the generation that gave a limit, else the one that was found; None where there is no cgroup.
    """

    cpu_quota: float | None = None
    memory_bytes: int | None = None
    version: int | None = None


@dataclass(frozen=True, slots=True)
class _Mount:
    version: int
    root: str
    point: Path
    controllers: frozenset[str]


def available_threads(
    given: float | None = None, *, limits: CgroupLimits | None = None, affinity: int | None = None
) -> int:
    """Threads that can run at the same time: the least of affinity, cgroup quota (rounded up) and `given`; at least 1.

    Args:
        given: CPUs granted by somebody else, for example by Ray; None when nobody did. Fractions are rounded up.
        limits: Read from this process's cgroups unless passed.
        affinity: Cores that may be used; asked of the scheduler unless passed.
    """
    if limits is None:
        limits = read_cgroup_limits()
    bounds = [cores_in_affinity() if affinity is None else affinity]
    bounds += [math.ceil(bound) for bound in (limits.cpu_quota, given) if bound is not None]
    return max(1, min(bounds))


def cores_in_affinity() -> int:
    """Logical cores that the scheduler may put this process on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_limit_bytes(*, limits: CgroupLimits | None = None) -> int:
    """Memory that this process may fill: the least of the machine's and the cgroup's."""
    if limits is None:
        limits = read_cgroup_limits()
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return physical if limits.memory_bytes is None else min(physical, limits.memory_bytes)


def read_cgroup_limits(proc: Path = Path("/proc/self")) -> CgroupLimits:
    """Limits in force for a process. Whatever cannot be read counts as no limit.

    Args:
        proc: Folder with the process's `cgroup` and `mountinfo`.
    """
    groups = _groups(_text(proc / "cgroup"))
    cpus: list[tuple[float, int]] = []
    memory: list[tuple[int, int]] = []
    found: set[int] = set()
    for mount in _mounts(_text(proc / "mountinfo")):
        found.add(mount.version)
        for folder in _own_folders(mount, groups):
            if mount.version == 2:
                cpus += [(quota, 2) for quota in _cpu_max(folder)]
                memory += [(size, 2) for size in _number(folder / "memory.max")]
            if "cpu" in mount.controllers:
                cpus += [(quota, 1) for quota in _cfs_quota(folder)]
            if "memory" in mount.controllers:
                sizes = _number(folder / "memory.limit_in_bytes")
                memory += [(size, 1) for size in sizes if size < _UNLIMITED_BYTES]
    binding = [version for _, version in (*cpus, *memory)]
    return CgroupLimits(
        cpu_quota=min(cpus)[0] if cpus else None,
        memory_bytes=min(memory)[0] if memory else None,
        version=max(binding or found, default=None),
    )


def _groups(text: str) -> dict[str, str]:
    """Controller -> path of the process's group; the unified hierarchy stands under the empty name."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        for controller in controllers.split(","):
            groups[controller] = path
    return groups


def _mounts(text: str) -> Iterator[_Mount]:
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        root, point = _unescaped(fields[3]), Path(_unescaped(fields[4]))
        if kind[0] == "cgroup2":
            yield _Mount(2, root, point, frozenset())
        elif kind[0] == "cgroup":
            yield _Mount(1, root, point, frozenset(kind[2].split(",")))


def _own_folders(mount: _Mount, groups: dict[str, str]) -> Iterator[Path]:
    """Folders of the process's group and of every ancestor that this mount shows, the innermost first."""
    if mount.version == 2:
        path = groups.get("")
    else:
        path = next((groups[name] for name in ("cpu", "memory") if name in mount.controllers and name in groups), None)
    if path is None:
        return
    # A container without a cgroup namespace sees the host's path, but only its own branch is mounted.
    inside = path.removeprefix(mount.root) if mount.root != "/" else path
    parts = [part for part in inside.split("/") if part]
    if ".." in parts:
        parts = []
    folder = mount.point.joinpath(*parts)
    while folder != mount.point:
        yield folder
        folder = folder.parent
    yield mount.point


def _cpu_max(folder: Path) -> list[float]:
    fields = _text(folder / "cpu.max").split()
    if not fields or not fields[0].isdigit():
        return []
    period = int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else 100_000
    return _ratio(int(fields[0]), period)


def _cfs_quota(folder: Path) -> list[float]:
    quotas, periods = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return _ratio(quotas[0], periods[0]) if quotas and periods else []


def _ratio(quota_us: int, period_us: int) -> list[float]:
    return [quota_us / period_us] if quota_us > 0 and period_us > 0 else []


def _number(path: Path) -> list[int]:
    text = _text(path).strip()
    return [int(text)] if text.isdigit() else []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _unescaped(field: str) -> str:
    """Mountinfo writes space, tab, newline and backslash as three octal digits."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field
