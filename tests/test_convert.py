"""The verb `convert`: whole model folders, with their modules, and nothing left behind when it fails."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from job_files import JobFiles
from safetensors.numpy import load_file
from torch_pickles import write_torch

GOLDEN = Path(__file__).parent / "fixtures" / "golden"

pytestmark = pytest.mark.usefixtures("torch_names")


@pytest.fixture
def pickled(files: JobFiles) -> Path:
    """A golden sentence-transformers model whose weights, its Dense module's too, are PyTorch's."""
    folder = files.root / "pickled"
    shutil.copytree(GOLDEN / "st-mean-dense", folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    for inner in (folder, folder / "2_Dense"):
        write_torch(inner / "pytorch_model.bin", load_file(inner / "model.safetensors"))
        (inner / "model.safetensors").unlink()
    return folder


def test_a_converted_folder_gives_the_references_vectors(files: JobFiles, pickled: Path) -> None:
    done = files.run("convert", "pickled", "new", "--json")
    assert done.code == 0, done.stderr
    assert done.json["tensors"] > 30
    files.write_input(pa.table({"doc": ["", "a"]}))
    assert files.run("submit", str(files.spec_file(model__source="new"))).code == 0
    expected = load_file(GOLDEN / "st-mean-dense" / "expected.safetensors")["embedding"][:2]
    found = np.stack(files.rows()["embedding"].to_numpy(zero_copy_only=False))
    assert np.abs(found - expected).max() < 2e-5
    assert not list((files.root / "new").rglob("*.bin"))


def test_submitting_a_pickled_folder_says_how_to_convert_it(files: JobFiles, pickled: Path) -> None:
    files.write_input(pa.table({"doc": ["a"]}))
    done = files.run("submit", str(files.spec_file(model__source=str(pickled))))
    assert done.code == 2
    assert "candelabra convert" in done.stderr


def test_safetensors_of_a_module_are_kept(files: JobFiles, pickled: Path) -> None:
    shutil.copy(GOLDEN / "st-mean-dense" / "2_Dense" / "model.safetensors", pickled / "2_Dense")
    assert files.run("convert", "pickled", "new").code == 0
    copied = (files.root / "new" / "2_Dense" / "model.safetensors").read_bytes()
    assert copied == (GOLDEN / "st-mean-dense" / "2_Dense" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("target", "code"),
    [("pickled", 2), ("pickled/inside", 2), ("no/parent", 6), ("file", 2), ("file/below", 6), (".", 2)],
)
def test_a_target_that_cannot_be_is_told_and_nothing_is_left(
    files: JobFiles, pickled: Path, target: str, code: int
) -> None:
    (files.root / "file").write_text("x")
    before = sorted(files.root.rglob("*"))
    done = files.run("convert", "pickled", target)
    assert done.code == code, done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(files.root.rglob("*")) == before


def test_a_damaged_pickle_is_told_by_name_in_one_line_and_nothing_is_left(files: JobFiles, pickled: Path) -> None:
    content = (pickled / "pytorch_model.bin").read_bytes()
    for damaged in (content[:1000], content[: len(content) // 2], b"not a pickle", b""):
        (pickled / "pytorch_model.bin").write_bytes(damaged)
        done = files.run("convert", "pickled", "new", environment={"RUST_BACKTRACE": "1"})
        assert done.code == 2, done.stderr
        assert "pytorch_model.bin" in done.stderr
        assert "stack backtrace" not in done.stderr
        assert "<unknown>" not in done.stderr
        assert sorted(path.name for path in files.root.iterdir()) == ["pickled"]


def test_a_folder_without_pickles_is_told(files: JobFiles) -> None:
    (files.root / "empty").mkdir()
    assert files.run("convert", "empty", "new").code == 6
