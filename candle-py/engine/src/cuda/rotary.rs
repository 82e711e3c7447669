//! Rotary positions, from angles that the host has computed in f64.

use super::{Kernel, Launch, Size, Source, in_file, whole};
use crate::backend::Attention;

/// Rotates the heads of queries and keys in `(queries, keys, values)` rows: the first half of a head's numbers with the
/// second. Of every row, the cosines `(head_dim / 2)` are followed by the sines.
#[derive(Clone, Copy, Debug)]
pub struct Rotate<'a> {
    pub attention: &'a Attention,
    pub rows: usize,
}

impl Kernel for Rotate<'_> {
    in_file!("rotary");

    fn out_len(&self) -> usize {
        self.rows * self.attention.qkv_width()
    }

    fn sources(&self) -> Vec<Size> {
        vec![Size::Floats(self.rows * self.attention.head_dim)]
    }

    fn launch(&self) -> Launch {
        let Attention { heads, kv_heads, head_dim, .. } = *self.attention;
        Launch {
            function: "rotate",
            grid: [self.rows, 1, 1],
            threads: 128,
            shared_floats: 0,
            scalars: vec![whole(heads), whole(kv_heads), whole(head_dim)],
        }
    }

    fn twin(&self, sources: &[Source<'_>], out: &mut [f32]) {
        let Attention { heads, kv_heads, head_dim, .. } = *self.attention;
        let rows = out.chunks_exact_mut(self.attention.qkv_width());
        for (row, angles) in rows.zip(sources[0].floats().chunks_exact(head_dim)) {
            let (cos, sin) = angles.split_at(head_dim / 2);
            for head in row.chunks_exact_mut(head_dim).take(heads + kv_heads) {
                let (first, second) = head.split_at_mut(head_dim / 2);
                for (pair, (one, two)) in first.iter_mut().zip(second).enumerate() {
                    let (x, y) = (*one, *two);
                    *one = x * cos[pair] - y * sin[pair];
                    *two = y * cos[pair] + x * sin[pair];
                }
            }
        }
    }
}
