"""Small tokenizers of each kind and the model folders around them, made on the spot."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

GOLDEN = Path(__file__).parent / "fixtures" / "golden"

_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again; it doesn't stop.",
    "def read_rows(pieces, columns):\n    for piece in pieces:\n        yield from piece.rows\n\n",
    "A file's footer tells where each row group begins, how long it is, and what it holds.",
    "什么是深度学习。一种模仿人脑神经网络的机器学习方法，广泛用于图像和语言。",
    "naïve café résumé; العربية نص تجريبي; हिन्दी पाठ; 한국어 문장; ภาษาไทย; ελληνικά; русский текст",
    "1234567890 0.5 1e-5 [[1, 2], [3, 4]] {'a': None} <b>tags</b> ---- ==== #### https://example.org/a?b=c",
] * 4


def write_model(folder: Path, tokenizer: Tokenizer | None = None, **files: Any) -> Path:
    """Write a model folder: tokenizer, config, weights that nobody can load, and files by the first part of their name.

    Args:
        folder: Made if it is not there.
        tokenizer: Default: WordPiece.
        **files: `config`, `tokenizer_config`, `sentence_bert_config` and so on; None leaves one out. Those of `config`
            are added to a BERT's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "bert", "vocab_size": 60_000, "max_position_embeddings": 512, "pad_token_id": 0}
    config |= files.pop("config", {})
    (tokenizer or word_piece()).save(str(folder / "tokenizer.json"))
    (folder / "model.safetensors").write_bytes(b"weights")
    for name, content in {"config": config, **files}.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@cache
def word_piece_text() -> str:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # type: ignore[call-arg]
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer.to_str()


def word_piece() -> Tokenizer:
    """BERT's kind."""
    return Tokenizer.from_str(word_piece_text())


@cache
def _byte_bpe_text(pattern: str | None) -> str:
    tokenizer = Tokenizer(models.BPE())
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|im_start|>", "<|start of a turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer.to_str()


def roberta_bpe() -> Tokenizer:
    """RoBERTa's kind: byte-level BPE, `<s> a </s></s> b </s>`."""
    tokenizer = Tokenizer.from_str(_byte_bpe_text(None))
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True)
    return tokenizer


def plain_bpe() -> Tokenizer:
    """GPT-2's kind: byte-level BPE without special tokens around a text."""
    return Tokenizer.from_str(_byte_bpe_text(None))


def qwen_bpe() -> Tokenizer:
    """Qwen's kind: byte-level BPE behind a splitting pattern of its own."""
    return Tokenizer.from_str(_byte_bpe_text(_QWEN_PATTERN))


@cache
def _unigram_text() -> str:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer.to_str()


def unigram() -> Tokenizer:
    """XLM-RoBERTa's kind."""
    tokenizer = Tokenizer.from_str(_unigram_text())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


def unsplit(tokenizer: Tokenizer) -> Tokenizer:
    """The same model without a pre-tokenizer, the whole text one word, as older SentencePiece conversions have it."""
    content = json.loads(tokenizer.to_str())
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    content["pre_tokenizer"] = None
    content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]}
    return Tokenizer.from_str(json.dumps(content))


@cache
def _metaspace_bpe_text() -> str:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer.to_str()


def metaspace_bpe() -> Tokenizer:
    """BPE over words, spaces as `▁`, before which it adds one."""
    return Tokenizer.from_str(_metaspace_bpe_text())


def llama_bpe() -> Tokenizer:
    """Llama's kind: BPE over the whole text, spaces as `▁`."""
    return unsplit(metaspace_bpe())


def crossing_bpe() -> Tokenizer:
    """BPE over the whole text with tokens that go on over a space, so that no cut is safe."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


KINDS = {
    "word_piece": word_piece,
    "byte_bpe": roberta_bpe,
    "qwen_bpe": qwen_bpe,
    "unigram": unigram,
    "unsplit_unigram": lambda: unsplit(unigram()),
    "llama_bpe": llama_bpe,
    "crossing_bpe": crossing_bpe,
}
"""Makers of every kind of tokenizer above, by name."""
