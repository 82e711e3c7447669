//! The cache of keys and values on the CPU: blocks of tokens, each a page per layer.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::backend::KeyValueCache;
use crate::cpu::{PAGE_TOKENS, PageShape, Pages, PagesView, SharedPages};
use crate::error::{Error, Result};
use crate::generate::{BLOCK_TOKENS, StepSequence};

const _: () = assert!(BLOCK_TOKENS == PAGE_TOKENS);

/// Keys and values by layer and block.
#[derive(Debug)]
pub struct PagedCache {
    shape: PageShape,
    layers: Vec<Pages>,
    blocks: usize,
    /// Nanoseconds of writing and reading it so far.
    busy: AtomicU64,
}

/// What some sequences of a step have of a cache: the blocks that they write are theirs alone.
#[derive(Debug)]
pub struct CachePart<'a> {
    layers: Vec<SharedPages<'a>>,
    sequences: &'a [StepSequence],
    targets: Vec<Target>,
    /// How many parts of the step go on at the same time.
    parts: u32,
    busy: &'a AtomicU64,
}

/// Tokens to be written into one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The block.
    pub block: usize,
    /// The place of the first in the block.
    pub slot: usize,
    /// Which rows of the batch.
    pub rows: Range<usize>,
}

impl PagedCache {
    /// A cache without blocks.
    pub fn new(layers: usize, shape: PageShape) -> Self {
        let layers = (0..layers).map(|_| Pages::new(shape)).collect();
        Self { shape, layers, blocks: 0, busy: AtomicU64::new(0) }
    }
}

impl<'a> CachePart<'a> {
    /// The sequences.
    pub fn sequences(&self) -> &'a [StepSequence] {
        self.sequences
    }

    /// The pages of a layer that the sequences' new tokens go to, and which tokens these are.
    pub fn writes(&mut self, layer: usize) -> Vec<(&mut [u8], &Target)> {
        let pages = self.layers[layer];
        // SAFETY: no two targets have a block in common, other parts do not touch these, and the borrow is exclusive.
        self.targets.iter().map(|target| (unsafe { pages.page_mut(target.block) }, target)).collect()
    }

    /// All pages of a layer, of which the sequences' own may be read.
    pub fn pages(&self, layer: usize) -> PagesView<'_> {
        // SAFETY: what the sequences have is written through this part alone, which is borrowed.
        unsafe { self.layers[layer].view() }
    }

    /// Notes what time a layer took.
    pub fn add_time(&self, time: Duration) {
        self.busy.fetch_add((time / self.parts).as_nanos() as u64, Ordering::Relaxed);
    }
}

impl KeyValueCache for PagedCache {
    type Part<'a> = CachePart<'a>;

    fn blocks(&self) -> usize {
        self.blocks
    }

    fn block_bytes(&self) -> usize {
        self.layers.len() * self.shape.bytes()
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

    fn are_apart(&self, lanes: &[Vec<StepSequence>]) -> bool {
        const NOBODY: u32 = u32::MAX;
        if lanes.len() == 1 {
            return true;
        }
        let mut writers = vec![NOBODY; self.blocks];
        let mut lanes_of_blocks = (0..).zip(lanes);
        let write = |(lane, sequences): (u32, &Vec<StepSequence>)| {
            targets(sequences).into_iter().all(|target| {
                let before = std::mem::replace(&mut writers[target.block], lane);
                before == NOBODY || before == lane
            })
        };
        lanes_of_blocks.all(write)
            && (0..).zip(lanes).all(|(lane, sequences)| {
                let mut blocks = sequences.iter().flat_map(|sequence| &sequence.blocks);
                blocks.all(|block| [NOBODY, lane].contains(&writers[*block as usize]))
            })
    }

    fn parts<'a>(&'a mut self, lanes: &'a [Vec<StepSequence>]) -> Vec<CachePart<'a>> {
        assert!(self.are_apart(lanes), "two parts touch the same block");
        let used = lanes.iter().flatten().flat_map(|sequence| &sequence.blocks).max();
        let used = used.map_or(0, |block| *block as usize + 1);
        assert!(used <= self.blocks, "a sequence has a block that is not there");
        self.layers.iter_mut().for_each(|pages| pages.touch(used));
        let layers: Vec<_> = self.layers.iter_mut().map(Pages::shared).collect();
        let (parts, busy) = (lanes.len() as u32, &self.busy);
        let part = |sequences: &'a Vec<StepSequence>| {
            let mut targets = targets(sequences);
            // A block that two of them want goes to the first.
            targets.dedup_by_key(|target| target.block);
            CachePart { layers: layers.clone(), sequences, targets, parts, busy }
        };
        lanes.iter().map(part).collect()
    }

