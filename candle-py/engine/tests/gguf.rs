//! GGUF files through a whole load: their logits against the reference's, and what is refused before anything is read.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{self, Content, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use candle_engine::{Error, inspect};
use common::{Batch, Folder, cases, distance, expected, golden, load, load_error, load_on, ways};
use tempfile::{TempDir, tempdir};

const GOLDEN: [&str; 3] = ["gguf-llama-q4_0", "gguf-qwen2-q8_0", "gguf-qwen3-q4_1"];

/// The same numbers, dequantised; float32 sums in another order.
const LOGIT_TOLERANCE: f32 = 1e-4;

fn file(name: &str) -> PathBuf {
    golden(name).join("model.gguf")
}

/// A file's metadata and tensors, to be changed and written elsewhere.
struct Parts {
    dir: TempDir,
    metadata: Vec<(String, Value)>,
    tensors: Vec<(String, QTensor)>,
}

impl Parts {
    fn of(name: &str) -> Self {
        let mut reader = fs::File::open(file(name)).unwrap();
        let content = Content::read(&mut reader).unwrap();
        let tensors = content
            .tensor_infos
            .keys()
            .map(|name| (name.clone(), content.tensor(&mut reader, name, &Device::Cpu).unwrap()))
            .collect();
        Self { dir: tempdir().unwrap(), metadata: content.metadata.into_iter().collect(), tensors }
    }

    fn write(&self) -> PathBuf {
        let path = self.dir.path().join("model.gguf");
        let metadata: Vec<_> = self.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let tensors: Vec<_> = self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        gguf_file::write(&mut fs::File::create(&path).unwrap(), &metadata, &tensors).unwrap();
        path
    }

    fn without(mut self, key: &str) -> Self {
        self.metadata.retain(|(there, _)| there != key);
        self.tensors.retain(|(there, _)| there != key);
        self
    }

    fn with(self, key: &str, value: Value) -> Self {
        let mut parts = self.without(key);
        parts.metadata.push((key.to_owned(), value));
        parts
    }

    fn with_zeros(self, name: &str, shape: &[usize]) -> Self {
        let mut parts = self.without(name);
        let zeros = Tensor::zeros(shape, candle_core::DType::F32, &Device::Cpu).unwrap();
        parts.tensors.push((name.to_owned(), QTensor::quantize(&zeros, GgmlDType::F32).unwrap()));
        parts
    }
}

/// Loading and inspecting refuse alike; gives what they say.
fn refusal(path: &Path) -> String {
    let (message, _) = load_error(path);
    assert_eq!(inspect(path, None).unwrap_err().to_string(), message);
    message
}

#[test]
fn logits_equal_the_reference_on_the_dequantised_weights() {
    for name in GOLDEN {
        for way in ways() {
            let engine = load_on(&file(name), way);
            let logits = engine.logits(&Batch::new(&cases(name, "ids")).ragged()).unwrap();
            let distance = distance(&logits.data, &expected(name, "logits"));
            assert!(distance <= LOGIT_TOLERANCE, "{name} on {:?}: {distance}", way);
        }
    }
}

#[test]
fn greedy_decoding_gives_the_references_ids() {
    for name in GOLDEN {
        let engine = load(&file(name));
        for (prompt, greedy) in cases(name, "ids").into_iter().zip(cases(name, "greedy")) {
            let mut sequence = prompt;
            for wanted in greedy {
                let logits = engine.logits(&Batch::new(std::slice::from_ref(&sequence)).ragged()).unwrap();
                let last = logits.data.chunks(logits.width).next_back().unwrap();
                let best = (0..last.len()).max_by(|a, b| last[*a].total_cmp(&last[*b])).unwrap() as u32;
                assert_eq!(best, wanted, "{name} after {} tokens", sequence.len());
                sequence.push(best);
            }
        }
    }
}

#[test]
fn a_file_and_its_folder_tell_the_facts_of_the_config() {
    for name in GOLDEN {
        let info = inspect(&file(name), None).unwrap();
        let config: serde_json::Value =
            serde_json::from_slice(&fs::read(golden(name).join("config.json")).unwrap()).unwrap();
        let size = |key: &str| usize::try_from(config[key].as_u64().unwrap()).unwrap();
        assert_eq!(info.model_type, config["model_type"].as_str().unwrap());
        assert!(info.architecture.ends_with("ForCausalLM"));
        assert_eq!((info.hidden_size, info.layers), (size("hidden_size"), size("num_hidden_layers")));
        assert_eq!((info.vocab_size, info.max_positions), (size("vocab_size"), size("max_position_embeddings")));
        assert_eq!(info.pooling, None);
        let alone = tempdir().unwrap();
        fs::copy(file(name), alone.path().join("any name.gguf")).unwrap();
        assert_eq!(inspect(alone.path(), None).unwrap(), info);
        assert_eq!(load(alone.path()).info(), &info);
    }
}

