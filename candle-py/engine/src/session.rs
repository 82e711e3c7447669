//! A decoder that generates: the network with a paged cache of keys and values. Runs the steps that it is given; which
//! sequences enter, and which blocks they hold, is the scheduler's. Where the model is split over ranks, rank 0's session
//! has one of the same number follow it on every other rank.

use std::fmt;
use std::sync::Arc;

use crate::backend::{Backend, CpuBackend, KeyValueCache, TensorBackend};
use crate::error::{Error, Result};
use crate::generate::{BLOCK_TOKENS, Logits, StepBatch, StepModel, StepSequence};
use crate::group::Group;
use crate::info::Info;
use crate::kv_cache::targets;
use crate::lanes;
use crate::models::{Network, Scratch};
use crate::orders::Order;
use crate::team;
use crate::workers::{Failure, Workers};

/// A model with a cache of its own; see [`crate::Engine::session`].
#[derive(Debug)]
pub struct DecoderSession(AnySession);

/// The session on one of the backends.
#[derive(Debug)]
enum AnySession {
    Cpu(Box<Session<CpuBackend>>),
    Tensors(Box<Session<TensorBackend>>),
}

impl From<Session<CpuBackend>> for DecoderSession {
    fn from(session: Session<CpuBackend>) -> Self {
        Self(AnySession::Cpu(Box::new(session)))
    }
}

impl From<Session<TensorBackend>> for DecoderSession {
    fn from(session: Session<TensorBackend>) -> Self {
        Self(AnySession::Tensors(Box::new(session)))
    }
}

/// `$call` with the session as `$session`, whatever its backend.
macro_rules! with_session {
    ($any:expr, $session:ident => $call:expr) => {
        match $any {
            AnySession::Cpu($session) => $call,
            AnySession::Tensors($session) => $call,
        }
    };
}

impl StepModel for DecoderSession {
    fn vocab_size(&self) -> usize {
        with_session!(&self.0, session => session.vocab_size())
    }

    fn max_positions(&self) -> usize {
        with_session!(&self.0, session => session.max_positions())
    }

    fn block_bytes(&self) -> usize {
        with_session!(&self.0, session => session.block_bytes())
    }

    fn resize_cache(&mut self, blocks: usize) -> Result<()> {
        with_session!(&mut self.0, session => session.resize_cache(blocks))
    }

    fn step(&mut self, batch: &StepBatch, logits: &mut Vec<f32>) -> Result<()> {
        with_session!(&mut self.0, session => session.step(batch, logits))
    }

    fn attention_s(&self) -> f64 {
        with_session!(&self.0, session => session.attention_s())
    }

    fn copy_block(&mut self, from: u32, to: u32) -> Result<()> {
        with_session!(&mut self.0, session => session.copy_block(from, to))
    }
}

/// A session on one backend.
pub(crate) struct Session<B: Backend> {
    network: Arc<Network<B>>,
    backend: B,
    workers: Arc<Workers<Scratch<B::Buffer>>>,
    vocab_size: usize,
    max_positions: usize,
    cache: B::Cache,
    threads: usize,
    lead: Option<Lead>,
}

/// The sessions on other ranks that follow this one.
struct Lead {
    group: Arc<Group>,
    session: u32,
    /// Blocks that were copied since they last heard.
    copies: Vec<[u32; 2]>,
}

impl<B: Backend> Session<B> {
    pub(crate) fn new(
        info: &Info,
        network: Arc<Network<B>>,
        backend: &B,
        workers: Arc<Workers<Scratch<B::Buffer>>>,
        threads: usize,
    ) -> Result<Self> {
        let decoder = network.decoder().ok_or_else(no_decoder)?;
        let cache = backend.cache(info.layers, decoder.kv_heads(), info.head_dim);
        Ok(Self {
            network,
            backend: backend.clone(),
            workers,
            vocab_size: info.vocab_size,
            max_positions: info.max_positions,
            cache,
            threads,
            lead: None,
        })
    }

    /// The same with sessions on all other ranks that follow it.
    pub(crate) fn leading(mut self, group: &Arc<Group>) -> Result<Self> {
        let session = group.open()?;
        self.lead = Some(Lead { group: Arc::clone(group), session, copies: Vec::new() });
        Ok(self)
    }

    /// Runs a batch that is known to fit, on this rank.
    pub(crate) fn compute(&mut self, batch: &StepBatch, logits: &mut Vec<f32>) -> Result<()> {
        let Self { network, backend, workers, cache, threads, vocab_size, .. } = self;
        let decoder = network.decoder().ok_or_else(no_decoder)?;
        let sequences = &batch.sequences;
        let mut lanes = match backend.lane_tokens() {
            Some(tokens) => lanes::cut(sequences, *threads, tokens),
            None => lanes::whole(sequences),
        };
        if !cache.are_apart(&lanes) {
            lanes = lanes::whole(sequences);
        }
        let wanted = lanes.iter().map(|lane| wanted_rows(lane));
        logits.resize(wanted.clone().map(|rows| rows.len()).sum::<usize>() * *vocab_size, 0.0);
        let (mut ids, mut rest) = (batch.tokens.as_slice(), logits.as_mut_slice());
        let mut work = Vec::with_capacity(lanes.len());
        for ((lane, wanted), part) in lanes.iter().zip(wanted).zip(cache.parts(&lanes)) {
            let (own, later) = ids.split_at(lane.last().map_or(0, |sequence| sequence.tokens.end));
            let (out, after) = std::mem::take(&mut rest).split_at_mut(wanted.len() * *vocab_size);
            (ids, rest) = (later, after);
            work.push((own, lane, wanted, part, out));
        }
        let failure = Failure::default();
        workers.run_teams(work, |(ids, lane, wanted, mut part, out), scratch| {
            let backend = backend.spread(team::threads() > 1);
            failure.note(decoder.step(&backend, ids, lane, &mut part, scratch).and_then(|()| {
                let Scratch { hidden, other, .. } = scratch;
                backend.pick(hidden, &wanted, other)?;
                decoder.logits(&backend, other, 0..wanted.len(), out)
            }));
        });
        failure.result()
    }

