//! Ranks over TCP, each connected to every other. Sums are added in the order of the ranks; large ones in parts, each by
//! one rank, so that no connection carries more than its share.

use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Communicator;
use super::connect::Gathering;
use super::exchange::{Patience, exchange};
use super::frame::Kind;
use super::link::{Incoming, Link, Outgoing, Room};
use crate::error::{Error, Result};

/// Sums of so many numbers and more go in parts, in two rounds; smaller ones whole, in one.
const LEAST_PARTED: usize = 16_384;

/// The longest deadline, a week.
const MOST_TIMEOUT: Duration = Duration::from_secs(7 * 24 * 3600);

/// Signs of life within the time that others wait for one.
const BEATS: u32 = 4;

/// A rank of a group over TCP.
#[derive(Debug)]
pub struct Tcp {
    shared: Arc<Shared>,
    heart: Option<Heart>,
}

#[derive(Debug)]
struct Shared {
    rank: usize,
    world: usize,
    timeout: Duration,
    links: Mutex<Links>,
    /// The same sockets, to be closed while an operation has the links.
    doors: Vec<TcpStream>,
    failure: OnceLock<String>,
}

/// The connections, and what operations keep from one to the next.
#[derive(Debug)]
struct Links {
    by_rank: Vec<Option<Link>>,
    step: u32,
    /// What came of each rank.
    received: Vec<Vec<f32>>,
}

/// The thread that shows others that this process lives while its caller has nothing to ask for.
#[derive(Debug)]
struct Heart {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Tcp {
    /// Connects rank `rank` of `world`. `addresses` are "host:port", of every rank or of rank 0 alone. Waits until all are
    /// there, at most for `timeout`, which is also the deadline of every operation afterwards. Whoever does not know
    /// `token` is refused.
    ///
    /// # Errors
    /// [`Error::Input`] for arguments that name no group; [`Error::Communicator`] where the ranks do not come together.
    pub fn connect(rank: usize, world: usize, addresses: &[String], token: &str, timeout: Duration) -> Result<Self> {
        let deadline = deadline(timeout)?;
        Self::gather(&Gathering { rank, world, addresses, token, timeout, deadline }, None)
    }

    /// Connects rank 0, whose listener its caller made.
    ///
    /// # Errors
    /// As of [`connect`](Tcp::connect).
    pub fn host(listener: TcpListener, world: usize, token: &str, timeout: Duration) -> Result<Self> {
        let address = listener.local_addr().map_err(|error| Error::communicator(format!("no listener: `{error}`")))?;
        let addresses = [address.to_string()];
        let deadline = deadline(timeout)?;
        Self::gather(&Gathering { rank: 0, world, addresses: &addresses, token, timeout, deadline }, Some(listener))
    }

    fn gather(gathering: &Gathering<'_>, listener: Option<TcpListener>) -> Result<Self> {
        let streams = gathering.connect(listener)?;
        let unusable = |error| Error::communicator(format!("connection cannot be used: `{error}`"));
        let doors = streams.iter().flatten().map(TcpStream::try_clone).collect::<Result<_, _>>().map_err(unusable)?;
        let by_rank = streams.into_iter().map(|stream| stream.map(Link::new).transpose());
        let by_rank = by_rank.collect::<Result<_, _>>().map_err(unusable)?;
        let &Gathering { rank, world, timeout, .. } = gathering;
        let links = Mutex::new(Links { by_rank, step: 0, received: vec![Vec::new(); world] });
        let shared = Arc::new(Shared { rank, world, timeout, links, doors, failure: OnceLock::new() });
        let heart = (rank == 0 && world > 1).then(|| Heart::start(Arc::clone(&shared))).transpose()?;
        Ok(Self { shared, heart })
    }

    /// Why the group is over, if it is.
    pub fn failure(&self) -> Option<&str> {
        self.shared.failure.get().map(String::as_str)
    }

    /// How long an operation may take.
    pub fn timeout(&self) -> Duration {
        self.shared.timeout
    }

    /// Runs one operation; a fault in it is the end of the group.
    fn operate(&self, work: impl FnOnce(&mut Links, u32) -> Result<(), String>) -> Result<()> {
        let shared = &self.shared;
        let mut links = shared.lock();
        if shared.failure.get().is_none() {
            links.step = links.step.wrapping_add(1);
            let step = links.step;
            match work(&mut links, step) {
                Ok(()) => return Ok(()),
                Err(reason) => shared.give_up(&mut links, &reason),
            }
        }
        let reason = shared.failure.get().map_or("the group is over", String::as_str);
        Err(Error::communicator(reason).with_hint("start all ranks again"))
    }

