//! From a folder's tensors to a model's layers: what a model wants is declared, checked against the files' headers, and
//! only then read. Knows no model.

mod checkpoint;
mod declare;
mod gguf;
mod load;

pub use checkpoint::Checkpoint;
pub use declare::{Declaration, Declared, Extras};
pub use gguf::{ROPE_FACTORS, read_plain};
pub use load::Loader;

use crate::error::Result;

/// The layers that a model is made of, as one backend holds them (or nothing, where they are only declared).
pub trait Layers {
    /// A table of rows by id.
    type Embedding: Send + Sync;
    /// A matrix with or without a bias.
    type Linear: Send + Sync;
    /// A layer norm.
    type Norm: Send + Sync;
}

/// Where a model gets its layers from. A model is built by one function for all sources: a [`Declaration`] only notes
/// names and shapes, a [`Loader`] reads them.
pub trait Source<L: Layers> {
    /// The table `{name}.weight` of `(rows, width)`.
    fn embedding(&mut self, name: &str, rows: usize, width: usize) -> Result<L::Embedding>;

    /// Linear layers `{name}.weight` of `(out_features, in_features)` and `{name}.bias`, each a name and its
    /// `out_features`, joined into one along their outputs.
    fn joined(&mut self, parts: &[(&str, usize)], in_features: usize, bias: bool) -> Result<L::Linear>;

    /// The same for layers with as many outputs each.
    fn linear(&mut self, names: &[&str], out_features: usize, in_features: usize, bias: bool) -> Result<L::Linear> {
        let parts: Vec<_> = names.iter().map(|name| (*name, out_features)).collect();
        self.joined(&parts, in_features, bias)
    }

    /// The layer norm `{name}.weight` of `(width)` and `{name}.bias`.
    fn norm(&mut self, name: &str, width: usize, bias: bool, eps: f32) -> Result<L::Norm>;

    /// The root-mean-square norm `{name}.weight` of `(width)`.
    fn rms_norm(&mut self, name: &str, width: usize, eps: f32) -> Result<L::Norm>;
}
