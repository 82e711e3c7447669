"""The tokens that a GGUF file lists: by id, with what each is. Knows nothing of how a text is split into them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sharding.words import counted
from workers.errors import ModelError

PREFIX = "tokenizer.ggml."
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
BESIDE_HINT = "put the model's tokenizer.json into the folder of the file"
SPACE = "▁"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id, and what each is.

    Attributes:
        tokens: In the order of ids; no two are equal.
        types: llama.cpp's number for what each is; all normal where the file does not say.
        name: The file's name, for errors.
    """

    tokens: list[str]
    types: list[int]
    name: str

    def added_tokens(self) -> list[dict[str, Any]]:
        """Control, unknown and user-defined tokens, which are found in a text before it is split."""
        return [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                # SentencePiece's own spaces are there only once a text is normalised.
                "normalized": kind == USER_DEFINED and SPACE in token,
                "special": kind != USER_DEFINED,
            }
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
        ]

    def ids(self) -> dict[str, int]:
        """Every token's id."""
        return {token: index for index, token in enumerate(self.tokens)}

    def special(self, metadata: Mapping[str, Any], key: str, default: int | None = None) -> int | None:
        """The id that a key such as `bos_token_id` gives; None where there is none.

        Raises:
            ModelError: It is no token's.
        """
        value = metadata.get(f"{PREFIX}{key}", default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise ModelError(f"{self.name} gives a {PREFIX}{key} that is no token's id: `{value!r}`")
        return value


def read_vocabulary(metadata: Mapping[str, Any], name: str) -> Vocabulary:
    """Take the vocabulary out of a file's metadata.

    Raises:
        ModelError: It is missing, or its parts do not fit each other.
    """
    tokens = read_list(metadata, "tokens", str, name)
    if f"{PREFIX}token_type" in metadata:
        types = read_list(metadata, "token_type", int, name, len(tokens))
    else:
        types = [1] * len(tokens)
    if len(set(tokens)) < len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise ModelError(f"{name} lists a token twice in {PREFIX}tokens: `{twice}`", hint=BESIDE_HINT)
    return Vocabulary(tokens, types, name)


def read_list(metadata: Mapping[str, Any], key: str, kind: type, name: str, length: int | None = None) -> list[Any]:
    """Take a list of the tokenizer out of a file's metadata.

    Args:
        metadata: Of the file.
        key: Without the prefix that all of the tokenizer's have.
        kind: What every value must be.
        name: The file's name, for errors.
        length: Values that it must have, where that is known.

    Raises:
        ModelError: It is missing, empty, of another type or of another length.
    """
    values = metadata.get(f"{PREFIX}{key}")
    if not isinstance(values, list) or not values or not all(isinstance(value, kind) for value in values):
        raise ModelError(f"{name} lacks a part of its tokenizer, or has one of another type: `{PREFIX}{key}`")
    if length is not None and len(values) != length:
        raise ModelError(f"{name} has {counted(length, 'token')} and another number of {PREFIX}{key}: `{len(values)}`")
    return values
