//! Where keys and values of a cache lie: pages of 16 tokens, in the order in which `paged_attention` reads them.

use memmap2::MmapMut;

use super::pack::LINE_FLOATS;

/// Tokens of a page.
pub const PAGE_TOKENS: usize = 16;

/// What a page holds of one layer: for every head the keys as columns `(head_dim, 16)`, so that a register holds one
/// dimension of several keys, then the values as rows `(16, value_width)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageShape {
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl PageShape {
    /// Floats of one page.
    pub fn floats(self) -> usize {
        self.kv_heads * self.head_floats()
    }

    /// Floats of one head.
    pub(super) fn head_floats(self) -> usize {
        PAGE_TOKENS * (self.head_dim + self.value_width())
    }

    /// Width of a row of values: whole registers, whose rest stays zero.
    pub(super) fn value_width(self) -> usize {
        self.head_dim.next_multiple_of(LINE_FLOATS)
    }

    /// Writes one token's keys and values, `(kv_heads, head_dim)` each, into a page.
    pub fn write(self, page: &mut [f32], token: usize, keys: &[f32], values: &[f32]) {
        assert!(token < PAGE_TOKENS, "token is outside the page");
        let heads = keys.chunks_exact(self.head_dim).zip(values.chunks_exact(self.head_dim));
        for (page, (keys, values)) in page.chunks_exact_mut(self.head_floats()).zip(heads) {
            let (columns, rows) = page.split_at_mut(PAGE_TOKENS * self.head_dim);
            columns.iter_mut().skip(token).step_by(PAGE_TOKENS).zip(keys).for_each(|(to, key)| *to = *key);
            rows[token * self.value_width()..][..self.head_dim].copy_from_slice(values);
        }
    }
}

/// One layer's pages. Room is reserved for all, but memory is taken only as pages are written.
#[derive(Debug)]
pub struct Pages {
    shape: PageShape,
    room: Zeros,
    used: usize,
}

impl Pages {
    /// Room for no page.
    pub fn new(shape: PageShape) -> Self {
        Self { shape, room: Zeros::NONE, used: 0 }
    }

    /// Makes room for `count` pages and drops those beyond; whether there is so much memory.
    pub fn reserve(&mut self, count: usize) -> bool {
        let Some(mut room) = count.checked_mul(self.shape.floats()).and_then(Zeros::new) else { return false };
        self.used = self.used.min(count);
        let floats = self.used * self.shape.floats();
        room.floats_mut()[..floats].copy_from_slice(&self.room.floats()[..floats]);
        self.room = room;
        true
    }

    /// Brings the first `count` pages into use.
    pub fn touch(&mut self, count: usize) {
        self.used = self.used.max(count);
    }

    /// The pages in use, one after the other.
    pub fn floats(&self) -> &[f32] {
        &self.room.floats()[..self.used * self.shape.floats()]
    }

    /// The same, to be written.
    pub fn floats_mut(&mut self) -> &mut [f32] {
        &mut self.room.floats_mut()[..self.used * self.shape.floats()]
    }

    /// Copies a page.
    pub fn copy(&mut self, from: usize, to: usize) {
        self.touch(from.max(to) + 1);
        let floats = self.shape.floats();
        self.floats_mut().copy_within(from * floats..(from + 1) * floats, to * floats);
    }
}

/// Floats that are zero until they are written: a mapping of their own, whose memory the system gives only then. (A `Vec` that
/// grows would take it, and clear it, at once; so would an allocator that has memory to use again.)
#[derive(Debug)]
struct Zeros {
    /// `None` where there are no floats.
    map: Option<MmapMut>,
    len: usize,
}

impl Zeros {
    const NONE: Zeros = Zeros { map: None, len: 0 };

    /// `len` zeros, if there is so much memory.
    fn new(len: usize) -> Option<Zeros> {
        if len == 0 {
            return Some(Zeros::NONE);
        }
        let bytes = len.checked_mul(size_of::<f32>()).filter(|bytes| isize::try_from(*bytes).is_ok())?;
        Some(Zeros { map: Some(MmapMut::map_anon(bytes).ok()?), len })
    }

    fn floats(&self) -> &[f32] {
        let Some(map) = &self.map else { return &[] };
        // SAFETY: the mapping begins on a page and has `len` floats, every pattern of bytes being one; the result borrows it.
        unsafe { std::slice::from_raw_parts(map.as_ptr().cast(), self.len) }
    }

    fn floats_mut(&mut self) -> &mut [f32] {
        let Some(map) = &mut self.map else { return &mut [] };
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(map.as_mut_ptr().cast(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_zero_begin_on_a_cache_line_and_outlive_a_change_of_room() {
        let shape = PageShape { kv_heads: 2, head_dim: 24 };
        let mut pages = Pages::new(shape);
        assert!(pages.floats().is_empty() && pages.reserve(3));
        pages.touch(2);
        assert_eq!(pages.floats().len(), 2 * shape.floats());
        assert!(pages.floats().iter().all(|float| *float == 0.0));
        assert_eq!(pages.floats().as_ptr().align_offset(LINE_FLOATS * size_of::<f32>()), 0);
        pages.floats_mut().fill(7.0);
        assert!(pages.reserve(5));
        pages.copy(1, 4);
        let (kept, later) = pages.floats().split_at(2 * shape.floats());
        assert!(kept.iter().all(|float| *float == 7.0));
        let (between, copied) = later.split_at(2 * shape.floats());
        assert!(between.iter().all(|float| *float == 0.0) && copied.iter().all(|float| *float == 7.0));
        assert!(pages.reserve(1) && pages.reserve(2));
        pages.touch(2);
        assert!(pages.floats()[shape.floats()..].iter().all(|float| *float == 0.0));
        assert!(pages.reserve(0) && pages.floats().is_empty());
    }

    #[test]
    fn more_than_there_is_memory_for_is_refused() {
        let mut pages = Pages::new(PageShape { kv_heads: 8, head_dim: 128 });
        assert!(!pages.reserve(usize::MAX / 2));
        assert!(!pages.reserve(usize::MAX >> 18));
        assert!(pages.reserve(1));
    }
}
