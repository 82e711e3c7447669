"""The CUDA build on a real device: the golden cases, half precision, and groups over NCCL. Run by `make test-gpu`.

Needs the wheels of candle-py and candle-py-cuda, numpy, safetensors, tokenizers and pytest; nothing is built.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import candle_py
import numpy as np
import pytest
from engine_models import GOLDEN, cases, expected, generate, ragged
from rank_groups import LONG_S, Group, Rank

from workers.resources.devices import cuda_obstacle, probe_cuda

# As on the CPU: float32, sums in another order.
HIDDEN_TOLERANCE = 2e-5
LOGIT_TOLERANCE = 5e-5
_CACHE_BYTES = 64 << 20
ENCODERS = ["bert", "roberta", "xlm-roberta", "distilbert", "modernbert"]
DECODERS = ["qwen2", "qwen2-untied", "qwen3", "llama"]
QUANTISED = ["gguf-qwen2-q8_0", "gguf-llama-q4_0", "gguf-qwen3-q4_1"]


def _obstacle() -> str | None:
    failure = candle_py.cuda_failure()
    told = None if failure is None else (str(failure), failure.hint or "")
    found = cuda_obstacle(bool(candle_py.capabilities()["cuda"]), probe_cuda(), told)
    return None if found is None else found[0]


OBSTACLE = _obstacle()
DEVICES = 0 if OBSTACLE is not None else len(probe_cuda().gpus)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(OBSTACLE is not None, reason=OBSTACLE or "")]


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    """Groups that end with the test."""
    found: list[Group] = []
    yield found
    for group in found:
        group.end()


def load(name: str, **options: Any) -> candle_py.Engine:
    return candle_py.Engine.load(GOLDEN / name, device="cuda", **options)


def test_the_device_is_told_by_its_number_in_this_process() -> None:
    assert load("bert").info["device"] == "cuda:0"


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_equal_the_reference(name: str) -> None:
    engine, batch = load(name), ragged(cases(name)["ids"])
    np.testing.assert_allclose(engine.hidden_states(*batch), expected(name, "hidden"), rtol=0, atol=HIDDEN_TOLERANCE)
    for mode in ("mean", "cls"):
        rows = engine.embed(*batch, pooling=mode, normalize=True)
        np.testing.assert_allclose(rows, expected(name, mode), rtol=0, atol=HIDDEN_TOLERANCE)


@pytest.mark.parametrize("name", ["bert-classifier", "bert-cross-encoder"])
def test_classifiers_equal_the_reference(name: str) -> None:
    case = cases(name)
    types, _ = ragged(case["token_type_ids"])
    logits = load(name).classify(*ragged(case["ids"]), types)
    np.testing.assert_allclose(logits, expected(name, "logits"), rtol=0, atol=HIDDEN_TOLERANCE)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_equal_the_reference(name: str) -> None:
    engine, batch = load(name), ragged(cases(name)["ids"])
    np.testing.assert_allclose(engine.logits(*batch), expected(name, "logits"), rtol=0, atol=LOGIT_TOLERANCE)
    np.testing.assert_allclose(engine.hidden_states(*batch), expected(name, "hidden"), rtol=0, atol=HIDDEN_TOLERANCE)
    assert (np.asarray(engine.embed(*batch, pooling="last")) * expected(name, "last")).sum(1).min() >= 0.999999


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_ids_equal_the_reference(name: str) -> None:
    case = cases(name)
    assert generate(load(name), case["ids"], len(case["greedy"][0]), cache_bytes=_CACHE_BYTES) == case["greedy"]


@pytest.mark.parametrize("name", QUANTISED)
def test_gguf_files_give_what_they_give_on_the_cpu(name: str) -> None:
    batch = ragged(cases(name)["ids"])
    on_cpu = np.asarray(candle_py.Engine.load(GOLDEN / name / "model.gguf").logits(*batch))
    on_device = np.asarray(load(f"{name}/model.gguf").logits(*batch))
    np.testing.assert_allclose(on_device, on_cpu, rtol=0, atol=LOGIT_TOLERANCE)


def test_int8_is_refused_with_what_a_gpu_has() -> None:
    with pytest.raises(candle_py.DeviceError, match="dtype is on the CPU alone: `int8`") as caught:
        load("bert", dtype="int8")
    assert caught.value.hint == "use auto, float32, bfloat16 or float16"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen2", "qwen3", "llama"])
def test_weights_of_half_precision_stay_close(name: str, dtype: str) -> None:
    batch = ragged(cases(name)["ids"])
    found, wanted = np.asarray(load(name, dtype=dtype).hidden_states(*batch)), expected(name, "hidden")
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    assert ((found * wanted).sum(1) / lengths).min() >= 0.999


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(candle_py.DeviceError, match=f"`cuda:{DEVICES}`"):
        candle_py.Engine.load(GOLDEN / "bert", device=f"cuda:{DEVICES}")


def _uuids() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("nvidia-smi is not there to tell UUIDs")
    said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"UUID: (MIG-[\w-]+|GPU-[\w-]+)", said)


def test_a_device_given_by_its_uuid_is_device_0_of_the_process() -> None:
    script = f"import candle_py; print(candle_py.Engine.load({str(GOLDEN / 'bert')!r}, device='cuda').info['device'])"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": _uuids()[-1]}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert run.stdout.split() == ["cuda:0"]


def test_an_id_of_nccl_has_128_bytes_and_is_new_every_time() -> None:
    ids = {candle_py.nccl_unique_id() for _ in range(3)}
    assert [len(id_) for id_ in ids] == [128] * 3


@pytest.mark.parametrize("given", [True, False], ids=["id given", "id made"])
def test_a_group_of_one_over_nccl_gives_the_whole_models_numbers(given: bool) -> None:
    """It sums and gathers over NCCL when it is made; a model of one rank has nothing to sum."""
    control = candle_py.TcpCommunicator(0, 1, [], "secret", LONG_S)
    unique_id = candle_py.nccl_unique_id() if given else None
    group = candle_py.NcclCommunicator(control, device=0, unique_id=unique_id)
    assert (group.rank, group.world) == (0, 1)
    engine = load("qwen2", communicator=group)
    logits = engine.logits(*ragged(cases("qwen2")["ids"]))
    np.testing.assert_allclose(logits, expected("qwen2", "logits"), rtol=0, atol=LOGIT_TOLERANCE)
    assert generate(engine, cases("qwen2")["ids"], 24, cache_bytes=_CACHE_BYTES) == cases("qwen2")["greedy"]
    engine.close()


def test_a_group_that_was_aborted_makes_room_for_another() -> None:
    for _ in range(3):
        group = candle_py.NcclCommunicator(candle_py.TcpCommunicator(0, 1, [], "secret", LONG_S))
        group.abort("enough")


def test_a_group_on_another_device_than_the_model_is_refused() -> None:
    control = candle_py.TcpCommunicator(0, 1, [], "secret", LONG_S)
    with pytest.raises(candle_py.InputError, match="cuda:1 and: `cuda:0`"):
        candle_py.Engine.load(GOLDEN / "qwen2", device="cuda:1", communicator=candle_py.NcclCommunicator(control))


@pytest.mark.skipif(DEVICES < 2, reason=f"needs two devices, has {DEVICES}")
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_two_devices_give_the_numbers_and_ids_of_the_reference(name: str, tmp_path: Path, groups: list[Group]) -> None:
    """Every rank sees one device, its own, as device 0; the ranks are in the other order than the devices."""
    output, uuids = tmp_path / "found.npz", _uuids()
    more = {"work": "all", "rows": cases(name)["ids"], "output": str(output), "device": "cuda", "nccl": True}
    group = Group(2, GOLDEN / name, **more)
    groups.append(group)
    group.ranks = [Rank({"CUDA_VISIBLE_DEVICES": uuids[1 - rank]}, rank=rank, **group.options) for rank in range(2)]
    for rank in group.ranks:
        rank.until("started")
        rank.go()
    assert group.ranks[0].until("generated")["generated"] == cases(name)["greedy"]
    assert [rank.process.wait(LONG_S) for rank in group.ranks] == [0, 0]
    found = np.load(output)
    np.testing.assert_allclose(found["logits"], expected(name, "logits"), rtol=0, atol=LOGIT_TOLERANCE)


@pytest.mark.skipif(DEVICES < 2, reason=f"needs two devices, has {DEVICES}")
def test_a_rank_that_is_killed_is_told_on_the_other(groups: list[Group]) -> None:
    uuids = _uuids()
    group = Group(2, GOLDEN / "qwen2", work="forever", device="cuda", nccl=True)
    groups.append(group)
    group.ranks = [Rank({"CUDA_VISIBLE_DEVICES": uuids[rank]}, rank=rank, **group.options) for rank in range(2)]
    for rank in group.ranks:
        rank.until("started")
        rank.go()
    group.ranks[0].until("step")
    group.ranks[1].process.kill()
    told = group.ranks[0].until("error")
    assert told["error"] == "CommunicatorError", json.dumps(told)
