//! What the tiers below the device hold: one contiguous object for all caches of a block, and one
//! for all that is needed to go on from its end.

use core::fmt;
use kv_pool::ChainHash;

/// Which part of a prefix an object holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Part {
    /// C4 KV, index keys and C128 KV of all layers for one block of 256 tokens.
    Block = 1,
    /// Window rows and carry of all layers at the end of a block.
    Boundary = 2,
}

impl Part {
    /// All parts, in the order of their numbers.
    pub const ALL: [Self; 2] = [Self::Block, Self::Boundary];

    /// Position in [`Part::ALL`], for what is kept by part.
    #[must_use]
    pub const fn position(self) -> usize {
        self as usize - 1
    }

    /// Name for files, metrics and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Block => "block",
            Self::Boundary => "boundary",
        }
    }
}

/// Name of an object, by content: the tokens up to its end, under a layout and a salt, and the part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey {
    /// The prefix up to the end of the block. It says fingerprint and salt too, see
    /// [`kv_pool::Namespace`].
    pub chain: ChainHash,
    /// What of it.
    pub part: Part,
}

impl ObjectKey {
    /// The block that ends a prefix.
    #[must_use]
    pub const fn block(chain: ChainHash) -> Self {
        Self { chain, part: Part::Block }
    }

    /// The boundary at the end of a prefix.
    #[must_use]
    pub const fn boundary(chain: ChainHash) -> Self {
        Self { chain, part: Part::Boundary }
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in &self.chain.0[..8] {
            write!(f, "{byte:02x}")?;
        }
        write!(f, ".{}", self.part.name())
    }
}
