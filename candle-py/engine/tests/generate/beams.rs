//! Beam search against one that holds whole sequences and computes each anew, and beams beside other rows.

use candle_engine::generate::{Finish, Limits, Params};

use crate::toy::{VOCAB, logits_after};
use crate::{Given, alone, prompt, roomy, tight, together};

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
    logits.iter().map(|logit| f64::from(*logit) - sum.ln()).collect()
}

/// Beam search as transformers' BeamSearchScorer does it, written down plainly.
fn reference(prompt: &[u32], params: &Params) -> Given {
    let beams = params.beams;
    let power = |length: usize| (length as f64).powf(f64::from(params.length_penalty));
    let mut running: Vec<(f64, Vec<u32>)> = vec![(0.0, vec![])];
    let mut finished: Vec<(f64, Vec<u32>, bool)> = vec![];
    let add = |finished: &mut Vec<(f64, Vec<u32>, bool)>, found: (f64, Vec<u32>, bool)| {
        finished.push(found);
        finished.sort_by(|a, b| b.0.total_cmp(&a.0));
        finished.truncate(beams);
    };
    let mut is_done = false;
    for length in 1..=params.max_new_tokens {
        let mut candidates = vec![];
        for (score, tokens) in &running {
            let mut scores = log_softmax(&logits_after(&[prompt, tokens].concat(), false));
            let mut seen = [prompt, &tokens[..]].concat();
            seen.sort_unstable();
            seen.dedup();
            // Log-probabilities are negative: the penalty multiplies.
            seen.iter().for_each(|id| scores[*id as usize] *= f64::from(params.repetition_penalty));
            candidates.extend((0..VOCAB).map(|id| (score + scores[id], tokens.clone(), id as u32)));
        }
        candidates.sort_by(|a, b| b.0.total_cmp(&a.0));
        candidates.truncate(beams * (1 + params.stop_ids.len()).max(2));
        let best = candidates[0].0;
        running.clear();
        for (rank, (score, mut tokens, id)) in candidates.into_iter().enumerate() {
            if params.stop_ids.contains(&id) {
                if rank < beams {
                    add(&mut finished, (score / power(length), tokens, true));
                }
            } else if running.len() < beams {
                tokens.push(id);
                running.push((score, tokens));
            }
        }
        if finished.len() == beams && finished[beams - 1].0 >= best / power(length) {
            is_done = true;
            break;
        }
    }
    if !is_done {
        running.into_iter().for_each(|(score, tokens)| {
            let length = tokens.len();
            add(&mut finished, (score / power(length), tokens, false));
        });
    }
    let (_, tokens, is_stopped) = finished.remove(0);
    let logprobs = (0..tokens.len())
        .map(|at| log_softmax(&logits_after(&[prompt, &tokens[..at]].concat(), false))[tokens[at] as usize] as f32)
        .collect();
    Given { tokens, logprobs, finish: Some(if is_stopped { Finish::Stop } else { Finish::Length }) }
}

fn searches() -> Vec<(Vec<u32>, Params)> {
    let mut searches = vec![];
    for (index, length) in [1, 15, 16, 17, 33].into_iter().enumerate() {
        for beams in [2, 3, 5] {
            let params = Params {
                beams,
                length_penalty: [1.0, 0.0, 2.0, -1.0][(index + beams) % 4],
                repetition_penalty: [1.0, 1.2][index % 2],
                stop_ids: [vec![], vec![3, 11], (20..28).collect()][(index + beams) % 3].clone(),
                ..Params::greedy(1 + (index * 9 + beams * 4) % 36)
            };
            searches.push((prompt(index as u32 % 2, 10, beams as u32, length), params));
        }
    }
    searches
}

#[test]
fn a_beam_search_finds_what_a_plain_one_finds() {
    let (mut stopped, mut longest) = (0, 0);
    for (prompt, params) in searches() {
        let given = alone(&[(prompt.clone(), params.clone())]).remove(0);
        let expected = reference(&prompt, &params);
        assert_eq!((&given.tokens, &given.finish), (&expected.tokens, &expected.finish), "{params:?}");
        let distance = given.logprobs.iter().zip(&expected.logprobs).map(|(a, b)| (a - b).abs());
        assert!(distance.fold(0.0, f32::max) < 1e-5);
        stopped += usize::from(given.finish == Some(Finish::Stop));
        longest = longest.max(given.tokens.len());
    }
    assert!(stopped >= 3 && longest > 20, "the searches are too much alike: {stopped} {longest}");
}

#[test]
fn more_beams_find_likelier_outputs() {
    let start = prompt(0, 0, 4, 20);
    let total = |beams| alone(&[(start.clone(), Params { beams, ..Params::greedy(12) })])[0].logprob();
    assert!(total(8) > total(1));
}

#[test]
fn beams_beside_other_rows_and_in_small_caches_find_the_same() {
    let mut requests = searches();
    for own in 0..8 {
        requests.insert(own * 2, (prompt(own as u32 % 2, 30, own as u32, 40), Params::greedy(25)));
    }
    let expected = alone(&requests);
    // The widest takes 5 beams on 33 + 35 tokens: two blocks of the prompt, and three of its own for each.
    let mut preemptions = 0;
    for blocks in [17, 18, 20, 25, 30, 50] {
        for (step_tokens, max_rows) in [(512, 64), (1, 5), (7, 6), (30, 9)] {
            let limits = Limits { step_tokens, max_rows, ..tight(blocks) };
            let (given, generator) = together(limits, &requests);
            assert_eq!(given, expected, "blocks {blocks} step_tokens {step_tokens} max_rows {max_rows}");
            preemptions += generator.stats().preemptions;
        }
    }
    assert!(preemptions > 20, "{preemptions}");
}

#[test]
fn the_beams_of_a_search_hold_its_prompt_once() {
    let params = Params { beams: 4, ..Params::greedy(10) };
    // Six full blocks of prompt, and for each beam one of its own.
    let (_, generator) = together(tight(6 + 4), &[(prompt(0, 0, 1, 96), params)]);
    let stats = generator.stats();
    assert_eq!((stats.prefill_tokens, stats.preemptions), (96, 0));
    assert_eq!(stats.decode_tokens, 4 * 9);
}

#[test]
fn a_search_takes_as_many_places_as_it_has_beams() {
    let mut generator = crate::generator(roomy());
    generator.add(0, vec![1], Params { beams: 4, ..Params::greedy(10) }).unwrap();
    assert_eq!(generator.free_rows(), roomy().max_rows - 4);
}
