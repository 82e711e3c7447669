//! Rows of float32 as signed bytes: each 64 numbers in a row are mixed with each other, and share a scale, which maps the
//! greatest of what comes out to 127.

use std::cell::Cell;

use super::pack::{Line, bytes_of_mut};
use super::simd::Simd;

/// Numbers that share a scale. Where a row is no multiple of it, zeros follow.
pub(super) const BLOCK: usize = 64;

/// Lanes of the narrowest register.
const LEAST_LANES: usize = 4;

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
                (scales[block], sums[block]) = quantize_block(s, numbers, bytes);
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

/// Mixes up to a block of numbers and rounds them to the nearest multiples of a scale, ties to even: the scale, and the sum of
/// the bytes. A block with a number that is not finite gets the scale NaN, and so does all that comes of it.
///
/// The mixing is the Walsh-Hadamard transform, `sqrt(BLOCK)` times an orthogonal one: it leaves products of two blocks what
/// they are but for the factor `BLOCK`, and spreads a number that stands out over all 64, which would else leave the others
/// few of the 127 steps. After Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024.
#[inline(always)]
pub(super) fn quantize_block<S: Simd>(s: S, numbers: &[f32], bytes: &mut [u8; BLOCK]) -> (f32, i32) {
    let mut rest = [0.0; BLOCK];
    let from = match numbers.len() {
        BLOCK => numbers.as_ptr(),
        len => {
            rest[..len].copy_from_slice(numbers);
            rest.as_ptr()
        }
    };
    let mut lanes = [s.splat(0.0); BLOCK / LEAST_LANES];
    let lanes = &mut lanes[..BLOCK / S::LANES];
    for (i, lanes) in lanes.iter_mut().enumerate() {
        // SAFETY: `from` has a block of numbers, `BLOCK / LANES` registers.
        let v = s.butterflies::<2>(s.butterflies::<1>(unsafe { s.load(from.add(i * S::LANES)) }));
        let v = if S::LANES > 4 { s.butterflies::<4>(v) } else { v };
        *lanes = if S::LANES > 8 { s.butterflies::<8>(v) } else { v };
    }
    let mut step = 1;
    while step < BLOCK / S::LANES {
        for pair in lanes.chunks_exact_mut(2 * step) {
            let (a, b) = pair.split_at_mut(step);
            a.iter_mut().zip(b).for_each(|(a, b)| (*a, *b) = (s.add(*a, *b), s.sub(*a, *b)));
        }
        step *= 2;
    }

    let greatest = lanes.iter().fold(s.splat(0.0), |greatest, v| s.greater_magnitude(greatest, *v));
    let greatest = s.greatest_magnitude(greatest);
    if greatest < LEAST {
        *bytes = [0; BLOCK];
        return (0.0, 0);
    }
    if !greatest.is_finite() {
        *bytes = [0; BLOCK];
        return (f32::NAN, 0);
    }
    let inverse = s.splat(127.0 / greatest);
    let mut sum = s.splat_int(0);
    for (v, bytes) in lanes.iter().zip(bytes.chunks_exact_mut(S::LANES)) {
        let rounded = s.to_int(s.mul(*v, inverse));
        sum = s.add_int(sum, rounded);
        // SAFETY: the chunk is `LANES` bytes.
        unsafe { s.store_bytes(rounded, bytes.as_mut_ptr()) };
    }
    (greatest / 127.0, s.sum_int(sum))
}

/// The numbers of a block, from its bytes and its scale.
pub(super) fn unquantized(bytes: impl Iterator<Item = i32>, scale: f32) -> [f32; BLOCK] {
    let mut block = [0.0; BLOCK];
    block.iter_mut().zip(bytes).for_each(|(number, byte)| *number = scale * byte as f32);
    let mut step = 1;
    while step < BLOCK {
        for pair in block.chunks_exact_mut(2 * step) {
            let (a, b) = pair.split_at_mut(step);
            a.iter_mut().zip(b).for_each(|(a, b)| (*a, *b) = (*a + *b, *a - *b));
        }
        step *= 2;
    }
    block
}
