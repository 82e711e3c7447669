"""What a model folder or GGUF file says about text: lengths, prompts, case. Reads neither weights nor tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from workers.errors import ModelError
from workers.model.gguf import GgufText, read_gguf
from workers.model.jsonfile import read_count, read_object
from workers.model.layout import (
    CONFIG,
    PROMPTS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TRANSFORMER_CONFIGS,
    is_gguf,
    read_modules,
    text_folder,
)
from workers.model.lengths import LengthFacts, TokenLimit, read_length_facts, read_tokenizer_length

_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the files say, before a task asks for anything.

    Attributes:
        path: The model folder, or the GGUF file.
        tokenizer_path: Its `tokenizer.json`, which exists; None where a GGUF file has none beside it.
        model_type: `model_type` of `config.json`.
        vocab_size: Rows of the embedding matrix as `config.json` says, or None.
        lengths: Everything the files say about lengths.
        prompts: Prompts by name.
        default_prompt_name: The prompt that is used when nobody asks for one, or None.
        include_prompt: Whether pooling takes the prompt's tokens in.
        lowercase: Texts are lower-cased before everything else.
        truncation_side: The end of a text that is cut off.
        special_tokens: Contents of the tokens that the tokenizer's config calls special.
        gguf: What the GGUF file says, where the model is one.
    """

    path: Path
    tokenizer_path: Path | None
    model_type: str
    vocab_size: int | None
    lengths: LengthFacts
    prompts: Mapping[str, str]
    default_prompt_name: str | None
    include_prompt: bool
    lowercase: bool
    truncation_side: Literal["right", "left"]
    special_tokens: frozenset[str]
    gguf: GgufText | None = None

    @property
    def config_name(self) -> str:
        """The file that gives `vocab_size`."""
        return CONFIG if self.gguf is None else self.path.name

    @property
    def max_tokens(self) -> int:
        """Most tokens of one row, special tokens included, when the task asks for `auto`."""
        return self.lengths.limit().max_tokens

    @property
    def max_tokens_rule(self) -> str:
        """The file and key that decided `max_tokens`."""
        return self.lengths.limit().rule

    def limit_tokens(self, requested: int | None) -> TokenLimit:
        """The limit in force for `task.max_tokens`; None is `auto`. See `workers.model.lengths`."""
        return self.lengths.limit(requested)


@dataclass(frozen=True, slots=True)
class PromptChoice:
    """The prompt in force, and the rule that chose it, in words."""

    text: str
    rule: str


