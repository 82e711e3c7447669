//! What is refused, what a caller may stop, and what the counters tell.

use candle_engine::Error;
use candle_engine::generate::{BLOCK_TOKENS, Event, Finish, Generator, Limits, NoMasks, Params};

use crate::toy::{POSITIONS, Toy, VOCAB};
use crate::{alone, drain, generator, prompt, roomy, tight, together};

fn refusal(limits: Limits, prompt: Vec<u32>, params: Params) -> String {
    let mut generator = generator(limits);
    let error = generator.add(3, prompt, params).unwrap_err();
    assert!(matches!(error, Error::Input { .. }));
    assert_eq!((generator.pending(), generator.free_rows()), (0, limits.max_rows));
    error.to_string()
}

#[test]
fn what_fits_nowhere_is_refused_by_name() {
    let greedy = Params::greedy(10);
    assert_eq!(refusal(roomy(), vec![], greedy.clone()), "prompt of the request has no tokens: `3`");
    assert_eq!(
        refusal(roomy(), vec![1, VOCAB as u32], greedy.clone()),
        "prompt has a token id outside the vocabulary of 48 tokens: `48`"
    );
    assert_eq!(
        refusal(roomy(), vec![1; POSITIONS], greedy.clone()),
        "prompt leaves no room in the 160 positions of the model: `160`"
    );
    let message = "prompt and new tokens may need 5 blocks of 16 tokens, more than the cache's: `4`";
    assert_eq!(refusal(tight(4), vec![1; 60], greedy.clone()), message);
    let few = Limits { max_rows: 3, ..roomy() };
    assert_eq!(refusal(few, vec![1], Params { beams: 4, ..greedy.clone() }), "beams are more than max_rows, 3: `4`");
    // 55 tokens and 10 new ones, of which the last never enters, fill four blocks.
    assert!(generator(tight(4)).add(0, vec![1; 55], greedy).is_ok());
}

#[test]
fn options_that_make_no_sense_are_refused_by_name() {
    let greedy = Params::greedy(10);
    for (params, message) in [
        (Params::greedy(0), "max_new_tokens must be at least 1: `0`"),
        (Params { temperature: -1.0, ..greedy.clone() }, "temperature must be 0, or a number from 0.000001 on: `-1`"),
        (
            Params { temperature: f32::NAN, ..greedy.clone() },
            "temperature must be 0, or a number from 0.000001 on: `NaN`",
        ),
        (Params { top_k: Some(0), ..greedy.clone() }, "top_k must be at least 1: `0`"),
        (Params { top_p: 0.0, ..greedy.clone() }, "top_p must be above 0 and at most 1: `0`"),
        (Params { top_p: 1.5, ..greedy.clone() }, "top_p must be above 0 and at most 1: `1.5`"),
        (Params { min_p: -0.1, ..greedy.clone() }, "min_p must be from 0 to 1: `-0.1`"),
        (Params { repetition_penalty: 0.0, ..greedy.clone() }, "repetition_penalty must be above 0: `0`"),
        (Params { stop_ids: vec![48], ..greedy.clone() }, "stop id is outside the vocabulary of 48 tokens: `48`"),
        (Params { beams: 0, ..greedy.clone() }, "beams must be at least 1: `0`"),
        (Params { beams: 2, temperature: 1.0, ..greedy.clone() }, "a beam search takes no temperature: `1`"),
        (Params { beams: 2, constrained: true, ..greedy.clone() }, "a beam search takes no constraint: `2`"),
        (Params { length_penalty: f32::INFINITY, ..greedy.clone() }, "length_penalty must be a finite number: `inf`"),
    ] {
        assert_eq!(refusal(roomy(), vec![1], params), message);
    }
}

