"""Models of well-known sizes with random weights, for speed on a GPU: written without PyTorch, as fast as the disk.

Weights are one block of random numbers over and over, which is no model, but costs a device the same.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

SEED = 20_251
_BLOCK = 1 << 22
_DEVIATION = 0.02
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model's `config.json`, and what is measured with it."""

    config: dict[str, Any]
    dtypes: tuple[str, ...]
    rows: int
    row_tokens: int
    new_tokens: int = 0


_BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "vocab_size": 30_522,
    "pad_token_id": 0,
}
_QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}


def _bert(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        **_BERT,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


MODELS = {
    "minilm": Sizes(_bert(384, 6, 12), ("float32", "bfloat16"), rows=2048, row_tokens=128),
    "bert-large": Sizes(_bert(1024, 24, 16), ("float32", "bfloat16"), rows=512, row_tokens=128),
    "qwen2.5-7b": Sizes(_QWEN, ("bfloat16",), rows=64, row_tokens=256, new_tokens=64),
}


def write_model(name: str, folder: Path) -> Path:
    """Write `config.json` and `model.safetensors`: float32 for a BERT, bfloat16 for a decoder.

    Args:
        name: One of `MODELS`.
        folder: Where the model goes; made here.
    """
    config = MODELS[name].config
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    is_bert = config["model_type"] == "bert"
    shapes = _bert_shapes(config) if is_bert else _qwen_shapes(config)
    dtype, width = ("F32", 4) if is_bert else ("BF16", 2)
    header, end = {}, 0
    for tensor, shape in shapes.items():
        begin, end = end, end + prod(shape) * width
        header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    block = (_DEVIATION * np.random.default_rng(SEED).standard_normal(_BLOCK)).astype(np.float32)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for tensor, shape in shapes.items():
            _fill(file, prod(shape), _ones(shape) if tensor.lower().endswith("norm.weight") else block, is_bert)
    return folder


def _ones(shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.ones(prod(shape), np.float32)


def _fill(file: BinaryIO, count: int, block: np.ndarray[Any, np.dtype[np.float32]], whole: bool) -> None:
    numbers = block if whole else (block.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16: float32's upper half
    while count > 0:
        file.write(numbers[:count].tobytes())
        count -= len(numbers)


def _bert_shapes(config: dict[str, Any]) -> Shapes:
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    shapes: Shapes = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], hidden),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], hidden),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], hidden),
    }
    shapes |= _with_bias("embeddings.LayerNorm", (hidden,))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"encoder.layer.{layer}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= _with_bias(f"{prefix}.attention.{name}", (hidden, hidden))
        shapes |= _with_bias(f"{prefix}.intermediate.dense", (intermediate, hidden))
        shapes |= _with_bias(f"{prefix}.output.dense", (hidden, intermediate))
        shapes |= _with_bias(f"{prefix}.attention.output.LayerNorm", (hidden,))
        shapes |= _with_bias(f"{prefix}.output.LayerNorm", (hidden,))
    return shapes


def _qwen_shapes(config: dict[str, Any]) -> Shapes:
    hidden, intermediate, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.mlp.gate_proj.weight": (intermediate, hidden),
            f"{prefix}.mlp.up_proj.weight": (intermediate, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, intermediate),
        }
        for name, rows in (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv)):
            shapes |= _with_bias(f"{prefix}.self_attn.{name}", (rows, hidden))
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def _with_bias(name: str, shape: tuple[int, ...]) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
