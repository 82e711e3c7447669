//! `config.json` of Llama, Qwen2 and Qwen3: one set of choices that tells the three model types apart.

use serde_json::Value;

use super::rope::read_rotary;
use super::{JsonObject, MAX_LAYERS, MAX_ROWS, MAX_WIDTH, activation, check_heads};
use crate::cpu::Activation;
use crate::error::Problems;
use crate::rotary::{RotaryConfig, RotaryScaling};

/// A model type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecoderFamily {
    /// "llama".
    Llama,
    /// "qwen2", Qwen2.5 included.
    Qwen2,
    /// "qwen3".
    Qwen3,
}

/// Where the logits of a language model come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LanguageHead {
    /// The token table.
    Tied,
    /// A matrix of its own.
    Separate,
}

/// Sizes and choices of a decoder.
#[derive(Clone, Debug)]
pub struct DecoderConfig {
    /// The model type.
    pub family: DecoderFamily,
    /// Rows of the token table.
    pub vocab_size: usize,
    /// The most tokens that one sequence may have.
    pub max_positions: usize,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// Width inside the gated feed-forward.
    pub intermediate_size: usize,
    /// For each layer, how many tokens it sees, the token itself included; `None` for all before it.
    pub windows: Vec<Option<usize>>,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// On the gate.
    pub activation: Activation,
    /// Added to the mean square in every norm.
    pub norm_eps: f32,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the attention's output has a bias.
    pub output_bias: bool,
    /// Whether the feed-forward's linear layers have biases.
    pub mlp_bias: bool,
    /// Whether every head of queries and keys is normalised.
    pub head_norm: bool,
    /// The rotary embedding of all layers.
    pub rotary: RotaryConfig,
    /// Where logits come from; `None` for a model that gives none.
    pub head: Option<LanguageHead>,
}

impl DecoderFamily {
    /// What the names of its classes begin with.
    pub fn class_name(self) -> &'static str {
        match self {
            DecoderFamily::Llama => "Llama",
            DecoderFamily::Qwen2 => "Qwen2",
            DecoderFamily::Qwen3 => "Qwen3",
        }
    }
}

impl DecoderConfig {
    /// Reads the family's keys; defaults are those of the model type. What is wrong goes to `problems`.
    pub(super) fn read(family: DecoderFamily, file: &JsonObject, problems: &mut Problems) -> Self {
        refuse_other_attention(file, problems);
        let is_llama = family == DecoderFamily::Llama;
        let hidden_size = file.size("hidden_size", 4096, 1, MAX_WIDTH, problems);
        let heads = file.size("num_attention_heads", 32, 1, MAX_WIDTH, problems);
        let kv_heads = kv_heads(family, file, heads, problems);
        let head_dim = head_dim(family, file, hidden_size, heads, problems);
        let trained = file.size("max_position_embeddings", if is_llama { 2048 } else { 32_768 }, 1, MAX_ROWS, problems);
        let rotary = read_rotary(file, head_dim, trained, problems);
        let attention_bias = file.flag("attention_bias", false, problems);
        let mlp_bias = file.flag("mlp_bias", false, problems);
        if mlp_bias && !is_llama {
            problems.push(file.complaint("mlp_bias", "is not supported for this model type"));
        }
        let tied = file.flag("tie_word_embeddings", false, problems);
        Self {
            family,
            vocab_size: file.size("vocab_size", if is_llama { 32_000 } else { 151_936 }, 1, MAX_ROWS, problems),
            max_positions: reach(&rotary, trained),
            hidden_size,
            intermediate_size: file.size(
                "intermediate_size",
                if is_llama { 11_008 } else { 22_016 },
                1,
                MAX_WIDTH,
                problems,
            ),
            windows: windows(family, file, problems),
            heads,
            kv_heads,
            head_dim,
            activation: activation(file, "hidden_act", "silu", problems),
            norm_eps: file.positive("rms_norm_eps", 1e-6, problems) as f32,
            qkv_bias: attention_bias || family == DecoderFamily::Qwen2,
            output_bias: attention_bias && family != DecoderFamily::Qwen2,
            mlp_bias,
            head_norm: family == DecoderFamily::Qwen3,
            rotary,
            head: Some(if tied { LanguageHead::Tied } else { LanguageHead::Separate }),
        }
    }
}

/// Positions that the rotary embedding was stretched to: files leave `max_position_embeddings` at the first training's
/// where YaRN was added afterwards.
fn reach(rotary: &RotaryConfig, trained: usize) -> usize {
    match rotary.scaling {
        RotaryScaling::Yarn { factor, original_positions, .. } => {
            trained.max((factor * original_positions) as usize).min(MAX_ROWS)
        }
        _ => trained,
    }
}

fn kv_heads(family: DecoderFamily, file: &JsonObject, heads: usize, problems: &mut Problems) -> usize {
    const KEY: &str = "num_key_value_heads";
    let default = if family == DecoderFamily::Llama || file.has(KEY) { heads } else { 32 };
    let kv_heads = file.size(KEY, default, 1, MAX_WIDTH, problems);
    if !heads.is_multiple_of(kv_heads) {
        problems.push(file.complaint(KEY, &format!("does not divide the {heads} attention heads")));
        return heads;
    }
    kv_heads
}

