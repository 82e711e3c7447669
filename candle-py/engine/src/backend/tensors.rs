//! The backend trait on Candle's tensors, on any device. Weights are in the dtype that was asked for, everything else is
//! float32. What Candle lacks is in [`crate::cuda`]. Each operation makes a new tensor.

mod cache;
mod matmul;
mod parts;

use std::ops::Range;
use std::sync::Arc;

use candle_core::{D, DType, Device, Tensor, WithDType};

use self::cache::TensorCache;
use self::parts::{Linear, Norm, Rows, Sequences, Steps, activated, check_heads, put};
use super::{After, Attention, Backend, Targets, joined_ranks};
use crate::comm::Communicator;
use crate::cpu::Activation;
use crate::cuda::{
    self, AddBias, AddBiasAndResidual, Attend, AttendCached, Gate, NormHeads, Pool, Rotate, TileList, WriteCache,
    sum_over_ranks,
};
use crate::error::{Error, Result};
use crate::generate::{BLOCK_TOKENS, StepSequence};
use crate::placement::Dtype;
use crate::pooling::Pooling;
use crate::rotary::Angles;
use crate::weights::Layers;

/// Tokens that go through the network together: enough to fill a device, few enough for the widest layer of a model of
/// billions to need less than a gigabyte.
const CHUNK_TOKENS: usize = 4096;

/// Rows whose logits are on the device at a time.
const LOGIT_ROWS: usize = 256;

/// The least norm that a row is divided by, as in torch's `normalize`.
const LEAST_NORM: f64 = 1e-12;

/// Candle's tensors on a device.
#[derive(Clone, Debug)]
pub struct TensorBackend {
    device: Device,
    dtype: DType,
    communicator: Option<Arc<dyn Communicator>>,
}

impl Layers for TensorBackend {
    type Embedding = Tensor;
    type Linear = Linear;
    type Norm = Norm;
}

impl TensorBackend {
    /// Computes on `device`, and holds weights as `dtype`.
    ///
    /// # Errors
    /// [`Error::Device`] for a dtype that Candle's tensors do not have.
    pub fn new(device: Device, dtype: Dtype) -> Result<Self> {
        Ok(Self { device, dtype: dtype.of_tensors()?, communicator: None })
    }

    /// Numbers of the host on the device; Candle does not count them.
    fn upload<T: WithDType>(&self, numbers: Vec<T>, shape: (usize, usize)) -> Result<Tensor> {
        if numbers.len() != shape.0 * shape.1 {
            return Err(Error::internal(format!("{} numbers are no tensor of shape: `{shape:?}`", numbers.len())));
        }
        Ok(Tensor::from_vec(numbers, shape, &self.device)?)
    }

    /// A list of whole numbers on the device.
    fn list(&self, numbers: &[u32]) -> Result<Tensor> {
        Ok(self.upload(numbers.to_vec(), (1, numbers.len()))?.squeeze(0)?)
    }

    /// A weight of the host, on the device.
    fn weight(&self, tensor: &Tensor, dtype: DType) -> Result<Tensor> {
        Ok(tensor.to_device(&self.device)?.to_dtype(dtype)?.contiguous()?)
    }

    /// `table[ids[i] - first]` in float32, zeros where the table has no such row.
    fn rows_of(&self, table: &Tensor, first: usize, ids: &[u32]) -> Result<Tensor> {
        let count = table.dim(0)?;
        let place = |id: &u32| (*id as usize).checked_sub(first).filter(|place| *place < count);
        let places: Vec<Option<usize>> = ids.iter().map(place).collect();
        let known: Vec<u32> = places.iter().map(|place| place.unwrap_or(0) as u32).collect();
        let rows = table.index_select(&self.list(&known)?, 0)?.to_dtype(DType::F32)?;
        if places.iter().all(Option::is_some) {
            return Ok(rows);
        }
        let is_there = places.iter().map(|place| if place.is_some() { 1.0_f32 } else { 0.0 });
        Ok(rows.broadcast_mul(&self.upload(is_there.collect(), (ids.len(), 1))?)?)
    }

