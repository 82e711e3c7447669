"""Generation through Python: golden greedy ids whatever is around a row, seeds, constraints, stops, refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import candle_py
import numpy as np
import pytest
from engine_models import GOLDEN, cases, ragged

DECODERS = ["qwen2", "qwen2-untied", "qwen3", "llama"]
NEW_TOKENS = 24
# The longest case and its new tokens but the last.
MOST_BLOCKS = 5


@dataclass
class Given:
    """What a request gave in all."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None


def load(name: str) -> candle_py.Engine:
    return candle_py.Engine.load(GOLDEN / name)


def cache_bytes(engine: candle_py.Engine, blocks: int) -> int:
    """Bytes of a cache of so many blocks."""
    return int(blocks * engine.generator().stats["block_bytes"])


def drain(generator: candle_py.Generator) -> dict[int, Given]:
    """Step until nothing is pending."""
    given: dict[int, Given] = {}
    while generator.pending:
        for event in generator.step():
            row = given.setdefault(event.request_id, Given())
            assert row.finish is None
            row.ids += event.ids
            row.logprobs += event.logprobs
            row.finish, row.error = event.finish, event.error
    assert generator.stats["held_blocks"] == 0
    return given


def generate(
    engine: candle_py.Engine, prompts: Sequence[Sequence[int]], options: dict[str, Any], **limits: Any
) -> list[Given]:
    """What the prompts give when all are there at once, in their order."""
    generator = engine.generator(**limits)
    for index, prompt in enumerate(prompts):
        generator.add(index, np.array(prompt, np.uint32), **options)
    given = drain(generator)
    return [given[index] for index in range(len(prompts))]