fn head_dim(
    family: DecoderFamily,
    file: &JsonObject,
    hidden_size: usize,
    heads: usize,
    problems: &mut Problems,
) -> usize {
    const KEY: &str = "head_dim";
    let is_told = file.get(KEY).is_some() || (family == DecoderFamily::Qwen3 && !file.has(KEY));
    if !is_told {
        check_heads(file, "hidden_size", hidden_size, heads, problems);
    }
    let default = if is_told { 128 } else { (hidden_size / heads).max(1) };
    let head_dim = file.size(KEY, default, 1, MAX_WIDTH, problems);
    if !head_dim.is_multiple_of(2) {
        problems.push(file.complaint(KEY, &format!("gives heads of odd width {head_dim}, which cannot be rotated")));
    }
    head_dim
}

/// The window of each layer: `layer_types`, or the older rule that layers from `max_window_layers` on have one; none
/// without `use_sliding_window`.
fn windows(family: DecoderFamily, file: &JsonObject, problems: &mut Problems) -> Vec<Option<usize>> {
    let layers = file.size("num_hidden_layers", 32, 0, MAX_LAYERS, problems);
    let window = window(family, file, problems);
    let first = file.size("max_window_layers", 28, 0, MAX_ROWS, problems);
    let Some(types) = file.get("layer_types") else {
        return (0..layers).map(|layer| window.filter(|_| layer >= first)).collect();
    };
    let is_sliding = |value: &Value| match value.as_str()? {
        "full_attention" => Some(false),
        "sliding_attention" => Some(true),
        _ => None,
    };
    let sliding: Option<Vec<bool>> = types.as_array().and_then(|types| types.iter().map(is_sliding).collect());
    let Some(sliding) = sliding else {
        problems.push(file.complaint("layer_types", "may hold full_attention and sliding_attention only"));
        return vec![None; layers];
    };
    if sliding.len() != layers {
        problems.push(file.complaint("layer_types", &format!("must name a type for each of {layers} layers")));
    }
    if sliding.contains(&true) && window.is_none() {
        problems.push(file.complaint("layer_types", "has sliding_attention while no sliding_window is in use"));
    }
    sliding.into_iter().map(|is_sliding| window.filter(|_| is_sliding)).collect()
}

/// The window that is in use.
fn window(family: DecoderFamily, file: &JsonObject, problems: &mut Problems) -> Option<usize> {
    const KEY: &str = "sliding_window";
    if family == DecoderFamily::Llama {
        for key in [KEY, "use_sliding_window"] {
            if file.get(key).is_some_and(|value| *value != Value::Bool(false)) {
                problems.push(file.complaint(key, "is not supported for this model type"));
            }
        }
        return None;
    }
    let in_use = file.flag("use_sliding_window", false, problems);
    if !in_use || (file.has(KEY) && file.get(KEY).is_none()) {
        return None;
    }
    Some(file.size(KEY, 4096, 1, MAX_ROWS, problems))
}

/// Notes settings of other decoders, and of bidirectional variants of these, which would change the numbers.
fn refuse_other_attention(file: &JsonObject, problems: &mut Problems) {
    let refuse = |key: &str, problems: &mut Problems| problems.push(file.complaint(key, "is not supported"));
    if !file.flag("is_causal", true, problems) {
        refuse("is_causal", problems);
    }
    // Keys whose presence with anything but null, false or their neutral number means another computation.
    const NEUTRAL: [(&str, f64); 24] = [
        ("attention_chunk_size", 0.0),
        ("attention_multiplier", 1.0),
        ("attn_logit_softcapping", 0.0),
        ("attn_temperature_tuning", 0.0),
        ("bidirectional", 0.0),
        ("embedding_multiplier", 1.0),
        ("final_logit_softcapping", 0.0),
        ("interleave_moe_layer_step", 0.0),
        ("is_bidirectional", 0.0),
        ("logits_scaling", 1.0),
        ("logit_scale", 1.0),
        ("no_rope_layers", 0.0),
        ("num_experts", 0.0),
        ("num_local_experts", 0.0),
        ("query_pre_attn_scalar", 0.0),
        ("residual_multiplier", 1.0),
        ("rope_interleaved", 0.0),
        ("rotary_interleaved", 0.0),
        ("scale_emb", 1.0),
        ("use_bidirectional", 0.0),
        ("use_bidirectional_attention", 0.0),
        ("use_mrope", 0.0),
        ("use_parallel_residual", 0.0),
        ("use_qk_norm", 0.0),
    ];
    for (key, neutral) in NEUTRAL {
        let is_neutral = |value: &Value| *value == Value::Bool(false) || value.as_f64() == Some(neutral);
        if file.get(key).is_some_and(|value| !is_neutral(value)) {
            refuse(key, problems);
        }
    }
    let classes = file.get("auto_map").and_then(Value::as_object);
    if classes.is_some_and(|classes| classes.keys().any(|class| class.starts_with("AutoModel"))) {
        problems.push(file.complaint("auto_map", "names code of the model's own, which is not run"));
    }
}
