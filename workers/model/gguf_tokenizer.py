"""A GGUF file's vocabulary as the content of a tokenizer.json. Reads no file and tokenises nothing.

Two kinds are known by `tokenizer.ggml.model`: `gpt2`, byte-level BPE split as `tokenizer.ggml.pre` says, and `llama`,
SentencePiece's BPE whose merges follow from the scores. Names and patterns are llama.cpp's (src/llama-vocab.cpp); where
a model's own tokenizer.json is known to do more (Qwen2's NFC), that is followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.errors import ModelError
from workers.model.gguf_vocabulary import (
    BESIDE_HINT,
    BYTE,
    CONTROL,
    PREFIX,
    SPACE,
    UNKNOWN,
    Vocabulary,
    read_list,
    read_vocabulary,
)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How byte-level BPE sees words.

    Attributes:
        patterns: Applied one after the other; what they do not match stays as it is.
        gpt2_pattern: GPT-2's own pattern comes last.
        single_digits: Every digit is a word.
        nfc: Texts are composed first.
        whole_words: A word that is a token is taken whole, whatever the merges say.
        adds_bos: Where the file does not say whether texts begin with the start token.
    """

    patterns: tuple[str, ...] = ()
    gpt2_pattern: bool = False
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_GPT2 = _Splitting(gpt2_pattern=True)
_SMOLLM = _Splitting(gpt2_pattern=True, single_digits=True)
_QWEN2 = _Splitting((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",), nfc=True)
_LLAMA3 = _Splitting((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",), whole_words=True, adds_bos=True)
_SPLITTINGS: Mapping[str, _Splitting] = {
    "default": _Splitting(_DEFAULT),
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


def tokenizer_content(metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Make the content of a tokenizer.json.

    Args:
        metadata: Of the file, as `workers.engine.candle.read_gguf_metadata` gives it.
        name: The file's name, for errors.

    Raises:
        ModelError: The tokenizer is of a kind that is not known, or its parts do not fit each other.
    """
    kind = metadata.get(f"{PREFIX}model")
    makers = {"gpt2": _byte_level, "llama": _sentence_piece}
    if not isinstance(kind, str) or kind not in makers:
        raise ModelError(f"{name} has a tokenizer of a kind that is not supported: `{kind}`", hint=BESIDE_HINT)
    if metadata.get(f"{PREFIX}add_sep_token") is True:
        raise ModelError(f"{name} puts separators around texts, which is not supported: `{PREFIX}add_sep_token`")
    vocabulary = read_vocabulary(metadata, name)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        **makers[kind](metadata, vocabulary),
    }


def _byte_level(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    name = vocabulary.name
    pre = metadata.get(f"{PREFIX}pre")
    if pre is None:
        raise ModelError(f"{name} does not say how its tokenizer splits words: `{PREFIX}pre`", hint=BESIDE_HINT)
    splitting = _SPLITTINGS.get(pre) if isinstance(pre, str) else None
    if splitting is None:
        raise ModelError(f"{name} has a pre-tokenizer that is not known: `{pre}`", hint=BESIDE_HINT)
    merges = []
    for merge in read_list(metadata, "merges", str, name):
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise ModelError(f"{name} has an entry in {PREFIX}merges that is no pair: `{merge}`")
        merges.append([left, right])
    parts: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in splitting.patterns
    ]
    if splitting.single_digits:
        parts.append({"type": "Digits", "individual_digits": True})
    parts.append(_byte_level_part(prefix=False, pattern=splitting.gpt2_pattern))
    return {
        "normalizer": {"type": "NFC"} if splitting.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts},
        "post_processor": _template(metadata, vocabulary, (None, None), adds_bos=splitting.adds_bos),
        "decoder": _byte_level_part(prefix=True, pattern=True),
        "model": _bpe(vocabulary, merges, whole_words=splitting.whole_words),
    }


def _byte_level_part(*, prefix: bool, pattern: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": pattern}


def _sentence_piece(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    name = vocabulary.name
    for key in ("remove_extra_whitespaces", "escape_whitespaces"):
        if metadata.get(f"{PREFIX}{key}", key == "escape_whitespaces") is not (key == "escape_whitespaces"):
            raise ModelError(f"{name} normalises texts in a way that is not supported: `{PREFIX}{key}`")
    scores = read_list(metadata, "scores", float, name, len(vocabulary.tokens))
    unknown = vocabulary.special(metadata, "unknown_token_id", 0)
    has_bytes = BYTE in vocabulary.types
    prefix = metadata.get(f"{PREFIX}add_space_prefix", True) is not False
    space = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    before = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = _bpe(vocabulary, _merges(vocabulary, scores), byte_fallback=has_bytes)
    model |= {"unk_token": None if unknown is None else vocabulary.tokens[unknown], "fuse_unk": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, space]},
        "pre_tokenizer": None,
        "post_processor": _template(metadata, vocabulary, (1, 2), adds_bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _merges(vocabulary: Vocabulary, scores: list[float]) -> list[list[str]]:
    """Every way to make a token of two others, best score first; longer beginnings go before shorter ones.

    SentencePiece joins the two neighbours whose whole has the best score; a list of merges in that order does the same.
    """
    whole = {
        token: score
        for token, kind, score in zip(vocabulary.tokens, vocabulary.types, scores, strict=True)
        if kind not in (UNKNOWN, CONTROL, BYTE)
    }
    found = [
        (score, cut, token)
        for token, score in whole.items()
        for cut in range(1, len(token))
        if token[:cut] in whole and token[cut:] in whole
    ]
    found.sort(key=lambda merge: (-merge[0], -merge[1]))
    return [[token[:cut], token[cut:]] for _, cut, token in found]


def _bpe(
    vocabulary: Vocabulary, merges: list[list[str]], *, whole_words: bool = False, byte_fallback: bool = False
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": byte_fallback,
        "ignore_merges": whole_words,
        "vocab": vocabulary.ids(),
        "merges": merges,
    }


def _template(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, defaults: tuple[int | None, int | None], *, adds_bos: bool
) -> dict[str, Any] | None:
    """The start and end tokens around a text, or None when there are none."""
    around: list[str | None] = []
    used: dict[str, int] = {}
    for key, default, adds in (("bos", defaults[0], adds_bos), ("eos", defaults[1], False)):
        if metadata.get(f"{PREFIX}add_{key}_token", adds) is not True:
            around.append(None)
            continue
        index = vocabulary.special(metadata, f"{key}_token_id", default)
        if index is None:
            raise ModelError(f"{vocabulary.name} adds a token that it does not name: `{PREFIX}{key}_token_id`")
        around.append(vocabulary.tokens[index])
        used[vocabulary.tokens[index]] = index
    if not used:
        return None
    single, pair = (
        [_piece(around, sequence, kind) for sequence, kind in (("A", 0), ("B", 1))][:count] for count in (1, 2)
    )
    return {
        "type": "TemplateProcessing",
        "single": [part for parts in single for part in parts],
        "pair": [part for parts in pair for part in parts],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]} for token, index in used.items()},
    }


def _piece(around: list[str | None], sequence: str, kind: int) -> list[dict[str, Any]]:
    before, after = ([{"SpecialToken": {"id": token, "type_id": kind}}] if token else [] for token in around)
    return [*before, {"Sequence": {"id": sequence, "type_id": kind}}, *after]
