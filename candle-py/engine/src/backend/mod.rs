//! What a model needs of a device. Models are written against this trait alone; today the CPU implements it.

mod cpu;
mod cpu_attention;
mod rows;

pub use self::cpu::CpuBackend;

use std::ops::Range;

use candle_core::Tensor;

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
pub trait Backend: Layers + Send + Sync {
    /// Rows of activations.
    type Buffer: Default + Send;
    /// Keys and values of tokens that went through the model before.
    type Cache: Send;

    /// Takes a table of rows in.
    fn embedding(&self, table: Tensor) -> Result<Self::Embedding>;
    /// Takes a weight `(out_features, in_features)` and a bias in.
    fn linear(&self, weight: Tensor, bias: Option<Tensor>) -> Result<Self::Linear>;
    /// Takes a layer norm in.
    fn norm(&self, weight: Tensor, bias: Option<Tensor>, eps: f32) -> Result<Self::Norm>;

    /// Takes a root-mean-square norm in.
    fn rms_norm(&self, weight: Tensor, eps: f32) -> Result<Self::Norm>;

    /// `out[i] += table[ids[i]]`.
    fn gather_add(&self, table: &Self::Embedding, ids: &[u32], out: &mut Self::Buffer);
    /// `out[i] = table[ids[i] - first]`; zeros where the table has no such row.
    fn gather_part(&self, table: &Self::Embedding, first: usize, ids: &[u32], out: &mut Self::Buffer);
    /// The same of a linear layer's weight, read as a table.
    fn gather_weight(&self, linear: &Self::Linear, first: usize, ids: &[u32], out: &mut Self::Buffer);
    /// `out = after(x @ weight^T + bias)`.
    fn project(&self, linear: &Self::Linear, x: &Self::Buffer, after: After<'_, Self::Buffer>, out: &mut Self::Buffer);
    /// Normalisation in place.
    fn normalize(&self, norm: &Self::Norm, x: &mut Self::Buffer);
    /// Normalises every head of the queries (first norm) and of the keys (second) in `(queries, keys, values)` rows.
    fn normalize_heads(&self, norms: &[Self::Norm; 2], attention: &Attention, qkv: &mut Self::Buffer);
    /// `out = x`.
    fn copy(&self, x: &Self::Buffer, out: &mut Self::Buffer);
    /// `out = activation(first half of x) * second half of x`.
    fn gate(&self, x: &Self::Buffer, activation: Activation, out: &mut Self::Buffer);
    /// `out = after(output(activation(gate) * up))` for `(gate, up) = input(x)`, with two buffers of its own.
    fn feed_forward(
        &self,
        layers: &FeedForward<Self>,
        x: &Self::Buffer,
        after: After<'_, Self::Buffer>,
        scratch: [&mut Self::Buffer; 2],
        out: &mut Self::Buffer,
    ) where
        Self: Sized;
    /// Rotates the queries and keys in `(queries, keys, values)` rows, each row by the angles of its position.
    fn rotate(&self, angles: &Angles, positions: &[usize], attention: &Attention, qkv: &mut Self::Buffer);
    /// Attention of every sequence to itself, from `(queries, keys, values)` rows.
    fn attend(
        &self,
        attention: &Attention,
        offsets: &[usize],
        qkv: &Self::Buffer,
        scratch: &mut Self::Buffer,
        out: &mut Self::Buffer,
    );
    /// Adds the keys and values of the new tokens of `sequences`, `(queries, keys, values)` rows, to the cache of a
    /// layer; then the attention of these tokens to their sequences in the cache.
    fn attend_cached(
        &self,
        attention: &Attention,
        layer: usize,
        sequences: &[StepSequence],
        qkv: &Self::Buffer,
        cache: &mut Self::Cache,
        out: &mut Self::Buffer,
    );
    /// `out[i] = x[rows[i]]`.
    fn pick(&self, x: &Self::Buffer, rows: &[usize], out: &mut Self::Buffer);
    /// One row per sequence.
    fn pool(&self, pooling: &Pooling, offsets: &[usize], skip: usize, x: &Self::Buffer, out: &mut Self::Buffer);
    /// Divides every row by its Euclidean norm.
    fn l2_normalize(&self, x: &mut Self::Buffer);
    /// Copies the first `width` numbers of every row to the host.
    fn read(&self, x: &Self::Buffer, width: usize, out: &mut [f32]);
    /// `out = x @ weight^T + bias` of some rows, on the host.
    fn project_out(&self, linear: &Self::Linear, x: &Self::Buffer, rows: Range<usize>, out: &mut [f32]);
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
    );
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
