"""A real S3 server on loopback, and a proxy in front of it that fails on purpose. A helper of tests; tests nothing.

Fixtures (import them in `conftest.py`): `s3_server`, `s3_bucket`, `faulty_s3`.

The server is moto in a process of its own. Its requests run one after the other, so that a conditional put is atomic,
as it is in real stores. The proxy runs in the test's process and decides for each request what happens to it.
"""

from __future__ import annotations

import http.client
import os
import random
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

import pytest

Fault = Literal["500", "503", "429", "409", "403", "drop", "lose", "cut", "slow"]
"""What happens to a request: an answer of that status without asking the server; `drop`: the connection is closed
before the server sees the request; `lose`: the server does it, the answer is lost; `cut`: half of the answer's body;
`slow`: the server answers 503 with the code S3 uses for throttling."""

_SERVER = """
import sys, threading
from werkzeug.serving import make_server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app

class Handler(MotoRequestHandler):
    def log(self, *arguments):
        pass

application = DomainDispatcherApplication(create_backend_app)
lock = threading.Lock()

def one_at_a_time(environ, start_response):
    with lock:
        return [b"".join(application(environ, start_response))]

server = make_server("127.0.0.1", 0, one_at_a_time, threaded=True, request_handler=Handler)
print(server.server_port, flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
"""


@dataclass
class S3Server:
    """The running server. It ends when `process.stdin` is closed, so also when the test process dies."""

    process: subprocess.Popen[str]
    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """One plain request, past any proxy: (status, body)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body=body, headers={"Authorization": _CREDENTIAL})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def stop(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait(timeout=30)
        if self.process.stdout:
            self.process.stdout.close()


_CREDENTIAL = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


def start_server() -> S3Server:
    """Starts a server with no buckets, on a free port."""
    environment = {**os.environ, "MOTO_S3_CUSTOM_ENDPOINTS": "", "AWS_ACCESS_KEY_ID": "test"}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.strip().isdecimal():
        raise RuntimeError("the S3 server did not start")
    return S3Server(process, int(line))


@dataclass
class Request:
    """What the proxy knows when it decides: `number` counts from 0 over all requests."""

    method: str
    path: str
    number: int
    body: bytes = field(repr=False)


Decide = Callable[[Request], Fault | None]


def random_faults(seed: int, rate: float, kinds: tuple[Fault, ...] = ("503", "500", "slow", "drop")) -> Decide:
    """Lets each request fail with probability `rate`."""
    source, lock = random.Random(seed), threading.Lock()

    def decide(request: Request) -> Fault | None:
        with lock:
            return source.choice(kinds) if source.random() < rate else None

    return decide


def first_faults(kind: Fault, count: int, match: Callable[[Request], bool]) -> Decide:
    """Lets the first `count` requests that match fail, and no other."""
    left, lock = [count], threading.Lock()

    def decide(request: Request) -> Fault | None:
        with lock:
            if left[0] > 0 and match(request):
                left[0] -= 1
                return kind
        return None

    return decide


class FaultyProxy:
    """Forwards to the server, except where `decide` says otherwise. Give it another `decide` at any time."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.decide: Decide = lambda request: None
        self.requests: list[tuple[Request, Fault | None]] = []
        self._lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def faults(self) -> int:
        """How many requests have failed on purpose."""
        return sum(fault is not None for _, fault in self.requests)

    def rule(self, method: str, path: str, body: bytes) -> Fault | None:
        with self._lock:
            request = Request(method, path, len(self.requests), body)
            fault = self.decide(request)
            self.requests.append((request, fault))
            return fault

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=30)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: FaultyProxy

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # the client gave up
            self.close_connection = True
            return
        fault = self.owner.rule(self.command, self.path, body)
        if fault is None or fault in ("lose", "cut"):
            status, headers, content = self._forward(body)
            if fault == "lose":
                self.close_connection = True
                return
            self._reply(status, headers, content, cut=fault == "cut" and len(content) > 1)
        elif fault == "drop":
            self.close_connection = True
        else:
            status, code = (503, "SlowDown") if fault == "slow" else (int(fault), "InternalError")
            content = f"<Error><Code>{code}</Code><Message>on purpose</Message></Error>".encode()
            self._reply(status, [("Content-Type", "application/xml")], content, cut=False)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer  # noqa: N815

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.owner.target_port, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "connection":
                    connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            connection.close()

    def _reply(self, status: int, headers: list[tuple[str, str]], content: bytes, *, cut: bool) -> None:
        self.send_response_only(status)
        length = next((value for name, value in headers if name.lower() == "content-length"), str(len(content)))
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        pass


@dataclass
class FaultyS3:
    """What the fixture `faulty_s3` gives: `uri` is reached through `proxy`, `server` is behind it."""

    uri: str
    proxy: FaultyProxy
    server: S3Server


def point_environment(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Sets the usual variables, so that S3 clients of this process and its children talk to `endpoint`."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One server for the whole run."""
    server = start_server()
    yield server
    server.stop()


@pytest.fixture
def s3_bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """`s3://` location of a new, empty bucket; the environment points to the server."""
    point_environment(monkeypatch, s3_server.endpoint)
    return _new_bucket(s3_server)


@pytest.fixture
def faulty_s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """A new bucket behind a proxy that forwards everything until its `decide` is set."""
    proxy = FaultyProxy(s3_server.port)
    point_environment(monkeypatch, proxy.endpoint)
    yield FaultyS3(_new_bucket(s3_server), proxy, s3_server)
    proxy.stop()


def _new_bucket(server: S3Server) -> str:
    name = f"bucket-{secrets.token_hex(6)}"
    status, body = server.request("PUT", f"/{name}")
    assert status == 200, body
    return f"s3://{name}"
