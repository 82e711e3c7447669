//! `epilogue(x @ weight^T + bias)` on tiles: both operands in bfloat16, sums in float32. The loops are the same over the
//! hardware's tiles and their twin in software.
//!
//! An element is summed in the order of k, tile by tile, whatever the rows beside it: a row has the same bits in every batch.

use std::cell::Cell;

use super::Isa;
use super::activation::{Activate, Activation};
#[cfg(target_arch = "x86_64")]
use super::amx::AmxTiles;
use super::amx_pack::{PANEL_TILES, round_rows};
use super::linear::{Epilogue, Linear};
use super::pack::{CACHED_BYTES, LINE_FLOATS, Panel};
use super::simd::{Op, Simd, each_register};
use super::tiles::{ROW_BYTES, TILE_COLUMNS, TILE_ROWS, TileRow, Tiles};
use super::tiles_soft::SoftTiles;

/// Rows and columns of a block: two by two tiles, whose four products share four loads.
const BLOCK_ROWS: usize = 2 * TILE_ROWS;
const BLOCK_COLUMNS: usize = PANEL_TILES * TILE_COLUMNS;

thread_local! {
    /// The rows that this thread has rounded. A product takes them and puts them back: no borrow is held meanwhile.
    static ROUNDED: Cell<Vec<TileRow>> = const { Cell::new(Vec::new()) };
}

/// `Linear` for a weight in the order of tiles.
pub(super) struct TiledLinear<'a> {
    pub(super) linear: Linear<'a>,
    pub(super) isa: Isa,
}

impl Op for TiledLinear<'_> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => product::<S, AmxTiles>(s, &self.linear),
            _ => product::<S, SoftTiles>(s, &self.linear),
        }
    }
}

/// All rows, as many at a time as stay in L2; for each such part, panel after panel of the weight, which comes from far and
/// stays in L1 or L2 while the rows pass by.
#[inline(always)]
fn product<S: Simd, T: Tiles>(s: S, op: &Linear<'_>) {
    let k = op.weight.k();
    let depth = op.weight.steps() / TILE_ROWS;
    let part_rows = (CACHED_BYTES / (ROW_BYTES * depth.max(1))).max(1).next_multiple_of(BLOCK_ROWS);
    let mut rounded = ROUNDED.take();
    let mut tiles = T::begin();
    let mut sums = Sums([0.0; BLOCK_ROWS * BLOCK_COLUMNS]);
    for first in (0..op.rows).step_by(part_rows) {
        let rows = part_rows.min(op.rows - first);
        round_rows(&op.x[first * k..][..rows * k], rows, k, &mut rounded);
        for index in op.panels.clone() {
            let panel = op.weight.panels.get(index);
            for row in (0..rows).step_by(BLOCK_ROWS) {
                let block = Block { panel, row, rows: BLOCK_ROWS.min(rows - row), depth };
                let ahead = Ahead::of(op, &block, rows);
                let x = &rounded[row * depth..][..block.rows.next_multiple_of(TILE_ROWS) * depth];
                match (block.rows > TILE_ROWS, panel.registers > 1) {
                    (true, true) => sum_block::<S, T, true, true>(s, &mut tiles, op, &block, x, ahead, &mut sums),
                    (true, false) => sum_block::<S, T, true, false>(s, &mut tiles, op, &block, x, ahead, &mut sums),
                    (false, true) => sum_block::<S, T, false, true>(s, &mut tiles, op, &block, x, ahead, &mut sums),
                    (false, false) => sum_block::<S, T, false, false>(s, &mut tiles, op, &block, x, ahead, &mut sums),
                }
                finish(s, op, &block, first + row, &mut sums.0);
            }
        }
    }
    drop(tiles);
    ROUNDED.set(rounded);
}

/// The sums of a block, row by row.
#[repr(C, align(64))]
struct Sums([f32; BLOCK_ROWS * BLOCK_COLUMNS]);

/// Up to 32 rows of one panel's columns.
struct Block {
    panel: Panel,
    /// First row among those rounded.
    row: usize,
    rows: usize,
    /// Tiles of k.
    depth: usize,
}

/// The lines of the next panel that a block asks for, some at each step of k.
#[derive(Clone, Copy)]
struct Ahead {
    at: *const f32,
    lines_per_step: usize,
}

impl Ahead {
    /// The block's share of the panel after its own, where `rows` rows pass by each panel.
    #[inline(always)]
    fn of(op: &Linear<'_>, block: &Block, rows: usize) -> Ahead {
        let lines_per_step = (TILE_ROWS * PANEL_TILES).div_ceil(rows.div_ceil(BLOCK_ROWS));
        let next = (block.panel.start + block.panel.registers * TILE_COLUMNS) * op.weight.steps();
        let own = block.row / BLOCK_ROWS * block.depth * lines_per_step;
        Ahead { at: op.weight.floats().as_ptr().wrapping_add(next + own * LINE_FLOATS), lines_per_step }
    }
}

