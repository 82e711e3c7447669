//! Attention of one sequence: its arguments, the loops over heads and blocks of keys, and the scratch.
//!
//! Queries lie across the lanes while scores are computed, so that the softmax needs no sum across a register and keys are
//! read where they are. A block of keys at a time: the greatest score and the sum of powers of every query are carried on
//! from block to block (Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135), which bounds the scratch
//! whatever the length. A query's result depends on its position and its sequence alone, never on its place in a panel.

use std::ops::Range;

use super::assert_rows;
use super::attention_panel::QueryPanel;
use super::attention_values::Values;
use super::pack::{LINE_FLOATS, Panels};
use super::simd::{Op, Simd, each_register};
use super::tile::with_width;

/// Keys whose scores of a panel of queries are held at a time.
pub(super) const KEY_BLOCK: usize = 512;

/// Panels of queries from which on the keys and values are copied.
const WORTH_A_COPY: usize = 3;

/// Running greatest score before any key: low enough for any finite score, high enough to stay finite when scaled.
pub(super) const LOWEST: f32 = -1e30;

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

    /// The keys that query row `row` may look at: both ends grow with the row.
    pub(super) fn visible(&self, row: usize) -> Range<usize> {
        let position = self.q_offset.saturating_add(row);
        let (left, mut right) = self.window.unwrap_or((usize::MAX, usize::MAX));
        if self.causal {
            right = 0;
        }
        let end = position.saturating_add(right).saturating_add(1).min(self.k_len);
        position.saturating_sub(left).min(end)..end
    }

    /// Heads that share one head of keys and values.
    pub(super) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// `Kernels::attention`, whose sizes it has checked.
pub(super) struct Attention<'a> {
    pub(super) args: &'a AttentionArgs<'a>,
    pub(super) scratch: &'a mut Vec<f32>,
    pub(super) out: &'a mut [f32],
}

impl Op for Attention<'_> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        let Attention { args, scratch, out } = self;
        // The queries of all heads that share keys, head after head.
        let query_panels = Panels::new(args.group() * args.q_len, S::LANES, S::TILE_REGISTERS);
        let value_panels = Panels::new(args.head_dim, S::LANES, S::TILE_REGISTERS);
        let mut work = Workspace::new::<S>(scratch, args, query_panels, value_panels);
        for kv_head in 0..args.kv_heads {
            work.panel.greatest.fill(LOWEST);
            work.panel.sums.fill(0.0);
            for start in (0..args.k_len.max(1)).step_by(KEY_BLOCK) {
                let keys = start..args.k_len.min(start + KEY_BLOCK);
                // Rows far apart are slow to find: worth a copy when several panels of queries read them.
                let copied = query_panels.count() >= WORTH_A_COPY;
                let (key_rows, values);
                if copied || !args.head_dim.is_multiple_of(S::LANES) {
                    pack_block(s, args, kv_head, keys.clone(), value_panels, work.keys, work.values);
                    key_rows = (&*work.keys, args.head_dim);
                    values = Values::Packed(work.values, keys.len());
                } else {
                    let column = kv_head * args.head_dim;
                    key_rows = (args.k.get(start * args.k_stride + column..).unwrap_or(&[]), args.k_stride);
                    let rows = args.v.get(start * args.v_stride + column..).unwrap_or(&[]);
                    values = Values::InPlace(rows, args.v_stride);
                }
                for index in 0..query_panels.count() {
                    let panel = query_panels.get(index);
                    let (keys, work, out) = (keys.clone(), &mut work.panel, &mut *out);
                    with_width!(S::TILE_REGISTERS, panel.registers, |WIDTH| {
                        s.run(QueryPanel::<'_, '_, WIDTH> {
                            args,
                            kv_head,
                            keys,
                            panel,
                            key_rows,
                            values,
                            value_panels,
                            work,
                            out,
                        })
                    });
                }
            }
        }
    }
}

/// What lies in the scratch.
struct Workspace<'a> {
    /// The block's keys: `(keys, head_dim)`.
    keys: &'a mut [f32],
    /// The block's values as panels `(keys, columns)`, whole registers wide.
    values: &'a mut [f32],
    panel: PanelWorkspace<'a>,
}

