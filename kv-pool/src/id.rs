//! Names of things: cache kinds, pools, page references and 128/256-bit values. No arithmetic.

use core::fmt;

/// A number that names no known kind; the peer speaks of something this build does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnknownKind {
    /// Not a [`CacheKind`].
    #[error("unknown cache kind {0}")]
    Cache(u8),
    /// Not a [`PoolKind`].
    #[error("unknown pool kind {0}")]
    Pool(u8),
    /// Bytes that must be zero were not.
    #[error("reserved byte {position} of an encoded page reference or plan key is {value}, not 0")]
    Reserved {
        /// Offset of the byte.
        position: u8,
        /// Its value.
        value: u8,
    },
}

/// What a page's bytes are. The numbers are stable: they are hashed and sent to peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum CacheKind {
    /// Sliding-window KV, one row a position, in every layer.
    Window = 0,
    /// Compressed KV of a C4 layer, one row per 4 tokens.
    C4Kv = 1,
    /// Index keys of a C4 layer, one row per 4 tokens.
    C4Index = 2,
    /// Compressed KV of a C128 layer, one row per 128 tokens.
    C128Kv = 3,
    /// Open and previous compressor rows of a C4 layer.
    C4Carry = 4,
    /// Open and previous rows of a C4 layer's indexer compressor.
    IndexCarry = 5,
    /// Running softmax of a C128 layer's open window.
    C128Carry = 6,
    /// Reserved for drafting state; it has no geometry yet.
    Draft = 7,
}

impl CacheKind {
    /// All kinds in the order of their numbers.
    pub const ALL: [Self; 8] = [
        Self::Window,
        Self::C4Kv,
        Self::C4Index,
        Self::C128Kv,
        Self::C4Carry,
        Self::IndexCarry,
        Self::C128Carry,
        Self::Draft,
    ];

    /// The pool that holds pages of this kind; none for [`CacheKind::Draft`].
    #[must_use]
    pub const fn pool(self) -> Option<PoolKind> {
        match self {
            Self::Window => Some(PoolKind::Window),
            Self::C4Kv | Self::C4Index | Self::C128Kv => Some(PoolKind::Block),
            Self::C4Carry | Self::IndexCarry | Self::C128Carry => Some(PoolKind::Carry),
            Self::Draft => None,
        }
    }

    /// Short lower-case name, used in descriptions and messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Window => "window",
            Self::C4Kv => "c4_kv",
            Self::C4Index => "c4_index",
            Self::C128Kv => "c128_kv",
            Self::C4Carry => "c4_carry",
            Self::IndexCarry => "index_carry",
            Self::C128Carry => "c128_carry",
            Self::Draft => "draft",
        }
    }
}

impl fmt::Display for CacheKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl TryFrom<u8> for CacheKind {
    type Error = UnknownKind;

    fn try_from(value: u8) -> Result<Self, UnknownKind> {
        Self::ALL.get(usize::from(value)).copied().ok_or(UnknownKind::Cache(value))
    }
}

/// Which pool a page index counts in. The numbers are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum PoolKind {
    /// One index per 256-token block: C4 KV and index-key pages of every C4 layer and the C128 KV
    /// page of every C128 layer.
    Block = 0,
    /// One index per 64 positions: the window rows of every layer.
    Window = 1,
    /// One index per sequence or snapshot: the compressor carries of every layer.
    Carry = 2,
}

impl PoolKind {
    /// All pools in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::Block, Self::Window, Self::Carry];

    /// Short lower-case name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Block => "block",
            Self::Window => "window",
            Self::Carry => "carry",
        }
    }
}

impl fmt::Display for PoolKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl TryFrom<u8> for PoolKind {
    type Error = UnknownKind;

    fn try_from(value: u8) -> Result<Self, UnknownKind> {
        Self::ALL.get(usize::from(value)).copied().ok_or(UnknownKind::Pool(value))
    }
}

/// One page of one pool in one of its lives.
///
/// Live generations start at 1, so that neither zeroed memory nor sixteen zero bytes name a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageRef {
    /// Pool.
    pub pool: PoolKind,
    /// Page index in the pool.
    pub index: u32,
    /// Life of the page; grows by one at each free.
    pub generation: u64,
}

