"""Split models before anything starts: what is refused and why, what a rank holds, and where ranks have room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from engine_models import GOLDEN
from gangs import GENERATE, write_prompts, write_split_model
from job_files import JobFiles, sample_table
from safetensors import safe_open

from jobs import run_job
from jobs.errors import exit_code_of
from jobs.paper import PaperPreview, preview_on_paper
from jobs.placement import place_replicas
from jobs.prepare import prepare_job
from jobs.preview import preview_job
from jobs.spec import load_spec
from jobs.split import Dimensions, Load, plan_split, rank_bytes
from jobs.weight_bytes import weight_bytes
from sharding.errors import CandelabraError, InfrastructureError, InputError
from sharding.tensor_shapes import decoder_shapes
from sharding.words import counted
from workers.resources.limits import available_threads

ROOT = Path(__file__).parent.parent
QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
# As the published index tells it: 7,615,616,512 numbers of two bytes.
QWEN_7B_BYTES = 15_231_233_024


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Config and index of Qwen2.5-7B, without any weight."""
    target = tmp_path / "qwen"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(QWEN_7B))
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    for layer in range(28):
        inside = [f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")]
        inside += ["self_attn.o_proj.weight", *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down"))]
        inside += ["input_layernorm.weight", "post_attention_layernorm.weight"]
        names += [f"model.layers.{layer}.{name}" for name in inside]
    index = {"metadata": {"total_size": QWEN_7B_BYTES}, "weight_map": dict.fromkeys(names, "model-1-of-4.safetensors")}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target


def plan(folder: Path, ranks: int, *settings: str) -> PaperPreview:
    """What `plan` says of a 7B job."""
    config = ROOT / f"configs/generate-qwen2.5-7b-tp{ranks}.yaml"
    found = preview_on_paper(load_spec(config, [f"model.source={folder}", *settings]))
    assert found is not None
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_7b_model_is_planned_from_config_and_index_alone(folder: Path, ranks: int) -> None:
    found = plan(folder, ranks)
    split, norms = found.split, 57 * 3584 * 2
    assert (split.ranks, split.weight_bytes) == (ranks, QWEN_7B_BYTES)
    assert split.rank_weight_bytes == (QWEN_7B_BYTES - norms) // ranks + norms
    assert split.cache_token_bytes == 2 * 28 * 4 // ranks * 128 * 4
    assert (split.all_reduces, split.all_reduce_bytes) == (57, 14_336)
    assert list(split.cache_tokens) == ["24", "40", "80", "141"]
    for gigabytes, tokens in split.cache_tokens.items():
        assert tokens is not None
        beside = 0.9e9 * int(gigabytes) - split.rank_weight_bytes - tokens * split.cache_token_bytes
        assert 0 <= beside < 0.3e9, "of work, beside weights and cache"
    assert split.one_device_gb == 24
    assert any("end with exit 5" in hazard and f"{ranks} ranks" in hazard for hazard in found.hazards)


@pytest.mark.parametrize(
    ("settings", "cache_dtype", "on_gpus"),
    [
        (["model.dtype=bfloat16", "model.device=cuda"], "float32", True),
        (["model.dtype=bfloat16", "model.device=auto"], "float16", True),
        (["model.dtype=bfloat16", "model.device=cpu"], "float16", False),
        (["model.dtype=float32", "model.device=cpu"], "float32", False),
        (["model.dtype=int8", "model.device=auto"], "float16", False),
        (["model.dtype=int8", "model.device=cpu"], "float16", False),
    ],
)
def test_gpus_are_counted_where_the_job_may_run_on_one_and_the_cache_in_its_format(
    files: JobFiles, folder: Path, settings: list[str], cache_dtype: str, on_gpus: bool
) -> None:
    split, numbers = plan(folder, 2, *settings).split, 2 * 28 * 2 * 128
    assert (split.cache_dtype, split.cache_token_bytes) == (cache_dtype, numbers * int(cache_dtype[-2:]) // 8)
    assert bool(split.cache_tokens) == on_gpus == (split.one_device_gb is not None)
    if settings[0] == "model.dtype=bfloat16" and on_gpus:
        assert split.cache_tokens == plan(folder, 2).split.cache_tokens, "a GPU's cache is float32"
    words = [word for setting in settings for word in ("--set", setting)]
    config = str(ROOT / "configs/generate-qwen2.5-7b-tp2.yaml")
    done = files.run("plan", config, "--set", f"model.source={folder}", *words)
    assert f"bytes per token on each rank, in {cache_dtype}" in " ".join(done.stdout.split())
    assert ("24 GB" in done.stdout) == on_gpus


def test_a_rank_takes_of_a_nodes_memory_what_the_plan_says_that_it_needs(files: JobFiles, folder: Path) -> None:
    cpus = ("model.device=cpu", "model.dtype=int8", "workers.cpus=1")
    found = plan(folder, 2, *cpus)
    told = f"{-(-found.split.rank_bytes // 2**20):,} MiB of memory"
    assert any(told in text for text in (found.replicas, *found.hazards))
    source = write_split_model(files)
    write_prompts(files, 20)
    changes = {"backend": "ray", "task": GENERATE, "model__source": source, "model__tensor_parallel": 2}
    job = files.spec(**changes, ray__address="127.0.0.1:1")
    prepared, seen = prepare_job(job), preview_job(job)
    assert seen.split is not None
    reserved = rank_bytes(job, prepared.model.path, prepared.info, prepared.worker_config)
    assert reserved == seen.split.rank_bytes > seen.split.rank_weight_bytes


def test_a_plan_without_weights_is_readable_and_plain_data(files: JobFiles, folder: Path) -> None:
    words = ("plan", str(ROOT / "configs/generate-qwen2.5-7b-tp2.yaml"), "--set", f"model.source={folder}")
    docs = pa.table({name: [f"the {name} of {row}" for row in range(100)] for name in ("module", "name", "doc")})
    words += ("--set", f"input.path={files.write_input(docs)}")
    found = files.run(*words, "--json").json
    assert found["split"]["cache_tokens"].keys() == {"24", "40", "80", "141"}
    assert (found["files"], found["rows"], found["shards"]) == (1, 100, 2)
    assert found["columns"][-7:] == [
        "text",
        "finish_reason",
        "n_new_tokens",
        "logprob",
        "n_tokens",
        "truncated",
        "error",
    ]
    done = files.run(*words)
    assert done.code == 0, done.stderr
    for text in (
        "1 file, 100 rows",
        "7,615,820,800 bytes per rank",
        "57 of 14,336 bytes",
        "24 GB",
        "model.tensor_parallel: 1",
    ):
        assert text in " ".join(done.stdout.split()), done.stdout


@pytest.mark.parametrize(
    ("setting", "code", "words"),
    [
        ("model.tensor_parallel=3", 2, ["28 heads, 4 key/value heads", "many ranks: `3`", "split over: 1, 2, 4"]),
        ("model.tensor_parallel=8", 2, ["split over: 1, 2, 4"]),
        ("batch.cache_bytes=150GiB", 5, ["a rank needs 168.", "largest device counted on has: `141 GB`"]),
        ("model.tensor_parallel=0", 2, ["model.tensor_parallel", "greater than or equal to 1"]),
        ("model.tensor_parallel=two", 2, ["model.tensor_parallel"]),
        ("workers.rank_timeout_s=0", 2, ["workers.rank_timeout_s"]),
        ("ray.placement_timeout_s=1e9", 2, ["ray.placement_timeout_s"]),
        ("backend=local", 2, ["needs `backend: ray`"]),
    ],
)
def test_what_cannot_be_split_or_fit_is_refused(folder: Path, setting: str, code: int, words: list[str]) -> None:
    with pytest.raises(CandelabraError) as caught:
        plan(folder, 2, setting)
    assert exit_code_of(caught.value) == code
    for word in words:
        assert word in f"{caught.value} {caught.value.hint}"


def test_an_index_of_another_model_is_refused_with_what_differs(folder: Path) -> None:
    other = QWEN_7B | {"num_hidden_layers": 27, "tie_word_embeddings": True}
    for config, message in (
        (other, r"does not fit config\.json, it has lm_head\.weight, model\.layers\.27\."),
        (QWEN_7B | {"model_type": "qwen3"}, r"it lacks model\.layers\.0\.self_attn\.k_norm\.weight, .* and has "),
        ({"model_type": "bert"}, r"known from config\.json alone: `bert`"),
        ({"model_type": "llama", "hidden_size": "wide"}, r"no size that can be used"),
    ):
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match=message):
            plan(folder, 2)


def test_a_model_too_large_for_one_device_names_the_ranks_that_hold_it() -> None:
    large = decoder_shapes(QWEN_7B | {"num_hidden_layers": 400})
    held = weight_bytes("bfloat16", "cuda")
    load = Load(held=held, step_tokens=512, rows=64, row_tokens=4160, cache_bytes=0)
    with pytest.raises(InfrastructureError, match=r"a rank needs 19\d\.\d GB .* has: `141 GB`") as caught:
        plan_split(Dimensions.of_shapes(large), load, 1, held)
    assert caught.value.hint is not None
    assert "that fits: 2, 4;" in caught.value.hint
    assert "model.device: cpu" in caught.value.hint
    assert plan_split(Dimensions.of_shapes(large), load, 2, held).one_device_gb is None
    assert plan_split(Dimensions.of_shapes(large), load, 1, None).rank_bytes > 190e9, "a CPU's memory has any size"


def test_a_whole_model_is_planned_with_its_ranks(files: JobFiles) -> None:
    source = write_split_model(files)
    write_prompts(files, 20)
    changes = {"backend": "ray", "task": GENERATE, "model__source": source, "model__tensor_parallel": 2}
    found = preview_job(files.spec(**changes, workers__cpus=1, workers__replicas=1))
    assert found.split is not None
    assert found.split.weight_bytes == 154_432 * 4
    assert found.split.all_reduces == 7
    assert found.replicas is not None
    assert found.replicas.startswith("1 here, each 2 ranks on one node, each with 1 CPU, 0 GPUs and")
    elsewhere = preview_job(files.spec(**changes, ray__address="127.0.0.1:1"))
    assert elsewhere.replicas is not None
    assert elsewhere.replicas.startswith("as many as the cluster's nodes have room for, each 2 ranks on one node")
    assert preview_job(files.spec(**changes | {"model__tensor_parallel": 1})).split is None


def test_ranks_without_room_on_this_machine_are_refused_by_plan_with_need_and_have(files: JobFiles) -> None:
    source = write_split_model(files, "llama")
    write_prompts(files, 20, "llama")
    cpus = available_threads()
    spec = files.spec_file(
        backend="ray", task=GENERATE, model__source=source, model__tensor_parallel=8, workers__cpus=cpus
    )
    done = files.run("plan", str(spec))
    assert done.code == 5, done.stderr
    assert "Traceback" not in done.stderr
    assert f"8 ranks on one node, each with {counted(cpus, 'CPU')}" in done.stderr
    assert f"the nodes have: `{counted(cpus, 'CPU')}, " in done.stderr


def test_the_plan_of_a_split_encoder_speaks_of_no_cache(files: JobFiles) -> None:
    files.write_input(sample_table(20))
    task = {"kind": "embed", "text": "doc"}
    source = str(GOLDEN / "st-mean-dense")
    spec = files.spec_file(
        backend="ray", task=task, model__source=source, model__tensor_parallel=2, workers__cpus=1, workers__replicas=1
    )
    if available_threads() < 2:
        pytest.skip("two ranks need two CPUs")
    done = files.run("plan", str(spec))
    assert done.code == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "24 GB │ fits" in words
    assert "cache" not in words.split("rank │")[1].split("all-reduces")[0]
    assert set(files.run("plan", str(spec), "--json").json["split"]["cache_tokens"].values()) == {0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__source": "MODEL", "model__tensor_parallel": 3}, "split over so many ranks: `3`"),
        (
            {"model__source": str(GOLDEN / "st-mean-dense"), "model__tensor_parallel": 3},
            "of 4 heads, 4 key/value heads",
        ),
        ({"model__source": "fake:8"}, "needs a model of a real kind: `fake:8`"),
        ({"model__source": "MODEL", "backend": "local"}, "needs `backend: ray`"),
    ],
)
def test_jobs_that_cannot_be_split_are_refused_before_anything_is_written(
    files: JobFiles, changes: dict[str, Any], message: str
) -> None:
    source = write_split_model(files)
    files.write_input(sample_table(20))
    settings = {"backend": "ray", "model__tensor_parallel": 2, "task": {"kind": "embed", "text": "doc"}} | changes
    if settings["model__source"] == "MODEL":
        settings |= {"model__source": source, "task": GENERATE}
    with pytest.raises(InputError, match=message):
        run_job(files.spec(**settings))
    assert not files.out().exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"backend": "local", "model__source": "some/model"},
            "needs `backend: ray`, which runs a process for each rank",
        ),
        ({"backend": "ray", "model__source": "fake:8"}, "needs a model of a real kind: `fake:8`"),
    ],
)
def test_validate_refuses_what_the_spec_alone_tells_of_ranks_in_the_words_of_submit(
    files: JobFiles, changes: dict[str, Any], words: str
) -> None:
    files.write_input(sample_table(20))
    if changes["backend"] == "local":
        changes = changes | {"model__source": write_split_model(files)}
    spec = str(files.spec_file(model__tensor_parallel=2, **changes))
    told = [files.run(verb, spec) for verb in ("validate", "plan", "submit")]
    assert [done.code for done in told] == [2, 2, 2]
    assert words in told[0].stderr
    assert len({done.stderr for done in told}) == 1
    assert told[0].stdout == ""
    assert files.run("validate", spec, "--set", "model.tensor_parallel=1").code == 0


