//! What there is to know of a model, from its files alone.

use std::collections::BTreeMap;
use std::path::Path;

use crate::batch::Limits;
use crate::blueprint::Blueprint;
use crate::config::{LanguageHead, SentenceModule};
use crate::error::{Error, Result};
use crate::pooling::Pooling;
use crate::shard::{Shard, Sizes, Slice};

/// A model's facts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// The class that the configuration names, such as "BertModel".
    pub architecture: String,
    /// The configuration's model type, such as "bert".
    pub model_type: String,
    /// "encoder" or "decoder".
    pub kind: &'static str,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// Transformer layers.
    pub layers: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Whether the token table gives the logits; `None` for a model that gives none.
    pub tied: Option<bool>,
    /// Token ids are below this.
    pub vocab_size: usize,
    /// The most tokens that one sequence may have.
    pub max_positions: usize,
    /// Token type ids are below this; 0 for a model without.
    pub type_vocab_size: usize,
    /// A classifier's labels, in the order of its logits.
    pub labels: Option<Vec<String>>,
    /// What a classifier was trained for, if its configuration says.
    pub problem_type: Option<String>,
    /// How the model's files pool tokens, if they say.
    pub pooling: Option<Pooling>,
    /// Whether the model's files normalise embeddings.
    pub normalize: bool,
    /// Whether the model's files pool the tokens of the prompt too.
    pub include_prompt: bool,
    /// Width of an embedding under that pooling.
    pub embedding_dim: Option<usize>,
    /// The width that the first Dense module takes, and what the last one gives.
    pub dense_widths: Option<(usize, usize)>,
    /// The transformer's folder under the model's; empty for the model's folder itself.
    pub transformer_path: String,
    /// Numbers in all weights.
    pub parameters: usize,
    /// Bytes of all weights, in the dtype that they are computed with.
    pub weight_bytes: usize,
}

impl Info {
    pub(crate) fn of(blueprint: &Blueprint) -> Self {
        let (config, sentence) = (&blueprint.config, &blueprint.sentence);
        let network = &config.network;
        let Sizes { heads, kv_heads, head_dim, .. } = network.sizes();
        let pooling = sentence.pooling.as_ref();
        let mut dense = sentence.modules.iter().filter_map(|module| match module {
            SentenceModule::Dense(dense) => Some(dense),
            SentenceModule::Normalize => None,
        });
        let dense_widths = dense.next().map(|first| {
            let last = dense.next_back().unwrap_or(first);
            (first.in_features, last.out_features)
        });
        Self {
            architecture: config.architecture.clone(),
            model_type: config.model_type.clone(),
            kind: if network.decoder().is_some() { "decoder" } else { "encoder" },
            hidden_size: network.hidden_size(),
            layers: network.layers(),
            heads,
            kv_heads,
            head_dim,
            tied: network.decoder().and_then(|decoder| decoder.head).map(|head| head == LanguageHead::Tied),
            vocab_size: network.vocab_size(),
            max_positions: network.max_positions(),
            type_vocab_size: network.type_vocab_size(),
            labels: config.labels.as_ref().map(|labels| labels.names.clone()),
            problem_type: config.labels.as_ref().and_then(|labels| labels.problem_type.clone()),
            pooling: pooling.map(|config| config.pooling.clone()),
            normalize: sentence.ends_normalized(),
            include_prompt: pooling.is_none_or(|config| config.include_prompt),
            embedding_dim: pooling.map(|config| match dense_widths {
                Some((_, output)) => output,
                None => config.pooling.width(network.hidden_size()),
            }),
            dense_widths,
            transformer_path: sentence.transformer_path.to_string_lossy().into_owned(),
            parameters: blueprint.parameters,
            weight_bytes: blueprint.parameters * size_of::<f32>(),
        }
    }

    /// Width of an embedding under another pooling than the files'.
    ///
    /// # Errors
    /// [`Error::Input`] when the pooled rows do not fit the model's Dense modules.
    pub fn embedding_width(&self, pooling: &Pooling) -> Result<usize> {
        let pooled = pooling.width(self.hidden_size);
        match self.dense_widths {
            Some((input, _)) if input != pooled => {
                let message =
                    format!("pooling gives {pooled} numbers where the model's Dense takes {input}: `{pooling}`");
                Err(Error::input(message).with_hint("leave task.pooling at auto"))
            }
            Some((_, output)) => Ok(output),
            None => Ok(pooled),
        }
    }

    pub(crate) fn limits(&self) -> Limits {
        Limits { vocab_size: self.vocab_size, max_positions: self.max_positions, type_vocab_size: self.type_vocab_size }
    }
}

/// Checks a model folder as [`crate::Engine::load`] does, reading its JSON files and the headers of its weights only.
///
/// With a `pooling`, the facts are those of an embedding made with it rather than with the files' own.
///
/// # Errors
/// The same as of a load; [`Error::Input`] for a pooling that does not fit the model's Dense modules.
pub fn inspect(dir: &Path, pooling: Option<&Pooling>) -> Result<Info> {
    let info = Info::of(&Blueprint::read(dir)?);
    match pooling {
        None => Ok(info),
        Some(pooling) => {
            let embedding_dim = Some(info.embedding_width(pooling)?);
            Ok(Info { pooling: Some(pooling.clone()), embedding_dim, ..info })
        }
    }
}

/// The part of every tensor of a model that rank `rank` of `world` loads, by the tensors' names; checks as a load does,
/// and reads no weights.
///
/// # Errors
/// As of [`inspect`]; [`Error::Input`] for a model that cannot be split so.
pub fn inspect_rank(dir: &Path, rank: usize, world: usize) -> Result<BTreeMap<String, Slice>> {
    if rank >= world {
        return Err(Error::input(format!("rank must be below the world of {world}: `{rank}`")));
    }
    let blueprint = Blueprint::read(dir)?;
    let (whole, shard) = (blueprint.config.network.sizes(), Shard { rank, world });
    whole.split(world)?;
    let names = blueprint.checkpoint.tensors().keys();
    Ok(names.map(|name| (name.clone(), whole.slice(name, shard))).collect())
}
