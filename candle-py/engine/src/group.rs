//! A group of ranks that hold one model together: rank 0 says what to compute, one order after the other, and all compute
//! it. Knows no model.

use std::sync::{Arc, Mutex, PoisonError};

use crate::comm::Communicator;
use crate::error::{Error, Result};
use crate::orders::Order;

/// This rank's place in a group, shared by an engine and its sessions.
#[derive(Debug)]
pub(crate) struct Group {
    communicator: Arc<dyn Communicator>,
    turn: Mutex<Turn>,
}

/// Held while an order is carried out: what several threads ask of rank 0 goes one after the other.
#[derive(Debug, Default)]
struct Turn {
    is_over: bool,
    sessions: u32,
}

/// Ends the group unless it is told that all went well.
struct Guard<'a>(Option<&'a dyn Communicator>);

impl Group {
    pub(crate) fn new(communicator: Arc<dyn Communicator>) -> Self {
        Self { communicator, turn: Mutex::default() }
    }

    pub(crate) fn rank(&self) -> usize {
        self.communicator.rank()
    }

    pub(crate) fn world(&self) -> usize {
        self.communicator.world()
    }

    /// Ends the group.
    pub(crate) fn abort(&self, reason: &str) {
        self.communicator.abort(reason);
    }

    /// Gives an order to all other ranks, and carries out this rank's part of it.
    ///
    /// # Errors
    /// [`Error::Input`] on another rank than 0, and once the engine is closed; [`Error::Communicator`]; what `work`
    /// fails with, which ends the group, since the other ranks may wait for this one in the middle of it.
    pub(crate) fn lead<T>(&self, order: &Order, work: impl FnOnce() -> Result<T>) -> Result<T> {
        if self.rank() != 0 {
            return Err(Error::input(format!(
                "engine computes what rank 0 asks for, being of rank: `{}`",
                self.rank()
            ))
            .with_hint("call follow on it, and ask the engine of rank 0"));
        }
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if turn.is_over {
            return Err(Error::input("engine is closed: `close`").with_hint("load it again, on all ranks"));
        }
        turn.is_over = matches!(order, Order::Close);
        let guard = Guard(Some(&*self.communicator));
        let mut bytes = order.to_bytes();
        self.communicator.broadcast_bytes(&mut bytes)?;
        let result = work();
        guard.pass(result)
    }

    /// The number of a new session, told to all ranks.
    pub(crate) fn open(&self) -> Result<u32> {
        let session = {
            let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
            turn.sessions += 1;
            turn.sessions
        };
        self.lead(&Order::Open(session), || Ok(session))
    }

    /// The next order of rank 0.
    ///
    /// # Errors
    /// [`Error::Communicator`].
    pub(crate) fn next(&self) -> Result<Order> {
        let mut bytes = Vec::new();
        self.communicator.broadcast_bytes(&mut bytes)?;
        Order::from_bytes(&bytes)
    }

    /// Compares the model with that of rank 0, and waits until all ranks have loaded theirs.
    ///
    /// # Errors
    /// [`Error::Communicator`]; [`Error::Model`] on a rank whose model is another.
    pub(crate) fn compare(&self, model: &str) -> Result<()> {
        if self.rank() == 0 {
            return self.lead(&Order::Compare(model.to_owned()), || self.communicator.barrier());
        }
        match self.next()? {
            Order::Compare(theirs) if theirs == model => self.communicator.barrier(),
            _ => Err(Error::model(format!("model, or how it is loaded, is not rank 0's on rank: `{}`", self.rank()))
                .with_hint("give all ranks the same model files and options")),
        }
    }

    /// What a rank did alone, once it is known that all others could do it too.
    ///
    /// # Errors
    /// [`Error::Communicator`], and inside that the rank's own error or, where it has none, that others have.
    pub(crate) fn agree(&self, result: Result<()>) -> Result<Result<()>> {
        let mut failed = [if result.is_err() { 1.0 } else { 0.0 }];
        self.communicator.all_reduce_sum(&mut failed)?;
        let of_others =
            || Err(Error::device(format!("other ranks cannot do the same, so many of them: `{}`", failed[0])));
        Ok(result.and_then(|()| if failed[0] == 0.0 { Ok(()) } else { of_others() }))
    }

    /// Tells the other ranks that nothing more will be asked of them.
    ///
    /// # Errors
    /// [`Error::Communicator`]; none where the group is over already.
    pub(crate) fn close(&self) -> Result<()> {
        let is_over = self.turn.lock().unwrap_or_else(PoisonError::into_inner).is_over;
        if self.rank() != 0 || is_over { Ok(()) } else { self.lead(&Order::Close, || Ok(())) }
    }

    /// Notes that rank 0 has closed the engine.
    pub(crate) fn end(&self) {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner).is_over = true;
    }

    /// Whether nothing more will be computed.
    pub(crate) fn is_over(&self) -> bool {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner).is_over
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if self.is_over() {
            return;
        }
        match self.rank() {
            0 => drop(self.close()), // whoever is gone needs not be told
            rank => self.abort(&format!("rank is done: `{rank}`")),
        }
    }
}

impl Guard<'_> {
    fn pass<T>(mut self, result: Result<T>) -> Result<T> {
        if let (Some(communicator), Err(error)) = (self.0.take(), &result) {
            communicator.abort(&error.to_string());
        }
        result
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if let Some(communicator) = self.0 {
            communicator.abort("rank 0 failed in the middle of an order");
        }
    }
}
