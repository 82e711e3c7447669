//! Weights as the product of bytes reads them: panels of a few registers' columns; for each 64 of k, 16 rows of lanes with
//! four bytes each, then a row of lanes with the columns' scales (which make up for the mixing of both sides, too).

use super::int8_rows::{BLOCK, quantize_block, unquantized};
use super::isa::{BytePath, Isa};
use super::pack::{LINE_FLOATS, Line, PackedMatrix, Panels, Storage, floats_of_mut};
use super::simd::{Op, Simd};

/// Numbers of k to a lane.
pub(super) const GROUP: usize = 4;

/// Rows of lanes for a block: its bytes and its scales.
pub(super) const BLOCK_STEPS: usize = BLOCK / GROUP + 1;

/// What a stored byte is more than the weight; `Simd::add_dots` counts on it.
pub(super) const EXCESS: i32 = 128;

/// Packs a weight `(n, k)`; columns that do not exist are zero.
pub(super) struct PackBytes<'a> {
    pub(super) weight: &'a [f32],
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) isa: Isa,
    pub(super) bytes: BytePath,
}

impl Op for PackBytes<'_> {
    type Output = PackedMatrix;

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) -> PackedMatrix {
        let PackBytes { weight, n, k, isa, bytes: path } = self;
        let panels = Panels::new(n, S::LANES, S::BYTE_TILE_REGISTERS);
        let steps = Storage::Int8.steps(k);
        let mut lines = vec![Line::ZERO; panels.packed_len(steps).div_ceil(LINE_FLOATS)];
        let floats = floats_of_mut(&mut lines);
        let mut bytes = [0; BLOCK];
        for index in 0..panels.count() {
            let panel = panels.get(index);
            let width = panel.registers * S::LANES;
            let to = &mut floats[panel.start * steps..][..width * steps];
            for (first, to) in (0..k).step_by(BLOCK).zip(to.chunks_exact_mut(width * BLOCK_STEPS)) {
                let depth = BLOCK.min(k - first);
                for column in 0..width {
                    let numbers = match column < panel.columns {
                        true => &weight[(panel.start + column) * k + first..][..depth],
                        false => &[],
                    };
                    let scale = quantize_block(s, numbers, &mut bytes).0 / BLOCK as f32;
                    let groups = bytes.chunks_exact(GROUP).map(|group| {
                        let group: [u8; GROUP] = std::array::from_fn(|i| group[i].wrapping_add(EXCESS as u8));
                        f32::from_bits(u32::from_ne_bytes(group))
                    });
                    let places = to[column..].iter_mut().step_by(width);
                    places.zip(groups.chain([scale])).for_each(|(to, value)| *to = value);
                }
            }
        }
        let mut packed = PackedMatrix::from_parts(isa, panels, Storage::Int8, [n, k, steps], lines);
        packed.bytes = Some(path);
        packed
    }
}

/// A column as numbers, from its lanes top to bottom.
pub(super) fn unpack_column(lanes: impl Iterator<Item = f32>, to: &mut [f32]) {
    let mut lanes = lanes;
    let mut groups = [0.0; BLOCK / GROUP];
    for to in to.chunks_mut(BLOCK) {
        groups.iter_mut().zip(&mut lanes).for_each(|(group, lane)| *group = lane);
        let scale = lanes.next().unwrap_or(0.0);
        let bytes = groups.iter().flat_map(|group| group.to_bits().to_ne_bytes());
        let block = unquantized(bytes.map(|byte| i32::from(byte) - EXCESS), scale);
        to.copy_from_slice(&block[..to.len()]);
    }
}
