"""Loading the tokenizer of a model folder or GGUF file, with truncation and padding off. Tokenises nothing itself."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, normalizers

from workers.errors import ModelError
from workers.model.ends import add_missing_ends
from workers.model.files import ModelFiles
from workers.model.jsonfile import read_object
from workers.model.layout import TOKENIZER


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Load the tokenizer of a model.

    Raises:
        ModelError: The file is broken, has ids that the model's embedding does not, or no token that its config adds.
    """
    path = files.tokenizer_path
    try:
        if path is not None:
            tokenizer = Tokenizer.from_file(str(path))
        else:
            tokenizer = Tokenizer.from_str(json.dumps(_gguf_content(files)))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{TOKENIZER if path else 'the tokenizer'} cannot be read ({error}): `{path or files.path}`"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    add_missing_ends(tokenizer, (files.tokenizer_path or files.path).parent)
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if files.vocab_size is not None and highest >= files.vocab_size:
        raise ModelError(
            f"the tokenizer's ids go up to {highest}, {files.config_name} has vocab_size {files.vocab_size}: "
            f"`{files.path}`",
            hint="is the tokenizer of another model?",
        )
    if path is not None and files.lowercase and not _lowercases(read_object(path).get("normalizer")):
        lowercase = normalizers.Lowercase()
        old = tokenizer.normalizer
        tokenizer.normalizer = normalizers.Sequence([lowercase] if old is None else [lowercase, old])
    return tokenizer


def _gguf_content(files: ModelFiles) -> dict[str, Any]:
    if files.gguf is None:
        raise ModelError(f"the model has no {TOKENIZER}: `{files.path}`")
    return files.gguf.tokenizer_content()


def _lowercases(normalizer: Any) -> bool:
    """Whether a normalizer of tokenizer.json already makes lower case of a text."""
    if not isinstance(normalizer, dict):
        return False
    if normalizer.get("type") == "Sequence":
        return any(_lowercases(member) for member in normalizer.get("normalizers", []))
    return normalizer.get("type") == "Lowercase" or normalizer.get("lowercase") is True
