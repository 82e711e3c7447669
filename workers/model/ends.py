"""Start and end tokens that a tokenizer's config asks for and tokenizer.json forgets. Cuts and tokenises nothing.

Some models (gte-Qwen2 among them) add their end token in Python code of their own, which nobody runs here, and say so
with `add_eos_token: true`; their tokenizer.json puts nothing behind a text. Last-token pooling then reads the wrong
token. A token that is put there already is never put there twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from workers.errors import ModelError
from workers.model.jsonfile import read_object
from workers.model.layout import TOKENIZER_CONFIG

_PROBE = "a"


def add_missing_ends(tokenizer: Tokenizer, folder: Path) -> None:
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
