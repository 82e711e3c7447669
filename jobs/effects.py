"""Settings of a spec that change nothing: told before a job starts, never refused. Looks at no data and no model.

What certainly is a mistake (beams that should sample, several greedy texts of one prompt) is refused by
`jobs.spec_task` and `workers.generation.sampling`; here is what somebody may have left in a spec on purpose.
"""

from __future__ import annotations

from jobs.spec import JobSpec, RaySpec, WorkersSpec
from workers.config import Sampling

_SAMPLING_OFF = {"top_k": 0, "top_p": 1, "min_p": 0, "seed": 0}


def settings_without_effect(spec: JobSpec, sampling: Sampling | None = None) -> list[str]:
    """A line for each setting that the spec gives and nothing obeys.

    Args:
        spec: The job.
        sampling: What was decided of `auto`; without it only what the spec alone makes certain is told.
    """
    found = _of_batch(spec) + _of_ranks(spec) + _of_backend(spec)
    if spec.task.kind != "generate":
        return found
    asked = spec.task.generation
    beams = asked.beams if sampling is None else sampling.beams
    temperature = asked.temperature if sampling is None else sampling.temperature
    searches = beams != "auto" and beams > 1
    if searches or temperature == 0:
        reason = "beam search never samples" if searches else "at temperature 0 nothing is sampled"
        for name, off in _SAMPLING_OFF.items():
            value = getattr(asked, name)
            if value not in ("auto", off):
                found.append(f"task.generation.{name} {value:g} has no effect: {reason}")
    if beams == 1 and asked.length_penalty not in ("auto", 1):
        found.append(f"task.generation.length_penalty {asked.length_penalty:g} has no effect without beams")
    if spec.task.json_schema is not None and asked.min_new_tokens not in ("auto", 0):
        found.append(
            f"task.generation.min_new_tokens {asked.min_new_tokens} makes no JSON longer: a text ends where it is whole"
        )
    return found


def _of_ranks(spec: JobSpec) -> list[str]:
    if spec.model.tensor_parallel > 1:
        return []
    given = {
        "workers.rank_timeout_s": (spec.workers.rank_timeout_s, WorkersSpec.model_fields["rank_timeout_s"].default),
        "ray.placement_timeout_s": (spec.ray.placement_timeout_s, RaySpec.model_fields["placement_timeout_s"].default),
    }
    reason = "it belongs to `model.tensor_parallel` above 1"
    return [f"{name} {value:g} has no effect: {reason}" for name, (value, default) in given.items() if value != default]


def _of_backend(spec: JobSpec) -> list[str]:
    if spec.backend != "local":
        return []
    workers = spec.workers
    given = {
        "workers.replicas": workers.replicas if workers.replicas != 1 else "auto",
        "workers.gpus": workers.gpus,
        "ray.address": spec.ray.address or "auto",
    }
    reason = "`backend: local` is one worker in this process"
    return [f"{name} {value} has no effect: {reason}" for name, value in given.items() if value != "auto"]


def _of_batch(spec: JobSpec) -> list[str]:
    kind, batch = spec.task.kind, spec.batch
    given = {"rows": batch.rows, "cache_bytes": batch.cache_bytes} if kind != "generate" else {}
    return [
        f"batch.{name} {value} has no effect: it belongs to `kind: generate`"
        for name, value in given.items()
        if value != "auto"
    ]