#[test]
fn limits_that_make_no_sense_are_refused_by_name() {
    for (limits, message) in [
        (Limits { max_rows: 0, ..roomy() }, "max_rows must be at least 1: `0`"),
        (Limits { step_tokens: 0, ..roomy() }, "step_tokens must be at least 1: `0`"),
        (Limits { threads: 0, ..roomy() }, "threads must be at least 1: `0`"),
        (Limits { cache_bytes: 999, ..roomy() }, "cache_bytes are fewer than the 1000 of one block: `999`"),
    ] {
        let error = Generator::new(Toy::default(), limits).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
}

#[test]
fn a_cache_too_small_for_the_longest_request_grows_to_hold_it_and_no_further() {
    let blocks = |limits: Limits| generator(limits).stats().blocks;
    assert_eq!(blocks(Limits { longest_tokens: 65, ..tight(4) }), 5);
    assert_eq!(blocks(Limits { longest_tokens: 64, ..tight(4) }), 4);
    assert_eq!(blocks(Limits { longest_tokens: 65, beams: 3, ..tight(4) }), 15);
    assert_eq!(blocks(Limits { longest_tokens: 65, beams: 3, ..tight(20) }), 20);
    assert_eq!(blocks(Limits { longest_tokens: 17, cache_bytes: 0, ..roomy() }), 2);
    // No request is longer than the model's positions, nor has more rows than there are.
    let most = POSITIONS / BLOCK_TOKENS;
    assert_eq!(blocks(Limits { longest_tokens: usize::MAX, beams: 2, ..tight(1) }), 2 * most);
    assert_eq!(blocks(Limits { longest_tokens: usize::MAX, beams: 9, max_rows: 3, ..tight(1) }), 3 * most);
    let request = (vec![1; 50], Params { beams: 4, ..Params::greedy(15) });
    assert!(generator(tight(6)).add(0, request.0.clone(), request.1.clone()).is_err());
    let small = Limits { longest_tokens: 65, beams: 4, ..tight(6) };
    assert_eq!(together(small, std::slice::from_ref(&request)).0, alone(&[request]));
}

#[test]
fn a_request_keeps_its_number_to_itself_until_it_has_ended() {
    let mut generator = generator(roomy());
    generator.add(1, vec![1], Params::greedy(2)).unwrap();
    let error = generator.add(1, vec![1], Params::greedy(2)).unwrap_err();
    assert_eq!(error.to_string(), "request is on its way already: `1`");
    drain(&mut generator, &mut NoMasks);
    generator.add(1, vec![1], Params::greedy(2)).unwrap();
}

#[test]
fn a_stopped_request_gives_its_place_and_blocks_back_at_once() {
    let mut generator = generator(Limits { max_rows: 2, ..tight(8) });
    let other = (prompt(0, 0, 2, 60), Params::greedy(6));
    generator.add(0, prompt(0, 0, 1, 60), Params::greedy(6)).unwrap();
    generator.add(1, other.0.clone(), other.1.clone()).unwrap();
    generator.add(2, vec![5], Params::greedy(6)).unwrap();
    assert_eq!((generator.free_rows(), generator.pending()), (0, 3));
    generator.step(&mut NoMasks).unwrap();
    let held = generator.stats().held_blocks;
    generator.stop(0);
    generator.stop(2);
    generator.stop(99);
    assert!(generator.stats().held_blocks < held);
    assert_eq!((generator.free_rows(), generator.pending()), (1, 3));
    let events = generator.step(&mut NoMasks).unwrap();
    let stopped = |id| Event { id, new_tokens: vec![], logprobs: vec![], finished: Some(Finish::Stopped) };
    assert_eq!(events[..2], [stopped(0), stopped(2)]);
    assert_eq!(generator.pending(), 1);
    drain(&mut generator, &mut NoMasks);
    // Stopped in its first step, then again from the start in the blocks of others.
    generator.add(1, other.0.clone(), other.1.clone()).unwrap();
    assert_eq!(drain(&mut generator, &mut NoMasks)[&1], alone(&[other])[0]);
}

#[test]
fn without_stream_all_tokens_come_with_the_end() {
    let start = vec![1, 2, 3];
    let expected = alone(&[(start.clone(), Params::greedy(6))]).remove(0);
    let mut generator = generator(roomy());
    generator.add(0, start, Params { stream: false, ..Params::greedy(6) }).unwrap();
    let events: Vec<Event> = (0..6).flat_map(|_| generator.step(&mut NoMasks).unwrap()).collect();
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].new_tokens, expected.tokens);
    assert_eq!(events[0].logprobs, expected.logprobs);
}

#[test]
fn a_step_without_requests_does_nothing() {
    let mut generator = generator(roomy());
    assert!(generator.step(&mut NoMasks).unwrap().is_empty());
    assert_eq!(generator.stats().steps, 0);
}

#[test]
fn after_a_failed_step_the_requests_go_on() {
    let requests: Vec<_> = (0..6).map(|own| (prompt(0, 20, own, 30), Params::greedy(20))).collect();
    let expected = alone(&requests);
    for failing in 0..12 {
        let model = Toy { fails_in: Some(failing), ..Toy::default() };
        let mut generator = Generator::new(model, tight(9)).unwrap();
        for (id, (prompt, params)) in requests.iter().enumerate() {
            generator.add(id as u64, prompt.clone(), params.clone()).unwrap();
        }
        let mut given = std::collections::BTreeMap::<u64, Vec<u32>>::new();
        let mut failures = 0;
        while generator.pending() > 0 {
            match generator.step(&mut NoMasks) {
                Ok(events) => {
                    events.into_iter().for_each(|event| given.entry(event.id).or_default().extend(event.new_tokens))
                }
                Err(error) => {
                    assert_eq!(error.to_string(), "the model failed: `once`");
                    failures += 1;
                }
            }
        }
        assert_eq!(failures, 1);
        for (id, tokens) in given {
            assert_eq!(tokens, expected[id as usize].tokens);
        }
    }
}
