//! The bytes of a batch: MessagePack arrays, as SGLang publishes them and as consumers of vLLM's
//! events read them too.
//!
//! ```text
//! [seconds, [event, ..], data-parallel rank]
//! ["BlockStored", [hash], parent hash or nil, [token, ..], block size, nil (LoRA), medium]
//! ["BlockRemoved", [hash, ..], medium]
//! ["AllBlocksCleared"]
//! ```

use kv_pool::{BLOCK_TOKENS, ChainHash};
use rmp::encode::{
    ByteBuf, ValueWriteError, write_array_len, write_f64, write_nil, write_sint, write_str,
    write_uint,
};
use std::convert::Infallible;
use std::sync::Arc;

/// Workers have one rank each. Some consumers refuse a batch that does not name one.
const RANK: u64 = 0;

/// Where a block is, by the names that SGLang publishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Medium {
    /// In the worker's pages.
    Device,
    /// In host memory.
    Host,
    /// In the worker's folder.
    Disk,
}

impl Medium {
    /// All media, nearest first.
    pub const ALL: [Self; 3] = [Self::Device, Self::Host, Self::Disk];

    /// Name on the wire.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "GPU",
            Self::Host => "CPU_PINNED",
            Self::Disk => "DISK",
        }
    }
}

/// Name of a block on the wire: the first eight bytes of its chain hash, big endian, as a signed
/// number. They are the first 16 hex digits by which logs and stores name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(pub i64);

impl From<&ChainHash> for BlockHash {
    fn from(chain: &ChainHash) -> Self {
        let (first, _) = chain.0.as_chunks::<8>();
        Self(i64::from_be_bytes(first[0]))
    }
}

/// Something that a copy of a worker's cache has to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// A block can be found in a medium.
    Stored {
        /// Which.
        hash: BlockHash,
        /// The one before it in its prompt.
        parent: Option<BlockHash>,
        /// Its tokens, [`BLOCK_TOKENS`] of them.
        tokens: Arc<[u32]>,
        /// Where.
        medium: Medium,
    },
    /// Blocks can not be found there any more.
    Removed {
        /// Which.
        hashes: Vec<BlockHash>,
        /// Where.
        medium: Medium,
    },
    /// No block is anywhere.
    Cleared,
}

/// Events that belong together, in order.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Its number. Numbers grow by one; one that is missing was dropped.
    pub seq: u64,
    /// When it was put together, seconds since 1970.
    pub time_s: f64,
    /// What happened.
    pub events: Vec<KvEvent>,
}

type Written = Result<(), ValueWriteError<Infallible>>;

impl Batch {
    /// The payload. The number is not in it.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let blocks = self.events.iter().filter(|event| matches!(event, KvEvent::Stored { .. }));
        // Three bytes for most tokens.
        let bytes = 64 * self.events.len() + 3 * BLOCK_TOKENS as usize * blocks.count();
        let mut out = ByteBuf::with_capacity(bytes);
        self.write(&mut out).expect("memory takes every byte");
        out.into_vec()
    }

    fn write(&self, out: &mut ByteBuf) -> Written {
        write_array_len(out, 3)?;
        write_f64(out, self.time_s)?;
        write_len(out, self.events.len())?;
        for event in &self.events {
            event.write(out)?;
        }
        write_uint(out, RANK).map(drop)
    }
}

impl KvEvent {
    fn write(&self, out: &mut ByteBuf) -> Written {
        match self {
            Self::Stored { hash, parent, tokens, medium } => {
                write_array_len(out, 7)?;
                write_str(out, "BlockStored")?;
                write_hashes(out, std::slice::from_ref(hash))?;
                match parent {
                    Some(parent) => write_sint(out, parent.0).map(drop)?,
                    None => nil(out)?,
                }
                write_len(out, tokens.len())?;
                for token in tokens.iter() {
                    write_uint(out, (*token).into())?;
                }
                write_uint(out, BLOCK_TOKENS.into())?;
                nil(out)?;
                write_str(out, medium.name())
            }
            Self::Removed { hashes, medium } => {
                write_array_len(out, 3)?;
                write_str(out, "BlockRemoved")?;
                write_hashes(out, hashes)?;
                write_str(out, medium.name())
            }
            Self::Cleared => {
                write_array_len(out, 1)?;
                write_str(out, "AllBlocksCleared")
            }
        }
    }
}

fn nil(out: &mut ByteBuf) -> Written {
    write_nil(out).map_err(ValueWriteError::InvalidMarkerWrite)
}

fn write_len(out: &mut ByteBuf, len: usize) -> Written {
    let len = u32::try_from(len).expect("a batch has a bound that is far below");
    write_array_len(out, len).map(drop)
}

fn write_hashes(out: &mut ByteBuf, hashes: &[BlockHash]) -> Written {
    write_len(out, hashes.len())?;
    hashes.iter().try_for_each(|hash| write_sint(out, hash.0).map(drop))
}
