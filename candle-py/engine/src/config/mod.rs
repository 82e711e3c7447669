//! What a model folder's JSON files, or a GGUF file's metadata, say: read into types and checked. Reads no weights.

mod bert;
mod gguf;
mod json;
mod labels;
mod modernbert;
mod sentence;

use std::path::Path;

pub use bert::{BertConfig, BertFamily};
pub use gguf::{read_gguf_config, read_gguf_pooling};
pub use json::{JsonObject, read_json};
pub use labels::Labels;
pub(crate) use modernbert::LayerKind;
pub use modernbert::{ClassifierPooling, ModernBertConfig};
pub use sentence::{SentenceConfig, SentenceModule};

use crate::cpu::Activation;
use crate::error::{Error, Problems, Result};

/// The families of `model_type`, as told in messages.
const MODEL_TYPES: &str = "bert, roberta, xlm-roberta, distilbert, modernbert";

/// Bounds that no real model reaches: a larger number in a file is damage, and must not become an allocation.
const MAX_WIDTH: usize = 1 << 20;
const MAX_ROWS: usize = 1 << 28;
const MAX_LAYERS: usize = 1024;

/// `config.json` of a transformer.
#[derive(Debug)]
pub struct ModelConfig {
    /// `model_type`.
    pub model_type: String,
    /// The first of `architectures`; a bare encoder's name when the file has none.
    pub architecture: String,
    /// Sizes and choices of the encoder.
    pub encoder: EncoderConfig,
    /// The labels when the model is a sequence classifier.
    pub labels: Option<Labels>,
}

/// Sizes and choices of an encoder, by family.
#[derive(Debug)]
pub enum EncoderConfig {
    /// BERT, RoBERTa, XLM-RoBERTa and DistilBERT.
    Bert(BertConfig),
    /// ModernBERT.
    ModernBert(ModernBertConfig),
}

impl ModelConfig {
    /// Reads and checks `config.json` in `dir`; what is wrong goes to `problems`.
    ///
    /// # Errors
    /// When nothing can be made of the file: missing, not JSON, or of an unsupported family.
    pub fn read(dir: &Path, problems: &mut Problems) -> Result<Self> {
        Self::of(&JsonObject::read(&dir.join("config.json"))?, problems)
    }

    /// Checks what such a file holds, or what a GGUF file's metadata amount to.
    ///
    /// # Errors
    /// When the model is of an unsupported family.
    pub fn of(file: &JsonObject, problems: &mut Problems) -> Result<Self> {
        let model_type = file.text("model_type", "", problems).to_owned();
        let encoder = match model_type.as_str() {
            "bert" => EncoderConfig::Bert(BertConfig::read(BertFamily::Bert, file, problems)),
            "roberta" => EncoderConfig::Bert(BertConfig::read(BertFamily::Roberta, file, problems)),
            "xlm-roberta" => EncoderConfig::Bert(BertConfig::read(BertFamily::XlmRoberta, file, problems)),
            "distilbert" => EncoderConfig::Bert(BertConfig::read(BertFamily::DistilBert, file, problems)),
            "modernbert" => EncoderConfig::ModernBert(ModernBertConfig::read(file, problems)),
            _ => {
                let complaint = file.complaint("model_type", "is not supported");
                return Err(Error::model(complaint).with_hint(format!("supported model types: {MODEL_TYPES}")));
            }
        };
        refuse_unsupported(file, problems);
        let architecture = architecture(file, &encoder)?;
        let is_classifier = architecture.ends_with("ForSequenceClassification");
        let labels = is_classifier.then(|| Labels::read(file, problems));
        Ok(Self { model_type, architecture, encoder, labels })
    }
}

impl EncoderConfig {
    /// Width of the hidden states.
    pub fn hidden_size(&self) -> usize {
        match self {
            EncoderConfig::Bert(config) => config.hidden_size,
            EncoderConfig::ModernBert(config) => config.hidden_size,
        }
    }

