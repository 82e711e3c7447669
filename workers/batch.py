"""Third station of a shard: token rows become batches under a token budget, longest rows first. No model, no I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Ragged token ids of some rows.

    Attributes:
        rows: int64 (rows,): positions of the rows in the token rows they came from.
        ids: uint32 (tokens,): ids of all rows, one after the other.
        offsets: uint32 (rows + 1,): row i is `ids[offsets[i]:offsets[i + 1]]`.
        type_ids: uint32 (tokens,), or None where the model sees single texts.
    """

    rows: NDArray[np.int64]
    ids: NDArray[np.uint32]
    offsets: NDArray[np.uint32]
    type_ids: NDArray[np.uint32] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, start: int, stop: int) -> TokenBatch:
        """The rows `start <= i < stop` of this batch, as a batch of their own."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return TokenBatch(
            rows=self.rows[start:stop],
            ids=self.ids[first:last],
            offsets=self.offsets[start : stop + 1] - self.offsets[start],
            type_ids=None if self.type_ids is None else self.type_ids[first:last],
        )


def row_lengths(offsets: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Tokens of each row, int64 (rows,)."""
    wide = offsets.astype(np.int64)
    return wide[1:] - wide[:-1]


def batch_tokens(
    ids: NDArray[np.uint32],
    offsets: NDArray[np.uint32],
    rows: NDArray[np.int64],
    *,
    budget_tokens: int,
    type_ids: NDArray[np.uint32] | None = None,
) -> Iterator[TokenBatch]:
    """Cut token rows into batches of at most `budget_tokens` tokens, longest rows first.

    Rows of one length keep their order. A row above the budget is a batch of its own: it costs itself only.

    Args:
        ids: uint32 (tokens,).
        offsets: uint32 (all rows + 1,).
        rows: int64, the rows to batch (others, such as bad rows, are left out).
        budget_tokens: Most tokens of one batch.
        type_ids: uint32 (tokens,) or None.
    """
    lengths = row_lengths(offsets)[rows]
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        sums = np.cumsum(lengths[order[start : start + budget_tokens]])
        count = max(1, int(np.searchsorted(sums, budget_tokens, side="right")))
        chosen = rows[order[start : start + count]]
        yield _gather(ids, offsets, chosen, type_ids)
        start += count


def _gather(
    ids: NDArray[np.uint32],
    offsets: NDArray[np.uint32],
    rows: NDArray[np.int64],
    type_ids: NDArray[np.uint32] | None,
) -> TokenBatch:
    starts = offsets[rows].astype(np.int64)
    lengths = offsets[rows + 1].astype(np.int64) - starts
    ends = np.cumsum(lengths)
    positions = np.arange(int(ends[-1]), dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
    new_offsets = np.zeros(len(rows) + 1, dtype=np.uint32)
    new_offsets[1:] = ends
    return TokenBatch(rows, ids[positions], new_offsets, None if type_ids is None else type_ids[positions])
