"""Before the journey: says in plain words what on this machine would get in a job's way. Changes nothing, runs no job.

Facts are gathered by `jobs.facts` and judged here, so that every judgement can be tested without such a machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from jobs.facts import OWN_NAMES, Facts, gather_facts
from jobs.shell import SHELLS, init_line
from jobs.verbs import PROGRAM
from sharding.words import counted
from workers.resources.devices import cuda_obstacle, hidden_devices
from workers.resources.limits import available_threads

Status = Literal["ok", "note", "problem"]

_MIB, _GIB = 1 << 20, 1 << 30
_SMALL_SHM_BYTES = 128 * _MIB  # Ray's store asks for 75 MiB at the least; containers get 64 MiB unless told otherwise
_SMALL_TEMP_BYTES = _GIB
_RC_FILES = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/config.fish"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        area: What it belongs to: cpu, memory, disk, engine, gpu, ray, names, shell, hub or store.
        status: `ok`; `note` (works, but worth knowing); `problem` (a job would fail or suffer).
        what: What is the case.
        hint: What to do, or None.
    """

    area: str
    status: Status
    what: str
    hint: str | None = None

    def to_dict(self) -> dict[str, str | None]:
        """As data."""
        return asdict(self)


def examine(facts: Facts | None = None) -> list[Finding]:
    """Judge a machine.

    Args:
        facts: This machine, gathered now, when None.
    """
    if facts is None:
        facts = gather_facts()
    parts = (_cpu, _memory, _disk, _engine, _gpu, _ray, _names, _shell, _hub, _store)
    return [finding for part in parts for finding in part(facts)]


