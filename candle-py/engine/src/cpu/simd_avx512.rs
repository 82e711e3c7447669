//! AVX-512: 32 registers of 16 lanes.

use std::arch::x86_64::*;

use super::Isa;
use super::simd::{MOST_LANES, Op, Simd, butterfly_signs};

/// The upper 16 bits of a lane.
const UPPER_HALF: i32 = -0x1_0000;

/// Proof that the processor has AVX-512 F, BW, VL and DQ (and AVX2, FMA).
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    /// The proof; panics without the instructions (the detection is cached by the standard library).
    #[inline]
    pub(super) fn checked() -> Avx512 {
        assert!(Isa::Avx512.available(), "this processor has no AVX-512");
        Avx512(())
    }
}

/// Where the op and everything inlined into it is compiled with AVX-512.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")]
fn run_op<O: Op>(simd: Avx512, op: O) -> O::Output {
    op.apply(simd)
}

/// `sum + weights . x` over groups of four bytes, unsigned by signed: VNNI's instruction. In assembly, since that needs no
/// other target feature than the registers do: the rest of AVX-512 is compiled for processors without VNNI, too.
///
/// # Safety
/// The processor has AVX-512 VNNI.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn add_byte_dots(mut sum: __m512i, weights: __m512i, x: __m512i) -> __m512i {
    // SAFETY: reads and writes these registers alone; the caller vouches for the instruction.
    unsafe {
        std::arch::asm!(
            "vpdpbusd {sum}, {weights}, {x}",
            sum = inout(zmm_reg) sum,
            weights = in(zmm_reg) weights,
            x = in(zmm_reg) x,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// The mask of the first `count` lanes.
#[inline(always)]
fn first(count: usize) -> __mmask16 {
    debug_assert!(count <= 16);
    ((1u32 << count) - 1) as __mmask16
}

// SAFETY of every block below: `self` proves the instructions; the memory they touch is what each method's contract asks.
impl Simd for Avx512 {
    type V = __m512;
    type I = __m512i;
    const LANES: usize = 16;
    const TILE_ROWS: usize = 8;
    const TILE_REGISTERS: usize = 3;
    const PAGED_TILE_ROWS: usize = 6;
    const PAGED_TILE_REGISTERS: usize = 4;
    const BYTE_TILE_ROWS: usize = 8;
    const BYTE_TILE_REGISTERS: usize = 2;
    const BYTE_EXCESS: i32 = 128;

    #[inline(always)]
    fn run<O: Op>(self, op: O) -> O::Output {
        // SAFETY: as above the impl.
        unsafe { run_op(self, op) }
    }
    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: as above the impl.
        unsafe { _mm512_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load_first(self, from: *const f32, count: usize, fill: f32) -> __m512 {
        // SAFETY: as above the impl; masked lanes are not read.
        unsafe {
            if count == 16 {
                return _mm512_loadu_ps(from);
            }
            _mm512_mask_loadu_ps(_mm512_set1_ps(fill), first(count), from)
        }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        // SAFETY: as above the impl.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_halves(self, from: *const u16) -> __m512 {
        // SAFETY: as above the impl.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn store_halves(self, v: __m512, to: *mut u16) {
        // SAFETY: as above the impl.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
    #[inline(always)]
    unsafe fn store(self, v: __m512, to: *mut f32) {
        // SAFETY: as above the impl.
        unsafe { _mm512_storeu_ps(to, v) }
    }
    #[inline(always)]
    unsafe fn store_first(self, v: __m512, to: *mut f32, count: usize) {
        // SAFETY: as above the impl; masked lanes are not written.
        unsafe {
            if count == 16 {
                return _mm512_storeu_ps(to, v);
            }
            _mm512_mask_storeu_ps(to, first(count), v)
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
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above the impl.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above the impl.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above the impl.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above the impl.
        unsafe { _mm512_div_ps(a, b) }
    }
    /// An estimate of 14 bits and one step of Newton's: a division of 16 lanes takes as long as eight other operations.
    #[inline(always)]
    fn reciprocal(self, a: __m512) -> __m512 {
        // SAFETY: as above the impl.
        unsafe {
            let estimate = _mm512_rcp14_ps(a);
            _mm512_fmadd_ps(estimate, _mm512_fnmadd_ps(a, estimate, _mm512_set1_ps(1.0)), estimate)
        }
    }
    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: as above the impl.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above the impl.
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above the impl.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn copy_sign(self, a: __m512, sign: __m512) -> __m512 {
        // SAFETY: as above the impl.
        unsafe {
            let bit = _mm512_set1_ps(-0.0);
            _mm512_or_ps(_mm512_andnot_ps(bit, a), _mm512_and_ps(bit, sign))
        }
    }
    #[inline(always)]
    fn split_exponent(self, y: __m512) -> (__m512, __m512) {
        // SAFETY: as above the impl.
        unsafe { (_mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(y), y) }
    }
    #[inline(always)]
    fn scale_exp2(self, a: __m512, exponent: __m512) -> __m512 {
        // SAFETY: as above the impl.
        unsafe { _mm512_scalef_ps(a, exponent) }
    }
    #[inline(always)]
    fn lower_bfloat16(self, pairs: __m512) -> __m512 {
        // SAFETY: as above the impl.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(pairs))) }
    }
    #[inline(always)]
    fn upper_bfloat16(self, pairs: __m512) -> __m512 {
        // SAFETY: as above the impl.
        unsafe {
            let upper = _mm512_set1_epi32(UPPER_HALF);
            _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), upper))
        }
    }
    #[inline(always)]
    fn if_less(self, a: __m512, b: __m512, then: __m512, otherwise: __m512) -> __m512 {
        // SAFETY: as above the impl.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), otherwise, then) }
    }
    #[inline(always)]
    fn butterflies<const STEP: usize>(self, v: __m512) -> __m512 {
        // SAFETY: as above the impl; the signs are 16 floats.
        unsafe {
            let partners = match STEP {
                1 => _mm512_permute_ps::<0b10_11_00_01>(v),
                2 => _mm512_permute_ps::<0b01_00_11_10>(v),
                4 => _mm512_shuffle_f32x4::<0b10_11_00_01>(v, v),
                _ => _mm512_shuffle_f32x4::<0b01_00_11_10>(v, v),
            };
            _mm512_fmadd_ps(v, _mm512_loadu_ps(const { butterfly_signs::<16>(STEP) }.as_ptr()), partners)
        }
    }
    #[inline(always)]
    fn splat_int(self, value: i32) -> __m512i {
        // SAFETY: as above the impl.
        unsafe { _mm512_set1_epi32(value) }
    }
    #[inline(always)]
    unsafe fn load_bytes(self, from: *const u8) -> __m512i {
        // SAFETY: as above the impl.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    fn add_dots(self, sum: __m512i, weights: __m512i, x: __m512i) -> __m512i {
        // SAFETY: products of bytes run on these vectors only where there is VNNI (`BytePath`).
        unsafe { add_byte_dots(sum, weights, x) }
    }
    #[inline(always)]
    fn to_float(self, v: __m512i) -> __m512 {
        // SAFETY: as above the impl.
        unsafe { _mm512_cvtepi32_ps(v) }
    }
    #[inline(always)]
    fn to_int(self, v: __m512) -> __m512i {
        // SAFETY: as above the impl.
        unsafe { _mm512_cvtps_epi32(v) }
    }
    #[inline(always)]
    fn add_int(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as above the impl.
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    fn sum_int(self, a: __m512i) -> i32 {
        // SAFETY: as above the impl.
        unsafe { _mm512_reduce_add_epi32(a) }
    }
    #[inline(always)]
    unsafe fn store_bytes(self, v: __m512i, to: *mut u8) {
        // SAFETY: as above the impl.
        unsafe { _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(v)) }
    }
    /// Magnitudes are ordered as their bits are, NaN's last.
    #[inline(always)]
    fn greater_magnitude(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above the impl.
        unsafe {
            let (a, b) = (_mm512_castps_si512(_mm512_abs_ps(a)), _mm512_castps_si512(_mm512_abs_ps(b)));
            _mm512_castsi512_ps(_mm512_max_epu32(a, b))
        }
    }
    #[inline(always)]
    fn greatest_magnitude(self, a: __m512) -> f32 {
        // SAFETY: as above the impl.
        f32::from_bits(unsafe { _mm512_reduce_max_epu32(_mm512_castps_si512(a)) })
    }
    #[inline(always)]
    fn transpose(self, rows: [__m512; MOST_LANES]) -> [__m512; MOST_LANES] {
        let mut a = rows;
        let mut b = rows;
        // SAFETY: as above the impl.
        unsafe {
            // Pairs, then fours of rows within each 128 bits; then the 128-bit quarters, twice.
            for i in 0..8 {
                a[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
                a[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
            }
            for i in 0..8 {
                let (upper, lower) = (4 * (i / 2) + i % 2, 4 * (i / 2) + i % 2 + 2);
                let (upper, lower) = (_mm512_castps_pd(a[upper]), _mm512_castps_pd(a[lower]));
                b[2 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(upper, lower));
                b[2 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(upper, lower));
            }
            for i in 0..8 {
                let (upper, lower) = (b[8 * (i / 4) + i % 4], b[8 * (i / 4) + i % 4 + 4]);
                a[8 * (i / 4) + i % 4] = _mm512_shuffle_f32x4::<0x88>(upper, lower);
                a[8 * (i / 4) + i % 4 + 4] = _mm512_shuffle_f32x4::<0xdd>(upper, lower);
            }
            for i in 0..8 {
                b[i] = _mm512_shuffle_f32x4::<0x88>(a[i], a[i + 8]);
                b[i + 8] = _mm512_shuffle_f32x4::<0xdd>(a[i], a[i + 8]);
            }
        }
        b
    }
    #[inline(always)]
    fn sum(self, a: __m512) -> f32 {
        // SAFETY: as above the impl.
        unsafe { _mm512_reduce_add_ps(a) }
    }
    #[inline(always)]
    fn greatest(self, a: __m512) -> f32 {
        // SAFETY: as above the impl.
        unsafe { _mm512_reduce_max_ps(a) }
    }
}
