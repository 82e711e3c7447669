//! Generation: prompts of many requests in, their new tokens out, over any [`StepModel`]. Knows no text, and nothing of
//! the model's inside.
//!
//! A step reads top to bottom as [`Generator::step`]: the scheduler says which tokens enter, the model carries them
//! through, and every sequence whose last token has entered gets a next one. A finished row's place is taken at the
//! next step. What a request gives depends on its prompt and options alone.

mod beam;
mod blocks;
mod params;
mod random;
mod request;
mod sampling;
mod scheduler;
mod step;

use std::time::Instant;

pub use params::{Event, Finish, Limits, MaskVerdict, Masks, NoMasks, Params, Stats};
pub use step::{BLOCK_TOKENS, Logits, StepBatch, StepModel, StepSequence};

use crate::cpu::Kernels;
use crate::error::{Error, Result};
use crate::workers::Workers;
use beam::Continuation;
use blocks::blocks_of;
use request::Request;
use sampling::{Choice, Row, Scratch};
use scheduler::{Plan, Scheduler};

/// Plans in a row that may be empty: beams that find all they need in the cache enter without computing anything.
const EMPTY_PLANS: usize = 2;

/// Generates tokens for many requests at a time.
#[derive(Debug)]
pub struct Generator<M> {
    model: M,
    kernels: Kernels,
    workers: Workers<Scratch>,
    scheduler: Scheduler,
    arrivals: u64,
    /// Events of requests that the caller stopped.
    news: Vec<Event>,
    batch: StepBatch,
    logits: Vec<f32>,
}

/// What the logits of a request's sequences are to become.
struct Task<'a> {
    request: &'a Request,
    /// Those of its sequences, one after the other.
    logits: &'a [f32],
    mask: Option<Result<MaskVerdict>>,
    outcome: Outcome,
}

/// What the logits became.
enum Outcome {
    Token(Choice),
    Beams(Vec<Continuation>),
    Stop,
    Error(String),
}

impl<M: StepModel> Generator<M> {
    /// A generator on `model`, whose cache it makes as large as `limits` say, as the longest request needs where that is
    /// more, and never larger than all rows at full length could use.
    ///
    /// # Errors
    /// [`Error::Input`] for limits of zero or a cache of less than a block; [`Error::Device`] where the machine lacks
    /// the instruction set.
    pub fn new(mut model: M, limits: Limits) -> Result<Self> {
        for (name, value) in
            [("max_rows", limits.max_rows), ("step_tokens", limits.step_tokens), ("threads", limits.threads)]
        {
            if value == 0 {
                return Err(Error::input(format!("{name} must be at least 1: `0`")));
            }
        }
        let useful = limits.max_rows.saturating_mul(blocks_of(model.max_positions()));
        let longest = limits.beams.saturating_mul(blocks_of(limits.longest_tokens.min(model.max_positions())));
        let blocks = (limits.cache_bytes / model.block_bytes().max(1)).max(longest).min(useful);
        if blocks == 0 {
            return Err(Error::input(format!(
                "cache_bytes are fewer than the {} of one block: `{}`",
                model.block_bytes(),
                limits.cache_bytes
            ))
            .with_hint("give the cache at least some megabytes"));
        }
        let count =
            u32::try_from(blocks).map_err(|_| Error::input(format!("cache has too many blocks: `{blocks}`")))?;
        let kernels = Kernels::new(limits.isa)
            .ok_or_else(|| Error::device(format!("this machine lacks the instruction set: `{}`", limits.isa.name())))?;
        model.resize_cache(blocks)?;
        Ok(Self {
            model,
            kernels,
            workers: Workers::new(limits.threads)?,
            scheduler: Scheduler::new(limits.max_rows, limits.step_tokens, count),
            arrivals: 0,
            news: Vec::new(),
            batch: StepBatch::default(),
            logits: Vec::new(),
        })
    }

    /// Takes a request. `id` is the caller's, of no other request that is still on its way.
    ///
    /// # Errors
    /// [`Error::Input`] for a prompt or options that do not fit the model or the limits.
    pub fn add(&mut self, id: u64, prompt: Vec<u32>, params: Params) -> Result<()> {
        let (vocab_size, max_positions) = (self.model.vocab_size(), self.model.max_positions());
        params.check(vocab_size)?;
        let Scheduler { running, waiting, .. } = &self.scheduler;
        if running.iter().chain(waiting).any(|request| request.id == id) {
            return Err(Error::input(format!("request is on its way already: `{id}`")));
        }
        if prompt.is_empty() {
            return Err(Error::input(format!("prompt of the request has no tokens: `{id}`")));
        }
        if let Some(token) = prompt.iter().find(|token| **token as usize >= vocab_size) {
            return Err(Error::input(format!(
                "prompt has a token id outside the vocabulary of {vocab_size} tokens: `{token}`"
            ))
            .with_hint("check that the tokenizer belongs to the model"));
        }
        if prompt.len() >= max_positions {
            return Err(Error::input(format!(
                "prompt leaves no room in the {max_positions} positions of the model: `{}`",
                prompt.len()
            ))
            .with_hint("shorten the prompt"));
        }
        if params.beams > self.scheduler.max_rows() {
            return Err(Error::input(format!(
                "beams are more than max_rows, {}: `{}`",
                self.scheduler.max_rows(),
                params.beams
            )));
        }
        let request = Request::new(id, self.arrivals, prompt, params, max_positions);
        let (needed, total) = (request.most_blocks(), self.scheduler.blocks.total());
        if needed > total {
            return Err(Error::input(format!(
                "prompt and new tokens may need {needed} blocks of {BLOCK_TOKENS} tokens, more than the cache's: \
                 `{total}`"
            ))
            .with_hint(format!(
                "raise cache_bytes to {}, or lower max_new_tokens",
                needed.saturating_mul(self.model.block_bytes())
            )));
        }
        self.arrivals += 1;
        self.scheduler.waiting.push_back(request);
        Ok(())
    }

