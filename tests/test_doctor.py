"""What `doctor` makes of a machine: each way of being unfit is named, with something to do about it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.doctor import Finding, examine
from jobs.facts import EngineFacts, Facts, gather_facts
from workers.resources.devices import CudaFacts, Gpu, cuda_obstacle, probe_cuda
from workers.resources.limits import CgroupLimits

GIB = 1 << 30
ENGINE = EngineFacts(
    version="0.1.0",
    candle_version="0.11.1",
    cpu="avx512",
    cpu_bfloat16="amx",
    cpu_int8="avx512-vnni",
    cuda=False,
    nccl=False,
    threads_default=8,
)
CUDA_ENGINE = replace(ENGINE, cuda=True, nccl=True)
GPU = Gpu("NVIDIA H200", 139 * GIB, "9.0")
DRIVER = CudaFacts(module="580.65.06", boards=1, library="13.0", gpus=(GPU,), nccl="2.28.9")
GOOD = Facts(
    cpu_model="A processor",
    cpu_flags=frozenset({"avx2", "fma", "avx512f"}),
    cores=8,
    affinity=8,
    memory_bytes=16 * GIB,
    shm_bytes=8 * GIB,
    temp_free_bytes=50 * GIB,
    engine=ENGINE,
    version="0.1.0",
    ray="2.60.0",
    owners=dict.fromkeys(("jobs", "workers", "sharding"), ("candelabra",)),
    homes={name: f"/site/{name}" for name in ("jobs", "workers", "sharding")},
    shell="bash",
    program_on_path="/venv/bin/candelabra",
)


def problems(facts: Facts) -> list[Finding]:
    return [finding for finding in examine(facts) if finding.status == "problem"]


def only_problem(facts: Facts) -> Finding:
    found = problems(facts)
    assert len(found) == 1, found
    return found[0]


def notes(facts: Facts) -> str:
    return "\n".join(f"{finding.what} {finding.hint}" for finding in examine(facts) if finding.status == "note")


def test_a_sound_machine_has_no_problem() -> None:
    assert problems(GOOD) == []
    assert [finding.area for finding in examine(GOOD) if finding.status == "note"] == ["shell"]


def test_a_cuda_build_without_driver_names_the_driver() -> None:
    finding = only_problem(replace(GOOD, engine=CUDA_ENGINE))
    assert "built for CUDA, but the NVIDIA driver is not loaded" in finding.what
    assert finding.hint is not None
    assert "driver" in finding.hint


def test_a_cpu_build_on_a_gpu_machine_names_the_build() -> None:
    finding = only_problem(replace(GOOD, cuda=DRIVER))
    assert "built for the CPU only; this machine has a GPU" in finding.what


def test_a_cuda_build_that_cannot_be_loaded_says_what_it_misses() -> None:
    failure = ("candle-py-cuda cannot be loaded, since a library of CUDA is not there: `libcublas.so.13`", "install it")
    finding = only_problem(replace(GOOD, engine=replace(ENGINE, cuda_failure=failure), cuda=DRIVER))
    assert (finding.what, finding.hint) == failure
    without_driver = only_problem(replace(GOOD, engine=replace(ENGINE, cuda_failure=failure)))
    assert "the NVIDIA driver is not loaded" in without_driver.what


def test_a_device_that_is_named_but_not_seen_is_a_problem() -> None:
    assert (
        "names 2 devices" in only_problem(replace(GOOD, engine=CUDA_ENGINE, cuda=replace(DRIVER, visible="0,9"))).what
    )


@pytest.mark.parametrize(
    ("cuda", "expected"),
    [
        (CudaFacts(module="580.65.06", boards=1, nccl="2.28.9"), "`libcuda.so.1` cannot be loaded"),
        (replace(DRIVER, gpus=(), visible="7"), "`CUDA_VISIBLE_DEVICES` hides every device: `7`"),
        (replace(DRIVER, gpus=(), failure="no device"), "shows no device: `no device`"),
        (replace(DRIVER, nccl=None), "built with NCCL"),
    ],
)
def test_each_missing_piece_of_cuda_is_named(cuda: CudaFacts, expected: str) -> None:
    assert expected in only_problem(replace(GOOD, engine=CUDA_ENGINE, cuda=cuda)).what


def test_a_whole_cuda_machine_is_described_without_a_problem() -> None:
    said = "\n".join(finding.what for finding in examine(replace(GOOD, engine=CUDA_ENGINE, cuda=DRIVER)))
    assert not problems(replace(GOOD, engine=CUDA_ENGINE, cuda=DRIVER))
    for part in ("NVIDIA H200, 139.0 GiB, compute capability 9.0", "580.65.06", "CUDA 13.0", "NCCL 2.28.9"):
        assert part in said


def test_cuda_obstacle_is_silent_only_when_build_driver_and_device_are_there() -> None:
    assert cuda_obstacle(True, DRIVER) is None
    for built, facts in ((False, DRIVER), (True, CudaFacts()), (True, replace(DRIVER, gpus=())), (False, CudaFacts())):
        obstacle = cuda_obstacle(built, facts)
        assert obstacle is not None
        message, hint = obstacle
        assert message[0].islower()
        assert hint


def test_an_engine_that_cannot_be_imported_is_a_problem_with_its_reason() -> None:
    assert "No module named" in only_problem(replace(GOOD, engine=None, engine_failure="No module named 'x'")).what


def test_a_plain_path_on_a_capable_cpu_is_a_problem_and_elsewhere_a_note() -> None:
    slow = replace(ENGINE, cpu="scalar")
    assert "plain path" in only_problem(replace(GOOD, engine=slow)).what
    assert "no AVX2" in notes(replace(GOOD, engine=slow, cpu_flags=frozenset({"sse2"})))


def test_the_paths_of_bfloat16_and_int8_are_told_and_an_amx_that_is_withheld_noted() -> None:
    assert "CPU path avx512 (bfloat16: amx, int8: avx512-vnni)" in " ".join(finding.what for finding in examine(GOOD))
    amx = replace(GOOD, cpu_flags=GOOD.cpu_flags | {"amx_bf16"})
    assert "AMX" not in notes(amx)
    assert "does not let the engine use it" in notes(replace(amx, engine=replace(ENGINE, cpu_bfloat16="avx512")))


def test_another_owner_of_a_name_is_a_problem_that_names_it() -> None:
    finding = only_problem(replace(GOOD, owners={**GOOD.owners, "jobs": ("candelabra", "other-jobs")}))
    assert "`jobs`" in finding.what
    assert "other-jobs" in finding.what
    assert finding.hint is not None
    assert "pip uninstall other-jobs" in finding.hint


def test_a_package_imported_from_elsewhere_is_a_problem_that_says_where() -> None:
    finding = only_problem(replace(GOOD, homes={**GOOD.homes, "workers": "/home/me/project/workers"}))
    assert "/home/me/project/workers" in finding.what


def test_a_folder_named_jobs_in_the_working_directory_is_noted() -> None:
    assert "python -P -m jobs" in notes(replace(GOOD, shadows=("jobs",)))


def test_a_small_shm_is_a_problem() -> None:
    finding = only_problem(replace(GOOD, shm_bytes=64 << 20))
    assert "64 MiB" in finding.what
    assert finding.hint is not None
    assert "--shm-size" in finding.hint


def test_a_quota_below_the_visible_cores_is_noted_and_engine_threads_above_it_are_a_problem() -> None:
    facts = replace(GOOD, limits=CgroupLimits(cpu_quota=1.5, version=2))
    assert "grants 1.5 CPUs of 8" in notes(facts)
    assert "8 threads where 2 can run" in only_problem(facts).what
    assert not problems(replace(facts, engine=replace(ENGINE, threads_default=2)))


def test_little_temporary_space_is_a_problem() -> None:
    assert "100 MiB free" in only_problem(replace(GOOD, temp_free_bytes=100 << 20)).what


@pytest.mark.parametrize(
    ("variable", "value", "status", "expected"),
    [
        ("HF_ENDPOINT", "mirror.example", "problem", "`mirror.example`"),
        ("HF_ENDPOINT", "https://mirror.example", "note", "mirror"),
        ("HF_HUB_OFFLINE", "1", "note", "HF_HUB_OFFLINE"),
        ("AWS_ENDPOINT_URL", "localhost:9000", "problem", "`localhost:9000`"),
        ("AWS_ENDPOINT_URL", "http://localhost:9000", "note", "localhost:9000"),
        ("RAY_ADDRESS", "auto", "note", "RAY_ADDRESS"),
        ("CANDELABRA_FAILPOINTS", "read=kill", "problem", "crash on purpose"),
    ],
)
def test_environment_variables_are_read_out(variable: str, value: str, status: str, expected: str) -> None:
    found = examine(replace(GOOD, environment={variable: value}))
    assert any(finding.status == status and expected in finding.what for finding in found)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_hint_gives_the_line_for_that_shell(shell: str) -> None:
    assert f"candelabra shell-init {shell}" in notes(replace(GOOD, shell=shell))


def test_an_unknown_shell_gets_the_name_that_always_works() -> None:
    said = notes(replace(GOOD, shell="tcsh", program_on_path=None))
    assert "type `candelabra`" in said
    assert "not on PATH" in said
    assert "shell-init" not in said


def test_this_machine_can_be_examined_and_secrets_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret-value")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another-secret")
    facts = gather_facts()
    said = str(facts) + str(examine(facts))
    assert facts.cores >= facts.affinity >= 1
    assert facts.memory_bytes > 0
    assert "secret" not in said
    assert facts.environment["HF_TOKEN"] == "(set)"


def test_folders_of_our_names_are_found_only_when_they_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "sharding.py").touch()
    (tmp_path / "workers.txt").touch()
    assert gather_facts(tmp_path).shadows == ("jobs", "sharding")
    assert gather_facts(Path(gather_facts().homes["jobs"]).parent).shadows == ()


class FakeDriver:
    """`libcuda.so.1` as far as it is asked: one device."""

    def __init__(self, init: int = 0, devices: int = 1) -> None:
        self.init, self.devices = init, devices

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.init

    def cuDriverGetVersion(self, out: Any) -> int:  # noqa: N802
        out._obj.value = 13010
        return 0

    def cuDeviceGetCount(self, out: Any) -> int:  # noqa: N802
        out._obj.value = self.devices
        return 0 if self.init == 0 else 3

    def cuDeviceGet(self, out: Any, ordinal: int) -> int:  # noqa: N802
        out._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, buffer: Any, size: int, device: ctypes.c_int) -> int:  # noqa: N802
        buffer.value = f"GPU {device.value}".encode()
        return 0

    def cuDeviceTotalMem_v2(self, out: Any, device: ctypes.c_int) -> int:  # noqa: N802
        out._obj.value = 8 * GIB
        return 0

    def cuDeviceGetAttribute(self, out: Any, attribute: int, device: ctypes.c_int) -> int:  # noqa: N802
        out._obj.value = {75: 9, 76: 0}[attribute]
        return 0


class FakeNccl:
    def __init__(self, code: int) -> None:
        self.code = code

    def ncclGetVersion(self, out: Any) -> int:  # noqa: N802
        out._obj.value = self.code
        return 0


def loader(**libraries: object) -> Callable[[str], object]:
    def load(name: str) -> object:
        for short, library in libraries.items():
            if name.startswith(f"lib{short}."):
                return library
        raise OSError(f"{name}: cannot open shared object file")

    return load


def test_the_driver_is_asked_for_its_devices(tmp_path: Path) -> None:
    (tmp_path / "gpus" / "0000:00:05.0").mkdir(parents=True)
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n")
    facts = probe_cuda(tmp_path, loader(cuda=FakeDriver(devices=2), nccl=FakeNccl(22809)), visible="0,1")
    assert facts == CudaFacts(
        module="580.65.06",
        boards=1,
        library="13.1",
        gpus=(Gpu("GPU 0", 8 * GIB, "9.0"), Gpu("GPU 1", 8 * GIB, "9.0")),
        visible="0,1",
        nccl="2.28.9",
    )


def test_a_driver_that_fails_says_why(tmp_path: Path) -> None:
    facts = probe_cuda(tmp_path, loader(cuda=FakeDriver(init=803)), visible="")
    assert (facts.library, facts.failure, facts.gpus) == ("13.1", "driver and library do not match", ())


def test_a_machine_without_driver_is_an_answer_not_an_error(tmp_path: Path) -> None:
    facts = probe_cuda(tmp_path / "missing", loader())
    assert (facts.module, facts.boards, facts.library, facts.gpus, facts.nccl) == (None, 0, None, (), None)
