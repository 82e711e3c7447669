//! Norms of rows and of heads. Mean first, squares of what is left after: in one pass they cancel where the mean is large.

use super::{Kernel, Launch, Scalar, Size, Source, in_file, whole};
use crate::backend::Attention;

/// Threads of a warp, whose sum is one float.
const WARP: usize = 32;

/// Threads of a block that has a row.
const THREADS: usize = 128;

/// Normalises rows. The weights are followed by as many biases, or by none.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    pub rows: usize,
    pub width: usize,
    pub eps: f32,
    /// Whether the mean is taken off.
    pub centred: bool,
    pub bias: bool,
}

/// Normalises the heads of queries and keys in `(queries, keys, values)` rows by the mean square, with weights
/// of the queries and of the keys.
#[derive(Clone, Copy, Debug)]
pub struct NormHeads<'a> {
    pub attention: &'a Attention,
    pub rows: usize,
    /// Of queries and keys.
    pub eps: [f32; 2],
}

/// `row * weight / root of the mean square`, in place, of numbers whose mean has been taken off where it has to be.
fn scale(row: &mut [f64], weight: &[f32], eps: f32) {
    let square = row.iter().map(|value| value * value).sum::<f64>() / row.len() as f64;
    let factor = 1.0 / (square + f64::from(eps)).sqrt();
    row.iter_mut().zip(weight).for_each(|(value, weight)| *value *= factor * f64::from(*weight));
}

impl Kernel for Norm {
    in_file!("norm");

    fn out_len(&self) -> usize {
        self.rows * self.width
    }

    fn sources(&self) -> Vec<Size> {
        vec![Size::Floats(self.rows * self.width), Size::Floats(self.width * (1 + usize::from(self.bias)))]
    }

    fn launch(&self) -> Launch {
        Launch {
            function: "norm_rows",
            grid: [self.rows, 1, 1],
            threads: THREADS,
            shared_floats: THREADS / WARP,
            scalars: vec![
                whole(self.width),
                Scalar::Float(self.eps),
                whole(usize::from(self.centred)),
                whole(usize::from(self.bias)),
            ],
        }
    }

    fn twin(&self, sources: &[Source<'_>], out: &mut [f32]) {
        let (weight, bias) = sources[1].floats().split_at(self.width);
        for (row, out) in sources[0].floats().chunks_exact(self.width).zip(out.chunks_exact_mut(self.width)) {
            let mut row: Vec<f64> = row.iter().map(|value| f64::from(*value)).collect();
            if self.centred {
                let mean = row.iter().sum::<f64>() / self.width as f64;
                row.iter_mut().for_each(|value| *value -= mean);
            }
            scale(&mut row, weight, self.eps);
            row.iter_mut().zip(bias).for_each(|(value, bias)| *value += f64::from(*bias));
            out.iter_mut().zip(row).for_each(|(out, value)| *out = value as f32);
        }
    }
}

impl Kernel for NormHeads<'_> {
    in_file!("norm");

    fn out_len(&self) -> usize {
        self.rows * self.attention.qkv_width()
    }

    fn sources(&self) -> Vec<Size> {
        vec![Size::Floats(self.attention.head_dim); 2]
    }

    fn launch(&self) -> Launch {
        let Attention { heads, kv_heads, head_dim, .. } = *self.attention;
        Launch {
            function: "norm_heads",
            grid: [self.rows, heads + kv_heads, 1],
            threads: WARP,
            shared_floats: 0,
            scalars: [whole(heads), whole(kv_heads), whole(head_dim)]
                .into_iter()
                .chain(self.eps.map(Scalar::Float))
                .collect(),
        }
    }

    fn twin(&self, sources: &[Source<'_>], out: &mut [f32]) {
        let Attention { heads, kv_heads, head_dim, .. } = *self.attention;
        let (queries, keys) = (sources[0].floats(), sources[1].floats());
        for row in out.chunks_exact_mut(self.attention.qkv_width()) {
            for (index, head) in row.chunks_exact_mut(head_dim).take(heads + kv_heads).enumerate() {
                let (weight, eps) = if index < heads { (queries, self.eps[0]) } else { (keys, self.eps[1]) };
                let mut numbers: Vec<f64> = head.iter().map(|value| f64::from(*value)).collect();
                scale(&mut numbers, weight, eps);
                head.iter_mut().zip(numbers).for_each(|(out, value)| *out = value as f32);
            }
        }
    }
}
