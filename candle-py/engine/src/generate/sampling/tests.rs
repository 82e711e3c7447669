//! Choices against exact probabilities, and the edges of every filter.

use std::collections::HashSet;

use super::{Choice, Row, Scratch, choose, continuations, largest};
use crate::cpu::{Isa, Kernels};
use crate::generate::params::Params;
use crate::generate::random::uniform;

const DRAWS: u64 = 10_000;

fn kernels() -> Vec<Kernels> {
    Isa::ALL.into_iter().filter_map(Kernels::new).collect()
}

fn row<'a>(logits: &'a [f32], params: &'a Params) -> Row<'a> {
    Row { logits, seen: None, mask: None, generated: 0, params }
}

fn pick(row: &Row<'_>) -> Result<Choice, String> {
    let choices: Vec<_> = kernels().iter().map(|kernels| choose(kernels, row, &mut Scratch::default())).collect();
    let id = |choice: &Result<Choice, String>| choice.as_ref().map(|choice| choice.id).map_err(String::clone);
    assert!(choices.iter().all(|choice| id(choice) == id(&choices[0])), "{choices:?}");
    choices.into_iter().last().unwrap()
}

fn id(row: &Row<'_>) -> u32 {
    pick(row).unwrap().id
}

/// Logits of many tokens, spread as a model's are.
fn many(count: usize, seed: u64) -> Vec<f32> {
    (0..count as u64).map(|id| (uniform(seed, id) * 12.0 - 4.0) as f32).collect()
}

/// How often each token is drawn.
fn counts(logits: &[f32], params: &Params) -> Vec<u64> {
    let kernels = *kernels().last().unwrap();
    let mut scratch = Scratch::default();
    let mut counts = vec![0; logits.len()];
    for position in 0..DRAWS {
        let row = Row { generated: position as usize, ..row(logits, params) };
        counts[choose(&kernels, &row, &mut scratch).unwrap().id as usize] += 1;
    }
    counts
}

/// What the probabilities should be, in plain float64: sort, cut, divide.
fn exact(logits: &[f32], params: &Params) -> Vec<f64> {
    let temperature = f64::from(params.temperature);
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    let greatest = f64::from(logits[order[0]]);
    let power = |id: usize| ((f64::from(logits[id]) - greatest) / temperature).exp();
    order.truncate(params.top_k.unwrap_or(usize::MAX));
    let total: f64 = order.iter().map(|id| power(*id)).sum();
    let mut before = 0.0;
    order.retain(|id| {
        let is_kept = before < f64::from(params.top_p) * total;
        before += power(*id);
        is_kept
    });
    order.retain(|id| power(*id) >= f64::from(params.min_p));
    let total: f64 = order.iter().map(|id| power(*id)).sum();
    let mut probabilities = vec![0.0; logits.len()];
    order.into_iter().for_each(|id| probabilities[id] = power(id) / total);
    probabilities
}

/// Pearson's statistic for a fit, as deviations from its mean: beyond 4.5 hardly ever by chance.
fn deviation(counts: &[u64], probabilities: &[f64]) -> f64 {
    let (mut statistic, mut freedom) = (0.0, -1.0);
    // Rare tokens together make one bin.
    let (mut rare, mut rarely) = (0.0, 0.0);
    for (count, probability) in counts.iter().zip(probabilities) {
        assert!(*probability > 0.0 || *count == 0, "a token that was ruled out is drawn");
        let (count, expected) = (*count as f64, probability * DRAWS as f64);
        if expected < 5.0 {
            (rare, rarely) = (rare + expected, rarely + count);
        } else {
            statistic += (count - expected).powi(2) / expected;
            freedom += 1.0;
        }
    }
    if rare >= 5.0 {
        statistic += (rarely - rare).powi(2) / rare;
        freedom += 1.0;
    }
    if freedom < 1.0 { statistic } else { (statistic - freedom) / (2.0 * freedom).sqrt() }
}

#[test]
fn draws_follow_the_exact_probabilities() {
    let logits = many(400, 1);
    let base = Params { seed: 5, ..Params::greedy(1) };
    for temperature in [0.3, 1.0, 1.7] {
        for top_k in [None, Some(7), Some(200), Some(500)] {
            for top_p in [1.0, 0.95, 0.5] {
                for min_p in [0.0, 0.1] {
                    let params = Params { temperature, top_k, top_p, min_p, ..base.clone() };
                    let found = deviation(&counts(&logits, &params), &exact(&logits, &params));
                    assert!(found < 4.5, "{found}: {params:?}");
                }
            }
        }
    }
}

