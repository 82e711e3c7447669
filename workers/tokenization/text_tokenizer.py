"""From texts to token ids as the model's own tokenizer gives them, cut to length. Pads nothing and knows no columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from sharding.errors import InputError
from sharding.words import counted
from workers.config import LimitName
from workers.model.files import read_model_files
from workers.model.tokenizer import load_tokenizer
from workers.tokenization.encode import BoundedEncoder, TextTokens, too_long
from workers.tokenization.rows import NO_TOKENS, NULL_TEXT, RowBuilder, TokenRows
from workers.tokenization.special import SpecialLayout, read_special_layout

_BATCH_TEXTS = 1024


class TextTokenizer:
    """The tokenizer of one model folder, with a limit, a prompt and a rule for longer texts.

    Truncation and padding that tokenizer.json bakes in are switched off. Special tokens written out in a text become
    those tokens, as in the reference implementations. Texts are cut by `workers.tokenization.encode` before they are
    tokenised, which never changes ids; only a text beyond its hard bound is cut there, and counts as truncated.

    Args:
        model_path: The model folder.
        max_tokens: Most tokens of one row, special tokens included; None is what the files say.
        prompt: Literal text put before every text (before the query of a pair).
        truncate: `end` cuts longer texts, `error` makes them row errors.

    Attributes:
        max_tokens: The limit in force; an asked one is never above what model and tokenizer allow.
        max_tokens_rule: What decided it.
        prompt_tokens: Leading tokens of each row that belong to the prompt, by sentence-transformers' rule: the tokens
            of the prompt alone, special tokens included, less a special one at the end.

    Raises:
        ModelError: The folder's tokenizer is missing, broken, or has more tokens than the model.
        InputError: The limit leaves no room for a token of the text.
    """

    def __init__(
        self,
        model_path: Path | str,
        *,
        max_tokens: int | None = None,
        prompt: str = "",
        truncate: Literal["end", "error"] = "end",
        limit_name: LimitName = "task.max_tokens",
    ) -> None:
        files = read_model_files(model_path)
        limit = files.limit_tokens(max_tokens)
        self.max_tokens = limit.max_tokens
        self.max_tokens_rule = limit.rule
        self._prompt = prompt
        self._truncate = truncate
        self._limit_name = limit_name
        self._tokenizer = load_tokenizer(files)
        self._side = files.truncation_side
        self._single = read_special_layout(self._tokenizer, 1)
        self._pair: SpecialLayout | None = None
        self._encoder = BoundedEncoder(
            self._tokenizer, files.tokenizer_path, max_tokens=self.max_tokens, side=self._side
        )
        self._check_room(self._single)
        self.prompt_tokens = self._count_prompt_tokens(files.special_tokens) if prompt else 0

    def tokenize_columns(self, columns: Sequence[Sequence[str | None]]) -> TokenRows:
        """Tokenise rows of one text, or of two (a pair), given as columns."""
        return self.tokenize(columns[0]) if len(columns) == 1 else self.tokenize_pairs(columns[0], columns[1])

    def tokenize(self, texts: Sequence[str | None]) -> TokenRows:
        """Tokenise single texts.

        Args:
            texts: A null is a row error.
        """
        rows = RowBuilder(with_types=self._single.has_types)
        room = self.max_tokens - self._single.count
        for start in range(0, len(texts), _BATCH_TEXTS):
            batch = texts[start : start + _BATCH_TEXTS]
            encoded = iter(self._encoder.encode([text for text in batch if text is not None], room, self._prompt))
            for text in batch:
                if text is None:
                    rows.add_error(NULL_TEXT)
                else:
                    self._add(rows, next(encoded))
        return rows.build()

    def tokenize_pairs(self, queries: Sequence[str | None], texts: Sequence[str | None]) -> TokenRows:
        """Tokenise pairs; too long ones lose tokens of the longer text first, as `longest_first` does.

        A pair whose second text is empty is the first one alone, without a second separator, as transformers has it for
        one pair at a time.

        Args:
            queries: First text of each pair; a null is a row error.
            texts: Second text of each pair; as many.

        Returns:
            Rows with `type_ids`.
        """
        layout = self._pair_layout()
        rows = RowBuilder(with_types=True)
        room = self.max_tokens - min(layout.count, self._single.count)
        for start in range(0, len(texts), _BATCH_TEXTS):
            pairs = list(zip(queries[start : start + _BATCH_TEXTS], texts[start : start + _BATCH_TEXTS], strict=True))
            whole = [(query, text) for query, text in pairs if query is not None and text is not None]
            first = iter(self._encoder.encode([query for query, _ in whole], room, self._prompt))
            second = iter(self._encoder.encode([text for _, text in whole], room))
            for query, text in pairs:
                if query is None or text is None:
                    rows.add_error(NULL_TEXT)
                    continue
                encoded = next(first), next(second)
                if text:
                    self._add_pair(rows, encoded, (self._prompt + query, text), layout)
                else:
                    self._add(rows, encoded[0])
        return rows.build()

    def _add(self, rows: RowBuilder, text: TextTokens) -> None:
        room = self.max_tokens - self._single.count
        truncated = text.cut or len(text.ids) > room
        if truncated and self._truncate == "error":
            rows.add_error(self._too_long([text], self._single.count), truncated=True)
        else:
            _lay_out(rows, truncated, self._single, self._cut(text.ids, room))

    def _add_pair(
        self,
        rows: RowBuilder,
        pair: tuple[TextTokens, TextTokens],
        texts: tuple[str, str],
        layout: SpecialLayout,
    ) -> None:
        room = self.max_tokens - layout.count
        first, second = pair
        truncated = first.cut or second.cut or len(first.ids) + len(second.ids) > room
        if truncated and self._truncate == "error":
            rows.add_error(self._too_long(pair, layout.count), truncated=True)
            return
        if room % 2 and min(len(first.ids), len(second.ids)) > room:
            # The odd token goes to the longer text: only here both lengths matter beyond the room.
            first, second = map(self._encoder.encode_whole, texts)
        lengths = share_room(len(first.ids), len(second.ids), room)
        _lay_out(rows, truncated, layout, self._cut(first.ids, lengths[0]), self._cut(second.ids, lengths[1]))

    def _too_long(self, texts: Sequence[TextTokens], special_tokens: int) -> str:
        return too_long(texts, self.max_tokens, self._limit_name, more=special_tokens)

    def _cut(self, ids: list[int], length: int) -> list[int]:
        if len(ids) <= length:
            return ids
        return ids[:length] if self._side == "right" else ids[len(ids) - length :]

    def _count_prompt_tokens(self, special_tokens: frozenset[str]) -> int:
        ids = self._single.ids(self._tokenizer.encode(self._prompt, add_special_tokens=False).ids)
        special = {self._tokenizer.token_to_id(token) for token in special_tokens} | set(self._single.pieces[1])
        return min(len(ids) - (bool(ids) and ids[-1] in special), self.max_tokens)

    def _check_room(self, layout: SpecialLayout) -> None:
        if self.max_tokens <= layout.count:
            raise InputError(
                f"task.max_tokens leaves no room beside {counted(layout.count, 'special token')}: `{self.max_tokens}`",
                hint=f"the limit comes from {self.max_tokens_rule}",
            )

    def _pair_layout(self) -> SpecialLayout:
        if self._pair is None:
            pair = read_special_layout(self._tokenizer, 2)
            self._check_room(pair)
            self._pair = pair
        return self._pair


def _lay_out(rows: RowBuilder, truncated: bool, layout: SpecialLayout, *texts: list[int]) -> None:
    """Add one row with its special tokens; one without any token is an error."""
    if ids := layout.ids(*texts):
        rows.add(ids, layout.types(*map(len, texts)) if rows.with_types else (), truncated=truncated)
    else:
        rows.add_error(NO_TOKENS, truncated=truncated)


def share_room(first: int, second: int, room: int) -> tuple[int, int]:
    """Tokens that each text of a pair keeps, as the tokenizers library's `longest_first` has it.

    The longer text gives way until both fit or both are equally long; of an odd room it has the one more.

    Args:
        first: Tokens of the first text.
        second: Tokens of the second.
        room: Tokens that both may have together.
    """
    if first + second <= room:
        return first, second
    shorter = min(first, second)
    longer = room - shorter
    if shorter > longer:
        shorter, longer = room // 2, room - room // 2
    return (longer, shorter) if first > second else (shorter, longer)
