"""Where shards are cut: every row once, in order, within the targets, whatever the files look like."""

from __future__ import annotations

import random

import pytest
from sharding_jobs import SCHEMA, plan_of, source

from sharding.plan import Piece, Shard, make_plan, plan_digest, plan_shards
from sharding.source import RowGroup, SourceFile

LARGE = 1 << 40


def file(*groups: tuple[int, int]) -> SourceFile:
    row_groups = tuple(RowGroup(rows, size_bytes) for rows, size_bytes in groups)
    return SourceFile("/x", 1, sum(rows for rows, _ in groups), "v", row_groups)


def bounds(shards: tuple[Shard, ...]) -> list[list[tuple[int, int, int]]]:
    return [[(piece.file, piece.start, piece.stop) for piece in shard.pieces] for shard in shards]


def test_row_groups_are_gathered_up_to_the_target() -> None:
    shards = plan_shards([source(groups=(4, 4, 4, 4, 4))], target_rows=10, target_bytes=LARGE)
    assert bounds(shards) == [[(0, 0, 8)], [(0, 8, 16)], [(0, 16, 20)]]
    assert [shard.rows for shard in shards] == [8, 8, 4]
    assert [shard.index for shard in shards] == [0, 1, 2]


def test_bytes_count_as_rows_do() -> None:
    shards = plan_shards([file((10, 60), (10, 60), (10, 40))], target_rows=1000, target_bytes=100)
    assert bounds(shards) == [[(0, 0, 10)], [(0, 10, 30)]]


def test_small_files_share_a_shard() -> None:
    shards = plan_shards([source(groups=(3,)) for _ in range(7)], target_rows=9, target_bytes=LARGE)
    assert bounds(shards) == [
        [(0, 0, 3), (1, 0, 3), (2, 0, 3)],
        [(3, 0, 3), (4, 0, 3), (5, 0, 3)],
        [(6, 0, 3)],
    ]


def test_a_giant_row_group_is_cut_by_rows_into_equal_pieces() -> None:
    shards = plan_shards([source(groups=(2, 1_000_003, 2))], target_rows=10_000, target_bytes=LARGE)
    sizes = [shard.rows for shard in shards]
    assert len(shards) == 103
    assert sizes[0] == sizes[-1] == 2  # neighbours do not join a piece of a giant
    assert max(sizes[1:-1]) - min(sizes[1:-1]) <= 1
    assert max(sizes) <= 10_000


def test_a_giant_by_bytes_is_cut_by_rows_too() -> None:
    shards = plan_shards([file((10, 1000))], target_rows=1000, target_bytes=300)
    assert [shard.rows for shard in shards] == [2, 3, 2, 3]


def test_a_row_larger_than_the_target_is_a_shard_of_its_own() -> None:
    shards = plan_shards([file((3, 10**9), (1, 10**9))], target_rows=100, target_bytes=1000)
    assert bounds(shards) == [[(0, 0, 1)], [(0, 1, 2)], [(0, 2, 3)], [(0, 3, 4)]]


def test_row_groups_that_just_fit_are_not_cut() -> None:
    shards = plan_shards([file((10, 100), (10, 100))], target_rows=10, target_bytes=100)
    assert bounds(shards) == [[(0, 0, 10)], [(0, 10, 20)]]


def test_files_and_row_groups_without_rows_belong_to_no_shard() -> None:
    files = [file(), file((0, 10), (5, 50), (0, 0)), file((0, 0)), file((5, 50))]
    assert bounds(plan_shards(files, target_rows=100, target_bytes=LARGE)) == [[(1, 0, 5), (3, 0, 5)]]


@pytest.mark.parametrize("files", [[], [file()], [file((0, 0)), file()]])
def test_no_rows_at_all_give_one_shard_without_pieces(files: list[SourceFile]) -> None:
    assert plan_shards(files, target_rows=10, target_bytes=LARGE) == (Shard(0, (), 0),)


@pytest.mark.parametrize(("rows", "size_bytes"), [(0, 1), (1, 0), (-1, 1)])
def test_targets_below_one_are_refused(rows: int, size_bytes: int) -> None:
    with pytest.raises(ValueError, match="targets must be positive"):
        plan_shards([source()], target_rows=rows, target_bytes=size_bytes)


@pytest.mark.parametrize("seed", range(40))
def test_every_row_is_in_one_shard_once_and_in_order(seed: int) -> None:
    chance = random.Random(seed)
    files = [
        file(
            *(
                (chance.choice([0, 1, 2, 7, 50, 1000]), chance.choice([0, 1, 100, 10_000]))
                for _ in range(chance.randrange(4))
            )
        )
        for _ in range(chance.randrange(1, 30))
    ]
    target_rows, target_bytes = chance.choice([1, 3, 10, 100, 5000]), chance.choice([1, 500, 100_000])
    shards = plan_shards(files, target_rows=target_rows, target_bytes=target_bytes)
    rows = [(piece.file, row) for shard in shards for piece in shard.pieces for row in range(piece.start, piece.stop)]
    assert rows == [(index, row) for index, item in enumerate(files) for row in range(item.rows)]
    assert [shard.index for shard in shards] == list(range(len(shards)))
    for shard in shards:
        assert shard.rows == sum(piece.stop - piece.start for piece in shard.pieces)
        assert shard.rows <= target_rows
        assert rows == [] or shard.pieces


def test_the_digest_covers_identity_files_and_shards_and_nothing_else() -> None:
    plan = plan_of()
    assert plan.digest == plan_of(identity={"task.prompt": "", "model.revision": "abc"}).digest
    assert plan.digest == plan_digest(plan.identity, plan.files, plan.shards)
    others = [
        plan_of(identity={"model.revision": "abd", "task.prompt": ""}),
        plan_of(identity={"model.revision": "abc"}),
        plan_of((source(version="v2"),)),
        plan_of((source(path="/data/b.parquet"),)),
        plan_of(target_rows=20),
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == 6


def test_part_names_sort_as_the_shards_do_beyond_a_hundred_thousand() -> None:
    assert plan_of().part_name(2) == "part-00002.parquet"
    shards = tuple(Shard(index, (Piece(0, index, index + 1),), 1) for index in range(100_001))
    plan = make_plan(job="x", identity={}, input_schema=SCHEMA, output_schema=SCHEMA, files=[source()], shards=shards)
    names = [plan.part_name(index) for index in range(len(shards))]
    assert names == sorted(names)
    assert names[0] == "part-000000.parquet"
