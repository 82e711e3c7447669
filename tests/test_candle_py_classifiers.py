"""The classification heads of every family, against the same arithmetic in NumPy on the engine's own hidden states."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import candle_py
import numpy as np
import numpy.typing as npt
import pytest
from engine_models import ModelFolder, cases, ragged

LABELS = 3
# float32 against float64 through two small matrices.
TOLERANCE = 1e-5

Rows = npt.NDArray[np.float64]


def _gelu(x: Rows) -> Rows:
    return x * 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2)))


def _norm(x: Rows, weight: Rows, bias: Rows | float, eps: float) -> Rows:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


def _head(model: ModelFolder, prefix: str, architecture: str, names: dict[str, tuple[int, ...]]) -> dict[str, Rows]:
    """Turn an encoder's folder into a classifier's: a prefix on the encoder, random tensors for the head."""
    generator = np.random.default_rng(4)
    head = {name: generator.normal(0, 0.3, shape).astype(np.float32) for name, shape in names.items()}
    encoder = {name: tensor for name, tensor in model.tensors.items() if not name.startswith("pooler")}
    model.tensors = {**{prefix + name: tensor for name, tensor in encoder.items()}, **head}
    model.config["architectures"] = [architecture]
    model.config["id2label"] = {"0": "negative", "1": "neutral", "2": "positive"}
    return {name: tensor.astype(np.float64) for name, tensor in head.items()}


def _hidden_rows(engine: candle_py.Engine, name: str) -> list[Rows]:
    sequences = cases(name)["ids"]
    hidden = np.asarray(engine.hidden_states(*ragged(sequences)), np.float64)
    return np.split(hidden, np.cumsum([len(sequence) for sequence in sequences])[:-1])


@pytest.mark.parametrize(("name", "architecture"), [("roberta", "Roberta"), ("xlm-roberta", "XLMRoberta")])
def test_roberta_heads_are_dense_tanh_and_projection_of_the_first_token(
    tmp_path: Path, name: str, architecture: str
) -> None:
    model = ModelFolder(tmp_path / "model", name)
    shapes = {"classifier.dense.weight": (48, 48), "classifier.dense.bias": (48,)}
    shapes |= {"classifier.out_proj.weight": (LABELS, 48), "classifier.out_proj.bias": (LABELS,)}
    head = _head(model, "roberta.", f"{architecture}ForSequenceClassification", shapes)
    engine = candle_py.Engine.load(model.write())
    first = np.stack([rows[0] for rows in _hidden_rows(engine, name)])
    inner = np.tanh(first @ head["classifier.dense.weight"].T + head["classifier.dense.bias"])
    wanted = inner @ head["classifier.out_proj.weight"].T + head["classifier.out_proj.bias"]
    found = engine.classify(*ragged(cases(name)["ids"]))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)
    assert engine.info["labels"] == ["negative", "neutral", "positive"]


def test_distilbert_heads_are_dense_relu_and_projection_of_the_first_token(tmp_path: Path) -> None:
    model = ModelFolder(tmp_path / "model", "distilbert")
    shapes = {"pre_classifier.weight": (64, 64), "pre_classifier.bias": (64,)}
    shapes |= {"classifier.weight": (LABELS, 64), "classifier.bias": (LABELS,)}
    head = _head(model, "distilbert.", "DistilBertForSequenceClassification", shapes)
    engine = candle_py.Engine.load(model.write())
    first = np.stack([rows[0] for rows in _hidden_rows(engine, "distilbert")])
    inner = np.maximum(first @ head["pre_classifier.weight"].T + head["pre_classifier.bias"], 0)
    wanted = inner @ head["classifier.weight"].T + head["classifier.bias"]
    found = engine.classify(*ragged(cases("distilbert")["ids"]))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("biases", [False, True])
def test_modernbert_heads_pool_as_their_configuration_says(tmp_path: Path, pooling: str, biases: bool) -> None:
    model = ModelFolder(tmp_path / "model", "modernbert")
    shapes: dict[str, tuple[int, ...]] = {"head.dense.weight": (64, 64), "head.norm.weight": (64,)}
    shapes |= {"classifier.weight": (LABELS, 64), "classifier.bias": (LABELS,)}
    if biases:
        shapes["head.dense.bias"] = (64,)
        model.config["classifier_bias"] = True
    head = _head(model, "model.", "ModernBertForSequenceClassification", shapes)
    model.config |= {"classifier_pooling": pooling, "problem_type": "multi_label_classification"}
    engine = candle_py.Engine.load(model.write())
    rows = [rows[0] if pooling == "cls" else rows.mean(0) for rows in _hidden_rows(engine, "modernbert")]
    dense = np.stack(rows) @ head["head.dense.weight"].T + head.get("head.dense.bias", np.zeros(64))
    inner = _norm(_gelu(dense), head["head.norm.weight"], 0.0, 1e-5)
    wanted = inner @ head["classifier.weight"].T + head["classifier.bias"]
    found = engine.classify(*ragged(cases("modernbert")["ids"]))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)
    assert engine.info["problem_type"] == "multi_label_classification"


@pytest.mark.parametrize(
    ("config", "labels"),
    [
        ({}, [f"LABEL_{index}" for index in range(5)]),
        ({"id2label": {"4": "e", "0": "a", "2": "c", "1": "b", "3": "d"}}, ["a", "b", "c", "d", "e"]),
        ({"id2label": None, "num_labels": 5}, [f"LABEL_{index}" for index in range(5)]),
    ],
)
def test_labels_come_in_the_order_of_their_ids(tmp_path: Path, config: dict[str, Any], labels: list[str]) -> None:
    model = ModelFolder(tmp_path / "model", "bert-classifier")
    model.config |= config
    (model.path / "config.json").write_text(json.dumps(model.config))
    assert candle_py.inspect(model.path)["labels"] == labels


def test_labels_that_are_not_as_many_as_logits_are_refused(tmp_path: Path) -> None:
    model = ModelFolder(tmp_path / "model", "bert-classifier")
    model.config["id2label"] = {"0": "a", "1": "b"}
    (model.path / "config.json").write_text(json.dumps(model.config))
    with pytest.raises(candle_py.ModelError, match=r"shape of classifier.weight is not \[2, 64\]: `\[5, 64\]`"):
        candle_py.inspect(model.path)


def test_a_classifier_gives_hidden_states_and_embeddings_too(tmp_path: Path) -> None:
    model = ModelFolder(tmp_path / "model", "bert-classifier")
    engine = candle_py.Engine.load(model.path)
    batch = ragged(cases("bert-classifier")["ids"])
    hidden = np.asarray(engine.hidden_states(*batch))
    rows = np.asarray(engine.embed(*batch, pooling="cls", normalize=False))
    np.testing.assert_array_equal(rows, hidden[batch[1][:-1]])
