//! Ragged batches: sequences one after the other without padding, checked against the model's sizes, and cut into
//! chunks of whole sequences that are computed independently.

use std::borrow::Cow;

use crate::error::{Error, Result};

/// Token ids of many sequences, as the caller gives them.
#[derive(Clone, Copy, Debug)]
pub struct Ragged<'a> {
    /// Token ids of all sequences.
    pub ids: &'a [u32],
    /// Where each sequence begins, and where the last ends: one more than there are sequences, from 0 on.
    pub offsets: &'a [u32],
    /// Token type ids, one per token id; zeros when absent.
    pub type_ids: Option<&'a [u32]>,
}

/// What a model can take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Token ids are below this.
    pub vocab_size: usize,
    /// No sequence is longer than this.
    pub max_positions: usize,
    /// Token type ids are below this; with 0 they must all be 0.
    pub type_vocab_size: usize,
}

impl<'a> Ragged<'a> {
    /// Sequences in the batch.
    pub fn rows(&self) -> usize {
        self.offsets.len().saturating_sub(1)
    }

    /// Checks offsets, ids, lengths and token types.
    ///
    /// # Errors
    /// The first fault found, naming the row and both sizes.
    pub fn check(&self, limits: &Limits) -> Result<()> {
        self.check_offsets()?;
        for row in 0..self.rows() {
            let (start, end) = (self.offsets[row] as usize, self.offsets[row + 1] as usize);
            if end - start > limits.max_positions {
                return Err(Error::input(format!(
                    "row {row} has more tokens than the {} positions of the model: `{}`",
                    limits.max_positions,
                    end - start
                ))
                .with_hint("truncate the text to the model's length"));
            }
            if let Some(id) = self.ids[start..end].iter().find(|id| **id as usize >= limits.vocab_size) {
                return Err(Error::input(format!(
                    "row {row} has a token id outside the vocabulary of {} tokens: `{id}`",
                    limits.vocab_size
                ))
                .with_hint("check that the tokenizer belongs to the model"));
            }
            let types = self.type_ids.map_or(&[][..], |types| &types[start..end]);
            if let Some(id) = types.iter().find(|id| **id as usize >= limits.type_vocab_size.max(1)) {
                return Err(Error::input(format!(
                    "row {row} has a token type id outside the {} token types of the model: `{id}`",
                    limits.type_vocab_size
                )));
            }
        }
        Ok(())
    }

    fn check_offsets(&self) -> Result<()> {
        let (Some(first), Some(last)) = (self.offsets.first(), self.offsets.last()) else {
            return Err(Error::input("offsets must have one more entry than there are rows: `[]`"));
        };
        if *first != 0 {
            return Err(Error::input(format!("offsets must start at 0: `{first}`")));
        }
        for (row, bounds) in self.offsets.windows(2).enumerate() {
            if bounds[1] == bounds[0] {
                return Err(Error::input(format!("row has no tokens: `{row}`")).with_hint("leave empty rows out"));
            }
            if bounds[1] < bounds[0] {
                return Err(Error::input(format!("offsets fall after row {row}: `{}`", bounds[1])));
            }
        }
        if *last as usize != self.ids.len() {
            return Err(Error::input(format!("offsets must end at the number of ids, {}: `{last}`", self.ids.len())));
        }
        if let Some(types) = self.type_ids.filter(|types| types.len() != self.ids.len()) {
            return Err(Error::input(format!(
                "type_ids must be as many as ids, {}: `{}`",
                self.ids.len(),
                types.len()
            )));
        }
        Ok(())
    }

    /// Cuts the batch into chunks of whole sequences. `target_tokens` says for the tokens that are left how many the next
    /// chunk may have; a longer sequence is a chunk of its own.
    pub(crate) fn chunks(&self, target_tokens: impl Fn(usize) -> usize) -> Vec<Chunk<'a>> {
        let mut chunks = Vec::new();
        let mut first = 0;
        while first < self.rows() {
            let start = self.offsets[first] as usize;
            let target_tokens = target_tokens(self.ids.len() - start);
            let fits = |row: &usize| self.offsets[*row + 1] as usize - start <= target_tokens;
            let end = (first + 1..self.rows()).take_while(fits).last().map_or(first + 1, |row| row + 1);
            chunks.push(self.chunk(first, end));
            first = end;
        }
        chunks
    }

    fn chunk(&self, first: usize, end: usize) -> Chunk<'a> {
        let tokens = self.offsets[first] as usize..self.offsets[end] as usize;
        Chunk {
            ids: &self.ids[tokens.clone()],
            type_ids: self.type_ids.map(|types| &types[tokens.clone()]),
            offsets: self.offsets[first..=end].iter().map(|offset| *offset as usize - tokens.start).collect(),
        }
    }
}

/// Some whole sequences of a batch, computed together on one thread.
#[derive(Debug)]
pub struct Chunk<'a> {
    ids: &'a [u32],
    type_ids: Option<&'a [u32]>,
    offsets: Vec<usize>,
}

impl<'a> Chunk<'a> {
    /// Token ids of all its sequences.
    pub fn ids(&self) -> &'a [u32] {
        self.ids
    }

    /// Token type ids of all its sequences.
    pub fn type_ids(&self) -> Cow<'a, [u32]> {
        self.type_ids.map_or_else(|| Cow::Owned(vec![0; self.ids.len()]), Cow::Borrowed)
    }

    /// Where each of its sequences begins, from 0 on, and where the last ends.
    pub fn offsets(&self) -> &[usize] {
        &self.offsets
    }

    /// Its sequences.
    pub fn sequences(&self) -> impl Iterator<Item = &'a [u32]> {
        self.offsets.windows(2).map(|bounds| &self.ids[bounds[0]..bounds[1]])
    }

    /// The position of every token in its sequence.
    pub fn positions(&self) -> Vec<usize> {
        self.offsets.windows(2).flat_map(|bounds| 0..bounds[1] - bounds[0]).collect()
    }

    /// How many sequences.
    pub fn rows(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Tokens of the longest of its sequences.
    pub fn longest(&self) -> usize {
        self.offsets.windows(2).map(|bounds| bounds[1] - bounds[0]).max().unwrap_or(0)
    }
}
