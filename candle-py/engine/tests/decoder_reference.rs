//! Decoders against a plain f64 implementation, for shapes, rotary kinds and windows that the golden folders lack, whole and
//! through the paged cache.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::f64::consts::TAU;
use std::ops::Range;

use candle_core::DType;
use candle_engine::Engine;
use candle_engine::generate::{Logits, StepBatch, StepModel, StepSequence};
use common::{Batch, Folder, Random, Way, distance, load, load_on, same_bits, ways};
use serde_json::{Value, json};

/// float32 against f64, through two layers of width below 200.
const TOLERANCE: f32 = 2e-5;

/// Rows of f64.
type Rows = Vec<Vec<f64>>;

/// The model, read from its JSON and tensors alone.
struct Reference<'a> {
    config: &'a Value,
    tensors: BTreeMap<&'a str, Vec<f64>>,
}

impl<'a> Reference<'a> {
    fn new(folder: &'a Folder) -> Self {
        let numbers = |tensor: &candle_core::Tensor| {
            tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
        };
        let tensors = folder.tensors.iter().map(|(name, tensor)| (name.as_str(), numbers(tensor))).collect();
        Self { config: &folder.config, tensors }
    }

    fn size(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap() as usize
    }

    fn head_dim(&self) -> usize {
        let told = self.config["head_dim"].as_u64().map(|width| width as usize);
        told.unwrap_or_else(|| self.size("hidden_size") / self.size("num_attention_heads"))
    }

    fn linear(&self, name: &str, rows: &Rows) -> Rows {
        let weight = &self.tensors[format!("{name}.weight").as_str()];
        let bias = self.tensors.get(format!("{name}.bias").as_str());
        let dot = |row: &[f64], weight: &[f64]| row.iter().zip(weight).map(|(x, w)| x * w).sum::<f64>();
        let one = |row: &Vec<f64>| {
            let products = weight.chunks(row.len()).map(|weight| dot(row, weight));
            products.enumerate().map(|(at, product)| product + bias.map_or(0.0, |bias| bias[at])).collect()
        };
        rows.iter().map(one).collect()
    }

    fn norm(&self, name: &str, row: &[f64]) -> Vec<f64> {
        let weight = &self.tensors[format!("{name}.weight").as_str()];
        let square = row.iter().map(|value| value * value).sum::<f64>() / row.len() as f64;
        let scale = (square + self.config["rms_norm_eps"].as_f64().unwrap()).sqrt();
        row.iter().zip(weight).map(|(value, weight)| value / scale * weight).collect()
    }

    /// Rotates heads by the position, in place; the frequencies in the form in which transformers has them.
    fn rotate(&self, row: &mut [f64], position: usize) {
        let (dim, width) = (self.head_dim(), self.head_dim() as f64);
        let parameters = match &self.config["rope_parameters"] {
            Value::Null => &self.config["rope_scaling"],
            parameters => parameters,
        };
        let theta = parameters["rope_theta"].as_f64().or(self.config["rope_theta"].as_f64()).unwrap();
        let number = |key: &str, default: f64| parameters[key].as_f64().unwrap_or(default);
        let original = number("original_max_position_embeddings", self.size("max_position_embeddings") as f64);
        let (factor, mut magnitude) = (number("factor", 1.0), 1.0);
        let kind = parameters["rope_type"].as_str().or(parameters["type"].as_str()).unwrap_or("default");
        let frequency = |pair: usize| {
            let plain = 1.0 / theta.powf(2.0 * pair as f64 / width);
            match kind {
                "default" => plain,
                "linear" => plain / factor,
                "llama3" => {
                    let (low, high) = (number("low_freq_factor", 0.0), number("high_freq_factor", 0.0));
                    let wave = TAU / plain;
                    let smooth = (original / wave - low) / (high - low);
                    match () {
                        () if wave > original / low => plain / factor,
                        () if wave < original / high => plain,
                        () => (1.0 - smooth) * plain / factor + smooth * plain,
                    }
                }
                "yarn" => {
                    let dimension = |turns: f64| width * (original / (turns * TAU)).ln() / (2.0 * theta.ln());
                    let (mut low, mut high) =
                        (dimension(number("beta_fast", 32.0)), dimension(number("beta_slow", 1.0)));
                    if parameters["truncate"] != json!(false) {
                        (low, high) = (low.floor(), high.ceil());
                    }
                    (low, high) = (low.max(0.0), high.min(width - 1.0));
                    high += if low == high { 0.001 } else { 0.0 };
                    let kept = 1.0 - ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    plain / factor * (1.0 - kept) + plain * kept
                }
                other => panic!("{other}"),
            }
        };
        if kind == "yarn" {
            let scale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
            let (one, all) = (number("mscale", 0.0), number("mscale_all_dim", 0.0));
            let default = if one != 0.0 && all != 0.0 { scale(one) / scale(all) } else { scale(1.0) };
            magnitude = number("attention_factor", default);
        }
        for head in row.chunks_mut(dim) {
            for pair in 0..dim / 2 {
                let (sin, cos) = (position as f64 * frequency(pair)).sin_cos();
                let (a, b) = (head[pair], head[pair + dim / 2]);
                head[pair] = magnitude * (a * cos - b * sin);
                head[pair + dim / 2] = magnitude * (b * cos + a * sin);
            }
        }
    }

