//! The networks: hidden states from token ids, on any backend. A model sees one chunk of a batch at a time.

mod bert;
mod classifier;
mod decoder;
mod modernbert;

pub use bert::Bert;
pub use classifier::Classifier;
pub use decoder::Decoder;
pub use modernbert::ModernBert;

use crate::backend::{After, Backend};
use crate::batch::Chunk;
use crate::config::{BertFamily, NetworkConfig};
use crate::error::Result;
use crate::shard::Shard;
use crate::weights::{Checkpoint, Extras, Layers, Source};

/// A network of any family.
pub enum Network<L: Layers> {
    /// BERT, RoBERTa, XLM-RoBERTa or DistilBERT.
    Bert(Bert<L>),
    /// ModernBERT.
    ModernBert(ModernBert<L>),
    /// Llama, Qwen2 or Qwen3.
    Decoder(Decoder<L>),
}

/// The buffers of one forward, kept from one chunk to the next.
#[derive(Debug, Default)]
pub struct Scratch<Buffer> {
    /// The residual stream; after a forward, the hidden states.
    pub hidden: Buffer,
    /// The second half of a pair of residual streams.
    pub(crate) other: Buffer,
    /// Queries, keys and values.
    pub(crate) qkv: Buffer,
    /// What the attention read.
    pub(crate) context: Buffer,
    /// Inside the feed-forward.
    pub(crate) inner: Buffer,
    /// After the pooling, in turns.
    pub(crate) pooled: [Buffer; 2],
}

impl<L: Layers> Network<L> {
    /// Builds the network from a source of layers, whose names begin with `prefix`.
    pub fn build(config: &NetworkConfig, prefix: &str, source: &mut impl Source<L>) -> Result<Self> {
        Ok(match config {
            NetworkConfig::Bert(config) => Network::Bert(Bert::build(config, prefix, source)?),
            NetworkConfig::ModernBert(config) => Network::ModernBert(ModernBert::build(config, prefix, source)?),
            NetworkConfig::Decoder(config) => Network::Decoder(Decoder::build(config, prefix, source)?),
        })
    }

    /// The decoder, if it is one.
    pub fn decoder(&self) -> Option<&Decoder<L>> {
        match self {
            Network::Decoder(decoder) => Some(decoder),
            Network::Bert(_) | Network::ModernBert(_) => None,
        }
    }
}

impl<B: Backend> Network<B> {
    /// Computes the hidden states of a chunk into `scratch.hidden`.
    ///
    /// # Errors
    /// Those of the device, and of the group that the model is split over.
    pub fn forward(&self, backend: &B, chunk: &Chunk<'_>, scratch: &mut Scratch<B::Buffer>) -> Result<()> {
        match self {
            Network::Bert(model) => model.forward(backend, chunk, scratch),
            Network::ModernBert(model) => model.forward(backend, chunk, scratch),
            Network::Decoder(model) => model.forward(backend, chunk, scratch),
        }
    }
}

/// The residual stream, which is added once over all ranks.
fn residual<Buffer>(shard: Shard, stream: &Buffer) -> After<'_, Buffer> {
    if shard.rank == 0 { After::Add(stream) } else { After::Nothing }
}

/// What the tensors' names begin with in this checkpoint: the class's own prefix, "model.", or nothing.
pub fn prefix(config: &NetworkConfig, checkpoint: &Checkpoint) -> &'static str {
    let (own, table) = match config {
        NetworkConfig::Bert(config) => match config.family {
            BertFamily::Bert => ("bert.", bert::TOKEN_TABLE),
            BertFamily::Roberta | BertFamily::XlmRoberta => ("roberta.", bert::TOKEN_TABLE),
            BertFamily::DistilBert => ("distilbert.", bert::TOKEN_TABLE),
        },
        NetworkConfig::ModernBert(_) => ("model.", modernbert::TOKEN_TABLE),
        NetworkConfig::Decoder(_) => ("model.", decoder::TOKEN_TABLE),
    };
    let has_table = |prefix: &&str| checkpoint.tensors().contains_key(&format!("{prefix}{table}.weight"));
    ["", own, "model."].into_iter().find(has_table).unwrap_or("")
}

/// The tensors that checkpoints of this family carry for other tasks, and that are passed over.
pub fn extras(config: &NetworkConfig, prefix: &str, is_classifier: bool) -> Extras {
    let mut names = match config {
        NetworkConfig::Bert(config) => bert::extras(config, prefix),
        NetworkConfig::ModernBert(_) => Vec::new(),
        NetworkConfig::Decoder(config) => decoder::extras(config, prefix, is_classifier),
    };
    if !is_classifier {
        names.extend(match config {
            NetworkConfig::Bert(config) => bert::language_model_head(config.family),
            NetworkConfig::ModernBert(_) => modernbert::language_model_head(),
            NetworkConfig::Decoder(_) => Vec::new(),
        });
    }
    Extras(names)
}
