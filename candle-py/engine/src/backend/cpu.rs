//! The backend trait on the CPU kernels. A call runs on the calling thread and allocates nothing once its buffers have
//! grown; where there are fewer chunks than threads, it hands blocks of rows to the pool that it is called in. A row
//! comes out the same either way.

use candle_core::{Storage as TensorStorage, Tensor};
use rayon::iter::{IndexedParallelIterator, ParallelIterator};
use rayon::slice::ParallelSliceMut;

use super::{After, Attention, Backend};
use crate::cpu::{Activation, AttentionArgs, Epilogue, Kernels, PackedMatrix, Storage, bfloat16_bits};
use crate::error::{Error, Result};
use crate::pooling::Pooling;
use crate::rotary::Angles;
use crate::weights::Layers;

/// Rows that are handed to another thread at once.
const BLOCK_ROWS: usize = 64;

/// The CPU with the kernels of one instruction set.
#[derive(Clone, Copy, Debug)]
pub struct CpuBackend {
    kernels: Kernels,
    storage: Storage,
    spread: bool,
}

/// Rows of `width` numbers.
#[derive(Debug, Default)]
pub struct Rows {
    data: Vec<f32>,
    width: usize,
}

impl Rows {
    fn count(&self) -> usize {
        self.data.len().checked_div(self.width).unwrap_or(0)
    }

    /// `count` rows from `first` on.
    fn part(&self, first: usize, count: usize) -> &[f32] {
        &self.data[first * self.width..(first + count) * self.width]
    }

    /// Makes room for `count` rows, whose content is whatever was there.
    fn reshape(&mut self, count: usize, width: usize) -> &mut [f32] {
        self.width = width;
        self.data.resize(count * width, 0.0);
        &mut self.data
    }

    fn rows_mut(&mut self) -> impl Iterator<Item = &mut [f32]> {
        self.data.chunks_exact_mut(self.width.max(1))
    }
}

/// A table of rows.
#[derive(Debug)]
pub struct Embedding {
    table: Table,
    width: usize,
}

#[derive(Debug)]
enum Table {
    Float32(Vec<f32>),
    /// The upper halves of float32.
    Bfloat16(Vec<u16>),
}

impl Embedding {
    /// `out[i] = put(out[i], row[i])`.
    fn row(&self, id: u32, out: &mut [f32], put: impl Fn(&mut f32, f32)) {
        let start = id as usize * self.width;
        match &self.table {
            Table::Float32(table) => {
                out.iter_mut().zip(&table[start..start + self.width]).for_each(|(out, value)| put(out, *value));
            }
            Table::Bfloat16(table) => {
                let row = table[start..start + self.width].iter().map(|bits| f32::from_bits(u32::from(*bits) << 16));
                out.iter_mut().zip(row).for_each(|(out, value)| put(out, value));
            }
        }
    }
}

/// A packed matrix and its bias.
#[derive(Debug)]
pub struct Linear {
    weight: PackedMatrix,
    bias: Option<Vec<f32>>,
}

/// A layer norm.
#[derive(Debug)]
pub struct Norm {
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    eps: f32,
}

impl Layers for CpuBackend {
    type Embedding = Embedding;
    type Linear = Linear;
    type Norm = Norm;
}

impl CpuBackend {
    /// Computes with `kernels`, each call on one thread, and holds weights as `storage` says.
    pub fn new(kernels: Kernels, storage: Storage) -> Self {
        Self { kernels, storage, spread: false }
    }

    /// The same, with calls spread over the threads of the pool that they are made in, or not.
    pub fn spread(self, spread: bool) -> Self {
        Self { spread, ..self }
    }

    /// Calls `work` on rows of `out`, `width` wide, from the row it names: all at once, or block by block.
    fn by_rows(&self, out: &mut [f32], width: usize, work: impl Fn(usize, &mut [f32]) + Send + Sync) {
        if !self.spread || out.len() <= BLOCK_ROWS * width {
            return work(0, out);
        }
        let blocks = out.par_chunks_mut(BLOCK_ROWS * width).enumerate();
        blocks.for_each(|(block, out)| work(block * BLOCK_ROWS, out));
    }
}

/// Hands over the numbers of a tensor, row-major.
fn with_numbers<T>(tensor: &Tensor, work: impl FnOnce(&[f32]) -> T) -> Result<T> {
    let (storage, layout) = tensor.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (TensorStorage::Cpu(storage), Some((start, end))) => Ok(work(&storage.as_slice::<f32>()?[start..end])),
        _ => Err(Error::internal(format!("weight is not contiguous on the CPU: `{layout:?}`"))),
    }
}

fn copied(tensor: &Tensor) -> Result<Vec<f32>> {
    with_numbers(tensor, <[f32]>::to_vec)
}

impl Backend for CpuBackend {
    type Buffer = Rows;

    fn embedding(&self, table: Tensor) -> Result<Embedding> {
        let (_, width) = table.dims2()?;
        let table = match self.storage {
            Storage::Float32 => Table::Float32(copied(&table)?),
            Storage::Bfloat16 => Table::Bfloat16(with_numbers(&table, |numbers| {
                numbers.iter().map(|value| bfloat16_bits(*value)).collect()
            })?),
        };
        Ok(Embedding { table, width })
    }

    fn linear(&self, weight: Tensor, bias: Option<Tensor>) -> Result<Linear> {
        let (out_features, in_features) = weight.dims2()?;
        let weight =
            with_numbers(&weight, |numbers| self.kernels.pack(numbers, out_features, in_features, self.storage))?;
        Ok(Linear { weight, bias: bias.as_ref().map(copied).transpose()? })
    }