    /// The keys that a token sees in a layer.
    fn visible(&self, layer: usize, position: usize) -> Range<usize> {
        let is_sliding = match &self.config["layer_types"] {
            Value::Null => self.config["max_window_layers"].as_u64().is_some_and(|first| layer as u64 >= first),
            types => types[layer] == json!("sliding_attention"),
        };
        let window = self.config["sliding_window"].as_u64().map_or(usize::MAX, |window| window as usize);
        let in_use = is_sliding && self.config["use_sliding_window"] == json!(true);
        if in_use { (position + 1).saturating_sub(window)..position + 1 } else { 0..position + 1 }
    }

    fn attention(&self, layer: usize, rows: &Rows, wanted: &[usize]) -> Rows {
        let (heads, kv_heads, width) =
            (self.size("num_attention_heads"), self.size("num_key_value_heads"), self.head_dim());
        let name = |part: &str| format!("model.layers.{layer}.self_attn.{part}");
        let has_norm = self.config["model_type"] == json!("qwen3");
        let ready = |part: &str| {
            let mut rows = self.linear(&name(&format!("{part}_proj")), rows);
            for (position, row) in rows.iter_mut().enumerate() {
                if has_norm {
                    *row = row.chunks(width).flat_map(|head| self.norm(&name(&format!("{part}_norm")), head)).collect();
                }
                self.rotate(row, position);
            }
            rows
        };
        let (query, key, value) = (ready("q"), ready("k"), self.linear(&name("v_proj"), rows));
        let mut out = vec![vec![0.0; heads * width]; rows.len()];
        for at in wanted {
            for head in 0..heads {
                let (own, other) = (head * width, head / (heads / kv_heads) * width);
                let seen = self.visible(layer, *at);
                let score = |key: &Vec<f64>| {
                    let dot = query[*at][own..own + width].iter().zip(&key[other..other + width]).map(|(q, k)| q * k);
                    dot.sum::<f64>() / (width as f64).sqrt()
                };
                let scores: Vec<f64> = key[seen.clone()].iter().map(score).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
                let total: f64 = weights.iter().sum();
                for (weight, value) in weights.iter().zip(&value[seen]) {
                    for feature in 0..width {
                        out[*at][own + feature] += weight / total * value[other + feature];
                    }
                }
            }
        }
        self.linear(&name("o_proj"), &out)
    }