impl PageRef {
    /// Sixteen bytes for the wire: pool, three zero bytes, index, generation (little-endian).
    #[must_use]
    pub fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[0] = self.pool as u8;
        bytes[4..8].copy_from_slice(&self.index.to_le_bytes());
        bytes[8..].copy_from_slice(&self.generation.to_le_bytes());
        bytes
    }

    /// Reads [`PageRef::to_bytes`] back.
    ///
    /// # Errors
    ///
    /// [`UnknownKind`] if the pool is not known or a reserved byte is not zero.
    pub fn from_bytes(bytes: [u8; 16]) -> Result<Self, UnknownKind> {
        for position in 1..4_u8 {
            let value = bytes[usize::from(position)];
            if value != 0 {
                return Err(UnknownKind::Reserved { position, value });
            }
        }
        let pool = PoolKind::try_from(bytes[0])?;
        let [.., i0, i1, i2, i3, g0, g1, g2, g3, g4, g5, g6, g7] = bytes;
        Ok(Self {
            pool,
            index: u32::from_le_bytes([i0, i1, i2, i3]),
            generation: u64::from_le_bytes([g0, g1, g2, g3, g4, g5, g6, g7]),
        })
    }
}

impl fmt::Display for PageRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}@{}", self.pool, self.index, self.generation)
    }
}

fn write_hex(f: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    for byte in bytes {
        write!(f, "{byte:02x}")?;
    }
    Ok(())
}

macro_rules! opaque {
    ($(#[$meta:meta])* $name:ident, $len:literal) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub [u8; $len]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write_hex(f, &self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(concat!(stringify!($name), "("))?;
                write_hex(f, &self.0)?;
                f.write_str(")")
            }
        }
    };
}

opaque!(
    /// Random identity of one process life. Displayed as lower-case hex.
    Incarnation,
    16
);
opaque!(
    /// Identity of everything that decides what a page's bytes mean, see
    /// [`crate::FingerprintInput`]. Displayed as lower-case hex.
    Fingerprint,
    16
);
opaque!(
    /// Digest of a page's written bytes, see [`crate::digest()`]. Displayed as lower-case hex.
    PageDigest,
    16
);
opaque!(
    /// Digest bound to the page's identity, see [`crate::tag()`]. Displayed as lower-case hex.
    PageTag,
    16
);
opaque!(
    /// Keyed hash of a token prefix, see [`crate::Namespace`]. Displayed as lower-case hex.
    ChainHash,
    32
);

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn kind_numbers_are_stable() {
        for (number, kind) in CacheKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, number);
            assert_eq!(CacheKind::try_from(number as u8), Ok(kind));
        }
        assert_eq!(CacheKind::try_from(8), Err(UnknownKind::Cache(8)));
        for (number, pool) in PoolKind::ALL.into_iter().enumerate() {
            assert_eq!(pool as usize, number);
            assert_eq!(PoolKind::try_from(number as u8), Ok(pool));
        }
        assert_eq!(PoolKind::try_from(255), Err(UnknownKind::Pool(255)));
    }

    #[test]
    fn page_ref_bytes_round_trip_and_reject_reserved() {
        let page = PageRef { pool: PoolKind::Carry, index: 0x0102_0304, generation: u64::MAX - 7 };
        let bytes = page.to_bytes();
        assert_eq!(bytes[..8], [2, 0, 0, 0, 4, 3, 2, 1]);
        assert_eq!(PageRef::from_bytes(bytes), Ok(page));
        for position in 1..4 {
            let mut bad = bytes;
            bad[position] = 9;
            let error = UnknownKind::Reserved { position: position as u8, value: 9 };
            assert_eq!(PageRef::from_bytes(bad), Err(error));
        }
        let mut bad = bytes;
        bad[0] = 3;
        assert_eq!(PageRef::from_bytes(bad), Err(UnknownKind::Pool(3)));
    }

    #[test]
    fn opaque_values_display_as_hex() {
        let mut value = [0; 16];
        value[0] = 0xab;
        value[15] = 0x01;
        assert_eq!(Incarnation(value).to_string(), "ab000000000000000000000000000001");
        assert_eq!(ChainHash([0x1f; 32]).to_string(), "1f".repeat(32));
    }
}
