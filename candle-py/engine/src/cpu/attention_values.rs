//! The second product of attention: powers times values, added to the output of earlier blocks.

use std::ops::Range;

use super::attention::AttentionArgs;
use super::attention_panel::Run;
use super::pack::{Panel, Panels};
use super::simd::{Op, Simd};
use super::tile::{Ahead, Left, Right, Tile, add_product, add_rows, for_each_height, store_rows, with_width, zeros};

/// Where the values of a block are.
#[derive(Clone, Copy)]
pub(super) enum Values<'a> {
    /// In place: the head's columns from the block's first row on, and the distance between rows.
    InPlace(&'a [f32], usize),
    /// Packed into panels of so many rows, whole registers wide.
    Packed(&'a [f32], usize),
}

impl Values<'_> {
    /// Rows `keys` of one panel, `width` floats wide, as an operand.
    #[inline(always)]
    fn rows(self, panel: Panel, width: usize, keys: Range<usize>) -> Right {
        let (floats, step) = match self {
            Values::InPlace(floats, stride) => (&floats[panel.start..], stride),
            Values::Packed(floats, rows) => (&floats[panel.start * rows..], width),
        };
        let floats = &floats[keys.start * step..][..(keys.len() - 1) * step + width];
        Right { at: floats.as_ptr(), step }
    }
}

/// The output rows of one run of queries.
pub(super) struct AddValues<'a, 'b> {
    pub(super) args: &'b AttentionArgs<'a>,
    pub(super) run: Run,
    /// Powers of the scores, a key a row, a query a column.
    pub(super) powers: &'b [f32],
    /// Columns of `powers`.
    pub(super) width: usize,
    pub(super) values: Values<'b>,
    pub(super) value_panels: Panels,
    /// Keys that `powers` holds, counted from the start of the block.
    pub(super) here: Range<usize>,
    /// What the output of every query is multiplied by first; none when there is no output yet.
    pub(super) before: Option<&'b [f32]>,
    /// What it is multiplied by at the end.
    pub(super) after: &'b [f32],
    pub(super) out: &'b mut [f32],
}

impl Op for AddValues<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(mut self, s: S) {
        for index in 0..self.value_panels.count() {
            let panel = self.value_panels.get(index);
            with_width!(S::TILE_REGISTERS, panel.registers, |REGISTERS| {
                for_each_height!(S::TILE_ROWS, self.run.queries.len(), |rows, ROWS| {
                    for row in rows.step_by(ROWS) {
                        self.tile::<S, ROWS, REGISTERS>(s, panel, row);
                    }
                })
            });
        }
    }
}

impl AddValues<'_, '_> {
    /// Rows `row .. row + ROWS` of the run, columns `panel` of the head.
    #[inline(always)]
    fn tile<S: Simd, const ROWS: usize, const REGISTERS: usize>(&mut self, s: S, panel: Panel, row: usize) {
        let (args, k, columns) = (self.args, self.here.len(), REGISTERS * S::LANES);
        let query = self.run.queries.start + row;
        let powers = &self.powers[query..][..(k - 1) * self.width + ROWS];
        let left = Left { at: powers.as_ptr(), row: 1, step: self.width };
        let values = self.values.rows(panel, columns, self.here.clone());
        let start = (self.run.row + row) * args.out_stride + self.run.head * args.head_dim + panel.start;
        let out = &mut self.out[start..][..(ROWS - 1) * args.out_stride + panel.columns];

        let mut tile = zeros::<S, ROWS, REGISTERS>(s);
        if let Some(before) = self.before {
            // SAFETY: the slice holds the tile's rows.
            tile = unsafe { add_rows(s, tile, out.as_ptr(), args.out_stride, panel.columns) };
            scale_rows(s, &mut tile, &before[query..]);
        }
        // SAFETY: the two slices are what the product reads.
        tile = unsafe { add_product(s, tile, left, values, k, Ahead::NOTHING) };
        scale_rows(s, &mut tile, &self.after[query..]);
        // SAFETY: the slice holds the tile's rows.
        unsafe { store_rows(s, tile, out.as_mut_ptr(), args.out_stride, panel.columns) };
    }
}

/// Multiplies every row of the tile by its factor.
#[inline(always)]
fn scale_rows<S: Simd, const ROWS: usize, const REGISTERS: usize>(
    s: S,
    tile: &mut Tile<S, ROWS, REGISTERS>,
    factors: &[f32],
) {
    for (row, factor) in tile.iter_mut().zip(&factors[..ROWS]) {
        for value in row.iter_mut() {
            *value = s.mul(*value, s.splat(*factor));
        }
    }
}
