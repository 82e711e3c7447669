//! Layer and root-mean-square normalisation of rows, in place.

use super::reduce::{Product, Value, sum_of};
use super::simd::{Op, Simd, each_register};

/// `Kernels::layer_norm`, whose sizes it has checked (Ba, Kiros and Hinton, arXiv:1607.06450).
pub(super) struct LayerNorm<'a> {
    pub(super) x: &'a mut [f32],
    pub(super) dim: usize,
    pub(super) weight: &'a [f32],
    pub(super) bias: Option<&'a [f32]>,
    pub(super) eps: f32,
}

impl Op for LayerNorm<'_> {
    type Output = ();

    /// The corrected two-pass algorithm (Chan, Golub and LeVeque, "Algorithms for computing the sample variance", The
    /// American Statistician 37(3), 1983): the rounded mean is subtracted first, then what that left of the mean, so that
    /// a large mean costs nothing.
    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        let size = self.dim as f32;
        for row in self.x.chunks_exact_mut(self.dim) {
            let mean = sum_of(s, row, row, Value) / size;
            shift(s, row, mean);
            let left = sum_of(s, row, row, Value) / size;
            let variance = (sum_of(s, row, row, Product) / size - left * left).max(0.0);
            scale_and_shift(s, row, left, 1.0 / (variance + self.eps).sqrt(), self.weight, self.bias);
        }
    }
}

/// `Kernels::rms_norm`, whose sizes it has checked (Zhang and Sennrich, arXiv:1910.07467).
pub(super) struct RmsNorm<'a> {
    pub(super) x: &'a mut [f32],
    pub(super) dim: usize,
    pub(super) weight: &'a [f32],
    pub(super) eps: f32,
}

impl Op for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        let size = self.dim as f32;
        for row in self.x.chunks_exact_mut(self.dim) {
            let square = sum_of(s, row, row, Product) / size;
            scale_and_shift(s, row, 0.0, 1.0 / (square + self.eps).sqrt(), self.weight, None);
        }
    }
}

/// `row -= amount`.
#[inline(always)]
fn shift<S: Simd>(s: S, row: &mut [f32], amount: f32) {
    let amount = s.splat(amount);
    let at = row.as_mut_ptr();
    each_register!(S, row.len(), |i, count| {
        // SAFETY: `count` floats are left.
        unsafe { s.store_first(s.sub(s.load_first(at.add(i), count, 0.0), amount), at.add(i), count) };
    });
}

/// `row = (row - mean) * inverse * weight + bias`.
#[inline(always)]
fn scale_and_shift<S: Simd>(s: S, row: &mut [f32], mean: f32, inverse: f32, weight: &[f32], bias: Option<&[f32]>) {
    assert!(weight.len() == row.len() && bias.is_none_or(|bias| bias.len() == row.len()), "lengths differ");
    let (mean, inverse) = (s.splat(mean), s.splat(inverse));
    let at = row.as_mut_ptr();
    each_register!(S, row.len(), |i, count| {
        // SAFETY: `count` floats are left of the row, the weight and the bias.
        unsafe {
            let x = s.mul(s.sub(s.load_first(at.add(i), count, 0.0), mean), inverse);
            let weight = s.load_first(weight.as_ptr().add(i), count, 0.0);
            let bias = match bias {
                Some(bias) => s.load_first(bias.as_ptr().add(i), count, 0.0),
                None => s.splat(0.0),
            };
            s.store_first(s.mul_add(x, weight, bias), at.add(i), count);
        }
    });
}
