"""One shard, from rows to a published attempt: read, tokenize, batch, forward, write. Commits nothing.

Reading and tokenising run ahead in one thread, writing runs behind in another, the engine computes in between.
Every row of the shard leaves exactly once, in input order, whatever happens to it on the way.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sharding.errors import NotFoundError, RetryShard
from sharding.failpoints import failpoint
from sharding.layout import AttemptName, attempt_path
from sharding.storage import Storage
from workers.config import Assignment, ShardResult, WorkerConfig
from workers.engine.base import Engine
from workers.flow import Ahead, Behind
from workers.forward import RowResults, compute_window
from workers.parquet.read import MOST_BATCH_ROWS, RowBatch, read_rows
from workers.parquet.repair import read_kept
from workers.parquet.write import PartWriter
from workers.progress import Progress
from workers.prompt.template import TextTemplate
from workers.tokenization.prompt_tokenizer import PromptTokenizer
from workers.tokenization.window import RepeatedTexts, TextWindow, Tokenizer, tokenize_window

if TYPE_CHECKING:
    from workers.generation.constrain import SchemaConstraint

_log = logging.getLogger(__name__)
_RESULT_BYTES = 32 << 20
_GENERATE_ROWS = 64
"""Rows of a window of generate: texts are slow, and a window leaves when its last one is finished."""


@dataclass(slots=True)
class ShardTools:
    """What a worker keeps between shards."""

    engine: Engine
    tokenizer: Tokenizer
    output: Storage
    progress: Progress = field(default_factory=Progress)
    constraint: SchemaConstraint | None = None


def run_shard(assignment: Assignment, config: WorkerConfig, tools: ShardTools) -> ShardResult:
    """Compute one shard and publish it as an attempt.

    Args:
        assignment: The shard and the attempt; a probe computes a range of rows and publishes nothing.
        config: The job's settings.
        tools: Loaded engine, tokenizer and output storage.

    Returns:
        Figures for the receipt.

    Raises:
        RetryShard: This attempt is lost.
        StopJob: No attempt can succeed (a source file changed, the disk is full).
    """
    started = time.monotonic()
    tools.progress.begin(assignment.shard)
    if assignment.probe is not None:
        for _ in _results(assignment, config, tools):
            pass
        return _result(assignment, "", assignment.rows, Counter(), 0, 0, "", started)
    nonce = secrets.token_hex(4)
    name = AttemptName(assignment.shard, assignment.generation, assignment.epoch, assignment.attempt, nonce)
    scratch = tools.output.scratch_dir() / f"{os.getpid()}-{nonce}.parquet"
    errors: Counter[str] = Counter()
    tokens = 0
    with PartWriter(scratch, config.output_schema) as writer:
        with Behind(writer.write, "write") as sink:
            for results in _results(assignment, config, tools):
                sink.put(results.batch)
                errors += results.error_counts
                tokens += results.tokens
        size_bytes, sha256 = writer.close()
        if writer.rows != assignment.rows:
            raise RuntimeError(f"shard {assignment.shard} gave {writer.rows} rows for {assignment.rows}")
        failpoint("publish.before")
        try:
            tools.output.publish_file(scratch, attempt_path(name))
        except NotFoundError as error:
            raise RetryShard(f"the finished part was removed before it was published: `{scratch}`") from error
        failpoint("publish.after")
    scratch.unlink(missing_ok=True)
    _log.info("shard=%d attempt=%d rows=%d published", assignment.shard, assignment.attempt, assignment.rows)
    return _result(assignment, attempt_path(name), assignment.rows, errors, tokens, size_bytes, sha256, started)


def _results(assignment: Assignment, config: WorkerConfig, tools: ShardTools) -> Iterator[RowResults]:
    generates = config.task.kind == "generate"
    repeated = RepeatedTexts(tools.engine.info.width, **({"most_bytes": 0} if generates else {}))
    with Ahead(_windows(assignment, config, tools, repeated), "read") as windows:
        if generates:
            yield from _texts(windows, assignment, config, tools)
            return
        for window in windows:
            advance = tools.progress.window(window.batch.rows.num_rows, int(window.tokens.offsets[-1]))
            results = compute_window(window, config, tools.engine, repeated, advance)
            tools.progress.finish_window()
            yield results


def _texts(
    windows: Iterable[TextWindow], assignment: Assignment, config: WorkerConfig, tools: ShardTools
) -> Iterator[RowResults]:
    from workers.generation.generate import TextGenerator

    assert isinstance(tools.tokenizer, PromptTokenizer), "the tokenizer of a decoder task"
    generator = TextGenerator(
        config, tools.engine, tools.tokenizer.codec, tools.constraint, assignment.pieces, tools.progress
    )
    yield from generator.run(iter(windows))


def _windows(
    assignment: Assignment, config: WorkerConfig, tools: ShardTools, repeated: RepeatedTexts
) -> Iterator[TextWindow]:
    templates = config.task.templates()
    kept = None
    if assignment.repair_part is not None:
        kept = read_kept(tools.output, assignment.repair_part, config)
    most_rows = max(1, min(MOST_BATCH_ROWS, _RESULT_BYTES // (4 * tools.engine.info.width)))
    if config.task.kind == "generate":
        most_rows = min(most_rows, _GENERATE_ROWS)
    for batch in read_rows(assignment.pieces, _read_columns(config, templates), most_rows=most_rows):
        window = _probed(batch, assignment.probe)
        if window is not None:
            kept_rows = None if kept is None else kept.take(window.rows.num_rows)
            yield tokenize_window(window, templates, tools.tokenizer, repeated, assignment.poison_rows, kept_rows)


def _read_columns(config: WorkerConfig, templates: list[TextTemplate]) -> list[str]:
    return list(dict.fromkeys([*config.columns, *(name for template in templates for name in template.columns)]))


def _probed(batch: RowBatch, probe: tuple[int, int] | None) -> RowBatch | None:
    if probe is None:
        return batch
    start = max(probe[0], batch.start)
    stop = min(probe[1], batch.start + batch.rows.num_rows)
    return RowBatch(start, batch.rows.slice(start - batch.start, stop - start)) if start < stop else None


def _result(
    assignment: Assignment,
    attempt_file: str,
    rows: int,
    errors: Counter[str],
    tokens: int,
    size_bytes: int,
    sha256: str,
    started: float,
) -> ShardResult:
    return ShardResult(
        shard=assignment.shard,
        generation=assignment.generation,
        attempt=assignment.attempt,
        attempt_file=attempt_file,
        rows=rows,
        row_errors=errors.total(),
        error_counts=dict(errors),
        tokens=tokens,
        size_bytes=size_bytes,
        sha256=sha256,
        seconds=time.monotonic() - started,
    )
