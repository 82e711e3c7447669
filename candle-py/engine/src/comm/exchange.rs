//! Messages to and from several ranks at once: all that can go goes, so that no two ranks wait for each other's sockets.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::frame::Kind;
use super::link::{Fault, Incoming, Link, Outgoing, Progress};

/// How long an exchange may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    /// So long from its start.
    Whole(Duration),
    /// So long from the last sign of life of the ranks that it waits for.
    SinceLife(Duration),
}

/// Sends and receives all messages of an operation.
///
/// # Errors
/// A clause that names the rank at fault.
pub(super) fn exchange(
    links: &mut [Option<Link>],
    outgoing: &mut [Outgoing<'_>],
    incoming: &mut [Incoming<'_>],
    kind: Kind,
    patience: Patience,
) -> Result<(), String> {
    let (Patience::Whole(wait) | Patience::SinceLife(wait)) = patience;
    let mut deadline = Instant::now() + wait;
    loop {
        let is_alive = advance(links, outgoing, incoming).map_err(|(rank, fault)| blame(kind, rank, fault))?;
        if outgoing.iter().all(Outgoing::is_done) && incoming.iter().all(Incoming::is_done) {
            return Ok(());
        }
        if is_alive && patience == Patience::SinceLife(wait) {
            deadline = Instant::now() + wait;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || !wait_for_sockets(links, outgoing, incoming, left)? {
            return Err(format!("{}, in `{}`", silence(outgoing, incoming, wait), kind.name()));
        }
    }
}

/// Lets every message go on; whether any rank gave a sign of life.
fn advance(
    links: &mut [Option<Link>],
    outgoing: &mut [Outgoing<'_>],
    incoming: &mut [Incoming<'_>],
) -> Result<bool, (usize, Fault)> {
    let mut is_alive = false;
    for message in outgoing.iter_mut().filter(|message| !message.is_done()) {
        let rank = message.rank;
        if let Some(link) = &mut links[rank]
            && let Err(fault) = link.send(message)
        {
            // It may have said why before it went.
            let said = incoming.iter_mut().find(|message| message.rank == rank && !message.is_done());
            let fault = said.and_then(|message| link.receive(message).err()).unwrap_or(fault);
            return Err((rank, fault));
        }
    }
    for message in incoming.iter_mut().filter(|message| !message.is_done()) {
        if let Some(link) = &mut links[message.rank] {
            let progress = link.receive(message).map_err(|fault| (message.rank, fault))?;
            is_alive |= progress != Progress::Waiting(false);
        }
    }
    Ok(is_alive)
}

/// What is wrong with a rank, in words; who gave up because of another passes on what it was told.
fn blame(kind: Kind, rank: usize, fault: Fault) -> String {
    match fault {
        Fault::Own(text) => format!("rank {rank} {text}, in `{}`", kind.name()),
        Fault::Told(reason) if reason.contains(" gave up: ") => reason,
        Fault::Told(reason) => format!("rank {rank} gave up: {reason}"),
    }
}

/// Waits until a socket that is waited for takes or gives something; `false` where none does for so long.
fn wait_for_sockets(
    links: &[Option<Link>],
    outgoing: &[Outgoing<'_>],
    incoming: &[Incoming<'_>],
    left: Duration,
) -> Result<bool, String> {
    let mut sockets = Vec::with_capacity(links.len());
    for (rank, link) in links.iter().enumerate() {
        let Some(link) = link else { continue };
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::OUT, outgoing.iter().any(|message| message.rank == rank && !message.is_done()));
        flags.set(PollFlags::IN, incoming.iter().any(|message| message.rank == rank && !message.is_done()));
        if !flags.is_empty() {
            sockets.push(PollFd::new(link.stream(), flags));
        }
    }
    poll_for(&mut sockets, left)
}

/// Polls sockets; `false` where nothing happens for so long.
pub(super) fn poll_for(sockets: &mut [PollFd<'_>], left: Duration) -> Result<bool, String> {
    let timeout = Timespec::try_from(left).map_err(|error| format!("deadline is too far away ({error})"))?;
    match poll(sockets, Some(&timeout)) {
        Ok(count) => Ok(count > 0),
        Err(Errno::INTR) => Ok(true),
        Err(error) => Err(format!("sockets cannot be waited for ({error})")),
    }
}

/// Who has not done its part.
fn silence(outgoing: &[Outgoing<'_>], incoming: &[Incoming<'_>], wait: Duration) -> String {
    let waiting = incoming.iter().filter(|message| !message.is_done()).map(|message| message.rank);
    let deaf = outgoing.iter().filter(|message| !message.is_done()).map(|message| message.rank);
    let mut ranks: Vec<usize> = waiting.chain(deaf).collect();
    ranks.sort_unstable();
    ranks.dedup();
    let names: Vec<String> = ranks.iter().map(usize::to_string).collect();
    format!("rank {} gave no answer for {:.1} s", names.join(" and "), wait.as_secs_f64())
}
