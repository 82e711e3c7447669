//! What a decoder's `config.json` may say: settings that would change the numbers and are not followed are refused by
//! name and value.

#![allow(clippy::unwrap_used)]

mod common;

use candle_engine::inspect;
use common::{Folder, golden, load_error};
use serde_json::{Value, json};

/// The error for a golden folder with other settings.
fn refusal(name: &str, settings: Value) -> (String, String) {
    let mut folder = Folder::from_golden(name);
    settings.as_object().unwrap().iter().for_each(|(key, value)| folder.config[key] = value.clone());
    let (message, hint) = load_error(folder.write());
    // Inspecting checks the same.
    assert_eq!(inspect(folder.dir.path(), None).unwrap_err().to_string(), message);
    (message, hint)
}

#[test]
fn settings_that_are_not_followed_are_named_with_their_value() {
    for (name, settings, message) in [
        ("qwen2", json!({"is_causal": false}), "is_causal is not supported: `false`"),
        ("llama", json!({"use_bidirectional_attention": true}), "use_bidirectional_attention is not supported: `true`"),
        ("qwen3", json!({"is_bidirectional": true}), "is_bidirectional is not supported: `true`"),
        ("qwen3", json!({"add_cross_attention": true}), "add_cross_attention is not supported: `true`"),
        ("llama", json!({"attention_multiplier": 0.5}), "attention_multiplier is not supported: `0.5`"),
        ("llama", json!({"final_logit_softcapping": 30.0}), "final_logit_softcapping is not supported: `30.0`"),
        ("llama", json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor is not supported: `0.5`"),
        ("qwen2", json!({"mlp_bias": true}), "mlp_bias is not supported for this model type: `true`"),
        ("llama", json!({"sliding_window": 64}), "sliding_window is not supported for this model type: `64`"),
        ("qwen3", json!({"hidden_act": "relu2"}), "hidden_act is not a supported activation: `relu2`"),
        ("qwen3", json!({"num_key_value_heads": 3}), "num_key_value_heads does not divide the 4 attention heads: `3`"),
        ("qwen3", json!({"rms_norm_eps": 0}), "rms_norm_eps must be a positive number: `0`"),
        ("qwen3", json!({"tie_word_embeddings": "yes"}), "tie_word_embeddings must be true or false: `yes`"),
        ("qwen2", json!({"quantization_config": {"bits": 4}}), "quantization_config is not supported: `{\"bits\":4}`"),
        (
            "qwen2",
            json!({"auto_map": {"AutoModel": "modeling.Model"}}),
            "auto_map names code of the model's own, which is not run: `{\"AutoModel\":\"modeling.Model\"}`",
        ),
        (
            "qwen2",
            json!({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}),
            "layer_types may hold full_attention and sliding_attention only: \
             `[\"full_attention\",\"chunked_attention\",\"full_attention\"]`",
        ),
        (
            "qwen2",
            json!({"layer_types": ["full_attention"]}),
            "layer_types must name a type for each of 3 layers: `[\"full_attention\"]`",
        ),
        (
            "qwen2",
            json!({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
            "layer_types has sliding_attention while no sliding_window is in use: \
             `[\"full_attention\",\"sliding_attention\",\"full_attention\"]`",
        ),
        (
            "qwen2",
            json!({"use_sliding_window": true, "sliding_window": 0}),
            "sliding_window must be a whole number from 1 to 268435456: `0`",
        ),
    ] {
        let (found, _) = refusal(name, settings);
        assert_eq!(found, format!("config.json: {message}"));
    }
}

#[test]
fn rotary_settings_that_are_not_followed_are_named_with_their_value() {
    const KINDS: &str = "is not a supported rotary kind (default, linear, llama3, yarn)";
    for (parameters, message) in [
        (json!({"rope_type": "dynamic", "factor": 2.0}), format!("rope_type {KINDS}: `dynamic`")),
        (json!({"type": "longrope"}), format!("type {KINDS}: `longrope`")),
        (json!({"rope_type": "linear"}), "factor is needed for the rotary kind linear: `absent`".into()),
        (json!({"rope_type": "linear", "factor": -1}), "factor must be a positive number: `-1`".into()),
        (
            json!({"rope_type": "yarn", "type": "linear", "factor": 2}),
            "type is not what rope_type says: `linear`".into(),
        ),
        (
            json!({"rope_type": "linear", "factor": 2.0, "mscale": 1.0}),
            "mscale is not supported in the rotary kind linear: `1.0`".into(),
        ),
        (
            json!({"rope_type": "default", "mrope_section": [16, 24]}),
            "mrope_section is not supported in the rotary kind default: `[16,24]`".into(),
        ),
        (
            json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1}),
            "high_freq_factor is needed for the rotary kind llama3: `absent`".into(),
        ),
        (json!({"partial_rotary_factor": 0.25}), "partial_rotary_factor is not supported: `0.25`".into()),
        (json!("yarn"), "rope_scaling must be an object: `yarn`".into()),
    ] {
        let (found, _) = refusal("llama", json!({"rope_parameters": null, "rope_scaling": parameters}));
        assert_eq!(found, format!("config.json: {message}"));
    }
    let (found, _) = refusal("llama", json!({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}));
    assert!(found.starts_with("config.json: rope_scaling is not what rope_parameters says: "), "{found}");
}

#[test]
fn variants_of_a_class_are_refused_by_name() {
    for name in ["Qwen2BidirectionalModel", "Qwen2ForTokenClassification", "LlamaForCausalLM", "BiQwen2ForCausalLM"] {
        let (message, hint) = refusal("qwen2", json!({"architectures": [name]}));
        assert_eq!(message, format!("config.json: architectures is not supported: `[\"{name}\"]`"));
        assert_eq!(hint, "supported here: Qwen2ForCausalLM, Qwen2Model, Qwen2ForSequenceClassification");
    }
    let (message, hint) = refusal("qwen2", json!({"model_type": "qwen2_moe"}));
    assert_eq!(message, "config.json: model_type is not supported: `qwen2_moe`");
    assert!(hint.contains("llama, qwen2, qwen3"));
}

#[test]
fn tensors_that_are_missing_or_left_over_are_all_told() {
    let mut folder = Folder::from_golden("qwen2");
    folder.tensors.remove("model.layers.1.self_attn.k_proj.bias");
    folder.zeros("model.layers.0.self_attn.q_norm.weight", &[16]);
    let (message, _) = load_error(folder.write());
    assert!(message.contains("missing tensor of shape [32]: `model.layers.1.self_attn.k_proj.bias`"), "{message}");
    assert!(message.contains("unexpected tensor: `model.layers.0.self_attn.q_norm.weight`"), "{message}");

    let mut folder = Folder::from_golden("qwen2-untied");
    folder.tensors.remove("lm_head.weight");
    assert_eq!(load_error(folder.write()).0, "missing tensor of shape [384, 96]: `lm_head.weight`");
}

#[test]
fn harmless_settings_of_real_files_are_passed_over() {
    let mut folder = Folder::from_golden("qwen2");
    for (key, value) in [
        ("is_causal", json!(true)),
        ("is_decoder", json!(true)),
        ("use_mrope", json!(false)),
        ("rope_scaling", Value::Null),
        ("pretraining_tp", json!(1)),
        ("attention_dropout", json!(0.1)),
        ("auto_map", json!({"AutoTokenizer": "tokenization.Tokenizer"})),
        ("partial_rotary_factor", json!(1.0)),
        ("num_experts", Value::Null),
    ] {
        folder.config[key] = value;
    }
    assert!(inspect(folder.write(), None).is_ok());
    folder.config.as_object_mut().unwrap().remove("architectures");
    assert_eq!(inspect(folder.write(), None).unwrap().architecture, "Qwen2ForCausalLM");
}

#[test]
fn yarn_reaches_as_far_as_it_stretches() {
    let mut folder = Folder::from_golden("qwen2");
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 1e6});
    folder.config["rope_parameters"] = yarn;
    assert_eq!(inspect(folder.write(), None).unwrap().max_positions, 1024);
    assert_eq!(inspect(&golden("qwen2"), None).unwrap().max_positions, 256);
}
