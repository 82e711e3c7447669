"""From log-probabilities of tokens to likelihoods of answers and labels. Knows no model: it is handed a function."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from workers.batch import TokenBatch, row_lengths
from workers.engine.base import BatchOutput

Logprobs = Callable[[NDArray[np.uint32], NDArray[np.uint32]], NDArray[np.float32]]
"""Ids and offsets of ragged sequences to float32 (tokens,): log p(token | those before it), the first of each 0."""


def compute_likelihoods(batch: TokenBatch, width: int, logprobs: Logprobs, *, scored: bool) -> BatchOutput:
    """Sum log-probabilities of the counted tokens of each row.

    Args:
        batch: With `type_ids`: 0 for tokens that are only read, 1 + label for those that count. Sequences of one row
            (one per label) follow each other; each begins where a 0 follows a counted token.
        width: Values per row.
        logprobs: The model.
        scored: Values are the sum and how many tokens count (score), else one sum per label.

    Returns:
        float32 (rows, width).
    """
    types = np.zeros(len(batch.ids), np.uint32) if batch.type_ids is None else batch.type_ids
    begins = np.zeros(len(types), np.bool_)
    begins[1:] = (types[1:] == 0) & (types[:-1] != 0)
    begins[batch.offsets[:-1].astype(np.int64)] = True
    offsets = np.append(np.flatnonzero(begins), len(types)).astype(np.uint32)
    found = logprobs(batch.ids, offsets).reshape(-1).astype(np.float64)
    rows = np.repeat(np.arange(len(batch)), row_lengths(batch.offsets))
    counted = types > 0
    sums = np.zeros((len(batch), width), np.float64)
    column = np.zeros_like(types) if scored else types - 1
    np.add.at(sums, (rows[counted], column[counted]), found[counted])
    if scored:
        sums[:, 1] = np.bincount(rows[counted], minlength=len(batch))
    values = sums.astype(np.float32)
    return BatchOutput(values, tuple(int(row) for row in np.flatnonzero(~np.isfinite(values).all(axis=1))))
