//! Rows beside one another: chunks, small caches, shared starts, order, seeds.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use candle_engine::generate::{Finish, Generator, Limits, NoMasks, Params};

use crate::toy::{POSITIONS, Toy, VOCAB, logits_after};
use crate::{Given, alone, drain, generator, prompt, roomy, tight, together};

/// Prompts from 1 token to several blocks, some with a common start, some greedy, some drawn.
fn mixture() -> Vec<(Vec<u32>, Params)> {
    let lengths = [1, 2, 15, 16, 17, 31, 32, 33, 48, 50, 64, 70];
    let row = |(index, length): (usize, usize)| {
        let params = Params {
            max_new_tokens: 5 + index * 7 % 40,
            temperature: if index % 3 == 1 { 0.9 } else { 0.0 },
            top_p: if index % 2 == 1 { 0.8 } else { 1.0 },
            repetition_penalty: if index % 4 == 2 { 1.3 } else { 1.0 },
            seed: index as u64,
            ..Params::greedy(1)
        };
        (prompt(index as u32 % 2, 40, index as u32, length), params)
    };
    lengths.into_iter().enumerate().map(row).collect()
}

#[test]
fn greedy_takes_the_most_likely_token_and_tells_its_log_probability() {
    let start = prompt(1, 0, 3, 21);
    let (given, _) = together(roomy(), &[(start.clone(), Params::greedy(30))]);
    let mut tokens = start;
    for (token, logprob) in given[0].tokens.iter().zip(&given[0].logprobs) {
        let logits = logits_after(&tokens, false);
        let best = logits.iter().copied().fold(f32::MIN, f32::max);
        assert_eq!(logits[*token as usize], best);
        let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
        assert!((f64::from(*logprob) - (f64::from(best) - sum.ln())).abs() < 1e-6);
        tokens.push(*token);
    }
    assert_eq!((given[0].tokens.len(), &given[0].finish), (30, &Some(Finish::Length)));
}

#[test]
fn of_equally_likely_tokens_the_lowest_id_is_taken() {
    let mut generator = Generator::new(Toy { is_coarse: true, ..Toy::default() }, roomy()).unwrap();
    let start = prompt(1, 0, 3, 9);
    generator.add(0, start.clone(), Params::greedy(40)).unwrap();
    let mut tokens = start;
    for token in &drain(&mut generator, &mut NoMasks)[&0].tokens {
        let logits = logits_after(&tokens, true);
        let best = logits.iter().copied().fold(f32::MIN, f32::max);
        assert_eq!(logits.iter().position(|logit| *logit == best), Some(*token as usize));
        tokens.push(*token);
    }
}

#[test]
fn rows_give_what_they_give_alone_for_every_step_budget() {
    let requests = mixture();
    let expected = alone(&requests);
    for step_tokens in (1..=40).chain([64, 100, 1000]) {
        let (given, _) = together(Limits { step_tokens, ..roomy() }, &requests);
        assert_eq!(given, expected, "step_tokens {step_tokens}");
    }
}

#[test]
fn rows_give_what_they_give_alone_for_every_number_of_places_and_threads() {
    let requests = mixture();
    let expected = alone(&requests);
    for max_rows in 1..=requests.len() {
        let (given, _) = together(Limits { max_rows, threads: 1 + max_rows % 2, ..roomy() }, &requests);
        assert_eq!(given, expected, "max_rows {max_rows}");
    }
}

#[test]
fn rows_that_are_put_back_give_what_they_give_alone() {
    let mut requests = mixture();
    for own in 0..8 {
        let params = Params { temperature: own as f32 / 4.0, seed: own, ..Params::greedy(60 + own as usize * 5) };
        requests.insert(own as usize, (prompt(own as u32 % 2, 20, own as u32, 1 + 3 * own as usize), params));
    }
    let expected = alone(&requests);
    let mut preemptions = 0;
    // The longest needs eight blocks.
    for blocks in 8..40 {
        for step_tokens in [1, 7, 512] {
            let (given, generator) = together(Limits { step_tokens, ..tight(blocks) }, &requests);
            assert_eq!(given, expected, "blocks {blocks} step_tokens {step_tokens}");
            preemptions += generator.stats().preemptions;
        }
    }
    assert!(preemptions > 300, "{preemptions}");
}