    fn patience(&self) -> Patience {
        Patience::Whole(self.shared.timeout)
    }

    /// Every rank's `values` to every other; `received` of the others holds what came, of any length or of the same.
    fn swap(&self, kind: Kind, step: u32, links: &mut Links, values: &[f32], same_length: bool) -> Result<(), String> {
        let own = self.shared.rank;
        let Links { by_rank, received, .. } = links;
        let mut incoming = Vec::with_capacity(received.len());
        for (rank, floats) in received.iter_mut().enumerate().filter(|(rank, _)| *rank != own) {
            let room = if same_length {
                floats.resize(values.len(), 0.0);
                Room::Exactly(bytemuck::cast_slice_mut(floats))
            } else {
                Room::Floats(floats)
            };
            incoming.push(Incoming::new(rank, kind, step, room));
        }
        let mut outgoing = self.to_all(kind, step, bytemuck::cast_slice(values));
        exchange(by_rank, &mut outgoing, &mut incoming, kind, self.patience())
    }

    fn to_all<'a>(&self, kind: Kind, step: u32, body: &'a [u8]) -> Vec<Outgoing<'a>> {
        let Shared { rank: own, world, .. } = *self.shared;
        (0..world).filter(|rank| *rank != own).map(|rank| Outgoing::new(rank, kind, step, body)).collect()
    }

    /// Every part by its own rank, then every part to all.
    fn sum_in_parts(&self, links: &mut Links, step: u32, values: &mut [f32]) -> Result<(), String> {
        let Shared { rank: own, world, .. } = *self.shared;
        let length = values.len();
        let part = |rank: usize| length * rank / world..length * (rank + 1) / world;
        let Links { by_rank, received, .. } = links;
        let others = || (0..world).filter(|rank| *rank != own);
        let mut outgoing: Vec<_> = others()
            .map(|rank| Outgoing::new(rank, Kind::Sum, step, bytemuck::cast_slice(&values[part(rank)])))
            .collect();
        let mut incoming = Vec::with_capacity(world);
        for (rank, floats) in received.iter_mut().enumerate().filter(|(rank, _)| *rank != own) {
            floats.resize(part(own).len(), 0.0);
            incoming.push(Incoming::new(rank, Kind::Sum, step, Room::Exactly(bytemuck::cast_slice_mut(floats))));
        }
        exchange(by_rank, &mut outgoing, &mut incoming, Kind::Sum, self.patience())?;
        add_in_order(own, &mut values[part(own)], received);

        let mut incoming = Vec::with_capacity(world);
        let (mut rest, mut mine) = (values, &[][..]);
        for rank in 0..world {
            let (floats, later) = rest.split_at_mut(part(rank).len());
            rest = later;
            if rank == own {
                mine = floats;
            } else {
                let room = Room::Exactly(bytemuck::cast_slice_mut(floats));
                incoming.push(Incoming::new(rank, Kind::Summed, step, room));
            }
        }
        let mut outgoing = self.to_all(Kind::Summed, step, bytemuck::cast_slice(mine));
        exchange(by_rank, &mut outgoing, &mut incoming, Kind::Summed, self.patience())
    }
}

/// When waiting ends that begins now.
fn deadline(timeout: Duration) -> Result<Instant> {
    if timeout.is_zero() || timeout > MOST_TIMEOUT {
        return Err(Error::input(format!(
            "timeout_s must be more than 0 and at most {}: `{}`",
            MOST_TIMEOUT.as_secs(),
            timeout.as_secs_f64()
        )));
    }
    Ok(Instant::now() + timeout)
}

impl Communicator for Tcp {
    fn rank(&self) -> usize {
        self.shared.rank
    }

    fn world(&self) -> usize {
        self.shared.world
    }

    fn all_reduce_sum(&self, values: &mut [f32]) -> Result<()> {
        self.operate(|links, step| {
            if self.shared.world > 2 && values.len() >= LEAST_PARTED {
                return self.sum_in_parts(links, step, values);
            }
            self.swap(Kind::Sum, step, links, values, true)?;
            add_in_order(self.shared.rank, values, &mut links.received);
            Ok(())
        })
    }

