//! A decoder that generates: the network with a paged cache of keys and values. Runs the steps that it is given; which
//! sequences enter, and which blocks they hold, is the scheduler's.

use std::fmt;
use std::sync::Arc;

use crate::backend::{Backend, CpuBackend};
use crate::cpu::PageShape;
use crate::error::{Error, Result};
use crate::generate::{BLOCK_TOKENS, Logits, StepBatch, StepModel, StepSequence};
use crate::info::Info;
use crate::kv_cache::{PagedCache, targets};
use crate::models::{Decoder, Network, Scratch};
use crate::workers::Workers;

type Buffer = <CpuBackend as Backend>::Buffer;

/// A model with a cache of its own; see [`crate::Engine::session`].
pub struct DecoderSession {
    network: Arc<Network<CpuBackend>>,
    backend: CpuBackend,
    workers: Arc<Workers<Scratch<Buffer>>>,
    vocab_size: usize,
    max_positions: usize,
    cache: PagedCache,
    scratch: Scratch<Buffer>,
}

impl DecoderSession {
    pub(crate) fn new(
        info: &Info,
        network: Arc<Network<CpuBackend>>,
        backend: CpuBackend,
        workers: Arc<Workers<Scratch<Buffer>>>,
        threads: usize,
    ) -> Result<Self> {
        let shape = PageShape { kv_heads: info.kv_heads, head_dim: info.head_dim };
        Ok(Self {
            network,
            backend: backend.spread(threads > 1),
            workers,
            vocab_size: info.vocab_size,
            max_positions: info.max_positions,
            cache: PagedCache::new(info.layers, shape),
            scratch: Scratch::default(),
        })
    }

    /// Checks a batch whole, before any of it is computed.
    fn check(&self, batch: &StepBatch) -> Result<()> {
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
        match written.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            Some(pair) => Err(Error::input(format!("two sequences write into one block: `{}`", pair[0].0))),
            None => Ok(()),
        }
    }
}

impl StepModel for DecoderSession {
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
        self.cache.resize(blocks)
    }

    fn step(&mut self, batch: &StepBatch, logits: &mut Vec<f32>) -> Result<()> {
        self.check(batch)?;
        let Self { network, backend, workers, cache, scratch, .. } = self;
        let head = network.decoder().and_then(|decoder| Some((decoder, decoder.head()?)));
        let (decoder, head): (&Decoder<_>, _) = head.ok_or_else(|| Error::internal("a session without a head"))?;
        let wanted = wanted_rows(&batch.sequences);
        logits.resize(wanted.len() * self.vocab_size, 0.0);
        if batch.tokens.is_empty() {
            return Ok(());
        }
        let used = batch.sequences.iter().flat_map(|sequence| &sequence.blocks).max();
        cache.touch(used.map_or(0, |block| *block as usize + 1));
        workers.install(|| {
            decoder.step(backend, &batch.tokens, &batch.sequences, cache, scratch);
            let Scratch { hidden, other, .. } = scratch;
            backend.pick(hidden, &wanted, other);
            backend.project_out(head, other, 0..wanted.len(), logits);
        });
        Ok(())
    }

    fn attention_s(&self) -> f64 {
        self.cache.attention_s
    }

    fn copy_block(&mut self, from: u32, to: u32) {
        self.cache.copy(from as usize, to as usize);
    }
}

impl fmt::Debug for DecoderSession {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let blocks = self.cache.blocks();
        formatter.debug_struct("DecoderSession").field("vocab_size", &self.vocab_size).field("blocks", &blocks).finish()
    }
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
