//! `epilogue(x @ weight^T + bias)` on bytes: rows and weights in blocks of 64 signed bytes with a float32 scale. Products
//! within a block are summed exactly, in integers; the blocks' sums follow each other in float32, in the order of k, whatever
//! the tile's shape: a row has the same bits in every batch.
//!
//! The way of GGML's Q8_0, with longer blocks; weights are stored 128 more than they are, as VNNI wants one side unsigned.

use std::ops::Range;

use super::int8_pack::{BLOCK_STEPS, GROUP};
use super::int8_rows::{BLOCK, Quantize, QuantizedRows};
use super::linear::{Linear, finish_tile, next_lines, prefetch_rows};
use super::pack::{LINE_FLOATS, Panel};
use super::simd::{Op, Simd};
use super::tile::{Tile, even_heights, with_height, with_width, zeros};

/// Steps of k by which a panel is fetched to L1 ahead of its use.
const FETCH_AHEAD: usize = 16;

/// `Linear` for a weight of bytes.
pub(super) struct ByteLinear<'a> {
    pub(super) linear: Linear<'a>,
}

impl Op for ByteLinear<'_> {
    type Output = ();

    /// The rows as they come quantised; else as many at a time as stay in L2. For each such part, panel after panel of the
    /// weight.
    #[inline(always)]
    fn apply<S: Simd>(mut self, s: S) {
        if let Some(quantized) = self.linear.quantized {
            return self.part(s, quantized, 0);
        }
        let (rows, k) = (self.linear.rows, self.linear.weight.k());
        let part_rows = QuantizedRows::most_rows(k).next_multiple_of(S::BYTE_TILE_ROWS);
        QuantizedRows::with(|quantized| {
            for first in (0..rows).step_by(part_rows) {
                let rows = part_rows.min(rows - first);
                quantized.reshape(rows, k);
                for to in quantized.parts_mut(rows) {
                    s.run(Quantize { x: &self.linear.x[first * k..][..rows * k], to });
                }
                self.part(s, quantized, first);
            }
        });
    }
}

impl ByteLinear<'_> {
    /// Rows `first ..` of the output, as many as are quantised.
    #[inline(always)]
    fn part<S: Simd>(&mut self, s: S, quantized: &QuantizedRows, first: usize) {
        for index in self.linear.panels.clone() {
            let panel = self.linear.weight.panels.get(index);
            for (rows, height) in even_heights(quantized.shape().0, S::BYTE_TILE_ROWS) {
                if rows.is_empty() {
                    continue;
                }
                with_height!(S::BYTE_TILE_ROWS, height, |ROWS| {
                    with_width!(S::BYTE_TILE_REGISTERS, panel.registers, |REGISTERS| {
                        s.run(Tiles::<'_, '_, ROWS, REGISTERS> { op: &mut self.linear, quantized, panel, first, rows })
                    })
                });
            }
        }
    }
}

/// Tiles of `ROWS` rows, one under the other, of one panel's columns.
struct Tiles<'a, 'b, const ROWS: usize, const REGISTERS: usize> {
    op: &'b mut Linear<'a>,
    quantized: &'b QuantizedRows,
    panel: Panel,
    /// The row that the first of those quantised is.
    first: usize,
    /// Among those quantised.
    rows: Range<usize>,
}

impl<const ROWS: usize, const REGISTERS: usize> Op for Tiles<'_, '_, ROWS, REGISTERS> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        let Tiles { op, quantized, panel, first, rows } = self;
        let blocks = op.weight.k().div_ceil(BLOCK);
        for row in rows.step_by(ROWS) {
            prefetch_rows::<S, ROWS, REGISTERS>(s, op.out, op.out_stride, panel, first + row);
            let tile = product::<S, ROWS, REGISTERS>(s, op, quantized, panel, first, row, blocks);
            finish_tile::<S, ROWS, REGISTERS>(s, op, panel, first + row, tile);
        }
    }
}

/// The product of a tile's rows, from `row` on among those quantised, and a panel's columns.
#[inline(always)]
fn product<S: Simd, const ROWS: usize, const REGISTERS: usize>(
    s: S,
    op: &Linear<'_>,
    quantized: &QuantizedRows,
    panel: Panel,
    first: usize,
    row: usize,
    blocks: usize,
) -> Tile<S, ROWS, REGISTERS> {
    let width = REGISTERS * S::LANES;
    let steps = op.weight.steps();
    let mut weights = op.weight.floats()[panel.start * steps..][..width * blocks * BLOCK_STEPS].as_ptr();
    let (scales, starts) = (quantized.scales(row, ROWS), quantized.starts(row, ROWS));
    let x = quantized.bytes().wrapping_add(row * blocks * BLOCK);
    let ahead = next_lines::<S>(op, panel, first + row, ROWS);
    let ahead_per_block = ahead.lines.div_ceil(blocks.max(1));
    let mut tile = zeros::<S, ROWS, REGISTERS>(s);
    for block in 0..blocks {
        let mut dots = [[s.splat_int(0); REGISTERS]; ROWS];
        for (m, dots) in dots.iter_mut().enumerate() {
            *dots = [s.splat_int(starts[m * blocks + block]); REGISTERS];
        }
        for group in 0..BLOCK / GROUP {
            let mut columns = [s.splat_int(0); REGISTERS];
            for (r, columns) in columns.iter_mut().enumerate() {
                let at = weights.wrapping_add(group * width + r * S::LANES);
                // SAFETY: the panel has `BLOCK_STEPS` rows of `width` lanes for each block.
                *columns = unsafe { s.load_bytes(at.cast()) };
                s.prefetch(at.wrapping_add(FETCH_AHEAD * width));
            }
            for (m, dots) in dots.iter_mut().enumerate() {
                let at = x.wrapping_add((m * blocks + block) * BLOCK + group * GROUP);
                // SAFETY: `quantized` has rows `row .. row + ROWS` (as `scales` has checked), each of `blocks` blocks.
                let x = s.splat_int(unsafe { at.cast::<i32>().read() });
                for (dots, columns) in dots.iter_mut().zip(columns) {
                    *dots = s.add_dots(*dots, columns, x);
                }
            }
        }
        for line in block * ahead_per_block..(block + 1) * ahead_per_block {
            s.prefetch_far(ahead.at.wrapping_add(line * LINE_FLOATS));
        }
        let scales_at = weights.wrapping_add((BLOCK_STEPS - 1) * width);
        for r in 0..REGISTERS {
            // SAFETY: as above.
            let columns = unsafe { s.load(scales_at.wrapping_add(r * S::LANES)) };
            for (m, (tile, dots)) in tile.iter_mut().zip(&dots).enumerate() {
                let scale = s.mul(columns, s.splat(scales[m * blocks + block]));
                tile[r] = s.mul_add(s.to_float(dots[r]), scale, tile[r]);
            }
        }
        weights = weights.wrapping_add(width * BLOCK_STEPS);
    }
    tile
}
