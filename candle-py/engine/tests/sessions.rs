//! Steps through the paged cache give the bits of whole forwards, however a sequence is cut into steps, whatever is in the
//! batch beside it and wherever its blocks lie.

#![allow(clippy::unwrap_used)]

mod common;

use candle_core::{Device, Tensor};
use candle_engine::generate::{BLOCK_TOKENS, Logits, StepBatch, StepModel, StepSequence};
use candle_engine::{DecoderSession, Engine, LoadOptions};
use common::{Batch, Folder, Random, cases, golden, instruction_sets, load, load_with, same_bits};

const DECODERS: [&str; 4] = ["qwen2", "qwen2-untied", "qwen3", "llama"];
const NEW_TOKENS: usize = 24;
const VOCAB: usize = 384;

/// Prompts and what greedy decoding adds to them.
fn texts(name: &str) -> Vec<(Vec<u32>, Vec<u32>)> {
    cases(name, "ids").into_iter().zip(cases(name, "greedy")).collect()
}

/// Block tables, shuffled, for sequences of so many tokens.
fn tables(lengths: &[usize], blocks: usize, seed: u64) -> Vec<Vec<u32>> {
    let mut free: Vec<u32> = (0..blocks as u32).collect();
    let mut random = Random::new(seed);
    for index in (1..free.len()).rev() {
        free.swap(index, random.below(index as u32 + 1) as usize);
    }
    lengths.iter().map(|length| free.split_off(free.len() - length.div_ceil(BLOCK_TOKENS))).collect()
}

fn session(engine: &Engine, blocks: usize) -> DecoderSession {
    let mut session = engine.session().unwrap();
    session.resize_cache(blocks).unwrap();
    session
}

/// Runs whole sequences through the cache, `chunk` tokens of each a step; all logits, sequence after sequence.
fn in_chunks(session: &mut DecoderSession, sequences: &[Vec<u32>], tables: &[Vec<u32>], chunk: usize) -> Vec<f32> {
    let mut found = vec![Vec::new(); sequences.len()];
    let longest = sequences.iter().map(Vec::len).max().unwrap();
    let mut logits = Vec::new();
    for start in (0..longest).step_by(chunk) {
        let mut batch = StepBatch::default();
        let mut members = Vec::new();
        for (index, sequence) in sequences.iter().enumerate().filter(|(_, sequence)| sequence.len() > start) {
            let tokens = &sequence[start..sequence.len().min(start + chunk)];
            let first = batch.tokens.len();
            batch.tokens.extend(tokens);
            let (tokens, blocks) = (first..batch.tokens.len(), tables[index].clone());
            batch.sequences.push(StepSequence { tokens, start, blocks, logits: Logits::All });
            members.push(index);
        }
        session.step(&batch, &mut logits).unwrap();
        assert_eq!(logits.len(), batch.tokens.len() * VOCAB);
        for (sequence, index) in batch.sequences.iter().zip(members) {
            found[index].extend_from_slice(&logits[sequence.tokens.start * VOCAB..sequence.tokens.end * VOCAB]);
        }
    }
    found.concat()
}

fn greatest(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap() as u32
}

#[test]
fn chunks_of_every_size_give_the_bits_of_a_whole_forward() {
    for name in DECODERS {
        for isa in instruction_sets() {
            let engine = load_with(&golden(name), isa);
            let sequences: Vec<Vec<u32>> =
                texts(name).iter().map(|(prompt, new)| [&prompt[..], new].concat()).collect();
            let whole = engine.logits(&Batch::new(&sequences).ragged()).unwrap();
            let lengths: Vec<usize> = sequences.iter().map(Vec::len).collect();
            for chunk in (1..=25).chain([31, 32, 33, 48, 73, 74, 80]) {
                let tables = tables(&lengths, 40, chunk as u64);
                let found = in_chunks(&mut session(&engine, 40), &sequences, &tables, chunk);
                assert!(same_bits(&whole, &found), "{name} on {}: chunks of {chunk}", isa.name());
            }
        }
    }
}

#[test]
fn sequences_alone_give_the_bits_that_they_give_together() {
    for name in DECODERS {
        let engine = load(&golden(name));
        for (prompt, new) in texts(name) {
            let sequence = [&prompt[..], &new].concat();
            let whole = engine.logits(&Batch::new(std::slice::from_ref(&sequence)).ragged()).unwrap();
            for chunk in [1, 5, 16, 100] {
                let tables = tables(&[sequence.len()], 9, chunk as u64);
                let found = in_chunks(&mut session(&engine, 9), std::slice::from_ref(&sequence), &tables, chunk);
                assert!(same_bits(&whole, &found), "{name}: chunks of {chunk}");
            }
        }
    }
}

