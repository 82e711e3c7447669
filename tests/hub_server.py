"""A small Hub on loopback: enough of its protocol for `huggingface_hub`, and faults that a test asks for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlsplit

_LFS_SUFFIXES = (".safetensors", ".bin")


@dataclass
class Repository:
    """A model repository: files by commit, and branches or tags that name commits."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    token: str | None = None

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit that a branch points to from now on."""
        content = json.dumps({name: hashlib.sha1(data).hexdigest() for name, data in files.items()})
        sha = hashlib.sha1(f"{content}{len(self.commits)}".encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        return sha

    def find(self, revision: str) -> str | None:
        sha = self.branches.get(revision, revision)
        return sha if sha in self.commits else None


class HubServer:
    """Serves repositories until closed.

    Attributes:
        repositories: By id, such as `org/name`.
        fail: Statuses to answer with, in order, before anything is served.
        cut: By file name: drop the connection after so many bytes, once.
        hold: By file name: send half, set the first event, and go on when the second is set, once.
        sent_bytes: Body bytes sent, by file name.
        gets: GET requests of file contents, by file name.
        ranges: Range headers asked for, by file name.
        requests: Method and path of every request.
        on_request: Called with each of them.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.fail: list[int] = []
        self.cut: dict[str, int] = {}
        self.hold: dict[str, tuple[threading.Event, threading.Event]] = {}
        self.sent_bytes: Counter[str] = Counter()
        self.gets: Counter[str] = Counter()
        self.ranges: dict[str, list[str]] = {}
        self.requests: list[str] = []
        self.on_request: Callable[[str], object] = lambda request: None
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        """Address of the server, for `HF_ENDPOINT`."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def add(self, repository_id: str, files: Mapping[str, bytes], **kind: bool | str) -> Repository:
        """Add a repository with one commit on `main`."""
        repository = Repository(**kind)  # type: ignore[arg-type]
        repository.commit(files)
        self.repositories[repository_id] = repository
        return repository

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        pass

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {path}")
            asks_repository = path.startswith("api/models/") or "/resolve/" in path
            status = self.hub.fail.pop(0) if self.hub.fail and asks_repository else None
        self.hub.on_request(f"{self.command} {path}")
        if status is not None:
            return self._error(status, "")
        parts = path.split("/")
        if parts[:2] == ["api", "models"]:
            return self._serve_api("/".join(parts[2:4]), parts[4:])
        if len(parts) > 4 and parts[2] == "resolve":
            return self._serve_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        return self._error(404, "RepoNotFound")

    def _allowed(self, repository_id: str, *, content: bool) -> Repository | None:
        repository = self.hub.repositories.get(repository_id)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository is None or (repository.token and not token):
            self._error(401, "RepoNotFound")
        elif repository.token and token != repository.token:
            self._error(401, "", "Invalid credentials in Authorization header")
        elif repository.gated and content:
            self._error(403 if token else 401, "GatedRepo")
        else:
            return repository
        return None

    def _serve_api(self, repository_id: str, rest: list[str]) -> None:
        repository = self._allowed(repository_id, content=False)
        if repository is None:
            return None
        sha = repository.find(rest[1] if len(rest) > 1 else "main")
        if sha is None:
            return self._error(404, "RevisionNotFound")
        files = repository.commits[sha]
        if rest[:1] == ["tree"]:
            return self._send_json([_tree_entry(name, data) for name, data in sorted(files.items())])
        siblings = [{"rfilename": name} for name in sorted(files)]
        return self._send_json({"id": repository_id, "modelId": repository_id, "sha": sha, "siblings": siblings})

    def _serve_file(self, repository_id: str, revision: str, name: str) -> None:
        repository = self._allowed(repository_id, content=True)
        if repository is None:
            return None
        sha = repository.find(revision)
        if sha is None:
            return self._error(404, "RevisionNotFound")
        data = repository.commits[sha].get(name)
        if data is None:
            return self._error(404, "EntryNotFound")
        start = self._range_start(name)
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", sha)
        self.send_header("ETag", f'"{_etag(name, data)}"')
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            self._send_body(name, data[start:])
        return None

    def _range_start(self, name: str) -> int:
        asked = self.headers.get("Range")
        if asked is None or self.command != "GET":
            return 0
        with self.hub.lock:
            self.hub.ranges.setdefault(name, []).append(asked)
        return int(asked.removeprefix("bytes=").partition("-")[0])

    def _send_body(self, name: str, body: bytes) -> None:
        with self.hub.lock:
            self.hub.gets[name] += 1
            stop = self.hub.cut.pop(name, None)
            hold = self.hub.hold.pop(name, None)
            self.hub.sent_bytes[name] += len(body[:stop])
        if hold is not None:
            self.wfile.write(body[: len(body) // 2])
            body = body[len(body) // 2 :]
            hold[0].set()
            hold[1].wait(60)
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body[:stop])
        if stop is not None:
            self.close_connection = True

    def _send_json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _error(self, status: int, code: str, message: str = "") -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if message:
            self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(name: str, data: bytes) -> str:
    if name.endswith(_LFS_SUFFIXES):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _tree_entry(name: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": _etag(name, data)}
    if name.endswith(_LFS_SUFFIXES):
        entry["lfs"] = {"oid": _etag(name, data), "size": len(data), "pointerSize": 130}
    return entry
