"""Which native module `candle_py` takes: the CPU's, or the CUDA build's where that is installed and loads.

The CUDA builds here are stand-ins: a small library that misses what the real one may miss, and hands on to the CPU's
module. That the real one loads and computes is for `make test-gpu`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import candle_py._native
import pytest

_HANDING_ON = """
#include <dlfcn.h>
extern int needed(void);
void *PyInit__native(void) {
    void *module = dlopen(%s, RTLD_NOW);
    return needed() && module ? ((void *(*)(void))dlsym(module, "PyInit__native"))() : 0;
}
"""

_REPORT = """
import json, sys
import candle_py
failure = candle_py.cuda_failure()
try:
    candle_py.Engine.load("nowhere", device="cuda")
except candle_py.EngineError as error:
    loaded = [type(error).__name__, str(error)]
module = sys.modules["candle_py._native"].__spec__.name
print(json.dumps([module, None if failure is None else [str(failure), failure.hint], loaded]))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages that comes before all others."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to make a stand-in with")
    folder = tmp_path / "site"
    (folder / "candle_py_cuda").mkdir(parents=True)
    (folder / "candle_py_cuda" / "__init__.py").touch()
    return folder


def compile_c(source: str, target: Path, *options: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(target), *options]
    subprocess.run(command, input=source, text=True, check=True)


def make_build(site: Path, tmp_path: Path, library: str) -> Path:
    """A CUDA build that needs `library`; returns that, which nobody finds where it is."""
    needed = tmp_path / "away" / library
    compile_c("int needed(void) { return 1; }", needed, f"-Wl,-soname,{library}")
    real = json.dumps(str(candle_py._native.__file__))
    module = site / "candle_py_cuda" / "_native.abi3.so"
    compile_c(_HANDING_ON % real, module, "-Wl,--no-as-needed", "-x", "none", str(needed))
    return needed


def report(site: Path) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    run = subprocess.run(
        [sys.executable, "-c", _REPORT], capture_output=True, text=True, env=environment, cwd=site, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_without_a_cuda_build_the_module_is_the_cpus(site: Path) -> None:
    shutil.rmtree(site / "candle_py_cuda")
    module, failure, loaded = report(site)
    assert (module, failure) == ("candle_py._native", None)
    assert loaded == ["DeviceError", "this build has no CUDA support: `cuda`"]


@pytest.mark.parametrize("folder", ["cu13", "cublas"])
def test_a_cuda_build_is_taken_with_a_library_from_nvidias_packages(site: Path, tmp_path: Path, folder: str) -> None:
    needed = make_build(site, tmp_path, "libcublas.so.13")
    packaged = site / "nvidia" / folder / "lib" / needed.name
    packaged.parent.mkdir(parents=True)
    needed.rename(packaged)
    module, failure, _ = report(site)
    assert (module, failure) == ("candle_py_cuda._native", None)


def test_a_cuda_build_without_its_library_names_library_and_package(site: Path, tmp_path: Path) -> None:
    make_build(site, tmp_path, "libcublasLt.so.13")
    module, failure, loaded = report(site)
    assert module == "candle_py._native"
    assert failure[0] == "candle-py-cuda cannot be loaded, since a library of CUDA is not there: `libcublasLt.so.13`"
    assert "nvidia-cublas" in failure[1]
    assert loaded == ["DeviceError", failure[0]], "asking for the device tells the same"


def test_a_damaged_library_is_as_good_as_none(site: Path, tmp_path: Path) -> None:
    make_build(site, tmp_path, "libcurand.so.10")
    damaged = site / "nvidia" / "cu13" / "lib" / "libcurand.so.10"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"\x7fELF, cut short")
    module, failure, _ = report(site)
    assert module == "candle_py._native"
    assert "`libcurand.so.10`" in failure[0]


def test_a_cuda_build_without_a_driver_names_the_driver(site: Path, tmp_path: Path) -> None:
    if (Path("/proc/driver/nvidia")).exists():
        pytest.skip("this machine has an NVIDIA driver")
    make_build(site, tmp_path, "libcuda.so.1")
    module, failure, _ = report(site)
    assert module == "candle_py._native"
    assert failure[0] == "candle-py-cuda cannot be loaded, since the NVIDIA driver is not there: `libcuda.so.1`"
    assert "install the driver" in failure[1]


def test_what_the_dynamic_linker_says_otherwise_is_told_as_it_is(site: Path) -> None:
    compile_c("int nothing;", site / "candle_py_cuda" / "_native.abi3.so")
    module, failure, _ = report(site)
    assert module == "candle_py._native"
    assert "PyInit__native" in failure[0]


def test_a_cuda_build_of_another_version_is_not_taken(site: Path, tmp_path: Path) -> None:
    needed = make_build(site, tmp_path, "libcudart.so.13")
    packaged = site / "nvidia" / "cu13" / "lib" / needed.name
    packaged.parent.mkdir(parents=True)
    needed.rename(packaged)
    metadata = site / "candle_py-9.9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: candle-py\nVersion: 9.9.9\n")
    module, failure, _ = report(site)
    assert module == "candle_py._native"
    assert failure[0].startswith("candle-py-cuda is of another version than candle-py 9.9.9")


def test_a_cpu_build_says_that_it_has_no_nccl() -> None:
    if candle_py.capabilities()["nccl"]:
        pytest.skip("this is a build with NCCL")
    control = candle_py.TcpCommunicator(0, 1, [], "secret", 10)
    for ask in (candle_py.nccl_unique_id, lambda: candle_py.NcclCommunicator(control)):
        with pytest.raises(candle_py.DeviceError, match="this build has no NCCL: `CPU build`"):
            ask()
