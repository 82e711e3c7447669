//! A GGUF file's metadata as the `config.json` that Hugging Face has for the same model, so that one reader checks both.
//! Refuses by name what would change the computation and has no such key.
//!
//! Source of the keys: llama.cpp's `gguf-py/gguf/constants.py`.

use std::f64::consts::PI;

use serde_json::{Map, Value, json};

use super::JsonObject;
use crate::error::{Error, Problems, Result};
use crate::gguf::{GgufFile, GgufValue};
use crate::pooling::PoolingMode;
use crate::weights::{ROPE_FACTORS, read_plain};

/// Architectures, and what Hugging Face calls their classes.
const ARCHITECTURES: [(&str, &str); 3] =
    [("llama", "LlamaForCausalLM"), ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")];

/// Keys of an architecture that this file reads, or that change nothing.
const KNOWN_KEYS: [&str; 28] = [
    "attention.causal",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "pooling_type",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "tensor_data_layout",
    "vocab_size",
];

/// The configuration that a file's metadata amounts to.
///
/// # Errors
/// [`Error::Model`] for an architecture that is not supported, a file in several parts, or a value that is missing, of
/// another type or of no support; all that is found is told together.
pub fn read_gguf_config(file: &GgufFile) -> Result<JsonObject> {
    let architecture = match file.value("general.architecture")? {
        Some(GgufValue::Text(name)) => name,
        _ => return Err(Error::file(file.path(), "GGUF file does not name an architecture (general.architecture)")),
    };
    let Some((_, class)) = ARCHITECTURES.iter().find(|(name, _)| *name == architecture) else {
        let shown: String = architecture.chars().take(80).collect();
        return Err(Error::model(format!("GGUF architecture is not supported: `{shown}`"))
            .with_hint(format!("supported here: {}", ARCHITECTURES.map(|(name, _)| name).join(", "))));
    };
    let mut reader = Reader { file, prefix: format!("{architecture}."), problems: Problems::default() };
    let config = reader.config(&architecture, class)?;
    reader.problems.into_result(file.path())?;
    Ok(JsonObject::nested(file.path(), &config))
}

/// How an embedding model's file pools tokens, if it says.
///
/// # Errors
/// [`Error::Model`] for a way that is not supported.
pub fn read_gguf_pooling(file: &GgufFile) -> Result<Option<PoolingMode>> {
    let Some(GgufValue::Text(architecture)) = file.value("general.architecture")? else { return Ok(None) };
    let key = format!("{architecture}.pooling_type");
    match file.value(&key)?.map(|value| whole(&value)) {
        None | Some(Some(0)) => Ok(None),
        Some(Some(1)) => Ok(Some(PoolingMode::Mean)),
        Some(Some(2)) => Ok(Some(PoolingMode::Cls)),
        Some(Some(3)) => Ok(Some(PoolingMode::Last)),
        Some(Some(4)) => Err(Error::model(format!("GGUF {key} is not supported: `rank`"))),
        Some(_) => Err(Error::model(format!("GGUF file has an impossible value: `{key}`"))),
    }
}

struct Reader<'a> {
    file: &'a GgufFile,
    prefix: String,
    problems: Problems,
}

