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
from sharding.tensor import DecoderSizes, TensorSlice, check_world, rank_numbers, slice_tensor

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
]
QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}


def _sizes(name: str) -> DecoderSizes:
    return DecoderSizes.from_config(json.loads((GOLDEN / name / "config.json").read_text()))


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


def _as_tuple(part: TensorSlice | None) -> tuple[int | None, int, int] | None:
    return None if part is None else (part.axis, part.start, part.stop)


@pytest.mark.parametrize(("name", "world"), WORLDS)
def test_the_ranks_hold_every_number_once_but_for_norms_and_copied_heads(name: str, world: int) -> None:
    sizes, shapes = _sizes(name), _shapes(name)
    total = sum(rank_numbers(shapes.items(), sizes, rank=rank, world=world) for rank in range(world))
    whole = sum(map(prod, shapes.values()))
    copies = max(world // sizes.kv_heads, 1)
    norms = sum(prod(shape) for tensor, shape in shapes.items() if "norm" in tensor)
    kv = sum(prod(shape) for tensor, shape in shapes.items() if "k_proj" in tensor or "v_proj" in tensor)
    assert total == whole + (world - 1) * norms + (copies - 1) * kv


def test_biases_of_summed_products_are_on_rank_0_alone() -> None:
    sizes = _sizes("llama")
    for layer in ("self_attn.o_proj", "mlp.down_proj"):
        name = f"model.layers.0.{layer}.bias"
        assert slice_tensor(name, sizes, rank=0, world=2) == TensorSlice()
        assert slice_tensor(name, sizes, rank=1, world=2) is None


def test_a_7b_model_splits_as_its_heads_allow() -> None:
    sizes = DecoderSizes.from_config(QWEN_7B)
    assert sizes == DecoderSizes(heads=28, kv_heads=4, head_dim=128, intermediate_size=18944, vocab_size=152064)
    assert sizes.fitting_worlds() == (1, 2, 4)
    name = "model.layers.3.self_attn.o_proj.weight"
    part = slice_tensor(name, sizes, rank=1, world=4)
    assert part == TensorSlice(1, 896, 1792)
    assert part.shape_of((3584, 3584)) == (3584, 896)
    with pytest.raises(InputError, match=r"model of 28 heads, 4 key/value heads .* over so many ranks: `7`") as error:
        check_world(sizes, 7)
    assert error.value.hint == "it can be split over: 1, 2, 4"


def test_sizes_that_config_does_not_name_are_the_engines() -> None:
    assert DecoderSizes.from_config({**QWEN_7B, "model_type": "qwen3"}).head_dim == 128
    assert DecoderSizes.from_config({**QWEN_7B, "num_key_value_heads": None}).kv_heads == 28
    with pytest.raises(InputError, match=r"config\.json has no size that can be used, `vocab_size`: `None`"):
        DecoderSizes.from_config({**QWEN_7B, "vocab_size": None})


def test_worlds_that_the_table_refuses_the_engine_refuses_with_the_same_words() -> None:
    for name, world in (("qwen2", 3), ("qwen2-untied", 6), ("llama", 16)):
        with pytest.raises(candle_py.InputError) as engine:
            candle_py.inspect_rank(GOLDEN / name, 0, world)
        with pytest.raises(InputError) as table:
            check_world(_sizes(name), world)
        assert (str(engine.value), engine.value.hint) == (str(table.value), table.value.hint)
    with pytest.raises(candle_py.InputError, match="only decoders are split over ranks: `BertModel`"):
        candle_py.inspect_rank(GOLDEN / "bert", 0, 2)
