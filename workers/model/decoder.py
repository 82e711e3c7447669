"""What a decoder's files say about prompts and endings: tokenizer, special tokens, chat template, generation defaults.

A folder says it in tokenizer.json, tokenizer_config.json, chat_template.jinja, config.json and generation_config.json.
Renders nothing and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from tokenizers import Tokenizer

from workers.errors import ModelError
from workers.model.files import read_model_files
from workers.model.jsonfile import read_object
from workers.model.layout import CONFIG, TOKENIZER_CONFIG, text_folder
from workers.model.tokenizer import load_tokenizer

GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class DecoderFiles:
    """One decoder's files.

    Attributes:
        tokenizer: Without truncation and padding.
        special_tokens: `bos_token`, `eos_token` and the like that the tokenizer's config names, as text.
        chat_template: Jinja source, or None.
        chat_template_place: The file it comes from.
        generation_config: Content of generation_config.json; empty without one.
        config: Content of config.json, or what a GGUF file says instead.
        config_place: The file that `config` is from.
        truncation_side: The end of a prompt that is cut off.
    """

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    chat_template: str | None
    chat_template_place: str
    generation_config: Mapping[str, Any]
    config: Mapping[str, Any]
    truncation_side: Literal["right", "left"]
    config_place: str = CONFIG


def read_decoder_files(path: Path) -> DecoderFiles:
    """Read a model folder, or a GGUF file.

    Raises:
        ModelError: A file is missing, broken, or at odds with another.
    """
    files = read_model_files(path)
    gguf = files.gguf  # what a GGUF file says of itself; what lies beside it goes first
    place = text_folder(path) if gguf is None else path.parent
    tokenizer_config = read_object(place / TOKENIZER_CONFIG)
    template, origin = _chat_template(place, tokenizer_config)
    special_tokens = _special_tokens(tokenizer_config)
    config, config_place = read_object(place / CONFIG), CONFIG
    if gguf is not None:
        special_tokens = special_tokens or dict(gguf.special_tokens)
        if not config:
            config, config_place = {"eos_token_id": list(gguf.end_ids)}, path.name
        if template is None:
            template, origin = gguf.chat_template, path.name
    return DecoderFiles(
        tokenizer=load_tokenizer(files),
        special_tokens=MappingProxyType(special_tokens),
        chat_template=template,
        chat_template_place=origin,
        generation_config=read_object(place / GENERATION_CONFIG),
        config=config,
        truncation_side=files.truncation_side,
        config_place=config_place,
    )


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key in _TOKEN_KEYS:
        token = tokenizer_config.get(key)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[key] = content
    return found


def _chat_template(place: Path, tokenizer_config: Mapping[str, Any]) -> tuple[str | None, str]:
    """The file of its own goes before the key; of several named templates, the one called default."""
    path = place / CHAT_TEMPLATE
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8"), CHAT_TEMPLATE
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the chat template cannot be read ({error}): `{path}`") from error
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default", next(iter(named.values())) if len(named) == 1 else None)
        if template is None and named:
            raise ModelError(
                f"{TOKENIZER_CONFIG} has several chat templates, none is `default`: `{', '.join(map(str, named))}`"
            )
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{TOKENIZER_CONFIG} gives a chat_template that is no text: `{type(template).__name__}`")
    return template, f"chat_template of {TOKENIZER_CONFIG}"
