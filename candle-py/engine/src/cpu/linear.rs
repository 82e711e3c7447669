//! `epilogue(x @ weight^T + bias)`: the loops over panels and row tiles, and what happens to a tile before it leaves L1.

use std::ops::Range;

use super::activation::{Activation, activate_tile};
use super::pack::{LINE_FLOATS, PackedMatrix, Panel};
use super::simd::{Op, Simd};
use super::tile::{
    Ahead, Left, Right, add_product, add_rows, for_each_height, lanes_left, store_rows, with_width, zeros,
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

    /// A panel of the weight stays in L1 or L2 while every row tile passes by; rows come from L2.
    #[inline(always)]
    fn apply<S: Simd>(mut self, s: S) {
        let panels = self.weight.panels;
        for index in self.panels.clone() {
            let panel = panels.get(index);
            for_each_height!(S, self.rows, |rows, ROWS| {
                with_width!(S, panel.registers, |REGISTERS| {
                    s.run(Tiles::<'_, '_, ROWS, REGISTERS> { op: &mut self, panel, rows })
                })
            });
        }
    }
}

/// Tiles of `ROWS` rows, one under the other, of one panel's columns.
struct Tiles<'a, 'b, const ROWS: usize, const REGISTERS: usize> {
    op: &'b mut Linear<'a>,
    panel: Panel,
    rows: Range<usize>,
}

impl<const ROWS: usize, const REGISTERS: usize> Op for Tiles<'_, '_, ROWS, REGISTERS> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        for row in self.rows.step_by(ROWS) {
            linear_tile::<S, ROWS, REGISTERS>(s, self.op, self.panel, row);
        }
    }
}

/// One tile: rows `row .. row + ROWS` of one panel's columns.
#[inline(always)]
fn linear_tile<S: Simd, const ROWS: usize, const REGISTERS: usize>(
    s: S,
    op: &mut Linear<'_>,
    panel: Panel,
    row: usize,
) {
    let k = op.weight.k();
    let x = Left { at: op.x[row * k..][..ROWS * k].as_ptr(), row: k, step: 1 };
    let width = REGISTERS * S::LANES;
    let panel_floats = &op.weight.floats()[panel.start * k..][..width * k];
    let weight = Right { at: panel_floats.as_ptr(), step: width };
    let ahead = next_lines::<S>(op, panel, row);
    prefetch_rows::<S, ROWS, REGISTERS>(s, op.out, op.out_stride, panel, row);
    if let Epilogue::Add(residual, stride) = op.epilogue {
        prefetch_rows::<S, ROWS, REGISTERS>(s, residual.as_ptr(), stride, panel, row);
    }
    // SAFETY: the two slices are what the product reads.
    let mut tile = unsafe { add_product(s, zeros::<S, ROWS, REGISTERS>(s), x, weight, k, ahead) };

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
fn next_lines<S: Simd>(op: &Linear<'_>, panel: Panel, row: usize) -> Ahead {
    let k = op.weight.k();
    let floats = op.weight.floats();
    let start = ((panel.start + panel.registers * S::LANES) * k).min(floats.len());
    let lines = (floats.len() - start).min(panel.registers * S::LANES * k) / LINE_FLOATS;
    let (first, end) = (lines * row / op.rows, lines * (row + S::TILE_ROWS).min(op.rows) / op.rows);
    Ahead { at: floats[start..].as_ptr().wrapping_add(first * LINE_FLOATS), lines: end - first }
}

/// Asks for a tile's part of `rows` in L1, long before the product is there.
#[inline(always)]
fn prefetch_rows<S: Simd, const ROWS: usize, const REGISTERS: usize>(
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
