//! Random numbers as a function of seed and position, so that nothing of batch, order or preemption can change them.

/// Rounds of the generator.
const ROUNDS: usize = 10;
/// Multipliers of a round.
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// What is added to the key after a round.
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Philox 4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..ROUNDS {
        if round > 0 {
            key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        }
        let products = [0, 1].map(|i| u64::from(MULTIPLIERS[i]) * u64::from(counter[2 * i]));
        let [(low0, high0), (low1, high1)] = products.map(|product| (product as u32, (product >> 32) as u32));
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
    }
    counter
}

/// The number of `seed` at `position`, evenly spread over `[0, 1)`.
pub fn uniform(seed: u64, position: u64) -> f64 {
    let [low, high, ..] = philox([position as u32, (position >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = u64::from(high) << 32 | u64::from(low);
    // The 53 bits that an f64 holds exactly.
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::{philox, uniform};

    #[test]
    fn the_published_vectors_come_out() {
        // Known answers of the authors' Random123 library for philox4x32 with 10 rounds.
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn numbers_are_spread_evenly_over_positions_and_over_seeds() {
        for number in [|i: u64| uniform(7, i), |i: u64| uniform(i, 7)] {
            let mut counts = [0u32; 16];
            (0..16_000).for_each(|i| counts[(number(i) * 16.0) as usize] += 1);
            let chi_square: f64 = counts.iter().map(|count| (f64::from(*count) - 1000.0).powi(2) / 1000.0).sum();
            // 15 degrees of freedom: beyond 44.3 once in 10,000 tries.
            assert!(chi_square < 44.3, "{chi_square}");
        }
    }
}
