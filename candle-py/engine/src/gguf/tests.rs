//! GGUF files as they should be, and damaged in every place: what is read, and what is refused by name.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use tempfile::{TempDir, tempdir};

use super::{GgufFile, GgufValue, find_gguf};
use crate::config::{read_gguf_config, read_gguf_pooling};
use crate::error::Result;
use crate::pooling::PoolingMode;
use crate::weights::Checkpoint;

const GOLDEN: [&str; 3] = ["gguf-llama-q4_0", "gguf-qwen2-q8_0", "gguf-qwen3-q4_1"];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/golden").join(name)
}

/// A file in a folder of its own, written by Candle.
struct Written {
    dir: TempDir,
    metadata: Vec<(String, gguf_file::Value)>,
    tensors: Vec<(String, QTensor)>,
}

impl Written {
    /// A Llama of one layer: metadata and a table, no other tensors.
    fn llama() -> Self {
        let count = gguf_file::Value::U32;
        let metadata = [
            ("general.architecture", gguf_file::Value::String("llama".into())),
            ("llama.block_count", count(1)),
            ("llama.context_length", count(131_072)),
            ("llama.embedding_length", count(256)),
            ("llama.feed_forward_length", count(512)),
            ("llama.attention.head_count", count(4)),
            ("llama.attention.head_count_kv", count(2)),
            ("llama.attention.layer_norm_rms_epsilon", gguf_file::Value::F32(1e-5)),
            ("llama.rope.freq_base", gguf_file::Value::F32(500_000.0)),
        ];
        let metadata = metadata.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        let mut written = Self { dir: tempdir().unwrap(), metadata, tensors: Vec::new() };
        written.tensor("token_embd.weight", &numbered(&[384, 256]), GgmlDType::F32);
        written
    }

    fn set(&mut self, key: &str, value: gguf_file::Value) {
        self.metadata.retain(|(there, _)| there != key);
        self.metadata.push((key.to_owned(), value));
    }

    fn tensor(&mut self, name: &str, tensor: &Tensor, kind: GgmlDType) {
        self.tensors.push((name.to_owned(), QTensor::quantize(tensor, kind).unwrap()));
    }

    fn path(&self) -> PathBuf {
        let path = self.dir.path().join("model.gguf");
        let metadata: Vec<_> = self.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let tensors: Vec<_> = self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        gguf_file::write(&mut fs::File::create(&path).unwrap(), &metadata, &tensors).unwrap();
        path
    }

    fn config(&self) -> Result<Value> {
        config(&self.path())
    }

    fn refusal(&self) -> String {
        self.config().unwrap_err().to_string()
    }
}

fn numbered(shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    Tensor::arange(0.0_f32, count as f32, &Device::Cpu).unwrap().reshape(shape).unwrap()
}

