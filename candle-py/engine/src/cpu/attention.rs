//! Attention of one sequence: blocks of keys, tiles of query rows, a float32 softmax between two small matrix products.
//!
//! Up to `KEY_BLOCK` keys the softmax of a row is done in one go. Beyond that blocks follow one another and the row's
//! running greatest and sum are carried on (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135), so
//! that scratch is bounded whatever the length. Which keys a row looks at, and in which order, depends on its position alone.

use std::ops::Range;

use super::assert_rows;
use super::pack::{LINE_FLOATS, Panel, Panels, pack_rows};
use super::reduce::{exp_and_sum, greatest_of};
use super::simd::{Op, Simd};
use super::tile::{Ahead, 
    MOST_ROWS, Tile, add_product, add_rows, for_each_height, store_rows, whole_tiles, with_width, zeros,
};

/// Keys whose scores of a tile of rows are held at a time: their packed keys and values fit L2, the scores L1. A multiple
/// of every instruction set's panel.
const KEY_BLOCK: usize = 576;

/// One sequence: queries `(q_len, heads * head_dim)`, keys and values `(k_len, kv_heads * head_dim)`, each with its own
/// row stride (so that they may be columns of one buffer).
#[derive(Clone, Copy, Debug)]
pub struct AttentionArgs<'a> {
    /// Queries.
    pub q: &'a [f32],
    /// Keys.
    pub k: &'a [f32],
    /// Values.
    pub v: &'a [f32],
    /// Floats from one row of q to the next.
    pub q_stride: usize,
    /// Floats from one row of k to the next.
    pub k_stride: usize,
    /// Floats from one row of v to the next.
    pub v_stride: usize,
    /// Floats from one row of the output to the next.
    pub out_stride: usize,
    /// Rows of q and of the output.
    pub q_len: usize,
    /// Rows of k and v.
    pub k_len: usize,
    /// Heads of q and of the output.
    pub heads: usize,
    /// Heads of k and v; query head `h` reads `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Multiplies the scores; positive.
    pub scale: f32,
    /// A query at position `p` sees keys `..= p` only.
    pub causal: bool,
    /// Position of query row 0 among the keys.
    pub q_offset: usize,
    /// A query at position `p` sees keys `p - left ..= p + right` only.
    pub window: Option<(usize, usize)>,
}

impl AttentionArgs<'_> {
    /// Asserts that every buffer holds what the sizes say.
    pub(super) fn check(&self, out_len: usize) {
        assert!(self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads), "heads is not a multiple of kv_heads");
        assert!(self.head_dim > 0, "head_dim is zero");
        assert!(self.scale > 0.0, "scale is not positive");
        assert_rows(self.q.len(), self.q_len, self.heads * self.head_dim, self.q_stride);
        assert_rows(self.k.len(), self.k_len, self.kv_heads * self.head_dim, self.k_stride);
        assert_rows(self.v.len(), self.k_len, self.kv_heads * self.head_dim, self.v_stride);
        assert_rows(out_len, self.q_len, self.heads * self.head_dim, self.out_stride);
    }

    /// The keys that query row `row` may look at.
    fn visible(&self, row: usize) -> Range<usize> {
        let position = self.q_offset.saturating_add(row);
        let (left, mut right) = self.window.unwrap_or((usize::MAX, usize::MAX));
        if self.causal {
            right = 0;
        }
        let end = position.saturating_add(right).saturating_add(1).min(self.k_len);
        position.saturating_sub(left).min(end)..end
    }
}

/// `Kernels::attention`, whose sizes it has checked.
pub(super) struct Attention<'a> {
    pub(super) args: &'a AttentionArgs<'a>,
    pub(super) scratch: &'a mut Vec<f32>,
    pub(super) out: &'a mut [f32],
}

