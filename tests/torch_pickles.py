"""Writes files as `torch.save` does, without torch. A helper of tests; tests nothing."""

from __future__ import annotations

import io
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

_STORAGES = {
    np.float32: "FloatStorage",
    np.float16: "HalfStorage",
    np.int64: "LongStorage",
    np.float64: "DoubleStorage",
}


class _Storage:
    """Stands for a tensor's storage until it is pickled as a persistent id."""

    def __init__(self, key: str, kind: type, count: int) -> None:
        self.key, self.kind, self.count = key, kind, count


class _Tensor:
    """Pickles as torch pickles a tensor: a call of `torch._utils._rebuild_tensor_v2`."""

    def __init__(self, storage: _Storage, numbers: npt.NDArray[Any]) -> None:
        self.storage, self.numbers = storage, numbers

    def __reduce__(self) -> tuple[Any, ...]:
        strides = tuple(stride // self.numbers.itemsize for stride in self.numbers.strides)
        rebuild = sys.modules["torch._utils"]._rebuild_tensor_v2
        return rebuild, (self.storage, 0, self.numbers.shape, strides, False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> Any:
        if isinstance(value, _Storage):
            return ("storage", value.kind, value.key, "cpu", value.count)
        return None


@pytest.fixture
def torch_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names that a pickle of torch refers to; they are written, never called."""
    utilities, torch = types.ModuleType("torch._utils"), types.ModuleType("torch")

    def _rebuild_tensor_v2() -> None: ...

    _rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    utilities._rebuild_tensor_v2 = _rebuild_tensor_v2  # type: ignore[attr-defined]
    for name in (*_STORAGES.values(), "ComplexFloatStorage"):
        setattr(torch, name, type(name, (), {"__module__": "torch"}))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._utils", utilities)


def write_torch(path: Path, tensors: dict[str, npt.NDArray[Any]], extra: dict[str, Any] | None = None) -> None:
    """Write a file as `torch.save` lays out a state dict."""
    state: OrderedDict[str, Any] = OrderedDict()
    storages = {}
    for index, (name, numbers) in enumerate(tensors.items()):
        kind = getattr(sys.modules["torch"], _STORAGES[numbers.dtype.type])
        storages[str(index)] = numbers.ravel(order="K").tobytes()
        state[name] = _Tensor(_Storage(str(index), kind, numbers.size), numbers)
    state.update(extra or {})
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(state)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", buffer.getvalue())
        archive.writestr("archive/version", "3\n")
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)
