"""Joining Arrow tables that carry dictionaries of their own. Used where rows are read and where they are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa


def join_tables(tables: Sequence[pa.Table]) -> Iterator[pa.Table]:
    """The tables as few contiguous ones as their dictionaries allow, in order; the same way for the same tables.

    A dictionary column whose joined dictionary would need a larger index type than the column's (127 values for int8)
    cannot be one chunk; then the tables are joined in halves.

    Args:
        tables: At least one, of one schema.
    """
    if len(tables) == 1:
        yield tables[0]
        return
    try:
        joined = pa.concat_tables(tables).combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        middle = len(tables) // 2
        yield from join_tables(tables[:middle])
        yield from join_tables(tables[middle:])
        return
    yield joined
