//! Steps with tokens enough to go through the model in lanes give the bits that one thread gives, whatever the sequences share.

#![allow(clippy::unwrap_used)]

mod common;

use candle_engine::generate::{BLOCK_TOKENS, Logits, StepBatch, StepModel, StepSequence};
use candle_engine::{DecoderSession, Dtype, Engine, LoadOptions};
use common::{Random, golden};

const VOCAB: u32 = 384;
const BLOCKS: usize = 600;
const DTYPES: [Dtype; 3] = [Dtype::Float32, Dtype::Bfloat16, Dtype::Int8];

fn session(name: &str, dtype: Dtype, threads: usize) -> DecoderSession {
    let options = LoadOptions { threads: Some(threads), dtype, ..LoadOptions::default() };
    let mut session = Engine::load(&golden(name), &options).unwrap().session().unwrap();
    session.resize_cache(BLOCKS).unwrap();
    session
}

/// A step of sequences: their new tokens, where these start, and their blocks.
fn step(sequences: &[(Vec<u32>, usize, Vec<u32>)], logits: Logits) -> StepBatch {
    let mut batch = StepBatch::default();
    for (tokens, start, blocks) in sequences {
        let first = batch.tokens.len();
        batch.tokens.extend(tokens);
        let tokens = first..batch.tokens.len();
        batch.sequences.push(StepSequence { tokens, start: *start, blocks: blocks.clone(), logits });
    }
    batch
}

/// The logits of all steps, one after the other.
fn run(mut session: DecoderSession, steps: &[StepBatch]) -> Vec<f32> {
    let (mut logits, mut all) = (Vec::new(), Vec::new());
    for step in steps {
        session.step(step, &mut logits).unwrap();
        all.extend_from_slice(&logits);
    }
    all
}

fn assert_same(steps: &[StepBatch], what: &str) {
    for name in ["qwen2", "qwen3"] {
        for dtype in DTYPES {
            let alone = run(session(name, dtype, 1), steps);
            assert!(alone.iter().all(|logit| logit.is_finite()) && !alone.is_empty());
            for threads in [2, 3, 4] {
                let found = run(session(name, dtype, threads), steps);
                let same = alone.iter().map(|logit| logit.to_bits()).eq(found.iter().map(|logit| logit.to_bits()));
                assert!(same, "{what}: {name} {dtype:?}, {threads} threads");
            }
        }
    }
}

/// Many prompts, of which all begin with the same `shared` tokens, then `count` steps of a token each.
fn many_rows(rows: usize, shared: usize, count: usize) -> Vec<StepBatch> {
    let mut random = Random::new(rows as u64);
    let beginning = random.sequence(shared, VOCAB);
    let blocks_each = 4;
    let of_all: Vec<u32> = (0..(shared / BLOCK_TOKENS) as u32).collect();
    let lengths: Vec<usize> = (0..rows).map(|_| 1 + random.below(40) as usize).collect();
    let table = |row: usize| {
        let first = of_all.len() as u32 + (row * blocks_each) as u32;
        [of_all.clone(), (first..first + blocks_each as u32).collect()].concat()
    };
    let mut steps = Vec::new();
    if shared > 0 {
        steps.push(step(&[(beginning, 0, of_all.clone())], Logits::All));
    }
    let prompts: Vec<_> = (0..rows).map(|row| (random.sequence(lengths[row], VOCAB), shared, table(row))).collect();
    steps.push(step(&prompts, Logits::Last));
    for new in 0..count {
        let ones: Vec<_> =
            (0..rows).map(|row| (random.sequence(1, VOCAB), shared + lengths[row] + new, table(row))).collect();
        steps.push(step(&ones, Logits::Last));
    }
    steps
}

#[test]
fn lanes_give_the_bits_of_one_thread() {
    assert_same(&many_rows(100, 0, 3), "nothing shared");
}

#[test]
fn lanes_read_a_beginning_that_they_share() {
    assert_same(&many_rows(100, 48, 3), "a shared beginning");
}

#[test]
fn what_one_sequence_writes_and_another_reads_is_not_cut_apart() {
    let mut random = Random::new(7);
    let prefix = random.sequence(16, VOCAB);
    // The last sequence reads block 0, which the first writes in the same step; the many between would be lanes.
    let mut sequences = vec![(prefix, 0, vec![0])];
    sequences.extend((0..9).map(|row| (random.sequence(40, VOCAB), 0, (1 + 3 * row..4 + 3 * row).collect())));
    sequences.push((random.sequence(40, VOCAB), 16, vec![0, 100, 101, 102]));
    assert_same(&[step(&sequences, Logits::All)], "a block that is written and read");
}
