"""Chooses the engine for a model: `fake:N` names the test engine, everything else is a folder that Candle loads."""

from __future__ import annotations

from pathlib import Path

from workers.config import RankConfig, TaskConfig, TaskKind
from workers.engine.base import Engine, EngineInfo
from workers.engine.fake import FakeEngine, is_fake


def load_engine(
    source: str,
    path: Path,
    task: TaskConfig,
    *,
    device: str,
    dtype: str,
    threads: int | None,
    skip_tokens: int = 0,
    rank: RankConfig | None = None,
) -> Engine:
    """Load a model for one kind of task.

    Args:
        source: `model.source` of the spec.
        path: Folder that `source` was resolved to.
        task: The task, with nothing left to `auto`.
        device: `cpu` or `cuda`.
        dtype: `float32`, `bfloat16`, or `int8` on a CPU and `float16` on a GPU.
        threads: Engine threads, or None for all that this process may use.
        skip_tokens: Leading tokens of each row that pooling leaves out.
        rank: Rank 0's place, for a model that several processes hold together.

    Raises:
        ModelError: The folder cannot be loaded.
        InfrastructureError: The device is not there, or the build cannot use it.
        GroupLostError: Another rank is gone, or could not load the model.
    """
    if is_fake(source):
        return FakeEngine(source, task)
    from workers.engine.candle import CandleEngine

    return CandleEngine(path, task, device=device, dtype=dtype, threads=threads, skip_tokens=skip_tokens, rank=rank)


def inspect_model(source: str, path: Path, kind: TaskKind, pooling: str, *, by_likelihood: bool = False) -> EngineInfo:
    """Read what a model says of itself, and check its files, without loading any weight.

    Args:
        source: `model.source` of the spec.
        path: Folder that `source` was resolved to.
        kind: The task.
        pooling: `auto`, or modes joined by `+`.
        by_likelihood: The task runs a decoder's head over tokens.

    Raises:
        ModelError: The folder cannot be loaded; the message lists every problem found.
    """
    if is_fake(source):
        return FakeEngine.inspect(source, kind)
    from workers.engine.candle import inspect_candle

    return inspect_candle(path, kind, pooling, by_likelihood=by_likelihood)