    /// Gives this rank's cache so many blocks.
    pub(crate) fn resize(&mut self, blocks: usize) -> Result<()> {
        self.cache.resize(blocks)
    }

    /// Copies blocks of this rank's cache.
    pub(crate) fn copy(&mut self, copies: &[[u32; 2]]) -> Result<()> {
        copies.iter().try_for_each(|[from, to]| self.cache.copy(*from as usize, *to as usize))
    }

    /// Checks a batch whole, before any of it is computed.
    pub(crate) fn check(&self, batch: &StepBatch) -> Result<()> {
        let mut next = 0;
        for (index, sequence) in batch.sequences.iter().enumerate() {
            let StepSequence { tokens, start, blocks, .. } = sequence;
            if tokens.start != next || tokens.is_empty() || tokens.end > batch.tokens.len() {
                return Err(Error::input(format!("sequence {index} does not follow the one before it: `{tokens:?}`")));
            }
            next = tokens.end;
            let end = start.saturating_add(tokens.len());
            if end > self.max_positions {
                return Err(Error::input(format!(
                    "sequence {index} has more tokens than the {} positions of the model: `{end}`",
                    self.max_positions
                )));
            }
            if blocks.len() * BLOCK_TOKENS < end {
                return Err(Error::input(format!(
                    "sequence {index} of {end} tokens has too few blocks: `{}`",
                    blocks.len()
                )));
            }
            if let Some(block) = blocks.iter().find(|block| **block as usize >= self.cache.blocks()) {
                return Err(Error::input(format!(
                    "sequence {index} has a block outside the cache of {} blocks: `{block}`",
                    self.cache.blocks()
                )));
            }
        }
        if next != batch.tokens.len() {
            return Err(Error::input(format!("batch has more tokens than its sequences: `{}`", batch.tokens.len())));
        }
        if let Some(id) = batch.tokens.iter().find(|id| **id as usize >= self.vocab_size) {
            return Err(Error::input(format!(
                "batch has a token id outside the vocabulary of {} tokens: `{id}`",
                self.vocab_size
            )));
        }
        let written = targets(&batch.sequences);
        match written.windows(2).find(|pair| pair[0].block == pair[1].block) {
            Some(pair) => Err(Error::input(format!("two sequences write into one block: `{}`", pair[0].block))),
            None => Ok(()),
        }
    }
}

impl<B: Backend> StepModel for Session<B> {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn max_positions(&self) -> usize {
        self.max_positions
    }

    fn block_bytes(&self) -> usize {
        self.cache.block_bytes()
    }

    fn resize_cache(&mut self, blocks: usize) -> Result<()> {
        let Some(mut lead) = self.lead.take() else { return self.resize(blocks) };
        let order =
            Order::Resize { session: lead.session, copies: std::mem::take(&mut lead.copies), blocks: blocks as u64 };
        let result = lead.group.lead(&order, || lead.group.agree(self.resize(blocks)));
        self.lead = Some(lead);
        let result = result.flatten();
        if result.is_err() {
            self.resize(0)?;
        }
        result
    }

    fn step(&mut self, batch: &StepBatch, logits: &mut Vec<f32>) -> Result<()> {
        self.check(batch)?;
        if batch.tokens.is_empty() {
            logits.clear();
            return Ok(());
        }
        let Some(mut lead) = self.lead.take() else { return self.compute(batch, logits) };
        let copies = std::mem::take(&mut lead.copies);
        let order = Order::Step { session: lead.session, copies, batch: batch.clone() };
        let result = lead.group.lead(&order, || self.compute(batch, logits));
        self.lead = Some(lead);
        result
    }

    fn attention_s(&self) -> f64 {
        self.cache.attention_s()
    }

    fn copy_block(&mut self, from: u32, to: u32) -> Result<()> {
        self.copy(&[[from, to]])?;
        if let Some(lead) = &mut self.lead {
            lead.copies.push([from, to]);
        }
        Ok(())
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        // Where the group is over, nobody is left to be told.
        drop(self.group.lead(&Order::Drop(self.session), || Ok(())));
    }
}

impl<B: Backend> fmt::Debug for Session<B> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let blocks = self.cache.blocks();
        formatter.debug_struct("Session").field("vocab_size", &self.vocab_size).field("blocks", &blocks).finish()
    }
}

fn no_decoder() -> Error {
    Error::internal("a session without a decoder")
}

/// The rows of the batch whose logits are wanted.
fn wanted_rows(sequences: &[StepSequence]) -> Vec<usize> {
    let rows = |sequence: &StepSequence| match sequence.logits {
        Logits::None => sequence.tokens.end..sequence.tokens.end,
        Logits::Last => sequence.tokens.end - 1..sequence.tokens.end,
        Logits::All => sequence.tokens.clone(),
    };
    sequences.iter().flat_map(rows).collect()
}