def test_the_local_backend_named_by_argument_is_refused_too(files: JobFiles) -> None:
    source = write_split_model(files)
    write_prompts(files, 20)
    spec = files.spec(backend="ray", task=GENERATE, model__source=source, model__tensor_parallel=2)
    with pytest.raises(InputError, match="needs `backend: ray`"):
        run_job(spec, backend="local")


@pytest.mark.parametrize(
    ("nodes", "replicas", "ranks", "gpus", "expected"),
    [
        ([(8, 0)], None, 2, None, (1, 4)),
        ([(8, 0)], 2, 2, None, (2, 2)),
        ([(4, 0), (4, 0)], None, 2, None, (2, 2)),
        ([(16, 4), (16, 2), (64, 0)], None, 2, 1, (3, 4)),
        ([(2, 2)], None, 1, 1, (2, 1)),
    ],
)
def test_replicas_fill_whole_nodes_with_gangs(
    nodes: list[tuple[int, int]], replicas: int | None, ranks: int, gpus: int | None, expected: tuple[int, int]
) -> None:
    resources = [{"CPU": float(cpu), "GPU": float(gpu)} for cpu, gpu in nodes]
    found = place_replicas(resources, replicas, None, gpus, device="cpu", ranks=ranks)
    assert (found.replicas, found.cpus, found.ranks) == (*expected, ranks)


