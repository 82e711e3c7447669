//! `config.json` of ModernBERT: which layers look at everything and which at a window, and their rotary bases.

use serde_json::Value;

use super::{JsonObject, MAX_LAYERS, MAX_ROWS, MAX_WIDTH, activation, check_heads};
use crate::cpu::Activation;
use crate::error::Problems;
use crate::shard::Shard;

/// What a classifier reads of the hidden states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClassifierPooling {
    /// The first token.
    Cls,
    /// The mean over all tokens.
    Mean,
}

/// How far a layer's attention reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayerKind {
    /// Every token of the sequence.
    Full,
    /// Tokens at most `ModernBertConfig::window` away.
    Sliding,
}

/// Sizes and choices of a ModernBERT encoder.
#[derive(Clone, Debug)]
pub struct ModernBertConfig {
    /// Rows of the token table.
    pub vocab_size: usize,
    /// The most tokens that one sequence may have.
    pub max_positions: usize,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// Width inside the gated feed-forward, of this rank.
    pub intermediate_size: usize,
    /// The reach of each layer's attention.
    pub(crate) layers: Vec<LayerKind>,
    /// Attention heads, of this rank.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Tokens that a sliding layer sees on either side.
    pub window: usize,
    /// Rotary base of the full layers.
    pub full_rope_theta: f64,
    /// Rotary base of the sliding layers.
    pub sliding_rope_theta: f64,
    /// On the gate's input.
    pub activation: Activation,
    /// Added to the variance in every layer norm.
    pub norm_eps: f32,
    /// Whether the norms have biases.
    pub norm_bias: bool,
    /// Whether the attention's linear layers have biases.
    pub attention_bias: bool,
    /// Whether the feed-forward's linear layers have biases.
    pub mlp_bias: bool,
    /// Whether the classification head's dense layer has a bias.
    pub classifier_bias: bool,
    /// In the classification head.
    pub classifier_activation: Activation,
    /// What the classification head reads.
    pub classifier_pooling: ClassifierPooling,
    /// The rank's share of the whole model.
    pub shard: Shard,
}

impl ModernBertConfig {
    /// Reads ModernBERT's keys; defaults are those of the model type.
    pub(super) fn read(file: &JsonObject, problems: &mut Problems) -> Self {
        let hidden_size = file.size("hidden_size", 768, 1, MAX_WIDTH, problems);
        let heads = file.size("num_attention_heads", 12, 1, MAX_WIDTH, problems);
        check_heads(file, "hidden_size", hidden_size, heads, problems);
        if !(hidden_size / heads).is_multiple_of(2) {
            problems.push(file.complaint("num_attention_heads", "gives heads of odd width, which cannot be rotated"));
        }
        let [full_rope_theta, sliding_rope_theta] = rope_thetas(file, problems);
        Self {
            vocab_size: file.size("vocab_size", 50_368, 1, MAX_ROWS, problems),
            max_positions: file.size("max_position_embeddings", 8192, 1, MAX_ROWS, problems),
            hidden_size,
            intermediate_size: file.size("intermediate_size", 1152, 1, MAX_WIDTH, problems),
            layers: layer_kinds(file, problems),
            heads,
            head_dim: hidden_size / heads,
            window: file.size("local_attention", 128, 1, MAX_ROWS, problems) / 2,
            full_rope_theta,
            sliding_rope_theta,
            activation: activation(file, "hidden_activation", "gelu", problems),
            norm_eps: file.positive("norm_eps", 1e-5, problems) as f32,
            norm_bias: file.flag("norm_bias", false, problems),
            attention_bias: file.flag("attention_bias", false, problems),
            mlp_bias: file.flag("mlp_bias", false, problems),
            classifier_bias: file.flag("classifier_bias", false, problems),
            classifier_activation: activation(file, "classifier_activation", "gelu", problems),
            classifier_pooling: classifier_pooling(file, problems),
            shard: Shard::WHOLE,
        }
    }
}

/// `layer_types`, or the older rule that every n-th layer is a full one.
fn layer_kinds(file: &JsonObject, problems: &mut Problems) -> Vec<LayerKind> {
    let layers = file.size("num_hidden_layers", 22, 0, MAX_LAYERS, problems);
    let every = file.size("global_attn_every_n_layers", 3, 1, MAX_ROWS, problems);
    let kind_at = |layer: usize| if layer.is_multiple_of(every) { LayerKind::Full } else { LayerKind::Sliding };
    let Some(types) = file.get("layer_types") else {
        return (0..layers).map(kind_at).collect();
    };
    let kinds: Option<Vec<LayerKind>> = types.as_array().and_then(|types| types.iter().map(layer_kind).collect());
    match kinds {
        Some(kinds) if kinds.len() == layers => kinds,
        Some(_) => {
            problems.push(file.complaint("layer_types", &format!("must name a type for each of {layers} layers")));
            Vec::new()
        }
        None => {
            problems.push(file.complaint("layer_types", "may hold full_attention and sliding_attention only"));
            Vec::new()
        }
    }
}

fn layer_kind(value: &Value) -> Option<LayerKind> {
    match value.as_str()? {
        "full_attention" => Some(LayerKind::Full),
        "sliding_attention" => Some(LayerKind::Sliding),
        _ => None,
    }
}

/// The rotary bases of full and of sliding layers: `rope_parameters` by layer type, else the older two keys.
fn rope_thetas(file: &JsonObject, problems: &mut Problems) -> [f64; 2] {
    let full = file.positive("global_rope_theta", 160_000.0, problems);
    let sliding = match file.has("local_rope_theta") && file.get("local_rope_theta").is_none() {
        true => full,
        false => file.positive("local_rope_theta", 10_000.0, problems),
    };
    let Some(parameters) = file.get("rope_parameters") else {
        return [full, sliding];
    };
    let Some(parameters) = parameters.as_object() else {
        problems.push(file.complaint("rope_parameters", "must be an object by layer type"));
        return [full, sliding];
    };
    if let Some(key) = parameters.keys().find(|key| !["full_attention", "sliding_attention"].contains(&key.as_str())) {
        problems.push(file.complaint("rope_parameters", &format!("has a key that is no layer type ({key})")));
    }
    let theta = |layer_type: &str, default: f64, problems: &mut Problems| match parameters.get(layer_type) {
        None | Some(Value::Null) => default,
        Some(Value::Object(values)) => rope_theta(&JsonObject::nested(file.path(), values), default, problems),
        Some(_) => {
            problems.push(file.complaint("rope_parameters", &format!("must hold an object for {layer_type}")));
            default
        }
    };
    [theta("full_attention", full, problems), theta("sliding_attention", sliding, problems)]
}

/// The base of one layer type, whose rotary kind must be the plain one.
fn rope_theta(parameters: &JsonObject, default: f64, problems: &mut Problems) -> f64 {
    for key in ["rope_type", "type"] {
        if parameters.text(key, "default", problems) != "default" {
            problems.push(parameters.complaint(key, "is not supported"));
        }
    }
    if parameters.positive("partial_rotary_factor", 1.0, problems) != 1.0 {
        problems.push(parameters.complaint("partial_rotary_factor", "is not supported"));
    }
    parameters.positive("rope_theta", default, problems)
}

fn classifier_pooling(file: &JsonObject, problems: &mut Problems) -> ClassifierPooling {
    match file.text("classifier_pooling", "cls", problems) {
        "cls" => ClassifierPooling::Cls,
        "mean" => ClassifierPooling::Mean,
        _ => {
            problems.push(file.complaint("classifier_pooling", "is not supported"));
            ClassifierPooling::Cls
        }
    }
}
