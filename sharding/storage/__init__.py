"""Between every station and the bytes: the only file-system code. Knows nothing of plans, shards or receipts."""

from __future__ import annotations

from sharding.storage.base import Entry, Folder, Storage
from sharding.storage.local import SCRATCH, LocalStorage, translate_os_error
from sharding.storage.uri import Location, is_inside, parse_uri, same_location, split_uri

__all__ = [
    "SCRATCH",
    "Entry",
    "Folder",
    "LocalStorage",
    "Location",
    "Storage",
    "is_inside",
    "open_storage",
    "parse_uri",
    "same_location",
    "split_uri",
    "translate_os_error",
]


def open_storage(uri: str) -> Storage:
    """Opens a folder or a bucket prefix. Nothing is read or created; the place need not exist yet.

    Args:
        uri: A local path, `file:///...`, `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, or,
            to read only, `hf://datasets/org/name[@revision]/prefix`. Endpoint, region and credentials come from the
            usual variables of each store (`AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_ACCESS_KEY_ID`, ...).

    Raises:
        InputError: The location cannot be parsed or its scheme is unknown.
    """
    location = parse_uri(uri)
    if location.scheme == "file":
        return LocalStorage(location.key)
    if location.scheme == "hf":
        from sharding.storage.hub import HubStorage

        return HubStorage(location)
    from sharding.storage.remote import RemoteStorage

    return RemoteStorage(location)
