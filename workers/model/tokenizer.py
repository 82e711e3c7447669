"""Loading a model folder's tokenizer.json, with truncation and padding off. Tokenises nothing itself."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, normalizers

from workers.errors import ModelError
from workers.model.ends import add_missing_ends
from workers.model.files import ModelFiles
from workers.model.jsonfile import read_object
from workers.model.layout import CONFIG, TOKENIZER


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Load the tokenizer of a model.

    Raises:
        ModelError: The file is broken, has ids that the model's embedding does not, or no token that its config adds.
    """
    try:
        tokenizer = Tokenizer.from_file(str(files.tokenizer_path))
    except Exception as error:
        raise ModelError(f"{TOKENIZER} cannot be read ({error}): `{files.tokenizer_path}`") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    add_missing_ends(tokenizer, (files.tokenizer_path or files.path).parent)
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if files.vocab_size is not None and highest >= files.vocab_size:
        raise ModelError(
            f"the tokenizer's ids go up to {highest}, {CONFIG} has vocab_size {files.vocab_size}: `{files.path}`",
            hint="is the tokenizer of another model?",
        )
    content = read_object(files.tokenizer_path)
    if files.lowercase and not _lowercases(content.get("normalizer")):
        lowercase = normalizers.Lowercase()
        old = tokenizer.normalizer
        tokenizer.normalizer = normalizers.Sequence([lowercase] if old is None else [lowercase, old])
    return tokenizer


def _lowercases(normalizer: Any) -> bool:
    """Whether a normalizer of tokenizer.json already makes lower case of a text."""
    if not isinstance(normalizer, dict):
        return False
    if normalizer.get("type") == "Sequence":
        return any(_lowercases(member) for member in normalizer.get("normalizers", []))
    return normalizer.get("type") == "Lowercase" or normalizer.get("lowercase") is True
