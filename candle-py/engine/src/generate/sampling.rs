//! One row of logits becomes the next token, or a beam's best continuations. Knows nothing of requests or of time.
//!
//! Everything is a function of the row, its options and the number of tokens before: equal logits give equal tokens.

use std::cmp::Ordering;
use std::collections::HashSet;

use super::params::Params;
use super::random::uniform;
use crate::cpu::{Kernels, LEAST_EXPONENT};

/// Numbers whose powers are summed in float32; the sums of such segments are added in float64.
const SEGMENT: usize = 1024;
/// Numbers whose greatest stands for them where the largest of a row are looked for.
const PANEL: usize = 64;
/// Tokens that are looked at first for top-p; it is seldom that more are needed.
const FIRST_NUCLEUS: usize = 64;

/// Buffers that are kept from row to row.
#[derive(Debug, Default)]
pub struct Scratch {
    scores: Vec<f32>,
    powers: Vec<f32>,
    sums: Vec<f64>,
    maxima: Vec<f32>,
    ranked: Vec<f32>,
    candidates: Vec<(f32, u32)>,
}

/// The logits after a sequence, and what rules the choice.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// The logits, one per token of the vocabulary.
    pub logits: &'a [f32],
    /// The tokens of prompt and output, where there is a repetition penalty.
    pub seen: Option<&'a HashSet<u32>>,
    /// The tokens that the caller allows, a bit each.
    pub mask: Option<&'a [u32]>,
    /// New tokens so far.
    pub generated: usize,
    /// The request's options.
    pub params: &'a Params,
}

/// A token, and its log-probability under the model's own distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The token.
    pub id: u32,
    /// Its log-probability.
    pub logprob: f32,
}

/// The next token of a row.
///
/// # Errors
/// In words: logits that are no numbers, or no token that is allowed.
pub fn choose(kernels: &Kernels, row: &Row<'_>, scratch: &mut Scratch) -> Result<Choice, String> {
    let greatest = kernels.greatest(row.logits);
    let normalizer = log_normalizer(kernels, row.logits, greatest)?;
    let mut scores = std::mem::take(&mut scratch.scores);
    let chosen = if row.is_plain() && row.params.temperature == 0.0 {
        most_likely(kernels, row.logits, greatest)
    } else {
        row.adjust(0.0, &mut scores);
        match row.params.temperature {
            0.0 => most_likely(kernels, &scores, kernels.greatest(&scores)),
            _ => draw(kernels, &scores, row, scratch),
        }
    };
    scratch.scores = scores;
    let id = chosen.ok_or("no token is allowed here")?;
    Ok(Choice { id, logprob: (f64::from(row.logits[id as usize]) - normalizer) as f32 })
}

/// The `count` likeliest continuations of a beam, best first: each with its log-probability after the penalties, and
/// under the model's own distribution.
///
/// # Errors
/// In words: logits that are no numbers.
pub fn continuations(
    kernels: &Kernels,
    row: &Row<'_>,
    count: usize,
    scratch: &mut Scratch,
) -> Result<Vec<(f64, Choice)>, String> {
    let normalizer = log_normalizer(kernels, row.logits, kernels.greatest(row.logits))?;
    let mut scores = std::mem::take(&mut scratch.scores);
    row.adjust(normalizer as f32, &mut scores);
    largest(kernels, &scores, count, scratch);
    scratch.scores = scores;
    let best = scratch.candidates.iter().take(count);
    let with_own = |(score, id): &(f32, u32)| {
        let logprob = (f64::from(row.logits[*id as usize]) - normalizer) as f32;
        (f64::from(*score), Choice { id: *id, logprob })
    };
    Ok(best.map(with_own).collect())
}

impl Row<'_> {
    /// Whether nothing changes the logits before the temperature.
    fn is_plain(&self) -> bool {
        self.seen.is_none() && self.mask.is_none() && !self.is_too_short()
    }

    fn is_too_short(&self) -> bool {
        self.generated < self.params.min_new_tokens && !self.params.stop_ids.is_empty()
    }

    /// `scores` becomes the logits less `offset` after repetition penalty, mask and least length.
    fn adjust(&self, offset: f32, scores: &mut Vec<f32>) {
        scores.clear();
        scores.extend(self.logits.iter().map(|logit| logit - offset));
        let penalty = self.params.repetition_penalty;
        for id in self.seen.into_iter().flatten() {
            let score = &mut scores[*id as usize];
            *score = if *score < 0.0 { *score * penalty } else { *score / penalty };
        }
        for (bits, scores) in self.mask.into_iter().flatten().zip(scores.chunks_mut(u32::BITS as usize)) {
            match *bits {
                0 => scores.fill(f32::NEG_INFINITY),
                u32::MAX => {}
                bits => {
                    let forbidden = scores.iter_mut().enumerate().filter(|(bit, _)| bits >> bit & 1 == 0);
                    forbidden.for_each(|(_, score)| *score = f32::NEG_INFINITY);
                }
            }
        }
        if self.is_too_short() {
            let stops = &self.params.stop_ids;
            let goes_on = |(id, score): (usize, &f32)| *score > f32::NEG_INFINITY && !stops.contains(&(id as u32));
            if scores.iter().enumerate().any(goes_on) {
                stops.iter().for_each(|id| scores[*id as usize] = f32::NEG_INFINITY);
            }
        }
    }
}

