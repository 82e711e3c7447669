"""Names and shapes of a decoder's weights from its `config.json` alone, for plans without any weight. Reads no file.

Sources: the models' own checkpoints; `tests/test_tensor_layout.py` holds this against files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sharding.errors import InputError
from sharding.tensor import ModelSizes

MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""Those whose shapes are known here."""


@dataclass(frozen=True, slots=True)
class DecoderShapes:
    """A decoder as its config tells it.

    Attributes:
        sizes: What decides how it can be split.
        shapes: Of every weight, by name.
        max_positions: Most tokens of a row.
    """

    sizes: ModelSizes
    hidden_size: int
    layers: int
    max_positions: int
    shapes: Mapping[str, tuple[int, ...]]


def decoder_shapes(config: Mapping[str, object]) -> DecoderShapes:
    """What the weights of a Llama, Qwen2 or Qwen3 are.

    Raises:
        InputError: It is another model, or a size is missing.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise InputError(
            f"model_type is none whose weights are known from config.json alone: `{kind}`",
            hint=f"known are {', '.join(MODEL_TYPES)}; with its weights beside it, any model is planned",
        )
    sizes = ModelSizes.from_config(config)
    hidden, layers = _count(config, "hidden_size"), _count(config, "num_hidden_layers")
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes.vocab_size, hidden)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer(config, sizes, hidden).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (sizes.vocab_size, hidden)
    return DecoderShapes(sizes, hidden, layers, _count(config, "max_position_embeddings"), shapes)


def _layer(config: Mapping[str, object], sizes: ModelSizes, hidden: int) -> dict[str, tuple[int, ...]]:
    kind = config["model_type"]
    queries, keys, inner = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim, sizes.intermediate_size
    attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    output = {"o_proj": (hidden, queries)}
    feed_forward = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    weights = [*attention.items(), *output.items()]
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{name}.weight": shape for name, shape in weights}
    shapes |= {f"mlp.{name}.weight": shape for name, shape in feed_forward.items()}
    shapes |= {f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    has_bias = bool(config.get("attention_bias", False))
    if has_bias or kind == "qwen2":
        shapes |= {f"self_attn.{name}.bias": shape[:1] for name, shape in attention.items()}
    if has_bias and kind != "qwen2":
        shapes |= {f"self_attn.{name}.bias": shape[:1] for name, shape in output.items()}
    if config.get("mlp_bias", False):
        shapes |= {f"mlp.{name}.bias": shape[:1] for name, shape in feed_forward.items()}
    if kind == "qwen3":
        shapes |= {f"self_attn.{name}.weight": (sizes.head_dim,) for name in ("q_norm", "k_norm")}
    return shapes


def _count(config: Mapping[str, object], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json has no size that can be used, `{key}`: `{value}`")
    return value
