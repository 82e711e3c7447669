"""Words of messages, at every station: a number with its noun. Knows no data."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """A number and its noun, in the plural unless it is one: `1 row`, `2,000 rows`.

    Args:
        count: How many.
        noun: In the singular, of those whose plural ends in `s`.
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
