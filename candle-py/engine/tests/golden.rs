//! The engine's numbers against those of an independent implementation, on every instruction set of this machine and on Candle's tensors.

#![allow(clippy::unwrap_used)]

mod common;

use candle_engine::{EmbedOptions, Pooling};
use common::{Batch, Folder, cases, distance, expected, golden, load, load_on, ways};
use serde_json::json;

/// float32 through a handful of layers, sums in another order.
const TOLERANCE: f32 = 2e-5;

const ENCODERS: [&str; 5] = ["bert", "roberta", "xlm-roberta", "distilbert", "modernbert"];

#[test]
fn hidden_states_equal_the_reference() {
    for name in ENCODERS {
        for way in ways() {
            let batch = Batch::new(&cases(name, "ids"));
            let output = load_on(&golden(name), way).hidden_states(&batch.ragged()).unwrap();
            let distance = distance(&output.data, &expected(name, "hidden"));
            assert!(distance <= TOLERANCE, "{name} on {:?}: {distance}", way);
            assert!(output.bad_rows.is_empty());
        }
    }
}

#[test]
fn normalised_mean_and_cls_equal_the_reference() {
    for name in ENCODERS {
        for mode in ["mean", "cls"] {
            let pooling: Pooling = mode.parse().unwrap();
            let options =
                EmbedOptions { pooling: Some(pooling), normalize: Some(true), dimensions: None, skip_tokens: 0 };
            let batch = Batch::new(&cases(name, "ids"));
            let output = load(&golden(name)).embed(&batch.ragged(), &options).unwrap();
            let distance = distance(&output.data, &expected(name, mode));
            assert!(distance <= TOLERANCE, "{name} {mode}: {distance}");
        }
    }
}

#[test]
fn logits_equal_the_reference() {
    for name in ["bert-classifier", "bert-cross-encoder"] {
        for way in ways() {
            let batch = Batch::new(&cases(name, "ids")).with_types(&cases(name, "token_type_ids"));
            let output = load_on(&golden(name), way).classify(&batch.ragged()).unwrap();
            let distance = distance(&output.data, &expected(name, "logits"));
            assert!(distance <= TOLERANCE, "{name} on {:?}: {distance}", way);
        }
    }
}

#[test]
fn token_types_matter() {
    let name = "bert-classifier";
    let batch = Batch::new(&cases(name, "ids"));
    let output = load(&golden(name)).classify(&batch.ragged()).unwrap();
    assert!(distance(&output.data, &expected(name, "logits")) > TOLERANCE);
}

#[test]
fn older_spellings_of_modernbert_layers_give_the_same_numbers() {
    let mut folder = Folder::from_golden("modernbert");
    let config = folder.config.as_object_mut().unwrap();
    config.remove("layer_types");
    config.remove("rope_parameters");
    config.insert("global_attn_every_n_layers".into(), json!(3));
    config.insert("global_rope_theta".into(), json!(160_000.0));
    config.insert("local_rope_theta".into(), json!(10_000.0));
    let batch = Batch::new(&cases("modernbert", "ids"));
    let output = load(folder.write()).hidden_states(&batch.ragged()).unwrap();
    assert!(distance(&output.data, &expected("modernbert", "hidden")) <= TOLERANCE);

    folder.config["local_rope_theta"] = json!(20_000.0);
    let other = load(folder.write()).hidden_states(&batch.ragged()).unwrap();
    assert!(distance(&output.data, &other.data) > TOLERANCE);
}

#[test]
fn prefixes_and_heads_of_other_tasks_do_not_matter() {
    let cases_of = |name: &str| Batch::new(&cases(name, "ids"));
    for (name, prefix, extra, architecture) in [
        ("bert", "bert.", "cls.predictions.bias", "BertForMaskedLM"),
        ("roberta", "roberta.", "lm_head.bias", "RobertaForMaskedLM"),
        ("xlm-roberta", "roberta.", "lm_head.dense.weight", "XLMRobertaForMaskedLM"),
        ("distilbert", "distilbert.", "vocab_projector.bias", "DistilBertForMaskedLM"),
        ("modernbert", "model.", "decoder.bias", "ModernBertForMaskedLM"),
        ("bert", "model.", "cls.seq_relationship.weight", "BertForPreTraining"),
    ] {
        let mut folder = Folder::from_golden(name);
        folder.rename(|old| format!("{prefix}{old}"));
        folder.zeros(extra, &[3]);
        folder.config["architectures"] = json!([architecture]);
        let output = load(folder.write()).hidden_states(&cases_of(name).ragged()).unwrap();
        assert!(distance(&output.data, &expected(name, "hidden")) <= TOLERANCE, "{name}");
    }
}

#[test]
fn gamma_and_beta_are_the_old_names_of_a_norm() {
    let mut folder = Folder::from_golden("bert");
    folder
        .rename(|name| name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"));
    let batch = Batch::new(&cases("bert", "ids"));
    let output = load(folder.write()).hidden_states(&batch.ragged()).unwrap();
    assert!(distance(&output.data, &expected("bert", "hidden")) <= TOLERANCE);
}

#[test]
fn an_encoder_needs_no_pooler_and_no_architectures() {
    let mut folder = Folder::from_golden("bert");
    folder.tensors.retain(|name, _| !name.starts_with("pooler"));
    folder.config.as_object_mut().unwrap().remove("architectures");
    let engine = load(folder.write());
    assert_eq!(engine.info().architecture, "BertModel");
    let output = engine.hidden_states(&Batch::new(&cases("bert", "ids")).ragged()).unwrap();
    assert!(distance(&output.data, &expected("bert", "hidden")) <= TOLERANCE);
}

#[test]
fn shards_are_one_model() {
    let folder = Folder::from_golden("bert");
    let shard_of = |name: &str| if name.contains("layer.1") { "b.safetensors" } else { "a.safetensors" };
    let map: serde_json::Map<_, _> = folder.tensors.keys().map(|name| (name.clone(), json!(shard_of(name)))).collect();
    folder.file("config.json", &folder.config);
    folder.file("model.safetensors.index.json", &json!({"metadata": {}, "weight_map": map}));
    for shard in ["a.safetensors", "b.safetensors"] {
        folder.write_tensors(shard, |name| shard_of(name) == shard);
    }
    let output = load(folder.dir.path()).hidden_states(&Batch::new(&cases("bert", "ids")).ragged()).unwrap();
    assert!(distance(&output.data, &expected("bert", "hidden")) <= TOLERANCE);
}

#[test]
fn facts_are_those_of_the_configuration() {
    let info = load(&golden("roberta")).info().clone();
    assert_eq!((info.hidden_size, info.layers, info.vocab_size, info.type_vocab_size), (48, 2, 384, 1));
    // 130 rows, of which the padding token's and those before it hold no text.
    assert_eq!(info.max_positions, 128);
    assert_eq!(info.labels, None);

    let info = candle_engine::inspect(&golden("bert-classifier"), None).unwrap();
    assert_eq!(info.labels.unwrap().len(), 5);

    let info = candle_engine::inspect(&golden("st-mean-dense"), None).unwrap();
    assert_eq!(info.pooling.unwrap().to_string(), "mean");
    assert!(info.normalize);
    assert_eq!(info.embedding_dim, Some(16));
}
