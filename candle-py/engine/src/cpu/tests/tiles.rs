//! The tiled product: its twin in software against the manual's words and against plain loops, AMX against the twin.

use super::{assert_close, assert_same_bits, every_kernels, random};
use crate::cpu::tiles::{TILE_COLUMNS, TILE_ROWS, TileRow, Tiles};
use crate::cpu::tiles_soft::SoftTiles;
use crate::cpu::{Activation, Epilogue, Isa, Kernels, Operand, Storage, bfloat16_bits};

const SIZES: [usize; 12] = [1, 2, 15, 16, 17, 31, 32, 33, 64, 383, 384, 385];

fn twin() -> Kernels {
    Kernels::new(Isa::AmxSoftware).unwrap()
}

/// AMX, or a word on why it is not tested here.
fn hardware() -> Option<Kernels> {
    let kernels = Kernels::new(Isa::Amx);
    if kernels.is_none() {
        eprintln!("skipped: this machine has no AMX, or its operating system does not give it");
    }
    kernels
}

/// The value as bfloat16 holds it.
fn rounded(value: f32) -> f32 {
    f32::from_bits(u32::from(bfloat16_bits(value)) << 16)
}

fn linear(
    kernels: Kernels,
    (x, rows): (&[f32], usize),
    (weight, n, k): (&[f32], usize, usize),
    bias: Option<&[f32]>,
    epilogue: Epilogue<'_>,
) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows * n];
    let packed = kernels.pack(weight, n, k, Storage::Bfloat16);
    kernels.linear(x, rows, &packed, bias, epilogue, &mut out, n);
    out
}

/// One element in the manual's order: 32 numbers of k at a time, a chain over the even ones, a chain over the odd ones.
fn element(x: &[f32], weight: &[f32]) -> f32 {
    let mut sum = 0.0_f32;
    for (x, weight) in x.chunks(32).zip(weight.chunks(32)) {
        let mut chains = [0.0_f32; 2];
        for (i, (x, weight)) in x.iter().zip(weight).enumerate() {
            chains[i % 2] = rounded(*x).mul_add(rounded(*weight), chains[i % 2]);
        }
        sum += chains[0] + chains[1];
    }
    sum
}

