"""Jobs over split models on real Rays, for the tests: models with tokenizers, processes of ranks. Tests nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pyarrow as pa
from engine_models import cases, words, write_golden
from job_files import JobFiles

# Far above what anything here takes on a busy machine.
LONG_S = 120.0
GENERATE: dict[str, Any] = {
    "kind": "generate",
    "text": "doc",
    "generation": {"max_new_tokens": 24, "defaults": "none"},
}


def write_split_model(files: JobFiles, name: str = "qwen2") -> str:
    """A golden decoder with a tokenizer of one word per id, in the folder of a test's files."""
    return write_golden(files.root / "model", name)


def write_prompts(files: JobFiles, rows: int, name: str = "qwen2") -> None:
    """An input of so many prompts, with their numbers."""
    ids = cases(name)["ids"]
    texts = [words([(token + row) % 300 for token in ids[row % len(ids)]]) for row in range(rows)]
    files.write_input(pa.table({"id": range(rows), "doc": texts}))


def rank_processes(number: int | None = None) -> list[psutil.Process]:
    """Processes of ranks below this one; of rank 0, or of the others (1), or all, that compute."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = process.cmdline()[0] if process.cmdline() else ""
        except psutil.Error:
            continue
        if (number != 1 and title.startswith("ray::WorkerActor.run")) or (
            number != 0 and title.startswith("ray::FollowerActor.follow")
        ):
            found.append(process)
    return found


def wait_until(condition: Callable[[], object], timeout_s: float = LONG_S) -> None:
    """Wait for something another process does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


class Blows(threading.Thread):
    """Does things to a job, one after the other, each when a gang computes that nothing was done to yet."""

    def __init__(self, *acts: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._acts = acts
        self.gangs: list[list[psutil.Process]] = []
        self.start()

    def run(self) -> None:
        """Wait for ranks that compute, then act."""
        for act in self._acts:
            wait_until(self._gang_computes)
            self.gangs.append(rank_processes())
            act()

    def _gang_computes(self) -> bool:
        known = [process for gang in self.gangs for process in gang]
        return all(any(process not in known for process in rank_processes(number)) for number in (0, 1))
