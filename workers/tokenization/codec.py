"""Text to tokens and back for decoders: the contract, and the model's own tokenizer behind it. Makes no prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from workers.model.decoder import DecoderFiles
from workers.tokenization.encode import BoundedEncoder, TextTokens
from workers.tokenization.special import read_special_layout


class TextCodec(Protocol):
    """A tokenizer as decoders need it.

    Attributes:
        start_ids: Special tokens before a plain text.
        hard_chars: Characters beyond which no text is tokenised.
    """

    start_ids: tuple[int, ...]
    hard_chars: int

    def encode(self, texts: Sequence[str], room: int) -> list[TextTokens]:
        """Tokens of texts without special tokens around them; more than `room` for a longer text."""

    def cut(self, ids: list[int], length: int) -> list[int]:
        """The tokens that stay when only `length` may."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens; special tokens give none."""

    def is_special(self, token: int) -> bool:
        """Whether a token gives no text."""


class FileCodec:
    """The codec of a model's own tokenizer."""

    def __init__(self, files: DecoderFiles, max_tokens: int) -> None:
        self._tokenizer = files.tokenizer
        self._side = files.truncation_side
        self._encoder = BoundedEncoder(files.tokenizer, None, max_tokens=max_tokens, side=files.truncation_side)
        self.start_ids = read_special_layout(files.tokenizer, 1).pieces[0]
        self.hard_chars = self._encoder.hard_chars
        added = files.tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, content in added.items() if content.special)

    def encode(self, texts: Sequence[str], room: int) -> list[TextTokens]:
        """See `TextCodec.encode`."""
        return self._encoder.encode(texts, room)

    def cut(self, ids: list[int], length: int) -> list[int]:
        """See `TextCodec.cut`."""
        return ids[:length] if self._side == "right" else ids[max(0, len(ids) - length) :]

    def decode(self, ids: Sequence[int]) -> str:
        """See `TextCodec.decode`."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def is_special(self, token: int) -> bool:
        """See `TextCodec.is_special`."""
        return token in self._special
