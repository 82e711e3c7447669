"""Every way the engine can compute, held to the references: each instruction set, and weights in bfloat16 and int8."""

from __future__ import annotations

from pathlib import Path

import candle_py
import numpy as np
import pyarrow.parquet as pq
import pytest
from engine_models import GOLDEN, cases, expected, minilm, ragged, tokenizer

TOLERANCE = 2e-5
MINILM_TOKENS = 256
PATHS = ["scalar", "avx2", "avx512"]
TILED = ["amx", "amx-software"]


def is_missing(cpu: str) -> bool:
    """Whether this machine lacks an instruction set."""
    found = candle_py.capabilities()
    if cpu in TILED:
        return cpu == "amx" and found["cpu_bfloat16"] != "amx"
    return PATHS.index(cpu) > PATHS.index(found["cpu"])


def load(model: object, cpu: str, dtype: str = "auto") -> candle_py.Engine:
    """An engine on one instruction set; skips where the processor lacks it."""
    if is_missing(cpu):
        pytest.skip(f"this machine has no {cpu}")
    engine = candle_py.Engine.load(str(model), cpu=cpu, dtype=dtype)
    assert engine.info["cpu"] == cpu
    return engine


def minilm_rows(texts: slice = slice(None)) -> tuple[list[list[int]], np.ndarray]:
    """Token ids and the reference's vectors, float32 (rows, 384)."""
    table = pq.read_table(GOLDEN / "minilm.parquet")
    split = tokenizer(minilm(), MINILM_TOKENS)
    rows = [split.encode(text).ids for text in table["text"].to_pylist()[texts]]
    return rows, np.array(table["embedding"].to_pylist()[texts])


