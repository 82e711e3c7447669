"""Before the journey: what this machine and this installation are, gathered for `jobs.doctor`. Judges nothing.

Every gatherer answers on any machine: what cannot be found is None or empty, never an exception. Ray is not imported
(its version is read from its metadata); the engine is, because only a loaded engine knows which path it takes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jobs.verbs import PROGRAM
from workers.resources.devices import CudaFacts, probe_cuda
from workers.resources.limits import CgroupLimits, cores_in_affinity, memory_limit_bytes, read_cgroup_limits

OWN_NAMES = ("jobs", "workers", "sharding")
"""Top-level packages of this distribution."""

VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_ENDPOINT_URL",
    "AWS_REGION",
    "CANDELABRA_FAILPOINTS",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "HF_TOKEN",
    "PYTHONPATH",
    "RAY_ADDRESS",
)
"""Environment variables that change what a job does. Secrets among them are noted as set, never kept."""

_SECRET = frozenset({"AWS_ACCESS_KEY_ID", "HF_TOKEN"})


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the installed engine says of itself."""

    version: str
    candle_version: str
    cpu: str
    cpu_bfloat16: str
    cpu_int8: str
    cuda: bool
    nccl: bool
    threads_default: int
    cuda_failure: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """One machine, one installation, one working directory.

    Attributes:
        cores: Logical cores of the machine.
        affinity: Logical cores that this process may run on.
        memory_bytes: Memory that this process may fill.
        shm_bytes: Size of `/dev/shm`, or None where there is none.
        temp_free_bytes: Free space in the folder for temporary files.
        engine: None when it cannot be imported; `engine_failure` says why.
        owners: Top-level name -> distributions that install it.
        homes: Top-level name -> folder it would be imported from.
        shadows: Folders of the working directory that bear one of our names and are not ours.
        shell: Name of the login shell.
        program_on_path: Where `candelabra` is found on PATH.
        environment: The variables of `VARIABLES` that are set; the value of a secret is `(set)`.
    """

    system: str = "Linux"
    machine: str = "x86_64"
    python: str = "3.11"
    cpu_model: str = "unknown"
    cpu_flags: frozenset[str] = frozenset()
    cores: int = 1
    affinity: int = 1
    limits: CgroupLimits = field(default_factory=CgroupLimits)
    memory_bytes: int = 0
    shm_bytes: int | None = None
    temp_dir: str = "/tmp"
    temp_free_bytes: int = 0
    engine: EngineFacts | None = None
    engine_failure: str | None = None
    cuda: CudaFacts = field(default_factory=CudaFacts)
    version: str | None = None
    ray: str | None = None
    owners: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    homes: Mapping[str, str] = field(default_factory=dict)
    shadows: tuple[str, ...] = ()
    shell: str | None = None
    program_on_path: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def gather_facts(directory: Path | None = None) -> Facts:
    """Look at this machine.

    Args:
        directory: Working directory to look at for folders of our names; the current one when None.
    """
    limits = read_cgroup_limits()
    model, flags = _cpu()
    engine, failure = _engine()
    homes = _homes()
    temp_dir = tempfile.gettempdir()
    return Facts(
        system=platform.system(),
        machine=platform.machine(),
        python=platform.python_version(),
        cpu_model=model,
        cpu_flags=flags,
        cores=os.cpu_count() or 1,
        affinity=cores_in_affinity(),
        limits=limits,
        memory_bytes=memory_limit_bytes(limits=limits),
        shm_bytes=_size(Path("/dev/shm")),
        temp_dir=temp_dir,
        temp_free_bytes=shutil.disk_usage(temp_dir).free,
        engine=engine,
        engine_failure=failure,
        cuda=probe_cuda(),
        version=_version(PROGRAM),
        ray=_version("ray"),
        owners=_owners(),
        homes=homes,
        shadows=_shadows(directory or Path.cwd(), homes),
        shell=Path(os.environ.get("SHELL", "")).name or None,
        program_on_path=shutil.which(PROGRAM),
        environment={
            name: "(set)" if name in _SECRET else os.environ[name] for name in VARIABLES if os.environ.get(name)
        },
    )


def _cpu() -> tuple[str, frozenset[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    first: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        first[name.strip()] = value.strip()
    flags = first.get("flags") or first.get("Features") or ""
    return first.get("model name") or platform.machine(), frozenset(flags.split())


def _engine() -> tuple[EngineFacts | None, str | None]:
    try:
        from workers.engine.candle import capabilities

        said = capabilities()
    except (ImportError, OSError) as error:
        return None, str(error)
    return EngineFacts(
        version=str(said["version"]),
        candle_version=str(said["candle_version"]),
        cpu=str(said["cpu"]),
        cpu_bfloat16=str(said["cpu_bfloat16"]),
        cpu_int8=str(said["cpu_int8"]),
        cuda=bool(said["cuda"]),
        nccl=bool(said["nccl"]),
        threads_default=int(str(said["threads_default"])),
        cuda_failure=said["cuda_failure"],
    ), None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _owners() -> dict[str, tuple[str, ...]]:
    known = importlib.metadata.packages_distributions()
    return {name: tuple(sorted(set(known.get(name, ())))) for name in OWN_NAMES}


def _homes() -> dict[str, str]:
    """Folder of each of our packages as an import in this process finds it."""
    homes = {}
    for name in OWN_NAMES:
        module = sys.modules.get(name)
        spec = importlib.util.find_spec(name) if module is None else module.__spec__
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        homes[name] = str(Path(places[0]).resolve()) if places else ""
    return homes


def _shadows(directory: Path, homes: Mapping[str, str]) -> tuple[str, ...]:
    found = [name for name in OWN_NAMES if (directory / name).is_dir() or (directory / f"{name}.py").is_file()]
    return tuple(name for name in found if str((directory / name).resolve()) != homes[name])


def _size(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return None
