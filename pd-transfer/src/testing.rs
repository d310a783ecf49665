//! For tests, of this crate and of those above it: fault injection, pages with known bytes, a
//! prefill side and a prefill group that serve them, the conformance suite of transports, and a simulated world.

pub mod conformance;
pub mod faulty;
pub mod fuzz;
pub mod mutation;
pub mod pages;
pub mod ranks;
pub mod sim;
mod sim_nodes;

/// A small seeded generator (SplitMix64); the same seed gives the same numbers for ever.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// From a seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which is not zero.
    pub const fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// True in `per_mille` of 1000 cases.
    pub const fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }

    /// Sixteen bytes.
    pub fn id(&mut self) -> [u8; 16] {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&self.next().to_le_bytes());
        id[8..].copy_from_slice(&self.next().to_le_bytes());
        id
    }
}
