//! Where keys and values of a cache lie: pages of 16 tokens, in the order in which `paged_attention` reads them.

use std::marker::PhantomData;

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use memmap2::MmapMut;

use super::pack::LINE_FLOATS;
use super::simd::{MOST_LANES, Op, Simd, each_register};

/// Tokens of a page.
pub const PAGE_TOKENS: usize = 16;

/// How a cache holds its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageNumbers {
    /// As they are.
    Float32,
    /// Rounded to float16: half the memory to read. A token with a number beyond its range, 65504, counts as one without a
    /// number.
    Float16,
}

impl PageNumbers {
    /// What the magnitude of a number must be below.
    fn limit(self) -> f32 {
        match self {
            PageNumbers::Float32 => f32::INFINITY,
            // From here on the nearest float16 is infinite.
            PageNumbers::Float16 => 65520.0,
        }
    }
}

/// A number in a page.
pub(super) trait Number: Pod {
    /// No number.
    const NAN: Self;

    /// All lanes of a register.
    ///
    /// # Safety
    /// `from` is readable for `LANES` numbers.
    unsafe fn load<S: Simd>(s: S, from: *const Self) -> S::V;
    /// Stores all lanes.
    ///
    /// # Safety
    /// `to` is writable for `LANES` numbers.
    unsafe fn store<S: Simd>(s: S, v: S::V, to: *mut Self);
}

impl Number for f32 {
    const NAN: f32 = f32::NAN;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const f32) -> S::V {
        // SAFETY: as the caller says.
        unsafe { s.load(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, v: S::V, to: *mut f32) {
        // SAFETY: as the caller says.
        unsafe { s.store(v, to) };
    }
}

/// The bits of a float16.
impl Number for u16 {
    const NAN: u16 = 0x7e00;

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const u16) -> S::V {
        // SAFETY: as the caller says.
        unsafe { s.load_halves(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, v: S::V, to: *mut u16) {
        // SAFETY: as the caller says.
        unsafe { s.store_halves(v, to) };
    }
}

/// What a page holds of one layer: for every head the keys as columns `(head_dim, 16)`, so that a register holds one
/// dimension of several keys, then the values as rows `(16, value_width)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageShape {
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// How each number is held.
    pub numbers: PageNumbers,
}

impl PageShape {
    /// Bytes of one page.
    pub fn bytes(self) -> usize {
        self.kv_heads * self.head_bytes()
    }

    /// Bytes of one head.
    fn head_bytes(self) -> usize {
        let each = match self.numbers {
            PageNumbers::Float32 => size_of::<f32>(),
            PageNumbers::Float16 => size_of::<u16>(),
        };
        PAGE_TOKENS * (self.head_dim + self.value_width()) * each
    }

    /// Width of a row of values: whole registers, whose rest stays zero.
    pub(super) fn value_width(self) -> usize {
        self.head_dim.next_multiple_of(LINE_FLOATS)
    }
}

/// `Kernels::write_token`.
pub(super) struct WriteToken<'a> {
    pub(super) shape: PageShape,
    pub(super) page: &'a mut [u8],
    pub(super) token: usize,
    pub(super) keys: &'a [f32],
    pub(super) values: &'a [f32],
}

impl Op for WriteToken<'_> {
    type Output = ();

    #[inline(always)]
    fn apply<S: Simd>(self, s: S) {
        let WriteToken { shape, page, token, keys, values } = self;
        let heads = keys.chunks_exact(shape.head_dim).zip(values.chunks_exact(shape.head_dim));
        for (page, (keys, values)) in page.chunks_exact_mut(shape.head_bytes()).zip(heads) {
            match shape.numbers {
                PageNumbers::Float32 => write_head::<S, f32>(s, shape, cast_slice_mut(page), token, keys, values),
                PageNumbers::Float16 => write_head::<S, u16>(s, shape, cast_slice_mut(page), token, keys, values),
            }
        }
    }
}

