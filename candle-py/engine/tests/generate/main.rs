//! Generation over a model that really uses its cache: every request gives what it gives alone, whatever is around it.

#![allow(missing_docs, clippy::unwrap_used)]

mod beams;
mod limits;
mod masks;
mod rows;
mod toy;

use std::collections::BTreeMap;

use candle_engine::cpu::{Isa, Storage};
use candle_engine::generate::{Finish, Generator, Limits, Masks, NoMasks, Params};

use toy::{BLOCK_BYTES, POSITIONS, Toy};

/// What a request gave in all.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Given {
    pub tokens: Vec<u32>,
    pub logprobs: Vec<f32>,
    pub finish: Option<Finish>,
}

impl Given {
    pub fn logprob(&self) -> f32 {
        self.logprobs.iter().sum()
    }
}

/// Room for everything.
pub fn roomy() -> Limits {
    Limits {
        max_rows: 64,
        cache_bytes: usize::MAX,
        longest_tokens: 0,
        beams: 1,
        step_tokens: 512,
        threads: 1,
        isa: Isa::detected(Storage::Float32),
    }
}

/// A cache of so many blocks.
pub fn tight(blocks: usize) -> Limits {
    Limits { cache_bytes: blocks * BLOCK_BYTES, ..roomy() }
}

pub fn generator(limits: Limits) -> Generator<Toy> {
    Generator::new(Toy::default(), limits).unwrap()
}

/// Steps until nothing is pending, and what every request gave.
pub fn drain(generator: &mut Generator<Toy>, masks: &mut dyn Masks) -> BTreeMap<u64, Given> {
    let mut given: BTreeMap<u64, Given> = BTreeMap::new();
    // No request takes more steps than it has tokens, at the smallest budget, each time that it begins.
    for _ in 0..200_000 {
        if generator.pending() == 0 {
            let stats = generator.stats();
            assert_eq!(stats.held_blocks, 0, "blocks are lost");
            return given;
        }
        for event in generator.step(masks).unwrap() {
            let given = given.entry(event.id).or_default();
            assert_eq!(given.finish, None, "news of a request that has ended");
            assert_eq!(event.new_tokens.len(), event.logprobs.len());
            given.tokens.extend(event.new_tokens);
            given.logprobs.extend(event.logprobs);
            given.finish = event.finished;
        }
    }
    panic!("no end: {:?}", generator.stats());
}

/// What each request gives when all are there at once, and the generator.
pub fn together(limits: Limits, requests: &[(Vec<u32>, Params)]) -> (Vec<Given>, Generator<Toy>) {
    let mut generator = generator(limits);
    for (id, (prompt, params)) in requests.iter().enumerate() {
        generator.add(id as u64, prompt.clone(), params.clone()).unwrap();
    }
    let given = drain(&mut generator, &mut NoMasks);
    assert_eq!(given.len(), requests.len());
    (given.into_values().collect(), generator)
}

/// What each request gives alone.
pub fn alone(requests: &[(Vec<u32>, Params)]) -> Vec<Given> {
    requests.iter().flat_map(|request| together(roomy(), std::slice::from_ref(request)).0).collect()
}

/// A prompt of `length` tokens; prompts of the same `start` begin with the same `shared` tokens.
pub fn prompt(start: u32, shared: usize, own: u32, length: usize) -> Vec<u32> {
    assert!(length < POSITIONS);
    let token = |index: usize| {
        let of = if index < shared { start } else { own };
        (of * 7 + index as u32 * 13 + of * index as u32) % toy::VOCAB as u32
    };
    (0..length).map(token).collect()
}
