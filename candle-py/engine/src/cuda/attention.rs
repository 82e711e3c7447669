//! Attention over ragged batches: of whole sequences to themselves, and of new tokens to their sequences in the cache.
//! One kernel body, cut into tiles of a few tokens each; the host lists the tiles.

use super::{Kernel, Launch, Scalar, Size, Source, in_file, whole};
use crate::backend::Attention;
use crate::generate::{BLOCK_TOKENS, StepSequence};

/// Tokens of a tile.
const TILE_TOKENS: usize = 16;

/// Numbers that tell a tile: its first row in the batch, its tokens, the position of the first in its sequence, the
/// sequence's keys, and where these are: their first row in the batch, or their block table in the list.
const TILE_NUMBERS: usize = 5;

/// Rows of one block of threads, each a token and a head: four warps with four each.
const BLOCK_ROWS: usize = 16;

/// Threads of a block.
const THREADS: usize = 128;

/// Keys that a block holds at a time.
const BLOCK_KEYS: usize = 32;

/// The widest head that the kernel has registers for.
pub const MOST_HEAD_DIM: usize = 256;

/// The tiles of a batch, and the block tables behind them.
#[derive(Clone, Debug, Default)]
pub struct TileList {
    /// The numbers of all tiles, then the tables.
    pub numbers: Vec<u32>,
    /// How many tiles.
    pub tiles: usize,
}

/// A tile of [`TileList`].
#[derive(Clone, Copy, Debug)]
struct Tile {
    first: usize,
    tokens: usize,
    position: usize,
    keys: usize,
    base: usize,
}

impl TileList {
    /// Tiles of whole sequences.
    pub fn of_sequences(offsets: &[usize]) -> Self {
        let mut list = Self::default();
        for bounds in offsets.windows(2) {
            list.add(bounds[0]..bounds[1], 0, bounds[1] - bounds[0], bounds[0]);
        }
        list
    }

    /// Tiles of the new tokens of a step.
    pub fn of_steps(sequences: &[StepSequence]) -> Self {
        let tiles: usize = sequences.iter().map(|sequence| sequence.tokens.len().div_ceil(TILE_TOKENS)).sum();
        let (mut list, mut table) = (Self::default(), tiles * TILE_NUMBERS);
        for sequence in sequences {
            list.add(sequence.tokens.clone(), sequence.start, sequence.start + sequence.tokens.len(), table);
            table += sequence.blocks.len();
        }
        sequences.iter().for_each(|sequence| list.numbers.extend(&sequence.blocks));
        list
    }

    fn add(&mut self, rows: std::ops::Range<usize>, start: usize, keys: usize, base: usize) {
        for first in rows.clone().step_by(TILE_TOKENS) {
            let tokens = TILE_TOKENS.min(rows.end - first);
            let numbers = [first, tokens, start + first - rows.start, keys, base];
            self.numbers.extend(numbers.map(|number| number as u32));
            self.tiles += 1;
        }
    }

    fn tile(numbers: &[u32], index: usize) -> Tile {
        let tile = numbers[index * TILE_NUMBERS..][..TILE_NUMBERS].iter().map(|number| *number as usize);
        let mut tile = tile.collect::<Vec<_>>().into_iter();
        let mut next = || tile.next().unwrap_or_default();
        Tile { first: next(), tokens: next(), position: next(), keys: next(), base: next() }
    }
}

/// Attention of whole sequences to themselves: `(queries, keys, values)` rows and tiles in, `(rows, heads * head_dim)` out.
#[derive(Clone, Copy, Debug)]
pub struct Attend<'a> {
    pub attention: &'a Attention,
    pub rows: usize,
    /// How many tiles, and how many numbers in their list.
    pub tiles: [usize; 2],
}

/// Attention of new tokens to their sequences in the cache; tokens look back only. Reads their rows, the pages of one
/// layer, `(blocks, 2, kv_heads, 16, head_dim)`, and the tiles.
#[derive(Clone, Copy, Debug)]
pub struct AttendCached<'a> {
    pub attention: &'a Attention,
    pub rows: usize,
    /// How many tiles, and how many numbers in their list.
    pub tiles: [usize; 2],
    pub blocks: usize,
}

/// Floats of one block of the cache in one layer.
pub fn block_floats(kv_heads: usize, head_dim: usize) -> usize {
    2 * kv_heads * BLOCK_TOKENS * head_dim
}

