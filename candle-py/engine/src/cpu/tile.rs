//! The GEMM's inner loop: `ROWS x REGISTERS` accumulators held in registers while k goes by.
//!
//! Every element is one chain of multiply-adds in the order of k, whatever the tile's shape: that is what makes a row's
//! result the same bits in every batch. Register tiling after Goto and van de Geijn, "Anatomy of High-Performance
//! Matrix Multiplication", ACM TOMS 34(3), 2008.

use std::ops::Range;

use super::pack::LINE_FLOATS;
use super::simd::Simd;

/// Rows of k by which the panel is fetched ahead of its use.
const FETCH_AHEAD: usize = 8;

/// Steps of k per turn of the loop.
const UNROLLED: usize = 4;

/// The accumulators of a tile.
pub(super) type Tile<S, const ROWS: usize, const REGISTERS: usize> = [[<S as Simd>::V; REGISTERS]; ROWS];

/// A tile of zeros.
#[inline(always)]
pub(super) fn zeros<S: Simd, const ROWS: usize, const REGISTERS: usize>(s: S) -> Tile<S, ROWS, REGISTERS> {
    [[s.splat(0.0); REGISTERS]; ROWS]
}

/// Cache lines to bring to L2 while a product is computed, because a later product reads them.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    /// The first line; any address will do.
    pub(super) at: *const f32,
    /// How many; at most `LINES_PER_TURN` for every `UNROLLED` steps of k are fetched.
    pub(super) lines: usize,
}

impl Ahead {
    /// Nothing.
    pub(super) const NOTHING: Ahead = Ahead { at: std::ptr::null(), lines: 0 };
}

/// Lines fetched ahead per turn of the loop.
const LINES_PER_TURN: usize = 2;

/// The left operand of a product: element `(m, i)` is at `at + m * row + i * step`.
#[derive(Clone, Copy)]
pub(super) struct Left {
    pub(super) at: *const f32,
    pub(super) row: usize,
    pub(super) step: usize,
}

/// The right operand: row `i`, `REGISTERS * LANES` floats, is at `at + i * step`.
#[derive(Clone, Copy)]
pub(super) struct Right {
    pub(super) at: *const f32,
    pub(super) step: usize,
}

/// `tile + a @ b` for `a(ROWS, k)` and `b(k, REGISTERS * LANES)`.
///
/// # Safety
/// Every element `(m < ROWS, i < k)` of `a` and every row `i < k` of `b` is readable.
#[inline(always)]
pub(super) unsafe fn add_product<S: Simd, const ROWS: usize, const REGISTERS: usize>(
    s: S,
    mut tile: Tile<S, ROWS, REGISTERS>,
    a: Left,
    b: Right,
    k: usize,
    ahead: Ahead,
) -> Tile<S, ROWS, REGISTERS> {
    let mut i = 0;
    while i + UNROLLED <= k {
        if ahead.lines > 0 {
            for line in 0..LINES_PER_TURN {
                let line = i / UNROLLED * LINES_PER_TURN + line;
                // Fetching a line just read costs nothing: no branch that depends on the line.
                s.prefetch_far(if line < ahead.lines { ahead.at.wrapping_add(line * LINE_FLOATS) } else { b.at });
            }
        }
        for step in i..i + UNROLLED {
            // SAFETY: `step < k`.
            unsafe { add_outer(s, &mut tile, a, b, step) };
        }
        i += UNROLLED;
    }
    while i < k {
        // SAFETY: `i < k`.
        unsafe { add_outer(s, &mut tile, a, b, i) };
        i += 1;
    }
    tile
}

/// `tile + a[:, i] @ b[i, :]`.
///
/// # Safety
/// As `add_product`, with `i < k`.
#[inline(always)]
unsafe fn add_outer<S: Simd, const ROWS: usize, const REGISTERS: usize>(
    s: S,
    tile: &mut Tile<S, ROWS, REGISTERS>,
    a: Left,
    b: Right,
    i: usize,
) {
    // SAFETY: `i < k`.
    unsafe { add_multiples(s, tile, a, i, load_row(s, b, i)) };
}

