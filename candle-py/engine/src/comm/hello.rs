//! What two processes say to each other before they are ranks of one group: who is calling, with which token; and the
//! answer, the addresses of all or a refusal.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use crate::error::{Error, Result};

/// Begins every hello and every answer; another version of the protocol has another.
const MAGIC: [u8; 8] = *b"candle\x01\n";

/// Bytes of a hello before its token and address.
const FIXED_BYTES: usize = 20;

/// The longest token, and the longest address.
pub(super) const MOST_TEXT_BYTES: usize = 1024;

/// The longest answer.
const MOST_ANSWER_BYTES: usize = 1 << 20;

/// Who calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) token: String,
    /// Where it listens.
    pub(super) address: String,
}

/// A caller whose hello has not come whole.
#[derive(Debug)]
pub(super) struct Caller {
    pub(super) stream: TcpStream,
    bytes: Vec<u8>,
}

/// What has come of a caller's hello.
#[derive(Debug)]
pub(super) enum Heard {
    /// Not all of it.
    Part,
    /// All of it.
    Whole(Hello),
    /// Something else, or the end of the connection.
    Noise,
}

impl Hello {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend((self.rank as u32).to_le_bytes());
        bytes.extend((self.world as u32).to_le_bytes());
        bytes.extend((self.token.len() as u16).to_le_bytes());
        bytes.extend((self.address.len() as u16).to_le_bytes());
        bytes.extend(self.token.as_bytes());
        bytes.extend(self.address.as_bytes());
        bytes
    }

    /// Whether the caller knows the token; takes as long whatever is wrong with it.
    pub(super) fn knows(&self, token: &str) -> bool {
        let (theirs, ours) = (self.token.as_bytes(), token.as_bytes());
        let difference = theirs.iter().zip(ours).fold(0, |difference, (one, other)| difference | (one ^ other));
        theirs.len() == ours.len() && difference == 0
    }
}

impl Caller {
    /// A connection that was taken, whose socket must not wait.
    pub(super) fn new(stream: TcpStream) -> Self {
        Self { stream, bytes: Vec::new() }
    }

    /// Reads what has come, and nothing after the hello.
    pub(super) fn listen(&mut self) -> Heard {
        loop {
            let needed = match hello_size(&self.bytes) {
                Some(needed) => needed,
                None => return Heard::Noise,
            };
            if self.bytes.len() == needed {
                return hello_of(&self.bytes).map_or(Heard::Noise, Heard::Whole);
            }
            let have = self.bytes.len();
            self.bytes.resize(needed, 0);
            let read = self.stream.read(&mut self.bytes[have..]);
            self.bytes.truncate(have + read.as_ref().map_or(0, |count| *count));
            match read {
                Ok(0) => return Heard::Noise,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Heard::Part,
                Err(_) => return Heard::Noise,
            }
        }
    }
}

/// Bytes of a hello by what has come of it; `None` for what is none.
fn hello_size(bytes: &[u8]) -> Option<usize> {
    let compared = bytes.len().min(MAGIC.len());
    if bytes[..compared] != MAGIC[..compared] {
        return None;
    }
    let Some(fixed) = bytes.first_chunk::<FIXED_BYTES>() else { return Some(FIXED_BYTES) };
    let (token, address) = (u16_at(fixed, 16), u16_at(fixed, 18));
    (token <= MOST_TEXT_BYTES && address <= MOST_TEXT_BYTES).then_some(FIXED_BYTES + token + address)
}

fn hello_of(bytes: &[u8]) -> Option<Hello> {
    let (fixed, text) = bytes.split_first_chunk::<FIXED_BYTES>()?;
    let (token, address) = text.split_at_checked(u16_at(fixed, 16))?;
    let number = |at: usize| u32::from_le_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]) as usize;
    Some(Hello {
        rank: number(8),
        world: number(12),
        token: String::from_utf8(token.to_vec()).ok()?,
        address: String::from_utf8(address.to_vec()).ok()?,
    })
}

fn u16_at(bytes: &[u8; FIXED_BYTES], at: usize) -> usize {
    usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

/// The answer to a hello.
pub(super) fn answer(is_welcome: bool, text: &str) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.push(u8::from(is_welcome));
    bytes.extend((text.len() as u32).to_le_bytes());
    bytes.extend(text.as_bytes());
    bytes
}

/// Refuses a caller; one that does not listen sees its connection close.
pub(super) fn refuse(mut stream: &TcpStream, reason: &str) {
    drop(stream.write_all(&answer(false, reason)));
}

/// Reads the answer of `peer`: its text.
///
/// # Errors
/// [`Error::Communicator`] with the refusal, for a stranger, and where nothing comes before the deadline.
pub(super) fn read_answer(stream: &mut TcpStream, peer: &str, deadline: Instant) -> Result<String> {
    let mut fixed = [0; MAGIC.len() + 5];
    read_whole(stream, &mut fixed, peer, deadline)?;
    let size_bytes = u32::from_le_bytes([fixed[9], fixed[10], fixed[11], fixed[12]]) as usize;
    if fixed[..MAGIC.len()] != MAGIC || size_bytes > MOST_ANSWER_BYTES {
        return Err(Error::communicator(format!("what answers is no rank of this protocol: `{peer}`")));
    }
    let mut text = vec![0; size_bytes];
    read_whole(stream, &mut text, peer, deadline)?;
    let text = String::from_utf8_lossy(&text).into_owned();
    if fixed[MAGIC.len()] == 0 { Err(Error::communicator(format!("{peer} refuses: {text}"))) } else { Ok(text) }
}

fn read_whole(stream: &mut TcpStream, mut bytes: &mut [u8], peer: &str, deadline: Instant) -> Result<()> {
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::communicator(format!("no answer before the deadline from: `{peer}`")));
        }
        let read = stream.set_read_timeout(Some(left)).and_then(|()| stream.read(bytes));
        match read {
            Ok(0) => return Err(Error::communicator(format!("connection was closed by: `{peer}`"))),
            Ok(count) => bytes = &mut bytes[count..],
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {}
                _ => return Err(Error::communicator(format!("connection was lost ({error}) to: `{peer}`"))),
            },
        }
    }
    Ok(())
}
