"""Numbers that are none, or beyond float16, in the keys of one request: it fails, and its neighbours do not notice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import candle_py
import numpy as np
import pytest
from engine_models import GOLDEN
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Weights = dict[str, NDArray[np.float32]]

BAD = 7
"""The token whose embedding is spoilt."""
HEAD = list(range(20, 36))
"""One block of tokens, which all prompts begin with."""
DTYPES = ["float32", "bfloat16", "int8"]
NOT_NUMBERS = "the model's logits are not numbers"


def write_model(folder: Path, change: Callable[[Weights], None]) -> Path:
    """A decoder with a head of its own, whose embedding can be spoilt without the logits of all others."""
    shutil.copytree(GOLDEN / "qwen2", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    weights = {name: weight.astype(np.float32) for name, weight in load_file(folder / "model.safetensors").items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


def spoil_with(number: float) -> Callable[[Weights], None]:
    """Set the token's embedding to one number."""

    def change(weights: Weights) -> None:
        weights["model.embed_tokens.weight"][BAD] = number

    return change


def pass_float16(name: str) -> Callable[[Weights], None]:
    """Make only this token's keys or values leave float16's range in the first layer."""

    def change(weights: Weights) -> None:
        weights["model.embed_tokens.weight"][:, 0] = 0
        weights["model.embed_tokens.weight"][BAD, 0] = 1
        weights["model.layers.0.input_layernorm.weight"][0] = 1
        weights[f"model.layers.0.self_attn.{name}_proj.weight"][:, 0] = 1e6

    return change


def finishes(engine: candle_py.Engine, prompts: dict[int, list[int]], step_tokens: int) -> dict[int, tuple[str, str]]:
    """How each request ends: its finish, and its error or its ids."""
    generator = engine.generator(step_tokens=step_tokens)
    ids: dict[int, list[int]] = {request_id: [] for request_id in prompts}
    ended = {}
    for request_id, prompt in prompts.items():
        generator.add(request_id, np.array(prompt, np.uint32), max_new_tokens=3)
    while generator.pending:
        for event in generator.step():
            ids[event.request_id] += event.ids
            if event.finish is not None:
                ended[event.request_id] = (event.finish, event.error or str(ids[event.request_id]))
    return ended


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", [spoil_with(np.nan), spoil_with(np.inf)], ids=["nan", "infinity"])
def test_a_request_without_numbers_fails_and_who_shares_its_beginning_does_not(
    tmp_path: Path, change: Callable[[Weights], None], dtype: str
) -> None:
    engine = candle_py.Engine.load(write_model(tmp_path / "model", change), dtype=dtype, threads=1)
    clean = {1: [*HEAD, 40], 2: [*HEAD[:8], 41]}
    for step_tokens in (1, 5, 17, 512):
        alone = {key: found for row in clean.items() for key, found in finishes(engine, dict([row]), 512).items()}
        assert [finish for finish, _ in alone.values()] == ["length", "length"]
        beside = finishes(engine, {0: [*HEAD, BAD, 9], **clean}, step_tokens)
        assert beside == {0: ("error", NOT_NUMBERS), **alone}


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_beyond_float16_a_row_fails_where_the_cache_is_float16(tmp_path: Path, dtype: str, name: str) -> None:
    engine = candle_py.Engine.load(write_model(tmp_path / "model", pass_float16(name)), dtype=dtype, threads=1)
    for step_tokens in (1, 5, 512):
        found = finishes(engine, {0: [*HEAD, BAD, 9], 1: [*HEAD, 40]}, step_tokens)
        assert found[1] == finishes(engine, {1: [*HEAD, 40]}, 512)[1]
        assert found[0][0] == ("length" if dtype == "float32" else "error")
