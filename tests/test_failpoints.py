"""Failpoints: nothing without the switch; the named action at the named hit with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sharding import failpoints
from sharding.failpoints import SWITCH, FailpointError, failpoint

CODE = (
    "import sys; from sharding.failpoints import failpoint\n"
    "for number in range(5):\n"
    "    failpoint('publish.after'); failpoint('read')\n"
    "    print(number, flush=True)\n"
)


def run(switch: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, SWITCH: switch}
    return subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(failpoints, "_hits", {})


def test_without_the_switch_nothing_happens() -> None:
    for name in failpoints.NAMES:
        failpoint(name)


def test_the_process_is_killed_at_the_hit_that_is_named() -> None:
    done = run("publish.after=kill:3")
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["0", "1"]


def test_the_first_hit_is_the_default_and_others_are_left_alone() -> None:
    done = run("seal.before=kill, read=exit137")
    assert done.returncode == 137
    assert done.stdout == ""


def test_a_marker_makes_it_happen_once_over_all_processes(tmp_path: Path) -> None:
    switch = f"read=exit137:2@{tmp_path / 'once'}"
    assert run(switch).returncode == 137
    again = run(switch)
    assert again.returncode == 0
    assert again.stdout.split() == list("01234")


def test_raise_gives_an_error_that_nobody_foresaw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "compute=raise:2")
    failpoint("compute")
    with pytest.raises(FailpointError, match="compute"):
        failpoint("compute")
    failpoint("compute")


@pytest.mark.parametrize(
    "switch",
    ["comptue=kill", "compute=explode", "compute", "compute=kill:x", "compute=kill:0", "read=kill;compute=kill"],
)
def test_a_typing_mistake_in_the_switch_is_an_error(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.setenv(SWITCH, switch)
    with pytest.raises(ValueError, match=f"cannot parse {SWITCH}"):
        failpoint("compute")


def test_an_unknown_name_in_the_code_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "read=kill")
    with pytest.raises(ValueError, match="unknown failpoint"):
        failpoint("raed")
