"""Before anything starts: what spec, sources and model files say becomes a plan and the workers' settings.

Every `auto` is decided here, and everything that can be found wrong without computing is found here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pyarrow as pa

from jobs.identity import make_identity
from jobs.spec import JobSpec
from jobs.split import check_tensor_parallel
from sharding.errors import InfrastructureError, InputError
from sharding.find import finds
from sharding.layout import part_name
from sharding.plan import ShardPlan, make_plan, plan_shards
from sharding.plan_file import read_plan
from sharding.source import SourceListing, list_sources
from sharding.storage import Storage, is_inside, open_storage, parse_uri
from sharding.words import counted
from workers.config import DeviceKind, ModelConfig, TaskConfig, WorkerConfig
from workers.devices import cuda_obstacle, probe_cuda
from workers.engine.base import EngineInfo
from workers.engine.fake import is_fake
from workers.engine.load import inspect_model
from workers.model.resolve import ModelLocation, resolve_model
from workers.results import FACT_FIELDS, result_fields
from workers.template import TextTemplate, is_text_type, parse_template

_log = logging.getLogger(__name__)
BUDGET_TOKENS = 16_384
STEP_TOKENS = 512
GENERATE_ROWS = 64
_MAIN_COLUMNS = {"embed": "embedding", "classify": "label", "rerank": "score", "generate": "text", "score": "score"}


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
    output = _open_output(spec)
    listing = list_sources(spec.input.path)
    _check_output_apart(spec, listing, output)
    _check_templates(spec, listing.schema)
    device = _decide_device(spec)
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
    output_schema, columns, results = _output_schema(spec, listing.schema, task)
    shards = plan_shards(listing.files, target_rows=spec.sharding.target_rows, target_bytes=spec.sharding.target_bytes)
    source = str(model.path) if Path(model.source).expanduser().exists() else model.source
    model_config = ModelConfig(
        source, model.revision, model.digest, info.dtype if spec.model.dtype == "auto" else spec.model.dtype, device
    )
    plan = make_plan(
        job=spec.name,
        identity=make_identity(spec, task, model_config, output_schema),
        input_schema=listing.schema,
        output_schema=output_schema,
        files=listing.files,
        shards=shards,
        notes=notes,
    )
    batch = spec.batch
    worker_config = WorkerConfig(
        task=task,
        model=model_config,
        output_uri=output.uri,
        columns=columns,
        output_schema=output_schema,
        result_columns=results,
        threads=None,
        budget_tokens=BUDGET_TOKENS if batch.budget_tokens == "auto" else batch.budget_tokens,
        step_tokens=STEP_TOKENS if batch.budget_tokens == "auto" else batch.budget_tokens,
        generate_rows=_decide_rows(batch.rows, task),
        cache_bytes=None if batch.cache_bytes == "auto" else batch.cache_bytes,
    )
    return PreparedJob(spec, output, listing, model, info, plan, worker_config, on_disk)


def _open_output(spec: JobSpec) -> Storage:
    if parse_uri(spec.output.path).scheme == "hf":
        raise InputError(f"output.path cannot be written to, hf:// is for reading: `{spec.output.path}`")
    output = open_storage(spec.output.path)
    if output.local_root is not None and output.local_root.is_file():
        raise InputError(f"output.path is a file, not a folder: `{spec.output.path}`")
    return output


def _check_output_apart(spec: JobSpec, listing: SourceListing, output: Storage) -> None:
    inside = next((file.path for file in listing.files if is_inside(file.path, output.uri)), None)
    if inside is not None:
        raise InputError(
            f"output.path holds an input file, `{inside}`, and may not: `{spec.output.path}`",
            hint="write to a folder of its own",
        )
    for path in spec.input.path:
        if finds(path, output.full_uri(part_name(0))):
            raise InputError(
                f"input.path `{path}` would find the parts of the output: `output.path {spec.output.path}`",
                hint="write to a folder of its own: the next run would read this one's results",
            )


def _check_templates(spec: JobSpec, schema: pa.Schema) -> None:
    task = spec.task
    sources = [("task.query", task.query, True), ("task.text", task.text, True), ("task.answer", task.answer, True)]
    sources += [(f"task.messages[{i}]", message.content, False) for i, message in enumerate(task.messages or ())]
    for key, text, bare_column in sources:
        if not text:
            continue
        template = parse_template(text, bare_column=bare_column)
        if not bare_column and text in schema.names:
            raise InputError(
                f"{key} is the literal text `{text}`, which is also a column's name: `content: {text}`",
                hint=f"write {{{text}}} for the column's text",
            )
        _check_columns(key, template, schema)
    for name in spec.input.columns or ():
        if name not in schema.names:
            raise InputError(
                f"input.columns names a column that the input does not have: `{name}`",
                hint=f"the input has: {', '.join(schema.names)}",
            )


def _check_columns(key: str, template: TextTemplate, schema: pa.Schema) -> None:
    for name in template.columns:
        if name not in schema.names:
            raise InputError(
                f"{key} names a column that the input does not have: `{name}`",
                hint=f"the input has: {', '.join(schema.names)}",
            )
        kind = schema.field(name).type
        if not is_text_type(kind, in_template=len(template.columns) > 1 or template.literals != ("", "")):
            raise InputError(f"{key} names column `{name}`, which holds no text: `{kind}`")


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
    if asked.dimensions is not None and asked.dimensions > info.width:
        raise InputError(
            f"task.dimensions is more than the model's {counted(info.width, 'value')}: `{asked.dimensions}`"
        )
    requested = None if asked.max_tokens == "auto" else asked.max_tokens
    if is_fake(model.source):
        prompt = "" if asked.prompt in ("auto", "none") else asked.prompt
        max_tokens, notes = min(requested or info.max_positions, info.max_positions - (asked.kind == "generate")), []
    else:
        from workers.model.files import read_model_files
        from workers.model.prompts import choose_prompt

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


def _decide_rows(asked: int | Literal["auto"], task: TaskConfig) -> int:
    """Texts that grow at the same time; each beam of a search is one."""
    sampling = None if task.decoder is None else task.decoder.sampling
    beams = 1 if sampling is None else sampling.beams
    if asked == "auto":
        return max(GENERATE_ROWS, beams)
    if asked < beams:
        raise InputError(
            f"each of the {beams} beams of a row takes a place, more than there are: `batch.rows: {asked}`",
            hint="raise batch.rows, or lower task.generation.beams",
        )
    return asked


def _output_schema(
    spec: JobSpec, schema: pa.Schema, task: TaskConfig
) -> tuple[pa.Schema, tuple[str, ...], tuple[str, ...]]:
    """The schema of every part, the columns passed through, and the result columns."""
    column = _MAIN_COLUMNS[spec.task.kind] if spec.output.column == "auto" else spec.output.column
    results = [*result_fields(task, column), *FACT_FIELDS]
    names = [field.name for field in results]
    if len(set(names)) < len(names):
        raise InputError(f"output.column has the name of another result column: `{column}`")
    passed = list(spec.input.columns) if spec.input.columns is not None else schema.names
    clashes = [name for name in passed if name in names]
    if clashes and spec.output.on_conflict == "error":
        raise InputError(
            f"the input already has a column with a result's name: `{', '.join(clashes)}`",
            hint="set output.column, leave the column out of input.columns, or set output.on_conflict: overwrite",
        )
    columns = tuple(name for name in passed if name not in names)
    fields = [schema.field(name) for name in columns] + results
    return pa.schema(fields, metadata=_still_true(schema.metadata)), columns, tuple(names)


def _still_true(metadata: dict[bytes, bytes] | None) -> dict[bytes, bytes] | None:
    """Schema metadata less what pandas and datasets wrote: both describe the columns, which are others now."""
    return (
        {key: value for key, value in metadata.items() if key not in (b"pandas", b"huggingface")} if metadata else None
    )


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