    /// Ends a request; its place and blocks are free at once, and the next step tells its last event. Nothing happens
    /// where it is not on its way.
    pub fn stop(&mut self, id: u64) {
        if let Some(mut request) = self.scheduler.remove(id) {
            self.news.extend(request.event(Some(Finish::Stopped)));
        }
    }

    /// Rows that further requests could take at once.
    pub fn free_rows(&self) -> usize {
        self.scheduler.free_rows()
    }

    /// Requests whose last event has not been told.
    pub fn pending(&self) -> usize {
        self.scheduler.running.len() + self.scheduler.waiting.len() + self.news.len()
    }

    /// What has been done so far.
    pub fn stats(&self) -> Stats {
        let blocks = &self.scheduler.blocks;
        Stats {
            attention_s: self.model.attention_s(),
            block_bytes: self.model.block_bytes(),
            blocks: blocks.total(),
            held_blocks: blocks.total() - blocks.available(),
            kept_blocks: blocks.kept(),
            ..self.scheduler.stats
        }
    }

    /// One step of the model for the requests that are on their way, and what came of it. Nothing happens where there
    /// are none.
    ///
    /// # Errors
    /// The model's; the requests stay as they are.
    pub fn step(&mut self, masks: &mut dyn Masks) -> Result<Vec<Event>> {
        let mut events = std::mem::take(&mut self.news);
        let plan = self.plan()?;
        if plan.entries.is_empty() {
            return Ok(events);
        }
        if let Err(error) = self.compute(&plan) {
            self.news = events;
            return Err(error);
        }
        let outcomes = self.choose(&plan, masks);
        let started = Instant::now();
        for (arrival, outcome) in outcomes {
            events.extend(self.settle(arrival, outcome));
        }
        self.scheduler.stats.sampling_s += started.elapsed().as_secs_f64();
        Ok(events)
    }

    fn plan(&mut self) -> Result<Plan> {
        for _ in 0..=EMPTY_PLANS {
            let plan = self.scheduler.plan();
            if !plan.entries.is_empty() || (self.scheduler.running.is_empty() && self.scheduler.waiting.is_empty()) {
                return Ok(plan);
            }
        }
        Err(Error::internal(format!("no request can go on: `{}`", self.pending())))
    }

    /// Carries the plan's tokens through the model.
    fn compute(&mut self, plan: &Plan) -> Result<()> {
        for (from, to) in &plan.copies {
            self.model.copy_block(*from, *to)?;
        }
        self.batch.tokens.clear();
        self.batch.sequences.clear();
        for entry in &plan.entries {
            let request = self.scheduler.running(entry.arrival);
            let branch = request.map(|request| &request.branches[entry.branch]);
            let Some((branch, table)) = branch.and_then(|branch| Some((branch, branch.table.as_ref()?))) else {
                return Err(Error::internal(format!("planned request is not there: `{}`", entry.arrival)));
            };
            let (first, start, end) = (self.batch.tokens.len(), branch.computed, branch.computed + entry.count);
            self.batch.tokens.extend_from_slice(&branch.tokens[start..end]);
            self.batch.sequences.push(StepSequence {
                tokens: first..self.batch.tokens.len(),
                start,
                blocks: table.blocks[..blocks_of(end)].to_vec(),
                logits: if end == branch.tokens.len() { Logits::Last } else { Logits::None },
            });
        }
        let started = Instant::now();
        self.model.step(&self.batch, &mut self.logits)?;
        let wanted = self.batch.sequences.iter().filter(|sequence| sequence.logits == Logits::Last).count();
        if self.logits.len() != wanted * self.model.vocab_size() {
            return Err(Error::internal(format!("model gave another number of logits: `{}`", self.logits.len())));
        }
        self.scheduler.stats.model_s += started.elapsed().as_secs_f64();
        self.scheduler.stats.steps += 1;
        self.scheduler.advance(plan);
        Ok(())
    }

