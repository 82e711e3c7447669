//! What an instruction set must offer for the kernels to be written once: a token that proves the processor has it, and
//! the arithmetic of its float32 registers. The kernels are `Op`s, compiled once per instruction set by `dispatch`.
//!
//! Every method is `#[inline(always)]`: it must end up inside the `#[target_feature]` function of its token's `run`,
//! where an intrinsic is one instruction.

use super::isa::{BytePath, Isa};
use super::simd_scalar::ScalarLanes;
#[cfg(target_arch = "x86_64")]
use super::{simd_avx2::Avx2, simd_avx512::Avx512};

/// Lanes of the widest register.
pub(super) const MOST_LANES: usize = 16;

/// Registers of `LANES` float32 lanes. A value of the implementing type proves that the processor can execute it.
pub(super) trait Simd: Copy {
    /// One register.
    type V: Copy;
    /// The same register as 32-bit integers, or as groups of four bytes.
    type I: Copy;
    /// Lanes of a register.
    const LANES: usize;
    /// Rows of the GEMM tile whose accumulators stay in registers.
    const TILE_ROWS: usize;
    /// Registers across the GEMM tile.
    const TILE_REGISTERS: usize;
    /// Rows of the tile of attention to a cache. It is wide, for the few queries of a step are too few chains to keep the
    /// multiply-adds busy.
    const PAGED_TILE_ROWS: usize;
    /// Registers across that tile.
    const PAGED_TILE_REGISTERS: usize;
    /// Rows of the tile of bytes: its integer accumulators stay in registers; those in float32, met once a block, need not.
    const BYTE_TILE_ROWS: usize;
    /// Registers across the tile of bytes.
    const BYTE_TILE_REGISTERS: usize;
    /// What `add_dots` takes each weight to be more than it is.
    const BYTE_EXCESS: i32;

    /// Compiles `op` for this instruction set and runs it.
    fn run<O: Op>(self, op: O) -> O::Output;

    /// Every lane `value`.
    fn splat(self, value: f32) -> Self::V;
    /// The first lanes from `from`, `count <= LANES` of them; the rest are `fill`.
    ///
    /// # Safety
    /// `from` is readable for `count` floats; no alignment is needed.
    unsafe fn load_first(self, from: *const f32, count: usize, fill: f32) -> Self::V;
    /// All lanes.
    ///
    /// # Safety
    /// `from` is readable for `LANES` floats; no alignment is needed.
    unsafe fn load(self, from: *const f32) -> Self::V;
    /// All lanes, from float16.
    ///
    /// # Safety
    /// `from` is readable for `LANES` numbers of 16 bits; no alignment is needed.
    unsafe fn load_halves(self, from: *const u16) -> Self::V;
    /// Stores all lanes as the nearest float16, ties to even; what is too large becomes infinite.
    ///
    /// # Safety
    /// `to` is writable for `LANES` numbers of 16 bits; no alignment is needed.
    unsafe fn store_halves(self, v: Self::V, to: *mut u16);
    /// Stores all lanes.
    ///
    /// # Safety
    /// `to` is writable for `LANES` floats; no alignment is needed.
    unsafe fn store(self, v: Self::V, to: *mut f32);
    /// Stores the first `count <= LANES` lanes.
    ///
    /// # Safety
    /// `to` is writable for `count` floats; no alignment is needed.
    unsafe fn store_first(self, v: Self::V, to: *mut f32, count: usize);
    /// Asks for the cache line at `at`, which may be any address, in L1.
    fn prefetch(self, at: *const f32);
    /// The same in L2.
    fn prefetch_far(self, at: *const f32);

    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `1 / a` to a unit in the last place, for `a` from 1 to `2^127.5`.
    #[inline(always)]
    fn reciprocal(self, a: Self::V) -> Self::V {
        self.div(self.splat(1.0), a)
    }
    /// `a * b + c`, rounded once where the hardware does.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The lesser; `b` when either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// The greater; `b` when either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The magnitude of `a` with the sign of `sign`.
    fn copy_sign(self, a: Self::V, sign: Self::V) -> Self::V;
    /// `y - floor(y)` and what `scale_exp2` needs of y; `y <= 127.99`.
    fn split_exponent(self, y: Self::V) -> (Self::V, Self::V);
    /// `a * 2^floor(y)` for the second part of `split_exponent(y)`; zero for `y = -inf`.
    fn scale_exp2(self, a: Self::V, exponent: Self::V) -> Self::V;
    /// The bfloat16 in the lower half of each lane, as float32.
    fn lower_bfloat16(self, pairs: Self::V) -> Self::V;
    /// The bfloat16 in the upper half of each lane, as float32.
    fn upper_bfloat16(self, pairs: Self::V) -> Self::V;
    /// `if a < b { then } else { otherwise }`, lane by lane.
    fn if_less(self, a: Self::V, b: Self::V, then: Self::V, otherwise: Self::V) -> Self::V;
    /// `a + b` in the place of a, `a - b` in the place of b, for any two lanes a and b that are `STEP` apart: a power of two
    /// below `LANES`.
    fn butterflies<const STEP: usize>(self, v: Self::V) -> Self::V;
    /// Every lane `value`.
    fn splat_int(self, value: i32) -> Self::I;
    /// All lanes.
    ///
    /// # Safety
    /// `from` is readable for `4 * LANES` bytes; no alignment is needed.
    unsafe fn load_bytes(self, from: *const u8) -> Self::I;
    /// `sum + (weights + BYTE_EXCESS - 128) . x` lane by lane over groups of four: weights are bytes from 1 to 255, x are
    /// signed bytes above -128.
    fn add_dots(self, sum: Self::I, weights: Self::I, x: Self::I) -> Self::I;
    /// The integers as float32.
    fn to_float(self, v: Self::I) -> Self::V;
    /// The nearest integers, ties to even; all are below 2^31.
    fn to_int(self, v: Self::V) -> Self::I;
    /// `a + b`.
    fn add_int(self, a: Self::I, b: Self::I) -> Self::I;
    /// Sum of the lanes.
    fn sum_int(self, a: Self::I) -> i32;
    /// Stores the lanes, each from -128 to 127, as signed bytes.
    ///
    /// # Safety
    /// `to` is writable for `LANES` bytes; no alignment is needed.
    unsafe fn store_bytes(self, v: Self::I, to: *mut u8);
    /// The greater of |a| and |b|, lane by lane; NaN when either is.
    fn greater_magnitude(self, a: Self::V, b: Self::V) -> Self::V;
    /// The greatest of the lanes, none of which is negative; NaN when one is.
    fn greatest_magnitude(self, a: Self::V) -> f32;
    /// Transposes the leading `LANES x LANES` block: lane `j` of register `i` goes to lane `i` of register `j`.
    fn transpose(self, rows: [Self::V; MOST_LANES]) -> [Self::V; MOST_LANES];
    /// Sum of the lanes, in one fixed order.
    fn sum(self, a: Self::V) -> f32;
    /// Greatest lane.
    fn greatest(self, a: Self::V) -> f32;
}

