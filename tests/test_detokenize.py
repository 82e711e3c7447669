"""Text from tokens while they come: stop strings wherever tokens are cut, and no broken character."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from decoder_folders import byte_tokenizer, space_tokenizer, write_decoder
from tokenizers import Tokenizer, decoders, models

from workers.engine.fake_generator import FakeEvent
from workers.generation.completions import Growing
from workers.generation.detokenize import TextStream
from workers.model.decoder import read_decoder_files
from workers.tokenization.codec import FileCodec

KINDS = {"byte": byte_tokenizer, "space": space_tokenizer}
TEXT = "The quick brown fox, naïve café 深度学习! It doesn't stop; русский текст."


def codec(tokenizer: Tokenizer, folder: Path) -> FileCodec:
    write_decoder(folder, tokenizer)
    return FileCodec(read_decoder_files(folder), 512)


def stream(found: FileCodec, ids: Iterable[int], stop: list[str]) -> tuple[str, int]:
    """Text of tokens up to a stop string, and how many tokens were taken."""
    texts = TextStream(found, stop)
    taken = 0
    for token in ids:
        taken += 1
        if texts.push(token):
            break
    return texts.text(), taken


@pytest.mark.parametrize("kind", KINDS)
def test_without_stop_strings_the_text_is_what_the_tokenizer_decodes(kind: str, tmp_path: Path) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert stream(codec(tokenizer, tmp_path), ids, [])[0] == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_every_stop_string_is_found_wherever_tokens_are_cut_and_the_text_ends_before_it(
    kind: str, tmp_path: Path
) -> None:
    tokenizer = KINDS[kind]()
    found = codec(tokenizer, tmp_path)
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    whole = tokenizer.decode(ids)
    rng = random.Random(3)
    spanning = 0
    for _ in range(300):
        start = rng.randrange(len(whole) - 1)
        stop = whole[start : start + rng.randint(1, 12)]
        text, taken = stream(found, ids, ["never there", stop])
        assert text == whole[: whole.index(stop)]
        assert stop in tokenizer.decode(ids[:taken])
        assert stop not in tokenizer.decode(ids[: taken - 1])
        spanning += stop not in tokenizer.decode(ids[taken - 1 : taken])
    assert spanning > 100


def test_the_earliest_of_several_stop_strings_counts(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("one two three", add_special_tokens=False).ids
    assert stream(codec(tokenizer, tmp_path), ids, ["three", "two", "o thr"])[0] == "one "


@pytest.mark.parametrize("character", ["é", "深", "😀", "👩‍👩‍👧"])
def test_half_a_character_at_the_end_is_left_out_and_whole_ones_stay(character: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    found = codec(tokenizer, tmp_path)
    vocab = tokenizer.get_vocab()
    by_byte = [vocab[tokenizer.encode(chr(0), add_special_tokens=False).tokens[0]]]
    alphabet = {bytes([b]): vocab[c] for b, c in byte_characters().items()}
    by_byte = [alphabet[bytes([b])] for b in ("ab" + character * 2).encode()]
    for length in range(len(by_byte) + 1):
        expected = ("ab" + character * 2).encode()[:length].decode(errors="ignore")
        assert stream(found, by_byte[:length], [])[0] == expected


def test_a_decoder_that_spoils_finished_characters_before_half_a_one_does_not_lose_them(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "a": 1, "▁": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    found = codec(tokenizer, tmp_path)
    ids = [1, *(3 + b for b in "😀".encode()), *(3 + b for b in "😀".encode()[:3])]
    assert "😀" not in tokenizer.decode(ids)
    assert stream(found, ids, [])[0] == "a😀"


def test_special_tokens_give_no_text_and_hide_no_stop_string(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    found = codec(tokenizer, tmp_path)
    one, two = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("hello st", "op there"))
    assert stream(found, [*one, 4, 5, *two], []) == ("hello stop there", len(one) + len(two) + 2)
    assert stream(found, [*one, *[4] * 100, *two], ["stop"])[0] == "hello "


def test_tokens_and_log_probabilities_are_summed_up_to_the_end_or_the_stop_string(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    found = codec(tokenizer, tmp_path)
    ids = tokenizer.encode("done", add_special_tokens=False).ids
    growing = Growing(found, [])
    assert growing.take(FakeEvent(1, ids, [-0.5] * len(ids))) is None
    ended = growing.take(FakeEvent(1, [], [], "stop"))
    assert ended is not None
    assert (ended.text, ended.finish_reason, ended.n_new_tokens) == ("done", "stop", len(ids))
    assert ended.logprob == -0.5 * len(ids)
    several = tokenizer.encode("a bc d", add_special_tokens=False).ids
    growing = Growing(found, ["b"])
    stopped = growing.take(FakeEvent(1, several, [-1.0] * len(several), "length"))
    assert stopped is not None
    assert (stopped.text, stopped.finish_reason) == ("a ", "stop")
    assert stopped.n_new_tokens < len(several)


def test_a_log_probability_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    growing = Growing(codec(byte_tokenizer(), tmp_path), [])
    ended = growing.take(FakeEvent(1, [2], [float("nan")], "stop"))
    assert ended is not None
    assert "not finite" in str(ended.error)


def byte_characters() -> dict[int, str]:
    """The character by which byte-level BPE writes each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}
