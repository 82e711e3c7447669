//! One panel of queries against one block of keys: the scores, and the softmax down the keys, one query a lane.

use std::ops::Range;

use super::attention::{AttentionArgs, PanelWorkspace};
use super::attention_values::{AddValues, Values};
use super::math::exp2;
use super::pack::{LINE_FLOATS, Panel, Panels, pack_columns};
use super::simd::{MOST_LANES, Op, Simd};
use super::tile::{Ahead, Left, Right, Tile, add_product, for_each_height, store_rows, zeros};

/// Queries of the widest panel.
pub(super) const MOST_QUERIES: usize = 3 * MOST_LANES;

/// Queries `panel` (counted head after head over the heads that share the keys) against the block `keys`.
pub(super) struct QueryPanel<'a, 'b, const WIDTH: usize> {
    pub(super) args: &'b AttentionArgs<'a>,
    pub(super) kv_head: usize,
    pub(super) keys: Range<usize>,
    pub(super) panel: Panel,
    /// The block's keys, and the distance between rows.
    pub(super) key_rows: (&'b [f32], usize),
    pub(super) values: Values<'b>,
    pub(super) value_panels: Panels,
    pub(super) work: &'b mut PanelWorkspace<'a>,
    pub(super) out: &'b mut [f32],
}

/// Rows of one head, among the queries of a panel.
#[derive(Clone, Debug)]
pub(super) struct Run {
    /// Which queries of the panel.
    pub(super) queries: Range<usize>,
    /// Their head.
    pub(super) head: usize,
    /// The row of the first.
    pub(super) row: usize,
}

impl<const WIDTH: usize> Op for QueryPanel<'_, '_, WIDTH> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        let QueryPanel { args, kv_head, keys, panel, key_rows, values, value_panels, work, out } = self;
        let runs = || runs(args, kv_head, panel);
        let sight = Sight::new(args, panel, runs());
        if sight.some.is_empty() {
            for run in runs() {
                for row in run.row..run.row + run.queries.len() {
                    out[row * args.out_stride + run.head * args.head_dim..][..args.head_dim].fill(0.0);
                }
            }
            return;
        }
        let here = sight.some.start.max(keys.start)..sight.some.end.min(keys.end);
        if here.is_empty() {
            return;
        }

        pack_queries::<S, WIDTH>(s, args, kv_head, panel, work.queries);
        let mut greatest = load_lanes::<S, WIDTH>(s, &work.greatest[panel.start..]);
        let before = greatest;
        for_each_height!(S::TILE_ROWS, here.len(), |rows, ROWS| {
            for row in rows.step_by(ROWS) {
                let key = here.start + row;
                let (rows, stride) = key_rows;
                let rows = &rows[(key - keys.start) * stride..];
                let tile = scores::<S, ROWS, WIDTH>(s, rows, stride, args.head_dim, work.queries);
                let tile = if sight.all.start <= key && key + ROWS <= sight.all.end {
                    tile
                } else {
                    hide::<S, ROWS, WIDTH>(s, tile, key, &sight)
                };
                for scores in &tile {
                    for (greatest, score) in greatest.iter_mut().zip(scores) {
                        *greatest = s.max(*score, *greatest);
                    }
                }
                let width = WIDTH * S::LANES;
                let to = &mut work.scores[row * width..][..ROWS * width];
                // SAFETY: the slice holds the tile's rows.
                unsafe { store_rows(s, tile, to.as_mut_ptr(), width, width) };
            }
        });

        let factor = s.splat(args.scale * std::f32::consts::LOG2_E);
        let mut shift = greatest;
        let mut carried = greatest;
        for r in 0..WIDTH {
            shift[r] = s.mul(s.sub(s.splat(0.0), greatest[r]), factor);
            carried[r] = exp2(s, s.mul(s.sub(before[r], greatest[r]), factor));
        }
        let powers = &mut work.scores[..here.len() * WIDTH * S::LANES];
        let added = exp_and_sum::<S, WIDTH>(s, powers, factor, shift);
        let mut sums = load_lanes::<S, WIDTH>(s, &work.sums[panel.start..]);
        for r in 0..WIDTH {
            sums[r] = s.mul_add(sums[r], carried[r], added[r]);
        }
        store_lanes::<S, WIDTH>(s, greatest, &mut work.greatest[panel.start..]);
        store_lanes::<S, WIDTH>(s, sums, &mut work.sums[panel.start..]);