/// What lies in the scratch.
struct Workspace<'a> {
    /// The block's keys as panels of columns, `head_dim` long.
    keys: &'a mut [f32],
    /// The block's values as panels of `head_dim` columns, as long as the block.
    values: &'a mut [f32],
    /// Scores of a tile of rows.
    scores: &'a mut [f32],
    /// Floats from one row of scores to the next.
    score_stride: usize,
    /// Greatest score and sum of powers so far, for every head that shares the keys and every row.
    state: &'a mut [[f32; 2]],
}

impl Op for Attention<'_> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        let Attention { args, scratch, out } = self;
        let group = args.heads / args.kv_heads;
        let value_panels = Panels::new(args.head_dim, S::LANES, S::TILE_REGISTERS);
        let block_len = KEY_BLOCK.min(args.k_len.next_multiple_of(S::LANES));
        let mut work = split_scratch::<S>(scratch, args, block_len, value_panels);
        for kv_head in 0..args.kv_heads {
            work.state.fill([f32::NEG_INFINITY, 0.0]);
            for start in (0..args.k_len.max(1)).step_by(KEY_BLOCK) {
                let keys = start..args.k_len.min(start + KEY_BLOCK);
                let key_panels = Panels::new(keys.len(), S::LANES, S::TILE_REGISTERS);
                let block = Block { keys, key_panels, value_panels };
                pack_block(s, args, &block, kv_head, &mut work);
                for member in 0..group {
                    let head = kv_head * group + member;
                    let out = &mut out[head * args.head_dim..];
                    for_each_height!(S, args.q_len, |rows, ROWS| {
                        s.run(Tiles::<'_, '_, ROWS> { args, block: &block, work: &mut work, head, member, rows, out })
                    });
                }
            }
        }
    }
}

/// Cuts the scratch into its parts, each on a cache line.
#[inline(always)]
fn split_scratch<'a, S: Simd>(
    scratch: &'a mut Vec<f32>,
    args: &AttentionArgs<'_>,
    block: usize,
    value_panels: Panels,
) -> Workspace<'a> {
    let keys = block * args.head_dim;
    let values = value_panels.packed_len(block);
    let scores = S::TILE_ROWS * block;
    let state = 2 * args.q_len * (args.heads / args.kv_heads);
    let parts = [keys, values, scores, state].map(|floats| floats.next_multiple_of(LINE_FLOATS));
    let needed = LINE_FLOATS + parts.iter().sum::<usize>();
    if scratch.len() < needed {
        scratch.resize(needed, 0.0);
    }
    let skipped = scratch.as_ptr().align_offset(LINE_FLOATS * size_of::<f32>()).min(LINE_FLOATS);
    let (keys, rest) = scratch[skipped..].split_at_mut(parts[0]);
    let (values, rest) = rest.split_at_mut(parts[1]);
    let (scores, rest) = rest.split_at_mut(parts[2]);
    let (state, _) = rest[..state].as_chunks_mut();
    Workspace { keys, values, scores, score_stride: block, state }
}

/// A block of keys and how it is packed.
struct Block {
    keys: Range<usize>,
    key_panels: Panels,
    value_panels: Panels,
}

/// Packs the keys and values of one block of one head.
#[inline(always)]
fn pack_block<S: Simd>(s: S, args: &AttentionArgs<'_>, block: &Block, kv_head: usize, work: &mut Workspace<'_>) {
    if block.keys.is_empty() {
        return;
    }
    let column = kv_head * args.head_dim;
    let from = &args.k[block.keys.start * args.k_stride + column..];
    pack_rows(from, args.k_stride, args.head_dim, block.key_panels, work.keys);
    let from = &args.v[block.keys.start * args.v_stride + column..];
    pack_values(s, from, args.v_stride, block.keys.len(), block.value_panels, work.values);
}

