"""Words of messages, at every station: a number with its noun. Knows no data."""

from __future__ import annotations


def counted(count: float, noun: str) -> str:
    """A number and its noun, in the plural unless it is one: `1 row`, `2,000 rows`, `1.5 CPUs`.

    Args:
        count: How many.
        noun: In the singular, of those whose plural ends in `s`.
    """
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {noun}" if count == 1 else f"{number} {noun}s"
