//! Pooling: the rows of each sequence become one.

use super::{Kernel, Launch, Size, Source, in_file, whole};
use crate::pooling::{Pooling, PoolingMode};

/// Features that a block of threads pools, one each.
const THREADS: usize = 128;

/// Pools rows `(rows, width)` by one mode; a sequence's first row, and the end of the last, are the other source.
#[derive(Clone, Copy, Debug)]
pub struct Pool {
    pub mode: PoolingMode,
    pub rows: usize,
    pub sequences: usize,
    pub width: usize,
    /// Rows at the start of each sequence that are left out.
    pub skip: usize,
}

impl Kernel for Pool {
    in_file!("pool");

    fn out_len(&self) -> usize {
        self.sequences * self.width
    }

    fn sources(&self) -> Vec<Size> {
        vec![Size::Floats(self.rows * self.width), Size::Wholes(self.sequences + 1)]
    }

    fn launch(&self) -> Launch {
        let mode = match self.mode {
            PoolingMode::Cls => 0,
            PoolingMode::Last => 1,
            PoolingMode::Max => 2,
            PoolingMode::Mean => 3,
            PoolingMode::MeanSqrtLen => 4,
            PoolingMode::WeightedMean => 5,
        };
        Launch {
            function: "pool",
            grid: [self.sequences, self.width.div_ceil(THREADS), 1],
            threads: THREADS,
            shared_floats: 0,
            scalars: vec![whole(self.width), whole(self.skip), whole(mode)],
        }
    }

    fn twin(&self, sources: &[Source<'_>], out: &mut [f32]) {
        let (x, offsets) = (sources[0].floats(), sources[1].wholes());
        let pooling = Pooling::new(vec![self.mode]);
        for (bounds, out) in offsets.windows(2).zip(out.chunks_exact_mut(self.width)) {
            let rows = bounds[0] as usize * self.width..bounds[1] as usize * self.width;
            pooling.apply(&x[rows], self.width, self.skip, out);
        }
    }
}
