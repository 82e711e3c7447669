//! Activations, the gated form, rotary embedding.

use super::{assert_close, assert_same_bits, erf, every_kernels, random};
use crate::cpu::Activation;

const ALL: [Activation; 7] = [
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::Relu,
    Activation::Silu,
    Activation::Tanh,
    Activation::Sigmoid,
    Activation::Identity,
];

fn reference(x: f64, activation: Activation) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match activation {
        Activation::Gelu => 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
        }
        Activation::Relu => x.max(0.0),
        Activation::Silu => x * sigmoid(x),
        Activation::Tanh => x.tanh(),
        Activation::Sigmoid => sigmoid(x),
        Activation::Identity => x,
    }
}

#[test]
fn activations_match_float64_from_tiny_to_huge() {
    let mut x: Vec<f32> = (-120_000..=120_000).map(|i| i as f32 * 1e-4).collect();
    x.extend((0..200).flat_map(|i| [1.2f32.powi(i - 150), -1.2f32.powi(i - 150)]));
    x.extend([0.0, -0.0, 1e30, -1e30, 88.0, -88.0, 127.0, -127.0, f32::MIN_POSITIVE, 1e-45]);
    for kernels in every_kernels() {
        for activation in ALL {
            let mut y = x.clone();
            kernels.activate(&mut y, activation);
            for (x, y) in x.iter().zip(&y) {
                let want = reference(f64::from(*x), activation);
                let error = (f64::from(*y) - want).abs();
                assert!(
                    error <= 6e-7f64.max(4e-7 * want.abs()),
                    "{:?} {activation:?}({x}) = {y}, not {want}",
                    kernels.isa()
                );
            }
        }
    }
}

#[test]
fn tanh_keeps_its_relative_accuracy_near_zero() {
    let x: Vec<f32> = (-4000..4000).map(|i| i as f32 * 2.5e-4).collect();
    for kernels in every_kernels() {
        let mut y = x.clone();
        kernels.activate(&mut y, Activation::Tanh);
        for (x, y) in x.iter().zip(&y) {
            let want = f64::from(*x).tanh();
            assert!((f64::from(*y) - want).abs() <= 3e-7 * want.abs(), "tanh({x}) = {y}, not {want}");
        }
    }
}

#[test]
fn activations_show_nan_and_bear_infinity() {
    for kernels in every_kernels() {
        for activation in ALL {
            for place in [0, 16, 20] {
                let mut x = random(21, 1);
                x[place] = f32::NAN;
                kernels.activate(&mut x, activation);
                assert!(x[place].is_nan(), "{activation:?}");
                assert_eq!(x.iter().filter(|x| x.is_nan()).count(), 1, "{activation:?}");
            }
        }
        let mut x = [f32::INFINITY, f32::NEG_INFINITY];
        kernels.activate(&mut x, Activation::Tanh);
        assert_eq!(x, [1.0, -1.0]);
        let mut x = [f32::INFINITY, f32::NEG_INFINITY];
        kernels.activate(&mut x, Activation::Gelu);
        assert_eq!(x[0], f32::INFINITY);
        assert!(x[1].abs() < 1e-6, "{}", x[1]);
    }
}

#[test]
fn an_element_has_the_same_bits_in_every_place() {
    for kernels in every_kernels() {
        for activation in ALL {
            let x = random(100, 2);
            let mut whole = x.clone();
            kernels.activate(&mut whole, activation);
            for (start, end) in [(0, 1), (3, 20), (17, 100), (99, 100)] {
                let mut part = x[start..end].to_vec();
                kernels.activate(&mut part, activation);
                assert_same_bits(&part, &whole[start..end], "part");
            }
        }
    }
}

#[test]
fn gated_multiplies_the_activated_first_half_by_the_second() {
    for kernels in every_kernels() {
        for half in [0, 1, 7, 8, 9, 16, 31, 100] {
            for activation in ALL {
                let rows = 3;
                let x = random(rows * 2 * half, 3);
                let mut out = vec![f32::NAN; rows * half];
                kernels.gated(&x, rows, half, activation, &mut out);
                let want = |i: usize| {
                    let (row, column) = (i / half, i % half);
                    let x = &x[row * 2 * half..][..2 * half];
                    reference(x[column].into(), activation) * f64::from(x[half + column])
                };
                assert_close(&out, &(0..rows * half).map(want).collect::<Vec<_>>(), 1e-6, "gated");
            }
        }
    }
}

#[test]
fn rotary_turns_each_pair_by_its_angle() {
    for kernels in every_kernels() {
        for (head_dim, heads, extra) in [(2, 1, 0), (32, 3, 5), (34, 2, 1), (64, 2, 0), (80, 1, 7)] {
            let (rows, half, width) = (5, head_dim / 2, heads * head_dim);
            let stride = width + extra;
            let angles = random(rows * half, 4);
            let cos: Vec<f32> = angles.iter().map(|a| (3.0 * a).cos()).collect();
            let sin: Vec<f32> = angles.iter().map(|a| (3.0 * a).sin()).collect();
            let x = random(rows * stride, 5);
            let mut out = x.clone();
            kernels.rotary(&mut out, stride, rows, heads, head_dim, &cos, &sin);
            let want = |i: usize| {
                let (row, column) = (i / stride, i % stride);
                if column >= width {
                    return f64::from(x[i]);
                }
                let place = column % head_dim;
                let (c, s) = (f64::from(cos[row * half + place % half]), f64::from(sin[row * half + place % half]));
                let other = f64::from(if place < half { -x[i + half] } else { x[i - half] });
                f64::from(x[i]) * c + other * s
            };
            assert_close(&out, &(0..x.len()).map(want).collect::<Vec<_>>(), 1e-6, "rotary");
        }
    }
}
