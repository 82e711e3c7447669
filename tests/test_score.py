"""score and classify by labels: sums of log-probabilities over the right tokens, in whole jobs and by hand."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from decoder_folders import CHATML, byte_tokenizer, write_decoder
from job_files import JobFiles, part_digests, sample_table
from numpy.typing import NDArray

from jobs import run_job
from jobs.preview import preview_job
from jobs.spec import parse_spec
from sharding.errors import InputError
from workers.batch import TokenBatch
from workers.engine.likelihood import compute_likelihoods
from workers.tokenization.fake import FakeCodec

SCORE: dict[str, Any] = {"kind": "score", "text": "q", "answer": "a"}
LABELS: dict[str, Any] = {"kind": "classify", "text": "q", "labels": [" yes", " no", " it depends"]}


def ids_of(text: str) -> list[int]:
    """Ids by the fake model's tokenizer."""
    return FakeCodec().encode([text], 99)[0].ids


def logprob(tokens: list[int], start: int) -> float:
    """The fake model's log-probability of `tokens[start:]`, one at a time."""
    return sum(math.sin(tokens[i] + 0.5 * tokens[i - 1]) - 1.5 for i in range(max(start, 1), len(tokens)))


def rows_of(files: JobFiles, task: dict[str, Any], name: str = "out", **changes: Any) -> list[dict[str, Any]]:
    spec = files.spec(task=task, errors__max_row_error_rate=1.0, output__path=str(files.out(name)), **changes)
    assert run_job(spec).exit_code == 0
    rows: list[dict[str, Any]] = files.rows(name).to_pylist()
    return rows


def test_the_score_is_the_sum_over_the_answers_tokens_and_the_perplexity_follows(files: JobFiles) -> None:
    pairs = [("what is it", "a small cat"), ("", "only an answer"), ("x", "y"), ("one two", "nan"), (None, "z")]
    files.write_input(pa.table({"q": [q for q, _ in pairs], "a": [a for _, a in pairs]}))
    rows = rows_of(files, SCORE)
    for (question, answer), row in list(zip(pairs, rows, strict=True))[:3]:
        prompt, tokens = ids_of(question or ""), ids_of(answer)
        counted = len(tokens) - (not prompt)
        expected = logprob(prompt + tokens, len(prompt))
        assert row["score"] == pytest.approx(expected, rel=1e-5)
        assert row["n_answer_tokens"] == counted
        assert row["perplexity"] == pytest.approx(math.exp(-expected / counted), rel=1e-5)
        assert row["n_tokens"] == len(prompt) + len(tokens)
        assert row["error"] is None
    assert "not finite" in rows[3]["error"]
    assert "null text" in rows[4]["error"]
    assert [row["score"] for row in rows[3:]] == [None, None]
    types = {name: str(files.rows().schema.field(name).type) for name in ("score", "n_answer_tokens", "perplexity")}
    assert types == {"score": "float", "n_answer_tokens": "int32", "perplexity": "float"}


def test_without_a_prompt_documents_are_scored_and_cut_at_the_context(files: JobFiles) -> None:
    files.write_input(pa.table({"a": ["w " * 700, "one", "", "two words"]}))
    rows = rows_of(files, {"kind": "score", "answer": "a"})
    assert (rows[0]["n_tokens"], rows[0]["truncated"], rows[0]["n_answer_tokens"]) == (512, True, 511)
    assert "only token" in rows[1]["error"]
    assert "no token" in rows[2]["error"]
    assert rows[3]["n_answer_tokens"] == 1
    rows = rows_of(files, {"kind": "score", "answer": "a", "truncate": "error"}, "refused")
    assert rows[0]["error"] == "the answer has more tokens than the model's context allows: `700 of 512`"


def test_a_long_prompt_gives_way_to_the_answer_and_an_answer_that_does_not_fit_is_an_error(files: JobFiles) -> None:
    files.write_input(pa.table({"q": ["p " * 600, "p", "p " * 600], "a": ["x y z", "x " * 600, "x " * 512]}))
    rows = rows_of(files, SCORE)
    assert (rows[0]["n_tokens"], rows[0]["n_answer_tokens"], rows[0]["truncated"]) == (512, 3, True)
    context = "more tokens than the model's context allows"
    assert [row["error"] for row in rows[1:]] == [
        f"the answer has {context}: `600 of 512`",
        f"the prompt has {context} beside the answer: `600 of 0`",
    ]
    assert [row["truncated"] for row in rows[1:]] == [True, True]
    rows = rows_of(files, {**SCORE, "truncate": "error"}, "refused")
    assert rows[0]["error"] == f"the prompt has {context} beside the answer: `600 of 509`"
    rows = rows_of(files, {**SCORE, "truncate": "error", "max_tokens": 40}, "few")
    assert rows[0]["error"] == "the prompt has more tokens than task.max_tokens allows beside the answer: `600 of 37`"


