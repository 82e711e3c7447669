//! Beam search: a step's continuations become the next beams, or the output. Semantics of transformers'
//! `BeamSearchScorer` with `early_stopping=False` (transformers 4, `generation/beam_search.py`).

use super::blocks::Blocks;
use super::params::Finish;
use super::request::{Branch, Hypothesis, Request};
use super::sampling::Choice;
use super::scheduler::release;

/// A way for a beam to go on.
#[derive(Clone, Copy, Debug)]
pub struct Continuation {
    /// The beam.
    pub branch: usize,
    /// Its summed log-probability, with the token's.
    pub score: f64,
    /// The token.
    pub choice: Choice,
}

/// A finished search's output.
#[derive(Debug)]
pub struct Found {
    /// New tokens without a stop token.
    pub tokens: Vec<u32>,
    /// Their log-probabilities under the model's own distribution.
    pub logprobs: Vec<f32>,
    /// Stop or length.
    pub finish: Finish,
}

/// Continuations that are looked at in a step: enough for all beams to go on though some reach every stop token.
pub fn continuations(request: &Request) -> usize {
    request.params.beams * (1 + request.params.stop_ids.len()).max(2)
}

/// Takes a step of the search; the output once it is over. `found` holds at least [`continuations`] of every beam, where
/// there are so many.
///
/// # Errors
/// In words: no beam can go on.
pub fn advance(
    request: &mut Request,
    mut found: Vec<Continuation>,
    blocks: &mut Blocks,
) -> Result<Option<Found>, String> {
    let beams = request.params.beams;
    let length = request.generated() + 1;
    // Best first; of equals the earlier beam's, then the lowest id.
    found.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.branch.cmp(&b.branch)).then(a.choice.id.cmp(&b.choice.id)));
    found.truncate(continuations(request));
    let Some(best) = found.first().map(|best| best.score) else {
        return Err("no token is allowed here".to_owned());
    };
    let mut next: Vec<Continuation> = Vec::with_capacity(beams);
    for (rank, continuation) in found.into_iter().enumerate() {
        if request.params.stop_ids.contains(&continuation.choice.id) {
            if rank < beams {
                let branch = &request.branches[continuation.branch];
                let tokens = branch.tokens[request.prompt_tokens..].to_vec();
                let logprobs = branch.logprobs.clone();
                keep(request, tokens, logprobs, continuation.score, length, true);
            }
        } else {
            next.push(continuation);
        }
        if next.len() == beams {
            break;
        }
    }
    let attainable = best / power(length, request.params.length_penalty);
    let is_over = request.hypotheses.len() == beams && worst(request) >= attainable;
    if is_over || next.is_empty() {
        return Ok(Some(finish(request)));
    }
    let branches = next.iter().map(|next| fork(&request.branches[next.branch], next, blocks)).collect();
    let mut old = std::mem::replace(&mut request.branches, branches);
    old.iter_mut().for_each(|branch| release(blocks, branch));
    if length < request.limit {
        return Ok(None);
    }
    for index in 0..request.branches.len() {
        let branch = &request.branches[index];
        let (tokens, logprobs) = (branch.tokens[request.prompt_tokens..].to_vec(), branch.logprobs.clone());
        keep(request, tokens, logprobs, branch.score, length, false);
    }
    Ok(Some(finish(request)))
}

/// The beam with one more token, on the same blocks.
fn fork(parent: &Branch, next: &Continuation, blocks: &mut Blocks) -> Branch {
    let mut branch = Branch {
        tokens: parent.tokens.clone(),
        computed: parent.computed,
        table: parent.table.as_ref().map(|table| blocks.share(table)),
        logprobs: parent.logprobs.clone(),
        score: next.score,
        seen: parent.seen.clone(),
    };
    branch.push(next.choice.id, next.choice.logprob);
    branch
}

/// Keeps a finished beam while it is among the best.
fn keep(request: &mut Request, tokens: Vec<u32>, logprobs: Vec<f32>, score: f64, length: usize, is_stopped: bool) {
    let score = score / power(length, request.params.length_penalty);
    if request.hypotheses.len() == request.params.beams {
        if score <= worst(request) {
            return;
        }
        let least = (0..request.hypotheses.len())
            .min_by(|a, b| request.hypotheses[*a].score.total_cmp(&request.hypotheses[*b].score));
        least.map(|index| request.hypotheses.remove(index));
    }
    request.hypotheses.push(Hypothesis { score, tokens, logprobs, is_stopped });
}

fn worst(request: &Request) -> f64 {
    request.hypotheses.iter().map(|hypothesis| hypothesis.score).fold(f64::INFINITY, f64::min)
}

/// The best finished beam, of equals the later one.
fn finish(request: &mut Request) -> Found {
    let hypotheses = std::mem::take(&mut request.hypotheses);
    let best = hypotheses.into_iter().max_by(|a, b| a.score.total_cmp(&b.score));
    let is_stopped = best.as_ref().is_none_or(|best| best.is_stopped);
    let finish = if is_stopped { Finish::Stop } else { Finish::Length };
    let (tokens, logprobs) = best.map(|best| (best.tokens, best.logprobs)).unwrap_or_default();
    Found { tokens, logprobs, finish }
}

fn power(length: usize, penalty: f32) -> f64 {
    (length as f64).powf(f64::from(penalty))
}
