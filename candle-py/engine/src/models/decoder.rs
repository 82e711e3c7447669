//! Llama, Qwen2 and Qwen3: pre-norm layers with rotary positions, grouped heads, causal attention and gated
//! feed-forwards. One body serves whole sequences and sequences whose beginning is in a cache.
//!
//! Sources: Llama, arXiv:2302.13971; grouped heads, arXiv:2305.13245; Qwen2, arXiv:2407.10671; Qwen3, arXiv:2505.09388.

use super::Scratch;
use crate::backend::{After, Attention, Backend, FeedForward};
use crate::batch::Chunk;
use crate::config::{DecoderConfig, LanguageHead};
use crate::error::Result;
use crate::generate::StepSequence;
use crate::rotary::Rotary;
use crate::weights::{Layers, Source};

/// The table whose name tells a checkpoint's prefix.
pub(super) const TOKEN_TABLE: &str = "embed_tokens";

/// The output layer of a language model.
const HEAD: &str = "lm_head";

/// A decoder.
pub struct Decoder<L: Layers> {
    tokens: Tokens<L>,
    layers: Vec<Layer<L>>,
    final_norm: L::Norm,
    rotary: Rotary,
}

/// The token table, and the head that gives logits.
enum Tokens<L: Layers> {
    Separate(L::Embedding, Option<L::Linear>),
    Tied(L::Linear),
}

struct Layer<L: Layers> {
    attention: Attention,
    attention_norm: L::Norm,
    qkv: L::Linear,
    /// Of queries and of keys.
    head_norms: Option<[L::Norm; 2]>,
    attention_output: L::Linear,
    mlp_norm: L::Norm,
    feed_forward: FeedForward<L>,
}

impl<L: Layers> Decoder<L> {
    pub(super) fn build(config: &DecoderConfig, prefix: &str, source: &mut impl Source<L>) -> Result<Self> {
        let (vocab_size, hidden) = (config.vocab_size, config.hidden_size);
        let table = format!("{prefix}{TOKEN_TABLE}");
        let tokens = match config.head {
            Some(LanguageHead::Tied) => Tokens::Tied(source.linear(&[&table], vocab_size, hidden, false)?),
            Some(LanguageHead::Separate) => {
                let embedding = source.embedding(&table, vocab_size, hidden)?;
                Tokens::Separate(embedding, Some(source.linear(&[HEAD], vocab_size, hidden, false)?))
            }
            None => Tokens::Separate(source.embedding(&table, vocab_size, hidden)?, None),
        };
        Ok(Self {
            tokens,
            layers: (0..config.windows.len())
                .map(|layer| Layer::build(config, prefix, layer, source))
                .collect::<Result<_>>()?,
            final_norm: source.rms_norm(&format!("{prefix}norm"), hidden, config.norm_eps)?,
            rotary: Rotary::new(&config.rotary),
        })
    }

    /// The layer that turns hidden states into logits, if the model has one.
    pub fn head(&self) -> Option<&L::Linear> {
        match &self.tokens {
            Tokens::Separate(_, head) => head.as_ref(),
            Tokens::Tied(table) => Some(table),
        }
    }
}

impl<L: Layers> Layer<L> {
    fn build(config: &DecoderConfig, prefix: &str, layer: usize, source: &mut impl Source<L>) -> Result<Self> {
        let name = |part: &str| format!("{prefix}layers.{layer}.{part}");
        let (hidden, inner, eps) = (config.hidden_size, config.intermediate_size, config.norm_eps);
        let attention = Attention {
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            causal: true,
            window: config.windows[layer].map(|tokens| tokens - 1),
        };
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let [q_name, k_name, v_name] = ["q", "k", "v"].map(|part| name(&format!("self_attn.{part}_proj")));
        let parts = [(q_name.as_str(), q), (&k_name, kv), (&v_name, kv)];
        let mut head_norm =
            |part: &str| source.rms_norm(&name(&format!("self_attn.{part}_norm")), config.head_dim, eps);
        Ok(Self {
            attention,
            head_norms: if config.head_norm { Some([head_norm("q")?, head_norm("k")?]) } else { None },
            attention_norm: source.rms_norm(&name("input_layernorm"), hidden, eps)?,
            qkv: source.joined(&parts, hidden, config.qkv_bias)?,
            attention_output: source.linear(&[&name("self_attn.o_proj")], hidden, q, config.output_bias)?,
            mlp_norm: source.rms_norm(&name("post_attention_layernorm"), hidden, eps)?,
            feed_forward: FeedForward {
                input: source.linear(
                    &[&name("mlp.gate_proj"), &name("mlp.up_proj")],
                    inner,
                    hidden,
                    config.mlp_bias,
                )?,
                activation: config.activation,
                output: source.linear(&[&name("mlp.down_proj")], hidden, inner, config.mlp_bias)?,
            },
        })
    }
}

