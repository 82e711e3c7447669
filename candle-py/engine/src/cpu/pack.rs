//! Weights as the GEMM reads them: panels of a few registers' columns, row after row of k, padded to whole registers.

use super::int8_pack::{BLOCK_STEPS, unpack_column};
use super::int8_rows::BLOCK;
use super::isa::{BytePath, Isa};
use super::simd::{MOST_LANES, Op, Simd};

/// Floats of a cache line, and of the widest register.
pub(super) const LINE_FLOATS: usize = 16;

/// Bytes of rounded rows that stay in L2 while all panels of a weight pass by.
pub(super) const CACHED_BYTES: usize = 1 << 20;

/// How a packed matrix holds its numbers. Where they are no bytes, they are summed in float32, and multiplied in it but on
/// tiles, which take both operands in bfloat16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Storage {
    /// As they are.
    #[default]
    Float32,
    /// Rounded to the nearest bfloat16, ties to even: half the memory.
    Bfloat16,
    /// Each 64 along k as signed bytes with a float32 scale, and so are the rows that they meet: little more than a quarter
    /// of the memory.
    Int8,
}

impl Storage {
    const ALL: [Storage; 3] = [Storage::Float32, Storage::Bfloat16, Storage::Int8];

    /// Its name: "float32", "bfloat16" or "int8".
    pub fn name(self) -> &'static str {
        match self {
            Storage::Float32 => "float32",
            Storage::Bfloat16 => "bfloat16",
            Storage::Int8 => "int8",
        }
    }

    /// The storage of that name.
    pub fn from_name(name: &str) -> Option<Storage> {
        Self::ALL.into_iter().find(|storage| storage.name() == name)
    }

    /// Rows of lanes that hold `k` rows.
    pub(super) fn steps(self, k: usize) -> usize {
        match self {
            Storage::Float32 => k,
            Storage::Bfloat16 => k.div_ceil(2),
            Storage::Int8 => k.div_ceil(BLOCK) * BLOCK_STEPS,
        }
    }

    /// Bytes of that many numbers as `Int8`, rows being whole blocks.
    pub fn int8_bytes(numbers: usize) -> usize {
        numbers + numbers.div_ceil(BLOCK) * size_of::<f32>()
    }
}

/// A weight matrix in the layout that one instruction set's kernels read.
#[derive(Clone, Debug)]
pub struct PackedMatrix {
    pub(super) isa: Isa,
    pub(super) panels: Panels,
    pub(super) storage: Storage,
    /// What bytes are packed for.
    pub(super) bytes: Option<BytePath>,
    n: usize,
    k: usize,
    steps: usize,
    lines: Vec<Line>,
}

/// A cache line, so that panels start on one.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub(super) struct Line([f32; LINE_FLOATS]);

impl Line {
    /// A line of zeros.
    pub(super) const ZERO: Line = Line([0.0; LINE_FLOATS]);
}

/// The floats of lines.
pub(super) fn floats_of(lines: &[Line]) -> &[f32] {
    // SAFETY: a `Line` is 16 floats without padding, and the result borrows them.
    unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), lines.len() * LINE_FLOATS) }
}

/// The same, to be written.
pub(super) fn floats_of_mut(lines: &mut [Line]) -> &mut [f32] {
    // SAFETY: as in `floats_of`, and the borrow is exclusive.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), lines.len() * LINE_FLOATS) }
}

/// The bytes of lines, to be written.
pub(super) fn bytes_of_mut(lines: &mut [Line]) -> &mut [u8] {
    // SAFETY: as in `floats_of_mut`; every pattern of four bytes is a float.
    unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), size_of_val(lines)) }
}

impl PackedMatrix {
    /// A matrix `(n, k)` whose panels of `steps` rows of lanes are in `lines`.
    pub(super) fn from_parts(
        isa: Isa,
        panels: Panels,
        storage: Storage,
        [n, k, steps]: [usize; 3],
        lines: Vec<Line>,
    ) -> PackedMatrix {
        assert_eq!(lines.len(), panels.packed_len(steps).div_ceil(LINE_FLOATS), "lines are not the panels");
        PackedMatrix { isa, panels, storage, bytes: None, n, k, steps, lines }
    }

    /// Output features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// How the numbers are held.
    pub fn storage(&self) -> Storage {
        self.storage
    }

    /// Parts that the outputs are computed in, see `Kernels::linear_panels`.
    pub fn panel_count(&self) -> usize {
        self.panels.count()
    }

    /// Copies row `row` of the weight, `k` numbers.
    pub fn copy_row(&self, row: usize, to: &mut [f32]) {
        assert!(row < self.n && to.len() == self.k, "no such row, or no room for it");
        let steps = self.steps();
        let panel = self.panels.find(row);
        let width = panel.registers * self.panels.lanes;
        let column = self.floats()[panel.start * steps + row - panel.start..].iter().step_by(width);
        match self.storage {
            Storage::Float32 => to.iter_mut().zip(column).for_each(|(to, from)| *to = *from),
            Storage::Int8 => unpack_column(column.copied(), to),
            Storage::Bfloat16 => {
                for (to, pair) in to.chunks_mut(2).zip(column) {
                    let halves = [pair.to_bits() << 16, pair.to_bits() & 0xffff_0000];
                    to.iter_mut().zip(halves).for_each(|(to, bits)| *to = f32::from_bits(bits));
                }
            }
        }
    }

    /// Rows of lanes in a panel: one of them holds two rows of k where the numbers are bfloat16.
    pub(super) fn steps(&self) -> usize {
        self.steps
    }

    /// The panels, one after the other. Panel `p` starts at float `panels.get(p).start * steps()`.
    pub(super) fn floats(&self) -> &[f32] {
        floats_of(&self.lines)
    }
}

