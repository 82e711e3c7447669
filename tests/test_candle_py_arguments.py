"""What candle_py takes and what it refuses: buffers, ids, offsets, options."""

from __future__ import annotations

import array
import pickle
from typing import Any

import candle_py
import numpy as np
import pyarrow as pa
import pytest
from engine_models import GOLDEN, cases, ragged

IDS, OFFSETS = ragged([[5, 6, 7], [8, 9]])


@pytest.fixture(scope="module")
def engine() -> candle_py.Engine:
    return candle_py.Engine.load(GOLDEN / "bert")


def _uint32_array(values: Any) -> array.array[int]:
    return array.array("I", [int(value) for value in values])


@pytest.mark.parametrize(
    "convert",
    [
        np.asarray,
        _uint32_array,
        memoryview,
        pa.array,
        lambda values: pa.array([1, *values, 2], pa.uint32())[1:-1],
        lambda values: np.repeat(values, 2)[::2],
        lambda values: np.ascontiguousarray(values[::-1])[::-1],
    ],
    ids=["numpy", "array", "memoryview", "arrow", "arrow slice", "strided", "reversed"],
)
def test_any_buffer_or_arrow_array_of_uint32_is_taken(engine: candle_py.Engine, convert: Any) -> None:
    wanted = np.asarray(engine.hidden_states(IDS, OFFSETS))
    found = engine.hidden_states(convert(IDS), convert(OFFSETS), convert(np.zeros_like(IDS)))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (IDS.astype(np.int64), "ids must be uint32: `int64`"),
        (IDS.astype(np.int32), "ids must be uint32: `int32`"),
        (IDS.astype(np.uint64), "ids must be uint32: `uint64`"),
        (IDS.astype(np.float32), "ids must be uint32: `float32`"),
        (IDS.astype(np.bool_), "ids must be uint32: `bool`"),
        (IDS.astype(">u4"), "ids must be uint32: `uint32 of another byte order or alignment`"),
        (IDS.reshape(1, -1), "ids must have one dimension: `[1, 5]`"),
        (np.uint32(5), "ids must be a buffer or an Arrow array: `uint32`"),
        (b"12345678", "ids must be uint32: `uint8`"),
        ([5, 6, 7, 8, 9], "ids must be a buffer or an Arrow array: `list`"),
        (None, "ids must be a buffer or an Arrow array: `NoneType`"),
        ("56789", "ids must be a buffer or an Arrow array: `str`"),
        (pa.array([5, 6, 7, 8, 9]), "ids must be uint32 without nulls: `Arrow format l`"),
        (pa.array([5, None, 7, 8, 9], pa.uint32()), "ids must be uint32 without nulls: `nulls`"),
        (
            pa.array([5, 6, 7, 8, 9], pa.uint32()).dictionary_encode(),
            "ids must be uint32 without nulls: `Arrow format i`",
        ),
    ],
)
def test_other_types_are_refused_rather_than_converted(engine: candle_py.Engine, ids: Any, message: str) -> None:
    with pytest.raises(candle_py.InputError) as caught:
        engine.hidden_states(ids, OFFSETS)
    assert str(caught.value) == message
    assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        ([5, 384], [0, 2], "row 0 has a token id outside the vocabulary of 384 tokens: `384`"),
        ([5, 2**32 - 1], [0, 1, 2], "row 1 has a token id outside the vocabulary of 384 tokens: `4294967295`"),
        ([5] * 129, [0, 129], "row 0 has more tokens than the 128 positions of the model: `129`"),
        ([5, 6], [0, 1, 1, 2], "row has no tokens: `1`"),
        ([5, 6], [0, 2, 1], "offsets fall after row 1: `1`"),
        ([5, 6], [1, 2], "offsets must start at 0: `1`"),
        ([5, 6], [0, 1], "offsets must end at the number of ids, 2: `1`"),
        ([5, 6], [0, 3], "offsets must end at the number of ids, 2: `3`"),
        ([5, 6], [], "offsets must have one more entry than there are rows: `[]`"),
    ],
)
def test_batches_that_do_not_fit_are_refused(
    engine: candle_py.Engine, ids: list[int], offsets: list[int], message: str
) -> None:
    batch = np.array(ids, np.uint32), np.array(offsets, np.uint32)
    with pytest.raises(candle_py.InputError) as caught:
        engine.hidden_states(*batch)
    assert str(caught.value) == message
    with pytest.raises(candle_py.InputError) as caught:
        engine.embed(*batch, pooling="mean")
    assert str(caught.value) == message


