"""Whole generate jobs with the fake engine: order, flow, seeds, errors, repair, resume."""

from __future__ import annotations

import math
import re
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from decoder_folders import CHATML, byte_tokenizer, write_decoder
from job_files import JobFiles, leftovers, part_digests, sample_table

from jobs import run_job
from jobs.errors import ExitCode, exit_code_of
from jobs.preview import preview_job
from sharding.errors import CandelabraError, InputError

TASK = {"kind": "generate", "text": "doc"}
SAMPLED = {"temperature": 1.0, "max_new_tokens": 24}


def generate(files: JobFiles, name: str = "out", **changes: object) -> list[dict[str, object]]:
    """Run a job and give its rows."""
    changes.setdefault("task", TASK)
    changes.setdefault("errors__max_row_error_rate", 1.0)
    report = run_job(files.spec(output__path=str(files.out(name)), **changes))
    assert report.exit_code == 0, report
    return files.rows(name).to_pylist()


def sampled(**changes: object) -> dict[str, object]:
    return {**TASK, "generation": {**SAMPLED, **changes}}


def refusal(files: JobFiles, **changes: object) -> str:
    """The error of a job that is refused before anything is written."""
    with pytest.raises(CandelabraError) as caught:
        run_job(files.spec(**changes))
    assert exit_code_of(caught.value) == ExitCode.USAGE
    assert not files.out().exists()
    return f"{caught.value} {caught.value.hint}"


def test_every_row_gets_a_text_in_its_place_and_the_documented_columns(files: JobFiles) -> None:
    files.write_input(sample_table(700), row_group_size=200)
    rows = generate(files)
    assert [row["id"] for row in rows] == list(range(700))
    schema = files.rows().schema
    assert {name: str(schema.field(name).type) for name in schema.names[3:]} == {
        "text": "string",
        "finish_reason": "string",
        "n_new_tokens": "int32",
        "logprob": "float",
        "n_tokens": "int32",
        "truncated": "bool",
        "error": "string",
    }
    for row in rows:
        if row["doc"] is None:
            assert (row["text"], row["finish_reason"], row["logprob"]) == (None, "error", None)
            assert "null text" in str(row["error"])
        else:
            assert row["error"] is None
            assert row["finish_reason"] in ("stop", "length")
            assert row["n_tokens"] == len(str(row["doc"]).split())
            assert (row["finish_reason"] == "length") == (row["n_new_tokens"] == 256)
            assert math.isfinite(float(str(row["logprob"])))
    assert {row["finish_reason"] for row in rows if row["error"] is None} == {"stop"}


def test_prompts_of_very_different_length_together_give_what_each_gives_alone(files: JobFiles) -> None:
    texts = [" ".join([f"w{i}"] * length) for i, length in enumerate([1, 200, 3, 77, 1, 150, 2, 2, 199, 5])]
    files.write_input(pa.table({"doc": texts}))
    together = generate(files)
    for i, text in enumerate(texts):
        files.write_input(pa.table({"doc": [text]}), f"{i}.parquet")
        (alone,) = generate(files, f"o{i}", input__path=str(files.root / f"{i}.parquet"))
        assert alone == together[i]