#[test]
fn rows_give_the_same_in_another_order() {
    let mut requests = mixture();
    let mut expected = alone(&requests);
    requests.reverse();
    expected.reverse();
    for limits in [roomy(), tight(9), Limits { step_tokens: 3, ..tight(12) }] {
        assert_eq!(together(limits, &requests).0, expected);
    }
}

#[test]
fn a_common_start_is_computed_once() {
    const ROWS: usize = 20;
    const SHARED: usize = 96;
    let requests: Vec<_> =
        (0..ROWS).map(|own| (prompt(5, SHARED, own as u32, SHARED + 5), Params::greedy(4))).collect();
    let expected = alone(&requests);
    for step_tokens in [7, 64, 1000] {
        let entered = Arc::default();
        let model = Toy { entered: Arc::clone(&entered), ..Toy::default() };
        let mut generator = Generator::new(model, Limits { step_tokens, ..roomy() }).unwrap();
        for (id, (prompt, params)) in requests.iter().enumerate() {
            generator.add(id as u64, prompt.clone(), params.clone()).unwrap();
        }
        let given: Vec<Given> = drain(&mut generator, &mut NoMasks).into_values().collect();
        assert_eq!(given, expected);
        let stats = generator.stats();
        assert_eq!(stats.shared_tokens, ((ROWS - 1) * SHARED) as u64);
        assert_eq!(stats.prefill_tokens, (SHARED + ROWS * 5) as u64);
        assert_eq!(entered.load(Ordering::Relaxed), stats.prefill_tokens + stats.decode_tokens);
    }
}

#[test]
fn a_common_start_is_kept_after_its_rows_have_finished_while_there_is_room() {
    let mut generator = generator(roomy());
    let first = (prompt(5, 64, 1, 70), Params::greedy(3));
    let second = (prompt(5, 64, 2, 75), Params::greedy(3));
    let expected = alone(&[first.clone(), second.clone()]);
    generator.add(0, first.0, first.1).unwrap();
    drain(&mut generator, &mut NoMasks);
    assert!(generator.stats().kept_blocks >= 4);
    generator.add(1, second.0, second.1).unwrap();
    assert_eq!(drain(&mut generator, &mut NoMasks)[&1], expected[1]);
    assert_eq!(generator.stats().shared_tokens, 64);
}

#[test]
fn completions_of_one_prompt_compute_it_once_and_differ_by_seed() {
    let drawn = |seed| Params { temperature: 1.0, seed, ..Params::greedy(12) };
    let requests: Vec<_> = (0..8).map(|seed| (prompt(1, 0, 4, 65), drawn(seed))).collect();
    let (given, generator) = together(roomy(), &requests);
    assert_eq!(given, alone(&requests));
    assert_eq!(generator.stats().prefill_tokens, 65 + 7);
    let mut texts: Vec<_> = given.into_iter().map(|given| given.tokens).collect();
    texts.sort();
    texts.dedup();
    assert_eq!(texts.len(), 8);
}

#[test]
fn a_finished_row_gives_its_place_away_at_the_next_step() {
    let steps = Arc::new(Mutex::default());
    let model = Toy { steps: Arc::clone(&steps), ..Toy::default() };
    let mut generator = Generator::new(model, Limits { max_rows: 2, ..roomy() }).unwrap();
    for id in 0..4 {
        generator.add(id, vec![id as u32], Params::greedy(if id == 0 { 3 } else { 5 })).unwrap();
    }
    drain(&mut generator, &mut NoMasks);
    // Two rows all the time: the third begins as the first ends, the fourth as the second does.
    assert_eq!(*steps.lock().unwrap(), [2, 2, 2, 2, 2, 2, 2, 2, 1, 1]);
}

