//! The 128-bit page digest: position dependent, fast, equal on every machine.
//!
//! Definition (all integers wrap, all words are little-endian). The input is cut into chunks of
//! 1024 bytes and each chunk, independently, into stripes of 64 bytes, the last one filled up with
//! zeros. Lane `l` of stripe `s` of a chunk is the word `v`; with `k = v ^ STRIPE[8 s + l]` and
//! from zeroed sums, `product[l] += lo32(k) * hi32(k)` and `plain[l] += v`.
//! Then `a[l] = product[l] + plain[l ^ 1]`, as in XXH3, and with the chunk number `i`:
//!
//! ```text
//! low  += mix(sum over j in 0..4 of fold(a[2j] ^ (LOW[2j] + i P), a[2j+1] ^ (LOW[2j+1] - i P)))
//! high += mix(sum over j in 0..4 of fold(a[j] ^ (HIGH[2j] - i Q), a[j+4] ^ (HIGH[2j+1] + i Q)))
//! ```
//!
//! where `fold(x, y)` is the exclusive or of both halves of the 128-bit product. Because the chunk
//! number is inside the product, the sums over chunks depend on their order although they can be
//! formed in any order, which is what a GPU needs. At the end, with the length `n` in bytes:
//! `low += mix(high + n P)`, `high += mix(low ^ n Q)`, both are mixed once more, and the digest is
//! `low`, `high`.
//!
//! The tables are SplitMix64 from the seed in [`SEED`]. The definition is frozen: committed vectors
//! hold it. It detects accidents; it is no defence against someone who chooses the bytes.

use crate::id::{CacheKind, ChainHash, Fingerprint, PageDigest, PageTag};

/// Bytes of a chunk, the unit in which digests are computed.
pub const CHUNK_BYTES: usize = 1024;
const CHUNK: usize = CHUNK_BYTES;
/// Bytes of a stripe.
const STRIPE_BYTES: usize = 64;
/// Words of a stripe.
const LANES: usize = 8;
/// First 64 bits of the fraction of pi; the usual number without a hidden purpose.
const SEED: u64 = 0x243f_6a88_85a3_08d3;
/// Golden ratio in 64 bits (odd).
const P: u64 = 0x9e37_79b9_7f4a_7c15;
/// First prime of xxHash64.
const Q: u64 = 0x9e37_79b1_85eb_ca87;

const STRIPE: [u64; CHUNK / 8] = split_mix(SEED);
const LOW: [u64; LANES] = split_mix(SEED ^ 1);
const HIGH: [u64; LANES] = split_mix(SEED ^ 2);

const fn split_mix<const N: usize>(seed: u64) -> [u64; N] {
    let mut table = [0; N];
    let mut state = seed;
    let mut n = 0;
    while n < N {
        state = state.wrapping_add(P);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        table[n] = z ^ (z >> 31);
        n += 1;
    }
    table
}

/// XXH3's avalanche, a bijection.
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 37)).wrapping_mul(0x1656_6791_9e37_79f9);
    z ^ (z >> 32)
}

const fn fold(x: u64, y: u64) -> u64 {
    let product = (x as u128) * (y as u128);
    (product as u64) ^ ((product >> 64) as u64)
}

/// Lane sums of a chunk; `bytes` is a whole number of stripes, at most 16.
///
/// Nothing is written in this loop, or the compiler gives up its vector form (32x32 to 64 bit
/// multiplies, which the SSE2 baseline has).
#[inline]
fn accumulate(bytes: &[u8]) -> [u64; LANES] {
    let mut product = [0_u64; LANES];
    let mut plain = [0_u64; LANES];
    let (stripes, _) = bytes.as_chunks::<STRIPE_BYTES>();
    let (keys, _) = STRIPE.as_chunks::<LANES>();
    for (stripe, keys) in stripes.iter().zip(keys) {
        let (words, _) = stripe.as_chunks::<8>();
        for lane in 0..LANES {
            let v = u64::from_le_bytes(words[lane]);
            let k = v ^ keys[lane];
            product[lane] = product[lane].wrapping_add((k & 0xffff_ffff).wrapping_mul(k >> 32));
            plain[lane] = plain[lane].wrapping_add(v);
        }
    }
    core::array::from_fn(|lane| product[lane].wrapping_add(plain[lane ^ 1]))
}

