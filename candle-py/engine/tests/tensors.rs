//! Models on Candle's tensors, the path that a CUDA device takes: generation through the paged cache, pooling, halves and
//! ranks. That whole forwards equal the references is told where the CPU's kernels are tested, too.

#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use candle_core::{DType, Device as TensorDevice, Tensor};
use candle_engine::generate::{Limits, Logits, Params, StepBatch, StepModel, StepSequence};
use candle_engine::{DecoderSession, Device, Dtype, EmbedOptions, Engine, Error, LoadOptions};
use common::{Batch, Folder, Random, Way, cases, distance, expected, golden, group, load, load_on, tensor_ways};
use serde_json::json;

const DECODERS: [&str; 4] = ["qwen2", "qwen2-untied", "qwen3", "llama"];
const VOCAB: usize = 384;

/// As of the CPU's kernels: float32, sums in another order.
const HIDDEN_TOLERANCE: f32 = 2e-5;
const LOGIT_TOLERANCE: f32 = 5e-5;

/// New ids of all prompts, generated together in a cache of so many blocks.
fn generated(engine: &Engine, prompts: &[Vec<u32>], params: &Params, blocks: usize) -> Vec<Vec<u32>> {
    let session = engine.session().unwrap();
    let cache_bytes = blocks * session.block_bytes();
    let limits = Limits { threads: 1, ..common::limits(engine, 6, cache_bytes) };
    common::generated(session, prompts, params, limits)
}

#[test]
fn greedy_decoding_gives_the_reference_ids_in_a_roomy_and_in_a_tight_cache() {
    for way in tensor_ways() {
        for name in DECODERS {
            let engine = load_on(&golden(name), way);
            for blocks in [64, 10] {
                let found = generated(&engine, &cases(name, "ids"), &Params::greedy(24), blocks);
                assert_eq!(found, cases(name, "greedy"), "{name} on {way:?} with {blocks} blocks");
            }
        }
    }
}

#[test]
fn beams_are_those_of_the_cpus_kernels() {
    let params = Params { beams: 3, ..Params::greedy(12) };
    for name in DECODERS {
        let prompts = cases(name, "ids");
        let wanted = generated(&load(&golden(name)), &prompts, &params, 200);
        for way in tensor_ways() {
            assert_eq!(generated(&load_on(&golden(name), way), &prompts, &params, 200), wanted, "{name} on {way:?}");
        }
    }
}

#[test]
fn log_probabilities_are_those_of_the_cpus_kernels() {
    for name in DECODERS {
        let batch = Batch::new(&cases(name, "ids"));
        let wanted = load(&golden(name)).token_logprobs(&batch.ragged()).unwrap();
        for way in tensor_ways() {
            let found = load_on(&golden(name), way).token_logprobs(&batch.ragged()).unwrap();
            let distance = distance(&found.data, &wanted.data);
            assert!(distance <= LOGIT_TOLERANCE, "{name} on {way:?}: {distance}");
        }
    }
}

fn session(engine: &Engine, blocks: usize) -> DecoderSession {
    let mut session = engine.session().unwrap();
    session.resize_cache(blocks).unwrap();
    session
}

#[test]
fn sequences_cut_into_steps_of_every_size_give_a_whole_forward_through_scattered_blocks() {
    let sequences = [Random::new(1).sequence(70, VOCAB as u32), Random::new(2).sequence(41, VOCAB as u32)];
    // Of 12 blocks, in no order.
    let tables = [vec![7, 0, 11, 3, 4], vec![9, 2, 10]];
    for way in tensor_ways() {
        for name in DECODERS {
            let engine = load_on(&golden(name), way);
            let whole = engine.logits(&Batch::new(&sequences).ragged()).unwrap().data;
            for chunk in [1, 3, 15, 16, 17, 33, 70] {
                let (mut session, mut logits) = (session(&engine, 12), Vec::new());
                let mut found = [Vec::new(), Vec::new()];
                for start in (0..70).step_by(chunk) {
                    let mut batch = StepBatch::default();
                    for (sequence, table) in sequences.iter().zip(&tables).filter(|(ids, _)| ids.len() > start) {
                        let first = batch.tokens.len();
                        batch.tokens.extend(&sequence[start..sequence.len().min(start + chunk)]);
                        let (tokens, blocks) = (first..batch.tokens.len(), table.clone());
                        batch.sequences.push(StepSequence { tokens, start, blocks, logits: Logits::All });
                    }
                    session.step(&batch, &mut logits).unwrap();
                    let mut rest = logits.as_slice();
                    for (found, sequence) in found.iter_mut().zip(&batch.sequences) {
                        let (own, later) = rest.split_at(sequence.tokens.len() * VOCAB);
                        found.extend_from_slice(own);
                        rest = later;
                    }
                }
                let distance = distance(&found.concat(), &whole);
                assert!(distance <= LOGIT_TOLERANCE, "{name} on {way:?}, steps of {chunk}: {distance}");
            }
        }
    }
}

