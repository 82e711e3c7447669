"""The real engine: candle_py behind the `Engine` contract. Translates arguments and errors; computes nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import candle_py
import numpy as np
from numpy.typing import NDArray

from sharding.errors import CandelabraError, InfrastructureError, InputError, RecordRow, RetryShard
from workers.batch import TokenBatch
from workers.config import RankConfig, Sampling, TaskConfig, TaskKind
from workers.engine.base import BatchOutput, Constraint, EngineInfo, Event, Generator
from workers.engine.likelihood import compute_likelihoods
from workers.errors import GroupLostError, ModelError


def inspect_candle(path: Path, kind: TaskKind, pooling: str, *, by_likelihood: bool = False) -> EngineInfo:
    """Check a model folder and say what it holds; no weight is loaded.

    Args:
        path: The folder.
        kind: The task.
        pooling: `auto`, or modes joined by `+`.
        by_likelihood: The task runs a decoder's head over tokens.

    Raises:
        ModelError: It cannot be loaded, or not for this task.
        InputError: There is no such pooling.
    """
    try:
        return _info(candle_py.inspect(str(path), pooling=pooling), kind, by_likelihood)
    except candle_py.InputError as error:
        raise InputError(str(error), hint=error.hint) from error
    except candle_py.EngineError as error:
        raise _translated(error) from error


def check_split(path: Path, world: int) -> None:
    """Check that a model can be split over so many ranks; no weight is loaded.

    Raises:
        InputError: It cannot; the hint names the numbers that work, or says that models of its kind are not split.
        ModelError: It cannot be loaded at all.
    """
    try:
        candle_py.inspect_rank(str(path), 0, world)
    except candle_py.InputError as error:
        raise InputError(f"{error}, with `model.tensor_parallel: {world}`", hint=error.hint) from error
    except candle_py.EngineError as error:
        raise _translated(error) from error


class CandleEngine:
    """One model, loaded; see `workers.engine.base.Engine`."""

    def __init__(
        self,
        path: Path,
        task: TaskConfig,
        *,
        device: str,
        dtype: str,
        threads: int | None,
        skip_tokens: int,
        rank: RankConfig | None = None,
    ) -> None:
        self._task = task
        self._skip_tokens = skip_tokens
        self._engine = _load(path, device, dtype, threads, rank)
        info = _info(self._engine.info, task.kind, task.decoder is not None)
        self._info = replace(info, width=task.width)

    @property
    def info(self) -> EngineInfo:
        """What was loaded."""
        return self._info

    def forward(self, batch: TokenBatch) -> BatchOutput:
        """Compute one batch; see `workers.engine.base.Engine.forward`."""
        try:
            if self._task.decoder is not None:
                scored = self._task.kind == "score"
                return compute_likelihoods(batch, self._info.width, self._logprobs, scored=scored)
            if self._task.kind == "embed":
                result = self._engine.embed(
                    batch.ids,
                    batch.offsets,
                    pooling=self._task.pooling or "auto",
                    normalize=self._task.normalize,
                    dimensions=self._task.dimensions,
                    type_ids=batch.type_ids,
                    skip_tokens=self._skip_tokens,
                )
            else:
                result = self._engine.classify(batch.ids, batch.offsets, batch.type_ids)
        except candle_py.EngineError as error:
            raise _translated(error) from error
        return BatchOutput(np.asarray(result), tuple(result.bad_rows))

    def generator(self, *, rows: int, cache_bytes: int | None, step_tokens: int) -> Generator:
        """See `workers.engine.base.Engine.generator`."""
        longest_tokens, beams = self._longest_request()
        try:
            native: Any = self._engine
            inner = native.generator(
                max_rows=rows,
                cache_bytes=cache_bytes,
                step_tokens=step_tokens,
                longest_tokens=longest_tokens,
                beams=beams,
            )
        except candle_py.EngineError as error:
            raise _translated(error) from error
        return _Generator(inner)

    def _longest_request(self) -> tuple[int, int]:
        """Tokens and beams of the largest text that the task may ask for: a smaller cache would cost rows, not time."""
        decoder = self._task.decoder
        if decoder is None or decoder.sampling is None:
            return 0, 1
        tokens = min(self._task.max_tokens + decoder.sampling.max_new_tokens, decoder.max_positions)
        return tokens, decoder.sampling.beams

    def _logprobs(self, ids: NDArray[np.uint32], offsets: NDArray[np.uint32]) -> NDArray[np.float32]:
        native: Any = self._engine
        return np.asarray(native.token_logprobs(ids, offsets))


def follow_rank_0(path: Path, *, device: str, dtype: str, threads: int | None, rank: RankConfig) -> None:
    """Load a rank's part of a model and work for rank 0 until that ends.

    Raises:
        GroupLostError: A rank is gone or silent.
        ModelError: As `workers.engine.load.load_engine`.
    """
    engine = _load(path, device, dtype, threads, rank)
    try:
        engine.follow()
    except candle_py.EngineError as error:
        raise _translated(error, row=False) from error


def _load(path: Path, device: str, dtype: str, threads: int | None, rank: RankConfig | None) -> candle_py.Engine:
    try:
        group: candle_py.TcpCommunicator | candle_py.NcclCommunicator | None = None
        if rank is not None:
            group = candle_py.TcpCommunicator(rank.rank, rank.world, [rank.address], rank.token, rank.timeout_s)
            if device == "cuda":  # Ray shows each rank one GPU, which is the first that it sees
                group = candle_py.NcclCommunicator(group)
        return candle_py.Engine.load(str(path), device=device, dtype=dtype, threads=threads, communicator=group)
    except candle_py.InputError as error:
        raise InputError(str(error), hint=error.hint) from error
    except candle_py.EngineError as error:
        raise _translated(error) from error


class _Generator:
    """candle_py's generator with the project's errors; see `workers.engine.base.Generator`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def cache_bytes(self) -> int:
        """See `workers.engine.base.Generator.cache_bytes`."""
        stats = self._inner.stats
        return int(stats["blocks"] * stats["block_bytes"])

    def add(
        self,
        request_id: int,
        ids: Sequence[int],
        sampling: Sampling,
        *,
        max_new_tokens: int,
        seed: int = 0,
        constraint: Constraint | None = None,
    ) -> None:
        """See `workers.engine.base.Generator.add`."""
        try:
            self._inner.add(
                request_id,
                np.array(ids, np.uint32),
                max_new_tokens=max_new_tokens,
                min_new_tokens=min(sampling.min_new_tokens, max_new_tokens),
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty,
                beams=sampling.beams,
                length_penalty=sampling.length_penalty,
                stop_ids=sampling.stop_ids,
                seed=seed,
                constraint=constraint,
            )
        except candle_py.EngineError as error:
            raise _translated(error) from error

    def step(self) -> Sequence[Event]:
        """See `workers.engine.base.Generator.step`."""
        try:
            events: Sequence[Event] = self._inner.step()
        except candle_py.EngineError as error:
            raise _translated(error, row=False) from error
        return events

    def stop(self, request_id: int) -> None:
        """See `workers.engine.base.Generator.stop`."""
        self._inner.stop(request_id)


