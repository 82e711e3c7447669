//! The matrix product and its epilogues.

use super::{assert_close, assert_same_bits, erf, every_kernels, random};
use crate::cpu::{Activation, Epilogue, Kernels, Storage};

const SIZES: [usize; 13] = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 47, 49];

/// `x @ weight^T + bias` in float64.
fn reference(x: &[f32], rows: usize, weight: &[f32], n: usize, k: usize, bias: Option<&[f32]>) -> Vec<f64> {
    let mut out = Vec::new();
    for row in 0..rows {
        for column in 0..n {
            let products = (0..k).map(|i| f64::from(x[row * k + i]) * f64::from(weight[column * k + i]));
            out.push(products.sum::<f64>() + bias.map_or(0.0, |bias| f64::from(bias[column])));
        }
    }
    out
}

fn linear(kernels: Kernels, x: &[f32], weight: &[f32], n: usize, k: usize, epilogue: Epilogue<'_>) -> Vec<f32> {
    let rows = x.len() / k;
    let mut out = vec![f32::NAN; rows * n];
    kernels.linear(x, rows, &kernels.pack(weight, n, k, Storage::Float32), None, epilogue, &mut out, n);
    out
}

#[test]
fn small_odd_shapes_match_float64() {
    for kernels in every_kernels() {
        for rows in SIZES {
            for n in SIZES {
                for k in [1, 2, 5, 16, 31, 33] {
                    let (x, weight, bias) = (random(rows * k, 1), random(n * k, 2), random(n, 3));
                    let mut out = vec![f32::NAN; rows * n];
                    let packed = kernels.pack(&weight, n, k, Storage::Float32);
                    kernels.linear(&x, rows, &packed, Some(&bias), Epilogue::None, &mut out, n);
                    let want = reference(&x, rows, &weight, n, k, Some(&bias));
                    assert_close(&out, &want, 2e-6, &format!("{:?} {rows} {n} {k}", kernels.isa()));
                }
            }
        }
    }
}

#[test]
fn shapes_around_hidden_sizes_match_float64() {
    for kernels in every_kernels() {
        for (rows, n, k) in [(13, 383, 385), (5, 384, 384), (9, 385, 383), (3, 1024, 768), (2, 1000, 1537)] {
            let (x, weight) = (random(rows * k, 4), random(n * k, 5));
            let out = linear(kernels, &x, &weight, n, k, Epilogue::None);
            // The bound of a chain of k roundings grows with k; random signs leave far less.
            let want = reference(&x, rows, &weight, n, k, None);
            assert_close(&out, &want, 2e-5, &format!("{:?} {rows} {n} {k}", kernels.isa()));
        }
    }
}

#[test]
fn epilogues_come_after_the_bias() {
    let (rows, n, k) = (11, 37, 29);
    let (x, weight, bias, residual) = (random(rows * k, 6), random(n * k, 7), random(n, 8), random(rows * (n + 3), 9));
    let plain = reference(&x, rows, &weight, n, k, Some(&bias));
    for kernels in every_kernels() {
        let packed = kernels.pack(&weight, n, k, Storage::Float32);
        let mut out = vec![f32::NAN; rows * n];
        kernels.linear(&x, rows, &packed, Some(&bias), Epilogue::Add(&residual, n + 3), &mut out, n);
        let added = |i: usize| plain[i] + f64::from(residual[i / n * (n + 3) + i % n]);
        assert_close(&out, &(0..rows * n).map(added).collect::<Vec<_>>(), 2e-6, "residual");

        let gelu = |x: &f64| 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2));
        let activation = Epilogue::Activation(Activation::Gelu);
        kernels.linear(&x, rows, &packed, Some(&bias), activation, &mut out, n);
        assert_close(&out, &plain.iter().map(gelu).collect::<Vec<_>>(), 2e-6, "gelu");

        let activation = Epilogue::Activation(Activation::Relu);
        kernels.linear(&x, rows, &packed, Some(&bias), activation, &mut out, n);
        assert_close(&out, &plain.iter().map(|x| x.max(0.0)).collect::<Vec<_>>(), 2e-6, "relu");
    }
}

