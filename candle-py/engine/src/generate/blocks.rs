//! Who holds which cache block: reference counts, free blocks, and full blocks found again by what they hold. Knows
//! nothing of requests or of the cache's memory.
//!
//! A full block's content is all tokens up to its end: its own and those of the blocks before it. Contents are numbered,
//! and a block is found under the number of the block before it and its own tokens, so two blocks are taken for equal
//! only when they are. A block that nobody holds any more keeps its content until its place is needed; the one that went
//! unused longest goes first. (The idea of paging: Kwon et al., arXiv:2309.06180.)

use std::collections::{BTreeMap, HashMap};

use super::step::BLOCK_TOKENS;

/// The content before the first block.
const NOTHING: u64 = 0;

/// Blocks that `tokens` positions take.
pub fn blocks_of(tokens: usize) -> usize {
    tokens.div_ceil(BLOCK_TOKENS)
}

/// The content before a block, and the block's tokens.
type Key = (u64, [u32; BLOCK_TOKENS]);

/// A content and where it is.
#[derive(Debug)]
struct Content {
    number: u64,
    /// `None` while a sequence is about to compute it.
    block: Option<u32>,
}

#[derive(Clone, Debug, Default)]
struct Block {
    holders: u32,
    /// What it holds, where others may find it.
    key: Option<Key>,
    /// Its place among the idle ones.
    idle_since: u64,
}

/// What of a sequence the cache holds already.
#[derive(Debug, Default)]
pub struct Found {
    /// The blocks, from the sequence's start on.
    pub blocks: Vec<u32>,
    /// Their contents.
    contents: Vec<u64>,
    /// The next block is about to be computed for another sequence: it is worth waiting for.
    pub is_coming: bool,
}

/// The blocks that a sequence holds.
#[derive(Debug, Default)]
pub struct Table {
    /// The blocks, in the order of positions.
    pub blocks: Vec<u32>,
    /// Contents of its first full blocks: those computed, then those promised.
    contents: Vec<u64>,
    /// Full blocks that are computed and may be found.
    sealed: usize,
}

impl Table {
    /// The content before block `index`.
    fn before(&self, index: usize) -> u64 {
        if index == 0 { NOTHING } else { self.contents[index - 1] }
    }
}

/// All blocks of a cache.
#[derive(Debug)]
pub struct Blocks {
    blocks: Vec<Block>,
    /// Hold nothing; the last is taken first.
    free: Vec<u32>,
    /// Held by nobody, but their content may be found; by the time since when.
    idle: BTreeMap<u64, u32>,
    contents: HashMap<Key, Content>,
    clock: u64,
}

impl Blocks {
    /// A cache of `count` blocks.
    pub fn new(count: u32) -> Self {
        Self {
            blocks: vec![Block::default(); count as usize],
            free: (0..count).rev().collect(),
            idle: BTreeMap::new(),
            contents: HashMap::new(),
            clock: NOTHING,
        }
    }

