//! What a model folder's JSON files, or a GGUF file's metadata, say: read into types and checked. Reads no weights.

mod bert;
mod decoder;
mod gguf;
mod json;
mod labels;
mod modernbert;
mod rope;
mod sentence;

use std::path::Path;

pub use bert::{BertConfig, BertFamily};
pub use decoder::{DecoderConfig, DecoderFamily, LanguageHead};
pub use gguf::{read_gguf_config, read_gguf_pooling};
pub use json::{JsonObject, read_json};
pub use labels::Labels;
pub(crate) use modernbert::LayerKind;
pub use modernbert::{ClassifierPooling, ModernBertConfig};
pub use sentence::{SentenceConfig, SentenceModule};

use crate::cpu::Activation;
use crate::error::{Error, Problems, Result};
use crate::shard::{Shard, Sizes};

/// The families of `model_type`, as told in messages.
const MODEL_TYPES: &str = "bert, roberta, xlm-roberta, distilbert, modernbert, llama, qwen2, qwen3";

/// Bounds that no real model reaches: a larger number in a file is damage, and must not become an allocation.
const MAX_WIDTH: usize = 1 << 20;
const MAX_ROWS: usize = 1 << 28;
const MAX_LAYERS: usize = 1024;

/// `config.json` of a transformer.
#[derive(Debug)]
pub struct ModelConfig {
    /// `model_type`.
    pub model_type: String,
    /// The first of `architectures`; where the file has none, a bare encoder's name or a decoder's with a head.
    pub architecture: String,
    /// Sizes and choices of the network.
    pub network: NetworkConfig,
    /// The labels when the model is a sequence classifier.
    pub labels: Option<Labels>,
}

/// Sizes and choices of a network, by family.
#[derive(Debug)]
pub enum NetworkConfig {
    /// BERT, RoBERTa, XLM-RoBERTa and DistilBERT.
    Bert(BertConfig),
    /// ModernBERT.
    ModernBert(ModernBertConfig),
    /// Llama, Qwen2 and Qwen3.
    Decoder(DecoderConfig),
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
        let mut network = match model_type.as_str() {
            "bert" => NetworkConfig::Bert(BertConfig::read(BertFamily::Bert, file, problems)),
            "roberta" => NetworkConfig::Bert(BertConfig::read(BertFamily::Roberta, file, problems)),
            "xlm-roberta" => NetworkConfig::Bert(BertConfig::read(BertFamily::XlmRoberta, file, problems)),
            "distilbert" => NetworkConfig::Bert(BertConfig::read(BertFamily::DistilBert, file, problems)),
            "modernbert" => NetworkConfig::ModernBert(ModernBertConfig::read(file, problems)),
            "llama" => NetworkConfig::Decoder(DecoderConfig::read(DecoderFamily::Llama, file, problems)),
            "qwen2" => NetworkConfig::Decoder(DecoderConfig::read(DecoderFamily::Qwen2, file, problems)),
            "qwen3" => NetworkConfig::Decoder(DecoderConfig::read(DecoderFamily::Qwen3, file, problems)),
            _ => {
                let complaint = file.complaint("model_type", "is not supported");
                return Err(Error::model(complaint).with_hint(format!("supported model types: {MODEL_TYPES}")));
            }
        };
        refuse_unsupported(file, &network, problems);
        let architecture = architecture(file, &network)?;
        if let NetworkConfig::Decoder(decoder) = &mut network
            && !architecture.ends_with(CAUSAL)
        {
            decoder.head = None;
        }
        let is_classifier = architecture.ends_with("ForSequenceClassification");
        let labels = is_classifier.then(|| Labels::read(file, problems));
        Ok(Self { model_type, architecture, network, labels })
    }
}

impl NetworkConfig {
    /// Width of the hidden states.
    pub fn hidden_size(&self) -> usize {
        match self {
            NetworkConfig::Bert(config) => config.hidden_size,
            NetworkConfig::ModernBert(config) => config.hidden_size,
            NetworkConfig::Decoder(config) => config.hidden_size,
        }
    }

    /// Transformer layers.
    pub fn layers(&self) -> usize {
        match self {
            NetworkConfig::Bert(config) => config.layers,
            NetworkConfig::ModernBert(config) => config.layers.len(),
            NetworkConfig::Decoder(config) => config.windows.len(),
        }
    }

    /// Token ids are below this.
    pub fn vocab_size(&self) -> usize {
        match self {
            NetworkConfig::Bert(config) => config.vocab_size,
            NetworkConfig::ModernBert(config) => config.vocab_size,
            NetworkConfig::Decoder(config) => config.vocab_size,
        }
    }

