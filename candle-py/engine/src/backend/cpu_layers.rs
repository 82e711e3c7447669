//! The layers of a model as the CPU backend holds them.

use candle_core::{Storage, Tensor};

use crate::cpu::{Kernels, PackedMatrix};
use crate::error::{Error, Result};

/// A table of rows.
#[derive(Debug)]
pub struct Embedding {
    pub(super) table: Table,
    pub(super) width: usize,
}

/// What a table's numbers are held as.
#[derive(Debug)]
pub(super) enum Table {
    Float32(Vec<f32>),
    /// The upper halves of float32.
    Bfloat16(Vec<u16>),
}

impl Embedding {
    pub(super) fn rows(&self) -> usize {
        let numbers = match &self.table {
            Table::Float32(table) => table.len(),
            Table::Bfloat16(table) => table.len(),
        };
        numbers.checked_div(self.width).unwrap_or(0)
    }

    /// `out[i] = put(out[i], row[i])`.
    pub(super) fn row(&self, id: u32, out: &mut [f32], put: impl Fn(&mut f32, f32)) {
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

/// Where a token is among `count` places that begin with token `first`.
pub(super) fn place(id: u32, first: usize, count: usize) -> Option<usize> {
    (id as usize).checked_sub(first).filter(|place| *place < count)
}

/// A packed matrix and its bias.
#[derive(Debug)]
pub struct Linear {
    pub(super) weight: PackedMatrix,
    pub(super) bias: Option<Vec<f32>>,
}

/// A norm.
#[derive(Debug)]
pub struct Norm {
    pub(super) kind: NormKind,
    pub(super) weight: Vec<f32>,
    pub(super) eps: f32,
}

/// A norm's kind.
#[derive(Debug)]
pub(super) enum NormKind {
    /// By mean and variance.
    Layer(Option<Vec<f32>>),
    /// By the mean square.
    Rms,
}

impl Norm {
    /// Normalises rows as wide as the weight.
    pub(super) fn apply(&self, kernels: Kernels, rows: &mut [f32]) {
        let Norm { kind, weight, eps } = self;
        match kind {
            NormKind::Layer(bias) => kernels.layer_norm(rows, weight.len(), weight, bias.as_deref(), *eps),
            NormKind::Rms => kernels.rms_norm(rows, weight.len(), weight, *eps),
        }
    }
}

/// Hands over the numbers of a tensor, row-major.
pub(super) fn with_numbers<T>(tensor: &Tensor, work: impl FnOnce(&[f32]) -> T) -> Result<T> {
    let (storage, layout) = tensor.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(storage), Some((start, end))) => Ok(work(&storage.as_slice::<f32>()?[start..end])),
        _ => Err(Error::internal(format!("weight is not contiguous on the CPU: `{layout:?}`"))),
    }
}

/// The numbers of a tensor, row-major.
pub(super) fn copied(tensor: &Tensor) -> Result<Vec<f32>> {
    with_numbers(tensor, <[f32]>::to_vec)
}
