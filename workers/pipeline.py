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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sharding.errors import NotFoundError, RetryShard
from sharding.failpoints import failpoint
from sharding.layout import AttemptName, attempt_path
from sharding.storage import Storage
from workers.config import Assignment, ShardResult, WorkerConfig
from workers.engine.base import Engine
from workers.flow import Ahead, Behind
from workers.forward import RowResults, compute_window
from workers.read import MOST_BATCH_ROWS, RowBatch, read_rows
from workers.repair import read_kept
from workers.template import TextTemplate, parse_template
from workers.texts import RepeatedTexts, TextWindow, Tokenizer, tokenize_window
from workers.write import PartWriter

_log = logging.getLogger(__name__)
_RESULT_BYTES = 32 << 20


@dataclass(slots=True)
class Progress:
    """How far the running shard is; read by other threads."""

    shard: int = -1
    rows_before: int = 0
    tokens: int = 0
    share: float = 0.0
    window_rows: int = 0

    def begin(self, shard: int) -> None:
        """Begin a shard."""
        self.shard, self.rows_before, self.tokens, self.share, self.window_rows = shard, 0, 0, 0.0, 0

    @property
    def rows(self) -> int:
        """Rows of finished windows, and of the running one the share that its finished batches are."""
        return self.rows_before + int(self.window_rows * self.share)

    def window(self, rows: int, tokens: int) -> Callable[[int], None]:
        """Begin a window; the function returned counts the tokens of each finished batch."""
        self.share, self.window_rows = 0.0, rows

        def advance(batch_tokens: int) -> None:
            self.tokens += batch_tokens
            self.share = min(1.0, self.share + batch_tokens / tokens)

        return advance

    def finish_window(self) -> None:
        """The window's rows are finished, those without any token too."""
        self.rows_before += self.window_rows
        self.share, self.window_rows = 0.0, 0


@dataclass(slots=True)
class ShardTools:
    """What a worker keeps between shards."""

    engine: Engine
    tokenizer: Tokenizer
    output: Storage
    progress: Progress = field(default_factory=Progress)


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
    repeated = RepeatedTexts(tools.engine.info.width)
    with Ahead(_windows(assignment, config, tools, repeated), "read") as windows:
        for window in windows:
            advance = tools.progress.window(window.batch.rows.num_rows, int(window.tokens.offsets[-1]))
            results = compute_window(window, config, tools.engine, repeated, advance)
            tools.progress.finish_window()
            yield results


def _windows(
    assignment: Assignment, config: WorkerConfig, tools: ShardTools, repeated: RepeatedTexts
) -> Iterator[TextWindow]:
    templates = [parse_template(text) for text in (config.task.query, config.task.text) if text is not None]
    kept = None
    if assignment.repair_part is not None:
        kept = read_kept(tools.output, assignment.repair_part, config)
    most_rows = max(1, min(MOST_BATCH_ROWS, _RESULT_BYTES // (4 * tools.engine.info.width)))
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
