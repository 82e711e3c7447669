//! The engine of a rank that is not 0: carries out what rank 0 orders until that closes its engine.

use std::collections::HashMap;

use super::model::Model;
use super::{AnyModel, Engine, with_model};
use crate::backend::Backend;
use crate::batch::Ragged;
use crate::error::{Error, Result, catching_panics};
use crate::group::Group;
use crate::orders::Order;
use crate::session::Session;

/// Sessions by rank 0's numbers.
type Sessions<B> = HashMap<u32, Session<B>>;

impl Engine {
    /// Computes this rank's part of all that the engine of rank 0 is asked for. Returns once that is closed or dropped,
    /// with all its sessions.
    ///
    /// # Errors
    /// [`Error::Communicator`] when the group is over before that; [`Error::Input`] where there is nobody to follow;
    /// what goes wrong on this rank, which ends the group.
    pub fn follow(&self) -> Result<()> {
        self.follow_with(|_| {})
    }

    /// The same; `observe` is shown the numbers of every order that gives some: the same as rank 0's, bit for bit.
    ///
    /// # Errors
    /// As of [`follow`](Engine::follow).
    pub fn follow_with(&self, mut observe: impl FnMut(&[f32])) -> Result<()> {
        let group = self.group().filter(|group| group.rank() > 0).ok_or_else(|| {
            Error::input("there is no other rank to follow: `0`").with_hint("call the engine's functions on rank 0")
        })?;
        if group.is_over() {
            return Err(Error::input("engine is closed: `follow`").with_hint("load it again, on all ranks"));
        }
        let result = catching_panics(|| with_model!(self, model => model.carry_out_all(group, &mut observe)));
        match &result {
            Ok(()) => group.end(),
            Err(error) => group.abort(&format!("rank {} failed: {error}", group.rank())),
        }
        result
    }

    /// Ends the work of all ranks: the others' [`follow`](Engine::follow) returns, and nothing more can be asked of this
    /// engine and its sessions. Dropping the engine and its sessions does the same; a model that is not split has
    /// nothing to close.
    ///
    /// # Errors
    /// [`Error::Communicator`] when another rank cannot be told.
    pub fn close(&self) -> Result<()> {
        self.group().map_or(Ok(()), |group| group.close())
    }

    /// Ends the group that the model is split over, from any thread.
    pub fn abort(&self, reason: &str) {
        if let Some(group) = self.group() {
            group.abort(reason);
        }
    }

    /// This rank, and how many ranks the model is split over.
    pub fn rank_and_world(&self) -> (usize, usize) {
        self.group().map_or((0, 1), |group| (group.rank(), group.world()))
    }

    fn group(&self) -> Option<&Group> {
        with_model!(self, model => model.group.as_deref())
    }
}

impl<B: Backend> Model<B> {
    fn carry_out_all(&self, group: &Group, observe: &mut impl FnMut(&[f32])) -> Result<()> {
        let mut sessions = Sessions::<B>::new();
        loop {
            match group.next()? {
                Order::Close => return Ok(()),
                order => self.carry_out(group, order, &mut sessions, observe)?,
            }
        }
    }

    fn carry_out(
        &self,
        group: &Group,
        order: Order,
        sessions: &mut Sessions<B>,
        observe: &mut impl FnMut(&[f32]),
    ) -> Result<()> {
        let unknown = |session: u32| Error::internal(format!("no such session: `{session}`"));
        match order {
            Order::Forward { wanted, ids, offsets, type_ids } => {
                let batch = Ragged { ids: &ids, offsets: &offsets, type_ids: type_ids.as_deref() };
                observe(&self.run_for(wanted, &batch)?);
            }
            Order::Open(session) => {
                sessions.insert(session, self.local_session()?);
            }
            Order::Resize { session, copies, blocks } => {
                let followed = sessions.get_mut(&session).ok_or_else(|| unknown(session))?;
                followed.copy(&copies)?;
                let result = followed.resize(usize::try_from(blocks).unwrap_or(usize::MAX));
                // What keeps the cache from its size is told by rank 0.
                if group.agree(result)?.is_err() {
                    followed.resize(0)?;
                }
            }
            Order::Step { session, copies, batch } => {
                let followed = sessions.get_mut(&session).ok_or_else(|| unknown(session))?;
                followed.copy(&copies)?;
                followed.check(&batch)?;
                let mut logits = Vec::new();
                followed.compute(&batch, &mut logits)?;
                observe(&logits);
            }
            Order::Drop(session) => drop(sessions.remove(&session)),
            Order::Compare(_) | Order::Close => return Err(Error::internal("an order out of its place")),
        }
        Ok(())
    }
}
