//! Products of bytes: against a plain loop over the same rounded numbers, and what rounding leaves of a number.

use super::{assert_close, assert_same_bits, random};
use crate::cpu::{Activation, BytePath, Epilogue, Isa, Kernels, Operand, Storage};

const BLOCK: usize = 64;

/// Kernels for every way that this processor has to multiply bytes.
fn every_kernels() -> Vec<Kernels> {
    let paths = BytePath::ALL.into_iter().filter(|path| path.available());
    paths.map(|bytes| Kernels { isa: Isa::detected(Storage::Int8), bytes }).collect()
}

/// The Walsh-Hadamard transform, pair by pair.
fn mix<T: Copy + std::ops::Add<Output = T> + std::ops::Sub<Output = T>>(block: &mut [T]) {
    for step in (0..6).map(|power| 1 << power) {
        for i in (0..BLOCK).filter(|i| i & step == 0) {
            (block[i], block[i + step]) = (block[i] + block[i + step], block[i] - block[i + step]);
        }
    }
}

/// Rows of `k` numbers as blocks of signed bytes, mixed, each with a scale of its own, and back: plain arithmetic. Rows are
/// padded to whole blocks, and rounding leaves something of what was zero.
fn rounded(numbers: &[f32], k: usize) -> Vec<f64> {
    let mut out = Vec::new();
    for row in numbers.chunks(k) {
        for numbers in row.chunks(BLOCK) {
            let mut block = [0.0; BLOCK];
            block[..numbers.len()].copy_from_slice(numbers);
            mix(&mut block);
            let greatest = block.iter().fold(0.0, |greatest: f32, number| greatest.max(number.abs()));
            let scale = f64::from(greatest / 127.0);
            let byte = |number: f32| f64::from((number * (127.0 / greatest)).round_ties_even()) * scale / 64.0;
            let mut back = block.map(|number| if greatest == 0.0 { 0.0 } else { byte(number) });
            mix(&mut back);
            out.extend(back);
        }
    }
    out
}

/// `x @ weight^T + bias` of the rounded numbers, in float64.
fn reference(x: &[f32], rows: usize, weight: &[f32], n: usize, k: usize, bias: Option<&[f32]>) -> Vec<f64> {
    let (x, weight) = (rounded(x, k), rounded(weight, k));
    let k = k.next_multiple_of(BLOCK);
    let mut out = Vec::new();
    for row in 0..rows {
        for column in 0..n {
            let products = (0..k).map(|i| x[row * k + i] * weight[column * k + i]);
            out.push(products.sum::<f64>() + bias.map_or(0.0, |bias| f64::from(bias[column])));
        }
    }
    out
}

fn linear(kernels: Kernels, x: &[f32], rows: usize, weight: &[f32], n: usize, k: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows * n];
    let packed = kernels.pack(weight, n, k, Storage::Int8);
    kernels.linear(x, rows, &packed, None, Epilogue::None, &mut out, n);
    out
}

#[test]
fn odd_shapes_match_the_same_bytes_in_float64() {
    for kernels in every_kernels() {
        for rows in [1, 2, 3, 5, 6, 7, 13] {
            for n in [1, 3, 4, 5, 15, 16, 17, 31, 33, 47, 65] {
                for k in [1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 130] {
                    let (x, weight, bias) = (random(rows * k, 1), random(n * k, 2), random(n, 3));
                    let packed = kernels.pack(&weight, n, k, Storage::Int8);
                    let mut out = vec![f32::NAN; rows * n];
                    kernels.linear(&x, rows, &packed, Some(&bias), Epilogue::None, &mut out, n);
                    let want = reference(&x, rows, &weight, n, k, Some(&bias));
                    assert_close(&out, &want, 2e-6, &format!("{:?} {rows} {n} {k}", kernels.bytes));
                }
            }
        }
    }
}