#[test]
fn greedy_decoding_gives_the_reference_ids() {
    for name in DECODERS {
        for threads in [1, 2] {
            let engine =
                Engine::load(&golden(name), &LoadOptions { threads: Some(threads), ..LoadOptions::default() }).unwrap();
            let texts = texts(name);
            let lengths: Vec<usize> = texts.iter().map(|(prompt, _)| prompt.len() + NEW_TOKENS).collect();
            let tables = tables(&lengths, 30, 5);
            let mut session = session(&engine, 30);
            let mut found = vec![Vec::new(); texts.len()];
            let mut logits = Vec::new();
            for step in 0..NEW_TOKENS {
                let mut batch = StepBatch::default();
                for (index, (prompt, _)) in texts.iter().enumerate() {
                    let first = batch.tokens.len();
                    match found[index].last() {
                        None => batch.tokens.extend(prompt),
                        Some(id) => batch.tokens.push(*id),
                    }
                    let start = if step == 0 { 0 } else { prompt.len() + step - 1 };
                    let (tokens, blocks) = (first..batch.tokens.len(), tables[index].clone());
                    batch.sequences.push(StepSequence { tokens, start, blocks, logits: Logits::Last });
                }
                session.step(&batch, &mut logits).unwrap();
                found.iter_mut().zip(logits.chunks(VOCAB)).for_each(|(found, logits)| found.push(greatest(logits)));
            }
            let wanted: Vec<Vec<u32>> = texts.into_iter().map(|(_, new)| new).collect();
            assert_eq!(found, wanted, "{name}");
        }
    }
}

#[test]
fn prompts_and_single_tokens_of_others_share_a_step() {
    let engine = load(&golden("qwen3"));
    let mut random = Random::new(4);
    let long = random.sequence(200, VOCAB as u32);
    let short = random.sequence(40, VOCAB as u32);
    let whole = engine.logits(&Batch::new(&[short.clone(), long.clone()]).ragged()).unwrap();
    let tables = tables(&[short.len(), long.len()], 20, 8);
    let mut session = session(&engine, 20);
    let mut logits = Vec::new();
    let mut found = [Vec::new(), Vec::new()];
    for step in 0..short.len() {
        let new = step * 5..(step + 1) * 5;
        let tokens = [&short[step..=step], &long[new.clone()]].concat();
        let sequence = |tokens, start, blocks: &[u32]| StepSequence {
            tokens,
            start,
            blocks: blocks.to_vec(),
            logits: Logits::All,
        };
        let sequences = vec![sequence(0..1, step, &tables[0]), sequence(1..6, new.start, &tables[1])];
        session.step(&StepBatch { tokens, sequences }, &mut logits).unwrap();
        found[0].extend_from_slice(&logits[..VOCAB]);
        found[1].extend_from_slice(&logits[VOCAB..]);
    }
    assert!(same_bits(&whole, &found.concat()));
}

#[test]
fn shared_and_copied_blocks_serve_several_sequences() {
    let engine = load(&golden("llama"));
    let mut random = Random::new(6);
    let prefix = random.sequence(20, VOCAB as u32);
    let ends = [random.sequence(9, VOCAB as u32), random.sequence(9, VOCAB as u32)];
    let sequences = ends.clone().map(|end| [&prefix[..], &end].concat());
    let whole = engine.logits(&Batch::new(&sequences).ragged()).unwrap();
    let mut session = session(&engine, 6);
    let mut logits = vec![1.0; 7];
    let first = StepSequence { tokens: 0..20, start: 0, blocks: vec![4, 2], logits: Logits::None };
    session.step(&StepBatch { tokens: prefix, sequences: vec![first] }, &mut logits).unwrap();
    assert!(logits.is_empty());
    // The second block is partly filled: one sequence gets a copy of it.
    session.copy_block(2, 5).unwrap();
    let sequence = |tokens, blocks| StepSequence { tokens, start: 20, blocks, logits: Logits::All };
    let sequences = vec![sequence(0..9, vec![4, 2]), sequence(9..18, vec![4, 5])];
    session.step(&StepBatch { tokens: ends.concat(), sequences }, &mut logits).unwrap();
    let wanted = [&whole.data[20 * VOCAB..29 * VOCAB], &whole.data[49 * VOCAB..]].concat();
    assert_eq!(logits, wanted);
}

