//! Attention to pages against attention to rows, bit for bit; and the reading of a packed weight's rows.

use half::f16;

use super::{assert_same_bits, every_kernels, random};
use crate::cpu::{AttentionArgs, Kernels, PAGE_TOKENS, PageNumbers, PageShape, PagedAttentionArgs, Pages, Storage};

/// Keys and values of so many tokens in pages that lie in reverse order, all places beyond them not a number.
fn paged(kernels: Kernels, shape: PageShape, length: usize, keys: &[f32], values: &[f32]) -> (Pages, Vec<u32>) {
    let count = length.div_ceil(PAGE_TOKENS);
    let mut pages = Pages::new(shape);
    assert!(pages.reserve(count));
    pages.touch(count);
    pages.bytes_mut().fill(0xff);
    let table: Vec<u32> = (0..count as u32).rev().collect();
    let width = shape.kv_heads * shape.head_dim;
    for token in 0..length {
        let page = table[token / PAGE_TOKENS] as usize;
        let page = &mut pages.bytes_mut()[page * shape.bytes()..][..shape.bytes()];
        let row = token * width..(token + 1) * width;
        kernels.write_token(shape, page, token % PAGE_TOKENS, &keys[row.clone()], &values[row]);
    }
    (pages, table)
}

/// Numbers as a page holds them.
fn held(numbers: Vec<f32>, kind: PageNumbers) -> Vec<f32> {
    match kind {
        PageNumbers::Float32 => numbers,
        PageNumbers::Float16 => numbers.into_iter().map(|number| f16::from_f32(number).to_f32()).collect(),
    }
}

#[test]
fn pages_and_rows_give_the_same_bits() {
    let mut scratch = Vec::new();
    for kernels in every_kernels() {
        for (heads, kv_heads, head_dim) in [(3, 1, 64), (4, 4, 8), (6, 2, 18), (2, 1, 3), (14, 2, 16), (40, 1, 5)] {
            for (length, q_len) in [(1, 1), (16, 3), (17, 17), (40, 1), (100, 33), (530, 2), (1025, 5)] {
                let windows = [None, Some(0), Some(6), Some(600)];
                let all =
                    windows.map(|window| [PageNumbers::Float32, PageNumbers::Float16].map(|numbers| (window, numbers)));
                for (window, numbers) in all.into_iter().flatten() {
                    let (q_width, width) = (heads * head_dim, kv_heads * head_dim);
                    let (q, first) = (random(q_len * q_width, 1), length - q_len);
                    let [keys, values] = [2, 3].map(|seed| held(random(length * width, seed), numbers));
                    let shape = PageShape { kv_heads, head_dim, numbers };
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
                    let (pages, table) = paged(kernels, shape, length, &keys, &values);
                    let mut found = vec![f32::NAN; q_len * q_width];
                    for kv_head in 0..kv_heads {
                        let args = PagedAttentionArgs {
                            q: &q,
                            q_stride: q_width,
                            q_len,
                            first,
                            heads,
                            kv_heads: kv_head..kv_heads,
                            pages: pages.view(),
                            table: &table,
                            next_table: &table[..table.len() / 2],
                            scale: 0.3,
                            window,
                            out_stride: q_width,
                        };
                        let out = &mut found[kv_head * heads / kv_heads * head_dim..];
                        kernels.paged_attention(&args, &mut scratch, out);
                    }
                    let what =
                        format!("{:?} {heads}/{kv_heads} {head_dim} {length} {q_len} {numbers:?}", kernels.isa());
                    assert_same_bits(&found, &rows, &what);
                }
            }
        }
    }
}

#[test]
fn float16_is_the_nearest() {
    let least = f32::from_bits(0x3300_0000);
    let mut numbers = vec![65504.0, 65519.0, least, least * 1.001, 6e-5, 0.0];
    // Halfway between two neighbours, and next to that.
    numbers.extend([1.0 + 1.0 / 2048.0, 1.0 + 3.0 / 2048.0, 1.000_489, 2049.0, 2051.0, 0.1, 1.0 / 3.0]);
    numbers.extend(numbers.clone().iter().map(|number| -number));
    let shape = PageShape { kv_heads: 1, head_dim: numbers.len(), numbers: PageNumbers::Float16 };
    let expected: Vec<u16> = numbers.iter().map(|number| f16::from_f32(*number).to_bits()).collect();
    for kernels in every_kernels() {
        let mut page = vec![0; shape.bytes()];
        kernels.write_token(shape, &mut page, 3, &numbers, &numbers);
        let halves: &[u16] = bytemuck::cast_slice(&page);
        let (columns, rows) = halves.split_at(PAGE_TOKENS * numbers.len());
        let keys: Vec<u16> = columns.iter().skip(3).step_by(PAGE_TOKENS).copied().collect();
        assert_eq!(keys, expected, "{:?}", kernels.isa());
        assert_eq!(rows[3 * shape.value_width()..][..numbers.len()], expected, "{:?}", kernels.isa());
        let written = halves.iter().filter(|bits| **bits != 0).count();
        assert_eq!(written, 2 * expected.iter().filter(|bits| **bits != 0).count());
    }
}

#[test]
fn a_token_without_a_number_is_seen_by_those_who_see_it_alone() {
    let (heads, kv_heads, head_dim, length) = (6, 2, 20, 40);
    let (width, q_width) = (kv_heads * head_dim, heads * head_dim);
    let bad = 22;
    let beyond = [(PageNumbers::Float16, 65520.0), (PageNumbers::Float16, -1e9)];
    let never = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY]
        .map(|bad| [PageNumbers::Float32, PageNumbers::Float16].map(|numbers| (numbers, bad)));
    for kernels in every_kernels() {
        for (numbers, number) in never.into_iter().flatten().chain(beyond) {
            for (is_key, window) in [(true, None), (false, None), (true, Some(5)), (false, Some(5))] {
                let shape = PageShape { kv_heads, head_dim, numbers };
                let [mut keys, mut values] = [2, 3].map(|seed| held(random(length * width, seed), numbers));
                let q = random(length * q_width, 1);
                let attend = |keys: &[f32], values: &[f32]| {
                    let (pages, table) = paged(kernels, shape, length, keys, values);
                    let args = PagedAttentionArgs {
                        q: &q,
                        q_stride: q_width,
                        q_len: length,
                        first: 0,
                        heads,
                        kv_heads: 0..kv_heads,
                        pages: pages.view(),
                        table: &table,
                        next_table: &[],
                        scale: 0.3,
                        window,
                        out_stride: q_width,
                    };
                    let mut out = vec![0.0; length * q_width];
                    kernels.paged_attention(&args, &mut Vec::new(), &mut out);
                    out
                };
                let clean = attend(&keys, &values);
                // One number of the second head.
                (if is_key { &mut keys } else { &mut values })[bad * width + head_dim + 7] = number;
                let found = attend(&keys, &values);
                for (row, (found, clean)) in found.chunks(q_width).zip(clean.chunks(q_width)).enumerate() {
                    let what = format!("{:?} {numbers:?} {number} {is_key} {window:?} row {row}", kernels.isa());
                    let sees = row >= bad && window.is_none_or(|window| row - bad <= window);
                    let own = q_width / 2;
                    assert_same_bits(&found[..own], &clean[..own], &what);
                    match sees {
                        true => assert!(found[own..].iter().all(|number| number.is_nan()), "{what}"),
                        false => assert_same_bits(&found[own..], &clean[own..], &what),
                    }
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