def test_token_types_must_be_the_models() -> None:
    types = np.array([0, 0, 1, 0, 0], np.uint32)
    assert candle_py.Engine.load(GOLDEN / "bert").hidden_states(IDS, OFFSETS, types).shape == (5, 64)
    for name, count in (("roberta", 1), ("distilbert", 0), ("modernbert", 0)):
        engine = candle_py.Engine.load(GOLDEN / name)
        assert len(engine.hidden_states(IDS, OFFSETS, np.zeros_like(types))) == 5
        with pytest.raises(candle_py.InputError, match=f"outside the {count} token types of the model: `1`"):
            engine.hidden_states(IDS, OFFSETS, types)


def test_a_batch_without_rows_gives_no_rows(engine: candle_py.Engine) -> None:
    nothing = np.array([], np.uint32), np.array([0], np.uint32)
    assert np.asarray(engine.hidden_states(*nothing)).shape == (0, 64)
    assert np.asarray(engine.embed(*nothing, pooling="mean+cls")).shape == (0, 128)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "median"}, "pooling is not known: `median`"),
        ({"pooling": ""}, "pooling is not known: ``"),
        ({"pooling": "mean+"}, "pooling is not known: `mean+`"),
        ({"normalize": "yes"}, "normalize must be auto, True or False: `yes`"),
        ({"normalize": 3}, "normalize must be auto, True or False: `3`"),
        ({"dimensions": 0}, "dimensions must be at least 1: `0`"),
        ({"dimensions": -1}, "dimensions must not be negative: `-1`"),
        ({"dimensions": 65}, "dimensions are more than the 64 of the model: `65`"),
        ({"skip_tokens": -1}, "skip_tokens must not be negative: `-1`"),
        ({"pooling": "auto"}, "the model's files do not say how to pool: `auto`"),
    ],
)
def test_options_of_embed_that_make_no_sense_are_refused(
    engine: candle_py.Engine, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(candle_py.InputError) as caught:
        engine.embed(IDS, OFFSETS, **{"pooling": "mean", **options})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"device": "cuda"}, candle_py.DeviceError, "this build has no CUDA support: `cuda`"),
        ({"device": "cuda:1"}, candle_py.DeviceError, "this build has no CUDA support: `cuda:1`"),
        ({"device": "tpu"}, candle_py.InputError, "device is not known: `tpu`"),
        ({"dtype": "float16"}, candle_py.DeviceError, "dtype is not supported on the CPU: `float16`"),
        ({"dtype": "int4"}, candle_py.InputError, "dtype is not known: `int4`"),
        ({"threads": 0}, candle_py.InputError, "threads must be at least 1: `0`"),
        ({"threads": -2}, candle_py.InputError, "threads must not be negative: `-2`"),
        ({"cpu": "sse9"}, candle_py.InputError, "instruction set is not known: `sse9`"),
        ({"cpu": "amx"}, candle_py.InputError, "instruction set is for dtype bfloat16 alone: `amx`"),
        (
            {"communicator": object()},
            candle_py.InputError,
            "communicator must be a TcpCommunicator or NcclCommunicator: `object`",
        ),
    ],
)
def test_options_of_load_that_cannot_be_met_are_refused(
    options: dict[str, Any], kind: type[candle_py.EngineError], message: str
) -> None:
    with pytest.raises(kind) as caught:
        candle_py.Engine.load(GOLDEN / "bert", **options)
    assert str(caught.value) == message
    assert caught.value.hint or "threads" in message


