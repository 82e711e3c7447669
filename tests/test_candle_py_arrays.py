"""Results of candle_py: NumPy and Arrow share their memory, nobody can write to it, and it lives as long as they do."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import candle_py
import numpy as np
import pyarrow as pa
import pytest
from engine_models import GOLDEN, ModelFolder, cases, ragged


@pytest.fixture(scope="module")
def rows() -> candle_py.Array:
    return candle_py.Engine.load(GOLDEN / "bert").embed(*ragged(cases("bert")["ids"]), pooling="mean")


def _address(array: candle_py.Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def test_numpy_shares_the_memory(rows: candle_py.Array) -> None:
    for view in (np.asarray(rows), np.frombuffer(rows, np.float32), np.asarray(memoryview(rows))):
        assert view.dtype == np.float32
        assert view.ctypes.data == _address(rows)
        assert not view.flags.writeable
    assert np.asarray(rows).shape == rows.shape == (6, 64)
    assert (len(rows), rows.dtype, repr(rows)) == (6, "float32", "Array(shape=(6, 64), dtype=float32)")


def test_arrow_shares_the_memory(rows: candle_py.Array) -> None:
    array = pa.array(rows)
    array.validate(full=True)
    assert array.type == pa.list_(pa.field("element", pa.float32()), 64)
    assert array.type.value_field.name == "element"
    assert array.values.buffers()[1].address == _address(rows)
    assert (len(array), array.null_count) == (6, 0)
    np.testing.assert_array_equal(array.values.to_numpy(), np.asarray(rows).ravel())


def test_numpy_and_arrow_see_the_same_memory_as_each_other(rows: candle_py.Array) -> None:
    numbers, array = np.asarray(rows), pa.array(rows)
    assert np.shares_memory(numbers, array.values.to_numpy(zero_copy_only=True))


def test_the_arrow_type_comes_alone_too(rows: candle_py.Array) -> None:
    class Schema:
        def __arrow_c_schema__(self) -> object:
            return rows.__arrow_c_schema__()

    assert pa.field(Schema()).type == pa.list_(pa.field("element", pa.float32()), 64)


def test_a_buffer_cannot_be_written_to(rows: candle_py.Array) -> None:
    view = memoryview(rows)
    assert (view.readonly, view.format, view.shape, view.strides) == (True, "f", (6, 64), (256, 4))
    with pytest.raises(TypeError):
        view[0, 0] = 1.0
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(rows)[0, 0] = 1.0


def test_views_keep_the_memory_alive() -> None:
    engine = candle_py.Engine.load(GOLDEN / "bert")
    ids, offsets = ragged(cases("bert")["ids"])
    wanted = np.array(engine.hidden_states(ids, offsets))
    numbers = np.asarray(engine.hidden_states(ids, offsets))
    array = pa.array(engine.hidden_states(ids, offsets))
    part = array[2:3]
    del engine, array
    gc.collect()
    for _ in range(20):
        np.full_like(wanted, 7.0)
    np.testing.assert_array_equal(numbers, wanted)
    np.testing.assert_array_equal(part.flatten().to_numpy(), wanted[2])


def test_capsules_that_nobody_consumes_are_released(rows: candle_py.Array) -> None:
    for _ in range(1000):
        schema, array = rows.__arrow_c_array__()
        del schema, array
    assert pa.array(rows).values.buffers()[1].address == _address(rows)


def test_tables_of_results_outlive_everything() -> None:
    def table() -> pa.Table:
        engine = candle_py.Engine.load(GOLDEN / "bert")
        return pa.table({"rows": pa.array(engine.hidden_states(*ragged([[1, 2, 3]])))})

    found = table()
    gc.collect()
    found.validate(full=True)
    assert found.num_rows == 3


def test_an_engine_is_let_go() -> None:
    class Holder:
        def __init__(self) -> None:
            self.engine = candle_py.Engine.load(GOLDEN / "bert")

    holder = Holder()
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None


def test_empty_results_are_empty_arrays() -> None:
    engine = candle_py.Engine.load(GOLDEN / "bert")
    nothing = engine.embed(np.array([], np.uint32), np.array([0], np.uint32), pooling="mean")
    assert np.asarray(nothing).shape == (0, 64)
    array = pa.array(nothing)
    array.validate(full=True)
    assert len(array) == 0


def test_rows_that_are_not_finite_are_named_and_the_others_are_untouched(tmp_path: Path) -> None:
    model = ModelFolder(tmp_path / "model")
    table = model.tensors["embeddings.word_embeddings.weight"]
    table[7, 0], table[9, 3] = np.nan, np.inf
    engine = candle_py.Engine.load(model.write())
    good = candle_py.Engine.load(GOLDEN / "bert")
    rows = [[1, 2], [5, 7], [3], [9, 20, 21]]
    found = engine.embed(*ragged(rows), pooling="mean", normalize=True)
    assert found.bad_rows == [1, 3]
    wanted = np.asarray(good.embed(*ragged(rows), pooling="mean", normalize=True))
    np.testing.assert_array_equal(np.asarray(found)[[0, 2]], wanted[[0, 2]])
    assert engine.hidden_states(*ragged(rows)).bad_rows == [2, 3, 5, 6, 7]
    assert found.bad_rows == [1, 3]


def test_a_zero_vector_is_bad_only_where_it_should_be_normalised(tmp_path: Path) -> None:
    model = ModelFolder(tmp_path / "model")
    for half in ("weight", "bias"):
        model.tensors[f"encoder.layer.2.output.LayerNorm.{half}"][:] = 0
    engine = candle_py.Engine.load(model.write())
    batch = ragged([[1, 2], [3]])
    assert engine.embed(*batch, pooling="mean", normalize=True).bad_rows == [0, 1]
    assert engine.embed(*batch, pooling="mean", normalize=False).bad_rows == []


def test_logits_that_are_not_finite_are_named(tmp_path: Path) -> None:
    model = ModelFolder(tmp_path / "model", "bert-classifier")
    model.tensors["bert.embeddings.word_embeddings.weight"][7] = np.nan
    engine = candle_py.Engine.load(model.write())
    assert engine.classify(*ragged([[1, 2], [7], [3, 4]])).bad_rows == [1]
