//! The backend trait on the CPU kernels. A call runs on the calling thread and allocates nothing once its buffers have
//! grown; where there are fewer chunks than threads, it hands rows or columns to the pool that it is called in. A row comes
//! out the same either way.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use candle_core::Tensor;

use super::cpu_layers::{Embedding, Linear, Norm, NormKind, Table, copied, place, with_numbers};
use super::rows::{Rows, by_rows, linear};
use super::{After, Attention, Backend, FeedForward, Targets, cpu_attention, joined_ranks};
use crate::comm::Communicator;
use crate::cpu::{Activation, Epilogue, Isa, Kernels, PageNumbers, PageShape, Storage, bfloat16_bits};
use crate::error::Result;
use crate::generate::StepSequence;
use crate::kv_cache::{CachePart, PagedCache};
use crate::pooling::Pooling;
use crate::rotary::Angles;
use crate::weights::Layers;

/// Rows whose logits are held at a time where only one number of each is wanted.
const LOGIT_ROWS: usize = 32;

/// Tokens that a lane needs for each byte of a weight's numbers, which it reads by itself: with fewer it waits for memory.
const LANE_TOKENS_PER_BYTE: usize = 24;

/// Rows that go through a feed-forward together: what lies between its two layers is wide, and stays small however long a
/// sequence is.
const FEED_ROWS: usize = 512;

/// The CPU with the kernels of one instruction set.
#[derive(Clone, Debug)]
pub struct CpuBackend {
    kernels: Kernels,
    storage: Storage,
    spread: bool,
    communicator: Option<Arc<dyn Communicator>>,
}

impl Layers for CpuBackend {
    type Embedding = Embedding;
    type Linear = Linear;
    type Norm = Norm;
}

impl CpuBackend {
    /// Computes with `kernels`, each call on one thread, and holds weights as `storage` says.
    pub fn new(kernels: Kernels, storage: Storage) -> Self {
        Self { kernels, storage, spread: false, communicator: None }
    }
}

impl Backend for CpuBackend {
    const TAKES_STORED: bool = false;

    type Buffer = Rows;
    type Cache = PagedCache;
    type Sequences<'a> = &'a [usize];
    /// A part of the cache knows its sequences.
    type Steps<'a> = ();
    type Rotation<'a> = (&'a Angles, &'a [usize]);

    fn within(self, communicator: Arc<dyn Communicator>) -> Self {
        Self { communicator: Some(communicator), ..self }
    }

    fn spread(&self, spread: bool) -> Self {
        Self { spread, ..self.clone() }
    }

    fn chunk_tokens(&self) -> Option<usize> {
        None
    }

    fn lane_tokens(&self) -> Option<usize> {
        let is_apart = self.communicator.is_none();
        let bytes = match self.storage {
            Storage::Float32 => size_of::<f32>(),
            // Tiles are through with a weight long before the next has come, even with all tokens.
            Storage::Bfloat16 if self.kernels.isa() >= Isa::Amx => return None,
            Storage::Bfloat16 => size_of::<u16>(),
            Storage::Int8 => size_of::<u8>(),
        };
        is_apart.then_some(LANE_TOKENS_PER_BYTE * bytes)
    }

    fn cache(&self, layers: usize, kv_heads: usize, head_dim: usize) -> PagedCache {
        let numbers = match self.storage {
            Storage::Float32 => PageNumbers::Float32,
            Storage::Bfloat16 | Storage::Int8 => PageNumbers::Float16,
        };
        PagedCache::new(layers, PageShape { kv_heads, head_dim, numbers })
    }

