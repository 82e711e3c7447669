"""Before a replica starts: which NVIDIA driver, devices and libraries this machine has. Allocates nothing on a device.

Three things must come together for CUDA, and each can be missing alone: a build of the engine for CUDA, the driver
(kernel module and `libcuda.so.1`), and a device that this process may see. `cuda_obstacle` says which.

Source: CUDA Driver API, `cuInit`, `cuDriverGetVersion`, `cuDeviceGetCount` and their result codes; NCCL API,
`ncclGetVersion`.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.resources.visible import parse_visible

_LIBRARY = "libcuda.so.1"
_RESULTS = {
    3: "the driver is not initialised",
    35: "the driver is older than this library",
    100: "no device",
    101: "no such device",
    802: "the system is not ready (fabric manager?)",
    803: "driver and library do not match",
    804: "forward compatibility is not supported on this device",
    999: "unknown error",
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device as the driver shows it to this process.

    Attributes:
        capability: Compute capability, such as `9.0`.
    """

    name: str
    memory_bytes: int
    capability: str


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """What was found of CUDA on this machine.

    Attributes:
        module: Version of the loaded kernel module, or None.
        boards: Devices that the kernel module lists, visible to this process or not.
        library: CUDA version that the driver library offers, such as `13.0`, or None when it cannot be loaded.
        failure: Why the driver library could not list its devices, or None.
        gpus: Devices that this process sees.
        visible: `CUDA_VISIBLE_DEVICES` as it is set, or None.
        nccl: Version of the NCCL library, or None.
    """

    module: str | None = None
    boards: int = 0
    library: str | None = None
    failure: str | None = None
    gpus: tuple[Gpu, ...] = ()
    visible: str | None = None
    nccl: str | None = None


def probe_cuda(
    proc: Path = Path("/proc/driver/nvidia"), load: Callable[[str], Any] = ctypes.CDLL, visible: str | None = None
) -> CudaFacts:
    """Ask the kernel and the driver library what there is. Never raises; takes a moment where there is a GPU.

    Args:
        proc: Folder of the kernel module.
        load: Opens a shared library by name, raising OSError when it is not there.
        visible: Value of `CUDA_VISIBLE_DEVICES`; read from the environment when None.
    """
    library, failure, gpus = _ask_driver(load)
    return CudaFacts(
        module=_module_version(proc),
        boards=_count_boards(proc),
        library=library,
        failure=failure,
        gpus=gpus,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible,
        nccl=_nccl_version(load),
    )


def cuda_obstacle(
    built_with_cuda: bool, facts: CudaFacts, failure: tuple[str, str] | None = None
) -> tuple[str, str] | None:
    """What keeps this process from computing on a GPU: a message and a hint, or None when nothing does.

    Args:
        built_with_cuda: The engine in use is a CUDA build.
        facts: The machine.
        failure: Why a CUDA build that is installed is not in use.
    """
    if not built_with_cuda and failure is None:
        there = "; this machine has a GPU" if facts.gpus or facts.boards else ""
        return (
            f"the installed engine is built for the CPU only{there}",
            "set `model.device: cpu`, or install candle-py-cuda (docs/gpu.md)",
        )
    if facts.library is None:
        missing = "the NVIDIA driver is not loaded" if facts.module is None else f"`{_LIBRARY}` cannot be loaded"
        return (
            f"the engine is built for CUDA, but {missing}",
            "install the NVIDIA driver, or start the container with its devices and libraries (`--gpus all`)",
        )
    if failure is not None:
        return failure
    if facts.gpus:
        return None
    if facts.visible is not None and facts.boards:
        fault = parse_visible(facts.visible).fault
        return (
            f"the driver is there, but `CUDA_VISIBLE_DEVICES` hides every device: `{facts.visible}`",
            ("" if fault is None else f"an entry is {fault}; ")
            + "unset it, or give the indexes or UUIDs that `nvidia-smi -L` prints",
        )
    return (
        f"the driver is there, but shows no device: `{facts.failure or 'none listed'}`",
        "look at `nvidia-smi`; in a container, start it with its devices (`--gpus all`)",
    )


def hidden_devices(facts: CudaFacts) -> str | None:
    """What of `CUDA_VISIBLE_DEVICES` this process does not see although it is named; None where it sees all of it."""
    if facts.visible is None or not facts.gpus:
        return None
    visible = parse_visible(facts.visible)
    if visible.fault is not None:
        return f"`CUDA_VISIBLE_DEVICES` is read up to an entry that is {visible.fault}"
    if len(facts.gpus) < len(visible.ids):
        missing = visible.ids[len(facts.gpus)]
        return (
            f"`CUDA_VISIBLE_DEVICES` names {len(visible.ids)} devices, of which the driver shows {len(facts.gpus)}; "
            f"the first that it does not know: `{missing}`"
        )
    return None


def _ask_driver(load: Callable[[str], Any]) -> tuple[str | None, str | None, tuple[Gpu, ...]]:
    try:
        cuda = load(_LIBRARY)
    except OSError as error:
        return None, str(error), ()
    version = ctypes.c_int(0)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    offers = f"{version.value // 1000}.{version.value % 1000 // 10}"
    count = ctypes.c_int(0)
    for result in (cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(count))):
        if result:
            return offers, _RESULTS.get(result, f"error {result}"), ()
    return offers, None, tuple(_describe(cuda, ordinal) for ordinal in range(count.value))


def _describe(cuda: Any, ordinal: int) -> Gpu:
    device, size = ctypes.c_int(0), ctypes.c_size_t(0)
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # ..._MINOR
    return Gpu(name.value.decode(errors="replace"), size.value, f"{major.value}.{minor.value}")


def _module_version(proc: Path) -> str | None:
    try:
        text = (proc / "version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else None


def _count_boards(proc: Path) -> int:
    try:
        return sum(1 for _ in (proc / "gpus").iterdir())
    except OSError:
        return 0


def _nccl_version(load: Callable[[str], Any]) -> str | None:
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        nccl = load("libnccl.so.2")
    except OSError:
        return None
    version = ctypes.c_int(0)
    if nccl.ncclGetVersion(ctypes.byref(version)):
        return None
    code = version.value  # 2.9 and later: major * 10000 + minor * 100 + patch; before: major * 1000
    major = 10_000 if code >= 20_000 else 1_000
    return f"{code // major}.{code % major // 100}.{code % 100}"
