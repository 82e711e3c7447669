"""What a row's error says of a text with too many tokens: which limit it is, how many there are, how many may be.

Counts and cuts nothing; `workers.tokenize` and `workers.prompts` do.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.config import LimitName
from workers.model.encode import TextTokens

TOO_LONG = "more tokens than"


def too_long(
    texts: Sequence[TextTokens], allowed: int, limit: LimitName, *, subject: str = "", beside: str = "", more: int = 0
) -> str:
    """The error.

    Args:
        texts: Tokens of the text, or of its parts.
        allowed: How many it may have.
        limit: Who says so.
        subject: What is too long, where a row has several texts: `the answer has `.
        beside: What takes its share of the limit: ` beside the answer`.
        more: Tokens that count beside those of the texts.
    """
    whole = all(text.complete for text in texts)
    count = f"{sum(len(text.ids) for text in texts) + more}" if whole else f"more than {allowed}"
    return f"{subject}{TOO_LONG} {limit} allows{beside}: `{count} of {allowed}`"
