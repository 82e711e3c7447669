//! `epilogue(x @ weight^T + bias)`: the loops over panels and row tiles, and what happens to a tile before it leaves L1.

use std::cell::RefCell;
use std::ops::Range;

use super::activation::{Activation, activate_tile};
use super::int8_rows::QuantizedRows;
use super::pack::{LINE_FLOATS, Line, PackedMatrix, Panel, Storage, floats_of, floats_of_mut};
use super::simd::{Op, Simd};
use super::tile::{
    Ahead, Left, Right, Tile, add_product, add_product_of_pairs, add_rows, for_each_height, lanes_left, store_rows,
    with_width, zeros,
};

/// What `linear` does to its output tile by tile.
#[derive(Clone, Copy, Debug)]
pub enum Epilogue<'a> {
    /// Nothing.
    None,
    /// The function, after the bias.
    Activation(Activation),
    /// Adds a residual `(rows, n)` whose row stride is the second field.
    Add(&'a [f32], usize),
}

/// The arguments of `Kernels::linear`, whose sizes it has checked.
pub(super) struct Linear<'a> {
    pub(super) x: &'a [f32],
    /// `x` for a weight of bytes, if somebody has quantised it already.
    pub(super) quantized: Option<&'a QuantizedRows>,
    pub(super) rows: usize,
    pub(super) weight: &'a PackedMatrix,
    pub(super) bias: Option<&'a [f32]>,
    pub(super) epilogue: Epilogue<'a>,
    /// Writable where `Kernels::linear_panels` says.
    pub(super) out: *mut f32,
    pub(super) out_stride: usize,
    pub(super) panels: Range<usize>,
}

impl Op for Linear<'_> {
    type Output = ();

    /// A panel of the weight stays in L1 or L2 while every row tile passes by; rows come from L2. Where many rows pass by
    /// a panel of bfloat16, it is unfolded to float32 once for all of them.
    #[inline(always)]
    fn apply<S: Simd>(mut self, s: S) {
        let (panels, steps, k) = (self.weight.panels, self.weight.steps(), self.weight.k());
        let storage = self.weight.storage;
        for index in self.panels.clone() {
            let panel = panels.get(index);
            let width = panel.registers * S::LANES;
            let packed = &self.weight.floats()[panel.start * steps..][..width * steps];
            if storage == Storage::Bfloat16 && self.rows >= ROWS_WORTH_UNFOLDING {
                UNFOLDED.with_borrow_mut(|lines| {
                    lines.resize((k.next_multiple_of(2) * width).div_ceil(LINE_FLOATS), Line::ZERO);
                    s.run(Unfold { pairs: packed, width, to: floats_of_mut(lines) });
                    self.panel::<S>(s, panel, &floats_of(lines)[..width * k], Storage::Float32);
                });
            } else {
                self.panel::<S>(s, panel, packed, storage);
            }
        }
    }
}

/// Fewer rows than this do not pay for unfolding a panel.
const ROWS_WORTH_UNFOLDING: usize = 24;

thread_local! {
    /// The panel that this thread has unfolded.
    static UNFOLDED: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// A panel of bfloat16 pairs as rows of float32.
struct Unfold<'a> {
    pairs: &'a [f32],
    width: usize,
    to: &'a mut [f32],
}

impl Op for Unfold<'_> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        for (pairs, to) in self.pairs.chunks_exact(self.width).zip(self.to.chunks_exact_mut(2 * self.width)) {
            let (even, odd) = to.split_at_mut(self.width);
            for lane in (0..self.width).step_by(S::LANES) {
                // SAFETY: the three slices are whole registers long, and `lane` begins one of them.
                unsafe {
                    let lanes = s.load(pairs.as_ptr().add(lane));
                    s.store(s.lower_bfloat16(lanes), even.as_mut_ptr().add(lane));
                    s.store(s.upper_bfloat16(lanes), odd.as_mut_ptr().add(lane));
                }
            }
        }
    }
}

impl Linear<'_> {
    /// All rows of one panel's columns; `weight` is the panel, held as `storage`.
    #[inline(always)]
    fn panel<S: Simd>(&mut self, s: S, panel: Panel, weight: &[f32], storage: Storage) {
        for_each_height!(S::TILE_ROWS, self.rows, |rows, ROWS| {
            with_width!(S::TILE_REGISTERS, panel.registers, |REGISTERS| {
                s.run(Tiles::<'_, '_, ROWS, REGISTERS> { op: self, panel, weight, storage, rows })
            })
        });
    }
}

/// Tiles of `ROWS` rows, one under the other, of one panel's columns.
struct Tiles<'a, 'b, const ROWS: usize, const REGISTERS: usize> {
    op: &'b mut Linear<'a>,
    panel: Panel,
    weight: &'b [f32],
    storage: Storage,
    rows: Range<usize>,
}

