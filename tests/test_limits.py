"""Threads and memory follow the least of affinity, cgroup and grant, on either cgroup generation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.resources.limits import (
    CgroupLimits,
    available_threads,
    cores_in_affinity,
    memory_limit_bytes,
    read_cgroup_limits,
)

MIB = 1 << 20
NO_LIMIT_V1 = 9223372036854771712


class Machine:
    """A process folder and cgroup mounts, written as the kernel writes them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc = root / "proc"
        self.proc.mkdir()
        self.mounts: list[str] = ["21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"]

    def group(self, *lines: str) -> None:
        (self.proc / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    def mount(self, kind: str, name: str, *, root: str = "/", options: str = "rw") -> Path:
        point = self.root / name
        point.mkdir(parents=True, exist_ok=True)
        escaped = str(point).replace("\\", "\\134").replace(" ", "\\040")
        self.mounts.append(f"30 21 0:26 {root} {escaped} rw,nosuid shared:9 - {kind} {kind} {options}")
        return point

    def limits(self) -> CgroupLimits:
        (self.proc / "mountinfo").write_text("".join(f"{line}\n" for line in self.mounts))
        return read_cgroup_limits(self.proc)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_a_container_with_its_own_cgroup_namespace_reads_the_mount_root(machine: Machine) -> None:
    machine.group("0::/")
    write(machine.mount("cgroup2", "cgroup"), cpu__max="150000 100000", memory__max=str(512 * MIB))
    assert machine.limits() == CgroupLimits(cpu_quota=1.5, memory_bytes=512 * MIB, version=2)


def test_the_tightest_ancestor_binds(machine: Machine) -> None:
    machine.group("0::/kubepods/pod1/main")
    point = machine.mount("cgroup2", "cgroup")
    write(point / "kubepods", cpu__max="max 100000", memory__max="max")
    write(point / "kubepods/pod1", cpu__max="200000 100000", memory__max=str(64 * MIB))
    write(point / "kubepods/pod1/main", cpu__max="400000 100000", memory__max=str(128 * MIB))
    assert machine.limits() == CgroupLimits(cpu_quota=2.0, memory_bytes=64 * MIB, version=2)


def test_version_one_is_read_per_controller(machine: Machine) -> None:
    machine.group("4:memory:/docker/abc", "1:cpu,cpuacct:/docker/abc", "0::/")
    cpu = machine.mount("cgroup", "cgroup/cpu,cpuacct", options="rw,cpu,cpuacct")
    memory = machine.mount("cgroup", "cgroup/memory", options="rw,memory")
    machine.mount("cgroup2", "cgroup/unified")
    write(cpu / "docker/abc", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000")
    write(memory, memory__limit_in_bytes=str(NO_LIMIT_V1))
    write(memory / "docker/abc", memory__limit_in_bytes=str(256 * MIB))
    assert machine.limits() == CgroupLimits(cpu_quota=0.5, memory_bytes=256 * MIB, version=1)


def test_a_bind_mounted_branch_shows_the_host_path_cut_off(machine: Machine) -> None:
    machine.group("1:cpu:/docker/abc")
    cpu = machine.mount("cgroup", "cgroup/cpu", root="/docker/abc", options="rw,cpu")
    write(cpu, cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    assert machine.limits().cpu_quota == 3.0


def test_a_mount_point_with_a_space_is_found(machine: Machine) -> None:
    machine.group("0::/")
    write(machine.mount("cgroup2", "a folder"), cpu__max="100000 100000")
    assert machine.limits().cpu_quota == 1.0


@pytest.mark.parametrize("quota", ["max 100000", "-1", "0 100000", "", "nonsense", "100000 0"])
def test_no_quota_and_nonsense_are_no_limit(machine: Machine, quota: str) -> None:
    machine.group("0::/")
    write(machine.mount("cgroup2", "cgroup"), cpu__max=quota, memory__max="max")
    assert machine.limits() == CgroupLimits(version=2)


def test_version_one_without_limits_says_so_with_sentinels(machine: Machine) -> None:
    machine.group("4:memory:/", "1:cpu:/")
    write(machine.mount("cgroup", "cpu", options="rw,cpu"), cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    write(machine.mount("cgroup", "memory", options="rw,memory"), memory__limit_in_bytes=str(NO_LIMIT_V1))
    assert machine.limits() == CgroupLimits(version=1)


def test_a_group_above_the_namespace_falls_back_to_the_mount_root(machine: Machine) -> None:
    machine.group("0::/../other")
    write(machine.mount("cgroup2", "cgroup"), cpu__max="100000 100000")
    assert machine.limits().cpu_quota == 1.0


def test_no_proc_at_all_is_no_limit(tmp_path: Path) -> None:
    assert read_cgroup_limits(tmp_path / "missing") == CgroupLimits()


@pytest.mark.parametrize(
    ("quota", "given", "expected"),
    [
        (None, None, 64),
        (1.0, None, 1),
        (1.5, None, 2),
        (0.1, None, 1),
        (None, 2, 2),
        (None, 0.5, 1),
        (8.0, 2, 2),
        (1.0, 2, 1),
        (128.0, 100, 64),
        (None, 0, 1),
    ],
)
def test_threads_are_the_least_of_affinity_quota_and_grant(
    quota: float | None, given: float | None, expected: int
) -> None:
    assert available_threads(given, limits=CgroupLimits(cpu_quota=quota), affinity=64) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks")
def test_a_process_bound_to_one_core_gets_one_thread() -> None:
    core = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, {{{core}}})\n"
        "from workers.resources.limits import available_threads; print(available_threads(8))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "1\n"


def test_this_machine_gives_sane_numbers() -> None:
    assert 1 <= available_threads() <= cores_in_affinity()
    assert 64 * MIB < memory_limit_bytes() < 1 << 50


def test_memory_is_the_least_of_machine_and_cgroup() -> None:
    assert memory_limit_bytes(limits=CgroupLimits(memory_bytes=MIB)) == MIB
    assert memory_limit_bytes(limits=CgroupLimits(memory_bytes=1 << 59)) == memory_limit_bytes(limits=CgroupLimits())