/// The logarithm of the sum of the logits' exponentials, in float64.
fn log_normalizer(kernels: &Kernels, logits: &[f32], greatest: f32) -> Result<f64, String> {
    let sum: f64 = logits.chunks(SEGMENT).map(|segment| f64::from(kernels.power_sum(segment, greatest))).sum();
    // A NaN is no greatest, but the sum's undoing.
    if sum.is_nan() || !greatest.is_finite() {
        return Err("the model's logits are not numbers".to_owned());
    }
    Ok(f64::from(greatest) + sum.ln())
}

/// The number, or minus infinity where it is below `least`.
fn above(number: f32, least: f32) -> f32 {
    if number < least { f32::NEG_INFINITY } else { number }
}

/// The token with the greatest score, of equals the lowest id; `None` where all are ruled out.
fn most_likely(kernels: &Kernels, scores: &[f32], greatest: f32) -> Option<u32> {
    if greatest == f32::NEG_INFINITY {
        return None;
    }
    // To ask whether a segment has it is cheaper than to look where.
    let segment = scores.chunks(SEGMENT).position(|segment| kernels.greatest(segment) == greatest)?;
    let at = scores[segment * SEGMENT..].iter().position(|score| *score == greatest)?;
    Some((segment * SEGMENT + at) as u32)
}

/// A token drawn from the scores under temperature, top-k, top-p and min-p.
fn draw(kernels: &Kernels, scores: &[f32], row: &Row<'_>, scratch: &mut Scratch) -> Option<u32> {
    let params = row.params;
    let greatest = kernels.greatest(scores);
    if greatest == f32::NEG_INFINITY {
        return None;
    }
    let number = uniform(params.seed, row.generated as u64);
    let top_k = params.top_k.filter(|count| *count < scores.len());
    let temperature = f64::from(params.temperature);
    // The logarithm of a probability's share of the greatest one.
    let log_share = |score: f32| f64::from(score - greatest) / temperature;
    match (top_k, params.top_p < 1.0) {
        (None, false) if params.min_p == 0.0 => {
            return Some(draw_of_all(kernels, scores, greatest, params.temperature, number, scratch));
        }
        (None, false) => {
            // A little below the least score, which is looked at again with all digits.
            let least = f64::from(greatest) + temperature * f64::from(params.min_p).ln();
            find_maxima(kernels, scores, &mut scratch.maxima);
            gather(scores, (least - 1e-6 * least.abs()) as f32, scratch);
            scratch.candidates.sort_unstable_by(likelier);
        }
        (None, true) => nucleus_of_all(kernels, scores, greatest, params, scratch),
        (Some(count), is_cut) => {
            largest(kernels, scores, count, scratch);
            if is_cut {
                let total: f64 = scratch.candidates.iter().map(|(score, _)| log_share(*score).exp()).sum();
                let kept =
                    nucleus(&scratch.candidates, |score| log_share(score).exp(), f64::from(params.top_p) * total);
                scratch.candidates.truncate(kept.unwrap_or(usize::MAX));
            }
        }
    }
    if params.min_p > 0.0 {
        let least = f64::from(params.min_p).ln();
        scratch.candidates.retain(|(score, _)| log_share(*score) >= least);
    }
    let total: f64 = scratch.candidates.iter().map(|(score, _)| log_share(*score).exp()).sum();
    let mut left = number * total;
    let hit = scratch.candidates.iter().find(|(score, _)| {
        left -= log_share(*score).exp();
        left < 0.0
    });
    hit.or(scratch.candidates.last()).map(|(_, id)| *id)
}

