//! Attention to pages against attention to rows, bit for bit; and the reading of a packed weight's rows.

use super::{assert_close, assert_same_bits, every_kernels, random};
use crate::cpu::{AttentionArgs, PAGE_TOKENS, PageShape, PagedAttentionArgs, Pages, Storage};

/// Keys and values of so many tokens in pages that lie in reverse order, all places beyond them not a number.
fn paged(shape: PageShape, length: usize, keys: &[f32], values: &[f32]) -> (Pages, Vec<u32>) {
    let count = length.div_ceil(PAGE_TOKENS);
    let mut pages = Pages::new(shape);
    assert!(pages.reserve(count));
    pages.touch(count);
    pages.floats_mut().fill(f32::NAN);
    let table: Vec<u32> = (0..count as u32).rev().collect();
    let width = shape.kv_heads * shape.head_dim;
    for token in 0..length {
        let page = table[token / PAGE_TOKENS] as usize;
        let page = &mut pages.floats_mut()[page * shape.floats()..][..shape.floats()];
        let row = token * width..(token + 1) * width;
        shape.write(page, token % PAGE_TOKENS, &keys[row.clone()], &values[row]);
    }
    (pages, table)
}

#[test]
fn pages_and_rows_give_the_same_bits() {
    let mut scratch = Vec::new();
    for kernels in every_kernels() {
        for (heads, kv_heads, head_dim) in [(3, 1, 64), (4, 4, 8), (6, 2, 18), (2, 1, 3), (14, 2, 16), (40, 1, 5)] {
            for (length, q_len) in [(1, 1), (16, 3), (17, 17), (40, 1), (100, 33), (530, 2), (1025, 5)] {
                for window in [None, Some(0), Some(6), Some(600)] {
                    let (q_width, width) = (heads * head_dim, kv_heads * head_dim);
                    let (q, keys) = (random(q_len * q_width, 1), random(length * width, 2));
                    let (values, first) = (random(length * width, 3), length - q_len);
                    let shape = PageShape { kv_heads, head_dim };
                    let mut rows = vec![f32::NAN; q_len * q_width];
                    let args = AttentionArgs {
                        q: &q,
                        k: &keys,
                        v: &values,
                        q_stride: q_width,
                        k_stride: width,
                        v_stride: width,
                        out_stride: q_width,
                        q_len,
                        k_len: length,
                        heads,
                        kv_heads,
                        head_dim,
                        scale: 0.3,
                        causal: true,
                        q_offset: first,
                        window: window.map(|window| (window, 0)),
                    };
                    kernels.attention(&args, &mut scratch, &mut rows);
                    let (pages, table) = paged(shape, length, &keys, &values);
                    let mut found = vec![f32::NAN; q_len * q_width];
                    for kv_head in 0..kv_heads {
                        let args = PagedAttentionArgs {
                            q: &q,
                            q_stride: q_width,
                            q_len,
                            first,
                            heads,
                            shape,
                            kv_heads: kv_head..kv_heads,
                            pages: pages.floats(),
                            table: &table,
                            scale: 0.3,
                            window,
                            out_stride: q_width,
                        };
                        let out = &mut found[kv_head * heads / kv_heads * head_dim..];
                        kernels.paged_attention(&args, &mut scratch, out);
                    }
                    let what = format!("{:?} {heads}/{kv_heads} {head_dim} {length} {q_len}", kernels.isa());
                    assert_same_bits(&found, &rows, &what);
                }
            }
        }
    }
}

#[test]
fn a_packed_weight_gives_its_rows_back() {
    for kernels in every_kernels() {
        for (n, k) in [(1, 1), (5, 7), (31, 16), (48, 3), (49, 9), (200, 20), (383, 5)] {
            let weight = random(n * k, 4);
            let packed = kernels.pack(&weight, n, k, Storage::Float32);
            for row in 0..n {
                let mut found = vec![f32::NAN; k];
                packed.copy_row(row, &mut found);
                assert_same_bits(&found, &weight[row * k..(row + 1) * k], &format!("{:?} {n} {k}", kernels.isa()));
            }
        }
    }
}

#[test]
fn the_logarithm_of_a_sum_of_exponentials_matches_float64() {
    for kernels in every_kernels() {
        for (count, scale) in [(1, 1.0), (17, 30.0), (384, 5.0), (50_000, 80.0)] {
            let mut row: Vec<f32> = random(count, 5).iter().map(|value| value * scale).collect();
            let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = row.iter().map(|value| f64::from(value - most).exp()).sum();
            let found = kernels.log_sum_exp(&mut row);
            assert_close(&[found], &[f64::from(most) + sum.ln()], 2e-6, &format!("{:?} {count}", kernels.isa()));
        }
    }
}