/// Row `i` of `b`; a later one is asked for in L1.
///
/// # Safety
/// The row is readable.
#[inline(always)]
unsafe fn load_row<S: Simd, const REGISTERS: usize>(s: S, b: Right, i: usize) -> [S::V; REGISTERS] {
    let mut row = [s.splat(0.0); REGISTERS];
    for (r, register) in row.iter_mut().enumerate() {
        let at = b.at.wrapping_add(i * b.step + r * S::LANES);
        // SAFETY: as the caller says.
        *register = unsafe { s.load(at) };
        s.prefetch(at.wrapping_add(FETCH_AHEAD * b.step));
    }
    row
}

/// `tile + a[:, i] @ b_row`.
///
/// # Safety
/// Every element `(m < ROWS, i)` of `a` is readable.
#[inline(always)]
unsafe fn add_multiples<S: Simd, const ROWS: usize, const REGISTERS: usize>(
    s: S,
    tile: &mut Tile<S, ROWS, REGISTERS>,
    a: Left,
    i: usize,
    b_row: [S::V; REGISTERS],
) {
    for (m, row) in tile.iter_mut().enumerate() {
        // SAFETY: as the caller says.
        let value = s.splat(unsafe { *a.at.add(m * a.row + i * a.step) });
        for (sum, b_row) in row.iter_mut().zip(b_row) {
            *sum = s.mul_add(value, b_row, *sum);
        }
    }
}

/// `add_product` for a `b` in bfloat16, two rows to a row of lanes: `2 * i` in the lower halves, `2 * i + 1` in the upper.
///
/// # Safety
/// Every element `(m < ROWS, i < k)` of `a` and every row of lanes `i < k.div_ceil(2)` of `b` is readable.
#[inline(always)]
pub(super) unsafe fn add_product_of_pairs<S: Simd, const ROWS: usize, const REGISTERS: usize>(
    s: S,
    mut tile: Tile<S, ROWS, REGISTERS>,
    a: Left,
    b: Right,
    k: usize,
    ahead: Ahead,
) -> Tile<S, ROWS, REGISTERS> {
    let pairs = k.div_ceil(2);
    for pair in 0..pairs {
        if pair < ahead.lines {
            s.prefetch_far(ahead.at.wrapping_add(pair * LINE_FLOATS));
        }
        // SAFETY: row `pair < pairs`, which the caller gives.
        let lanes: [S::V; REGISTERS] = unsafe { load_row(s, b, pair) };
        // SAFETY: `2 * pair < k`.
        unsafe { add_multiples(s, &mut tile, a, 2 * pair, lanes.map(|lanes| s.lower_bfloat16(lanes))) };
        if 2 * pair + 1 < k {
            // SAFETY: `2 * pair + 1 < k`.
            unsafe { add_multiples(s, &mut tile, a, 2 * pair + 1, lanes.map(|lanes| s.upper_bfloat16(lanes))) };
        }
    }
    tile
}

/// How many lanes of register `r` are columns that exist. The registers of a panel but the last are full.
#[inline(always)]
pub(super) fn lanes_left<S: Simd>(columns: usize, r: usize) -> usize {
    (columns - r * S::LANES).min(S::LANES)
}

/// `tile + rows`, the rows being `columns` wide and `stride` apart.
///
/// # Safety
/// Row `m < ROWS` is readable at `from + m * stride` for `columns` floats, with more than `(REGISTERS - 1) * LANES` columns.
#[inline(always)]
pub(super) unsafe fn add_rows<S: Simd, const ROWS: usize, const REGISTERS: usize>(
    s: S,
    mut tile: Tile<S, ROWS, REGISTERS>,
    from: *const f32,
    stride: usize,
    columns: usize,
) -> Tile<S, ROWS, REGISTERS> {
    for (m, row) in tile.iter_mut().enumerate() {
        for (r, value) in row.iter_mut().enumerate() {
            let at = from.wrapping_add(m * stride + r * S::LANES);
            // SAFETY: inside the row, as the caller says.
            let added = unsafe {
                if columns == REGISTERS * S::LANES {
                    s.load(at)
                } else {
                    s.load_first(at, lanes_left::<S>(columns, r), 0.0)
                }
            };
            *value = s.add(*value, added);
        }
    }
    tile
}

