//! Causal attention of one sequence's newest tokens to keys and values that lie in pages, read in place.
//!
//! The same arithmetic as `attention`, in the same order for every query, so that a token's result has the same bits
//! whether the tokens before it come from pages or from the batch: scores are chains over the dimensions of a head,
//! powers are summed key after key, values are added key after key, in the same blocks of keys.

use std::marker::PhantomData;
use std::ops::Range;

use super::assert_rows;
use super::attention::KEY_BLOCK;
use super::attention_powers::{PANEL_QUERIES, SCORE_STRIDE, Softmax};
use super::pack::{Panel, Panels};
use super::pages::{Number, PAGE_TOKENS, PageNumbers, PageShape, PagesView};
use super::simd::{Op, Simd};
use super::tile::{for_each_height, store_rows, with_width, zeros};

/// The newest tokens of a sequence: queries `(q_len, heads * head_dim)`; every token sees itself and those before it. The
/// output holds the queries' heads that read `kv_heads`.
#[derive(Clone, Debug)]
pub struct PagedAttentionArgs<'a> {
    /// Queries.
    pub q: &'a [f32],
    /// Floats from one row of q to the next.
    pub q_stride: usize,
    /// Rows of q and of the output.
    pub q_len: usize,
    /// Position of query row 0.
    pub first: usize,
    /// Heads of q and of the output; query head `h` reads `h / (heads / kv_heads)`.
    pub heads: usize,
    /// The heads of keys and values that are read.
    pub kv_heads: Range<usize>,
    /// All pages of the layer.
    pub pages: PagesView<'a>,
    /// Page `table[i]` holds positions from `16 i` on.
    pub table: &'a [u32],
    /// The table of the attention that comes after this one, whose first head is fetched ahead; empty where none is known.
    pub next_table: &'a [u32],
    /// Multiplies the scores; positive.
    pub scale: f32,
    /// A query at position `p` sees keys from `p - window` on only.
    pub window: Option<usize>,
    /// Floats from one row of the output to the next.
    pub out_stride: usize,
}

impl PagedAttentionArgs<'_> {
    /// Asserts that every buffer holds what the sizes say.
    pub(super) fn check(&self, out_len: usize) {
        let (heads, PageShape { kv_heads, head_dim, .. }) = (self.heads, self.shape());
        assert!(kv_heads > 0 && heads.is_multiple_of(kv_heads), "heads is not a multiple of kv_heads");
        assert!(head_dim > 0, "head_dim is zero");
        assert!(self.scale > 0.0, "scale is not positive");
        assert_rows(self.q.len(), self.q_len, heads * head_dim, self.q_stride);
        assert!(self.kv_heads.end <= kv_heads, "no such head of keys");
        assert_rows(out_len, self.q_len, self.kv_heads.len() * self.group() * head_dim, self.out_stride);
        assert!(self.table.len() * PAGE_TOKENS >= self.first + self.q_len, "table is too short");
        let mut pages = self.table.iter().chain(self.next_table);
        assert!(pages.all(|page| (*page as usize) < self.pages.count()), "table names a page that is not there");
    }

    /// One head of the page that holds position `position`.
    #[inline(always)]
    fn head<N: Number>(&self, kv_head: usize, position: usize) -> &[N] {
        self.pages.head(self.table[position / PAGE_TOKENS] as usize, kv_head)
    }

    /// What is read after the values of a head from `position` on: the next head's keys, or the next sequence's.
    #[inline(always)]
    fn after<N: Number>(&self, kv_head: usize, position: usize) -> Option<*const N> {
        if kv_head + 1 < self.kv_heads.end {
            return Some(self.head(kv_head + 1, position).as_ptr());
        }
        let page = *self.next_table.get(position / PAGE_TOKENS)?;
        Some(self.pages.head(page as usize, self.kv_heads.start).as_ptr())
    }

    fn shape(&self) -> PageShape {
        self.pages.shape()
    }

    fn group(&self) -> usize {
        self.heads / self.shape().kv_heads
    }

    /// The keys that query `query` (counted row after row, the heads that share keys side by side) sees.
    fn visible(&self, query: usize) -> Range<usize> {
        let position = self.first + query / self.group();
        self.window.map_or(0, |window| position.saturating_sub(window))..position + 1
    }
}

/// `Kernels::paged_attention`, whose sizes it has checked.
pub(super) struct PagedAttention<'a> {
    pub(super) args: &'a PagedAttentionArgs<'a>,
    pub(super) scratch: &'a mut Vec<f32>,
    pub(super) out: &'a mut [f32],
}