#[test]
fn a_row_has_the_same_bits_in_every_batch_and_place() {
    for kernels in every_kernels() {
        for (n, k) in [(33, 17), (100, 64), (384, 384)] {
            let (x, weight, bias) = (random(45 * k, 10), random(n * k, 11), random(n, 12));
            let packed = kernels.pack(&weight, n, k, Storage::Float32);
            for epilogue in [Epilogue::None, Epilogue::Activation(Activation::Gelu)] {
                let run = |x: &[f32]| {
                    let rows = x.len() / k;
                    let mut out = vec![f32::NAN; rows * n];
                    kernels.linear(x, rows, &packed, Some(&bias), epilogue, &mut out, n);
                    out
                };
                let whole = run(&x);
                for (start, end) in [(0, 1), (0, 7), (1, 10), (3, 45), (13, 14), (17, 33), (44, 45)] {
                    let part = run(&x[start * k..end * k]);
                    assert_same_bits(&part, &whole[start * n..end * n], &format!("{:?} {n} {k}", kernels.isa()));
                }
            }
        }
    }
}

#[test]
fn an_element_is_one_chain_over_k() {
    // Big terms cancel only in the order of k: any split into partial sums gives another result.
    let k = 64;
    let x: Vec<f32> = (0..k).map(|i| [1e8, 1.0, -1e8, 0.25][i % 4]).collect();
    let mut want = 0f32;
    x.iter().for_each(|value| want += value);
    for kernels in every_kernels() {
        for n in [1, 20, 60] {
            let out = linear(kernels, &x, &vec![1.0; n * k], n, k, Epilogue::None);
            assert_same_bits(&out, &vec![want; n], "chain");
        }
    }
}

#[test]
fn strided_output_leaves_the_columns_between_alone() {
    let (rows, n, k, stride) = (10, 21, 8, 50);
    let (x, weight) = (random(rows * k, 13), random(n * k, 14));
    for kernels in every_kernels() {
        let packed = kernels.pack(&weight, n, k, Storage::Float32);
        let mut out = vec![7.0; rows * stride];
        kernels.linear(&x, rows, &packed, None, Epilogue::Activation(Activation::Tanh), &mut out[5..], stride);
        let dense = linear(kernels, &x, &weight, n, k, Epilogue::Activation(Activation::Tanh));
        for row in 0..rows {
            let line = &out[row * stride..][..stride];
            assert_same_bits(&line[5..5 + n], &dense[row * n..][..n], "row");
            assert!(line[..5].iter().chain(&line[5 + n..]).all(|value| *value == 7.0), "a stray write");
        }
    }
}

#[test]
fn misaligned_slices_give_the_same_bits() {
    let (rows, n, k) = (9, 40, 24);
    let (x, weight) = (random(rows * k, 15), random(n * k, 16));
    for kernels in every_kernels() {
        let packed = kernels.pack(&weight, n, k, Storage::Float32);
        let mut aligned = vec![0.0; rows * n];
        kernels.linear(&x, rows, &packed, None, Epilogue::None, &mut aligned, n);
        for shift in 1..16 {
            let mut moved = vec![0.0; shift];
            moved.extend_from_slice(&x);
            let mut out = vec![0.0; rows * n + shift];
            kernels.linear(&moved[shift..], rows, &packed, None, Epilogue::None, &mut out[shift..], n);
            assert_same_bits(&out[shift..], &aligned, "shifted");
        }
    }
}

#[test]
fn no_rows_and_no_inner_dimension_are_fine() {
    for kernels in every_kernels() {
        let packed = kernels.pack(&random(6, 17), 2, 3, Storage::Float32);
        kernels.linear(&[], 0, &packed, None, Epilogue::None, &mut [], 2);
        let packed = kernels.pack(&[], 3, 0, Storage::Float32);
        let mut out = [9.0; 6];
        kernels.linear(&[], 2, &packed, Some(&[1.0, 2.0, 3.0]), Epilogue::None, &mut out, 3);
        assert_eq!(out, [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]);
        let packed = kernels.pack(&[], 0, 4, Storage::Float32);
        kernels.linear(&[0.0; 8], 2, &packed, Some(&[]), Epilogue::None, &mut [], 0);
    }
}

#[test]
fn a_bad_row_stays_alone() {
    let (rows, n, k) = (9, 20, 16);
    let mut x = random(rows * k, 18);
    x[3 * k + 5] = f32::NAN;
    x[6 * k] = f32::INFINITY;
    for kernels in every_kernels() {
        let out = linear(kernels, &x, &random(n * k, 19), n, k, Epilogue::Activation(Activation::Gelu));
        for (row, out) in out.chunks_exact(n).enumerate() {
            assert_eq!(out.iter().all(|value| value.is_finite()), row != 3 && row != 6, "row {row}");
        }
    }
}

