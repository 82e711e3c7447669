"""Batches under a token budget."""

from __future__ import annotations

import numpy as np
import pytest

from workers.batch import TokenBatch, batch_tokens, row_lengths


def make(
    lengths: list[int], budget: int, rows: list[int] | None = None
) -> tuple[np.ndarray, np.ndarray, list[TokenBatch]]:
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 1000, sum(lengths)).astype(np.uint32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32)
    chosen = np.arange(len(lengths)) if rows is None else np.array(rows)
    return ids, offsets, list(batch_tokens(ids, offsets, chosen, budget_tokens=budget, type_ids=ids))


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_in_exactly_one_batch_with_its_own_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.integers(1, 300, rng.integers(1, 400))]
    ids, offsets, batches = make(lengths, int(rng.integers(1, 4000)))
    seen = np.concatenate([batch.rows for batch in batches])
    assert sorted(seen) == list(range(len(lengths)))
    for batch in batches:
        for i, row in enumerate(batch.rows):
            part = slice(batch.offsets[i], batch.offsets[i + 1])
            whole = slice(offsets[row], offsets[row + 1])
            np.testing.assert_array_equal(batch.ids[part], ids[whole])
            assert batch.type_ids is not None
            np.testing.assert_array_equal(batch.type_ids[part], ids[whole])


@pytest.mark.parametrize("budget", [1, 7, 64, 511, 512, 10_000])
def test_a_batch_stays_within_the_budget_unless_it_is_one_long_row(budget: int) -> None:
    lengths = [512] + [5] * 63
    _, _, batches = make(lengths, budget)
    for batch in batches:
        assert len(batch.ids) <= budget or len(batch) == 1


def test_one_long_row_among_short_ones_costs_itself_only() -> None:
    _, _, batches = make([5] * 40 + [512] + [5] * 23, 64)
    assert [len(batch) for batch in batches if 512 in row_lengths(batch.offsets)] == [1]
    assert sum(len(batch.ids) for batch in batches) == 512 + 63 * 5


def test_longest_rows_come_first_and_equal_ones_keep_their_order() -> None:
    _, _, batches = make([3, 9, 3, 9, 1], 1000)
    assert batches[0].rows.tolist() == [1, 3, 0, 2, 4]


def test_rows_left_out_are_in_no_batch() -> None:
    _, _, batches = make([4, 4, 4, 4], 8, rows=[0, 2])
    assert sorted(np.concatenate([batch.rows for batch in batches])) == [0, 2]


def test_no_rows_give_no_batch() -> None:
    assert make([], 8)[2] == []


def test_a_selection_of_a_batch_is_a_batch() -> None:
    _, _, (batch,) = make([3, 2, 5], 100)
    part = batch.select(1, 3)
    assert part.rows.tolist() == batch.rows[1:3].tolist()
    assert part.offsets.tolist() == [0, 3, 5]
    np.testing.assert_array_equal(part.ids, batch.ids[5:10])
