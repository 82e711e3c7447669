//! Ranks over NCCL, one GPU each. Numbers go from device to device; rank 0's orders, barriers and signs of life go over the
//! TCP group that the ranks have already, since a rank may wait long for its next order, which NCCL's ranks do on the GPU
//! and without an end.
//!
//! NCCL by itself waits for a lost rank for ever. Here no call of it blocks: the communicator is asked for its errors while
//! a deadline runs, and is aborted when that passes, when NCCL reports an error, or when another rank closes its connection.

mod calls;
#[cfg(test)]
mod fake;
#[cfg(feature = "nccl")]
mod library;
#[cfg(test)]
mod tests;
mod wait;

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

pub use calls::{UNIQUE_ID_BYTES, UniqueId};

use self::calls::{Calls, Code, Handle};
use self::wait::Wait;
use super::{Communicator, DeviceCommunicator};
use crate::error::{Error, Result};

/// How long NCCL may take to let go of a communicator.
const LET_GO: Duration = Duration::from_secs(5);

/// A rank of a group over NCCL.
#[derive(Debug)]
pub struct Nccl {
    control: Arc<dyn Communicator>,
    calls: Arc<dyn Calls>,
    device: usize,
    timeout: Duration,
    state: Mutex<State>,
    failure: OnceLock<String>,
}

/// What one operation uses at a time.
#[derive(Debug, Default)]
struct State {
    /// `None` once NCCL has let go of it.
    comm: Option<Handle>,
    room: Room,
}

/// Device memory that operations on host memory go through.
#[derive(Debug, Default)]
struct Room {
    address: u64,
    size_bytes: usize,
}

#[cfg(feature = "nccl")]
impl Nccl {
    /// Joins the ranks of `control`, which all call it, each with a device of its own: its place among those that this
    /// process sees, which has nothing to do with the rank. `id` is rank 0's from [`nccl_unique_id`]; without one it makes
    /// one. `timeout` is the deadline of every operation, as of this one.
    ///
    /// # Errors
    /// [`Error::Device`] where the driver, the device or NCCL is not there, on this rank or another;
    /// [`Error::Communicator`] where the ranks do not come together.
    pub fn connect(
        control: Arc<dyn Communicator>,
        device: usize,
        id: Option<UniqueId>,
        timeout: Duration,
    ) -> Result<Self> {
        let calls = library::Library::open(device);
        Self::join(control, calls.map(|calls| -> Arc<dyn Calls> { Arc::new(calls) }), device, id, timeout)
    }
}

/// An id for a group, to be given to [`Nccl::connect`] of rank 0. Needs NCCL, but no device.
///
/// # Errors
/// [`Error::Device`] where NCCL is not there or makes none.
#[cfg(feature = "nccl")]
pub fn nccl_unique_id() -> Result<UniqueId> {
    library::unique_id()
}

impl Nccl {
    fn join(
        control: Arc<dyn Communicator>,
        calls: Result<Arc<dyn Calls>>,
        device: usize,
        id: Option<UniqueId>,
        timeout: Duration,
    ) -> Result<Self> {
        let id = match &calls {
            Ok(calls) if control.rank() == 0 => id.map_or_else(|| calls.unique_id(), Ok).map_err(|code| {
                Error::device(format!("NCCL makes no id ({}): `{}`", calls.last_error(None), code.name()))
            }),
            _ => Ok([0; UNIQUE_ID_BYTES]),
        };
        // All hear of a rank that cannot, before any waits for it inside NCCL.
        let mut failed = [if calls.is_err() || id.is_err() { 1.0 } else { 0.0 }];
        control.all_reduce_sum(&mut failed)?;
        let (calls, id) = (calls?, id?);
        if failed[0] != 0.0 {
            return Err(Error::device(format!("other ranks cannot use NCCL, so many of them: `{}`", failed[0]))
                .with_hint("see the errors of the other ranks"));
        }
        let mut id = id.to_vec();
        control.broadcast_bytes(&mut id)?;
        let id: UniqueId = id.try_into().map_err(|_| Error::communicator("rank 0 sent no id: `NCCL`"))?;

        let state = Mutex::default();
        let group = Self { control, calls, device, timeout, state, failure: OnceLock::new() };
        group.operate("the start of NCCL", |group, state, wait| {
            let (comm, code) = group.calls.init(group.world(), &id, group.rank());
            state.comm = comm;
            let Some(comm) = comm else { return Err(group.explain(None, code)) };
            wait.settle(comm, code)
        })?;
        group.prove()?;
        Ok(group)
    }

