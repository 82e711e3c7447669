//! Elementwise functions over slices, and the gated form of a feed-forward layer.

use super::math::{Function, Gelu, GeluTanh, Relu, Sigmoid, Silu, Tanh};
use super::simd::{Op, Simd};

/// An elementwise function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x * Phi(x)` with the error function, "gelu" of Hugging Face configs.
    Gelu,
    /// The tanh form of GELU, "gelu_new" and "gelu_pytorch_tanh".
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
    /// `x * sigmoid(x)`.
    Silu,
    /// Hyperbolic tangent.
    Tanh,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `x`.
    Identity,
}

#[derive(Clone, Copy)]
struct Identity;

impl Function for Identity {
    #[inline(always)]
    fn of<S: Simd>(self, _s: S, x: S::V) -> S::V {
        x
    }
}

/// Calls `$function($before, F, $after)` with the `Function` that `$activation` names.
macro_rules! with_function {
    ($activation:expr, $name:ident => $call:expr) => {
        match $activation {
            Activation::Gelu => {
                let $name = Gelu;
                $call
            }
            Activation::GeluTanh => {
                let $name = GeluTanh;
                $call
            }
            Activation::Relu => {
                let $name = Relu;
                $call
            }
            Activation::Silu => {
                let $name = Silu;
                $call
            }
            Activation::Tanh => {
                let $name = Tanh;
                $call
            }
            Activation::Sigmoid => {
                let $name = Sigmoid;
                $call
            }
            Activation::Identity => {
                let $name = Identity;
                $call
            }
        }
    };
}

/// Applies `activation` in place to `rows` rows of `columns`, `stride` apart.
#[inline(always)]
pub(super) fn activate_rows<S: Simd>(
    s: S,
    activation: Activation,
    x: &mut [f32],
    stride: usize,
    rows: usize,
    columns: usize,
) {
    if activation == Activation::Identity {
        return;
    }
    for row in 0..rows {
        let x = &mut x[row * stride..][..columns];
        with_function!(activation, function => map(s, function, x));
    }
}

/// Applies `function` in place.
#[inline(always)]
fn map<S: Simd>(s: S, function: impl Function, x: &mut [f32]) {
    let full = x.len() / S::LANES * S::LANES;
    let at = x.as_mut_ptr();
    let mut i = 0;
    while i < full {
        // SAFETY: `i + LANES <= x.len()`.
        unsafe { s.store(function.of(s, s.load(at.add(i))), at.add(i)) };
        i += S::LANES;
    }
    if full < x.len() {
        let count = x.len() - full;
        // SAFETY: `count` floats are left.
        unsafe { s.store_first(function.of(s, s.load_first(at.add(full), count, 0.0)), at.add(full), count) };
    }
}

/// `Kernels::activate`.
pub(super) struct Activate<'a> {
    pub(super) x: &'a mut [f32],
    pub(super) activation: Activation,
}

impl Op for Activate<'_> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        let columns = self.x.len();
        activate_rows(s, self.activation, self.x, columns, 1, columns);
    }
}

/// `Kernels::gated`, whose sizes it has checked.
pub(super) struct Gated<'a> {
    pub(super) x: &'a [f32],
    pub(super) half: usize,
    pub(super) activation: Activation,
    pub(super) out: &'a mut [f32],
}

impl Op for Gated<'_> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        if self.half == 0 {
            return;
        }
        for (x, out) in self.x.chunks_exact(2 * self.half).zip(self.out.chunks_exact_mut(self.half)) {
            let (gate, up) = x.split_at(self.half);
            with_function!(self.activation, function => gate_row(s, function, gate, up, out));
        }
    }
}

/// `out = function(gate) * up`.
#[inline(always)]
fn gate_row<S: Simd>(s: S, function: impl Function, gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(up.len() == gate.len() && out.len() == gate.len(), "lengths differ");
    let mut i = 0;
    while i < gate.len() {
        let count = S::LANES.min(gate.len() - i);
        // SAFETY: the three slices have `count` floats left at `i`.
        unsafe {
            let x = function.of(s, s.load_first(gate.as_ptr().add(i), count, 0.0));
            let x = s.mul(x, s.load_first(up.as_ptr().add(i), count, 0.0));
            s.store_first(x, out.as_mut_ptr().add(i), count);
        }
        i += S::LANES;
    }
}
