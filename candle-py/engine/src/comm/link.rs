//! One connection to another rank: messages written and read as far as the socket takes and gives, never waiting.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;

use super::frame::{HEAD_BYTES, Head, Kind};

/// The longest reason that is read from another rank.
const MOST_REASON_BYTES: u64 = 4096;

/// A connection, and what of a message has gone either way.
#[derive(Debug)]
pub(super) struct Link {
    stream: TcpStream,
    /// The rest of a beat that the socket did not take whole.
    backlog: Vec<u8>,
    /// Whether a message has gone in part.
    is_torn: bool,
    head: [u8; HEAD_BYTES],
    head_bytes: usize,
    /// Bytes of a reason that are still to be read, once an abort has come.
    reason: Option<(Vec<u8>, usize)>,
}

/// A message on its way out.
#[derive(Debug)]
pub(super) struct Outgoing<'a> {
    /// The rank that it goes to.
    pub(super) rank: usize,
    head: [u8; HEAD_BYTES],
    body: &'a [u8],
    sent: usize,
}

/// Where a message's bytes go.
#[derive(Debug)]
pub(super) enum Room<'a> {
    /// So many are awaited.
    Exactly(&'a mut [u8]),
    /// As many as come.
    Bytes(&'a mut Vec<u8>),
    /// As many as come, whole numbers of them.
    Floats(&'a mut Vec<f32>),
}

/// A message that is awaited.
#[derive(Debug)]
pub(super) struct Incoming<'a> {
    /// The rank that it comes from.
    pub(super) rank: usize,
    kind: Kind,
    step: u32,
    room: Room<'a>,
    received: Option<usize>,
}

/// What a socket's turn came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// All is there, or gone.
    Done,
    /// The socket takes or gives no more for now; whether it gave anything, a sign of life at least.
    Waiting(bool),
}

/// What is wrong with a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// As a clause that follows its name.
    Own(String),
    /// It gave up, for this reason.
    Told(String),
}

impl From<&str> for Fault {
    fn from(text: &str) -> Self {
        Fault::Own(text.to_owned())
    }
}

impl<'a> Outgoing<'a> {
    pub(super) fn new(rank: usize, kind: Kind, step: u32, body: &'a [u8]) -> Self {
        let head = Head { kind, step, size_bytes: body.len() as u64 };
        Self { rank, head: head.to_bytes(), body, sent: 0 }
    }

    pub(super) fn is_done(&self) -> bool {
        self.sent == HEAD_BYTES + self.body.len()
    }
}

impl<'a> Incoming<'a> {
    pub(super) fn new(rank: usize, kind: Kind, step: u32, room: Room<'a>) -> Self {
        Self { rank, kind, step, room, received: None }
    }

    pub(super) fn is_done(&self) -> bool {
        self.received.is_some_and(|received| received == self.room.len())
    }

    /// Checks the head against what is awaited, and makes room.
    fn begin(&mut self, head: Head) -> Result<(), Fault> {
        if head.kind != self.kind || head.step != self.step {
            return Err(Fault::Own(format!("is out of step, at its {} {}", head.kind.name(), head.step)));
        }
        let fits = usize::try_from(head.size_bytes).ok().filter(|size_bytes| self.room.make(*size_bytes));
        if fits.is_none() {
            return Err(Fault::Own(format!("sent a message of an unexpected size, {} bytes", head.size_bytes)));
        }
        self.received = Some(0);
        Ok(())
    }
}

impl Room<'_> {
    fn len(&self) -> usize {
        match self {
            Room::Exactly(bytes) => bytes.len(),
            Room::Bytes(bytes) => bytes.len(),
            Room::Floats(floats) => size_of_val(floats.as_slice()),
        }
    }

    /// Whether so many bytes have room.
    fn make(&mut self, size_bytes: usize) -> bool {
        match self {
            Room::Exactly(bytes) => bytes.len() == size_bytes,
            Room::Bytes(bytes) => {
                bytes.clear();
                bytes.try_reserve_exact(size_bytes).is_ok() && {
                    bytes.resize(size_bytes, 0);
                    true
                }
            }
            Room::Floats(floats) => {
                let count = size_bytes / size_of::<f32>();
                floats.clear();
                count * size_of::<f32>() == size_bytes && floats.try_reserve_exact(count).is_ok() && {
                    floats.resize(count, 0.0);
                    true
                }
            }
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Room::Exactly(bytes) => bytes,
            Room::Bytes(bytes) => bytes,
            Room::Floats(floats) => bytemuck::cast_slice_mut(floats),
        }
    }
}

