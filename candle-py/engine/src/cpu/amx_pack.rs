//! What the tiled product reads: weights in the order of tiles, packed once, and rows rounded to bfloat16 for each product.

use super::Isa;
use super::pack::{LINE_FLOATS, Line, PackedMatrix, Panels, Storage, bfloat16_bits, floats_of_mut};
use super::tiles::{TILE_COLUMNS, TILE_DEPTH, TILE_ROWS, TileRow};

/// Tiles side by side in a panel of the weight.
pub(super) const PANEL_TILES: usize = 2;

/// Packs a weight `(n, k)`: panels of two tiles' columns, row after row of pairs of k, padded with zeros to whole tiles. The
/// columns of a panel that do not exist are zero, too.
pub(super) fn pack(weight: &[f32], n: usize, k: usize, isa: Isa) -> PackedMatrix {
    let panels = Panels::new(n, TILE_COLUMNS, PANEL_TILES);
    let steps = k.div_ceil(TILE_DEPTH) * TILE_ROWS;
    let mut lines = vec![Line::ZERO; panels.packed_len(steps) / LINE_FLOATS];
    let floats = floats_of_mut(&mut lines);
    for index in 0..panels.count() {
        let panel = panels.get(index);
        let width = panel.registers * TILE_COLUMNS;
        let to = &mut floats[panel.start * steps..][..width * steps];
        // A few rows of the panel at a time, which stay in L1 while column after column is written.
        for (first, to) in (0..k).step_by(TILE_DEPTH).zip(to.chunks_exact_mut(width * TILE_ROWS)) {
            let depth = TILE_DEPTH.min(k - first);
            for column in 0..panel.columns {
                let from = &weight[(panel.start + column) * k + first..][..depth];
                for (pair, to) in from.chunks(2).zip(to[column..].iter_mut().step_by(width)) {
                    let upper = pair.get(1).map_or(0, |value| bfloat16_bits(*value));
                    *to = f32::from_bits(u32::from(upper) << 16 | u32::from(bfloat16_bits(pair[0])));
                }
            }
        }
    }
    PackedMatrix::from_parts(isa, panels, Storage::Bfloat16, [n, k, steps], lines)
}

/// Rounds rows of `k` to the nearest bfloat16, ties to even, tile after tile: those of 16 rows follow each other in the
/// order of k. What is missing of the last row of tiles and of the last tile of each is zero.
#[inline(always)]
pub(super) fn round_rows(x: &[f32], rows: usize, k: usize, tiles: &mut Vec<TileRow>) {
    let depth_tiles = k.div_ceil(TILE_DEPTH);
    if depth_tiles == 0 {
        return tiles.clear();
    }
    tiles.resize(rows.next_multiple_of(TILE_ROWS) * depth_tiles, TileRow::ZERO);
    for row in 0..rows.next_multiple_of(TILE_ROWS) {
        let first = row / TILE_ROWS * TILE_ROWS * depth_tiles + row % TILE_ROWS;
        let lines = tiles[first..].iter_mut().step_by(TILE_ROWS).take(depth_tiles);
        if row >= rows {
            lines.for_each(|line| *line = TileRow::ZERO);
            continue;
        }
        for (line, numbers) in lines.zip(x[row * k..][..k].chunks(TILE_DEPTH)) {
            if numbers.len() < TILE_DEPTH {
                *line = TileRow::ZERO;
            }
            line.0.iter_mut().zip(numbers).for_each(|(to, from)| *to = bfloat16_bits(*from));
        }
    }
}
