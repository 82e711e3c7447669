//! The cache's pages of one layer take the keys and values of new tokens.

use super::attention::block_floats;
use super::{Kernel, Launch, Size, Source, in_file, whole};
use crate::backend::Attention;
use crate::generate::BLOCK_TOKENS;

/// Writes `(queries, keys, values)` rows to pages `(blocks, 2, kv_heads, 16, head_dim)`, each to its place: the number
/// of its block times 16, and where it is in the block.
#[derive(Clone, Copy, Debug)]
pub struct WriteCache<'a> {
    pub attention: &'a Attention,
    pub rows: usize,
    pub blocks: usize,
}

impl Kernel for WriteCache<'_> {
    in_file!("cache");

    fn out_len(&self) -> usize {
        self.blocks * block_floats(self.attention.kv_heads, self.attention.head_dim)
    }

    fn sources(&self) -> Vec<Size> {
        vec![Size::Floats(self.rows * self.attention.qkv_width()), Size::Wholes(self.rows)]
    }

    fn launch(&self) -> Launch {
        let Attention { heads, kv_heads, head_dim, .. } = *self.attention;
        Launch {
            function: "write_cache",
            grid: [self.rows, 1, 1],
            threads: 128,
            shared_floats: 0,
            scalars: vec![whole(heads), whole(kv_heads), whole(head_dim)],
        }
    }

    fn twin(&self, sources: &[Source<'_>], out: &mut [f32]) {
        let (qkv, places) = (sources[0].floats(), sources[1].wholes());
        let Attention { heads, kv_heads, head_dim, .. } = *self.attention;
        for (row, place) in qkv.chunks_exact(self.attention.qkv_width()).zip(places) {
            let (block, token) = (*place as usize / BLOCK_TOKENS, *place as usize % BLOCK_TOKENS);
            let page = &mut out[block * block_floats(kv_heads, head_dim)..];
            for (head, numbers) in row[heads * head_dim..].chunks_exact(head_dim).enumerate() {
                page[(head * BLOCK_TOKENS + token) * head_dim..][..head_dim].copy_from_slice(numbers);
            }
        }
    }
}