fn numbers(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn config(path: &Path) -> Result<Value> {
    let object = read_gguf_config(&GgufFile::open(path)?)?;
    Ok(object
        .keys()
        .map(|key| (key.to_owned(), object.get(key).cloned().unwrap()))
        .collect::<serde_json::Map<_, _>>()
        .into())
}

/// All that a load does before it reads tensors.
fn check(path: &Path) -> Result<Checkpoint> {
    read_gguf_config(&GgufFile::open(path)?)?;
    let file = GgufFile::open(path)?;
    read_gguf_pooling(&file)?;
    for key in file.keys() {
        file.value(key)?;
    }
    Checkpoint::from_gguf(file)
}

#[test]
fn metadata_amount_to_the_config_of_the_same_model() {
    for name in GOLDEN {
        let there: Value = serde_json::from_slice(&fs::read(golden(name).join("config.json")).unwrap()).unwrap();
        let made = config(&golden(name).join("model.gguf")).unwrap();
        for (key, value) in made.as_object().unwrap() {
            match key.as_str() {
                "architectures" => assert_eq!(
                    value[0].as_str().unwrap().strip_suffix("ForCausalLM").unwrap().to_lowercase(),
                    there["model_type"].as_str().unwrap()
                ),
                "rope_theta" => assert_eq!(value, &there["rope_parameters"][key]),
                "rms_norm_eps" => assert_eq!(value.as_f64().unwrap() as f32, there[key].as_f64().unwrap() as f32),
                "head_dim" if there.get(key).is_none() => assert_eq!(value, &json!(32)),
                _ => assert_eq!(value, &there[key], "{name} {key}"),
            }
        }
    }
}

#[test]
fn every_tensor_of_a_real_layout_has_its_checkpoint_name() {
    for name in GOLDEN {
        let checkpoint = check(&golden(name).join("model.gguf")).unwrap();
        assert!(checkpoint.tensors().keys().all(|name| name.starts_with("model.") || name == "lm_head.weight"));
        assert_eq!(checkpoint.tensors()["model.layers.1.mlp.down_proj.weight"].shape, [128, 256]);
        assert_eq!(checkpoint.tensors().contains_key("model.layers.0.self_attn.q_norm.weight"), name.contains("qwen3"));
        for key in checkpoint.tensors().keys() {
            let tensor = checkpoint.read(key).unwrap();
            assert_eq!((tensor.dtype(), tensor.dims()), (DType::F32, checkpoint.tensors()[key].shape.as_slice()));
            assert!(numbers(&tensor).iter().all(|number| number.is_finite()));
        }
    }
}

#[test]
fn every_kind_is_read_as_candle_reads_it() {
    use GgmlDType::{BF16, F16, F32, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    let weights = (numbered(&[8, 256]) / 100.0).unwrap().sin().unwrap();
    for kind in [F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4K, Q5K, Q6K] {
        let mut written = Written::llama();
        written.tensor("blk.0.ffn_up.weight", &weights, kind);
        let expected = written.tensors[1].1.dequantize(&Device::Cpu).unwrap();
        let there = check(&written.path()).unwrap().read("model.layers.0.mlp.up_proj.weight").unwrap();
        assert_eq!(numbers(&there), numbers(&expected), "{kind:?}");
        let far = numbers(&(there - &weights).unwrap()).iter().fold(0.0_f32, |most, each| most.max(each.abs()));
        assert!(far < 0.1, "{kind:?}: {far}");
    }
}

#[test]
fn rotary_rows_of_llama_alone_are_put_in_halves() {
    for (architecture, order) in [("llama", [0.0, 2.0, 1.0, 3.0]), ("qwen2", [0.0, 1.0, 2.0, 3.0])] {
        let mut written = Written::llama();
        for (key, _) in &mut written.metadata {
            *key = key.replace("llama", architecture);
        }
        written.set("general.architecture", gguf_file::Value::String(architecture.into()));
        // Four heads of four rows; two heads of four.
        written.tensor("blk.0.attn_q.weight", &numbered(&[16, 1]), GgmlDType::F32);
        written.tensor("blk.0.attn_k.bias", &numbered(&[8]), GgmlDType::F32);
        written.tensor("blk.0.attn_v.weight", &numbered(&[8, 1]), GgmlDType::F32);
        let checkpoint = check(&written.path()).unwrap();
        let rows = |name: &str| numbers(&checkpoint.read(&format!("model.layers.0.self_attn.{name}")).unwrap());
        let halves =
            |heads: u8| (0..heads).flat_map(|head| order.map(|row| f32::from(head) * 4.0 + row)).collect::<Vec<_>>();
        assert_eq!(rows("q_proj.weight"), halves(4));
        assert_eq!(rows("k_proj.bias"), halves(2));
        assert_eq!(rows("v_proj.weight"), numbers(&numbered(&[8])));
    }
}

#[test]
fn scaled_rotary_angles_become_their_settings() {
    let mut written = Written::llama();
    assert_eq!(written.config().unwrap().get("rope_scaling"), None);
    written.set("llama.rope.scaling.type", gguf_file::Value::String("yarn".into()));
    assert!(written.refusal().contains("GGUF metadata lacks a key: `llama.rope.scaling.factor`"));
    written.set("llama.rope.scaling.factor", gguf_file::Value::F32(4.0));
    written.set("llama.rope.scaling.original_context_length", gguf_file::Value::U32(32_768));
    written.set("llama.rope.scaling.yarn_beta_fast", gguf_file::Value::F32(16.0));
    let expected =
        json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768, "beta_fast": 16.0});
    assert_eq!(written.config().unwrap()["rope_scaling"], expected);
    written.set("llama.rope.scaling.type", gguf_file::Value::String("linear".into()));
    assert_eq!(written.config().unwrap()["rope_scaling"], json!({"rope_type": "linear", "factor": 4.0}));
    written.set("llama.rope.scaling.type", gguf_file::Value::String("longrope".into()));
    assert_eq!(written.refusal(), "GGUF llama.rope.scaling.type is not supported: `longrope`");
}

