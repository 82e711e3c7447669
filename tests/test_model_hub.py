"""Models from a Hub: a real client in processes of its own, a small server on loopback."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer
from model_folders import GOLDEN

from workers.model.digest import digest_model

_CODE = """
import json, logging, sys
logging.disable(logging.WARNING)
from sharding.errors import CandelabraError
from workers.model import hub
from workers.model.resolve import resolve_model
hub._RETRY_WAITS_S = (0.01, 0.01, 0.01)
source, revision, offline = sys.argv[1:]
try:
    found = resolve_model(source, revision or None, offline=True if offline else None)
    print(json.dumps({"path": str(found.path), "revision": found.revision, "digest": found.digest}))
except CandelabraError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error), "hint": error.hint}))
"""


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def files() -> dict[str, bytes]:
    folder = GOLDEN / "st-mean-dense"
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: data for name, data in found.items() if name not in ("texts.json", "expected.safetensors")}


class Client:
    """Resolves models in processes that share one cache."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def start(
        self, source: str, revision: str = "", *, offline: bool = False, **environment: str
    ) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        return subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _CODE, source, revision, "yes" if offline else ""],
            env=kept | {"HF_HOME": str(self._home)} | environment,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )

    def resolve(self, source: str, revision: str = "", *, offline: bool = False, **environment: str) -> dict[str, str]:
        process = self.start(source, revision, offline=offline, **environment)
        return self.finish(process)

    def finish(self, process: subprocess.Popen[str]) -> dict[str, str]:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        answer: dict[str, str] = json.loads(output)
        return answer


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path / "home")


def _repository_requests(hub: HubServer) -> list[str]:
    return [request for request in hub.requests if "org/" in request]


def _wants_weights(request: str) -> bool:
    return request.endswith("/model.safetensors") and "2_Dense" not in request


def test_a_hub_model_is_fetched_from_the_mirror_pinned_to_a_commit_and_without_other_weights(
    hub: HubServer, client: Client, files: dict[str, bytes]
) -> None:
    others = ["README.md", "pytorch_model.bin", "model.fp16.safetensors", "onnx/model.onnx", "onnx/config.json"]
    repository = hub.add("org/model", files | dict.fromkeys(others, b"other"))
    found = client.resolve("org/model", HF_ENDPOINT=hub.url)
    assert found["revision"] == repository.branches["main"]
    path = Path(found["path"])
    assert sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()) == sorted(files)
    assert found["digest"] == digest_model(GOLDEN / "st-mean-dense"), "the same files have the same digest anywhere"


def test_a_planned_commit_outlives_its_branch_and_asks_the_hub_nothing(
    hub: HubServer, client: Client, files: dict[str, bytes]
) -> None:
    repository = hub.add("org/model", files)
    planned = client.resolve("org/model", "main", HF_ENDPOINT=hub.url)
    repository.commit(files | {"config.json": files["config.json"] + b"\n"})
    repository.commit(files, branch="v1")
    hub.requests.clear()
    assert client.resolve("org/model", planned["revision"], HF_ENDPOINT=hub.url) == planned
    assert _repository_requests(hub) == []
    moved = client.resolve("org/model", "main", HF_ENDPOINT=hub.url)
    assert moved["revision"] != planned["revision"]
    assert moved["digest"] != planned["digest"]
    assert client.resolve("org/model", "v1", HF_ENDPOINT=hub.url)["digest"] == planned["digest"]


