"""Paths, globs and folders: which files they stand for, and in which order."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from s3_server import FaultyS3

from sharding.errors import InputError, NotFoundError
from sharding.find import find_files
from sharding.storage import Storage, open_storage

TREE = (
    "a.parquet",
    "b.parq",
    "C.PARQUET",
    "notes.txt",
    "_hidden.parquet",
    ".dot.parquet",
    "_candelabra/attempts/part-00000.g0-e1-a1-x.parquet",
    "date=2024-01-01/x.parquet",
    "date=2024-01-02/x.parquet",
    "date=2024-01-02/deep/y.parquet",
    "other/z.parquet",
    "odd [1]/100%41#ü.parquet",
    "_k=1/x.parquet",
    "_temporary/x.parquet",
)
EVERYTHING = [
    "C.PARQUET",
    "_k=1/x.parquet",
    "a.parquet",
    "b.parq",
    "date=2024-01-01/x.parquet",
    "date=2024-01-02/deep/y.parquet",
    "date=2024-01-02/x.parquet",
    "odd [1]/100%41#ü.parquet",
    "other/z.parquet",
]


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    uri = str(tmp_path) if request.param == "local" else f"{request.getfixturevalue('s3_bucket')}/data"
    storage = open_storage(uri)
    for path in TREE:
        storage.write_bytes(path, b"")
    return storage


def found(root: Storage, *patterns: str) -> list[str]:
    return relative(root, (root.full_uri(pattern) for pattern in patterns))


def relative(root: Storage, uris: Iterable[str]) -> list[str]:
    return [item.storage.full_uri(item.entry.path).removeprefix(f"{root.uri}/") for item in find_files([*uris])]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", EVERYTHING),
        ("**", EVERYTHING),
        ("a.parquet", ["a.parquet"]),
        ("_hidden.parquet", ["_hidden.parquet"]),
        ("*.parquet", ["a.parquet"]),
        ("?.parq*", ["a.parquet", "b.parq"]),
        ("[ab].parq*", ["a.parquet", "b.parq"]),
        ("[!a].parq*", ["b.parq"]),
        ("_*.parquet", ["_hidden.parquet"]),
        ("date=*/x.parquet", ["date=2024-01-01/x.parquet", "date=2024-01-02/x.parquet"]),
        ("date=*/*", ["date=2024-01-01/x.parquet", "date=2024-01-02/deep/y.parquet", "date=2024-01-02/x.parquet"]),
        ("date=*2", ["date=2024-01-02/deep/y.parquet", "date=2024-01-02/x.parquet"]),
        ("**/y.parquet", ["date=2024-01-02/deep/y.parquet"]),
        ("**/*.parquet", [path for path in EVERYTHING if path.endswith(".parquet")]),
        ("date=*/**/y.parquet", ["date=2024-01-02/deep/y.parquet"]),
        ("date=*/**", EVERYTHING[4:7]),
        ("odd [1]", ["odd [1]/100%41#ü.parquet"]),
        ("odd [1]/*", ["odd [1]/100%41#ü.parquet"]),
        ("odd [1]/100%41#ü.parquet", ["odd [1]/100%41#ü.parquet"]),
        ("notes.txt", ["notes.txt"]),
    ],
)
def test_a_pattern_stands_for_these_files(root: Storage, pattern: str, expected: list[str]) -> None:
    assert found(root, pattern) == expected


def test_lists_keep_their_order_and_name_a_file_once(root: Storage) -> None:
    assert found(root, "other", "b.parq", "*.parq*", "other/z.parquet") == ["other/z.parquet", "b.parq", "a.parquet"]


@pytest.mark.parametrize("pattern", ["nothing", "nothing/*.parquet", "*.csv", "date=2025*/*", "a.parquet/x"])
def test_what_stands_for_no_file_is_named(root: Storage, pattern: str) -> None:
    with pytest.raises(NotFoundError, match="no Parquet file") as caught:
        found(root, "a.parquet", pattern)
    assert f"`{root.full_uri(pattern)}`" in str(caught.value)


def test_one_path_need_not_be_a_list(root: Storage) -> None:
    assert [item.entry.path for item in find_files(root.full_uri("*.parquet"))] == ["a.parquet"]


def test_no_path_at_all_is_an_input_error() -> None:
    with pytest.raises(InputError, match="no input path"):
        find_files([])


def test_a_relative_path_becomes_a_full_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.parquet").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    root = open_storage(str(tmp_path))
    assert relative(root, ["data/*.parquet", "./data", "data/../data/a.parquet"]) == ["data/a.parquet"]


def test_a_glob_lists_only_the_folders_it_has_to(faulty_s3: FaultyS3) -> None:
    storage = open_storage(faulty_s3.uri)
    for path in ("in/2024/a.parquet", "in/2025/b.parquet", "huge/x/y/z.parquet"):
        storage.write_bytes(path, b"")
    faulty_s3.proxy.requests.clear()
    assert relative(storage, [f"{faulty_s3.uri}/in/*/*.parquet"]) == ["in/2024/a.parquet", "in/2025/b.parquet"]
    assert not [request.path for request, _ in faulty_s3.proxy.requests if "huge" in request.path]
    listings = [request.path for request, _ in faulty_s3.proxy.requests if "list-type" in request.path]
    assert all("prefix=in%2F" in path for path in listings)