    fn norm(&self, weight: Tensor, bias: Option<Tensor>, eps: f32) -> Result<Norm> {
        Ok(Norm { weight: copied(&weight)?, bias: bias.as_ref().map(copied).transpose()?, eps })
    }

    fn gather(&self, table: &Embedding, ids: &[u32], out: &mut Rows) {
        out.reshape(ids.len(), table.width);
        out.rows_mut().zip(ids).for_each(|(out, id)| table.row(*id, out, |out, value| *out = value));
    }

    fn gather_add(&self, table: &Embedding, ids: &[u32], out: &mut Rows) {
        out.rows_mut().zip(ids).for_each(|(out, id)| table.row(*id, out, |out, value| *out += value));
    }

    fn project(&self, linear: &Linear, x: &Rows, after: After<'_, Rows>, out: &mut Rows) {
        let Linear { weight, bias } = linear;
        let width = weight.n();
        self.by_rows(out.reshape(x.count(), width), width, |first, out| {
            let rows = out.len() / width;
            let epilogue = match after {
                After::Nothing => Epilogue::None,
                After::Activation(activation) => Epilogue::Activation(activation),
                After::Add(other) => Epilogue::Add(other.part(first, rows), other.width),
            };
            self.kernels.linear(x.part(first, rows), rows, weight, bias.as_deref(), epilogue, out, width);
        });
    }

    fn normalize(&self, norm: &Norm, x: &mut Rows) {
        self.by_rows(&mut x.data, x.width, |_, rows| {
            self.kernels.layer_norm(rows, x.width, &norm.weight, norm.bias.as_deref(), norm.eps);
        });
    }

    fn copy(&self, x: &Rows, out: &mut Rows) {
        out.reshape(x.count(), x.width).copy_from_slice(&x.data);
    }

    fn gate(&self, x: &Rows, activation: Activation, out: &mut Rows) {
        let half = x.width / 2;
        self.by_rows(out.reshape(x.count(), half), half, |first, out| {
            let rows = out.len() / half;
            self.kernels.gated(x.part(first, rows), rows, half, activation, out);
        });
    }

    fn rotate(&self, angles: &Angles, offsets: &[usize], attention: &Attention, qkv: &mut Rows) {
        let stride = qkv.width;
        for bounds in offsets.windows(2) {
            let length = bounds[1] - bounds[0];
            let count = length * attention.head_dim / 2;
            self.kernels.rotary(
                &mut qkv.data[bounds[0] * stride..bounds[1] * stride],
                stride,
                length,
                2 * attention.heads,
                attention.head_dim,
                &angles.cos[..count],
                &angles.sin[..count],
            );
        }
    }

    fn attend(&self, attention: &Attention, offsets: &[usize], qkv: &Rows, scratch: &mut Rows, out: &mut Rows) {
        let hidden = attention.heads * attention.head_dim;
        let out = out.reshape(qkv.count(), hidden);
        for bounds in offsets.windows(2) {
            let length = bounds[1] - bounds[0];
            let sequence = qkv.part(bounds[0], length);
            let out = &mut out[bounds[0] * hidden..bounds[1] * hidden];
            if !self.spread || length <= BLOCK_ROWS {
                self.attend_rows(attention, sequence, 0, &mut scratch.data, out);
                continue;
            }
            let blocks = out.par_chunks_mut(BLOCK_ROWS * hidden).enumerate();
            blocks.for_each_init(Vec::new, |scratch, (block, out)| {
                self.attend_rows(attention, sequence, block * BLOCK_ROWS, scratch, out);
            });
        }
    }

    fn pool(&self, pooling: &Pooling, offsets: &[usize], skip: usize, x: &Rows, out: &mut Rows) {
        out.reshape(offsets.len() - 1, pooling.width(x.width));
        for (bounds, out) in offsets.windows(2).zip(out.rows_mut()) {
            pooling.apply(&x.data[bounds[0] * x.width..bounds[1] * x.width], x.width, skip, out);
        }
    }

    fn l2_normalize(&self, x: &mut Rows) {
        x.rows_mut().for_each(|row| self.kernels.l2_normalize(row));
    }

    fn read(&self, x: &Rows, width: usize, out: &mut [f32]) {
        let rows = x.data.chunks_exact(x.width.max(1));
        out.chunks_exact_mut(width.max(1)).zip(rows).for_each(|(out, row)| out.copy_from_slice(&row[..width]));
    }
}

impl CpuBackend {
    /// Attention of a sequence's rows from `first` on, as many as `out` holds, to the whole sequence.
    fn attend_rows(
        &self,
        attention: &Attention,
        sequence: &[f32],
        first: usize,
        scratch: &mut Vec<f32>,
        out: &mut [f32],
    ) {
        let hidden = attention.heads * attention.head_dim;
        let stride = 3 * hidden;
        let args = AttentionArgs {
            q: &sequence[first * stride..],
            k: &sequence[hidden..],
            v: &sequence[2 * hidden..],
            q_stride: stride,
            k_stride: stride,
            v_stride: stride,
            out_stride: hidden,
            q_len: out.len() / hidden,
            k_len: sequence.len() / stride,
            heads: attention.heads,
            kv_heads: attention.heads,
            head_dim: attention.head_dim,
            scale: 1.0 / (attention.head_dim as f32).sqrt(),
            causal: false,
            q_offset: first,
            window: attention.window.map(|tokens| (tokens, tokens)),
        };
        self.kernels.attention(&args, scratch, out);
    }
}