    /// `after(x @ weight^T + bias)`.
    fn product(&self, layer: &Linear, x: &Tensor, after: After<'_, Rows>) -> Result<Tensor> {
        let out = matmul::by_transposed(x, &layer.weight)?;
        let (rows, width) = out.dims2()?;
        match (&layer.bias, after) {
            (None, After::Nothing) => Ok(out),
            (None, After::Activation(activation)) => Ok(activated(&out, activation)?),
            (None, After::Add(other)) => Ok((out + other.get()?)?),
            (Some(bias), After::Add(other)) => {
                cuda::in_place(&AddBiasAndResidual { rows, width }, &out, &[bias, other.get()?])?;
                Ok(out)
            }
            (Some(bias), after) => {
                let activation =
                    if let After::Activation(activation) = after { activation } else { Activation::Identity };
                cuda::in_place(&AddBias { rows, width, activation }, &out, &[bias])?;
                Ok(out)
            }
        }
    }

    /// The numbers of a tensor on the host.
    fn download(x: &Tensor) -> Result<Vec<f32>> {
        Ok(x.flatten_all()?.to_vec1()?)
    }
}

impl Backend for TensorBackend {
    /// Less goes to the device so, and it converts faster.
    const TAKES_STORED: bool = true;

    type Buffer = Rows;
    type Cache = TensorCache;
    type Sequences<'a> = Sequences;
    type Steps<'a> = Steps;
    type Rotation<'a> = Tensor;

    fn within(self, communicator: Arc<dyn Communicator>) -> Self {
        Self { communicator: Some(communicator), ..self }
    }

    fn spread(&self, _spread: bool) -> Self {
        self.clone()
    }

    fn chunk_tokens(&self) -> Option<usize> {
        Some(CHUNK_TOKENS)
    }

    fn cache(&self, layers: usize, kv_heads: usize, head_dim: usize) -> TensorCache {
        TensorCache::new(self.device.clone(), layers, kv_heads, head_dim)
    }

    fn embedding(&self, table: Tensor) -> Result<Tensor> {
        self.weight(&table, self.dtype)
    }

    fn linear(&self, weight: Tensor, bias: Option<Tensor>) -> Result<Linear> {
        let bias = bias.map(|bias| self.weight(&bias, DType::F32)).transpose()?;
        Ok(Linear { weight: self.weight(&weight, self.dtype)?, bias })
    }

    fn norm(&self, weight: Tensor, bias: Option<Tensor>, eps: f32) -> Result<Norm> {
        let (width, has_bias) = (weight.dims1()?, bias.is_some());
        let both = [Some(weight), bias].into_iter().flatten();
        let both = both.map(|tensor| self.weight(&tensor, DType::F32)).collect::<Result<Vec<_>>>()?;
        let weight = Tensor::cat(&both, 0)?;
        Ok(Norm { weight, width, eps, centred: true, bias: has_bias })
    }

    fn rms_norm(&self, weight: Tensor, eps: f32) -> Result<Norm> {
        Ok(Norm { centred: false, ..self.norm(weight, None, eps)? })
    }

    fn sequences(&self, offsets: &[usize]) -> Result<Sequences> {
        let TileList { numbers, tiles } = TileList::of_sequences(offsets);
        Ok(Sequences { list: self.list(&numbers)?, tiles: [tiles, numbers.len()] })
    }

    fn steps(&self, sequences: &[StepSequence]) -> Result<Steps> {
        let place = |sequence: &StepSequence, token: usize| {
            let position = sequence.start + token;
            let block = sequence.blocks[position / BLOCK_TOKENS] as usize;
            (block * BLOCK_TOKENS + position % BLOCK_TOKENS) as u32
        };
        let places = sequences.iter();
        let places = places.flat_map(|sequence| (0..sequence.tokens.len()).map(move |token| place(sequence, token)));
        let places: Vec<u32> = places.collect();
        let TileList { numbers, tiles } = TileList::of_steps(sequences);
        Ok(Steps { list: self.list(&numbers)?, tiles: [tiles, numbers.len()], places: self.list(&places)? })
    }