impl Reader<'_> {
    fn config(&mut self, architecture: &str, class: &str) -> Result<Map<String, Value>> {
        self.refuse_unknown_keys();
        self.refuse_unsupported()?;
        let hidden_size = self.needed_count("embedding_length")?;
        let heads = self.needed_count("attention.head_count")?;
        let kv_heads = self.count("attention.head_count_kv")?.unwrap_or(heads);
        let head_dim = self.count("attention.key_length")?.unwrap_or(hidden_size / heads.max(1));
        self.must_equal("attention.value_length", head_dim)?;
        self.must_equal("rope.dimension_count", head_dim)?;
        let context = self.needed_count("context_length")?;
        if self.count("attention.sliding_window")?.is_some_and(|window| (1..context).contains(&window)) {
            self.refuse("attention.sliding_window")?;
        }
        let theta = self.number("rope.freq_base")?.unwrap_or(10_000.0);
        let mut config = json!({
            "model_type": architecture,
            "architectures": [class],
            "hidden_size": hidden_size,
            "num_hidden_layers": self.needed_count("block_count")?,
            "intermediate_size": self.needed_count("feed_forward_length")?,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.needed_number("attention.layer_norm_rms_epsilon")?,
            "max_position_embeddings": context,
            "rope_theta": theta,
            "vocab_size": self.vocab_size()?,
            "tie_word_embeddings": !self.file.tensors().contains_key("output.weight"),
        });
        if architecture != "qwen2" {
            config["attention_bias"] = json!(self.file.tensors().contains_key("blk.0.attn_q.bias"));
        }
        if architecture == "llama" {
            config["mlp_bias"] = json!(self.file.tensors().contains_key("blk.0.ffn_gate.bias"));
        }
        if let Some(scaling) = self.rope_scaling(theta, head_dim, context)? {
            config["rope_scaling"] = scaling;
        }
        match config {
            Value::Object(config) => Ok(config),
            _ => Err(Error::internal("a configuration that is no object")),
        }
    }

    /// Notes keys of the architecture that may mean another computation.
    fn refuse_unknown_keys(&mut self) {
        let unknown: Vec<&str> = self
            .file
            .keys()
            .filter(|key| key.strip_prefix(&self.prefix).is_some_and(|rest| !KNOWN_KEYS.contains(&rest)))
            .collect();
        for key in unknown {
            self.problems.push(format!("GGUF metadata key is not supported: `{key}`"));
        }
    }

    fn refuse_unsupported(&mut self) -> Result<()> {
        if let Some(parts) = self.file.value("split.count")?.and_then(|value| whole(&value)).filter(|parts| *parts > 1)
        {
            self.problems.push(format!("GGUF files in several parts are not supported: `split.count {parts}`"));
        }
        for key in ["expert_count", "expert_used_count"] {
            if self.value(key)?.is_some_and(|value| whole(&value) != Some(0)) {
                self.refuse(key)?;
            }
        }
        if self.value("attention.causal")? == Some(GgufValue::Bool(false)) {
            self.refuse("attention.causal")?;
        }
        // Minus one leaves the choice to the reader.
        let is_usual = |value: &GgufValue| [Some(1.0), Some(-1.0)].contains(&real(value));
        if self.value("rope.scaling.yarn_ext_factor")?.is_some_and(|value| !is_usual(&value)) {
            self.refuse("rope.scaling.yarn_ext_factor")?;
        }
        Ok(())
    }

    /// `rope_scaling`, from the keys or from the tensor of factors.
    fn rope_scaling(&mut self, theta: f64, head_dim: u64, context: u64) -> Result<Option<Value>> {
        let original = self.count("rope.scaling.original_context_length")?;
        let factor = match self.number("rope.scaling.factor")? {
            Some(factor) => Some(factor),
            None => self.number("rope.scale_linear")?.filter(|factor| *factor != 1.0),
        };
        let kind = match self.value("rope.scaling.type")? {
            None => factor.filter(|factor| *factor != 1.0 && *factor != 0.0).map_or("none", |_| "linear").to_owned(),
            Some(GgufValue::Text(kind)) => kind,
            Some(_) => "(no text)".to_owned(),
        };
        if let Some(factors) = read_plain(self.file, ROPE_FACTORS)? {
            if kind != "none" {
                self.problems.push(format!("GGUF file scales rotary angles twice: `{ROPE_FACTORS}`"));
            }
            let scaling = llama3_scaling(&factors, theta, head_dim, original);
            if scaling.is_none() {
                self.problems.push(format!("rotary factors are not those of Llama 3: `{ROPE_FACTORS}`"));
            }
            return Ok(scaling);
        }
        match kind.as_str() {
            "none" => Ok(None),
            "linear" | "yarn" => {
                let Some(factor) = factor else {
                    self.missing("rope.scaling.factor");
                    return Ok(None);
                };
                let mut scaling = json!({"rope_type": kind, "factor": factor});
                if kind == "yarn" {
                    self.yarn(&mut scaling, factor, original.unwrap_or(context))?;
                }
                Ok(Some(scaling))
            }
            _ => {
                self.refuse("rope.scaling.type")?;
                Ok(None)
            }
        }
    }

    fn yarn(&mut self, scaling: &mut Value, factor: f64, original: u64) -> Result<()> {
        scaling["original_max_position_embeddings"] = json!(original);
        for (key, name) in [("rope.scaling.yarn_beta_fast", "beta_fast"), ("rope.scaling.yarn_beta_slow", "beta_slow")]
        {
            if let Some(value) = self.number(key)? {
                scaling[name] = json!(value);
            }
        }
        let attention = match self.number("rope.scaling.yarn_attn_factor")? {
            Some(value) => Some(value),
            None => self.number("rope.scaling.attn_factor")?,
        };
        // llama.cpp multiplies by what Hugging Face has as the default of the whole.
        if let Some(attention) = attention.filter(|attention| *attention != 1.0) {
            scaling["attention_factor"] = json!(attention * (0.1 * factor.ln() + 1.0));
        }
        Ok(())
    }

    /// Rows of the embedding: as said, or as many as tokens are listed, or as the table has.
    fn vocab_size(&mut self) -> Result<u64> {
        if let Some(said) = self.count("vocab_size")? {
            return Ok(said);
        }
        if let Some(tokens) = self.file.list_len("tokenizer.ggml.tokens") {
            return Ok(tokens as u64);
        }
        let table = self.file.tensors().get("token_embd.weight");
        Ok(table.and_then(|table| table.shape.first()).map_or(0, |rows| *rows as u64))
    }

    fn value(&self, key: &str) -> Result<Option<GgufValue>> {
        self.file.value(&format!("{}{key}", self.prefix))
    }

    fn count(&mut self, key: &str) -> Result<Option<u64>> {
        let Some(value) = self.value(key)? else { return Ok(None) };
        let count = whole(&value);
        if count.is_none() {
            self.problems.push(format!("GGUF {}{key} must be one whole number: `{}`", self.prefix, shown(&value)));
        }
        Ok(count)
    }

    fn number(&mut self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.value(key)? else { return Ok(None) };
        let number = real(&value).filter(|number| number.is_finite());
        if number.is_none() {
            self.problems.push(format!("GGUF {}{key} must be one number: `{}`", self.prefix, shown(&value)));
        }
        Ok(number)
    }

    fn needed_count(&mut self, key: &str) -> Result<u64> {
        if self.value(key)?.is_none() {
            self.missing(key);
        }
        Ok(self.count(key)?.unwrap_or(1))
    }

    fn needed_number(&mut self, key: &str) -> Result<f64> {
        if self.value(key)?.is_none() {
            self.missing(key);
        }
        Ok(self.number(key)?.unwrap_or(1.0))
    }

    fn missing(&mut self, key: &str) {
        self.problems.push(format!("GGUF metadata lacks a key: `{}{key}`", self.prefix));
    }

    fn must_equal(&mut self, key: &str, head_dim: u64) -> Result<()> {
        if let Some(value) = self.count(key)?.filter(|value| *value != head_dim) {
            self.problems.push(format!("GGUF {}{key} is not the head width {head_dim}: `{value}`", self.prefix));
        }
        Ok(())
    }

    fn refuse(&mut self, key: &str) -> Result<()> {
        let value = self.value(key)?.map(|value| shown(&value)).unwrap_or_default();
        self.problems.push(format!("GGUF {}{key} is not supported: `{value}`", self.prefix));
        Ok(())
    }
}