    /// Transformer layers.
    pub fn layers(&self) -> usize {
        match self {
            EncoderConfig::Bert(config) => config.layers,
            EncoderConfig::ModernBert(config) => config.layers.len(),
        }
    }

    /// Token ids are below this.
    pub fn vocab_size(&self) -> usize {
        match self {
            EncoderConfig::Bert(config) => config.vocab_size,
            EncoderConfig::ModernBert(config) => config.vocab_size,
        }
    }

    /// The most tokens that one sequence may have.
    pub fn max_positions(&self) -> usize {
        match self {
            EncoderConfig::Bert(config) => config.max_positions(),
            EncoderConfig::ModernBert(config) => config.max_positions,
        }
    }

    /// Token type ids are below this; 0 when the model has none.
    pub fn type_vocab_size(&self) -> usize {
        match self {
            EncoderConfig::Bert(config) => config.type_vocab_size,
            EncoderConfig::ModernBert(_) => 0,
        }
    }
}

/// The first name in `architectures`, if it is of a kind that the engine runs.
fn architecture(file: &JsonObject, encoder: &EncoderConfig) -> Result<String> {
    const KINDS: [&str; 4] = ["Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification"];
    let bare = match encoder {
        EncoderConfig::Bert(config) => config.family.class_name(),
        EncoderConfig::ModernBert(_) => "ModernBert",
    };
    let Some(value) = file.get("architectures") else {
        return Ok(format!("{bare}Model"));
    };
    let name = match value.as_array().map(Vec::as_slice) {
        Some([]) => return Ok(format!("{bare}Model")),
        Some([first, ..]) => first.as_str(),
        None => None,
    };
    match name {
        Some(name) if KINDS.iter().any(|kind| name.ends_with(kind)) => Ok(name.to_owned()),
        _ => {
            let supported: Vec<String> = KINDS.iter().map(|kind| format!("{bare}{kind}")).collect();
            Err(Error::model(file.complaint("architectures", "is not supported"))
                .with_hint(format!("supported here: {}", supported.join(", "))))
        }
    }
}

/// Notes settings that would change the numbers and that the engine does not follow.
fn refuse_unsupported(file: &JsonObject, problems: &mut Problems) {
    for key in ["is_decoder", "add_cross_attention"] {
        if file.flag(key, false, problems) {
            problems.push(file.complaint(key, "is not supported"));
        }
    }
    for key in ["quantization_config", "rope_scaling"] {
        if file.get(key).is_some() {
            problems.push(file.complaint(key, "is not supported"));
        }
    }
    let pruned = file.get("pruned_heads").and_then(|value| value.as_object()).is_some_and(|heads| !heads.is_empty());
    if pruned {
        problems.push(file.complaint("pruned_heads", "is not supported"));
    }
}

/// The activation that a Hugging Face config names under `key`.
fn activation(file: &JsonObject, key: &str, default: &str, problems: &mut Problems) -> Activation {
    match file.text(key, default, problems) {
        "gelu" | "gelu_python" => Activation::Gelu,
        "gelu_new" | "gelu_fast" | "gelu_accurate" | "gelu_pytorch_tanh" | "gelu_python_tanh" => Activation::GeluTanh,
        "relu" => Activation::Relu,
        "silu" | "swish" => Activation::Silu,
        "tanh" => Activation::Tanh,
        "sigmoid" => Activation::Sigmoid,
        "linear" => Activation::Identity,
        _ => {
            problems.push(file.complaint(key, "is not a supported activation"));
            Activation::Identity
        }
    }
}

/// Notes a hidden size that the heads do not divide.
fn check_heads(file: &JsonObject, hidden_key: &str, hidden_size: usize, heads: usize, problems: &mut Problems) {
    if !hidden_size.is_multiple_of(heads) {
        problems.push(file.complaint(hidden_key, &format!("is not a multiple of the {heads} attention heads")));
    }
}
