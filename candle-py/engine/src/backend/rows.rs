//! The CPU backend's buffer, and how work on its rows and columns is spread over threads.

use crate::cpu::{Epilogue, Kernels, Operand, PackedMatrix, QuantizedRows, Storage};
use crate::team;

/// Rows that are handed to another thread at once, at most.
pub(super) const BLOCK_ROWS: usize = 64;

/// Fewer numbers are not worth another thread.
const LEAST_SPREAD: usize = 4096;

/// Parts per thread that work such as the columns of a product is cut into: more than one, so that no thread waits long for another
/// that was held up.
pub(super) const PARTS_PER_THREAD: usize = 4;

/// Panels of a weight to a part, at least where every thread has one: the first of a part is not fetched ahead.
const LEAST_PANELS: usize = 8;

/// Rows of `width` numbers.
#[derive(Debug, Default)]
pub struct Rows {
    /// Never made shorter: what is beyond `len` needs not be written anew when the rows grow again.
    numbers: Vec<f32>,
    len: usize,
    pub(super) width: usize,
}

impl Rows {
    pub(super) fn count(&self) -> usize {
        self.len.checked_div(self.width).unwrap_or(0)
    }

    /// All rows.
    pub(super) fn data(&self) -> &[f32] {
        &self.numbers[..self.len]
    }

    /// All rows, to be written.
    pub(super) fn data_mut(&mut self) -> &mut [f32] {
        &mut self.numbers[..self.len]
    }

    /// `count` rows from `first` on.
    pub(super) fn part(&self, first: usize, count: usize) -> &[f32] {
        &self.data()[first * self.width..(first + count) * self.width]
    }

    /// Makes room for `count` rows, whose content is whatever was there.
    pub(super) fn reshape(&mut self, count: usize, width: usize) -> &mut [f32] {
        (self.len, self.width) = (count * width, width);
        if self.numbers.len() < self.len {
            self.numbers.resize(self.len, 0.0);
        }
        self.data_mut()
    }

    pub(super) fn rows_mut(&mut self) -> impl Iterator<Item = &mut [f32]> {
        let width = self.width.max(1);
        self.data_mut().chunks_exact_mut(width)
    }
}

/// Calls `work` on rows of `out`, `width` wide, from the row it names: all at once, or spread block by block.
pub(super) fn by_rows(spread: bool, out: &mut [f32], width: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
    if !spread || out.len() < LEAST_SPREAD {
        return work(0, out);
    }
    let rows = (out.len() / width).div_ceil(team::threads()).clamp(1, BLOCK_ROWS);
    let blocks = out.chunks_mut(rows * width).enumerate();
    team::each_item(blocks, |(block, out)| work(block * rows, out));
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
/// alone, whatever the number of rows. Where the weight takes its rows quantised, they are once for all threads.
pub(super) fn linear(
    spread: bool,
    kernels: Kernels,
    x: &[f32],
    weight: &PackedMatrix,
    bias: Option<&[f32]>,
    epilogue: Epilogue<'_>,
    out: &mut [f32],
) {
    let (width, k) = (weight.n(), weight.k());
    let rows = out.len() / width;
    if !spread || weight.panel_count() < 2 {
        return kernels.linear(x, rows, weight, bias, epilogue, out, width);
    }
    assert_eq!(out.len(), rows * width, "out is not rows * n");
    if weight.storage() != Storage::Int8 {
        return linear_columns(kernels, Operand::Rows(x), rows, weight, bias, epilogue, out);
    }
    QuantizedRows::with(|quantized| {
        let most_rows = QuantizedRows::most_rows(k);
        for (first, out) in (0..rows).step_by(most_rows).zip(out.chunks_mut(most_rows * width)) {
            let rows = out.len() / width;
            let x = &x[first * k..][..rows * k];
            quantized.reshape(rows, k);
            let of_part = if x.len() < LEAST_SPREAD { rows } else { rows.div_ceil(team::threads()) };
            let parts = quantized.parts_mut(of_part).zip(x.chunks((of_part * k).max(1)));
            team::each_item(parts, |(to, x)| kernels.quantize(x, to));
            let epilogue = match epilogue {
                Epilogue::Add(added, stride) => Epilogue::Add(&added[first * stride..], stride),
                other => other,
            };
            linear_columns(kernels, Operand::Quantized(quantized), rows, weight, bias, epilogue, out);
        }
    });
}

/// The columns of a product, spread.
fn linear_columns(
    kernels: Kernels,
    x: Operand<'_>,
    rows: usize,
    weight: &PackedMatrix,
    bias: Option<&[f32]>,
    epilogue: Epilogue<'_>,
    out: &mut [f32],
) {
    let (width, panels) = (weight.n(), weight.panel_count());
    let parts = (panels / LEAST_PANELS).clamp(team::threads(), PARTS_PER_THREAD * team::threads()).min(panels);
    let columns = Columns(out.as_mut_ptr());
    team::each(parts, |part| {
        let panels = panels * part / parts..panels * (part + 1) / parts;
        // SAFETY: `out` holds all rows, this function borrows it alone, and no two parts have a panel in common.
        unsafe { kernels.linear_panels(x, rows, weight, bias, epilogue, columns.start(), width, panels) };
    });
}