impl Link {
    /// Takes a connection over.
    ///
    /// # Errors
    /// Where the system does not set its options.
    pub(super) fn new(stream: TcpStream) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let head = [0; HEAD_BYTES];
        Ok(Self { stream, backlog: Vec::new(), is_torn: false, head, head_bytes: 0, reason: None })
    }

    /// The socket.
    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Writes as much of a message as the socket takes.
    pub(super) fn send(&mut self, message: &mut Outgoing<'_>) -> Result<Progress, Fault> {
        if !self.flush()? {
            return Ok(Progress::Waiting(false));
        }
        while !message.is_done() {
            let written = match message.sent.checked_sub(HEAD_BYTES) {
                Some(sent) => self.stream.write(&message.body[sent..]),
                None => self
                    .stream
                    .write_vectored(&[IoSlice::new(&message.head[message.sent..]), IoSlice::new(message.body)]),
            };
            match turn(written)? {
                Some(count) => message.sent += count,
                None => return Ok(Progress::Waiting(false)),
            }
            self.is_torn = !message.is_done();
        }
        Ok(Progress::Done)
    }

    /// Reads as much of a message as has come. Beats before it are passed over.
    pub(super) fn receive(&mut self, message: &mut Incoming<'_>) -> Result<Progress, Fault> {
        let mut is_alive = false;
        while !message.is_done() {
            let read = if self.reason.is_some() {
                self.read_reason()?
            } else if let Some(received) = message.received {
                let read = turn(self.stream.read(&mut message.room.bytes_mut()[received..]))?;
                message.received = Some(received + read.unwrap_or(0));
                read
            } else {
                let read = turn(self.stream.read(&mut self.head[self.head_bytes..]))?;
                self.head_bytes += read.unwrap_or(0);
                if self.head_bytes == HEAD_BYTES {
                    self.head_bytes = 0;
                    self.begin(message)?;
                }
                read
            };
            match read {
                Some(_) => is_alive = true,
                None => return Ok(Progress::Waiting(is_alive)),
            }
        }
        Ok(Progress::Done)
    }

    fn begin(&mut self, message: &mut Incoming<'_>) -> Result<(), Fault> {
        let head = Head::from_bytes(self.head).ok_or_else(|| Fault::from("sent what is no message"))?;
        match head.kind {
            Kind::Beat => Ok(()),
            Kind::Abort => {
                self.reason = Some((vec![0; head.size_bytes.min(MOST_REASON_BYTES) as usize], 0));
                self.read_reason().map(drop)
            }
            _ => message.begin(head),
        }
    }

    /// Reads on in an abort's reason; whole, it is the fault.
    fn read_reason(&mut self) -> Result<Option<usize>, Fault> {
        let Self { reason, stream, .. } = self;
        let Some((bytes, received)) = reason else { return Ok(None) };
        let read = if bytes.is_empty() { Some(0) } else { turn(stream.read(&mut bytes[*received..]))? };
        *received += read.unwrap_or(0);
        if *received < bytes.len() {
            return Ok(read);
        }
        Err(Fault::Told(String::from_utf8_lossy(bytes).into_owned()))
    }

    /// Sends a sign of life, unless the last one has not gone yet.
    pub(super) fn beat(&mut self) {
        if !self.is_torn && self.backlog.is_empty() {
            self.backlog.extend(Head { kind: Kind::Beat, step: 0, size_bytes: 0 }.to_bytes());
        }
        // What is wrong with the connection is told by the next operation.
        drop(self.flush());
    }

    /// Tells the other side, where it still understands, why the group is over, and closes the connection.
    pub(super) fn close(&mut self, reason: &str) {
        let reason = &reason.as_bytes()[..reason.len().min(MOST_REASON_BYTES as usize)];
        if !self.is_torn {
            let mut message = Outgoing::new(0, Kind::Abort, 0, reason);
            drop(self.send(&mut message)); // whoever does not hear it sees the connection close
        }
        drop(self.stream.shutdown(std::net::Shutdown::Both)); // it may be closed already
    }

    /// Writes what is left of a beat; whether all of it has gone.
    fn flush(&mut self) -> Result<bool, Fault> {
        while !self.backlog.is_empty() {
            match turn(self.stream.write(&self.backlog))? {
                Some(count) => drop(self.backlog.drain(..count)),
                None => return Ok(false),
            }
        }
        Ok(true)
    }
}

/// One call of a socket: bytes, `None` where it would wait, or what is wrong.
fn turn(result: std::io::Result<usize>) -> Result<Option<usize>, Fault> {
    match result {
        Ok(0) => Err(Fault::from("closed its connection")),
        Ok(count) => Ok(Some(count)),
        Err(error) => match error.kind() {
            ErrorKind::WouldBlock => Ok(None),
            ErrorKind::Interrupted => Ok(Some(0)),
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted => {
                Err(Fault::from("closed its connection"))
            }
            _ => Err(Fault::Own(format!("cannot be reached ({error})"))),
        },
    }
}
