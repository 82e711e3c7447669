//! Sequence classification: one row of logits from the hidden states of a sequence. One head serves all families: a
//! pooled row, a dense layer with an activation, a norm where the family has one, and the output layer.

use super::Scratch;
use crate::backend::{After, Backend};
use crate::batch::Chunk;
use crate::config::{BertFamily, ClassifierPooling, NetworkConfig};
use crate::cpu::Activation;
use crate::error::Result;
use crate::pooling::{Pooling, PoolingMode};
use crate::weights::{Layers, Source};

/// A classification head.
pub struct Classifier<L: Layers> {
    pooling: Pooling,
    dense: Option<(L::Linear, Activation)>,
    norm: Option<L::Norm>,
    output: L::Linear,
}

impl<L: Layers> Classifier<L> {
    /// Builds the family's head with `labels` outputs.
    pub fn build(config: &NetworkConfig, prefix: &str, labels: usize, source: &mut impl Source<L>) -> Result<Self> {
        let hidden = config.hidden_size();
        let (dense, norm, mode, output) = match config {
            NetworkConfig::Bert(config) => {
                let (dense, activation, output) = match config.family {
                    BertFamily::Bert => (format!("{prefix}pooler.dense"), Activation::Tanh, "classifier"),
                    BertFamily::Roberta | BertFamily::XlmRoberta => {
                        ("classifier.dense".to_owned(), Activation::Tanh, "classifier.out_proj")
                    }
                    BertFamily::DistilBert => ("pre_classifier".to_owned(), Activation::Relu, "classifier"),
                };
                (Some((source.linear(&[&dense], hidden, hidden, true)?, activation)), None, PoolingMode::Cls, output)
            }
            NetworkConfig::ModernBert(config) => {
                let dense = source.linear(&["head.dense"], hidden, hidden, config.classifier_bias)?;
                let norm = source.norm("head.norm", hidden, config.norm_bias, config.norm_eps)?;
                let mode = match config.classifier_pooling {
                    ClassifierPooling::Cls => PoolingMode::Cls,
                    ClassifierPooling::Mean => PoolingMode::Mean,
                };
                (Some((dense, config.classifier_activation)), Some(norm), mode, "classifier")
            }
            NetworkConfig::Decoder(_) => (None, None, PoolingMode::Last, "score"),
        };
        let has_bias = config.decoder().is_none();
        Ok(Self {
            pooling: Pooling::new(vec![mode]),
            dense,
            norm,
            output: source.linear(&[output], labels, hidden, has_bias)?,
        })
    }
}

impl<B: Backend> Classifier<B> {
    /// Computes the logits of a chunk's sequences from `scratch.hidden`; gives the buffer that holds them.
    ///
    /// # Errors
    /// Those of the device.
    pub fn forward<'a>(
        &self,
        backend: &B,
        chunk: &Chunk<'_>,
        scratch: &'a mut Scratch<B::Buffer>,
    ) -> Result<&'a B::Buffer> {
        let [pooled, other] = &mut scratch.pooled;
        backend.pool(&self.pooling, chunk.offsets(), 0, &scratch.hidden, pooled)?;
        if let Some((dense, activation)) = &self.dense {
            backend.project(dense, pooled, After::Activation(*activation), other)?;
            std::mem::swap(pooled, other);
        }
        if let Some(norm) = &self.norm {
            backend.normalize(norm, pooled)?;
        }
        backend.project(&self.output, pooled, After::Nothing, other)?;
        Ok(other)
    }
}