    fn embedding(&self, table: Tensor) -> Result<Embedding> {
        let (_, width) = table.dims2()?;
        let table = match self.storage {
            Storage::Float32 => Table::Float32(copied(&table)?),
            // A table is only looked up: bytes would save little time, and cost exactness.
            Storage::Bfloat16 | Storage::Int8 => Table::Bfloat16(with_numbers(&table, |numbers| {
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
        let bias = bias.as_ref().map(copied).transpose()?;
        Ok(Norm { kind: NormKind::Layer(bias), weight: copied(&weight)?, eps })
    }

    fn rms_norm(&self, weight: Tensor, eps: f32) -> Result<Norm> {
        Ok(Norm { kind: NormKind::Rms, weight: copied(&weight)?, eps })
    }

    fn sequences<'a>(&self, offsets: &'a [usize]) -> Result<&'a [usize]> {
        Ok(offsets)
    }

    fn steps(&self, _sequences: &[StepSequence]) -> Result<()> {
        Ok(())
    }

    fn rotation<'a>(&self, angles: &'a Angles, positions: &'a [usize]) -> Result<(&'a Angles, &'a [usize])> {
        Ok((angles, positions))
    }

    fn gather_add(&self, table: &Embedding, ids: &[u32], out: &mut Rows) -> Result<()> {
        out.rows_mut().zip(ids).for_each(|(out, id)| table.row(*id, out, |out, value| *out += value));
        Ok(())
    }

    fn gather_part(&self, table: &Embedding, first: usize, ids: &[u32], out: &mut Rows) -> Result<()> {
        out.reshape(ids.len(), table.width);
        for (out, id) in out.rows_mut().zip(ids) {
            match place(*id, first, table.rows()) {
                Some(row) => table.row(row as u32, out, |out, value| *out = value),
                None => out.fill(0.0),
            }
        }
        Ok(())
    }

    fn gather_weight(&self, linear: &Linear, first: usize, ids: &[u32], out: &mut Rows) -> Result<()> {
        let width = linear.weight.k();
        by_rows(self.spread, out.reshape(ids.len(), width), width, |start, out| {
            for (out, id) in out.chunks_exact_mut(width).zip(&ids[start..]) {
                match place(*id, first, linear.weight.n()) {
                    Some(row) => linear.weight.copy_row(row, out),
                    None => out.fill(0.0),
                }
            }
        });
        Ok(())
    }

    fn project(&self, layer: &Linear, x: &Rows, after: After<'_, Rows>, out: &mut Rows) -> Result<()> {
        let Linear { weight, bias } = layer;
        let epilogue = match after {
            After::Nothing => Epilogue::None,
            After::Activation(activation) => Epilogue::Activation(activation),
            After::Add(other) => Epilogue::Add(other.data(), other.width),
        };
        let out = out.reshape(x.count(), weight.n());
        linear(self.spread, self.kernels, x.data(), weight, bias.as_deref(), epilogue, out);
        Ok(())
    }

    fn feed_forward(
        &self,
        layers: &FeedForward<Self>,
        x: &Rows,
        after: After<'_, Rows>,
        [pairs, inner]: [&mut Rows; 2],
        out: &mut Rows,
    ) -> Result<()> {
        let FeedForward { input, activation, output } = layers;
        let (double, single, width) = (input.weight.n(), output.weight.k(), output.weight.n());
        let blocks = out.reshape(x.count(), width).chunks_mut(FEED_ROWS * width);
        for (first, out) in (0..x.count()).step_by(FEED_ROWS).zip(blocks) {
            let rows = out.len() / width;
            let x = x.part(first, rows);
            let pairs = pairs.reshape(rows, double);
            linear(self.spread, self.kernels, x, &input.weight, input.bias.as_deref(), Epilogue::None, pairs);
            let inner = inner.reshape(rows, single);
            by_rows(self.spread, inner, single, |first, out| {
                let rows = out.len() / single;
                self.kernels.gated(&pairs[first * double..][..rows * double], rows, single, *activation, out);
            });
            let epilogue = match after {
                After::Nothing => Epilogue::None,
                After::Activation(activation) => Epilogue::Activation(activation),
                After::Add(residual) => Epilogue::Add(residual.part(first, rows), width),
            };
            linear(self.spread, self.kernels, inner, &output.weight, output.bias.as_deref(), epilogue, out);
        }
        Ok(())
    }

    fn normalize(&self, norm: &Norm, x: &mut Rows) -> Result<()> {
        let width = x.width;
        by_rows(self.spread, x.data_mut(), width, |_, rows| norm.apply(self.kernels, rows));
        Ok(())
    }

    fn normalize_heads(&self, norms: &[Norm; 2], attention: &Attention, qkv: &mut Rows) -> Result<()> {
        let [queries, keys] = [attention.heads, attention.kv_heads].map(|heads| heads * attention.head_dim);
        let width = qkv.width;
        by_rows(self.spread, qkv.data_mut(), width, |_, rows| {
            for row in rows.chunks_exact_mut(width) {
                norms[0].apply(self.kernels, &mut row[..queries]);
                norms[1].apply(self.kernels, &mut row[queries..queries + keys]);
            }
        });
        Ok(())
    }

    fn normalize_into(&self, norm: &Norm, x: &Rows, out: &mut Rows) -> Result<()> {
        let width = x.width;
        by_rows(self.spread, out.reshape(x.count(), width), width, |first, out| {
            // Row by row: what was just copied is still near.
            for (out, row) in out.chunks_exact_mut(width).zip(first..) {
                out.copy_from_slice(x.part(row, 1));
                norm.apply(self.kernels, out);
            }
        });
        Ok(())
    }

    fn copy(&self, x: &Rows, out: &mut Rows) -> Result<()> {
        out.reshape(x.count(), x.width).copy_from_slice(x.data());
        Ok(())
    }

    fn gate(&self, x: &Rows, activation: Activation, out: &mut Rows) -> Result<()> {
        let half = x.width / 2;
        by_rows(self.spread, out.reshape(x.count(), half), half, |first, out| {
            let rows = out.len() / half;
            self.kernels.gated(x.part(first, rows), rows, half, activation, out);
        });
        Ok(())
    }

    fn rotate(&self, rotation: &Self::Rotation<'_>, attention: &Attention, qkv: &mut Rows) -> Result<()> {
        let (angles, positions) = *rotation;
        let (stride, half) = (qkv.width, attention.head_dim / 2);
        let heads = attention.heads + attention.kv_heads;
        by_rows(self.spread, qkv.data_mut(), stride, |first, rows| {
            let positions = &positions[first..first + rows.len() / stride];
            let mut done = 0;
            // Neighbours mostly follow each other, and so do their angles.
            for run in positions.chunk_by(|one, next| one + 1 == *next) {
                let angles_at = run[0] * half..(run[0] + run.len()) * half;
                let (cos, sin) = (&angles.cos[angles_at.clone()], &angles.sin[angles_at]);
                let rows = &mut rows[done * stride..(done + run.len()) * stride];
                self.kernels.rotary(rows, stride, run.len(), heads, attention.head_dim, cos, sin);
                done += run.len();
            }
        });
        Ok(())
    }

    fn attend(&self, attention: &Attention, offsets: &&[usize], qkv: &Rows, out: &mut Rows) -> Result<()> {
        cpu_attention::attend(self.spread, self.kernels, attention, offsets, qkv, out);
        Ok(())
    }

    fn attend_cached(
        &self,
        attention: &Attention,
        layer: usize,
        _steps: &(),
        qkv: &Rows,
        cache: &mut CachePart<'_>,
        out: &mut Rows,
    ) -> Result<()> {
        let started = Instant::now();
        cpu_attention::attend_cached(self.spread, self.kernels, attention, layer, qkv, cache, out);
        cache.add_time(started.elapsed());
        Ok(())
    }

    fn pick(&self, x: &Rows, rows: &[usize], out: &mut Rows) -> Result<()> {
        out.reshape(rows.len(), x.width);
        out.rows_mut().zip(rows).for_each(|(out, row)| out.copy_from_slice(x.part(*row, 1)));
        Ok(())
    }

    fn pool(&self, pooling: &Pooling, offsets: &[usize], skip: usize, x: &Rows, out: &mut Rows) -> Result<()> {
        out.reshape(offsets.len() - 1, pooling.width(x.width));
        for (bounds, out) in offsets.windows(2).zip(out.rows_mut()) {
            pooling.apply(&x.data()[bounds[0] * x.width..bounds[1] * x.width], x.width, skip, out);
        }
        Ok(())
    }

    fn l2_normalize(&self, x: &mut Rows) -> Result<()> {
        x.rows_mut().for_each(|row| self.kernels.l2_normalize(row));
        Ok(())
    }

    fn read(&self, x: &Rows, width: usize, out: &mut [f32]) -> Result<()> {
        let rows = x.data().chunks_exact(x.width.max(1));
        out.chunks_exact_mut(width.max(1)).zip(rows).for_each(|(out, row)| out.copy_from_slice(&row[..width]));
        Ok(())
    }
    fn project_out(&self, layer: &Linear, x: &Rows, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let Linear { weight, bias } = layer;
        let x = x.part(rows.start, rows.len());
        linear(self.spread, self.kernels, x, weight, bias.as_deref(), Epilogue::None, out);
        Ok(())
    }

    fn log_sums(
        &self,
        head: &Linear,
        x: &Rows,
        rows: Range<usize>,
        targets: Targets<'_>,
        scratch: &mut Rows,
        out: &mut [[f32; 2]],
    ) -> Result<()> {
        let width = head.weight.n();
        let Targets { ids, first: start } = targets;
        let blocks = rows.clone().step_by(LOGIT_ROWS).zip(ids.chunks(LOGIT_ROWS)).zip(out.chunks_mut(LOGIT_ROWS));
        for ((first, targets), out) in blocks {
            let logits = scratch.reshape(targets.len(), width);
            self.project_out(head, x, first..first + targets.len(), logits)?;
            for ((row, target), out) in logits.chunks_exact_mut(width).zip(targets).zip(out) {
                let logit = place(*target, start, width).map_or(0.0, |place| row[place]);
                *out = [logit, self.kernels.log_sum_exp(row)];
            }
        }
        Ok(())
    }

    fn reduce(&self, x: &mut Rows) -> Result<()> {
        self.communicator.as_ref().map_or(Ok(()), |communicator| communicator.all_reduce_sum(x.data_mut()))
    }

    fn gather_ranks(&self, own: &[f32], all: &mut Vec<f32>) -> Result<()> {
        joined_ranks(self.communicator.as_deref(), own, all)
    }
}
