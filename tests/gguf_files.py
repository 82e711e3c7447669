"""A small writer of GGUF files, and vocabularies to put into them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from model_folders import plain_bpe
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64 = 4, 5, 6, 7, 8, 9, 10

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10_000.0,
}
"""Metadata of a Llama of one layer, without a tokenizer."""


def llama_tensors(vocab_size: int, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Random tensors that fit `LLAMA`; the head is the token table."""
    shapes = {
        "token_embd": (vocab_size, 32),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_norm": (32,),
        "blk.0.ffn_gate": (64, 32),
        "blk.0.ffn_up": (64, 32),
        "blk.0.ffn_down": (32, 64),
    }
    random = np.random.default_rng(seed)
    return {f"{name}.weight": random.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, NDArray[np.float32]] | None = None,
    *,
    kinds: dict[str, int] | None = None,
    version: int = 3,
) -> Path:
    """Write a file; None in the metadata leaves a key out.

    Args:
        path: Where.
        metadata: Texts, numbers, truth values, and lists of one of these.
        tensors: Stored as F32.
        kinds: Other kinds to name for some of them, whatever is stored.
        version: The format's.
    """
    there = {key: value for key, value in metadata.items() if value is not None}
    tensors = tensors or {}
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(there))
    header += b"".join(_text(key) + _value(value) for key, value in there.items())
    offset = 0
    for name, tensor in tensors.items():
        header += _text(name) + struct.pack("<I", tensor.ndim) + struct.pack(f"<{tensor.ndim}Q", *tensor.shape[::-1])
        header += struct.pack("<IQ", (kinds or {}).get(name, 0), offset)
        offset += -(-tensor.nbytes // 32) * 32
    data = b"".join(_padded(tensor.tobytes()) for tensor in tensors.values())
    path.write_bytes(_padded(header) + data)
    return path


def byte_level_metadata(pre: str | None = "gpt-2", **keys: Any) -> dict[str, Any]:
    """A byte-level BPE of some hundred tokens, the first seven of which are control tokens."""
    content = json.loads(plain_bpe().to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["merges"]]
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [CONTROL] * 7 + [NORMAL] * (len(tokens) - 7),
        "merges": merges,
        "bos_token_id": 0,
        "eos_token_id": 2,
        **keys,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def sentence_piece_metadata(pieces: list[str], **keys: Any) -> dict[str, Any]:
    """SentencePiece's BPE: three special tokens, all bytes, then the pieces, the first with the best score."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
        "scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        **keys,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def trained_pieces(texts: list[str], size: int) -> list[str]:
    """Pieces as SentencePiece would list them: merged ones by rank, then single characters."""
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[], show_progress=False)
    tokenizer.train_from_iterator(["▁" + text.replace(" ", "▁") for text in texts], trainer)
    vocab: dict[str, int] = tokenizer.get_vocab()
    pieces = sorted(vocab, key=vocab.__getitem__)
    return [piece for piece in pieces if len(piece) > 1] + [piece for piece in pieces if len(piece) == 1]


def _text(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _value(value: Any) -> bytes:
    kind = _kind(value)
    if kind != _ARRAY:
        return struct.pack("<I", kind) + _plain(value, kind)
    inner = _kind(value[0]) if value else _U32
    return struct.pack("<IIQ", _ARRAY, inner, len(value)) + b"".join(_plain(element, inner) for element in value)


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        return _I32 if value < 0 else _U64 if value >= 1 << 32 else _U32
    return {float: _F32, str: _STRING, list: _ARRAY}[type(value)]


def _plain(value: Any, kind: int) -> bytes:
    formats = {_U32: "<I", _I32: "<i", _F32: "<f", _BOOL: "<?", _U64: "<Q"}
    return _text(value) if kind == _STRING else struct.pack(formats[kind], value)


def _padded(content: bytes) -> bytes:
    return content + b"\0" * (-len(content) % 32)