/// `Kernels::pack`, whose sizes it has checked.
pub(super) struct Pack<'a> {
    pub(super) weight: &'a [f32],
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) isa: Isa,
    pub(super) storage: Storage,
}

impl Op for Pack<'_> {
    type Output = PackedMatrix;

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) -> PackedMatrix {
        let Pack { weight, n, k, isa, storage } = self;
        let panels = Panels::new(n, S::LANES, S::TILE_REGISTERS);
        let steps = storage.steps(k);
        let mut lines = vec![Line::ZERO; panels.packed_len(steps).div_ceil(LINE_FLOATS)];
        let mut whole = Vec::new();
        for index in 0..panels.count() {
            let panel = panels.get(index);
            let width = panel.registers * S::LANES;
            let to = &mut floats_of_mut(&mut lines)[panel.start * steps..][..width * steps];
            let panel_floats = match storage {
                Storage::Bfloat16 => {
                    whole.resize(width * k, 0.0);
                    &mut whole[..]
                }
                _ => &mut *to,
            };
            for first in (0..panel.columns).step_by(S::LANES) {
                // Lanes beyond the last column repeat it; what they give is never stored.
                let row = |lane: usize| &weight[(panel.start + (first + lane).min(panel.columns - 1)) * k..][..k];
                pack_columns(s, &std::array::from_fn(row), k, width, &mut panel_floats[first..]);
            }
            if storage == Storage::Bfloat16 {
                pair_rows(&whole, width, to);
            }
        }
        PackedMatrix::from_parts(isa, panels, storage, [n, k, steps], lines)
    }
}

/// How `columns` are cut into panels: as few as the tile allows, of nearly equal width (in registers).
#[derive(Clone, Copy, Debug)]
pub(super) struct Panels {
    columns: usize,
    lanes: usize,
    count: usize,
    narrow: usize,
    wide_count: usize,
}

/// One panel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Panel {
    /// First column.
    pub(super) start: usize,
    /// Columns that exist (the rest, to `registers * lanes`, are padding).
    pub(super) columns: usize,
    /// Width in registers.
    pub(super) registers: usize,
}

impl Panels {
    /// Cuts `columns` into panels of at most `most_registers` registers of `lanes`.
    pub(super) fn new(columns: usize, lanes: usize, most_registers: usize) -> Panels {
        let registers = columns.div_ceil(lanes);
        let count = registers.div_ceil(most_registers);
        let narrow = registers.checked_div(count).unwrap_or(0);
        Panels { columns, lanes, count, narrow, wide_count: registers - narrow * count }
    }

    /// Number of panels.
    pub(super) fn count(self) -> usize {
        self.count
    }

    /// Panel `index`; the wide ones come first.
    #[inline(always)]
    pub(super) fn get(self, index: usize) -> Panel {
        let start = (index * self.narrow + index.min(self.wide_count)) * self.lanes;
        let registers = self.narrow + usize::from(index < self.wide_count);
        Panel { start, columns: (registers * self.lanes).min(self.columns - start), registers }
    }

    /// The panel that holds a column.
    fn find(self, column: usize) -> Panel {
        let register = column / self.lanes;
        let wide = self.wide_count * (self.narrow + 1);
        self.get(match register < wide {
            true => register / (self.narrow + 1),
            false => self.wide_count + (register - wide) / self.narrow,
        })
    }

    /// Columns with their padding.
    pub(super) fn padded_columns(self) -> usize {
        (self.count * self.narrow + self.wide_count) * self.lanes
    }

    /// Floats of all panels for `k` rows. Panel `p` starts at float `get(p).start * k`.
    pub(super) fn packed_len(self, k: usize) -> usize {
        self.padded_columns() * k
    }
}

/// Rounds rows of `width` floats to bfloat16 and joins each two: the even one in the lower halves of the lanes.
fn pair_rows(rows: &[f32], width: usize, to: &mut [f32]) {
    for (pair, to) in rows.chunks(2 * width).zip(to.chunks_exact_mut(width)) {
        let (even, odd) = pair.split_at(width);
        for (column, to) in to.iter_mut().enumerate() {
            let upper = odd.get(column).map_or(0, |value| bfloat16_bits(*value));
            *to = f32::from_bits(u32::from(upper) << 16 | u32::from(bfloat16_bits(even[column])));
        }
    }
}

/// The bits of the nearest bfloat16, ties to even; NaN stays NaN.
pub fn bfloat16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// Packs the first `LANES` of `rows`, each `k` long, as columns of a panel `width` floats wide, from the panel's column
/// `to[0]` on: a transpose.
#[inline(always)]
pub(super) fn pack_columns<S: Simd>(s: S, rows: &[&[f32]; MOST_LANES], k: usize, width: usize, to: &mut [f32]) {
    assert!(rows[..S::LANES].iter().all(|row| row.len() == k), "rows are not k long");
    let mut start = 0;
    while start < k {
        let count = S::LANES.min(k - start);
        let mut block = [s.splat(0.0); MOST_LANES];
        for lane in 0..S::LANES {
            // SAFETY: the row has `count` floats from `start` on.
            block[lane] = unsafe {
                let from = rows[lane].as_ptr().add(start);
                if count == S::LANES { s.load(from) } else { s.load_first(from, count, 0.0) }
            };
        }
        let to = &mut to[start * width..][..(count - 1) * width + S::LANES];
        for (i, column) in s.transpose(block).into_iter().enumerate().take(count) {
            // SAFETY: the slice has `LANES` floats from `i * width` on, for `i < count`.
            unsafe { s.store(column, to.as_mut_ptr().add(i * width)) };
        }
        start += S::LANES;
    }
}