impl<B: Backend> Decoder<B> {
    /// Computes the hidden states of whole sequences into `scratch.hidden`.
    pub(super) fn forward(&self, backend: &B, chunk: &Chunk<'_>, scratch: &mut Scratch<B::Buffer>) {
        let attend = |_, attention: &Attention, qkv: &B::Buffer, own: &mut B::Buffer, out: &mut B::Buffer| {
            backend.attend(attention, chunk.offsets(), qkv, own, out);
        };
        self.run(backend, chunk.ids(), &chunk.positions(), scratch, attend);
    }

    /// Computes the hidden states of new tokens of `sequences`, which follow what the cache holds of each, and adds
    /// their keys and values to the cache.
    pub fn step(
        &self,
        backend: &B,
        ids: &[u32],
        sequences: &[StepSequence],
        cache: &mut B::Cache,
        scratch: &mut Scratch<B::Buffer>,
    ) {
        let positions = |sequence: &StepSequence| sequence.start..sequence.start + sequence.tokens.len();
        let positions: Vec<usize> = sequences.iter().flat_map(positions).collect();
        let attend = |layer, attention: &Attention, qkv: &B::Buffer, _: &mut B::Buffer, out: &mut B::Buffer| {
            backend.attend_cached(attention, layer, sequences, qkv, cache, out);
        };
        self.run(backend, ids, &positions, scratch, attend);
    }

    /// The network; `attend` is given the layer, its attention, the rotated rows, the attention's own buffer and where
    /// to write.
    fn run(
        &self,
        backend: &B,
        ids: &[u32],
        positions: &[usize],
        scratch: &mut Scratch<B::Buffer>,
        mut attend: impl FnMut(usize, &Attention, &B::Buffer, &mut B::Buffer, &mut B::Buffer),
    ) {
        let angles = self.rotary.upto(positions.iter().max().map_or(0, |last| last + 1));
        let Scratch { hidden, other, qkv, context, inner, attention: own, .. } = scratch;
        match &self.tokens {
            Tokens::Separate(table, _) => backend.gather(table, ids, hidden),
            Tokens::Tied(table) => backend.gather_weight(table, ids, hidden),
        }
        for (index, layer) in self.layers.iter().enumerate() {
            backend.copy(hidden, context);
            backend.normalize(&layer.attention_norm, context);
            backend.project(&layer.qkv, context, After::Nothing, qkv);
            if let Some(norms) = &layer.head_norms {
                backend.normalize_heads(norms, &layer.attention, qkv);
            }
            backend.rotate(&angles, positions, &layer.attention, qkv);
            attend(index, &layer.attention, qkv, own, context);
            backend.project(&layer.attention_output, context, After::Add(hidden), other);

            backend.copy(other, context);
            backend.normalize(&layer.mlp_norm, context);
            backend.feed_forward(&layer.feed_forward, context, other, [qkv, inner], hidden);
        }
        backend.normalize(&self.final_norm, hidden);
    }
}

/// Tensors of older checkpoints, which are computed rather than read, and of tasks that are not this one's.
pub(super) fn extras(config: &DecoderConfig, prefix: &str, is_classifier: bool) -> Vec<String> {
    let frequencies = |layer| format!("{prefix}layers.{layer}.self_attn.rotary_emb.inv_freq");
    let mut names: Vec<String> = (0..config.windows.len()).map(frequencies).collect();
    if config.head != Some(LanguageHead::Separate) {
        names.push(format!("{HEAD}."));
    }
    if !is_classifier {
        names.push("score.".to_owned());
    }
    names
}