def read_model_files(path: Path | str) -> ModelFiles:
    """Read what a model folder says about text.

    Args:
        path: The model folder, or a GGUF file.

    Raises:
        ModelError: `config.json` or `tokenizer.json` is missing, or a file is broken or says something impossible.
    """
    folder = Path(path)
    if is_gguf(folder):
        return _read_gguf_files(folder)
    place = text_folder(folder)
    config = read_object(place / CONFIG)
    if not config:
        raise ModelError(f"the model folder has no {CONFIG}, or an empty one: `{place}`")
    tokenizer_path = place / TOKENIZER
    if not tokenizer_path.is_file():
        raise ModelError(
            f"the model folder has no {TOKENIZER}: `{place}`",
            hint="transformers writes one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )
    tokenizer_config = read_object(place / TOKENIZER_CONFIG)
    transformer, transformer_path = _first_config(place)
    prompts, default_prompt_name = _read_prompts(folder / PROMPTS)
    return ModelFiles(
        path=folder,
        tokenizer_path=tokenizer_path,
        model_type=str(config.get("model_type", "")),
        vocab_size=read_count(config, "vocab_size", place / CONFIG),
        lengths=read_length_facts(
            (config, place / CONFIG),
            (tokenizer_config, place / TOKENIZER_CONFIG),
            (transformer, transformer_path),
        ),
        prompts=MappingProxyType(prompts),
        default_prompt_name=default_prompt_name,
        include_prompt=_include_prompt(folder),
        lowercase=transformer.get("do_lower_case") is True,
        truncation_side=_truncation_side(tokenizer_config),
        special_tokens=_special_tokens(tokenizer_config),
    )


def choose_prompt(files: ModelFiles, prompt: str) -> PromptChoice:
    """Choose the text that is put before every text.

    Args:
        files: What the model's files say.
        prompt: `auto`, `none`, the name of a prompt in the model's files, or literal text. A name goes before text.
    """
    if prompt == "none":
        return PromptChoice("", "task.prompt: none")
    if prompt == "auto":
        name = files.default_prompt_name
        if name is None:
            return PromptChoice("", "the model names no default prompt")
        return PromptChoice(files.prompts[name], f"the model's default prompt {name}")
    if prompt in files.prompts:
        return PromptChoice(files.prompts[prompt], f"the model's prompt {prompt}")
    named = ", ".join(sorted(files.prompts)) or "no prompts"
    return PromptChoice(prompt, f"literal text (the model's files name {named})")


def _read_gguf_files(path: Path) -> ModelFiles:
    """The same of a GGUF file; what lies in its folder besides says more about text where it is there."""
    gguf = read_gguf(path)
    tokenizer_path = path.parent / TOKENIZER
    tokenizer_config = read_object(path.parent / TOKENIZER_CONFIG)
    positions = gguf.context_length and TokenLimit(gguf.context_length, f"{gguf.context_key} of {path.name}")
    return ModelFiles(
        path=path,
        tokenizer_path=tokenizer_path if tokenizer_path.is_file() else None,
        model_type=gguf.architecture,
        vocab_size=gguf.vocab_size,
        lengths=LengthFacts(
            positions or None, read_tokenizer_length(tokenizer_config, path.parent / TOKENIZER_CONFIG), None
        ),
        prompts=MappingProxyType({}),
        default_prompt_name=None,
        include_prompt=True,
        lowercase=False,
        truncation_side=_truncation_side(tokenizer_config),
        special_tokens=_special_tokens(tokenizer_config) or gguf.control_tokens,
        gguf=gguf,
    )


def _first_config(place: Path) -> tuple[dict[str, Any], Path]:
    """The first `sentence_*_config.json` that says anything, as sentence-transformers looks for it."""
    for name in TRANSFORMER_CONFIGS:
        if content := read_object(place / name):
            return content, place / name
    return {}, place / TRANSFORMER_CONFIGS[0]


def _read_prompts(path: Path) -> tuple[dict[str, str], str | None]:
    content = read_object(path)
    prompts = content.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise ModelError(f"{path.name} gives prompts that are no object: `{prompts!r}`")
    texts = {str(name): "" if text is None else text for name, text in prompts.items()}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ModelError(f"{path.name} gives the prompt {name} a value that is no text: `{text!r}`")
    default = content.get("default_prompt_name")
    if default is not None and default not in texts:
        raise ModelError(f"{path.name} names a default prompt that is not among its prompts: `{default}`")
    return texts, default


def _include_prompt(folder: Path) -> bool:
    for module in read_modules(folder):
        if module.kind == "Pooling":
            return read_object(folder / module.path / CONFIG).get("include_prompt") is not False
    return True


def _truncation_side(tokenizer_config: dict[str, Any]) -> Literal["right", "left"]:
    side = tokenizer_config.get("truncation_side", "right")
    if side not in ("right", "left"):
        raise ModelError(f"{TOKENIZER_CONFIG} gives a truncation_side that is neither right nor left: `{side}`")
    return "left" if side == "left" else "right"


def _special_tokens(tokenizer_config: dict[str, Any]) -> frozenset[str]:
    """What transformers calls all special tokens: the named ones and the additional ones."""
    additional = tokenizer_config.get("additional_special_tokens") or tokenizer_config.get("extra_special_tokens") or []
    if isinstance(additional, dict):
        additional = list(additional.values())
    tokens = [tokenizer_config.get(key) for key in _SPECIAL_TOKEN_KEYS] + list(additional)
    contents = (token.get("content") if isinstance(token, dict) else token for token in tokens)
    return frozenset(content for content in contents if isinstance(content, str))
