"""The start and end token of a row: there once, whatever the text's length, whichever file asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_folders import plain_bpe, qwen_bpe, write_model
from tokenizers import Tokenizer, processors

from workers.errors import ModelError
from workers.tokenization.text_tokenizer import TextTokenizer

END, START = 2, 0
TEXTS = ["one", "The quick brown fox jumps over the lazy dog. " * 50, "", "x" * 300_000]
FLAG = {"add_eos_token": True, "eos_token": "</s>"}


def with_end(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return tokenizer


def rows(folder: Path, **options: Any) -> list[list[int]]:
    tokens = TextTokenizer(folder, **options).tokenize(TEXTS)
    return [tokens.ids[a:b].tolist() for a, b in zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True)]


@pytest.mark.parametrize("make", [plain_bpe, qwen_bpe])
@pytest.mark.parametrize("case", ["post-processor", "flag", "both", "token as object"])
def test_the_end_token_is_the_last_of_every_row_and_there_once(make: Any, case: str, tmp_path: Path) -> None:
    tokenizer = make() if case in ("flag", "token as object") else with_end(make())
    config: dict[str, Any] = {} if case == "post-processor" else dict(FLAG)
    if case == "token as object":
        config["eos_token"] = {"content": "</s>", "special": True}
    folder = write_model(tmp_path / "model", tokenizer, tokenizer_config=config)
    for max_tokens in (None, 2, 7, 100):
        for row in rows(folder, max_tokens=max_tokens):
            assert row[-1] == END
            assert row.count(END) == 1
            assert len(row) <= (max_tokens or 512)


def test_a_start_token_is_put_before_an_end_token_behind(tmp_path: Path) -> None:
    config = {**FLAG, "add_bos_token": True, "bos_token": "<s>"}
    folder = write_model(tmp_path / "model", plain_bpe(), tokenizer_config=config)
    for row in rows(folder, max_tokens=9):
        assert (row[0], row[-1], row.count(START), row.count(END)) == (START, END, 1, 1)


@pytest.mark.parametrize("config", [{"add_eos_token": False, "eos_token": "</s>"}, {"eos_token": "</s>"}, {}])
def test_without_the_flag_nothing_is_added_or_taken_away(config: dict[str, Any], tmp_path: Path) -> None:
    bare = write_model(tmp_path / "bare", plain_bpe(), tokenizer_config=config)
    assert all(END not in row for row in rows(bare, max_tokens=9))
    ended = write_model(tmp_path / "ended", with_end(plain_bpe()), tokenizer_config=config)
    assert all(row[-1] == END for row in rows(ended, max_tokens=9))


def test_a_flag_for_a_token_that_is_not_there_is_told(tmp_path: Path) -> None:
    config = {"add_eos_token": True, "eos_token": "<|nothing|>"}
    folder = write_model(tmp_path / "model", plain_bpe(), tokenizer_config=config)
    with pytest.raises(ModelError, match="nothing"):
        TextTokenizer(folder)
