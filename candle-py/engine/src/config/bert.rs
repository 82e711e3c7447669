//! `config.json` of the BERT family: four model types that differ in names, positions and token types.

use super::{JsonObject, MAX_LAYERS, MAX_ROWS, MAX_WIDTH, activation, check_heads};
use crate::cpu::Activation;
use crate::error::Problems;
use crate::shard::Shard;

/// A model type of the family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BertFamily {
    /// "bert".
    Bert,
    /// "roberta".
    Roberta,
    /// "xlm-roberta".
    XlmRoberta,
    /// "distilbert".
    DistilBert,
}

impl BertFamily {
    /// What the names of its classes begin with.
    pub fn class_name(self) -> &'static str {
        match self {
            BertFamily::Bert => "Bert",
            BertFamily::Roberta => "Roberta",
            BertFamily::XlmRoberta => "XLMRoberta",
            BertFamily::DistilBert => "DistilBert",
        }
    }

    /// Whether positions start after the padding token's id.
    pub fn is_roberta(self) -> bool {
        matches!(self, BertFamily::Roberta | BertFamily::XlmRoberta)
    }
}

/// Sizes and choices of an encoder of the BERT family.
#[derive(Clone, Debug)]
pub struct BertConfig {
    /// The model type.
    pub family: BertFamily,
    /// Rows of the token table.
    pub vocab_size: usize,
    /// Rows of the position table, the ones before `first_position` included.
    pub position_rows: usize,
    /// Rows of the token type table; 0 for none.
    pub type_vocab_size: usize,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// Width inside the feed-forward, of this rank.
    pub intermediate_size: usize,
    /// Transformer layers.
    pub layers: usize,
    /// Attention heads, of this rank.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Between the two linear layers of the feed-forward.
    pub activation: Activation,
    /// Added to the variance in every layer norm.
    pub norm_eps: f32,
    /// RoBERTa's padding token: it takes this number as its position, and real positions start after it.
    pub padding_id: Option<u32>,
    /// The rank's share of the whole model.
    pub shard: Shard,
}

impl BertConfig {
    /// Reads the family's keys; defaults are those of the model type.
    pub(super) fn read(family: BertFamily, file: &JsonObject, problems: &mut Problems) -> Self {
        let keys = if family == BertFamily::DistilBert { &DISTILBERT_KEYS } else { &BERT_KEYS };
        let vocab_size = file.size("vocab_size", family.default_vocab_size(), 1, MAX_ROWS, problems);
        let position_rows = file.size("max_position_embeddings", 512, 1, MAX_ROWS, problems);
        let hidden_size = file.size(keys.hidden_size, 768, 1, MAX_WIDTH, problems);
        let heads = file.size(keys.heads, 12, 1, MAX_WIDTH, problems);
        check_heads(file, keys.hidden_size, hidden_size, heads, problems);
        let embedding_type = file.text("position_embedding_type", "absolute", problems);
        if embedding_type != "absolute" {
            problems.push(file.complaint("position_embedding_type", "is not supported"));
        }
        let type_vocab_size = match family {
            BertFamily::DistilBert => 0,
            _ => file.size("type_vocab_size", 2, 0, MAX_ROWS, problems),
        };
        let padding_id = family.is_roberta().then(|| padding_id(file, position_rows, problems));
        Self {
            family,
            vocab_size,
            position_rows,
            type_vocab_size,
            hidden_size,
            intermediate_size: file.size(keys.intermediate_size, 3072, 1, MAX_WIDTH, problems),
            layers: file.size(keys.layers, keys.default_layers, 0, MAX_LAYERS, problems),
            heads,
            head_dim: hidden_size / heads,
            activation: activation(file, keys.activation, "gelu", problems),
            norm_eps: match family {
                BertFamily::DistilBert => 1e-12,
                _ => file.positive("layer_norm_eps", 1e-12, problems) as f32,
            },
            padding_id,
            shard: Shard::WHOLE,
        }
    }

    /// The position of a sequence's first token.
    pub fn first_position(&self) -> usize {
        self.padding_id.map_or(0, |padding_id| padding_id as usize + 1)
    }

    /// The most tokens that one sequence may have.
    pub fn max_positions(&self) -> usize {
        self.position_rows - self.first_position()
    }
}

impl BertFamily {
    fn default_vocab_size(self) -> usize {
        match self {
            BertFamily::Bert | BertFamily::DistilBert => 30_522,
            BertFamily::Roberta => 50_265,
            BertFamily::XlmRoberta => 30_522,
        }
    }
}

/// The padding id, which must leave at least one position after it.
fn padding_id(file: &JsonObject, position_rows: usize, problems: &mut Problems) -> u32 {
    const DEFAULT: u32 = 1;
    if file.has("pad_token_id") && file.get("pad_token_id").is_none() {
        problems.push(file.complaint("pad_token_id", "is needed to number the positions"));
    }
    let padding_id = file.size("pad_token_id", DEFAULT as usize, 0, MAX_ROWS, problems);
    if padding_id + 1 >= position_rows {
        problems.push(file.complaint("max_position_embeddings", "leaves no position after the padding id"));
        return 0;
    }
    u32::try_from(padding_id).unwrap_or(DEFAULT)
}

/// What one family calls its settings.
struct Keys {
    hidden_size: &'static str,
    intermediate_size: &'static str,
    layers: &'static str,
    heads: &'static str,
    activation: &'static str,
    default_layers: usize,
}

const BERT_KEYS: Keys = Keys {
    hidden_size: "hidden_size",
    intermediate_size: "intermediate_size",
    layers: "num_hidden_layers",
    heads: "num_attention_heads",
    activation: "hidden_act",
    default_layers: 12,
};

const DISTILBERT_KEYS: Keys = Keys {
    hidden_size: "dim",
    intermediate_size: "hidden_dim",
    layers: "n_layers",
    heads: "n_heads",
    activation: "activation",
    default_layers: 6,
};