def test_offline_the_cache_is_used_and_nobody_is_asked(hub: HubServer, client: Client, files: dict[str, bytes]) -> None:
    hub.add("org/model", files)
    online = client.resolve("org/model", HF_ENDPOINT=hub.url)
    hub.requests.clear()
    assert client.resolve("org/model", HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1") == online
    assert client.resolve("org/model", offline=True, HF_ENDPOINT=hub.url) == online
    assert client.resolve("org/model", online["revision"], offline=True, HF_ENDPOINT=hub.url) == online
    for switch in ({"HF_HUB_OFFLINE": "1"}, {"offline": True}):
        missing = client.resolve("org/other", HF_ENDPOINT=hub.url, **switch)  # type: ignore[arg-type]
        assert missing["error"] == "NotFoundError"
        assert "the cache does not hold the whole model" in missing["message"]
    assert hub.requests == []


def test_a_connection_cut_in_the_middle_is_resumed_where_it_broke(
    hub: HubServer, client: Client, files: dict[str, bytes]
) -> None:
    weights = random.Random(0).randbytes(14_000_000)
    hub.add("org/model", files | {"model.safetensors": weights})
    hub.cut["model.safetensors"] = 12_000_000
    found = client.resolve("org/model", HF_ENDPOINT=hub.url)
    assert (Path(found["path"]) / "model.safetensors").read_bytes() == weights
    assert len(hub.ranges["model.safetensors"]) == 1
    assert not hub.ranges["model.safetensors"][0].startswith("bytes=0-")
    assert hub.sent_bytes["model.safetensors"] < 2 * len(weights)


def test_a_process_killed_in_the_middle_leaves_nothing_half_fetched(
    hub: HubServer, client: Client, files: dict[str, bytes]
) -> None:
    hub.add("org/model", files)
    half_sent, go_on = threading.Event(), threading.Event()
    hub.hold["model.safetensors"] = (half_sent, go_on)
    process = client.start("org/model", HF_ENDPOINT=hub.url)
    assert half_sent.wait(60)
    process.kill()
    process.communicate()
    go_on.set()
    offline = client.resolve("org/model", offline=True, HF_ENDPOINT=hub.url)
    assert offline["error"] == "NotFoundError"
    found = client.resolve("org/model", HF_ENDPOINT=hub.url)
    assert found["digest"] == digest_model(GOLDEN / "st-mean-dense")
    assert hub.gets["tokenizer.json"] == 1, "what had arrived whole is not fetched again"


def test_two_processes_that_want_one_model_fetch_it_once(
    hub: HubServer, client: Client, files: dict[str, bytes]
) -> None:
    hub.add("org/model", files)
    half_sent, go_on = threading.Event(), threading.Event()
    hub.hold["model.safetensors"] = (half_sent, go_on)
    first = client.start("org/model", HF_ENDPOINT=hub.url)
    assert half_sent.wait(60)
    wants = threading.Event()
    hub.on_request = lambda request: wants.set() if _wants_weights(request) else None
    second = client.start("org/model", HF_ENDPOINT=hub.url)
    assert wants.wait(60), "the second process asks for the file that the first one is fetching"
    go_on.set()
    assert client.finish(first) == client.finish(second)
    assert set(hub.gets.values()) == {1}


def test_a_model_in_shards_brings_exactly_the_files_its_index_names(
    hub: HubServer, client: Client, files: dict[str, bytes]
) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    shards = {name: name.encode() for name in index["weight_map"].values()}
    rest = {name: data for name, data in files.items() if name != "model.safetensors"}
    index_file = {"model.safetensors.index.json": json.dumps(index).encode()}
    hub.add("org/model", rest | shards | index_file | {"model-3.safetensors": b"old"})
    path = Path(client.resolve("org/model", HF_ENDPOINT=hub.url)["path"])
    assert sorted(p.name for p in path.glob("model*")) == [
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
    ]


def test_a_model_with_pickled_weights_only_tells_how_to_convert_it(
    hub: HubServer, client: Client, files: dict[str, bytes]
) -> None:
    rest = {name: data for name, data in files.items() if name != "model.safetensors"}
    hub.add("org/model", rest | {"pytorch_model.bin": b"pickle"})
    found = client.resolve("org/model", HF_ENDPOINT=hub.url)
    assert found["error"] == "ModelError"
    assert found["message"] == "the Hub model has no weights in safetensors, only pytorch_model.bin: `org/model`"
    assert "candelabra convert" in found["hint"]
    assert hub.gets["pytorch_model.bin"] == 0


def test_unknown_repositories_and_revisions_are_not_found(
    hub: HubServer, client: Client, files: dict[str, bytes]
) -> None:
    hub.add("org/model", files)
    hub.add("org/private", files, token="hf_right")
    expected = {
        ("org/nothing", ""): "the Hub knows no such model: `org/nothing`",
        ("org/private", ""): "the Hub knows no such model: `org/private`",
        ("org/model", "v9"): "the Hub model org/model has no such revision: `v9`",
        ("org/model", "a" * 40): f"the Hub model org/model has no such revision: `{'a' * 40}`",
    }
    found = {asked: client.resolve(*asked, HF_ENDPOINT=hub.url) for asked in expected}
    assert {asked: answer["message"] for asked, answer in found.items()} == expected
    assert {answer["error"] for answer in found.values()} == {"NotFoundError"}
    assert "HF_TOKEN" in found["org/private", ""]["hint"]


def test_a_token_opens_a_private_model_and_a_wrong_or_missing_one_is_named(
    hub: HubServer, client: Client, files: dict[str, bytes]
) -> None:
    hub.add("org/private", files, token="hf_right")
    hub.add("org/gated", files, gated=True)
    wrong = client.resolve("org/private", HF_ENDPOINT=hub.url, HF_TOKEN="hf_wrong")
    gated = client.resolve("org/gated", HF_ENDPOINT=hub.url)
    refused = client.resolve("org/gated", HF_ENDPOINT=hub.url, HF_TOKEN="hf_right")
    assert {answer["error"] for answer in (wrong, gated, refused)} == {"AuthenticationError"}
    assert all("HF_TOKEN" in answer["hint"] for answer in (wrong, gated, refused))
    assert "gated" in gated["message"]
    assert "hf_" not in json.dumps([wrong, refused]).replace("HF_TOKEN", "")
    assert "path" in client.resolve("org/private", HF_ENDPOINT=hub.url, HF_TOKEN="hf_right")


def test_a_hub_that_fails_now_and_then_is_asked_again(hub: HubServer, client: Client, files: dict[str, bytes]) -> None:
    hub.add("org/model", files)
    hub.fail += [503, 502, 500]
    assert "path" in client.resolve("org/model", HF_ENDPOINT=hub.url)


def test_a_hub_that_keeps_failing_or_cannot_be_reached_is_an_infrastructure_error(
    hub: HubServer, client: Client, files: dict[str, bytes]
) -> None:
    hub.add("org/model", files)
    hub.fail += [503] * 100
    failing = client.resolve("org/model", HF_ENDPOINT=hub.url)
    assert (failing["error"], failing["message"]) == ("HubError", "the Hub answers with 503: `org/model`")
    with HubServer() as closed:
        pass
    unreachable = client.resolve("org/model", HF_ENDPOINT=closed.url)
    assert unreachable["error"] == "HubError"
    assert "ConnectError" in unreachable["message"]
    assert "HF_ENDPOINT" in unreachable["hint"]


def test_a_file_on_the_hub_is_fetched_alone_with_what_counts_beside_it(hub: HubServer, client: Client) -> None:
    gguf = b"GGUF" + bytes(100)
    beside = {"q4/tokenizer.json": b"{}", "q4/generation_config.json": b"{}"}
    hub.add("org/model", {"q4/model.gguf": gguf, "q8/model.gguf": gguf, "tokenizer.json": b"{}", **beside})
    found = client.resolve("org/model/q4/model.gguf", HF_ENDPOINT=hub.url)
    path = Path(found["path"])
    assert (path.name, path.read_bytes(), path.parent.parent.name) == ("model.gguf", gguf, found["revision"])
    assert sorted(p.name for p in path.parent.iterdir()) == ["generation_config.json", "model.gguf", "tokenizer.json"]
    assert hub.gets["q8/model.gguf"] == 0
    assert client.resolve("org/model/q4/model.gguf", found["revision"], offline=True) == found
    missing = client.resolve("org/model/q2/model.gguf", HF_ENDPOINT=hub.url)
    assert (missing["error"], missing["message"]) == (
        "NotFoundError",
        "the Hub model org/model has no such file: `q2/model.gguf`",
    )


def test_a_repository_of_gguf_files_tells_to_name_one(hub: HubServer, client: Client) -> None:
    hub.add("org/model", {"a.Q4_0.gguf": b"GGUF", "README.md": b"files"})
    found = client.resolve("org/model", HF_ENDPOINT=hub.url)
    assert found["message"] == "the Hub model has no weights in safetensors, only a.Q4_0.gguf: `org/model`"
    assert found["hint"] == "name one file: model.source: org/model/FILE.gguf"