    fn all_gather(&self, values: &[f32], out: &mut Vec<f32>) -> Result<()> {
        out.clear();
        self.operate(|links, step| {
            self.swap(Kind::Gather, step, links, values, false)?;
            for (rank, received) in links.received.iter().enumerate() {
                out.extend_from_slice(if rank == self.shared.rank { values } else { received });
            }
            Ok(())
        })
    }

    fn broadcast_bytes(&self, bytes: &mut Vec<u8>) -> Result<()> {
        self.operate(|links, step| {
            if self.shared.rank == 0 {
                let mut outgoing = self.to_all(Kind::Broadcast, step, bytes);
                return exchange(&mut links.by_rank, &mut outgoing, &mut [], Kind::Broadcast, self.patience());
            }
            let mut incoming = [Incoming::new(0, Kind::Broadcast, step, Room::Bytes(bytes))];
            let patience = Patience::SinceLife(self.shared.timeout);
            exchange(&mut links.by_rank, &mut [], &mut incoming, Kind::Broadcast, patience)
        })
    }

    fn barrier(&self) -> Result<()> {
        self.operate(|links, step| self.swap(Kind::Barrier, step, links, &[], true))
    }

    fn abort(&self, reason: &str) {
        self.shared.abort(reason);
    }

    fn check(&self) -> Result<()> {
        let lost = || self.shared.closed_door().map(|rank| format!("rank {rank} closed its connection"));
        match self.failure().map(str::to_owned).or_else(lost) {
            Some(reason) => Err(Error::communicator(reason).with_hint("start all ranks again")),
            None => Ok(()),
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Links> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lowest rank that has closed its connection.
    fn closed_door(&self) -> Option<usize> {
        let mut doors: Vec<_> = self.doors.iter().map(|door| PollFd::new(door, PollFlags::RDHUP)).collect();
        poll(&mut doors, Some(&Timespec::default())).ok()?;
        let place = doors.iter().position(|door| !door.revents().is_empty())?;
        Some(if place < self.rank { place } else { place + 1 })
    }

    /// Ends the group, telling the others the first reason.
    fn give_up(&self, links: &mut Links, reason: &str) {
        let reason = self.failure.get_or_init(|| reason.to_owned());
        links.by_rank.iter_mut().flatten().for_each(|link| link.close(reason));
    }

    fn abort(&self, reason: &str) {
        match self.links.try_lock() {
            Ok(mut links) => self.give_up(&mut links, reason),
            Err(_) => {
                // The operation under way sees its connections close.
                self.failure.get_or_init(|| reason.to_owned());
                self.doors.iter().for_each(|door| drop(door.shutdown(std::net::Shutdown::Both)));
            }
        }
    }
}

impl Heart {
    fn start(shared: Arc<Shared>) -> Result<Self> {
        let (stop, stopped) = channel();
        let thread = thread::Builder::new()
            .name("candle-heart".to_owned())
            .spawn(move || beat(&shared, &stopped))
            .map_err(|error| Error::device(format!("thread cannot be started: `{error}`")))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

/// Gives signs of life until told to stop, except while an operation is under way, which gives enough itself.
fn beat(shared: &Shared, stopped: &Receiver<()>) {
    let interval = shared.timeout / BEATS;
    while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) && shared.failure.get().is_none() {
        if let Ok(mut links) = shared.links.try_lock() {
            links.by_rank.iter_mut().flatten().for_each(Link::beat);
        }
    }
}

impl Drop for Heart {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join()); // it does not panic
        }
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        drop(self.heart.take());
    }
}

/// `values` becomes the sum over all ranks: `received` of the others, `values` itself in the place of rank `own`. The
/// operands stand in the same order whatever the rank.
fn add_in_order(own: usize, values: &mut [f32], received: &mut [Vec<f32>]) {
    let add = |sum: &mut [f32], other: &[f32]| sum.iter_mut().zip(other).for_each(|(sum, other)| *sum += other);
    if own == 0 {
        received[1..].iter().for_each(|other| add(values, other));
        return;
    }
    let Some((sum, others)) = received.split_first_mut() else { return };
    for (rank, other) in (1..).zip(others) {
        add(sum, if rank == own { values } else { other });
    }
    values.copy_from_slice(sum);
}
