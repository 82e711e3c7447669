//! What the ranks of a group tell each other: sums, gathered rows, and rank 0's orders. Knows no model.

mod connect;
mod exchange;
mod frame;
mod hello;
mod link;
mod tcp;

use std::fmt;

pub use tcp::Tcp;

use crate::error::Result;

/// Processes that compute together, one of which this is. All of them call the same operations in the same order.
///
/// An operation that fails ends the group: this rank tells the others where it still can, and every later operation
/// fails with the first reason.
pub trait Communicator: Send + Sync + fmt::Debug {
    /// The place of this process, below [`world`](Communicator::world).
    fn rank(&self) -> usize;

    /// How many processes there are.
    fn world(&self) -> usize;

    /// `values[i]` becomes the sum of all ranks' `values[i]`, added in float32 in the order of the ranks, so that all
    /// hold equal bits. All ranks give as many.
    ///
    /// # Errors
    /// A rank that is gone, silent past the deadline or out of step.
    fn all_reduce_sum(&self, values: &mut [f32]) -> Result<()>;

    /// `out` becomes the `values` of all ranks in their order; they may be of different lengths.
    ///
    /// # Errors
    /// As of [`all_reduce_sum`](Communicator::all_reduce_sum).
    fn all_gather(&self, values: &[f32], out: &mut Vec<f32>) -> Result<()>;

    /// `bytes` becomes rank 0's. The other ranks wait for it as long as rank 0 gives signs of life, since its caller may
    /// have nothing to ask for.
    ///
    /// # Errors
    /// As of [`all_reduce_sum`](Communicator::all_reduce_sum).
    fn broadcast_bytes(&self, bytes: &mut Vec<u8>) -> Result<()>;

    /// Returns once all ranks have called it.
    ///
    /// # Errors
    /// As of [`all_reduce_sum`](Communicator::all_reduce_sum).
    fn barrier(&self) -> Result<()>;

    /// Ends the group, from any thread: whatever this rank or another waits for fails with `reason`.
    fn abort(&self, reason: &str);
}