def test_a_start_token_makes_the_first_token_count(files: JobFiles, tmp_path: Path) -> None:
    files.write_input(pa.table({"a": ["cat"]}))
    tokens = byte_tokenizer().encode("cat").ids
    source = write_decoder(tmp_path / "model", byte_tokenizer(start=True))
    (row,) = rows_of(files, {"kind": "score", "answer": "a"}, model__source=source)
    assert row["n_answer_tokens"] == len(tokens)
    assert row["score"] == pytest.approx(logprob([0, *tokens], 1), rel=1e-5)


def test_an_answer_stands_where_the_assistants_begins_in_a_chat(files: JobFiles, tmp_path: Path) -> None:
    files.write_input(pa.table({"q": ["cats"], "a": ["meow"]}))
    source = write_decoder(tmp_path / "model", template=CHATML)
    tokenizer = byte_tokenizer()
    chat = "<|im_start|>user\ncats<|start of a turn|>\n<|im_start|>assistant\n"
    task = {"kind": "score", "answer": "a", "messages": [{"role": "user", "content": "{q}"}]}
    for name, chosen, text in (("chat", task, chat), ("forced", {**SCORE, "chat": True}, chat), ("no", SCORE, "cats")):
        (row,) = rows_of(files, chosen, name, model__source=source)
        prompt = tokenizer.encode(text).ids
        expected = logprob(prompt + tokenizer.encode("meow").ids, len(prompt))
        assert row["score"] == pytest.approx(expected, rel=1e-5)


def test_labels_are_compared_by_likelihood_and_named_without_outer_space(files: JobFiles) -> None:
    questions = [f"is it {i}" for i in range(50)]
    files.write_input(pa.table({"q": [*questions, None, "a nan", ""]}))
    rows = rows_of(files, LABELS)
    raw = rows_of(files, {**LABELS, "activation": "none"}, "raw")
    for question, row, one in zip(questions, rows, raw, strict=False):
        prompt = ids_of(question)
        sums = np.array([logprob(prompt + ids_of(label), len(prompt)) for label in LABELS["labels"]])
        best = int(sums.argmax())
        assert row["label"] == ["yes", "no", "it depends"][best]
        assert row["score"] == pytest.approx(np.exp(sums[best]) / np.exp(sums).sum(), rel=1e-4)
        assert one["score"] == pytest.approx(sums[best], rel=1e-5)
        assert row["n_tokens"] == len(prompt)
    assert [row["label"] for row in rows[50:]] == [None] * 3
    assert "null text" in rows[50]["error"]
    assert "no token" in rows[52]["error"]
    assert len({row["label"] for row in rows[:50]}) > 1


def test_what_scores_does_not_depend_on_batches_or_shards(files: JobFiles) -> None:
    table = sample_table(300, null_every=0)
    files.write_input(pa.table({"q": table["doc"], "a": table["doc"].to_pylist()[::-1]}))
    for task in (SCORE, LABELS):
        one = rows_of(files, task, f"{task['kind']}1", batch__budget_tokens=13)
        two = rows_of(files, task, f"{task['kind']}2", sharding__target_rows=31)
        assert one == two


def test_a_killed_score_job_is_resumed_to_the_same_bytes_and_retry_failed_keeps_the_good_rows(files: JobFiles) -> None:
    table = sample_table(400, null_every=0)
    files.write_input(pa.table({"q": table["doc"], "a": ["nan" if i == 250 else f"answer {i}" for i in range(400)]}))
    run_job(files.spec(task=SCORE, output__path=str(files.out("reference"))))
    spec = str(files.spec_file(task=SCORE))
    killed = files.run("submit", spec, environment={"CANDELABRA_FAILPOINTS": "publish.after=kill:2"})
    assert killed.code == -signal.SIGKILL
    assert files.run("submit", spec).code == 0
    assert part_digests(files.out()) == part_digests(files.out("reference"))
    report = run_job(files.spec(task=SCORE), retry_failed=True)
    assert (report.row_errors, part_digests(files.out())) == (1, part_digests(files.out("reference")))


def test_sums_are_taken_apart_by_row_and_label() -> None:
    ids = np.arange(10, dtype=np.uint32)
    types = np.array([0, 0, 1, 0, 0, 2, 2, 0, 1, 1], np.uint32)
    batch = TokenBatch(np.arange(2), ids, np.array([0, 7, 10], np.uint32), types)
    seen: list[list[int]] = []

    def model(ids: NDArray[np.uint32], offsets: NDArray[np.uint32]) -> NDArray[np.float32]:
        seen.append(offsets.tolist())
        return ids.astype(np.float32)[:, None]

    output = compute_likelihoods(batch, 2, model, scored=False)
    assert seen == [[0, 3, 7, 10]]
    assert output.values.tolist() == [[2, 11], [17, 0]]
    whole = TokenBatch(np.arange(1), ids[:4], np.array([0, 4], np.uint32), np.array([0, 1, 1, 1], np.uint32))
    assert compute_likelihoods(whole, 2, model, scored=True).values.tolist() == [[6, 3]]


