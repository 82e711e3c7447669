//! Rows of float32 as signed bytes: each 64 numbers in a row share a scale, which maps the greatest of them to 127.

use std::cell::Cell;

use super::pack::Line;

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
    /// A block to a line.
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
    pub(super) fn quantize(&mut self, x: &[f32], rows: usize, k: usize) {
        let blocks = k.div_ceil(BLOCK);
        self.bytes.resize(rows * blocks, Line::ZERO);
        self.scales.resize(rows * blocks, 0.0);
        self.sums.resize(rows * blocks, 0);
        if k == 0 {
            return;
        }
        let lines = self.bytes.chunks_exact_mut(blocks);
        let scales = self.scales.chunks_exact_mut(blocks).zip(self.sums.chunks_exact_mut(blocks));
        for ((row, lines), (scales, sums)) in x.chunks_exact(k).zip(lines).zip(scales) {
            for (block, numbers) in row.chunks(BLOCK).enumerate() {
                let bytes = lines[block].bytes_mut();
                let scale = match numbers.try_into() {
                    Ok(numbers) => quantize_block(numbers, bytes),
                    Err(_) => {
                        let mut whole = [0.0; BLOCK];
                        whole[..numbers.len()].copy_from_slice(numbers);
                        quantize_block(&whole, bytes)
                    }
                };
                scales[block] = scale;
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

/// Rounds a block to the nearest multiples of its scale, ties to even, and returns the scale. A block with a number that is
/// not finite gets the scale NaN, and so does all that comes of it.
#[inline(always)]
pub(super) fn quantize_block(numbers: &[f32; BLOCK], bytes: &mut [u8; BLOCK]) -> f32 {
    // The order of magnitudes is that of their bits, and NaN's are the greatest.
    let greatest = numbers.iter().map(|number| number.to_bits() & 0x7fff_ffff).fold(0, u32::max);
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
    for (byte, number) in bytes.iter_mut().zip(numbers) {
        // SAFETY: the product is finite, and a number of at most 128.
        let rounded: i32 = unsafe { (number * inverse).round_ties_even().to_int_unchecked() };
        *byte = rounded as u8;
    }
    greatest / 127.0
}