fn launch(function: &'static str, attention: &Attention, tiles: usize) -> Launch {
    let Attention { heads, kv_heads, head_dim, causal, window } = *attention;
    Launch {
        function,
        grid: [tiles, kv_heads, (TILE_TOKENS * (heads / kv_heads)).div_ceil(BLOCK_ROWS)],
        threads: THREADS,
        shared_floats: BLOCK_ROWS * head_dim + BLOCK_KEYS * (head_dim + 1),
        scalars: vec![
            whole(heads),
            whole(kv_heads),
            whole(head_dim),
            Scalar::Float(1.0 / (head_dim as f32).sqrt()),
            whole(usize::from(causal)),
            window.map_or(Scalar::Whole(-1), whole),
        ],
    }
}

/// Every query of every tile to all keys that it sees; `key` and `value` give rows of a key/value head.
fn twin<'a>(
    attention: &Attention,
    qkv: &[f32],
    tiles: impl Iterator<Item = Tile>,
    key_and_value: impl Fn(&Tile, usize, usize) -> [&'a [f32]; 2],
    out: &mut [f32],
) {
    let Attention { heads, kv_heads, head_dim, causal, window } = *attention;
    let scale = 1.0 / (head_dim as f64).sqrt();
    for tile in tiles {
        for token in 0..tile.tokens {
            let (row, position) = (tile.first + token, tile.position + token);
            let first = window.map_or(0, |window| position.saturating_sub(window));
            let end = if causal { position + 1 } else { tile.keys };
            let end = window.map_or(end, |window| end.min(position + window + 1));
            for head in 0..heads {
                let query = &qkv[row * attention.qkv_width() + head * head_dim..][..head_dim];
                let seen = (first..end).map(|at| key_and_value(&tile, at, head / (heads / kv_heads)));
                let score = |key: &[f32]| {
                    query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() * scale
                };
                let scores: Vec<f64> = seen.clone().map(|[key, _]| score(key)).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
                let total: f64 = weights.iter().sum();
                let out = &mut out[(row * heads + head) * head_dim..][..head_dim];
                for (at, out) in out.iter_mut().enumerate() {
                    let sum: f64 = weights
                        .iter()
                        .zip(seen.clone())
                        .map(|(weight, [_, value])| weight * f64::from(value[at]))
                        .sum();
                    *out = (sum / total) as f32;
                }
            }
        }
    }
}

impl Kernel for Attend<'_> {
    in_file!("attention");

    fn out_len(&self) -> usize {
        self.rows * self.attention.heads * self.attention.head_dim
    }

    fn sources(&self) -> Vec<Size> {
        vec![Size::Floats(self.rows * self.attention.qkv_width()), Size::Wholes(self.tiles[1])]
    }

    fn launch(&self) -> Launch {
        launch("attend", self.attention, self.tiles[0])
    }

    fn twin(&self, sources: &[Source<'_>], out: &mut [f32]) {
        let (qkv, numbers) = (sources[0].floats(), sources[1].wholes());
        let Attention { heads, kv_heads, head_dim, .. } = *self.attention;
        let tiles = (0..self.tiles[0]).map(|index| TileList::tile(numbers, index));
        let key_and_value = |tile: &Tile, at: usize, head: usize| {
            let row = &qkv[(tile.base + at) * self.attention.qkv_width()..];
            [heads + head, heads + kv_heads + head].map(|head| &row[head * head_dim..][..head_dim])
        };
        twin(self.attention, qkv, tiles, key_and_value, out);
    }
}

impl Kernel for AttendCached<'_> {
    in_file!("attention");

    fn out_len(&self) -> usize {
        self.rows * self.attention.heads * self.attention.head_dim
    }

    fn sources(&self) -> Vec<Size> {
        let pages = self.blocks * block_floats(self.attention.kv_heads, self.attention.head_dim);
        vec![Size::Floats(self.rows * self.attention.qkv_width()), Size::Floats(pages), Size::Wholes(self.tiles[1])]
    }

    fn launch(&self) -> Launch {
        launch("attend_cached", self.attention, self.tiles[0])
    }

    fn twin(&self, sources: &[Source<'_>], out: &mut [f32]) {
        let (qkv, pages, numbers) = (sources[0].floats(), sources[1].floats(), sources[2].wholes());
        let Attention { kv_heads, head_dim, .. } = *self.attention;
        let tiles = (0..self.tiles[0]).map(|index| TileList::tile(numbers, index));
        let key_and_value = |tile: &Tile, at: usize, head: usize| {
            let block = numbers[tile.base + at / BLOCK_TOKENS] as usize;
            let page = &pages[block * block_floats(kv_heads, head_dim)..];
            [head, kv_heads + head]
                .map(|head| &page[(head * BLOCK_TOKENS + at % BLOCK_TOKENS) * head_dim..][..head_dim])
        };
        twin(self.attention, qkv, tiles, key_and_value, out);
    }
}
