"""Which files of a model decide its output, and where each part sits. Reads JSON only; fetches nothing.

A model is a folder, or one GGUF file; then files in its folder that say more about text count too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from workers.errors import ModelError
from workers.model.jsonfile import read_json, read_object

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TRANSFORMER_CONFIGS = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
"""Names that sentence-transformers gave to one file over the years, in the order it looks for them."""
GGUF_SUFFIX = ".gguf"
BESIDE_GGUF = (TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "generation_config.json", "chat_template.jinja")
"""What counts in the folder of a GGUF file."""
SMALL_FILES = (
    CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    *TRANSFORMER_CONFIGS,
)
"""What may stand beside the weights and decide the output."""


@dataclass(frozen=True, slots=True)
class Module:
    """One line of `modules.json`.

    Attributes:
        kind: Last part of its type name, such as `Pooling`.
        path: Its folder inside the model folder; empty for the folder itself.
    """

    kind: str
    path: str


def read_modules(folder: Path) -> tuple[Module, ...]:
    """Read `modules.json`; a folder without one has no modules.

    Raises:
        ModelError: The file is broken, or a path leads out of the folder.
    """
    path = folder / MODULES
    content = read_json(path)
    if content is None:
        return ()
    if not isinstance(content, list):
        raise ModelError(f"{MODULES} does not hold a list of modules: `{path}`")
    modules: list[Module] = []
    for entry in content:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("type", "path")):
            raise ModelError(f"{MODULES} has an entry without type and path: `{entry!r}`")
        modules.append(Module(entry["type"].rpartition(".")[2], inside(entry["path"], path)))
    return tuple(modules)


def inside(path: str, named_by: Path) -> str:
    """Pass on a relative path that stays inside its folder.

    Raises:
        ModelError: It is absolute or climbs out.
    """
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or "\\" in path:
        raise ModelError(f"{named_by.name} names a path outside the model folder: `{path}`")
    return "" if path in ("", ".") else str(parts)


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, by its name."""
    return path.suffix.lower() == GGUF_SUFFIX and path.is_file()


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files in a folder, sorted."""
    return sorted(path for path in folder.iterdir() if is_gguf(path))


def only_gguf(folder: Path) -> Path | None:
    """The GGUF file that a folder without `config.json` stands for; None when it holds none.

    Raises:
        ModelError: It holds several.
    """
    if (folder / CONFIG).is_file():
        return None
    files = gguf_files(folder)
    if len(files) > 1:
        raise ModelError(
            f"the model folder holds {len(files)} GGUF files: `{folder}`",
            hint=f"name one of them: {', '.join(path.name for path in files)}",
        )
    return files[0] if files else None


def text_folder(folder: Path) -> Path:
    """The folder that holds config and tokenizer: the first module's (old models keep it in `0_Transformer`).

    For a GGUF file it is the folder that the file lies in.
    """
    if is_gguf(folder):
        return folder.parent
    modules = read_modules(folder)
    if modules and modules[0].path and (folder / modules[0].path / CONFIG).is_file():
        return folder / modules[0].path
    return folder


def weight_files(folder: Path) -> tuple[str, ...]:
    """Names of the safetensors that an engine reads from this folder; empty when it holds none.

    `model.safetensors` goes before an index; an index brings itself and every file it names.

    Raises:
        ModelError: The index is broken, or names a file that is missing or outside the folder.
    """
    if (folder / WEIGHTS).is_file():
        return (WEIGHTS,)
    names = index_shards(folder)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{WEIGHTS_INDEX} names files that are missing: `{', '.join(missing)}`")
    return (WEIGHTS_INDEX, *names) if names else ()


def index_shards(folder: Path) -> tuple[str, ...]:
    """Sorted names of the files that the weights' index of a folder names; empty without an index.

    Raises:
        ModelError: The index is broken, or names a file outside the folder.
    """
    index = folder / WEIGHTS_INDEX
    weight_map = read_object(index).get("weight_map", {})
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{WEIGHTS_INDEX} has no usable weight_map: `{index}`")
    return tuple(sorted({inside(name, index) for name in weight_map.values()}))


def deciding_files(folder: Path) -> tuple[str, ...]:
    """Every file that decides the model's output, as sorted paths relative to the folder (a GGUF file's own folder).

    Weights, config, tokenizer, prompts, `modules.json` and what the folders that it names hold. Read-me files, other
    weight formats and training leftovers are not among them.

    Raises:
        ModelError: `modules.json` or the weights' index is broken.
    """
    if is_gguf(folder):
        return tuple(sorted([folder.name, *(name for name in BESIDE_GGUF if (folder.parent / name).is_file())]))
    folders = {"", *(module.path for module in read_modules(folder))}
    names = {name for name in (MODULES, PROMPTS) if (folder / name).is_file()}
    for inner in folders:
        place = folder / inner
        names.update(str(PurePosixPath(inner, name)) for name in SMALL_FILES if (place / name).is_file())
        names.update(str(PurePosixPath(inner, name)) for name in weight_files(place))
    return tuple(sorted(names))
