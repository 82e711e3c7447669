//! BERT, RoBERTa, XLM-RoBERTa and DistilBERT: one encoder, told apart by names, positions and token types.
//!
//! Source: BERT (arXiv:1810.04805), RoBERTa (arXiv:1907.11692), DistilBERT (arXiv:1910.01108); post-norm layers of
//! "Attention Is All You Need" (arXiv:1706.03762); ranks, arXiv:1909.08053.

use super::{Scratch, residual};
use crate::backend::{After, Attention, Backend};
use crate::batch::Chunk;
use crate::config::{BertConfig, BertFamily};
use crate::cpu::Activation;
use crate::error::Result;
use crate::shard::Shard;
use crate::weights::{Layers, Source};

/// The table whose name tells a checkpoint's prefix.
pub(super) const TOKEN_TABLE: &str = "embeddings.word_embeddings";

/// An encoder of the BERT family.
pub struct Bert<L: Layers> {
    tokens: L::Embedding,
    positions: L::Embedding,
    token_types: Option<L::Embedding>,
    norm: L::Norm,
    layers: Vec<Layer<L>>,
    attention: Attention,
    activation: Activation,
    first_position: u32,
    padding_id: Option<u32>,
    /// The first row of the token table that is here.
    first_token: usize,
    shard: Shard,
}

struct Layer<L: Layers> {
    qkv: L::Linear,
    attention_output: L::Linear,
    attention_norm: L::Norm,
    inner: L::Linear,
    output: L::Linear,
    output_norm: L::Norm,
}

/// What a family calls the parts of a layer.
struct LayerNames {
    layer: &'static str,
    qkv: [&'static str; 3],
    attention_output: &'static str,
    attention_norm: &'static str,
    inner: &'static str,
    output: &'static str,
    output_norm: &'static str,
}

const BERT_NAMES: LayerNames = LayerNames {
    layer: "encoder.layer",
    qkv: ["attention.self.query", "attention.self.key", "attention.self.value"],
    attention_output: "attention.output.dense",
    attention_norm: "attention.output.LayerNorm",
    inner: "intermediate.dense",
    output: "output.dense",
    output_norm: "output.LayerNorm",
};

const DISTILBERT_NAMES: LayerNames = LayerNames {
    layer: "transformer.layer",
    qkv: ["attention.q_lin", "attention.k_lin", "attention.v_lin"],
    attention_output: "attention.out_lin",
    attention_norm: "sa_layer_norm",
    inner: "ffn.lin1",
    output: "ffn.lin2",
    output_norm: "output_layer_norm",
};

impl<L: Layers> Bert<L> {
    pub(super) fn build(config: &BertConfig, prefix: &str, source: &mut impl Source<L>) -> Result<Self> {
        let hidden = config.hidden_size;
        let embeddings = format!("{prefix}embeddings");
        let token_types = match config.type_vocab_size {
            0 => None,
            rows => Some(source.embedding(&format!("{embeddings}.token_type_embeddings"), rows, hidden)?),
        };
        Ok(Self {
            tokens: source.embedding(&format!("{prefix}{TOKEN_TABLE}"), config.vocab_size, hidden)?,
            positions: source.embedding(&format!("{embeddings}.position_embeddings"), config.position_rows, hidden)?,
            token_types,
            norm: source.norm(&format!("{embeddings}.LayerNorm"), hidden, true, config.norm_eps)?,
            layers: (0..config.layers)
                .map(|layer| Layer::build(config, prefix, layer, source))
                .collect::<Result<_>>()?,
            attention: Attention {
                heads: config.heads,
                kv_heads: config.heads,
                head_dim: config.head_dim,
                causal: false,
                window: None,
            },
            activation: config.activation,
            first_position: config.first_position() as u32,
            padding_id: config.padding_id,
            first_token: config.shard.part(config.vocab_size).start,
            shard: config.shard,
        })
    }
}

impl<L: Layers> Layer<L> {
    fn build(config: &BertConfig, prefix: &str, layer: usize, source: &mut impl Source<L>) -> Result<Self> {
        let names = if config.family == BertFamily::DistilBert { &DISTILBERT_NAMES } else { &BERT_NAMES };
        let name = |part: &str| format!("{prefix}{}.{layer}.{part}", names.layer);
        let (hidden, inner, eps) = (config.hidden_size, config.intermediate_size, config.norm_eps);
        let heads = config.heads * config.head_dim;
        let [query, key, value] = names.qkv.map(name);
        Ok(Self {
            qkv: source.linear(&[&query, &key, &value], heads, hidden, true)?,
            attention_output: source.linear(&[&name(names.attention_output)], hidden, heads, true)?,
            attention_norm: source.norm(&name(names.attention_norm), hidden, true, eps)?,
            inner: source.linear(&[&name(names.inner)], inner, hidden, true)?,
            output: source.linear(&[&name(names.output)], hidden, inner, true)?,
            output_norm: source.norm(&name(names.output_norm), hidden, true, eps)?,
        })
    }
}

impl<B: Backend> Bert<B> {
    /// Computes the hidden states into `scratch.hidden`.
    ///
    /// # Errors
    /// Those of the group that the model is split over; a whole model has none.
    pub(super) fn forward(&self, backend: &B, chunk: &Chunk<'_>, scratch: &mut Scratch<B::Buffer>) -> Result<()> {
        self.embed(backend, chunk, &mut scratch.hidden)?;
        let sequences = backend.sequences(chunk.offsets())?;
        let Scratch { hidden, other, qkv, context, inner, .. } = scratch;
        for layer in &self.layers {
            backend.project(&layer.qkv, hidden, After::Nothing, qkv)?;
            backend.attend(&self.attention, &sequences, qkv, context)?;
            backend.project(&layer.attention_output, context, residual(self.shard, hidden), other)?;
            backend.reduce(other)?;
            backend.normalize(&layer.attention_norm, other)?;
            backend.project(&layer.inner, other, After::Activation(self.activation), inner)?;
            backend.project(&layer.output, inner, residual(self.shard, other), hidden)?;
            backend.reduce(hidden)?;
            backend.normalize(&layer.output_norm, hidden)?;
        }
        Ok(())
    }

