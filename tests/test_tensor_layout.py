"""The table of tensor-parallel slices: what planners compute is what the engine loads, and it covers every weight."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import candle_py
import pytest
from engine_models import GOLDEN
from safetensors import safe_open

from sharding.errors import InputError
from sharding.tensor import ModelSizes, TensorSlice, check_world, rank_numbers, slice_tensor

WORLDS = [
    ("qwen2", 1),
    ("qwen2", 2),
    ("qwen2", 4),
    ("qwen2-untied", 2),
    ("qwen3", 2),
    ("qwen3", 4),
    ("llama", 2),
    ("llama", 4),
    ("llama", 8),
    ("bert", 2),
    ("bert", 4),
    ("roberta", 3),
    ("xlm-roberta", 2),
    ("distilbert", 4),
    ("modernbert", 2),
    ("modernbert", 4),
    ("bert-classifier", 2),
]
QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}


def _sizes(name: str) -> ModelSizes:
    return ModelSizes.from_config(json.loads((GOLDEN / name / "config.json").read_text()))


def _shapes(name: str) -> dict[str, tuple[int, ...]]:
    with safe_open(GOLDEN / name / "model.safetensors", "numpy") as file:
        return {tensor: tuple(file.get_slice(tensor).get_shape()) for tensor in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize(("name", "world"), WORLDS)
def test_the_engine_loads_what_the_table_says(name: str, world: int) -> None:
    sizes = _sizes(name)
    check_world(sizes, world)
    for rank in range(world):
        loaded = candle_py.inspect_rank(GOLDEN / name, rank, world)
        assert loaded.keys() == _shapes(name).keys()
        for tensor, part in loaded.items():
            assert part == _as_tuple(slice_tensor(tensor, sizes, rank=rank, world=world)), tensor


def _as_tuple(part: TensorSlice | None) -> tuple[int | None, int, int, int] | None:
    return None if part is None else (part.axis, part.start, part.stop, part.blocks)


@pytest.mark.parametrize(("name", "world"), WORLDS)
def test_the_ranks_hold_every_number_once_but_for_what_is_copied(name: str, world: int) -> None:
    sizes, shapes = _sizes(name), _shapes(name)
    total = sum(rank_numbers(shapes.items(), sizes, rank=rank, world=world) for rank in range(world))
    whole = sum(map(prod, shapes.values()))
    copies = max(world // sizes.kv_heads, 1)
    whole_words = ("norm", "Norm", "position", "token_type", "pooler", "classifier")
    copied = sum(prod(shape) for tensor, shape in shapes.items() if any(word in tensor for word in whole_words))
    kv = sum(prod(shape) for tensor, shape in shapes.items() if "k_proj" in tensor or "v_proj" in tensor)
    assert total == whole + (world - 1) * copied + (copies - 1) * kv


def test_biases_of_summed_products_are_on_rank_0_alone() -> None:
    sizes = _sizes("llama")
    for layer in ("self_attn.o_proj", "mlp.down_proj"):
        name = f"model.layers.0.{layer}.bias"
        assert slice_tensor(name, sizes, rank=0, world=2) == TensorSlice()
        assert slice_tensor(name, sizes, rank=1, world=2) is None


def test_a_7b_model_splits_as_its_heads_allow() -> None:
    sizes = ModelSizes.from_config(QWEN_7B)
    assert sizes == ModelSizes(heads=28, kv_heads=4, head_dim=128, intermediate_size=18944, vocab_size=152064)
    assert sizes.fitting_worlds() == (1, 2, 4)
    name = "model.layers.3.self_attn.o_proj.weight"
    part = slice_tensor(name, sizes, rank=1, world=4)
    assert part == TensorSlice(1, 896, 1792)
    assert part.shape_of((3584, 3584)) == (3584, 896)
    with pytest.raises(InputError, match=r"model of 28 heads, 4 key/value heads .* over so many ranks: `7`") as error:
        check_world(sizes, 7)
    assert error.value.hint == "it can be split over: 1, 2, 4"


def test_sizes_that_config_does_not_name_are_the_engines() -> None:
    assert ModelSizes.from_config({**QWEN_7B, "model_type": "qwen3"}).head_dim == 128
    assert ModelSizes.from_config({**QWEN_7B, "num_key_value_heads": None}).kv_heads == 28
    with pytest.raises(InputError, match=r"config\.json has no size that can be used, `vocab_size`: `None`"):
        ModelSizes.from_config({**QWEN_7B, "vocab_size": None})


def test_worlds_that_the_table_refuses_the_engine_refuses_with_the_same_words() -> None:
    for name, world in (("qwen2", 3), ("qwen2-untied", 6), ("llama", 16), ("bert", 3), ("distilbert", 8)):
        with pytest.raises(candle_py.InputError) as engine:
            candle_py.inspect_rank(GOLDEN / name, 0, world)
        with pytest.raises(InputError) as table:
            check_world(_sizes(name), world)
        assert (str(engine.value), engine.value.hint) == (str(table.value), table.value.hint)


def test_layers_of_the_same_last_word_are_told_apart() -> None:
    sizes = _sizes("bert")
    heads = slice_tensor("encoder.layer.0.attention.output.dense.weight", sizes, rank=1, world=2)
    inner = slice_tensor("encoder.layer.0.output.dense.weight", sizes, rank=1, world=2)
    assert (heads, inner) == (TensorSlice(1, 32, 64), TensorSlice(1, 80, 160))
    for name in ("pooler.dense.weight", "classifier.dense.weight", "head.dense.weight"):
        assert slice_tensor(name, sizes, rank=1, world=2) == TensorSlice()
    joined = slice_tensor("layers.0.attn.Wqkv.weight", _sizes("modernbert"), rank=1, world=2)
    assert joined == TensorSlice(0, 32, 64, 3)
    assert joined.shape_of((192, 64)) == (96, 64)