/// Llama 3's scaling, if these are its factors for the usual bounds (1 and 4 waves in the original context).
fn llama3_scaling(factors: &[f32], theta: f64, head_dim: u64, original: Option<u64>) -> Option<Value> {
    const LOW: f64 = 1.0;
    const HIGH: f64 = 4.0;
    let original = original.unwrap_or(8192);
    let factor = f64::from(*factors.last()?);
    let expected = (0..head_dim / 2).map(|index| {
        let wave = 2.0 * PI * theta.powf(2.0 * index as f64 / head_dim as f64);
        let waves = original as f64 / wave;
        let smooth = ((waves - LOW) / (HIGH - LOW)).clamp(0.0, 1.0);
        1.0 / ((1.0 - smooth) / factor + smooth)
    });
    let is_close = |(expected, there): (f64, &f32)| (expected - f64::from(*there)).abs() <= 1e-4 * expected.abs();
    let fits = factors.len() as u64 == head_dim / 2 && expected.zip(factors).all(is_close);
    fits.then(|| {
        json!({"rope_type": "llama3", "factor": factor, "low_freq_factor": LOW, "high_freq_factor": HIGH,
               "original_max_position_embeddings": original})
    })
}

fn whole(value: &GgufValue) -> Option<u64> {
    match value {
        GgufValue::Unsigned(value) => Some(*value),
        GgufValue::Signed(value) => u64::try_from(*value).ok(),
        _ => None,
    }
}

fn real(value: &GgufValue) -> Option<f64> {
    match value {
        GgufValue::Float(value) => Some(*value),
        _ => whole(value).map(|value| value as f64),
    }
}

/// A value cut to what a message can bear.
fn shown(value: &GgufValue) -> String {
    match value {
        GgufValue::Unsigned(value) => value.to_string(),
        GgufValue::Signed(value) => value.to_string(),
        GgufValue::Float(value) => value.to_string(),
        GgufValue::Bool(value) => value.to_string(),
        GgufValue::Text(text) => text.chars().take(80).collect(),
        GgufValue::List(values) => format!("a list of {}", values.len()),
    }
}
