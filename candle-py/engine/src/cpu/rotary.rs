//! Rotary position embedding (Su et al., arXiv:2104.09864) in the half-split form of GPT-NeoX and Hugging Face models.

use super::simd::{Op, Simd, each_register};

/// `Kernels::rotary`, whose sizes it has checked.
pub(super) struct Rotary<'a> {
    pub(super) x: &'a mut [f32],
    pub(super) stride: usize,
    pub(super) rows: usize,
    pub(super) heads: usize,
    pub(super) head_dim: usize,
    pub(super) cos: &'a [f32],
    pub(super) sin: &'a [f32],
}

impl Op for Rotary<'_> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        let half = self.head_dim / 2;
        for row in 0..self.rows {
            let cos = &self.cos[row * half..][..half];
            let sin = &self.sin[row * half..][..half];
            for head in 0..self.heads {
                let x = &mut self.x[row * self.stride + head * self.head_dim..][..self.head_dim];
                let (first, second) = x.split_at_mut(half);
                rotate(s, first, second, cos, sin);
            }
        }
    }
}

/// `(a, b) = (a cos - b sin, b cos + a sin)`.
#[inline(always)]
fn rotate<S: Simd>(s: S, a: &mut [f32], b: &mut [f32], cos: &[f32], sin: &[f32]) {
    assert!(b.len() == a.len() && cos.len() == a.len() && sin.len() == a.len(), "lengths differ");
    each_register!(S, a.len(), |i, count| {
        // SAFETY: the four slices have `count` floats left at `i`.
        unsafe {
            let (at_a, at_b) = (a.as_mut_ptr().add(i), b.as_mut_ptr().add(i));
            let (x, y) = (s.load_first(at_a, count, 0.0), s.load_first(at_b, count, 0.0));
            let cos = s.load_first(cos.as_ptr().add(i), count, 0.0);
            let sin = s.load_first(sin.as_ptr().add(i), count, 0.0);
            s.store_first(s.sub(s.mul(x, cos), s.mul(y, sin)), at_a, count);
            s.store_first(s.mul_add(y, cos, s.mul(x, sin)), at_b, count);
        }
    });
}
