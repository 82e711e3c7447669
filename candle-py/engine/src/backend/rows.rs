//! The CPU backend's buffer, and how work on its rows and columns is spread over threads.

use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;

use crate::cpu::{Epilogue, Kernels, PackedMatrix};

/// Rows that are handed to another thread at once, at most.
pub(super) const BLOCK_ROWS: usize = 64;

/// Fewer numbers are not worth another thread.
const LEAST_SPREAD: usize = 8192;

/// Parts per thread that work such as the columns of a product is cut into: more than one, so that no thread waits long for another
/// that was held up.
pub(super) const PARTS_PER_THREAD: usize = 2;

/// Rows of `width` numbers.
#[derive(Debug, Default)]
pub struct Rows {
    pub(super) data: Vec<f32>,
    pub(super) width: usize,
}

impl Rows {
    pub(super) fn count(&self) -> usize {
        self.data.len().checked_div(self.width).unwrap_or(0)
    }

    /// `count` rows from `first` on.
    pub(super) fn part(&self, first: usize, count: usize) -> &[f32] {
        &self.data[first * self.width..(first + count) * self.width]
    }

    /// Makes room for `count` rows, whose content is whatever was there.
    pub(super) fn reshape(&mut self, count: usize, width: usize) -> &mut [f32] {
        self.width = width;
        self.data.resize(count * width, 0.0);
        &mut self.data
    }

    pub(super) fn rows_mut(&mut self) -> impl Iterator<Item = &mut [f32]> {
        self.data.chunks_exact_mut(self.width.max(1))
    }
}

/// Calls `work` on rows of `out`, `width` wide, from the row it names: all at once, or spread block by block.
pub(super) fn by_rows(spread: bool, out: &mut [f32], width: usize, work: impl Fn(usize, &mut [f32]) + Send + Sync) {
    if !spread || out.len() < LEAST_SPREAD {
        return work(0, out);
    }
    let rows = (out.len() / width).div_ceil(rayon::current_num_threads()).clamp(1, BLOCK_ROWS);
    let blocks = out.par_chunks_mut(rows * width).enumerate();
    blocks.for_each(|(block, out)| work(block * rows, out));
}

/// Where several threads write, each its own columns.
#[derive(Clone, Copy)]
struct Columns(*mut f32);

// SAFETY: the pointer is only written through for columns that one thread alone has.
unsafe impl Send for Columns {}
// SAFETY: as above.
unsafe impl Sync for Columns {}

impl Columns {
    fn start(self) -> *mut f32 {
        self.0
    }
}

/// `Kernels::linear` into rows as wide as the weight's outputs, spread by columns: every weight is read by one thread
/// alone, whatever the number of rows.
pub(super) fn linear(
    spread: bool,
    kernels: Kernels,
    x: &[f32],
    weight: &PackedMatrix,
    bias: Option<&[f32]>,
    epilogue: Epilogue<'_>,
    out: &mut [f32],
) {
    let (width, panels) = (weight.n(), weight.panel_count());
    let rows = out.len() / width;
    if !spread || panels < 2 {
        return kernels.linear(x, rows, weight, bias, epilogue, out, width);
    }
    assert_eq!(out.len(), rows * width, "out is not rows * n");
    let parts = panels.min(PARTS_PER_THREAD * rayon::current_num_threads());
    let columns = Columns(out.as_mut_ptr());
    (0..parts).into_par_iter().with_max_len(1).for_each(|part| {
        let panels = panels * part / parts..panels * (part + 1) / parts;
        // SAFETY: `out` holds all rows, this function borrows it alone, and no two parts have a panel in common.
        unsafe { kernels.linear_panels(x, rows, weight, bias, epilogue, columns.start(), width, panels) };
    });
}
