"""Fetching what decides a Hub model's output into the Hub cache of this machine. Does not judge what the files say.

`huggingface_hub` does the fetching: `HF_ENDPOINT` (a mirror), `HF_HUB_OFFLINE`, `HF_TOKEN` and `HF_HOME` are obeyed, a
connection cut in the middle is resumed with a ranged request, and its file locks make two processes of one machine
that want the same file fetch it once. Only safetensors, configs and tokenizers are fetched, and a GGUF file that was
asked for by name, never pickled or other weights.
"""

from __future__ import annotations

import errno
import glob
import logging
import random
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from sharding.errors import AuthenticationError, CandelabraError, DiskFullError, NotFoundError
from workers.errors import HubError, ModelError
from workers.model.layout import (
    BESIDE_GGUF,
    GGUF_SUFFIX,
    MODULES,
    PROMPTS,
    SMALL_FILES,
    WEIGHTS,
    WEIGHTS_INDEX,
    index_shards,
    read_modules,
    text_folder,
    weight_files,
)

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

_HUB_ID = re.compile(r"(?!.*(?:--|\.\.))(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]{0,95}(?<![.-])(?<!\.git)")
_RETRY_WAITS_S = (1.0, 2.0, 4.0)
_OTHER_WEIGHTS = (".bin", ".h5", ".msgpack", ".onnx", ".gguf")
Answer = TypeVar("Answer")
_logger = logging.getLogger(__name__)


def is_hub_id(source: str) -> bool:
    """Whether a source is written like a Hub id: `name` or `org/name`."""
    return _HUB_ID.fullmatch(source) is not None


def split_hub_file(source: str) -> tuple[str, str] | None:
    """`org/name/PATH.gguf` as repository and path; None for anything else."""
    parts = source.split("/")
    repository, inner = "/".join(parts[:2]), "/".join(parts[2:])
    if not inner.lower().endswith(GGUF_SUFFIX) or not is_hub_id(repository) or {"", ".", ".."} & set(parts):
        return None
    return repository, inner


def fetch_gguf(repository: str, inner: str, revision: str | None, *, offline: bool | None) -> tuple[Path, str]:
    """Fetch one GGUF file, and what lies beside it and says more about text, or find them in the cache.

    Args:
        repository: A Hub id.
        inner: The file's path in it.
        revision: As of `fetch_model`.
        offline: As of `fetch_model`.

    Returns:
        The file, and its commit.

    Raises:
        NotFoundError: The repository has no such file, or as of `fetch_model`.
        AuthenticationError, HubError, DiskFullError: As of `fetch_model`.
    """
    snapshot = _Snapshot(repository, offline is True)
    names = [str(PurePosixPath(inner).parent / name) for name in BESIDE_GGUF]
    folder = snapshot.fetch(revision, [inner, *names])
    if not (folder / inner).is_file():
        raise NotFoundError(f"the Hub model {repository} has no such file: `{inner}`")
    return folder / inner, folder.name


def fetch_model(repository: str, revision: str | None, *, offline: bool | None) -> tuple[Path, str]:
    """Fetch a model, or find it in the cache.

    The small files come first; they say which folders and weights to ask for.

    Args:
        repository: A Hub id.
        revision: Branch, tag or commit; None is the default branch.
        offline: True asks nobody but the cache; None obeys `HF_HUB_OFFLINE`.

    Returns:
        The snapshot's folder, and its commit.

    Raises:
        NotFoundError: The Hub knows no such repository or revision, or offline and not in the cache.
        AuthenticationError: The repository is gated, or the token is refused.
        HubError: The Hub cannot be reached, or keeps failing.
        ModelError: It has no safetensors, or its small files are broken.
        DiskFullError: No space is left in the cache.
    """
    snapshot = _Snapshot(repository, offline is True)
    folder = snapshot.fetch(revision, [MODULES, PROMPTS, *SMALL_FILES])
    commit = folder.name
    inner_folders = sorted({module.path for module in read_modules(folder)} - {""})
    wanted = [str(PurePosixPath(inner, name)) for inner in inner_folders for name in SMALL_FILES]
    wanted += [str(PurePosixPath(inner, name)) for inner in ["", *inner_folders] for name in (WEIGHTS, WEIGHTS_INDEX)]
    snapshot.fetch(commit, wanted)
    for inner in ["", *inner_folders]:
        shards = () if (folder / inner / WEIGHTS).is_file() else index_shards(folder / inner)
        if shards:
            snapshot.fetch(commit, [str(PurePosixPath(inner, name)) for name in shards])
    if not weight_files(text_folder(folder)):
        raise snapshot.missing_weights(commit)
    return folder, commit


