//! A model's layers read from its files into a backend, once its declaration is known to fit them.

use candle_core::{DType, Tensor};

use super::{Checkpoint, Source};
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::shard::{Shard, Sizes, Slice};

/// Reads layers, one tensor in memory at a time beside what the backend keeps.
#[derive(Debug)]
pub struct Loader<'a, B> {
    checkpoint: &'a Checkpoint,
    backend: &'a B,
    /// The whole model, and which part of it is wanted.
    part: Option<(Sizes, Shard)>,
}

impl<'a, B: Backend> Loader<'a, B> {
    /// Reads from `checkpoint` into `backend`.
    pub fn new(checkpoint: &'a Checkpoint, backend: &'a B) -> Self {
        Self { checkpoint, backend, part: None }
    }

    /// Reads a rank's part of a model, of which the whole sizes are given.
    pub(crate) fn of_part(self, whole: Sizes, shard: Shard) -> Self {
        Self { part: Some((whole, shard)), ..self }
    }

    fn tensor(&self, name: &str) -> Result<Option<Tensor>> {
        let slice = self.part.map_or(Slice::Whole, |(whole, shard)| whole.slice(name, shard));
        let tensor = self.checkpoint.read_part(name, &slice)?;
        match tensor {
            Some(tensor) if !B::TAKES_STORED => Ok(Some(tensor.to_dtype(DType::F32)?)),
            tensor => Ok(tensor),
        }
    }

    fn bias(&self, name: &str, is_there: bool) -> Result<Option<Tensor>> {
        Ok(if is_there { self.tensor(&format!("{name}.bias"))? } else { None })
    }

    fn weight(&self, name: &str) -> Result<Tensor> {
        let name = format!("{name}.weight");
        self.tensor(&name)?.ok_or_else(|| Error::internal(format!("no part of tensor: `{name}`")))
    }
}

impl<B: Backend> Source<B> for Loader<'_, B> {
    fn embedding(&mut self, name: &str, _rows: usize, _width: usize) -> Result<B::Embedding> {
        self.backend.embedding(self.weight(name)?)
    }

    fn joined(&mut self, parts: &[(&str, usize)], _in_features: usize, bias: bool) -> Result<B::Linear> {
        let names = parts.iter().map(|(name, _)| name);
        let weights: Vec<Tensor> = names.clone().map(|name| self.weight(name)).collect::<Result<_>>()?;
        let biases: Vec<Tensor> = match bias {
            true => names.filter_map(|name| self.bias(name, true).transpose()).collect::<Result<_>>()?,
            false => Vec::new(),
        };
        let bias = if biases.is_empty() { None } else { Some(joined(biases)?) };
        self.backend.linear(joined(weights)?, bias)
    }

    fn norm(&mut self, name: &str, _width: usize, bias: bool, eps: f32) -> Result<B::Norm> {
        self.backend.norm(self.weight(name)?, self.bias(name, bias)?, eps)
    }

    fn rms_norm(&mut self, name: &str, _width: usize, eps: f32) -> Result<B::Norm> {
        self.backend.rms_norm(self.weight(name)?, eps)
    }
}

/// The tensors one below the other.
fn joined(mut tensors: Vec<Tensor>) -> Result<Tensor> {
    match (tensors.pop(), tensors.is_empty()) {
        (Some(only), true) => Ok(only),
        (Some(last), false) => {
            tensors.push(last);
            if tensors.iter().any(|tensor| tensor.dtype() != tensors[0].dtype()) {
                tensors =
                    tensors.iter().map(|tensor| tensor.to_dtype(DType::F32)).collect::<candle_core::Result<_>>()?;
            }
            Ok(Tensor::cat(&tensors, 0)?)
        }
        (None, _) => Err(Error::internal("a linear layer without a name")),
    }
}