    fn rotation(&self, angles: &Angles, positions: &[usize]) -> Result<Tensor> {
        let half = angles.pairs;
        let mut numbers = Vec::with_capacity(positions.len() * 2 * half);
        for position in positions {
            let at = position * half..(position + 1) * half;
            numbers.extend_from_slice(&angles.cos[at.clone()]);
            numbers.extend_from_slice(&angles.sin[at]);
        }
        self.upload(numbers, (positions.len(), 2 * half))
    }

    fn gather_add(&self, table: &Tensor, ids: &[u32], out: &mut Rows) -> Result<()> {
        let rows = (out.get()? + self.rows_of(table, 0, ids)?)?;
        out.set(rows)
    }

    fn gather_part(&self, table: &Tensor, first: usize, ids: &[u32], out: &mut Rows) -> Result<()> {
        out.set(self.rows_of(table, first, ids)?)
    }

    fn gather_weight(&self, linear: &Linear, first: usize, ids: &[u32], out: &mut Rows) -> Result<()> {
        out.set(self.rows_of(&linear.weight, first, ids)?)
    }

    fn project(&self, layer: &Linear, x: &Rows, after: After<'_, Rows>, out: &mut Rows) -> Result<()> {
        let product = self.product(layer, x.get()?, after)?;
        out.set(product)
    }

    fn normalize(&self, norm: &Norm, x: &mut Rows) -> Result<()> {
        let rows = x.get()?;
        let Norm { width, eps, centred, bias, .. } = *norm;
        let kernel = cuda::Norm { rows: rows.dim(0)?, width, eps, centred, bias };
        let rows = cuda::fresh(&kernel, rows.shape(), &[rows, &norm.weight])?;
        x.set(rows)
    }

    fn normalize_heads(&self, norms: &[Norm; 2], attention: &Attention, qkv: &mut Rows) -> Result<()> {
        let rows = qkv.get()?;
        let [queries, keys] = norms;
        let kernel = NormHeads { attention, rows: rows.dim(0)?, eps: [queries.eps, keys.eps] };
        Ok(cuda::in_place(&kernel, rows, &[&queries.weight, &keys.weight])?)
    }

    fn copy(&self, x: &Rows, out: &mut Rows) -> Result<()> {
        // What is written in place is written by nobody else: rows of queries, keys and values.
        out.set(x.get()?.clone())
    }

    fn gate(&self, x: &Rows, activation: Activation, out: &mut Rows) -> Result<()> {
        let x = x.get()?;
        let (rows, half) = (x.dim(0)?, x.dim(1)? / 2);
        out.set(cuda::fresh(&Gate { rows, half, activation }, (rows, half), &[x])?)
    }

    fn rotate(&self, rotation: &Tensor, attention: &Attention, qkv: &mut Rows) -> Result<()> {
        let rows = qkv.get()?;
        Ok(cuda::in_place(&Rotate { attention, rows: rows.dim(0)? }, rows, &[rotation])?)
    }

    fn attend(&self, attention: &Attention, sequences: &Sequences, qkv: &Rows, out: &mut Rows) -> Result<()> {
        check_heads(attention)?;
        let qkv = qkv.get()?;
        let (rows, width) = (qkv.dim(0)?, attention.heads * attention.head_dim);
        let kernel = Attend { attention, rows, tiles: sequences.tiles };
        out.set(cuda::fresh(&kernel, (rows, width), &[qkv, &sequences.list])?)
    }

    fn attend_cached(
        &self,
        attention: &Attention,
        layer: usize,
        steps: &Steps,
        qkv: &Rows,
        cache: &mut &mut TensorCache,
        out: &mut Rows,
    ) -> Result<()> {
        check_heads(attention)?;
        let (qkv, pages) = (qkv.get()?, cache.pages(layer)?);
        let (rows, blocks) = (qkv.dim(0)?, pages.dim(0)?);
        cuda::in_place(&WriteCache { attention, rows, blocks }, pages, &[qkv, &steps.places])?;
        let kernel = AttendCached { attention, rows, tiles: steps.tiles, blocks };
        out.set(cuda::fresh(&kernel, (rows, attention.heads * attention.head_dim), &[qkv, pages, &steps.list])?)
    }

