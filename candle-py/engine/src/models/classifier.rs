//! Sequence classification: one row of logits from the hidden states of a sequence. One head serves all families: a
//! pooled row, a dense layer with an activation, a norm where the family has one, and the output layer.

use super::Scratch;
use crate::backend::{After, Backend};
use crate::batch::Chunk;
use crate::config::{BertFamily, ClassifierPooling, EncoderConfig};
use crate::cpu::Activation;
use crate::error::Result;
use crate::pooling::{Pooling, PoolingMode};
use crate::weights::{Layers, Source};

/// A classification head.
pub struct Classifier<L: Layers> {
    pooling: Pooling,
    dense: L::Linear,
    activation: Activation,
    norm: Option<L::Norm>,
    output: L::Linear,
}

impl<L: Layers> Classifier<L> {
    /// Builds the family's head with `labels` outputs.
    pub fn build(config: &EncoderConfig, prefix: &str, labels: usize, source: &mut impl Source<L>) -> Result<Self> {
        let hidden = config.hidden_size();
        let (dense, activation, output) = match config {
            EncoderConfig::Bert(config) => match config.family {
                BertFamily::Bert => (format!("{prefix}pooler.dense"), Activation::Tanh, "classifier"),
                BertFamily::Roberta | BertFamily::XlmRoberta => {
                    ("classifier.dense".to_owned(), Activation::Tanh, "classifier.out_proj")
                }
                BertFamily::DistilBert => ("pre_classifier".to_owned(), Activation::Relu, "classifier"),
            },
            EncoderConfig::ModernBert(config) => ("head.dense".to_owned(), config.classifier_activation, "classifier"),
        };
        let (mode, dense_bias, norm) = match config {
            EncoderConfig::Bert(_) => (PoolingMode::Cls, true, None),
            EncoderConfig::ModernBert(config) => {
                let mode = match config.classifier_pooling {
                    ClassifierPooling::Cls => PoolingMode::Cls,
                    ClassifierPooling::Mean => PoolingMode::Mean,
                };
                let norm = source.norm("head.norm", hidden, config.norm_bias, config.norm_eps)?;
                (mode, config.classifier_bias, Some(norm))
            }
        };
        Ok(Self {
            pooling: Pooling::new(vec![mode]),
            dense: source.linear(&[&dense], hidden, hidden, dense_bias)?,
            activation,
            norm,
            output: source.linear(&[output], labels, hidden, true)?,
        })
    }
}

impl<B: Backend> Classifier<B> {
    /// Computes the logits of a chunk's sequences from `scratch.hidden`; gives the buffer that holds them.
    pub fn forward<'a>(&self, backend: &B, chunk: &Chunk<'_>, scratch: &'a mut Scratch<B::Buffer>) -> &'a B::Buffer {
        let [pooled, other] = &mut scratch.pooled;
        backend.pool(&self.pooling, chunk.offsets(), 0, &scratch.hidden, pooled);
        backend.project(&self.dense, pooled, After::Activation(self.activation), other);
        if let Some(norm) = &self.norm {
            backend.normalize(norm, other);
        }
        backend.project(&self.output, other, After::Nothing, pooled);
        pooled
    }
}
