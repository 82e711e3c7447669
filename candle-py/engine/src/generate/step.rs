//! One step of generation, as the scheduler asks for it and a model answers it. Knows no model and no sampling.

use std::ops::Range;

use crate::error::Result;

/// Tokens whose keys and values one block of the cache holds.
pub const BLOCK_TOKENS: usize = 16;

/// Sequences that enter the model together, each with some new tokens after what its cache already holds.
#[derive(Clone, Debug, Default)]
pub struct StepBatch {
    /// The new tokens of all sequences, one sequence after the other.
    pub tokens: Vec<u32>,
    /// The sequences.
    pub sequences: Vec<StepSequence>,
}

/// One sequence of a step.
#[derive(Clone, Debug)]
pub struct StepSequence {
    /// Its new tokens in [`StepBatch::tokens`], at least one.
    pub tokens: Range<usize>,
    /// The position of the first of them: how many tokens the cache already holds.
    pub start: usize,
    /// Its block table: block `i` holds positions from `i * BLOCK_TOKENS` on; covers all positions up to the last new one.
    pub blocks: Vec<u32>,
    /// Which logits are wanted.
    pub logits: Logits,
}

/// Which of a sequence's new tokens the logits are wanted of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None.
    None,
    /// The last.
    Last,
    /// All.
    All,
}

/// A model with a cache of keys and values, cut into blocks that its caller hands out.
pub trait StepModel: Send {
    /// Token ids are below this, and a row of logits is as wide.
    fn vocab_size(&self) -> usize;
    /// The most tokens that one sequence may have.
    fn max_positions(&self) -> usize;
    /// Bytes of the cache that one block takes, over all layers.
    fn block_bytes(&self) -> usize;
    /// Gives the cache so many blocks; what the first of them hold stays.
    ///
    /// # Errors
    /// When there is not so much memory.
    fn resize_cache(&mut self, blocks: usize) -> Result<()>;
    /// Runs the new tokens of every sequence through the model: writes their keys and values into the sequences' blocks,
    /// then attends. `logits` is made the wanted rows of all sequences, in order, `(rows, vocab_size)`.
    ///
    /// # Errors
    /// When the batch does not fit the model or the cache.
    fn step(&mut self, batch: &StepBatch, logits: &mut Vec<f32>) -> Result<()>;
    /// Makes block `to` hold what block `from` does.
    fn copy_block(&mut self, from: u32, to: u32);
}
