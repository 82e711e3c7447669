"""Object stores: a real S3 server on loopback, and a proxy in front of it that fails on purpose."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from s3_server import Fault, FaultyS3, Request, first_faults, random_faults

from sharding.errors import (
    AuthenticationError,
    DriftError,
    InputError,
    NotFoundError,
    StorageError,
)
from sharding.storage import Storage, open_storage, parse_uri
from sharding.storage.remote import RemoteStorage
from sharding.storage.retry import RetryPolicy

QUICK = RetryPolicy(initial_s=0.005, longest_s=0.02, request_timeout_s=20)
IMPATIENT = RetryPolicy(request_retries=2, call_tries=2, initial_s=0.005, longest_s=0.01, request_timeout_s=20)
LARGE = 18 * 1024 * 1024
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
def storage(s3_bucket: str) -> Storage:
    return open_storage(f"{s3_bucket}/some where/out")


@pytest.fixture
def faulty(faulty_s3: FaultyS3) -> Iterator[RemoteStorage]:
    yield RemoteStorage(parse_uri(f"{faulty_s3.uri}/out"), QUICK)
    faulty_s3.proxy.decide = lambda request: None


def put(request: Request) -> bool:
    return request.method == "PUT"


def keys(s3: FaultyS3) -> list[str]:
    """What is visible in the bucket, asked behind the proxy's back."""
    status, body = s3.server.request("GET", f"/{parse_uri(s3.uri).bucket}?list-type=2")
    assert status == 200
    return [item.split("</Key>")[0] for item in body.decode().split("<Key>")[1:]]


def large_file(folder: Path, size_bytes: int = LARGE) -> Path:
    path = folder / "part.parquet"
    with path.open("wb") as file:
        file.write(b"rows")
        file.truncate(size_bytes)
    return path


def test_an_empty_prefix_is_empty(storage: Storage) -> None:
    assert list(storage.list()) == []
    assert storage.list_folder("x").files == ()
    assert storage.head("x") is None
    with pytest.raises(NotFoundError, match="x/y"):
        storage.read_bytes("x/y")
    with pytest.raises(NotFoundError, match="x/y"):
        storage.open_parquet_source("x/y")


def test_a_missing_bucket_is_named(s3_bucket: str) -> None:
    storage = open_storage("s3://no-such-bucket-here/out")
    with pytest.raises(NotFoundError, match="`no-such-bucket-here`"):
        list(storage.list())
    with pytest.raises(NotFoundError, match="`no-such-bucket-here`"):
        storage.write_bytes("x", b"")
    with pytest.raises(NotFoundError, match="`no-such-bucket-here`"):
        storage.create("x", b"")


def test_writes_reads_and_listing(storage: Storage) -> None:
    for path in ("b", "a/z", "a/b/c", "a.x", "a0"):
        storage.write_bytes(path, path.encode())
    assert [entry.path for entry in storage.list()] == ["a.x", "a/b/c", "a/z", "a0", "b"]
    assert [entry.path for entry in storage.list("a")] == ["a/b/c", "a/z"]
    folder = storage.list_folder("a")
    assert folder.folders == ("a/b",)
    assert [entry.path for entry in folder.files] == ["a/z"]
    assert storage.read_bytes("a/z") == b"a/z"
    assert [storage.head(entry.path) for entry in storage.list()] == list(storage.list())


def test_create_writes_once(storage: Storage) -> None:
    assert storage.create("r/0.json", b"first")
    assert not storage.create("r/0.json", b"second")
    assert storage.read_bytes("r/0.json") == b"first"


def test_of_several_processes_exactly_one_creates(storage: Storage) -> None:
    code = (
        "import sys; from sharding.storage import open_storage; s = open_storage(sys.argv[1])\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(*[i for i in range(40) if s.create(f'r/{i}.json', sys.argv[2].encode())])\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, storage.uri, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in "ab"
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    wins = Counter[int]()
    for name, process in zip("ab", processes, strict=True):
        output, _ = process.communicate(timeout=60)
        for number in map(int, output.split()):
            wins[number] += 1
            assert storage.read_bytes(f"r/{number}.json") == name.encode()
    assert wins == dict.fromkeys(range(40), 1)


def test_a_move_may_be_repeated(storage: Storage) -> None:
    storage.write_bytes("attempts/a", b"rows")
    storage.move("attempts/a", "part")
    storage.move("attempts/a", "part")
    assert [entry.path for entry in storage.list()] == ["part"]
    with pytest.raises(NotFoundError, match="attempts/b"):
        storage.move("attempts/b", "other")


def test_delete_says_when_nothing_is_there_if_asked(storage: Storage) -> None:
    storage.write_bytes("a", b"")
    storage.delete("a", missing_ok=False)
    storage.delete("a")
    with pytest.raises(NotFoundError):
        storage.delete("a", missing_ok=False)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_are_literal(storage: Storage, name: str, tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2]})
    pq.write_table(table, tmp_path / "part")
    storage.publish_file(tmp_path / "part", f"dir #%20ü/{name}")
    assert [entry.path for entry in storage.list()] == [f"dir #%20ü/{name}"]
    with storage.open_parquet_source(f"dir #%20ü/{name}") as file:
        assert pq.read_table(file) == table


