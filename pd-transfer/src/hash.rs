//! The two hashes of the protocol: a 64-bit checksum of an envelope, a 128-bit hash of a record.
//!
//! Both guard against accidents, not against an attacker. Their definition is part of the protocol
//! and is held by golden vectors.

use crate::wire::{Identity, Key, Tag};

const MUL_A: u64 = 0x9E37_79B9_7F4A_7C15;
const MUL_B: u64 = 0xC2B2_AE3D_27D4_EB4F;
const SEED_LOW: u64 = 0x1656_67B1_9E37_79F9;
const SEED_HIGH: u64 = 0x27D4_EB2F_1656_67C5;

/// A streaming hash over 8-byte little-endian words; the last word is padded with zeros and the
/// length is mixed in at the end, so `"a"` and `"a\0"` differ.
///
/// Per word `w`: `state = rotate_left((state ^ w) * multiplier, 29) + w`.
#[derive(Clone, Debug)]
struct Lane {
    state: u64,
    multiplier: u64,
}

impl Lane {
    fn word(&mut self, word: u64) {
        self.state =
            (self.state ^ word).wrapping_mul(self.multiplier).rotate_left(29).wrapping_add(word);
    }

    fn bytes(&mut self, bytes: &[u8]) {
        let (words, tail) = bytes.as_chunks::<8>();
        for word in words {
            self.word(u64::from_le_bytes(*word));
        }
        if !tail.is_empty() {
            let mut last = [0; 8];
            last[..tail.len()].copy_from_slice(tail);
            self.word(u64::from_le_bytes(last));
        }
        self.word(bytes.len() as u64);
    }

    /// MurmurHash3's 64-bit finaliser: every input bit reaches every output bit.
    fn finish(&self) -> u64 {
        let mut hash = self.state;
        hash = (hash ^ (hash >> 33)).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
        hash = (hash ^ (hash >> 33)).wrapping_mul(0xC4CE_B9FE_1A85_EC53);
        hash ^ (hash >> 33)
    }
}

/// The 64-bit checksum of an envelope: of `head`, then of `body`.
// PD-W9
#[must_use]
pub fn checksum64(head: &[u8], body: &[u8]) -> u64 {
    let mut lane = Lane { state: SEED_LOW, multiplier: MUL_A };
    lane.bytes(head);
    lane.bytes(body);
    lane.finish()
}

/// A 128-bit hash: two lanes of the checksum's kind with different seeds and multipliers.
#[must_use]
pub fn hash128(bytes: &[u8]) -> [u8; 16] {
    let mut low = Lane { state: SEED_LOW, multiplier: MUL_A };
    let mut high = Lane { state: SEED_HIGH, multiplier: MUL_B };
    low.bytes(bytes);
    high.bytes(bytes);
    let mut out = [0; 16];
    out[..8].copy_from_slice(&low.finish().to_le_bytes());
    out[8..].copy_from_slice(&high.finish().to_le_bytes());
    out
}

/// [`hash128`] of bytes that come in pieces, however they are cut.
#[derive(Clone, Debug)]
pub struct Hash128 {
    low: Lane,
    high: Lane,
    /// Bytes that are no whole word yet.
    tail: [u8; 8],
    tail_bytes: usize,
    bytes: u64,
}

impl Default for Hash128 {
    fn default() -> Self {
        Self::new()
    }
}

impl Hash128 {
    /// Of no bytes.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            low: Lane { state: SEED_LOW, multiplier: MUL_A },
            high: Lane { state: SEED_HIGH, multiplier: MUL_B },
            tail: [0; 8],
            tail_bytes: 0,
            bytes: 0,
        }
    }

    /// Takes in more bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        if self.tail_bytes > 0 {
            let (head, rest) = bytes.split_at(bytes.len().min(8 - self.tail_bytes));
            self.tail[self.tail_bytes..][..head.len()].copy_from_slice(head);
            self.tail_bytes += head.len();
            if self.tail_bytes < 8 {
                return;
            }
            self.word(u64::from_le_bytes(self.tail));
            self.tail_bytes = 0;
            bytes = rest;
        }
        let (words, tail) = bytes.as_chunks::<8>();
        for word in words {
            self.word(u64::from_le_bytes(*word));
        }
        self.tail[..tail.len()].copy_from_slice(tail);
        self.tail_bytes = tail.len();
    }

    /// The hash of all bytes.
    #[must_use]
    pub fn finish(mut self) -> [u8; 16] {
        if self.tail_bytes > 0 {
            self.tail[self.tail_bytes..].fill(0);
            self.word(u64::from_le_bytes(self.tail));
        }
        self.word(self.bytes);
        let mut out = [0; 16];
        out[..8].copy_from_slice(&self.low.finish().to_le_bytes());
        out[8..].copy_from_slice(&self.high.finish().to_le_bytes());
        out
    }

    fn word(&mut self, word: u64) {
        self.low.word(word);
        self.high.word(word);
    }
}