impl<const ROWS: usize, const REGISTERS: usize> Op for Tiles<'_, '_, ROWS, REGISTERS> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        for row in self.rows.step_by(ROWS) {
            linear_tile::<S, ROWS, REGISTERS>(s, self.op, self.panel, self.weight, self.storage, row);
        }
    }
}

/// One tile: rows `row .. row + ROWS` of one panel's columns.
#[inline(always)]
fn linear_tile<S: Simd, const ROWS: usize, const REGISTERS: usize>(
    s: S,
    op: &mut Linear<'_>,
    panel: Panel,
    weight: &[f32],
    storage: Storage,
    row: usize,
) {
    let k = op.weight.k();
    let x = Left { at: op.x[row * k..][..ROWS * k].as_ptr(), row: k, step: 1 };
    let width = REGISTERS * S::LANES;
    let weight = Right { at: weight[..width * storage.steps(k)].as_ptr(), step: width };
    let ahead = next_lines::<S>(op, panel, row, S::TILE_ROWS);
    prefetch_rows::<S, ROWS, REGISTERS>(s, op.out, op.out_stride, panel, row);
    if let Epilogue::Add(residual, stride) = op.epilogue {
        prefetch_rows::<S, ROWS, REGISTERS>(s, residual.as_ptr(), stride, panel, row);
    }
    // SAFETY: the two slices are what the product reads.
    let tile = unsafe {
        match storage {
            Storage::Bfloat16 => add_product_of_pairs(s, zeros::<S, ROWS, REGISTERS>(s), x, weight, k, ahead),
            _ => add_product(s, zeros::<S, ROWS, REGISTERS>(s), x, weight, k, ahead),
        }
    };
    finish_tile::<S, ROWS, REGISTERS>(s, op, panel, row, tile);
}

/// What happens to a tile's sums, rows `row .. row + ROWS` of one panel's columns, on their way out.
#[inline(always)]
pub(super) fn finish_tile<S: Simd, const ROWS: usize, const REGISTERS: usize>(
    s: S,
    op: &mut Linear<'_>,
    panel: Panel,
    row: usize,
    mut tile: Tile<S, ROWS, REGISTERS>,
) {
    if let Some(bias) = op.bias {
        let bias = &bias[panel.start..][..panel.columns];
        for r in 0..REGISTERS {
            let count = lanes_left::<S>(panel.columns, r);
            // SAFETY: `count` floats are left of the panel's part of the bias.
            let bias = unsafe { s.load_first(bias.as_ptr().add(r * S::LANES), count, 0.0) };
            for row in tile.iter_mut() {
                row[r] = s.add(row[r], bias);
            }
        }
    }
    if let Epilogue::Add(residual, stride) = op.epilogue {
        let residual = &residual[row * stride + panel.start..][..(ROWS - 1) * stride + panel.columns];
        // SAFETY: the slice holds the tile's rows.
        tile = unsafe { add_rows(s, tile, residual.as_ptr(), stride, panel.columns) };
    }
    let stride = op.out_stride;
    let out = op.out.wrapping_add(row * stride + panel.start);
    // SAFETY: the rows' part in this panel is writable, as the operation's caller says.
    unsafe {
        store_rows(s, tile, out, stride, panel.columns);
        if let Epilogue::Activation(activation) = op.epilogue {
            activate_tile::<S, ROWS>(s, activation, out, stride, panel.columns);
        }
    }
}

/// This tile's share of the panel after this one: a weight comes from far, once per call, and the rows of a panel give the
/// time to wait for it.
#[inline(always)]
pub(super) fn next_lines<S: Simd>(op: &Linear<'_>, panel: Panel, row: usize, tile_rows: usize) -> Ahead {
    let steps = op.weight.steps();
    let floats = op.weight.floats();
    let start = ((panel.start + panel.registers * S::LANES) * steps).min(floats.len());
    let lines = (floats.len() - start).min(panel.registers * S::LANES * steps) / LINE_FLOATS;
    let (first, end) = (lines * row / op.rows, lines * (row + tile_rows).min(op.rows) / op.rows);
    Ahead { at: floats[start..].as_ptr().wrapping_add(first * LINE_FLOATS), lines: end - first }
}

/// Asks for a tile's part of `rows` in L1, long before the product is there.
#[inline(always)]
pub(super) fn prefetch_rows<S: Simd, const ROWS: usize, const REGISTERS: usize>(
    s: S,
    rows: *const f32,
    stride: usize,
    panel: Panel,
    row: usize,
) {
    for m in row..row + ROWS {
        for r in 0..REGISTERS {
            s.prefetch(rows.wrapping_add(m * stride + panel.start + r * S::LANES));
        }
    }
}