def test_a_name_that_no_store_takes_is_refused(storage: Storage) -> None:
    with pytest.raises(InputError, match="object name"):
        storage.write_bytes("a\tb", b"")


def test_a_storage_can_be_sent_to_another_process(storage: Storage) -> None:
    storage.write_bytes("a", b"1")
    copy = pickle.loads(pickle.dumps(storage))
    assert (copy.uri, copy.read_bytes("a")) == (storage.uri, b"1")


def test_a_large_part_is_put_in_pieces_and_read_in_ranges(faulty: RemoteStorage, faulty_s3: FaultyS3) -> None:
    local = faulty.scratch_dir() / "part.parquet"
    table = pa.table({"id": range(200_000), "wide": [os.urandom(100) for _ in range(200_000)]})
    pq.write_table(table, local, row_group_size=20_000)
    size_bytes = local.stat().st_size
    faulty.publish_file(local, "part.parquet")
    assert not local.exists()
    uploads = [request for request, _ in faulty_s3.proxy.requests if "partNumber" in request.path]
    assert len(uploads) == 2
    faulty_s3.proxy.requests.clear()
    with faulty.open_parquet_source("part.parquet") as source, pq.ParquetFile(source) as file:
        assert file.read_row_group(3) == table.slice(60_000, 20_000)
    gets = [request for request, _ in faulty_s3.proxy.requests if request.method == "GET"]
    assert 0 < len(gets) <= 6  # the footer and one row group, not the file
    assert size_bytes > 20_000_000


def test_a_read_of_many_ranges_gives_the_bytes_in_order(faulty: RemoteStorage) -> None:
    data = os.urandom(20 * 1024 * 1024 + 7)
    faulty.write_bytes("x", data)
    with faulty.open_parquet_source("x") as file:
        assert file.size() == len(data)
        file.seek(3)
        assert file.read(17 * 1024 * 1024) == data[3 : 3 + 17 * 1024 * 1024]
        assert file.read() == data[3 + 17 * 1024 * 1024 :]
        assert file.read() == b""


@pytest.mark.parametrize("kind", ["500", "503", "slow", "429", "drop", "lose"])
def test_every_operation_survives_a_failed_request(
    faulty: RemoteStorage, faulty_s3: FaultyS3, kind: Fault, tmp_path: Path
) -> None:
    def fail_once(count: int = 1) -> None:
        faulty_s3.proxy.decide = first_faults(kind, count, lambda request: True)

    fail_once()
    faulty.write_bytes("a", b"1")
    fail_once()
    assert faulty.create("b", b"2")
    fail_once()
    assert faulty.read_bytes("b") == b"2"
    fail_once()
    assert faulty.head("a") is not None
    fail_once()
    assert [entry.path for entry in faulty.list()] == ["a", "b"]
    fail_once()
    assert len(faulty.list_folder().files) == 2
    fail_once(2)
    faulty.move("a", "c")
    fail_once()
    faulty.delete("b")
    fail_once(3)
    faulty.publish_file(large_file(tmp_path), "big")
    faulty_s3.proxy.decide = lambda request: None
    assert [(entry.path, entry.size_bytes) for entry in faulty.list()] == [("big", LARGE), ("c", 1)]
    assert faulty_s3.proxy.faults >= 11


def test_a_conditional_put_whose_answer_is_lost_is_still_ours(faulty: RemoteStorage, faulty_s3: FaultyS3) -> None:
    faulty_s3.proxy.decide = first_faults("lose", 1, put)
    assert faulty.create("r/0.json", b"ours")
    assert faulty_s3.proxy.faults == 1
    faulty_s3.proxy.decide = first_faults("lose", 1, put)
    assert not faulty.create("r/0.json", b"theirs")
    assert faulty.read_bytes("r/0.json") == b"ours"


def test_a_conflict_with_a_put_that_is_under_way_is_tried_again(faulty: RemoteStorage, faulty_s3: FaultyS3) -> None:
    faulty_s3.proxy.decide = first_faults("409", 2, put)
    assert faulty.create("r/0.json", b"ours")
    assert faulty_s3.proxy.faults == 2


