//! Rows of float32 as signed bytes: each 64 numbers in a row are mixed with each other, and share a scale, which maps the
//! greatest of what comes out to 127.

use std::cell::Cell;

use super::pack::{CACHED_BYTES, Line, bytes_of_mut};
use super::simd::{Op, Simd};

/// Numbers that share a scale. Where a row is no multiple of it, zeros follow.
pub(super) const BLOCK: usize = 64;

/// Lanes of the narrowest register.
const LEAST_LANES: usize = 4;

/// A block whose numbers are all below this counts as zeros: their scale would be no normal number.
const LEAST: f32 = 1e-30;

thread_local! {
    /// What this thread has quantised. A product takes them and puts them back: no borrow is held meanwhile.
    static ROWS: Cell<QuantizedRows> = const { Cell::new(QuantizedRows::NONE) };
}

/// Rows of signed bytes in blocks with a scale each, as products with weights in int8 take them.
#[derive(Debug)]
pub struct QuantizedRows {
    rows: usize,
    /// Numbers of a row, and its blocks.
    k: usize,
    blocks: usize,
    bytes: Vec<Line>,
    scales: Vec<f32>,
    /// What the products with each block begin at: less what the weights' bytes are more than they are.
    starts: Vec<i32>,
}

/// Some rows that follow each other, to be quantised.
#[derive(Debug)]
pub struct QuantizedPart<'a> {
    k: usize,
    blocks: usize,
    bytes: &'a mut [u8],
    scales: &'a mut [f32],
    starts: &'a mut [i32],
}

impl QuantizedRows {
    const NONE: QuantizedRows =
        QuantizedRows { rows: 0, k: 0, blocks: 0, bytes: Vec::new(), scales: Vec::new(), starts: Vec::new() };

    /// Calls `work` with this thread's, whose allocation stays.
    pub fn with<T>(work: impl FnOnce(&mut QuantizedRows) -> T) -> T {
        let mut rows = ROWS.replace(Self::NONE);
        let result = work(&mut rows);
        ROWS.set(rows);
        result
    }

    /// As many rows of `k` numbers as are worth quantising at a time.
    pub fn most_rows(k: usize) -> usize {
        (CACHED_BYTES / k.max(1)).max(1)
    }

    /// Makes room for `rows` rows of `k` numbers, whose content is whatever was there.
    pub fn reshape(&mut self, rows: usize, k: usize) {
        let blocks = k.div_ceil(BLOCK);
        (self.rows, self.k, self.blocks) = (rows, k, blocks);
        let lines = (rows * blocks * BLOCK).div_ceil(size_of::<Line>());
        if self.bytes.len() < lines {
            self.bytes.resize(lines, Line::ZERO);
        }
        if self.scales.len() < rows * blocks {
            self.scales.resize(rows * blocks, 0.0);
            self.starts.resize(rows * blocks, 0);
        }
    }

    /// The rows in parts of `rows`, the last one maybe shorter. Rows of no numbers have no parts.
    pub fn parts_mut(&mut self, rows: usize) -> impl Iterator<Item = QuantizedPart<'_>> {
        let (k, blocks) = (self.k, self.blocks);
        let count = self.rows * blocks;
        let bytes = bytes_of_mut(&mut self.bytes)[..count * BLOCK].chunks_mut((rows * blocks * BLOCK).max(1));
        let scales = self.scales[..count].chunks_mut((rows * blocks).max(1));
        let starts = self.starts[..count].chunks_mut((rows * blocks).max(1));
        let parts = bytes.zip(scales.zip(starts));
        parts.map(move |(bytes, (scales, starts))| QuantizedPart { k, blocks, bytes, scales, starts })
    }

    /// How many rows there are, and how many numbers each has.
    pub(super) fn shape(&self) -> (usize, usize) {
        (self.rows, self.k)
    }

    /// The bytes, row after row.
    pub(super) fn bytes(&self) -> *const u8 {
        self.bytes.as_ptr().cast()
    }

    /// The scales of `rows` rows from `row` on.
    #[inline(always)]
    pub(super) fn scales(&self, row: usize, rows: usize) -> &[f32] {
        &self.scales[row * self.blocks..][..rows * self.blocks]
    }

    /// The starts of `rows` rows from `row` on.
    #[inline(always)]
    pub(super) fn starts(&self, row: usize, rows: usize) -> &[i32] {
        &self.starts[row * self.blocks..][..rows * self.blocks]
    }
}

/// Quantises rows, one after the other.
pub(super) struct Quantize<'a> {
    pub(super) x: &'a [f32],
    pub(super) to: QuantizedPart<'a>,
}

impl Op for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        let Quantize { x, to } = self;
        assert_eq!(x.len() / to.k * to.blocks, to.scales.len(), "x is not the part's rows");
        let bytes = to.bytes.chunks_exact_mut(to.blocks * BLOCK);
        let scales = to.scales.chunks_exact_mut(to.blocks).zip(to.starts.chunks_exact_mut(to.blocks));
        for ((row, bytes), (scales, starts)) in x.chunks_exact(to.k).zip(bytes).zip(scales) {
            for (block, (numbers, bytes)) in row.chunks(BLOCK).zip(bytes.as_chunks_mut().0).enumerate() {
                let (scale, sum) = quantize_block(s, numbers, bytes);
                (scales[block], starts[block]) = (scale, -S::BYTE_EXCESS * sum);
            }
        }
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
    let mut rest;
    let from = match numbers.len() {
        BLOCK => numbers.as_ptr(),
        len => {
            rest = [0.0; BLOCK];
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
    mix(lanes, |a, b| (s.add(a, b), s.sub(a, b)));

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
    mix(&mut block, |a, b| (a + b, a - b));
    block
}

/// The Walsh-Hadamard transform of a power of two of numbers, or of registers lane by lane; `butterfly` gives sum and
/// difference.
#[inline(always)]
fn mix<T: Copy>(values: &mut [T], butterfly: impl Fn(T, T) -> (T, T)) {
    let mut step = 1;
    while step < values.len() {
        for pair in values.chunks_exact_mut(2 * step) {
            let (a, b) = pair.split_at_mut(step);
            a.iter_mut().zip(b).for_each(|(a, b)| (*a, *b) = butterfly(*a, *b));
        }
        step *= 2;
    }
}