/// What `butterflies` multiplies the lanes with before it adds their partners.
pub(super) const fn butterfly_signs<const LANES: usize>(step: usize) -> [f32; LANES] {
    let mut signs = [1.0; LANES];
    let mut lane = 0;
    while lane < LANES {
        if lane & step != 0 {
            signs[lane] = -1.0;
        }
        lane += 1;
    }
    signs
}

/// Walks `$len` floats a register at a time: the body sees the offset `$at` and the `$count` of lanes, a constant but for the
/// last part.
macro_rules! each_register {
    ($s:ty, $len:expr, |$at:ident, $count:ident| $body:expr) => {{
        let len: usize = $len;
        let mut $at = 0;
        while $at + <$s>::LANES <= len {
            let $count = <$s>::LANES;
            $body
            $at += <$s>::LANES;
        }
        if $at < len {
            let $count = len - $at;
            $body
        }
    }};
}
pub(super) use each_register;

/// A kernel with its arguments.
pub(super) trait Op {
    /// What it returns.
    type Output;
    /// Runs the kernel; must be `#[inline(always)]`.
    fn apply<S: Simd>(self, simd: S) -> Self::Output;
}

/// Runs `op` with the vectors of `isa`; panics when this processor lacks them.
pub(super) fn dispatch<O: Op>(isa: Isa, op: O) -> O::Output {
    match isa.vectors() {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => Avx512::checked().run(op),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => Avx2::<false>::checked().run(op),
        _ => ScalarLanes.run(op),
    }
}

/// Runs `op`, which is about products of bytes, with the vectors of `path`; panics when this processor lacks them.
pub(super) fn dispatch_bytes<O: Op>(path: BytePath, op: O) -> O::Output {
    match path {
        #[cfg(target_arch = "x86_64")]
        BytePath::Avx512Vnni => {
            assert!(path.available(), "this processor has no AVX-512 VNNI");
            Avx512::checked().run(op)
        }
        #[cfg(target_arch = "x86_64")]
        BytePath::AvxVnni => Avx2::<true>::checked().run(op),
        #[cfg(target_arch = "x86_64")]
        BytePath::Avx2 => Avx2::<false>::checked().run(op),
        _ => ScalarLanes.run(op),
    }
}