#[test]
fn tensors_that_do_not_fit_the_metadata_are_told_together() {
    let parts = Parts::of(GOLDEN[0])
        .without("blk.0.ffn_norm.weight")
        .with_zeros("blk.1.attn_q.weight", &[128, 64])
        .with_zeros("blk.0.attn_q.bias", &[128])
        .with_zeros("blk.7.attn_norm.weight", &[128])
        .with_zeros("adapter", &[4]);
    let message = refusal(&parts.write());
    for problem in [
        "missing tensor of shape [128]: `model.layers.0.post_attention_layernorm.weight`",
        "shape of blk.1.attn_q.weight is not [128, 128]: `[128, 64]`",
        "missing tensor of shape [128]: `model.layers.0.self_attn.o_proj.bias`",
        "unexpected tensor: `blk.7.attn_norm.weight`",
        "unexpected tensor: `adapter`",
    ] {
        assert!(message.contains(&format!("- {problem}")), "{problem}: {message}");
    }
}

#[test]
fn metadata_of_another_size_does_not_fit_and_never_allocates() {
    let huge = Parts::of(GOLDEN[0]).with("llama.block_count", Value::U32(u32::MAX));
    assert!(refusal(&huge.write()).contains("model.gguf: num_hidden_layers must be a whole number from"));
    let deep = Parts::of(GOLDEN[0]).with("llama.embedding_length", Value::U64(1 << 60));
    assert!(refusal(&deep.write()).contains("model.gguf: hidden_size must be a whole number from"));
    let vocab = Parts::of(GOLDEN[0]).with("llama.vocab_size", Value::U32(1 << 27));
    assert!(refusal(&vocab.write()).contains("shape of token_embd.weight is not [134217728, 128]: `[384, 128]`"));
    let heads = Parts::of(GOLDEN[0]).with("llama.attention.head_count", Value::U32(0));
    assert!(refusal(&heads.write()).contains("num_attention_heads must be a whole number from 1"));
}

#[test]
fn a_file_cut_short_is_refused_by_load_and_inspect_alike() {
    let whole = fs::read(file(GOLDEN[1])).unwrap();
    let dir = tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    for point in (0..whole.len() - 32).step_by(whole.len() / 60) {
        fs::write(&path, &whole[..point]).unwrap();
        let message = refusal(&path);
        assert!(message.contains("weights file is ") && message.contains("short"), "at {point}: {message}");
    }
    assert!(refusal(&dir.path().join("none.gguf")).starts_with("weights file is missing: `"));
}

#[test]
fn the_folders_own_chain_of_modules_is_followed() {
    let parts = Parts::of(GOLDEN[1]).with("qwen2.pooling_type", Value::U32(3));
    let info = inspect(&parts.write(), None).unwrap();
    assert_eq!(info.pooling.unwrap().to_string(), "last");
    fs::create_dir(parts.dir.path().join("1_Pooling")).unwrap();
    fs::write(parts.dir.path().join("1_Pooling/config.json"), r#"{"pooling_mode": "mean"}"#).unwrap();
    assert_eq!(inspect(parts.dir.path(), None).unwrap().pooling.unwrap().to_string(), "mean");
    let rank = Parts::of(GOLDEN[1]).with("qwen2.pooling_type", Value::U32(4));
    assert_eq!(refusal(&rank.write()), "GGUF qwen2.pooling_type is not supported: `rank`");
}

#[test]
fn a_folder_with_a_config_is_none_of_gguf() {
    let folder = Folder::from_golden("bert");
    let dir = folder.write();
    let info = inspect(dir, None).unwrap();
    fs::copy(file(GOLDEN[0]), dir.join("model.gguf")).unwrap();
    assert_eq!(inspect(dir, None).unwrap(), info);
    fs::remove_file(dir.join("model.safetensors")).unwrap();
    let error = inspect(dir, None).unwrap_err();
    assert!(matches!(error, Error::Model { .. }));
    assert!(error.to_string().starts_with("no model.safetensors or"));
    assert!(error.hint().unwrap().starts_with("it has a GGUF file: give its own path"));
}

#[test]
fn scaled_rotary_angles_reach_the_model() {
    let name = GOLDEN[2];
    let batch = Batch::new(&cases(name, "ids"));
    let plain = load(&file(name)).logits(&batch.ragged()).unwrap();
    let linear = Parts::of(name)
        .with("qwen3.rope.scaling.type", Value::String("linear".into()))
        .with("qwen3.rope.scaling.factor", Value::F32(4.0));
    let scaled = load(&linear.write()).logits(&batch.ragged()).unwrap();
    assert!(distance(&plain.data, &scaled.data) > 1e-2);
    let one = Parts::of(name)
        .with("qwen3.rope.scaling.type", Value::String("linear".into()))
        .with("qwen3.rope.scaling.factor", Value::F32(1.0));
    assert!(distance(&plain.data, &load(&one.write()).logits(&batch.ragged()).unwrap().data) < 1e-6);
}
