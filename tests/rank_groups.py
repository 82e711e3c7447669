"""Tensor-parallel groups of real processes for the tests: started together, listened to, ended. Computes nothing."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

# Far above what anything here takes on a busy machine.
LONG_S = 120.0


class Rank:
    """A process of `rank_process.py` and what it tells."""

    base_bytes = 0  # of memory, before it began

    def __init__(self, environment: dict[str, str] | None = None, **options: Any) -> None:
        script = Path(__file__).with_name("rank_process.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def next(self, timeout_s: float = LONG_S) -> dict[str, Any]:
        """Its next event; an empty one when it has ended."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        assert ready, "the rank said nothing"
        line = self.process.stdout.readline()
        event: dict[str, Any] = json.loads(line) if line else {}
        return event

    def go(self) -> Rank:
        """Lets it begin."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self

    def resident_bytes(self) -> int:
        """Memory of the process that is in use and its own: pages of the weights' files are not."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["RssAnon"].split()[0]) * 1024

    def until(self, key: str, timeout_s: float = LONG_S) -> dict[str, Any]:
        """Its next event that has `key`."""
        while key not in (event := self.next(timeout_s)):
            assert event, f"the rank ended without {key}"
        return event


class Group:
    """The ranks of one group."""

    def __init__(self, world: int, model: Path, *, timeout_s: float = LONG_S, work: str = "load", **more: Any) -> None:
        self.options: dict[str, Any] = {
            "world": world,
            "model": str(model),
            "timeout_s": timeout_s,
            "work": work,
            "addresses": [free_address()],
            "token": os.urandom(16).hex(),
            "rows": [[1, 2, 3]],
        } | more
        self.ranks: list[Rank] = []

    def start(self, rank: int, **other: Any) -> Rank:
        """Starts a rank, with other options where the test says so."""
        self.ranks.append(Rank(rank=rank, **(self.options | other)))
        self.ranks[-1].until("started")
        return self.ranks[-1].go()

    def start_all(self) -> list[Rank]:
        """Starts all ranks; none of them begins before all are there, however busy the machine is."""
        self.ranks = [Rank(rank=rank, **self.options) for rank in range(self.options["world"])]
        for rank in self.ranks:
            rank.until("started")
            rank.base_bytes = rank.resident_bytes()
        return [rank.go() for rank in self.ranks]

    def end(self) -> None:
        """Ends what is left."""
        for rank in self.ranks:
            rank.process.kill()
            rank.process.wait(LONG_S)
            for pipe in (rank.process.stdin, rank.process.stdout):
                if pipe is not None and not pipe.closed:
                    pipe.close()


def free_address() -> str:
    """An address of this machine that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"
