"""A peer's turn: embed a column with ONNX Runtime or OpenVINO, this process alone; one JSON line on stdout.

usage: .venv-bench/bin/python benchmarks/peers.py graft MODEL_DIR OUT.onnx
       .venv-bench/bin/python benchmarks/peers.py {onnxruntime,openvino,openvino-bf16} MODEL_DIR MODEL.onnx
           TEXTS.parquet [options]

`graft` puts a BERT's weights into the graph that lies beside this file (mean pooling and normalising included); a model
of more layers than the graph's gets its last layer repeated.
Imports nothing of this project: it runs in an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).resolve().parent
MAX_TOKENS = 256
BATCH_ROWS = 32
GRAPH_LAYERS = 6
GRAPH_HEAD_WIDTH = 32
FloatRows = npt.NDArray[np.float32]
IdRows = npt.NDArray[np.int64]
Forward = Callable[[IdRows, IdRows], FloatRows]


def graft(model: Path, out: Path) -> None:
    """Write the graph with the weights of a BERT folder in it."""
    import onnx  # type: ignore[import-not-found]
    from onnx import numpy_helper
    from safetensors.numpy import load_file  # type: ignore[import-not-found,unused-ignore]

    graph = onnx.load(str(HERE / "minilm_graph.onnx"))
    weights = load_file(model / "model.safetensors")
    names: dict[str, tuple[str, bool]] = json.loads((HERE / "minilm_graph.json").read_text())
    config = json.loads((model / "config.json").read_text())
    _add_layers(graph.graph, names, config["num_hidden_layers"])
    _set_head_width(graph.graph, config["hidden_size"] // config["num_attention_heads"])
    for name, (source, transposed) in names.items():
        weight = np.ascontiguousarray(weights[source].T if transposed else weights[source])
        graph.graph.initializer.append(numpy_helper.from_array(weight, name))
    onnx.checker.check_model(graph)
    onnx.save(graph, str(out))


def _add_layers(graph: Any, names: dict[str, tuple[str, bool]], layers: int) -> None:
    """Repeat the graph's last layer until there are `layers`; `names` gains the new ones' weights."""
    last, before = f"layer.{GRAPH_LAYERS - 1}", f"layer.{GRAPH_LAYERS - 2}"
    block = [node for node in graph.node if f"/{last}/" in node.name]
    own = {name for node in block for name in node.output}
    own_weights = {name: source for name, source in names.items() if f"{last}." in source[0]}
    place = max(index for index, node in enumerate(graph.node) if f"/{last}/" in node.name) + 1
    ends = block[-1].output[0]
    for number in range(GRAPH_LAYERS, layers):

        def renamed(name: str, number: int = number) -> str:
            if name in own:
                return name.replace(last, f"layer.{number}")
            if name in own_weights:
                return f"{name}.{number}"
            return name.replace(before, f"layer.{number - 1}")

        for node in block:
            copy = type(node)()
            copy.CopyFrom(node)
            copy.name = node.name.replace(last, f"layer.{number}")
            copy.input[:] = [renamed(name) for name in node.input]
            copy.output[:] = [renamed(name) for name in node.output]
            graph.node.insert(place, copy)
            place += 1
        for name, (source, transposed) in own_weights.items():
            names[renamed(name)] = (source.replace(f"{last}.", f"layer.{number}."), transposed)
    if layers > GRAPH_LAYERS:
        for node in list(graph.node)[place:]:
            node.input[:] = [name.replace(last, f"layer.{layers - 1}") if name == ends else name for name in node.input]


def _set_head_width(graph: Any, width: int) -> None:
    """Write another width of a head, and its softmax scale, over the graph's constants."""
    from onnx import numpy_helper

    scale = np.float32(GRAPH_HEAD_WIDTH**-0.5)
    for node in graph.node:
        if node.op_type != "Constant" or "/attention/self/" not in node.name:
            continue
        value = numpy_helper.to_array(node.attribute[0].t)
        if value.size == 1 and value.dtype == np.int64 and value.item() == GRAPH_HEAD_WIDTH:
            value = np.full_like(value, width)
        elif value.size == 1 and value.dtype == np.float32 and value.item() == scale:
            value = np.full_like(value, width**-0.5)
        node.attribute[0].t.CopyFrom(numpy_helper.from_array(value, node.attribute[0].t.name))


