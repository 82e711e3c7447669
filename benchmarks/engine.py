"""The project's own engine on a list of texts, as a worker sets it up for a spec: no Ray, no Parquet, no job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jobs.prepare import prepare_job
from jobs.spec import load_spec
from workers.batch import batch_tokens
from workers.engine.load import load_engine
from workers.worker import load_tokenizer


class SpecEngine:
    """Tokenizer and engine of a spec of kind `embed`.

    Args:
        spec: Path of the spec; its input must exist, because the plan decides every `auto`.
        threads: Engine threads, or None for all that this process may use.
        overrides: `field=value` each, as on the command line.
    """

    def __init__(self, spec: Path, *, threads: int | None = None, overrides: Sequence[str] = ()) -> None:
        prepared = prepare_job(load_spec(spec, overrides))
        config, model = prepared.worker_config, prepared.model
        self._budget_tokens = config.budget_tokens
        self._tokenizer = load_tokenizer(config.model.source, model.path, config.task)
        self._engine = load_engine(
            config.model.source,
            model.path,
            config.task,
            device=config.model.device,
            dtype=config.model.dtype,
            threads=threads,
            skip_tokens=0 if config.task.include_prompt else self._tokenizer.prompt_tokens,
        )
        self.width = config.task.dimensions or self._engine.info.width

    def embed(self, texts: Sequence[str]) -> tuple[NDArray[np.float32], int]:
        """Embeddings (texts, width), rows without a result all zero, and how many tokens were computed."""
        tokens = self._tokenizer.tokenize_columns([texts])
        out = np.zeros((len(texts), self.width), np.float32)
        good = np.array([row for row in range(len(texts)) if row not in tokens.errors], dtype=np.int64)
        for batch in batch_tokens(
            tokens.ids, tokens.offsets, good, budget_tokens=self._budget_tokens, type_ids=tokens.type_ids
        ):
            out[batch.rows] = self._engine.forward(batch).values
        return out, len(tokens.ids)