#[test]
#[should_panic(expected = "buffer is shorter than its rows")]
fn a_short_output_is_refused() {
    let kernels = every_kernels()[0];
    let packed = kernels.pack(&[0.0; 6], 2, 3, Storage::Float32);
    kernels.linear(&[0.0; 6], 2, &packed, None, Epilogue::None, &mut [0.0; 3], 2);
}

#[test]
#[should_panic(expected = "x is not rows * k")]
fn a_short_input_is_refused() {
    let kernels = every_kernels()[0];
    let packed = kernels.pack(&[0.0; 6], 2, 3, Storage::Float32);
    kernels.linear(&[0.0; 5], 2, &packed, None, Epilogue::None, &mut [0.0; 4], 2);
}

/// The nearest bfloat16 by way of f64 neighbours, ties to the even one.
fn rounded(value: f32) -> f32 {
    let below = f32::from_bits(value.to_bits() & 0xffff_0000);
    let above = f32::from_bits((value.to_bits() & 0xffff_0000).wrapping_add(0x1_0000));
    let (down, up) = ((value - below).abs(), (above - value).abs());
    let below_is_even = below.to_bits() >> 16 & 1 == 0;
    if down < up || (down == up && below_is_even) { below } else { above }
}

#[test]
fn bfloat16_weights_give_the_bits_of_their_rounded_values() {
    for kernels in every_kernels() {
        for rows in [1, 3, 8, 13, 24, 61] {
            for n in [1, 15, 16, 17, 48, 49, 100] {
                for k in [1, 2, 3, 16, 31, 33, 384, 385] {
                    let (x, weight, bias) = (random(rows * k, 20), random(n * k, 21), random(n, 22));
                    let nearest: Vec<f32> = weight.iter().copied().map(rounded).collect();
                    let run = |weight: &[f32], storage| {
                        let packed = kernels.pack(weight, n, k, storage);
                        let mut out = vec![f32::NAN; rows * n];
                        kernels.linear(&x, rows, &packed, Some(&bias), Epilogue::None, &mut out, n);
                        out
                    };
                    let half = run(&weight, Storage::Bfloat16);
                    let whole = run(&nearest, Storage::Float32);
                    assert_same_bits(&half, &whole, &format!("{:?} {rows} {n} {k}", kernels.isa()));
                }
            }
        }
    }
}

#[test]
fn bfloat16_rounds_ties_to_even_and_keeps_what_is_not_a_number() {
    for kernels in every_kernels() {
        let cases = [
            (1.0, 1.0),
            (1.0 + 1.0 / 256.0, 1.0),
            (1.0 + 3.0 / 256.0, 1.015_625),
            (-1.0 - 1.0 / 256.0, -1.0),
            (f32::MAX, f32::INFINITY),
            (f32::NEG_INFINITY, f32::NEG_INFINITY),
        ];
        for (value, want) in cases {
            let mut out = [0.0];
            let packed = kernels.pack(&[value], 1, 1, Storage::Bfloat16);
            kernels.linear(&[1.0], 1, &packed, None, Epilogue::None, &mut out, 1);
            assert_eq!(out[0], want, "{value}");
        }
        for nan in [f32::NAN, f32::from_bits(0x7f80_0001)] {
            let mut out = [0.0];
            let packed = kernels.pack(&[nan], 1, 1, Storage::Bfloat16);
            kernels.linear(&[1.0], 1, &packed, None, Epilogue::None, &mut out, 1);
            assert!(out[0].is_nan());
        }
    }
}

#[test]
fn a_row_is_copied_as_it_is_held() {
    for kernels in every_kernels() {
        for (n, k) in [(1, 1), (17, 5), (49, 33), (100, 64)] {
            let weight = random(n * k, 23);
            for (storage, round) in
                [(Storage::Float32, (|value| value) as fn(f32) -> f32), (Storage::Bfloat16, rounded)]
            {
                let packed = kernels.pack(&weight, n, k, storage);
                for row in 0..n {
                    let mut out = vec![f32::NAN; k];
                    packed.copy_row(row, &mut out);
                    let want: Vec<f32> = weight[row * k..][..k].iter().copied().map(round).collect();
                    assert_same_bits(&out, &want, &format!("{:?} {storage:?} {n} {k} {row}", kernels.isa()));
                }
            }
        }
    }
}