/// The part that panels of queries work in.
pub(super) struct PanelWorkspace<'a> {
    /// A panel's queries as columns: `(head_dim, width)`.
    pub(super) queries: &'a mut [f32],
    /// Scores, then powers, of a panel of queries: `(keys, width)`.
    pub(super) scores: &'a mut [f32],
    /// What every query of a panel multiplies its output by, before and after a block's values are added.
    pub(super) before: &'a mut [f32],
    pub(super) after: &'a mut [f32],
    /// Greatest score so far of every query, panels padded.
    pub(super) greatest: &'a mut [f32],
    /// Sum of powers so far of every query, panels padded.
    pub(super) sums: &'a mut [f32],
}

impl<'a> Workspace<'a> {
    /// Cuts the scratch, made larger if need be, into its parts, each on a cache line.
    fn new<S: Simd>(
        scratch: &'a mut Vec<f32>,
        args: &AttentionArgs<'_>,
        query_panels: Panels,
        value_panels: Panels,
    ) -> Workspace<'a> {
        let (block, width) = (KEY_BLOCK.min(args.k_len), S::TILE_REGISTERS * S::LANES);
        let (dim, queries) = (args.head_dim, query_panels.padded_columns());
        let parts =
            [block * dim, value_panels.packed_len(block), dim * width, block * width, width, width, queries, queries]
                .map(|floats| floats.next_multiple_of(LINE_FLOATS));
        let needed = LINE_FLOATS + parts.iter().sum::<usize>();
        if scratch.len() < needed {
            scratch.resize(needed, 0.0);
        }
        let skipped = scratch.as_ptr().align_offset(LINE_FLOATS * size_of::<f32>()).min(LINE_FLOATS);
        let mut rest = &mut scratch[skipped..];
        let [keys, values, queries, scores, before, after, greatest, sums] = parts.map(|floats| {
            let (part, left) = std::mem::take(&mut rest).split_at_mut(floats);
            rest = left;
            part
        });
        Workspace { keys, values, panel: PanelWorkspace { queries, scores, before, after, greatest, sums } }
    }
}

/// Copies the keys and values of one block of one head: keys row after row, values into panels whose rows are whole
/// registers, padded with zeros.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn pack_block<S: Simd>(
    s: S,
    args: &AttentionArgs<'_>,
    kv_head: usize,
    keys: Range<usize>,
    panels: Panels,
    packed_keys: &mut [f32],
    packed_values: &mut [f32],
) {
    let (dim, column, count) = (args.head_dim, kv_head * args.head_dim, keys.len());
    if count == 0 {
        return;
    }
    let from = &args.k[keys.start * args.k_stride + column..][..(count - 1) * args.k_stride + dim];
    copy_rows(s, from, args.k_stride, dim, dim, &mut packed_keys[..count * dim]);
    let from = &args.v[keys.start * args.v_stride + column..][..(count - 1) * args.v_stride + dim];
    for index in 0..panels.count() {
        let panel = panels.get(index);
        let width = panel.registers * S::LANES;
        let to = &mut packed_values[panel.start * count..][..width * count];
        copy_rows(s, &from[panel.start..], args.v_stride, panel.columns, width, to);
    }
}

/// Rows fetched ahead of a copy: they are far apart, each a surprise to the hardware.
const ROWS_AHEAD: usize = 8;

/// Copies rows of `columns`, `stride` apart, to rows of `width`, less than a register wider, whose rest becomes zeros.
#[inline(always)]
fn copy_rows<S: Simd>(s: S, from: &[f32], stride: usize, columns: usize, width: usize, to: &mut [f32]) {
    for (from, to) in from.chunks(stride).zip(to.chunks_exact_mut(width)) {
        let ahead = from.as_ptr().wrapping_add(ROWS_AHEAD * stride);
        let (from, to) = (&from[..columns], to.as_mut_ptr());
        each_register!(S, columns, |i, count| {
            s.prefetch(ahead.wrapping_add(i));
            // SAFETY: `count` floats are left of `from`; `to` has room for a whole register if its rows are whole registers.
            unsafe {
                let v = s.load_first(from.as_ptr().add(i), count, 0.0);
                s.store_first(v, to.add(i), (width - i).min(S::LANES));
            }
        });
    }
}