/// Stores the tile's rows, `columns` wide and `stride` apart.
///
/// # Safety
/// As `add_rows`, writable.
#[inline(always)]
pub(super) unsafe fn store_rows<S: Simd, const ROWS: usize, const REGISTERS: usize>(
    s: S,
    tile: Tile<S, ROWS, REGISTERS>,
    to: *mut f32,
    stride: usize,
    columns: usize,
) {
    for (m, row) in tile.into_iter().enumerate() {
        for (r, value) in row.into_iter().enumerate() {
            let at = to.wrapping_add(m * stride + r * S::LANES);
            // SAFETY: inside the row, as the caller says.
            unsafe {
                if columns == REGISTERS * S::LANES {
                    s.store(value, at);
                } else {
                    s.store_first(value, at, lanes_left::<S>(columns, r));
                }
            }
        }
    }
}

/// Cuts rows `0 .. $count` into tiles as tall as the instruction set's, then of 4, 3, 2 and 1 rows, and evaluates the body once
/// for every height that occurs: `$rows` is the range of rows it covers, `$ROWS` the height. `$most` is the tallest one.
macro_rules! for_each_height {
    ($most:expr, $count:expr, |$rows:ident, $ROWS:ident| $body:expr) => {{
        let count: usize = $count;
        let mut start = 0;
        for_each_height!(@each $most, count, start, $rows, $ROWS, $body, 8 6 4 3 2 1);
        debug_assert_eq!(start, count);
    }};
    (@each $most:expr, $count:ident, $start:ident, $rows:ident, $ROWS:ident, $body:expr, $($height:literal)*) => {
        $(
            if $height <= $most && ($height <= 4 || $most == $height) && $count - $start >= $height {
                const $ROWS: usize = $height;
                let $rows = $start..$start + super::tile::whole_tiles($count - $start, $ROWS);
                $start = $rows.end;
                $body
            }
        )*
    };
}
pub(super) use for_each_height;

/// The rows among `rows` that fill tiles of `height`.
pub(super) fn whole_tiles(rows: usize, height: usize) -> usize {
    rows - rows % height
}

/// `count` rows in tiles of nearly equal height, none above `most`: how many rows go to tiles of which height. A tile much
/// lower than the others would take nearly as long as they do: it has too few chains to keep the arithmetic busy.
pub(super) fn even_heights(count: usize, most: usize) -> [(Range<usize>, usize); 2] {
    let tiles = count.div_ceil(most);
    let low = count.checked_div(tiles).unwrap_or(0);
    let tall_rows = (count - low * tiles) * (low + 1);
    [(0..tall_rows, low + 1), (tall_rows..count, low)]
}

/// Evaluates the body with `$CONSTANT` a constant that equals `$value`, a tile's width, which is at most `$most`.
macro_rules! with_width {
    ($most:expr, $value:expr, |$CONSTANT:ident| $body:expr) => {
        with_width!(@each $most, $value, $CONSTANT, $body, 1 2 3 4)
    };
    (@each $most:expr, $value:expr, $CONSTANT:ident, $body:expr, $($literal:literal)*) => {
        match $value {
            $(
                $literal if $most >= $literal => {
                    const $CONSTANT: usize = $literal;
                    $body
                }
            )*
            value => unreachable!("no tile has {value} of them"),
        }
    };
}
pub(super) use with_width;

/// The same for a tile's height.
macro_rules! with_height {
    ($most:expr, $value:expr, |$CONSTANT:ident| $body:expr) => {
        with_width!(@each $most, $value, $CONSTANT, $body, 1 2 3 4 5 6 7 8)
    };
}
pub(super) use with_height;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_of_nearly_equal_height() {
        assert_eq!(even_heights(32, 6), [(0..12, 6), (12..32, 5)]);
        assert_eq!(even_heights(7, 6), [(0..4, 4), (4..7, 3)]);
        assert_eq!(even_heights(0, 6), [(0..0, 1), (0..0, 0)]);
        for (count, most) in (0..200).flat_map(|count| (1..9).map(move |most| (count, most))) {
            let [(tall_rows, tall), (low_rows, low)] = even_heights(count, most);
            assert_eq!((tall_rows.start, tall_rows.end, low_rows.end), (0, low_rows.start, count));
            assert!(tall_rows.is_empty() || tall <= most && tall_rows.len() % tall == 0);
            assert!(low_rows.is_empty() || low > 0 && low_rows.len() % low == 0);
            let tiles = tall_rows.len() / tall + low_rows.len().checked_div(low).unwrap_or(0);
            assert_eq!(tiles, count.div_ceil(most), "{count} rows in tiles of {most}");
        }
    }
}
