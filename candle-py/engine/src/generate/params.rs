//! What a caller asks of a generation and what it gets back: options with their checks, limits, events, counters.

use crate::cpu::Isa;
use crate::error::{Error, Result};

/// The least temperature above 0; below it the division overflows float32.
const LEAST_TEMPERATURE: f32 = 1e-6;

/// How the new tokens of one request are chosen.
///
/// The logits pass through repetition penalty, mask, temperature, top-k, top-p and min-p in that order, as in
/// transformers; log-probabilities are of the model's own distribution before all of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Params {
    /// New tokens at most, at least 1; fewer where the model's positions end.
    pub max_new_tokens: usize,
    /// Divides the logits; 0 takes the most likely token, of equals the one with the lowest id.
    pub temperature: f32,
    /// Only the so many most likely tokens, and those equal to the last of them.
    pub top_k: Option<usize>,
    /// Only the most likely tokens that reach this probability together; 1 keeps all (Holtzman et al.,
    /// arXiv:1904.09751).
    pub top_p: f32,
    /// Only tokens at least this likely, as a share of the most likely one's probability; 0 keeps all (Nguyen et al.,
    /// arXiv:2407.01082).
    pub min_p: f32,
    /// Divides the positive and multiplies the negative logits of tokens that prompt or output hold; 1 changes nothing
    /// (Keskar et al., arXiv:1909.05858).
    pub repetition_penalty: f32,
    /// The random numbers are a function of this and of how many new tokens there are already.
    pub seed: u64,
    /// Tokens that end the output; they are not part of it.
    pub stop_ids: Vec<u32>,
    /// Beams of a beam search; 1 is none.
    pub beams: usize,
    /// A beam's summed log-probability is divided by its length to this power.
    pub length_penalty: f32,
    /// Stop tokens are not chosen before there are so many new tokens, unless a mask allows nothing else.
    pub min_new_tokens: usize,
    /// Whether the caller's masks restrict every token.
    pub constrained: bool,
    /// Whether every step tells its token; otherwise all are told at the end.
    pub stream: bool,
}

impl Params {
    /// The most likely token each time, told as they come.
    pub fn greedy(max_new_tokens: usize) -> Self {
        Self {
            max_new_tokens,
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
            stop_ids: Vec::new(),
            beams: 1,
            length_penalty: 1.0,
            min_new_tokens: 0,
            constrained: false,
            stream: true,
        }
    }

    /// Checks every option.
    ///
    /// # Errors
    /// [`Error::Input`] for the first that makes no sense, by itself or with another.
    pub fn check(&self, vocab_size: usize) -> Result<()> {
        let refuse = |rule: &str, value: String| Err(Error::input(format!("{rule}: `{value}`")));
        if self.max_new_tokens == 0 {
            return refuse("max_new_tokens must be at least 1", "0".into());
        }
        if self.temperature != 0.0 && !(LEAST_TEMPERATURE..=f32::MAX).contains(&self.temperature) {
            return refuse("temperature must be 0, or a number from 0.000001 on", self.temperature.to_string());
        }
        if self.top_k == Some(0) {
            return refuse("top_k must be at least 1", "0".into());
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return refuse("top_p must be above 0 and at most 1", self.top_p.to_string());
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return refuse("min_p must be from 0 to 1", self.min_p.to_string());
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            return refuse("repetition_penalty must be above 0", self.repetition_penalty.to_string());
        }
        if let Some(id) = self.stop_ids.iter().find(|id| **id as usize >= vocab_size) {
            return refuse(&format!("stop id is outside the vocabulary of {vocab_size} tokens"), id.to_string());
        }
        if self.beams == 0 {
            return refuse("beams must be at least 1", "0".into());
        }
        if !self.length_penalty.is_finite() {
            return refuse("length_penalty must be a finite number", self.length_penalty.to_string());
        }
        if self.beams > 1 && self.temperature != 0.0 {
            return refuse("a beam search takes no temperature", self.temperature.to_string());
        }
        if self.beams > 1 && self.constrained {
            return refuse("a beam search takes no constraint", self.beams.to_string());
        }
        Ok(())
    }
}

/// What a generator may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Sequences in the model at a time; a beam search takes as many as it has beams.
    pub max_rows: usize,
    /// Bytes of keys and values.
    pub cache_bytes: usize,
    /// Tokens of the longest request that is to come, its new ones included: a cache that could not hold it becomes as
    /// large as that. 0 where nobody knows.
    pub longest_tokens: usize,
    /// Beams of such a request.
    pub beams: usize,
    /// Tokens of a step: those of rows that have their prompt behind them, then prompts, in pieces where they are long.
    /// Every such row enters each step, and one token of a prompt, even where that is more.
    pub step_tokens: usize,
    /// Threads that choose tokens.
    pub threads: usize,
    /// The instruction set of that.
    pub isa: Isa,
}

/// News of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// The request.
    pub id: u64,
    /// Its tokens since the last event; never a stop token.
    pub new_tokens: Vec<u32>,
    /// Their log-probabilities under the model's own distribution.
    pub logprobs: Vec<f32>,
    /// Set in the request's last event.
    pub finished: Option<Finish>,
}

/// Why a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop token came, or the mask said so.
    Stop,
    /// `max_new_tokens` are there, or the model's positions end.
    Length,
    /// The caller stopped it.
    Stopped,
    /// Its mask failed, or the model's logits are no numbers.
    Error(String),
}

/// What a mask says of the next token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MaskVerdict {
    /// One bit per token id of the vocabulary, least significant first: set where the token is allowed.
    Allowed(Vec<u32>),
    /// The output is whole: end it here.
    Stop,
}

/// Restricts the tokens of constrained requests.
pub trait Masks {
    /// What may follow in request `id`; `new_tokens` are those chosen since the last call for it.
    ///
    /// # Errors
    /// The request ends with this error; others go on.
    fn mask(&mut self, id: u64, new_tokens: &[u32]) -> Result<MaskVerdict>;
}

/// For requests without constraints.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoMasks;

impl Masks for NoMasks {
    fn mask(&mut self, id: u64, _new_tokens: &[u32]) -> Result<MaskVerdict> {
        Err(Error::input(format!("constrained request has no mask: `{id}`")))
    }
}

/// What a generator has done, and what its cache holds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Model steps.
    pub steps: u64,
    /// Tokens that entered as prompt, those of preempted rows again.
    pub prefill_tokens: u64,
    /// Tokens that entered one by one.
    pub decode_tokens: u64,
    /// Prompt tokens that did not enter because the cache held them already.
    pub shared_tokens: u64,
    /// Requests put back because the cache was full.
    pub preemptions: u64,
    /// Seconds in the model.
    pub model_s: f64,
    /// Seconds of them in attention; the rest is nearly all matrix products.
    pub attention_s: f64,
    /// Seconds in the callers' masks.
    pub mask_s: f64,
    /// Seconds of choosing tokens.
    pub sampling_s: f64,
    /// Bytes of a cache block.
    pub block_bytes: usize,
    /// Cache blocks in all.
    pub blocks: usize,
    /// Blocks that requests hold.
    pub held_blocks: usize,
    /// Blocks that nobody holds but whose content is kept for a later request.
    pub kept_blocks: usize,
}
