//! Rows of float32 as signed bytes: each 64 numbers in a row are mixed with each other, and share a scale, which maps the
//! greatest of what comes out to 127.

use std::cell::Cell;

use super::pack::{Line, bytes_of_mut};
use super::simd::Simd;

/// Numbers that share a scale. Where a row is no multiple of it, zeros follow.
pub(super) const BLOCK: usize = 64;

/// A block whose numbers are all below this counts as zeros: their scale would be no normal number.
const LEAST: f32 = 1e-30;

thread_local! {
    /// What this thread has quantised. A product takes them and puts them back: no borrow is held meanwhile.
    static ROWS: Cell<ByteRows> = const { Cell::new(ByteRows::NONE) };
}

/// Quantised rows, each of `blocks` blocks.
pub(super) struct ByteRows {
    bytes: Vec<Line>,
    scales: Vec<f32>,
    /// The sum of each block's bytes.
    sums: Vec<i32>,
}

impl ByteRows {
    const NONE: ByteRows = ByteRows { bytes: Vec::new(), scales: Vec::new(), sums: Vec::new() };

    /// This thread's, to be given back.
    pub(super) fn take() -> ByteRows {
        ROWS.replace(ByteRows::NONE)
    }

    /// Keeps the allocation for the thread's next product.
    pub(super) fn give_back(self) {
        ROWS.set(self);
    }

    /// Row after row of `k` numbers.
    #[inline(always)]
    pub(super) fn quantize<S: Simd>(&mut self, s: S, x: &[f32], rows: usize, k: usize) {
        let blocks = k.div_ceil(BLOCK);
        self.bytes.resize((rows * blocks * BLOCK).div_ceil(size_of::<Line>()), Line::ZERO);
        self.scales.resize(rows * blocks, 0.0);
        self.sums.resize(rows * blocks, 0);
        if k == 0 {
            return;
        }
        let bytes = bytes_of_mut(&mut self.bytes).chunks_exact_mut(blocks * BLOCK);
        let scales = self.scales.chunks_exact_mut(blocks).zip(self.sums.chunks_exact_mut(blocks));
        for ((row, bytes), (scales, sums)) in x.chunks_exact(k).zip(bytes).zip(scales) {
            for (block, (numbers, bytes)) in row.chunks(BLOCK).zip(bytes.as_chunks_mut().0).enumerate() {
                scales[block] = quantize_block(s, numbers, bytes);
                sums[block] = bytes.iter().map(|byte| i32::from(*byte as i8)).sum();
            }
        }
    }

    /// The bytes, row after row.
    pub(super) fn bytes(&self) -> *const u8 {
        self.bytes.as_ptr().cast()
    }

    /// The scales of `rows` rows from `row` on.
    #[inline(always)]
    pub(super) fn scales(&self, row: usize, rows: usize, blocks: usize) -> &[f32] {
        &self.scales[row * blocks..][..rows * blocks]
    }

    /// The sums of `rows` rows from `row` on.
    #[inline(always)]
    pub(super) fn sums(&self, row: usize, rows: usize, blocks: usize) -> &[i32] {
        &self.sums[row * blocks..][..rows * blocks]
    }
}

/// Mixes up to a block of numbers, rounds them to the nearest multiples of a scale, ties to even, and returns the scale. A
/// block with a number that is not finite gets the scale NaN, and so does all that comes of it.
#[inline(always)]
pub(super) fn quantize_block<S: Simd>(s: S, numbers: &[f32], bytes: &mut [u8; BLOCK]) -> f32 {
    let mut block = [0.0; BLOCK];
    match <&[f32; BLOCK]>::try_from(numbers) {
        Ok(numbers) => block = *numbers,
        Err(_) => block[..numbers.len()].copy_from_slice(numbers),
    }
    mix(s, &mut block);
    // The order of magnitudes is that of their bits, and NaN's are the greatest.
    let greatest = block.iter().map(|number| number.to_bits() & 0x7fff_ffff).fold(0, u32::max);
    let greatest = f32::from_bits(greatest);
    if greatest < LEAST {
        *bytes = [0; BLOCK];
        return 0.0;
    }
    if !greatest.is_finite() {
        *bytes = [0; BLOCK];
        return f32::NAN;
    }
    let inverse = 127.0 / greatest;
    for (byte, number) in bytes.iter_mut().zip(&block) {
        // SAFETY: the product is finite, and a number of at most 128.
        let rounded: i32 = unsafe { (number * inverse).round_ties_even().to_int_unchecked() };
        *byte = rounded as u8;
    }
    greatest / 127.0
}

/// The Walsh-Hadamard transform of a block, `sqrt(BLOCK)` times an orthogonal one: it leaves products of two blocks what they
/// are but for the factor `BLOCK`, and spreads a number that stands out over all 64, which would else leave the others few
/// of the 127 steps. After Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024.
#[inline(always)]
fn mix<S: Simd>(s: S, block: &mut [f32; BLOCK]) {
    for lanes in block.chunks_exact_mut(S::LANES) {
        // SAFETY: the chunk is one register long.
        unsafe {
            let mut v = s.butterflies::<2>(s.butterflies::<1>(s.load(lanes.as_ptr())));
            if S::LANES > 4 {
                v = s.butterflies::<4>(v);
            }
            if S::LANES > 8 {
                v = s.butterflies::<8>(v);
            }
            s.store(v, lanes.as_mut_ptr());
        }
    }
    mix_from(block, S::LANES);
}

/// `mix`'s steps from `step` on.
#[inline(always)]
fn mix_from(block: &mut [f32; BLOCK], mut step: usize) {
    while step < BLOCK {
        for pair in block.chunks_exact_mut(2 * step) {
            let (a, b) = pair.split_at_mut(step);
            a.iter_mut().zip(b).for_each(|(a, b)| (*a, *b) = (*a + *b, *a - *b));
        }
        step *= 2;
    }
}

/// Numbers from a block's bytes.
pub(super) fn unquantized(bytes: impl Iterator<Item = i32>, scale: f32) -> [f32; BLOCK] {
    let mut block = [0.0; BLOCK];
    block.iter_mut().zip(bytes).for_each(|(number, byte)| *number = scale * byte as f32);
    mix_from(&mut block, 1);
    block
}
