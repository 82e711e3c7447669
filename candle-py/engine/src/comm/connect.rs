//! How the ranks of a group find each other: everyone calls rank 0, hears where the others listen, and calls those below
//! itself. Strangers are refused and wait for nobody.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::exchange::poll_for;
use super::hello::{Caller, Heard, Hello, MOST_TEXT_BYTES, answer, read_answer, refuse};
use crate::error::{Error, Result};

/// How long a rank lets pass before it calls again where nobody listens yet.
const CALL_AGAIN: Duration = Duration::from_millis(20);

/// The most ranks of a group.
const MOST_RANKS: usize = 1024;

/// A group that is to come together.
#[derive(Debug)]
pub(super) struct Gathering<'a> {
    pub(super) rank: usize,
    pub(super) world: usize,
    /// Where every rank listens; or where rank 0 does, the others then take ports as they come.
    pub(super) addresses: &'a [String],
    pub(super) token: &'a str,
    pub(super) timeout: Duration,
    pub(super) deadline: Instant,
}

impl Gathering<'_> {
    /// Connects this rank to all others.
    ///
    /// # Errors
    /// [`Error::Input`] for arguments that name no group; [`Error::Communicator`] where the ranks do not come together.
    pub(super) fn connect(&self, listener: Option<TcpListener>) -> Result<Vec<Option<TcpStream>>> {
        self.check()?;
        let mut streams: Vec<Option<TcpStream>> = (0..self.world).map(|_| None).collect();
        if self.world == 1 {
            return Ok(streams);
        }
        if self.rank == 0 {
            let listener = listener.map_or_else(|| listen(&self.addresses[0]), Ok)?;
            let callers = self.receive_callers(&listener)?;
            let table: Vec<String> = std::iter::once(self.addresses[0].clone())
                .chain(callers.values().map(|(_, hello)| hello.address.clone()))
                .collect();
            for (rank, (stream, _)) in callers {
                streams[rank] = Some(welcome(stream, &table.join("\n"))?);
            }
            return Ok(streams);
        }
        let mut first = self.call(0, &self.addresses[0])?;
        let own = match self.addresses.get(self.rank) {
            Some(address) => address.clone(),
            None => format!("{}:0", bracketed(first.local_addr().map_err(|error| lost("rank 0", &error))?.ip())),
        };
        let listener = listen(&own)?;
        let address = match self.addresses.get(self.rank) {
            Some(address) => address.clone(),
            None => listener.local_addr().map_err(|error| lost(&own, &error))?.to_string(),
        };
        let table = self.greet(&mut first, 0, &address)?;
        let table: Vec<&str> = table.lines().collect();
        if table.len() != self.world {
            return Err(Error::communicator(format!("rank 0 knows another number of ranks: `{}`", table.len())));
        }
        streams[0] = Some(first);
        for rank in 1..self.rank {
            let mut stream = self.call(rank, table[rank])?;
            self.greet(&mut stream, rank, &address)?;
            streams[rank] = Some(stream);
        }
        for (rank, (stream, _)) in self.receive_callers(&listener)? {
            streams[rank] = Some(welcome(stream, "")?);
        }
        Ok(streams)
    }

    fn check(&self) -> Result<()> {
        if !(1..=MOST_RANKS).contains(&self.world) {
            return Err(Error::input(format!("world must be from 1 to {MOST_RANKS}: `{}`", self.world)));
        }
        if self.rank >= self.world {
            return Err(Error::input(format!("rank must be below the world of {}: `{}`", self.world, self.rank)));
        }
        if self.token.is_empty() || self.token.len() > MOST_TEXT_BYTES {
            return Err(Error::input(format!(
                "token must have from 1 to {MOST_TEXT_BYTES} bytes: `{}`",
                self.token.len()
            ))
            .with_hint("make a random one for every group and give it to all its ranks"));
        }
        if self.world > 1 && self.addresses.len() != 1 && self.addresses.len() != self.world {
            return Err(Error::input(format!(
                "addresses must be rank 0's alone or those of all {} ranks: `{}`",
                self.world,
                self.addresses.len()
            )));
        }
        if let Some(address) = self.addresses.iter().find(|address| address.len() > MOST_TEXT_BYTES) {
            return Err(Error::input(format!("address is too long: `{address}`")));
        }
        Ok(())
    }

    /// Connects to a rank, which may not listen yet.
    fn call(&self, rank: usize, address: &str) -> Result<TcpStream> {
        let targets: Vec<_> = address
            .to_socket_addrs()
            .map_err(|error| Error::input(format!("address of rank {rank} cannot be used ({error}): `{address}`")))?
            .collect();
        let mut reason = "it has no address".to_owned();
        loop {
            for target in &targets {
                let left = self.deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(Error::communicator(format!(
                        "rank {rank} cannot be reached within {:.1} s ({reason}): `{address}`",
                        self.timeout.as_secs_f64()
                    ))
                    .with_hint("all ranks must be started within timeout_s, with the same addresses"));
                }
                match TcpStream::connect_timeout(target, left) {
                    // Where nobody listens, a port of this machine's own range can come to be connected to itself.
                    Ok(stream) if stream.local_addr().ok() != stream.peer_addr().ok() => return Ok(stream),
                    Ok(_) => reason = "nobody listens".to_owned(),
                    Err(error) => reason = error.to_string(),
                }
            }
            thread::sleep(CALL_AGAIN);
        }
    }

    /// Says hello to a rank; gives its answer.
    fn greet(&self, stream: &mut TcpStream, rank: usize, address: &str) -> Result<String> {
        let hello =
            Hello { rank: self.rank, world: self.world, token: self.token.to_owned(), address: address.to_owned() };
        let name = format!("rank {rank}");
        stream.write_all(&hello.to_bytes()).map_err(|error| lost(&name, &error))?;
        read_answer(stream, &name, self.deadline)
    }

    /// Waits until all ranks above this one have called.
    fn receive_callers(&self, listener: &TcpListener) -> Result<BTreeMap<usize, (TcpStream, Hello)>> {
        listener.set_nonblocking(true).map_err(|error| lost("the listener", &error))?;
        let (mut waiting, mut found) = (Vec::new(), BTreeMap::new());
        let mut strangers = 0;
        let result = loop {
            if found.len() + self.rank + 1 == self.world {
                break Ok(());
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break Err(self.missing(&found, strangers));
            }
            let mut sockets = vec![PollFd::new(listener, PollFlags::IN)];
            sockets.extend(waiting.iter().map(|caller: &Caller| PollFd::new(&caller.stream, PollFlags::IN)));
            if let Err(fault) = poll_for(&mut sockets, left) {
                break Err(Error::communicator(fault));
            }
            while let Ok((stream, _)) = listener.accept() {
                if stream.set_nonblocking(true).is_ok() {
                    waiting.push(Caller::new(stream));
                }
            }
            if let Err(error) = self.hear(&mut waiting, &mut found, &mut strangers) {
                break Err(error);
            }
        };
        if let Err(error) = result {
            found.values().for_each(|(stream, _)| refuse(stream, &error.to_string()));
            return Err(error);
        }
        Ok(found)
    }

    /// Listens to those who have called and not said who they are.
    fn hear(
        &self,
        waiting: &mut Vec<Caller>,
        found: &mut BTreeMap<usize, (TcpStream, Hello)>,
        strangers: &mut usize,
    ) -> Result<()> {
        for mut caller in std::mem::take(waiting) {
            match caller.listen() {
                Heard::Part => waiting.push(caller),
                Heard::Noise => *strangers += 1,
                Heard::Whole(hello) if !hello.knows(self.token) => {
                    *strangers += 1;
                    refuse(&caller.stream, "the token is not this group's");
                }
                Heard::Whole(hello) => {
                    let (rank, world) = (hello.rank, hello.world);
                    let fault = if world != self.world {
                        Some(format!(
                            "rank {rank} is of a world of {world}, rank {} of one of `{}`",
                            self.rank, self.world
                        ))
                    } else if rank <= self.rank || rank >= self.world || found.contains_key(&rank) {
                        Some(format!("two processes have the same rank: `{rank}`"))
                    } else {
                        None
                    };
                    if let Some(fault) = fault {
                        refuse(&caller.stream, &fault);
                        return Err(
                            Error::communicator(fault).with_hint("give every rank the same world, and its own rank")
                        );
                    }
                    found.insert(rank, (caller.stream, hello));
                }
            }
        }
        Ok(())
    }

    fn missing(&self, found: &BTreeMap<usize, (TcpStream, Hello)>, strangers: usize) -> Error {
        let missing: Vec<String> =
            (self.rank + 1..self.world).filter(|rank| !found.contains_key(rank)).map(|rank| rank.to_string()).collect();
        let error = Error::communicator(format!(
            "ranks did not arrive within {:.1} s: `{}`",
            self.timeout.as_secs_f64(),
            missing.join(", ")
        ));
        match strangers {
            0 => error,
            _ => error.with_hint(format!("callers that were refused, without the group's token: {strangers}")),
        }
    }
}

/// Listens at an address.
fn listen(address: &str) -> Result<TcpListener> {
    TcpListener::bind(address)
        .map_err(|error| Error::communicator(format!("address cannot be listened at ({error}): `{address}`")))
}

/// Tells a caller that it belongs to the group.
fn welcome(mut stream: TcpStream, table: &str) -> Result<TcpStream> {
    let told = stream.set_nonblocking(false).and_then(|()| stream.write_all(&answer(true, table)));
    told.map(|()| stream).map_err(|error| lost("a rank", &error))
}

fn lost(peer: &str, error: &std::io::Error) -> Error {
    Error::communicator(format!("connection was lost ({error}) to: `{peer}`"))
}

fn bracketed(ip: std::net::IpAddr) -> String {
    if ip.is_ipv6() { format!("[{ip}]") } else { ip.to_string() }
}
