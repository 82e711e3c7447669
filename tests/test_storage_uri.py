"""Location strings: parsing, comparing, splitting."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sharding.errors import InputError
from sharding.storage import is_inside, open_storage, parse_uri, same_location, split_uri
from sharding.storage.uri import Location


@pytest.mark.parametrize(
    ("uri", "scheme", "bucket", "key"),
    [
        ("s3://bucket/a/b", "s3", "bucket", "a/b"),
        ("s3a://bucket/a/", "s3", "bucket", "a"),
        ("S3://bucket", "s3", "bucket", ""),
        ("s3://bucket/", "s3", "bucket", ""),
        ("gs://bucket/a b/#x%20=ü.parquet", "gs", "bucket", "a b/#x%20=ü.parquet"),
        ("az://container/x", "az", "container", "x"),
        ("hf://datasets/org/name/data", "hf", "datasets/org/name", "data"),
        ("hf://datasets/org/name@v1.0/data", "hf", "datasets/org/name@v1.0", "data"),
        (
            "hf://datasets/o/n@refs/convert/parquet/x/0.parquet",
            "hf",
            "datasets/o/n@refs/convert/parquet",
            "x/0.parquet",
        ),
        ("hf://datasets/o/n@refs%2Fconvert%2Fparquet/x", "hf", "datasets/o/n@refs%2Fconvert%2Fparquet", "x"),
        ("hf://org/model/x", "hf", "org/model", "x"),
        ("file:///tmp/a%20b/%23", "file", "", "/tmp/a b/#"),
        ("file://localhost/tmp/x/", "file", "", "/tmp/x"),
        ("/tmp/a%20b/../c#", "file", "", "/tmp/c#"),
        ("/", "file", "", "/"),
    ],
)
def test_locations_are_parsed(uri: str, scheme: str, bucket: str, key: str) -> None:
    assert parse_uri(uri) == Location(scheme, bucket, key)


def test_relative_and_home_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert parse_uri("out/x").uri == str(tmp_path / "out/x")
    assert parse_uri("~/x").uri == "/home/someone/x"
    assert open_storage("out").uri == str(tmp_path / "out")


@pytest.mark.parametrize(
    ("uri", "part"),
    [
        ("", "empty"),
        ("ftp://host/x", "`ftp`"),
        ("s3://", "incomplete"),
        ("s3://bucket//x", "incomplete"),
        ("s3://bucket/a/../b", "`..`"),
        ("hf://datasets/org", "incomplete"),
        ("file://host/x", "absolute"),
        ("a\0b", "null character"),
    ],
)
def test_a_malformed_location_is_refused_by_name(uri: str, part: str) -> None:
    with pytest.raises(InputError, match=part):
        parse_uri(uri)


def test_the_same_place_is_recognised_however_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert same_location(str(tmp_path / "link/x"), f"file://{tmp_path}/real/./x/")
    assert same_location("s3://bucket/x/", "s3a://bucket/x")
    assert not same_location("s3://bucket/x", "s3://bucket/X")
    assert not same_location("s3://bucket/x", "gs://bucket/x")


def test_inside_means_whole_segments(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data")
    assert is_inside(str(tmp_path / "link/out"), str(tmp_path / "data"))
    assert is_inside(str(tmp_path), str(tmp_path))
    assert is_inside("/x", "/")
    assert not is_inside(str(tmp_path / "data-2"), str(tmp_path / "data"))
    assert is_inside("s3://bucket/a/b", "s3://bucket")
    assert is_inside("s3://bucket/a/b", "s3://bucket/a/")
    assert not is_inside("s3://bucket/ab", "s3://bucket/a")
    assert not is_inside("s3://other/a/b", "s3://bucket/a")
    assert not is_inside("/bucket/a/b", "s3://bucket/a")


def test_a_location_splits_into_what_can_be_opened_and_the_rest() -> None:
    assert split_uri("/tmp/a#b/c%20.parquet") == ("/tmp/a#b", "c%20.parquet")
    assert split_uri("/c.parquet") == ("/", "c.parquet")
    assert split_uri("s3://bucket/a/c.parquet") == ("s3://bucket", "a/c.parquet")
    assert split_uri("hf://datasets/org/name@v1/a/c.parquet") == ("hf://datasets/org/name@v1", "a/c.parquet")


def test_full_locations_lead_back_to_the_file(tmp_path: Path) -> None:
    name = os.fsdecode("ü #%41=1.parquet")
    (tmp_path / name).write_bytes(b"x")
    storage = open_storage(str(tmp_path))
    folder, path = split_uri(storage.full_uri(name))
    assert open_storage(folder).read_bytes(path) == b"x"
