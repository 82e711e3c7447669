"""Conversion of PyTorch's pickled weights: the tensors come out bit for bit, and nothing in the pickle is ever run."""

from __future__ import annotations

import json
import os
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import candle_py
import numpy as np
import numpy.typing as npt
import pytest
from engine_models import ModelFolder, cases, ragged
from safetensors.numpy import load_file
from torch_pickles import _Storage, _Tensor, write_torch

pytestmark = pytest.mark.usefixtures("torch_names")


def test_a_converted_model_gives_the_same_numbers(tmp_path: Path) -> None:
    model = ModelFolder(tmp_path / "model")
    wanted = np.asarray(candle_py.Engine.load(model.path).hidden_states(*ragged(cases("bert")["ids"])))
    write_torch(model.path / "pytorch_model.bin", model.tensors)
    (model.path / "model.safetensors").unlink()
    result = candle_py.convert_pickle(model.path / "pytorch_model.bin", model.path)
    assert result["files"] == [str(model.path / "model.safetensors")]
    assert result["tensors"] == len(model.tensors)
    assert result["size_bytes"] == sum(tensor.nbytes for tensor in model.tensors.values())
    np.testing.assert_array_equal(
        candle_py.Engine.load(model.path).hidden_states(*ragged(cases("bert")["ids"])), wanted
    )
    assert sorted(path.name for path in model.path.glob("*safetensors*")) == [
        "expected.safetensors",
        "model.safetensors",
    ]


def test_dtypes_and_layouts_are_kept(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    tensors: dict[str, npt.NDArray[Any]] = {
        "f32": generator.random((3, 5), np.float32),
        "f16": generator.random(7).astype(np.float16),
        "f64": generator.random((2, 2)),
        "i64": np.arange(6).reshape(1, 6),
        "transposed": np.asfortranarray(generator.random((4, 3), np.float32)),
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }
    write_torch(tmp_path / "weights.bin", tensors, {"_metadata": OrderedDict({"": {"version": 1}})})
    candle_py.convert_pickle(tmp_path / "weights.bin", tmp_path / "deep" / "target")
    found = load_file(tmp_path / "deep" / "target" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        np.testing.assert_array_equal(found[name], tensor)


def test_shards_stay_shards(tmp_path: Path) -> None:
    parts = {"pytorch_model-00001-of-00002.bin": "a", "pytorch_model-00002-of-00002.bin": "b"}
    for index, (file, name) in enumerate(parts.items()):
        write_torch(tmp_path / file, {name: np.full(3, index, np.float32)})
    index = {"metadata": {"total_size": 24}, "weight_map": {name: file for file, name in parts.items()}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    result = candle_py.convert_pickle(tmp_path / "pytorch_model.bin.index.json", tmp_path / "out")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert [Path(file).name for file in result["files"]] == names
    written = json.loads((tmp_path / "out" / names[2]).read_text())
    assert written == {"metadata": {"total_size": 24}, "weight_map": {"a": names[0], "b": names[1]}}
    np.testing.assert_array_equal(load_file(tmp_path / "out" / names[1])["b"], np.ones(3, np.float32))


class _Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_would_run_something_runs_nothing(tmp_path: Path) -> None:
    write_torch(tmp_path / "weights.bin", {"a": np.zeros(2, np.float32)}, {"b": _Attack(tmp_path / "owned")})
    with pytest.raises(candle_py.ModelError, match="entry is not a tensor: `b`"):
        candle_py.convert_pickle(tmp_path / "weights.bin", tmp_path / "out")
    assert not (tmp_path / "owned").exists()
    assert list((tmp_path / "out").iterdir()) == []


def test_everything_that_is_not_a_tensor_is_named(tmp_path: Path) -> None:
    extra = {"epoch": 3, "state_dict": OrderedDict(a=1), "optimizer": [1, 2]}
    write_torch(tmp_path / "weights.bin", {"a": np.zeros(2, np.float32)}, extra)
    with pytest.raises(candle_py.ModelError) as caught:
        candle_py.convert_pickle(tmp_path / "weights.bin", tmp_path / "out")
    assert sorted(str(caught.value).splitlines()[1:]) == [
        "- entry is not a tensor: `epoch`",
        "- entry is not a tensor: `optimizer`",
        "- entry is not a tensor: `state_dict`",
    ]


def test_damaged_files_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    source, target = tmp_path / "weights.bin", tmp_path / "out"
    write_torch(source, {"a": np.arange(1000, dtype=np.float32), "b": np.arange(10, dtype=np.float32)})
    whole = source.read_bytes()
    for size in (0, 1, 30, len(whole) // 3, len(whole) // 2, len(whole) - 30, len(whole) - 1):
        source.write_bytes(whole[:size])
        with pytest.raises(candle_py.ModelError):
            candle_py.convert_pickle(source, target)
        assert list(target.iterdir()) == []
    with pytest.raises(candle_py.ModelError, match="cannot be opened"):
        candle_py.convert_pickle(tmp_path / "nothing.bin", target)


def test_a_tensor_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    numbers = np.zeros(4, np.float32)
    storage = _Storage("0", sys.modules["torch"].FloatStorage, 2**30)
    huge = _Tensor(storage, np.lib.stride_tricks.as_strided(numbers, (2**30,), (4,)))
    write_torch(tmp_path / "weights.bin", {"a": numbers}, {"huge": huge})
    with pytest.raises(candle_py.ModelError, match="tensor reaches beyond its storage: `huge`"):
        candle_py.convert_pickle(tmp_path / "weights.bin", tmp_path / "out")


def test_a_pickle_cut_into_nonsense_is_a_model_error_not_a_panic(tmp_path: Path) -> None:
    class Short:
        def __reduce__(self) -> tuple[Any, ...]:
            return sys.modules["torch._utils"]._rebuild_tensor_v2, (1,)

    write_torch(tmp_path / "weights.bin", {}, {"a": Short()})
    with pytest.raises(candle_py.ModelError, match="pickled weights are damaged"):
        candle_py.convert_pickle(tmp_path / "weights.bin", tmp_path / "out")


def test_weights_that_are_there_are_not_overwritten(tmp_path: Path) -> None:
    write_torch(tmp_path / "weights.bin", {"a": np.zeros(2, np.float32)})
    candle_py.convert_pickle(tmp_path / "weights.bin", tmp_path)
    with pytest.raises(candle_py.InputError, match="target has weights already"):
        candle_py.convert_pickle(tmp_path / "weights.bin", tmp_path)
