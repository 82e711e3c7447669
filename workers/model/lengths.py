"""How many tokens one row may have, and which file said so. Decides from numbers only; `files` reads the rest.

For `task.max_tokens: auto` the first that speaks wins, and is never above the model's positions:

    1. `max_seq_length` of sentence_bert_config.json (or one of its older names)
    2. `model_max_length` of tokenizer_config.json, unless it is the huge number that means "none"
    3. `max_position_embeddings` of config.json

The truncation that may be baked into tokenizer.json is never asked: it tells how the file was last used, not what the
model can do. A number in the spec goes before all three, and never above the ceiling: the model's positions, and the
tokenizer's `model_max_length` (or `max_seq_length` where that is higher, for then the authors say so).
RoBERTa and its kin count positions from `pad_token_id + 1` on, so that many of theirs are not for tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.errors import ModelError
from workers.model.jsonfile import NO_LIMIT, read_count

_OFFSET_MODEL_TYPES = frozenset({"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "data2vec-text"})
_OFFSET_PAD_TOKEN_ID = 1
_POSITION_KEYS = ("max_position_embeddings", "n_positions")


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """Most tokens of one row, special tokens included, and the rule that decided it, in words."""

    max_tokens: int
    rule: str


@dataclass(frozen=True, slots=True)
class LengthFacts:
    """What the files say about lengths; None where they are silent.

    Attributes:
        positions: The model's positions that tokens may take, with the rule in words.
        tokenizer: `model_max_length`.
        declared: `max_seq_length`.
    """

    positions: TokenLimit | None
    tokenizer: TokenLimit | None
    declared: TokenLimit | None

    def limit(self, requested: int | None = None) -> TokenLimit:
        """The limit in force.

        Args:
            requested: `task.max_tokens`; None is `auto`.

        Raises:
            ModelError: Nothing was asked for and no file says anything.
        """
        if requested is not None:
            return _lowest(TokenLimit(requested, "task.max_tokens"), self._allowed(), self.positions)
        named = self.declared or self.tokenizer or self.positions
        if named is None:
            raise ModelError(
                "no file of the model says how long a text may be: `max_position_embeddings`",
                hint="set task.max_tokens",
            )
        return _lowest(named, self.positions)

    def _allowed(self) -> TokenLimit | None:
        """What the tokenizer allows: the higher of what it says and what the authors declared."""
        if self.tokenizer is None:
            return None
        return max((limit for limit in (self.tokenizer, self.declared) if limit), key=lambda limit: limit.max_tokens)


def read_length_facts(
    config: tuple[dict[str, Any], Path],
    tokenizer_config: tuple[dict[str, Any], Path],
    transformer_config: tuple[dict[str, Any], Path],
) -> LengthFacts:
    """Take the numbers out of three files, each given as its content and path.

    Raises:
        ModelError: A number is not one, or too few positions are left.
    """
    return LengthFacts(
        _positions(*config),
        read_tokenizer_length(*tokenizer_config),
        _named("max_seq_length", *transformer_config),
    )


def read_tokenizer_length(tokenizer_config: dict[str, Any], path: Path) -> TokenLimit | None:
    """What tokenizer_config.json says, given as its content and path.

    Raises:
        ModelError: It says something that is no number.
    """
    return _named("model_max_length", tokenizer_config, path)


def _named(key: str, content: dict[str, Any], path: Path) -> TokenLimit | None:
    count = read_count(content, key, path)
    return None if count is None else TokenLimit(count, f"{key} of {path.name}")


def _positions(config: dict[str, Any], path: Path) -> TokenLimit | None:
    key = next((key for key in _POSITION_KEYS if config.get(key) not in (None, -1)), None)
    if key is None:
        return None
    count = read_count(config, key, path)
    if count is None:
        return None
    if config.get("model_type") not in _OFFSET_MODEL_TYPES:
        return TokenLimit(count, f"{key} of {path.name}")
    pad_token_id = read_count(config, "pad_token_id", path, least=0)
    offset = (_OFFSET_PAD_TOKEN_ID if pad_token_id is None else pad_token_id) + 1
    if count <= offset:
        raise ModelError(f"{path.name} leaves no position for a token: `{key} {count}, pad_token_id {offset - 1}`")
    return TokenLimit(count - offset, f"{key} of {path.name}, less the first {offset}")


def _lowest(wanted: TokenLimit, *caps: TokenLimit | None) -> TokenLimit:
    cap = min((cap for cap in caps if cap), key=lambda limit: limit.max_tokens, default=TokenLimit(NO_LIMIT, ""))
    if wanted.max_tokens <= cap.max_tokens:
        return wanted
    return TokenLimit(cap.max_tokens, f"{wanted.rule} ({wanted.max_tokens}), capped by {cap.rule}")
