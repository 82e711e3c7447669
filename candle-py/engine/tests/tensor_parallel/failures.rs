//! How a group ends: closed, lost, refused.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use candle_core::Device;
use candle_engine::comm::{Communicator, Tcp};
use candle_engine::generate::StepModel;
use candle_engine::{Engine, Slice, inspect_rank};

use super::common::{Batch, Folder, cases, golden, group};
use super::encoders::ENCODER_WORLDS;
use super::{WAIT, WORLDS, options};

#[test]
fn a_closed_engine_lets_the_others_go_and_computes_no_more() {
    group(2, WAIT, |tcp| {
        let rank = tcp.rank();
        let engine = Engine::load(&golden("qwen2"), &options(tcp)).unwrap();
        let batch = Batch::new(&[vec![1, 2]]);
        if rank == 1 {
            let early = engine.logits(&batch.ragged()).unwrap_err();
            assert_eq!(early.to_string(), "engine computes what rank 0 asks for, being of rank: `1`");
            engine.follow().unwrap();
            assert_eq!(engine.follow().unwrap_err().to_string(), "engine is closed: `follow`");
            return;
        }
        assert_eq!(engine.follow().unwrap_err().to_string(), "there is no other rank to follow: `0`");
        let mut session = engine.session().unwrap();
        engine.close().unwrap();
        engine.close().unwrap();
        assert_eq!(engine.logits(&batch.ragged()).unwrap_err().to_string(), "engine is closed: `close`");
        assert_eq!(session.resize_cache(1).unwrap_err().to_string(), "engine is closed: `close`");
    });
    let alone = Arc::new(Tcp::connect(0, 1, &[], "secret", WAIT).unwrap());
    let engine = Engine::load(&golden("qwen2"), &options(alone)).unwrap();
    assert_eq!(engine.rank_and_world(), (0, 1));
    assert!(engine.follow().is_err());
    engine.close().unwrap();
    engine.logits(&Batch::new(&[vec![1, 2]]).ragged()).unwrap();
}

#[test]
fn a_rank_that_goes_while_others_compute_is_told_on_all() {
    let batch = Batch::new(&cases("llama", "ids"));
    let found = group(4, WAIT, |tcp| {
        let rank = tcp.rank();
        let engine = Engine::load(&golden("llama"), &options(Arc::clone(&tcp))).unwrap();
        match rank {
            0 => loop {
                if let Err(error) = engine.logits(&batch.ragged()) {
                    // Whatever comes later fails for the same reason.
                    let later = engine.session().map(drop).unwrap_err();
                    assert_eq!(error.to_string(), later.to_string());
                    return error.to_string();
                }
            },
            2 => {
                let mut orders = 0;
                let result = engine.follow_with(|_| {
                    orders += 1;
                    if orders == 2 {
                        tcp.abort("this rank is lost: `2`");
                    }
                });
                result.unwrap_err().to_string()
            }
            _ => engine.follow().unwrap_err().to_string(),
        }
    });
    assert_eq!(found[2], "this rank is lost: `2`");
    assert!(found.iter().all(|text| text.contains("rank ") && !text.is_empty()), "{found:?}");
}

#[test]
fn what_one_rank_cannot_load_is_told_on_all() {
    let folder = Folder::from_golden("qwen2");
    let found = group(2, WAIT, |tcp| {
        let dir = if tcp.rank() == 0 { golden("qwen2") } else { folder.dir.path().to_path_buf() };
        Engine::load(&dir, &options(tcp)).err().unwrap().to_string()
    });
    assert!(found[0].starts_with("rank 1 gave up: rank 1 has not loaded the model: "), "{found:?}");
    let found = group(2, WAIT, |tcp| {
        let dir = golden(if tcp.rank() == 0 { "qwen2" } else { "qwen3" });
        Engine::load(&dir, &options(tcp)).err().unwrap().to_string()
    });
    assert_eq!(found[1], "model, or how it is loaded, is not rank 0's on rank: `1`");
    assert!(found[0].contains("rank 1 gave up: "), "{found:?}");
}

#[test]
fn worlds_that_do_not_fit_are_refused_with_those_that_do() {
    for (name, world, sizes, hint) in [
        ("qwen2", 3, "4 heads, 2 key/value heads and intermediate size 160", "1, 2, 4"),
        ("qwen2-untied", 6, "6 heads, 2 key/value heads and intermediate size 256", "1, 2"),
        ("llama", 5, "8 heads, 4 key/value heads and intermediate size 160", "1, 2, 4, 8"),
        ("bert", 3, "4 heads, 4 key/value heads and intermediate size 160", "1, 2, 4"),
    ] {
        let text = format!("model of {sizes} cannot be split over so many ranks: `{world}`");
        let error = inspect_rank(&golden(name), 0, world).unwrap_err();
        assert_eq!(error.to_string(), text);
        assert_eq!(error.hint().unwrap(), format!("it can be split over: {hint}"));
        let found = group(world, WAIT, |tcp| Engine::load(&golden(name), &options(tcp)).err().unwrap().to_string());
        assert!(found.iter().all(|found| found.ends_with(&text)), "{found:?}");
    }
    assert_eq!(inspect_rank(&golden("qwen2"), 2, 2).unwrap_err().to_string(), "rank must be below the world of 2: `2`");
}

#[test]
fn slices_of_all_ranks_make_up_every_tensor() {
    for (name, worlds) in WORLDS.into_iter().chain(ENCODER_WORLDS) {
        let tensors = candle_core::safetensors::load(golden(name).join("model.safetensors"), &Device::Cpu).unwrap();
        for world in worlds {
            let ranks: Vec<_> = (0..*world).map(|rank| inspect_rank(&golden(name), rank, *world).unwrap()).collect();
            for (tensor, value) in &tensors {
                let all = |axis: usize, parts: Vec<Range<usize>>| {
                    parts.iter().cloned().flatten().collect::<BTreeSet<_>>() == (0..value.dims()[axis]).collect()
                };
                let is_covered = match &ranks[0][tensor] {
                    Slice::Whole => {
                        let is_everywhere = |slice| ranks[1..].iter().all(|slices| slices[tensor] == slice);
                        // A bias that is added to a sum over the ranks is rank 0's.
                        is_everywhere(Slice::Whole) || tensor.ends_with("bias") && is_everywhere(Slice::Nothing)
                    }
                    Slice::Rows(_) => all(0, ranks.iter().map(|slices| rows(&slices[tensor])).collect()),
                    Slice::Blocks(count, _) => {
                        let height = value.dims()[0] / count;
                        let of_block = |slices: &BTreeMap<String, Slice>, block: usize| {
                            let rows = rows(&slices[tensor]);
                            rows.start + block * height..rows.end + block * height
                        };
                        let parts = ranks.iter().flat_map(|slices| (0..*count).map(|block| of_block(slices, block)));
                        all(0, parts.collect())
                    }
                    Slice::Columns(_) => all(1, ranks.iter().map(|slices| columns(&slices[tensor])).collect()),
                    Slice::Nothing => false,
                };
                assert!(is_covered, "{tensor} over {world}");
            }
        }
    }
}

fn rows(slice: &Slice) -> Range<usize> {
    let (Slice::Rows(rows) | Slice::Blocks(_, rows)) = slice else { panic!("{slice:?}") };
    rows.clone()
}

fn columns(slice: &Slice) -> Range<usize> {
    let Slice::Columns(columns) = slice else { panic!("{slice:?}") };
    columns.clone()
}