    fn embed(&self, backend: &B, chunk: &Chunk<'_>, hidden: &mut B::Buffer) -> Result<()> {
        backend.gather_part(&self.tokens, self.first_token, chunk.ids(), hidden)?;
        backend.reduce(hidden)?;
        if let Some(token_types) = &self.token_types {
            backend.gather_add(token_types, &chunk.type_ids(), hidden)?;
        }
        backend.gather_add(&self.positions, &self.position_ids(chunk), hidden)?;
        backend.normalize(&self.norm, hidden)
    }

    /// The row of the position table for each token. In RoBERTa, a padding token inside a text takes the padding row
    /// and does not count.
    fn position_ids(&self, chunk: &Chunk<'_>) -> Vec<u32> {
        let mut positions = Vec::with_capacity(chunk.ids().len());
        for sequence in chunk.sequences() {
            let mut next = self.first_position;
            for id in sequence {
                let is_padding = Some(*id) == self.padding_id;
                positions.push(if is_padding { *id } else { next });
                next += u32::from(!is_padding);
            }
        }
        positions
    }
}

/// Tensors of the family that the encoder has no use for.
pub(super) fn extras(config: &BertConfig, prefix: &str) -> Vec<String> {
    let mut names = vec![
        format!("{prefix}embeddings.position_ids"),
        format!("{prefix}embeddings.token_type_ids"),
        format!("{prefix}pooler."),
    ];
    if config.type_vocab_size == 0 && config.family != BertFamily::DistilBert {
        names.push(format!("{prefix}embeddings.token_type_embeddings.weight"));
    }
    names
}

/// The heads that the family was trained with.
pub(super) fn language_model_head(family: BertFamily) -> Vec<String> {
    let names: &[&str] = match family {
        BertFamily::Bert => &["cls."],
        BertFamily::Roberta | BertFamily::XlmRoberta => &["lm_head."],
        BertFamily::DistilBert => &["vocab_transform.", "vocab_layer_norm.", "vocab_projector."],
    };
    names.iter().map(|name| (*name).to_owned()).collect()
}
