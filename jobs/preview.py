"""`plan`: what a job would do, before it does it: sizes, a token histogram from a sample, time, memory, hazards.

Reads footers and a small sample of rows, tokenises it, and runs the engine on a few batches to learn its pace.
Starts no worker and writes nothing.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobs.hazards import input_hazards, plan_hazards, room_hazards
from jobs.prepare import PreparedJob, prepare_job
from jobs.sample import RowSample, check_sample, sample_rows
from jobs.spec import JobSpec
from jobs.split import Dimensions, Load, SplitPlan, describe_replicas, place_here, plan_split, rank_bytes
from jobs.weight_bytes import weight_bytes_on_gpus
from sharding.errors import RecordRow
from sharding.plan_file import check_empty
from workers.batch import batch_tokens, row_lengths
from workers.config import WorkerConfig
from workers.engine.base import Engine
from workers.engine.load import load_engine

_TIMED_TOKENS = 16_384
_HISTOGRAM_BOUNDS = (16, 32, 64, 128, 256, 512, 1024, 4096)
_PROCESS_BYTES = 200 << 20
_FACT_BYTES = 8
_TOKEN_BYTES = 4
_TIMED_PROMPTS = 16
_TIMED_NEW_TOKENS = 16


@dataclass(frozen=True, slots=True)
class JobPreview:
    """A job before it runs. Times and sizes are estimates from the sample.

    Attributes:
        token_histogram: Upper bound of each bin in tokens (as text; `more` for the last), and rows of the sample in it.
        tokens_per_s: Pace of one replica on this machine, in tokens (generate: of prompts and new ones together).
        estimated_s: One replica's time for all rows (generate: if every text is as long as it may be).
        split: What a rank holds, with `model.tensor_parallel` above 1.
        replicas: Likewise, how many replicas of how many ranks there would be.
    """

    job: str
    output: str
    files: int
    rows: int
    input_bytes: int
    shards: int
    columns: tuple[str, ...]
    model: str
    revision: str | None
    architecture: str
    dtype: str
    notes: tuple[str, ...]
    sampled_rows: int
    token_histogram: dict[str, int]
    mean_tokens: float
    truncated_share: float
    null_share: float
    tokens_per_s: float
    estimated_s: float
    output_bytes: int
    replica_memory_bytes: int
    hazards: tuple[str, ...]
    split: SplitPlan | None
    replicas: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `--json` shows it."""
        return asdict(self)


def preview_job(spec: JobSpec) -> JobPreview:
    """Plan a job and look at a sample of it.

    Raises:
        StopJob: As `jobs.prepare.prepare_job`, and as `jobs.sample.check_sample`.
        InfrastructureError: The ranks of a split model do not fit this machine, where they would run.
    """
    prepared = prepare_job(spec)
    plan, config, info = prepared.plan, prepared.worker_config, prepared.info
    if prepared.on_disk is None:
        check_empty(prepared.output)
    split, replicas, ranks = None, None, spec.model.tensor_parallel
    if ranks > 1:
        least = rank_bytes(spec, prepared.model.path, info, config)
        replicas = describe_replicas(spec, place_here(spec, config.model.device, least))
        on_gpus = weight_bytes_on_gpus(config.model.dtype, spec.model.device)
        split = plan_split(Dimensions.of_model(prepared.model.path, info), Load.of_job(config), ranks, on_gpus)
    sample = sample_rows(prepared)
    if prepared.on_disk is None:
        check_sample(prepared, sample)
    lengths = sample.lengths
    mean = float(lengths.mean()) if len(lengths) else 0.0
    pace, cache_bytes = _pace(prepared, sample) if len(lengths) else (0.0, config.cache_bytes or 0)
    per_row = 4 * config.task.width if config.task.kind == "embed" else _FACT_BYTES
    decoder = config.task.decoder
    sampling = None if decoder is None else decoder.sampling
    row_tokens = mean * _sequences(config)
    if sampling is not None:
        assert decoder is not None
        new_tokens = max(0, min(sampling.max_new_tokens, decoder.max_positions - int(mean)))
        row_tokens = (mean + new_tokens * sampling.beams) * sampling.n
        per_row = sampling.n * (new_tokens * _TOKEN_BYTES + _FACT_BYTES)
    return JobPreview(
        job=plan.job,
        output=prepared.output.uri,
        files=len(plan.files),
        rows=plan.rows,
        input_bytes=sum(file.size_bytes for file in plan.files),
        shards=len(plan.shards),
        columns=tuple(config.output_schema.names),
        model=prepared.model.source,
        revision=prepared.model.revision,
        architecture=info.architecture,
        dtype=config.model.dtype,
        notes=plan.notes,
        sampled_rows=sample.rows,
        token_histogram=_histogram(lengths),
        mean_tokens=round(mean, 1),
        truncated_share=_share(sample.truncated, sample.rows),
        null_share=_share(sample.nulls, sample.rows),
        tokens_per_s=round(pace, 1),
        estimated_s=round(plan.rows * row_tokens / pace, 1) if pace else 0.0,
        output_bytes=plan.rows * (per_row + _FACT_BYTES) + sum(file.size_bytes for file in plan.files),
        replica_memory_bytes=_PROCESS_BYTES * ranks
        + Dimensions.of_info(info).weight_bytes(1, Load.of_job(config).held)
        + config.budget_tokens * info.hidden_size * 4
        + cache_bytes,
        hazards=tuple(_hazards(prepared, sample)),
        split=split,
        replicas=replicas,
    )