/// Sums over the chunks so far.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    low: u64,
    high: u64,
    chunks: u64,
}

impl Sums {
    #[inline]
    fn add(&mut self, a: &[u64; LANES]) {
        let p = self.chunks.wrapping_mul(P);
        let q = self.chunks.wrapping_mul(Q);
        let mut low = 0_u64;
        let mut high = 0_u64;
        for j in 0..4 {
            low = low.wrapping_add(fold(
                a[2 * j] ^ LOW[2 * j].wrapping_add(p),
                a[2 * j + 1] ^ LOW[2 * j + 1].wrapping_sub(p),
            ));
            high = high.wrapping_add(fold(
                a[j] ^ HIGH[2 * j].wrapping_sub(q),
                a[j + 4] ^ HIGH[2 * j + 1].wrapping_add(q),
            ));
        }
        self.low = self.low.wrapping_add(mix(low));
        self.high = self.high.wrapping_add(mix(high));
        self.chunks += 1;
    }

    #[inline]
    fn add_full(&mut self, chunk: &[u8; CHUNK]) {
        self.add(&accumulate(chunk));
    }

    /// A last chunk of 0 to 1023 bytes; none for 0.
    fn add_last(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let mut padded = [0; CHUNK];
        padded[..bytes.len()].copy_from_slice(bytes);
        self.add(&accumulate(&padded[..bytes.len().next_multiple_of(STRIPE_BYTES)]));
    }

    fn finish(self, len: u64) -> PageDigest {
        let Self { mut low, mut high, chunks: _ } = self;
        low = low.wrapping_add(mix(high.wrapping_add(len.wrapping_mul(P))));
        high = high.wrapping_add(mix(low ^ len.wrapping_mul(Q)));
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&mix(low).to_le_bytes());
        bytes[8..].copy_from_slice(&mix(high).to_le_bytes());
        PageDigest(bytes)
    }
}

/// A digest from lane sums that somebody else computes, with vector instructions or on a device.
///
/// The sums of a chunk are `a[0..8]` of the definition in this file: with the words `v` of the
/// chunk and `k = v ^ KEYS[word]`, `a[l]` is the sum of `lo32(k) * hi32(k)` over the words of lane
/// `l` plus the sum of `v` over the words of lane `l ^ 1`; word `n` belongs to lane `n % 8`.
#[derive(Clone, Copy, Debug, Default)]
pub struct LaneSums(Sums);

impl LaneSums {
    /// Of no chunk yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(Sums { low: 0, high: 0, chunks: 0 })
    }

    /// The key of each word of a chunk.
    pub const KEYS: &'static [u64; CHUNK_BYTES / 8] = &STRIPE;

    /// Adds the lane sums of the next full chunk.
    #[inline]
    pub fn add(&mut self, lanes: &[u64; LANES]) {
        self.0.add(lanes);
    }

    /// The digest. With a last chunk that is not full: its lane sums, filled up with zeros to a
    /// whole number of 64-byte stripes, and its bytes (1 to 1023).
    #[must_use]
    pub fn finish(mut self, last: Option<(&[u64; LANES], usize)>) -> PageDigest {
        let mut len = self.0.chunks * CHUNK as u64;
        if let Some((lanes, bytes)) = last {
            len += bytes as u64;
            self.0.add(lanes);
        }
        self.0.finish(len)
    }
}

/// The digest of `bytes`.
///
/// ```
/// use kv_pool::{digest, digest_parts};
/// let page = vec![7_u8; 8448];
/// assert_eq!(digest(&page), digest_parts(&[&page[..100], &page[100..]]));
/// assert_ne!(digest(&page), digest(&page[..8447]));
/// ```
#[must_use]
pub fn digest(bytes: &[u8]) -> PageDigest {
    let mut sums = Sums::default();
    let (chunks, rest) = bytes.as_chunks::<CHUNK>();
    for chunk in chunks {
        sums.add_full(chunk);
    }
    sums.add_last(rest);
    sums.finish(bytes.len() as u64)
}

