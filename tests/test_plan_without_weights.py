"""`plan` without weights looks at input and output as any plan does, and says what the job keeps by the same rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import candle_py
import pyarrow as pa
import pytest
from engine_models import GOLDEN, minilm
from gangs import GENERATE, write_prompts, write_split_model
from job_files import JobFiles, sample_table
from safetensors import safe_open

from jobs import run_job
from jobs.batching import decide_batching
from jobs.paper import PaperPreview, preview_on_paper
from jobs.prepare import prepare_job
from jobs.preview import JobPreview, preview_job
from jobs.spec import BatchSpec, JobSpec
from jobs.split import Dimensions, Load
from jobs.weight_bytes import weight_bytes
from sharding.errors import CandelabraError, InputError
from workers.config import DeviceKind
from workers.engine.load import inspect_model


@pytest.fixture
def whole(files: JobFiles) -> str:
    """A small decoder with its weights."""
    return write_split_model(files)


@pytest.fixture
def folder(files: JobFiles, whole: str) -> Path:
    """The same without them: config and index."""
    target = files.root / "weightless"
    target.mkdir()
    (target / "config.json").write_bytes((Path(whole) / "config.json").read_bytes())
    with safe_open(Path(whole) / "model.safetensors", "numpy") as weights:
        names = list(weights.keys())
    (target / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model-1-of-1.safetensors")})
    )
    return target


def on_paper(spec: JobSpec) -> PaperPreview:
    """The plan without weights."""
    found = preview_on_paper(spec)
    assert found is not None
    return found


def plan(spec: JobSpec) -> PaperPreview | JobPreview:
    """What the verb does."""
    return preview_on_paper(spec) or preview_job(spec)


@pytest.mark.parametrize(
    "changes",
    [
        {"task__text": "nope"},
        {"task__text": "{doc} {nope}"},
        {"task__text": "id"},
        {"input__columns": ["nope"]},
        {"output__column": "error"},
        {"output__column": "doc"},
        {"output__path": "in.parquet"},
        {"output__path": "ftp://host/x"},
        {"output__path": "full"},
        {"batch__rows": 2, "task__generation": {"beams": 3, "max_new_tokens": 4, "defaults": "none"}},
        {"task__json_schema": "no/such/file.json"},
    ],
)
def test_what_needs_no_weights_is_refused_in_the_words_of_a_plan_with_weights(
    files: JobFiles, whole: str, folder: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files.root)
    write_prompts(files, 20)
    files.write_input(sample_table(3), "full/stranger.parquet")
    told = []
    for source in (whole, str(folder)):
        spec = files.spec(**{"task": dict(GENERATE), "model__source": source} | changes)
        with pytest.raises(CandelabraError) as caught:
            plan(spec)
        told.append((type(caught.value), str(caught.value), caught.value.hint))
    assert told[0] == told[1]
    assert not files.out().exists()


def test_an_input_that_is_not_here_either_is_told_and_the_model_planned(files: JobFiles, folder: Path) -> None:
    write_prompts(files, 20)
    with_input = on_paper(files.spec(task=dict(GENERATE), model__source=str(folder)))
    changes: dict[str, Any] = {"task": dict(GENERATE), "model__source": str(folder), "input__path": "no/*.parquet"}
    found = on_paper(files.spec(**changes))
    assert (found.split, found.replicas) == (with_input.split, with_input.replicas)
    assert (found.files, found.rows, found.columns) == (0, 0, ())
    assert any("exit 6" in hazard and "`no/*.parquet`" in hazard for hazard in found.hazards)
    done = files.run("plan", str(files.spec_file(**changes)))
    assert done.code == 0
    assert "exit 6" in done.stdout


def test_columns_shards_and_hazards_are_those_of_a_plan_with_weights(files: JobFiles, whole: str, folder: Path) -> None:
    write_prompts(files, 250)
    task = GENERATE | {
        "generation": {"n": 2, "temperature": 0.5, "defaults": "none", "length_penalty": 2.0, "beams": 1}
    }
    changes = {"task": task, "workers__rank_timeout_s": 5.0, "batch__rows": 3}
    paper = on_paper(files.spec(**changes, model__source=str(folder)))
    seen = preview_job(files.spec(**changes, model__source=whole))
    for name in ("output", "files", "rows", "input_bytes", "shards", "columns"):
        assert getattr(paper, name) == getattr(seen, name), name
    assert set(seen.hazards) <= set(paper.hazards)
    assert any("rank_timeout_s" in hazard for hazard in paper.hazards)


def test_an_input_without_rows_and_an_output_with_a_plan_are_hazards(files: JobFiles, whole: str, folder: Path) -> None:
    files.write_input(pa.table({"doc": pa.array([], pa.string())}))
    changes = {"task": GENERATE}
    assert any("no rows" in hazard for hazard in on_paper(files.spec(**changes, model__source=str(folder))).hazards)
    run_job(files.spec(**changes, model__source=whole))
    assert any(
        "holds a plan" in hazard for hazard in on_paper(files.spec(**changes, model__source=str(folder))).hazards
    )


def test_a_plan_says_what_becomes_of_the_plan_that_is_there(files: JobFiles) -> None:
    files.write_input(sample_table(150))
    run_job(files.spec())
    assert "the output already holds this job's plan: submit would go on with it" in preview_job(files.spec()).hazards
    changed = preview_job(files.spec(sharding__target_rows=10)).hazards
    assert any("exit 3" in hazard and "sharding.target_rows: plan `100`, now `10`" in hazard for hazard in changed)


def test_a_plan_refuses_an_output_with_somebody_elses_rows_as_submit_does(files: JobFiles) -> None:
    files.write_input(sample_table(20))
    files.write_input(sample_table(3), "out/stranger.parquet")
    told = []
    for start in (preview_job, run_job):
        with pytest.raises(InputError) as caught:
            start(files.spec())
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert "stranger.parquet" in told[0]


@pytest.mark.parametrize(("rows", "beams", "texts"), [("auto", 1, 64), ("auto", 100, 100), (8, 1, 8), (8, 8, 8)])
def test_texts_that_grow_at_a_time_have_room_for_every_beam(rows: int | str, beams: int, texts: int) -> None:
    assert decide_batching(BatchSpec(rows=rows), beams).generate_rows == texts  # type: ignore[arg-type]


def test_more_beams_than_texts_raise_the_rows_of_a_plan_without_weights(
    files: JobFiles, whole: str, folder: Path
) -> None:
    write_prompts(files, 20)
    task = GENERATE | {"generation": {"beams": 100, "max_new_tokens": 2, "defaults": "none"}}
    few = GENERATE | {"generation": {"beams": 64, "max_new_tokens": 2, "defaults": "none"}}
    bytes_of = [
        on_paper(files.spec(task=chosen, model__source=str(folder), batch__cache_bytes="1GiB")).split.rank_bytes
        for chosen in (task, few)
    ]
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert bytes_of[0] - bytes_of[1] == 36 * vocabulary * 2 * 4, "logits and their copy of 36 more texts"


@pytest.mark.parametrize(
    ("dtype", "device", "matrix", "rest"),
    [
        ("float32", "cpu", 4, 4),
        ("bfloat16", "cpu", 2, 2),
        ("int8", "cpu", 1.0625, 2),
        ("float32", "cuda", 4, 4),
        ("bfloat16", "cuda", 2, 2),
        ("float16", "cuda", 2, 2),
    ],
)
def test_a_numbers_bytes_are_those_of_its_dtype_on_its_device(
    dtype: str, device: DeviceKind, matrix: float, rest: float
) -> None:
    held = weight_bytes(dtype, device)
    assert (held.matrix, held.rest) == (matrix, rest)
    assert held.size(1600, 10) == 1600 * matrix + 10 * rest


@pytest.mark.parametrize(
    ("dtype", "device", "hint"),
    [
        ("float16", "cpu", "model.dtype can be float32, bfloat16, int8; or set model.device: cuda"),
        ("int8", "cuda", "model.dtype can be float32, bfloat16; or set model.device: cpu"),
    ],
)
def test_a_dtype_of_another_device_is_refused_with_what_this_one_holds(
    dtype: str, device: DeviceKind, hint: str
) -> None:
    with pytest.raises(InputError, match=f"{device} does not hold weights in this dtype: `{dtype}`") as caught:
        weight_bytes(dtype, device)
    assert caught.value.hint == hint


def test_int8_on_cuda_is_refused_by_every_verb_in_the_same_words(files: JobFiles, whole: str, folder: Path) -> None:
    write_prompts(files, 20)
    changes = {"task": GENERATE, "model__dtype": "int8", "model__device": "cuda"}
    told = [
        files.run(verb, str(files.spec_file(**changes, model__source=source)))
        for verb, source in (("validate", whole), ("plan", whole), ("plan", str(folder)), ("submit", whole))
    ]
    assert [done.code for done in told] == [2] * 4
    assert len({done.stderr for done in told}) == 1
    assert "cuda does not hold weights in this dtype: `int8`" in told[0].stderr
    assert "set model.device: cpu" in told[0].stderr
    assert not files.out().exists()


def test_int8_where_auto_finds_a_gpu_is_refused_when_planned(files: JobFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_input(sample_table(20))
    monkeypatch.setattr("jobs.prepare._decide_device", lambda spec: "cuda")
    with pytest.raises(InputError, match="cuda does not hold weights in this dtype: `int8`"):
        prepare_job(files.spec(model__source=str(minilm()), model__dtype="int8"))
    assert (
        prepare_job(files.spec(model__source=str(minilm()), model__dtype="bfloat16")).worker_config.model.device
        == "cuda"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_weights_are_counted_alike_with_and_without_them(files: JobFiles, whole: str, folder: Path, dtype: str) -> None:
    write_prompts(files, 20)
    changes = {"backend": "ray", "model__tensor_parallel": 2, "task": GENERATE, "model__dtype": dtype}
    changes |= {"workers__cpus": 1, "ray__address": "127.0.0.1:1"}
    seen = preview_job(files.spec(**changes, model__source=whole)).split
    paper = on_paper(files.spec(**changes, model__source=str(folder))).split
    assert seen is not None
    assert (seen.weight_bytes, seen.rank_weight_bytes) == (paper.weight_bytes, paper.rank_weight_bytes)


def test_memory_of_a_replica_counts_weights_as_they_are_held(files: JobFiles) -> None:
    files.write_input(sample_table(20))
    source = str(minilm())
    dtypes = ("float32", "bfloat16", "int8")
    plans = {dtype: preview_job(files.spec(model__source=source, model__dtype=dtype)) for dtype in dtypes}
    assert all(planned.dtype == dtype for dtype, planned in plans.items())
    found = {dtype: planned.replica_memory_bytes for dtype, planned in plans.items()}
    whole = prepare_job(files.spec(model__source=source)).info.weight_bytes
    assert whole > 80 << 20
    assert found["float32"] - found["bfloat16"] == whole // 2
    int8_bytes = candle_py.Engine.load(source, dtype="int8").info["weight_bytes"]
    assert found["float32"] - found["int8"] == pytest.approx(whole - int8_bytes, rel=0.01)


@pytest.mark.parametrize("name", ["minilm", "qwen2", "qwen2-untied", "qwen3", "llama", "gguf-qwen2-q8_0/model.gguf"])
def test_bytes_in_int8_are_those_that_the_engine_tells(name: str) -> None:
    path = minilm() if name == "minilm" else GOLDEN / name
    told = candle_py.Engine.load(path, dtype="int8").info["weight_bytes"]
    info, held = inspect_model(str(path), path, "embed", "mean"), weight_bytes("int8", "cpu")
    for model in (Dimensions.of_info(info), Dimensions.of_model(path, info)):
        assert model.weight_bytes(1, held) == pytest.approx(told, rel=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_bytes_of_cache_are_those_that_the_engine_takes(name: str, dtype: str) -> None:
    blocks = candle_py.Engine.load(GOLDEN / name, dtype=dtype).generator().stats
    model = Dimensions.of_model(GOLDEN / name, inspect_model(name, GOLDEN / name, "embed", "mean"))
    assert model.cache_token_bytes(1, weight_bytes(dtype, "cpu")) == blocks["block_bytes"] / 16


def test_a_job_that_grows_no_text_keeps_no_cache() -> None:
    load = Load.of_batching(weight_bytes("float32", "cpu"), decide_batching(BatchSpec()))
    assert (load.step_tokens, load.rows, load.row_tokens, load.cache_bytes) == (16_384, 0, 0, 0)