#[test]
fn copied_blocks_and_a_resized_cache_keep_what_they_hold() {
    let mut random = Random::new(6);
    let prefix = random.sequence(20, VOCAB as u32);
    let ends = [random.sequence(9, VOCAB as u32), random.sequence(9, VOCAB as u32)];
    let sequences = ends.clone().map(|end| [&prefix[..], &end].concat());
    for way in tensor_ways() {
        let engine = load_on(&golden("llama"), way);
        let whole = engine.logits(&Batch::new(&sequences).ragged()).unwrap();
        let mut session = session(&engine, 5);
        let mut logits = vec![1.0; 7];
        let first = StepSequence { tokens: 0..20, start: 0, blocks: vec![4, 2], logits: Logits::None };
        session.step(&StepBatch { tokens: prefix.clone(), sequences: vec![first] }, &mut logits).unwrap();
        assert!(logits.is_empty());
        session.resize_cache(6).unwrap();
        session.copy_block(2, 5).unwrap();
        let sequence = |tokens, blocks| StepSequence { tokens, start: 20, blocks, logits: Logits::All };
        let both = vec![sequence(0..9, vec![4, 2]), sequence(9..18, vec![4, 5])];
        session.step(&StepBatch { tokens: ends.concat(), sequences: both }, &mut logits).unwrap();
        let wanted = [&whole.data[20 * VOCAB..29 * VOCAB], &whole.data[49 * VOCAB..]].concat();
        assert!(distance(&logits, &wanted) <= LOGIT_TOLERANCE, "{way:?}");
    }
}

#[test]
fn what_a_broken_row_leaves_in_a_block_reaches_nobody() {
    let mut folder = Folder::from_golden("qwen2-untied");
    let name = "model.embed_tokens.weight";
    let mut table: Vec<f32> = folder.tensors[name].flatten_all().unwrap().to_vec1().unwrap();
    let width = table.len() / VOCAB;
    table[7 * width..8 * width].fill(f32::NAN);
    folder.tensors.insert(name.into(), Tensor::from_vec(table, &[VOCAB, width], &TensorDevice::Cpu).unwrap());
    let dir = folder.write();
    for way in tensor_ways() {
        let engine = load_on(dir, way);
        let batch = Batch::new(&[vec![7; 20], vec![1, 2, 3]]);
        assert_eq!(engine.hidden_states(&batch.ragged()).unwrap().bad_rows, (0..20).collect::<Vec<_>>());
        let (mut session, mut logits) = (session(&engine, 3), Vec::new());
        let sequence = |tokens, start, blocks| StepSequence { tokens, start, blocks, logits: Logits::Last };
        let mut step = |tokens: &[u32], sequences| {
            session.step(&StepBatch { tokens: tokens.to_vec(), sequences }, &mut logits).unwrap();
            logits.chunks(VOCAB).map(|row| row.iter().any(|logit| logit.is_nan())).collect::<Vec<_>>()
        };
        let both = [&[7; 20][..], &[1, 2, 3, 4, 5]].concat();
        let sequences = vec![sequence(0..20, 0, vec![0, 1]), sequence(20..25, 0, vec![2])];
        assert_eq!(step(&both, sequences), [true, false]);
        assert_eq!(step(&[1, 2, 3, 4, 5], vec![sequence(0..5, 0, vec![1])]), [false]);
        assert_eq!(step(&[9], vec![sequence(0..1, 5, vec![1])]), [false]);
    }
}

