"""Tensor-parallel layout: which part of every weight of a model each rank loads. Pure arithmetic; reads no file.

The engine's loader keeps the same table; `tests/test_tensor_layout.py` holds one against the other.

Source: Megatron-LM, arXiv:1909.08053, section 3: what makes queries, keys, values and the inner columns of the
feed-forward is split by outputs, what brings them back to the residual stream by inputs, and the sum over the ranks is
the whole model's. Token table and head are split by tokens; norms, positions and what follows the network are whole
everywhere. Layers are known by how their names end, in every family.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from sharding.errors import InputError
from sharding.words import counted

_HEADS = ("q_proj", "q_lin", "k_lin", "v_lin", "self.query", "self.key", "self.value")
_KV = ("k_proj", "v_proj")
_HEADS_SUMMED = ("o_proj", "out_lin", "attn.Wo", "attention.output.dense")
_INNER = ("gate_proj", "up_proj", "lin1", "intermediate.dense")
_INNER_SUMMED = ("down_proj", "lin2", "mlp.Wo", "output.dense")
_VOCABULARY = ("embed_tokens", "lm_head", "word_embeddings", "tok_embeddings")
# Several layers, one below the other in one tensor.
_JOINED_HEADS, _JOINED_INNER = {"Wqkv": 3}, {"Wi": 2}


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a model that decide how it can be split."""

    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> ModelSizes:
        """The sizes that a `config.json` names; what it leaves out is as the engine reads it.

        Raises:
            InputError: A size is missing or no positive whole number.
        """
        is_distilbert = config.get("model_type") == "distilbert"
        heads_key, hidden_key, inner_key = (
            ("n_heads", "dim", "hidden_dim")
            if is_distilbert
            else ("num_attention_heads", "hidden_size", "intermediate_size")
        )
        heads = _size(config, heads_key)
        head_dim = 128 if config.get("model_type") == "qwen3" and "head_dim" not in config else None
        return cls(
            heads=heads,
            kv_heads=_size(config, "num_key_value_heads", heads),
            head_dim=head_dim or _size(config, "head_dim", _size(config, hidden_key) // heads),
            intermediate_size=_size(config, inner_key),
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
    """Places `start` to `stop` (exclusive) of axis 0 or 1; the whole tensor when `axis` is None.

    Where the axis is that of several layers, one below the other, these are places of each of its `blocks` equal parts.
    """

    axis: int | None = None
    start: int = 0
    stop: int = 0
    blocks: int = 1

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The slice's own shape, of a tensor of that shape."""
        places = self.blocks * (self.stop - self.start)
        return tuple(places if axis == self.axis else size for axis, size in enumerate(shape))


def check_world(sizes: ModelSizes, world: int) -> None:
    """Checks that the model can be split over so many ranks.

    Raises:
        InputError: It cannot; the hint names the numbers that work.
    """
    if world < 1 or not sizes.fits(world):
        heads = f"{counted(sizes.heads, 'head')}, {counted(sizes.kv_heads, 'key/value head')}"
        raise InputError(
            f"model of {heads} and intermediate size {sizes.intermediate_size} cannot be split over so many ranks: "
            f"`{world}`",
            hint=f"it can be split over: {', '.join(map(str, sizes.fitting_worlds()))}",
        )


def slice_tensor(name: str, sizes: ModelSizes, *, rank: int, world: int) -> TensorSlice | None:
    """The part of a weight that a rank loads; None for nothing of it.

    Args:
        name: The weight's name in the model's files, such as "model.layers.0.self_attn.q_proj.weight".
        sizes: Those of the whole model, which `check_world` has passed.
        rank: Which rank.
        world: Of how many.
    """
    layer, _, kind = name.rpartition(".")
    heads = _heads(sizes, _share(sizes.heads, rank, world))
    inner = _share(sizes.intermediate_size, rank, world)
    if _ends(layer, _HEADS):
        return TensorSlice(0, *heads)
    if _ends(layer, _KV):
        return TensorSlice(0, *_heads(sizes, _kv_heads(sizes, rank, world)))
    if _ends(layer, _INNER):
        return TensorSlice(0, *inner)
    if _ends(layer, _VOCABULARY):
        return TensorSlice(0, *_share(sizes.vocab_size, rank, world))
    for places, joined in ((heads, _JOINED_HEADS), (inner, _JOINED_INNER)):
        if (last := layer.rpartition(".")[2]) in joined:
            return TensorSlice(0, *places, joined[last])
    for places, summed in ((heads, _HEADS_SUMMED), (inner, _INNER_SUMMED)):
        if _ends(layer, summed):
            if kind != "bias":
                return TensorSlice(1, *places)
            # added once: the products of all ranks are summed
            return TensorSlice() if rank == 0 else None
    return TensorSlice()


def rank_numbers(shapes: Iterable[tuple[str, Sequence[int]]], sizes: ModelSizes, *, rank: int, world: int) -> int:
    """How many numbers a rank holds of tensors with those names and shapes."""
    total = 0
    for name, shape in shapes:
        part = slice_tensor(name, sizes, rank=rank, world=world)
        total += 0 if part is None else prod(part.shape_of(shape))
    return total


def _share(total: int, rank: int, world: int) -> tuple[int, int]:
    """A rank's places among `total`; shares differ by one at most."""
    return total * rank // world, total * (rank + 1) // world


def _kv_heads(sizes: ModelSizes, rank: int, world: int) -> tuple[int, int]:
    """A rank's key/value heads: its share, or where there are fewer than ranks, the one that its queries look at."""
    if world <= sizes.kv_heads:
        return _share(sizes.kv_heads, rank, world)
    head = rank * sizes.kv_heads // world
    return head, head + 1


def _heads(sizes: ModelSizes, heads: tuple[int, int]) -> tuple[int, int]:
    """The rows of some heads."""
    return heads[0] * sizes.head_dim, heads[1] * sizes.head_dim


def _ends(layer: str, names: Sequence[str]) -> bool:
    """Whether a layer is one of these, whose names are the last words of its own."""
    return any(layer == name or layer.endswith(f".{name}") for name in names)


def _size(config: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json has no size that can be used, `{key}`: `{value}`")
    return value
