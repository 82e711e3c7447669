"""Before the native module is imported: puts the CUDA build in its place, where that is installed and loads.

`candle-py` holds the module for CPUs, `candle-py-cuda` the same module built with CUDA and NCCL, which computes on
CPUs, too. The CUDA build is linked to libraries of CUDA that come as packages of their own (`nvidia-cublas` and more),
whose folders the dynamic linker does not search: what it misses is loaded from there, by the name that it asks for.
The driver's library is not among them. Asks no device for anything.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

from candle_py.errors import DeviceError

_PACKAGE = "candle_py_cuda"
_NCCL = "libnccl.so.2"
_DRIVER = "libcuda.so.1"
_MISSING = re.compile(r"(lib[\w+-]+)\.so\.(\d+)\S*: cannot open shared object file")
_SOURCES = {
    "libcublas": "nvidia-cublas",
    "libcublasLt": "nvidia-cublas",
    "libcudart": "nvidia-cuda-runtime",
    "libcurand": "nvidia-curand",
    "libnvrtc": "nvidia-cuda-nvrtc",
}
"""Packages of the libraries, for CUDA 13; for CUDA 12 their names end in `-cu12`."""


def cuda_failure() -> DeviceError | None:
    """Tell why the CUDA build is not in use although it is installed; None where it is in use or not installed."""
    return _failure


def _take() -> DeviceError | None:
    """Put the CUDA build in place of the CPU's module, or say why it cannot be used."""
    if importlib.util.find_spec(_PACKAGE) is None:
        return None
    tried: set[str] = set()
    while True:
        try:
            module = importlib.import_module(f"{_PACKAGE}._native")
            break
        except ImportError as error:
            found = _MISSING.match(str(error))
            library = f"{found[1]}.so.{found[2]}" if found else ""
            if found is None or library in tried or not _preload(library):
                return _explained(str(error), library, found[1] if found else "")
            tried.add(library)
    ours, theirs = importlib.metadata.version("candle-py"), module.capabilities()["version"]
    if ours != theirs:
        return DeviceError(
            f"candle-py-cuda is of another version than candle-py {ours}: `{theirs}`", "install both of one version"
        )
    _preload(_NCCL)  # opened by this name when it is asked for, and missed then
    sys.modules["candle_py._native"] = module
    return None


def _preload(library: str) -> bool:
    """Load a library from NVIDIA's packages, so that the dynamic linker has it; False where none of them holds it."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        for path in sorted(Path(folder).glob(f"*/lib/{library}")):
            try:
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue
            return True
    return False


def _explained(said: str, library: str, stem: str) -> DeviceError:
    if library == _DRIVER:
        return DeviceError(
            f"candle-py-cuda cannot be loaded, since the NVIDIA driver is not there: `{library}`",
            "install the driver, or start the container with its devices and libraries (`--gpus all`)",
        )
    if stem in _SOURCES:
        return DeviceError(
            f"candle-py-cuda cannot be loaded, since a library of CUDA is not there: `{library}`",
            "install candelabra[cuda13] (or [cuda12] for a build with CUDA 12); the library is in "
            f"{_SOURCES[stem]} or {_SOURCES[stem]}-cu12",
        )
    return DeviceError(
        f"candle-py-cuda cannot be loaded: `{said}`",
        "the driver may be older than the CUDA that it was built with: compare `nvidia-smi`",
    )


_failure = _take()
