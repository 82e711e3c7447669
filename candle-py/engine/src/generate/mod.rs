//! Generation: what a model is asked for at every step.

mod step;

pub use step::{BLOCK_TOKENS, Logits, StepBatch, StepModel, StepSequence};
