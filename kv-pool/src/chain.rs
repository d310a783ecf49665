//! Hashes of token prefixes, chained block by block.
//!
//! Users choose the tokens, so the hash is keyed BLAKE3: without the namespace's salt nobody can
//! look for two prefixes of one hash. A block is up to 256 tokens and its length is hashed.

use crate::geometry::BLOCK_TOKENS;
use crate::id::{ChainHash, Fingerprint};
use alloc::vec::Vec;
use core::fmt;

const CONTEXT: &str = "kv-pool 2026-01 token chain v1";
const BLOCK: usize = BLOCK_TOKENS as usize;
/// Parent, token count, tokens.
const MESSAGE: usize = 32 + 4 + 4 * BLOCK;

/// The key of all chains of one fingerprint and salt.
///
/// ```
/// use kv_pool::{Fingerprint, Namespace};
/// let namespace = Namespace::new(Fingerprint([7; 16]), b"tenant a");
/// let tokens: Vec<u32> = (0..600).collect();
/// let chain = namespace.chain(&tokens);
/// assert_eq!(chain.len(), 3);
/// assert_eq!(chain[1], namespace.next(&chain[0], &tokens[256..512]));
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Namespace {
    key: [u8; 32],
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The key is what keeps chains unpredictable; it does not belong in a log.
        f.debug_struct("Namespace").finish_non_exhaustive()
    }
}

impl Namespace {
    /// Derives the key. The salt is any secret or tenant name; an empty one is allowed.
    #[must_use]
    pub fn new(fingerprint: Fingerprint, salt: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(CONTEXT);
        hasher.update(&fingerprint.0);
        hasher.update(&(salt.len() as u64).to_le_bytes());
        hasher.update(salt);
        Self { key: *hasher.finalize().as_bytes() }
    }

    /// The hash of the empty prefix.
    #[must_use]
    pub fn root(&self) -> ChainHash {
        ChainHash(*blake3::keyed_hash(&self.key, b"root").as_bytes())
    }

    /// The hash of `parent`'s prefix with one more block of 1 to 256 tokens.
    ///
    /// # Panics
    ///
    /// If there are no tokens or more than 256.
    #[must_use]
    pub fn next(&self, parent: &ChainHash, tokens: &[u32]) -> ChainHash {
        assert!(!tokens.is_empty(), "a block without tokens");
        assert!(tokens.len() <= BLOCK, "a block of {} tokens, at most {BLOCK}", tokens.len());
        let mut message = [0; MESSAGE];
        message[..32].copy_from_slice(&parent.0);
        message[32..36].copy_from_slice(&(tokens.len() as u32).to_le_bytes());
        for (bytes, token) in message[36..].chunks_exact_mut(4).zip(tokens) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        let message = &message[..36 + 4 * tokens.len()];
        ChainHash(*blake3::keyed_hash(&self.key, message).as_bytes())
    }

    /// One hash per started block: entry `i` covers the first `min(256 * (i + 1), tokens.len())`
    /// tokens.
    #[must_use]
    pub fn chain(&self, tokens: &[u32]) -> Vec<ChainHash> {
        let mut parent = self.root();
        let extend = |block| {
            parent = self.next(&parent, block);
            parent
        };
        tokens.chunks(BLOCK).map(extend).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn chains_depend_on_everything_before() {
        let namespace = Namespace::new(Fingerprint([1; 16]), b"s");
        let tokens: Vec<u32> = (0..1000).collect();
        let chain = namespace.chain(&tokens);
        assert_eq!(chain.len(), 4);
        assert_eq!(namespace.chain(&[]), vec![]);
        for changed in [0, 255, 256, 999] {
            let mut other = tokens.clone();
            other[changed] ^= 1 << 31;
            let other = namespace.chain(&other);
            let first = changed / 256;
            assert_eq!(other[..first], chain[..first]);
            for block in first..4 {
                assert_ne!(other[block], chain[block], "token {changed}, block {block}");
            }
        }
    }

    #[test]
    fn length_key_and_salt_count() {
        let namespace = Namespace::new(Fingerprint([1; 16]), b"s");
        let root = namespace.root();
        assert_ne!(namespace.next(&root, &[0]), namespace.next(&root, &[0, 0]));
        for other in [
            Namespace::new(Fingerprint([2; 16]), b"s"),
            Namespace::new(Fingerprint([1; 16]), b"t"),
            Namespace::new(Fingerprint([1; 16]), b""),
            Namespace::new(Fingerprint([1; 16]), b"s\0"),
        ] {
            assert_ne!(other.root(), root);
            assert_ne!(other.next(&root, &[0]), namespace.next(&root, &[0]));
        }
    }
}
