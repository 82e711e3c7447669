//! The cache of keys and values on a device: a tensor of pages for each layer.

use candle_core::{DType, Device, Tensor};

use crate::backend::KeyValueCache;
use crate::error::{Error, Result};
use crate::generate::{BLOCK_TOKENS, StepSequence};

/// Keys and values by layer and block, float32; `(blocks, 2, kv_heads, 16, head_dim)` each.
#[derive(Debug)]
pub struct TensorCache {
    device: Device,
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
    /// None without blocks.
    pages: Vec<Tensor>,
}

impl TensorCache {
    pub(super) fn new(device: Device, layers: usize, kv_heads: usize, head_dim: usize) -> Self {
        Self { device, layers, kv_heads, head_dim, pages: Vec::new() }
    }

    /// The pages of a layer.
    pub(super) fn pages(&self, layer: usize) -> Result<&Tensor> {
        self.pages.get(layer).ok_or_else(|| Error::internal("a step with a cache without blocks"))
    }

    fn resized(&self, layer: usize, blocks: usize) -> candle_core::Result<Tensor> {
        let shape = (blocks, 2, self.kv_heads, BLOCK_TOKENS, self.head_dim);
        let pages = Tensor::zeros(shape, DType::F32, &self.device)?;
        if let Some(old) = self.pages.get(layer) {
            let kept = blocks.min(old.dim(0)?);
            pages.slice_set(&old.narrow(0, 0, kept)?, 0, 0)?;
        }
        Ok(pages)
    }
}

impl KeyValueCache for TensorCache {
    type Part<'a> = &'a mut Self;

    fn blocks(&self) -> usize {
        self.pages.first().map_or(0, |pages| pages.dims()[0])
    }

    fn block_bytes(&self) -> usize {
        self.layers * 2 * self.kv_heads * BLOCK_TOKENS * self.head_dim * DType::F32.size_in_bytes()
    }

    fn resize(&mut self, blocks: usize) -> Result<()> {
        if blocks == self.blocks() {
            return Ok(());
        }
        if blocks == 0 {
            self.pages.clear();
            return Ok(());
        }
        // Layer by layer, so that little is there twice.
        for layer in 0..self.layers {
            match self.resized(layer, blocks) {
                Ok(pages) if layer < self.pages.len() => self.pages[layer] = pages,
                Ok(pages) => self.pages.push(pages),
                Err(error) => {
                    self.pages.clear();
                    let message = format!("the device's memory is too small for a cache of so many blocks: `{blocks}`");
                    return Err(Error::device(message).with_hint(format!("give the cache fewer bytes ({error})")));
                }
            }
        }
        Ok(())
    }

    fn parts<'a>(&'a mut self, lanes: &'a [Vec<StepSequence>]) -> Vec<&'a mut Self> {
        assert_eq!(lanes.len(), 1, "a step is not cut into lanes");
        vec![self]
    }

    fn copy(&mut self, from: usize, to: usize) -> Result<()> {
        for pages in &self.pages {
            pages.slice_set(&pages.narrow(0, from, 1)?.copy()?, 0, to)?;
        }
        Ok(())
    }
}