#[test]
fn shapes_around_hidden_sizes_match_the_same_bytes_in_float64() {
    for kernels in every_kernels() {
        for (rows, n, k) in [(13, 383, 385), (5, 384, 384), (9, 385, 383), (3, 1024, 768), (2, 1000, 1537)] {
            let (x, weight) = (random(rows * k, 4), random(n * k, 5));
            let out = linear(kernels, &x, rows, &weight, n, k);
            let want = reference(&x, rows, &weight, n, k, None);
            assert_close(&out, &want, 1e-5, &format!("{:?} {rows} {n} {k}", kernels.bytes));
        }
    }
}

#[test]
fn extreme_bytes_neither_saturate_nor_wrap() {
    let k = 3 * BLOCK;
    let signs = |mask: usize| move |i: usize| if i & mask == 0 { 1.0 } else { -1.0 };
    for kernels in every_kernels() {
        for (of_x, of_weight) in [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (2, 2), (64, 0), (0, 64)] {
            let x: Vec<f32> = (0..k).map(signs(of_x)).collect();
            let weight: Vec<f32> = (0..k).map(signs(of_weight)).collect();
            let want: f64 = x.iter().zip(&weight).map(|(x, weight)| f64::from(x * weight)).sum();
            let out = linear(kernels, &x, 1, &weight, 1, k);
            assert_close(&out, &[want], 1e-6, &format!("{:?} {of_x} {of_weight}", kernels.bytes));
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_every_batch_and_in_parts_of_the_panels() {
    let (rows, n, k) = (29, 70, 200);
    let (x, weight) = (random(rows * k, 6), random(n * k, 7));
    for kernels in every_kernels() {
        let together = linear(kernels, &x, rows, &weight, n, k);
        for row in 0..rows {
            let alone = linear(kernels, &x[row * k..][..k], 1, &weight, n, k);
            assert_same_bits(&alone, &together[row * n..][..n], &format!("{:?} row {row}", kernels.bytes));
        }
        let packed = kernels.pack(&weight, n, k, Storage::Int8);
        let mut out = vec![f32::NAN; rows * n];
        for panel in (0..packed.panel_count()).rev() {
            let to = out.as_mut_ptr();
            // SAFETY: the buffer holds all rows, and one call at a time writes.
            unsafe {
                kernels.linear_panels(Operand::Rows(&x), rows, &packed, None, Epilogue::None, to, n, panel..panel + 1)
            };
        }
        assert_same_bits(&out, &together, "panel by panel");
    }
}

#[test]
fn rows_beyond_what_is_quantised_at_a_time_have_the_same_bits() {
    // Three parts: 1 MiB of bytes are 1,024 rows of 1,024.
    let (rows, n, k) = (2100, 4, 1024);
    let (x, weight) = (random(rows * k, 8), random(n * k, 9));
    let kernels = every_kernels().pop().unwrap();
    let together = linear(kernels, &x, rows, &weight, n, k);
    for row in [0, 1, 1022, 1023, 1024, 1025, 1026, 2052, 2099] {
        let alone = linear(kernels, &x[row * k..][..k], 1, &weight, n, k);
        assert_same_bits(&alone, &together[row * n..][..n], &format!("row {row}"));
    }
}

#[test]
fn epilogues_come_after_the_bias() {
    let (rows, n, k) = (11, 37, 70);
    let (x, weight, bias, residual) = (random(rows * k, 6), random(n * k, 7), random(n, 8), random(rows * (n + 3), 9));
    let plain = reference(&x, rows, &weight, n, k, Some(&bias));
    for kernels in every_kernels() {
        let packed = kernels.pack(&weight, n, k, Storage::Int8);
        let mut out = vec![f32::NAN; rows * n];
        kernels.linear(&x, rows, &packed, Some(&bias), Epilogue::Add(&residual, n + 3), &mut out, n);
        let added = |i: usize| plain[i] + f64::from(residual[i / n * (n + 3) + i % n]);
        assert_close(&out, &(0..rows * n).map(added).collect::<Vec<_>>(), 2e-6, "residual");
        let activation = Epilogue::Activation(Activation::Relu);
        kernels.linear(&x, rows, &packed, Some(&bias), activation, &mut out, n);
        assert_close(&out, &plain.iter().map(|x| x.max(0.0)).collect::<Vec<_>>(), 2e-6, "relu");
    }
}

#[test]
fn rows_of_a_weight_come_back_as_they_were_rounded() {
    for kernels in every_kernels() {
        for (n, k) in [(1, 1), (5, 63), (33, 64), (70, 130)] {
            let weight = random(n * k, 10);
            let packed = kernels.pack(&weight, n, k, Storage::Int8);
            let want = rounded(&weight, k);
            for row in 0..n {
                let mut out = vec![f32::NAN; k];
                packed.copy_row(row, &mut out);
                assert_close(
                    &out,
                    &want[row * k.next_multiple_of(BLOCK)..][..k],
                    1e-6,
                    &format!("{:?} {n} {k} {row}", kernels.bytes),
                );
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays_so_in_its_row_alone() {
    let (rows, n, k) = (7, 5, 130);
    for kernels in every_kernels() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, 64, 129] {
                let (mut x, weight) = (random(rows * k, 11), random(n * k, 12));
                let clean = linear(kernels, &x, rows, &weight, n, k);
                x[3 * k + place] = bad;
                let out = linear(kernels, &x, rows, &weight, n, k);
                assert!(out[3 * n..4 * n].iter().all(|number| number.is_nan()), "{:?} {bad}", kernels.bytes);
                assert_same_bits(&out[..3 * n], &clean[..3 * n], "rows before");
                assert_same_bits(&out[4 * n..], &clean[4 * n..], "rows after");
            }
        }
    }
}

#[test]
fn zeros_and_the_least_numbers_give_zero() {
    let k = 70;
    for kernels in every_kernels() {
        for number in [0.0, -0.0, f32::MIN_POSITIVE, 1e-40] {
            let out = linear(kernels, &vec![number; 2 * k], 2, &random(3 * k, 13), 3, k);
            assert!(out.iter().all(|out| *out == 0.0), "{:?} {number}", kernels.bytes);
            let out = linear(kernels, &random(2 * k, 14), 2, &vec![number; 3 * k], 3, k);
            assert!(out.iter().all(|out| *out == 0.0), "{:?} weight {number}", kernels.bytes);
        }
        let packed = kernels.pack(&[], 3, 0, Storage::Int8);
        let mut out = [f32::NAN; 6];
        kernels.linear(&[], 2, &packed, Some(&[1.0, 2.0, 3.0]), Epilogue::None, &mut out, 3);
        assert_eq!(out, [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]);
    }
}

#[test]
fn every_way_to_multiply_bytes_gives_sums_of_the_same_bytes() {
    let (rows, n, k) = (5, 33, 200);
    let (x, weight) = (random(rows * k, 15), random(n * k, 16));
    let sums: Vec<_> = every_kernels().into_iter().map(|kernels| linear(kernels, &x, rows, &weight, n, k)).collect();
    for other in &sums[1..] {
        let first: Vec<f64> = sums[0].iter().map(|sum| f64::from(*sum)).collect();
        assert_close(other, &first, 1e-6, "another path");
    }
}

#[test]
fn bytes_are_multiplied_by_the_fastest_way_that_an_instruction_set_allows() {
    assert_eq!(BytePath::of(Isa::Scalar), BytePath::Scalar);
    if Isa::Avx2.available() {
        let vnni = BytePath::AvxVnni.available();
        assert_eq!(BytePath::of(Isa::Avx2), if vnni { BytePath::AvxVnni } else { BytePath::Avx2 });
    }
    if BytePath::Avx512Vnni.available() {
        assert_eq!(BytePath::of(Isa::Avx512), BytePath::Avx512Vnni);
        assert_eq!(BytePath::of(Isa::AmxSoftware), BytePath::Avx512Vnni);
    }
}
