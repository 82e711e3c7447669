"""Models split over real processes: the whole model's numbers, memory by rank, and ranks that are lost."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import candle_py
import numpy as np
import pytest
from engine_models import GOLDEN, cases, expected, ragged
from rank_groups import LONG_S, Group
from safetensors.numpy import save_file

from jobs.weight_bytes import matrix_names, weight_bytes
from sharding.tensor import ModelSizes, rank_numbers

# As of whole models: float32, sums in another order.
HIDDEN_TOLERANCE = 2e-5
LOGIT_TOLERANCE = 5e-5
SHORT_S = 3.0


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    """Groups that end with the test."""
    found: list[Group] = []
    yield found
    for group in found:
        group.end()


@pytest.mark.parametrize(("name", "world"), [("qwen2", 2), ("qwen2-untied", 2), ("qwen3", 4), ("llama", 4)])
def test_processes_give_the_numbers_and_ids_of_the_reference(
    name: str, world: int, tmp_path: Path, groups: list[Group]
) -> None:
    output = tmp_path / "found.npz"
    groups.append(Group(world, GOLDEN / name, work="all", rows=cases(name)["ids"], output=str(output)))
    ranks = groups[0].start_all()
    for index, rank in enumerate(ranks):
        assert rank.until("info")["info"] == [index, world]
    assert ranks[0].next() == {"generated": cases(name)["greedy"]}
    assert [rank.next() for rank in ranks[1:]] == [{"done": True}] * (world - 1)
    assert [rank.process.wait(LONG_S) for rank in ranks] == [0] * world
    found = np.load(output)
    np.testing.assert_allclose(found["hidden"], expected(name, "hidden"), rtol=0, atol=HIDDEN_TOLERANCE)
    np.testing.assert_allclose(found["logits"], expected(name, "logits"), rtol=0, atol=LOGIT_TOLERANCE)
    assert (found["last"] * expected(name, "last")).sum(1).min() >= 0.999999
    assert found["logprobs"].shape == (len(found["hidden"]), 1)


def test_followers_end_with_rank_0s_engine_though_nobody_closes_it(groups: list[Group]) -> None:
    groups.append(Group(2, GOLDEN / "qwen2"))
    ranks = groups[0].start_all()
    assert ranks[1].until("done") == {"done": True}
    assert [rank.process.wait(LONG_S) for rank in ranks] == [0, 0]


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_killed_rank_is_told_at_once_on_all_others(lost: int, groups: list[Group]) -> None:
    groups.append(Group(4, GOLDEN / "llama", work="forever"))
    ranks = groups[0].start_all()
    ranks[0].until("step")
    ranks[lost].process.kill()
    started = time.monotonic()
    for index, rank in enumerate(ranks):
        if index != lost:
            event = rank.until("error")
            assert event["error"] == "CommunicatorError", event
            assert "closed its connection, in `" in event["text"], event
            assert event["hint"] == "start all ranks again"
    assert time.monotonic() - started < LONG_S / 2


@pytest.mark.parametrize("silent", [0, 1])
def test_a_stopped_rank_is_told_at_the_deadline_on_all_others(silent: int, tmp_path: Path, groups: list[Group]) -> None:
    _write_llama(tmp_path, hidden=24, heads=3, inner=48, vocab=100, layers=1)
    groups.append(Group(3, tmp_path, timeout_s=SHORT_S, work="forever"))
    ranks = groups[0].start_all()
    ranks[0].until("step")
    ranks[silent].process.send_signal(signal.SIGSTOP)
    for index, rank in enumerate(ranks):
        if index != silent:
            event = rank.until("error")
            assert event["error"] == "CommunicatorError", event
            # Who hears of it from another, in the middle of a message, sees that one's connection close.
            assert "gave no answer for 3.0 s" in event["text"] or "closed its connection" in event["text"], event


def test_an_idle_rank_0_is_waited_for_beyond_the_deadline_and_its_death_is_told(groups: list[Group]) -> None:
    groups.append(Group(2, GOLDEN / "qwen2", timeout_s=SHORT_S, work="wait"))
    ranks = groups[0].start_all()
    ranks[1].until("info")
    assert ranks[0].until("waited") == {"waited": True, "steps": 2}
    ranks[0].process.kill()
    event = ranks[1].until("error")
    assert event["text"] == "rank 0 closed its connection, in `broadcast_bytes`"


def test_an_interrupted_follower_ends_the_group(groups: list[Group]) -> None:
    groups.append(Group(2, GOLDEN / "qwen2", work="forever"))
    ranks = groups[0].start_all()
    ranks[0].until("step")
    ranks[1].process.send_signal(signal.SIGINT)
    ranks[1].until("interrupted")
    assert ranks[0].until("error")["error"] == "CommunicatorError"


def test_a_rank_that_never_arrives_is_named(groups: list[Group]) -> None:
    groups.append(Group(3, GOLDEN / "qwen2", timeout_s=SHORT_S))
    second = groups[0].start(1, timeout_s=LONG_S)
    first = groups[0].start(0)
    assert first.until("error")["text"] == "ranks did not arrive within 3.0 s: `2`"
    assert second.until("error")["text"] == "rank 0 refuses: ranks did not arrive within 3.0 s: `2`"
    late = groups[0].start(2).until("error")
    assert late["text"].startswith("rank 0 cannot be reached within 3.0 s ("), late


def test_a_process_with_another_token_is_refused_and_the_group_goes_on(groups: list[Group]) -> None:
    groups.append(Group(2, GOLDEN / "qwen2"))
    first = groups[0].start(0)
    stranger = groups[0].start(1, token="another").until("error")
    assert stranger["text"] == "rank 0 refuses: the token is not this group's"
    follower = groups[0].start(1)
    assert follower.until("done") == {"done": True}
    assert first.process.wait(LONG_S) == 0


def test_a_process_of_another_world_is_named_on_both_sides(groups: list[Group]) -> None:
    groups.append(Group(2, GOLDEN / "qwen2"))
    first, other = groups[0].start(0), groups[0].start(2, world=4)
    told = "rank 2 is of a world of 4, rank 0 of one of `2`"
    assert other.until("error")["text"] == f"rank 0 refuses: {told}"
    assert first.until("error") == {
        "error": "CommunicatorError",
        "text": told,
        "hint": "give every rank the same world, and its own rank",
    }


def test_heads_that_do_not_divide_are_refused_on_every_rank_with_worlds_that_fit(groups: list[Group]) -> None:
    groups.append(Group(3, GOLDEN / "qwen2"))
    for rank in groups[0].start_all():
        event = rank.until("error")
        told = "model of 4 heads, 2 key/value heads and intermediate size 160 cannot be split over so many ranks: `3`"
        assert event["text"].endswith(told), event
        if event["error"] == "InputError":
            assert event["hint"] == "it can be split over: 1, 2, 4"


@pytest.mark.parametrize(("name", "world"), [("bert", 2), ("roberta", 3), ("modernbert", 4)])
def test_processes_give_the_vectors_of_the_reference(
    name: str, world: int, tmp_path: Path, groups: list[Group]
) -> None:
    output = tmp_path / "found.npz"
    groups.append(Group(world, GOLDEN / name, work="encode", rows=cases(name)["ids"], output=str(output)))
    ranks = groups[0].start_all()
    assert [rank.until("done") for rank in ranks[1:]] == [{"done": True}] * (world - 1)
    assert [rank.process.wait(LONG_S) for rank in ranks] == [0] * world
    found = np.load(output)
    np.testing.assert_allclose(found["hidden"], expected(name, "hidden"), rtol=0, atol=HIDDEN_TOLERANCE)
    np.testing.assert_allclose(found["mean"], expected(name, "mean"), rtol=0, atol=HIDDEN_TOLERANCE)


@pytest.mark.parametrize(
    ("name", "world", "least"),
    # Ranks cut rows within a block, so that blocks, and what is rounded in them, are others than the whole model's.
    [
        ("bert", 2, 0.9999),
        ("modernbert", 4, 0.9999),
        ("qwen2", 2, 0.998),
        ("qwen2-untied", 2, 0.998),
        ("llama", 4, 0.998),
    ],
)
def test_processes_in_int8_keep_as_near_the_whole_model_as_to_the_reference(
    name: str, world: int, least: float, tmp_path: Path, groups: list[Group]
) -> None:
    output, rows = tmp_path / "found.npz", cases(name)["ids"]
    groups.append(Group(world, GOLDEN / name, work="encode", dtype="int8", rows=rows, output=str(output)))
    ranks = groups[0].start_all()
    assert [rank.until("done") for rank in ranks[1:]] == [{"done": True}] * (world - 1)
    assert [rank.process.wait(LONG_S) for rank in ranks] == [0] * world
    split = np.load(output)["hidden"].astype(np.float64)
    whole = np.asarray(candle_py.Engine.load(GOLDEN / name, dtype="int8").hidden_states(*ragged(rows)))
    for other in (whole, expected(name, "hidden")):
        lengths = np.linalg.norm(split, axis=1) * np.linalg.norm(other, axis=1)
        assert ((split * other).sum(1) / lengths).min() >= least


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_rank_holds_its_part_of_the_weights_and_no_more(tmp_path: Path, groups: list[Group], dtype: str) -> None:
    model = _write_llama(tmp_path, hidden=768, heads=12, inner=3072, vocab=16_000, layers=6)
    sizes, held, names = (
        ModelSizes.from_config(model["config"]),
        weight_bytes(dtype, "cpu"),
        matrix_names(model["shapes"]),
    )
    parts = [[item for item in model["shapes"].items() if (item[0] in names) == is_in] for is_in in (True, False)]
    for world in (1, 2, 4):
        group = Group(world, tmp_path, work="forever", dtype=dtype)
        groups.append(group)
        ranks = group.start_all()
        own = [
            held.size(*(rank_numbers(part, sizes, rank=rank, world=world) for part in parts)) for rank in range(world)
        ]
        ranks[0].until("step")
        found = [rank.resident_bytes() - rank.base_bytes for rank in ranks]
        print(f"world {world}: MiB held {[size >> 20 for size in found]}, weights {[size >> 20 for size in own]}")
        # Beside the weights: what the allocator keeps of the largest tensor's reading and packing, and buffers.
        beside = 2 * 4 * max(map(prod, model["shapes"].values())) // world + 40 * 2**20
        assert all(part <= size < part + beside for size, part in zip(found, own, strict=True))
        group.end()


def test_a_communicator_belongs_to_one_engine_and_checks_its_arguments() -> None:
    alone = candle_py.TcpCommunicator(0, 1, [], "secret", 5.0)
    assert (alone.rank, alone.world, repr(alone)) == (0, 1, "TcpCommunicator(rank=0, world=1)")
    engine = candle_py.Engine.load(GOLDEN / "qwen2", communicator=alone)
    assert (engine.info["rank"], engine.info["world"]) == (0, 1)
    with pytest.raises(candle_py.InputError, match="communicator belongs to another engine"):
        candle_py.Engine.load(GOLDEN / "qwen2", communicator=alone)
    with pytest.raises(candle_py.InputError, match="there is no other rank to follow: `0`"):
        engine.follow()
    engine.close()
    for arguments, text in (
        ((-1, 2, ["127.0.0.1:1"], "t", 1.0), "rank must not be negative: `-1`"),
        ((2, 2, ["127.0.0.1:1"], "t", 1.0), "rank must be below the world of 2: `2`"),
        ((0, 2, ["127.0.0.1:1"], "", 1.0), "token must have from 1 to 1024 bytes: `0`"),
        ((0, 2, ["127.0.0.1:1"], "t", -1.0), "timeout_s must be a number of seconds: `-1`"),
        ((0, 3, ["127.0.0.1:1"] * 2, "t", 1.0), "addresses must be rank 0's alone or those of all 3 ranks: `2`"),
        ((0, 2, ["nowhere"], "t", 1.0), "address cannot be listened at"),
    ):
        with pytest.raises(candle_py.EngineError, match=text):
            candle_py.TcpCommunicator(*arguments)


def _write_llama(folder: Path, *, hidden: int, heads: int, inner: int, vocab: int, layers: int) -> dict[str, Any]:
    """A Llama with random weights; the shapes of its tensors."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
    }
    shapes["model.norm.weight"] = (hidden,)
    for layer in range(layers):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
        shapes |= {f"{name}.mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{name}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
    random = np.random.default_rng(0)
    save_file(
        {name: random.normal(0, 0.05, shape).astype(np.float32) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config))
    return {"config": config, "shapes": shapes}
