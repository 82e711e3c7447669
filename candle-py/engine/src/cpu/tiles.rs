//! What a matrix unit with tile registers must offer for the tiled product to be written once: the instructions of AMX, in
//! hardware (`amx`) and in portable Rust (`tiles_soft`). Knows nothing of models, packing or threads.
//!
//! A tile is 16 rows of 64 bytes: 16 float32 of an accumulator, or 16 pairs of bfloat16. All eight tiles have the full
//! size at all times: rows that do not exist are computed from whatever is there and dropped.

/// Rows of a tile.
pub(super) const TILE_ROWS: usize = 16;

/// Float32 numbers, or pairs of bfloat16, in a row of a tile.
pub(super) const TILE_COLUMNS: usize = 16;

/// Numbers of k that one product of tiles takes in.
pub(super) const TILE_DEPTH: usize = 2 * TILE_COLUMNS;

/// Bytes of a row of a tile.
pub(super) const ROW_BYTES: usize = 64;

/// Tile registers.
pub(super) const TILE_COUNT: usize = 8;

/// One row of a tile of bfloat16: a cache line.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub(super) struct TileRow(pub(super) [u16; TILE_DEPTH]);

impl TileRow {
    /// A row of zeros.
    pub(super) const ZERO: TileRow = TileRow([0; TILE_DEPTH]);
}

/// Eight tile registers, from `begin` until the value is dropped. They belong to the calling thread.
pub(super) trait Tiles: Sized {
    /// Makes the registers ready; panics where the processor has none.
    fn begin() -> Self;

    /// Register `T` becomes zero.
    fn zero<const T: usize>(&mut self);

    /// Loads register `T` from 16 rows of 64 bytes, `stride` bytes apart.
    ///
    /// # Safety
    /// All rows are readable; no alignment is needed.
    unsafe fn load<const T: usize>(&mut self, from: *const u8, stride: usize);

    /// Stores register `T` as 16 rows of 16 float32, `stride` bytes apart.
    ///
    /// # Safety
    /// All rows are writable; no alignment is needed.
    unsafe fn store<const T: usize>(&self, to: *mut f32, stride: usize);

    /// Register `C`, float32, plus the product of the pairs in `A` (row, pair of k) and `B` (pair of k, column). For each
    /// element: one chain of multiply-adds from zero over the lower halves, one over the upper halves, both in the order
    /// of k; their sum; and that added to `C`. Every step is rounded to nearest, ties to even; denormal numbers count as
    /// zero, going in and coming out. (TDPBF16PS: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2.)
    fn dot<const C: usize, const A: usize, const B: usize>(&mut self);
}
