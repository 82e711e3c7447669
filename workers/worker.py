"""A loaded worker: model, tokenizer and output storage, ready for one assignment after another. Knows no Ray."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from sharding.errors import DriftError, InputError
from sharding.storage import open_storage
from workers.config import Assignment, RankConfig, ShardResult, TaskConfig, WorkerConfig
from workers.engine.fake import fake_folder, is_fake
from workers.engine.load import load_engine
from workers.pipeline import ShardTools, run_shard
from workers.progress import Progress
from workers.tokenization.fake import FakeCodec, FakeTokenizer
from workers.tokenization.window import Tokenizer

if TYPE_CHECKING:
    from workers.generation.constrain import SchemaConstraint
    from workers.model.decoder import DecoderFiles
    from workers.tokenization.prompt_tokenizer import PromptTokenizer

_log = logging.getLogger(__name__)


class Worker:
    """Loads once, runs many shards."""

    def __init__(self, config: WorkerConfig, path: Path | None = None, rank: RankConfig | None = None) -> None:
        """Load the model.

        Args:
            config: The job's settings.
            path: Where the model is, as `locate_model` says; None looks for it now.
            rank: Rank 0's place, where several processes hold the model together; see `jobs.replica`.

        Raises:
            DriftError: The model found here is not the planned one.
            ModelError: It cannot be loaded.
            InfrastructureError: The device is not there.
            GroupLostError: Another rank is gone, or could not load the model.
        """
        self._config = config
        model = config.model
        path = locate_model(config) if path is None else path
        tokenizer = load_tokenizer(model.source, path, config.task)
        engine = load_engine(
            model.source,
            path,
            config.task,
            device=model.device,
            dtype=model.dtype,
            threads=config.threads,
            skip_tokens=0 if config.task.include_prompt else tokenizer.prompt_tokens,
            rank=rank,
        )
        constraint = load_constraint(model.source, path, config.task, engine.info.vocab_size)
        self._tools = ShardTools(engine, tokenizer, open_storage(config.output_uri), constraint=constraint)
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
    if task.decoder is not None:
        return load_prompt_tokenizer(source, path, task)
    if is_fake(source):
        return FakeTokenizer(max_tokens=task.max_tokens, prompt=task.prompt)
    from workers.tokenization.text_tokenizer import TextTokenizer

    return TextTokenizer(
        path,
        max_tokens=task.max_tokens,
        prompt=task.prompt,
        truncate=task.truncate,
        limit_name=task.max_tokens_by,
    )


def load_prompt_tokenizer(source: str, path: Path, task: TaskConfig) -> PromptTokenizer:
    """The same for a task that runs a decoder's head: prompts, and text from tokens.

    Raises:
        ModelError: The folder holds none that can be read.
        InputError: The task wants a chat and the model has no template for it.
    """
    from workers.tokenization.codec import FileCodec
    from workers.tokenization.prompt_tokenizer import PromptTokenizer, make_chat_template

    assert task.decoder is not None, "a decoder task"
    files = load_decoder_files(source, path)
    if files is None:
        return PromptTokenizer(FakeCodec(), task)
    template = make_chat_template(files, task.decoder) if task.decoder.messages else None
    return PromptTokenizer(FileCodec(files, task.max_tokens), task, template)


def load_decoder_files(source: str, path: Path) -> DecoderFiles | None:
    """What a decoder's files say; None for a fake model that has none.

    Raises:
        ModelError: They are missing or broken.
    """
    from workers.model.decoder import read_decoder_files

    if is_fake(source):
        folder = fake_folder(source)
        return None if folder is None else read_decoder_files(folder)
    return read_decoder_files(path)


def load_constraint(source: str, path: Path, task: TaskConfig, vocab_size: int) -> SchemaConstraint | None:
    """The schema that a task's texts fit, compiled for the model; None without one.

    Raises:
        InputError: It cannot be used; see `workers.generation.constrain.SchemaConstraint`.
    """
    if task.decoder is None or task.decoder.json_schema is None or task.decoder.sampling is None:
        return None
    from workers.generation.constrain import SchemaConstraint

    files = load_decoder_files(source, path)
    if files is None:
        raise InputError(f"task.json_schema needs a tokenizer of a real kind: `{source}`")
    return SchemaConstraint(task.decoder.json_schema, files.tokenizer, vocab_size, task.decoder.sampling.stop_ids)


def locate_model(config: WorkerConfig) -> Path:
    """Find the planned model on this node.

    Raises:
        DriftError: The model found here is not the planned one.
        NotFoundError: There is none.
    """
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
