"""Decoders through Python against an independent implementation: logits, hidden states, last-token vectors, scores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import candle_py
import numpy as np
import pytest
from engine_models import GOLDEN, cases, expected, ragged

DECODERS = ["qwen2", "qwen2-untied", "qwen3", "llama"]
# float32, a handful of layers, sums in another order.
HIDDEN_TOLERANCE = 2e-5
LOGIT_TOLERANCE = 5e-5


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


@pytest.mark.parametrize("name", DECODERS)
def test_logits_hidden_states_and_last_tokens_equal_the_reference(name: str) -> None:
    engine = candle_py.Engine.load(GOLDEN / name)
    batch = ragged(cases(name)["ids"])
    logits = engine.logits(*batch)
    np.testing.assert_allclose(logits, expected(name, "logits"), rtol=0, atol=LOGIT_TOLERANCE)
    assert logits.shape == (len(batch[0]), engine.info["vocab_size"])
    np.testing.assert_allclose(engine.hidden_states(*batch), expected(name, "hidden"), rtol=0, atol=HIDDEN_TOLERANCE)
    vectors = np.asarray(engine.embed(*batch, pooling="last", normalize=True))
    assert (vectors * expected(name, "last")).sum(1).min() >= 0.999999


@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_bit_equal_alone_and_in_another_order(name: str) -> None:
    engine = candle_py.Engine.load(GOLDEN / name)
    rows = cases(name)["ids"]
    alone = [np.asarray(engine.logits(*ragged([row]))) for row in rows]
    for order in (range(len(rows)), range(len(rows) - 1, -1, -1)):
        together = np.asarray(engine.logits(*ragged([rows[index] for index in order])))
        np.testing.assert_array_equal(together, np.concatenate([alone[index] for index in order]))


@pytest.mark.parametrize("name", DECODERS)
def test_log_probabilities_follow_from_the_logits(name: str) -> None:
    engine = candle_py.Engine.load(GOLDEN / name)
    rows = [row + new for row, new in zip(cases(name)["ids"], cases(name)["greedy"], strict=True)]
    found = engine.token_logprobs(*ragged(rows))
    assert found.shape == (sum(map(len, rows)), 1)
    scores = _log_softmax(np.asarray(engine.logits(*ragged(rows))))
    start = 0
    for row in rows:
        wanted = [0.0, *(scores[start + at, token] for at, token in enumerate(row[1:]))]
        np.testing.assert_allclose(np.asarray(found)[start : start + len(row), 0], wanted, rtol=0, atol=1e-5)
        start += len(row)


def test_facts_of_a_decoder() -> None:
    facts = candle_py.inspect(GOLDEN / "qwen3")
    assert (facts["kind"], facts["model_type"], facts["architecture"]) == ("decoder", "qwen3", "Qwen3ForCausalLM")
    assert (facts["heads"], facts["kv_heads"], facts["head_dim"], facts["tied"]) == (4, 2, 32, True)
    assert (facts["pooling"], facts["embedding_dim"], facts["labels"]) == (None, None, None)
    assert candle_py.inspect(GOLDEN / "llama")["tied"] is False
    facts = candle_py.inspect(GOLDEN / "bert")
    assert (facts["kind"], facts["kv_heads"], facts["tied"]) == ("encoder", facts["heads"], None)


def test_an_encoder_gives_no_logits() -> None:
    engine = candle_py.Engine.load(GOLDEN / "bert")
    for method in (engine.logits, engine.token_logprobs):
        with pytest.raises(candle_py.InputError, match="model has no language model head: `BertModel`"):
            method(*ragged([[5, 6]]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("is_causal", False),
        ("use_bidirectional_attention", True),
        ("rope_parameters", {"rope_type": "longrope"}),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"bits": 4}),
        ("architectures", ["Qwen2BidirectionalModel"]),
    ],
)
def test_a_setting_that_is_not_followed_is_named(tmp_path: Path, key: str, value: object) -> None:
    shutil.copytree(GOLDEN / "qwen2", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    named = "rope_type" if key == "rope_parameters" else key
    with pytest.raises(candle_py.ModelError, match=f"config.json: {named} .*`.+`"):
        candle_py.inspect(tmp_path)
