//! A model whose logits depend on all that its paged cache says of a sequence, and that minds how it is used.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use candle_engine::generate::{BLOCK_TOKENS, Logits, StepBatch, StepModel, StepSequence};
use candle_engine::{Error, Result};

pub const VOCAB: usize = 48;
pub const POSITIONS: usize = 160;
pub const BLOCK_BYTES: usize = 1000;

/// A slot of the cache: what a layer would keep of a position. It depends on all tokens up to there, as keys and values
/// above the first layer do.
#[derive(Clone, Copy, Debug, Default)]
pub struct Slot {
    state: u64,
    position: usize,
    is_written: bool,
}

#[derive(Debug, Default)]
pub struct Toy {
    pub slots: Vec<Slot>,
    /// Rounds the logits, so that many are equal.
    pub is_coarse: bool,
    /// Sequences whose last token is this get logits that are no numbers.
    pub poison: Option<u32>,
    /// Steps until one fails.
    pub fails_in: Option<usize>,
    /// Tokens that entered the model, for a look from outside.
    pub entered: Arc<AtomicU64>,
    /// Tokens of each step.
    pub steps: Arc<Mutex<Vec<usize>>>,
}

fn mix(a: u64, b: u64) -> u64 {
    // SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014).
    let mut z = a.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(b).wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl Toy {
    fn slot(sequence: &StepSequence, position: usize) -> usize {
        sequence.blocks[position / BLOCK_TOKENS] as usize * BLOCK_TOKENS + position % BLOCK_TOKENS
    }

    /// What the cache says of the first `length` positions: attention over all of them.
    fn read(&self, sequence: &StepSequence, length: usize) -> u64 {
        (0..length).fold(0, |state, position| {
            let slot = self.slots[Self::slot(sequence, position)];
            assert!(slot.is_written && slot.position == position, "position {position} is not in the cache");
            mix(state, slot.state)
        })
    }

    /// Sequences may read what others hold, but what one writes no other may touch.
    fn check_writers(batch: &StepBatch) {
        let written = |sequence: &StepSequence| {
            let first = sequence.start / BLOCK_TOKENS;
            sequence.blocks[first..].to_vec()
        };
        for (index, sequence) in batch.sequences.iter().enumerate() {
            assert!(!sequence.tokens.is_empty());
            assert_eq!(sequence.blocks.len(), (sequence.start + sequence.tokens.len()).div_ceil(BLOCK_TOKENS));
            for (other, reader) in batch.sequences.iter().enumerate() {
                if index != other {
                    let clash = written(sequence).into_iter().find(|block| reader.blocks.contains(block));
                    assert_eq!(clash, None, "a block is written by one sequence and held by another");
                }
            }
        }
    }

    fn logits(&self, state: u64, last: u32) -> impl Iterator<Item = f32> {
        let (is_coarse, poison) = (self.is_coarse, self.poison);
        (0..VOCAB as u64).map(move |id| {
            if poison == Some(last) {
                return f32::NAN;
            }
            let value = (mix(state, id) >> 40) as f32 / (1u64 << 24) as f32 * 8.0 - 4.0;
            if is_coarse { value.round() } else { value }
        })
    }
}

impl StepModel for Toy {
    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn max_positions(&self) -> usize {
        POSITIONS
    }

    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn resize_cache(&mut self, blocks: usize) -> Result<()> {
        self.slots = vec![Slot::default(); blocks * BLOCK_TOKENS];
        Ok(())
    }

    fn step(&mut self, batch: &StepBatch, logits: &mut Vec<f32>) -> Result<()> {
        match &mut self.fails_in {
            Some(0) => {
                self.fails_in = None;
                return Err(Error::internal("the model failed: `once`"));
            }
            Some(left) => *left -= 1,
            None => {}
        }
        Self::check_writers(batch);
        logits.clear();
        self.entered.fetch_add(batch.tokens.len() as u64, Ordering::Relaxed);
        self.steps.lock().unwrap().push(batch.tokens.len());
        for sequence in &batch.sequences {
            let tokens = &batch.tokens[sequence.tokens.clone()];
            for (index, token) in tokens.iter().enumerate() {
                let position = sequence.start + index;
                let state = mix(mix(self.read(sequence, position), u64::from(*token)), position as u64);
                self.slots[Self::slot(sequence, position)] = Slot { state, position, is_written: true };
                let is_last = index + 1 == tokens.len();
                if sequence.logits == Logits::All || (sequence.logits == Logits::Last && is_last) {
                    logits.extend(self.logits(self.read(sequence, position + 1), *token));
                }
            }
        }
        Ok(())
    }

    fn copy_block(&mut self, from: u32, to: u32) -> Result<()> {
        let (from, to) = (from as usize * BLOCK_TOKENS, to as usize * BLOCK_TOKENS);
        self.slots.copy_within(from..from + BLOCK_TOKENS, to);
        Ok(())
    }
}

/// The logits after each of the sequences, computed with a cache of their own.
pub fn logits_after(sequence: &[u32], is_coarse: bool) -> Vec<f32> {
    let mut model = Toy { is_coarse, ..Toy::default() };
    let blocks = sequence.len().div_ceil(BLOCK_TOKENS);
    model.resize_cache(blocks).unwrap();
    let mut logits = Vec::new();
    let alone = StepSequence {
        tokens: 0..sequence.len(),
        start: 0,
        blocks: (0..blocks as u32).rev().collect(),
        logits: Logits::Last,
    };
    model.step(&StepBatch { tokens: sequence.to_vec(), sequences: vec![alone] }, &mut logits).unwrap();
    logits
}
