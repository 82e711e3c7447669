//! Models that are split over ranks, threads over loopback sockets, give what the whole model gives; all ranks hold
//! equal bits; what goes wrong on one is told on all.

#![allow(missing_docs, clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod encoders;
mod failures;

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use candle_core::{Device, Tensor};
use candle_engine::comm::{Communicator, Tcp};
use candle_engine::cpu::{Isa, Storage};
use candle_engine::generate::{Logits, Params, StepBatch, StepModel, StepSequence};
use candle_engine::{Dtype, EmbedOptions, Engine, LoadOptions, Output};
use common::{Batch, Folder, Random, cases, distance, expected, golden, group, load};
use serde_json::json;

const WAIT: Duration = Duration::from_secs(60);

/// As of whole models: float32, sums in another order. Between whole and split ones logits keep to it, too.
const HIDDEN_TOLERANCE: f32 = 2e-5;
const LOGIT_TOLERANCE: f32 = 5e-5;

const WORLDS: [(&str, &[usize]); 4] =
    [("qwen2", &[2, 4]), ("qwen2-untied", &[2]), ("qwen3", &[2, 4]), ("llama", &[2, 4, 8])];

fn options(tcp: Arc<Tcp>) -> LoadOptions {
    LoadOptions { threads: Some(1 + tcp.rank() % 2), communicator: Some(tcp), ..LoadOptions::default() }
}

/// Runs `work` on rank 0's engine while all others follow; what it gave, and what every follower saw.
fn led<T: Send>(dir: &Path, world: usize, work: impl Fn(&Engine) -> T + Send + Sync) -> (T, Vec<Vec<Vec<u32>>>) {
    let given = Mutex::new(None);
    let mut seen = group(world, WAIT, |tcp| {
        let rank = tcp.rank();
        let engine = Engine::load(dir, &options(tcp)).unwrap();
        let mut seen = Vec::new();
        if rank == 0 {
            *given.lock().unwrap() = Some(work(&engine));
        } else {
            engine.follow_with(|numbers| seen.push(bits(numbers))).unwrap();
        }
        seen
    });
    seen.remove(0);
    (given.into_inner().unwrap().unwrap(), seen)
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

fn last() -> EmbedOptions {
    EmbedOptions { pooling: Some("last".parse().unwrap()), normalize: Some(true), ..EmbedOptions::default() }
}

#[test]
fn golden_decoders_equal_the_reference_on_all_ranks() {
    for (name, worlds) in WORLDS {
        let batch = Batch::new(&cases(name, "ids"));
        let alone = load(&golden(name));
        let logprobs = alone.token_logprobs(&batch.ragged()).unwrap();
        let embedded = alone.embed(&batch.ragged(), &last()).unwrap();
        let whole = alone.logits(&batch.ragged()).unwrap();
        for world in worlds {
            let (found, seen) = led(&golden(name), *world, |engine| {
                assert_eq!(engine.rank_and_world(), (0, *world));
                let batch = batch.ragged();
                [
                    engine.hidden_states(&batch).unwrap(),
                    engine.logits(&batch).unwrap(),
                    engine.token_logprobs(&batch).unwrap(),
                    engine.embed(&batch, &last()).unwrap(),
                ]
            });
            let [hidden, logits, scores, vectors] = &found;
            let told = |what: &str, distance: f32, tolerance: f32| {
                assert!(distance <= tolerance, "{name} over {world}: {what} differ by {distance}");
            };
            told("hidden states", distance(&hidden.data, &expected(name, "hidden")), HIDDEN_TOLERANCE);
            told("logits", distance(&logits.data, &expected(name, "logits")), LOGIT_TOLERANCE);
            told("the whole model's logits", distance(&logits.data, &whole.data), HIDDEN_TOLERANCE);
            told("log-probabilities", distance(&scores.data, &logprobs.data), LOGIT_TOLERANCE);
            told("embeddings", distance(&vectors.data, &embedded.data), HIDDEN_TOLERANCE);
            let wanted: Vec<_> = [hidden, logits, scores, hidden].iter().map(|output| bits(&output.data)).collect();
            assert_eq!(seen.len() + 1, *world);
            assert!(seen.iter().all(|seen| *seen == wanted), "{name} over {world}: ranks differ");
        }
    }
}

/// New ids of all prompts, generated together.
fn generated(engine: &Engine, prompts: &[Vec<u32>], params: &Params) -> Vec<Vec<u32>> {
    common::generated(engine.session().unwrap(), prompts, params, common::limits(engine, 4, 1 << 20))
}

#[test]
fn greedy_decoding_over_ranks_gives_the_reference_ids() {
    for (name, worlds) in WORLDS {
        for world in worlds {
            let (found, seen) =
                led(&golden(name), *world, |engine| generated(engine, &cases(name, "ids"), &Params::greedy(24)));
            assert_eq!(found, cases(name, "greedy"), "{name} over {world}");
            assert!(!seen[0].is_empty() && seen.iter().all(|each| *each == seen[0]), "{name} over {world}");
        }
    }
}

#[test]
fn beams_and_samples_over_ranks_are_those_of_the_whole_model() {
    let prompts = cases("qwen3", "ids");
    let work = |engine: &Engine| {
        let beams = Params { beams: 3, ..Params::greedy(12) };
        let sampled = Params { temperature: 0.7, top_k: Some(20), seed: 3, ..Params::greedy(12) };
        (generated(engine, &prompts, &beams), generated(engine, &prompts, &sampled))
    };
    let wanted = work(&load(&golden("qwen3")));
    for world in [2, 4] {
        assert_eq!(led(&golden("qwen3"), world, work).0, wanted, "over {world}");
    }
}

/// A Llama with biases everywhere, a vocabulary that no world divides, and random weights.
fn odd_model(heads: usize, kv_heads: usize, tied: bool) -> Folder {
    let (hidden, head_dim, inner, vocab) = (48, 8, 36, 101);
    let mut folder = Folder::empty(json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "vocab_size": vocab,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "num_hidden_layers": 2,
        "intermediate_size": inner, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 700,
        "attention_bias": true, "mlp_bias": true, "tie_word_embeddings": tied,
    }));
    let mut random = Random::new(heads as u64 * 10 + kv_heads as u64);
    let mut add = |name: String, shape: &[usize]| {
        let (scale, base) = match (name.contains("norm"), shape.len()) {
            (true, _) => (0.3, 1.0),
            (false, 1) => (0.5, 0.0),
            (false, _) => ((3.0 / shape[1] as f32).sqrt(), 0.0),
        };
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| scale * random.number() + base).collect();
        folder.tensors.insert(name, Tensor::from_vec(values, shape, &Device::Cpu).unwrap());
    };
    add("model.embed_tokens.weight".into(), &[vocab, hidden]);
    if !tied {
        add("lm_head.weight".into(), &[vocab, hidden]);
    }
    add("model.norm.weight".into(), &[hidden]);
    for layer in 0..2 {
        let linears = [
            ("self_attn.q_proj", heads * head_dim, hidden),
            ("self_attn.k_proj", kv_heads * head_dim, hidden),
            ("self_attn.v_proj", kv_heads * head_dim, hidden),
            ("self_attn.o_proj", hidden, heads * head_dim),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ];
        for (name, rows, columns) in linears {
            add(format!("model.layers.{layer}.{name}.weight"), &[rows, columns]);
            add(format!("model.layers.{layer}.{name}.bias"), &[rows]);
        }
        add(format!("model.layers.{layer}.input_layernorm.weight"), &[hidden]);
        add(format!("model.layers.{layer}.post_attention_layernorm.weight"), &[hidden]);
    }
    folder
}