        if sight.some.end <= keys.end {
            store_lanes::<S, WIDTH>(s, inverse::<S, WIDTH>(s, sums, &sight), work.after);
        } else {
            store_lanes::<S, WIDTH>(s, [s.splat(1.0); WIDTH], work.after);
        }
        store_lanes::<S, WIDTH>(s, carried, work.before);
        let before = if sight.some.start < keys.start { Some(&*work.before) } else { None };
        let here = here.start - keys.start..here.end - keys.start;
        for run in runs() {
            let (powers, after, width, here, out) =
                (&*work.scores, &*work.after, WIDTH * S::LANES, here.clone(), &mut *out);
            s.run(AddValues { args, run, powers, width, values, value_panels, here, before, after, out });
        }
    }
}

/// The runs of a panel.
fn runs(args: &AttentionArgs<'_>, kv_head: usize, panel: Panel) -> impl Iterator<Item = Run> {
    let (group, q_len) = (args.group(), args.q_len);
    let mut done = 0;
    std::iter::from_fn(move || {
        let (member, row) = ((panel.start + done) / q_len, (panel.start + done) % q_len);
        let queries = done..panel.columns.min(done + q_len - row);
        done = queries.end;
        (!queries.is_empty()).then_some(Run { queries, head: kv_head * group + member, row })
    })
}

/// Which keys the queries of a panel see.
struct Sight {
    /// First key that each query sees and one past its last, when some query does not see all; lanes are compared with them.
    ends: Option<[[f32; MOST_QUERIES]; 2]>,
    /// Keys that some query sees.
    some: Range<usize>,
    /// Keys that every query sees.
    all: Range<usize>,
}

impl Sight {
    fn new(args: &AttentionArgs<'_>, panel: Panel, runs: impl Iterator<Item = Run>) -> Sight {
        let every = 0..args.k_len;
        if !args.causal && args.window.is_none() {
            return Sight { ends: None, some: every.clone(), all: every };
        }
        let mut ends = [[0.0; MOST_QUERIES]; 2];
        let (mut some, mut all) = (args.k_len..0, every);
        for run in runs {
            for (query, row) in run.queries.zip(run.row..) {
                let visible = args.visible(row);
                (ends[0][query], ends[1][query]) = (visible.start as f32, visible.end as f32);
                all = all.start.max(visible.start)..all.end.min(visible.end);
                if !visible.is_empty() {
                    some = some.start.min(visible.start)..some.end.max(visible.end);
                }
            }
        }
        debug_assert!(panel.columns > 0);
        Sight { ends: Some(ends), some, all }
    }
}

/// Packs the queries of the panel as columns, and asks for the next panel's.
#[inline(always)]
fn pack_queries<S: Simd, const WIDTH: usize>(
    s: S,
    args: &AttentionArgs<'_>,
    kv_head: usize,
    panel: Panel,
    to: &mut [f32],
) {
    let start = |query: usize| {
        let (member, row) = if args.group() == 1 { (0, query) } else { (query / args.q_len, query % args.q_len) };
        row * args.q_stride + (kv_head * args.group() + member) * args.head_dim
    };
    for first in (0..panel.columns).step_by(S::LANES) {
        // Lanes beyond the last query repeat it; what they give is never stored.
        let row = |lane: usize| &args.q[start(panel.start + (first + lane).min(panel.columns - 1))..][..args.head_dim];
        pack_columns(s, &std::array::from_fn(row), args.head_dim, WIDTH * S::LANES, &mut to[first..]);
    }
    let next = panel.start + panel.columns;
    for query in next..(next + WIDTH * S::LANES).min(args.group() * args.q_len) {
        for i in (0..args.head_dim).step_by(LINE_FLOATS) {
            s.prefetch(args.q.as_ptr().wrapping_add(start(query) + i));
        }
    }
}

