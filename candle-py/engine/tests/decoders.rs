//! Decoders against the numbers of an independent implementation, on every instruction set of this machine and on Candle's tensors.

#![allow(clippy::unwrap_used)]

mod common;

use candle_core::{DType, Device, Tensor};
use candle_engine::{EmbedOptions, Engine, LoadOptions, Pooling};
use common::{Batch, Folder, cases, distance, expected, golden, load, load_on, same_bits, ways};
use serde_json::json;

const DECODERS: [&str; 4] = ["qwen2", "qwen2-untied", "qwen3", "llama"];

/// float32 through a handful of layers, sums in another order.
const HIDDEN_TOLERANCE: f32 = 2e-5;
const LOGIT_TOLERANCE: f32 = 5e-5;

fn last() -> EmbedOptions {
    let pooling: Pooling = "last".parse().unwrap();
    EmbedOptions { pooling: Some(pooling), normalize: Some(true), dimensions: None, skip_tokens: 0 }
}

#[test]
fn logits_and_hidden_states_equal_the_reference() {
    for name in DECODERS {
        for way in ways() {
            let engine = load_on(&golden(name), way);
            let batch = Batch::new(&cases(name, "ids"));
            let hidden = distance(&engine.hidden_states(&batch.ragged()).unwrap().data, &expected(name, "hidden"));
            assert!(hidden <= HIDDEN_TOLERANCE, "{name} on {:?}: {hidden}", way);
            let logits = engine.logits(&batch.ragged()).unwrap();
            assert_eq!(logits.width, 384);
            let distance = distance(&logits.data, &expected(name, "logits"));
            assert!(distance <= LOGIT_TOLERANCE, "{name} on {:?}: {distance}", way);
        }
    }
}

#[test]
fn last_token_vectors_equal_the_reference() {
    for name in DECODERS {
        let batch = Batch::new(&cases(name, "ids"));
        let output = load(&golden(name)).embed(&batch.ragged(), &last()).unwrap();
        let wanted = expected(name, "last");
        for (found, wanted) in output.data.chunks(output.width).zip(wanted.chunks(output.width)) {
            let cosine: f64 = found.iter().zip(wanted).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            assert!(cosine >= 0.999_999, "{name}: {cosine}");
        }
    }
}

#[test]
fn sequences_alone_together_and_in_any_order_are_bit_equal() {
    for name in DECODERS {
        for threads in [1, 2] {
            let engine =
                Engine::load(&golden(name), &LoadOptions { threads: Some(threads), ..LoadOptions::default() }).unwrap();
            let sequences = cases(name, "ids");
            let logits = |sequences: &[Vec<u32>]| engine.logits(&Batch::new(sequences).ragged()).unwrap();
            let reversed: Vec<_> = sequences.iter().rev().cloned().collect();
            for order in [sequences.clone(), reversed, [&sequences[3..], &sequences[..3]].concat()] {
                let each: Vec<f32> =
                    order.iter().flat_map(|sequence| logits(std::slice::from_ref(sequence)).data).collect();
                assert!(same_bits(&logits(&order), &each), "{name}");
            }
        }
    }
}

#[test]
fn log_probabilities_are_those_of_the_logits() {
    for name in DECODERS {
        let engine = load(&golden(name));
        let sequences = cases(name, "ids");
        let batch = Batch::new(&sequences);
        let found = engine.token_logprobs(&batch.ragged()).unwrap();
        assert_eq!((found.rows(), found.width), (batch.ids.len(), 1));
        let logits = expected(name, "logits");
        let rows: Vec<&[f32]> = logits.chunks(384).collect();
        let mut row = 0;
        for sequence in &sequences {
            for (at, id) in sequence.iter().enumerate() {
                let wanted = if at == 0 { 0.0 } else { log_softmax(rows[row - 1], *id as usize) };
                assert!((f64::from(found.data[row]) - wanted).abs() <= 5e-5, "{name}: token {row}");
                row += 1;
            }
        }
        let each: Vec<f32> = sequences
            .iter()
            .flat_map(|sequence| {
                engine.token_logprobs(&Batch::new(std::slice::from_ref(sequence)).ragged()).unwrap().data
            })
            .collect();
        assert!(same_bits(&found, &each), "{name}");
    }
}

fn log_softmax(logits: &[f32], id: usize) -> f64 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|logit| f64::from(logit - most).exp()).sum();
    f64::from(logits[id] - most) - total.ln()
}