#[test]
fn a_wrong_distribution_would_be_seen() {
    let logits = many(400, 1);
    let params = Params { temperature: 1.0, seed: 5, ..Params::greedy(1) };
    let drawn = counts(&logits, &params);
    for other in [Params { temperature: 1.1, ..params.clone() }, Params { temperature: 0.9, ..params.clone() }] {
        assert!(deviation(&drawn, &exact(&logits, &other)) > 4.5);
    }
    let other = Params { seed: 6, ..params };
    assert_ne!(counts(&logits, &other), drawn);
}

#[test]
fn equal_logits_are_drawn_equally() {
    let logits = vec![2.5; 64];
    for top_p in [1.0, 0.999_999] {
        let params = Params { temperature: 1.0, top_p, ..Params::greedy(1) };
        assert!(deviation(&counts(&logits, &params), &[1.0 / 64.0; 64]) < 4.5);
    }
}

#[test]
fn the_log_probability_is_of_the_models_own_distribution() {
    let logits = many(50_000, 3);
    let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
    let params = Params { temperature: 2.0, top_k: Some(40), repetition_penalty: 1.5, ..Params::greedy(1) };
    let seen: HashSet<u32> = (0..25_000).collect();
    let choice = pick(&Row { seen: Some(&seen), ..row(&logits, &params) }).unwrap();
    let expected = f64::from(logits[choice.id as usize]) - sum.ln();
    assert!((f64::from(choice.logprob) - expected).abs() < 2e-6);
}

#[test]
fn large_logits_and_small_temperatures_stay_numbers() {
    let logits = [1e30, -1e30, 9.9e29, 0.0];
    for temperature in [0.0, 1e-6, 1.0, 1e30] {
        let choice = pick(&row(&logits, &Params { temperature, ..Params::greedy(1) })).unwrap();
        assert!(choice.logprob.is_finite() || choice.id != 0);
        assert!(temperature == 1e30 || choice == Choice { id: 0, logprob: 0.0 });
    }
}

#[test]
fn of_equals_greedy_takes_the_lowest_id() {
    let params = Params::greedy(1);
    let mut logits = vec![-1.0; 5000];
    [4999, 1234, 4097, 1235].into_iter().for_each(|id: usize| logits[id] = 0.5);
    assert_eq!(id(&row(&logits, &params)), 1234);
}

#[test]
fn logits_that_are_no_numbers_are_an_error_wherever_they_are() {
    for count in [1, 17, 3000] {
        for at in [0, count / 2, count - 1] {
            for bad in [f32::NAN, f32::INFINITY] {
                let mut logits = vec![0.5; count];
                logits[at] = bad;
                for temperature in [0.0, 1.0] {
                    let params = Params { temperature, ..Params::greedy(1) };
                    assert_eq!(pick(&row(&logits, &params)).unwrap_err(), "the model's logits are not numbers");
                }
            }
        }
    }
    let params = Params::greedy(1);
    assert!(pick(&row(&[f32::NEG_INFINITY; 20], &params)).is_err());
    assert_eq!(id(&row(&[f32::NEG_INFINITY, -3.0], &params)), 1);
}

#[test]
fn the_repetition_penalty_makes_seen_tokens_less_likely_on_either_side_of_zero() {
    let params = Params { repetition_penalty: 2.0, ..Params::greedy(1) };
    let seen = HashSet::from([0, 3]);
    let with = |logits: [f32; 4]| id(&Row { seen: Some(&seen), ..row(&logits, &params) });
    assert_eq!(with([3.0, 1.4, 1.6, 0.0]), 2);
    assert_eq!(with([3.0, 1.4, 1.4, 0.0]), 0);
    assert_eq!(with([-1.0, -1.9, -2.1, -5.0]), 1);
    assert_eq!(with([-1.0, -2.1, -2.1, -5.0]), 0);
}