def test_equal_prompts_are_computed_once_when_greedy_and_apart_when_sampled(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": ["a b", "c"] * 300}))
    report = run_job(files.spec(task=TASK, sharding__target_rows=1000))
    rows = files.rows().to_pylist()
    assert {row["text"] for row in rows} == {rows[0]["text"], rows[1]["text"]}
    once = sum(row["n_tokens"] + row["n_new_tokens"] for row in rows[:2])
    assert report.tokens == once
    texts = [row["text"] for row in generate(files, "sampled", task=sampled())]
    assert len(set(texts)) > 500


def test_a_sampled_text_depends_on_row_and_seed_and_not_on_shards_mates_or_places(files: JobFiles) -> None:
    files.write_input(sample_table(230, null_every=0))
    first = generate(files, "a", task=sampled(), sharding__target_rows=1000)
    cut = generate(files, "b", task=sampled(), sharding__target_rows=37, batch__rows=3, batch__budget_tokens=7)
    assert first == cut
    other = generate(files, "c", task=sampled(seed=1), sharding__target_rows=1000)
    pairs = [(one["text"], two["text"]) for one, two in zip(first, other, strict=True)]
    assert all(one != two for one, two in pairs if one or two)


def test_a_rows_seed_counts_rows_over_all_files_however_they_are_coalesced(files: JobFiles) -> None:
    table = sample_table(60, null_every=0)
    files.write_input(table, "whole/in.parquet")
    for number in range(6):
        files.write_input(table.slice(number * 10, 10), f"cut/{number}.parquet")
    whole = generate(files, "a", task=sampled(), input__path=str(files.root / "whole"))
    coalesced = generate(files, "b", task=sampled(), input__path=str(files.root / "cut"), sharding__target_rows=25)
    apart = generate(files, "c", task=sampled(), input__path=str(files.root / "cut"), sharding__target_rows=7)
    assert whole == coalesced == apart


def test_several_completions_are_lists_that_differ_and_the_first_is_the_only_one(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": ["a b", None, "c"]}))
    rows = generate(files, task=sampled(n=3))
    assert files.rows().schema.field("text").type == pa.list_(pa.field("element", pa.string()))
    assert (rows[1]["text"], rows[1]["finish_reason"]) == (None, ["error"] * 3)
    single = generate(files, "single", task=sampled())
    for row, alone in zip(rows, single, strict=True):
        if row["error"] is None:
            assert len(set(row["text"])) == 3  # type: ignore[arg-type]
            assert row["text"][0] == alone["text"]  # type: ignore[index]
            assert [len(row[name]) for name in ("finish_reason", "n_new_tokens", "logprob")] == [3] * 3  # type: ignore[arg-type]


def test_max_new_tokens_ends_a_text_with_length(files: JobFiles) -> None:
    files.write_input(sample_table(100, null_every=0))
    rows = generate(files, task={**TASK, "generation": {"max_new_tokens": 3}})
    assert {(row["finish_reason"], row["n_new_tokens"]) for row in rows} >= {("length", 3)}
    assert max(row["n_new_tokens"] for row in rows) == 3  # type: ignore[type-var]


def test_min_new_tokens_keeps_a_text_from_ending_early(files: JobFiles) -> None:
    files.write_input(sample_table(100, null_every=0))
    rows = generate(files, task={**TASK, "generation": {"min_new_tokens": 15}})
    assert min(row["n_new_tokens"] for row in rows) >= 15  # type: ignore[type-var]


def test_a_row_that_the_model_refuses_or_spoils_is_its_own_error_alone(files: JobFiles) -> None:
    texts = [f"text {i}" for i in range(200)]
    texts[77], texts[133] = "crash now", "a nan here"
    files.write_input(pa.table({"doc": texts}))
    rows = generate(files)
    assert [i for i, row in enumerate(rows) if row["error"]] == [77, 133]
    assert rows[77]["finish_reason"] == rows[133]["finish_reason"] == "error"
    texts[77], texts[133] = "fine", "fine"
    files.write_input(pa.table({"doc": texts}), "fine.parquet")
    fine = generate(files, "fine", input__path=str(files.root / "fine.parquet"))
    assert [row["text"] for i, row in enumerate(rows) if i not in (77, 133)] == [
        row["text"] for i, row in enumerate(fine) if i not in (77, 133)
    ]


def test_a_prompt_beyond_the_context_is_cut_or_an_error_as_asked_and_the_finish_tells(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": ["a " * 600, "b " * 510, "c"]}))
    cut = generate(files)
    assert [row["truncated"] for row in cut] == [True, False, False]
    assert [row["n_tokens"] for row in cut] == [511, 510, 1]
    assert (cut[0]["finish_reason"], cut[0]["n_new_tokens"]) == ("length", 1)
    assert cut[1]["n_new_tokens"] in (1, 2)
    refused = generate(files, "refused", task={**TASK, "truncate": "error"})
    assert [row["finish_reason"] for row in refused] == ["error", cut[1]["finish_reason"], "stop"]
    assert refused[0]["error"] == "the prompt has more tokens than the model's context allows: `600 of 511`"
    short = generate(files, "short", task={**TASK, "truncate": "error", "max_tokens": 511})
    assert short[0]["error"] == "the prompt has more tokens than task.max_tokens allows: `600 of 511`"
    beyond = generate(files, "beyond", task={**TASK, "truncate": "error", "max_tokens": 9999})
    assert beyond[0]["error"] == refused[0]["error"]
    few = generate(files, "few", task={**TASK, "max_tokens": 4})
    assert [row["n_tokens"] for row in few] == [4, 4, 1]


def test_an_empty_prompt_is_a_row_error_without_a_start_token_and_fine_with_one(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": ["", "x", "   "]}))
    without = write_decoder(files.root / "without")
    rows = generate(files, model__source=without)
    assert [row["error"] is None for row in rows] == [False, True, True]
    assert "no token" in str(rows[0]["error"])
    start = write_decoder(files.root / "with", byte_tokenizer(start=True))
    rows = generate(files, "start", model__source=start)
    assert [row["error"] for row in rows] == [None] * 3
    assert rows[0]["n_tokens"] == 1


def test_retry_failed_writes_only_bad_rows_again(files: JobFiles) -> None:
    texts = [f"t {i}" if i != 150 else "nan" for i in range(300)]
    files.write_input(pa.table({"id": list(range(300)), "doc": texts}))
    spec = files.spec(task=sampled(n=2))
    run_job(spec)
    before = part_digests(files.out())
    report = run_job(spec, retry_failed=True)
    assert (report.exit_code, report.row_errors, report.computed_tokens) == (0, 1, 2)
    assert part_digests(files.out()) == before
    assert leftovers(files.out()) == []


def test_generating_several_equal_texts_is_refused(files: JobFiles) -> None:
    files.write_input(sample_table(3))
    assert "equal" in refusal(files, task={**TASK, "generation": {"n": 2}})
    assert "beam" in refusal(files, task={**TASK, "generation": {"beams": 2, "temperature": 1.0}})


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({"generation": {"temperature": 0.5}}, {"task.generation.temperature: plan `0.0`, now `0.5`"}),
        ({"generation": {"seed": 3}}, {"task.generation.seed: plan `0`, now `3`"}),
        ({"generation": {"stop": "x"}}, {"task.generation.stop: plan `()`, now `('x',)`"}),
        ({"generation": {"stop_tokens": [5]}}, {"task.generation.stop_tokens: plan `(1,)`, now `(1, 5)`"}),
        ({"generation": {"max_new_tokens": 7}}, {"task.generation.max_new_tokens: plan `256`, now `7`"}),
        ({"text": "<{doc}>"}, {"task.text: plan `doc`, now `<{doc}>`"}),
    ],
)
def test_a_changed_setting_is_drift_and_named_as_the_spec_names_it(
    files: JobFiles, change: dict[str, object], lines: set[str]
) -> None:
    files.write_input(sample_table(30))
    run_job(files.spec(task=TASK))
    with pytest.raises(CandelabraError) as caught:
        run_job(files.spec(task={**TASK, **change}))
    assert exit_code_of(caught.value) == ExitCode.DRIFT
    assert {line.strip() for line in str(caught.value).splitlines()[1:]} == lines


def test_a_chat_made_of_the_text_is_named_by_the_text_and_messages_by_messages(files: JobFiles) -> None:
    files.write_input(sample_table(30))
    source = write_decoder(files.root / "model", template=CHATML)

    def drift(task: dict[str, object]) -> set[str]:
        with pytest.raises(CandelabraError) as caught:
            run_job(files.spec(task=task, model__source=source))
        return {line.strip().partition(":")[0] for line in str(caught.value).splitlines()[1:]}

    run_job(files.spec(task=TASK, model__source=source))
    assert drift({**TASK, "text": "<{doc}>"}) == {"task.text"}
    assert drift({**TASK, "chat": False}) == {"task.chat", "task.generation.stop_tokens"}
    assert "task.messages" in drift({"kind": "generate", "messages": [{"role": "user", "content": "{doc}"}]})


@pytest.mark.parametrize(
    ("step", "hit"),
    [("read", 3), ("compute", 1), ("compute", 100), ("publish.after", 2), ("receipt.after", 1), ("promote.before", 3)],
)
def test_a_driver_killed_at_any_step_is_resumed_to_the_same_bytes(files: JobFiles, step: str, hit: int) -> None:
    files.write_input(sample_table(400), row_group_size=130)
    task = {"task": sampled(n=2), "sharding__target_rows": 90}
    run_job(files.spec(output__path=str(files.out("reference")), **task))
    reference = part_digests(files.out("reference"))
    spec = str(files.spec_file(**task))
    killed = files.run("submit", spec, environment={"CANDELABRA_FAILPOINTS": f"{step}=kill:{hit}"})
    assert killed.code == -signal.SIGKILL, killed.stderr
    assert set(part_digests(files.out()).items()) <= set(reference.items())
    again = files.run("submit", spec)
    assert again.code == 0, again.stderr
    assert part_digests(files.out()) == reference
    assert leftovers(files.out()) == []


@pytest.mark.slow
def test_workers_of_a_cluster_write_what_one_process_writes_and_a_poison_row_is_isolated(files: JobFiles) -> None:
    table = sample_table(120, null_every=0)
    files.write_input(table)
    settings = {"task": sampled(), "sharding__target_rows": 20, "workers__cpus": 1}
    run_job(files.spec(output__path=str(files.out("local")), **settings))
    report = run_job(files.spec(backend="ray", **settings))
    assert report.exit_code == 0
    assert part_digests(files.out()) == part_digests(files.out("local"))
    texts = table["doc"].to_pylist()
    texts[33] = "some oom here"
    files.write_input(table.set_column(1, "doc", pa.array(texts)), "poison.parquet")
    settings |= {"input__path": str(files.root / "poison.parquet"), "output__path": str(files.out("poison"))}
    report = run_job(files.spec(backend="ray", errors__max_row_error_rate=1.0, **settings))
    assert report.exit_code == 0
    rows = files.rows("poison").to_pylist()
    assert [i for i, row in enumerate(rows) if row["error"]] == [33]
    good = files.rows("local").to_pylist()
    assert [row["text"] for row in rows if not row["error"]] == [row["text"] for i, row in enumerate(good) if i != 33]


def test_the_plan_says_what_is_in_force_and_how_long_it_takes(files: JobFiles) -> None:
    files.write_input(sample_table(300))
    source = write_decoder(
        files.root / "model",
        template=CHATML,
        generation={"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [2, 4]},
    )
    preview = preview_job(files.spec(task={**TASK, "generation": {"top_p": 0.9}}, model__source=source))
    notes = "\n".join(preview.notes)
    for words in (
        "temperature 0.6 (generation_config.json)",
        "top_k 20 (generation_config.json)",
        "top_p 0.9 (spec)",
        "max_new_tokens 256 (default)",
        "</s> (generation_config.json)",
        "end of turn in the chat template",
        "user message through chat_template of tokenizer_config.json",
    ):
        assert words in notes, notes
    assert preview.tokens_per_s > 0
    assert preview.estimated_s > 0
    assert not files.out().exists()


def test_memory_is_bounded_by_the_rows_in_flight(files: JobFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    import workers.generation.generate

    most: list[int] = []
    step = workers.generation.generate.TextGenerator._step

    def watched(self: workers.generation.generate.TextGenerator) -> None:
        most.append(len(self._waiting) + len(self._growing))
        step(self)

    monkeypatch.setattr(workers.generation.generate.TextGenerator, "_step", watched)
    files.write_input(sample_table(5000, null_every=0))
    generate(files, task=sampled(), sharding__target_rows=5000, batch__rows=8)
    assert max(most) <= 8 * 64


def test_a_columns_name_as_literal_message_is_refused(files: JobFiles) -> None:
    files.write_input(sample_table(3))
    source = write_decoder(files.root / "model", template=CHATML)
    task = {"kind": "generate", "messages": [{"role": "user", "content": "doc"}]}
    assert "{doc}" in refusal(files, task=task, model__source=source)


def test_text_is_what_the_tokenizer_decodes_without_special_tokens(files: JobFiles, tmp_path: Path) -> None:
    files.write_input(pa.table({"doc": [f"question {i}" for i in range(40)]}))
    source = write_decoder(tmp_path / "model")
    rows = generate(files, model__source=source, task={**TASK, "generation": {"max_new_tokens": 12}})
    texts = [str(row["text"]) for row in rows]
    assert all("</s>" not in text and "\ufffd" not in text[-1:] for text in texts)
    assert len(set(texts)) > 30  # some end at once
    assert np.mean([len(text) for text in texts]) > 5


@pytest.mark.parametrize(
    ("token", "hint"),
    [
        ("<|nothing|>", "a stop token is an id"),
        (" the", "the vocabulary spells this one `Ġthe`; a stop token is an id"),
        (999_999, "a stop token is an id"),
    ],
)
def test_an_unknown_stop_token_is_told_with_what_it_has_to_be(files: JobFiles, token: str | int, hint: str) -> None:
    files.write_input(sample_table(3))
    source = write_decoder(files.root / "model")
    task = {**TASK, "generation": {"stop_tokens": [token]}}
    with pytest.raises(InputError, match=f"is no token of the model: `{re.escape(str(token))}`") as caught:
        run_job(files.spec(task=task, model__source=source))
    assert str(caught.value.hint).startswith(hint)
    assert "task.generation.stop" in str(caught.value.hint)
