"""Beside every station: places where a crash test can stop a process. Does nothing unless the switch is set.

The switch is the variable `CANDELABRA_FAILPOINTS`, a comma-separated list of `name=action[:hit][@marker]`:

    publish.after=kill:3         the third time this process passes there, it kills itself (SIGKILL)
    read=raise                   the first time, `FailpointError` is raised
    compute=exit137@/tmp/once    ends with status 137, once over all processes: `/tmp/once` is created by the first

Hits are counted per process, from 1; without a marker a restarted process counts, and stops, again.
A name or an action that does not exist is an error: a crash test with a typing mistake must not pass.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from dataclasses import dataclass

SWITCH = "CANDELABRA_FAILPOINTS"
NAMES = frozenset(
    {
        "plan.before",
        "plan.after",
        "read",
        "compute",
        "publish.before",
        "publish.after",
        "receipt.before",
        "receipt.after",
        "promote.before",
        "promote.after",
        "seal.before",
    }
)
_HIT = re.compile("[1-9][0-9]*")
_ACTIONS = ("kill", "raise", "exit137")

_hits: dict[str, int] = {}
_lock = threading.Lock()


class FailpointError(RuntimeError):
    """Raised by the action `raise`. Not one of the project's errors: it stands for what nobody foresaw."""


@dataclass(frozen=True, slots=True)
class _Rule:
    action: str
    hit: int
    marker: str


def failpoint(name: str) -> None:
    """Stops here if the switch says so.

    Raises:
        ValueError: `name` is unknown, or the switch cannot be parsed.
        FailpointError: The action is `raise`.
    """
    switch = os.environ.get(SWITCH)
    if not switch:
        return
    if name not in NAMES:
        raise ValueError(f"unknown failpoint: `{name}`")
    rule = _parse(switch).get(name)
    if rule is None:
        return
    with _lock:
        _hits[name] = hit = _hits.get(name, 0) + 1
    if hit == rule.hit and _claim(rule.marker):
        _act(rule.action, name)


def _parse(switch: str) -> dict[str, _Rule]:
    rules: dict[str, _Rule] = {}
    for item in filter(None, (part.strip() for part in switch.split(","))):
        name, equals, rest = item.partition("=")
        rest, _, marker = rest.partition("@")
        action, _, hit = rest.partition(":")
        if not equals or name not in NAMES or action not in _ACTIONS or not _HIT.fullmatch(hit or "1"):
            raise ValueError(f"cannot parse {SWITCH}: `{item}`")
        rules[name] = _Rule(action, int(hit or "1"), marker)
    return rules


def _claim(marker: str) -> bool:
    if not marker:
        return True
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        return False
    return True


def _act(action: str, name: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "exit137":
        os._exit(137)
    raise FailpointError(f"failpoint: `{name}`")
