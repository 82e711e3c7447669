//! Elementwise functions over slices, and the gated form of a feed-forward layer.

use super::math::{Function, Gelu, GeluTanh, Relu, Sigmoid, Silu, Tanh};
use super::simd::{Op, Simd, each_register};

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

/// Registers computed side by side.
const MANY: usize = 8;

/// Applies `function` in place.
#[inline(always)]
fn map<S: Simd>(s: S, function: impl Function, x: &mut [f32]) {
    let mut blocks = x.chunks_exact_mut(MANY * S::LANES);
    for block in &mut blocks {
        let mut registers = [s.splat(0.0); MANY];
        for (i, register) in registers.iter_mut().enumerate() {
            // SAFETY: the block is `MANY` registers long.
            *register = unsafe { s.load(block.as_ptr().add(i * S::LANES)) };
        }
        for (i, register) in function.of_many(s, registers).into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { s.store(register, block.as_mut_ptr().add(i * S::LANES)) };
        }
    }
    let rest = blocks.into_remainder();
    let at = rest.as_mut_ptr();
    each_register!(S, rest.len(), |i, count| {
        // SAFETY: `count` floats are left.
        unsafe { s.store_first(function.of(s, s.load_first(at.add(i), count, 0.0)), at.add(i), count) };
    });
}

/// Applies `activation` in place to a tile: `ROWS` rows of `columns`, `stride` apart.
///
/// # Safety
/// The tile's rows are readable and writable.
#[inline(always)]
pub(super) unsafe fn activate_tile<S: Simd, const ROWS: usize>(
    s: S,
    activation: Activation,
    x: *mut f32,
    stride: usize,
    columns: usize,
) {
    if activation != Activation::Identity {
        // SAFETY: the caller's promise.
        with_function!(activation, function => unsafe { map_tile::<S, ROWS>(s, function, x, stride, columns) });
    }
}

/// Applies `function` in place, down the rows of the tile a register at a time.
///
/// # Safety
/// As `activate_tile`.
#[inline(always)]
unsafe fn map_tile<S: Simd, const ROWS: usize>(
    s: S,
    function: impl Function,
    x: *mut f32,
    stride: usize,
    columns: usize,
) {
    each_register!(S, columns, |i, count| {
        let mut registers = [s.splat(0.0); ROWS];
        for (m, register) in registers.iter_mut().enumerate() {
            // SAFETY: `count` floats are left of row `m < ROWS`.
            *register = unsafe { s.load_first(x.add(m * stride + i), count, 0.0) };
        }
        for (m, register) in function.of_many(s, registers).into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { s.store_first(register, x.add(m * stride + i), count) };
        }
    });
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
        if self.activation != Activation::Identity {
            with_function!(self.activation, function => map(s, function, self.x));
        }
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
    out.copy_from_slice(gate);
    map(s, function, out);
    each_register!(S, up.len(), |i, count| {
        // SAFETY: both slices have `count` floats left at `i`.
        unsafe {
            let at = out.as_mut_ptr().add(i);
            let product = s.mul(s.load_first(at, count, 0.0), s.load_first(up.as_ptr().add(i), count, 0.0));
            s.store_first(product, at, count);
        }
    });
}
