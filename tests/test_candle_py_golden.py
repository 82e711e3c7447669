"""The engine through Python against independent implementations, with small models of each kind and with MiniLM."""

from __future__ import annotations

from pathlib import Path

import candle_py
import numpy as np
import pyarrow.parquet as pq
import pytest
from engine_models import GOLDEN, cases, expected, minilm, ragged, texts, tokenizer

# float32, a handful of layers, sums in another order.
TOLERANCE = 2e-5
# The tokenizers of these folders say 128.
TEXT_TOKENS = 128
# All positions of the model.
PAIR_TOKENS = 160
MINILM_TOKENS = 256


@pytest.fixture(scope="module")
def minilm_engine() -> candle_py.Engine:
    return candle_py.Engine.load(minilm())


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "distilbert", "modernbert"])
def test_hidden_states_and_pooled_rows_equal_the_reference(name: str) -> None:
    engine = candle_py.Engine.load(GOLDEN / name)
    ids, offsets = ragged(cases(name)["ids"])
    np.testing.assert_allclose(engine.hidden_states(ids, offsets), expected(name, "hidden"), rtol=0, atol=TOLERANCE)
    for mode in ("mean", "cls"):
        rows = engine.embed(ids, offsets, pooling=mode, normalize=True)
        np.testing.assert_allclose(rows, expected(name, mode), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["bert-classifier", "bert-cross-encoder"])
def test_logits_equal_the_reference(name: str) -> None:
    engine = candle_py.Engine.load(GOLDEN / name)
    case = cases(name)
    types, _ = ragged(case["token_type_ids"])
    logits = engine.classify(*ragged(case["ids"]), types)
    np.testing.assert_allclose(logits, expected(name, "logits"), rtol=0, atol=TOLERANCE)
    assert logits.shape == (3, engine.info["num_labels"])


@pytest.mark.parametrize(
    ("name", "prompt"), [("st-mean-dense", ""), ("st-cls-prompt", "passage: "), ("st-max-raw", "")]
)
def test_sentence_transformers_folders_give_their_embeddings(name: str, prompt: str) -> None:
    folder = GOLDEN / name
    split = tokenizer(folder, TEXT_TOKENS)
    rows = [split.encode(prompt + text).ids for text in texts(name)["texts"]]
    found = candle_py.Engine.load(folder).embed(*ragged(rows))
    np.testing.assert_allclose(found, expected(name, "embedding"), rtol=0, atol=TOLERANCE)


def test_a_cross_encoder_scores_pairs_of_texts() -> None:
    name = "text-cross-encoder"
    split = tokenizer(GOLDEN / name, PAIR_TOKENS)
    # An empty second text is no second text.
    pairs = [split.encode(*filter(None, pair)) for pair in texts(name)["pairs"]]
    types, _ = ragged([pair.type_ids for pair in pairs])
    logits = candle_py.Engine.load(GOLDEN / name).classify(*ragged([pair.ids for pair in pairs]), types)
    np.testing.assert_allclose(logits, expected(name, "logits"), rtol=0, atol=TOLERANCE)


def _minilm_rows() -> tuple[list[list[int]], np.ndarray]:
    table = pq.read_table(GOLDEN / "minilm.parquet")
    split = tokenizer(minilm(), MINILM_TOKENS)
    rows = [split.encode(text).ids for text in table["text"].to_pylist()]
    assert [len(row) for row in rows] == table["n_tokens"].to_pylist()
    return rows, np.array(table["embedding"].to_pylist(), np.float32)


def test_minilm_vectors_equal_those_of_sentence_transformers(minilm_engine: candle_py.Engine) -> None:
    rows, vectors = _minilm_rows()
    found = minilm_engine.embed(*ragged(rows))
    assert found.bad_rows == []
    assert (np.asarray(found) * vectors).sum(1).min() >= 0.999999
    np.testing.assert_allclose(found, vectors, rtol=0, atol=TOLERANCE)


def test_minilm_vectors_are_bit_equal_alone_and_in_any_batch(minilm_engine: candle_py.Engine) -> None:
    rows, _ = _minilm_rows()
    rows = rows[:40]
    alone = np.concatenate([minilm_engine.embed(*ragged([row])) for row in rows])
    order = np.random.default_rng(1).permutation(len(rows))
    for chosen in (np.arange(len(rows)), order, order[::-1], order[:7]):
        together = np.asarray(minilm_engine.embed(*ragged([rows[index] for index in chosen])))
        np.testing.assert_array_equal(together, alone[chosen])


def test_lengths_from_1_to_512_are_bit_equal_in_a_batch(minilm_engine: candle_py.Engine) -> None:
    generator = np.random.default_rng(2)
    lengths = [1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 255, 256, 257, 400, 511, 512]
    rows = [generator.integers(1000, 30_000, length).tolist() for length in generator.permutation(lengths)]
    together = np.asarray(minilm_engine.embed(*ragged(rows)))
    np.testing.assert_array_equal(together, np.concatenate([minilm_engine.embed(*ragged([row])) for row in rows]))
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, rtol=1e-6)


def test_inspect_and_info_tell_the_same_facts(minilm_engine: candle_py.Engine) -> None:
    facts = candle_py.inspect(minilm())
    how_it_runs = ("threads", "cpu", "rank", "world")
    assert facts == {key: value for key, value in minilm_engine.info.items() if key not in how_it_runs}
    assert facts["architecture"] == "BertModel"
    assert facts["model_type"] == "bert"
    assert (facts["hidden_size"], facts["layers"], facts["vocab_size"]) == (384, 6, 30_522)
    assert (facts["max_positions"], facts["type_vocab_size"]) == (512, 2)
    assert (facts["labels"], facts["num_labels"], facts["problem_type"]) == (None, None, None)
    assert (facts["pooling"], facts["normalize"], facts["include_prompt"]) == (["mean"], True, True)
    assert (facts["embedding_dim"], facts["dtype"], facts["device"]) == (384, "float32", "cpu")
    assert facts["weight_bytes"] == 4 * facts["parameters"] == 4 * 22_565_376


def test_inspect_tells_the_width_of_a_pooling_that_is_asked_for() -> None:
    facts = candle_py.inspect(GOLDEN / "bert", pooling="mean+max")
    assert (facts["pooling"], facts["embedding_dim"]) == (["mean", "max"], 128)
    with pytest.raises(candle_py.InputError, match="Dense takes 32"):
        candle_py.inspect(GOLDEN / "st-mean-dense", pooling="mean+max")


def test_a_classifier_tells_its_labels(tmp_path: Path) -> None:
    facts = candle_py.inspect(GOLDEN / "bert-classifier")
    assert facts["labels"] == [f"LABEL_{index}" for index in range(5)]
    assert facts["num_labels"] == 5
