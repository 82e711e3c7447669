//! The head of every message: what it is, which operation it belongs to, and how many bytes follow.

/// Bytes of a head.
pub(super) const HEAD_BYTES: usize = 16;

/// The first byte of every head: anything else is no message of ours.
const MARK: u8 = 0xC7;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Values to be summed.
    Sum,
    /// A finished part of a sum.
    Summed,
    /// Values to be gathered.
    Gather,
    /// Rank 0's bytes.
    Broadcast,
    /// Nothing but that its rank has come so far.
    Barrier,
    /// A sign of life; belongs to no operation.
    Beat,
    /// The group is over; the reason follows.
    Abort,
}

impl Kind {
    const ALL: [Kind; 7] =
        [Kind::Sum, Kind::Summed, Kind::Gather, Kind::Broadcast, Kind::Barrier, Kind::Beat, Kind::Abort];

    /// The operation, as errors call it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Sum | Kind::Summed => "all_reduce_sum",
            Kind::Gather => "all_gather",
            Kind::Broadcast => "broadcast_bytes",
            Kind::Barrier => "barrier",
            Kind::Beat => "beat",
            Kind::Abort => "abort",
        }
    }
}

/// A message's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    /// What it is.
    pub(super) kind: Kind,
    /// The number of the operation that it belongs to.
    pub(super) step: u32,
    /// Bytes that follow.
    pub(super) size_bytes: u64,
}

impl Head {
    pub(super) fn to_bytes(self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[0] = MARK;
        bytes[1] = self.kind as u8;
        bytes[4..8].copy_from_slice(&self.step.to_le_bytes());
        bytes[8..].copy_from_slice(&self.size_bytes.to_le_bytes());
        bytes
    }

    /// `None` for what is no head.
    pub(super) fn from_bytes(bytes: [u8; HEAD_BYTES]) -> Option<Self> {
        let [mark, kind, 0, 0, a, b, c, d, size_bytes @ ..] = bytes else { return None };
        let kind = *Kind::ALL.get(usize::from(kind)).filter(|_| mark == MARK)?;
        Some(Self { kind, step: u32::from_le_bytes([a, b, c, d]), size_bytes: u64::from_le_bytes(size_bytes) })
    }
}

#[cfg(test)]
mod tests {
    use super::{Head, Kind};

    #[test]
    fn a_head_comes_back_from_its_bytes_and_nothing_else_does() {
        for kind in Kind::ALL {
            let head = Head { kind, step: 0x0102_0304, size_bytes: u64::MAX - 1 };
            assert_eq!(Head::from_bytes(head.to_bytes()), Some(head));
        }
        assert_eq!(Head::from_bytes(*b"GET / HTTP/1.1\r\n"), None);
        assert_eq!(Head::from_bytes([0; 16]), None);
    }
}