    fn pick(&self, x: &Rows, rows: &[usize], out: &mut Rows) -> Result<()> {
        let rows: Vec<u32> = rows.iter().map(|row| *row as u32).collect();
        if rows.is_empty() {
            *out = Rows::default();
            return Ok(());
        }
        out.set(x.get()?.index_select(&self.list(&rows)?, 0)?)
    }

    fn pool(&self, pooling: &Pooling, offsets: &[usize], skip: usize, x: &Rows, out: &mut Rows) -> Result<()> {
        let x = x.get()?;
        let ((rows, width), sequences) = (x.dims2()?, offsets.len() - 1);
        let offsets: Vec<u32> = offsets.iter().map(|offset| *offset as u32).collect();
        let offsets = self.list(&offsets)?;
        let pool = |mode| {
            let kernel = Pool { mode, rows, sequences, width, skip };
            cuda::fresh(&kernel, (sequences, width), &[x, &offsets])
        };
        let parts = pooling.modes().iter().map(|mode| pool(*mode)).collect::<candle_core::Result<Vec<_>>>()?;
        out.set(Tensor::cat(&parts, 1)?)
    }

    fn l2_normalize(&self, x: &mut Rows) -> Result<()> {
        let rows = x.get()?;
        let norms = rows.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?.maximum(LEAST_NORM)?;
        let rows = rows.broadcast_div(&norms)?;
        x.set(rows)
    }

    fn read(&self, x: &Rows, width: usize, out: &mut [f32]) -> Result<()> {
        put(&Self::download(&x.get()?.narrow(1, 0, width)?.contiguous()?)?, out)
    }

    fn project_out(&self, layer: &Linear, x: &Rows, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let width = layer.weight.dim(0)?;
        for (first, out) in rows.clone().step_by(LOGIT_ROWS).zip(out.chunks_mut(LOGIT_ROWS * width)) {
            let rows = x.get()?.narrow(0, first, LOGIT_ROWS.min(rows.end - first))?;
            put(&Self::download(&self.product(layer, &rows, After::Nothing)?)?, out)?;
        }
        Ok(())
    }

    fn log_sums(
        &self,
        head: &Linear,
        x: &Rows,
        rows: Range<usize>,
        targets: Targets<'_>,
        _scratch: &mut Rows,
        out: &mut [[f32; 2]],
    ) -> Result<()> {
        let (width, start) = (head.weight.dim(0)?, targets.first);
        let blocks = rows.step_by(LOGIT_ROWS).zip(targets.ids.chunks(LOGIT_ROWS)).zip(out.chunks_mut(LOGIT_ROWS));
        for ((first, targets), out) in blocks {
            let logits = self.product(head, &x.get()?.narrow(0, first, targets.len())?, After::Nothing)?;
            let place = |id: &u32| (*id as usize).checked_sub(start).filter(|place| *place < width);
            let places: Vec<Option<usize>> = targets.iter().map(place).collect();
            let known = places.iter().map(|place| place.unwrap_or(0) as u32).collect();
            let of_targets = Self::download(&logits.gather(&self.upload(known, (targets.len(), 1))?, 1)?)?;
            let most = logits.max_keepdim(D::Minus1)?;
            let sums = logits.broadcast_sub(&most)?.exp()?.sum_keepdim(D::Minus1)?.log()?;
            let sums = Self::download(&(sums + most)?)?;
            for (((out, place), logit), sum) in out.iter_mut().zip(places).zip(of_targets).zip(sums) {
                *out = [if place.is_some() { logit } else { 0.0 }, sum];
            }
        }
        Ok(())
    }

    fn reduce(&self, x: &mut Rows) -> Result<()> {
        let Some(communicator) = &self.communicator else { return Ok(()) };
        let sum = sum_over_ranks(&**communicator, x.get()?)?;
        x.set(sum)
    }

    fn gather_ranks(&self, own: &[f32], all: &mut Vec<f32>) -> Result<()> {
        joined_ranks(self.communicator.as_deref(), own, all)
    }
}
