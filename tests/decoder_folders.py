"""Text sides of decoders for tests: tokenizer, chat template and generation defaults around a made-up model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from model_folders import metaspace_bpe, plain_bpe, write_model
from tokenizers import Tokenizer, decoders, processors

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|start of a turn|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML with the marks that the tests' tokenizer has; a turn ends with `<|start of a turn|>` (id 6)."""


def byte_tokenizer(*, start: bool = False) -> Tokenizer:
    """Byte-level BPE whose decoder gives the text back; with `start`, `<s>` (id 0) before every text."""
    tokenizer = plain_bpe()
    tokenizer.decoder = decoders.ByteLevel()
    if start:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def space_tokenizer() -> Tokenizer:
    """Llama's kind with bytes for what it does not know."""
    tokenizer = metaspace_bpe()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def write_decoder(
    folder: Path,
    tokenizer: Tokenizer | None = None,
    *,
    template: str | None = None,
    generation: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **tokenizer_config: Any,
) -> str:
    """Write the folder; gives the source of a fake model with this text side."""
    tokenizer = tokenizer or byte_tokenizer()
    if template is not None:
        tokenizer_config["chat_template"] = template
    write_model(
        folder,
        tokenizer,
        config={"model_type": "llama", "max_position_embeddings": 512, **(config or {"eos_token_id": 2})},
        tokenizer_config=tokenizer_config,
        generation_config=generation,
    )
    return f"fake:8:{folder}"