/// A token drawn from all, in the order of ids.
fn draw_of_all(
    kernels: &Kernels,
    scores: &[f32],
    greatest: f32,
    temperature: f32,
    number: f64,
    scratch: &mut Scratch,
) -> u32 {
    let total = exponentials(kernels, scores, greatest, temperature, scratch);
    let mut left = number * total;
    let mut last = 0;
    for ((segment, powers), sum) in scratch.powers.chunks(SEGMENT).enumerate().zip(&scratch.sums) {
        if left >= *sum {
            left -= sum;
            // Rounding may leave a little at the end: then the last token that is possible is taken.
            if let Some(at) = powers.iter().rposition(|power| *power > 0.0) {
                last = segment * SEGMENT + at;
            }
            continue;
        }
        for (at, power) in powers.iter().enumerate().filter(|(_, power)| **power > 0.0) {
            last = segment * SEGMENT + at;
            left -= f64::from(*power);
            if left < 0.0 {
                break;
            }
        }
        break;
    }
    last as u32
}

/// `scratch.powers` becomes `exp((score - greatest) / temperature)`, `scratch.sums` its sums by segment; their total.
fn exponentials(kernels: &Kernels, scores: &[f32], greatest: f32, temperature: f32, scratch: &mut Scratch) -> f64 {
    scratch.powers.clear();
    let least = LEAST_EXPONENT * temperature;
    scratch.powers.extend(scores.iter().map(|score| above(score - greatest, least)));
    scratch.sums.clear();
    for segment in scratch.powers.chunks_mut(SEGMENT) {
        scratch.sums.push(f64::from(kernels.exponentials(segment, 1.0 / temperature)));
    }
    scratch.sums.iter().sum()
}

/// `scratch.candidates` becomes the likeliest tokens that reach `top_p` together, best first.
fn nucleus_of_all(kernels: &Kernels, scores: &[f32], greatest: f32, params: &Params, scratch: &mut Scratch) {
    let total = exponentials(kernels, scores, greatest, params.temperature, scratch);
    let share = |score: f32| (f64::from(score - greatest) / f64::from(params.temperature)).exp();
    let mut count = FIRST_NUCLEUS;
    loop {
        largest(kernels, scores, count, scratch);
        if let Some(kept) = nucleus(&scratch.candidates, share, f64::from(params.top_p) * total) {
            scratch.candidates.truncate(kept);
            return;
        }
        if count >= scores.len() {
            return;
        }
        count = count.saturating_mul(8).min(scores.len());
    }
}

/// How many of the candidates, best first, it takes to reach `mass`; `None` where all of them do not.
fn nucleus(candidates: &[(f32, u32)], share: impl Fn(f32) -> f64, mass: f64) -> Option<usize> {
    let mut sum = 0.0;
    let reached = candidates.iter().position(|(score, _)| {
        sum += share(*score);
        sum >= mass
    });
    reached.map(|last| last + 1)
}

/// Best first, of equals the lowest id.
fn likelier(a: &(f32, u32), b: &(f32, u32)) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// `maxima` becomes the greatest of every panel.
fn find_maxima(kernels: &Kernels, scores: &[f32], maxima: &mut Vec<f32>) {
    maxima.clear();
    maxima.extend(scores.chunks(PANEL).map(|panel| kernels.greatest(panel)));
}

/// `scratch.candidates` becomes the scores from `bound` on, by id, with the help of `scratch.maxima`.
fn gather(scores: &[f32], bound: f32, scratch: &mut Scratch) {
    scratch.candidates.clear();
    for (panel, (scores, greatest)) in scores.chunks(PANEL).zip(&scratch.maxima).enumerate() {
        if *greatest >= bound && *greatest > f32::NEG_INFINITY {
            let possible = ((panel * PANEL) as u32..).zip(scores);
            let possible = possible.filter(|(_, score)| **score >= bound && **score > f32::NEG_INFINITY);
            scratch.candidates.extend(possible.map(|(id, score)| (*score, id)));
        }
    }
}

/// `scratch.candidates` becomes the `count` largest scores and those equal to the last of them, best first.
fn largest(kernels: &Kernels, scores: &[f32], count: usize, scratch: &mut Scratch) {
    find_maxima(kernels, scores, &mut scratch.maxima);
    let Scratch { maxima, ranked, .. } = scratch;
    ranked.clone_from(maxima);
    // Of that many panels each has one that is no less: so has the row.
    let bound = match ranked.len() >= count {
        true => *ranked.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a)).1,
        false => f32::NEG_INFINITY,
    };
    gather(scores, bound, scratch);
    let candidates = &mut scratch.candidates;
    if candidates.len() > count {
        let (last, _) = *candidates.select_nth_unstable_by(count - 1, likelier).1;
        candidates.retain(|(score, _)| *score >= last);
    }
    candidates.sort_unstable_by(likelier);
}

#[cfg(test)]
mod tests;
