"""Bytes of a model's weights, in memory by dtype and device, and in files: one table for all. Measures nothing.

A dtype that holds matrices in fewer bytes than the rest is one more line of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from sharding.errors import InputError
from workers.config import DeviceKind


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes that a number takes, scales of its block included.

    Attributes:
        matrix: Of a layer's matrix.
        rest: Of an embedding, a norm or a bias.
    """

    matrix: float
    rest: float

    def size(self, matrices: int, rest: int) -> int:
        """Bytes of so many numbers of each."""
        return ceil(matrices * self.matrix + rest * self.rest)


_FOUR, _TWO = WeightBytes(4, 4), WeightBytes(2, 2)
_HELD: dict[DeviceKind, dict[str, WeightBytes]] = {
    "cpu": {"float32": _FOUR, "bfloat16": _TWO},
    "cuda": {"float32": _FOUR, "bfloat16": _TWO, "float16": _TWO},
}
_STORED = {"float32": 4, "bfloat16": 2, "float16": 2}
_EMBEDDINGS = "embed_tokens.weight"


def weight_bytes(dtype: str, device: DeviceKind) -> WeightBytes:
    """How a device holds weights.

    Raises:
        InputError: Not in this dtype.
    """
    held = _HELD[device]
    if dtype not in held:
        raise InputError(f"{device} does not hold weights in this dtype: `{dtype}`", hint=f"one of: {', '.join(held)}")
    return held[dtype]


def stored_bytes(dtype: str) -> int | None:
    """Bytes of a number in a file of weights; None for a dtype that is not known."""
    return _STORED.get(dtype)


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a decoder's weight is a layer's matrix."""
    return len(shape) == 2 and not name.endswith(_EMBEDDINGS)
