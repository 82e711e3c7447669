"""Before anything starts: what spec, sources and model files say becomes a plan and the workers' settings.

Every `auto` is decided here, and everything that can be found wrong without computing is found here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from jobs.batching import decide_batching
from jobs.identity import make_identity
from jobs.prepare_input import check_dimensions, decide_columns, main_column, prepare_input
from jobs.spec import JobSpec
from jobs.split import check_tensor_parallel
from jobs.weight_bytes import check_dtype
from sharding.errors import InfrastructureError, InputError
from sharding.plan import ShardPlan, make_plan, plan_shards
from sharding.plan_file import read_plan
from sharding.source import SourceListing
from sharding.storage import Storage
from workers.config import DeviceKind, ModelConfig, TaskConfig, WorkerConfig
from workers.engine.base import EngineInfo
from workers.engine.fake import is_fake
from workers.engine.load import inspect_model
from workers.model.resolve import ModelLocation, resolve_model
from workers.resources.devices import cuda_obstacle, probe_cuda
from workers.results import result_fields

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job that could start: nothing about it is left to decide.

    Attributes:
        plan: As it would be made now.
        on_disk: The plan that the output holds already, or None.
    """

    spec: JobSpec
    output: Storage
    listing: SourceListing
    model: ModelLocation
    info: EngineInfo
    plan: ShardPlan
    worker_config: WorkerConfig
    on_disk: ShardPlan | None


def prepare_job(spec: JobSpec) -> PreparedJob:
    """Make the plan of a job.

    Raises:
        InputError: Columns, templates, model or output do not fit together.
        NotFoundError: An input or the model is not there.
        InfrastructureError: The device asked for is not there.
    """
    ahead = prepare_input(spec)
    output, listing = ahead.output, ahead.listing
    check_dtype(spec.model.dtype, spec.model.device)
    device = _decide_device(spec)
    check_dtype(spec.model.dtype, device)
    model = _resolve(spec)
    likelihood = spec.task.by_likelihood
    info = inspect_model(model.source, model.path, spec.task.kind, spec.task.pooling, by_likelihood=likelihood)
    check_tensor_parallel(spec, model.path)
    task, notes = _decide_task(spec, model, info)
    on_disk = read_plan(output)
    if likelihood:
        from jobs.prepare_decoder import check_decoder, decide_decoder

        decoder, said = decide_decoder(spec, model, info, on_disk.identity if on_disk else {})
        task = replace(task, decoder=decoder, width=len(decoder.labels) or info.width)
        notes += said + check_decoder(model, task, info)
    for note in notes:
        _log.info("%s", note)
    columns = decide_columns(spec, listing.schema, result_fields(task, main_column(spec)))
    shards = plan_shards(listing.files, target_rows=spec.sharding.target_rows, target_bytes=spec.sharding.target_bytes)
    source = str(model.path) if Path(model.source).expanduser().exists() else model.source
    model_config = ModelConfig(
        source, model.revision, model.digest, info.dtype if spec.model.dtype == "auto" else spec.model.dtype, device
    )
    plan = make_plan(
        job=spec.name,
        identity=make_identity(spec, task, model_config, columns.schema),
        input_schema=listing.schema,
        output_schema=columns.schema,
        files=listing.files,
        shards=shards,
        notes=notes,
    )
    sampling = None if task.decoder is None else task.decoder.sampling
    batching = decide_batching(spec.batch, 1 if sampling is None else sampling.beams)
    worker_config = WorkerConfig(
        task=task,
        model=model_config,
        output_uri=output.uri,
        columns=columns.passed,
        output_schema=columns.schema,
        result_columns=columns.results,
        threads=None,
        budget_tokens=batching.budget_tokens,
        step_tokens=batching.step_tokens,
        generate_rows=batching.generate_rows,
        cache_bytes=batching.cache_bytes,
    )
    return PreparedJob(spec, output, listing, model, info, plan, worker_config, on_disk)


def _resolve(spec: JobSpec) -> ModelLocation:
    if is_fake(spec.model.source):
        return ModelLocation(Path(), spec.model.source, None, spec.model.source)
    return resolve_model(spec.model.source, spec.model.revision)


def _decide_task(spec: JobSpec, model: ModelLocation, info: EngineInfo) -> tuple[TaskConfig, list[str]]:
    asked = spec.task
    pooling = info.pooling if asked.kind == "embed" else None
    if asked.kind == "embed" and pooling is None:
        raise InputError(
            f"the model's files do not say how tokens become one vector: `{model.source}`",
            hint="set task.pooling to what the model was trained with: cls, mean, last, ...",
        )
    check_dimensions(spec, info.width)
    requested = None if asked.max_tokens == "auto" else asked.max_tokens
    if is_fake(model.source):
        prompt = "" if asked.prompt in ("auto", "none") else asked.prompt
        max_tokens, notes = min(requested or info.max_positions, info.max_positions - (asked.kind == "generate")), []
    else:
        from workers.model.files import choose_prompt, read_model_files

        files = read_model_files(model.path)
        limit = files.limit_tokens(requested)
        choice = choose_prompt(files, asked.prompt)
        new_tokens = 1 if asked.kind == "generate" else 0  # at least, after the prompt
        prompt, max_tokens = choice.text, min(limit.max_tokens, info.max_positions - new_tokens)
        notes = [f"max_tokens {max_tokens}: {limit.rule}"]
        if asked.by_likelihood:
            prompt = ""
        else:
            notes.append(f"prompt {prompt!r}: {choice.rule}")
    task = TaskConfig(
        kind=asked.kind,
        text=asked.text or "",
        query=asked.query,
        activation=asked.activation,
        prompt=prompt,
        include_prompt=info.include_prompt,
        pooling=pooling,
        normalize=info.normalize if asked.normalize == "auto" else asked.normalize,
        dimensions=asked.dimensions,
        width=asked.dimensions or info.width,
        max_tokens=max_tokens,
        max_tokens_by="task.max_tokens" if max_tokens == requested else "the model's context",
        truncate=asked.truncate,
    )
    return task, notes


def _decide_device(spec: JobSpec) -> DeviceKind:
    """`auto` takes a GPU where build and machine have one; `cuda` insists.

    Raises:
        InfrastructureError: CUDA was asked for, and build, driver or device is missing.
    """
    if spec.model.device == "cpu" or is_fake(spec.model.source):
        return "cpu"
    from workers.engine.candle import capabilities

    engine = capabilities()
    obstacle = cuda_obstacle(bool(engine["cuda"]), probe_cuda(), engine["cuda_failure"])
    if obstacle is None:
        return "cuda"
    if spec.model.device == "auto":
        return "cpu"
    message, hint = obstacle
    raise InfrastructureError(f"{message}: `model.device: cuda`", hint=hint)
