//! What rank 0 tells the other ranks to compute, as bytes. The ranks are of one build, so there is no version in it.

use crate::error::{Error, Result};
use crate::generate::{Logits, StepBatch, StepSequence};

/// One order of rank 0.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Order {
    /// The model as rank 0 has loaded it; the others compare.
    Compare(String),
    /// A forward of whole sequences.
    Forward { wanted: Wanted, ids: Vec<u32>, offsets: Vec<u32>, type_ids: Option<Vec<u32>> },
    /// A session begins; its number.
    Open(u32),
    /// A session's cache gets another number of blocks.
    Resize { session: u32, copies: Vec<[u32; 2]>, blocks: u64 },
    /// A step of a session, after some blocks were copied to others.
    Step { session: u32, copies: Vec<[u32; 2]>, batch: StepBatch },
    /// A session is over.
    Drop(u32),
    /// The engine is: nothing more will be asked.
    Close,
}

/// What a forward is for; decides what the ranks have to tell each other after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Hidden states, or what each rank makes of them alone.
    Hidden,
    /// Logits of all tokens.
    Logits,
    /// Log-probabilities of all tokens.
    LogProbabilities,
}

impl Order {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut out = Writer(Vec::new());
        match self {
            Order::Compare(text) => {
                out.number(0);
                out.0.extend(text.as_bytes());
            }
            Order::Forward { wanted, ids, offsets, type_ids } => {
                out.number(1);
                out.number(*wanted as u32);
                out.list(ids);
                out.list(offsets);
                out.number(type_ids.is_some().into());
                out.list(type_ids.as_deref().unwrap_or_default());
            }
            Order::Open(session) => [2, *session].iter().for_each(|number| out.number(*number)),
            Order::Resize { session, copies, blocks } => {
                [3, *session].iter().for_each(|number| out.number(*number));
                out.list(copies.as_flattened());
                out.0.extend(blocks.to_le_bytes());
            }
            Order::Step { session, copies, batch } => {
                [4, *session].iter().for_each(|number| out.number(*number));
                out.list(copies.as_flattened());
                out.list(&batch.tokens);
                out.number(batch.sequences.len() as u32);
                for StepSequence { tokens, start, blocks, logits } in &batch.sequences {
                    out.number(tokens.len() as u32);
                    out.number(*start as u32);
                    out.number(*logits as u32);
                    out.list(blocks);
                }
            }
            Order::Drop(session) => [5, *session].iter().for_each(|number| out.number(*number)),
            Order::Close => out.number(6),
        }
        out.0
    }

    /// # Errors
    /// [`Error::Internal`] for bytes that are no order.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        Reader(bytes).order().ok_or_else(|| Error::internal("rank 0 gave an order that is none"))
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn number(&mut self, number: u32) {
        self.0.extend(number.to_le_bytes());
    }

    fn list(&mut self, numbers: &[u32]) {
        self.number(numbers.len() as u32);
        numbers.iter().for_each(|number| self.number(*number));
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn order(&mut self) -> Option<Order> {
        let order = match self.number()? {
            0 => Order::Compare(String::from_utf8(std::mem::take(&mut self.0).to_vec()).ok()?),
            1 => {
                let all = [Wanted::Hidden, Wanted::Logits, Wanted::LogProbabilities];
                let wanted = *all.get(self.number()? as usize)?;
                let (ids, offsets, has_types) = (self.list()?, self.list()?, self.number()? == 1);
                Order::Forward { wanted, ids, offsets, type_ids: Some(self.list()?).filter(|_| has_types) }
            }
            2 => Order::Open(self.number()?),
            3 => {
                let (session, copies) = (self.number()?, self.pairs()?);
                let (blocks, rest) = self.0.split_first_chunk()?;
                self.0 = rest;
                Order::Resize { session, copies, blocks: u64::from_le_bytes(*blocks) }
            }
            4 => Order::Step { session: self.number()?, copies: self.pairs()?, batch: self.batch()? },
            5 => Order::Drop(self.number()?),
            6 => Order::Close,
            _ => return None,
        };
        self.0.is_empty().then_some(order)
    }

    fn number(&mut self) -> Option<u32> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_le_bytes(*number))
    }

    fn list(&mut self) -> Option<Vec<u32>> {
        let count = self.number()? as usize;
        let (numbers, rest) = self.0.split_at_checked(count.checked_mul(size_of::<u32>())?)?;
        self.0 = rest;
        Some(numbers.as_chunks().0.iter().map(|number| u32::from_le_bytes(*number)).collect())
    }

    fn pairs(&mut self) -> Option<Vec<[u32; 2]>> {
        Some(self.list()?.as_chunks().0.to_vec())
    }

    fn batch(&mut self) -> Option<StepBatch> {
        let tokens = self.list()?;
        let mut first = 0;
        let mut sequences = Vec::new();
        for _ in 0..self.number()? {
            let end = first + self.number()? as usize;
            let start = self.number()? as usize;
            let logits = *[Logits::None, Logits::Last, Logits::All].get(self.number()? as usize)?;
            sequences.push(StepSequence { tokens: first..end, start, blocks: self.list()?, logits });
            first = end;
        }
        Some(StepBatch { tokens, sequences })
    }
}

#[cfg(test)]
mod tests {
    use super::{Order, Wanted};
    use crate::generate::{Logits, StepBatch, StepSequence};

    #[test]
    fn an_order_comes_back_from_its_bytes_and_nothing_else_does() {
        let sequence = |tokens, start, logits| StepSequence { tokens, start, blocks: vec![7, 0, start as u32], logits };
        let sequences =
            vec![sequence(0..2, 40, Logits::None), sequence(2..3, 0, Logits::Last), sequence(3..5, 16, Logits::All)];
        let orders = [
            Order::Compare("a model".to_owned()),
            Order::Forward {
                wanted: Wanted::Logits,
                ids: vec![1, 2, u32::MAX],
                offsets: vec![0, 3],
                type_ids: Some(vec![0, 1, 1]),
            },
            Order::Forward { wanted: Wanted::Hidden, ids: vec![4], offsets: vec![0, 1], type_ids: None },
            Order::Open(3),
            Order::Resize { session: 3, copies: vec![[1, 2], [3, 4]], blocks: u64::MAX },
            Order::Step { session: 3, copies: vec![], batch: StepBatch { tokens: vec![5; 5], sequences } },
            Order::Drop(3),
            Order::Close,
        ];
        for order in orders {
            let bytes = order.to_bytes();
            assert_eq!(Order::from_bytes(&bytes).unwrap(), order);
            if !matches!(order, Order::Compare(_)) {
                assert!((0..bytes.len()).all(|length| Order::from_bytes(&bytes[..length]).is_err()));
            }
        }
        assert!(Order::from_bytes(&[9, 0, 0, 0]).is_err());
    }
}
