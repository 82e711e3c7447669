"""`convert`: a model folder with PyTorch weights becomes one with safetensors. Executes nothing of the pickle."""

from __future__ import annotations

import shutil
from pathlib import Path

from sharding.errors import InputError, NotFoundError
from sharding.storage import translate_os_error

_PICKLES = ("pytorch_model.bin.index.json", "pytorch_model.bin")
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_LEFT_OUT = (".bin", ".bin.index.json", ".onnx", ".h5", ".msgpack", ".ot")


def convert_model(source: Path, target: Path) -> int:
    """Copy a model folder, with every PyTorch weight file in it and below as `model.safetensors`.

    Files of other weight formats are left out; safetensors that are there already are copied and win over a pickle
    beside them.

    Args:
        source: Folder with `pytorch_model.bin`, or an index and the files it names, itself or in a module's folder.
        target: New or empty folder, outside the source.

    Returns:
        Tensors converted.

    Raises:
        NotFoundError: The source is no folder, or has no PyTorch weights.
        InputError: The target holds something, or lies in the source.
        ModelError: The weights cannot be read.
    """
    source, target = source.expanduser(), target.expanduser().absolute()
    if not source.is_dir():
        raise NotFoundError(f"no such model folder: `{source}`")
    source = source.resolve()
    pickles = _find_pickles(source)
    if not pickles:
        raise NotFoundError(f"the folder has no pytorch_model.bin to convert: `{source}`")
    _check_target(source, target)
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial, ignore=_leave_out, ignore_dangling_symlinks=True)
        tensors = _convert_all(source, pickles, partial)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except shutil.Error as error:
        raise InputError(f"the folder cannot be copied ({error.args[0][0][2]}): `{source}`") from error
    except OSError as error:
        raise translate_os_error(error, str(target)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return tensors


def _find_pickles(source: Path) -> list[Path]:
    """The pickle, or index of pickles, of each folder that has one and no safetensors."""
    found = []
    for folder in [source, *sorted(path for path in source.rglob("*") if path.is_dir())]:
        pickle = next((folder / name for name in _PICKLES if (folder / name).is_file()), None)
        if pickle is not None and not any((folder / name).is_file() for name in _SAFETENSORS):
            found.append(pickle)
    return found


def _check_target(source: Path, target: Path) -> None:
    if target.resolve().is_relative_to(source):
        raise InputError(f"the target of a conversion may not lie in its source: `{target}`")
    if not target.parent.is_dir():
        raise NotFoundError(f"the target's parent is no folder: `{target.parent}`")
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise InputError(f"the target of a conversion must be a new or empty folder: `{target}`")


def _leave_out(_: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(_LEFT_OUT)]


def _convert_all(source: Path, pickles: list[Path], partial: Path) -> int:
    from workers.engine.candle import convert_weights

    return sum(convert_weights(pickle, partial / pickle.parent.relative_to(source)) for pickle in pickles)
