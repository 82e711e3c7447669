//! The kernels against plain float64 loops, for every instruction set this processor has, over odd sizes; and the
//! promise that a row's bits do not depend on the other rows.

mod attention;
mod bytes;
mod elementwise;
mod linear;
mod norm;
mod paged;
mod reduce;
mod tiles;

use super::{Isa, Kernels, Storage};

/// The kernels of every instruction set this processor has that multiply in float32.
fn every_kernels() -> Vec<Kernels> {
    Isa::ALL.into_iter().filter(|isa| isa.is_for(Storage::Float32)).filter_map(Kernels::new).collect()
}

/// `count` values in -1 .. 1, the same for the same seed (a 64-bit linear congruential generator: Knuth, "The Art of
/// Computer Programming", volume 2, 3.3.4).
fn random(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Asserts that `got` is within `tolerance * (1 + |want|)` of `want` everywhere.
fn assert_close(got: &[f32], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: lengths differ");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs();
        assert!(error <= tolerance * (1.0 + want.abs()), "{what}: element {i} is {got}, not {want}");
    }
}

/// Asserts equality bit for bit.
fn assert_same_bits(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}: lengths differ");
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.to_bits(), b.to_bits(), "{what}: element {i}: {a} and {b}");
    }
}

/// erf by its Maclaurin series, and by Lentz's continued fraction of erfc beyond 2.5 (Abramowitz and Stegun 7.1.5, 7.1.14).
fn erf(x: f64) -> f64 {
    if x.abs() < 2.5 {
        let (mut term, mut sum) = (x, x);
        for n in 1..100 {
            term *= -x * x / n as f64;
            sum += term / (2 * n + 1) as f64;
        }
        return sum * std::f64::consts::FRAC_2_SQRT_PI;
    }
    let z = x.abs();
    let mut fraction = z;
    for n in (1..200).rev() {
        fraction = z + n as f64 / 2.0 / fraction;
    }
    (1.0 - (-z * z).exp() / fraction / std::f64::consts::PI.sqrt()).copysign(x)
}

#[test]
fn the_reference_erf_matches_published_values() {
    // Abramowitz and Stegun, table 7.1.
    for (x, want) in [(0.5, 0.520_499_877_8), (1.0, 0.842_700_792_9), (2.0, 0.995_322_265_0), (2.6, 0.999_763_965_6)] {
        assert!((erf(x) - want).abs() < 1e-9, "erf({x}) is {}", erf(x));
    }
}

#[test]
fn names_of_instruction_sets_round_trip() {
    for isa in Isa::ALL.into_iter().chain([Isa::AmxSoftware]) {
        assert_eq!(Isa::from_name(isa.name()), Some(isa));
    }
    assert_eq!(Isa::from_name("mmx"), None);
    assert!(Kernels::new(Isa::Scalar).is_some());
}

#[test]
fn tiles_are_chosen_for_bfloat16_alone_and_only_in_hardware() {
    let (whole, half) = (Isa::detected(Storage::Float32), Isa::detected(Storage::Bfloat16));
    assert!(whole.available() && half.available());
    assert!(!whole.has_tiles());
    assert_eq!(half, if Isa::Amx.available() { Isa::Amx } else { whole });
}
