//! Which part of a decoder each rank of a group has: the heads, the columns of the feed-forward and the tokens of the
//! vocabulary that are its own. `sharding/tensor.py` tells the same to those who plan.

use std::ops::Range;

use crate::config::DecoderConfig;
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

impl DecoderConfig {
    /// The same model as one rank computes it: its own heads, and its own columns of the feed-forward.
    ///
    /// # Errors
    /// [`Error::Input`] where the model cannot be split over so many ranks; the hint names the numbers that can.
    pub(crate) fn split(&self, shard: Shard) -> Result<Self> {
        let Shard { world, .. } = shard;
        if !self.can_split(world) {
            let (heads, kv_heads, inner) = (self.heads, self.kv_heads, self.intermediate_size);
            let fitting: Vec<String> =
                (1..=heads).filter(|world| self.can_split(*world)).map(|world| world.to_string()).collect();
            return Err(Error::input(format!(
                "model of {heads} heads, {kv_heads} key/value heads and intermediate size {inner} cannot be split over so \
                 many ranks: `{world}`"
            ))
            .with_hint(format!("it can be split over: {}", fitting.join(", "))));
        }
        Ok(Self {
            heads: self.heads / world,
            kv_heads: self.kv_heads.div_ceil(world),
            intermediate_size: self.intermediate_size / world,
            shard,
            ..self.clone()
        })
    }

    /// Whether every rank gets as many heads, whole key/value heads or a copy of one, and as many columns.
    fn can_split(&self, world: usize) -> bool {
        let Self { heads, kv_heads, intermediate_size, vocab_size, .. } = self;
        heads.is_multiple_of(world)
            && (kv_heads.is_multiple_of(world) || world.is_multiple_of(*kv_heads))
            && intermediate_size.is_multiple_of(world)
            && *vocab_size >= world
    }

    /// The part of tensor `name` that a rank of the whole model's `shard` has.
    pub(crate) fn slice(&self, name: &str, shard: Shard) -> Slice {
        let (layer, is_bias) = match name.rsplit_once('.') {
            Some((layer, "bias")) => (layer, true),
            Some((layer, _)) => (layer, false),
            None => (name, false),
        };
        let of_heads = |part: Range<usize>| part.start * self.head_dim..part.end * self.head_dim;
        let Shard { rank, world } = shard;
        let kv_heads = match world > self.kv_heads {
            true => rank * self.kv_heads / world..rank * self.kv_heads / world + 1,
            false => shard.part(self.kv_heads),
        };
        // The products of these are summed over the ranks, and so would be their biases.
        let summed = |columns| match (is_bias, rank) {
            (false, _) => Slice::Columns(columns),
            (true, 0) => Slice::Whole,
            (true, _) => Slice::Nothing,
        };
        match layer.rsplit_once('.').map_or(layer, |(_, last)| last) {
            "q_proj" => Slice::Rows(of_heads(shard.part(self.heads))),
            "k_proj" | "v_proj" => Slice::Rows(of_heads(kv_heads)),
            "o_proj" => summed(of_heads(shard.part(self.heads))),
            "gate_proj" | "up_proj" => Slice::Rows(shard.part(self.intermediate_size)),
            "down_proj" => summed(shard.part(self.intermediate_size)),
            "embed_tokens" | "lm_head" => Slice::Rows(shard.part(self.vocab_size)),
            _ => Slice::Whole,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Shard;

    #[test]
    fn shares_cover_everything_once() {
        for (total, world) in [(10, 3), (7, 7), (384, 4), (5, 8)] {
            let whole = Shard { rank: 0, world };
            let all: Vec<usize> = (0..world).flat_map(|rank| whole.of(rank).part(total)).collect();
            assert_eq!(all, (0..total).collect::<Vec<_>>());
        }
    }
}
