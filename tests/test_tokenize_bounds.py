"""Long texts: only as much is tokenised as a row needs, and nobody can tell from the ids."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from model_folders import KINDS, write_model
from tokenizers import Tokenizer

from workers.tokenization import encode
from workers.tokenization.encode import BoundedEncoder
from workers.tokenization.stable import find_stable_rule
from workers.tokenization.text_tokenizer import TextTokenizer

_PIECES = [
    *("word", "don't", "antidisestablishmentarianism", "'s", "_", "-", "...", "!!!", "()", "aB" * 30, "A" * 70),
    *(" ", "  ", " " * 9, "\n", "\r\n", "\t", "\u3000", "\xa0", "\u2028", "\n\n  "),
    *("什么是深度学习", "一种", "。", "，", "한국어", "가", "ไทย", "हिन्दी", "العربية", "ﷺ", "русский", "Σ", "İ", "ß"),
    *("naïve", "e\u0301", "a" + "\u0301" * 40, "\u0301", "ﬁ", "①②③", "½", "\u200b", "\x00", "\ufeff", "𐍈", "\ud7ff"),
    *("👩\u200d👩\u200d👧\u200d👦", "🚀", "🔥" * 5, "🏳️\u200d🌈", "x" * 99, "x" * 101, "x" * 250, "1234567890" * 4),
    *("[SEP]", "[MA", "<mask>", "<|im_start|>", "<|im_", "<s>", "#" * 30, "==" * 20),
    *("<|start of a turn|>", "<|start of a"),
]


def _random_text(source: random.Random, lengths: Sequence[int]) -> str:
    pieces = source.sample(_PIECES, source.choice([3, 10, len(_PIECES)]))
    separator = source.choice(["", "", " ", " ", "  ", "\n"])
    return separator.join(source.choice(pieces) for _ in range(source.choice(lengths)))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_called_final_are_those_of_the_whole_text_wherever_it_is_cut(kind: str) -> None:
    tokenizer = KINDS[kind]()
    rule = find_stable_rule(json.loads(tokenizer.to_str()))
    source = random.Random(kind)
    final = 0
    for _ in range(60):
        text = _random_text(source, [5, 15, 30])[:250]
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        cuts = [text[:stop] for stop in range(len(text))]
        for cut, encoding in zip(cuts, tokenizer.encode_batch(cuts, add_special_tokens=False), strict=True):
            stable = rule.count(encoding, cut)
            assert encoding.ids[:stable] == whole[:stable], (cut, text)
            final += stable > 0
    assert (final > 100) == (kind != "crossing_bpe")


@pytest.mark.parametrize("kind", KINDS)
def test_cutting_a_text_before_tokenizing_never_changes_its_ids(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = KINDS[kind]()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    source = random.Random(kind)
    cut_short = 0
    for room in (1, 5, 30, 126):
        monkeypatch.setattr(encode, "_FIRST_CHARS", source.choice([0, 20, 100]))
        monkeypatch.setattr(encode, "_FIRST_CHARS_PER_TOKEN", source.choice([1, 2, 4]))
        encoder = BoundedEncoder(tokenizer, path, max_tokens=room, side="right")
        texts = [_random_text(source, [5, 50, 300, 900]) for _ in range(30)]
        for text, found in zip(texts, encoder.encode(texts, room), strict=True):
            whole = tokenizer.encode(text[: encode.HARD_BOUND_CHARS], add_special_tokens=False).ids
            assert found.ids == whole[: len(found.ids)]
            assert not found.complete or found.ids == whole
            assert len(found.ids) == len(whole) or len(found.ids) > room
            cut_short += len(found.ids) < len(whole)
    assert (cut_short > 20) == (kind != "crossing_bpe")


class _CountingTokenizer:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.chars = 0

    def encode_batch(self, texts: list[str], **options: bool) -> object:
        self.chars += sum(map(len, texts))
        return self._tokenizer.encode_batch(texts, **options)

    def encode_batch_fast(self, texts: list[str], **options: bool) -> object:
        self.chars += sum(map(len, texts))
        return self._tokenizer.encode_batch_fast(texts, **options)


def _tokenized_chars(kind: str, text: str, room: int, folder: Path) -> int:
    tokenizer = KINDS[kind]()
    tokenizer.save(str(folder / "tokenizer.json"))
    counting = _CountingTokenizer(tokenizer)
    encoder = BoundedEncoder(counting, folder / "tokenizer.json", max_tokens=room, side="right")  # type: ignore[arg-type]
    encoder.encode([text], room)
    return counting.chars


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("unit", ["x", "word ", "深", " ", "👩\u200d👩\u200d👧", "a\u0301"])
def test_no_text_costs_more_than_two_and_a_half_times_the_hard_bound(kind: str, unit: str, tmp_path: Path) -> None:
    text = unit * (2_000_000 // len(unit))
    assert _tokenized_chars(kind, text, 126, tmp_path) <= 2.5 * encode.HARD_BOUND_CHARS


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"crossing_bpe"}))
def test_a_long_ordinary_text_costs_little_more_than_its_row(kind: str, tmp_path: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog " * 5_000
    assert _tokenized_chars(kind, text, 126, tmp_path) <= 4_000


def test_a_line_of_200_000_characters_is_truncated_and_keeps_its_place(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(write_model(tmp_path), max_tokens=32)
    rows = tokenizer.tokenize(["before", "x" * 200_000, "1" * 200_000, "after"])
    alone = [tokenizer.tokenize([text]).ids.tolist() for text in ("before", "after")]
    lengths = np.diff(rows.offsets).tolist()
    assert rows.truncated.tolist() == [False, True, True, False]
    assert [rows.ids[: lengths[0]].tolist(), rows.ids[-lengths[3] :].tolist()] == alone
    assert lengths[1] == 3, "a word of more than 100 letters is one unknown token to WordPiece"
    assert not rows.errors


def test_a_text_that_goes_on_beyond_the_hard_bound_is_truncated_even_when_its_tokens_fit(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(write_model(tmp_path), max_tokens=32)
    rows = tokenizer.tokenize([" " * encode.HARD_BOUND_CHARS, " " * encode.HARD_BOUND_CHARS + "the"])
    assert np.diff(rows.offsets).tolist() == [2, 2]
    assert rows.truncated.tolist() == [False, True]


def test_a_cell_of_50_mb_takes_no_memory_to_speak_of(tmp_path: Path) -> None:
    write_model(tmp_path)
    code = (
        "import resource, sys\n"
        "from workers.tokenization.text_tokenizer import TextTokenizer\n"
        "tokenizer = TextTokenizer(sys.argv[1], max_tokens=256, prompt='query: ')\n"
        "texts = ['word ' * 10_000_000, 'x' * 50_000_000, 'short']\n"
        "tokenizer.tokenize_pairs(['short'] * 3, ['short'] * 3)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "rows = tokenizer.tokenize(texts)\n"
        "pairs = tokenizer.tokenize_pairs(texts, texts[::-1])\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(rows.truncated.tolist(), pairs.truncated.tolist(), after - before)\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
    )
    flags, growth_kib = result.stdout.strip().rsplit(" ", 1)
    assert flags == "[True, True, False] [True, True, True]"
    assert int(growth_kib) < 30 * 1024
