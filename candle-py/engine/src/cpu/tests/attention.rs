//! Attention of one sequence.

use super::{assert_close, assert_same_bits, every_kernels, random};
use crate::cpu::{AttentionArgs, Kernels};

/// Sizes and rules of a case; the buffers are made from it.
#[derive(Clone, Copy, Debug)]
struct Case {
    q_len: usize,
    k_len: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    causal: bool,
    q_offset: usize,
    window: Option<(usize, usize)>,
}

const PLAIN: Case =
    Case { q_len: 9, k_len: 9, heads: 2, kv_heads: 2, head_dim: 32, causal: false, q_offset: 0, window: None };

/// Queries, keys and values as columns of one buffer each, with a few columns to spare.
struct Buffers {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    spread: f32,
}

impl Buffers {
    fn new(case: Case, spread: f32) -> Buffers {
        let (q_width, k_width) = (case.heads * case.head_dim + 3, case.kv_heads * case.head_dim + 5);
        let scaled = |values: Vec<f32>| values.iter().map(|x| x * spread).collect();
        Buffers {
            q: scaled(random(case.q_len * q_width, 1)),
            k: scaled(random(case.k_len * k_width, 2)),
            v: random(case.k_len * k_width, 3),
            spread,
        }
    }

    fn args(&self, case: Case) -> AttentionArgs<'_> {
        AttentionArgs {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            q_stride: case.heads * case.head_dim + 3,
            k_stride: case.kv_heads * case.head_dim + 5,
            v_stride: case.kv_heads * case.head_dim + 5,
            out_stride: case.heads * case.head_dim,
            q_len: case.q_len,
            k_len: case.k_len,
            heads: case.heads,
            kv_heads: case.kv_heads,
            head_dim: case.head_dim,
            scale: 1.0 / (case.head_dim as f32).sqrt(),
            causal: case.causal,
            q_offset: case.q_offset,
            window: case.window,
        }
    }
}

fn attend(kernels: Kernels, args: &AttentionArgs<'_>) -> Vec<f32> {
    let mut out = vec![f32::NAN; args.q_len * args.out_stride];
    kernels.attention(args, &mut Vec::new(), &mut out);
    out
}

/// The definition, in float64.
fn reference(args: &AttentionArgs<'_>) -> Vec<f64> {
    let mut out = vec![0.0; args.q_len * args.out_stride];
    for row in 0..args.q_len {
        let position = args.q_offset + row;
        let sees = |key: &usize| {
            let (left, right) = args.window.unwrap_or((1 << 40, 1 << 40));
            (!args.causal || *key <= position) && key + left >= position && *key <= position + right
        };
        for head in 0..args.heads {
            let kv = head / (args.heads / args.kv_heads) * args.head_dim;
            let keys: Vec<usize> = (0..args.k_len).filter(sees).collect();
            let score = |key: &usize| -> f64 {
                let q = &args.q[row * args.q_stride + head * args.head_dim..][..args.head_dim];
                let k = &args.k[key * args.k_stride + kv..][..args.head_dim];
                q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() * f64::from(args.scale)
            };
            let scores: Vec<f64> = keys.iter().map(score).collect();
            let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let powers: Vec<f64> = scores.iter().map(|score| (score - greatest).exp()).collect();
            let sum: f64 = powers.iter().sum();
            for (key, power) in keys.iter().zip(&powers) {
                for i in 0..args.head_dim {
                    let value = f64::from(args.v[key * args.v_stride + kv + i]);
                    out[row * args.out_stride + head * args.head_dim + i] += power / sum * value;
                }
            }
        }
    }
    out
}

fn check(case: Case, spread: f32) {
    let buffers = Buffers::new(case, spread);
    let args = buffers.args(case);
    let want = reference(&args);
    for kernels in every_kernels() {
        let what = format!("{:?} {case:?} {}", kernels.isa(), buffers.spread);
        // Scores of size `spread^2 * sqrt(head_dim)` carry that much rounding into the exponent.
        assert_close(&attend(kernels, &args), &want, 1e-6 * f64::from(spread * spread).max(2.0), &what);
    }
}

#[test]
fn odd_lengths_and_head_sizes_match_float64() {
    for len in [1, 2, 7, 8, 9, 15, 16, 17, 47, 48, 49, 100] {
        for head_dim in [1, 3, 16, 31, 32, 33, 64, 80, 128, 256] {
            check(Case { q_len: len, k_len: len, head_dim, ..PLAIN }, 1.0);
        }
    }
}

#[test]
fn large_scores_match_float64() {
    for spread in [4.0, 20.0] {
        check(Case { q_len: 50, k_len: 50, ..PLAIN }, spread);
        check(Case { q_len: 3, k_len: 1300, ..PLAIN }, spread);
    }
}