/// Writes one head of a token. Where some of its numbers are none, or beyond the page's, its keys become NaN and its values zero:
/// who sees the token gets NaN, and who does not, but is worked on together with those who do, gets what it would without it, for
/// zero times a number is zero, and zero times NaN is not.
#[inline(always)]
fn write_head<S: Simd, N: Number>(s: S, shape: PageShape, page: &mut [N], token: usize, keys: &[f32], values: &[f32]) {
    let width = shape.value_width();
    let (columns, rows) = page.split_at_mut(PAGE_TOKENS * shape.head_dim);
    let row = &mut rows[token * width..][..width];
    let mut greatest = s.splat(0.0);
    for numbers in [keys, values] {
        each_register!(S, numbers.len(), |i, lanes| {
            // SAFETY: `lanes` numbers are left.
            greatest = s.greater_magnitude(greatest, unsafe { s.load_first(numbers.as_ptr().add(i), lanes, 0.0) });
        });
    }
    let greatest = s.greatest_magnitude(greatest);
    if greatest.is_nan() || greatest >= shape.numbers.limit() {
        columns.iter_mut().skip(token).step_by(PAGE_TOKENS).for_each(|key| *key = N::NAN);
        row.fill(N::zeroed());
        return;
    }
    each_register!(S, keys.len(), |i, lanes| {
        let mut register = [N::zeroed(); MOST_LANES];
        // SAFETY: `lanes` keys are left, and the array is a register long at least.
        unsafe { N::store(s, s.load_first(keys.as_ptr().add(i), lanes, 0.0), register.as_mut_ptr()) };
        let places = columns[i * PAGE_TOKENS..].iter_mut().skip(token).step_by(PAGE_TOKENS);
        places.zip(&register[..lanes]).for_each(|(to, key)| *to = *key);
    });
    let row = row.as_mut_ptr();
    each_register!(S, values.len(), |i, lanes| {
        // SAFETY: `lanes` values are left, and the row is whole registers wide.
        unsafe { N::store(s, s.load_first(values.as_ptr().add(i), lanes, 0.0), row.add(i)) };
    });
}

/// One layer's pages. Room is reserved for all, but memory is taken only as pages are written: a mapping of their own, whose
/// memory the system gives only then. (A `Vec` that grows would take it, and clear it, at once; so would an allocator that
/// has memory to use again. The system's huge pages were slower: they are cleared whole, and reading gained nothing.)
#[derive(Debug)]
pub struct Pages {
    shape: PageShape,
    /// `None` where there is room for nothing.
    room: Option<MmapMut>,
    used: usize,
}

impl Pages {
    /// Room for no page.
    pub fn new(shape: PageShape) -> Self {
        Self { shape, room: None, used: 0 }
    }

    /// Makes room for `count` pages and drops those beyond; whether there is so much memory.
    pub fn reserve(&mut self, count: usize) -> bool {
        let bytes = count.checked_mul(self.shape.bytes()).filter(|bytes| isize::try_from(*bytes).is_ok());
        let Some(bytes) = bytes else { return false };
        let mut room = None;
        if bytes > 0 {
            let Ok(map) = MmapMut::map_anon(bytes) else { return false };
            room = Some(map);
        }
        self.used = self.used.min(count);
        let kept = self.used * self.shape.bytes();
        if let (Some(to), Some(from)) = (&mut room, &self.room) {
            to[..kept].copy_from_slice(&from[..kept]);
        }
        self.room = room;
        true
    }

    /// Brings the first `count` pages into use.
    pub fn touch(&mut self, count: usize) {
        self.used = self.used.max(count);
    }

    /// The pages in use, one after the other.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let used = self.used * self.shape.bytes();
        self.room.as_deref_mut().map_or(&mut [], |room| &mut room[..used])
    }

    /// The pages in use.
    pub fn view(&self) -> PagesView<'_> {
        let used = self.used * self.shape.bytes();
        let bytes = self.room.as_deref().map_or(&[][..], |room| &room[..used]);
        PagesView { shape: self.shape, at: bytes.as_ptr(), count: self.used, bytes: PhantomData }
    }

    /// The pages in use, to be shared out.
    pub fn shared(&mut self) -> SharedPages<'_> {
        let (shape, count) = (self.shape, self.used);
        SharedPages { shape, at: self.bytes_mut().as_mut_ptr(), count, bytes: PhantomData }
    }

    /// Copies a page.
    pub fn copy(&mut self, from: usize, to: usize) {
        self.touch(from.max(to) + 1);
        let bytes = self.shape.bytes();
        self.bytes_mut().copy_within(from * bytes..(from + 1) * bytes, to * bytes);
    }
}

