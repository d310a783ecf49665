//! Random numbers that follow from a seed, the same on every machine.

/// SplitMix64 (G. L. Steele et al., OOPSLA 2014).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Numbers that follow from `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Numbers for one of many things with a common seed, independent of those of the others.
    #[must_use]
    pub fn for_item(seed: u64, item: u64) -> Self {
        let mut rng = Self(seed ^ 0x5851_f42d_4c95_7f2d);
        let base = rng.next_u64();
        let mut rng = Self(base.wrapping_add(item.wrapping_mul(0xd134_2543_de82_ef95)));
        Self(rng.next_u64())
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    ///
    /// # Panics
    /// If `n` is zero.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next_u64() % n as u64) as usize
    }

    /// One of the words of a list with spaces between them.
    pub(crate) fn word(&mut self, list: &str) -> String {
        let words: Vec<&str> = list.split_ascii_whitespace().collect();
        words[self.below(words.len())].to_owned()
    }
}