/// Scores, not yet scaled, of the first `ROWS` keys, `stride` apart.
#[inline(always)]
fn scores<S: Simd, const ROWS: usize, const WIDTH: usize>(
    s: S,
    keys: &[f32],
    stride: usize,
    head_dim: usize,
    queries: &[f32],
) -> Tile<S, ROWS, WIDTH> {
    let keys = &keys[..(ROWS - 1) * stride + head_dim];
    let width = WIDTH * S::LANES;
    let right = Right { at: queries[..head_dim * width].as_ptr(), step: width };
    let left = Left { at: keys.as_ptr(), row: stride, step: 1 };
    // SAFETY: the two slices are what the product reads.
    unsafe { add_product(s, zeros(s), left, right, head_dim, Ahead::NOTHING) }
}

/// Minus infinity for the keys from `key` on that a query does not see.
#[inline(always)]
fn hide<S: Simd, const ROWS: usize, const WIDTH: usize>(
    s: S,
    mut tile: Tile<S, ROWS, WIDTH>,
    key: usize,
    sight: &Sight,
) -> Tile<S, ROWS, WIDTH> {
    let Some([starts, ends]) = &sight.ends else { return tile };
    let (starts, ends) = (load_lanes::<S, WIDTH>(s, starts), load_lanes::<S, WIDTH>(s, ends));
    let hidden = s.splat(f32::NEG_INFINITY);
    for (m, scores) in tile.iter_mut().enumerate() {
        let key = s.splat((key + m) as f32);
        for (r, score) in scores.iter_mut().enumerate() {
            *score = s.if_less(key, starts[r], hidden, s.if_less(key, ends[r], *score, hidden));
        }
    }
    tile
}

/// `x = 2^(x * factor + shift)` in place down the rows of `WIDTH` registers, and the sum of every lane.
#[inline(always)]
fn exp_and_sum<S: Simd, const WIDTH: usize>(s: S, x: &mut [f32], factor: S::V, shift: [S::V; WIDTH]) -> [S::V; WIDTH] {
    let mut sums = [s.splat(0.0); WIDTH];
    for row in x.chunks_exact_mut(WIDTH * S::LANES) {
        for r in 0..WIDTH {
            // SAFETY: the row is `WIDTH` registers long.
            unsafe {
                let at = row.as_mut_ptr().add(r * S::LANES);
                let power = exp2(s, s.mul_add(s.load(at), factor, shift[r]));
                s.store(power, at);
                sums[r] = s.add(sums[r], power);
            }
        }
    }
    sums
}

/// One over the sums; zero for a query that sees no key.
#[inline(always)]
fn inverse<S: Simd, const WIDTH: usize>(s: S, sums: [S::V; WIDTH], sight: &Sight) -> [S::V; WIDTH] {
    let mut inverse = sums;
    for inverse in &mut inverse {
        *inverse = s.div(s.splat(1.0), *inverse);
    }
    if let Some([starts, ends]) = &sight.ends {
        let (starts, ends) = (load_lanes::<S, WIDTH>(s, starts), load_lanes::<S, WIDTH>(s, ends));
        for r in 0..WIDTH {
            inverse[r] = s.if_less(starts[r], ends[r], inverse[r], s.splat(0.0));
        }
    }
    inverse
}

/// `WIDTH` registers from the start of `from`.
#[inline(always)]
fn load_lanes<S: Simd, const WIDTH: usize>(s: S, from: &[f32]) -> [S::V; WIDTH] {
    let from = &from[..WIDTH * S::LANES];
    let mut lanes = [s.splat(0.0); WIDTH];
    for (r, lanes) in lanes.iter_mut().enumerate() {
        // SAFETY: the slice is `WIDTH` registers long.
        *lanes = unsafe { s.load(from.as_ptr().add(r * S::LANES)) };
    }
    lanes
}

/// Stores `WIDTH` registers to the start of `to`.
#[inline(always)]
fn store_lanes<S: Simd, const WIDTH: usize>(s: S, lanes: [S::V; WIDTH], to: &mut [f32]) {
    let to = &mut to[..WIDTH * S::LANES];
    for (r, lanes) in lanes.into_iter().enumerate() {
        // SAFETY: the slice is `WIDTH` registers long.
        unsafe { s.store(lanes, to.as_mut_ptr().add(r * S::LANES)) };
    }
}
