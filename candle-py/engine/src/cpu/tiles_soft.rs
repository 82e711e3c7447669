//! The tile registers in portable Rust, bit for bit what the manual says of the hardware: what tests hold AMX to, and what
//! they run where there is none. Slow.

use super::tiles::{TILE_COLUMNS, TILE_COUNT, TILE_ROWS, Tiles};

/// The lanes of one tile, row by row.
type Lanes = [u32; TILE_ROWS * TILE_COLUMNS];

/// Eight tiles in memory.
pub(super) struct SoftTiles([Lanes; TILE_COUNT]);

impl Tiles for SoftTiles {
    #[inline(always)]
    fn begin() -> Self {
        // Nothing may rely on what is in a tile before it is zeroed or loaded: NaN shows who does.
        Self([[u32::MAX; TILE_ROWS * TILE_COLUMNS]; TILE_COUNT])
    }

    #[inline(always)]
    fn zero<const T: usize>(&mut self) {
        self.0[T] = [0; TILE_ROWS * TILE_COLUMNS];
    }

    #[inline(always)]
    unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: usize) {
        for (row, lanes) in self.0[T].chunks_exact_mut(TILE_COLUMNS).enumerate() {
            let at = from.wrapping_add(row * stride).cast::<[u32; TILE_COLUMNS]>();
            // SAFETY: the row is readable, as the caller says.
            lanes.copy_from_slice(&unsafe { at.read_unaligned() });
        }
    }

    #[inline(always)]
    unsafe fn store<const T: usize>(&self, to: *mut f32, stride: usize) {
        for (row, lanes) in self.0[T].chunks_exact(TILE_COLUMNS).enumerate() {
            let at = to.wrapping_byte_add(row * stride).cast::<[u32; TILE_COLUMNS]>();
            let lanes = std::array::from_fn(|column| lanes[column]);
            // SAFETY: the row is writable, as the caller says.
            unsafe { at.write_unaligned(lanes) };
        }
    }

    #[inline(always)]
    fn dot<const C: usize, const A: usize, const B: usize>(&mut self) {
        let (a, b) = (self.0[A], self.0[B]);
        if is_plain(&a, SMALLEST_LEFT) && is_plain(&b, SMALLEST_RIGHT) {
            dot_with(&mut self.0[C], &a, &b, multiply_add_plain);
        } else {
            dot_with(&mut self.0[C], &a, &b, multiply_add);
        }
    }
}

/// The product, each chain's step being `step(a, b, sum)`.
#[inline(always)]
fn dot_with(c: &mut Lanes, a: &Lanes, b: &Lanes, step: impl Fn(f32, f32, f32) -> f32 + Copy) {
    for (a, c) in a.chunks_exact(TILE_COLUMNS).zip(c.chunks_exact_mut(TILE_COLUMNS)) {
        let (mut lower, mut upper) = ([0.0_f32; TILE_COLUMNS], [0.0_f32; TILE_COLUMNS]);
        for (a, b) in a.iter().zip(b.chunks_exact(TILE_COLUMNS)) {
            let a = halves(*a);
            for column in 0..TILE_COLUMNS {
                let b = halves(b[column]);
                lower[column] = step(a[0], b[0], lower[column]);
                upper[column] = step(a[1], b[1], upper[column]);
            }
        }
        for (column, c) in c.iter_mut().enumerate() {
            *c = add(f32::from_bits(*c), add(lower[column], upper[column])).to_bits();
        }
    }
}

/// The two bfloat16 of a pair as float32, the lower half first.
#[inline(always)]
fn halves(pair: u32) -> [f32; 2] {
    [f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000)]
}

/// Numbers of the left operand that are not plain are zero or at least this large.
const SMALLEST_LEFT: f32 = f32::from_bits((127 - 60) << 23);

/// The same of the right operand. A bfloat16 from 2^-60 on is a multiple of 2^-67, one from 2^-50 on of 2^-57: all
/// products, and so all sums, are multiples of 2^-124, which no denormal number is.
const SMALLEST_RIGHT: f32 = f32::from_bits((127 - 50) << 23);

/// Plain numbers are smaller: 16 products of two of them stay finite.
const TOO_LARGE: f32 = f32::from_bits((127 + 60) << 23);

/// Whether nothing can overflow, underflow or be denormal in a chain of products of such numbers.
#[inline(always)]
fn is_plain(lanes: &Lanes, smallest: f32) -> bool {
    let plain = |value: f32| value == 0.0 || (value.abs() >= smallest && value.abs() < TOO_LARGE);
    lanes.iter().all(|pair| halves(*pair).into_iter().all(plain))
}