    /// The most tokens that one sequence may have.
    pub fn max_positions(&self) -> usize {
        match self {
            NetworkConfig::Bert(config) => config.max_positions(),
            NetworkConfig::ModernBert(config) => config.max_positions,
            NetworkConfig::Decoder(config) => config.max_positions,
        }
    }

    /// Token type ids are below this; 0 when the model has none.
    pub fn type_vocab_size(&self) -> usize {
        match self {
            NetworkConfig::Bert(config) => config.type_vocab_size,
            NetworkConfig::ModernBert(_) | NetworkConfig::Decoder(_) => 0,
        }
    }

    /// What decides how the model can be split.
    pub(crate) fn sizes(&self) -> Sizes {
        let (heads, kv_heads, head_dim, intermediate_size) = match self {
            NetworkConfig::Bert(config) => (config.heads, config.heads, config.head_dim, config.intermediate_size),
            NetworkConfig::ModernBert(config) => {
                (config.heads, config.heads, config.head_dim, config.intermediate_size)
            }
            NetworkConfig::Decoder(config) => {
                (config.heads, config.kv_heads, config.head_dim, config.intermediate_size)
            }
        };
        Sizes { heads, kv_heads, head_dim, intermediate_size, vocab_size: self.vocab_size() }
    }

    /// The same model as one rank computes it.
    ///
    /// # Errors
    /// [`Error::Input`] where the model cannot be split over so many ranks.
    pub(crate) fn split(&self, shard: Shard) -> Result<Self> {
        let Sizes { heads, kv_heads, intermediate_size, .. } = self.sizes().split(shard.world)?;
        Ok(match self {
            NetworkConfig::Bert(whole) => {
                NetworkConfig::Bert(BertConfig { heads, intermediate_size, shard, ..whole.clone() })
            }
            NetworkConfig::ModernBert(whole) => {
                NetworkConfig::ModernBert(ModernBertConfig { heads, intermediate_size, shard, ..whole.clone() })
            }
            NetworkConfig::Decoder(whole) => {
                NetworkConfig::Decoder(DecoderConfig { heads, kv_heads, intermediate_size, shard, ..whole.clone() })
            }
        })
    }

    /// The decoder's, if it is one.
    pub fn decoder(&self) -> Option<&DecoderConfig> {
        match self {
            NetworkConfig::Decoder(config) => Some(config),
            NetworkConfig::Bert(_) | NetworkConfig::ModernBert(_) => None,
        }
    }
}

/// What the names of language models end with.
const CAUSAL: &str = "ForCausalLM";

/// The first name in `architectures`, if it is of a kind that the engine runs.
fn architecture(file: &JsonObject, network: &NetworkConfig) -> Result<String> {
    const ENCODERS: [&str; 4] = ["Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification"];
    const DECODERS: [&str; 3] = [CAUSAL, "Model", "ForSequenceClassification"];
    let (bare, kinds): (_, &[&str]) = match network {
        NetworkConfig::Bert(config) => (config.family.class_name(), &ENCODERS),
        NetworkConfig::ModernBert(_) => ("ModernBert", &ENCODERS),
        NetworkConfig::Decoder(config) => (config.family.class_name(), &DECODERS),
    };
    let default = || Ok(format!("{bare}{}", kinds[0]));
    let Some(value) = file.get("architectures") else {
        return default();
    };
    let name = match value.as_array().map(Vec::as_slice) {
        Some([]) => return default(),
        Some([first, ..]) => first.as_str(),
        None => None,
    };
    // A decoder's name must be whole: variants that look both ways differ in the middle of theirs.
    let is_supported = |name: &&str| match network {
        NetworkConfig::Decoder(_) => kinds.iter().any(|kind| name.strip_prefix(bare) == Some(kind)),
        _ => kinds.iter().any(|kind| name.ends_with(kind)),
    };
    match name.filter(is_supported) {
        Some(name) => Ok(name.to_owned()),
        None => {
            let supported: Vec<String> = kinds.iter().map(|kind| format!("{bare}{kind}")).collect();
            Err(Error::model(file.complaint("architectures", "is not supported"))
                .with_hint(format!("supported here: {}", supported.join(", "))))
        }
    }
}

/// Notes settings that would change the numbers and that the engine does not follow.
fn refuse_unsupported(file: &JsonObject, network: &NetworkConfig, problems: &mut Problems) {
    let is_decoder = network.decoder().is_some();
    for key in ["is_decoder", "add_cross_attention"] {
        if !(is_decoder && key == "is_decoder") && file.flag(key, false, problems) {
            problems.push(file.complaint(key, "is not supported"));
        }
    }
    for key in ["quantization_config", "rope_scaling"] {
        if !(is_decoder && key == "rope_scaling") && file.get(key).is_some() {
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