impl Op for PagedAttention<'_> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        let PagedAttention { args, scratch, out } = self;
        let (dim, width) = (args.shape().head_dim, args.shape().value_width());
        let parts = [PANEL_QUERIES * dim, PANEL_QUERIES * SCORE_STRIDE, PANEL_QUERIES * width];
        scratch.resize(scratch.len().max(parts.iter().sum()), 0.0);
        let (queries, rest) = scratch.split_at_mut(parts[0]);
        let (scores, rest) = rest.split_at_mut(parts[1]);
        let count = args.q_len * args.group();
        for kv_head in args.kv_heads.clone() {
            for first in (0..count).step_by(PANEL_QUERIES) {
                let panel = first..count.min(first + PANEL_QUERIES);
                let sums = &mut rest[..panel.len() * width];
                match args.shape().numbers {
                    PageNumbers::Float32 => attend_panel::<S, f32>(s, args, kv_head, panel, queries, scores, sums, out),
                    PageNumbers::Float16 => attend_panel::<S, u16>(s, args, kv_head, panel, queries, scores, sums, out),
                }
            }
        }
    }
}

/// One panel of queries of the heads that share `kv_head`.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn attend_panel<S: Simd, N: Number>(
    s: S,
    args: &PagedAttentionArgs<'_>,
    kv_head: usize,
    panel: Range<usize>,
    queries: &mut [f32],
    scores: &mut [f32],
    sums: &mut [f32],
    out: &mut [f32],
) {
    let (dim, group, count) = (args.shape().head_dim, args.group(), panel.len());
    let place = |query: usize, stride: usize, first_head: usize| {
        query / group * stride + ((kv_head - first_head) * group + query % group) * dim
    };
    for (to, query) in queries.chunks_exact_mut(dim).zip(panel.clone()) {
        to.copy_from_slice(&args.q[place(query, args.q_stride, 0)..][..dim]);
    }
    sums.fill(0.0);
    let mut softmax = Softmax::new(s, args.scale);
    let some = args.visible(panel.start).start..args.visible(panel.end - 1).end;
    for block in (some.start / KEY_BLOCK * KEY_BLOCK..some.end).step_by(KEY_BLOCK) {
        let keys = some.start.max(block)..some.end.min(block + KEY_BLOCK);
        // Registers of keys: a page is a whole number of them.
        let mut register = keys.start / S::LANES;
        let end = keys.end.div_ceil(S::LANES);
        while register < end {
            let registers = (end - register).min(S::PAGED_TILE_REGISTERS);
            let (queries, scores, key) = (&*queries, &mut *scores, register * S::LANES);
            with_width!(S::PAGED_TILE_REGISTERS, registers, |WIDTH| s.run(Scores::<N, WIDTH> {
                args,
                kv_head,
                key,
                column: key - block,
                queries,
                count,
                scores,
                pages_of: PhantomData,
            }));
            register += registers;
        }
        let visible = |query: usize| {
            let visible = args.visible(panel.start + query);
            let start = visible.start.clamp(keys.start, keys.end);
            start - block..visible.end.clamp(start, keys.end) - block
        };
        softmax.powers(s, scores, count, keys.start - block..keys.end - block, visible);
        let panels = Panels::new(args.shape().value_width(), S::LANES, S::PAGED_TILE_REGISTERS);
        for index in 0..panels.count() {
            let panel = panels.get(index);
            let (scores, carried, keys, sums) = (&*scores, &softmax.carried, keys.clone(), &mut *sums);
            with_width!(S::PAGED_TILE_REGISTERS, panel.registers, |WIDTH| s.run(AddPages::<N, WIDTH> {
                args,
                kv_head,
                keys,
                block,
                scores,
                carried,
                panel,
                count,
                sums,
                pages_of: PhantomData,
            }));
        }
    }
    for (index, (query, sums)) in panel.zip(sums.chunks_exact(args.shape().value_width())).enumerate() {
        let inverse = 1.0 / softmax.totals[index];
        let out = &mut out[place(query, args.out_stride, args.kv_heads.start)..][..dim];
        out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum * inverse);
    }
}

/// Scores, not yet scaled, of `WIDTH` registers of keys from position `key` on.
struct Scores<'a, 'b, N, const WIDTH: usize> {
    args: &'b PagedAttentionArgs<'a>,
    kv_head: usize,
    key: usize,
    /// Where the first goes in a row of scores.
    column: usize,
    queries: &'b [f32],
    count: usize,
    scores: &'b mut [f32],
    pages_of: PhantomData<N>,
}

