//! BERT against a plain f64 implementation, for sizes that no published model has and settings that the golden folders
//! lack.

#![allow(clippy::unwrap_used)]

mod common;

use candle_core::{DType, Device, Tensor};
use common::{Batch, Folder, Random, distance, load, load_on, ways};
use serde_json::json;

/// float32 against f64, through two layers of width below 200.
const TOLERANCE: f32 = 2e-5;

/// Rows of f64.
type Rows = Vec<Vec<f64>>;

struct Reference<'a>(&'a Folder);

impl Reference<'_> {
    fn tensor(&self, name: &str) -> Vec<f64> {
        let tensor = self.0.tensors[name].to_dtype(DType::F64).unwrap();
        tensor.flatten_all().unwrap().to_vec1().unwrap()
    }

    fn size(&self, key: &str) -> usize {
        self.0.config[key].as_u64().unwrap() as usize
    }

    fn linear(&self, name: &str, rows: &Rows) -> Rows {
        let (weight, bias) = (self.tensor(&format!("{name}.weight")), self.tensor(&format!("{name}.bias")));
        let dot = |row: &[f64], weight: &[f64]| row.iter().zip(weight).map(|(x, w)| x * w).sum::<f64>();
        rows.iter().map(|row| weight.chunks(row.len()).zip(&bias).map(|(w, b)| dot(row, w) + b).collect()).collect()
    }

    fn norm(&self, name: &str, rows: &Rows) -> Rows {
        let (weight, bias) = (self.tensor(&format!("{name}.weight")), self.tensor(&format!("{name}.bias")));
        let eps = self.0.config["layer_norm_eps"].as_f64().unwrap();
        let one = |row: &Vec<f64>| {
            let mean = row.iter().sum::<f64>() / row.len() as f64;
            let variance = row.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / row.len() as f64;
            let scaled = row.iter().map(|value| (value - mean) / (variance + eps).sqrt());
            scaled.zip(weight.iter().zip(&bias)).map(|(value, (w, b))| value * w + b).collect()
        };
        rows.iter().map(one).collect()
    }

    fn attention(&self, layer: &str, rows: &Rows) -> Rows {
        let (hidden, heads) = (self.size("hidden_size"), self.size("num_attention_heads"));
        let width = hidden / heads;
        let part = |name: &str| self.linear(&format!("{layer}.attention.self.{name}"), rows);
        let (query, key, value) = (part("query"), part("key"), part("value"));
        let mut out = vec![vec![0.0; hidden]; rows.len()];
        for head in 0..heads {
            let range = head * width..(head + 1) * width;
            for (at, out) in out.iter_mut().enumerate() {
                let score = |other: &Vec<f64>| {
                    let dot = query[at][range.clone()].iter().zip(&other[range.clone()]).map(|(q, k)| q * k);
                    dot.sum::<f64>() / (width as f64).sqrt()
                };
                let scores: Vec<f64> = key.iter().map(score).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
                let total: f64 = weights.iter().sum();
                for (weight, value) in weights.iter().zip(&value) {
                    for feature in range.clone() {
                        out[feature] += weight / total * value[feature];
                    }
                }
            }
        }
        out
    }

    fn hidden_states(&self, ids: &[u32], activation: fn(f64) -> f64) -> Vec<f32> {
        let hidden = self.size("hidden_size");
        let table = |name: &str| self.tensor(&format!("embeddings.{name}.weight"));
        let (tokens, positions) = (table("word_embeddings"), table("position_embeddings"));
        let has_types = self.size("type_vocab_size") > 0;
        let types = if has_types { table("token_type_embeddings") } else { vec![0.0; hidden] };
        let embed = |(at, id): (usize, &u32)| {
            let feature = |f: usize| tokens[*id as usize * hidden + f] + positions[at * hidden + f] + types[f];
            (0..hidden).map(feature).collect::<Vec<f64>>()
        };
        let mut rows = self.norm("embeddings.LayerNorm", &ids.iter().enumerate().map(embed).collect());
        let add = |left: &Rows, right: &Rows| -> Rows {
            left.iter().zip(right).map(|(l, r)| l.iter().zip(r).map(|(l, r)| l + r).collect()).collect()
        };
        for layer in (0..self.size("num_hidden_layers")).map(|layer| format!("encoder.layer.{layer}")) {
            let attended = self.linear(&format!("{layer}.attention.output.dense"), &self.attention(&layer, &rows));
            rows = self.norm(&format!("{layer}.attention.output.LayerNorm"), &add(&attended, &rows));
            let mut inner = self.linear(&format!("{layer}.intermediate.dense"), &rows);
            inner.iter_mut().flatten().for_each(|value| *value = activation(*value));
            let output = self.linear(&format!("{layer}.output.dense"), &inner);
            rows = self.norm(&format!("{layer}.output.LayerNorm"), &add(&output, &rows));
        }
        rows.into_iter().flatten().map(|value| value as f32).collect()
    }
}

