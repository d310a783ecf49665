//! The hash by which states of the model are told apart.

use std::hash::{Hash, Hasher};

/// Two lanes of multiply and rotate; 128 bits, so that two states never meet by chance.
pub(super) struct Wide(u64, u64);

impl Wide {
    fn word(&mut self, word: u64) {
        self.0 = (self.0 ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29) ^ word;
        self.1 = (self.1.rotate_left(31) ^ word).wrapping_mul(0xC2B2_AE3D_27D4_EB4F);
    }

    pub(super) fn of(value: &impl Hash) -> u128 {
        let mut wide = Self(0x1656_67B1_9E37_79F9, 0x27D4_EB2F_1656_67C5);
        value.hash(&mut wide);
        wide.word(0x6A09_E667);
        wide.word(0xBB67_AE85);
        u128::from(wide.0) << 64 | u128::from(wide.1 ^ (wide.1 >> 29))
    }
}

impl Hasher for Wide {
    fn finish(&self) -> u64 {
        self.0 ^ self.1
    }

    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.word(u64::from_le_bytes(*word));
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        self.word(u64::from_le_bytes(last) ^ (rest.len() as u64) << 56);
    }

    fn write_u8(&mut self, n: u8) {
        self.word(n.into());
    }

    fn write_u32(&mut self, n: u32) {
        self.word(n.into());
    }

    fn write_u64(&mut self, n: u64) {
        self.word(n);
    }

    fn write_usize(&mut self, n: usize) {
        self.word(n as u64);
    }
}
