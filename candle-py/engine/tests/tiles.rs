//! Whole models in bfloat16 on tiles: the twin in software anywhere, AMX where there is one.

#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;

use candle_engine::cpu::{Isa, Kernels, Storage};
use candle_engine::{Dtype, Engine, LoadOptions};
use common::{Batch, Folder, Random, cases, expected, golden, same_bits};

const MODELS: [&str; 8] = ["bert", "roberta", "xlm-roberta", "distilbert", "modernbert", "llama", "qwen2", "qwen3"];

fn load(dir: &Path, isa: Isa, threads: usize) -> Engine {
    let options =
        LoadOptions { isa: Some(isa), dtype: Dtype::Bfloat16, threads: Some(threads), ..LoadOptions::default() };
    Engine::load(dir, &options).unwrap()
}

/// The twin, and AMX where it is there.
fn tiled() -> Vec<Isa> {
    [Isa::AmxSoftware, Isa::Amx].into_iter().filter(|isa| Kernels::new(*isa).is_some()).collect()
}

/// The least cosine of two lists of rows, `width` wide.
fn least_cosine(left: &[f32], right: &[f32], width: usize) -> f64 {
    assert_eq!(left.len(), right.len());
    let cosine = |(left, right): (&[f32], &[f32])| {
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        dot(left, right) / (dot(left, left) * dot(right, right)).sqrt()
    };
    left.chunks(width).zip(right.chunks(width)).map(cosine).fold(1.0, f64::min)
}

#[test]
fn hidden_states_of_every_family_point_where_the_references_do() {
    for name in MODELS {
        for isa in tiled() {
            let engine = load(&golden(name), isa, 1);
            let found = engine.hidden_states(&Batch::new(&cases(name, "ids")).ragged()).unwrap();
            let cosine = least_cosine(&found.data, &expected(name, "hidden"), found.width);
            assert!(cosine >= 0.9999, "{name} on {}: {cosine}", isa.name());
        }
    }
}

#[test]
fn rows_are_bit_equal_alone_in_any_batch_and_on_any_number_of_threads() {
    for name in ["bert", "modernbert", "qwen3"] {
        let sequences = cases(name, "ids");
        let batch = Batch::new(&sequences);
        for isa in tiled() {
            let engine = load(&golden(name), isa, 1);
            let together = engine.hidden_states(&batch.ragged()).unwrap();
            let alone: Vec<f32> = sequences
                .iter()
                .flat_map(|row| engine.hidden_states(&Batch::new(std::slice::from_ref(row)).ragged()).unwrap().data)
                .collect();
            assert!(same_bits(&together, &alone), "{name} on {}", isa.name());
            // One chunk over several threads is spread by columns.
            let spread = load(&golden(name), isa, 4).hidden_states(&batch.ragged()).unwrap();
            assert!(same_bits(&together, &spread.data), "{name} on {}", isa.name());
        }
    }
}

#[test]
fn whole_models_on_amx_give_what_the_twin_gives() {
    if Kernels::new(Isa::Amx).is_none() {
        return eprintln!("skipped: this machine has no AMX, or its operating system does not give it");
    }
    let mut random = Random::new(9);
    let sequences: Vec<Vec<u32>> = [1, 300, 7, 90, 33].map(|length| random.sequence(length, 50)).to_vec();
    let batch = Batch::new(&sequences);
    let wide = Folder::bert(384, 12, 1536, 2, 2);
    for dir in [wide.write(), &golden("qwen3"), &golden("modernbert")] {
        // The rest of the twin's model runs on the machine's best vectors, as that of AMX does.
        let [amx, twin] =
            [Isa::Amx, Isa::AmxSoftware].map(|isa| load(dir, isa, 2).hidden_states(&batch.ragged()).unwrap());
        let cosine = least_cosine(&amx.data, &twin.data, amx.width);
        assert!(cosine >= 0.9999, "{}: {cosine}", dir.display());
    }
}

#[test]
fn what_amx_is_for_is_chosen_unasked_and_nothing_else() {
    let best = |dtype| {
        let options = LoadOptions { dtype, ..LoadOptions::default() };
        Engine::load(&golden("bert"), &options).unwrap().isa()
    };
    let whole = best(Dtype::Float32);
    assert!(whole.is_for(Storage::Float32));
    assert_eq!(best(Dtype::Bfloat16), if Kernels::new(Isa::Amx).is_some() { Isa::Amx } else { whole });
}

#[test]
fn tiles_for_float32_are_refused_and_so_are_missing_ones() {
    let error = |isa, dtype| {
        let options = LoadOptions { isa: Some(isa), dtype, ..LoadOptions::default() };
        Engine::load(&golden("bert"), &options).err().map(|error| error.to_string())
    };
    for isa in [Isa::Amx, Isa::AmxSoftware] {
        let want = format!("instruction set is for dtype bfloat16 alone: `{}`", isa.name());
        assert_eq!(error(isa, Dtype::Float32), Some(want));
    }
    let missing = Kernels::new(Isa::Amx).is_none();
    let want = missing.then(|| "this machine lacks the instruction set: `amx`".to_owned());
    assert_eq!(error(Isa::Amx, Dtype::Bfloat16), want);
}
