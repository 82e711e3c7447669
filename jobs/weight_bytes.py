"""Bytes of a model's weights and of its cache, in memory by dtype and device, and in files. Measures nothing.

A dtype that holds matrices in fewer bytes than the rest is one more line of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from sharding.errors import InputError
from workers.config import DeviceKind


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes that a number takes, scales of its block included.

    Attributes:
        matrix: Of a layer's matrix.
        rest: Of an embedding, a norm or a bias.
        cache: The format of keys and values beside these weights.
    """

    matrix: float
    rest: float
    cache: Literal["float32", "float16"]

    def size(self, matrices: int, rest: int) -> int:
        """Bytes of so many numbers of each."""
        return ceil(matrices * self.matrix + rest * self.rest)

    @property
    def cache_bytes(self) -> int:
        """Bytes of a number of keys and values."""
        return _STORED[self.cache]


_FOUR, _TWO = WeightBytes(4, 4, "float32"), WeightBytes(2, 2, "float32")
_BLOCKS = WeightBytes(1 + 4 / 64, 2, "float16")
"""A byte a number and a float32 scale for 64 of a row; the last block of a row counts as far as it is filled."""
_HELD: dict[DeviceKind, dict[str, WeightBytes]] = {
    "cpu": {"float32": _FOUR, "bfloat16": replace(_TWO, cache="float16"), "int8": _BLOCKS},
    "cuda": {"float32": _FOUR, "bfloat16": _TWO, "float16": _TWO},
}
_STORED = {"float32": 4, "bfloat16": 2, "float16": 2}
_EMBEDDINGS, _HEAD = "embed_tokens.weight", "lm_head.weight"
_NOT_ASKED_FOR = "float16"
"""What no spec can ask for."""


def weight_bytes(dtype: str, device: DeviceKind) -> WeightBytes:
    """How a device holds weights, and keys and values beside them.

    Raises:
        InputError: Not in this dtype.
    """
    held = _HELD[device]
    if dtype not in held:
        others = [f"model.device: {other}" for other, dtypes in _HELD.items() if dtype in dtypes]
        choices = [name for name in held if name != _NOT_ASKED_FOR]
        hint = f"model.dtype can be {', '.join(choices)}; or set {' or '.join(others)}" if others else None
        raise InputError(f"{device} does not hold weights in this dtype: `{dtype}`", hint=hint)
    return held[dtype]


def weight_bytes_on_gpus(dtype: str, device: Literal["auto"] | DeviceKind) -> WeightBytes | None:
    """How a GPU would hold them; None for a job that never runs on one, by its dtype or its device."""
    return _HELD["cuda"].get(dtype) if device != "cpu" else None


def check_dtype(dtype: str, device: Literal["auto"] | DeviceKind) -> None:
    """Check a dtype against the device as far as it is decided.

    Raises:
        InputError: The device does not hold weights in this dtype.
    """
    if dtype != "auto" and device != "auto":
        weight_bytes(dtype, device)


def stored_bytes(dtype: str) -> int | None:
    """Bytes of a number in a file of weights; None for a dtype that is not known."""
    return _STORED.get(dtype)


def matrix_names(shapes: Mapping[str, Sequence[int]]) -> frozenset[str]:
    """Those of a decoder's weights that are a layer's matrix; so is a token table without a head beside it."""
    tied = not any(name.endswith(_HEAD) for name in shapes)
    return frozenset(
        name for name, shape in shapes.items() if len(shape) == 2 and (tied or not name.endswith(_EMBEDDINGS))
    )
