"""Tensor-parallel layout: which part of every weight of a decoder each rank loads. Pure arithmetic; reads no file.

The engine's loader keeps the same table; `tests/test_tensor_layout.py` holds one against the other.

Source: Megatron-LM, arXiv:1909.08053, section 3: what makes queries, keys, values and the inner columns of the
feed-forward is split by outputs, what brings them back to the residual stream by inputs, and the sum over the ranks is
the whole model's. Token table and head are split by tokens; norms are whole everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from sharding.errors import InputError

_KV = ("k_proj", "v_proj")
_INNER = ("gate_proj", "up_proj")
_VOCABULARY = ("embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """The sizes of a decoder that decide how it can be split."""

    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> DecoderSizes:
        """The sizes that a `config.json` names; what it leaves out is as the engine reads it.

        Raises:
            InputError: A size is missing or no positive whole number.
        """
        heads = _size(config, "num_attention_heads")
        head_dim = 128 if config.get("model_type") == "qwen3" and "head_dim" not in config else None
        return cls(
            heads=heads,
            kv_heads=_size(config, "num_key_value_heads", heads),
            head_dim=head_dim or _size(config, "head_dim", _size(config, "hidden_size") // heads),
            intermediate_size=_size(config, "intermediate_size"),
            vocab_size=_size(config, "vocab_size"),
        )

    def fits(self, world: int) -> bool:
        """Whether every rank gets as many heads, whole key/value heads or a copy of one, and as many inner columns."""
        return (
            self.heads % world == 0
            and (self.kv_heads % world == 0 or world % self.kv_heads == 0)
            and self.intermediate_size % world == 0
            and self.vocab_size >= world
        )

    def fitting_worlds(self) -> tuple[int, ...]:
        """All numbers of ranks that the model can be split over."""
        return tuple(world for world in range(1, self.heads + 1) if self.fits(world))


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Places `start` to `stop` (exclusive) of axis 0 or 1; the whole tensor when `axis` is None."""

    axis: int | None = None
    start: int = 0
    stop: int = 0

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The slice's own shape, of a tensor of that shape."""
        return tuple(self.stop - self.start if axis == self.axis else size for axis, size in enumerate(shape))


def check_world(sizes: DecoderSizes, world: int) -> None:
    """Checks that the model can be split over so many ranks.

    Raises:
        InputError: It cannot; the hint names the numbers that work.
    """
    if world < 1 or not sizes.fits(world):
        raise InputError(
            f"model of {sizes.heads} heads, {sizes.kv_heads} key/value heads and intermediate size "
            f"{sizes.intermediate_size} cannot be split over so many ranks: `{world}`",
            hint=f"it can be split over: {', '.join(map(str, sizes.fitting_worlds()))}",
        )


def slice_tensor(name: str, sizes: DecoderSizes, *, rank: int, world: int) -> TensorSlice | None:
    """The part of a weight that a rank loads; None for nothing of it.

    Args:
        name: The weight's name in the model's files, such as "model.layers.0.self_attn.q_proj.weight".
        sizes: Those of the whole model, which `check_world` has passed.
        rank: Which rank.
        world: Of how many.
    """
    layer, _, kind = name.rpartition(".")
    match layer.rpartition(".")[2]:
        case "q_proj":
            return _rows(_heads(sizes, _share(sizes.heads, rank, world)))
        case last if last in _KV:
            return _rows(_heads(sizes, _kv_heads(sizes, rank, world)))
        case last if last in _INNER:
            return _rows(_share(sizes.intermediate_size, rank, world))
        case last if last in _VOCABULARY:
            return _rows(_share(sizes.vocab_size, rank, world))
        case "o_proj":
            columns = _heads(sizes, _share(sizes.heads, rank, world))
        case "down_proj":
            columns = _share(sizes.intermediate_size, rank, world)
        case _:
            return TensorSlice()
    if kind != "bias":
        return TensorSlice(1, *columns)
    # added once: the products of all ranks are summed
    return TensorSlice() if rank == 0 else None


def rank_numbers(shapes: Iterable[tuple[str, Sequence[int]]], sizes: DecoderSizes, *, rank: int, world: int) -> int:
    """How many numbers a rank holds of tensors with those names and shapes."""
    total = 0
    for name, shape in shapes:
        part = slice_tensor(name, sizes, rank=rank, world=world)
        total += 0 if part is None else prod(part.shape_of(shape))
    return total


def _share(total: int, rank: int, world: int) -> tuple[int, int]:
    """A rank's places among `total`; shares differ by one at most."""
    return total * rank // world, total * (rank + 1) // world


def _kv_heads(sizes: DecoderSizes, rank: int, world: int) -> tuple[int, int]:
    """A rank's key/value heads: its share, or where there are fewer than ranks, the one that its queries look at."""
    if world <= sizes.kv_heads:
        return _share(sizes.kv_heads, rank, world)
    head = rank * sizes.kv_heads // world
    return head, head + 1


def _heads(sizes: DecoderSizes, heads: tuple[int, int]) -> tuple[int, int]:
    """The rows of some heads."""
    return heads[0] * sizes.head_dim, heads[1] * sizes.head_dim


def _rows(places: tuple[int, int]) -> TensorSlice:
    return TensorSlice(0, *places)


def _size(config: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json has no size that can be used, `{key}`: `{value}`")
    return value
