//! Reductions over one row: the sums behind norms, the softmax of a row, inner products. One fixed order per length.

use super::math::exp2;
use super::simd::{Op, Simd, each_register};

/// Sums that run side by side, to hide the latency of an addition.
const CHAINS: usize = 4;

/// `sum of term(x[i], y[i])` in one fixed order; `term(0, 0)` must be 0.
#[inline(always)]
pub(super) fn sum_of<S: Simd>(s: S, x: &[f32], y: &[f32], term: impl Term) -> f32 {
    assert_eq!(x.len(), y.len(), "lengths differ");
    let mut sums = [s.splat(0.0); CHAINS];
    let mut i = 0;
    while i + CHAINS * S::LANES <= x.len() {
        for (c, sum) in sums.iter_mut().enumerate() {
            let at = i + c * S::LANES;
            // SAFETY: `at + LANES <= x.len() == y.len()`.
            let (x, y) = unsafe { (s.load(x.as_ptr().add(at)), s.load(y.as_ptr().add(at))) };
            *sum = term.add(s, x, y, *sum);
        }
        i += CHAINS * S::LANES;
    }
    while i < x.len() {
        let count = S::LANES.min(x.len() - i);
        // SAFETY: `count` floats are left of both.
        let (x, y) =
            unsafe { (s.load_first(x.as_ptr().add(i), count, 0.0), s.load_first(y.as_ptr().add(i), count, 0.0)) };
        sums[0] = term.add(s, x, y, sums[0]);
        i += S::LANES;
    }
    s.sum(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3])))
}

/// A summand.
pub(super) trait Term: Copy {
    /// `sum + term(x, y)`.
    fn add<S: Simd>(self, s: S, x: S::V, y: S::V, sum: S::V) -> S::V;
}

/// `x`.
#[derive(Clone, Copy)]
pub(super) struct Value;

impl Term for Value {
    #[inline(always)]
    fn add<S: Simd>(self, s: S, x: S::V, _y: S::V, sum: S::V) -> S::V {
        s.add(sum, x)
    }
}

/// `x * y`.
#[derive(Clone, Copy)]
pub(super) struct Product;

impl Term for Product {
    #[inline(always)]
    fn add<S: Simd>(self, s: S, x: S::V, y: S::V, sum: S::V) -> S::V {
        s.mul_add(x, y, sum)
    }
}

/// `Kernels::dot`.
pub(super) struct Dot<'a> {
    pub(super) a: &'a [f32],
    pub(super) b: &'a [f32],
}

impl Op for Dot<'_> {
    type Output = f32;

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) -> f32 {
        sum_of(s, self.a, self.b, Product)
    }
}

/// The greatest of `x`, minus infinity when empty; NaNs are passed over.
#[inline(always)]
pub(super) fn greatest_of<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut greatest = [s.splat(f32::NEG_INFINITY); CHAINS];
    let whole = x.len() - x.len() % (CHAINS * S::LANES);
    for i in (0..whole).step_by(CHAINS * S::LANES) {
        for (c, greatest) in greatest.iter_mut().enumerate() {
            // SAFETY: `whole` is a multiple of what is read in a turn.
            *greatest = s.max(unsafe { s.load(x.as_ptr().add(i + c * S::LANES)) }, *greatest);
        }
    }
    let rest = &x[whole..];
    each_register!(S, rest.len(), |i, count| {
        // SAFETY: `count` floats are left.
        let x = unsafe { s.load_first(rest.as_ptr().add(i), count, f32::NEG_INFINITY) };
        greatest[0] = s.max(x, greatest[0]);
    });
    s.greatest(s.max(s.max(greatest[0], greatest[1]), s.max(greatest[2], greatest[3])))
}

/// Powers of less count as zero in `power_sum`: beside the greatest, which is 1, they change no sum, and the subnormal numbers
/// that come soon after are slow.
pub(crate) const LEAST_EXPONENT: f32 = -85.0;

