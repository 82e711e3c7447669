//! The calls of NCCL and of the CUDA driver that a rank needs, as a trait, so that what is made of their answers is tested
//! where there is neither.

use std::fmt;

/// Bytes of a group's id.
pub const UNIQUE_ID_BYTES: usize = 128;

/// What all ranks of a group give NCCL to find each other.
pub type UniqueId = [u8; UNIQUE_ID_BYTES];

/// NCCL's own handle of a communicator: an address that only [`Calls`] looks behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handle(pub(super) usize);

/// A result of NCCL, `ncclResult_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Code(pub(super) i32);

impl Code {
    pub(super) const SUCCESS: Code = Code(0);
    pub(super) const IN_PROGRESS: Code = Code(7);

    /// NCCL's name of it.
    pub(super) fn name(self) -> &'static str {
        match self.0 {
            0 => "ncclSuccess",
            1 => "ncclUnhandledCudaError",
            2 => "ncclSystemError",
            3 => "ncclInternalError",
            4 => "ncclInvalidArgument",
            5 => "ncclInvalidUsage",
            6 => "ncclRemoteError",
            7 => "ncclInProgress",
            _ => "unknown",
        }
    }
}

/// NCCL and one device. All calls return at once, unless it says otherwise.
pub(super) trait Calls: fmt::Debug + Send + Sync {
    /// `ncclGetUniqueId`.
    fn unique_id(&self) -> Result<UniqueId, Code>;

    /// `ncclCommInitRankConfig`, not blocking. The handle is there whatever the code.
    fn init(&self, world: usize, id: &UniqueId, rank: usize) -> (Option<Handle>, Code);

    /// `ncclCommGetAsyncError`: how the communicator is.
    fn state(&self, comm: Handle) -> Code;

    /// `ncclAllReduce` in place, of float32 in device memory.
    fn all_reduce_sum(&self, comm: Handle, values: u64, count: usize, stream: u64) -> Code;

    /// `ncclAllGather` of float32 in device memory, `count` of every rank.
    fn all_gather(&self, comm: Handle, own: u64, all: u64, count: usize, stream: u64) -> Code;

    /// `ncclCommFinalize`.
    fn finalize(&self, comm: Handle) -> Code;

    /// `ncclCommDestroy`. The handle is not to be used again.
    fn destroy(&self, comm: Handle) -> Code;

    /// `ncclCommAbort`, which may take its time. The handle is not to be used again.
    fn abort(&self, comm: Handle) -> Code;

    /// What NCCL says of its last error.
    fn last_error(&self, comm: Option<Handle>) -> String;

    /// Makes the device the current one of this thread.
    fn enter(&self) -> Result<(), String>;

    /// The stream of operations on host memory.
    fn stream(&self) -> u64;

    /// Whether all work of a stream is done.
    fn is_idle(&self, stream: u64) -> Result<bool, String>;

    /// Device memory.
    fn allocate(&self, size_bytes: usize) -> Result<u64, String>;

    /// Gives device memory back; waits for the device.
    fn free(&self, address: u64);

    /// Copies to the device, in [`stream`](Calls::stream).
    fn write(&self, address: u64, values: &[f32]) -> Result<(), String>;

    /// Copies from the device, in [`stream`](Calls::stream); waits for it.
    fn read(&self, address: u64, values: &mut [f32]) -> Result<(), String>;
}
