"""Settings that change nothing are told before a job starts; what is certainly a mistake is refused."""

from __future__ import annotations

from typing import Any

import pytest
from decoder_folders import write_decoder
from job_files import JobFiles, sample_table

from jobs.effects import settings_without_effect
from jobs.errors import SpecError
from jobs.preview import preview_job

SCHEMA = {"type": "object"}


def task(**generation: Any) -> dict[str, Any]:
    return {"kind": "generate", "text": "doc", "generation": generation}


GREEDY = "at temperature 0 nothing is sampled"


@pytest.mark.parametrize(
    ("generation", "lines"),
    [
        ({"temperature": 0, "top_k": 5}, [f"task.generation.top_k 5 has no effect: {GREEDY}"]),
        ({"temperature": 0, "top_p": 0.5}, [f"task.generation.top_p 0.5 has no effect: {GREEDY}"]),
        (
            {"temperature": 0, "min_p": 0.1, "seed": 3},
            [
                f"task.generation.min_p 0.1 has no effect: {GREEDY}",
                f"task.generation.seed 3 has no effect: {GREEDY}",
            ],
        ),
        ({"beams": 2, "seed": 3}, ["task.generation.seed 3 has no effect: beam search never samples"]),
        (
            {"beams": 1, "length_penalty": 2.0},
            ["task.generation.length_penalty 2 has no effect without beams"],
        ),
        ({"temperature": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}, []),
        ({"temperature": 0.5, "top_k": 5, "seed": 3}, []),
        ({"beams": 2, "length_penalty": 2.0}, []),
        ({"top_k": 5, "seed": 3, "length_penalty": 2.0}, []),  # what the model's file says may give them a meaning
    ],
)
def test_what_the_spec_alone_makes_certain_is_told(
    files: JobFiles, generation: dict[str, Any], lines: list[str]
) -> None:
    assert settings_without_effect(files.spec(task=task(**generation))) == lines


def test_what_the_models_files_leave_without_effect_is_a_hazard_of_the_plan(files: JobFiles) -> None:
    files.write_input(sample_table(20))
    asked = task(top_k=5, seed=3, length_penalty=2.0)
    lines = {
        f"task.generation.top_k 5 has no effect: {GREEDY}",
        f"task.generation.seed 3 has no effect: {GREEDY}",
        "task.generation.length_penalty 2 has no effect without beams",
    }
    assert lines <= set(preview_job(files.spec(task=asked)).hazards)
    source = write_decoder(files.root / "model", generation={"do_sample": True, "eos_token_id": 2})
    found = set(preview_job(files.spec(task=asked, model__source=source)).hazards)
    assert found & lines == {"task.generation.length_penalty 2 has no effect without beams"}


def test_least_tokens_of_json_and_settings_of_generation_for_other_kinds_are_told(files: JobFiles) -> None:
    spec = files.spec(task=task(min_new_tokens=9) | {"json_schema": SCHEMA})
    assert settings_without_effect(spec) == [
        "task.generation.min_new_tokens 9 makes no JSON longer: a text ends where it is whole"
    ]
    assert settings_without_effect(files.spec(batch__rows=3, batch__cache_bytes="1MiB")) == [
        "batch.rows 3 has no effect: it belongs to `kind: generate`",
        "batch.cache_bytes 1048576 has no effect: it belongs to `kind: generate`",
    ]
    assert settings_without_effect(files.spec()) == []


def test_settings_of_split_models_are_told_where_one_rank_holds_the_model(files: JobFiles) -> None:
    asked = {"backend": "ray", "workers__rank_timeout_s": 7.5, "ray__placement_timeout_s": 20.0}
    assert settings_without_effect(files.spec(**asked)) == [
        "workers.rank_timeout_s 7.5 has no effect: it belongs to `model.tensor_parallel` above 1",
        "ray.placement_timeout_s 20 has no effect: it belongs to `model.tensor_parallel` above 1",
    ]
    assert settings_without_effect(files.spec(**asked, model__tensor_parallel=2)) == []
    defaults = {"backend": "ray", "workers__rank_timeout_s": 60.0, "ray__placement_timeout_s": 300.0}
    assert settings_without_effect(files.spec(**defaults)) == []


def test_settings_of_ray_are_told_where_the_job_runs_without_it(files: JobFiles) -> None:
    asked = {"workers__replicas": 3, "workers__gpus": 1, "ray__address": "127.0.0.1:6379"}
    reason = "`backend: local` is one worker in this process"
    assert settings_without_effect(files.spec(**asked)) == [
        f"workers.replicas 3 has no effect: {reason}",
        f"workers.gpus 1 has no effect: {reason}",
        f"ray.address 127.0.0.1:6379 has no effect: {reason}",
    ]
    assert settings_without_effect(files.spec(**asked, backend="ray")) == []
    assert settings_without_effect(files.spec(workers__replicas=1)) == []


def test_validate_and_submit_warn_on_stderr_and_go_on(files: JobFiles) -> None:
    files.write_input(sample_table(20, null_every=0))
    spec = str(files.spec_file(task=task(temperature=0, top_k=5)))
    for verb in ("validate", "submit"):
        found = files.run(verb, spec, "--json")
        assert found.code == 0
        assert f"warning: task.generation.top_k 5 has no effect: {GREEDY}" in found.stderr
        assert isinstance(found.json, dict)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (task(beams=2, temperature=0.5), "beam search does not sample"),
        (task(n=2, temperature=0), "are all equal"),
        (task(n=2, beams=3), "are all equal"),
        (task(beams=2) | {"json_schema": SCHEMA}, "beam search cannot follow a JSON schema"),
    ],
)
def test_settings_that_exclude_each_other_are_refused_without_a_look_at_the_model(
    files: JobFiles, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        files.spec(task=changes)