/// The error function by its Taylor series for small arguments and its continued fraction for large ones (Abramowitz
/// and Stegun 7.1.5 and 7.1.14), close to f64's precision.
fn erf(x: f64) -> f64 {
    if x < 0.0 {
        return -erf(-x);
    }
    if x < 2.5 {
        let (mut term, mut sum) = (x, x);
        for n in 1..200 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        return sum * 2.0 / std::f64::consts::PI.sqrt();
    }
    let fraction = (1..200).rev().fold(x, |rest, n| x + f64::from(n) / 2.0 / rest);
    1.0 - (-x * x).exp() / std::f64::consts::PI.sqrt() / fraction
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2))
}

fn gelu_tanh(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

#[test]
fn odd_sizes_equal_a_plain_f64_forward() {
    // hidden, heads, intermediate, token types: odd widths, one wide head, many narrow ones, primes, none of a tile's
    // size.
    let shapes = [(6, 1, 5, 2), (21, 3, 17, 1), (33, 11, 50, 0), (130, 1, 131, 2), (64, 64, 31, 2), (97, 97, 13, 1)];
    for (hidden, heads, intermediate, types) in shapes {
        let folder = Folder::bert(hidden, heads, intermediate, 2, types);
        for way in ways() {
            let engine = load_on(folder.write(), way);
            for length in [1, 2, 7, 40] {
                let ids = Random::new(length as u64).sequence(length, 50);
                let output = engine.hidden_states(&Batch::new(std::slice::from_ref(&ids)).ragged()).unwrap();
                let distance = distance(&output.data, &Reference(&folder).hidden_states(&ids, gelu));
                assert!(distance <= TOLERANCE, "{hidden}/{heads}/{intermediate} on {:?}: {distance}", way);
            }
        }
    }
}

#[test]
fn activations_are_those_that_the_configuration_names() {
    let mut folder = Folder::bert(24, 2, 40, 2, 2);
    let ids = Random::new(1).sequence(12, 50);
    let activations = [
        ("gelu", gelu as fn(f64) -> f64),
        ("gelu_python", gelu),
        ("gelu_new", gelu_tanh),
        ("gelu_fast", gelu_tanh),
        ("gelu_pytorch_tanh", gelu_tanh),
        ("relu", |x| x.max(0.0)),
        ("silu", silu),
        ("swish", silu),
        ("tanh", f64::tanh),
    ];
    for (name, activation) in activations {
        folder.config["hidden_act"] = json!(name);
        let output = load(folder.write()).hidden_states(&Batch::new(std::slice::from_ref(&ids)).ragged()).unwrap();
        let distance = distance(&output.data, &Reference(&folder).hidden_states(&ids, activation));
        assert!(distance <= TOLERANCE, "{name}: {distance}");
    }
}

#[test]
fn weights_stored_in_half_precision_are_computed_in_float32() {
    for dtype in [DType::F16, DType::BF16] {
        let mut folder = Folder::bert(32, 4, 48, 2, 2);
        folder.tensors.values_mut().for_each(|tensor| *tensor = tensor.to_dtype(dtype).unwrap());
        let ids = Random::new(5).sequence(20, 50);
        let output = load(folder.write()).hidden_states(&Batch::new(std::slice::from_ref(&ids)).ragged()).unwrap();
        assert!(distance(&output.data, &Reference(&folder).hidden_states(&ids, gelu)) <= TOLERANCE);
    }
}

#[test]
fn the_norm_of_rows_with_a_large_mean_keeps_their_spread() {
    // Without layers, the hidden states are the norm of the token table's rows: mean 1000, spread 0.01.
    let hidden = 384;
    let mut folder = Folder::bert(hidden, 4, 8, 0, 0);
    let mut random = Random::new(11);
    let rows: Vec<f32> = (0..50 * hidden).map(|_| 1000.0 + 0.01 * random.number()).collect();
    let set = |folder: &mut Folder, name: &str, values: Vec<f32>, shape: &[usize]| {
        folder.tensors.insert(name.to_owned(), Tensor::from_vec(values, shape, &Device::Cpu).unwrap());
    };
    set(&mut folder, "embeddings.word_embeddings.weight", rows, &[50, hidden]);
    set(&mut folder, "embeddings.position_embeddings.weight", vec![0.0; 600 * hidden], &[600, hidden]);
    set(&mut folder, "embeddings.LayerNorm.weight", vec![1.0; hidden], &[hidden]);
    set(&mut folder, "embeddings.LayerNorm.bias", vec![0.0; hidden], &[hidden]);
    let ids: Vec<u32> = (0..50).collect();
    for way in ways() {
        let batch = Batch::new(std::slice::from_ref(&ids));
        let output = load_on(folder.write(), way).hidden_states(&batch.ragged()).unwrap();
        let distance = distance(&output.data, &Reference(&folder).hidden_states(&ids, gelu));
        assert!(distance <= 1e-4, "{way:?}: {distance}");
    }
}