@pytest.mark.parametrize("value", [2**63, 2**64, 10**400, -(2**63) - 1])
def test_numbers_beyond_64_bits_are_refused_by_their_name(engine: candle_py.Engine, value: int) -> None:
    decoder = candle_py.Engine.load(GOLDEN / "qwen2")
    generator = decoder.generator()
    new: dict[str, Any] = {"max_new_tokens": 1}
    request = ("max_new_tokens", "top_k", "beams", "min_new_tokens")
    calls: dict[str, Any] = {
        "threads": lambda: candle_py.Engine.load(GOLDEN / "bert", threads=value),
        "dimensions": lambda: engine.embed(IDS, OFFSETS, pooling="mean", dimensions=value),
        "skip_tokens": lambda: engine.embed(IDS, OFFSETS, pooling="mean", skip_tokens=value),
        "rank": lambda: candle_py.inspect_rank(GOLDEN / "qwen2", value, 2),
        "world": lambda: candle_py.TcpCommunicator(0, value, [], "secret", 1.0),
        "device": lambda: candle_py.NcclCommunicator(candle_py.TcpCommunicator(0, 1, [], "s", 1.0), device=value),
    }
    for name in ("max_rows", "cache_bytes", "step_tokens", "longest_tokens", "beams"):
        calls[f"{name} of a generator"] = lambda name=name: decoder.generator(**{name: value})
    for name in request:
        calls[f"{name} of a request"] = lambda name=name: generator.add(0, IDS, **(new | {name: value}))
    for name, call in calls.items():
        with pytest.raises(candle_py.InputError) as caught:
            call()
        assert str(caught.value).startswith(f"{name.split()[0]} does not fit in 64 bits: `{str(value)[:60]}"), name
        assert len(str(caught.value)) < 120
    with pytest.raises(candle_py.InputError, match=f"stop id is outside the vocabulary: `{str(value)[:60]}"):
        generator.add(0, IDS, max_new_tokens=1, stop_ids=[value])
    assert generator.pending == 0


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "length_penalty"])
def test_whole_numbers_that_no_float_holds_are_refused_by_their_name(name: str) -> None:
    generator = candle_py.Engine.load(GOLDEN / "qwen2").generator()
    options: dict[str, Any] = {name: 10**400}
    with pytest.raises(candle_py.InputError, match=f"{name} does not fit in 64 bits: `1000"):
        generator.add(0, IDS, max_new_tokens=1, **options)
    with pytest.raises(TypeError, match=name):
        generator.add(0, IDS, max_new_tokens=1, **{name: "much"})


def test_a_model_without_a_head_does_not_classify(engine: candle_py.Engine) -> None:
    with pytest.raises(candle_py.InputError, match="model has no classification head: `BertModel`"):
        engine.classify(IDS, OFFSETS)


def test_errors_have_kinds_and_survive_pickling() -> None:
    kinds = {candle_py.ModelError: "model", candle_py.InputError: "input", candle_py.DeviceError: "device"}
    for error_type, kind in {**kinds, candle_py.InternalError: "internal"}.items():
        assert issubclass(error_type, candle_py.EngineError)
        again = pickle.loads(pickle.dumps(error_type("message: `1`", "a hint")))
        assert (type(again), str(again), again.hint, again.kind) == (error_type, "message: `1`", "a hint", kind)


def test_ids_are_copied_before_the_forward(engine: candle_py.Engine) -> None:
    ids, offsets = ragged(cases("bert")["ids"])
    before = np.asarray(engine.hidden_states(ids, offsets)).copy()
    result = engine.hidden_states(ids, offsets)
    ids[:] = 0
    offsets[:] = 0
    np.testing.assert_array_equal(result, before)
