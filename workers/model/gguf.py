"""What a GGUF file says about text: tokenizer, special tokens, chat template, positions. Reads no tensor.

Files in the folder beside it go first where there are any: a tokenizer.json, and what a model folder has besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from workers.errors import ModelError
from workers.model.gguf_tokenizer import tokenizer_content
from workers.model.gguf_vocabulary import CONTROL, PREFIX, Vocabulary, read_vocabulary

CHAT_TEMPLATE = "tokenizer.chat_template"
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
}
"""transformers' names, and the format's (the spelling is its own)."""
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True)
class GgufText:
    """What one file says.

    Attributes:
        path: The file.
        metadata: Everything in its header but the tensors.
        architecture: Such as `llama`; Hugging Face's `model_type` for the families that the engine runs.
        context_length: The model's positions, or None.
    """

    path: Path
    metadata: Mapping[str, Any]
    architecture: str
    context_length: int | None

    @property
    def context_key(self) -> str:
        """The key that gives the positions."""
        return f"{self.architecture}.context_length"

    def tokenizer_content(self) -> dict[str, Any]:
        """The tokenizer as the content of a tokenizer.json.

        Raises:
            ModelError: It is of a kind that is not supported, or damaged; the message names it.
        """
        return tokenizer_content(self.metadata, self.path.name)

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding: as said, or as many as tokens are listed."""
        said = self.metadata.get(f"{self.architecture}.vocab_size")
        tokens = self.metadata.get(f"{PREFIX}tokens")
        return said if isinstance(said, int) else len(tokens) if isinstance(tokens, list) else None

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of `bos_token`, `eos_token` and the like, those that the file names.

        Raises:
            ModelError: One of them is no token's id.
        """
        vocabulary = self._vocabulary()
        if vocabulary is None:
            return {}
        found = {name: vocabulary.special(self.metadata, key) for name, key in _SPECIAL_TOKENS.items()}
        return MappingProxyType({name: vocabulary.tokens[index] for name, index in found.items() if index is not None})

    @property
    def control_tokens(self) -> frozenset[str]:
        """Texts of all tokens that are no text of their own."""
        vocabulary = self._vocabulary()
        if vocabulary is None:
            return frozenset()
        pairs = zip(vocabulary.tokens, vocabulary.types, strict=True)
        return frozenset(token for token, kind in pairs if kind == CONTROL)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a text: end of text, of turn, of message, those that the file names, each once.

        Raises:
            ModelError: One of them is no token's id.
        """
        vocabulary = self._vocabulary()
        if vocabulary is None:
            return ()
        found = (vocabulary.special(self.metadata, key) for key in _END_TOKENS)
        return tuple(dict.fromkeys(index for index in found if index is not None))

    @property
    def chat_template(self) -> str | None:
        """Jinja source, or None.

        Raises:
            ModelError: It is no text.
        """
        template = self.metadata.get(CHAT_TEMPLATE)
        if template is not None and not isinstance(template, str):
            raise ModelError(f"{self.path.name} has a chat template that is no text: `{CHAT_TEMPLATE}`")
        return template

    def _vocabulary(self) -> Vocabulary | None:
        if f"{PREFIX}tokens" not in self.metadata:
            return None
        return read_vocabulary(self.metadata, self.path.name)


def read_gguf(path: Path) -> GgufText:
    """Read a file's metadata.

    Raises:
        ModelError: It is missing, damaged, of another format or version, or does not say what it holds.
    """
    from workers.engine.candle import read_gguf_metadata

    metadata = read_gguf_metadata(path)
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError(f"the GGUF file does not name an architecture: `{path}`")
    context_length = metadata.get(f"{architecture}.context_length")
    if context_length is not None and (not isinstance(context_length, int) or context_length < 1):
        raise ModelError(f"{path.name} gives a context length that is no whole number: `{context_length!r}`")
    return GgufText(path, MappingProxyType(metadata), architecture, context_length)
