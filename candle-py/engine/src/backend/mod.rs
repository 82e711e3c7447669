//! What a model needs of a device. Models are written against this trait alone. Two backends have it: the CPU with kernels
//! of ours, and Candle's tensors on any device, of which CUDA is the one that is meant.

mod cpu;
mod cpu_attention;
mod cpu_layers;
mod rows;
mod tensors;

pub use self::cpu::CpuBackend;
pub use self::tensors::TensorBackend;

use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;

use crate::comm::Communicator;
use crate::cpu::Activation;
use crate::error::Result;
use crate::generate::StepSequence;
use crate::pooling::Pooling;
use crate::rotary::Angles;
use crate::weights::Layers;

/// A device: it takes layers in, and computes with them on its own buffers.
///
/// A buffer holds float32 rows; every operation that writes one sets its rows and width. Sequences lie one after the
/// other without padding; `offsets` tells where each begins, and where the last ends.
///
/// An operation fails where the device does: out of memory, or lost.
pub trait Backend: Layers + Clone + Send + Sync + 'static {
    /// Whether weights come as they are stored; else they come in float32.
    const TAKES_STORED: bool;

    /// Rows of activations.
    type Buffer: Default + Send;
    /// Keys and values of tokens that went through the model before.
    type Cache: KeyValueCache;
    /// Where whole sequences lie, as the attention is told.
    type Sequences<'a>: Send;
    /// The sequences of a step, and where the cache has them, as the attention is told.
    type Steps<'a>: Send;
    /// The angles of every row.
    type Rotation<'a>: Send;

    /// The same as a rank of a group.
    fn within(self, communicator: Arc<dyn Communicator>) -> Self;
    /// The same, with calls spread over the threads of the pool that they are made in, or not.
    fn spread(&self, spread: bool) -> Self;
    /// How many tokens go through the network together, one such chunk after the other; `None` where chunks are cut for
    /// threads, each of which computes its own.
    fn chunk_tokens(&self) -> Option<usize>;
    /// From how many tokens on a step is better cut into lanes, each computed by threads of its own, this many for each; `None`
    /// where it always goes as a whole.
    fn lane_tokens(&self) -> Option<usize> {
        None
    }
    /// A cache without blocks for so many layers.
    fn cache(&self, layers: usize, kv_heads: usize, head_dim: usize) -> Self::Cache;

    /// Takes a table of rows in.
    fn embedding(&self, table: Tensor) -> Result<Self::Embedding>;
    /// Takes a weight `(out_features, in_features)` and a bias in.
    fn linear(&self, weight: Tensor, bias: Option<Tensor>) -> Result<Self::Linear>;
    /// Takes a layer norm in.
    fn norm(&self, weight: Tensor, bias: Option<Tensor>, eps: f32) -> Result<Self::Norm>;
    /// Takes a root-mean-square norm in.
    fn rms_norm(&self, weight: Tensor, eps: f32) -> Result<Self::Norm>;

    /// Tells the attention of whole sequences where they lie.
    fn sequences<'a>(&self, offsets: &'a [usize]) -> Result<Self::Sequences<'a>>;
    /// Tells the attention of a step which tokens of which sequences it has.
    fn steps<'a>(&self, sequences: &'a [StepSequence]) -> Result<Self::Steps<'a>>;
    /// The angles of rows at these positions.
    fn rotation<'a>(&self, angles: &'a Angles, positions: &'a [usize]) -> Result<Self::Rotation<'a>>;

    /// `out[i] += table[ids[i]]`.
    fn gather_add(&self, table: &Self::Embedding, ids: &[u32], out: &mut Self::Buffer) -> Result<()>;
    /// `out[i] = table[ids[i] - first]`; zeros where the table has no such row.
    fn gather_part(&self, table: &Self::Embedding, first: usize, ids: &[u32], out: &mut Self::Buffer) -> Result<()>;
    /// The same of a linear layer's weight, read as a table.
    fn gather_weight(&self, linear: &Self::Linear, first: usize, ids: &[u32], out: &mut Self::Buffer) -> Result<()>;
    /// `out = after(x @ weight^T + bias)`.
    fn project(
        &self,
        linear: &Self::Linear,
        x: &Self::Buffer,
        after: After<'_, Self::Buffer>,
        out: &mut Self::Buffer,
    ) -> Result<()>;
    /// Normalisation in place.
    fn normalize(&self, norm: &Self::Norm, x: &mut Self::Buffer) -> Result<()>;
    /// Normalises every head of the queries (first norm) and of the keys (second) in `(queries, keys, values)` rows.
    fn normalize_heads(&self, norms: &[Self::Norm; 2], attention: &Attention, qkv: &mut Self::Buffer) -> Result<()>;
    /// `out = x`.
    fn copy(&self, x: &Self::Buffer, out: &mut Self::Buffer) -> Result<()>;
    /// `out = x`, normalised.
    fn normalize_into(&self, norm: &Self::Norm, x: &Self::Buffer, out: &mut Self::Buffer) -> Result<()> {
        self.copy(x, out)?;
        self.normalize(norm, out)
    }
    /// `out = activation(first half of x) * second half of x`.
    fn gate(&self, x: &Self::Buffer, activation: Activation, out: &mut Self::Buffer) -> Result<()>;
    /// `out = after(output(activation(gate) * up))` for `(gate, up) = input(x)`, with two buffers of its own.
    fn feed_forward(
        &self,
        layers: &FeedForward<Self>,
        x: &Self::Buffer,
        after: After<'_, Self::Buffer>,
        [pairs, inner]: [&mut Self::Buffer; 2],
        out: &mut Self::Buffer,
    ) -> Result<()> {
        self.project(&layers.input, x, After::Nothing, pairs)?;
        self.gate(pairs, layers.activation, inner)?;
        self.project(&layers.output, inner, after, out)
    }
    /// Rotates the queries and keys in `(queries, keys, values)` rows, each row by its angles.
    fn rotate(&self, rotation: &Self::Rotation<'_>, attention: &Attention, qkv: &mut Self::Buffer) -> Result<()>;
    /// Attention of every sequence to itself, from `(queries, keys, values)` rows.
    fn attend(
        &self,
        attention: &Attention,
        sequences: &Self::Sequences<'_>,
        qkv: &Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<()>;
    /// Adds the keys and values of the new tokens of a step, `(queries, keys, values)` rows, to the cache of a layer;
    /// then the attention of these tokens to their sequences in the cache.
    fn attend_cached(
        &self,
        attention: &Attention,
        layer: usize,
        steps: &Self::Steps<'_>,
        qkv: &Self::Buffer,
        cache: &mut <Self::Cache as KeyValueCache>::Part<'_>,
        out: &mut Self::Buffer,
    ) -> Result<()>;
    /// `out[i] = x[rows[i]]`.
    fn pick(&self, x: &Self::Buffer, rows: &[usize], out: &mut Self::Buffer) -> Result<()>;
    /// One row per sequence.
    fn pool(
        &self,
        pooling: &Pooling,
        offsets: &[usize],
        skip: usize,
        x: &Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<()>;
    /// Divides every row by its Euclidean norm.
    fn l2_normalize(&self, x: &mut Self::Buffer) -> Result<()>;
    /// Copies the first `width` numbers of every row to the host.
    fn read(&self, x: &Self::Buffer, width: usize, out: &mut [f32]) -> Result<()>;
    /// `out = x @ weight^T + bias` of some rows, on the host.
    fn project_out(&self, linear: &Self::Linear, x: &Self::Buffer, rows: Range<usize>, out: &mut [f32]) -> Result<()>;
    /// Of each of some rows of logits: that of its target, whose place is `target - first` (0 where there is no such
    /// place), and the logarithm of the sum of all logits' exponentials.
    fn log_sums(
        &self,
        head: &Self::Linear,
        x: &Self::Buffer,
        rows: Range<usize>,
        targets: Targets<'_>,
        scratch: &mut Self::Buffer,
        out: &mut [[f32; 2]],
    ) -> Result<()>;
    /// Sums a buffer over all ranks of the group that the backend computes in.
    ///
    /// # Errors
    /// Those of the group.
    fn reduce(&self, x: &mut Self::Buffer) -> Result<()>;
    /// Joins the numbers of all ranks, in the order of the ranks.
    ///
    /// # Errors
    /// Those of the group.
    fn gather_ranks(&self, own: &[f32], all: &mut Vec<f32>) -> Result<()>;
}

/// A cache of keys and values in blocks of tokens. Who holds which block is the caller's affair.
pub trait KeyValueCache: Send {
    /// What some sequences of a step have of it.
    type Part<'a>: Send
    where
        Self: 'a;

    /// How many blocks there are.
    fn blocks(&self) -> usize;
    /// Bytes of one block over all layers.
    fn block_bytes(&self) -> usize;
    /// Gives the cache so many blocks; what the first of them hold stays.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) when there is not so much memory; the cache has no blocks then.
    fn resize(&mut self, blocks: usize) -> Result<()>;
    /// Whether no lane of these writes a block that another one has.
    fn are_apart(&self, lanes: &[Vec<StepSequence>]) -> bool {
        lanes.len() == 1
    }
    /// The parts of a step's lanes, which must be apart.
    fn parts<'a>(&'a mut self, lanes: &'a [Vec<StepSequence>]) -> Vec<Self::Part<'a>>;
    /// Makes block `to` hold what block `from` does; both must be there.
    fn copy(&mut self, from: usize, to: usize) -> Result<()>;
    /// Seconds of writing and reading it so far; 0 where nobody looks.
    fn attention_s(&self) -> f64 {
        0.0
    }
}

/// The numbers of all ranks of the group, if there is one, in the order of the ranks.
fn joined_ranks(communicator: Option<&dyn Communicator>, own: &[f32], all: &mut Vec<f32>) -> Result<()> {
    match communicator {
        Some(communicator) => communicator.all_gather(own, all),
        None => {
            all.clear();
            all.extend_from_slice(own);
            Ok(())
        }
    }
}

/// Token ids, each wanted of one row; the first place is that of token `first`.
#[derive(Clone, Copy, Debug)]
pub struct Targets<'a> {
    /// The ids.
    pub ids: &'a [u32],
    /// The token of the first place.
    pub first: usize,
}

/// The layers of a gated feed-forward.
#[derive(Debug)]
pub struct FeedForward<L: Layers> {
    /// To the gate and what it opens for, side by side.
    pub input: L::Linear,
    /// On the gate.
    pub activation: Activation,
    /// Back to the hidden width.
    pub output: L::Linear,
}

/// What follows a linear layer.
#[derive(Clone, Copy, Debug)]
pub enum After<'a, Buffer> {
    /// Nothing.
    Nothing,
    /// An activation.
    Activation(Activation),
    /// The addition of another buffer of the same size.
    Add(&'a Buffer),
}

/// The attention of one layer.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Whether a token sees none of those after it.
    pub causal: bool,
    /// How many tokens away (on either side) a token sees; `None` for all.
    pub window: Option<usize>,
}

impl Attention {
    /// Width of `(queries, keys, values)` rows.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}
