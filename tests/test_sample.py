"""A job whose rows would all fail is refused before it starts; a plan says how many of a sample would, and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from decoder_folders import CHATML, write_decoder
from job_files import JobFiles
from model_folders import word_piece, write_model

from jobs import run_job, sample
from jobs.prepare import prepare_job
from jobs.preview import preview_job
from jobs.sample import check_sample
from sharding.errors import InputError

TASK: dict[str, Any] = {"kind": "generate", "text": "doc"}
CHOOSY = "{% if 'x' in messages[0].content %}{{ raise_exception('no x') }}{% endif %}" + CHATML


def refusal(files: JobFiles, **changes: Any) -> str:
    """What plan and submit both say; nothing is written."""
    told = []
    for start in (preview_job, run_job):
        with pytest.raises(InputError) as caught:
            start(files.spec(**changes))
        told.append(str(caught.value))
    assert not files.out().exists()
    assert told[0] == told[1]
    return told[0]


def test_a_chat_template_that_raises_for_every_row_is_refused_with_a_row_and_its_reason(
    files: JobFiles, tmp_path: Path
) -> None:
    path = files.write_input(pa.table({"doc": [None, "x", "yx"]}))
    source = write_decoder(tmp_path / "model", template=CHOOSY)
    assert refusal(files, task=TASK, model__source=source) == (
        f"ALL 2 sampled rows would fail, the first of them row 1 of `{path}`: the chat template fails: `no x`"
    )


def test_the_command_line_says_it_with_exit_2(files: JobFiles, tmp_path: Path) -> None:
    files.write_input(pa.table({"doc": ["x"]}))
    spec = str(files.spec_file(task=TASK, model__source=write_decoder(tmp_path / "model", template=CHOOSY)))
    for verb in ("plan", "submit"):
        found = files.run(verb, spec)
        assert found.code == 2
        assert "error: the only sampled row would fail" in found.stderr
        assert "hint: no worker was started" in found.stderr
        assert "Traceback" not in found.stderr


def test_prompts_that_are_all_too_long_are_refused_by_what_allows_how_many(files: JobFiles, tmp_path: Path) -> None:
    files.write_input(pa.table({"doc": ["one two three four five six"] * 5}))
    task = {**TASK, "max_tokens": 5, "truncate": "error"}
    assert refusal(files, task=task).endswith("the prompt has more tokens than task.max_tokens allows: `6 of 5`")
    source = write_decoder(tmp_path / "model", template=CHATML)
    assert "even without its longest message" in refusal(files, task={**task, "truncate": "end"}, model__source=source)


def test_texts_that_are_all_too_long_for_an_encoder_are_refused_too(files: JobFiles, tmp_path: Path) -> None:
    files.write_input(pa.table({"doc": ["the fox " * 9] * 3}))
    spec = files.spec(task={"kind": "embed", "text": "doc", "max_tokens": 10, "truncate": "error"})
    prepared = prepare_job(spec)
    check_sample(prepared)
    folder = write_model(tmp_path / "model", word_piece())
    prepared = replace(prepared, model=replace(prepared.model, source=str(folder), path=folder))
    with pytest.raises(InputError, match=r"ALL 3 sampled rows .* more tokens than task.max_tokens allows: `"):
        check_sample(prepared)


def test_a_job_that_allows_every_row_to_fail_runs_and_its_plan_warns(files: JobFiles, tmp_path: Path) -> None:
    files.write_input(pa.table({"doc": ["x"] * 3}))
    source = write_decoder(tmp_path / "model", template=CHOOSY)
    spec = files.spec(task=TASK, model__source=source, errors__max_row_error_rate=1.0)
    assert any(hazard.startswith("ALL 3 sampled rows would fail") for hazard in preview_job(spec).hazards)
    report = run_job(spec)
    assert (report.exit_code, report.row_errors) == (0, 3)


def test_rows_of_which_some_would_fail_are_counted_with_the_first_reason_and_run(
    files: JobFiles, tmp_path: Path
) -> None:
    path = files.write_input(pa.table({"doc": ["a", "b", "x", "c", "xx"] * 60}))
    source = write_decoder(tmp_path / "model", template=CHOOSY)
    hazards = preview_job(files.spec(task=TASK, model__source=source)).hazards
    assert (
        f"120 of 300 sampled rows would fail, the first of them row 2 of `{path}`: the chat template fails: `no x`"
        in hazards
    )
    assert "that is above errors.max_row_error_rate 0.05: the job would exit 1" in hazards
    assert run_job(files.spec(task=TASK, model__source=source)).row_errors == 120


def test_a_null_in_every_row_stays_a_matter_of_the_rows(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": pa.array([None] * 3, pa.string())}))
    report = run_job(files.spec(task=TASK))
    assert (report.exit_code, report.state, report.row_errors) == (1, "too_many_row_errors", 3)


def test_a_job_that_has_begun_goes_on_whatever_its_rows_are(files: JobFiles, tmp_path: Path) -> None:
    files.write_input(pa.table({"doc": ["x"] * 3}))
    source = write_decoder(tmp_path / "model", template=CHOOSY)
    spec = files.spec(task=TASK, model__source=source, errors__max_row_error_rate=1.0)
    run_job(spec)
    strict = files.spec(task=TASK, model__source=source)
    assert any(hazard.startswith("ALL 3 sampled rows") for hazard in preview_job(strict).hazards)
    assert run_job(strict).exit_code == 1


def test_the_sample_is_spread_over_the_shards_and_bounded_by_bytes(
    files: JobFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_input(pa.table({"doc": [f"row {i}" for i in range(4000)]}))
    prepared = prepare_job(files.spec(task=TASK, sharding__target_rows=100))
    places = [row for _, row in sample.sample_rows(prepared, 16).places]
    assert places == [start + row for start in range(0, 4000, 500) for row in (0, 1)]
    assert sample.sample_rows(prepared, 3200).rows == 8 * 100
    monkeypatch.setattr(sample, "_SAMPLE_BYTES", 1)
    assert 8 <= sample.sample_rows(prepared, 3200).rows <= 8 * 64