def test_an_answer_cut_short_is_never_taken_for_whole(faulty: RemoteStorage, faulty_s3: FaultyS3) -> None:
    data = os.urandom(300_000)
    faulty.write_bytes("x", data)
    faulty_s3.proxy.decide = first_faults("cut", 2, lambda request: request.method == "GET")
    assert faulty.read_bytes("x") == data
    faulty_s3.proxy.decide = first_faults("cut", 2, lambda request: request.method == "GET")
    with faulty.open_parquet_source("x") as file:
        assert file.read() == data
    faulty_s3.proxy.decide = first_faults("cut", 4, lambda request: "list-type" in request.path)
    assert [entry.path for entry in faulty.list()] == ["x"]
    assert faulty_s3.proxy.faults == 8


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_a_third_failing_requests_changes_nothing(
    faulty: RemoteStorage, faulty_s3: FaultyS3, seed: int, tmp_path: Path
) -> None:
    faulty_s3.proxy.decide = random_faults(seed, 1 / 3, ("503", "500", "slow", "429", "drop", "lose", "cut"))
    for number in range(10):
        local = tmp_path / "part"
        local.write_bytes(b"%d" % number * 1000)
        faulty.publish_file(local, f"attempts/{number}")
        assert faulty.create(f"receipts/{number}", b"receipt %d" % number)
        assert not faulty.create(f"receipts/{number}", b"another %d" % number)
        faulty.move(f"attempts/{number}", f"part-{number}")
        assert faulty.read_bytes(f"part-{number}") == b"%d" % number * 1000
    paths = [entry.path for entry in faulty.list()]
    assert faulty_s3.proxy.faults > 10
    assert paths == [*(f"part-{number}" for number in range(10)), *(f"receipts/{number}" for number in range(10))]
    assert all(faulty.read_bytes(f"receipts/{number}") == b"receipt %d" % number for number in range(10))


def test_a_store_that_never_answers_ends_in_a_storage_error(faulty_s3: FaultyS3) -> None:
    storage = RemoteStorage(parse_uri(f"{faulty_s3.uri}/out"), IMPATIENT)
    faulty_s3.proxy.decide = lambda request: "503"
    with pytest.raises(StorageError, match=r"503.*`s3://.*/out/a`"):
        storage.write_bytes("a", b"")
    assert len(faulty_s3.proxy.requests) == IMPATIENT.call_tries * (IMPATIENT.request_retries + 1)
    faulty_s3.proxy.decide = lambda request: "drop"
    with pytest.raises(StorageError):
        storage.create("a", b"")
    faulty_s3.proxy.decide = lambda request: None
    assert keys(faulty_s3) == []


def test_refused_access_is_an_authentication_error_at_once(faulty: RemoteStorage, faulty_s3: FaultyS3) -> None:
    faulty_s3.proxy.decide = lambda request: "403"
    with pytest.raises(AuthenticationError) as caught:
        faulty.write_bytes("a", b"")
    assert "AWS_ACCESS_KEY_ID" in str(caught.value.hint)
    assert len(faulty_s3.proxy.requests) == 1
    for call in (faulty.head, faulty.read_bytes, faulty.delete, lambda path: list(faulty.list(path))):
        with pytest.raises(AuthenticationError):
            call("a")


def test_a_failed_publish_leaves_nothing_to_read(faulty_s3: FaultyS3, tmp_path: Path) -> None:
    storage = RemoteStorage(parse_uri(f"{faulty_s3.uri}/out"), IMPATIENT)
    local = large_file(tmp_path)
    faulty_s3.proxy.decide = lambda request: "500" if "partNumber=2" in request.path else None
    with pytest.raises(StorageError, match="part-00000"):
        storage.publish_file(local, "part-00000.parquet")
    assert local.stat().st_size == LARGE  # another try is possible
    assert keys(faulty_s3) == []
    _, uploads = faulty_s3.server.request("GET", f"/{parse_uri(faulty_s3.uri).bucket}?uploads")
    assert b"<UploadId>" not in uploads  # the pieces that got through were removed
    faulty_s3.proxy.decide = lambda request: None
    storage.publish_file(local, "part-00000.parquet")
    assert keys(faulty_s3) == ["out/part-00000.parquet"]


