//! Scores of attention to a cache become powers: a softmax that is carried on from one block of keys to the next.

use std::ops::Range;

use super::attention::{KEY_BLOCK, LOWEST};
use super::math::exp2;
use super::pack::LINE_FLOATS;
use super::reduce::greatest_of;
use super::simd::{Simd, each_register};

/// Queries that are worked on together.
pub(super) const PANEL_QUERIES: usize = 32;

/// Floats from one query's scores to the next: a little more than a block, so that columns do not share a cache set.
pub(super) const SCORE_STRIDE: usize = KEY_BLOCK + LINE_FLOATS;

/// The softmax of a panel of queries, carried on from block to block of keys.
pub(super) struct Softmax<V> {
    factor: V,
    greatest: [f32; PANEL_QUERIES],
    /// Sums of powers so far.
    pub(super) totals: [f32; PANEL_QUERIES],
    /// What the sums of earlier blocks are multiplied by.
    pub(super) carried: [f32; PANEL_QUERIES],
}

impl<V: Copy> Softmax<V> {
    #[inline(always)]
    pub(super) fn new<S: Simd<V = V>>(s: S, scale: f32) -> Self {
        Self {
            factor: s.splat(scale * std::f32::consts::LOG2_E),
            greatest: [LOWEST; PANEL_QUERIES],
            totals: [0.0; PANEL_QUERIES],
            carried: [1.0; PANEL_QUERIES],
        }
    }

    /// Turns the scores of a block into powers, zero where a query does not see the key.
    #[inline(always)]
    pub(super) fn powers<S: Simd<V = V>>(
        &mut self,
        s: S,
        scores: &mut [f32],
        count: usize,
        keys: Range<usize>,
        visible: impl Fn(usize) -> Range<usize>,
    ) {
        let factor = self.factor;
        let mut shift = [0.0; PANEL_QUERIES];
        let mut added = [0.0; PANEL_QUERIES];
        let before = self.greatest;
        for (query, row) in scores.chunks_exact(SCORE_STRIDE).enumerate().take(count) {
            let here = greatest_of(s, &row[visible(query)]);
            if here > self.greatest[query] {
                self.greatest[query] = here;
            }
        }
        for i in (0..PANEL_QUERIES).step_by(S::LANES) {
            // SAFETY: all arrays are whole registers long.
            unsafe {
                let greatest = s.load(self.greatest.as_ptr().add(i));
                let less = s.sub(s.load(before.as_ptr().add(i)), greatest);
                s.store(s.mul(s.sub(s.splat(0.0), greatest), factor), shift.as_mut_ptr().add(i));
                s.store(exp2(s, s.mul(less, factor)), self.carried.as_mut_ptr().add(i));
            }
        }
        for (query, row) in scores.chunks_exact_mut(SCORE_STRIDE).enumerate().take(count) {
            let visible = visible(query);
            let shift = s.splat(shift[query]);
            row[keys.start..visible.start].fill(0.0);
            row[visible.end..keys.end].fill(0.0);
            let at = row[visible.clone()].as_mut_ptr();
            each_register!(S, visible.len(), |i, lanes| {
                // SAFETY: `lanes` floats are left.
                unsafe {
                    let power = exp2(s, s.mul_add(s.load_first(at.add(i), lanes, 0.0), factor, shift));
                    s.store_first(power, at.add(i), lanes);
                }
            });
        }
        // Key after key, several queries side by side to hide the latency of an addition.
        const SIDE: usize = 8;
        for first in (0..count).step_by(SIDE) {
            let rows = &scores[first * SCORE_STRIDE..];
            let sums = &mut added[first..first + SIDE];
            if count - first >= SIDE {
                for key in keys.clone() {
                    for (query, sum) in sums.iter_mut().enumerate() {
                        *sum += rows[query * SCORE_STRIDE + key];
                    }
                }
            } else {
                for (row, sum) in rows.chunks_exact(SCORE_STRIDE).zip(sums).take(count - first) {
                    *sum = row[keys.clone()].iter().fold(0.0, |sum, power| sum + power);
                }
            }
        }
        for i in (0..PANEL_QUERIES).step_by(S::LANES) {
            // SAFETY: all arrays are whole registers long.
            unsafe {
                let total = self.totals.as_mut_ptr().add(i);
                let (carried, added) = (s.load(self.carried.as_ptr().add(i)), s.load(added.as_ptr().add(i)));
                s.store(s.mul_add(s.load(total), carried, added), total);
            }
        }
    }
}
