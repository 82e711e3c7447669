//! Lanes: a step's sequences in parts that go through the model side by side, each with threads of its own, which then need not
//! wait for each other layer by layer. Worth it where the tokens are many enough to use every weight well that a lane reads.

use crate::generate::StepSequence;

/// Tokens of context whose attention takes about as long as a small model's layers do with one token.
const CONTEXT_PER_TOKEN: usize = 1000;

/// How much longer the longest lane may take than all would on average.
const MOST_UNEVEN: f64 = 1.15;

/// A step as it is.
pub fn whole(sequences: &[StepSequence]) -> Vec<Vec<StepSequence>> {
    vec![sequences.to_vec()]
}

/// Cuts a step's sequences, in their order, into lanes for so many threads: as many as have an equal number of threads and
/// `least_tokens` each, on average; fewer, where that would leave some of them waiting. Each is a step of its own.
pub fn cut(sequences: &[StepSequence], threads: usize, least_tokens: usize) -> Vec<Vec<StepSequence>> {
    let tokens: usize = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
    let costs: Vec<usize> = sequences.iter().map(cost).collect();
    let most = threads.min(tokens / least_tokens.max(1)).min(sequences.len());
    let counts = (2..=most).rev().filter(|count| threads.is_multiple_of(*count));
    let found = counts.map(|count| evenly(&costs, count)).find(|sizes| is_even(&costs, sizes));
    let Some(sizes) = found else { return whole(sequences) };
    let mut rest = sequences;
    let mut next = |size: usize| {
        let (lane, later) = rest.split_at(size);
        rest = later;
        apart(lane)
    };
    sizes.into_iter().map(&mut next).collect()
}

/// Some sequences of a step as a step of their own, whose tokens begin with their first.
fn apart(sequences: &[StepSequence]) -> Vec<StepSequence> {
    let first = sequences.first().map_or(0, |sequence| sequence.tokens.start);
    let moved = |sequence: &StepSequence| {
        let tokens = sequence.tokens.start - first..sequence.tokens.end - first;
        StepSequence { tokens, ..sequence.clone() }
    };
    sequences.iter().map(moved).collect()
}

fn cost(sequence: &StepSequence) -> usize {
    let tokens = sequence.tokens.len();
    tokens * (CONTEXT_PER_TOKEN + sequence.start + tokens / 2)
}

/// The sizes of `count` parts of about the same cost: each sequence is in the part where its middle is.
fn evenly(costs: &[usize], count: usize) -> Vec<usize> {
    let total: usize = costs.iter().sum();
    let mut sizes = vec![0; count];
    let mut before = 0;
    for cost in costs {
        sizes[((before + cost / 2) * count / total.max(1)).min(count - 1)] += 1;
        before += cost;
    }
    sizes
}

fn is_even(costs: &[usize], sizes: &[usize]) -> bool {
    let mut rest = costs.iter();
    let (mut most, total) = (0, costs.iter().sum::<usize>());
    for size in sizes {
        most = most.max(rest.by_ref().take(*size).sum());
    }
    most as f64 * sizes.len() as f64 <= MOST_UNEVEN * total as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::Logits;

    /// Sequences of so many new tokens after so many.
    fn sequences(sizes: &[(usize, usize)]) -> Vec<StepSequence> {
        let mut first = 0;
        let sequence = |(count, start): &(usize, usize)| {
            let tokens = first..first + count;
            first += count;
            StepSequence { tokens, start: *start, blocks: vec![0], logits: Logits::Last }
        };
        sizes.iter().map(sequence).collect()
    }

    /// How many of the sequences are in each lane.
    fn lanes(sequences: &[StepSequence], threads: usize, least_tokens: usize) -> Vec<usize> {
        cut(sequences, threads, least_tokens).iter().map(Vec::len).collect()
    }

    #[test]
    fn lanes_have_equal_shares_of_the_threads_and_enough_tokens() {
        let rows = sequences(&[(1, 40); 64]);
        assert_eq!(lanes(&rows, 2, 24), [32, 32]);
        assert_eq!(lanes(&rows, 6, 24), [32, 32]);
        assert_eq!(lanes(&rows, 3, 20), [21, 22, 21]);
        assert_eq!(lanes(&rows, 16, 8), [8; 8]);
        for (threads, least_tokens) in [(1, 1), (5, 24), (2, 33), (7, 24)] {
            assert_eq!(lanes(&rows, threads, least_tokens), [64], "{threads} threads, {least_tokens} tokens");
        }
        assert_eq!(lanes(&[], 4, 1), [0]);
    }

    #[test]
    fn what_cannot_be_shared_evenly_stays_together() {
        assert_eq!(lanes(&sequences(&[(400, 0), (1, 9), (1, 9)]), 2, 24), [3]);
        assert_eq!(lanes(&sequences(&[(500, 0)]), 2, 24), [1]);
        // Four lanes would wait for the long one; two do not.
        let sizes = [(200, 0), (50, 0), (50, 0), (50, 0), (50, 0)];
        assert_eq!(lanes(&sequences(&sizes), 4, 24), [1, 4]);
        // A long context counts.
        let mut sizes = [(1, 10); 60];
        sizes[0].1 = 30_000;
        assert_eq!(lanes(&sequences(&sizes), 2, 24), [15, 45]);
    }

    #[test]
    fn every_sequence_is_in_one_lane_in_order_and_a_lane_is_a_step_of_its_own() {
        for seed in 1..200 {
            let sizes: Vec<_> = (1..seed % 37 + 2).map(|i| (i * seed % 29 + 1, i * seed * 7 % 900)).collect();
            let rows = sequences(&sizes);
            for threads in 1..9 {
                let lanes = cut(&rows, threads, 10);
                assert!(lanes.iter().all(|lane| !lane.is_empty()));
                let mut rest = rows.iter();
                for lane in &lanes {
                    let mut next = 0;
                    for (sequence, original) in lane.iter().zip(&mut rest) {
                        assert_eq!((sequence.tokens.start, sequence.start), (next, original.start));
                        assert_eq!(sequence.tokens.len(), original.tokens.len());
                        next = sequence.tokens.end;
                    }
                }
                assert!(rest.next().is_none());
            }
        }
    }
}