#[test]
fn the_factors_of_llama_3_are_known_and_others_refused() {
    let factor_of = |index: usize| {
        let wave = 2.0 * std::f64::consts::PI * 500_000_f64.powf(index as f64 / 32.0);
        let smooth = (8192.0 / wave - 1.0) / 3.0;
        let factor = if wave < 2048.0 {
            1.0
        } else if wave > 8192.0 {
            32.0
        } else {
            1.0 / ((1.0 - smooth) / 32.0 + smooth)
        };
        factor as f32
    };
    let factors: Vec<f32> = (0..32).map(factor_of).collect();
    let mut written = Written::llama();
    written.tensor("rope_freqs.weight", &Tensor::new(factors.as_slice(), &Device::Cpu).unwrap(), GgmlDType::F32);
    let expected = json!({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192});
    assert_eq!(written.config().unwrap()["rope_scaling"], expected);
    assert!(!check(&written.path()).unwrap().tensors().contains_key("rope_freqs.weight"));
    written.tensors.pop();
    written.tensor("rope_freqs.weight", &numbered(&[32]), GgmlDType::F32);
    assert_eq!(written.refusal(), "rotary factors are not those of Llama 3: `rope_freqs.weight`");
}

#[test]
fn what_changes_the_computation_is_refused_by_name() {
    let cases = [
        (
            "general.architecture",
            gguf_file::Value::String("mamba".into()),
            "GGUF architecture is not supported: `mamba`",
        ),
        ("llama.expert_count", gguf_file::Value::U32(8), "GGUF llama.expert_count is not supported: `8`"),
        ("llama.logit_scale", gguf_file::Value::F32(2.0), "GGUF metadata key is not supported: `llama.logit_scale`"),
        (
            "llama.attention.causal",
            gguf_file::Value::Bool(false),
            "GGUF llama.attention.causal is not supported: `false`",
        ),
        (
            "llama.attention.value_length",
            gguf_file::Value::U32(32),
            "GGUF llama.attention.value_length is not the head width 64: `32`",
        ),
        (
            "llama.attention.sliding_window",
            gguf_file::Value::U32(4096),
            "GGUF llama.attention.sliding_window is not supported: `4096`",
        ),
        (
            "llama.block_count",
            gguf_file::Value::String("one".into()),
            "GGUF llama.block_count must be one whole number: `one`",
        ),
        ("split.count", gguf_file::Value::U16(3), "GGUF files in several parts are not supported: `split.count 3`"),
    ];
    for (key, value, message) in cases {
        let mut written = Written::llama();
        written.set(key, value);
        assert_eq!(written.refusal(), message);
    }
    let mut written = Written::llama();
    written.metadata.retain(|(key, _)| !key.ends_with("head_count") && !key.ends_with("_epsilon"));
    let message = written.refusal();
    assert!(message.contains("lacks a key: `llama.attention.head_count`"), "{message}");
    assert!(message.contains("lacks a key: `llama.attention.layer_norm_rms_epsilon`"), "{message}");
}

#[test]
fn an_embedding_model_tells_its_pooling() {
    let mut written = Written::llama();
    assert_eq!(read_gguf_pooling(&GgufFile::open(&written.path()).unwrap()).unwrap(), None);
    written.set("llama.pooling_type", gguf_file::Value::U32(3));
    assert_eq!(read_gguf_pooling(&GgufFile::open(&written.path()).unwrap()).unwrap(), Some(PoolingMode::Last));
}

#[test]
fn a_file_cut_short_anywhere_is_refused() {
    let dir = tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    for name in GOLDEN {
        let whole = fs::read(golden(name).join("model.gguf")).unwrap();
        fs::write(&path, &whole).unwrap();
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        let last_tensor_end = whole.len() - 32;
        let points = (0..4096).chain((4096..last_tensor_end).step_by(1009));
        for point in points.collect::<Vec<_>>().into_iter().rev() {
            file.set_len(point as u64).unwrap();
            let message = check(&path).unwrap_err().to_string();
            assert!(message.contains("weights file is ") && message.contains("short"), "at {point}: {message}");
        }
    }
}

#[test]
fn a_header_damaged_anywhere_never_panics() {
    let dir = tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let whole = fs::read(golden(GOLDEN[0]).join("model.gguf")).unwrap();
    fs::write(&path, &whole).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    let mut refused = 0;
    for (index, byte) in whole.iter().enumerate().take(2048) {
        for damage in [0x00, 0x01, 0x09, 0x7F, 0x80, 0xFF] {
            file.write_all_at(&[damage], index as u64).unwrap();
            refused += usize::from(check(&path).is_err());
        }
        file.write_all_at(&[*byte], index as u64).unwrap();
    }
    assert!(refused > 4096);
    check(&path).unwrap();
}