def test_a_process_killed_in_the_middle_of_a_publish_leaves_nothing_to_read(
    faulty_s3: FaultyS3, tmp_path: Path
) -> None:
    code = (
        "import sys; from pathlib import Path; from sharding.storage import open_storage\n"
        "open_storage(sys.argv[1]).publish_file(Path(sys.argv[2]), 'part-00000.parquet')\n"
    )
    local = large_file(tmp_path)
    children: Queue[subprocess.Popen[bytes]] = Queue()

    def kill(request: Request) -> Fault | None:
        if "partNumber=2" not in request.path:
            return None
        children.get(timeout=60).send_signal(signal.SIGKILL)
        return "drop"

    faulty_s3.proxy.decide = kill
    child = subprocess.Popen([sys.executable, "-c", code, f"{faulty_s3.uri}/out", str(local)])
    children.put(child)
    assert child.wait(timeout=60) == -signal.SIGKILL
    assert any("partNumber" in request.path for request, _ in faulty_s3.proxy.requests)
    assert keys(faulty_s3) == []


def test_a_part_too_large_to_be_promoted_is_refused_before_it_is_sent(
    faulty: RemoteStorage, faulty_s3: FaultyS3, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="more than S3 copies") as caught:
        faulty.publish_file(large_file(tmp_path, 5 * 1024**3 + 1), "x")
    assert "target_rows" in str(caught.value.hint)
    with pytest.raises(StorageError, match="gone"):
        faulty.publish_file(tmp_path / "nothing", "x")
    assert faulty_s3.proxy.requests == []


def test_small_reads_in_a_row_are_one_request(faulty: RemoteStorage, faulty_s3: FaultyS3) -> None:
    data = os.urandom(600_000)
    faulty.write_bytes("x", data)
    with faulty.open_parquet_source("x") as file:
        faulty_s3.proxy.requests.clear()
        assert b"".join(file.read(1000) for _ in range(200)) == data[:200_000]
        assert len(faulty_s3.proxy.requests) == 1
        file.seek(590_000)
        assert file.read(100_000) == data[590_000:]


def test_a_file_replaced_while_it_is_read_is_drift(faulty: RemoteStorage, tmp_path: Path) -> None:
    table = pa.table({"id": range(100_000)})
    pq.write_table(table, tmp_path / "a", row_group_size=10_000)
    pq.write_table(table.slice(1), tmp_path / "b", row_group_size=10_000)
    faulty.write_bytes("x", (tmp_path / "a").read_bytes())
    with faulty.open_parquet_source("x") as source, pq.ParquetFile(source) as file:
        assert file.read_row_group(0).num_rows == 10_000
        faulty.write_bytes("x", (tmp_path / "b").read_bytes())
        with pytest.raises(DriftError, match="replaced"):
            file.read_row_group(9)


def test_a_store_error_passes_through_the_parquet_reader(faulty_s3: FaultyS3, tmp_path: Path) -> None:
    storage = RemoteStorage(parse_uri(f"{faulty_s3.uri}/out"), IMPATIENT)
    pq.write_table(pa.table({"id": range(100_000)}), tmp_path / "a", row_group_size=10_000)
    storage.write_bytes("x", (tmp_path / "a").read_bytes())
    with storage.open_parquet_source("x") as source, pq.ParquetFile(source) as file:
        faulty_s3.proxy.decide = lambda request: "503"
        with pytest.raises(StorageError):
            file.read_row_group(3)


def test_scratch_of_a_killed_process_is_removed_by_the_next(s3_bucket: str, tmp_path: Path) -> None:
    code = (
        "import os, sys, signal; from sharding.storage import open_storage\n"
        "folder = open_storage(sys.argv[1]).scratch_dir(); (folder / 'half-a-part').write_bytes(b'x')\n"
        "print(folder, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == 'die' else sys.stdin.readline()\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    def start(what: str) -> subprocess.Popen[str]:
        arguments = [sys.executable, "-c", code, s3_bucket, what]
        return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    with start("die") as dead, start("live") as alive:
        assert dead.stdout is not None
        assert alive.stdout is not None
        gone, kept = Path(dead.stdout.readline().strip()), Path(alive.stdout.readline().strip())
        dead.wait(timeout=60)
        with start("live") as later:
            assert later.stdout is not None
            assert Path(later.stdout.readline().strip()).is_dir()
            assert not gone.exists()
            assert (kept / "half-a-part").exists()
            for process in (alive, later):
                process.communicate("end\n", timeout=60)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("uri", "variables"),
    [
        ("gs://bucket/out", {"GOOGLE_SKIP_SIGNATURE": "true"}),
        ("az://container/out", {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_SKIP_SIGNATURE": "true"}),
    ],
)
def test_other_clouds_open_without_a_request(
    uri: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert open_storage(uri).uri == uri
