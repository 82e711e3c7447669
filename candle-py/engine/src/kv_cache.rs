//! The cache of keys and values on the CPU: blocks of tokens, each a page per layer.

use std::ops::Range;

use crate::backend::KeyValueCache;
use crate::cpu::{PAGE_TOKENS, PageShape, Pages};
use crate::error::{Error, Result};
use crate::generate::{BLOCK_TOKENS, StepSequence};

const _: () = assert!(BLOCK_TOKENS == PAGE_TOKENS);

/// Keys and values by layer and block.
#[derive(Debug)]
pub struct PagedCache {
    shape: PageShape,
    layers: Vec<Pages>,
    blocks: usize,
    /// Seconds of writing and reading it so far.
    pub attention_s: f64,
}

/// Tokens to be written into one page.
#[derive(Debug)]
pub struct PageWrite<'a> {
    /// The page.
    pub page: &'a mut [f32],
    /// The place of the first in the page.
    pub slot: usize,
    /// Which rows of the batch.
    pub rows: Range<usize>,
}

impl PagedCache {
    /// A cache without blocks.
    pub fn new(layers: usize, shape: PageShape) -> Self {
        Self { shape, layers: (0..layers).map(|_| Pages::new(shape)).collect(), blocks: 0, attention_s: 0.0 }
    }

    /// How a page is laid out.
    pub fn shape(&self) -> PageShape {
        self.shape
    }

    /// All pages of a layer that are in use.
    pub fn pages(&self, layer: usize) -> &[f32] {
        self.layers[layer].floats()
    }

    /// The pages of a layer that the new tokens of `sequences` go to. A block that two of them want goes to the first.
    pub fn writes(&mut self, layer: usize, sequences: &[StepSequence]) -> Vec<PageWrite<'_>> {
        let floats = self.shape.floats();
        let mut rest = self.layers[layer].floats_mut();
        let mut next_block = 0;
        let mut writes = Vec::new();
        for (block, slot, rows) in targets(sequences) {
            if block < next_block {
                continue;
            }
            let (_, from) = std::mem::take(&mut rest).split_at_mut((block - next_block) * floats);
            let (page, later) = from.split_at_mut(floats);
            (rest, next_block) = (later, block + 1);
            writes.push(PageWrite { page, slot, rows });
        }
        writes
    }
}

impl KeyValueCache for PagedCache {
    fn blocks(&self) -> usize {
        self.blocks
    }

    fn block_bytes(&self) -> usize {
        self.layers.len() * self.shape.floats() * size_of::<f32>()
    }

    fn resize(&mut self, blocks: usize) -> Result<()> {
        let is_there = self.layers.iter_mut().all(|pages| pages.reserve(blocks));
        self.blocks = if is_there { blocks } else { 0 };
        if !is_there {
            self.layers.iter_mut().for_each(|pages| *pages = Pages::new(self.shape));
            return Err(Error::device(format!("memory is too small for a cache of so many blocks: `{blocks}`"))
                .with_hint("give the cache fewer bytes"));
        }
        Ok(())
    }

    fn touch(&mut self, count: usize) {
        self.layers.iter_mut().for_each(|pages| pages.touch(count));
    }

    fn copy(&mut self, from: usize, to: usize) -> Result<()> {
        assert!(from < self.blocks && to < self.blocks, "no such block");
        self.layers.iter_mut().for_each(|pages| pages.copy(from, to));
        Ok(())
    }

    fn attention_s(&self) -> f64 {
        self.attention_s
    }
}

/// Block, first place in it, and rows of the batch, of everything that `sequences` write; in the order of blocks.
pub fn targets(sequences: &[StepSequence]) -> Vec<(usize, usize, Range<usize>)> {
    let mut targets = Vec::new();
    for sequence in sequences {
        let mut row = sequence.tokens.start;
        while row < sequence.tokens.end {
            let position = sequence.start + row - sequence.tokens.start;
            let slot = position % BLOCK_TOKENS;
            let end = sequence.tokens.end.min(row + BLOCK_TOKENS - slot);
            targets.push((sequence.blocks[position / BLOCK_TOKENS] as usize, slot, row..end));
            row = end;
        }
    }
    targets.sort_unstable_by_key(|(block, ..)| *block);
    targets
}