@pytest.mark.parametrize(
    ("max_tokens", "limit"), [(8, "task.max_tokens allows 8"), ("auto", "the model's context allows 512")]
)
def test_a_label_that_leaves_no_room_for_a_prompt_is_refused_before_anything_starts(
    files: JobFiles, max_tokens: object, limit: str
) -> None:
    files.write_input(pa.table({"q": ["a"]}))
    words = 8 if max_tokens == 8 else 512
    task = {**LABELS, "max_tokens": max_tokens, "labels": ["yes", "no " * words]}
    for start in (preview_job, run_job):
        with pytest.raises(
            InputError, match=f"a label of {words} tokens leaves no room for a prompt, {limit} together"
        ):
            start(files.spec(task=task))
    assert not files.out().exists()
    assert rows_of(files, {**task, "labels": ["yes", "no " * (words - 1)]})[0]["error"] is None


def test_a_plan_of_labels_counts_every_label(files: JobFiles) -> None:
    files.write_input(pa.table({"q": ["a b c"] * 100}))
    preview = preview_job(files.spec(task=LABELS))
    assert preview.mean_tokens == 3
    assert preview.tokens_per_s > 0


@pytest.mark.parametrize(
    ("task", "word"),
    [
        ({"kind": "generate"}, "`text` is needed"),
        ({"kind": "score", "text": "q"}, "`answer` is needed"),
        ({"kind": "embed", "text": "q", "answer": "a"}, "`answer` belongs to `kind: score`"),
        ({"kind": "embed", "text": "q", "generation": {"n": 2}}, "`generation` belongs"),
        ({"kind": "score", "answer": "a", "json_schema": {}}, "`json_schema` belongs"),
        ({"kind": "rerank", "text": "q", "query": "a", "labels": ["x", "y"]}, "`labels` belongs"),
        ({"kind": "classify", "text": "q", "labels": ["x"]}, "at least two"),
        ({"kind": "classify", "text": "q", "labels": ["x", "x"]}, "at least two"),
        ({"kind": "classify", "text": "q", "labels": ["x", " x"]}, "at least two"),
        ({"kind": "classify", "text": "q", "labels": ["x", " "]}, "at least two"),
        ({"kind": "classify", "text": "q", "chat": True}, "`chat` belongs"),
        ({"kind": "generate", "text": "q", "messages": [{"role": "user", "content": "x"}]}, "exclude"),
        ({"kind": "generate", "messages": []}, "messages"),
        ({"kind": "generate", "messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"kind": "generate", "messages": [{"role": "user", "content": "{x"}]}, "brace"),
        ({"kind": "generate", "messages": [{"role": "user", "content": "x"}], "chat": False}, "excludes"),
        ({"kind": "generate", "text": "q", "pooling": "mean"}, "`pooling` belongs"),
        ({"kind": "generate", "text": "q", "prompt": "p"}, "`prompt` belongs"),
        ({"kind": "generate", "text": "q", "generation": {"top_p": 1.5}}, "top_p"),
        ({"kind": "generate", "text": "q", "generation": {"temprature": 1.5}}, "did you mean `temperature`"),
        ({"kind": "generate", "text": "q", "generation": {"min_new_tokens": 9, "max_new_tokens": 8}}, "more than"),
        ({"kind": "score", "answer": "a", "text": "", "chat": True}, "needs `text`"),
    ],
)
def test_keys_that_do_not_belong_together_are_refused_with_a_word_on_it(task: dict[str, Any], word: str) -> None:
    data = {
        "name": "x",
        "task": task,
        "model": {"source": "fake:8"},
        "input": {"path": "a"},
        "output": {"path": "b"},
    }
    with pytest.raises(InputError) as caught:
        parse_spec(data)
    assert word in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


def test_null_in_the_generation_section_is_auto() -> None:
    task = {"kind": "generate", "text": "q", "generation": {"temperature": None, "top_k": None, "max_new_tokens": None}}
    data = {"name": "x", "task": task, "model": {"source": "fake:8"}, "input": {"path": "a"}, "output": {"path": "b"}}
    found = parse_spec(data).task.generation
    assert (found.temperature, found.top_k, found.max_new_tokens) == ("auto", "auto", "auto")


@pytest.mark.parametrize("task", [SCORE, LABELS, {"kind": "embed", "text": "q"}, {"kind": "generate", "text": "q"}])
def test_a_spec_with_every_default_written_out_is_the_same_spec(task: dict[str, Any]) -> None:
    data = {"name": "x", "task": task, "model": {"source": "fake:8"}, "input": {"path": "a"}, "output": {"path": "b"}}
    spec = parse_spec(data)
    assert parse_spec(spec.model_dump(mode="json")) == spec