def capabilities() -> dict[str, Any]:
    """What the installed build of the engine offers: versions, CPU features and path in force, CUDA, NCCL.

    `cuda_failure` is None, or message and hint: why an installed CUDA build cannot be loaded.
    """
    found: dict[str, Any] = candle_py.capabilities()
    failure = candle_py.cuda_failure()
    found["cuda_failure"] = None if failure is None else (str(failure), failure.hint or "")
    return found


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Everything in a GGUF file's header but its tensors: plain values and lists of them, by key.

    Raises:
        ModelError: The file is missing, damaged, or of another format or version.
    """
    try:
        return candle_py.gguf_metadata(str(path))
    except candle_py.EngineError as error:
        raise _translated(error) from error


def convert_weights(source: Path, target: Path) -> int:
    """Write the tensors of a PyTorch pickle (or of an index of several) as safetensors; nothing in it is executed.

    Args:
        source: `pytorch_model.bin`, or `pytorch_model.bin.index.json`.
        target: Folder that gets `model.safetensors`.

    Returns:
        Tensors written.

    Raises:
        ModelError: The file cannot be read.
    """
    try:
        return int(candle_py.convert_pickle(str(source), str(target))["tensors"])
    except candle_py.EngineError as error:
        raise _translated(error) from error


def _info(facts: dict[str, Any], kind: TaskKind, by_likelihood: bool) -> EngineInfo:
    labels = facts["labels"]
    if by_likelihood and (facts.get("kind") != "decoder" or facts.get("tied") is None):  # tied: of the head's weights
        raise ModelError(
            f"the model does not predict tokens, so it cannot {kind} by likelihood: `{facts['architecture']}`",
            hint="use a causal language model (Llama, Qwen2, Qwen3)",
        )
    if kind != "embed" and not by_likelihood and not facts["num_labels"]:
        raise ModelError(
            f"the model has no classification head, so it cannot {kind}: `{facts['architecture']}`",
            hint="use a model saved for sequence classification; with a decoder, task.labels; or task.kind: embed",
        )
    return EngineInfo(
        architecture=facts["architecture"],
        max_positions=facts["max_positions"],
        vocab_size=facts["vocab_size"],
        hidden_size=facts["hidden_size"],
        layers=facts["layers"],
        width=(facts["embedding_dim"] or facts["hidden_size"]) if kind == "embed" else facts["num_labels"] or 2,
        labels=None if labels is None else tuple(labels),
        pooling=None if facts["pooling"] is None else "+".join(facts["pooling"]),
        normalize=facts["normalize"],
        include_prompt=facts["include_prompt"],
        dtype=facts["dtype"],
        device=facts["device"],
        weight_bytes=facts["weight_bytes"],
        kv_heads=facts["kv_heads"] if facts["kind"] == "decoder" else 0,
        head_dim=facts["head_dim"] if facts["kind"] == "decoder" else 0,
        tied=bool(facts["tied"]),
    )


def _translated(error: candle_py.EngineError, *, row: bool = True) -> CandelabraError:
    """The project's error for one of the engine's, by its kind; `row`: bad input is one row's."""
    message, hint = str(error), error.hint
    kinds = {
        "model": ModelError,
        "input": RecordRow if row else RetryShard,
        "device": InfrastructureError,
        "communicator": GroupLostError,
    }
    return kinds.get(error.kind, RetryShard)(message, hint=hint)
