//! Philox4x32-10, a counter-based generator (Salmon et al., "Parallel random numbers: as easy as
//! 1, 2, 3", 2011): the n-th number is a function of n and a key, so there is no state.

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: u32 = 10;

/// The generator's block function: four random words for a counter and a key.
#[must_use]
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut c, mut k) = (counter, key);
    for round in 0..ROUNDS {
        if round > 0 {
            k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
        }
        let (high_0, low_0) = wide(MULTIPLIERS[0], c[0]);
        let (high_1, low_1) = wide(MULTIPLIERS[1], c[2]);
        c = [high_1 ^ c[1] ^ k[0], low_1, high_0 ^ c[3] ^ k[1], low_0];
    }
    c
}

fn wide(a: u32, b: u32) -> (u32, u32) {
    let product = u64::from(a) * u64::from(b);
    ((product >> 32) as u32, product as u32)
}

/// The random number of a position: uniform in `[0, 1)` with 53 bits.
#[must_use]
pub fn uniform(seed: u64, position: u32) -> f64 {
    let words = philox4x32([position, 0, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(words[0]) << 32 | u64::from(words[1])) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that Random123 publishes for philox4x32-10.
    #[test]
    fn known_answers() {
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([!0; 4], [!0; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, want) in cases {
            assert_eq!(philox4x32(counter, key), want);
        }
    }

    #[test]
    fn uniform_is_in_range_and_uses_seed_and_position() {
        let mut numbers: Vec<u64> = Vec::new();
        for seed in [0, 1, 1 << 32, u64::MAX] {
            for position in [0, 1, 2, 1 << 20, u32::MAX] {
                let u = uniform(seed, position);
                assert!((0.0..1.0).contains(&u), "{u}");
                numbers.push(u.to_bits());
            }
        }
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 20);
    }
}
