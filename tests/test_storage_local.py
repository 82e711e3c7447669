"""Local storage: atomic writes, one winner, listing, errors by kind."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sharding.errors import (
    AuthenticationError,
    DiskFullError,
    InfrastructureError,
    NotFoundError,
    StorageError,
)
from sharding.storage import Storage, open_storage, translate_os_error
from sharding.storage.local import LocalStorage

ODD_NAMES = (
    "a b.parquet",
    "ü-日本.parquet",
    "x#y.parquet",
    "100%41.parquet",
    "k=v.parquet",
    "q?&+.parquet",
    "[z]*.parquet",
)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "out"))


def left_over(storage: Storage) -> list[Path]:
    assert storage.local_root is not None
    return [path for path in storage.local_root.rglob("*") if path.name.endswith(".tmp")]


def test_a_storage_that_does_not_exist_is_empty(storage: Storage) -> None:
    assert list(storage.list()) == []
    assert storage.list_folder("x").files == ()
    assert storage.head("x") is None
    assert not storage.exists("x/y")
    with pytest.raises(NotFoundError, match="x/y"):
        storage.read_bytes("x/y")


def test_writes_replace_and_leave_nothing_behind(storage: Storage) -> None:
    storage.write_bytes("a/b.json", b"one")
    storage.write_bytes("a/b.json", b"two")
    assert storage.read_bytes("a/b.json") == b"two"
    assert [entry.path for entry in storage.list()] == ["a/b.json"]
    assert left_over(storage) == []


def test_a_reader_sees_the_old_content_or_the_new_never_a_part(storage: Storage) -> None:
    sizes = (100_000, 200_000)
    code = (
        "import sys; from sharding.storage import open_storage; s = open_storage(sys.argv[1])\n"
        "print('ready', flush=True)\n"
        "for i in range(100): s.write_bytes('x', bytes([i % 2 + 1]) * (100_000, 200_000)[i % 2])\n"
    )
    storage.write_bytes("x", b"\x01" * sizes[0])
    with subprocess.Popen([sys.executable, "-c", code, storage.uri], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        seen = Counter()  # type: ignore[var-annotated]
        while writer.poll() is None:
            data = storage.read_bytes("x")
            seen[len(data), data[0], data.count(data[0]) == len(data)] += 1
    assert writer.returncode == 0
    assert set(seen) <= {(sizes[0], 1, True), (sizes[1], 2, True)}


def test_create_writes_once(storage: Storage) -> None:
    assert storage.create("receipts/00000.json", b"first")
    assert not storage.create("receipts/00000.json", b"second")
    assert storage.read_bytes("receipts/00000.json") == b"first"
    assert left_over(storage) == []


def test_create_has_one_winner_without_hard_links_too(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    assert storage.create("a.json", b"first")
    assert not storage.create("a.json", b"second")
    assert storage.read_bytes("a.json") == b"first"


def test_of_several_processes_exactly_one_creates(storage: Storage) -> None:
    code = (
        "import sys; from sharding.storage import open_storage; s = open_storage(sys.argv[1])\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(*[i for i in range(100) if s.create(f'r/{i}.json', sys.argv[2].encode() * 1000)])\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, storage.uri, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in "abc"
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    wins = Counter[int]()
    for process in processes:  # all are waiting: let them go
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for name, process in zip("abc", processes, strict=True):
        output, _ = process.communicate(timeout=60)
        for number in map(int, output.split()):
            wins[number] += 1
            assert storage.read_bytes(f"r/{number}.json") == name.encode() * 1000
    assert wins == dict.fromkeys(range(100), 1)


def test_a_link_whose_answer_was_lost_is_still_ours(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Path.hardlink_to

    def lose_answer(path: Path, target: Path) -> None:
        link(path, target)
        raise FileExistsError(errno.EEXIST, "as NFS says when it repeats a request")

    monkeypatch.setattr(Path, "hardlink_to", lose_answer)
    assert storage.create("a.json", b"first")
    assert not storage.create("a.json", b"second")


def test_publishing_is_a_rename_on_the_same_device(storage: Storage) -> None:
    local = storage.scratch_dir() / "part.parquet"
    local.write_bytes(b"rows")
    inode = local.stat().st_ino
    storage.publish_file(local, "attempts/a.parquet")
    assert not local.exists()
    assert storage.local_root is not None
    assert (storage.local_root / "attempts/a.parquet").stat().st_ino == inode


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second device")
def test_publishing_across_devices_copies_whole(storage: Storage, tmp_path: Path) -> None:
    local = Path("/dev/shm") / f"candelabra-test-{os.getpid()}"
    try:
        if local.parent.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("the temporary folder is on the same device")
        local.write_bytes(b"rows" * 1000)
        storage.publish_file(local, "a.parquet")
        assert storage.read_bytes("a.parquet") == b"rows" * 1000
        assert not local.exists()
        assert left_over(storage) == []
    finally:
        local.unlink(missing_ok=True)


def test_a_file_that_is_not_there_cannot_be_published(storage: Storage, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nothing"):
        storage.publish_file(tmp_path / "nothing", "a")


def test_a_move_may_be_repeated(storage: Storage) -> None:
    storage.write_bytes("attempts/a", b"rows")
    storage.move("attempts/a", "part")
    storage.move("attempts/a", "part")
    assert storage.read_bytes("part") == b"rows"
    with pytest.raises(NotFoundError, match="attempts/b"):
        storage.move("attempts/b", "other")


def test_delete_says_when_nothing_is_there_if_asked(storage: Storage) -> None:
    storage.write_bytes("a", b"")
    storage.delete("a", missing_ok=False)
    storage.delete("a")
    with pytest.raises(NotFoundError):
        storage.delete("a", missing_ok=False)


def test_listing_is_recursive_sorted_and_hides_scratch_files(storage: Storage) -> None:
    for path in ("b", "a/z", "a/b/c", "a.x", "a0", "_candelabra/plan.json"):
        storage.write_bytes(path, b"123")
    (storage.scratch_dir() / "half-a-part").write_bytes(b"")
    assert [entry.path for entry in storage.list()] == ["_candelabra/plan.json", "a.x", "a/b/c", "a/z", "a0", "b"]
    assert [entry.path for entry in storage.list("a")] == ["a/b/c", "a/z"]
    folder = storage.list_folder("a")
    assert folder.folders == ("a/b",)
    assert [entry.path for entry in folder.files] == ["a/z"]


def test_a_pipe_is_no_file(storage: Storage) -> None:
    storage.write_bytes("a", b"")
    assert storage.local_root is not None
    os.mkfifo(storage.local_root / "pipe")
    assert [entry.path for entry in storage.list()] == ["a"]
    assert storage.head("pipe") is None


def test_listing_survives_loops_and_dangling_links(storage: Storage) -> None:
    storage.write_bytes("a/b/c", b"")
    assert storage.local_root is not None
    (storage.local_root / "a/b/loop").symlink_to(storage.local_root / "a")
    (storage.local_root / "a/gone").symlink_to(storage.local_root / "nowhere")
    assert [entry.path for entry in storage.list()] == ["a/b/c"]


def test_the_version_changes_with_the_content(storage: Storage) -> None:
    storage.write_bytes("a", b"1")
    before = storage.head("a")
    storage.write_bytes("a", b"2")
    after = storage.head("a")
    assert before is not None
    assert after is not None
    assert before.version != after.version
    assert [after] == list(storage.list())


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_are_literal(storage: Storage, name: str) -> None:
    path = f"dir #%20ü/{name}"
    table = pa.table({"a": [1, 2]})
    local = storage.scratch_dir() / "part"
    pq.write_table(table, local)
    storage.publish_file(local, path)
    assert [entry.path for entry in storage.list()] == [path]
    with storage.open_parquet_source(path) as file:
        assert pq.read_table(file) == table


def test_a_storage_can_be_sent_to_another_process(storage: Storage) -> None:
    storage.write_bytes("a", b"1")
    copy = pickle.loads(pickle.dumps(storage))
    assert copy.uri == storage.uri
    assert copy.read_bytes("a") == b"1"


def test_clearing_scratch_removes_what_dead_workers_left(storage: Storage) -> None:
    (storage.scratch_dir() / "half-a-part").write_bytes(b"x")
    storage.clear_scratch()
    assert not any(storage.scratch_dir().iterdir())


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, DiskFullError),
        (errno.EDQUOT, DiskFullError),
        (errno.EACCES, AuthenticationError),
        (errno.EROFS, InfrastructureError),
        (errno.ENOENT, NotFoundError),
        (errno.EIO, StorageError),
    ],
)
def test_errors_are_told_apart_by_type(number: int, kind: type[Exception]) -> None:
    error = translate_os_error(OSError(number, os.strerror(number)), "/x/part")
    assert type(error) is kind
    assert "`/x/part`" in str(error)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_stops_the_job(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_full(path: Path, mode: str) -> IO[bytes]:
        return open("/dev/full", "wb")

    scratch = storage.scratch_dir()
    monkeypatch.setattr(LocalStorage, "_temporary_path", lambda self: scratch / "full")
    monkeypatch.setattr("sharding.storage.local.open", open_full, raising=False)
    with pytest.raises(DiskFullError, match="no space left"):
        storage.write_bytes("a", b"x" * 100_000)
    with pytest.raises(DiskFullError, match="no space left"):
        storage.create("b", b"x" * 100_000)
    assert list(storage.list()) == []


def test_a_file_where_a_folder_should_be_is_reported(storage: Storage) -> None:
    storage.write_bytes("a", b"")
    with pytest.raises(StorageError, match="a/b"):
        storage.write_bytes("a/b", b"")
    assert storage.head("a/b") is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_reported(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(AuthenticationError):
        open_storage(str(tmp_path / "out")).write_bytes("a", b"")