/// Pages to read.
#[derive(Clone, Copy, Debug)]
pub struct PagesView<'a> {
    shape: PageShape,
    at: *const u8,
    count: usize,
    bytes: PhantomData<&'a [u8]>,
}

// SAFETY: it gives shared references alone, under the terms on which it was made.
unsafe impl Send for PagesView<'_> {}
// SAFETY: as above.
unsafe impl Sync for PagesView<'_> {}

impl<'a> PagesView<'a> {
    /// What a page holds.
    pub fn shape(self) -> PageShape {
        self.shape
    }

    /// How many there are.
    pub(super) fn count(self) -> usize {
        self.count
    }

    /// One head of a page.
    #[inline(always)]
    pub(super) fn head<N: Number>(self, page: usize, kv_head: usize) -> &'a [N] {
        assert!(page < self.count && kv_head < self.shape.kv_heads, "no such page");
        let head_bytes = self.shape.head_bytes();
        // SAFETY: inside the pages, which nobody writes.
        cast_slice(unsafe {
            std::slice::from_raw_parts(self.at.add(page * self.shape.bytes() + kv_head * head_bytes), head_bytes)
        })
    }
}

/// Pages that several threads write and read, each of them its own.
#[derive(Clone, Copy, Debug)]
pub struct SharedPages<'a> {
    shape: PageShape,
    at: *mut u8,
    count: usize,
    bytes: PhantomData<&'a mut [u8]>,
}

// SAFETY: what it gives is under the terms of those two functions.
unsafe impl Send for SharedPages<'_> {}
// SAFETY: as above.
unsafe impl Sync for SharedPages<'_> {}

impl<'a> SharedPages<'a> {
    /// A page, to be written.
    ///
    /// # Safety
    /// Nobody else reads or writes it while the result is used.
    pub unsafe fn page_mut(self, page: usize) -> &'a mut [u8] {
        assert!(page < self.count, "no such page");
        let bytes = self.shape.bytes();
        // SAFETY: inside the pages, and the caller's alone.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(page * bytes), bytes) }
    }

    /// The pages, to be read.
    ///
    /// # Safety
    /// While the result is used, nobody writes a page that is read.
    pub unsafe fn view(self) -> PagesView<'a> {
        PagesView { shape: self.shape, at: self.at, count: self.count, bytes: PhantomData }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_zero_begin_on_a_cache_line_and_outlive_a_change_of_room() {
        for numbers in [PageNumbers::Float32, PageNumbers::Float16] {
            let shape = PageShape { kv_heads: 2, head_dim: 24, numbers };
            let mut pages = Pages::new(shape);
            assert!(pages.bytes_mut().is_empty() && pages.reserve(3));
            pages.touch(2);
            assert_eq!(pages.bytes_mut().len(), 2 * shape.bytes());
            assert!(pages.bytes_mut().iter().all(|byte| *byte == 0));
            assert_eq!(pages.bytes_mut().as_ptr().align_offset(LINE_FLOATS * size_of::<f32>()), 0);
            pages.bytes_mut().fill(7);
            assert!(pages.reserve(5));
            pages.copy(1, 4);
            let (kept, later) = pages.bytes_mut().split_at(2 * shape.bytes());
            assert!(kept.iter().all(|byte| *byte == 7));
            let (between, copied) = later.split_at(2 * shape.bytes());
            assert!(between.iter().all(|byte| *byte == 0) && copied.iter().all(|byte| *byte == 7));
            assert!(pages.reserve(1) && pages.reserve(2));
            pages.touch(2);
            assert!(pages.bytes_mut()[shape.bytes()..].iter().all(|byte| *byte == 0));
            assert!(pages.reserve(0) && pages.bytes_mut().is_empty());
        }
    }

    #[test]
    fn more_than_there_is_memory_for_is_refused() {
        let mut pages = Pages::new(PageShape { kv_heads: 8, head_dim: 128, numbers: PageNumbers::Float32 });
        assert!(!pages.reserve(usize::MAX / 2));
        assert!(!pages.reserve(usize::MAX >> 18));
        assert!(pages.reserve(1));
    }
}
