//! What generation asks of a model: to carry new tokens of many sequences through it, over a paged cache whose blocks
//! the caller gives out. Knows nothing of prompts, sampling or who holds which block.

use std::ops::Range;

use crate::error::Result;

/// Positions of a cache block.
pub const BLOCK_TOKENS: usize = 16;

/// Sequences that enter the model together, each with some new tokens after what its cache already holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepBatch {
    /// The new tokens of all sequences.
    pub tokens: Vec<u32>,
    /// The sequences.
    pub sequences: Vec<StepSequence>,
}

/// One sequence of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepSequence {
    /// Its new tokens in [`StepBatch::tokens`], at least one.
    pub tokens: Range<usize>,
    /// Position of the first of them, which is also how many tokens its cache holds.
    pub start: usize,
    /// Its block table, which covers `start + tokens.len()` positions: block `i` holds the positions from
    /// `i * BLOCK_TOKENS` on.
    pub blocks: Vec<u32>,
    /// Which of its new tokens' logits are wanted.
    pub logits: Logits,
}

/// Which logits of a sequence's new tokens are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// No token's.
    None,
    /// The last token's.
    Last,
    /// Every token's.
    All,
}

/// A causal model with a paged cache of keys and values.
pub trait StepModel: Send {
    /// Token ids are below this; a row of logits has so many numbers.
    fn vocab_size(&self) -> usize;

    /// The most tokens of a sequence.
    fn max_positions(&self) -> usize;

    /// Cache bytes of one block over all layers.
    fn block_bytes(&self) -> usize;

    /// Gives the cache so many blocks; what the first of them hold stays.
    ///
    /// # Errors
    /// The memory is not there.
    fn resize_cache(&mut self, blocks: usize) -> Result<()>;

    /// Writes the new tokens' keys and values into their sequences' blocks, then attends. `logits` becomes the wanted
    /// rows in the order of the sequences, `(wanted, vocab_size)`.
    ///
    /// A sequence's result does not depend on the others, nor on how its tokens were cut into steps.
    ///
    /// # Errors
    /// The batch does not fit the model.
    fn step(&mut self, batch: &StepBatch, logits: &mut Vec<f32>) -> Result<()>;

    /// Seconds that all steps so far spent in attention; 0 where nobody looks.
    fn attention_s(&self) -> f64 {
        0.0
    }

    /// Copies what block `from` holds to block `to`: before a sequence writes to a partly filled block that it shares.
    ///
    /// # Errors
    /// The device's.
    fn copy_block(&mut self, from: u32, to: u32) -> Result<()>;
}

impl<M: StepModel + ?Sized> StepModel for Box<M> {
    fn vocab_size(&self) -> usize {
        (**self).vocab_size()
    }

    fn max_positions(&self) -> usize {
        (**self).max_positions()
    }

    fn block_bytes(&self) -> usize {
        (**self).block_bytes()
    }

    fn resize_cache(&mut self, blocks: usize) -> Result<()> {
        (**self).resize_cache(blocks)
    }

    fn step(&mut self, batch: &StepBatch, logits: &mut Vec<f32>) -> Result<()> {
        (**self).step(batch, logits)
    }

    fn attention_s(&self) -> f64 {
        (**self).attention_s()
    }

    fn copy_block(&mut self, from: u32, to: u32) -> Result<()> {
        (**self).copy_block(from, to)
    }
}