/// Copies `rows` of values into panels whose rows are whole registers, padded with zeros.
#[inline(always)]
fn pack_values<S: Simd>(s: S, from: &[f32], stride: usize, rows: usize, panels: Panels, to: &mut [f32]) {
    for index in 0..panels.count() {
        let panel = panels.get(index);
        let width = panel.registers * S::LANES;
        let to = &mut to[panel.start * rows..][..width * rows];
        for (row, to) in to.chunks_exact_mut(width).enumerate() {
            let from = &from[row * stride + panel.start..][..panel.columns];
            let mut i = 0;
            while i < width {
                let count = S::LANES.min(panel.columns - i);
                // SAFETY: `count` columns are left of `from`, a whole register of `to`.
                unsafe { s.store(s.load_first(from.as_ptr().add(i), count, 0.0), to.as_mut_ptr().add(i)) };
                i += S::LANES;
            }
        }
    }
}

/// Tiles of `ROWS` query rows, one under the other, of one head, against one block of keys.
struct Tiles<'a, 'b, const ROWS: usize> {
    args: &'b AttentionArgs<'a>,
    block: &'b Block,
    work: &'b mut Workspace<'a>,
    head: usize,
    /// Which of the heads that share the keys.
    member: usize,
    rows: Range<usize>,
    /// The output from the first row's columns of this head.
    out: &'b mut [f32],
}

impl<const ROWS: usize> Op for Tiles<'_, '_, ROWS> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        for row in self.rows.step_by(ROWS) {
            let state = self.member * self.args.q_len + row;
            let out = &mut self.out[row * self.args.out_stride..];
            attend_tile::<S, ROWS>(s, self.args, self.block, self.work, state, self.head, row, out);
        }
    }
}

/// Query rows `row .. row + ROWS` of `head` against one block of keys; `out` starts at the first row's columns of the head,
/// `state` at the first row's running greatest and sum.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn attend_tile<S: Simd, const ROWS: usize>(
    s: S,
    args: &AttentionArgs<'_>,
    block: &Block,
    work: &mut Workspace<'_>,
    state: usize,
    head: usize,
    row: usize,
    out: &mut [f32],
) {
    let rows = row..row + ROWS;
    // What some row of the tile may look at: a row's range moves on with its position.
    let seen = args.visible(rows.start).start..args.visible(rows.end - 1).end;
    if seen.is_empty() {
        out.chunks_mut(args.out_stride).take(ROWS).for_each(|out| out[..args.head_dim].fill(0.0));
        return;
    }
    let here = local(&seen, &block.keys);
    if here.is_empty() {
        return;
    }
    let q = &args.q[rows.start * args.q_stride + head * args.head_dim..];
    for index in 0..block.key_panels.count() {
        let panel = block.key_panels.get(index);
        if panel.start < here.end && here.start < panel.start + panel.columns {
            with_width!(S, panel.registers, |WIDTH| score_tile::<S, ROWS, WIDTH>(s, args, q, panel, work));
        }
    }
    let mut step = Step { keys: here.clone(), before: [0.0; MOST_ROWS], after: [1.0; MOST_ROWS] };
    let first = seen.start >= block.keys.start;
    let last = seen.end <= block.keys.end;
    for (m, row) in rows.clone().enumerate() {
        let visible = local(&args.visible(row), &block.keys);
        let scores = &mut work.scores[m * work.score_stride..][..here.end];
        scores[here.start..visible.start.max(here.start)].fill(0.0);
        scores[visible.end.min(here.end)..].fill(0.0);
        let [greatest, sum] = &mut work.state[state + m];
        if !visible.is_empty() {
            let scores = &mut scores[visible];
            let greater = greatest.max(greatest_of(s, scores));
            if !first {
                step.before[m] = if *sum == 0.0 { 0.0 } else { ((*greatest - greater) * args.scale).exp() };
            }
            *sum = *sum * step.before[m] + exp_and_sum(s, scores, greater, args.scale);
            *greatest = greater;
        } else if !first {
            step.before[m] = 1.0;
        }
        if last {
            step.after[m] = if *sum == 0.0 { 0.0 } else { 1.0 / *sum };
        }
    }
    for index in 0..block.value_panels.count() {
        let panel = block.value_panels.get(index);
        with_width!(S, panel.registers, |WIDTH| value_tile::<S, ROWS, WIDTH>(s, args, block, work, panel, &step, out));
    }
}