#[test]
fn biases_odd_vocabularies_long_texts_and_copied_heads_are_right_over_any_world() {
    let mut random = Random::new(5);
    // One longer than a chunk, so that there are several, of which the ranks must agree.
    let sequences: Vec<Vec<u32>> = [1, 300, 7, 90, 411].map(|length| random.sequence(length, 101)).to_vec();
    let batch = Batch::new(&sequences);
    for (heads, kv_heads, tied, dtype, worlds) in [
        (6, 3, true, Dtype::Float32, [2, 3, 6].as_slice()),
        (6, 1, false, Dtype::Float32, &[2, 3, 6]),
        (12, 4, false, Dtype::Bfloat16, &[2, 4, 12]),
    ] {
        let folder = odd_model(heads, kv_heads, tied);
        let dir = folder.write();
        let all = |engine: &Engine| -> [Output; 3] {
            let batch = batch.ragged();
            [engine.hidden_states(&batch), engine.logits(&batch), engine.token_logprobs(&batch)].map(Result::unwrap)
        };
        // Where rows are rounded to bfloat16, the order of a sum over ranks decides which way: this holds without tiles.
        let isa = Some(Isa::detected(Storage::Float32));
        let whole = Engine::load(dir, &LoadOptions { dtype, isa, ..LoadOptions::default() }).unwrap();
        let wanted = all(&whole);
        for world in
            worlds.iter().filter(|world| heads % **world == 0 && kv_heads.max(**world) % kv_heads.min(**world) == 0)
        {
            let given = Mutex::new(None);
            group(*world, WAIT, |tcp| {
                let rank = tcp.rank();
                let engine = Engine::load(dir, &LoadOptions { dtype, isa, ..options(tcp) }).unwrap();
                match rank {
                    0 => *given.lock().unwrap() = Some(all(&engine)),
                    _ => engine.follow().unwrap(),
                }
            });
            let found = given.into_inner().unwrap().unwrap();
            for ((found, wanted), tolerance) in found.iter().zip(&wanted).zip([2e-5, 5e-5, 5e-5]) {
                let distance = distance(&found.data, &wanted.data);
                assert!(distance <= tolerance, "{heads} heads, {kv_heads}, over {world}: {distance}");
            }
        }
    }
}