/// `a * b + sum` for plain bfloat16 `a` and `b`: their product has 16 significant bits and is exact, so that the sum's
/// rounding is the only one.
#[inline(always)]
fn multiply_add_plain(a: f32, b: f32, sum: f32) -> f32 {
    a * b + sum
}

/// `a * b + sum` for any bfloat16 `a` and `b`, rounded once. In float64 the product is exact; where the sum is not, its
/// smaller part is too small to bring it near the middle between two float32, and rounding twice is rounding once.
fn multiply_add(a: f32, b: f32, sum: f32) -> f32 {
    round(f64::from(no_denormal(a)) * f64::from(no_denormal(b)) + f64::from(no_denormal(sum)))
}

/// `a + b`, rounded once.
fn add(a: f32, b: f32) -> f32 {
    round(f64::from(no_denormal(a)) + f64::from(no_denormal(b)))
}

/// A denormal number as the zero of its sign.
fn no_denormal(value: f32) -> f32 {
    if value.is_subnormal() { 0.0_f32.copysign(value) } else { value }
}

/// The nearest float32, ties to even; zero where the result, rounded as if exponents had no end, is below the normal ones.
fn round(value: f64) -> f32 {
    /// 2^64, which takes what is about to underflow back among the normal numbers.
    const UP: f64 = 18_446_744_073_709_551_616.0;
    let is_tiny = value.abs() < f64::from(f32::MIN_POSITIVE)
        && f64::from((value.abs() * UP) as f32) < f64::from(f32::MIN_POSITIVE) * UP;
    if is_tiny { 0.0_f32.copysign(value as f32) } else { value as f32 }
}

#[cfg(test)]
mod tests {
    use super::{SMALLEST_LEFT, SMALLEST_RIGHT, add, is_plain, multiply_add, multiply_add_plain, round};

    /// A bfloat16 of any sign and fraction, and an exponent from `least` on.
    fn bfloat16(bits: u64, least: u64, exponents: u64) -> f32 {
        f32::from_bits(((bits & 0x807f) as u32) << 16 | (((least + (bits >> 16) % exponents) as u32) << 23))
    }

    #[test]
    fn one_rounding_is_what_fused_arithmetic_of_the_standard_library_gives() {
        let (mut state, mut sum) = (1_u64, 0.0_f32);
        for _ in 0..300_000 {
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                state >> 20
            };
            // Products around 1 of 2^-30 to 2^30: the sum before is larger, smaller or nearly cancelled.
            let (a, b) = (bfloat16(next(), 112, 30), bfloat16(next(), 112, 30));
            let want = a.mul_add(b, sum);
            assert_eq!(multiply_add(a, b, sum).to_bits(), want.to_bits(), "{a} {b} {sum}");
            assert_eq!(multiply_add_plain(a, b, sum).to_bits(), want.to_bits(), "{a} {b} {sum}");
            assert_eq!(add(a, want).to_bits(), (a + want).to_bits(), "{a} {want}");
            sum = if next() % 7 == 0 { -a * b } else { want };
        }
    }

    #[test]
    fn what_rounds_up_to_the_least_normal_number_is_not_flushed() {
        let least = f64::from(f32::MIN_POSITIVE);
        let unit = least / f64::from(1 << 24);
        assert_eq!(round(least - 0.25 * unit), f32::MIN_POSITIVE);
        assert_eq!(round(least - 0.5 * unit), f32::MIN_POSITIVE);
        assert_eq!(round(least - 0.75 * unit), 0.0);
        assert_eq!(round(-least + 0.75 * unit).to_bits(), (-0.0_f32).to_bits());
        assert_eq!(round(-least), -f32::MIN_POSITIVE);
    }

    #[test]
    fn numbers_at_the_bounds_of_the_plain_ones_keep_clear_of_denormal_sums() {
        let pairs = |value: f32| [value.to_bits() | value.to_bits() >> 16; 256];
        for (smallest, other) in [(SMALLEST_LEFT, SMALLEST_RIGHT), (SMALLEST_RIGHT, SMALLEST_LEFT)] {
            assert!(is_plain(&pairs(smallest), smallest) && is_plain(&pairs(0.0), smallest));
            for value in [smallest / 2.0, f32::from_bits(1 << 16), 2.0_f32.powi(60), f32::INFINITY, f32::NAN] {
                assert!(!is_plain(&pairs(value), smallest), "{value}");
            }
            // The nearest that two different products come to each other.
            let unit = 1.0 + 1.0 / 128.0;
            let difference = multiply_add(smallest * unit, other * unit, -smallest * other * (1.0 + 1.0 / 64.0));
            assert!(difference.is_normal(), "{difference}");
        }
    }
}
