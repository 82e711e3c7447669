"""Tokenizers for tests of everything but tokenizers: a word is a token. The model behind is `workers.engine.fake`."""

from __future__ import annotations

from collections.abc import Sequence

from workers.engine.fake import END_ID, word_id
from workers.tokenization.encode import TextTokens
from workers.tokenization.rows import NULL_TEXT, RowBuilder, TokenRows


class FakeTokenizer:
    """Splits on white space; one id per word, one closing id."""

    prompt_tokens = 0

    def __init__(self, *, max_tokens: int, prompt: str) -> None:
        self._max_tokens = max_tokens
        self._prompt = prompt

    def tokenize_columns(self, columns: Sequence[Sequence[str | None]]) -> TokenRows:
        """See `workers.tokenization.window.Tokenizer.tokenize_columns`."""
        return self.tokenize(columns[0]) if len(columns) == 1 else self.tokenize_pairs(columns[0], columns[1])

    def tokenize(self, texts: Sequence[str | None]) -> TokenRows:
        """Token rows of texts; see `workers.tokenization.text_tokenizer.TextTokenizer.tokenize`."""
        return self._rows([text if text is None else self._prompt + text for text in texts])

    def tokenize_pairs(self, queries: Sequence[str | None], texts: Sequence[str | None]) -> TokenRows:
        """Token rows of pairs; see `workers.tokenization.text_tokenizer.TextTokenizer.tokenize_pairs`."""
        pairs = zip(queries, texts, strict=True)
        return self._rows([None if q is None or t is None else f"{q} | {t}" for q, t in pairs])

    def _rows(self, texts: Sequence[str | None]) -> TokenRows:
        rows = RowBuilder(with_types=False)
        most = self._max_tokens - 1
        for text in texts:
            if text is None:
                rows.add_error(NULL_TEXT)
            else:
                words = text.split()
                rows.add([word_id(word) for word in words[:most]] + [END_ID], truncated=len(words) > most)
        return rows.build()


class FakeCodec:
    """See `workers.tokenization.codec.TextCodec`: one id per word, and a word for every id. Id 1 ends a text."""

    start_ids: tuple[int, ...] = ()
    hard_chars = 1 << 20

    def encode(self, texts: Sequence[str], room: int) -> list[TextTokens]:
        """See `workers.tokenization.codec.TextCodec.encode`."""
        return [TextTokens([word_id(word) for word in text.split()], cut=False, complete=True) for text in texts]

    def cut(self, ids: list[int], length: int) -> list[int]:
        """See `workers.tokenization.codec.TextCodec.cut`."""
        return ids[:length]

    def decode(self, ids: Sequence[int]) -> str:
        """See `workers.tokenization.codec.TextCodec.decode`."""
        return " ".join(f"w{token}" for token in ids if token != END_ID)

    def is_special(self, token: int) -> bool:
        """See `workers.tokenization.codec.TextCodec.is_special`."""
        return token == END_ID