#[test]
fn a_long_prompt_enters_in_pieces_while_others_go_on() {
    let steps = Arc::new(Mutex::default());
    let model = Toy { steps: Arc::clone(&steps), ..Toy::default() };
    let mut generator = Generator::new(model, Limits { step_tokens: 20, ..roomy() }).unwrap();
    generator.add(0, vec![1], Params::greedy(10)).unwrap();
    generator.add(1, prompt(1, 0, 2, 100), Params::greedy(2)).unwrap();
    drain(&mut generator, &mut NoMasks);
    assert_eq!(*steps.lock().unwrap(), [20, 20, 20, 20, 20, 6, 2, 1, 1, 1]);
}

#[test]
fn random_requests_with_tiny_caches_all_end_and_lose_no_block() {
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut preemptions = 0;
    for round in 0..150 {
        let requests: Vec<_> = (0..1 + random(14))
            .map(|_| {
                let params = Params {
                    max_new_tokens: 1 + random(100),
                    temperature: [0.0, 0.7][random(2)],
                    seed: random(3) as u64,
                    stop_ids: (0..random(3)).map(|_| random(VOCAB) as u32).collect(),
                    ..Params::greedy(1)
                };
                let params = match random(4) {
                    0 => Params { beams: 2 + random(2), max_new_tokens: 1 + random(30), temperature: 0.0, ..params },
                    _ => params,
                };
                (prompt(random(2) as u32, random(60), random(3) as u32, 1 + random(50)), params)
            })
            .collect();
        let expected = alone(&requests);
        // The largest: 3 beams on 47 + 29 tokens, two blocks of the prompt and three of its own for each.
        let limits = Limits { max_rows: 3 + random(8), step_tokens: 1 + random(60), ..tight(11 + random(12)) };
        let (given, generator) = together(limits, &requests);
        assert_eq!(given, expected, "round {round}");
        let stats = generator.stats();
        assert_eq!(stats.held_blocks, 0);
        assert!(stats.kept_blocks <= stats.blocks);
        preemptions += stats.preemptions;
    }
    assert!(preemptions > 50, "{preemptions}");
}

#[test]
fn the_positions_of_the_model_end_a_row() {
    let start = prompt(1, 0, 2, POSITIONS - 3);
    let (given, _) = together(roomy(), &[(start, Params::greedy(50))]);
    assert_eq!((given[0].tokens.len(), &given[0].finish), (3, &Some(Finish::Length)));
}

#[test]
fn a_stop_token_ends_a_row_and_is_not_part_of_it() {
    let start = prompt(1, 0, 2, 10);
    let (free, _) = together(roomy(), &[(start.clone(), Params::greedy(20))]);
    let stop = free[0].tokens[7];
    let first = free[0].tokens.iter().position(|token| *token == stop).unwrap();
    let params = Params { stop_ids: vec![stop], ..Params::greedy(20) };
    let (given, _) = together(roomy(), &[(start.clone(), params.clone())]);
    assert_eq!(given[0].tokens, free[0].tokens[..first]);
    assert_eq!(given[0].finish, Some(Finish::Stop));
    let (given, _) = together(roomy(), &[(start, Params { min_new_tokens: first + 3, ..params })]);
    assert!(given[0].tokens.len() >= first + 3);
    assert!(!given[0].tokens.contains(&stop));
}

#[test]
fn a_seed_decides_a_row_whatever_its_batch_mates() {
    let row = (prompt(1, 0, 9, 30), Params { temperature: 1.2, seed: 77, ..Params::greedy(40) });
    let expected = alone(std::slice::from_ref(&row));
    let mut requests = mixture();
    requests.insert(5, row.clone());
    for limits in [roomy(), tight(8), Limits { step_tokens: 2, ..roomy() }] {
        assert_eq!(together(limits, &requests).0[5], expected[0]);
    }
    let other = (row.0, Params { seed: 78, ..row.1 });
    assert_ne!(alone(&[other])[0].tokens, expected[0].tokens);
}