def _pace(prepared: PreparedJob, sample: RowSample) -> tuple[float, int]:
    """Tokens per second of a replica on this machine, and bytes of its key/value cache."""
    config, model = prepared.worker_config, prepared.model
    engine = load_engine(
        model.source, model.path, config.task, device=config.model.device, dtype=config.model.dtype, threads=None
    )
    rows = np.flatnonzero(row_lengths(sample.offsets))
    if config.task.kind == "generate":
        return _generating_pace(config, engine, sample, rows[:: max(1, len(rows) // _TIMED_PROMPTS)])
    batches = list(
        batch_tokens(
            sample.ids, sample.offsets, rows, budget_tokens=config.budget_tokens // 2, type_ids=sample.type_ids
        )
    )
    step = max(1, len(batches) * config.budget_tokens // 2 // _TIMED_TOKENS)
    chosen = batches[step // 2 :: step]
    engine.forward(chosen[-1])
    started = time.perf_counter()
    tokens = 0
    for batch in chosen:
        engine.forward(batch)
        tokens += len(batch.ids)
    return tokens / (time.perf_counter() - started), 0


def _generating_pace(
    config: WorkerConfig, engine: Engine, sample: RowSample, rows: NDArray[np.int64]
) -> tuple[float, int]:
    """A few tokens for a few prompts, greedy and unconstrained: what sampling and masks add is little."""
    decoder = config.task.decoder
    assert decoder is not None, "a decoder task"
    assert decoder.sampling is not None, "a task of kind generate"
    greedy = replace(decoder.sampling, temperature=0.0, beams=1, stop_ids=())
    generator = engine.generator(
        rows=config.generate_rows, cache_bytes=config.cache_bytes, step_tokens=config.step_tokens
    )
    started = time.perf_counter()
    tokens, growing = 0, set()
    for row in rows.tolist():
        ids = sample.ids[sample.offsets[row] : sample.offsets[row + 1]].tolist()
        room = decoder.max_positions - len(ids)
        with contextlib.suppress(RecordRow):
            generator.add(row, ids, greedy, max_new_tokens=min(_TIMED_NEW_TOKENS, room))
            growing.add(row)
            tokens += len(ids)
    while growing:
        for event in generator.step():
            tokens += len(event.ids)
            if event.finish is not None:
                growing.discard(event.request_id)
    return tokens / (time.perf_counter() - started), generator.cache_bytes


def _sequences(config: WorkerConfig) -> int:
    """Times that a row's tokens go through the model: once for each label."""
    return max(1, len(config.task.decoder.labels)) if config.task.decoder is not None else 1


def _histogram(lengths: NDArray[np.int64]) -> dict[str, int]:
    bins = np.searchsorted(np.array(_HISTOGRAM_BOUNDS), lengths, side="left")
    counts = np.bincount(bins, minlength=len(_HISTOGRAM_BOUNDS) + 1)
    names = [*map(str, _HISTOGRAM_BOUNDS), "more"]
    return {name: int(count) for name, count in zip(names, counts, strict=True) if count}


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def _hazards(prepared: PreparedJob, sample: RowSample) -> list[str]:
    spec, plan = prepared.spec, prepared.plan
    config = prepared.worker_config
    sampling = None if config.task.decoder is None else config.task.decoder.sampling
    found = input_hazards(spec, plan.input_schema, plan.rows, config.result_columns, sampling)
    if sample.nulls:
        share = _share(sample.nulls, sample.rows)
        found.append(f"{share:.1%} of the sampled rows have a null text: they become row errors")
    if foreseen := sample.foreseen():
        found.append(foreseen)
    if _share(sample.nulls + len(sample.failures), sample.rows) > spec.errors.max_row_error_rate:
        found.append(f"that is above errors.max_row_error_rate {spec.errors.max_row_error_rate}: the job would exit 1")
    if sample.truncated:
        found.append(f"{_share(sample.truncated, sample.rows):.1%} of the sampled rows are longer than max_tokens")
    found += room_hazards(spec, config.model.device, 0) + plan_hazards(prepared.on_disk, plan)
    return found