def onnxruntime_forward(graph: Path, threads: int) -> Forward:
    """A session of ONNX Runtime with its own defaults, on `threads` threads."""
    import onnxruntime  # type: ignore[import-not-found]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])

    def forward(ids: IdRows, mask: IdRows) -> FloatRows:
        rows: FloatRows = session.run(None, {"ids": ids, "am": mask})[0]
        return rows

    return forward


def openvino_forward(graph: Path, threads: int, precision: str = "f32") -> Forward:
    """A compiled model of OpenVINO, asked for `precision` ("f32" or "bf16"), on `threads` threads."""
    import openvino  # type: ignore[import-not-found]

    core = openvino.Core()
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": precision}
    request = core.compile_model(core.read_model(str(graph)), "CPU", settings).create_infer_request()

    def forward(ids: IdRows, mask: IdRows) -> FloatRows:
        return np.array(request.infer({"ids": ids, "am": mask})[0])

    return forward


class Peer:
    """Tokenizer and engine of a peer; texts are sorted by length and padded to the longest of a batch."""

    def __init__(self, model: Path, forward: Forward) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._tokenizer.no_padding()
        self._forward = forward

    def embed(self, texts: list[str]) -> tuple[FloatRows, int]:
        """Embeddings (texts, width) and the number of tokens."""
        rows = [encoding.ids for encoding in self._tokenizer.encode_batch(texts)]
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]), reverse=True)
        parts = []
        for start in range(0, len(order), BATCH_ROWS):
            batch = [rows[row] for row in order[start : start + BATCH_ROWS]]
            ids = np.zeros((len(batch), len(batch[0])), np.int64)
            mask = np.zeros_like(ids)
            for number, row in enumerate(batch):
                ids[number, : len(row)], mask[number, : len(row)] = row, 1
            parts.append(self._forward(ids, mask))
        out = np.empty((len(rows), parts[0].shape[1]), np.float32)
        out[order] = np.concatenate(parts)
        return out, sum(map(len, rows))


def memory_bytes(key: str) -> int:
    """Resident size of this process: now (`VmRSS:`), or the largest so far (`VmHWM:`)."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))


def main() -> None:
    """Take a turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=("graft", "onnxruntime", "openvino", "openvino-bf16"))
    parser.add_argument("model", type=Path)
    parser.add_argument("graph", type=Path)
    parser.add_argument("texts", type=Path, nargs="?")
    parser.add_argument("--column", default="text")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--spawned", type=float, default=time.time(), help="when this process was started")
    parser.add_argument("--vectors", type=Path, help="where the embeddings go, as .npy")
    arguments = parser.parse_args()
    if arguments.engine == "graft":
        graft(arguments.model, arguments.graph)
        return
    import pyarrow.parquet as pq

    texts = pq.read_table(arguments.texts, columns=[arguments.column])[arguments.column].to_pylist()
    makers: dict[str, Callable[[Path, int], Forward]] = {
        "onnxruntime": onnxruntime_forward,
        "openvino": openvino_forward,
        "openvino-bf16": partial(openvino_forward, precision="bf16"),
    }
    peer = Peer(arguments.model, makers[arguments.engine](arguments.graph, arguments.threads))
    peer.embed(texts[:1])
    first_vector_s = time.time() - arguments.spawned
    resident_bytes = memory_bytes("VmRSS:")
    peer.embed(texts[:64])
    start = time.perf_counter()
    vectors, tokens = peer.embed(texts)
    seconds = time.perf_counter() - start
    if arguments.vectors is not None:
        np.save(arguments.vectors, vectors)
    print(
        json.dumps(
            {
                "tokens": tokens,
                "seconds": seconds,
                "first_vector_s": first_vector_s,
                "resident_bytes": resident_bytes,
                "peak_memory_bytes": memory_bytes("VmHWM:"),
            }
        )
    )


if __name__ == "__main__":
    main()