    fn copy(&mut self, from: usize, to: usize) -> Result<()> {
        assert!(from < self.blocks && to < self.blocks, "no such block");
        self.layers.iter_mut().for_each(|pages| pages.copy(from, to));
        Ok(())
    }

    fn attention_s(&self) -> f64 {
        Duration::from_nanos(self.busy.load(Ordering::Relaxed)).as_secs_f64()
    }
}

/// Everything that `sequences` write, in the order of blocks.
pub fn targets(sequences: &[StepSequence]) -> Vec<Target> {
    let mut targets = Vec::new();
    for sequence in sequences {
        let mut row = sequence.tokens.start;
        while row < sequence.tokens.end {
            let position = sequence.start + row - sequence.tokens.start;
            let slot = position % BLOCK_TOKENS;
            let end = sequence.tokens.end.min(row + BLOCK_TOKENS - slot);
            targets.push(Target { block: sequence.blocks[position / BLOCK_TOKENS] as usize, slot, rows: row..end });
            row = end;
        }
    }
    targets.sort_by_key(|target| target.block);
    targets
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::PageNumbers;
    use crate::generate::Logits;

    fn sequence(tokens: Range<usize>, start: usize, blocks: &[u32]) -> StepSequence {
        StepSequence { tokens, start, blocks: blocks.to_vec(), logits: Logits::Last }
    }

    fn cache(blocks: usize) -> PagedCache {
        let mut cache = PagedCache::new(2, PageShape { kv_heads: 1, head_dim: 4, numbers: PageNumbers::Float32 });
        cache.resize(blocks).unwrap();
        cache
    }

    #[test]
    fn parts_are_apart_unless_one_touches_what_another_writes() {
        let cache = cache(8);
        // A common beginning is only read.
        let [one, other] = [sequence(0..1, 16, &[0, 1]), sequence(0..3, 17, &[0, 2])];
        assert!(cache.are_apart(&[vec![one.clone()], vec![other.clone()]]));
        let reader = sequence(0..1, 32, &[2, 3, 4]);
        assert!(!cache.are_apart(&[vec![one.clone()], vec![other.clone()], vec![reader.clone()]]));
        assert!(cache.are_apart(&[vec![one.clone()], vec![other, reader]]));
        assert!(!cache.are_apart(&[vec![one.clone()], vec![sequence(0..1, 17, &[0, 1])]]));
        assert!(!cache.are_apart(&[vec![sequence(0..2, 15, &[0, 5])], vec![one]]));
    }

    #[test]
    #[should_panic(expected = "two parts touch the same block")]
    fn parts_that_are_not_apart_are_never_given() {
        let mut cache = cache(4);
        let lanes = [vec![sequence(0..1, 0, &[1])], vec![sequence(0..1, 0, &[1])]];
        cache.parts(&lanes);
    }

    #[test]
    fn each_block_is_written_once() {
        let mut cache = cache(4);
        let lanes = [vec![sequence(0..20, 10, &[2, 3]), sequence(20..21, 3, &[3])]];
        let mut parts = cache.parts(&lanes);
        let found: Vec<_> = parts[0].writes(1).into_iter().map(|(_, target)| target.clone()).collect();
        let target = |block, slot, rows| Target { block, slot, rows };
        assert_eq!(found, [target(2, 10, 0..6), target(3, 0, 6..20)]);
    }
}
