//! Lanes: a step's sequences in parts that go through the model side by side, each with threads of its own, which then need not
//! wait for each other layer by layer. Worth it where the tokens are many enough to use every weight well that a lane reads.

use std::ops::Range;

use crate::generate::StepSequence;

/// Tokens of context whose attention takes about as long as a small model's layers do with one token.
const CONTEXT_PER_TOKEN: usize = 1000;

/// How much longer the longest lane may take than all would on average.
const MOST_UNEVEN: f64 = 1.15;

/// Cuts a step's sequences, in their order, into lanes for so many threads: as many as have an equal number of threads and
/// `least_tokens` each, on average; fewer, where that would leave some of them waiting.
pub fn cut(sequences: &[StepSequence], threads: usize, least_tokens: usize) -> Vec<Range<usize>> {
    let tokens: usize = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
    let costs: Vec<usize> = sequences.iter().map(cost).collect();
    let most = threads.min(tokens / least_tokens.max(1)).min(sequences.len());
    let counts = (2..=most).rev().filter(|count| threads.is_multiple_of(*count));
    counts
        .map(|count| evenly(&costs, count))
        .find(|lanes| is_even(&costs, lanes))
        .unwrap_or_else(|| vec![0..costs.len()])
}

/// Some sequences of a step as a step of their own, whose tokens begin with their first.
pub fn apart(sequences: &[StepSequence]) -> Vec<StepSequence> {
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

/// `count` parts of about the same cost: each ends where its share of all is nearest.
fn evenly(costs: &[usize], count: usize) -> Vec<Range<usize>> {
    let total: usize = costs.iter().sum();
    let mut lanes = vec![0..0; count];
    let mut before = 0;
    for (index, cost) in costs.iter().enumerate() {
        let middle = before + cost / 2;
        let lane = (middle * count / total.max(1)).min(count - 1);
        lanes[lane].end = index + 1;
        before += cost;
    }
    let mut start = 0;
    for lane in &mut lanes {
        (lane.start, lane.end) = (start, lane.end.max(start));
        start = lane.end;
    }
    lanes
}

fn is_even(costs: &[usize], lanes: &[Range<usize>]) -> bool {
    let costs = lanes.iter().map(|lane| costs[lane.clone()].iter().sum::<usize>());
    let (most, total) = (costs.clone().max().unwrap_or(0), costs.sum::<usize>());
    most as f64 * lanes.len() as f64 <= MOST_UNEVEN * total as f64
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

    #[test]
    fn lanes_have_equal_shares_of_the_threads_and_enough_tokens() {
        let rows = sequences(&[(1, 40); 64]);
        assert_eq!(cut(&rows, 2, 24), [0..32, 32..64]);
        assert_eq!(cut(&rows, 6, 24), [0..32, 32..64]);
        assert_eq!(cut(&rows, 3, 20), [0..21, 21..43, 43..64]);
        assert_eq!(cut(&rows, 16, 8), [0..8, 8..16, 16..24, 24..32, 32..40, 40..48, 48..56, 56..64]);
        for (threads, least_tokens) in [(1, 1), (5, 24), (2, 33), (7, 24)] {
            assert_eq!(cut(&rows, threads, least_tokens), [0..64], "{threads} threads, {least_tokens} tokens");
        }
        assert_eq!(cut(&[], 4, 1), [0..0]);
    }

    #[test]
    fn what_cannot_be_shared_evenly_stays_together() {
        assert_eq!(cut(&sequences(&[(400, 0), (1, 9), (1, 9)]), 2, 24), [0..3]);
        assert_eq!(cut(&sequences(&[(500, 0)]), 2, 24), [0..1]);
        // Four lanes would wait for the long one; two do not.
        let sizes = [(200, 0), (50, 0), (50, 0), (50, 0), (50, 0)];
        assert_eq!(cut(&sequences(&sizes), 4, 24), [0..1, 1..5]);
        // A long context counts.
        let mut sizes = [(1, 10); 60];
        sizes[0].1 = 30_000;
        assert_eq!(cut(&sequences(&sizes), 2, 24), [0..15, 15..60]);
    }

    #[test]
    fn every_sequence_is_in_one_lane_in_order() {
        for seed in 1..200 {
            let sizes: Vec<_> = (1..seed % 37 + 2).map(|i| (i * seed % 29 + 1, i * seed * 7 % 900)).collect();
            let rows = sequences(&sizes);
            for threads in 1..9 {
                let lanes = cut(&rows, threads, 10);
                assert_eq!(lanes.iter().cloned().flatten().collect::<Vec<_>>(), (0..rows.len()).collect::<Vec<_>>());
                assert!(lanes.len() == 1 || lanes.iter().all(|lane| !lane.is_empty()));
            }
        }
    }

    #[test]
    fn a_lane_is_a_step_of_its_own() {
        let rows = sequences(&[(3, 1), (2, 5), (4, 0)]);
        let lane = apart(&rows[1..]);
        assert_eq!(lane.iter().map(|sequence| sequence.tokens.clone()).collect::<Vec<_>>(), [0..2, 2..6]);
        assert_eq!(lane[0].start, 5);
        assert!(apart(&[]).is_empty());
    }
}