    /// Logits of the rows `wanted`; all rows where there is more than one layer.
    fn logits(&self, ids: &[u32], wanted: &[usize]) -> Vec<f32> {
        let (hidden, layers) = (self.size("hidden_size"), self.size("num_hidden_layers"));
        let table = &self.tensors["model.embed_tokens.weight"];
        let mut rows: Rows = ids.iter().map(|id| table[*id as usize * hidden..][..hidden].to_vec()).collect();
        let all: Vec<usize> = (0..ids.len()).collect();
        let act = |x: f64| x / (1.0 + (-x).exp());
        for index in 0..layers {
            let layer = format!("model.layers.{index}");
            let norm = |part: &str, rows: &Rows| -> Rows {
                rows.iter().map(|row| self.norm(&format!("{layer}.{part}"), row)).collect()
            };
            let add = |left: &mut Rows, right: &Rows| {
                left.iter_mut().flatten().zip(right.iter().flatten()).for_each(|(left, right)| *left += right);
            };
            let queries = if index + 1 == layers { wanted } else { &all };
            let attended = self.attention(index, &norm("input_layernorm", &rows), queries);
            add(&mut rows, &attended);
            let normed = norm("post_attention_layernorm", &rows);
            let mut inner = self.linear(&format!("{layer}.mlp.gate_proj"), &normed);
            let up = self.linear(&format!("{layer}.mlp.up_proj"), &normed);
            inner.iter_mut().flatten().zip(up.iter().flatten()).for_each(|(gate, up)| *gate = act(*gate) * up);
            add(&mut rows, &self.linear(&format!("{layer}.mlp.down_proj"), &inner));
        }
        let last: Rows = wanted.iter().map(|row| self.norm("model.norm", &rows[*row])).collect();
        let tied = self.config["tie_word_embeddings"] == json!(true);
        let head = if tied { "model.embed_tokens" } else { "lm_head" };
        self.linear(head, &last).into_iter().flatten().map(|value| value as f32).collect()
    }
}

/// Logits of one sequence through the cache, `chunk` tokens a step.
fn cached(engine: &Engine, ids: &[u32], chunk: usize) -> Vec<f32> {
    let mut session = engine.session().unwrap();
    let count = ids.len().div_ceil(16) as u32;
    session.resize_cache(count as usize).unwrap();
    let (mut found, mut logits) = (Vec::new(), Vec::new());
    for (index, tokens) in ids.chunks(chunk).enumerate() {
        let blocks = (0..count).rev().collect();
        let sequence = StepSequence { tokens: 0..tokens.len(), start: index * chunk, blocks, logits: Logits::All };
        session.step(&StepBatch { tokens: tokens.to_vec(), sequences: vec![sequence] }, &mut logits).unwrap();
        found.extend_from_slice(&logits);
    }
    found
}

/// The model that `settings` make, whole and cached, on every instruction set, against the reference.
fn check(settings: Value) {
    let folder = Folder::decoder(settings.clone());
    let reference = Reference::new(&folder);
    let dir = folder.write();
    for length in [1, 2, 17, 60] {
        let ids = Random::new(length as u64).sequence(length, 50);
        let wanted = reference.logits(&ids, &(0..length).collect::<Vec<_>>());
        for way in ways() {
            let engine = load_on(dir, way);
            let found = engine.logits(&Batch::new(std::slice::from_ref(&ids)).ragged()).unwrap();
            let distance = distance(&found.data, &wanted);
            assert!(distance <= TOLERANCE, "{settings} on {:?}, {length} tokens: {distance}", way);
            for chunk in [1, 7, 40] {
                let cached = cached(&engine, &ids, chunk);
                let is_same = match way {
                    Way::Kernels(_) => same_bits(&found, &cached),
                    // The sums of Candle's products depend on the number of rows.
                    Way::Tensors(_) => crate::distance(&found.data, &cached) <= TOLERANCE,
                };
                assert!(is_same, "{settings} on {way:?}: {chunk}");
            }
        }
    }
}

#[test]
fn shapes_that_no_golden_folder_has() {
    // No grouping, one head of keys, wide and narrow heads, heads whose width is no multiple of a register.
    for (hidden, heads, kv_heads, head_dim) in
        [(24, 4, 4, 6), (24, 4, 1, 6), (20, 6, 2, 16), (48, 3, 1, 64), (16, 2, 2, 2), (36, 7, 7, 18), (32, 14, 2, 20)]
    {
        for family in ["llama", "qwen2", "qwen3"] {
            check(json!({
                "model_type": family, "hidden_size": hidden, "num_attention_heads": heads,
                "num_key_value_heads": kv_heads, "head_dim": head_dim,
            }));
        }
    }
}

#[test]
fn biases_and_tied_heads_are_obeyed() {
    check(json!({"attention_bias": true, "mlp_bias": true}));
    check(json!({"model_type": "qwen3", "attention_bias": true, "head_dim": 12, "tie_word_embeddings": true}));
    check(json!({"model_type": "qwen2", "tie_word_embeddings": true}));
}

