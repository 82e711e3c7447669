//! Encoders over ranks: embeddings, token types and classification are those of the whole model.

use candle_core::{Device, Tensor};
use candle_engine::{EmbedOptions, Engine};
use serde_json::json;

use super::common::{Batch, Folder, Random, cases, distance, expected, golden, load};
use super::{HIDDEN_TOLERANCE, bits, led};

/// As far as the heads and the feed-forward's width can be divided.
pub(super) const ENCODER_WORLDS: [(&str, &[usize]); 5] =
    [("bert", &[2, 4]), ("roberta", &[3]), ("xlm-roberta", &[2, 4]), ("distilbert", &[2, 4]), ("modernbert", &[2, 4])];

fn pooled(mode: &str) -> EmbedOptions {
    EmbedOptions { pooling: Some(mode.parse().unwrap()), normalize: Some(true), ..EmbedOptions::default() }
}

#[test]
fn golden_encoders_equal_the_reference_on_all_ranks() {
    for (name, worlds) in ENCODER_WORLDS {
        let batch = Batch::new(&cases(name, "ids"));
        for world in worlds {
            let (found, seen) = led(&golden(name), *world, |engine| {
                [
                    engine.hidden_states(&batch.ragged()).unwrap(),
                    engine.embed(&batch.ragged(), &pooled("mean")).unwrap(),
                    engine.embed(&batch.ragged(), &pooled("cls")).unwrap(),
                ]
            });
            for (output, key) in found.iter().zip(["hidden", "mean", "cls"]) {
                let distance = distance(&output.data, &expected(name, key));
                assert!(distance <= HIDDEN_TOLERANCE, "{name} over {world}: {key} differ by {distance}");
            }
            assert_eq!(seen.len() + 1, *world);
            assert!(
                seen.iter().all(|seen| *seen == vec![bits(&found[0].data); 3]),
                "{name} over {world}: ranks differ"
            );
        }
    }
}

#[test]
fn classifiers_over_ranks_tell_the_token_types_to_all() {
    for name in ["bert-classifier", "bert-cross-encoder"] {
        let batch = Batch::new(&cases(name, "ids")).with_types(&cases(name, "token_type_ids"));
        for world in [2, 4] {
            let (found, seen) = led(&golden(name), world, |engine| engine.classify(&batch.ragged()).unwrap());
            let distance = distance(&found.data, &expected(name, "logits"));
            assert!(distance <= HIDDEN_TOLERANCE, "{name} over {world}: logits differ by {distance}");
            assert!(seen.iter().all(|each| *each == seen[0]), "{name} over {world}: ranks differ");
        }
    }
}

#[test]
fn long_texts_and_texts_alone_are_the_same_over_ranks() {
    let mut random = Random::new(11);
    let sequences: Vec<Vec<u32>> = [1, 60, 7, 33].map(|length| random.sequence(length, 384)).to_vec();
    let hidden = |engine: &Engine, rows: &[Vec<u32>]| engine.hidden_states(&Batch::new(rows).ragged()).unwrap().data;
    for name in ["bert", "modernbert"] {
        let wanted = hidden(&load(&golden(name)), &sequences);
        let ((together, alone), _) = led(&golden(name), 2, |engine| {
            let alone: Vec<f32> = sequences.iter().flat_map(|row| hidden(engine, std::slice::from_ref(row))).collect();
            (hidden(engine, &sequences), alone)
        });
        assert_eq!(bits(&together), bits(&alone), "{name}");
        assert!(distance(&together, &wanted) <= HIDDEN_TOLERANCE, "{name}");
    }
}

#[test]
fn layers_that_share_a_tensor_are_cut_one_by_one_and_so_are_their_biases() {
    let mut folder = Folder::from_golden("modernbert");
    for flag in ["attention_bias", "mlp_bias", "norm_bias"] {
        folder.config[flag] = json!(true);
    }
    let mut random = Random::new(12);
    let names: Vec<String> =
        folder.tensors.keys().filter_map(|name| name.strip_suffix(".weight")).map(str::to_owned).collect();
    for name in names.into_iter().filter(|name| !name.ends_with("tok_embeddings")) {
        let rows = folder.tensors[&format!("{name}.weight")].dims()[0];
        let values: Vec<f32> = (0..rows).map(|_| 0.3 * random.number()).collect();
        folder.tensors.insert(format!("{name}.bias"), Tensor::from_vec(values, rows, &Device::Cpu).unwrap());
    }
    let batch = Batch::new(&cases("modernbert", "ids"));
    let wanted = load(folder.write()).hidden_states(&batch.ragged()).unwrap();
    assert!(distance(&wanted.data, &expected("modernbert", "hidden")) > 0.01, "the biases do nothing");
    for world in [2, 4] {
        let (found, _) = led(folder.write(), world, |engine| engine.hidden_states(&batch.ragged()).unwrap());
        let distance = distance(&found.data, &wanted.data);
        assert!(distance <= HIDDEN_TOLERANCE, "over {world}: hidden states differ by {distance}");
    }
}