    /// Chooses for every sequence whose logits are there.
    fn choose(&mut self, plan: &Plan, masks: &mut dyn Masks) -> Vec<(u64, Outcome)> {
        let vocab_size = self.model.vocab_size();
        let wanted = plan.entries.iter().zip(&self.batch.sequences);
        let mut arrivals: Vec<u64> =
            wanted.filter(|(_, sequence)| sequence.logits == Logits::Last).map(|(entry, _)| entry.arrival).collect();
        // The logits of a request's beams follow one another.
        let started = Instant::now();
        let mut spans: Vec<(u64, usize)> = Vec::new();
        for arrival in arrivals.drain(..) {
            match spans.last_mut() {
                Some((last, rows)) if *last == arrival => *rows += 1,
                _ => spans.push((arrival, 1)),
            }
        }
        let mut verdicts = Vec::with_capacity(spans.len());
        for (arrival, _) in &spans {
            let request = self.scheduler.running(*arrival).filter(|request| request.params.constrained);
            verdicts.push(request.map(|request| masks.mask(request.id, request.unmasked())));
        }
        self.scheduler.stats.mask_s += started.elapsed().as_secs_f64();
        let started = Instant::now();
        let mut rest = self.logits.as_slice();
        let mut tasks = Vec::with_capacity(spans.len());
        for ((arrival, rows), mask) in spans.into_iter().zip(verdicts) {
            let (logits, later) = rest.split_at(rows * vocab_size);
            rest = later;
            let running = &self.scheduler.running;
            let at = running.binary_search_by_key(&arrival, |request| request.arrival);
            if let Some(request) = at.ok().map(|at| &running[at]) {
                tasks.push(Task { request, logits, mask, outcome: Outcome::Stop });
            }
        }
        let kernels = self.kernels;
        self.workers.run(tasks.iter_mut().collect(), |task: &mut Task<'_>, scratch| task.run(&kernels, scratch));
        let outcomes = tasks.into_iter().map(|task| (task.request.arrival, task.outcome)).collect();
        self.scheduler.stats.sampling_s += started.elapsed().as_secs_f64();
        outcomes
    }

    /// Gives a request what was chosen, and ends it where it is over.
    fn settle(&mut self, arrival: u64, outcome: Outcome) -> Option<Event> {
        let Scheduler { running, blocks, .. } = &mut self.scheduler;
        let at = running.binary_search_by_key(&arrival, |request| request.arrival).ok()?;
        let request = &mut running[at];
        let finished = match outcome {
            Outcome::Token(choice) if request.params.stop_ids.contains(&choice.id) => Some(Finish::Stop),
            Outcome::Token(choice) => {
                request.branches[0].push(choice.id, choice.logprob);
                (request.generated() == request.limit).then_some(Finish::Length)
            }
            Outcome::Stop => Some(Finish::Stop),
            Outcome::Error(text) => Some(Finish::Error(text)),
            Outcome::Beams(found) => match beam::advance(request, found, blocks) {
                Ok(None) => None,
                Ok(Some(found)) => {
                    let event = request.closing(found.tokens, found.logprobs, found.finish);
                    self.scheduler.remove_running(at);
                    return Some(event);
                }
                Err(text) => Some(Finish::Error(text)),
            },
        };
        let is_over = finished.is_some();
        let event = request.event(finished);
        if is_over {
            self.scheduler.remove_running(at);
        }
        event
    }
}

impl Task<'_> {
    fn run(&mut self, kernels: &Kernels, scratch: &mut Scratch) {
        let request = self.request;
        let vocab_size = self.logits.len() / request.branches.len();
        let mask = match self.mask.take() {
            None => None,
            Some(Ok(MaskVerdict::Stop)) => return,
            Some(Ok(MaskVerdict::Allowed(mask))) if mask.len() == vocab_size.div_ceil(32) => Some(mask),
            Some(Ok(MaskVerdict::Allowed(mask))) => {
                let words = vocab_size.div_ceil(32);
                self.outcome = Outcome::Error(format!("mask must have {words} words: `{}`", mask.len()));
                return;
            }
            Some(Err(error)) => {
                self.outcome = Outcome::Error(error.to_string());
                return;
            }
        };
        let row = |branch: usize| Row {
            logits: &self.logits[branch * vocab_size..][..vocab_size],
            seen: request.branches[branch].seen.as_ref(),
            mask: mask.as_deref(),
            generated: request.generated(),
            params: &request.params,
        };
        let chosen = if request.width() == 1 {
            sampling::choose(kernels, &row(0), scratch).map(Outcome::Token)
        } else {
            let count = beam::continuations(request);
            let of_branch = |branch| {
                let found = sampling::continuations(kernels, &row(branch), count, scratch)?;
                let before = request.branches[branch].score;
                Ok(found.into_iter().map(move |(score, choice)| Continuation { branch, score: before + score, choice }))
            };
            let all: Result<Vec<_>, String> = (0..request.branches.len()).map(of_branch).collect();
            all.map(|all| Outcome::Beams(all.into_iter().flatten().collect()))
        };
        self.outcome = chosen.unwrap_or_else(Outcome::Error);
    }
}
