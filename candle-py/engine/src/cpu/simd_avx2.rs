//! AVX2 with FMA: 16 registers of 8 lanes.

use std::arch::x86_64::*;

use super::isa::{BytePath, Isa};
use super::simd::{MOST_LANES, Op, Simd, butterfly_signs};

/// The upper 16 bits of a lane.
const UPPER_HALF: i32 = -0x1_0000;

/// Proof that the processor has AVX2 and FMA, and with `VNNI` that it has AVX-VNNI, too.
#[derive(Clone, Copy)]
pub(super) struct Avx2<const VNNI: bool>(());

impl<const VNNI: bool> Avx2<VNNI> {
    /// The proof; panics without the instructions (the detection is cached by the standard library).
    #[inline]
    pub(super) fn checked() -> Self {
        assert!(Isa::Avx2.available(), "this processor has no AVX2");
        assert!(!VNNI || BytePath::AvxVnni.available(), "this processor has no AVX-VNNI");
        Avx2(())
    }
}

/// `sum + weights . x` over groups of four bytes, unsigned by signed. In assembly, since that needs no other target feature
/// than the registers do.
///
/// # Safety
/// The processor has AVX-VNNI.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn add_byte_dots(mut sum: __m256i, weights: __m256i, x: __m256i) -> __m256i {
    // SAFETY: reads and writes these registers alone; the caller vouches for the instruction.
    unsafe {
        std::arch::asm!(
            "{{vex}} vpdpbusd {sum}, {weights}, {x}",
            sum = inout(ymm_reg) sum,
            weights = in(ymm_reg) weights,
            x = in(ymm_reg) x,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// Where the op and everything inlined into it is compiled with AVX2.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_op<const VNNI: bool, O: Op>(simd: Avx2<VNNI>, op: O) -> O::Output {
    op.apply(simd)
}

/// The mask of the first `count` lanes: all ones in a lane that counts.
#[inline(always)]
fn first<const VNNI: bool>(_proof: Avx2<VNNI>, count: usize) -> __m256i {
    debug_assert!(count <= 8);
    const ONES_THEN_ZEROS: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
    let from = &ONES_THEN_ZEROS[8 - count.min(8)..];
    // SAFETY: at least 8 entries are left, and the token proves AVX2.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

// SAFETY of every block below: `self` proves the instructions; the memory they touch is what each method's contract asks.
impl<const VNNI: bool> Simd for Avx2<VNNI> {
    type V = __m256;
    type I = __m256i;
    const LANES: usize = 8;
    const TILE_ROWS: usize = 6;
    const TILE_REGISTERS: usize = 2;
    const PAGED_TILE_ROWS: usize = 4;
    const PAGED_TILE_REGISTERS: usize = 3;
    const BYTE_TILE_ROWS: usize = 4;
    const BYTE_TILE_REGISTERS: usize = 2;
    const BYTE_EXCESS: i32 = if VNNI { 128 } else { 0 };

    #[inline(always)]
    fn run<O: Op>(self, op: O) -> O::Output {
        // SAFETY: as above the impl.
        unsafe { run_op(self, op) }
    }
    #[inline(always)]
    fn splat(self, value: f32) -> __m256 {
        // SAFETY: as above the impl.
        unsafe { _mm256_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load_first(self, from: *const f32, count: usize, fill: f32) -> __m256 {
        // SAFETY: as above the impl; masked lanes are not read.
        unsafe {
            if count == 8 {
                return _mm256_loadu_ps(from);
            }
            let mask = first(self, count);
            _mm256_blendv_ps(_mm256_set1_ps(fill), _mm256_maskload_ps(from, mask), _mm256_castsi256_ps(mask))
        }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m256 {
        // SAFETY: as above the impl.
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_halves(self, from: *const u16) -> __m256 {
        // SAFETY: as above the impl.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn store_halves(self, v: __m256, to: *mut u16) {
        // SAFETY: as above the impl.
        unsafe { _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
    #[inline(always)]
    unsafe fn store(self, v: __m256, to: *mut f32) {
        // SAFETY: as above the impl.
        unsafe { _mm256_storeu_ps(to, v) }
    }
    #[inline(always)]
    unsafe fn store_first(self, v: __m256, to: *mut f32, count: usize) {
        // SAFETY: as above the impl; masked lanes are not written.
        unsafe {
            if count == 8 {
                return _mm256_storeu_ps(to, v);
            }
            _mm256_maskstore_ps(to, first(self, count), v)
        }
    }
    #[inline(always)]
    fn prefetch(self, at: *const f32) {
        // SAFETY: as above the impl; a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
    #[inline(always)]
    fn prefetch_far(self, at: *const f32) {
        // SAFETY: as above the impl; a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: as above the impl.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: as above the impl.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: as above the impl.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: as above the impl.
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: as above the impl.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: as above the impl.
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: as above the impl.
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    fn copy_sign(self, a: __m256, sign: __m256) -> __m256 {
        // SAFETY: as above the impl.
        unsafe {
            let bit = _mm256_set1_ps(-0.0);
            _mm256_or_ps(_mm256_andnot_ps(bit, a), _mm256_and_ps(bit, sign))
        }
    }
    #[inline(always)]
    fn split_exponent(self, y: __m256) -> (__m256, __m256) {
        // SAFETY: as above the impl.
        unsafe {
            let y = _mm256_max_ps(_mm256_set1_ps(-127.0), y);
            let floor = _mm256_floor_ps(y);
            (_mm256_sub_ps(y, floor), floor)
        }
    }
    #[inline(always)]
    fn scale_exp2(self, a: __m256, exponent: __m256) -> __m256 {
        // SAFETY: as above the impl.
        unsafe {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127));
            _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased)))
        }
    }
    #[inline(always)]
    fn lower_bfloat16(self, pairs: __m256) -> __m256 {
        // SAFETY: as above the impl.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(pairs))) }
    }
    #[inline(always)]
    fn upper_bfloat16(self, pairs: __m256) -> __m256 {
        // SAFETY: as above the impl.
        unsafe {
            let upper = _mm256_set1_epi32(UPPER_HALF);
            _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(pairs), upper))
        }
    }
    #[inline(always)]
    fn if_less(self, a: __m256, b: __m256, then: __m256, otherwise: __m256) -> __m256 {
        // SAFETY: as above the impl.
        unsafe { _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)) }
    }
    #[inline(always)]
    fn butterflies<const STEP: usize>(self, v: __m256) -> __m256 {
        // SAFETY: as above the impl; the signs are 8 floats.
        unsafe {
            let partners = match STEP {
                1 => _mm256_permute_ps::<0b10_11_00_01>(v),
                2 => _mm256_permute_ps::<0b01_00_11_10>(v),
                _ => _mm256_permute2f128_ps::<1>(v, v),
            };
            _mm256_fmadd_ps(v, _mm256_loadu_ps(const { butterfly_signs::<8>(STEP) }.as_ptr()), partners)
        }
    }
    #[inline(always)]
    fn splat_int(self, value: i32) -> __m256i {
        // SAFETY: as above the impl.
        unsafe { _mm256_set1_epi32(value) }
    }
    #[inline(always)]
    unsafe fn load_bytes(self, from: *const u8) -> __m256i {
        // SAFETY: as above the impl.
        unsafe { _mm256_loadu_si256(from.cast()) }
    }
    /// Without VNNI: `maddubs` takes one operand unsigned and saturates at 16 bits; with |x| and weights that have taken x's
    /// sign, two products are at most 2 * 127 * 127.
    #[inline(always)]
    fn add_dots(self, sum: __m256i, weights: __m256i, x: __m256i) -> __m256i {
        // SAFETY: as above the impl.
        unsafe {
            if VNNI {
                return add_byte_dots(sum, weights, x);
            }
            let weights = _mm256_xor_si256(weights, _mm256_set1_epi8(i8::MIN));
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(weights, x));
            _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }
    #[inline(always)]
    fn to_float(self, v: __m256i) -> __m256 {
        // SAFETY: as above the impl.
        unsafe { _mm256_cvtepi32_ps(v) }
    }
    #[inline(always)]
    fn to_int(self, v: __m256) -> __m256i {
        // SAFETY: as above the impl.
        unsafe { _mm256_cvtps_epi32(v) }
    }
    #[inline(always)]
    fn add_int(self, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: as above the impl.
        unsafe { _mm256_add_epi32(a, b) }
    }
    #[inline(always)]
    fn sum_int(self, a: __m256i) -> i32 {
        // SAFETY: as above the impl.
        unsafe {
            let four = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
            _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two)))
        }
    }
    #[inline(always)]
    unsafe fn store_bytes(self, v: __m256i, to: *mut u8) {
        // SAFETY: as above the impl.
        unsafe {
            let shorts = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
            _mm_storel_epi64(to.cast(), _mm_packs_epi16(shorts, shorts));
        }
    }
    /// Magnitudes are ordered as their bits are, NaN's last.
    #[inline(always)]
    fn greater_magnitude(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: as above the impl.
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            let (a, b) = (_mm256_andnot_ps(sign, a), _mm256_andnot_ps(sign, b));
            _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a), _mm256_castps_si256(b)))
        }
    }
    #[inline(always)]
    fn greatest_magnitude(self, a: __m256) -> f32 {
        // SAFETY: as above the impl.
        unsafe {
            let a = _mm256_castps_si256(a);
            let four = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            let two = _mm_max_epu32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
            let one = _mm_max_epu32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two));
            f32::from_bits(_mm_cvtsi128_si32(one) as u32)
        }
    }
    #[inline(always)]
    fn transpose(self, rows: [__m256; MOST_LANES]) -> [__m256; MOST_LANES] {
        let mut a = rows;
        let mut b = rows;
        // SAFETY: as above the impl.
        unsafe {
            // Pairs, then fours of rows within each 128 bits; then the 128-bit halves.
            for i in 0..4 {
                a[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
                a[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
            }
            for i in 0..4 {
                let (upper, lower) = (4 * (i / 2) + i % 2, 4 * (i / 2) + i % 2 + 2);
                let (upper, lower) = (_mm256_castps_pd(a[upper]), _mm256_castps_pd(a[lower]));
                b[2 * i] = _mm256_castpd_ps(_mm256_unpacklo_pd(upper, lower));
                b[2 * i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(upper, lower));
            }
            for i in 0..4 {
                a[i] = _mm256_permute2f128_ps::<0x20>(b[i], b[i + 4]);
                a[i + 4] = _mm256_permute2f128_ps::<0x31>(b[i], b[i + 4]);
            }
        }
        a
    }
    #[inline(always)]
    fn sum(self, a: __m256) -> f32 {
        // SAFETY: as above the impl.
        unsafe {
            let quarter = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
            _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps::<1>(pair, pair)))
        }
    }
    #[inline(always)]
    fn greatest(self, a: __m256) -> f32 {
        // SAFETY: as above the impl.
        unsafe {
            let quarter = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let pair = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
            _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps::<1>(pair, pair)))
        }
    }
}
