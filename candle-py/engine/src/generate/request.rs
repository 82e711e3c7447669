//! A request on its way: its sequences, what they hold of the cache, and what the caller has been told.

use std::collections::HashSet;

use super::blocks::{Table, blocks_of};
use super::params::{Event, Finish, Params};
use super::step::BLOCK_TOKENS;

/// A finished beam.
#[derive(Debug)]
pub struct Hypothesis {
    /// Its summed log-probability, divided by its length to the power of the length penalty.
    pub score: f64,
    /// Its new tokens, without a stop token.
    pub tokens: Vec<u32>,
    /// Their log-probabilities.
    pub logprobs: Vec<f32>,
    /// Whether it ended with a stop token.
    pub is_stopped: bool,
}

/// One sequence of a request: the only one, or a beam.
#[derive(Debug, Default)]
pub struct Branch {
    /// Prompt and new tokens.
    pub tokens: Vec<u32>,
    /// The first so many of them are in the cache.
    pub computed: usize,
    /// The blocks that it holds; `None` before it enters and after it was put back.
    pub table: Option<Table>,
    /// Log-probabilities of the new tokens.
    pub logprobs: Vec<f32>,
    /// A beam's summed log-probability after the penalties.
    pub score: f64,
    /// The tokens, where there is a repetition penalty.
    pub seen: Option<HashSet<u32>>,
}

impl Branch {
    /// Appends a new token.
    pub fn push(&mut self, id: u32, logprob: f32) {
        self.tokens.push(id);
        self.logprobs.push(logprob);
        if let Some(seen) = &mut self.seen {
            seen.insert(id);
        }
    }

    /// Whether all tokens but the last are in the cache.
    pub fn is_ready(&self) -> bool {
        self.table.is_some() && self.computed + 1 == self.tokens.len()
    }
}

/// A request and how far it is.
#[derive(Debug)]
pub struct Request {
    /// The caller's number.
    pub id: u64,
    /// Its place in the order of requests.
    pub arrival: u64,
    /// The options.
    pub params: Params,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// New tokens at most.
    pub limit: usize,
    /// Its sequences: one, or as many as beams after the first step of a beam search.
    pub branches: Vec<Branch>,
    /// Finished beams.
    pub hypotheses: Vec<Hypothesis>,
    /// New tokens that the mask knows of.
    pub masked: usize,
    /// New tokens that the caller knows of.
    told: usize,
    /// Whether it has been in the cache before.
    pub was_entered: bool,
}

impl Request {
    /// A request that has not begun. The prompt is shorter than `max_positions`.
    pub fn new(id: u64, arrival: u64, prompt: Vec<u32>, params: Params, max_positions: usize) -> Self {
        let prompt_tokens = prompt.len();
        let seen = (params.repetition_penalty != 1.0).then(|| prompt.iter().copied().collect());
        Self {
            id,
            arrival,
            prompt_tokens,
            limit: params.max_new_tokens.min(max_positions - prompt_tokens),
            branches: vec![Branch { tokens: prompt, seen, ..Branch::default() }],
            hypotheses: Vec::new(),
            masked: 0,
            told: 0,
            was_entered: false,
            params,
        }
    }

    /// Rows that it takes.
    pub fn width(&self) -> usize {
        self.params.beams
    }

    /// Cache blocks that it takes at most. Beams share the full blocks of the prompt; the last token never enters.
    pub fn most_blocks(&self) -> usize {
        let shared = self.prompt_tokens / BLOCK_TOKENS;
        let whole = blocks_of(self.prompt_tokens + self.limit - 1);
        if self.width() == 1 { whole } else { shared + self.width() * (whole - shared) }
    }

    /// Whether every sequence has but its last token left to compute.
    pub fn is_decoding(&self) -> bool {
        self.branches.iter().all(Branch::is_ready)
    }

    /// How many tokens of the branch enter as prompt. Those of beams leave the last out: all beams choose together.
    pub fn prefill_end(&self, branch: usize) -> usize {
        self.branches[branch].tokens.len() - usize::from(self.width() > 1)
    }

    /// New tokens of its sequences so far.
    pub fn generated(&self) -> usize {
        self.branches[0].tokens.len() - self.prompt_tokens
    }

    /// The new tokens that the mask has not seen; they count as seen from now on.
    pub fn unmasked(&mut self) -> &[u32] {
        let first = self.prompt_tokens + self.masked;
        self.masked = self.generated();
        &self.branches[0].tokens[first..]
    }

    /// What the caller is to know now, if anything.
    pub fn event(&mut self, finished: Option<Finish>) -> Option<Event> {
        if self.width() > 1 || (finished.is_none() && !self.params.stream) {
            return finished.map(|finished| self.closing(Vec::new(), Vec::new(), finished));
        }
        let branch = &self.branches[0];
        let new_tokens = branch.tokens[self.prompt_tokens + self.told..].to_vec();
        let logprobs = branch.logprobs[self.told..].to_vec();
        self.told += new_tokens.len();
        Some(Event { id: self.id, new_tokens, logprobs, finished })
    }

    /// The last event, with these tokens.
    pub fn closing(&self, new_tokens: Vec<u32>, logprobs: Vec<f32>, finished: Finish) -> Event {
        Event { id: self.id, new_tokens, logprobs, finished: Some(finished) }
    }
}
