"""Model folders that candle_py refuses, whole and by name, before it allocates anything."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import candle_py
import numpy as np
import pytest
from engine_models import GOLDEN, ModelFolder, cases, expected, ragged
from safetensors.numpy import save_file


def _refusal(folder: Path) -> candle_py.ModelError:
    """Loading and inspecting refuse alike."""
    with pytest.raises(candle_py.ModelError) as loading:
        candle_py.Engine.load(folder)
    with pytest.raises(candle_py.ModelError) as inspecting:
        candle_py.inspect(folder)
    assert str(loading.value) == str(inspecting.value)
    return loading.value


def test_weights_cut_short_anywhere_are_refused(tmp_path: Path) -> None:
    model = ModelFolder(tmp_path / "model")
    weights = model.path / "model.safetensors"
    whole = weights.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    points = {0, 4, 8, 9, header - 1, header, header + 1, len(whole) - 1, *range(0, len(whole), len(whole) // 40)}
    for point in sorted(points):
        weights.write_bytes(whole[:point])
        error = _refusal(model.path)
        assert "weights file" in str(error)
        assert "model.safetensors" in str(error)


def test_all_problems_of_the_tensors_are_listed(tmp_path: Path) -> None:
    model = ModelFolder(tmp_path / "model")
    del model.tensors["embeddings.LayerNorm.bias"]
    del model.tensors["encoder.layer.1.output.dense.weight"]
    model.tensors["encoder.layer.0.output.dense.bias"] = np.zeros(65, np.float32)
    model.tensors["encoder.layer.2.output.dense.bias"] = np.zeros(64, np.int64)
    model.tensors["adapter.weight"] = np.zeros(1, np.float32)
    lines = str(_refusal(model.write())).splitlines()
    assert lines[0] == f"the model has 5 problems: `{model.path}`"
    assert sorted(lines[1:]) == [
        "- dtype of encoder.layer.2.output.dense.bias is not supported: `I64`",
        "- missing tensor of shape [64, 160]: `encoder.layer.1.output.dense.weight`",
        "- missing tensor of shape [64]: `embeddings.LayerNorm.bias`",
        "- shape of encoder.layer.0.output.dense.bias is not [64]: `[65]`",
        "- unexpected tensor: `adapter.weight`",
    ]


def test_an_index_that_names_a_missing_file_is_refused(tmp_path: Path) -> None:
    model = ModelFolder(tmp_path / "model")
    (model.path / "model.safetensors").rename(model.path / "model-00001-of-00002.safetensors")
    weight_map = dict.fromkeys(model.tensors, "model-00001-of-00002.safetensors")
    weight_map["pooler.dense.bias"] = "model-00002-of-00002.safetensors"
    (model.path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert str(_refusal(model.path)) == f"weights file is missing: `{model.path}/model-00002-of-00002.safetensors`"

    save_file({"more": np.zeros(1, np.float32)}, model.path / "model-00002-of-00002.safetensors")
    assert str(_refusal(model.path)) == "unexpected tensor: `more`"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("pytorch_model.bin", "jobs convert"),
        ("pytorch_model.bin.index.json", "jobs convert"),
        ("none", "give the folder"),
    ],
)
def test_a_folder_without_safetensors_is_told_what_to_do(tmp_path: Path, name: str, problem: str) -> None:
    model = ModelFolder(tmp_path / "model")
    (model.path / "model.safetensors").unlink()
    (model.path / name).write_bytes(b"x")
    error = _refusal(model.path)
    assert error.hint is not None
    assert problem in error.hint


def test_a_model_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    model = ModelFolder(tmp_path / "model")
    model.config["model_type"] = "mpnet"
    error = _refusal(model.write())
    assert str(error) == "config.json: model_type is not supported: `mpnet`"
    assert (
        error.hint == "supported model types: bert, roberta, xlm-roberta, distilbert, modernbert, llama, qwen2, qwen3"
    )


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert str(_refusal(tmp_path / "nowhere")) == f"file is missing: `{tmp_path}/nowhere/config.json`"


_MEASURE = """
import sys
import candle_py
try:
    candle_py.Engine.load(sys.argv[1])
except candle_py.ModelError as error:
    print(str(error).splitlines()[0])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_a_refusal_allocates_nothing(tmp_path: Path) -> None:
    """Eight gigabytes of weights (a hole in the file system) with one tensor missing."""
    model = ModelFolder(tmp_path / "model")
    rows = 2**25
    model.config["vocab_size"] = rows
    del model.tensors["embeddings.LayerNorm.bias"]
    shapes = {name: list(tensor.shape) for name, tensor in model.tensors.items()}
    shapes["embeddings.word_embeddings.weight"] = [rows, 64]
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    model.write()
    text = json.dumps(header).encode()
    with (model.path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    run = subprocess.run([sys.executable, "-c", _MEASURE, model.path], capture_output=True, text=True, check=True)
    message, peak_kib = run.stdout.splitlines()
    assert message == "missing tensor of shape [64]: `embeddings.LayerNorm.bias`"
    assert int(peak_kib) < 64 * 1024


@pytest.mark.parametrize("dtype", [np.float16, "bfloat16"])
def test_weights_stored_in_half_precision_are_converted(tmp_path: Path, dtype: object) -> None:
    model = ModelFolder(tmp_path / "model")
    header, data = {}, b""
    for name, tensor in model.tensors.items():
        if dtype == "bfloat16":
            # The upper half of a float32 is the bfloat16 nearest to zero.
            stored, kind = (tensor.view(np.uint32) >> 16).astype(np.uint16), "BF16"
            model.tensors[name] = (stored.astype(np.uint32) << 16).view(np.float32)
        else:
            stored, kind = tensor.astype(np.float16), "F16"
            model.tensors[name] = stored.astype(np.float32)
        header[name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": [len(data), len(data) + stored.nbytes]}
        data += stored.tobytes()
    whole = np.asarray(candle_py.Engine.load(model.write()).hidden_states(*ragged(cases("bert")["ids"])))
    text = json.dumps(header).encode()
    (model.path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    half = candle_py.Engine.load(model.path).hidden_states(*ragged(cases("bert")["ids"]))
    np.testing.assert_array_equal(half, whole)
    np.testing.assert_allclose(half, expected("bert", "hidden"), rtol=0, atol=0.1)


def test_the_golden_folders_are_all_whole() -> None:
    for folder in sorted(path.parent for path in GOLDEN.glob("*/config.json")):
        file = folder / "model.gguf"
        assert candle_py.inspect(file if file.exists() else folder)["parameters"] > 0
