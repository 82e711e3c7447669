//! Normalisations, softmax, norms and products of rows.

use super::{assert_close, assert_same_bits, every_kernels, random};

const DIMS: [usize; 12] = [1, 2, 15, 16, 17, 31, 33, 63, 65, 383, 384, 385];

fn layer_norm(row: &[f32], weight: &[f32], bias: Option<&[f32]>, eps: f64) -> Vec<f64> {
    let size = row.len() as f64;
    let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / size;
    let variance = row.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / size;
    let bias = |i: usize| bias.map_or(0.0, |bias| f64::from(bias[i]));
    let value = |i: usize| (f64::from(row[i]) - mean) / (variance + eps).sqrt() * f64::from(weight[i]) + bias(i);
    (0..row.len()).map(value).collect()
}

#[test]
fn layer_norm_matches_float64() {
    for kernels in every_kernels() {
        for dim in DIMS {
            let (weight, bias) = (random(dim, 1), random(dim, 2));
            for bias in [None, Some(bias.as_slice())] {
                let mut x = random(3 * dim, 3);
                let want: Vec<f64> =
                    x.chunks_exact(dim).flat_map(|row| layer_norm(row, &weight, bias, 1e-5f32.into())).collect();
                kernels.layer_norm(&mut x, dim, &weight, bias, 1e-5);
                assert_close(&x, &want, 2e-6, &format!("{:?} {dim}", kernels.isa()));
            }
        }
    }
}

#[test]
fn a_large_mean_does_not_cancel_the_variance() {
    for kernels in every_kernels() {
        for dim in [384, 385, 768, 1024] {
            let mut x: Vec<f32> = random(dim, 4).iter().map(|x| 1000.0 + 0.01 * x).collect();
            let weight = vec![1.0; dim];
            let want = layer_norm(&x, &weight, None, 1e-12f32.into());
            kernels.layer_norm(&mut x, dim, &weight, None, 1e-12);
            assert_close(&x, &want, 1e-4, &format!("{:?} {dim}", kernels.isa()));
        }
    }
}

#[test]
fn a_constant_row_normalises_to_the_bias() {
    for kernels in every_kernels() {
        for value in [0.0, 1.0, 1000.3, -3e4] {
            let mut x = vec![value; 384];
            kernels.layer_norm(&mut x, 384, &[1.0; 384], Some(&[0.5; 384]), 1e-12);
            assert_close(&x, &[0.5; 384], 1e-6, &format!("{:?} {value}", kernels.isa()));
        }
    }
}

#[test]
fn rms_norm_matches_float64() {
    for kernels in every_kernels() {
        for dim in DIMS {
            let (mut x, weight) = (random(4 * dim, 5), random(dim, 6));
            let norm = |row: &[f32]| {
                let square = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / dim as f64;
                let inverse = 1.0 / (square + f64::from(1e-6f32)).sqrt();
                (0..dim).map(|i| f64::from(row[i]) * inverse * f64::from(weight[i])).collect::<Vec<_>>()
            };
            let want: Vec<f64> = x.chunks_exact(dim).flat_map(norm).collect();
            kernels.rms_norm(&mut x, dim, &weight, 1e-6);
            assert_close(&x, &want, 1e-6, &format!("{:?} {dim}", kernels.isa()));
        }
    }
}

#[test]
fn a_normalised_row_has_the_same_bits_alone() {
    for kernels in every_kernels() {
        let (x, weight) = (random(5 * 100, 7), random(100, 8));
        let mut whole = x.clone();
        kernels.layer_norm(&mut whole, 100, &weight, None, 1e-5);
        for (row, want) in x.chunks_exact(100).zip(whole.chunks_exact(100)) {
            let mut row = row.to_vec();
            kernels.layer_norm(&mut row, 100, &weight, None, 1e-5);
            assert_same_bits(&row, want, "row");
        }
    }
}

#[test]
fn softmax_matches_float64() {
    for kernels in every_kernels() {
        for len in DIMS {
            for spread in [0.01, 1.0, 30.0, 1e4] {
                let mut x: Vec<f32> = random(len, 9).iter().map(|x| x * spread + 50.0).collect();
                let greatest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let powers: Vec<f64> = x.iter().map(|x| (f64::from(*x) - f64::from(greatest)).exp()).collect();
                let sum: f64 = powers.iter().sum();
                kernels.softmax(&mut x);
                let want: Vec<f64> = powers.iter().map(|power| power / sum).collect();
                assert_close(&x, &want, 1e-6, &format!("{:?} {len} {spread}", kernels.isa()));
            }
        }
    }
}

#[test]
fn softmax_takes_infinities_and_shows_nan() {
    for kernels in every_kernels() {
        let mut x = vec![f32::NEG_INFINITY; 37];
        x[20] = -3e38;
        x[36] = 3.0;
        kernels.softmax(&mut x);
        assert_eq!(x[36], 1.0);
        assert!(x[..36].iter().all(|value| *value < 1e-30), "{x:?}");
        for bad in [f32::NAN, f32::INFINITY] {
            for place in [0, 19, 36] {
                let mut x = random(37, 10);
                x[place] = bad;
                kernels.softmax(&mut x);
                assert!(x[place].is_nan(), "{bad} at {place} gave {}", x[place]);
            }
        }
        kernels.softmax(&mut []);
    }
}

#[test]
fn dot_and_l2_norm_match_float64() {
    for kernels in every_kernels() {
        for len in DIMS {
            let (mut a, b) = (random(len, 11), random(len, 12));
            let want: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            assert_close(&[kernels.dot(&a, &b)], &[want], 2e-6, "dot");
            let norm = a.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            let want: Vec<f64> = a.iter().map(|x| f64::from(*x) / norm).collect();
            kernels.l2_normalize(&mut a);
            assert_close(&a, &want, 1e-6, "norm");
        }
        let mut zero = vec![0.0; 33];
        kernels.l2_normalize(&mut zero);
        assert_eq!(zero, vec![0.0; 33]);
        assert_eq!(kernels.dot(&[], &[]), 0.0);
    }
}
