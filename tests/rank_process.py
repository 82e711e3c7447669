"""One rank of a tensor-parallel group, run by the tests as a process of its own: `python rank_process.py '<json>'`.

Prints one JSON line per event. A rank other than 0 follows; rank 0 does what `work` names.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import candle_py
import numpy as np
from engine_models import generate, ragged


def say(**event: Any) -> None:
    """Tells the test."""
    print(json.dumps(event), flush=True)


@contextmanager
def told() -> Iterator[None]:
    """An engine's error becomes an event."""
    try:
        yield
    except candle_py.EngineError as error:
        say(error=type(error).__name__, text=str(error), hint=error.hint)


def main(options: dict[str, Any]) -> None:
    """One rank's life, from the moment that the test says so."""
    say(started=True)
    sys.stdin.readline()
    with told():
        communicator = candle_py.TcpCommunicator(
            options["rank"], options["world"], options["addresses"], options["token"], options["timeout_s"]
        )
        group: candle_py.TcpCommunicator | candle_py.NcclCommunicator = communicator
        if options.get("nccl"):
            group = candle_py.NcclCommunicator(communicator)
        device = options.get("device", "cpu")
        dtype = options.get("dtype", "auto")
        engine = candle_py.Engine.load(options["model"], device=device, dtype=dtype, threads=1, communicator=group)
        say(info=[engine.info["rank"], engine.info["world"]])
        if options["rank"] > 0:
            engine.follow()
            say(done=True)
            return
        rows = options["rows"]
        match options["work"]:
            case "all":
                np.savez(
                    options["output"],
                    hidden=engine.hidden_states(*ragged(rows)),
                    logits=engine.logits(*ragged(rows)),
                    logprobs=engine.token_logprobs(*ragged(rows)),
                    last=engine.embed(*ragged(rows), pooling="last", normalize=True),
                )
                say(generated=generate(engine, rows, 24, cache_bytes=1 << 20))
                engine.close()
            case "encode":
                np.savez(
                    options["output"],
                    hidden=engine.hidden_states(*ragged(rows)),
                    mean=engine.embed(*ragged(rows), pooling="mean", normalize=True),
                )
            case "load":
                pass
            case "wait":
                engine.logits(*ragged(rows))
                time.sleep(2 * options["timeout_s"])  # has nothing to ask for
                engine.logits(*ragged(rows))
                say(waited=True, steps=2)
                signal.pause()
            case "forever":
                while True:
                    engine.logits(*ragged(rows))
                    say(step=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children inherit that it is ignored
    try:
        main(json.loads(sys.argv[1]))
    except KeyboardInterrupt:
        say(interrupted=True)
