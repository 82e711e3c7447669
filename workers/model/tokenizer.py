"""Loading the tokenizer of a model folder or GGUF file, with truncation and padding off. Tokenises nothing itself.

Some models (gte-Qwen2 among them) add their end token in Python code of their own, which nobody runs here, and say so
with `add_eos_token: true`; their tokenizer.json puts nothing behind a text. Last-token pooling then reads the wrong
token. Such a token is added here, and one that is put there already is never put there twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers, processors

from workers.errors import ModelError
from workers.model.files import ModelFiles
from workers.model.jsonfile import read_object
from workers.model.layout import TOKENIZER, TOKENIZER_CONFIG

_PROBE = "a"


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
    _add_missing_ends(tokenizer, (files.tokenizer_path or files.path).parent)
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


def _add_missing_ends(tokenizer: Tokenizer, folder: Path) -> None:
    """Give a tokenizer the start and end token that its config asks for, each once.

    Args:
        tokenizer: Changed in place.
        folder: Where its tokenizer_config.json may lie.

    Raises:
        ModelError: The file is broken, asks for a token that it does not name, or that the tokenizer does not have.
    """
    config = read_object(folder / TOKENIZER_CONFIG)
    start, end = _asked(tokenizer, config, "bos"), _asked(tokenizer, config, "eos")
    found = tokenizer.encode(_PROBE).ids
    start = None if start is not None and found[:1] == [start[1]] else start
    end = None if end is not None and found[-1:] == [end[1]] else end
    if start is None and end is None:
        return
    before = f"{start[0]} " if start is not None else ""
    after = f" {end[0]}" if end is not None else ""
    added = processors.TemplateProcessing(
        single=f"{before}$A{after}",
        pair=f"{before}$A{after} {before}$B:1{after}",
        special_tokens=[token for token in (start, end) if token is not None],
    )
    inner = tokenizer.post_processor
    tokenizer.post_processor = added if inner is None else processors.Sequence([inner, added])


def _asked(tokenizer: Tokenizer, config: Mapping[str, Any], name: str) -> tuple[str, int] | None:
    """Text and id of a token that the config asks for, or None."""
    if config.get(f"add_{name}_token") is not True:
        return None
    token = config.get(f"{name}_token")
    content = token.get("content") if isinstance(token, dict) else token
    if content is None:
        return None
    found = tokenizer.token_to_id(content) if isinstance(content, str) else None
    if found is None:
        raise ModelError(f"{TOKENIZER_CONFIG} adds a {name}_token that the tokenizer does not have: `{content!r}`")
    return content, found
