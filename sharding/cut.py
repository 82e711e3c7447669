"""From source files to shards: where to cut. Pure arithmetic over row counts and sizes; reads no file.

The result depends on the files and on the targets alone, never on how many workers there are, so any cluster can go
on with a plan and every part comes out the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sharding.source import SourceFile


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start` to `stop` (exclusive) of the file with that index in the plan."""

    file: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One unit of work: its pieces in input order, and how many rows they have. One shard becomes one part."""

    index: int
    pieces: tuple[Piece, ...]
    rows: int


@dataclass(frozen=True, slots=True)
class _Atom:
    """A row group, or one of the equal pieces of a giant one: never cut further."""

    piece: Piece
    size_bytes: int


def plan_shards(files: Sequence[SourceFile], *, target_rows: int, target_bytes: int) -> tuple[Shard, ...]:
    """Cuts the files into shards, in input order.

    Whole row groups are gathered until the next one would go over a target. A row group that is over a target by
    itself is cut by rows into equal pieces, each a shard of its own. Files with no rows belong to no shard; if there
    are no rows at all, there is one shard with no pieces, so that one empty part carries the schema.

    Args:
        files: What `list_sources` found.
        target_rows: Most rows of a shard; at least 1.
        target_bytes: Most bytes of a shard, by the row groups' uncompressed sizes; at least 1. One row may be larger.

    Raises:
        ValueError: A target is below 1.
    """
    if target_rows < 1 or target_bytes < 1:
        raise ValueError(f"targets must be positive: `{target_rows}`, `{target_bytes}`")
    shards: list[Shard] = []
    pending: list[Piece] = []
    rows = size_bytes = 0
    for atom in _atoms(files, target_rows, target_bytes):
        count = atom.piece.stop - atom.piece.start
        if pending and (rows + count > target_rows or size_bytes + atom.size_bytes > target_bytes):
            shards.append(_shard(len(shards), pending))
            pending, rows, size_bytes = [], 0, 0
        pending.append(atom.piece)
        rows += count
        size_bytes += atom.size_bytes
    if pending or not shards:
        shards.append(_shard(len(shards), pending))
    return tuple(shards)


def _atoms(files: Sequence[SourceFile], target_rows: int, target_bytes: int) -> Iterator[_Atom]:
    for index, file in enumerate(files):
        start = 0
        for group in file.row_groups:
            if group.rows == 0:
                continue
            cuts = max(-(-group.rows // target_rows), -(-group.size_bytes // target_bytes), 1)
            cuts = min(cuts, group.rows)
            # a piece of a giant counts as full, so that no neighbour joins it
            size_bytes = group.size_bytes if cuts == 1 else target_bytes
            for cut in range(cuts):
                low, high = group.rows * cut // cuts, group.rows * (cut + 1) // cuts
                yield _Atom(Piece(index, start + low, start + high), size_bytes)
            start += group.rows


def _shard(index: int, pending: Sequence[Piece]) -> Shard:
    pieces: list[Piece] = []
    for piece in pending:
        if pieces and pieces[-1].file == piece.file and pieces[-1].stop == piece.start:
            pieces[-1] = Piece(piece.file, pieces[-1].start, piece.stop)
        else:
            pieces.append(piece)
    return Shard(index, tuple(pieces), sum(piece.stop - piece.start for piece in pieces))
