"""`plan`: what looks wrong or wasted and is no error, as far as spec, input and output tell it. Writes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from jobs.effects import settings_without_effect
from jobs.spec import JobSpec
from jobs.split import place_here
from sharding.errors import DriftError, InfrastructureError
from sharding.plan import ShardPlan
from sharding.plan_file import check_drift
from workers.config import DeviceKind, Sampling


def input_hazards(
    spec: JobSpec, schema: pa.Schema, rows: int, results: Sequence[str], sampling: Sampling | None
) -> list[str]:
    """What spec and input tell.

    Args:
        spec: The job.
        schema: Of the input.
        rows: Of the input.
        results: Names of the result columns.
        sampling: What was decided of `auto`, where it was.
    """
    found = ["the input has no rows: the output will be one empty part with the full schema"] if rows == 0 else []
    found += settings_without_effect(spec, sampling)
    overwritten = [name for name in schema.names if name in results]
    if overwritten and spec.input.columns is None:
        found.append(f"results overwrite input columns: {', '.join(overwritten)}")
    return found


def room_hazards(spec: JobSpec, device: DeviceKind, rank_bytes: int) -> list[str]:
    """Whether this machine has room for the job, where that is known and the job runs on Ray."""
    try:
        if spec.backend == "ray":
            place_here(spec, device, rank_bytes)
    except InfrastructureError as error:
        return [no_room(error)]
    return []


def no_room(error: InfrastructureError) -> str:
    """That there is not for the job."""
    return f"on this machine submit would end with exit 5: {error}"


def plan_hazards(on_disk: ShardPlan | None, wanted: ShardPlan) -> list[str]:
    """What submit would make of the plan that the output holds, if it holds one."""
    if on_disk is None:
        return []
    try:
        check_drift(on_disk, wanted)
    except DriftError as error:
        return [f"the output already holds a plan, submit would end with exit 3: {error}"]
    return ["the output already holds this job's plan: submit would go on with it"]