impl<N: Number, const WIDTH: usize> Op for Scores<'_, '_, N, WIDTH> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        let Scores { args, kv_head, key, column, queries, count, scores, .. } = self;
        let dim = args.shape().head_dim;
        let mut columns = [std::ptr::null(); WIDTH];
        for (r, column) in columns.iter_mut().enumerate() {
            let key = key + r * S::LANES;
            let keys = &args.head::<N>(kv_head, key)[..PAGE_TOKENS * dim];
            *column = keys[key % PAGE_TOKENS..].as_ptr();
        }
        for_each_height!(S::PAGED_TILE_ROWS, count, |rows, ROWS| {
            for row in rows.step_by(ROWS) {
                let queries = &queries[row * dim..][..ROWS * dim];
                let mut tile = zeros::<S, ROWS, WIDTH>(s);
                for i in 0..dim {
                    let mut keys = [s.splat(0.0); WIDTH];
                    for (keys, column) in keys.iter_mut().zip(columns) {
                        // SAFETY: `LANES` keys of dimension `i < dim` from a column that is a multiple of `LANES`, which
                        // divides the page.
                        *keys = unsafe { N::load(s, column.add(i * PAGE_TOKENS)) };
                        // The values follow the keys.
                        s.prefetch_far(column.wrapping_add((dim + i) * PAGE_TOKENS).cast());
                    }
                    for (m, sums) in tile.iter_mut().enumerate() {
                        // SAFETY: the slice holds `ROWS` queries of `dim`.
                        let query = s.splat(unsafe { *queries.as_ptr().add(m * dim + i) });
                        for (sum, keys) in sums.iter_mut().zip(keys) {
                            *sum = s.mul_add(query, keys, *sum);
                        }
                    }
                }
                let to = &mut scores[row * SCORE_STRIDE + column..][..(ROWS - 1) * SCORE_STRIDE + WIDTH * S::LANES];
                // SAFETY: the slice holds the tile's rows.
                unsafe { store_rows(s, tile, to.as_mut_ptr(), SCORE_STRIDE, WIDTH * S::LANES) };
            }
        });
    }
}

/// Adds powers times values of a block of keys to the queries' sums, in `WIDTH` registers of columns.
struct AddPages<'a, 'b, N, const WIDTH: usize> {
    args: &'b PagedAttentionArgs<'a>,
    kv_head: usize,
    keys: Range<usize>,
    /// The position that column 0 of the scores stands for.
    block: usize,
    scores: &'b [f32],
    carried: &'b [f32; PANEL_QUERIES],
    panel: Panel,
    count: usize,
    sums: &'b mut [f32],
    pages_of: PhantomData<N>,
}

impl<N: Number, const WIDTH: usize> Op for AddPages<'_, '_, N, WIDTH> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        let AddPages { args, kv_head, keys, block, scores, carried, panel, count, sums, .. } = self;
        let PageShape { head_dim, .. } = args.shape();
        let stride = args.shape().value_width();
        for_each_height!(S::PAGED_TILE_ROWS, count, |rows, ROWS| {
            for row in rows.step_by(ROWS) {
                let sums = &mut sums[row * stride + panel.start..][..(ROWS - 1) * stride + WIDTH * S::LANES];
                let mut tile = zeros::<S, ROWS, WIDTH>(s);
                for (m, tile) in tile.iter_mut().enumerate() {
                    let carried = s.splat(carried[row + m]);
                    for (r, sum) in tile.iter_mut().enumerate() {
                        // SAFETY: the slice holds the tile's rows.
                        *sum = s.mul(unsafe { s.load(sums.as_ptr().add(m * stride + r * S::LANES)) }, carried);
                    }
                }
                let mut key = keys.start;
                while key < keys.end {
                    let many = (keys.end - key).min(PAGE_TOKENS - key % PAGE_TOKENS);
                    let powers = &scores[row * SCORE_STRIDE + key - block..][..(ROWS - 1) * SCORE_STRIDE + many];
                    let values = &args.head::<N>(kv_head, key)[PAGE_TOKENS * head_dim..];
                    let values = &values[key % PAGE_TOKENS * stride + panel.start..];
                    let values = &values[..(many - 1) * stride + WIDTH * S::LANES];
                    // Where nothing is known, the values themselves, which are there.
                    let first = key % PAGE_TOKENS * stride + panel.start;
                    let ahead =
                        args.after::<N>(kv_head, key).map_or(values.as_ptr(), |after| after.wrapping_add(first));
                    for i in 0..many {
                        let mut row = [s.splat(0.0); WIDTH];
                        for (r, register) in row.iter_mut().enumerate() {
                            // SAFETY: the slice holds `many` rows of values, `stride` apart.
                            *register = unsafe { N::load(s, values.as_ptr().add(i * stride + r * S::LANES)) };
                            s.prefetch_far(ahead.wrapping_add(i * stride + r * S::LANES).cast());
                        }
                        for (m, sums) in tile.iter_mut().enumerate() {
                            // SAFETY: the slice holds `ROWS` rows of powers, `SCORE_STRIDE` apart.
                            let power = s.splat(unsafe { *powers.as_ptr().add(m * SCORE_STRIDE + i) });
                            for (sum, values) in sums.iter_mut().zip(row) {
                                *sum = s.mul_add(power, values, *sum);
                            }
                        }
                    }
                    key += many;
                }
                // SAFETY: the slice holds the tile's rows.
                unsafe { store_rows(s, tile, sums.as_mut_ptr(), stride, WIDTH * S::LANES) };
            }
        });
    }
}
