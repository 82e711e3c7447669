"""Tokenising no more of a text than its limit needs, with the same ids. Adds no special tokens and cuts no tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import Encoding, Tokenizer

from workers.config import LimitName
from workers.model.jsonfile import read_object
from workers.tokenization.stable import find_stable_rule

HARD_BOUND_CHARS = 65_536
HARD_BOUND_CHARS_PER_TOKEN = 64
"""No more characters of a text than the higher of these bounds are ever tokenised; no sane text needs so many."""

TOO_LONG = "more tokens than"
_FIRST_CHARS = 512
_FIRST_CHARS_PER_TOKEN = 4
_GROWTH = 4
_CALL_TEXTS = 512
_CALL_CHARS = 1 << 20


@dataclass(frozen=True, slots=True)
class TextTokens:
    """Tokens of one text, without special ones.

    Attributes:
        ids: All of them when `complete`, else more than the row has room for.
        cut: The text goes on beyond the hard bound; what follows was never looked at.
        complete: `ids` are the whole text's.
    """

    ids: list[int]
    cut: bool
    complete: bool


def too_long(
    texts: Sequence[TextTokens], allowed: int, limit: LimitName, *, subject: str = "", beside: str = "", more: int = 0
) -> str:
    """What a row's error says of a text with too many tokens: which limit, how many there are, how many may be.

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


class BoundedEncoder:
    """Tokenises texts in batches, on as many threads as the tokenizers library uses.

    A long text is cut, tokenised, and taken when more tokens than its row has room for are certain not to depend on
    what was cut off; otherwise four times as much of it is tried, up to the whole text or the hard bound. See
    `workers.tokenization.stable` for what is certain. Time and memory for one text are bounded, whatever its length.

    Args:
        tokenizer: Without truncation and padding.
        tokenizer_path: Its tokenizer.json; None where it was not read from one.
        max_tokens: Most tokens of a row; sets the hard bound.
        side: The end of a text that is cut off. Texts cut at their beginning are tokenised whole up to the bound.
    """

    def __init__(
        self, tokenizer: Tokenizer, tokenizer_path: Path | None, *, max_tokens: int, side: Literal["right", "left"]
    ) -> None:
        self._tokenizer = tokenizer
        content = read_object(tokenizer_path) if tokenizer_path else json.loads(tokenizer.to_str())
        self._stable = find_stable_rule(content)
        self._hard_chars = max(HARD_BOUND_CHARS, HARD_BOUND_CHARS_PER_TOKEN * max_tokens)
        self._side = side
        self._can_cut = side == "right" and self._stable.rule != "nothing"

    @property
    def hard_chars(self) -> int:
        """Characters of a text beyond which nothing is tokenised."""
        return self._hard_chars

    def encode(self, texts: Sequence[str], room: int, prompt: str = "") -> list[TextTokens]:
        """Tokenise texts.

        Args:
            texts: Any length.
            room: Tokens of a text that a row can take; more than these are given for a longer text.
            prompt: Put before each text.

        Returns:
            One for each text, in order.
        """
        bounded = [self._bounded(prompt, text) for text in texts]
        cut = [len(part) < len(prompt) + len(text) for part, text in zip(bounded, texts, strict=True)]
        found: dict[int, TextTokens] = {}
        whole: list[int] = []
        waiting = list(range(len(texts)))
        chars = _FIRST_CHARS + _FIRST_CHARS_PER_TOKEN * room if self._can_cut else self._hard_chars
        while waiting:
            whole += [row for row in waiting if len(bounded[row]) <= chars]
            longer = [row for row in waiting if len(bounded[row]) > chars]
            waiting = []
            for row, cut_text, encoding in self._encode_cut(bounded, longer, chars):
                stable = self._stable.count(encoding, cut_text)
                if stable > room:
                    found[row] = TextTokens(encoding.ids[:stable], cut[row], complete=False)
                else:
                    waiting.append(row)
            chars *= _GROWTH
        for row, ids in self._encode_whole(bounded, whole):
            found[row] = TextTokens(ids, cut[row], complete=not cut[row])
        return [found[row] for row in range(len(texts))]

    def encode_whole(self, text: str) -> TextTokens:
        """Tokenise one text up to the hard bound, whatever room there is."""
        part = self._bounded("", text)
        cut = len(part) < len(text)
        return TextTokens(self._tokenizer.encode(part, add_special_tokens=False).ids, cut, complete=not cut)

    def _bounded(self, prompt: str, text: str) -> str:
        bound = self._hard_chars
        if self._side == "right":
            return (prompt + text[:bound])[:bound]
        return (prompt + text[-bound:])[-bound:]

    def _encode_cut(self, texts: Sequence[str], rows: list[int], chars: int) -> Iterator[tuple[int, str, Encoding]]:
        for group in _groups([(row, chars) for row in rows]):
            cut_texts = [texts[row][:chars] for row in group]
            encodings = self._tokenizer.encode_batch(cut_texts, add_special_tokens=False)
            yield from zip(group, cut_texts, encodings, strict=True)

    def _encode_whole(self, texts: Sequence[str], rows: list[int]) -> Iterator[tuple[int, list[int]]]:
        for group in _groups([(row, len(texts[row])) for row in rows]):
            encodings = self._tokenizer.encode_batch_fast([texts[row] for row in group], add_special_tokens=False)
            for row, encoding in zip(group, encodings, strict=True):
                yield row, encoding.ids


def _groups(rows: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Rows, given with their characters, in groups that bound what one call of the library holds at a time."""
    group: list[int] = []
    chars = 0
    for row, row_chars in rows:
        if group and (len(group) == _CALL_TEXTS or chars + row_chars > _CALL_CHARS):
            yield group
            group, chars = [], 0
        group.append(row)
        chars += row_chars
    if group:
        yield group
