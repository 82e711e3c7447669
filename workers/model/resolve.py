"""From the spec's `model.source` to a folder or GGUF file here and its digest. Loads nothing and reads no config.

folder                a path; relative ones need no `./` as long as the folder exists
package:NAME/PATH     data of an installed package; NAME is its import name or its distribution name
org/name              a Hub id, fetched once per machine into the Hub cache and pinned to a commit

The first two may name a `.gguf` file, or a folder that holds one and no config.json; `org/name/PATH.gguf` is one file
of a Hub repository.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from sharding.errors import InputError, NotFoundError
from workers.errors import ModelError
from workers.model.digest import digest_model
from workers.model.hub import fetch_gguf, fetch_model, is_hub_id, split_hub_file
from workers.model.layout import CONFIG, GGUF_SUFFIX, gguf_files, is_gguf, only_gguf, text_folder, weight_files

PACKAGE_PREFIX = "package:"


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """A model's files on this machine.

    Attributes:
        path: The model folder or GGUF file, absolute.
        source: What the spec named.
        revision: The commit of a Hub model (40 hexadecimal digits); None for a folder or a package.
        digest: SHA-256 over names and contents of the files that decide the output.
    """

    path: Path
    source: str
    revision: str | None
    digest: str


def resolve_model(source: str, revision: str | None = None, *, offline: bool | None = None) -> ModelLocation:
    """Find a model's folder or GGUF file, fetching it from the Hub when it has to be.

    A folder that exists goes before a Hub id of the same name.

    Args:
        source: A folder, a GGUF file, `package:NAME/PATH` or a Hub id.
        revision: Branch, tag or commit of a Hub id; None is its default branch. Meaningless for the other two.
        offline: True uses only what the Hub cache holds; None obeys `HF_HUB_OFFLINE`.

    Returns:
        Where the model is. Giving its `revision` back brings the same commit, without asking the Hub anything once
        the files are there.

    Raises:
        NotFoundError: No such folder, package, Hub id or revision, or offline and not in the cache.
        ModelError: The folder holds no model that can be loaded.
        AuthenticationError: The Hub wants a token, or other rights than the one it got.
        HubError: The Hub cannot be reached or keeps failing.
    """
    if source.startswith(PACKAGE_PREFIX):
        refuse_revision(source, revision)
        return locate(find_in_package(source), source, None)
    folder = Path(source).expanduser()
    if source and folder.is_dir():
        refuse_revision(source, revision)
        return locate(folder.resolve(), source, None)
    if source and is_gguf(folder):
        refuse_revision(source, revision)
        return locate(resolved_file(folder), source, None)
    if source and folder.exists():
        raise NotFoundError(f"the model source is a file, not a folder or a {GGUF_SUFFIX} file: `{source}`")
    if source.endswith(GGUF_SUFFIX) and folder.parent != Path() and folder.parent.is_dir():
        raise NotFoundError(f"no such file, in a folder that is there: `{source}`")
    if (hub_file := split_hub_file(source)) is not None:
        path, commit = fetch_gguf(*hub_file, revision, offline=offline)
        return locate(path, source, commit)
    if not is_hub_id(source):
        raise NotFoundError(
            f"no such model folder: `{source}`",
            hint="give a folder that exists, package:NAME/PATH, or a Hub id such as org/name",
        )
    path, commit = fetch_model(source, revision, offline=offline)
    return locate(path, source, commit)


def resolved_file(path: Path) -> Path:
    """A file's absolute path under its own name; the Hub cache's links lead to files without one."""
    return path.parent.resolve() / path.name


def refuse_revision(source: str, revision: str | None) -> None:
    if revision is not None:
        raise InputError(
            f"model.revision has no meaning for a folder or a package: `{revision}`",
            hint=f"leave model.revision out, or name a Hub id instead of {source}",
        )


def locate(path: Path, source: str, commit: str | None) -> ModelLocation:
    """Check that a folder holds a model, and digest it."""
    gguf = path if is_gguf(path) else only_gguf(path)
    if gguf is not None:
        return ModelLocation(gguf, source, commit, digest_model(gguf))
    inner = text_folder(path)
    if not (inner / CONFIG).is_file():
        raise ModelError(f"the model folder has no {CONFIG}: `{path}`", hint="is this the folder of a saved model?")
    if not weight_files(inner):
        raise missing_weights(inner, path)
    return ModelLocation(path, source, commit, digest_model(path))


def missing_weights(inner: Path, named: Path) -> ModelError:
    pickled = sorted([*inner.glob("*.bin"), *inner.glob("*.bin.index.json")])
    hint = "only safetensors are read: model.safetensors, or an index and the files it names"
    if files := gguf_files(inner):
        hint = f"{files[0].name} is there: name the file itself in model.source"
    elif pickled:
        hint = f"{pickled[0].name} is there: `candelabra convert {named} NEW_FOLDER` makes safetensors of it"
    return ModelError(f"the model has no weights in safetensors: `{named}`", hint=hint)


def find_in_package(source: str) -> Path:
    """The folder or GGUF file that `package:NAME/PATH` names, without importing the package."""
    name, _, inner = source.removeprefix(PACKAGE_PREFIX).partition("/")
    if ".." in PurePosixPath(inner).parts or PurePosixPath(inner).is_absolute() or "\\" in inner:
        raise NotFoundError(f"the path inside the package must not leave it: `{source}`")
    roots = package_roots(name)
    if not roots:
        raise NotFoundError(
            f"no installed package has this name: `{name}`",
            hint=f"install it where the workers run: pip install {name}",
        )
    for root in roots:
        if (root / inner).is_dir():
            return (root / inner).resolve()
        if is_gguf(root / inner):
            return resolved_file(root / inner)
    raise NotFoundError(f"the package `{name}` is installed but holds no such folder: `{inner}`")


def package_roots(name: str) -> list[Path]:
    """Folders of a package by import name, or by the name of the distribution that brought it."""
    names = [name]
    try:
        top_level = {file.parts[0] for file in metadata.files(name) or () if len(file.parts) > 1}
        names += sorted(part for part in top_level if part.isidentifier())
    except (metadata.PackageNotFoundError, ValueError):
        pass
    roots: list[Path] = []
    for candidate in names:
        if not candidate.isidentifier():
            continue
        spec = importlib.util.find_spec(candidate)
        roots += [Path(root) for root in (spec.submodule_search_locations or ()) if spec] if spec else []
    return roots
