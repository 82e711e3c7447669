"""A loaded worker: model, tokenizer and output storage, ready for one assignment after another. Knows no Ray."""

from __future__ import annotations

import logging
from pathlib import Path

from sharding.errors import DriftError
from sharding.storage import open_storage
from workers.config import Assignment, ShardResult, TaskConfig, WorkerConfig
from workers.engine.fake import FakeTokenizer, is_fake
from workers.engine.load import load_engine
from workers.pipeline import Progress, ShardTools, run_shard
from workers.texts import Tokenizer

_log = logging.getLogger(__name__)


class Worker:
    """Loads once, runs many shards."""

    def __init__(self, config: WorkerConfig) -> None:
        """Resolve, check and load the model.

        Raises:
            DriftError: The model found here is not the planned one.
            ModelError: It cannot be loaded.
            InfrastructureError: The device is not there.
        """
        self._config = config
        model = config.model
        path = _checked_model_path(config)
        tokenizer = load_tokenizer(model.source, path, config.task)
        engine = load_engine(
            model.source,
            path,
            config.task,
            device=model.device,
            dtype=model.dtype,
            threads=config.threads,
            skip_tokens=0 if config.task.include_prompt else tokenizer.prompt_tokens,
        )
        self._tools = ShardTools(engine, tokenizer, open_storage(config.output_uri))
        _log.info("model loaded: %s", engine.info)

    def run(self, assignment: Assignment) -> ShardResult:
        """Compute one assignment; see `workers.pipeline.run_shard`."""
        return run_shard(assignment, self._config, self._tools)

    def progress(self) -> Progress:
        """How far the running assignment is."""
        return self._tools.progress


def load_tokenizer(source: str, path: Path, task: TaskConfig) -> Tokenizer:
    """The tokenizer of a model, set up for one task.

    Raises:
        ModelError: The folder holds none that can be read.
    """
    if is_fake(source):
        return FakeTokenizer(max_tokens=task.max_tokens, prompt=task.prompt)
    from workers.tokenize import TextTokenizer

    return TextTokenizer(path, max_tokens=task.max_tokens, prompt=task.prompt, truncate=task.truncate)


def _checked_model_path(config: WorkerConfig) -> Path:
    from workers.model.resolve import resolve_model

    model = config.model
    if is_fake(model.source):
        return Path()
    location = resolve_model(model.source, model.revision)
    if location.digest != model.digest:
        raise DriftError(
            f"the model on this node is not the planned one (planned digest `{model.digest}`, here "
            f"`{location.digest}`): `{location.path}`",
            hint="make the same model files available on every node, or start a new output",
        )
    return location.path
