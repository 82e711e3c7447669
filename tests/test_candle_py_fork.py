"""An engine after a fork: refused where it needs threads that the child lacks, at work where it does not."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from engine_models import GOLDEN

from workers.resources.limits import available_threads

FORK = """
import json, os, signal, sys
import candle_py
import numpy as np

def told(call):
    try:
        call()
    except candle_py.InputError as error:
        return [str(error), error.hint]

def load():
    return candle_py.Engine.load(sys.argv[1], threads=int(sys.argv[2]))

engine = load()
generator = engine.generator()
batch = np.arange(40, dtype=np.uint32), np.array([0, 17, 40], np.uint32)
calls = [
    lambda: engine.hidden_states(*batch),
    lambda: engine.embed(*batch, pooling="mean"),
    lambda: engine.logits(*batch),
    lambda: engine.token_logprobs(*batch),
    lambda: engine.generator(),
    lambda: generator.add(1, batch[0], max_new_tokens=2),
    lambda: generator.step(),
    lambda: generator.stats,
    lambda: engine.close(),
]
want = np.asarray(engine.logits(*batch)).tobytes()
child = os.fork()
if child == 0:
    signal.alarm(60)  # what would wait for ever ends here, without a word
    found = [told(call) for call in calls]
    own = load()
    same = np.asarray(own.logits(*batch)).tobytes() == want
    print(json.dumps({"parent": os.getppid(), "told": found, "same": same, "threads": engine.info["threads"]}))
    sys.stdout.flush()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert np.asarray(engine.logits(*batch)).tobytes() == want
"""


def fork(threads: int) -> dict[str, Any]:
    """What a child heard of an engine with so many threads that its parent had loaded."""
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(GOLDEN / "qwen2"), str(threads)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["same"]
    return found


def test_an_engine_with_threads_is_refused_after_a_fork_and_can_be_loaded_again() -> None:
    if available_threads() < 2:
        pytest.skip("two threads need two CPUs")
    found = fork(2)
    text = f"engine was loaded before a fork, its threads are in process: `{found['parent']}`"
    for told, hint in found["told"]:
        assert told == text
        assert "load the engine in the child process" in hint
        assert "spawn" in hint
    assert found["threads"] == 2, "facts can still be read"


def test_an_engine_of_one_thread_works_after_a_fork() -> None:
    assert fork(1)["told"] == [None] * 9