@pytest.mark.parametrize("cpu", PATHS)
@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "distilbert", "modernbert"])
def test_every_instruction_set_gives_the_references_hidden_states(name: str, cpu: str) -> None:
    engine = load(GOLDEN / name, cpu)
    hidden = engine.hidden_states(*ragged(cases(name)["ids"]))
    np.testing.assert_allclose(hidden, expected(name, "hidden"), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("cpu", PATHS)
@pytest.mark.parametrize(("dtype", "least"), [("float32", 0.999999), ("bfloat16", 0.9999), ("int8", 0.999)])
def test_every_path_gives_the_references_vectors_of_minilm(cpu: str, dtype: str, least: float) -> None:
    rows, vectors = minilm_rows()
    engine = load(minilm(), cpu, dtype)
    found = np.asarray(engine.embed(*ragged(rows)))
    cosines = (found * vectors).sum(1) / (np.linalg.norm(found, axis=1) * np.linalg.norm(vectors, axis=1))
    print(f"MiniLM in {dtype} on {cpu}: least cosine {cosines.min():.7f}, mean {cosines.mean():.7f}")
    assert cosines.min() >= least


@pytest.mark.parametrize(("cpu", "texts"), [("amx", slice(None)), ("amx-software", slice(None, None, 12))])
def test_tiles_give_the_references_vectors_of_minilm_alone_and_in_any_batch(cpu: str, texts: slice) -> None:
    rows, vectors = minilm_rows(texts)
    engine = load(minilm(), cpu, "bfloat16")
    found = np.asarray(engine.embed(*ragged(rows)))
    cosines = (found * vectors).sum(1) / (np.linalg.norm(found, axis=1) * np.linalg.norm(vectors, axis=1))
    assert cosines.min() >= 0.9999
    alone = np.concatenate([engine.embed(*ragged([row])) for row in rows])
    np.testing.assert_array_equal(found, alone)


def test_amx_gives_the_vectors_of_its_twin_in_software() -> None:
    rows, _ = minilm_rows(slice(None, None, 12))
    amx, twin = (np.asarray(load(minilm(), cpu, "bfloat16").embed(*ragged(rows))) for cpu in TILED)
    assert (amx * twin).sum(1).min() >= 0.9999


def test_an_instruction_set_that_is_missing_is_a_clear_error() -> None:
    missing = [cpu for cpu in [*PATHS, "amx"] if is_missing(cpu)]
    if not missing:
        pytest.skip("this machine has every instruction set")
    for cpu in missing:
        with pytest.raises(candle_py.DeviceError) as caught:
            candle_py.Engine.load(GOLDEN / "bert", cpu=cpu, dtype="bfloat16")
        assert str(caught.value) == f"this machine lacks the instruction set: `{cpu}`"
        assert caught.value.hint == f"the best that it has: {candle_py.capabilities()['cpu_bfloat16']}"


def test_bfloat16_halves_the_weights_and_says_so() -> None:
    whole, half = (candle_py.Engine.load(minilm(), dtype=dtype).info for dtype in ("auto", "bfloat16"))
    assert (whole["dtype"], half["dtype"]) == ("float32", "bfloat16")
    assert whole["weight_bytes"] == 2 * half["weight_bytes"] == 4 * whole["parameters"]


def test_int8_takes_little_more_than_a_byte_for_a_matrix_and_two_for_a_table_and_says_so() -> None:
    engine = candle_py.Engine.load(minilm(), dtype="int8")
    info = engine.info
    assert (info["dtype"], info["cpu"]) == ("int8", candle_py.capabilities()["cpu"])
    tables = (info["vocab_size"] + 512 + 2) * info["hidden_size"]
    assert info["weight_bytes"] == 2 * tables + (info["parameters"] - tables) * 68 // 64


@pytest.mark.parametrize(
    ("cpu", "dtype"), [(None, "bfloat16"), ("scalar", "int8"), ("avx2", "int8"), ("avx512", "int8")]
)
def test_rounded_vectors_are_bit_equal_alone_and_in_any_batch_and_order(cpu: str | None, dtype: str) -> None:
    rows, _ = minilm_rows(slice(None, None, 4) if cpu == "scalar" else slice(None))
    engine = candle_py.Engine.load(minilm(), dtype=dtype) if cpu is None else load(minilm(), cpu, dtype)
    together = np.asarray(engine.embed(*ragged(rows)))
    alone = np.concatenate([engine.embed(*ragged([row])) for row in rows])
    np.testing.assert_array_equal(together, alone)
    some = np.random.default_rng(3).permutation(len(rows))[: len(rows) // 2]
    np.testing.assert_array_equal(np.asarray(engine.embed(*ragged([rows[index] for index in some]))), alone[some])


def test_instruction_sets_give_vectors_in_int8_that_are_as_near_each_other_as_to_the_reference() -> None:
    # Sums in another order, by a bit or two, round some numbers to the next byte.
    rows, _ = minilm_rows(slice(None, None, 8))
    best = PATHS.index(candle_py.capabilities()["cpu"])
    found = [np.asarray(load(minilm(), cpu, "int8").embed(*ragged(rows))) for cpu in PATHS[: best + 1]]
    for other in found[1:]:
        assert (other * found[0]).sum(1).min() >= 0.999


def test_instruction_sets_give_nearly_the_same_bfloat16_vectors() -> None:
    rows, _ = minilm_rows()
    best = PATHS.index(candle_py.capabilities()["cpu"])
    found = [np.asarray(load(minilm(), cpu, "bfloat16").embed(*ragged(rows))) for cpu in PATHS[: best + 1]]
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=0, atol=TOLERANCE)


def test_memory_stays_flat_over_forty_thousand_batches() -> None:
    engine = candle_py.Engine.load(GOLDEN / "bert")
    random = np.random.default_rng(5)
    sizes = [(int(rows), int(tokens)) for rows, tokens in random.integers(1, 9, (1000, 2))]
    batches = [
        (random.integers(0, 100, rows * tokens).astype(np.uint32), np.arange(rows + 1, dtype=np.uint32) * tokens)
        for rows, tokens in [*sizes, (64, 12)]
    ]

    def run(times: int) -> int:
        for _ in range(times):
            for ids, offsets in batches:
                engine.embed(ids, offsets, pooling="mean")
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))

    warm_kb = run(10)
    grown_kb = run(40) - warm_kb
    assert grown_kb < 8 * 1024  # 200 bytes a batch; the allocator moves by a few MiB either way