#[test]
fn every_pooling_mode_gives_what_the_cpus_kernels_give() {
    for name in ["bert", "llama"] {
        let batch = Batch::new(&cases(name, "ids"));
        for mode in ["cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last", "mean+cls"] {
            for (skip_tokens, normalize) in [(0, true), (2, false), (5, false), (usize::MAX, false)] {
                let pooling = Some(mode.parse().unwrap());
                let options = EmbedOptions { pooling, normalize: Some(normalize), dimensions: Some(40), skip_tokens };
                let wanted = load(&golden(name)).embed(&batch.ragged(), &options).unwrap();
                for way in tensor_ways() {
                    let found = load_on(&golden(name), way).embed(&batch.ragged(), &options).unwrap();
                    let near =
                        |(found, wanted): (&f32, &f32)| found == wanted || (found - wanted).abs() <= HIDDEN_TOLERANCE;
                    let is_near = found.data.iter().zip(&wanted.data).all(near);
                    assert!(
                        is_near && found.bad_rows == wanted.bad_rows,
                        "{name} {mode} after {skip_tokens} on {way:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn sentence_transformers_modules_are_followed() {
    for name in ["st-mean-dense", "st-cls-prompt", "st-max-raw"] {
        let ids: Vec<Vec<u32>> = [3, 17, 1].map(|length| Random::new(length as u64).sequence(length, 90)).to_vec();
        let wanted = load(&golden(name)).embed(&Batch::new(&ids).ragged(), &EmbedOptions::default()).unwrap();
        for way in tensor_ways() {
            let engine = load_on(&golden(name), way);
            let found = engine.embed(&Batch::new(&ids).ragged(), &EmbedOptions::default()).unwrap();
            assert_eq!(found.width, wanted.width);
            assert!(distance(&found.data, &wanted.data) <= HIDDEN_TOLERANCE, "{name} on {way:?}");
        }
    }
}

#[test]
fn a_decoder_classifies_by_its_last_token() {
    let mut folder = Folder::from_golden("qwen2");
    folder.config["architectures"] = json!(["Qwen2ForSequenceClassification"]);
    folder.config["id2label"] = json!({"0": "no", "1": "yes", "2": "maybe"});
    let score: Vec<f32> = (0..3 * 64).map(|index| (index as f32 * 0.7).sin()).collect();
    folder.tensors.insert("score.weight".into(), Tensor::from_vec(score, &[3, 64], &TensorDevice::Cpu).unwrap());
    let batch = Batch::new(&cases("qwen2", "ids"));
    let dir = folder.write();
    let wanted = load(dir).classify(&batch.ragged()).unwrap();
    for way in tensor_ways() {
        let found = load_on(dir, way).classify(&batch.ragged()).unwrap();
        assert!(distance(&found.data, &wanted.data) <= 1e-4, "{way:?}");
    }
}

#[test]
fn weights_in_halves_round_and_sums_do_not() {
    // Units in the last place: 2^-9 of a bfloat16, 2^-12 of a float16; some dozens of roundings, as a norm of all.
    for (dtype, most) in [(Dtype::Bfloat16, 0.02), (Dtype::Float16, 0.0025)] {
        for name in ["bert", "modernbert", "qwen3", "llama"] {
            let wanted = expected(name, "hidden");
            for way in tensor_ways() {
                let options = LoadOptions { dtype, ..way.options() };
                let engine = Engine::load(&golden(name), &options).unwrap();
                assert_eq!((engine.dtype(), engine.info().weight_bytes), (dtype, 2 * engine.info().parameters));
                let found = engine.hidden_states(&Batch::new(&cases(name, "ids")).ragged()).unwrap();
                let norm = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|each| each * each).sum::<f32>().sqrt();
                let apart = norm(&mut found.data.iter().zip(&wanted).map(|(one, other)| one - other));
                let share = apart / norm(&mut wanted.iter().copied());
                assert!(share > 0.0 && share <= most, "{name} in {} on {way:?}: {share}", dtype.name());
            }
        }
    }
}

#[test]
fn batches_longer_than_a_chunk_are_put_together_in_order() {
    let mut random = Random::new(12);
    let sequences: Vec<Vec<u32>> = (0..60).map(|row| random.sequence(1 + row * 7 % 200, 300)).collect();
    let batch = Batch::new(&sequences);
    assert!(batch.ids.len() > 4096);
    let wanted = load(&golden("llama")).hidden_states(&batch.ragged()).unwrap();
    for way in tensor_ways() {
        let found = load_on(&golden("llama"), way).hidden_states(&batch.ragged()).unwrap();
        assert!(distance(&found.data, &wanted.data) <= HIDDEN_TOLERANCE, "{way:?}");
    }
}

/// What rank 0 of a group gives, while all others follow.
fn led<T: Send>(dir: &Path, world: usize, way: Way, work: impl Fn(&Engine) -> T + Send + Sync) -> T {
    let given = Mutex::new(None);
    group(world, Duration::from_secs(60), |tcp| {
        let is_first = candle_engine::comm::Communicator::rank(&*tcp) == 0;
        let engine = Engine::load(dir, &LoadOptions { communicator: Some(tcp), ..way.options() }).unwrap();
        match is_first {
            true => *given.lock().unwrap() = Some(work(&engine)),
            false => engine.follow().unwrap(),
        }
    });
    given.into_inner().unwrap().unwrap()
}

#[test]
fn decoders_split_over_ranks_equal_the_reference() {
    for way in tensor_ways() {
        for (name, world) in [("qwen2", 2), ("qwen2", 4), ("qwen2-untied", 2), ("qwen3", 4), ("llama", 8)] {
            let ids = cases(name, "ids");
            let work = |engine: &Engine| {
                let logits = engine.logits(&Batch::new(&ids).ragged()).unwrap();
                let scores = engine.token_logprobs(&Batch::new(&ids).ragged()).unwrap();
                (logits, scores, generated(engine, &ids, &Params::greedy(24), 64))
            };
            let (logits, scores, tokens) = led(&golden(name), world, way, work);
            let alone = load(&golden(name)).token_logprobs(&Batch::new(&ids).ragged()).unwrap();
            let distances = [distance(&logits.data, &expected(name, "logits")), distance(&scores.data, &alone.data)];
            assert!(
                distances.iter().all(|each| *each <= LOGIT_TOLERANCE),
                "{name} over {world} on {way:?}: {distances:?}"
            );
            assert_eq!(tokens, cases(name, "greedy"), "{name} over {world} on {way:?}");
        }
    }
}

#[test]
fn heads_wider_than_the_kernels_registers_are_refused() {
    let folder = Folder::decoder(json!({"hidden_size": 8, "head_dim": 258}));
    let dir = folder.write();
    assert!(load(dir).logits(&Batch::new(&[vec![1, 2]]).ragged()).is_ok());
    for way in tensor_ways() {
        let error = load_on(dir, way).logits(&Batch::new(&[vec![1, 2]]).ragged()).unwrap_err();
        assert!(matches!(error, Error::Device { .. }));
        assert_eq!(error.to_string(), "heads are wider than the 256 of the kernels: `258`");
    }
}

#[test]
fn names_of_devices_and_dtypes_are_told_apart() {
    assert_eq!(Device::from_name("cpu").unwrap(), Device::Cpu);
    for name in ["gpu", "tensors", "cuda0", "CUDA", ""] {
        assert!(matches!(Device::from_name(name), Err(Error::Input { .. })), "{name}");
    }
    if !candle_engine::has_cuda() {
        assert_eq!(Device::from_name("auto").unwrap(), Device::Cpu);
        for name in ["cuda", "cuda:1", "cuda:x"] {
            let error = Device::from_name(name).unwrap_err();
            assert_eq!(error.to_string(), format!("this build has no CUDA support: `{name}`"));
        }
    }
    assert_eq!(Dtype::from_name("auto", Device::Cpu).unwrap(), Dtype::Float32);
    assert_eq!(Dtype::from_name("float16", Device::Cuda(0)).unwrap(), Dtype::Float16);
    let error = Dtype::from_name("float16", Device::Cpu).unwrap_err();
    assert_eq!(error.to_string(), "dtype is not supported on the CPU: `float16`");
    assert!(matches!(Dtype::from_name("int8", Device::Cuda(0)), Err(Error::Device { .. })));
    assert_eq!(Dtype::from_name("int8", Device::Cpu).unwrap(), Dtype::Int8);
    assert!(matches!(Dtype::from_name("int4", Device::Cuda(0)), Err(Error::Input { .. })));
}

#[test]
fn weights_stored_in_several_dtypes_are_one_model() {
    for name in ["bert", "qwen2"] {
        let mut folder = Folder::from_golden(name);
        let half = |name: &str| name.contains("query") || name.contains("q_proj") || name.contains("orm.weight");
        for (name, tensor) in folder.tensors.iter_mut().filter(|(name, _)| half(name)) {
            let dtype = if name.contains("bias") { DType::F16 } else { DType::BF16 };
            *tensor = tensor.to_dtype(dtype).unwrap();
        }
        let batch = Batch::new(&cases(name, "ids"));
        let dir = folder.write();
        let wanted = load(dir).hidden_states(&batch.ragged()).unwrap();
        assert!(distance(&wanted.data, &expected(name, "hidden")) > HIDDEN_TOLERANCE);
        for way in tensor_ways() {
            let found = load_on(dir, way).hidden_states(&batch.ragged()).unwrap();
            assert!(distance(&found.data, &wanted.data) <= HIDDEN_TOLERANCE, "{name} on {way:?}");
        }
    }
}