#[test]
fn damage_is_told_by_what_it_is() {
    let dir = tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let le = |number: u64| number.to_le_bytes().to_vec();
    let entry = |key: &str, kind: u32, value: &[u8]| {
        [&le(key.len() as u64)[..], key.as_bytes(), &kind.to_le_bytes(), value].concat()
    };
    let header = |version: u32, tensors: u64, entries: u64, rest: &[u8]| {
        [&b"GGUF"[..], &version.to_le_bytes(), &le(tensors), &le(entries), rest].concat()
    };
    let list = |kind: u32, count: u64| [&kind.to_le_bytes()[..], &le(count)].concat();
    let cases = [
        (b"\x80\x02}q\x00.".to_vec(), "weights file is no GGUF file"),
        (header(1, 0, 0, &[]), "GGUF version is not supported (version 1;"),
        (header(3_u32.swap_bytes(), 0, 0, &[]), "GGUF file is big-endian"),
        (header(3, u64::MAX, 0, &[]), "damaged header (18446744073709551615 tensors"),
        (header(3, 0, 1 << 40, &[]), "damaged header (1099511627776 entries"),
        (header(3, 0, 1, &le(u64::MAX)), "cut short inside its header"),
        (header(3, 0, 1, &entry("a", 13, &[0; 8])), "a value of kind 13) at a"),
        (header(3, 0, 1, &entry("a", 7, &[2])), "truth value 2) at a"),
        (header(3, 0, 1, &entry("a", 9, &list(8, 1 << 60))), "more than 8388608 values in lists) at a"),
        (header(3, 0, 1, &entry("a", 9, &list(9, 1))), "list of lists, which is not supported at a"),
        (header(3, 0, 1, &entry("a", 9, &list(12, 1 << 20))), "cut short inside its header at a"),
        (header(3, 0, 2, &[entry("a", 7, &[1]), entry("a", 7, &[1])].concat()), "a key twice (a)"),
        (header(3, 0, 1, &entry("general.alignment", 4, &[0; 4])), "general.alignment is no power of two"),
    ];
    for (bytes, message) in cases {
        fs::write(&path, bytes).unwrap();
        let error = GgufFile::open(&path).unwrap_err().to_string();
        assert!(error.contains(message) && error.ends_with("model.gguf`"), "{message}: {error}");
    }
}

#[test]
fn kinds_that_cannot_be_read_are_named_once_each() {
    let path = Written::llama();
    let mut bytes = fs::read(path.path()).unwrap();
    let name = b"token_embd.weight";
    let at = bytes.windows(name.len()).position(|window| window == name).unwrap() + name.len() + 4 + 2 * 8;
    let file = path.dir.path().join("model.gguf");
    for (kind, shown) in [(23_u8, "IQ4_XS"), (10, "Q2_K"), (99, "kind 99")] {
        bytes[at] = kind;
        fs::write(&file, &bytes).unwrap();
        let error = check(&file).unwrap_err();
        let expected = format!("kind of tensor token_embd.weight is not supported: `{shown}`");
        assert_eq!(error.to_string(), expected);
        assert!(error.hint().unwrap().contains("Q4_K"));
    }
}

#[test]
fn a_folder_means_its_only_gguf_file() {
    let written = Written::llama();
    let path = written.path();
    assert_eq!(find_gguf(written.dir.path()).unwrap(), Some(path.clone()));
    assert_eq!(find_gguf(&path).unwrap(), Some(path));
    fs::write(written.dir.path().join("other.GGUF"), b"").unwrap();
    assert!(find_gguf(written.dir.path()).unwrap_err().to_string().starts_with("folder holds 2 GGUF files: `"));
    fs::write(written.dir.path().join("config.json"), b"{}").unwrap();
    assert_eq!(find_gguf(written.dir.path()).unwrap(), None);
}

#[test]
fn lists_are_read_when_asked_for() {
    let mut written = Written::llama();
    let texts = ["a", "é", ""].map(|text| gguf_file::Value::String(text.into())).to_vec();
    written.set("tokenizer.ggml.tokens", gguf_file::Value::Array(texts));
    let file = GgufFile::open(&written.path()).unwrap();
    assert_eq!(file.list_len("tokenizer.ggml.tokens"), Some(3));
    let expected = ["a", "é", ""].map(|text| GgufValue::Text(text.to_owned())).to_vec();
    assert_eq!(file.value("tokenizer.ggml.tokens").unwrap(), Some(GgufValue::List(expected)));
    assert_eq!(config(file.path()).unwrap()["vocab_size"], json!(3));
}
