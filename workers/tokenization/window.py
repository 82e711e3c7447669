"""Second station of a shard: the text of each row, equal texts once, as token rows. Computes nothing with a model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from workers.parquet.read import RowBatch
from workers.prompt.template import TextTemplate, invalid_rows
from workers.tokenization.rows import TokenRows

if TYPE_CHECKING:
    from workers.parquet.repair import KeptResults

_REPEATED_BYTES = 64 << 20
_ENTRY_BYTES = 200


class Tokenizer(Protocol):
    """What the pipeline asks of a tokenizer; see `workers.tokenization.text_tokenizer.TextTokenizer`."""

    prompt_tokens: int

    def tokenize_columns(self, columns: Sequence[Sequence[str | None]]) -> TokenRows:
        """Token rows of the texts that a task's templates give, one column for each template."""


@dataclass(frozen=True, slots=True)
class UniqueResult:
    """What one distinct text gave: computed once per shard."""

    values: NDArray[np.float32] | None
    error: str | None
    n_tokens: int
    truncated: bool


class RepeatedTexts:
    """Remembers the texts of a shard, so that each distinct one is tokenised and computed once.

    At most `most_bytes` (64 MiB) are kept; a text that comes when it is full is computed again, with the same result.
    The reading thread admits texts, the computing thread stores and finds results: windows come in one order, so a
    result is always stored before it is looked for.
    """

    def __init__(self, width: int, most_bytes: int = _REPEATED_BYTES) -> None:
        self._most_bytes = most_bytes
        self._entry_bytes = _ENTRY_BYTES + 4 * width
        self._admitted: set[bytes] = set()
        self._results: dict[bytes, UniqueResult] = {}

    def admit(self, key: bytes) -> bool:
        """Whether a text is known from an earlier window; an unknown one is admitted while there is room."""
        if key in self._admitted:
            return True
        if (len(self._admitted) + 1) * self._entry_bytes <= self._most_bytes:
            self._admitted.add(key)
        return False

    def store(self, key: bytes, result: UniqueResult) -> None:
        """Keep the result of an admitted text."""
        if key in self._admitted:
            self._results[key] = result

    def find(self, key: bytes) -> UniqueResult:
        """The result of a text that `admit` knew."""
        return self._results[key]


@dataclass(frozen=True, slots=True)
class TextWindow:
    """Rows of a shard with the tokens of their distinct, not yet known texts.

    Attributes:
        batch: The rows as read.
        unique: int64 (rows,): which distinct text each row has; -1 for a row decided without the model.
        row_errors: Why a row is bad before any model saw it, by row.
        keys: One per distinct text.
        known: Distinct texts whose result an earlier window gave.
        fresh: int64: positions in `keys` of the texts in `tokens`, in order.
        tokens: Token rows of the fresh texts.
        kept: Results of an earlier generation, or None.
    """

    batch: RowBatch
    unique: NDArray[np.int64]
    row_errors: dict[int, str]
    keys: list[bytes]
    known: list[int]
    fresh: NDArray[np.int64]
    tokens: TokenRows
    kept: KeptResults | None = field(default=None)


def tokenize_window(
    batch: RowBatch,
    templates: Sequence[TextTemplate],
    tokenizer: Tokenizer,
    repeated: RepeatedTexts,
    poison_rows: Sequence[int],
    kept: KeptResults | None,
) -> TextWindow:
    """Make the texts of some rows and tokenise the distinct ones.

    Args:
        batch: The rows.
        templates: As the task gives them; see `workers.config.TaskConfig.templates`.
        tokenizer: The model's.
        repeated: Texts of earlier windows of this shard.
        poison_rows: Rows of the shard that must not reach the model.
        kept: Results of an earlier generation; rows that have one are left alone.
    """
    columns = [template.render(batch.rows) for template in templates]
    row_errors = _early_errors(batch, templates, columns, poison_rows)
    skipped = np.zeros(batch.rows.num_rows, np.bool_)
    skipped[list(row_errors)] = True
    if kept is not None:
        skipped |= kept.good
        row_errors = {row: error for row, error in row_errors.items() if not kept.good[row]}
    wanted = np.flatnonzero(~skipped)
    keys, unique, firsts = _distinct(columns, wanted, batch.rows.num_rows)
    known: list[int] = []
    fresh: list[int] = []
    for position, key in enumerate(keys):
        (known if repeated.admit(key) else fresh).append(position)
    rows = pa.array(firsts[np.array(fresh, np.int64)] if fresh else np.zeros(0, np.int64))
    texts = [column.take(rows).to_pylist() for column in columns]
    tokens = tokenizer.tokenize_columns(texts)
    return TextWindow(batch, unique, row_errors, keys, known, np.array(fresh, np.int64), tokens, kept)


def _early_errors(
    batch: RowBatch, templates: Sequence[TextTemplate], columns: Sequence[pa.Array], poison_rows: Sequence[int]
) -> dict[int, str]:
    errors: dict[int, str] = {}
    for template, column in zip(templates, columns, strict=True):
        if column.null_count:
            for row in np.flatnonzero(pc.is_null(column).to_numpy(zero_copy_only=False)):
                errors.setdefault(int(row), template.null_reason(batch.rows, int(row)))
        for invalid in invalid_rows(column):
            errors.setdefault(invalid, "the text is not valid UTF-8")
    for poison in poison_rows:
        if 0 <= poison - batch.start < batch.rows.num_rows:
            errors[poison - batch.start] = "the worker was killed each time it computed this row"
    return errors


def _distinct(
    columns: Sequence[pa.Array], wanted: NDArray[np.int64], rows: int
) -> tuple[list[bytes], NDArray[np.int64], NDArray[np.int64]]:
    """Keys of the distinct texts, each row's distinct text (-1 for none), and the first row of each."""
    keys: dict[bytes, int] = {}
    firsts: list[int] = []
    unique = np.full(rows, -1, np.int64)
    for row in wanted:
        key = _key(columns, int(row))
        position = keys.setdefault(key, len(keys))
        if position == len(firsts):
            firsts.append(int(row))
        unique[row] = position
    return list(keys), unique, np.array(firsts, np.int64)


def _key(columns: Sequence[pa.Array], row: int) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for column in columns:
        text = column[row].as_buffer()
        digest.update(text.size.to_bytes(8, "little"))
        digest.update(text)
    return digest.digest()
