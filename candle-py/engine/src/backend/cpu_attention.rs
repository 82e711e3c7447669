//! Attention of the CPU backend: of whole sequences to themselves, and of new tokens to what a cache holds.

use std::cell::Cell;

use super::Attention;
use super::rows::{BLOCK_ROWS, PARTS_PER_THREAD, Rows};
use crate::cpu::{AttentionArgs, Kernels, PagedAttentionArgs};
use crate::generate::StepSequence;
use crate::kv_cache::{CachePart, Target};
use crate::team;

/// New tokens of one sequence that are handed to another thread at once.
const STEP_ROWS: usize = 32;

thread_local! {
    /// What this thread's attention computes in.
    static SCRATCH: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Calls `work` with this thread's scratch, whose allocation stays.
fn with_scratch(work: impl FnOnce(&mut Vec<f32>)) {
    let mut scratch = SCRATCH.take();
    work(&mut scratch);
    SCRATCH.set(scratch);
}

/// Attention of every sequence to itself, sequence after sequence or, where a long one is spread, block after block.
pub(super) fn attend(
    spread: bool,
    kernels: Kernels,
    attention: &Attention,
    offsets: &[usize],
    qkv: &Rows,
    out: &mut Rows,
) {
    let hidden = attention.heads * attention.head_dim;
    let out = out.reshape(qkv.count(), hidden);
    for bounds in offsets.windows(2) {
        let length = bounds[1] - bounds[0];
        let sequence = qkv.part(bounds[0], length);
        let out = &mut out[bounds[0] * hidden..bounds[1] * hidden];
        if !spread || length <= BLOCK_ROWS {
            attend_rows(kernels, attention, sequence, 0, out);
            continue;
        }
        let blocks = out.chunks_mut(BLOCK_ROWS * hidden).enumerate();
        team::each_item(blocks, |(block, out)| attend_rows(kernels, attention, sequence, block * BLOCK_ROWS, out));
    }
}

/// Attention of a sequence's rows from `first` on, as many as `out` holds, to the whole sequence.
fn attend_rows(kernels: Kernels, attention: &Attention, sequence: &[f32], first: usize, out: &mut [f32]) {
    let (q, kv) = (attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim);
    let stride = attention.qkv_width();
    let q_len = out.len() / q;
    // What lies after the last row is seen by none where tokens look back only.
    let length = if attention.causal { first + q_len } else { sequence.len() / stride };
    let args = AttentionArgs {
        q: &sequence[first * stride..],
        k: &sequence[q..length * stride],
        v: &sequence[q + kv..length * stride],
        q_stride: stride,
        k_stride: stride,
        v_stride: stride,
        out_stride: q,
        q_len,
        k_len: length,
        heads: attention.heads,
        kv_heads: attention.kv_heads,
        head_dim: attention.head_dim,
        scale: scale(attention),
        causal: attention.causal,
        q_offset: first,
        window: attention.window.map(|tokens| (tokens, tokens)),
    };
    with_scratch(|scratch| kernels.attention(&args, scratch, out));
}

fn scale(attention: &Attention) -> f32 {
    1.0 / (attention.head_dim as f32).sqrt()
}

/// Writes the keys and values of new tokens to the cache; when all are there, attends.
#[allow(clippy::too_many_arguments)]
pub(super) fn attend_cached(
    spread: bool,
    kernels: Kernels,
    attention: &Attention,
    layer: usize,
    qkv: &Rows,
    cache: &mut CachePart<'_>,
    out: &mut Rows,
) {
    let (q, kv) = (attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim);
    let shape = cache.pages(layer).shape();
    let write = |(page, target): (&mut [u8], &Target)| {
        for (token, row) in target.rows.clone().enumerate() {
            let (keys, values) = qkv.part(row, 1)[q..].split_at(kv);
            kernels.write_token(shape, page, target.slot + token, keys, values);
        }
    };
    let writes = cache.writes(layer);
    match spread {
        true => team::each_item(writes.into_iter(), write),
        false => writes.into_iter().for_each(write),
    }

    let (pages, sequences) = (cache.pages(layer), cache.sequences());
    let out = out.reshape(qkv.count(), q);
    let blocks = |sequence: &StepSequence| sequence.tokens.len().div_ceil(STEP_ROWS);
    let few = || sequences.iter().map(blocks).sum::<usize>() < PARTS_PER_THREAD * team::threads();
    // Where there are too few tokens for all threads, the heads are spread too, into parts that are put together after.
    let parts = if spread && few() { attention.kv_heads } else { 1 };
    let (width, heads) = (q / parts, attention.kv_heads / parts);
    let mut apart = vec![0.0; if parts > 1 { out.len() } else { 0 }];
    let mut rest = if parts > 1 { apart.as_mut_slice() } else { &mut *out };
    let mut work = Vec::with_capacity(sequences.len());
    for part in 0..parts {
        for (sequence, after) in sequences.iter().zip(1..) {
            let (own, later) = std::mem::take(&mut rest).split_at_mut(sequence.tokens.len() * width);
            rest = later;
            let next_table = sequences.get(after).map_or(&[][..], |next| &next.blocks);
            for (block, out) in own.chunks_mut(STEP_ROWS * width).enumerate() {
                let (first, rows) = (block * STEP_ROWS, out.len() / width);
                let args = PagedAttentionArgs {
                    q: qkv.part(sequence.tokens.start + first, rows),
                    q_stride: qkv.width,
                    q_len: rows,
                    first: sequence.start + first,
                    heads: attention.heads,
                    kv_heads: part * heads..(part + 1) * heads,
                    pages,
                    table: &sequence.blocks,
                    next_table,
                    scale: scale(attention),
                    window: attention.window,
                    out_stride: width,
                };
                work.push((args, out));
            }
        }
    }
    let attend = |(args, out): (PagedAttentionArgs<'_>, &mut [f32])| {
        with_scratch(|scratch| kernels.paged_attention(&args, scratch, out));
    };
    match spread {
        true => team::each_item(work.into_iter(), attend),
        false => work.into_iter().for_each(attend),
    }
    for (part, rows) in apart.chunks_exact(out.len() / parts).enumerate() {
        let to = out.chunks_exact_mut(q).map(|row| &mut row[part * width..][..width]);
        to.zip(rows.chunks_exact(width)).for_each(|(to, row)| to.copy_from_slice(row));
    }
}