/// The block's products, summed over all of k. `x` holds its rounded rows, `TALL` is whether they are two tiles high, `WIDE`
/// whether the panel is two tiles wide. Registers: sums in 0 to 3, rows in 4 and 5, columns in 6 and 7.
#[inline(always)]
fn sum_block<S: Simd, T: Tiles, const TALL: bool, const WIDE: bool>(
    s: S,
    tiles: &mut T,
    op: &Linear<'_>,
    block: &Block,
    x: &[TileRow],
    ahead: Ahead,
    sums: &mut Sums,
) {
    let (panel, depth) = (block.panel, block.depth);
    let row_bytes = panel.registers * ROW_BYTES;
    let weight = &op.weight.floats()[panel.start * op.weight.steps()..][..depth * TILE_ROWS * row_bytes / 4];
    let (x, weight) = (x[..depth * TILE_ROWS * (1 + usize::from(TALL))].as_ptr(), weight.as_ptr().cast::<u8>());
    tiles.zero::<0>();
    if WIDE {
        tiles.zero::<1>();
    }
    if TALL {
        tiles.zero::<2>();
    }
    if TALL && WIDE {
        tiles.zero::<3>();
    }
    for step in 0..depth {
        let (rows, columns) = (x.wrapping_add(step * TILE_ROWS), weight.wrapping_add(step * TILE_ROWS * row_bytes));
        // SAFETY: the two slices are `depth` tiles long, one (`TALL`, `WIDE`: two) of 16 rows per step; a second tile of
        // rows comes after all of the first, a second one of columns lies beside the first.
        unsafe {
            tiles.load::<6>(columns, row_bytes);
            tiles.load::<4>(rows.cast(), ROW_BYTES);
            tiles.dot::<0, 4, 6>();
            if WIDE {
                tiles.load::<7>(columns.wrapping_add(ROW_BYTES), row_bytes);
                tiles.dot::<1, 4, 7>();
            }
            if TALL {
                tiles.load::<5>(rows.wrapping_add(depth * TILE_ROWS).cast(), ROW_BYTES);
                tiles.dot::<2, 5, 6>();
            }
        }
        if TALL && WIDE {
            tiles.dot::<3, 5, 7>();
        }
        for line in step * ahead.lines_per_step..(step + 1) * ahead.lines_per_step {
            s.prefetch_far(ahead.at.wrapping_add(line * LINE_FLOATS));
        }
    }
    let (to, stride) = (sums.0.as_mut_ptr(), BLOCK_COLUMNS * size_of::<f32>());
    let second_row = to.wrapping_add(TILE_ROWS * BLOCK_COLUMNS);
    // SAFETY: the sums are 32 rows of 32 columns, four tiles.
    unsafe {
        tiles.store::<0>(to, stride);
        if WIDE {
            tiles.store::<1>(to.wrapping_add(TILE_COLUMNS), stride);
        }
        if TALL {
            tiles.store::<2>(second_row, stride);
        }
        if TALL && WIDE {
            tiles.store::<3>(second_row.wrapping_add(TILE_COLUMNS), stride);
        }
    }
}

/// What happens to a block's sums on their way out. `row` is the block's first among all.
#[inline(always)]
fn finish<S: Simd>(s: S, op: &Linear<'_>, block: &Block, row: usize, sums: &mut [f32; BLOCK_ROWS * BLOCK_COLUMNS]) {
    let Panel { start, columns, .. } = block.panel;
    let bias = op.bias.map(|bias| bias[start..][..columns].as_ptr());
    let out = |m: usize| op.out.wrapping_add((row + m) * op.out_stride + start);
    let activation = match op.epilogue {
        Epilogue::Activation(activation) if activation != Activation::Identity => Some(activation),
        _ => None,
    };
    for m in 0..block.rows {
        let from = sums[m * BLOCK_COLUMNS..][..columns].as_mut_ptr();
        let to = if activation.is_some() { from } else { out(m) };
        let added = match op.epilogue {
            Epilogue::Add(residual, stride) => Some(residual[(row + m) * stride + start..][..columns].as_ptr()),
            _ => None,
        };
        each_register!(S, columns, |i, count| {
            // SAFETY: `count` floats are left of the four rows; those of `out` are writable, as the operation's caller says.
            unsafe {
                let mut sum = s.load_first(from.add(i), count, 0.0);
                if let Some(bias) = bias {
                    sum = s.add(sum, s.load_first(bias.add(i), count, 0.0));
                }
                if let Some(added) = added {
                    sum = s.add(sum, s.load_first(added.add(i), count, 0.0));
                }
                s.store_first(sum, to.add(i), count);
            }
        });
    }
    let Some(activation) = activation else { return };
    // Columns and rows that do not exist go along: whole registers, whatever the block's shape.
    let rows = block.rows.next_multiple_of(4).min(BLOCK_ROWS);
    Activate { x: &mut sums[..rows * BLOCK_COLUMNS], activation }.apply(s);
    for m in 0..block.rows {
        let from = sums[m * BLOCK_COLUMNS..][..columns].as_ptr();
        // SAFETY: as above; the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, out(m), columns) };
    }
}