/// The part of `range` inside `block`, counted from the block's start.
#[inline(always)]
fn local(range: &Range<usize>, block: &Range<usize>) -> Range<usize> {
    let start = range.start.clamp(block.start, block.end);
    let end = range.end.clamp(start, block.end);
    start - block.start..end - block.start
}

/// Scores of one panel of keys, not yet scaled.
#[inline(always)]
fn score_tile<S: Simd, const ROWS: usize, const REGISTERS: usize>(
    s: S,
    args: &AttentionArgs<'_>,
    q: &[f32],
    panel: Panel,
    work: &mut Workspace<'_>,
) {
    let (k, width) = (args.head_dim, REGISTERS * S::LANES);
    let q = &q[..(ROWS - 1) * args.q_stride + k];
    let b = &work.keys[panel.start * k..][..width * k];
    // SAFETY: the two slices are what the product reads.
    let tile = unsafe { add_product(s, zeros::<S, ROWS, REGISTERS>(s), q.as_ptr(), args.q_stride, b.as_ptr(), k, Ahead::NOTHING) };
    let scores = &mut work.scores[panel.start..][..(ROWS - 1) * work.score_stride + width];
    // SAFETY: the slice holds the tile's rows.
    unsafe { store_rows(s, tile, scores.as_mut_ptr(), work.score_stride, width) };
}

/// How a tile's output goes on: `out = (out * before + powers @ values) * after`, row by row.
struct Step {
    /// Keys of the block that count.
    keys: Range<usize>,
    /// Zero where there is no output yet.
    before: [f32; MOST_ROWS],
    /// One until the last block.
    after: [f32; MOST_ROWS],
}

/// One panel of a tile's output columns.
#[inline(always)]
fn value_tile<S: Simd, const ROWS: usize, const REGISTERS: usize>(
    s: S,
    args: &AttentionArgs<'_>,
    block: &Block,
    work: &Workspace<'_>,
    panel: Panel,
    step: &Step,
    out: &mut [f32],
) {
    let (start, k, width) = (step.keys.start, step.keys.len(), REGISTERS * S::LANES);
    let out = &mut out[panel.start..][..(ROWS - 1) * args.out_stride + panel.columns];
    let powers = &work.scores[start..][..(ROWS - 1) * work.score_stride + k];
    let values = &work.values[panel.start * block.keys.len() + start * width..][..k * width];
    let mut tile = zeros::<S, ROWS, REGISTERS>(s);
    if step.before != [0.0; MOST_ROWS] {
        // SAFETY: the slice holds the tile's rows.
        tile = unsafe { add_rows(s, tile, out.as_ptr(), args.out_stride, panel.columns) };
        scale_rows(s, &mut tile, &step.before);
    }
    // SAFETY: the two slices are what the product reads.
    tile = unsafe { add_product(s, tile, powers.as_ptr(), work.score_stride, values.as_ptr(), k, Ahead::NOTHING) };
    scale_rows(s, &mut tile, &step.after);
    // SAFETY: the slice holds the tile's rows.
    unsafe { store_rows(s, tile, out.as_mut_ptr(), args.out_stride, panel.columns) };
}

/// Multiplies every row of the tile by its factor.
#[inline(always)]
fn scale_rows<S: Simd, const ROWS: usize, const REGISTERS: usize>(
    s: S,
    tile: &mut Tile<S, ROWS, REGISTERS>,
    factors: &[f32; MOST_ROWS],
) {
    for (row, factor) in tile.iter_mut().zip(factors) {
        for value in row.iter_mut() {
            *value = s.mul(*value, s.splat(*factor));
        }
    }
}
