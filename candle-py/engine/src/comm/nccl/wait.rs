//! Waiting for NCCL: its state, the device and the other ranks are looked at until a deadline.

use std::thread;
use std::time::{Duration, Instant};

use super::calls::{Code, Handle};
use super::{Nccl, State};

/// Waits are busy for so long, then sleep between looks.
const BUSY: Duration = Duration::from_micros(200);

/// Between looks.
const LOOK_AGAIN: Duration = Duration::from_micros(100);

/// How long an operation may still take once another rank has closed its connection: it may have done so after the
/// operation, which then is about to end here, too.
const AFTER_CLOSE: Duration = Duration::from_secs(1);

/// The wait for NCCL in one operation.
pub(super) struct Wait<'a> {
    group: &'a Nccl,
    name: &'static str,
    began: Instant,
    deadline: Instant,
    /// What is told at the deadline.
    reason: String,
    is_closed: bool,
}

impl<'a> Wait<'a> {
    pub(super) fn new(group: &'a Nccl, name: &'static str) -> Self {
        let began = Instant::now();
        let reason = format!("a rank was silent for {} s in {name}", group.timeout.as_secs_f64());
        Self { group, name, began, deadline: began + group.timeout, reason, is_closed: false }
    }

    pub(super) fn at_most(mut self, time: Duration) -> Self {
        self.deadline = self.deadline.min(self.began + time);
        self
    }

    /// The communicator, which is there while the group is not over.
    pub(super) fn comm(&self, state: &State) -> Result<Handle, String> {
        state.comm.ok_or_else(|| format!("NCCL is gone in {}", self.name))
    }

    /// Until a call has done its part on the host, whatever it answered at first.
    pub(super) fn settle(&mut self, comm: Handle, code: Code) -> Result<(), String> {
        let mut code = code;
        while code == Code::IN_PROGRESS {
            self.pause()?;
            code = self.group.calls.state(comm);
        }
        if code == Code::SUCCESS { Ok(()) } else { Err(self.group.explain(Some(comm), code)) }
    }

    /// Until the device has done all of a stream.
    pub(super) fn idle(&mut self, comm: Handle, stream: u64) -> Result<(), String> {
        loop {
            if self.group.calls.is_idle(stream)? {
                return Ok(());
            }
            self.pause()?;
            match self.group.calls.state(comm) {
                Code::SUCCESS | Code::IN_PROGRESS => {}
                code => return Err(self.group.explain(Some(comm), code)),
            }
        }
    }

    /// Lets some time pass.
    fn pause(&mut self) -> Result<(), String> {
        let now = Instant::now();
        if let Some(reason) = self.group.failure.get() {
            return Err(reason.clone());
        }
        if now >= self.deadline {
            return Err(self.reason.clone());
        }
        if now < self.began + BUSY {
            thread::yield_now();
            return Ok(());
        }
        if !self.is_closed
            && let Err(error) = self.group.control.check()
        {
            self.is_closed = true;
            self.reason = error.to_string();
            self.deadline = self.deadline.min(now + AFTER_CLOSE);
        }
        thread::sleep(LOOK_AGAIN);
        Ok(())
    }
}