#[test]
fn a_resized_cache_keeps_its_first_blocks() {
    let engine = load(&golden("qwen2"));
    let ids = Random::new(2).sequence(30, VOCAB as u32);
    let whole = engine.logits(&Batch::new(std::slice::from_ref(&ids)).ragged()).unwrap();
    let mut session = session(&engine, 2);
    assert_eq!(session.block_bytes(), 3 * 2 * 2 * 16 * 16 * 4);
    let mut logits = Vec::new();
    let mut step = |session: &mut DecoderSession, new: std::ops::Range<usize>| {
        let sequence = StepSequence { tokens: 0..new.len(), start: new.start, blocks: vec![1, 0], logits: Logits::All };
        session.step(&StepBatch { tokens: ids[new].to_vec(), sequences: vec![sequence] }, &mut logits).unwrap();
        logits.clone()
    };
    let mut found = step(&mut session, 0..10);
    session.resize_cache(50).unwrap();
    found.extend(step(&mut session, 10..21));
    session.resize_cache(2).unwrap();
    found.extend(step(&mut session, 21..30));
    assert!(same_bits(&whole, &found));
    assert!(session.resize_cache(usize::MAX / 2).is_err());
}

#[test]
fn a_batch_that_does_not_fit_is_refused_before_any_work() {
    let mut session = session(&load(&golden("qwen2")), 20);
    assert_eq!((session.vocab_size(), session.max_positions()), (384, 256));
    let sequence = |tokens, start, blocks| StepSequence { tokens, start, blocks, logits: Logits::Last };
    let cases = [
        (
            vec![1, 384],
            vec![sequence(0..2, 0, vec![0])],
            "batch has a token id outside the vocabulary of 384 tokens: `384`",
        ),
        (vec![1], vec![sequence(0..1, 0, vec![])], "sequence 0 of 1 tokens has too few blocks: `0`"),
        (vec![1], vec![sequence(0..1, 16, vec![0])], "sequence 0 of 17 tokens has too few blocks: `1`"),
        (vec![1], vec![sequence(0..1, 0, vec![20])], "sequence 0 has a block outside the cache of 20 blocks: `20`"),
        (
            vec![1],
            vec![sequence(0..1, 256, (0..17).collect())],
            "sequence 0 has more tokens than the 256 positions of the model: `257`",
        ),
        (vec![1, 2], vec![sequence(0..1, 0, vec![0])], "batch has more tokens than its sequences: `2`"),
        (vec![1], vec![sequence(0..0, 0, vec![0])], "sequence 0 does not follow the one before it: `0..0`"),
        (
            vec![1, 2],
            vec![sequence(0..1, 0, vec![3]), sequence(1..2, 5, vec![3])],
            "two sequences write into one block: `3`",
        ),
    ];
    for (tokens, sequences, message) in cases {
        let error = session.step(&StepBatch { tokens, sequences }, &mut Vec::new()).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    session.step(&StepBatch::default(), &mut Vec::new()).unwrap();
}

#[test]
fn what_a_broken_row_left_in_a_block_reaches_nobody() {
    let mut folder = Folder::from_golden("qwen3");
    let name = "model.embed_tokens.weight";
    let mut table: Vec<f32> = folder.tensors[name].flatten_all().unwrap().to_vec1().unwrap();
    table[7 * 64..8 * 64].fill(f32::NAN);
    folder.tensors.insert(name.into(), Tensor::from_vec(table, &[384, 64], &Device::Cpu).unwrap());
    let engine = load(folder.write());
    let good = vec![1, 2, 3, 4, 5];
    let bad = [7; 20];
    let mut session = session(&engine, 3);
    let mut logits = Vec::new();
    let sequence = |tokens, start, blocks| StepSequence { tokens, start, blocks, logits: Logits::Last };
    let mut step = |tokens: &[u32], sequences| {
        session.step(&StepBatch { tokens: tokens.to_vec(), sequences }, &mut logits).unwrap();
        // The head is the same table: one logit is not a number anyway.
        logits.chunks(VOCAB).map(|row| row.iter().filter(|logit| logit.is_nan()).count()).collect::<Vec<_>>()
    };
    let both = [&bad[..], &good].concat();
    let sequences = vec![sequence(0..20, 0, vec![0, 1]), sequence(20..25, 0, vec![2])];
    assert_eq!(step(&both, sequences), [VOCAB, 1]);
    assert_eq!(step(&good, vec![sequence(0..5, 0, vec![1])]), [1]);
    assert_eq!(step(&[9], vec![sequence(0..1, 5, vec![1])]), [1]);
}