    /// Sums and gathers what all ranks know the result of: what is wrong with NCCL or a device shows now.
    fn prove(&self) -> Result<()> {
        let ranks = || (0..self.world()).map(|rank| rank as f32);
        let own = self.rank() as f32;
        let (mut sum, mut all) = ([1.0, own], Vec::new());
        self.all_reduce_sum(&mut sum)?;
        self.all_gather(&[own], &mut all)?;
        if sum == [self.world() as f32, ranks().sum()] && all.iter().copied().eq(ranks()) {
            return Ok(());
        }
        self.abort(&format!("NCCL gives a wrong sum of ranks or their wrong order: `{sum:?} {all:?}`"));
        Err(self.over())
    }

    /// Runs one operation; a fault in it is the end of the group.
    fn operate(
        &self,
        name: &'static str,
        work: impl FnOnce(&Self, &mut State, &mut Wait<'_>) -> Result<(), String>,
    ) -> Result<()> {
        let mut state = self.lock();
        if self.failure.get().is_none() {
            let mut wait = Wait::new(self, name);
            match self.calls.enter().and_then(|()| work(self, &mut state, &mut wait)) {
                Ok(()) => return Ok(()),
                Err(reason) => self.give_up(&mut state, &reason),
            }
        }
        // Where another thread has aborted the group in the meantime, nobody else lets go of NCCL.
        self.give_up(&mut state, "the group is over");
        Err(self.over())
    }

    /// Runs an operation of the TCP group.
    fn over_control(&self, work: impl FnOnce(&dyn Communicator) -> Result<()>) -> Result<()> {
        if self.failure.get().is_some() {
            return Err(self.over());
        }
        work(&*self.control).map_err(|error| {
            self.give_up(&mut self.lock(), &error.to_string());
            self.over()
        })
    }

    fn over(&self) -> Error {
        let reason = self.failure.get().map_or("the group is over", String::as_str);
        Error::communicator(reason).with_hint("start all ranks again")
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the group with the first reason. What NCCL has on the device is left to the end of the process, since to free
    /// it may mean to wait for an operation that never ends.
    fn give_up(&self, state: &mut State, reason: &str) {
        let reason = self.failure.get_or_init(|| reason.to_owned());
        self.control.abort(reason);
        if let Some(comm) = state.comm.take() {
            self.let_go(comm);
        }
    }

    /// Aborts a communicator, on a thread of its own: NCCL may never come back.
    fn let_go(&self, comm: Handle) {
        let (done, over) = channel();
        let calls = Arc::clone(&self.calls);
        let work = move || {
            if calls.enter().is_ok() {
                calls.abort(comm);
            }
            let _ = done.send(()); // nobody waits any more
        };
        if thread::Builder::new().name("candle-abort".to_owned()).spawn(work).is_ok() {
            let _ = over.recv_timeout(self.timeout.min(LET_GO)); // it goes on by itself
        }
    }

    /// NCCL's words for a code.
    fn explain(&self, comm: Option<Handle>, code: Code) -> String {
        let said = self.calls.last_error(comm);
        if said.is_empty() {
            format!("NCCL failed: {}", code.name())
        } else {
            format!("NCCL failed: {}: {said}", code.name())
        }
    }

    /// Device memory of at least so many numbers.
    fn room(&self, state: &mut State, count: usize) -> Result<u64, String> {
        let size_bytes = count.checked_mul(size_of::<f32>()).ok_or("more numbers than memory")?;
        let room = &mut state.room;
        if room.size_bytes < size_bytes {
            if room.size_bytes > 0 {
                self.calls.free(std::mem::take(room).address);
            }
            room.address = self.calls.allocate(size_bytes)?;
            room.size_bytes = size_bytes;
        }
        Ok(room.address)
    }
}

impl Communicator for Nccl {
    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn world(&self) -> usize {
        self.control.world()
    }

    fn all_reduce_sum(&self, values: &mut [f32]) -> Result<()> {
        if values.is_empty() {
            return Ok(());
        }
        self.operate("a sum", |group, state, wait| {
            let (calls, stream) = (&group.calls, group.calls.stream());
            let (comm, address) = (wait.comm(state)?, group.room(state, values.len())?);
            calls.write(address, values)?;
            wait.settle(comm, calls.all_reduce_sum(comm, address, values.len(), stream))?;
            wait.idle(comm, stream)?;
            calls.read(address, values)
        })
    }

    fn all_gather(&self, values: &[f32], out: &mut Vec<f32>) -> Result<()> {
        out.clear();
        let own = values.len() as u64;
        let mut halves = Vec::new();
        self.over_control(|control| {
            control.all_gather(&[f32::from_bits(own as u32), f32::from_bits((own >> 32) as u32)], &mut halves)
        })?;
        let lengths: Vec<usize> = halves
            .chunks_exact(2)
            .map(|half| (u64::from(half[1].to_bits()) << 32 | u64::from(half[0].to_bits())) as usize)
            .collect();
        let width = lengths.iter().copied().max().unwrap_or(0);
        if width == 0 {
            return Ok(());
        }
        self.operate("a gathering", |group, state, wait| {
            let (calls, stream) = (&group.calls, group.calls.stream());
            let total = width.checked_mul(lengths.len()).ok_or("more numbers than memory")?;
            let mut padded = Vec::new();
            padded.try_reserve_exact(total).map_err(|_| format!("no memory for {total} numbers"))?;
            padded.resize(total, 0.0);
            let comm = wait.comm(state)?;
            let send = group.room(state, total + width)?;
            let receive = send + (width * size_of::<f32>()) as u64;
            calls.write(send, values)?;
            wait.settle(comm, calls.all_gather(comm, send, receive, width, stream))?;
            wait.idle(comm, stream)?;
            calls.read(receive, &mut padded)?;
            for (part, length) in padded.chunks_exact(width).zip(&lengths) {
                out.extend_from_slice(&part[..*length]);
            }
            Ok(())
        })
    }

    fn broadcast_bytes(&self, bytes: &mut Vec<u8>) -> Result<()> {
        self.over_control(|control| control.broadcast_bytes(bytes))
    }

    fn barrier(&self) -> Result<()> {
        self.over_control(|control| control.barrier())
    }

    fn abort(&self, reason: &str) {
        self.failure.get_or_init(|| reason.to_owned());
        self.control.abort(reason);
        // An operation under way sees it and lets go of NCCL itself.
        if let Ok(mut state) = self.state.try_lock() {
            self.give_up(&mut state, reason);
        }
    }

    fn check(&self) -> Result<()> {
        if self.failure.get().is_some() { Err(self.over()) } else { self.control.check() }
    }

    fn on_device(&self) -> Option<&dyn DeviceCommunicator> {
        Some(self)
    }
}

impl DeviceCommunicator for Nccl {
    fn device(&self) -> usize {
        self.device
    }

    unsafe fn all_reduce_sum_at(&self, values: u64, count: usize, stream: u64) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        self.operate("a sum", |group, state, wait| {
            let comm = wait.comm(state)?;
            wait.settle(comm, group.calls.all_reduce_sum(comm, values, count, stream))?;
            wait.idle(comm, stream)
        })
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let mut state = self.lock();
        let Some(comm) = state.comm.take() else { return };
        // The others may still read what this rank has on the device: NCCL tells when they have.
        let mut wait = Wait::new(self, "the end of NCCL").at_most(LET_GO);
        let calls = &self.calls;
        if calls.enter().is_ok() && wait.settle(comm, calls.finalize(comm)).is_ok() {
            calls.destroy(comm);
            if state.room.size_bytes > 0 {
                calls.free(std::mem::take(&mut state.room).address);
            }
        } else {
            self.let_go(comm);
        }
    }
}
