//! What the tensor backend holds: rows, layers and lists, and small steps between them.

use candle_core::Tensor;

use crate::backend::Attention;
use crate::cpu::Activation;
use crate::cuda;
use crate::error::{Error, Result};

/// Rows of float32 on the device; none at first.
#[derive(Clone, Debug, Default)]
pub struct Rows(Option<Tensor>);

impl Rows {
    pub(super) fn get(&self) -> Result<&Tensor> {
        self.0.as_ref().ok_or_else(|| Error::internal("a buffer is read before it is written"))
    }

    pub(super) fn set(&mut self, rows: Tensor) -> Result<()> {
        self.0 = Some(rows);
        Ok(())
    }
}

/// A weight `(out_features, in_features)` and a bias.
#[derive(Debug)]
pub struct Linear {
    pub(super) weight: Tensor,
    pub(super) bias: Option<Tensor>,
}

/// A norm: its weights, and its biases after them if it has any.
#[derive(Debug)]
pub struct Norm {
    pub(super) weight: Tensor,
    pub(super) width: usize,
    pub(super) eps: f32,
    pub(super) centred: bool,
    pub(super) bias: bool,
}

/// Tiles of whole sequences.
#[derive(Debug)]
pub struct Sequences {
    pub(super) list: Tensor,
    pub(super) tiles: [usize; 2],
}

/// Tiles of a step, and the place in the cache of every row.
#[derive(Debug)]
pub struct Steps {
    pub(super) list: Tensor,
    pub(super) tiles: [usize; 2],
    pub(super) places: Tensor,
}

/// Copies numbers to where as many are wanted.
pub(super) fn put(numbers: &[f32], out: &mut [f32]) -> Result<()> {
    if numbers.len() != out.len() {
        return Err(Error::internal(format!("{} numbers for a place of: `{}`", numbers.len(), out.len())));
    }
    out.copy_from_slice(numbers);
    Ok(())
}

/// `activation(x)`.
pub(super) fn activated(x: &Tensor, activation: Activation) -> candle_core::Result<Tensor> {
    match activation {
        Activation::Gelu => x.gelu_erf(),
        Activation::GeluTanh => x.gelu(),
        Activation::Relu => x.relu(),
        Activation::Silu => x.silu(),
        Activation::Tanh => x.tanh(),
        Activation::Sigmoid => (x.neg()?.exp()? + 1.0)?.recip(),
        Activation::Identity => Ok(x.clone()),
    }
}

/// The kernels hold a head in registers.
pub(super) fn check_heads(attention: &Attention) -> Result<()> {
    if attention.head_dim > cuda::MOST_HEAD_DIM {
        let message =
            format!("heads are wider than the {} of the kernels: `{}`", cuda::MOST_HEAD_DIM, attention.head_dim);
        return Err(Error::device(message).with_hint("use device cpu"));
    }
    Ok(())
}
