//! Elementary functions on registers: exp, GELU, tanh, sigmoid, SiLU. NaN in, NaN out.
//!
//! The coefficients are our own weighted minimax fits (Lawson's iteration on Chebyshev nodes, in float64, then rounded);
//! the tests hold each function against float64.

use super::simd::Simd;

/// Horner's rule, highest power first, on `MANY` registers step by step: one chain of dependent operations would leave the
/// processor waiting.
#[inline(always)]
fn polynomials<S: Simd, const MANY: usize, const N: usize>(
    s: S,
    x: [S::V; MANY],
    highest_first: [f32; N],
) -> [S::V; MANY] {
    let mut sums = [s.splat(highest_first[0]); MANY];
    let mut i = 1;
    while i < N {
        let next = s.splat(highest_first[i]);
        for (sum, x) in sums.iter_mut().zip(x) {
            *sum = s.mul_add(*sum, x, next);
        }
        i += 1;
    }
    sums
}

/// The same on one register.
#[inline(always)]
fn polynomial<S: Simd, const N: usize>(s: S, x: S::V, highest_first: [f32; N]) -> S::V {
    polynomials(s, [x], highest_first)[0]
}

/// `2^f` for `0 <= f < 1`, relative error 1.5e-7, exact at 0.
#[inline(always)]
fn exp2_fraction<S: Simd>(s: S, f: S::V) -> S::V {
    polynomial(s, f, [0.001_867_126, 0.009_016_896, 0.055_799_99, 0.240_164_5, 0.693_151_3, 1.0])
}

/// `2^y` for `y <= 127`; below -126 it is subnormal or 0, and 0 for `-inf`.
#[inline(always)]
pub(super) fn exp2<S: Simd>(s: S, y: S::V) -> S::V {
    let (fraction, exponent) = s.split_exponent(y);
    s.scale_exp2(exp2_fraction(s, fraction), exponent)
}

/// `e^x`, held between `2^-126` and `2^127.49`. Argument reduction with a two-part `log2(e)`: Cody and Waite, "Software
/// Manual for the Elementary Functions", 1980, chapter 6.
#[inline(always)]
pub(super) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    const LOG2_E_LOW: f32 = (std::f64::consts::LOG2_E - std::f32::consts::LOG2_E as f64) as f32;
    let x = s.min(s.splat(88.37), s.max(s.splat(-87.33), x));
    let high = s.splat(std::f32::consts::LOG2_E);
    let y = s.mul(x, high);
    let (fraction, exponent) = s.split_exponent(y);
    let rounding = s.mul_add(x, high, s.sub(s.splat(0.0), y));
    let rounding = s.mul_add(x, s.splat(LOG2_E_LOW), rounding);
    s.scale_exp2(exp2_fraction(s, s.add(fraction, rounding)), exponent)
}

/// An elementwise function.
pub(super) trait Function: Copy {
    /// The function of every lane.
    fn of<S: Simd>(self, s: S, x: S::V) -> S::V;

    /// The same of several registers; for long chains of operations, in lockstep.
    #[inline(always)]
    fn of_many<S: Simd, const MANY: usize>(self, s: S, mut x: [S::V; MANY]) -> [S::V; MANY] {
        for x in &mut x {
            *x = self.of(s, *x);
        }
        x
    }
}

/// `x * Phi(x)`, Phi the normal distribution function (Hendrycks and Gimpel, arXiv:1606.08415): absolute error 6e-7.
#[derive(Clone, Copy)]
pub(super) struct Gelu;

impl Function for Gelu {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::V) -> S::V {
        self.of_many(s, [x])[0]
    }

    /// `(Phi(x) - 1/2) / x` is a polynomial in `2 x^2 / c^2 - 1`, which stays in -1 ..= 1 and keeps Horner's rule
    /// stable; beyond `|x| = c = 5.25` Phi is 0 or 1 to float32.
    #[inline(always)]
    fn of_many<S: Simd, const MANY: usize>(self, s: S, mut x: [S::V; MANY]) -> [S::V; MANY] {
        const LIMIT: f32 = 5.25;
        let mut inside = x;
        let mut t = x;
        for i in 0..MANY {
            x[i] = s.max(s.splat(-LIMIT), x[i]);
            inside[i] = s.min(s.splat(LIMIT), x[i]);
            t[i] = s.mul_add(s.mul(inside[i], inside[i]), s.splat(2.0 / (LIMIT * LIMIT)), s.splat(-1.0));
        }
        let slopes = polynomials(s, t, GELU_SLOPE);
        for i in 0..MANY {
            x[i] = s.mul(x[i], s.mul_add(inside[i], slopes[i], s.splat(0.5)));
        }
        x
    }
}

/// Coefficients of `(Phi(x) - 1/2) / x`.
const GELU_SLOPE: [f32; 15] = [
    0.000_203_399_31,
    -0.000_628_627_43,
    0.000_775_429_5,
    -0.001_120_784_4,
    0.002_763_090_4,
    -0.005_358_795_6,
    0.008_491_023,
    -0.012_822_134,
    0.018_518_006,
    -0.025_030_226,
    0.032_034_11,
    -0.039_764_643,
    0.049_645_662,
    -0.067_126_78,
    0.134_659_35,
];

/// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))` (same paper), as `x * sigmoid(2 * ...)`.
#[derive(Clone, Copy)]
pub(super) struct GeluTanh;

impl Function for GeluTanh {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::V) -> S::V {
        const SLOPE: f32 = std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::SQRT_2; // 2 sqrt(2 / pi)
        let cubic = s.mul_add(s.mul(x, x), s.splat(SLOPE * 0.044_715), s.splat(SLOPE));
        s.mul(x, Sigmoid.of(s, s.mul(x, cubic)))
    }
}

/// `max(x, 0)`.
#[derive(Clone, Copy)]
pub(super) struct Relu;

impl Function for Relu {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::V) -> S::V {
        s.max(s.splat(0.0), x)
    }
}

/// `x * sigmoid(x)`.
#[derive(Clone, Copy)]
pub(super) struct Silu;

impl Function for Silu {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::V) -> S::V {
        s.mul(x, Sigmoid.of(s, x))
    }
}

/// `1 / (1 + e^-x)`.
#[derive(Clone, Copy)]
pub(super) struct Sigmoid;

impl Function for Sigmoid {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::V) -> S::V {
        let one = s.splat(1.0);
        s.reciprocal(s.add(one, exp(s, s.sub(s.splat(0.0), x))))
    }
}

/// Hyperbolic tangent: an odd polynomial below 0.625, `1 - 2 / (e^2|x| + 1)` above (the split of Cody and Waite, 1980,
/// chapter 13).
#[derive(Clone, Copy)]
pub(super) struct Tanh;

impl Function for Tanh {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::V) -> S::V {
        let magnitude = s.copy_sign(x, s.splat(1.0));
        let one = s.splat(1.0);
        let power = exp(s, s.add(magnitude, magnitude));
        let far = s.sub(one, s.div(s.splat(2.0), s.add(power, one)));
        let square = s.mul(x, x);
        let tail = polynomial(s, square, TANH_TAIL);
        let near = s.mul_add(s.mul(magnitude, square), tail, magnitude);
        s.copy_sign(s.if_less(magnitude, s.splat(0.625), near, far), x)
    }
}

/// `(tanh(x) / x - 1) / x^2` as a polynomial in `x^2`, for `|x| <= 0.64`: relative error of tanh 5e-9 before rounding.
const TANH_TAIL: [f32; 5] = [-0.005_603_905_3, 0.020_551_711, -0.053_714_104, 0.133_311_52, -0.333_332_72];