/// The hash over all pages of one attempt, independent of the order in which they were offered:
/// the sum, modulo 2^128, of the [`hash128`] of each page's `key | identity | tag` as a
/// little-endian number. A sum, so that it is there when the last page is.
// PD-W10
#[must_use]
pub fn manifest_hash(pages: impl IntoIterator<Item = (Key, Identity, Tag)>) -> [u8; 16] {
    let mut sum = PageSum::default();
    for (key, identity, tag) in pages {
        sum.add(&key, &identity, &tag);
    }
    sum.hash()
}

/// A [`manifest_hash`] of the pages so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PageSum(u128);

impl PageSum {
    /// Adds a page, which was not added before.
    pub fn add(&mut self, key: &Key, identity: &Identity, tag: &Tag) {
        let mut low = Lane { state: SEED_LOW, multiplier: MUL_A };
        let mut high = Lane { state: SEED_HIGH, multiplier: MUL_B };
        for part in [&key.0, &identity.0, &tag.0] {
            let (words, _) = part.as_chunks::<8>();
            for word in words {
                let word = u64::from_le_bytes(*word);
                low.word(word);
                high.word(word);
            }
        }
        self.0 = self.0.wrapping_add(u128::from_le_bytes(finish128(low, high, 48)));
    }

    /// Of all that were added.
    #[must_use]
    pub const fn hash(&self) -> [u8; 16] {
        self.0.to_le_bytes()
    }
}

fn finish128(mut low: Lane, mut high: Lane, bytes: usize) -> [u8; 16] {
    low.word(bytes as u64);
    high.word(bytes as u64);
    let mut out = [0; 16];
    out[..8].copy_from_slice(&low.finish().to_le_bytes());
    out[8..].copy_from_slice(&high.finish().to_le_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    // PD-W9
    #[test]
    fn vectors_are_frozen() {
        // From a second implementation of the definition above.
        assert_eq!(checksum64(b"", b""), 0xAE40_1E6A_4553_38CF);
        assert_eq!(checksum64(b"head", b"body bytes"), 0xE1EA_147E_9581_6D90);
        let hash = u128::from_be_bytes(hash128(b"prefill decode"));
        assert_eq!(hash, 0x5FA7_DD68_B063_126A_24F6_6700_CA4F_64CE);
    }

    #[test]
    fn pieces_hash_as_the_whole() {
        let bytes: Vec<u8> = (0..=99).collect();
        for len in 0..bytes.len() {
            let whole = &bytes[..len];
            for piece in [1, 3, 7, 8, 9, 64] {
                let mut hash = Hash128::new();
                whole.chunks(piece).for_each(|piece| hash.update(piece));
                assert_eq!(hash.finish(), hash128(whole), "{len} bytes by {piece}");
            }
        }
    }

    #[test]
    fn padding_length_and_split_matter() {
        assert_ne!(hash128(b"a"), hash128(b"a\0"));
        assert_ne!(checksum64(b"ab", b"c"), checksum64(b"a", b"bc"));
        assert_ne!(hash128(b"01234567abcdefgh"), hash128(b"abcdefgh01234567"));
    }

    // PD-W9
    #[test]
    fn every_single_bit_changes_the_checksum() {
        let clean = [0x5A_u8; 100];
        let sum = checksum64(&clean, b"");
        for bit in 0..800 {
            let mut damaged = clean;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(checksum64(&damaged, b""), sum, "bit {bit}");
        }
    }

    // PD-W10
    #[test]
    fn manifest_ignores_the_order_of_offers() {
        let page = |n: u8| (Key([n; 16]), Identity([n + 1; 16]), Tag([n + 2; 16]));
        assert_eq!(manifest_hash([page(1), page(9)]), manifest_hash([page(9), page(1)]));
        assert_ne!(manifest_hash([page(1), page(9)]), manifest_hash([page(1), page(8)]));
        let ((key, identity, tag), other) = (page(1), page(9));
        let swapped = [(key, identity, other.2), (other.0, other.1, tag)];
        assert_ne!(manifest_hash([page(1), page(9)]), manifest_hash(swapped), "swapped tags");
        let one = hash128(&[key.0, identity.0, tag.0].concat());
        assert_eq!(manifest_hash([page(1)]), one);
        let sum =
            u128::from_le_bytes(one).wrapping_add(u128::from_le_bytes(manifest_hash([page(9)])));
        assert_eq!(manifest_hash([page(9), page(1)]), sum.to_le_bytes());
    }
}
