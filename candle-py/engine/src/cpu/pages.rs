//! Where keys and values of a cache lie: pages of 16 tokens, in the order in which `paged_attention` reads them.

use super::pack::{LINE_FLOATS, Line, floats_of, floats_of_mut};

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

/// One layer's pages. Room is reserved for all, but memory is touched only as pages come into use.
#[derive(Debug)]
pub struct Pages {
    shape: PageShape,
    lines: Vec<Line>,
}

impl Pages {
    /// Room for no page.
    pub fn new(shape: PageShape) -> Self {
        Self { shape, lines: Vec::new() }
    }

    fn page_lines(&self) -> usize {
        self.shape.floats() / LINE_FLOATS
    }

    /// Makes room for `count` pages and drops those beyond; whether there is so much memory.
    pub fn reserve(&mut self, count: usize) -> bool {
        let Some(wanted) = count.checked_mul(self.page_lines()) else { return false };
        self.lines.truncate(wanted);
        if self.lines.capacity() > wanted {
            self.lines.shrink_to(wanted);
        }
        self.lines.try_reserve_exact(wanted - self.lines.len()).is_ok()
    }

    /// Brings the first `count` pages into use.
    pub fn touch(&mut self, count: usize) {
        let wanted = count * self.page_lines();
        if self.lines.len() < wanted {
            self.lines.resize(wanted, Line::ZERO);
        }
    }

    /// The pages in use, one after the other.
    pub fn floats(&self) -> &[f32] {
        floats_of(&self.lines)
    }

    /// The same, to be written.
    pub fn floats_mut(&mut self) -> &mut [f32] {
        floats_of_mut(&mut self.lines)
    }

    /// Copies a page.
    pub fn copy(&mut self, from: usize, to: usize) {
        self.touch(from.max(to) + 1);
        let lines = self.page_lines();
        self.lines.copy_within(from * lines..(from + 1) * lines, to * lines);
    }
}
