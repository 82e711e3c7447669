//! Portable Rust: 4 lanes in an array, which the compiler turns into SSE or NEON registers where it can.

use half::f16;

use super::simd::{MOST_LANES, Op, Simd};

/// Proof of nothing: every processor can do this.
#[derive(Clone, Copy)]
pub(super) struct ScalarLanes;

type V = [f32; 4];

/// One function per op, as for the other instruction sets.
#[inline(never)]
fn run_op<O: Op>(simd: ScalarLanes, op: O) -> O::Output {
    op.apply(simd)
}

#[inline(always)]
fn map2(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    std::array::from_fn(|i| f(a[i], b[i]))
}

/// Fused where that is one instruction; elsewhere two roundings rather than a call of libm.
#[inline(always)]
fn mul_add(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_arch = "aarch64", target_feature = "fma")) { a.mul_add(b, c) } else { a * b + c }
}

impl Simd for ScalarLanes {
    type V = V;
    type I = [i32; 4];
    const LANES: usize = 4;
    const TILE_ROWS: usize = 6;
    const TILE_REGISTERS: usize = 2;
    const PAGED_TILE_ROWS: usize = 4;
    const PAGED_TILE_REGISTERS: usize = 3;
    const BYTE_TILE_ROWS: usize = 2;
    const BYTE_TILE_REGISTERS: usize = 2;
    const BYTE_EXCESS: i32 = 128;

    #[inline(always)]
    fn run<O: Op>(self, op: O) -> O::Output {
        run_op(self, op)
    }
    #[inline(always)]
    fn splat(self, value: f32) -> V {
        [value; 4]
    }
    #[inline(always)]
    unsafe fn load_first(self, from: *const f32, count: usize, fill: f32) -> V {
        // SAFETY: the caller gives `count` readable floats, and no other is read.
        std::array::from_fn(|i| if i < count { unsafe { from.add(i).read_unaligned() } } else { fill })
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> V {
        // SAFETY: the caller gives 4 readable floats.
        unsafe { from.cast::<V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_halves(self, from: *const u16) -> V {
        // SAFETY: the caller gives 4 readable numbers.
        std::array::from_fn(|i| f16::from_bits(unsafe { from.add(i).read_unaligned() }).to_f32())
    }
    #[inline(always)]
    unsafe fn store_halves(self, v: V, to: *mut u16) {
        // SAFETY: the caller gives 4 writable numbers.
        v.into_iter().enumerate().for_each(|(i, v)| unsafe { to.add(i).write_unaligned(f16::from_f32(v).to_bits()) });
    }
    #[inline(always)]
    unsafe fn store(self, v: V, to: *mut f32) {
        // SAFETY: the caller gives 4 writable floats.
        unsafe { to.cast::<V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn store_first(self, v: V, to: *mut f32, count: usize) {
        for (i, value) in v.into_iter().enumerate().take(count) {
            // SAFETY: the caller gives `count` writable floats, and no other is written.
            unsafe { to.add(i).write_unaligned(value) }
        }
    }
    #[inline(always)]
    fn prefetch(self, _at: *const f32) {}
    #[inline(always)]
    fn prefetch_far(self, _at: *const f32) {}
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        map2(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn mul_add(self, a: V, b: V, c: V) -> V {
        std::array::from_fn(|i| mul_add(a[i], b[i], c[i]))
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        map2(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn copy_sign(self, a: V, sign: V) -> V {
        map2(a, sign, f32::copysign)
    }
    #[inline(always)]
    fn split_exponent(self, y: V) -> (V, V) {
        let y = y.map(|y| if y < -127.0 { -127.0 } else { y });
        let floor = y.map(f32::floor);
        (self.sub(y, floor), floor)
    }
    #[inline(always)]
    fn scale_exp2(self, a: V, exponent: V) -> V {
        map2(a, exponent, |a, n| a * f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    fn lower_bfloat16(self, pairs: V) -> V {
        pairs.map(|pair| f32::from_bits(pair.to_bits() << 16))
    }
    #[inline(always)]
    fn upper_bfloat16(self, pairs: V) -> V {
        pairs.map(|pair| f32::from_bits(pair.to_bits() & 0xffff_0000))
    }
    #[inline(always)]
    fn if_less(self, a: V, b: V, then: V, otherwise: V) -> V {
        std::array::from_fn(|i| if a[i] < b[i] { then[i] } else { otherwise[i] })
    }
    #[inline(always)]
    fn butterflies<const STEP: usize>(self, v: V) -> V {
        std::array::from_fn(|lane| if lane & STEP == 0 { v[lane] + v[lane ^ STEP] } else { v[lane ^ STEP] - v[lane] })
    }
    #[inline(always)]
    fn splat_int(self, value: i32) -> [i32; 4] {
        [value; 4]
    }
    #[inline(always)]
    unsafe fn load_bytes(self, from: *const u8) -> [i32; 4] {
        // SAFETY: the caller gives 16 readable bytes.
        unsafe { from.cast::<[i32; 4]>().read_unaligned() }
    }
    #[inline(always)]
    fn add_dots(self, sum: [i32; 4], weights: [i32; 4], x: [i32; 4]) -> [i32; 4] {
        // Byte by byte of all lanes: products that the compiler knows to be narrow, which it has instructions for.
        (0..4).fold(sum, |sum, byte| {
            let weights = weights.map(|weights| weights >> (8 * byte) & 0xff);
            let x = x.map(|x| x << (24 - 8 * byte) >> 24);
            std::array::from_fn(|lane| sum[lane] + weights[lane] * x[lane])
        })
    }
    #[inline(always)]
    fn to_float(self, v: [i32; 4]) -> V {
        v.map(|value| value as f32)
    }
    #[inline(always)]
    fn to_int(self, v: V) -> [i32; 4] {
        v.map(|value| value.round_ties_even() as i32)
    }
    #[inline(always)]
    fn add_int(self, a: [i32; 4], b: [i32; 4]) -> [i32; 4] {
        std::array::from_fn(|lane| a[lane] + b[lane])
    }
    #[inline(always)]
    fn sum_int(self, a: [i32; 4]) -> i32 {
        a.into_iter().sum()
    }
    #[inline(always)]
    unsafe fn store_bytes(self, v: [i32; 4], to: *mut u8) {
        // SAFETY: the caller gives 4 writable bytes.
        unsafe { to.cast::<[u8; 4]>().write_unaligned(v.map(|value| value as u8)) }
    }
    /// Magnitudes are ordered as their bits are, NaN's last.
    #[inline(always)]
    fn greater_magnitude(self, a: V, b: V) -> V {
        map2(a, b, |a, b| f32::from_bits(a.abs().to_bits().max(b.abs().to_bits())))
    }
    #[inline(always)]
    fn greatest_magnitude(self, a: V) -> f32 {
        f32::from_bits(a.map(f32::to_bits).into_iter().fold(0, u32::max))
    }
    #[inline(always)]
    fn transpose(self, rows: [V; MOST_LANES]) -> [V; MOST_LANES] {
        let mut columns = rows;
        for (j, column) in columns.iter_mut().enumerate().take(4) {
            for (i, value) in column.iter_mut().enumerate() {
                *value = rows[i][j];
            }
        }
        columns
    }
    #[inline(always)]
    fn sum(self, a: V) -> f32 {
        (a[0] + a[2]) + (a[1] + a[3])
    }
    #[inline(always)]
    fn greatest(self, a: V) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
}
