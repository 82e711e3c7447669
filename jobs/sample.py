"""A few rows of a planned job, read and tokenised as its workers will: what they hold, and which of them would fail.

Starts no worker, loads no model and writes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from jobs.prepare import PreparedJob
from sharding.errors import CandelabraError, InputError
from sharding.words import counted
from workers.batch import row_lengths
from workers.config import AssignedPiece
from workers.parquet.read import read_file_rows
from workers.prompt.template import invalid_rows
from workers.tokenization.rows import NULL_TEXT
from workers.worker import load_tokenizer

_log = logging.getLogger(__name__)
_SAMPLE_ROWS = 2000
_SAMPLE_SHARDS = 8
_FEW_ROWS = 64
_SAMPLE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class RowSample:
    """Sampled rows.

    Attributes:
        rows: How many.
        nulls: Those without a text.
        truncated: Those that lose tokens.
        ids, offsets, type_ids, counts: As `workers.tokenization.rows.TokenRows`.
        failures: Why a row that has a text would fail before any model sees it, by place in the sample.
        places: File of each row, and its place in that file.
    """

    rows: int
    nulls: int
    truncated: int
    ids: NDArray[np.uint32]
    offsets: NDArray[np.uint32]
    type_ids: NDArray[np.uint32] | None
    counts: NDArray[np.int64] | None
    failures: Mapping[int, str]
    places: tuple[tuple[str, int], ...]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row that has any."""
        lengths = row_lengths(self.offsets) if self.counts is None else self.counts
        return lengths[lengths > 0]

    @property
    def hopeless(self) -> bool:
        """Whether all rows that have a text would fail."""
        return len(self.failures) == self.rows - self.nulls > 0

    def foreseen(self) -> str | None:
        """How many rows would fail, and the first of them with its reason; None where none would."""
        if not self.failures:
            return None
        row, reason = min(self.failures.items())
        file, place = self.places[row]
        whole = self.rows - self.nulls
        all_of_them = "the only sampled row" if whole == 1 else f"ALL {counted(whole, 'sampled row')}"
        who = all_of_them if self.hopeless else f"{len(self.failures):,} of {counted(self.rows, 'sampled row')}"
        return f"{who} would fail, the first of them row {place} of `{file}`: {reason}"


def sample_rows(prepared: PreparedJob, most_rows: int = _SAMPLE_ROWS) -> RowSample:
    """The first rows of a few shards, spread over the job.

    Args:
        prepared: The job.
        most_rows: How many; fewer where they are large.

    Raises:
        DriftError: A source file has just changed.
        RetryShard: One cannot be read.
    """
    plan, task = prepared.plan, prepared.worker_config.task
    shards = len(plan.shards)
    chosen = sorted({shards * i // _SAMPLE_SHARDS for i in range(_SAMPLE_SHARDS)})
    templates = task.templates()
    columns = list(dict.fromkeys(name for template in templates for name in template.columns))
    texts: list[list[str | None]] = [[] for _ in templates]
    places: list[tuple[str, int]] = []
    for shard in chosen:
        wanted, most_bytes = -(-most_rows // len(chosen)), _SAMPLE_BYTES // len(chosen)
        for piece in plan.shards[shard].pieces[:1]:
            file, place = plan.files[piece.file], piece.start
            for batch in read_file_rows(AssignedPiece(file.path, file.version, piece.start, piece.stop), columns):
                rows = batch.slice(0, wanted)
                for column, template in zip(texts, templates, strict=True):
                    rendered = template.render(rows)
                    invalid = set(invalid_rows(rendered))
                    bad = pa.array([row in invalid for row in range(len(rendered))], pa.bool_())
                    column += pc.if_else(bad, None, rendered).to_pylist()
                    most_bytes -= rendered.nbytes
                places += [(file.path, place + row) for row in range(rows.num_rows)]
                place += rows.num_rows
                wanted -= rows.num_rows
                if wanted <= 0 or most_bytes <= 0:
                    break
    tokenizer = load_tokenizer(prepared.model.source, prepared.model.path, task)
    tokens = tokenizer.tokenize_columns(texts)
    return RowSample(
        rows=len(places),
        nulls=sum(any(text is None for text in row) for row in zip(*texts, strict=True)),
        truncated=int(tokens.truncated.sum()),
        ids=tokens.ids,
        offsets=tokens.offsets,
        type_ids=tokens.type_ids,
        counts=tokens.counts,
        failures={row: error for row, error in tokens.errors.items() if error != NULL_TEXT},
        places=tuple(places),
    )


def check_sample(prepared: PreparedJob, sample: RowSample | None = None) -> None:
    """Refuse a job whose rows all fail, as far as a sample tells, unless it says that all its rows may.

    Args:
        prepared: The job.
        sample: Rows of it; by default a few are read, and nothing is said where that does not work: workers will.

    Raises:
        InputError: All sampled rows that have a text would fail.
    """
    if prepared.spec.errors.max_row_error_rate >= 1:
        return
    if sample is None:
        try:
            sample = sample_rows(prepared, _FEW_ROWS)
        except CandelabraError as error:
            _log.warning("no rows could be looked at before the start: %s", error)
            return
    if sample.hopeless:
        raise InputError(
            str(sample.foreseen()),
            hint="no worker was started; errors.max_row_error_rate: 1 lets a job run that fails in every row",
        )