#[test]
fn gguf_files_are_split_too() {
    for name in ["gguf-llama-q4_0", "gguf-qwen2-q8_0", "gguf-qwen3-q4_1"] {
        let (dir, batch) = (golden(name).join("model.gguf"), Batch::new(&cases(name, "ids")));
        let wanted = load(&dir).logits(&batch.ragged()).unwrap();
        let (found, seen) = led(&dir, 2, |engine| engine.logits(&batch.ragged()).unwrap());
        let distance = distance(&found.data, &wanted.data);
        assert!(distance <= LOGIT_TOLERANCE, "{name}: {distance}");
        assert_eq!(seen, [[bits(&found.data)]]);
    }
}

#[test]
fn a_classifier_over_ranks_gives_what_it_gives_whole() {
    let mut folder = Folder::from_golden("qwen2");
    folder.config["architectures"] = json!(["Qwen2ForSequenceClassification"]);
    folder.config["id2label"] = json!({"0": "no", "1": "yes"});
    let score: Vec<f32> = (0..2 * 64).map(|index| (index as f32 * 0.7).sin()).collect();
    folder.tensors.insert("score.weight".into(), Tensor::from_vec(score, &[2, 64], &Device::Cpu).unwrap());
    let batch = Batch::new(&cases("qwen2", "ids"));
    let wanted = load(folder.write()).classify(&batch.ragged()).unwrap();
    let (found, _) = led(folder.dir.path(), 2, |engine| engine.classify(&batch.ragged()).unwrap());
    assert!(distance(&found.data, &wanted.data) <= LOGIT_TOLERANCE);
}

#[test]
fn sessions_share_and_copy_blocks_on_every_rank() {
    let text = |seed| Random::new(seed).sequence(29, 384);
    let shared = text(1)[..20].to_vec();
    let ends = [text(2)[..9].to_vec(), text(3)[..9].to_vec()];
    let whole = [[shared.clone(), ends[0].clone()].concat(), [shared.clone(), ends[1].clone()].concat()];
    let work = |engine: &Engine| {
        let mut session = engine.session().unwrap();
        let mut other = engine.session().unwrap();
        other.resize_cache(3).unwrap();
        session.resize_cache(4).unwrap();
        let mut logits = Vec::new();
        let first = StepSequence { tokens: 0..20, start: 0, blocks: vec![3, 2], logits: Logits::None };
        session.step(&StepBatch { tokens: shared.clone(), sequences: vec![first.clone()] }, &mut logits).unwrap();
        // A block that a session copies is its own: the other session's of that number has other content.
        other.copy_block(2, 1).unwrap();
        session.resize_cache(6).unwrap();
        session.copy_block(2, 5).unwrap();
        drop(other);
        let sequence = |tokens, blocks| StepSequence { tokens, start: 20, blocks, logits: Logits::All };
        let sequences = vec![sequence(0..9, vec![3, 2]), sequence(9..18, vec![3, 5])];
        session.step(&StepBatch { tokens: ends.concat(), sequences }, &mut logits).unwrap();
        // What this rank sees to be wrong is refused, and the ranks go on.
        let wrong = StepBatch { tokens: vec![384], sequences: vec![StepSequence { tokens: 0..1, ..first }] };
        assert!(session.step(&wrong, &mut Vec::new()).is_err());
        assert!(engine.logits(&Batch::new(&[vec![384]]).ragged()).is_err());
        let too_much = session.resize_cache(usize::MAX / 2).unwrap_err();
        assert!(too_much.to_string().starts_with("memory is too small for a cache"), "{too_much}");
        let all = engine.logits(&Batch::new(&whole).ragged()).unwrap();
        (logits, [&all.data[20 * 384..29 * 384], &all.data[49 * 384..]].concat())
    };
    for world in [2, 4] {
        let ((logits, wanted), _) = led(&golden("qwen3"), world, work);
        assert_eq!(bits(&logits), bits(&wanted), "over {world}");
    }
}

#[test]
fn threads_of_rank_0_take_turns() {
    let sequences = cases("llama", "ids");
    let (same, _) = led(&golden("llama"), 2, |engine| {
        let wanted: Vec<_> = sequences
            .iter()
            .map(|row| engine.logits(&Batch::new(std::slice::from_ref(row)).ragged()).unwrap())
            .collect();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        sequences.iter().zip(&wanted).all(|(row, wanted)| {
                            engine.logits(&Batch::new(std::slice::from_ref(row)).ragged()).unwrap() == *wanted
                        })
                    })
                })
                .collect();
            threads.into_iter().all(|thread| thread.join().unwrap())
        })
    });
    assert!(same);
}

#[test]
fn one_instruction_set_for_all_is_not_needed_to_agree() {
    let batch = Batch::new(&cases("qwen3", "ids"));
    let given = Mutex::new(None);
    group(2, WAIT, |tcp| {
        let rank = tcp.rank();
        let isa = if rank == 0 { Isa::detected(Storage::Float32) } else { Isa::Scalar };
        let engine = Engine::load(&golden("qwen3"), &LoadOptions { isa: Some(isa), ..options(tcp) }).unwrap();
        match rank {
            0 => *given.lock().unwrap() = Some(engine.logits(&batch.ragged()).unwrap()),
            _ => engine.follow().unwrap(),
        }
    });
    let found = given.into_inner().unwrap().unwrap();
    assert!(distance(&found.data, &expected("qwen3", "logits")) <= LOGIT_TOLERANCE);
}
