"""hf:// locations, read through `huggingface_hub` from a small Hub on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

TABLE = pa.table({"id": range(100_000), "doc": [f"text {number}" for number in range(100_000)]})


class Hub:
    """One data set, `org/name`; the branch `main` holds `files`."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.fail_next = 0
        self.status = 503
        self.requests: list[str] = []
        hub = self

        class Handler(_Handler):
            owner = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def entry(self, path: str) -> dict[str, object]:
        data = self.files[path]
        return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def tree(self, folder: str, recursive: bool) -> list[dict[str, object]] | None:
        below = [path for path in self.files if not folder or path.startswith(f"{folder}/")]
        if folder and not below:
            return None
        direct = {path.removeprefix(f"{folder}/").split("/")[0] if folder else path.split("/")[0] for path in below}
        folders = [f"{folder}/{name}" if folder else name for name in sorted(direct)]
        return [self.entry(path) for path in below if recursive or path in folders] + [
            {"type": "directory", "path": path, "size": 0, "oid": "0"} for path in folders if path not in self.files
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Hub

    def _answer(self) -> None:
        hub, split = self.owner, urlsplit(self.path)
        path = unquote(split.path)
        posted = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append(f"{self.command} {path}")
        if hub.fail_next > 0:
            hub.fail_next -= 1
            self._send(hub.status, b"on purpose")
        elif path.startswith("/api/datasets/org/name/tree/main"):
            folder = path.removeprefix("/api/datasets/org/name/tree/main").strip("/")
            found = hub.tree(folder, "recursive=true" in split.query.lower())
            self._json(found) if found is not None else self._missing("EntryNotFound")
        elif path.startswith("/api/datasets/org/name/paths-info/main"):
            wanted = parse_qs(posted.decode())["paths"]
            self._json([hub.entry(item) for item in wanted if item in hub.files])
        elif path in ("/api/datasets/org/name", "/api/datasets/org/name/revision/main"):
            self._json({"id": "org/name", "sha": "0" * 40, "siblings": []})
        elif path.startswith("/datasets/org/name/resolve/main/"):
            self._file(hub.files.get(path.removeprefix("/datasets/org/name/resolve/main/")))
        else:
            self._missing("RepoNotFound")

    do_GET = do_HEAD = do_POST = _answer  # noqa: N815

    def _file(self, data: bytes | None) -> None:
        if data is None:
            self._missing("EntryNotFound")
            return
        ranged = self.headers.get("Range")
        headers = {"ETag": hashlib.sha1(data).hexdigest(), "X-Repo-Commit": "0" * 40}
        if ranged:
            low, high = ranged.removeprefix("bytes=").split("-")
            part = data[int(low) : int(high or len(data)) + 1]
            headers["Content-Range"] = f"bytes {low}-{int(low) + len(part) - 1}/{len(data)}"
            self._send(206, part, headers)
        else:
            self._send(200, data, headers)

    def _json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _missing(self, code: str) -> None:
        self._send(404, b"{}", {"X-Error-Code": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response_only(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def run(hub: Hub, code: str, tmp_path: Path) -> str:
    """Runs in a process of its own: the library reads its endpoint when it is imported."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    prelude = (
        "from sharding.storage import open_storage, parse_uri, split_uri; from sharding.source import list_sources\n"
        "from sharding.storage.hub import HubStorage; from sharding.storage.retry import RetryPolicy\n"
        "from sharding.errors import *\nimport pyarrow.parquet as pq\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", prelude + code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sources_on_the_hub_are_listed_and_read_by_ranges(hub: Hub, tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "x.parquet", row_group_size=10_000)
    data = (tmp_path / "x.parquet").read_bytes()
    hub.files = {"data/a b.parquet": data, "data/deep/ü.parquet": data, "README.md": b"hello", "other/x.parquet": b""}
    code = (
        "for pattern in ('hf://datasets/org/name/data', 'hf://datasets/org/name/data/*.parquet',\n"
        "                'hf://datasets/org/name@main/data/**'):\n"
        "    listing = list_sources([pattern])\n"
        "    facts = [f'{file.path} {file.rows} {len(file.row_groups)} {file.version}' for file in listing.files]\n"
        "    print(*facts, sep=';')\n"
        "folder, path = split_uri(listing.files[0].path); storage = open_storage(folder)\n"
        "assert storage.head(path).version == listing.files[0].version\n"
        "with storage.open_parquet_source(path) as source, pq.ParquetFile(source) as file:\n"
        "    print(file.read_row_group(4)['doc'][7])\n"
        "print(storage.read_bytes('README.md'))\n"
    )
    version = hashlib.sha1(data).hexdigest()
    first, second, third, row, readme = run(hub, code, tmp_path).splitlines()
    facts = f"100000 10 {version}"
    prefix = "hf://datasets/org/name"
    assert first == f"{prefix}/data/a b.parquet {facts};{prefix}/data/deep/ü.parquet {facts}"
    assert second == f"{prefix}/data/a b.parquet {facts}"
    assert third == f"{prefix}@main/data/a b.parquet {facts};{prefix}@main/data/deep/ü.parquet {facts}"
    assert row == "text 40007"
    assert readme == "b'hello'"


def test_a_failing_hub_is_tried_again_and_then_named(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"a.txt": b"hello"}
    code = (
        "location = parse_uri('hf://datasets/org/name')\n"
        "storage = HubStorage(location, RetryPolicy(initial_s=0.01, longest_s=0.02, call_tries=4))\n"
        "print(storage.read_bytes('a.txt'), storage.head('a.txt').size_bytes, len(list(storage.list())))\n"
    )
    hub.fail_next = 3
    assert run(hub, code, tmp_path) == "b'hello' 5 1\n"
    hub.fail_next = 1000
    failed = run(
        hub,
        code.replace("print(", "try: ").replace("), storage.head('a.txt').size_bytes, len(list(storage.list())))", ")")
        + "except StorageError as error: print(error)\n",
        tmp_path,
    )
    assert failed.startswith("the Hub keeps failing (")
    assert failed.endswith("`hf://datasets/org/name/a.txt`\n")


def test_what_is_missing_or_refused_is_told_apart(hub: Hub, tmp_path: Path) -> None:
    hub.files = {"data/a.parquet": b"x"}
    code = (
        "def kind(call):\n"
        "    try: call()\n"
        "    except CandelabraError as error: print(type(error).__name__, '|', error)\n"
        "storage = open_storage('hf://datasets/org/name')\n"
        "print(storage.head('data/b.parquet'), storage.exists('data'), list(storage.list('nowhere')))\n"
        "kind(lambda: storage.read_bytes('data/b.parquet'))\n"
        "kind(lambda: storage.open_parquet_source('data/b.parquet'))\n"
        "kind(lambda: list_sources(['hf://datasets/org/other']))\n"
        "kind(lambda: list_sources(['hf://datasets/org/name/data/*.csv']))\n"
        "kind(lambda: storage.write_bytes('x', b''))\n"
        "kind(lambda: storage.create('x', b''))\n"
        "kind(lambda: storage.delete('x'))\n"
    )
    first, *lines = run(hub, code, tmp_path).splitlines()
    assert first == "None False []"
    assert [line.split(" | ")[0] for line in lines] == ["NotFoundError"] * 4 + ["InputError"] * 3
    assert all("`hf://datasets/org/" in line for line in lines)


def test_refused_access_is_an_authentication_error_at_once(hub: Hub, tmp_path: Path) -> None:
    hub.fail_next, hub.status = 1000, 403
    code = (
        "try: open_storage('hf://datasets/org/name').read_bytes('a')\n"
        "except CandelabraError as error: print(type(error).__name__, error.hint)\n"
    )
    output = run(hub, code, tmp_path)
    assert output.startswith("AuthenticationError check the name")
    assert len([request for request in hub.requests if "org/name" in request]) == 1