def _cpu(facts: Facts) -> Iterable[Finding]:
    known = [name for name in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd") if name in facts.cpu_flags]
    yield Finding("cpu", "ok", f"{facts.cpu_model}, {facts.machine}: {' '.join(known) or 'no vector extension known'}")
    if facts.machine in ("x86_64", "AMD64") and facts.cpu_flags and not {"avx2", "fma"} <= facts.cpu_flags:
        yield Finding("cpu", "note", "this CPU has no AVX2: the engine takes its plain path, which is far slower")
    threads = available_threads(limits=facts.limits, affinity=facts.affinity)
    quota = facts.limits.cpu_quota
    if quota is not None and math.ceil(quota) < facts.affinity:
        yield Finding(
            "cpu",
            "note",
            f"the control group grants {counted(quota, 'CPU')} of {facts.affinity} visible ones; "
            "threads follow the grant",
            "raise the container's CPU limit if the job should have more",
        )
    elif facts.affinity < facts.cores:
        yield Finding("cpu", "note", f"this process may run on {facts.affinity} of {counted(facts.cores, 'core')}")
    else:
        yield Finding("cpu", "ok", f"{counted(facts.cores, 'core')}, all usable")
    if facts.engine is not None and facts.engine.threads_default > threads:
        yield Finding(
            "cpu",
            "problem",
            f"the engine would start {counted(facts.engine.threads_default, 'thread')} where {threads} can run",
            "set `workers.cpus` in the spec",
        )


def _memory(facts: Facts) -> Iterable[Finding]:
    bounded = " (the control group's limit)" if facts.limits.memory_bytes == facts.memory_bytes else ""
    yield Finding("memory", "ok", f"{_size(facts.memory_bytes)} usable{bounded}")
    if facts.shm_bytes is None:
        if facts.system == "Linux":
            yield Finding("memory", "note", "there is no /dev/shm; Ray puts its object store on disk")
    elif facts.shm_bytes < _SMALL_SHM_BYTES:
        yield Finding(
            "memory",
            "problem",
            f"/dev/shm is too small for Ray's object store: {_size(facts.shm_bytes)}",
            "docker: `--shm-size=1g`; Kubernetes: mount an `emptyDir` with `medium: Memory` at /dev/shm",
        )
    else:
        yield Finding("memory", "ok", f"/dev/shm has {_size(facts.shm_bytes)}")


def _disk(facts: Facts) -> Iterable[Finding]:
    what = f"{facts.temp_dir} has {_size(facts.temp_free_bytes)} free"
    if facts.temp_free_bytes < _SMALL_TEMP_BYTES:
        yield Finding("disk", "problem", what, "Ray's session and unfinished parts go there: free space, or set TMPDIR")
    else:
        yield Finding("disk", "ok", what)


def _engine(facts: Facts) -> Iterable[Finding]:
    engine = facts.engine
    if engine is None:
        yield Finding(
            "engine", "problem", f"candle_py cannot be imported: {facts.engine_failure}", "install the candle-py wheel"
        )
        return
    build = "CUDA build" if engine.cuda else "CPU build"
    path = f"CPU path {engine.cpu} (bfloat16: {engine.cpu_bfloat16}, int8: {engine.cpu_int8})"
    yield Finding("engine", "ok", f"candle-py {engine.version} (Candle {engine.candle_version}), {build}, {path}")
    if engine.cpu == "scalar" and {"avx2", "fma"} <= facts.cpu_flags:
        yield Finding(
            "engine", "problem", "the engine takes its plain path on a CPU that has AVX2", "reinstall candle-py"
        )
    if engine.cpu_bfloat16 != "amx" and "amx_bf16" in facts.cpu_flags:
        yield Finding("engine", "note", "this CPU has AMX, but the system does not let the engine use it for bfloat16")


def _gpu(facts: Facts) -> Iterable[Finding]:
    cuda = facts.cuda
    for gpu in cuda.gpus:
        yield Finding("gpu", "ok", f"{gpu.name}, {_size(gpu.memory_bytes)}, compute capability {gpu.capability}")
    if cuda.module or cuda.library:
        driver = f"NVIDIA driver {cuda.module or 'of unknown version'}, offers CUDA {cuda.library or 'nothing'}"
        yield Finding("gpu", "ok", driver)
    built = facts.engine is not None and facts.engine.cuda
    failure = None if facts.engine is None else facts.engine.cuda_failure
    on_gpu_machine = bool(cuda.gpus or cuda.boards)
    obstacle = cuda_obstacle(built, cuda, failure) if facts.engine is not None else None
    hidden = hidden_devices(cuda)
    if hidden is not None:
        yield Finding("gpu", "problem", hidden, "compare it with the indexes and UUIDs that `nvidia-smi -L` prints")
    if obstacle is not None and (built or failure is not None or on_gpu_machine):
        yield Finding("gpu", "problem", *obstacle)
    elif not on_gpu_machine:
        yield Finding("gpu", "ok", "no NVIDIA GPU; models run on the CPU")
    if built and on_gpu_machine:
        if cuda.nccl is None and facts.engine is not None and facts.engine.nccl:
            hint = "install candelabra[cuda13] or [cuda12], or the system's libnccl2"
            yield Finding("gpu", "problem", "the engine is built with NCCL, but libnccl.so.2 is not there", hint)
        elif cuda.nccl is not None:
            yield Finding("gpu", "ok", f"NCCL {cuda.nccl}")


def _ray(facts: Facts) -> Iterable[Finding]:
    if facts.ray is None:
        yield Finding("ray", "problem", "Ray is not installed", "install candelabra with its dependencies")
    else:
        yield Finding(
            "ray", "ok", f"Ray {facts.ray}, Python {facts.python}, candelabra {facts.version or 'from source'}"
        )
    if "RAY_ADDRESS" in facts.environment:
        address = facts.environment["RAY_ADDRESS"]
        yield Finding(
            "ray", "note", f"RAY_ADDRESS is set: `{address}`", "a spec's `ray.address` says which cluster is used"
        )


def _names(facts: Facts) -> Iterable[Finding]:
    quiet = True
    for name in OWN_NAMES:
        strangers = [owner for owner in facts.owners.get(name, ()) if owner != PROGRAM]
        if strangers:
            quiet = False
            yield Finding(
                "names",
                "problem",
                f"another package installs `{name}` as well: {', '.join(strangers)}",
                f"`pip uninstall {strangers[0]}`, or give candelabra an environment of its own",
            )
    parents = {name: str(Path(home).parent) for name, home in facts.homes.items() if home}
    for name in OWN_NAMES:
        if parents.get(name) != parents.get("jobs"):
            quiet = False
            yield Finding(
                "names",
                "problem",
                f"`{name}` would be imported from another place than `jobs`: {facts.homes.get(name) or 'nowhere'}",
                "look at PYTHONPATH, and at folders of that name in the working directory",
            )
    if facts.shadows:
        quiet = False
        yield Finding(
            "names",
            "note",
            f"the working directory has its own {', '.join(f'`{name}`' for name in facts.shadows)}",
            f"`{PROGRAM}` uses the installed package all the same; write `python -P -m jobs` for `python -m jobs`",
        )
    if quiet:
        yield Finding("names", "ok", f"{', '.join(OWN_NAMES)} are candelabra's own")


def _shell(facts: Facts) -> Iterable[Finding]:
    if facts.program_on_path is None:
        hint = "activate the environment, or call it by its path"
        yield Finding("shell", "note", f"`{PROGRAM}` is not on PATH", hint)
    shell = facts.shell if facts.shell in SHELLS else None
    hint = f"type `{PROGRAM}`"
    if shell is not None:
        hint += f", or put this into {_RC_FILES[shell]}: {init_line(shell)}"
    yield Finding("shell", "note", f"`jobs` typed in {shell or 'a shell'} is the shell's own builtin", hint)


def _hub(facts: Facts) -> Iterable[Finding]:
    env = facts.environment
    endpoint = env.get("HF_ENDPOINT")
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        yield Finding("hub", "problem", f"HF_ENDPOINT is not a URL: `{endpoint}`", "it begins with https://")
    elif endpoint is not None:
        yield Finding("hub", "note", f"models come from a mirror: `{endpoint}`")
    if env.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        yield Finding("hub", "note", "HF_HUB_OFFLINE is set: only models that are already here can be used")
    token = "a token is set" if "HF_TOKEN" in env else "no HF_TOKEN"
    cache = env.get("HF_HOME", "~/.cache/huggingface")
    yield Finding("hub", "ok", f"cache in {cache}; {token}")


def _store(facts: Facts) -> Iterable[Finding]:
    env = facts.environment
    endpoint = env.get("AWS_ENDPOINT_URL")
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        yield Finding("store", "problem", f"AWS_ENDPOINT_URL is not a URL: `{endpoint}`", "it begins with http(s)://")
    elif endpoint is not None:
        yield Finding("store", "note", f"s3:// goes to `{endpoint}`")
    keys = "keys from the environment" if "AWS_ACCESS_KEY_ID" in env else "no keys in the environment"
    yield Finding("store", "ok", f"s3: {keys}, region {env.get('AWS_REGION', 'not set')}")
    if "CANDELABRA_FAILPOINTS" in env:
        yield Finding(
            "store", "problem", "CANDELABRA_FAILPOINTS is set: jobs will crash on purpose", "unset it; it is for tests"
        )


def _size(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.1f} GiB" if size_bytes >= _GIB else f"{size_bytes / _MIB:.0f} MiB"