#[test]
fn blocks_of_keys_join_up() {
    for k_len in [511, 512, 513, 1024, 1025, 2000] {
        check(Case { q_len: 11, k_len, head_dim: 40, ..PLAIN }, 3.0);
    }
}

#[test]
fn causal_rows_see_their_past() {
    for (q_len, k_len, q_offset) in [(20, 20, 0), (1, 30, 29), (7, 50, 43), (5, 3, 0), (100, 700, 600), (700, 700, 0)] {
        check(Case { q_len, k_len, q_offset, causal: true, ..PLAIN }, 1.0);
    }
}

#[test]
fn windows_bound_what_a_row_sees() {
    for window in [(0, 0), (1, 0), (3, 5), (64, 64), (600, 2)] {
        for (len, q_offset, causal) in [(1, 0, false), (17, 0, false), (200, 0, true), (700, 0, false), (30, 10, false)]
        {
            check(Case { q_len: len, k_len: len, q_offset, causal, window: Some(window), ..PLAIN }, 1.0);
        }
    }
}

#[test]
fn a_row_that_sees_nothing_is_zero() {
    let case = Case { q_len: 20, k_len: 10, q_offset: 5, window: Some((2, 2)), ..PLAIN };
    check(case, 1.0);
    let empty = Case { k_len: 0, ..PLAIN };
    let buffers = Buffers::new(empty, 1.0);
    for kernels in every_kernels() {
        assert!(attend(kernels, &buffers.args(empty)).iter().all(|value| *value == 0.0));
    }
}

#[test]
fn heads_share_keys_in_groups() {
    for (heads, kv_heads) in [(6, 2), (4, 1), (3, 3)] {
        check(Case { q_len: 13, k_len: 13, heads, kv_heads, ..PLAIN }, 1.0);
        check(Case { q_len: 13, k_len: 1000, q_offset: 987, causal: true, heads, kv_heads, ..PLAIN }, 1.0);
    }
}

#[test]
fn scratch_may_come_used_and_does_not_grow_with_the_keys() {
    for kernels in every_kernels() {
        let sizes = [1000, 6000].map(|k_len| {
            let case = Case { q_len: 40, k_len, ..PLAIN };
            let buffers = Buffers::new(case, 1.0);
            let args = buffers.args(case);
            let mut scratch = vec![f32::NAN; 200_000];
            let mut out = vec![f32::NAN; case.q_len * args.out_stride];
            kernels.attention(&args, &mut scratch, &mut out);
            assert_same_bits(&out, &attend(kernels, &args), "used scratch");
            let mut scratch = Vec::new();
            kernels.attention(&args, &mut scratch, &mut out);
            scratch.len()
        });
        assert_eq!(sizes[0], sizes[1]);
    }
}

#[test]
fn a_query_row_has_the_same_bits_in_every_tile() {
    // The rows from `start` on, as a call of their own: other tiles, the same rows.
    for case in [
        Case { q_len: 30, k_len: 30, ..PLAIN },
        Case { q_len: 30, k_len: 30, causal: true, ..PLAIN },
        Case { q_len: 700, k_len: 700, window: Some((64, 64)), ..PLAIN },
        Case { q_len: 620, k_len: 620, causal: true, ..PLAIN },
    ] {
        let buffers = Buffers::new(case, 1.0);
        for kernels in every_kernels() {
            let args = buffers.args(case);
            let whole = attend(kernels, &args);
            for start in [1, 5, 29, case.q_len - 1] {
                let q = &args.q[start * args.q_stride..];
                let part = AttentionArgs { q, q_len: case.q_len - start, q_offset: start, ..args };
                let what = format!("{:?} {case:?} from {start}", kernels.isa());
                assert_same_bits(&attend(kernels, &part), &whole[start * args.out_stride..], &what);
            }
        }
    }
}

#[test]
fn a_bad_query_spoils_its_own_row_only() {
    let case = Case { q_len: 20, k_len: 20, heads: 1, kv_heads: 1, ..PLAIN };
    let mut buffers = Buffers::new(case, 1.0);
    buffers.q[7 * (case.head_dim + 3) + 2] = f32::NAN;
    for kernels in every_kernels() {
        let out = attend(kernels, &buffers.args(case));
        for (row, out) in out.chunks_exact(case.head_dim).enumerate() {
            assert_eq!(out.iter().all(|value| value.is_finite()), row != 7, "row {row}");
        }
    }
}

#[test]
#[should_panic(expected = "heads is not a multiple of kv_heads")]
fn uneven_groups_are_refused() {
    let case = Case { heads: 3, kv_heads: 2, ..PLAIN };
    attend(every_kernels()[0], &Buffers::new(case, 1.0).args(case));
}
