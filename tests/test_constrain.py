"""JSON Schema as a mask: what compiles and what is refused when planned; whole jobs give JSON that fits."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from decoder_folders import byte_tokenizer, write_decoder
from job_files import JobFiles
from model_folders import word_piece

from jobs import run_job
from jobs.errors import ExitCode, exit_code_of
from sharding.errors import CandelabraError, InputError, RecordRow
from workers.generation.constrain import SchemaConstraint
from workers.generation.satisfiable import is_satisfiable

PERSON = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "count": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["size", "count"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"enum": ["a", "b"]},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["name", "next"],
            "additionalProperties": False,
        }
    },
}
ENDLESS = {
    "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "required": ["next"]}},
    "$ref": "#/$defs/n",
}
IMPOSSIBLE: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"enum": []},
    {"type": "string", "enum": [1]},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
    {"type": "nothing"},
    {"$ref": "#/nowhere"},
    {"$ref": "https://example.org/schema.json"},
    {"$ref": "#"},
    {"not": {}},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    ENDLESS,
]


def constraint(schema: dict[str, Any], vocab_size: int | None = None) -> SchemaConstraint:
    tokenizer = byte_tokenizer()
    return SchemaConstraint(json.dumps(schema), tokenizer, vocab_size or tokenizer.get_vocab_size(), [2])


def follow(schema: dict[str, Any], text: str, *, vocab_size: int | None = None) -> bool:
    """Whether the mask lets a text pass token by token, and then ends it."""
    begun = constraint(schema, vocab_size).begin()
    new: list[int] = []
    for token in [*byte_tokenizer().encode(text, add_special_tokens=False).ids, 2]:
        mask = begun.mask(new)
        if mask is None:
            return token == 2
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        assert len(mask) == 4 * -(-(vocab_size or byte_tokenizer().get_vocab_size()) // 32)
        if not bits[token]:
            return False
        new = [token]
    return begun.mask([2]) is None


@pytest.mark.parametrize("vocab_size", [None, 1000, 1025])
def test_a_mask_lets_json_of_the_schema_pass_and_nothing_else(vocab_size: int | None) -> None:
    assert follow(PERSON, '{"size": "small", "count": 3}', vocab_size=vocab_size)
    assert follow(PERSON, '{"size":"large","count":0}', vocab_size=vocab_size)
    assert not follow(PERSON, '{"size": "tiny", "count": 3}', vocab_size=vocab_size)
    assert not follow(PERSON, '{"size": "small"}', vocab_size=vocab_size)
    assert not follow(PERSON, 'Sure! {"size": "small", "count": 3}', vocab_size=vocab_size)


def test_the_empty_schema_is_any_json_and_white_space_is_bounded() -> None:
    for text in ("12", '"x"', "null", '[1, {"a": []}]', '{\n    "a": 1\n}'):
        assert follow({}, text)
    assert not follow({}, '{"a":' + " " * 200 + "1}")
    assert not follow({}, "hello")


def test_a_recursive_schema_follows_its_own_depth() -> None:
    assert follow(TREE, '{"name": "a", "next": {"name": "b", "next": null}}')
    assert not follow(TREE, '{"name": "a", "next": {"name": "c", "next": null}}')


@pytest.mark.parametrize("schema", IMPOSSIBLE, ids=json.dumps)
def test_a_schema_that_cannot_be_followed_is_an_error_before_anything_starts(schema: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"task\.json_schema") as caught:
        constraint(schema)
    assert "\n" not in str(caught.value)
    assert exit_code_of(caught.value) == ExitCode.USAGE


@pytest.mark.parametrize(
    "schema",
    [
        {},
        PERSON,
        TREE,
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 3}, {"type": "null"}]},
        {"$ref": "#/definitions/a~1b", "definitions": {"a/b": {"type": "null"}}},
    ],
    ids=json.dumps,
)
def test_a_schema_that_something_finite_satisfies_is_accepted(schema: dict[str, Any]) -> None:
    assert is_satisfiable(schema)


def test_a_large_schema_is_looked_at_in_bounded_time() -> None:
    defs = {
        f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["x"]}
        for i in range(300)
    }
    started = time.monotonic()
    assert not is_satisfiable({"$ref": "#/$defs/d0", "$defs": {**defs, "d300": {"$ref": "#/$defs/d0"}}})
    assert is_satisfiable({"$ref": "#/$defs/d0", "$defs": {**defs, "d300": {"type": "null"}}})
    assert time.monotonic() - started < 20


def test_a_token_that_was_not_allowed_is_that_texts_error() -> None:
    begun = constraint(PERSON).begin()
    begun.mask([])
    with pytest.raises(RecordRow, match="cannot be followed"):
        begun.mask(byte_tokenizer().encode("hello", add_special_tokens=False).ids)


def test_texts_are_followed_apart_from_each_other() -> None:
    made = constraint(PERSON)
    one, two = made.begin(), made.begin()
    first = one.mask([])
    one.mask(byte_tokenizer().encode('{"size', add_special_tokens=False).ids)
    assert two.mask([]) == first


def test_a_tokenizer_that_cannot_be_constrained_is_told() -> None:
    with pytest.raises(InputError, match="tokenizer"):
        SchemaConstraint("{}", word_piece(), 700, [3])
    with pytest.raises(InputError, match="end token"):
        SchemaConstraint("{}", byte_tokenizer(), 900, [])


def task(schema: object, **generation: object) -> dict[str, object]:
    return {"kind": "generate", "text": "doc", "json_schema": schema, "generation": generation}


def generate(files: JobFiles, source: str, chosen: dict[str, object], name: str = "out") -> list[dict[str, Any]]:
    spec = files.spec(model__source=source, task=chosen, output__path=str(files.out(name)))
    assert run_job(spec).exit_code == 0
    rows: list[dict[str, Any]] = files.rows(name).to_pylist()
    return rows


def test_every_text_of_a_job_is_json_of_the_schema_greedy_or_sampled(files: JobFiles, tmp_path: Path) -> None:
    files.write_input(pa.table({"doc": [f"question {i}" for i in range(60)]}))
    source = write_decoder(tmp_path / "model")
    for name, settings in (("greedy", {}), ("sampled", {"temperature": 1.0})):
        for row in generate(files, source, task(PERSON, **settings), name):
            found = json.loads(row["text"])
            assert found["size"] in ("small", "large")
            assert found["count"] in range(10)
            assert row["finish_reason"] == "stop"


def test_the_schema_may_be_a_file(files: JobFiles, tmp_path: Path) -> None:
    files.write_input(pa.table({"doc": ["a", "b"]}))
    (tmp_path / "schema.json").write_text(json.dumps(PERSON))
    source = write_decoder(tmp_path / "model")
    inline = generate(files, source, task(PERSON), "inline")
    assert generate(files, source, task(str(tmp_path / "schema.json")), "file") == inline


def test_max_new_tokens_within_the_json_ends_it_with_length(files: JobFiles, tmp_path: Path) -> None:
    files.write_input(pa.table({"doc": [f"question {i}" for i in range(20)]}))
    source = write_decoder(tmp_path / "model")
    rows = generate(files, source, task(TREE, max_new_tokens=6))
    assert {row["finish_reason"] for row in rows} == {"length"}
    assert all(row["text"].startswith("{") and row["n_new_tokens"] == 6 for row in rows)
    rows = generate(files, source, task({}, max_new_tokens=10), "any")
    assert {row["finish_reason"] for row in rows} <= {"length", "stop"}


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        (IMPOSSIBLE[0], "minimum"),
        (ENDLESS, "finite"),
        ("no-such-file.json", "no-such-file"),
        (__file__, "not readable JSON"),
    ],
)
def test_a_schema_that_cannot_be_used_is_exit_2_and_starts_nothing(
    files: JobFiles, tmp_path: Path, schema: object, word: str
) -> None:
    files.write_input(pa.table({"doc": ["a"]}))
    spec = files.spec(model__source=write_decoder(tmp_path / "model"), task=task(schema))
    with pytest.raises(CandelabraError, match=word) as caught:
        run_job(spec)
    assert exit_code_of(caught.value) == ExitCode.USAGE
    assert not files.out().exists()