GREEDY = {"max_new_tokens": NEW_TOKENS}


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_ids_equal_the_reference_alone_together_and_in_another_order(name: str) -> None:
    engine, case = load(name), cases(name)
    for prompt, expected in zip(case["ids"], case["greedy"], strict=True):
        [given] = generate(engine, [prompt], GREEDY)
        assert (given.ids, given.finish) == (expected, "length")
    assert [given.ids for given in generate(engine, case["ids"], GREEDY)] == case["greedy"]
    assert [given.ids for given in generate(engine, case["ids"][::-1], GREEDY)] == case["greedy"][::-1]


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_ids_equal_the_reference_for_every_chunk_of_the_prompt(name: str) -> None:
    engine, case = load(name), cases(name)
    alone = [generate(engine, [prompt], GREEDY)[0] for prompt in case["ids"]]
    for step_tokens in range(1, max(map(len, case["ids"])) + 2):
        given = generate(engine, case["ids"], GREEDY, step_tokens=step_tokens)
        assert [row.ids for row in given] == case["greedy"]
        for row, expected in zip(given, alone, strict=True):
            np.testing.assert_allclose(row.logprobs, expected.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_ids_equal_the_reference_when_rows_are_preempted(name: str) -> None:
    engine, case = load(name), cases(name)
    preemptions = 0
    for blocks in range(MOST_BLOCKS, 3 * MOST_BLOCKS):
        for step_tokens in (3, 512):
            generator = engine.generator(cache_bytes=cache_bytes(engine, blocks), step_tokens=step_tokens)
            assert generator.stats["blocks"] == blocks
            for index, prompt in enumerate(case["ids"]):
                generator.add(index, np.array(prompt, np.uint32), max_new_tokens=NEW_TOKENS)
            given = drain(generator)
            assert [given[index].ids for index in range(len(given))] == case["greedy"]
            preemptions += generator.stats["preemptions"]
    assert preemptions > 0


@pytest.mark.parametrize("name", DECODERS)
def test_log_probabilities_are_those_of_scoring(name: str) -> None:
    engine, case = load(name), cases(name)
    scores = np.asarray(
        engine.token_logprobs(*ragged([a + b for a, b in zip(case["ids"], case["greedy"], strict=True)]))
    )
    start = 0
    for prompt, given in zip(case["ids"], generate(engine, case["ids"], GREEDY), strict=True):
        start += len(prompt)
        np.testing.assert_allclose(given.logprobs, scores[start : start + NEW_TOKENS, 0], rtol=0, atol=1e-5)
        start += NEW_TOKENS


def test_a_seed_gives_the_same_ids_whatever_the_batch_mates() -> None:
    engine, prompts = load("qwen3"), cases("qwen3")["ids"]
    options = {"max_new_tokens": 40, "temperature": 0.9, "top_p": 0.95, "top_k": 200, "min_p": 0.001}
    alone = [generate(engine, [prompt], options | {"seed": 2**64 - 1})[0].ids for prompt in prompts]
    for limits in ({}, {"max_rows": 2}, {"step_tokens": 3}, {"cache_bytes": cache_bytes(engine, 7)}):
        generator = engine.generator(**limits)
        for index, prompt in enumerate(prompts):
            generator.add(2 * index, np.array(prompt, np.uint32), seed=2**64 - 1, **options)
            generator.add(2 * index + 1, np.array(prompt, np.uint32), seed=index, **options)
        given = drain(generator)
        assert [given[2 * index].ids for index in range(len(prompts))] == alone
        assert any(given[2 * index + 1].ids != alone[index] for index in range(len(prompts)))


def test_a_common_start_is_computed_once() -> None:
    engine = load("qwen2")
    start = [7 * at % 384 for at in range(128)]
    generator = engine.generator()
    for index in range(10):
        generator.add(index, np.array([*start, index], np.uint32), max_new_tokens=3)
    together = drain(generator)
    assert generator.stats["shared_tokens"] == 9 * 128
    assert generator.stats["prefill_tokens"] == 128 + 10
    for index in range(10):
        [alone] = generate(engine, [[*start, index]], {"max_new_tokens": 3})
        assert together[index].ids == alone.ids


def test_the_best_of_many_beams_is_no_less_likely_than_the_greedy_output() -> None:
    engine, prompts = load("llama"), cases("llama")["ids"]
    greedy = generate(engine, prompts, {"max_new_tokens": 6})
    beams = generate(engine, prompts, {"max_new_tokens": 6, "beams": 8}, cache_bytes=cache_bytes(engine, 30))
    assert all(sum(a.logprobs) >= sum(b.logprobs) - 1e-5 for a, b in zip(beams, greedy, strict=True))
    assert any(a.ids != b.ids for a, b in zip(beams, greedy, strict=True))
    alone = [generate(engine, [prompt], {"max_new_tokens": 6, "beams": 8})[0].ids for prompt in prompts]
    assert [row.ids for row in beams] == alone


def test_a_stop_token_ends_the_output_and_is_no_part_of_it() -> None:
    case = cases("llama")
    prompt, greedy = case["ids"][1], case["greedy"][1]
    [given] = generate(load("llama"), [prompt], GREEDY | {"stop_ids": [383, greedy[5]]})
    assert (given.ids, given.finish) == (greedy[:5], "stop")
    [given] = generate(load("llama"), [prompt], GREEDY | {"stop_ids": (greedy[5],), "min_new_tokens": 9})
    assert len(given.ids) >= 9


def test_the_models_positions_end_the_output() -> None:
    [given] = generate(load("qwen2"), [[5] * 250], GREEDY)
    assert (len(given.ids), given.finish) == (6, "length")


def test_stop_ends_a_request_and_frees_its_place() -> None:
    engine, case = load("qwen2"), cases("qwen2")
    generator = engine.generator(max_rows=2)
    for index in range(2):
        generator.add(index, np.array(case["ids"][index], np.uint32), max_new_tokens=NEW_TOKENS)
    generator.step()
    assert (generator.free_rows, generator.pending) == (0, 2)
    generator.stop(0)
    generator.stop(99)
    assert (generator.free_rows, generator.pending) == (1, 2)
    given = drain(generator)
    assert (given[0].ids, given[0].finish) == ([], "stopped")
    assert given[1].ids == case["greedy"][1][1:]


class Multiples:
    """Allows multiples of a number, stops after some tokens."""

    def __init__(self, of: int, length: int) -> None:
        bits = np.zeros(384, np.uint8)
        bits[::of] = 1
        self.allowed = np.packbits(bits, bitorder="little").tobytes()
        self.length = length
        self.told: list[int] = []

    def mask(self, new_ids: list[int]) -> bytes | None:
        self.told += new_ids
        return None if len(self.told) == self.length else self.allowed


def test_a_constraint_restricts_its_row_and_hears_every_token() -> None:
    engine, case = load("qwen3"), cases("qwen3")
    for limits in ({}, {"step_tokens": 1}, {"cache_bytes": cache_bytes(engine, 6)}):
        constraints = [Multiples(3 + index, 10 + index) for index in range(len(case["ids"]))]
        generator = engine.generator(**limits)
        for index, (prompt, constraint) in enumerate(zip(case["ids"], constraints, strict=True)):
            ids = np.array(prompt, np.uint32)
            generator.add(index, ids, max_new_tokens=NEW_TOKENS, constraint=constraint)
            generator.add(100 + index, ids, max_new_tokens=NEW_TOKENS)
        given = drain(generator)
        for index, constraint in enumerate(constraints):
            assert given[index].finish == "stop"
            assert given[index].ids == constraint.told
            assert len(constraint.told) == constraint.length
            assert all(token % (3 + index) == 0 for token in constraint.told)
            assert given[100 + index].ids == case["greedy"][index]


class Answers:
    """Answers every call with what a function gives."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer

    def mask(self, new_ids: list[int]) -> Any:
        return self.answer()


def _raise(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda: _raise(ValueError("no rule")), "constraint failed: `ValueError: no rule`"),
        (lambda: "x", "mask must be bytes or None: `str`"),
        (lambda: b"abc", "mask must be whole uint32 numbers, not of so many bytes: `3`"),
        (lambda: b"abcd", "mask must have 12 words: `1`"),
        (lambda: bytes(48), "no token is allowed here"),
    ],
)
def test_a_failing_constraint_is_its_rows_own_error(answer: Callable[[], Any], error: str) -> None:
    engine, case = load("llama"), cases("llama")
    generator = engine.generator()
    generator.add(0, np.array(case["ids"][0], np.uint32), max_new_tokens=3, constraint=Answers(answer))
    generator.add(1, np.array(case["ids"][1], np.uint32), max_new_tokens=NEW_TOKENS)
    given = drain(generator)
    assert given[0] == Given([], [], "error", error)
    assert given[1].ids == case["greedy"][1]


def test_an_interrupt_in_a_constraint_ends_the_step_and_loses_nothing() -> None:
    engine, case = load("llama"), cases("llama")
    generator = engine.generator()
    interrupted = Answers(lambda: _raise(KeyboardInterrupt()))
    generator.add(0, np.array(case["ids"][0], np.uint32), max_new_tokens=3, constraint=interrupted)
    generator.add(1, np.array(case["ids"][1], np.uint32), max_new_tokens=NEW_TOKENS)
    with pytest.raises(KeyboardInterrupt):
        generator.step()
    given = drain(generator)
    assert given[0].finish == "error"
    assert given[1].ids == case["greedy"][1]


def test_a_generator_in_use_says_so() -> None:
    generator = load("llama").generator()
    errors: list[str] = []

    def ask() -> bytes | None:
        try:
            generator.stop(1)
        except candle_py.InputError as error:
            errors.append(str(error))
        return None

    generator.add(0, np.array([1], np.uint32), max_new_tokens=3, constraint=Answers(ask))
    assert drain(generator)[0].finish == "stop"
    assert errors == ["generator is in use by another thread or by its own constraint"]


def test_python_goes_on_while_a_step_runs() -> None:
    # The constraint's call waits for another thread: it could not if either held the GIL.
    generator = load("llama").generator()
    reached, released = threading.Event(), threading.Event()

    def wait() -> None:
        assert reached.wait(60)
        released.set()

    def answer() -> None:
        reached.set()
        assert released.wait(60)

    thread = threading.Thread(target=wait)
    thread.start()
    generator.add(0, np.array([1], np.uint32), max_new_tokens=3, constraint=Answers(answer))
    assert drain(generator)[0] == Given([], [], "stop")
    thread.join()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": []}, "prompt of the request has no tokens: `0`"),
        ({"ids": [384]}, "prompt has a token id outside the vocabulary of 384 tokens: `384`"),
        ({"ids": [1] * 256}, "prompt leaves no room in the 256 positions of the model: `256`"),
        ({"ids": [1] * 150}, "prompt and new tokens may need 10 blocks of 16 tokens, more than the cache's: `8`"),
        ({"request_id": -1}, "request_id must be a whole number from 0 to 2^64 - 1: `-1`"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1: `0`"),
        ({"max_new_tokens": -1}, "max_new_tokens must not be negative: `-1`"),
        ({"temperature": -0.5}, "temperature must be 0, or a number from 0.000001 on: `-0.5`"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1: `0`"),
        ({"seed": 2**64}, f"seed must be a whole number from 0 to 2^64 - 1: `{2**64}`"),
        ({"stop_ids": [-1]}, "stop id is outside the vocabulary: `-1`"),
        ({"beams": 65}, "beams are more than max_rows, 64: `65`"),
        ({"beams": 2, "constraint": Multiples(2, 2)}, "a beam search takes no constraint: `2`"),
    ],
)
def test_requests_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    engine = load("qwen2")
    generator = engine.generator(cache_bytes=cache_bytes(engine, 8))
    arguments = {"request_id": 0, "ids": [1], "max_new_tokens": 5} | options
    ids = np.array(arguments.pop("ids"), np.uint32)
    with pytest.raises(candle_py.InputError) as caught:
        generator.add(ids=ids, **arguments)
    assert str(caught.value) == message
    assert generator.pending == 0


def test_a_cache_too_small_for_the_longest_request_grows_to_hold_it() -> None:
    engine = load("qwen2")
    prompt = np.array([1] * 60, np.uint32)
    with pytest.raises(candle_py.InputError, match="may need 5 blocks of 16 tokens, more than the cache's: `4`"):
        engine.generator(cache_bytes=cache_bytes(engine, 4)).add(0, prompt, max_new_tokens=10)
    for beams in (1, 3):
        generator = engine.generator(cache_bytes=1, longest_tokens=70, beams=beams)
        assert generator.stats["blocks"] == 5 * beams
        generator.add(0, prompt, max_new_tokens=10, beams=beams)
        roomy = engine.generator()
        roomy.add(0, prompt, max_new_tokens=10, beams=beams)
        assert drain(generator)[0].ids == drain(roomy)[0].ids
    assert engine.generator(cache_bytes=cache_bytes(engine, 9), longest_tokens=70).stats["blocks"] == 9


def test_limits_and_models_that_make_no_sense_are_refused() -> None:
    engine = load("qwen2")
    for limits, message in [
        ({"max_rows": 0}, "max_rows must be at least 1: `0`"),
        ({"step_tokens": 0}, "step_tokens must be at least 1: `0`"),
        ({"cache_bytes": -1}, "cache_bytes must not be negative: `-1`"),
        ({"longest_tokens": -1}, "longest_tokens must not be negative: `-1`"),
    ]:
        with pytest.raises(candle_py.InputError) as caught:
            engine.generator(**limits)
        assert str(caught.value) == message
    with pytest.raises(candle_py.InputError, match="are fewer than the"):
        engine.generator(cache_bytes=100)
    with pytest.raises(candle_py.InputError, match="model has no language model head"):
        load("bert").generator()


def test_a_generator_keeps_the_model_alive() -> None:
    generator = load("llama").generator()
    generator.add(0, np.array([1], np.uint32), max_new_tokens=2)
    assert len(drain(generator)[0].ids) == 2