#[test]
fn only_the_masks_tokens_are_taken_and_bits_beyond_the_vocabulary_are_not_looked_at() {
    let logits = many(70, 2);
    let mask = [1 << 5, u32::MAX, 1 << 2 | 1 << 20];
    let allowed: Vec<u32> = [5].into_iter().chain(32..64).chain([66]).collect();
    for temperature in [0.0, 1.0, 30.0] {
        for position in 0..200 {
            let params = Params { temperature, ..Params::greedy(1) };
            let masked = Row { mask: Some(&mask), generated: position, ..row(&logits, &params) };
            assert!(allowed.contains(&id(&masked)));
        }
    }
    let none = [0, 0, 1 << 20];
    for temperature in [0.0, 1.0] {
        let params = Params { temperature, ..Params::greedy(1) };
        let masked = Row { mask: Some(&none), ..row(&logits, &params) };
        assert_eq!(pick(&masked).unwrap_err(), "no token is allowed here");
    }
}

#[test]
fn top_k_keeps_tokens_that_are_equal_to_the_last_one() {
    let logits = [1.0, 3.0, 2.0, 2.0, 2.0, 0.0];
    let params = Params { temperature: 1.0, top_k: Some(2), ..Params::greedy(1) };
    let drawn = counts(&logits, &params);
    assert!(drawn[0] == 0 && drawn[5] == 0 && drawn[1..5].iter().all(|count| *count > 0));
}

#[test]
fn the_least_top_p_and_the_greatest_min_p_leave_the_most_likely_token() {
    let logits = many(4000, 9);
    let best = id(&row(&logits, &Params::greedy(1)));
    let base = Params { temperature: 1.5, ..Params::greedy(1) };
    for params in [
        Params { top_p: f32::MIN_POSITIVE, ..base.clone() },
        Params { min_p: 1.0, ..base.clone() },
        Params { top_k: Some(1), ..base },
    ] {
        for position in 0..50 {
            assert_eq!(id(&Row { generated: position, ..row(&logits, &params) }), best);
        }
    }
}

#[test]
fn a_flat_distribution_keeps_as_many_tokens_as_top_p_says() {
    let logits = vec![0.0; 10_000];
    let params = Params { temperature: 1.0, top_p: 0.75, ..Params::greedy(1) };
    let last = (0..60).map(|position| id(&Row { generated: position, ..row(&logits, &params) })).max().unwrap();
    assert!((7200..7500).contains(&last), "{last}");
}

#[test]
fn the_largest_are_those_of_a_full_sort() {
    for kernels in kernels() {
        for (count, levels) in [(1, 0), (63, 5), (64, 0), (1000, 3), (5000, 40), (5000, 0)] {
            let mut scores = many(count, 4);
            if levels > 0 {
                scores.iter_mut().for_each(|score| *score = (*score * levels as f32 / 12.0).round());
            }
            let mut sorted: Vec<(f32, u32)> = scores.iter().copied().zip(0..).collect();
            sorted.sort_by(super::likelier);
            for asked in [1, 2, 20, 64, 700, 5000] {
                let mut scratch = Scratch::default();
                largest(&kernels, &scores, asked, &mut scratch);
                let least = sorted[asked.min(count) - 1].0;
                let expected: Vec<_> = sorted.iter().copied().filter(|(score, _)| *score >= least).collect();
                assert_eq!(scratch.candidates, expected);
            }
        }
    }
}

#[test]
fn continuations_are_the_best_after_the_penalties_with_their_own_log_probability() {
    let logits = many(3000, 6);
    let params = Params { repetition_penalty: 1.4, beams: 3, ..Params::greedy(1) };
    let seen: HashSet<u32> = (0..1500).collect();
    let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
    let own = |id: usize| f64::from(logits[id]) - sum.ln();
    let mut expected: Vec<(f64, usize)> =
        (0..3000).map(|id| (own(id) * if id < 1500 { f64::from(1.4f32) } else { 1.0 }, id)).collect();
    expected.sort_by(|a, b| b.0.total_cmp(&a.0));
    for kernels in kernels() {
        let row = Row { seen: Some(&seen), ..row(&logits, &params) };
        let found = continuations(&kernels, &row, 6, &mut Scratch::default()).unwrap();
        for ((score, choice), (expected, id)) in found.iter().zip(&expected) {
            assert_eq!(choice.id as usize, *id);
            assert!((score - expected).abs() < 1e-5 && (f64::from(choice.logprob) - own(*id)).abs() < 1e-5);
        }
        assert_eq!(found.len(), 6);
    }
}
