//! A batch through the network: cut into chunks, each by one thread, or one after the other where ranks compute together.

use super::Output;
use super::model::Model;
use crate::backend::Backend;
use crate::batch::{Chunk, Ragged};
use crate::error::Result;
use crate::models::Scratch;
use crate::orders::{Order, Wanted};
use crate::workers::Failure;

/// Tokens that one thread carries through the network at a time: enough to use a weight well while it is in the cache,
/// few enough for the activations to stay there too.
const CHUNK_TOKENS: usize = 256;

/// Fewer tokens are not worth a thread of their own.
const LEAST_CHUNK_TOKENS: usize = 64;

impl<B: Backend> Model<B> {
    /// Runs the network over the batch; `finish` writes a chunk's rows, `rows_of` says how many. All other ranks do the
    /// same, to the end that is `wanted`.
    pub(super) fn run(
        &self,
        batch: &Ragged<'_>,
        (width, wanted): (usize, Wanted),
        rows_of: impl Fn(&Chunk<'_>) -> usize,
        finish: impl Fn(&B, &Chunk<'_>, &mut Scratch<B::Buffer>, &mut [f32]) -> Result<()> + Send + Sync,
    ) -> Result<Output> {
        batch.check(&self.info.limits())?;
        let data = match &self.group {
            None => self.compute(batch, width, rows_of, finish)?,
            Some(group) => {
                let (ids, offsets) = (batch.ids.to_vec(), batch.offsets.to_vec());
                let order = Order::Forward { wanted, ids, offsets, type_ids: batch.type_ids.map(<[u32]>::to_vec) };
                group.lead(&order, || self.compute(batch, width, rows_of, finish))?
            }
        };
        let is_bad = |row: &[f32]| row.iter().any(|value| !value.is_finite());
        let bad_rows =
            data.chunks_exact(width).enumerate().filter(|(_, row)| is_bad(row)).map(|(row, _)| row).collect();
        Ok(Output { data, width, bad_rows })
    }

    /// Carries out rank 0's order to run the network over a batch; what comes of it for every token.
    pub(super) fn run_for(&self, wanted: Wanted, batch: &Ragged<'_>) -> Result<Vec<f32>> {
        batch.check(&self.info.limits())?;
        let tokens = |chunk: &Chunk<'_>| chunk.ids().len();
        match wanted {
            Wanted::Hidden => {
                let width = self.info.hidden_size;
                self.compute(batch, width, tokens, |backend, _, scratch, out| backend.read(&scratch.hidden, width, out))
            }
            Wanted::Logits => {
                let decoder = self.language_model()?;
                self.compute(batch, self.info.vocab_size, tokens, |backend, chunk, scratch, out| {
                    decoder.logits(backend, &scratch.hidden, 0..chunk.ids().len(), out)
                })
            }
            Wanted::LogProbabilities => {
                let decoder = self.language_model()?;
                self.compute(batch, 1, tokens, |backend, chunk, scratch, out| {
                    decoder.log_probabilities(backend, chunk, scratch, out)
                })
            }
        }
    }

    /// This rank's part of a run.
    fn compute(
        &self,
        batch: &Ragged<'_>,
        width: usize,
        rows_of: impl Fn(&Chunk<'_>) -> usize,
        finish: impl Fn(&B, &Chunk<'_>, &mut Scratch<B::Buffer>, &mut [f32]) -> Result<()> + Send + Sync,
    ) -> Result<Vec<f32>> {
        // What the ranks tell each other comes in one order, so that all threads of a rank are in the same chunk.
        let of_device = self.backend.chunk_tokens();
        let is_apart = self.group.is_none() && of_device.is_none();
        let together = of_device.unwrap_or(CHUNK_TOKENS);
        let chunks = batch.chunks(|left| if is_apart { next_chunk_tokens(left, self.threads) } else { together });
        let mut data = vec![0.0; chunks.iter().map(&rows_of).sum::<usize>() * width];
        let mut rest = data.as_mut_slice();
        let mut work = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            let (out, later) = rest.split_at_mut(rows_of(&chunk) * width);
            rest = later;
            work.push((chunk, out));
        }
        let backend = self.backend.spread(if is_apart { work.len() < self.threads } else { self.threads > 1 });
        let failure = Failure::default();
        let run = |(chunk, out): (Chunk<'_>, &mut [f32]), scratch: &mut Scratch<B::Buffer>| {
            let result = self.network.forward(&backend, &chunk, scratch);
            failure.note(result.and_then(|()| finish(&backend, &chunk, scratch, out)));
        };
        if is_apart {
            self.workers.run(work, run)
        } else {
            self.workers.run_in_order(work, run)
        }
        failure.result()?;
        Ok(data)
    }
}

/// Tokens of the next chunk where `left` are left: full chunks first, smaller ones towards the end, so that no thread
/// waits long for the last one of another (guided self-scheduling, Polychronopoulos and Kuck 1987).
fn next_chunk_tokens(left: usize, threads: usize) -> usize {
    if threads == 1 { CHUNK_TOKENS } else { left.div_ceil(2 * threads).clamp(LEAST_CHUNK_TOKENS, CHUNK_TOKENS) }
}
