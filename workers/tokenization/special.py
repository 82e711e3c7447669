"""Where a tokenizer puts its special tokens around one text or two. Cuts nothing; `text_tokenizer` lays rows out."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Encoding, Tokenizer

from workers.errors import ModelError

_PROBES = (("a", "b a"), ("the first", "x"), ("0", "1 2 3"), (".", ", ,"))


@dataclass(frozen=True, slots=True)
class SpecialLayout:
    """Special tokens before, between and after the texts of a row.

    Attributes:
        pieces: One list of ids more than there are texts: `pieces[0] + text + pieces[1] (+ text + pieces[2])`.
        piece_types: Token types of those ids.
        text_types: Token type of each text's own tokens.
    """

    pieces: tuple[tuple[int, ...], ...]
    piece_types: tuple[tuple[int, ...], ...]
    text_types: tuple[int, ...]

    @property
    def count(self) -> int:
        """Special tokens of one row."""
        return sum(map(len, self.pieces))

    @property
    def has_types(self) -> bool:
        """Whether any token type differs from 0."""
        return any(self.text_types) or any(map(any, self.piece_types))

    def ids(self, *texts: list[int]) -> list[int]:
        """Ids of a whole row."""
        row = list(self.pieces[0])
        for text, piece in zip(texts, self.pieces[1:], strict=True):
            row += text
            row += piece
        return row

    def types(self, *lengths: int) -> list[int]:
        """Token types of a whole row whose texts have these many tokens."""
        row = list(self.piece_types[0])
        for text_type, length, piece in zip(self.text_types, lengths, self.piece_types[1:], strict=True):
            row += [text_type] * length
            row += piece
        return row


def read_special_layout(tokenizer: Tokenizer, texts: int) -> SpecialLayout:
    """Learn from the tokenizer itself where its special tokens go.

    A first probe gives the layout, further ones prove it.

    Args:
        tokenizer: Without truncation and padding.
        texts: 1 or 2.

    Raises:
        ModelError: The tokenizer gives no tokens to any probe, or puts its special tokens where no layout can.
    """
    layout: SpecialLayout | None = None
    for probe in _PROBES:
        alone = [tokenizer.encode(text, add_special_tokens=False).ids for text in probe[:texts]]
        if not all(alone):
            continue
        whole = tokenizer.encode(probe[0], probe[1] if texts == 2 else None)
        layout = layout or _layout_of(whole, texts)
        if layout.ids(*alone) != whole.ids or layout.types(*map(len, alone)) != whole.type_ids:
            raise ModelError("the tokenizer's post-processor does not put each text once, in order: `tokenizer.json`")
    if layout is None:
        raise ModelError("the tokenizer gives no token to the simplest words: `tokenizer.json`")
    return layout


def _layout_of(whole: Encoding, texts: int) -> SpecialLayout:
    pieces: list[list[int]] = [[] for _ in range(texts + 1)]
    types: list[list[int]] = [[] for _ in range(texts + 1)]
    text_types = [0] * texts
    seen = 0
    for token, type_id, text in zip(whole.ids, whole.type_ids, whole.sequence_ids, strict=True):
        if text is None:
            pieces[seen].append(token)
            types[seen].append(type_id)
        else:
            seen = text + 1
            text_types[text] = type_id
    return SpecialLayout(tuple(map(tuple, pieces)), tuple(map(tuple, types)), tuple(text_types))
