"""The whole job, top to bottom: prepare, lease, recover, start workers, plan, dispatch, commit, seal, report.

The plan is written when there are workers for it, so a job that is refused leaves nothing behind. The driver is the
only one who commits. Workers publish attempts; the first receipt of a shard wins; what a dead or late worker leaves
behind has no receipt and never counts.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from jobs.backend import Backend
from jobs.dispatch import Dispatcher
from jobs.errors import ExitCode
from jobs.interrupts import Interrupts
from jobs.keeper import LEASE_TIMEOUT_S, LeaseKeeper
from jobs.prepare import PreparedJob, prepare_job
from jobs.progress import ProgressListener
from jobs.refusal import absent_folders, leaving_no_trace
from jobs.report import JobReport, Run, build_report
from jobs.run import ShardRunner, Todo
from jobs.sample import check_sample
from jobs.spec import JobSpec
from jobs.split import rank_bytes
from sharding import layout
from sharding.commit import promote_pending, read_receipts, remove_orphans, seal_job
from sharding.failpoints import failpoint
from sharding.lease import Lease
from sharding.manifest import ShardReceipt
from sharding.plan import ShardPlan
from sharding.plan_file import check_drift, check_empty, read_plan, write_plan
from sharding.storage import Storage

_log = logging.getLogger(__name__)


def run_job(
    spec: JobSpec,
    *,
    backend: Literal["ray", "local"] | None = None,
    retry_failed: bool = False,
    on_progress: ProgressListener | None = None,
) -> JobReport:
    """Run a job, or go on with one that was interrupted: the same spec on the same output resumes.

    Args:
        spec: The job.
        backend: Overrides `spec.backend`.
        retry_failed: Compute the rows that have an error again, instead of only what is missing.
        on_progress: Called about once a second.

    Returns:
        What became of it; `exit_code` says it in one number.

    Raises:
        StopJob: The job cannot go on; see `jobs.errors` for the kinds.
    """
    if backend is not None:
        spec = spec.model_copy(update={"backend": backend})
    prepared = prepare_job(spec)
    output = prepared.output
    if prepared.on_disk is None:
        check_empty(output)
        check_sample(prepared)
    absent = absent_folders(output)
    with (
        Interrupts() as interrupts,
        LeaseKeeper(Lease.acquire(output, owner=spec.name, timeout_s=LEASE_TIMEOUT_S)) as keeper,
        leaving_no_trace(output, keeper, absent),
    ):
        plan = _agreed_plan(output, prepared)
        receipts = read_receipts(output, plan_digest=plan.digest)
        promote_pending(output, receipts)
        remove_orphans(output, receipts)
        todo = _todo(plan, receipts, retry_failed=retry_failed)
        dispatcher = Dispatcher(
            [(shard, plan.shards[shard].rows) for shard in todo], max_attempts=spec.workers.max_attempts
        )
        run = Run()
        if todo:
            runner = ShardRunner(
                spec.name,
                output,
                plan,
                receipts,
                todo,
                dispatcher,
                keeper=keeper,
                interrupts=interrupts,
                on_progress=on_progress,
            )
            run = runner.run(_make_backend(spec, prepared), lambda: _begin(output, plan))
        report = build_report(
            plan,
            output.uri,
            receipts,
            dispatcher.failed.values(),
            max_row_error_rate=spec.errors.max_row_error_rate,
            run=run,
        )
        return _finish(output, plan, receipts, report, keeper, spec.errors.max_row_error_rate)


def _agreed_plan(output: Storage, prepared: PreparedJob) -> ShardPlan:
    """The plan on disk; where there is none, the one that `_begin` writes."""
    known = prepared.on_disk
    on_disk = known if known is not None and output.exists(layout.PLAN) else read_plan(output)
    if on_disk is None:
        return prepared.plan
    check_drift(on_disk, prepared.plan)
    return on_disk


def _begin(output: Storage, plan: ShardPlan) -> None:
    """There are workers: from now on the output holds a job that is not complete."""
    failpoint("plan.before")
    if not output.exists(layout.PLAN):
        check_drift(write_plan(output, plan), plan)
    failpoint("plan.after")
    output.delete(layout.SUCCESS)


def _todo(plan: ShardPlan, receipts: Mapping[int, ShardReceipt], *, retry_failed: bool) -> dict[int, Todo]:
    """What has to be computed: every shard without a receipt and, when asked, those with bad rows."""
    todo: dict[int, Todo] = {}
    for shard in plan.shards:
        receipt = receipts.get(shard.index)
        if receipt is None:
            todo[shard.index] = Todo(generation=0, repair_part=None)
        elif retry_failed and receipt.row_errors:
            todo[shard.index] = Todo(generation=receipt.generation + 1, repair_part=receipt.part)
    return todo


def _make_backend(spec: JobSpec, prepared: PreparedJob) -> Backend:
    workers = spec.workers
    threads = None if workers.cpus == "auto" else workers.cpus
    if spec.backend == "local":
        from jobs.local import LocalBackend

        return LocalBackend(replace(prepared.worker_config, threads=threads))
    os.environ.setdefault(
        "RAY_USAGE_STATS_ENABLED", "0"
    )  # read when Ray is imported: nothing leaves the machine unasked
    from jobs.cluster import RayBackend

    return RayBackend(
        prepared.worker_config,
        address=spec.ray.address,
        replicas=None if workers.replicas == "auto" else workers.replicas,
        cpus=threads,
        gpus=None if workers.gpus == "auto" else workers.gpus,
        ranks=spec.model.tensor_parallel,
        rank_bytes=rank_bytes(spec, prepared.model.path, prepared.info, prepared.worker_config),
        rank_timeout_s=workers.rank_timeout_s,
        placement_timeout_s=spec.ray.placement_timeout_s,
    )


def _finish(
    output: Storage,
    plan: ShardPlan,
    receipts: Mapping[int, ShardReceipt],
    report: JobReport,
    keeper: LeaseKeeper,
    max_row_error_rate: float,
) -> JobReport:
    keeper.check_now()
    if report.exit_code == ExitCode.COMPLETE:
        seal_job(output, plan, receipts, max_row_error_rate=max_row_error_rate)
    else:
        output.delete(layout.SUCCESS)  # sealed under a looser limit before
    output.write_bytes(layout.REPORT, json.dumps(report.to_dict(), indent=2).encode())
    output.delete(layout.PROGRESS)
    return report
