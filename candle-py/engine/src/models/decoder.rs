//! Llama, Qwen2 and Qwen3: pre-norm layers with rotary positions, grouped heads, causal attention and gated
//! feed-forwards. One body serves whole sequences and sequences whose beginning is in a cache, and a rank's part of the
//! model as well as all of it: the sum over the ranks of what it adds to the residual stream is the whole model's.
//!
//! Sources: Llama, arXiv:2302.13971; grouped heads, arXiv:2305.13245; Qwen2, arXiv:2407.10671; Qwen3, arXiv:2505.09388;
//! ranks, arXiv:1909.08053.

use std::ops::Range;

use super::{Scratch, residual};
use crate::backend::{After, Attention, Backend, FeedForward, KeyValueCache, Targets};
use crate::batch::Chunk;
use crate::config::{DecoderConfig, LanguageHead};
use crate::error::{Error, Result};
use crate::generate::StepSequence;
use crate::rotary::Rotary;
use crate::shard::Shard;
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
    vocab_size: usize,
    kv_heads: usize,
    shard: Shard,
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
            vocab_size,
            kv_heads: config.kv_heads,
            shard: config.shard,
        })
    }

    /// The layer that turns hidden states into logits, if the model has one.
    pub fn head(&self) -> Option<&L::Linear> {
        match &self.tokens {
            Tokens::Separate(_, head) => head.as_ref(),
            Tokens::Tied(table) => Some(table),
        }
    }

    /// Heads of keys and values that are computed here.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
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
    ///
    /// # Errors
    /// Those of the device, and of the group that the model is split over.
    pub(super) fn forward(&self, backend: &B, chunk: &Chunk<'_>, scratch: &mut Scratch<B::Buffer>) -> Result<()> {
        let sequences = backend.sequences(chunk.offsets())?;
        let attend = |_, attention: &Attention, qkv: &B::Buffer, out: &mut B::Buffer| {
            backend.attend(attention, &sequences, qkv, out)
        };
        self.run(backend, chunk.ids(), &chunk.positions(), scratch, attend)
    }

    /// Computes the hidden states of new tokens of `sequences`, which follow what the cache holds of each, and adds
    /// their keys and values to the cache.
    ///
    /// # Errors
    /// As of a forward.
    pub fn step(
        &self,
        backend: &B,
        ids: &[u32],
        sequences: &[StepSequence],
        cache: &mut <B::Cache as KeyValueCache>::Part<'_>,
        scratch: &mut Scratch<B::Buffer>,
    ) -> Result<()> {
        let positions = |sequence: &StepSequence| sequence.start..sequence.start + sequence.tokens.len();
        let positions: Vec<usize> = sequences.iter().flat_map(positions).collect();
        let steps = backend.steps(sequences)?;
        let attend = |layer, attention: &Attention, qkv: &B::Buffer, out: &mut B::Buffer| {
            backend.attend_cached(attention, layer, &steps, qkv, cache, out)
        };
        self.run(backend, ids, &positions, scratch, attend)
    }

    /// The logits over the whole vocabulary of some rows of `x`.
    ///
    /// # Errors
    /// As of a forward.
    pub fn logits(&self, backend: &B, x: &B::Buffer, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let head = self.head().ok_or_else(no_head)?;
        if rows.is_empty() {
            return Ok(());
        }
        if self.shard == Shard::WHOLE {
            return backend.project_out(head, x, rows, out);
        }
        let (count, mut own, mut all) = (rows.len(), Vec::new(), Vec::new());
        own.resize(count * self.shard.part(self.vocab_size).len(), 0.0);
        backend.project_out(head, x, rows, &mut own)?;
        backend.gather_ranks(&own, &mut all)?;
        let mut rest = all.as_slice();
        for part in (0..self.shard.world).map(|rank| self.shard.of(rank).part(self.vocab_size)) {
            let (of_rank, later) = rest.split_at_checked(count * part.len()).ok_or_else(other_width)?;
            rest = later;
            let rows = out.chunks_exact_mut(self.vocab_size).zip(of_rank.chunks_exact(part.len()));
            rows.for_each(|(out, of_rank)| out[part.clone()].copy_from_slice(of_rank));
        }
        Ok(())
    }

    /// The logarithm of the probability of every token of a chunk after those before it, from the hidden states.
    ///
    /// # Errors
    /// As of a forward.
    pub fn log_probabilities(
        &self,
        backend: &B,
        chunk: &Chunk<'_>,
        scratch: &mut Scratch<B::Buffer>,
        out: &mut [f32],
    ) -> Result<()> {
        let head = self.head().ok_or_else(no_head)?;
        let Scratch { hidden, inner, .. } = scratch;
        let first = self.shard.part(self.vocab_size).start;
        // A row for each token, of which the first of a sequence is told by nothing.
        let mut sums = vec![[0.0; 2]; out.len()];
        for bounds in chunk.offsets().windows(2) {
            let (start, last) = (bounds[0], bounds[1] - 1);
            let targets = Targets { ids: &chunk.ids()[start + 1..=last], first };
            backend.log_sums(head, hidden, start..last, targets, inner, &mut sums[start + 1..=last])?;
        }
        let mut all = Vec::new();
        backend.gather_ranks(sums.as_flattened(), &mut all)?;
        let (ranks, _) = all.as_chunks::<2>();
        if ranks.len() != out.len() * self.shard.world {
            return Err(other_width());
        }
        for (row, out) in out.iter_mut().enumerate() {
            // A target's logit is one rank's, and 0 on all others.
            let of_ranks = ranks[row..].iter().step_by(sums.len());
            let logit: f32 = of_ranks.clone().map(|[logit, _]| logit).sum();
            *out = logit - log_sum_exp(of_ranks.map(|[_, sum]| *sum));
        }
        chunk.offsets()[..chunk.rows()].iter().for_each(|first| out[*first] = 0.0);
        Ok(())
    }

    /// The network; `attend` is given the layer, its attention, the rotated rows and where to write.
    fn run(
        &self,
        backend: &B,
        ids: &[u32],
        positions: &[usize],
        scratch: &mut Scratch<B::Buffer>,
        mut attend: impl FnMut(usize, &Attention, &B::Buffer, &mut B::Buffer) -> Result<()>,
    ) -> Result<()> {
        let angles = self.rotary.upto(positions.iter().max().map_or(0, |last| last + 1));
        let rotation = backend.rotation(&angles, positions)?;
        let Scratch { hidden, other, qkv, context, inner, .. } = scratch;
        let first = self.shard.part(self.vocab_size).start;
        match &self.tokens {
            Tokens::Separate(table, _) => backend.gather_part(table, first, ids, hidden)?,
            Tokens::Tied(table) => backend.gather_weight(table, first, ids, hidden)?,
        }
        backend.reduce(hidden)?;
        for (index, layer) in self.layers.iter().enumerate() {
            backend.normalize_into(&layer.attention_norm, hidden, context)?;
            backend.project(&layer.qkv, context, After::Nothing, qkv)?;
            if let Some(norms) = &layer.head_norms {
                backend.normalize_heads(norms, &layer.attention, qkv)?;
            }
            backend.rotate(&rotation, &layer.attention, qkv)?;
            attend(index, &layer.attention, qkv, context)?;
            backend.project(&layer.attention_output, context, residual(self.shard, hidden), other)?;
            backend.reduce(other)?;

            backend.normalize_into(&layer.mlp_norm, other, context)?;
            let after = residual(self.shard, other);
            backend.feed_forward(&layer.feed_forward, context, after, [qkv, inner], hidden)?;
            backend.reduce(hidden)?;
        }
        backend.normalize(&self.final_norm, hidden)
    }
}

/// The logarithm of the sum of exponentials of numbers that are such logarithms themselves; one comes back as it is.
fn log_sum_exp(parts: impl Iterator<Item = f32> + Clone) -> f32 {
    let most = parts.clone().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = parts.clone().map(|part| f64::from(part - most).exp()).sum();
    if parts.clone().count() == 1 { most } else { (f64::from(most) + total.ln()) as f32 }
}

fn no_head() -> Error {
    Error::internal("a decoder without a head")
}

fn other_width() -> Error {
    Error::internal("ranks gave numbers of another part of the vocabulary")
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