/// The sum of `exp(x - greatest)`, no `x` being above `greatest`; NaN where one is NaN.
#[inline(always)]
fn power_sum<S: Simd>(s: S, x: &[f32], greatest: f32) -> f32 {
    let [greatest, least, zero] = [greatest, LEAST_EXPONENT, 0.0].map(|value| s.splat(value));
    let [factor, positive, no_number] = [std::f32::consts::LOG2_E, 1.0, f32::NAN].map(|value| s.splat(value));
    let mut sum = zero;
    each_register!(S, x.len(), |i, count| {
        // SAFETY: `count` floats are left.
        let exponent = s.sub(unsafe { s.load_first(x.as_ptr().add(i), count, f32::NEG_INFINITY) }, greatest);
        let power = exp2(s, s.mul(s.max(exponent, least), factor));
        let power = s.if_less(exponent, least, zero, power);
        sum = s.add(sum, s.if_less(exponent, positive, power, no_number));
    });
    s.sum(sum)
}

/// `x = exp((x - greatest) * scale)` in place, and the sum of that.
#[inline(always)]
pub(super) fn exp_and_sum<S: Simd>(s: S, x: &mut [f32], greatest: f32, scale: f32) -> f32 {
    // exp(v) = 2^(v log2(e)): the factor and the shift are one multiply-add. Its rounding grows with the distance from the
    // greatest, where the result is small.
    let factor = scale * std::f32::consts::LOG2_E;
    let (factor, shift) = (s.splat(factor), s.splat(-greatest * factor));
    let mut sum = s.splat(0.0);
    let at = x.as_mut_ptr();
    each_register!(S, x.len(), |i, count| {
        // SAFETY: `count` floats are left. The lanes beyond are stored nowhere and, loaded again, counted as zero.
        let power = unsafe {
            let power = exp2(s, s.mul_add(s.load_first(at.add(i), count, 0.0), factor, shift));
            s.store_first(power, at.add(i), count);
            if count == S::LANES { power } else { s.load_first(at.add(i), count, 0.0) }
        };
        sum = s.add(sum, power);
    });
    s.sum(sum)
}

/// `x *= factor` in place.
#[inline(always)]
pub(super) fn scale<S: Simd>(s: S, x: &mut [f32], factor: f32) {
    let factor = s.splat(factor);
    let at = x.as_mut_ptr();
    each_register!(S, x.len(), |i, count| {
        // SAFETY: `count` floats are left.
        unsafe { s.store_first(s.mul(s.load_first(at.add(i), count, 0.0), factor), at.add(i), count) };
    });
}

/// `Kernels::softmax`.
pub(super) struct Softmax<'a> {
    pub(super) row: &'a mut [f32],
}

impl Op for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        let greatest = greatest_of(s, self.row);
        let sum = exp_and_sum(s, self.row, greatest, 1.0);
        scale(s, self.row, 1.0 / sum);
    }
}

/// `Kernels::greatest`.
pub(super) struct Greatest<'a> {
    pub(super) row: &'a [f32],
}

impl Op for Greatest<'_> {
    type Output = f32;

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) -> f32 {
        greatest_of(s, self.row)
    }
}

/// `Kernels::exponentials`.
pub(super) struct Exponentials<'a> {
    pub(super) row: &'a mut [f32],
    pub(super) factor: f32,
}

impl Op for Exponentials<'_> {
    type Output = f32;

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) -> f32 {
        exp_and_sum(s, self.row, 0.0, self.factor)
    }
}

/// `Kernels::power_sum`.
pub(super) struct PowerSum<'a> {
    pub(super) row: &'a [f32],
    pub(super) greatest: f32,
}

impl Op for PowerSum<'_> {
    type Output = f32;

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) -> f32 {
        power_sum(s, self.row, self.greatest)
    }
}

/// `Kernels::log_sum_exp`.
pub(super) struct LogSumExp<'a> {
    pub(super) row: &'a [f32],
}

impl Op for LogSumExp<'_> {
    type Output = f32;

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) -> f32 {
        let greatest = greatest_of(s, self.row);
        greatest + power_sum(s, self.row, greatest).ln()
    }
}

/// `Kernels::l2_normalize`.
pub(super) struct L2Normalize<'a> {
    pub(super) row: &'a mut [f32],
}

impl Op for L2Normalize<'_> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        let norm = sum_of(s, self.row, self.row, Product).sqrt();
        scale(s, self.row, 1.0 / norm.max(1e-12));
    }
}
