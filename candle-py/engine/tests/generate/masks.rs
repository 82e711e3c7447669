//! Masks restrict rows, and their failures stay their rows' own; so do logits that are no numbers.

use candle_engine::generate::{Finish, Generator, Limits, MaskVerdict, Masks, NoMasks, Params};
use candle_engine::{Error, Result};

use crate::toy::{Toy, VOCAB};
use crate::{alone, drain, generator, prompt, roomy, tight};

/// Allows even and odd ids by turns, and stops after `length` tokens; remembers what it was told.
struct Turns {
    length: usize,
    told: Vec<(u64, Vec<u32>)>,
}

impl Turns {
    fn of(&self, id: u64) -> Vec<u32> {
        self.told.iter().filter(|(told, _)| *told == id).flat_map(|(_, tokens)| tokens.clone()).collect()
    }
}

fn bits(is_allowed: impl Fn(u32) -> bool) -> Vec<u32> {
    let mut words = vec![0; VOCAB.div_ceil(32)];
    (0..VOCAB as u32).filter(|id| is_allowed(*id)).for_each(|id| words[id as usize / 32] |= 1 << (id % 32));
    words
}

impl Masks for Turns {
    fn mask(&mut self, id: u64, new_tokens: &[u32]) -> Result<MaskVerdict> {
        self.told.push((id, new_tokens.to_vec()));
        let length = self.of(id).len();
        if length == self.length {
            return Ok(MaskVerdict::Stop);
        }
        match id {
            7 if length == 3 => Err(Error::input("the grammar has no rule: `here`")),
            8 => Ok(MaskVerdict::Allowed(vec![0; VOCAB.div_ceil(32)])),
            9 => Ok(MaskVerdict::Allowed(vec![1])),
            _ => Ok(MaskVerdict::Allowed(bits(|token| token as usize % 2 == length % 2))),
        }
    }
}

fn constrained() -> Params {
    Params { constrained: true, ..Params::greedy(30) }
}

#[test]
fn a_masked_row_takes_allowed_tokens_only_and_its_mask_is_told_every_token_once() {
    for limits in [roomy(), Limits { step_tokens: 1, ..roomy() }, tight(7)] {
        let mut masks = Turns { length: 12, told: Vec::new() };
        let mut generator = generator(limits);
        for id in 0..5 {
            let params = Params { temperature: id as f32 / 4.0, seed: id, ..constrained() };
            generator.add(id, prompt(0, 0, id as u32, 40 + 5 * id as usize), params).unwrap();
        }
        let given = drain(&mut generator, &mut masks);
        for (id, given) in given {
            assert_eq!((given.tokens.len(), &given.finish), (12, &Some(Finish::Stop)));
            assert!(given.tokens.iter().enumerate().all(|(at, token)| *token as usize % 2 == at % 2));
            assert_eq!(masks.of(id), given.tokens);
        }
        assert_eq!(masks.told.len(), 5 * 13);
    }
}

#[test]
fn a_failing_mask_ends_its_own_row() {
    let mut masks = Turns { length: 12, told: Vec::new() };
    let mut generator = generator(roomy());
    for id in [1, 7, 8, 9] {
        generator.add(id, vec![1, 2, 3], constrained()).unwrap();
    }
    generator.add(2, vec![1, 2, 3], Params::greedy(9)).unwrap();
    let given = drain(&mut generator, &mut masks);
    let error = |text: &str| Some(Finish::Error(text.to_owned()));
    assert_eq!(given[&1].finish, Some(Finish::Stop));
    assert_eq!((given[&7].tokens.len(), &given[&7].finish), (3, &error("the grammar has no rule: `here`")));
    assert_eq!(given[&8].finish, error("no token is allowed here"));
    assert_eq!(given[&9].finish, error("mask must have 2 words: `1`"));
    assert_eq!(given[&2], alone(&[(vec![1, 2, 3], Params::greedy(9))])[0]);
}

#[test]
fn a_mask_that_allows_only_the_stop_token_is_followed_before_the_least_length() {
    struct OnlyStop;
    impl Masks for OnlyStop {
        fn mask(&mut self, _id: u64, _new_tokens: &[u32]) -> Result<MaskVerdict> {
            Ok(MaskVerdict::Allowed(bits(|token| token == 33)))
        }
    }
    let mut generator = generator(roomy());
    let params = Params { min_new_tokens: 5, stop_ids: vec![33, 34], ..constrained() };
    generator.add(0, vec![1], params).unwrap();
    let given = drain(&mut generator, &mut OnlyStop);
    assert_eq!((given[&0].tokens.len(), &given[&0].finish), (0, &Some(Finish::Stop)));
}

#[test]
fn logits_that_are_no_numbers_end_their_own_row() {
    let first = alone(&[(vec![1, 2, 40], Params::greedy(9))]).remove(0);
    let poison = first.tokens[4];
    let last = first.tokens.iter().position(|token| *token == poison).unwrap();
    let mut generator = Generator::new(Toy { poison: Some(poison), ..Toy::default() }, roomy()).unwrap();
    generator.add(0, vec![1, 2, 40], Params::greedy(9)).unwrap();
    generator.add(1, vec![poison], Params::greedy(9)).unwrap();
    generator.add(2, vec![poison], Params { beams: 3, ..Params::greedy(9) }).unwrap();
    let given = drain(&mut generator, &mut NoMasks);
    let error = Some(Finish::Error("the model's logits are not numbers".to_owned()));
    assert_eq!((&given[&0].tokens[..], &given[&0].finish), (&first.tokens[..=last], &error));
    assert_eq!((given[&1].tokens.len(), &given[&1].finish), (0, &error));
    assert_eq!((given[&2].tokens.len(), &given[&2].finish), (0, &error));
}