/// Operands of one element of a tile, its sum before and its sum after. What is missing of the operands is zero.
type Case = (&'static str, Vec<f32>, Vec<f32>, f32, f32);

/// What the manual says of order, rounding and denormal numbers.
fn manual() -> Vec<Case> {
    let two = |power: i32| 2.0_f64.powi(power) as f32;
    let largest = f32::from_bits(0x7f7f_0000);
    vec![
        ("even and odd apart", vec![two(30), -two(30), 1.0, 0.0], vec![1.0; 4], 0.0, 0.0),
        ("the sum before comes last", [8.0, 0.0].repeat(16), vec![1.0; 32], two(30), two(30) + 128.0),
        ("a tie goes to the even", vec![two(-12)], vec![two(-12)], 1.0, 1.0),
        ("a tie goes up to the even", vec![two(-12)], vec![two(-12)], 1.0 + two(-23), 1.0 + two(-22)),
        ("below normal alone", vec![two(-70), 0.0, two(-63)], vec![two(-60), 0.0, two(-63)], 0.0, two(-126)),
        (
            "a product is not rounded",
            vec![two(-63), 0.0, two(-70)],
            vec![two(-63), 0.0, two(-60)],
            0.0,
            two(-126) + two(-130),
        ),
        ("denormal operand", vec![f32::from_bits(1 << 16), 0.0, two(-1)], vec![two(127), 0.0, 3.0], 0.0, 1.5),
        ("denormal weight", vec![two(127)], vec![f32::from_bits(0x007f_0000)], 2.0, 2.0),
        ("denormal sum before", vec![], vec![], 1e-40, 0.0),
        ("overflow", vec![two(100)], vec![two(28)], 0.0, f32::INFINITY),
        ("too large only in between", vec![-largest, 0.0, two(64)], vec![1.0, 0.0, two(64)], 0.0, two(120)),
        ("cancelled", vec![3.0, -3.0], vec![5.0, 5.0], 0.0, 0.0),
    ]
}

/// Checks every case on the tiles' diagonal.
#[test]
fn the_twin_obeys_the_manual() {
    let cases = manual();
    let (mut a, mut b, mut c) = ([TileRow::ZERO; TILE_ROWS], [TileRow::ZERO; TILE_ROWS], [0.0_f32; 256]);
    for (place, (_, left, right, before, _)) in cases.iter().enumerate() {
        for (i, value) in left.iter().enumerate() {
            a[place].0[i] = bfloat16_bits(*value);
        }
        for (i, value) in right.iter().enumerate() {
            b[i / 2].0[2 * place + i % 2] = bfloat16_bits(*value);
        }
        c[place * TILE_COLUMNS + place] = *before;
    }
    let mut tiles = SoftTiles::begin();
    // SAFETY: the three arrays are whole tiles.
    unsafe {
        tiles.load::<2>(c.as_ptr().cast(), 64);
        tiles.load::<5>(a.as_ptr().cast(), 64);
        tiles.load::<7>(b.as_ptr().cast(), 64);
        tiles.dot::<2, 5, 7>();
        tiles.store::<2>(c.as_mut_ptr(), 64);
    }
    for (place, (what, .., after)) in cases.iter().enumerate() {
        let got = c[place * TILE_COLUMNS + place];
        assert_eq!(got.to_bits(), after.to_bits(), "{what}: {got:e}, not {after:e}");
    }
}

#[test]
fn every_shape_is_summed_in_the_manuals_order() {
    for rows in [1, 2, 15, 16, 17, 31, 32, 33, 70] {
        for n in [1, 15, 16, 17, 31, 32, 33, 48, 65] {
            for k in [1, 2, 31, 32, 33, 63, 64, 65, 384, 385] {
                let (x, weight, bias) = (random(rows * k, 1), random(n * k, 2), random(n, 3));
                let out = linear(twin(), (&x, rows), (&weight, n, k), Some(&bias), Epilogue::None);
                for (index, got) in out.iter().enumerate() {
                    let (row, column) = (index / n, index % n);
                    let want = element(&x[row * k..][..k], &weight[column * k..][..k]) + bias[column];
                    assert_eq!(got.to_bits(), want.to_bits(), "{rows} {n} {k}: row {row}, column {column}");
                }
            }
        }
    }
}

#[test]
fn products_match_float64_products_of_rounded_numbers() {
    for (rows, n, k) in [(13, 383, 385), (5, 384, 384), (35, 385, 383), (3, 1024, 768), (2, 1000, 1537)] {
        let (x, weight) = (random(rows * k, 4), random(n * k, 5));
        let out = linear(twin(), (&x, rows), (&weight, n, k), None, Epilogue::None);
        let want = |index: usize| {
            let (x, weight) = (&x[index / n * k..][..k], &weight[index % n * k..][..k]);
            x.iter().zip(weight).map(|(x, weight)| f64::from(rounded(*x)) * f64::from(rounded(*weight))).sum()
        };
        assert_close(&out, &(0..rows * n).map(want).collect::<Vec<_>>(), 2e-5, &format!("{rows} {n} {k}"));
    }
}

/// Both kernels where there are both.
fn tiled_kernels() -> Vec<Kernels> {
    [Isa::AmxSoftware, Isa::Amx].into_iter().filter_map(Kernels::new).collect()
}

#[test]
fn a_row_has_the_same_bits_in_every_batch_and_place() {
    for kernels in tiled_kernels() {
        // The last is more rows than are rounded at a time.
        for (rows, n, k) in [(75, 33, 17), (75, 100, 64), (45, 384, 384), (270, 20, 2050)] {
            let (x, weight, bias, residual) =
                (random(rows * k, 10), random(n * k, 11), random(n, 12), random(rows * n, 13));
            for kind in 0..3 {
                let run = |start: usize, end: usize| {
                    let epilogue = match kind {
                        0 => Epilogue::None,
                        1 => Epilogue::Activation(Activation::Gelu),
                        _ => Epilogue::Add(&residual[start * n..end * n], n),
                    };
                    let x = (&x[start * k..end * k], end - start);
                    linear(kernels, x, (&weight, n, k), Some(&bias), epilogue)
                };
                let whole = run(0, rows);
                for (start, end) in [(0, 1), (0, 7), (1, 10), (3, 45), (13, 14), (17, 33), (9, 43), (44, 45)] {
                    assert_same_bits(&run(start, end), &whole[start * n..end * n], &format!("{rows} {n} {k} {kind}"));
                }
            }
        }
    }
}

#[test]
fn epilogues_come_after_the_bias() {
    let (rows, n, k) = (37, 45, 29);
    let (x, weight, bias, residual) = (random(rows * k, 6), random(n * k, 7), random(n, 8), random(rows * (n + 3), 9));
    for kernels in tiled_kernels() {
        let run = |epilogue| linear(kernels, (&x, rows), (&weight, n, k), Some(&bias), epilogue);
        let plain = run(Epilogue::None);
        let added: Vec<f32> =
            plain.iter().enumerate().map(|(i, sum)| sum + residual[i / n * (n + 3) + i % n]).collect();
        assert_same_bits(&run(Epilogue::Add(&residual, n + 3)), &added, "residual");
        for activation in [Activation::Gelu, Activation::Relu, Activation::Tanh, Activation::Identity] {
            let mut want = plain.clone();
            kernels.activate(&mut want, activation);
            assert_same_bits(&run(Epilogue::Activation(activation)), &want, &format!("{activation:?}"));
        }
    }
}

#[test]
fn panels_computed_apart_fill_one_strided_output() {
    let (rows, n, k, stride) = (35, 150, 40, 171);
    let (x, weight) = (random(rows * k, 13), random(n * k, 14));
    for kernels in tiled_kernels() {
        let packed = kernels.pack(&weight, n, k, Storage::Bfloat16);
        let mut out = vec![7.0; rows * stride];
        for panel in (0..packed.panel_count()).rev() {
            // SAFETY: the buffer holds all rows, and one call at a time writes into it.
            unsafe {
                let (to, panels) = (out[5..].as_mut_ptr(), panel..panel + 1);
                kernels.linear_panels(Operand::Rows(&x), rows, &packed, None, Epilogue::None, to, stride, panels);
            }
        }
        let dense = linear(kernels, (&x, rows), (&weight, n, k), None, Epilogue::None);
        for row in 0..rows {
            let line = &out[row * stride..][..stride];
            assert_same_bits(&line[5..5 + n], &dense[row * n..][..n], "row");
            assert!(line[..5].iter().chain(&line[5 + n..]).all(|value| *value == 7.0), "a stray write");
        }
    }
}

#[test]
fn no_rows_and_no_inner_dimension_are_fine() {
    for kernels in tiled_kernels() {
        assert!(linear(kernels, (&[], 0), (&random(6, 17), 2, 3), None, Epilogue::None).is_empty());
        let out = linear(kernels, (&[], 2), (&[], 3, 0), Some(&[1.0, 2.0, 3.0]), Epilogue::None);
        assert_eq!(out, [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]);
        assert!(linear(kernels, (&[0.0; 8], 2), (&[], 0, 4), Some(&[]), Epilogue::None).is_empty());
    }
}

#[test]
fn a_bad_row_stays_alone() {
    let (rows, n, k) = (35, 20, 16);
    let mut x = random(rows * k, 18);
    x[3 * k + 5] = f32::NAN;
    x[33 * k] = f32::INFINITY;
    for kernels in tiled_kernels() {
        // A thread's rounded rows are used again: what the first call leaves there is in nobody's way.
        for last in [rows, 3] {
            let activation = Epilogue::Activation(Activation::Gelu);
            let out = linear(kernels, (&x[..last * k], last), (&random(n * k, 19), n, k), None, activation);
            for (row, out) in out.chunks_exact(n).enumerate() {
                assert_eq!(out.iter().all(|value| value.is_finite()), row != 3 && row != 33, "row {row}");
            }
        }
    }
}

#[test]
fn a_row_of_the_weight_is_copied_as_it_is_held() {
    for (n, k) in [(1, 1), (17, 5), (49, 33), (100, 64)] {
        let weight = random(n * k, 23);
        let packed = twin().pack(&weight, n, k, Storage::Bfloat16);
        for row in 0..n {
            let mut out = vec![f32::NAN; k];
            packed.copy_row(row, &mut out);
            let want: Vec<f32> = weight[row * k..][..k].iter().copied().map(rounded).collect();
            assert_same_bits(&out, &want, &format!("{n} {k} {row}"));
        }
    }
}

#[test]
fn float32_weights_never_meet_tiles() {
    let (rows, n, k) = (19, 50, 70);
    let (x, weight) = (random(rows * k, 24), random(n * k, 25));
    let run = |kernels: Kernels| {
        let mut out = vec![f32::NAN; rows * n];
        kernels.linear(&x, rows, &kernels.pack(&weight, n, k, Storage::Float32), None, Epilogue::None, &mut out, n);
        out
    };
    let best = every_kernels().pop().unwrap();
    for kernels in tiled_kernels() {
        assert_same_bits(&run(kernels), &run(best), "float32");
    }
}

/// Numbers of many magnitudes, a few of them too small to count.
fn uneven(count: usize, seed: u64) -> Vec<f32> {
    let magnitudes = random(count, seed + 100);
    random(count, seed)
        .into_iter()
        .zip(magnitudes)
        .map(|(value, magnitude)| value * if magnitude > 0.99 { 1e-39 } else { (20.0 * magnitude).exp2() })
        .collect()
}

/// Checks that two ways of summing the same products differ by rounding alone: each is off the exact sum by at most a half
/// unit in the last place of the sum of all magnitudes per addition, whatever their order. Manual and intrinsics guide
/// tell two orders, and no hardware has been asked.
fn assert_same_but_for_order(
    left: &[f32],
    right: &[f32],
    x: &[f32],
    weight: &[f32],
    (n, k): (usize, usize),
    what: &str,
) {
    assert_eq!(left.len(), right.len(), "{what}");
    for (index, (left, right)) in left.iter().zip(right).enumerate() {
        let (x, weight) = (&x[index / n * k..][..k], &weight[index % n * k..][..k]);
        let magnitude: f64 =
            x.iter().zip(weight).map(|(x, weight)| f64::from(rounded(*x) * rounded(*weight)).abs()).sum();
        let bound = magnitude * (k + 32) as f64 * f64::from(f32::EPSILON) + f64::from(f32::MIN_POSITIVE) * k as f64;
        let off = (f64::from(*left) - f64::from(*right)).abs();
        assert!(off <= bound, "{what}: element {index} is off by {off:e}, more than {bound:e}");
    }
}

#[test]
fn amx_gives_the_sums_of_its_twin() {
    let Some(amx) = hardware() else { return };
    let (mut equal, mut all) = (0, 0);
    for rows in [1, 15, 16, 17, 31, 32, 33] {
        for n in SIZES {
            for k in SIZES {
                let (x, weight) = (uneven(rows * k, 30), uneven(n * k, 31));
                let run = |kernels| linear(kernels, (&x, rows), (&weight, n, k), None, Epilogue::None);
                let (amx, twin) = (run(amx), run(twin()));
                assert_same_but_for_order(&amx, &twin, &x, &weight, (n, k), &format!("{rows} {n} {k}"));
                equal += amx.iter().zip(&twin).filter(|(left, right)| left.to_bits() == right.to_bits()).count();
                all += amx.len();
            }
        }
    }
    println!("{equal} of {all} sums have the bits of the twin's");
}

#[test]
fn amx_is_exact_where_every_sum_is() {
    let Some(amx) = hardware() else { return };
    for (rows, n, k) in [(1, 385, 33), (17, 33, 383), (33, 31, 385), (70, 100, 384)] {
        let whole = |values: Vec<f32>| values.into_iter().map(|value| (8.0 * value).round()).collect::<Vec<_>>();
        let (x, weight) = (whole(random(rows * k, 32)), whole(random(n * k, 33)));
        let out = linear(amx, (&x, rows), (&weight, n, k), None, Epilogue::None);
        let want = |index: usize| {
            let (x, weight) = (&x[index / n * k..][..k], &weight[index % n * k..][..k]);
            x.iter().zip(weight).map(|(x, weight)| x * weight).sum()
        };
        assert_same_bits(&out, &(0..rows * n).map(want).collect::<Vec<f32>>(), &format!("{rows} {n} {k}"));
    }
}

#[test]
fn threads_have_their_own_tiles() {
    let Some(amx) = hardware() else { return };
    let (rows, n, k) = (33, 70, 100);
    std::thread::scope(|scope| {
        for seed in 0..8 {
            scope.spawn(move || {
                let (x, weight) = (random(rows * k, seed), random(n * k, seed + 50));
                let run = |kernels| linear(kernels, (&x, rows), (&weight, n, k), None, Epilogue::None);
                let want = run(amx);
                assert_same_but_for_order(&want, &run(twin()), &x, &weight, (n, k), "thread");
                for _ in 0..100 {
                    assert_same_bits(&run(amx), &want, "thread");
                    std::thread::yield_now();
                }
            });
        }
    });
}