class _Snapshot:
    """One repository, and how to ask for it."""

    def __init__(self, repository: str, offline: bool) -> None:
        self._repository = repository
        self._offline = offline

    def fetch(self, revision: str | None, names: Iterable[str]) -> Path:
        """Bring files into the cache, those of them that the repository has; returns the snapshot's folder."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils.tqdm import tqdm

        class Bar(tqdm):
            def __init__(self, *args: Any, **options: Any) -> None:
                silent = not sys.stderr.isatty() or options.get("disable")
                super().__init__(*args, **{**options, "disable": silent})  # type: ignore[no-untyped-call]

        patterns = [glob.escape(name) for name in names]
        return Path(
            self._retried(
                revision,
                lambda: snapshot_download(
                    self._repository,
                    revision=revision,
                    allow_patterns=patterns,
                    local_files_only=self._offline,
                    tqdm_class=Bar,
                ),
            )
        )

    def missing_weights(self, commit: str) -> CandelabraError:
        """The error for a repository without safetensors, naming what it has instead."""
        from huggingface_hub import HfApi

        found: list[str] = []
        if not self._offline:
            names = self._retried(commit, lambda: HfApi().list_repo_files(self._repository, revision=commit))
            found = sorted(name for name in names if name.endswith(_OTHER_WEIGHTS) and "/" not in name)
        hint = "only safetensors are read"
        if any(name.endswith(".bin") for name in found):
            hint = "fetch it with `hf download`, then `candelabra convert FOLDER NEW_FOLDER` makes safetensors of it"
        elif any(name.endswith(GGUF_SUFFIX) for name in found):
            hint = f"name one file: model.source: {self._repository}/FILE{GGUF_SUFFIX}"
        only = f", only {', '.join(found)}" if found else ""
        return ModelError(f"the Hub model has no weights in safetensors{only}: `{self._repository}`", hint=hint)

    def _retried(self, revision: str | None, ask: Callable[[], Answer]) -> Answer:
        """Ask the Hub, again after a failure of its own; every failure becomes one of our errors."""
        for wait_s in (*_RETRY_WAITS_S, None):
            try:
                return ask()
            except Exception as error:
                ours = self._translate(error, revision)
                if wait_s is None or not isinstance(ours, HubError):
                    raise ours from error
                _logger.warning("%s; trying again", ours)
                time.sleep(wait_s * random.uniform(0.5, 1.0))
        raise AssertionError("unreachable")

    def _translate(self, error: Exception, revision: str | None) -> CandelabraError:
        from huggingface_hub import errors

        name = self._repository
        if isinstance(error, errors.GatedRepoError):
            return AuthenticationError(
                f"the Hub model is gated, and no token that may read it was given: `{name}`",
                hint="accept its terms on the Hub, and set HF_TOKEN to a token of that account",
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return NotFoundError(f"the Hub model {name} has no such revision: `{revision}`")
        if isinstance(error, errors.RepositoryNotFoundError):
            return NotFoundError(
                f"the Hub knows no such model: `{name}`",
                hint="if it is private, set HF_TOKEN to a token that may read it",
            )
        if isinstance(error, errors.HFValidationError):
            return NotFoundError(f"neither a folder nor a Hub id: `{name}`")
        if isinstance(error, errors.LocalEntryNotFoundError):
            return self._not_in_cache(error, revision)
        if isinstance(error, errors.HfHubHTTPError):
            return self._refused(error)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return DiskFullError(f"no space is left in the Hub cache for the model: `{name}`", hint="HF_HOME moves it")
        return HubError(
            f"the model could not be fetched from the Hub ({type(error).__name__}: {_first_line(error)}): `{name}`",
            hint="check the network, or HF_ENDPOINT if a mirror is used",
        )

    def _not_in_cache(self, error: Exception, revision: str | None) -> CandelabraError:
        """Not in the cache: offline that is an answer, online it is what followed a failed request."""
        from huggingface_hub import constants

        if self._offline or constants.HF_HUB_OFFLINE:
            return NotFoundError(
                f"the Hub is switched off and the cache does not hold the whole model at {revision or 'main'}: "
                f"`{self._repository}`",
                hint="fetch it once without HF_HUB_OFFLINE",
            )
        if isinstance(error.__cause__, Exception):
            return self._translate(error.__cause__, revision)
        return HubError(f"the model could not be fetched from the Hub ({_first_line(error)}): `{self._repository}`")

    def _refused(self, error: HfHubHTTPError) -> CandelabraError:
        status = error.response.status_code
        if status in (401, 403):
            return AuthenticationError(
                f"the Hub refuses the token, or wants one ({status}): `{self._repository}`",
                hint="set HF_TOKEN to a token that may read the model",
            )
        return HubError(
            f"the Hub answers with {status}: `{self._repository}`", hint="try again later; what was fetched is kept"
        )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