#[test]
fn rotary_kinds_follow_their_formulas() {
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32});
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    });
    let mut kinds = vec![
        json!({"rope_type": "default", "rope_theta": 500.0}),
        json!({"type": "linear", "factor": 2.5}),
        json!({"rope_type": "linear", "type": "linear", "factor": 4, "rope_theta": 100_000.0}),
        json!({"rope_type": "yarn", "factor": 2.0}),
        json!({"type": "yarn", "factor": 0.5, "original_max_position_embeddings": 4096, "finetuned": true}),
        llama3,
        yarn.clone(),
    ];
    for (key, value) in [
        ("attention_factor", json!(0.7)),
        ("beta_fast", json!(8)),
        ("beta_slow", json!(0.25)),
        ("mscale", json!(0.8)),
        ("truncate", json!(false)),
        ("rope_theta", json!(1_000_000.0)),
    ] {
        let mut kind = yarn.clone();
        kind[key] = value;
        kinds.push(kind.clone());
        kind["mscale"] = json!(1.3);
        kind["mscale_all_dim"] = json!(0.6);
        kinds.push(kind);
    }
    for kind in kinds {
        for key in ["rope_parameters", "rope_scaling"] {
            check(json!({key: kind, "head_dim": 16, "model_type": "qwen3"}));
        }
    }
}

#[test]
fn windows_follow_layer_types_or_the_number_of_full_layers() {
    for window in [1, 2, 5, 16, 33] {
        for family in ["qwen2", "qwen3"] {
            let with = |more: Value| {
                let mut settings = json!({
                    "model_type": family, "use_sliding_window": true, "sliding_window": window, "num_hidden_layers": 3,
                    "head_dim": 6,
                });
                more.as_object().unwrap().iter().for_each(|(key, value)| settings[key] = value.clone());
                check(settings);
            };
            with(json!({"max_window_layers": 1}));
            with(json!({"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}));
        }
    }
    // Not in use, whatever its size.
    check(json!({"model_type": "qwen2", "use_sliding_window": false, "sliding_window": 2, "max_window_layers": 0}));
    check(json!({"model_type": "qwen2", "use_sliding_window": true, "sliding_window": null, "max_window_layers": 0}));
}

#[test]
fn positions_up_to_8000_are_exact() {
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024, "rope_theta": 500_000.0,
    });
    let yarn = json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1000});
    let window = json!({"use_sliding_window": true, "sliding_window": 1500, "max_window_layers": 0});
    for (family, parameters, more) in [
        ("llama", json!({"rope_theta": 10_000.0}), json!({})),
        ("llama", llama3, json!({})),
        ("qwen2", yarn, json!({})),
        ("qwen2", json!({"rope_theta": 10_000.0}), window),
    ] {
        let mut settings = json!({"model_type": family, "rope_parameters": parameters, "num_hidden_layers": 1});
        more.as_object().unwrap().iter().for_each(|(key, value)| settings[key] = value.clone());
        let mut folder = Folder::decoder(settings);
        // In halves, so that storing them in bfloat16 would lose nothing: what is left is the arithmetic.
        folder.tensors.values_mut().for_each(|tensor| *tensor = tensor.to_dtype(DType::BF16).unwrap());
        let ids = Random::new(3).sequence(8000, 50);
        let rows = [0, 1, 255, 256, 257, 511, 512, 513, 1499, 1500, 4095, 7999];
        let wanted = Reference::new(&folder).logits(&ids, &rows);
        let engine = load(folder.write());
        let found = engine.logits(&Batch::new(std::slice::from_ref(&ids)).ragged()).unwrap();
        let picked: Vec<f32> = rows.iter().flat_map(|row| &found.data[row * 50..(row + 1) * 50]).copied().collect();
        let distance = distance(&picked, &wanted);
        assert!(distance <= TOLERANCE, "{}: {distance}", folder.config);
        for chunk in [333, 8000] {
            assert!(same_bits(&found, &cached(&engine, &ids, chunk)), "{}: {chunk}", folder.config);
        }
        // Token by token where a block of keys ends.
        let short = &ids[..530];
        assert_eq!(found.data[..530 * 50], cached(&engine, short, 1), "{}", folder.config);
    }
}
