//! What the ranks of a group tell each other: sums, gathered rows, and rank 0's orders. Knows no model.

mod connect;
mod exchange;
mod frame;
mod hello;
mod link;
#[cfg(any(test, feature = "nccl"))]
mod nccl;
mod tcp;

use std::fmt;

#[cfg(feature = "nccl")]
pub use nccl::{Nccl, UNIQUE_ID_BYTES, UniqueId, nccl_unique_id};
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

    /// `values[i]` becomes the sum of all ranks' `values[i]`, added in float32 in the same order on all of them (over TCP
    /// that of the ranks, over NCCL its own), so that all hold equal bits. All ranks give as many.
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

    /// Whether the group still stands, as far as can be told without waiting.
    ///
    /// # Errors
    /// Why the group is over, or a rank that has closed its connection.
    fn check(&self) -> Result<()>;

    /// The same group where numbers are in device memory already; `None` where it knows host memory alone.
    fn on_device(&self) -> Option<&dyn DeviceCommunicator> {
        None
    }
}

/// Operations on numbers in device memory.
pub trait DeviceCommunicator {
    /// The device's number among those that this process sees.
    fn device(&self) -> usize;

    /// As [`Communicator::all_reduce_sum`], after what was put into the stream before; waits for the sum to be there.
    ///
    /// # Errors
    /// As of [`Communicator::all_reduce_sum`].
    ///
    /// # Safety
    /// `values` is the address of `count` float32 in the memory of the communicator's device, which nothing else uses
    /// until this returns and which, if it fails, stay allocated; `stream` is a stream of that device's primary context, or
    /// 0 for its default one.
    unsafe fn all_reduce_sum_at(&self, values: u64, count: usize, stream: u64) -> Result<()>;
}