    /// Blocks in all.
    pub fn total(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that can be taken.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Blocks that nobody holds but whose content is kept.
    pub fn kept(&self) -> usize {
        self.idle.len()
    }

    /// What of `tokens` is there; the last token never counts, since its logits are wanted.
    pub fn find(&self, tokens: &[u32]) -> Found {
        let mut found = Found::default();
        let mut before = NOTHING;
        for tokens in tokens[..tokens.len().saturating_sub(1)].as_chunks().0 {
            match self.contents.get(&(before, *tokens)) {
                Some(Content { number, block: Some(block) }) => {
                    found.blocks.push(*block);
                    found.contents.push(*number);
                    before = *number;
                }
                Some(_) => {
                    found.is_coming = true;
                    break;
                }
                None => break,
            }
        }
        found
    }

    /// Available blocks that a sequence of `tokens` tokens would use up, those found included.
    pub fn cost(&self, tokens: usize, found: &Found) -> usize {
        let held = found.blocks.iter().filter(|block| self.blocks[**block as usize].holders > 0).count();
        blocks_of(tokens) - held
    }

    /// Takes what was found and the blocks for the rest of `tokens`, and promises the full ones among these to others;
    /// `None`, and nothing done, where there are not enough.
    pub fn enter(&mut self, tokens: &[u32], found: Found) -> Option<Table> {
        if self.cost(tokens.len(), &found) > self.available() {
            return None;
        }
        let sealed = found.blocks.len();
        let mut table = Table { blocks: found.blocks, contents: found.contents, sealed };
        table.blocks.iter().for_each(|block| self.hold(*block));
        while table.blocks.len() < blocks_of(tokens.len()) {
            table.blocks.push(self.take()?);
        }
        for tokens in &tokens.as_chunks().0[sealed..] {
            let key = (table.contents.last().copied().unwrap_or(NOTHING), *tokens);
            let number = self.next();
            let content = self.contents.entry(key).or_insert(Content { number, block: None });
            table.contents.push(content.number);
        }
        Some(table)
    }

    /// An empty block with one holder.
    pub fn take(&mut self) -> Option<u32> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => {
                let (_, block) = self.idle.pop_first()?;
                if let Some(key) = self.blocks[block as usize].key.take() {
                    self.contents.remove(&key);
                }
                block
            }
        };
        self.blocks[block as usize].holders = 1;
        Some(block)
    }

    /// Whether more than one sequence holds the block.
    pub fn is_shared(&self, block: u32) -> bool {
        self.blocks[block as usize].holders > 1
    }

    /// Notes that the first `computed` of `tokens` are in the table's blocks, so that others find the full ones. A block
    /// that is there already takes the place of the table's own.
    pub fn seal(&mut self, table: &mut Table, tokens: &[u32], computed: usize) {
        for (index, own_tokens) in tokens[..computed].as_chunks().0.iter().enumerate().skip(table.sealed) {
            let key = (table.before(index), *own_tokens);
            let promised = table.contents.get(index).copied();
            let number = promised.unwrap_or_else(|| self.next());
            let content = self.contents.entry(key).or_insert(Content { number, block: None });
            let (number, own) = (content.number, table.blocks[index]);
            let kept = *content.block.get_or_insert(own);
            if kept == own {
                self.blocks[own as usize].key = Some(key);
            } else {
                self.hold(kept);
                self.give_up(own);
                table.blocks[index] = kept;
            }
            if promised != Some(number) {
                // The later promises follow a number that this content had before it was dropped and came back.
                self.withdraw(table, tokens, index + 1);
                table.contents.truncate(index);
                table.contents.push(number);
            }
            table.sealed = index + 1;
        }
    }

    /// A second table of the same blocks.
    pub fn share(&mut self, table: &Table) -> Table {
        table.blocks.iter().for_each(|block| self.hold(*block));
        let contents = table.contents[..table.sealed].to_vec();
        Table { blocks: table.blocks.clone(), contents, sealed: table.sealed }
    }

    /// Gives a table's blocks up and takes its promises for `tokens` back.
    pub fn leave(&mut self, table: Table, tokens: &[u32]) {
        self.withdraw(&table, tokens, table.sealed);
        // From the end, so that the start of a sequence, which others are likelier to share, is kept longest, and no
        // block is kept after one before it.
        table.blocks.iter().rev().for_each(|block| self.give_up(*block));
    }

    /// Takes the promises from block `first` on back.
    fn withdraw(&mut self, table: &Table, tokens: &[u32], first: usize) {
        for (index, number) in table.contents.iter().enumerate().skip(first) {
            let Some(own_tokens) = tokens.as_chunks().0.get(index) else { break };
            let key = (table.before(index), *own_tokens);
            if self.contents.get(&key).is_some_and(|found| found.number == *number && found.block.is_none()) {
                self.contents.remove(&key);
            }
        }
    }

    /// Ends one holder's hold on a block.
    pub fn give_up(&mut self, block: u32) {
        let now = self.next();
        let entry = &mut self.blocks[block as usize];
        entry.holders -= 1;
        if entry.holders == 0 {
            if entry.key.is_some() {
                entry.idle_since = now;
                self.idle.insert(now, block);
            } else {
                self.free.push(block);
            }
        }
    }

    fn hold(&mut self, block: u32) {
        let entry = &mut self.blocks[block as usize];
        if entry.holders == 0 {
            self.idle.remove(&entry.idle_since);
        }
        entry.holders += 1;
    }

    fn next(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }
}

#[cfg(test)]
mod tests;
