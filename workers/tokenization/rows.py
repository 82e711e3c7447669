"""What tokenising gives: the ids of many rows as arrays, and why a row has none. Tokenises nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from sharding.errors import InputError

NULL_TEXT = "null text"
NO_TOKENS = "the text gives no token"
_MOST_TOKENS = 2**32 - 1


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Token ids of many rows, one after the other.

    Attributes:
        ids: uint32 (tokens,).
        offsets: uint32 (rows + 1,): row `i` has `ids[offsets[i]:offsets[i + 1]]`; a bad row has none.
        truncated: bool (rows,): something of the text was cut off.
        errors: Why a row is bad, by row; what differs from row to row follows `": "`.
        type_ids: uint32 (tokens,), or None where all of them are 0 (single texts of nearly every model).
        counts: int64 (rows,): tokens to tell of each row, where these are not simply all of its tokens.
    """

    ids: NDArray[np.uint32]
    offsets: NDArray[np.uint32]
    truncated: NDArray[np.bool_]
    errors: dict[int, str]
    type_ids: NDArray[np.uint32] | None
    counts: NDArray[np.int64] | None = None


class RowBuilder:
    """Gathers token rows in order.

    Args:
        with_types: The rows have `type_ids`.
        with_counts: The rows have `counts`.
    """

    def __init__(self, *, with_types: bool, with_counts: bool = False) -> None:
        self.with_types = with_types
        self._with_counts = with_counts
        self._ids: list[list[int]] = []
        self._types: list[Sequence[int]] = []
        self._counts: list[int] = []
        self._truncated: list[bool] = []
        self._errors: dict[int, str] = {}

    def add(self, ids: list[int], types: Sequence[int] = (), *, truncated: bool, count: int = 0) -> None:
        """Add one row.

        Args:
            ids: Its tokens.
            types: As many, where the rows have types.
            truncated: Something of its text was cut off.
            count: Tokens to tell of it, where the rows have counts.
        """
        self._ids.append(ids)
        self._types.append(types)
        self._counts.append(count)
        self._truncated.append(truncated)

    def add_error(self, error: str, *, truncated: bool = False) -> None:
        """Add a row with an error and no token."""
        self._errors[len(self._ids)] = error
        self.add([], truncated=truncated)

    def build(self) -> TokenRows:
        """Everything gathered, as arrays.

        Raises:
            InputError: More tokens than offsets can tell.
        """
        lengths = np.fromiter(map(len, self._ids), np.int64, len(self._ids))
        total = int(lengths.sum())
        if total > _MOST_TOKENS:
            raise InputError(f"too many tokens for one call: `{total}`")
        offsets = np.zeros(len(self._ids) + 1, np.uint32)
        np.cumsum(lengths, out=offsets[1:])
        return TokenRows(
            ids=np.fromiter(chain.from_iterable(self._ids), np.uint32, total),
            offsets=offsets,
            truncated=np.array(self._truncated, np.bool_),
            errors=self._errors,
            type_ids=np.fromiter(chain.from_iterable(self._types), np.uint32, total) if self.with_types else None,
            counts=np.array(self._counts, np.int64) if self._with_counts else None,
        )
