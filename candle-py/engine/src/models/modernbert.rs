//! ModernBERT: pre-norm layers with rotary positions, gated feed-forwards, and windowed attention in most layers.
//!
//! Source: arXiv:2412.13663; ranks, arXiv:1909.08053.

use super::{Scratch, residual};
use crate::backend::{After, Attention, Backend};
use crate::batch::Chunk;
use crate::config::{LayerKind, ModernBertConfig};
use crate::cpu::Activation;
use crate::error::Result;
use crate::rotary::{Rotary, RotaryConfig};
use crate::shard::Shard;
use crate::weights::{Layers, Source};

/// The table whose name tells a checkpoint's prefix.
pub(super) const TOKEN_TABLE: &str = "embeddings.tok_embeddings";

/// A ModernBERT encoder.
pub struct ModernBert<L: Layers> {
    tokens: L::Embedding,
    embedding_norm: L::Norm,
    layers: Vec<Layer<L>>,
    final_norm: L::Norm,
    activation: Activation,
    full: Reach,
    sliding: Reach,
    /// The first row of the token table that is here.
    first_token: usize,
    shard: Shard,
}

/// What the layers of one kind share.
#[derive(Debug)]
struct Reach {
    attention: Attention,
    rotary: Rotary,
}

struct Layer<L: Layers> {
    kind: LayerKind,
    /// The first layer has none: the embeddings are normalised already.
    attention_norm: Option<L::Norm>,
    qkv: L::Linear,
    attention_output: L::Linear,
    mlp_norm: L::Norm,
    mlp_input: L::Linear,
    mlp_output: L::Linear,
}

impl<L: Layers> ModernBert<L> {
    pub(super) fn build(config: &ModernBertConfig, prefix: &str, source: &mut impl Source<L>) -> Result<Self> {
        let (hidden, head_dim) = (config.hidden_size, config.head_dim);
        let reach = |theta: f64, window: Option<usize>| Reach {
            attention: Attention { heads: config.heads, kv_heads: config.heads, head_dim, causal: false, window },
            rotary: Rotary::new(&RotaryConfig::plain(theta, head_dim)),
        };
        let norm = |source: &mut _, name: &str| {
            Source::norm(source, &format!("{prefix}{name}"), hidden, config.norm_bias, config.norm_eps)
        };
        Ok(Self {
            tokens: source.embedding(&format!("{prefix}{TOKEN_TABLE}"), config.vocab_size, hidden)?,
            embedding_norm: norm(source, "embeddings.norm")?,
            layers: (0..config.layers.len())
                .map(|layer| Layer::build(config, prefix, layer, source))
                .collect::<Result<_>>()?,
            final_norm: norm(source, "final_norm")?,
            activation: config.activation,
            full: reach(config.full_rope_theta, None),
            sliding: reach(config.sliding_rope_theta, Some(config.window)),
            first_token: config.shard.part(config.vocab_size).start,
            shard: config.shard,
        })
    }
}

impl<L: Layers> Layer<L> {
    fn build(config: &ModernBertConfig, prefix: &str, layer: usize, source: &mut impl Source<L>) -> Result<Self> {
        let name = |part: &str| format!("{prefix}layers.{layer}.{part}");
        let (hidden, inner, eps) = (config.hidden_size, config.intermediate_size, config.norm_eps);
        let heads = config.heads * config.head_dim;
        let attention_norm = match layer {
            0 => None,
            _ => Some(source.norm(&name("attn_norm"), hidden, config.norm_bias, eps)?),
        };
        Ok(Self {
            kind: config.layers[layer],
            attention_norm,
            qkv: source.linear(&[&name("attn.Wqkv")], 3 * heads, hidden, config.attention_bias)?,
            attention_output: source.linear(&[&name("attn.Wo")], hidden, heads, config.attention_bias)?,
            mlp_norm: source.norm(&name("mlp_norm"), hidden, config.norm_bias, eps)?,
            mlp_input: source.linear(&[&name("mlp.Wi")], 2 * inner, hidden, config.mlp_bias)?,
            mlp_output: source.linear(&[&name("mlp.Wo")], hidden, inner, config.mlp_bias)?,
        })
    }
}

impl<B: Backend> ModernBert<B> {
    /// Computes the hidden states into `scratch.hidden`.
    ///
    /// # Errors
    /// Those of the group that the model is split over; a whole model has none.
    pub(super) fn forward(&self, backend: &B, chunk: &Chunk<'_>, scratch: &mut Scratch<B::Buffer>) -> Result<()> {
        let (sequences, positions) = (backend.sequences(chunk.offsets())?, chunk.positions());
        let angles = [self.full.rotary.upto(chunk.longest()), self.sliding.rotary.upto(chunk.longest())];
        let full = backend.rotation(&angles[0], &positions)?;
        let sliding = backend.rotation(&angles[1], &positions)?;
        let Scratch { hidden, other, qkv, context, inner, .. } = scratch;
        backend.gather_part(&self.tokens, self.first_token, chunk.ids(), hidden)?;
        backend.reduce(hidden)?;
        backend.normalize(&self.embedding_norm, hidden)?;
        for layer in &self.layers {
            let (reach, rotation) = match layer.kind {
                LayerKind::Full => (&self.full, &full),
                LayerKind::Sliding => (&self.sliding, &sliding),
            };
            match &layer.attention_norm {
                Some(norm) => backend.normalize_into(norm, hidden, context)?,
                None => backend.copy(hidden, context)?,
            }
            backend.project(&layer.qkv, context, After::Nothing, qkv)?;
            backend.rotate(rotation, &reach.attention, qkv)?;
            backend.attend(&reach.attention, &sequences, qkv, context)?;
            backend.project(&layer.attention_output, context, residual(self.shard, hidden), other)?;
            backend.reduce(other)?;

            backend.normalize_into(&layer.mlp_norm, other, context)?;
            backend.project(&layer.mlp_input, context, After::Nothing, qkv)?;
            backend.gate(qkv, self.activation, inner)?;
            backend.project(&layer.mlp_output, inner, residual(self.shard, other), hidden)?;
            backend.reduce(hidden)?;
        }
        backend.normalize(&self.final_norm, hidden)
    }
}

/// The heads that the family was trained with; the decoder's weight is often tied to the token table, and then absent.
pub(super) fn language_model_head() -> Vec<String> {
    ["head.", "decoder."].map(str::to_owned).to_vec()
}
