"""From paths, globs and folders to files: the search alone. Opens no file.

Globs are matched segment by segment, so `s3://bucket/2024-*/part-?.parquet` lists only the folders it has to.
A name that exists exactly as written is taken literally, even if it holds `[` or `*`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sharding.errors import InputError, NotFoundError
from sharding.storage import Entry, Storage, is_inside, open_storage, parse_uri, split_uri

EXTENSIONS = (".parquet", ".parq")
_MAGIC = re.compile(r"[*?\[]")
_TOKEN = re.compile(r"\*+|\?|\[[!^]?\]?[^\]]*\]|.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Found:
    """A file that was found, and the storage it lies in."""

    storage: Storage
    entry: Entry


def find_files(paths: Sequence[str], *, workers: int = 16) -> list[Found]:
    """Every file that `paths` stand for: each sorted by path, the list's order kept, duplicates dropped.

    Raises:
        NotFoundError: One of `paths` stands for no file.
        InputError: A path is malformed, or there are no paths.
    """
    if not paths:
        raise InputError("no input path is given: `[]`")
    if isinstance(paths, str):
        paths = [paths]
    result: dict[str, Found] = {}
    with ThreadPoolExecutor(workers, thread_name_prefix="listing") as pool:
        for path in paths:
            for found in _find(path, pool):
                result.setdefault(found.storage.full_uri(found.entry.path), found)
    return [*result.values()]


def _find(path: str, pool: ThreadPoolExecutor) -> list[Found]:
    storage, entry = _open_exact(path)
    if entry is not None:
        return [Found(storage, entry)]
    folder = open_storage(path)
    files = [Found(folder, entry) for entry in folder.list() if _is_visible(entry.path) and _is_parquet(entry.path)]
    if files:
        return files
    base, segments = _split_magic(path)
    if segments:
        root = open_storage(base)
        entries = {entry.path: entry for entry in _match(root, "", segments, pool)}
        files = [Found(root, entries[key]) for key in sorted(entries, key=_sort_key)]
    if not files:
        raise NotFoundError(
            f"no Parquet file is found at: `{path}`",
            hint="a folder stands for *.parquet and *.parq below it; names that begin with _ or . are skipped; "
            "a relative path begins at the working directory",
        )
    return files


def finds(path: str, file: str) -> bool:
    """Whether an input path would find a file, were it there: itself, below a folder, or by a pattern.

    Args:
        path: A path, glob or folder, as `find_files` takes it.
        file: Full location of the file.
    """
    if is_inside(file, path):
        return True
    base, segments = _split_magic(path)
    if not segments or not is_inside(file, base):
        return False
    below = parse_uri(file).key[len(parse_uri(base).key) :].strip("/").split("/")
    pattern = _compile(segments)
    return any(pattern.fullmatch("/".join(below[:length])) for length in range(1, len(below) + 1))


def _open_exact(path: str) -> tuple[Storage, Entry | None]:
    folder, name = split_uri(path)
    storage = open_storage(folder)
    return storage, storage.head(name) if name else None


def _split_magic(path: str) -> tuple[str, list[str]]:
    """Splits a location into the folder before the first segment that holds a pattern, and the segments from there."""
    location = parse_uri(path)
    segments = location.key.split("/")
    for index, segment in enumerate(segments):
        if _MAGIC.search(segment):
            key = "/".join(segments[:index])
            base = key or "/" if location.scheme == "file" else f"{location.scheme}://{location.bucket}/{key}"
            return base, segments[index:]
    return path, []


def _match(storage: Storage, prefix: str, segments: Sequence[str], pool: ThreadPoolExecutor) -> Iterator[Entry]:
    """Walks one level for each segment; `**` takes everything below."""
    prefixes = [prefix]
    for index, segment in enumerate(segments):
        if "**" in segment:
            pattern = _compile(segments[index:])
            for below in prefixes:
                yield from (
                    entry
                    for entry in storage.list(below)
                    if _is_visible(_relative(entry.path, below)) and pattern.fullmatch(_relative(entry.path, below))
                )
            return
        pattern = re.compile(_segment_pattern(segment), re.DOTALL)
        deeper: list[str] = []
        for level in pool.map(storage.list_folder, prefixes):
            deeper += [path for path in level.folders if _is_match(path, segment, pattern)]
            if index == len(segments) - 1:
                yield from (entry for entry in level.files if _is_match(entry.path, segment, pattern))
        prefixes = deeper
    for below in prefixes:  # folders that the whole pattern matches stand for what is in them
        yield from (
            entry
            for entry in storage.list(below)
            if _is_visible(_relative(entry.path, below)) and _is_parquet(entry.path)
        )


def _is_match(path: str, segment: str, pattern: re.Pattern[str]) -> bool:
    name = path.rpartition("/")[2]
    hidden = _is_hidden(name) and not segment.startswith(name[0])
    return not hidden and (name == segment or pattern.fullmatch(name) is not None)


def _compile(segments: Sequence[str]) -> re.Pattern[str]:
    """A pattern over whole relative paths: `*` stays within a segment, `**` spans any number of them."""
    *folders, last = segments
    parts = ["(?:[^/]+/)*" if segment == "**" else _segment_pattern(segment) + "/" for segment in folders]
    if last == "**":  # the same as the folder itself
        extensions = "|".join(re.escape(extension) for extension in EXTENSIONS)
        parts.append(f".*(?i:{extensions})")
    else:
        parts.append(_segment_pattern(last))
    return re.compile("".join(parts), re.DOTALL)


def _segment_pattern(segment: str) -> str:
    parts: list[str] = []
    for token in _TOKEN.findall(segment):
        if token.startswith("*"):
            parts.append("[^/]*")
        elif token == "?":
            parts.append("[^/]")
        elif len(token) > 2 and token[0] == "[":
            body = token[1:-1].replace("\\", r"\\").replace("[", r"\[")
            parts.append(f"(?!/)[^{body[1:]}]" if body[0] in "!^" else f"[{body}]")
        else:
            parts.append(re.escape(token))
    return "".join(parts)


def _relative(path: str, prefix: str) -> str:
    return path.removeprefix(f"{prefix}/") if prefix else path


def _is_visible(path: str) -> bool:
    return not any(map(_is_hidden, path.split("/")))


def _is_hidden(name: str) -> bool:
    """As Spark decides: `_x=1` is the folder of a partition column, not a hidden one."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _is_parquet(path: str) -> bool:
    return path.lower().endswith(EXTENSIONS)


def _sort_key(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")