#[test]
fn a_classifier_reads_the_last_token() {
    let mut folder = Folder::from_golden("qwen2");
    folder.config["architectures"] = json!(["Qwen2ForSequenceClassification"]);
    folder.config["id2label"] = json!({"0": "no", "1": "yes", "2": "maybe"});
    let score: Vec<f32> = (0..3 * 64).map(|index| (index as f32 * 0.7).sin()).collect();
    folder.tensors.insert("score.weight".into(), Tensor::from_vec(score.clone(), &[3, 64], &Device::Cpu).unwrap());
    let engine = load(folder.write());
    assert_eq!(engine.info().labels.as_deref().unwrap(), ["no", "yes", "maybe"]);
    assert_eq!(engine.info().tied, None);
    let sequences = cases("qwen2", "ids");
    let batch = Batch::new(&sequences);
    let found = engine.classify(&batch.ragged()).unwrap();
    let hidden = expected("qwen2", "hidden");
    let ends = batch.offsets[1..].iter().map(|end| &hidden[(*end as usize - 1) * 64..*end as usize * 64]);
    let wanted: Vec<f32> = ends
        .flat_map(|row| score.chunks(64).map(move |weight| weight.iter().zip(row).map(|(w, x)| w * x).sum::<f32>()))
        .collect();
    assert!(distance(&found.data, &wanted) <= 1e-4);
    let error = engine.logits(&batch.ragged()).unwrap_err();
    assert_eq!(error.to_string(), "model has no language model head: `Qwen2ForSequenceClassification`");
    assert!(engine.session().is_err());
}

#[test]
fn names_with_and_without_prefix_and_heads_of_other_tasks_do_not_matter() {
    for (prefix, extra, architecture) in [
        ("", "score.weight", "Qwen3ForCausalLM"),
        ("model.", "lm_head.weight", "Qwen3ForCausalLM"),
        ("model.", "model.layers.1.self_attn.rotary_emb.inv_freq", "Qwen3Model"),
    ] {
        let mut folder = Folder::from_golden("qwen3");
        folder.rename(|name| format!("{prefix}{}", name.strip_prefix("model.").unwrap()));
        folder.zeros(extra, &[3]);
        folder.config["architectures"] = json!([architecture]);
        let engine = load(folder.write());
        let output = engine.hidden_states(&Batch::new(&cases("qwen3", "ids")).ragged()).unwrap();
        assert!(distance(&output.data, &expected("qwen3", "hidden")) <= HIDDEN_TOLERANCE);
    }
}

#[test]
fn a_sentence_transformers_folder_pools_as_its_files_say() {
    let mut folder = Folder::from_golden("llama");
    // Models for embeddings leave the head out though their class has one.
    folder.tensors.remove("lm_head.weight");
    let kind = |name: &str| format!("sentence_transformers.models.{name}");
    let module = |index: usize, path: &str, name: &str| json!({"idx": index, "path": path, "type": kind(name)});
    let modules =
        [module(0, "", "Transformer"), module(1, "1_Pooling", "Pooling"), module(2, "2_Normalize", "Normalize")];
    folder.file("modules.json", &json!(modules));
    folder.file("1_Pooling/config.json", &json!({"word_embedding_dimension": 64, "pooling_mode_lasttoken": true}));
    let engine = load(folder.write());
    let info = engine.info();
    assert_eq!((info.kind, info.embedding_dim, info.tied), ("decoder", Some(64), None));
    let output = engine.embed(&Batch::new(&cases("llama", "ids")).ragged(), &EmbedOptions::default()).unwrap();
    assert!(distance(&output.data, &expected("llama", "last")) <= HIDDEN_TOLERANCE);
}

#[test]
fn facts_are_those_of_the_configuration() {
    let info = load(&golden("qwen3")).info().clone();
    assert_eq!(info, candle_engine::inspect(&golden("qwen3"), None).unwrap());
    assert_eq!((info.kind, info.model_type.as_str()), ("decoder", "qwen3"));
    assert_eq!((info.heads, info.kv_heads, info.head_dim, info.tied), (4, 2, 32, Some(true)));
    assert_eq!((info.max_positions, info.vocab_size, info.pooling), (256, 384, None));
    let info = candle_engine::inspect(&golden("llama"), None).unwrap();
    assert_eq!((info.heads, info.kv_heads, info.head_dim, info.tied), (8, 4, 8, Some(false)));
    let info = candle_engine::inspect(&golden("bert"), None).unwrap();
    assert_eq!((info.kind, info.tied), ("encoder", None));
}

#[test]
fn weights_stored_in_bfloat16_are_computed_in_float32() {
    let mut folder = Folder::from_golden("qwen3");
    folder.tensors.values_mut().for_each(|tensor| *tensor = tensor.to_dtype(DType::BF16).unwrap());
    let half = load(folder.write());
    folder.tensors.values_mut().for_each(|tensor| *tensor = tensor.to_dtype(DType::F32).unwrap());
    let batch = Batch::new(&cases("qwen3", "ids"));
    let whole = load(folder.write()).logits(&batch.ragged()).unwrap();
    assert!(same_bits(&half.logits(&batch.ragged()).unwrap(), &whole.data));
}
