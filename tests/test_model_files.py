"""What a model folder says about lengths and prompts, and which file wins."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from model_folders import GOLDEN, write_model

from workers.errors import ModelError
from workers.model.files import choose_prompt, read_model_files

_NO_LIMIT = 1000000000000000019884624838656
_ROBERTA = {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}


@pytest.mark.parametrize(
    ("files", "limit", "rule"),
    [
        (
            {"sentence_bert_config": {"max_seq_length": 256}, "tokenizer_config": {"model_max_length": 128}},
            256,
            "max_seq_length of sentence_bert_config.json",
        ),
        ({"tokenizer_config": {"model_max_length": 128}}, 128, "model_max_length of tokenizer_config.json"),
        (
            {"sentence_bert_config": {"max_seq_length": None}, "tokenizer_config": {"model_max_length": 128}},
            128,
            "model_max_length of tokenizer_config.json",
        ),
        ({"tokenizer_config": {"model_max_length": _NO_LIMIT}}, 512, "max_position_embeddings of config.json"),
        ({"tokenizer_config": {"model_max_length": 1e30}}, 512, "max_position_embeddings of config.json"),
        ({}, 512, "max_position_embeddings of config.json"),
        (
            {"sentence_bert_config": {"max_seq_length": 1024}},
            512,
            "max_seq_length of sentence_bert_config.json (1024), capped by max_position_embeddings of config.json",
        ),
        ({"config": _ROBERTA}, 512, "max_position_embeddings of config.json, less the first 2"),
        (
            {"config": _ROBERTA, "tokenizer_config": {"model_max_length": 514}},
            512,
            "model_max_length of tokenizer_config.json (514), "
            "capped by max_position_embeddings of config.json, less the first 2",
        ),
        (
            {"config": _ROBERTA | {"pad_token_id": None}},
            512,
            "max_position_embeddings of config.json, less the first 2",
        ),
        ({"sentence_roberta_config": {"max_seq_length": 75}}, 75, "max_seq_length of sentence_roberta_config.json"),
        (
            {"sentence_bert_config": {"max_seq_length": 90}, "sentence_xlnet_config": {"max_seq_length": 75}},
            90,
            "max_seq_length of sentence_bert_config.json",
        ),
    ],
)
def test_the_first_file_that_speaks_sets_the_length_and_positions_cap_it(
    files: dict[str, Any], limit: int, rule: str, tmp_path: Path
) -> None:
    found = read_model_files(write_model(tmp_path, **files))
    assert (found.max_tokens, found.max_tokens_rule) == (limit, rule)


@pytest.mark.parametrize(
    ("requested", "files", "limit", "rule"),
    [
        (64, {}, 64, "task.max_tokens"),
        (64, {"sentence_bert_config": {"max_seq_length": 32}}, 64, "task.max_tokens"),
        (9000, {}, 512, "task.max_tokens (9000), capped by max_position_embeddings of config.json"),
        (
            300,
            {"tokenizer_config": {"model_max_length": 128}},
            128,
            "task.max_tokens (300), capped by model_max_length of tokenizer_config.json",
        ),
        (
            300,
            {"tokenizer_config": {"model_max_length": 128}, "sentence_bert_config": {"max_seq_length": 256}},
            256,
            "task.max_tokens (300), capped by max_seq_length of sentence_bert_config.json",
        ),
        (
            600,
            {"tokenizer_config": {"model_max_length": _NO_LIMIT}, "sentence_bert_config": {"max_seq_length": 256}},
            512,
            "task.max_tokens (600), capped by max_position_embeddings of config.json",
        ),
    ],
)
def test_a_number_in_the_spec_goes_first_but_never_above_model_and_tokenizer(
    requested: int, files: dict[str, Any], limit: int, rule: str, tmp_path: Path
) -> None:
    found = read_model_files(write_model(tmp_path, **files)).limit_tokens(requested)
    assert (found.max_tokens, found.rule) == (limit, rule)


def test_truncation_and_padding_baked_into_tokenizer_json_say_nothing_about_lengths() -> None:
    baked = json.loads((GOLDEN / "text-cross-encoder" / "tokenizer.json").read_text())
    assert baked["truncation"]["max_length"] == 128
    assert read_model_files(GOLDEN / "text-cross-encoder").max_tokens == 160


def test_a_model_that_nobody_gives_a_length_asks_for_one(tmp_path: Path) -> None:
    files = read_model_files(write_model(tmp_path, config={"max_position_embeddings": None}))
    with pytest.raises(ModelError) as caught:
        files.limit_tokens(None)
    assert caught.value.hint == "set task.max_tokens"
    assert files.limit_tokens(77).max_tokens == 77


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"sentence_bert_config": {"max_seq_length": 0}}, "max_seq_length that is no whole number from 1 on: `0`"),
        (
            {"sentence_bert_config": {"max_seq_length": "256"}},
            "max_seq_length that is no whole number from 1 on: `'256'`",
        ),
        (
            {"sentence_bert_config": {"max_seq_length": True}},
            "max_seq_length that is no whole number from 1 on: `True`",
        ),
        ({"tokenizer_config": {"model_max_length": -1}}, "model_max_length that is no whole number from 1 on: `-1`"),
        ({"config": _ROBERTA | {"max_position_embeddings": 2}}, "leaves no position for a token"),
        ({"config": {"vocab_size": 1.5}}, "vocab_size that is no whole number from 1 on: `1.5`"),
        ({"tokenizer_config": ["list"]}, "holds list instead of an object"),
        ({"tokenizer_config": {"truncation_side": "middle"}}, "neither right nor left: `middle`"),
        ({"config_sentence_transformers": {"prompts": ["query: "]}}, "prompts that are no object"),
        ({"config_sentence_transformers": {"prompts": {"query": 3}}}, "the prompt query a value that is no text: `3`"),
        ({"config_sentence_transformers": {"default_prompt_name": "query"}}, "not among its prompts: `query`"),
        ({"modules": {}}, "does not hold a list of modules"),
        ({"modules": [{"path": "1_Pooling"}]}, "an entry without type and path"),
        ({"modules": [{"type": "x.Pooling", "path": "../elsewhere"}]}, "outside the model folder: `../elsewhere`"),
    ],
)
def test_a_file_that_says_something_impossible_is_named(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        read_model_files(write_model(tmp_path, **files))


@pytest.mark.parametrize("broken", [b"", b"{", b"\xff\xfe", b"[" * 200_000])
def test_a_broken_json_file_is_named(broken: bytes, tmp_path: Path) -> None:
    (write_model(tmp_path) / "tokenizer_config.json").write_bytes(broken)
    with pytest.raises(ModelError, match=r"not readable JSON .*tokenizer_config\.json`"):
        read_model_files(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    (write_model(tmp_path) / name).unlink()
    with pytest.raises(ModelError, match=re.escape(name)):
        read_model_files(tmp_path)


_PROMPTS = {"prompts": {"query": "query: ", "document": None}, "default_prompt_name": None}


@pytest.mark.parametrize(
    ("prompts", "asked", "text", "rule"),
    [
        (_PROMPTS | {"default_prompt_name": "query"}, "auto", "query: ", "the model's default prompt query"),
        (_PROMPTS, "auto", "", "the model names no default prompt"),
        ({}, "auto", "", "the model names no default prompt"),
        (_PROMPTS | {"default_prompt_name": "query"}, "none", "", "task.prompt: none"),
        (_PROMPTS, "query", "query: ", "the model's prompt query"),
        (_PROMPTS, "document", "", "the model's prompt document"),
        (_PROMPTS, "Find: ", "Find: ", "literal text (the model's files name document, query)"),
        ({}, "query", "query", "literal text (the model's files name no prompts)"),
    ],
)
def test_a_prompt_is_the_models_default_none_a_name_or_literal_text(
    prompts: dict[str, Any], asked: str, text: str, rule: str, tmp_path: Path
) -> None:
    choice = choose_prompt(read_model_files(write_model(tmp_path, config_sentence_transformers=prompts)), asked)
    assert (choice.text, choice.rule) == (text, rule)


def test_old_folders_keep_config_and_tokenizer_in_the_first_modules_folder(tmp_path: Path) -> None:
    inner = write_model(tmp_path / "0_Transformer", sentence_bert_config={"max_seq_length": 99})
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": "0_Transformer"},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"include_prompt": false}')
    files = read_model_files(tmp_path)
    assert files.tokenizer_path == inner / "tokenizer.json"
    assert (files.max_tokens, files.include_prompt) == (99, False)
