"""ModernBERT's settings that the golden folder leaves at their defaults, against a forward in NumPy and float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import candle_py
import numpy as np
import numpy.typing as npt
import pytest
from engine_models import GOLDEN, ModelFolder, cases, expected, ragged
from safetensors.numpy import load_file

# float32 against float64 through four layers of width 64.
TOLERANCE = 2e-5

Rows = npt.NDArray[np.float64]


class Reference:
    """The forward of arXiv:2412.13663 as its formulas read; one sequence at a time."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, npt.NDArray[Any]]) -> None:
        self.config = config
        self.tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def linear(self, name: str, x: Rows) -> Rows:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", np.zeros(1))

    def norm(self, name: str, x: Rows) -> Rows:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + self.config["norm_eps"])
        return scaled * self.tensors[f"{name}.weight"] + self.tensors.get(f"{name}.bias", np.zeros(1))

    def attention(self, layer: int, x: Rows) -> Rows:
        heads, length = self.config["num_attention_heads"], len(x)
        width = x.shape[1] // heads
        kind = self.config["layer_types"][layer]
        theta = self.config["rope_parameters"][kind]["rope_theta"]
        angles = np.arange(length)[:, None] * theta ** (-np.arange(0, width, 2) / width)
        cos, sin = np.cos(angles), np.sin(angles)

        def rotated(part: Rows) -> Rows:
            first, second = part[..., : width // 2], part[..., width // 2 :]
            return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

        qkv = self.linear(f"layers.{layer}.attn.Wqkv", x).reshape(length, 3, heads, width).transpose(1, 2, 0, 3)
        scores = rotated(qkv[0]) @ rotated(qkv[1]).transpose(0, 2, 1) / math.sqrt(width)
        if kind == "sliding_attention":
            apart = np.abs(np.arange(length)[:, None] - np.arange(length))
            scores = np.where(apart <= self.config["local_attention"] // 2, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = weights / weights.sum(-1, keepdims=True) @ qkv[2]
        return self.linear(f"layers.{layer}.attn.Wo", out.transpose(1, 0, 2).reshape(length, -1))

    def hidden_states(self, ids: list[int]) -> Rows:
        x = self.norm("embeddings.norm", self.tensors["embeddings.tok_embeddings.weight"][ids])
        for layer in range(self.config["num_hidden_layers"]):
            x = x + self.attention(layer, self.norm(f"layers.{layer}.attn_norm", x) if layer else x)
            inner, gate = np.split(
                self.linear(f"layers.{layer}.mlp.Wi", self.norm(f"layers.{layer}.mlp_norm", x)), 2, -1
            )
            gelu = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
            x = x + self.linear(f"layers.{layer}.mlp.Wo", gelu * gate)
        return self.norm("final_norm", x)


def test_the_reference_gives_the_golden_numbers() -> None:
    tensors = load_file(GOLDEN / "modernbert" / "model.safetensors")
    reference = Reference(json.loads((GOLDEN / "modernbert" / "config.json").read_text()), tensors)
    rows = [reference.hidden_states(ids) for ids in cases("modernbert")["ids"]]
    np.testing.assert_allclose(np.concatenate(rows), expected("modernbert", "hidden"), rtol=0, atol=TOLERANCE)


SETTINGS: dict[str, dict[str, Any]] = {
    "biases everywhere": {"norm_bias": True, "attention_bias": True, "mlp_bias": True},
    "norm biases": {"norm_bias": True},
    "a window of an odd size": {"local_attention": 7},
    "a window of one token": {"local_attention": 1},
    "all layers sliding": {"layer_types": ["sliding_attention"] * 4},
    "all layers full": {"layer_types": ["full_attention"] * 4},
    "other bases": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        }
    },
    "another eps": {"norm_eps": 0.1},
    "one wide head": {"num_attention_heads": 1},
    "many narrow heads": {"num_attention_heads": 32},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_are_obeyed(tmp_path: Path, setting: str) -> None:
    model = ModelFolder(tmp_path / "model", "modernbert")
    model.config |= SETTINGS[setting]
    generator = np.random.default_rng(5)
    kinds = {"norm": "norm_bias", "attn.": "attention_bias", "mlp.": "mlp_bias"}
    for name in list(model.tensors):
        switch = next((switch for part, switch in kinds.items() if part in name), None)
        if switch and model.config[switch]:
            rows = len(model.tensors[name])
            model.tensors[name.replace("weight", "bias")] = generator.normal(0, 0.3, rows).astype(np.float32)
    engine = candle_py.Engine.load(model.write())
    reference = Reference(model.config, model.tensors)
    sequences = cases("modernbert")["ids"]
    wanted = np.concatenate([reference.hidden_states(ids) for ids in sequences])
    np.testing.assert_allclose(engine.hidden_states(*ragged(sequences)), wanted, rtol=0, atol=TOLERANCE)


def test_a_long_sequence_is_rotated_and_windowed_like_a_short_one(tmp_path: Path) -> None:
    model = ModelFolder(tmp_path / "model", "modernbert")
    model.config["max_position_embeddings"] = 4096
    engine = candle_py.Engine.load(model.write())
    ids = np.random.default_rng(6).integers(3, 384, 1500).tolist()
    wanted = Reference(model.config, model.tensors).hidden_states(ids)
    np.testing.assert_allclose(engine.hidden_states(*ragged([ids])), wanted, rtol=0, atol=TOLERANCE)
