//! A row's result is the row's alone: bit for bit the same alone, among others, in any order, with any threads.

#![allow(clippy::unwrap_used)]

mod common;

use candle_engine::{EmbedOptions, Engine, LoadOptions};
use common::{Batch, Folder, Random, cases, golden, instruction_sets, load, load_with, same_bits};

fn alone(engine: &Engine, sequence: &[u32]) -> Vec<f32> {
    engine.hidden_states(&Batch::new(&[sequence.to_vec()]).ragged()).unwrap().data
}

#[test]
fn sequences_alone_together_and_in_any_order_are_bit_equal() {
    for name in ["bert", "roberta", "xlm-roberta", "distilbert", "modernbert"] {
        for isa in instruction_sets() {
            let engine = load_with(&golden(name), isa);
            let sequences = cases(name, "ids");
            let mut orders = vec![sequences.clone(), sequences.iter().rev().cloned().collect()];
            orders.push([&sequences[3..], &sequences[..3]].concat());
            for order in orders {
                let together = engine.hidden_states(&Batch::new(&order).ragged()).unwrap();
                let each: Vec<f32> = order.iter().flat_map(|sequence| alone(&engine, sequence)).collect();
                assert!(same_bits(&together, &each), "{name} on {}", isa.name());
            }
        }
    }
}

#[test]
fn lengths_from_1_to_512_are_bit_equal_in_a_batch() {
    for isa in instruction_sets() {
        let folder = Folder::bert(40, 5, 72, 1, 2);
        let engine = load_with(folder.write(), isa);
        let mut random = Random::new(7);
        let mut lengths: Vec<usize> = (1..70).chain([127, 128, 129, 255, 256, 257, 300, 511, 512]).collect();
        lengths.sort_by_key(|length| (length * 37) % 101);
        let sequences: Vec<Vec<u32>> = lengths.iter().map(|length| random.sequence(*length, 50)).collect();
        let together = engine.hidden_states(&Batch::new(&sequences).ragged()).unwrap();
        let each: Vec<f32> = sequences.iter().flat_map(|sequence| alone(&engine, sequence)).collect();
        assert!(same_bits(&together, &each), "{}", isa.name());
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let load = |threads| {
        Engine::load(&golden("modernbert"), &LoadOptions { threads: Some(threads), ..LoadOptions::default() }).unwrap()
    };
    let mut random = Random::new(3);
    let sequences: Vec<Vec<u32>> = (1..200).map(|length| random.sequence(length, 384)).collect();
    let batch = Batch::new(&sequences);
    let one = load(1).hidden_states(&batch.ragged()).unwrap();
    for threads in [2, 3, 64] {
        assert!(same_bits(&load(threads).hidden_states(&batch.ragged()).unwrap(), &one.data));
    }
}

#[test]
fn a_sequence_that_is_spread_over_threads_stays_the_same() {
    for name in ["bert", "modernbert"] {
        let load = |threads| {
            Engine::load(&golden(name), &LoadOptions { threads: Some(threads), ..LoadOptions::default() }).unwrap()
        };
        for length in [1, 64, 65, 100, 127, 128] {
            let batch = Batch::new(&[Random::new(9).sequence(length, 384)]);
            let one = load(1).hidden_states(&batch.ragged()).unwrap();
            assert!(same_bits(&load(2).hidden_states(&batch.ragged()).unwrap(), &one.data), "{name} of {length}");
        }
    }
}

#[test]
fn an_engine_answers_many_threads_at_once() {
    let engine = load(&golden("bert"));
    let batch = Batch::new(&cases("bert", "ids"));
    let wanted = engine.hidden_states(&batch.ragged()).unwrap().data;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..5 {
                    assert!(same_bits(&engine.hidden_states(&batch.ragged()).unwrap(), &wanted));
                }
            });
        }
    });
}

#[test]
fn a_batch_without_rows_gives_no_rows() {
    let engine = load(&golden("st-mean-dense"));
    let batch = Batch::new(&[]);
    assert_eq!(engine.hidden_states(&batch.ragged()).unwrap().rows(), 0);
    let output = engine.embed(&batch.ragged(), &EmbedOptions::default()).unwrap();
    assert_eq!((output.rows(), output.width), (0, 16));
}

#[test]
fn what_does_not_fit_the_model_is_told_before_any_work() {
    let engine = load(&golden("roberta"));
    let cases = [
        (Batch::new(&[vec![5], vec![384]]), "row 1 has a token id outside the vocabulary of 384 tokens: `384`"),
        (Batch::new(&[vec![5; 129]]), "row 0 has more tokens than the 128 positions of the model: `129`"),
        (Batch::new(&[vec![5], vec![]]), "row has no tokens: `1`"),
        (
            Batch::new(&[vec![5]]).with_types(&[vec![1]]),
            "row 0 has a token type id outside the 1 token types of the model: `1`",
        ),
        (Batch::new(&[vec![5]]).with_types(&[vec![0, 0]]), "type_ids must be as many as ids, 1: `2`"),
        (
            Batch { ids: vec![1, 2], offsets: vec![], type_ids: None },
            "offsets must have one more entry than there are rows: `[]`",
        ),
        (Batch { ids: vec![1, 2], offsets: vec![1, 2], type_ids: None }, "offsets must start at 0: `1`"),
        (Batch { ids: vec![1, 2], offsets: vec![0, 2, 1, 2], type_ids: None }, "offsets fall after row 1: `1`"),
        (
            Batch { ids: vec![1, 2], offsets: vec![0, 1], type_ids: None },
            "offsets must end at the number of ids, 2: `1`",
        ),
        (
            Batch { ids: vec![1, 2], offsets: vec![0, 4_000_000_000], type_ids: None },
            "offsets must end at the number of ids, 2: `4000000000`",
        ),
    ];
    for (batch, message) in cases {
        assert_eq!(engine.hidden_states(&batch.ragged()).unwrap_err().to_string(), message);
    }
    assert!(engine.hidden_states(&Batch::new(&[vec![5; 128]]).ragged()).is_ok());
}

#[test]
fn a_padding_token_inside_a_roberta_text_takes_no_position() {
    // As transformers numbers them: the padding token (1) sits at the padding position, the rest count on.
    let engine = load(&golden("roberta"));
    let with_padding = alone(&engine, &[10, 1, 20]);
    let mut folder = Folder::from_golden("roberta");
    folder.config["pad_token_id"] = serde_json::json!(0);
    // With another padding id, position 1 is a plain one, and everything moves.
    let other = alone(&load(folder.write()), &[10, 1, 20]);
    assert_ne!(with_padding, other);
    assert_eq!(with_padding.len(), 3 * 48);
}
