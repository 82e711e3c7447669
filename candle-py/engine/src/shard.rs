//! Which part of a model each rank of a group has: the heads, the columns of the feed-forward and the tokens of the
//! vocabulary that are its own. `sharding/tensor.py` tells the same to those who plan.

use std::ops::Range;

use crate::error::{Error, Result};

/// A rank's share of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Which.
    pub rank: usize,
    /// Of how many.
    pub world: usize,
}

/// The part of a tensor that a rank has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Slice {
    /// All of it, as all other ranks.
    Whole,
    /// Some rows.
    Rows(Range<usize>),
    /// The same rows of each of so many blocks, into which all rows fall: layers that stand one below the other.
    Blocks(usize, Range<usize>),
    /// Some columns.
    Columns(Range<usize>),
    /// None of it.
    Nothing,
}

impl Shard {
    /// All of a model.
    pub const WHOLE: Shard = Shard { rank: 0, world: 1 };

    /// Its share of `total` things in their order; the shares of all ranks differ by one at most.
    pub fn part(self, total: usize) -> Range<usize> {
        total * self.rank / self.world..total * (self.rank + 1) / self.world
    }

    /// The same of another rank.
    pub fn of(self, rank: usize) -> Shard {
        Shard { rank, ..self }
    }
}

/// The sizes of a model that decide how it can be split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub intermediate_size: usize,
    pub vocab_size: usize,
}

impl Sizes {
    /// The same of one rank: its own heads, and its own columns of the feed-forward. Its tokens are not counted here.
    ///
    /// # Errors
    /// [`Error::Input`] where the model cannot be split over so many ranks; the hint names the numbers that can.
    pub(crate) fn split(self, world: usize) -> Result<Self> {
        let Self { heads, kv_heads, intermediate_size, .. } = self;
        if !self.fits(world) {
            let fitting: Vec<String> =
                (1..=heads).filter(|world| self.fits(*world)).map(|world| world.to_string()).collect();
            let counted = |count, noun| format!("{count} {noun}{}", if count == 1 { "" } else { "s" });
            return Err(Error::input(format!(
                "model of {}, {} and intermediate size {intermediate_size} cannot be split over so many ranks: `{world}`",
                counted(heads, "head"),
                counted(kv_heads, "key/value head"),
            ))
            .with_hint(format!("it can be split over: {}", fitting.join(", "))));
        }
        Ok(Self {
            heads: heads / world,
            kv_heads: kv_heads.div_ceil(world),
            intermediate_size: intermediate_size / world,
            ..self
        })
    }

    /// Whether every rank gets as many heads, whole key/value heads or a copy of one, and as many columns.
    fn fits(self, world: usize) -> bool {
        let Self { heads, kv_heads, intermediate_size, vocab_size, .. } = self;
        heads.is_multiple_of(world)
            && (kv_heads.is_multiple_of(world) || world.is_multiple_of(kv_heads))
            && intermediate_size.is_multiple_of(world)
            && vocab_size >= world
    }

    /// The part of tensor `name` of the whole model that a rank has. Layers are known by how their names end, in every
    /// family.
    pub(crate) fn slice(self, name: &str, shard: Shard) -> Slice {
        let (layer, is_bias) = match name.rsplit_once('.') {
            Some((layer, "bias")) => (layer, true),
            Some((layer, _)) => (layer, false),
            None => (name, false),
        };
        let of_heads = |part: Range<usize>| part.start * self.head_dim..part.end * self.head_dim;
        let Shard { rank, world } = shard;
        let (heads, inner) = (of_heads(shard.part(self.heads)), shard.part(self.intermediate_size));
        // The products of these are summed over the ranks, and so would be their biases.
        let summed = |columns| match (is_bias, rank) {
            (false, _) => Slice::Columns(columns),
            (true, 0) => Slice::Whole,
            (true, _) => Slice::Nothing,
        };
        let (block, last) = layer.rsplit_once('.').unwrap_or(("", layer));
        match (block.rsplit('.').next().unwrap_or_default(), last) {
            (_, "q_proj" | "q_lin" | "k_lin" | "v_lin") | ("self", "query" | "key" | "value") => Slice::Rows(heads),
            (_, "k_proj" | "v_proj") => Slice::Rows(of_heads(match world > self.kv_heads {
                true => rank * self.kv_heads / world..rank * self.kv_heads / world + 1,
                false => shard.part(self.kv_heads),
            })),
            (_, "Wqkv") => Slice::Blocks(3, heads),
            (_, "gate_proj" | "up_proj" | "lin1") | ("intermediate", "dense") => Slice::Rows(inner),
            (_, "Wi") => Slice::Blocks(2, inner),
            (_, "o_proj" | "out_lin") | ("attn", "Wo") => summed(heads),
            ("output", "dense") if block.ends_with("attention.output") => summed(heads),
            (_, "down_proj" | "lin2") | ("mlp", "Wo") | ("output", "dense") => summed(inner),
            (_, "embed_tokens" | "lm_head" | "word_embeddings" | "tok_embeddings") => {
                Slice::Rows(shard.part(self.vocab_size))
            }
            _ => Slice::Whole,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Shard, Sizes};

    #[test]
    fn one_head_is_told_in_the_singular() {
        let sizes = Sizes { heads: 4, kv_heads: 1, head_dim: 8, intermediate_size: 64, vocab_size: 9 };
        for (sizes, text) in [(sizes, "4 heads, 1 key/value head"), (Sizes { heads: 1, ..sizes }, "1 head, 1 key")] {
            let told = sizes.split(3).map(|_| ()).unwrap_err().to_string();
            assert!(told.starts_with(&format!("model of {text}")), "{told}");
        }
    }

    #[test]
    fn shares_cover_everything_once() {
        for (total, world) in [(10, 3), (7, 7), (384, 4), (5, 8)] {
            let whole = Shard { rank: 0, world };
            let all: Vec<usize> = (0..world).flat_map(|rank| whole.of(rank).part(total)).collect();
            assert_eq!(all, (0..total).collect::<Vec<_>>());
        }
    }
}
