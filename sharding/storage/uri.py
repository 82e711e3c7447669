"""Before anything is opened: what a location string means. Parses and compares; touches no store.

Local locations are kept as plain absolute paths (never percent-encoded: `#`, `%`, spaces and `=` are ordinary
characters), remote ones as `scheme://bucket/key` with the key written literally, as the AWS command line does.
Only a `file://` location is percent-decoded, because that scheme is a URL by definition (RFC 8089).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from sharding.errors import InputError

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://(.*)$", re.DOTALL)
_ALIASES = {
    "file": "file",
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "azure": "az",
    "abfs": "az",
    "abfss": "az",
    "hf": "hf",
}


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed location.

    Attributes:
        scheme: `file`, `s3`, `gs`, `az` or `hf`.
        bucket: Bucket or container; for `hf` the repository (`datasets/org/name`, with `@revision`); empty if local.
        key: Absolute path if local, else the key without leading or trailing slash.
    """

    scheme: str
    bucket: str
    key: str

    @property
    def uri(self) -> str:
        if self.scheme == "file":
            return self.key
        return f"{self.scheme}://{self.bucket}/{self.key}" if self.key else f"{self.scheme}://{self.bucket}"


def parse_uri(uri: str) -> Location:
    """Parses `out/x`, `/abs`, `~/x`, `file:///x`, `s3://`, `gs://`, `az://container/` and `hf://datasets/org/name/`.

    Raises:
        InputError: The scheme is unknown, the bucket is missing, or a remote key has an empty, `.` or `..` segment.
    """
    if not uri:
        raise InputError("a location is empty: ``")
    if "\0" in uri:
        raise InputError(f"a location holds a null character: `{uri!r}`")
    match = _SCHEME.match(uri)
    if match is None:
        return Location("file", "", os.path.normpath(Path(uri).expanduser().absolute()))
    scheme = _ALIASES.get(match[1].lower())
    if scheme is None:
        raise InputError(
            f"unknown storage scheme `{match[1]}` in: `{uri}`",
            hint="use a local path, s3://, gs://, az:// or, for inputs, hf://",
        )
    if scheme == "file":
        return _parse_file(uri, match[2])
    segments = match[2].rstrip("/").split("/")
    count = 1
    if scheme == "hf":
        count = 3 if segments[0] in ("datasets", "spaces") else 2
        if segments[count - 1 : count][-1:] and segments[count - 1].endswith("@refs"):
            count += 2  # refs/convert/parquet, refs/pr/1
    if len(segments) < count or not all(segments):
        what = "hf://datasets/org/name/..." if scheme == "hf" else f"{scheme}://bucket/key, without empty segments"
        raise InputError(f"incomplete location: `{uri}`", hint=f"write it as {what}")
    if any(segment in (".", "..") for segment in segments):
        raise InputError(f"a remote location cannot hold `.` or `..`: `{uri}`")
    return Location(scheme, "/".join(segments[:count]), "/".join(segments[count:]))


def _parse_file(uri: str, rest: str) -> Location:
    host, slash, path = rest.partition("/")
    if not slash or host not in ("", "localhost"):
        raise InputError(f"a file:// location needs an absolute path: `{uri}`", hint="write file:///folder/file")
    return Location("file", "", os.path.normpath(unquote("/" + path)))


def same_location(first: str, second: str) -> bool:
    """True when both strings name the same place; symbolic links of local paths are resolved."""
    return _resolved(first) == _resolved(second)


def is_inside(inner: str, outer: str) -> bool:
    """True when `inner` is `outer` or lies below it; symbolic links of local paths are resolved."""
    one, other = _resolved(inner), _resolved(outer)
    if (one.scheme, one.bucket) != (other.scheme, other.bucket):
        return False
    prefix = other.key.rstrip("/")
    return one.key == other.key or not prefix or one.key.startswith(prefix + "/")


def _resolved(uri: str) -> Location:
    location = parse_uri(uri)
    if location.scheme != "file":
        return location
    return Location("file", "", str(Path(location.key).resolve()))


def split_uri(uri: str) -> tuple[str, str]:
    """Splits a full location into (what `open_storage` takes, path inside it): the parent folder, or the bucket."""
    location = parse_uri(uri)
    if location.scheme == "file":
        folder, _, name = location.key.rpartition("/")
        return folder or "/", name
    return Location(location.scheme, location.bucket, "").uri, location.key