@pytest.mark.parametrize(
    ("nodes", "ranks", "gpus", "words"),
    [
        ([(2, 1), (2, 1)], 2, 1, "2 ranks on one node, each with 1 CPU and 1 GPU does not fit"),
        ([(2, 1), (2, 1)], 2, 1, "`2 CPUs, 1 GPU; 2 CPUs, 1 GPU`"),
        ([(2, 0)], 4, 0, "`2 CPUs, 0 GPUs`"),
        ([], 2, 1, "the nodes have: `none`"),
    ],
)
def test_ranks_that_no_node_holds_together_are_refused_with_what_each_node_has(
    nodes: list[tuple[int, int]], ranks: int, gpus: int, words: str
) -> None:
    resources = [{"CPU": float(cpu), "GPU": float(gpu)} for cpu, gpu in nodes]
    with pytest.raises(InfrastructureError) as caught:
        place_replicas(resources, None, 1, gpus, device="cpu", ranks=ranks)
    assert words in str(caught.value)
    assert caught.value.hint is not None
    assert "model.tensor_parallel" in caught.value.hint


def test_ranks_whose_weights_no_node_holds_are_refused_with_the_memory_of_each() -> None:
    node = {"CPU": 8.0, "memory": float(10 << 30)}
    assert place_replicas([node], None, 1, 0, device="cpu", ranks=2, rank_bytes=3 << 30).replicas == 1
    with pytest.raises(InfrastructureError, match=r"6,144 MiB of memory does not fit; .*`8 CPUs, 0 GPUs, 10,240 MiB"):
        place_replicas([node], None, 1, 0, device="cpu", ranks=2, rank_bytes=6 << 30)


@pytest.mark.parametrize("name", ["qwen2", "qwen2-untied", "qwen3", "llama"])
def test_shapes_told_by_a_config_are_those_of_the_weights(name: str) -> None:
    found = decoder_shapes(json.loads((GOLDEN / name / "config.json").read_text()))
    with safe_open(GOLDEN / name / "model.safetensors", "numpy") as file:
        shapes = {tensor: tuple(file.get_slice(tensor).get_shape()) for tensor in file.keys()}  # noqa: SIM118
    assert dict(found.shapes) == shapes
