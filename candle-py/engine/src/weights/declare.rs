//! What a model wants of its files, declared without reading any, and the check of the files' headers against it.

use std::collections::BTreeMap;

use safetensors::tensor::Dtype;

use super::{Checkpoint, Layers, Source};
use crate::error::{Problems, Result};

/// Layers that are names and shapes only.
#[derive(Debug)]
pub struct Declared;

impl Layers for Declared {
    type Embedding = ();
    type Linear = ();
    type Norm = ();
}

/// The tensors that a model wants, by name, with their shapes.
#[derive(Debug, Default)]
pub struct Declaration {
    wanted: BTreeMap<String, Vec<usize>>,
    table_parameters: usize,
}

/// Tensors that real checkpoints carry and that a model has no use for: names, and beginnings that end with a dot.
#[derive(Debug, Default)]
pub struct Extras(pub Vec<String>);

impl Extras {
    fn cover(&self, name: &str) -> bool {
        self.0.iter().any(|extra| if extra.ends_with('.') { name.starts_with(extra) } else { name == extra })
    }
}

impl Declaration {
    /// Notes what is missing, of another shape, stored as something that is no float, or unexpected.
    pub fn check(&self, checkpoint: &Checkpoint, extras: &Extras, problems: &mut Problems) {
        for (name, shape) in &self.wanted {
            let Some(header) = checkpoint.tensors().get(name) else {
                problems.push(format!("missing tensor of shape {shape:?}: `{name}`"));
                continue;
            };
            let stored = &header.stored_name;
            if header.shape != *shape {
                problems.push(format!("shape of {stored} is not {shape:?}: `{:?}`", header.shape));
            }
            if !matches!(header.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
                problems.push(format!("dtype of {stored} is not supported: `{:?}`", header.dtype));
            }
        }
        for (name, header) in checkpoint.tensors() {
            if !self.wanted.contains_key(name) && !extras.cover(name) {
                problems.push(format!("unexpected tensor: `{}`", header.stored_name));
            }
        }
    }

    /// Numbers in all wanted tensors.
    pub fn parameters(&self) -> usize {
        self.wanted.values().map(|shape| shape.iter().product::<usize>()).sum()
    }

    /// Those of them in tables of embeddings.
    pub fn table_parameters(&self) -> usize {
        self.table_parameters
    }

    fn want(&mut self, name: String, shape: &[usize]) {
        self.wanted.insert(name, shape.to_vec());
    }
}

impl Source<Declared> for Declaration {
    fn embedding(&mut self, name: &str, rows: usize, width: usize) -> Result<()> {
        self.want(format!("{name}.weight"), &[rows, width]);
        self.table_parameters += rows * width;
        Ok(())
    }

    fn joined(&mut self, parts: &[(&str, usize)], in_features: usize, bias: bool) -> Result<()> {
        for (name, out_features) in parts {
            self.want(format!("{name}.weight"), &[*out_features, in_features]);
            if bias {
                self.want(format!("{name}.bias"), &[*out_features]);
            }
        }
        Ok(())
    }

    fn norm(&mut self, name: &str, width: usize, bias: bool, _eps: f32) -> Result<()> {
        self.want(format!("{name}.weight"), &[width]);
        if bias {
            self.want(format!("{name}.bias"), &[width]);
        }
        Ok(())
    }

    fn rms_norm(&mut self, name: &str, width: usize, _eps: f32) -> Result<()> {
        self.want(format!("{name}.weight"), &[width]);
        Ok(())
    }
}
