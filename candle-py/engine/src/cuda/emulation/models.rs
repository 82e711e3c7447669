//! Whole models through the kernels' own source, against the reference's numbers.

use std::cell::Cell;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::program;
use crate::cuda::{Kernel, Source};
use crate::generate::{Generator, Limits, NoMasks, Params};
use crate::{Device, Engine, LoadOptions, Ragged};

/// As of all other ways to compute: float32 through a handful of layers, sums in another order.
const HIDDEN_TOLERANCE: f32 = 2e-5;
const LOGIT_TOLERANCE: f32 = 5e-5;

thread_local! {
    /// Whether this thread's tensors take the kernels in place of the twins.
    static IS_ON: Cell<bool> = const { Cell::new(false) };
    /// How often they did.
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

/// What the kernel makes of `out`, where this thread asked for that.
pub fn in_place_of_twin<K: Kernel>(kernel: &K, sources: &[Source<'_>], out: &[f32]) -> Option<Vec<f32>> {
    let program = if IS_ON.get() { program() } else { None };
    CALLS.set(CALLS.get() + usize::from(program.is_some()));
    program.map(|program| super::emulated(program, kernel, sources, out))
}

/// Runs `work` with the kernels; not at all where they cannot be run.
fn with_kernels(work: impl FnOnce()) {
    if program().is_some() {
        IS_ON.set(true);
        work();
        IS_ON.set(false);
    }
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/golden").join(name)
}

fn expected(name: &str, key: &str) -> Vec<f32> {
    let file = golden(name).join("expected.safetensors");
    let tensors = candle_core::safetensors::load(file, &candle_core::Device::Cpu).unwrap();
    tensors[key].flatten_all().unwrap().to_vec1().unwrap()
}

fn cases(name: &str, key: &str) -> Vec<Vec<u32>> {
    let cases: Value = serde_json::from_slice(&std::fs::read(golden(name).join("cases.json")).unwrap()).unwrap();
    serde_json::from_value(cases[key].clone()).unwrap()
}

/// All on the thread that calls.
fn load(name: &str) -> Engine {
    let options = LoadOptions { device: Device::Tensors, threads: Some(1), ..LoadOptions::default() };
    Engine::load(&golden(name), &options).unwrap()
}

fn check(name: &str, found: &[f32], wanted: &[f32], tolerance: f32) {
    assert_eq!(found.len(), wanted.len());
    let apart = found.iter().zip(wanted).map(|(found, wanted)| (found - wanted).abs());
    assert!(apart.clone().all(|apart| apart <= tolerance), "{name}: {}", apart.fold(0.0, f32::max));
}

fn offsets(sequences: &[Vec<u32>]) -> Vec<u32> {
    super::offsets(&sequences.iter().map(Vec::len).collect::<Vec<_>>()).iter().map(|offset| *offset as u32).collect()
}

#[test]
fn encoders_equal_the_reference_through_the_kernels() {
    with_kernels(|| {
        for name in ["bert", "roberta", "modernbert"] {
            let (engine, sequences) = (load(name), cases(name, "ids"));
            let (ids, offsets) = (sequences.concat(), offsets(&sequences));
            let batch = Ragged { ids: &ids, offsets: &offsets, type_ids: None };
            let before = CALLS.get();
            check(name, &engine.hidden_states(&batch).unwrap().data, &expected(name, "hidden"), HIDDEN_TOLERANCE);
            assert!(CALLS.get() > before);
            for mode in ["mean", "cls"] {
                let options = crate::EmbedOptions {
                    pooling: Some(mode.parse().unwrap()),
                    normalize: Some(true),
                    ..crate::EmbedOptions::default()
                };
                check(name, &engine.embed(&batch, &options).unwrap().data, &expected(name, mode), HIDDEN_TOLERANCE);
            }
        }
    });
}

#[test]
fn decoders_equal_the_reference_through_the_kernels_whole_and_cached() {
    with_kernels(|| {
        for name in ["qwen2", "qwen3", "llama"] {
            let (engine, sequences) = (load(name), cases(name, "ids"));
            let (ids, offsets) = (sequences.concat(), offsets(&sequences));
            let batch = Ragged { ids: &ids, offsets: &offsets, type_ids: None };
            let before = CALLS.get();
            check(name, &engine.logits(&batch).unwrap().data, &expected(name, "logits"), LOGIT_TOLERANCE);
            assert!(CALLS.get() > before);

            let session = engine.session().unwrap();
            let limits = Limits {
                max_rows: 8,
                cache_bytes: 1 << 18,
                longest_tokens: 0,
                beams: 1,
                step_tokens: 40,
                threads: 1,
                isa: engine.isa(),
            };
            let mut generator = Generator::new(session, limits).unwrap();
            for (id, prompt) in sequences.iter().take(3).enumerate() {
                generator.add(id as u64, prompt.clone(), Params::greedy(4)).unwrap();
            }
            let mut found = vec![Vec::new(); 3];
            while generator.pending() > 0 {
                for event in generator.step(&mut NoMasks).unwrap() {
                    found[event.id as usize].extend(event.new_tokens);
                }
            }
            let wanted: Vec<Vec<u32>> = cases(name, "greedy").iter().take(3).map(|new| new[..4].to_vec()).collect();
            assert_eq!(found, wanted, "{name}");
        }
    });
}