/// The digest of the concatenation of `parts`.
#[must_use]
pub fn digest_parts(parts: &[&[u8]]) -> PageDigest {
    match parts {
        [whole] => digest(whole),
        _ => {
            let mut stream = DigestStream::new();
            for part in parts {
                stream.update(part);
            }
            stream.finish()
        }
    }
}

/// Copies `source` to `target` and digests it, in one pass over the memory.
///
/// # Panics
///
/// If the lengths differ.
#[must_use]
pub fn copy_and_digest(target: &mut [u8], source: &[u8]) -> PageDigest {
    assert_eq!(target.len(), source.len(), "copy between ranges of different length");
    let mut sums = Sums::default();
    let (to, to_rest) = target.as_chunks_mut::<CHUNK>();
    let (from, from_rest) = source.as_chunks::<CHUNK>();
    for (to, from) in to.iter_mut().zip(from) {
        sums.add_full(from);
        to.copy_from_slice(from);
    }
    sums.add_last(from_rest);
    to_rest.copy_from_slice(from_rest);
    sums.finish(source.len() as u64)
}

/// A digest computed piece by piece; equal to [`digest()`] of all pieces together.
#[derive(Clone, Debug)]
pub struct DigestStream {
    sums: Sums,
    /// The open chunk; its length is `len % 1024`.
    open: [u8; CHUNK],
    len: u64,
}

impl Default for DigestStream {
    fn default() -> Self {
        Self::new()
    }
}

impl DigestStream {
    /// A stream of no bytes.
    #[must_use]
    pub fn new() -> Self {
        Self { sums: Sums::default(), open: [0; CHUNK], len: 0 }
    }

    /// Adds bytes at the end.
    pub fn update(&mut self, bytes: &[u8]) {
        let filled = self.filled();
        self.len += bytes.len() as u64;
        let mut rest = bytes;
        if filled > 0 {
            let take = rest.len().min(CHUNK - filled);
            self.open[filled..filled + take].copy_from_slice(&rest[..take]);
            rest = &rest[take..];
            if filled + take < CHUNK {
                return;
            }
            self.sums.add_full(&self.open);
        }
        let (chunks, rest) = rest.as_chunks::<CHUNK>();
        for chunk in chunks {
            self.sums.add_full(chunk);
        }
        self.open[..rest.len()].copy_from_slice(rest);
    }

    /// The digest of all bytes so far; more may follow.
    #[must_use]
    pub fn finish(&self) -> PageDigest {
        let mut sums = self.sums;
        sums.add_last(&self.open[..self.filled()]);
        sums.finish(self.len)
    }

    fn filled(&self) -> usize {
        (self.len % CHUNK as u64) as usize
    }
}

/// What a page is, beside its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TagInput {
    /// Meaning of all bytes.
    pub fingerprint: Fingerprint,
    /// Cache.
    pub kind: CacheKind,
    /// Layer number.
    pub layer: u16,
    /// Token prefix up to the end of what the page holds.
    pub chain: ChainHash,
    /// Block number, window page number, 0 for a carry.
    pub page_no: u32,
    /// Written rows.
    pub rows: u32,
}

/// Key of the tag hash: domain separation, not a secret.
const TAG_KEY: &[u8; 32] = b"kv-pool 2026-01 page tag v1 ....";

/// Binds a digest to the page's identity: first 16 bytes of keyed BLAKE3 over digest, fingerprint,
/// chain, page number, rows, layer (little-endian) and kind, 75 bytes.
///
/// The identity is mixed outside the byte digest, so that a digest made once serves every tier.
#[must_use]
pub fn tag(digest: &PageDigest, input: &TagInput) -> PageTag {
    let &TagInput { fingerprint, kind, layer, chain, page_no, rows } = input;
    let mut message = [0; 75];
    message[..16].copy_from_slice(&digest.0);
    message[16..32].copy_from_slice(&fingerprint.0);
    message[32..64].copy_from_slice(&chain.0);
    message[64..68].copy_from_slice(&page_no.to_le_bytes());
    message[68..72].copy_from_slice(&rows.to_le_bytes());
    message[72..74].copy_from_slice(&layer.to_le_bytes());
    message[74] = kind as u8;
    let mut value = [0; 16];
    value.copy_from_slice(&blake3::keyed_hash(TAG_KEY, &message).as_bytes()[..16]);
    PageTag(value)
}
