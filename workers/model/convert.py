"""`convert`: a model folder with PyTorch weights becomes one with safetensors. Executes nothing of the pickle."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from sharding.errors import InputError, NotFoundError

_PICKLES = ("pytorch_model.bin.index.json", "pytorch_model.bin")
_LEFT_OUT = (".bin", ".bin.index.json", ".safetensors", ".safetensors.index.json", ".onnx", ".h5", ".msgpack", ".ot")


def convert_model(source: Path, target: Path) -> dict[str, Any]:
    """Copy a model folder, with its PyTorch weights as `model.safetensors`.

    Args:
        source: Folder with `pytorch_model.bin`, or with an index and the files it names.
        target: New or empty folder.

    Returns:
        `tensors` and `bytes` written.

    Raises:
        NotFoundError: The source is no folder, or has no PyTorch weights.
        InputError: The target holds something.
        ModelError: The weights cannot be read.
    """
    if not source.is_dir():
        raise NotFoundError(f"no such model folder: `{source}`")
    pickle = next((source / name for name in _PICKLES if (source / name).is_file()), None)
    if pickle is None:
        raise NotFoundError(f"the folder has no pytorch_model.bin: `{source}`")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"the target of a conversion must be new or empty: `{target}`")
    from workers.engine.candle import convert_weights

    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, ignore=lambda _, names: [name for name in names if name.endswith(_LEFT_OUT)])
    try:
        written = convert_weights(pickle, partial)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return written
