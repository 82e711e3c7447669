"""A BERT-base-sized sentence encoder with random weights: the larger model of `make bench`. Downloads nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.machine import SEED

HIDDEN, LAYERS, HEADS, INTERMEDIATE = 768, 12, 12, 3072
DEVIATION = 0.02  # what BERT starts its training with


def write_random_bert(like: Path, folder: Path) -> Path:
    """Write the model; tokenizer, pooling and vocabulary are those of another BERT, `like`.

    Args:
        like: Folder of a sentence-transformers BERT.
        folder: Where the model goes; made here.
    """
    shutil.copytree(like, folder, ignore=shutil.ignore_patterns("*.safetensors", "README.md"))
    config = json.loads((like / "config.json").read_text())
    config |= {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INTERMEDIATE,
    }
    (folder / "config.json").write_text(json.dumps(config))
    pooling = folder / "1_Pooling/config.json"
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"word_embedding_dimension": HIDDEN}))

    shapes = {
        "embeddings.word_embeddings": (config["vocab_size"], HIDDEN),
        "embeddings.position_embeddings": (config["max_position_embeddings"], HIDDEN),
        "embeddings.token_type_embeddings": (config["type_vocab_size"], HIDDEN),
    }
    norms = ["embeddings.LayerNorm"]
    linears: dict[str, tuple[int, int]] = {}
    for layer in (f"encoder.layer.{number}" for number in range(LAYERS)):
        linears |= {f"{layer}.attention.self.{name}": (HIDDEN, HIDDEN) for name in ("query", "key", "value")}
        linears[f"{layer}.attention.output.dense"] = (HIDDEN, HIDDEN)
        linears[f"{layer}.intermediate.dense"] = (INTERMEDIATE, HIDDEN)
        linears[f"{layer}.output.dense"] = (HIDDEN, INTERMEDIATE)
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    random = np.random.default_rng(SEED)
    tensors = {
        f"{name}.weight": DEVIATION * random.standard_normal(shape, np.float32)
        for name, shape in (shapes | linears).items()
    }
    tensors |= {
        f"{name}.bias": DEVIATION * random.standard_normal(shape[0], np.float32) for name, shape in linears.items()
    }
    tensors |= {f"{name}.weight": np.ones(HIDDEN, np.float32) for name in norms}
    tensors |= {f"{name}.bias": np.zeros(HIDDEN, np.float32) for name in norms}
    save_file({name: tensor.astype(np.float32) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
