//! What a decode worker tells a prefill worker to do, beside computing prompts: the request of an
//! attempt without pages, and its answer in the record that ends it.
//!
//! A worker that does not know orders refuses such a request as one that it cannot read.
#![expect(clippy::mem_forget, reason = "the derived readers forget their partial values")]

use crate::engine::Flushed;
use wincode::{SchemaRead, SchemaWrite};

/// The first two bytes of an order and of its answer, where a prompt has the version of its payload.
const MARK: u16 = u16::from_le_bytes(*b"DO");
/// Version of both.
const VERSION: u16 = 1;

/// An order or an answer that cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrderError {
    /// Not the bytes of one.
    #[error("{what} of {bytes} bytes cannot be read")]
    Malformed {
        /// `order` or `answer to an order`.
        what: &'static str,
        /// Its size.
        bytes: usize,
    },
    /// Another version.
    #[error("{what} has version {found}, this worker reads {VERSION}")]
    Version {
        /// `order` or `answer to an order`.
        what: &'static str,
        /// Its version.
        found: u16,
    },
}

/// Something to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Forget what is kept for later prompts.
    Flush {
        /// In the stores too.
        stores: bool,
    },
}

#[derive(SchemaWrite, SchemaRead)]
struct OrderWire {
    mark: u16,
    version: u16,
    stores: bool,
}

#[derive(SchemaWrite, SchemaRead)]
struct FlushedWire {
    mark: u16,
    version: u16,
    blocks: u64,
    boundaries: u64,
    host_objects: u64,
    stored_objects: u64,
}

impl Order {
    /// Whether the request of an attempt is an order and no prompt.
    #[must_use]
    pub fn is_one(bytes: &[u8]) -> bool {
        bytes.starts_with(&MARK.to_le_bytes())
    }

    /// Bytes for the wire.
    #[must_use]
    pub fn encode(self) -> Vec<u8> {
        let Self::Flush { stores } = self;
        let wire = OrderWire { mark: MARK, version: VERSION, stores };
        wincode::serialize(&wire).expect("numbers always serialise")
    }

    /// Reads bytes from a peer.
    ///
    /// # Errors
    /// [`OrderError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, OrderError> {
        let wire: OrderWire = read(bytes, "order")?;
        Ok(Self::Flush { stores: wire.stores })
    }
}

/// The answer to a flush, for the wire.
#[must_use]
pub fn encode_flushed(flushed: Flushed) -> Vec<u8> {
    let wire = FlushedWire {
        mark: MARK,
        version: VERSION,
        blocks: flushed.blocks,
        boundaries: flushed.boundaries,
        host_objects: flushed.host_objects,
        stored_objects: flushed.stored_objects,
    };
    wincode::serialize(&wire).expect("numbers always serialise")
}

/// Reads the answer to a flush.
///
/// # Errors
/// [`OrderError`].
pub fn decode_flushed(bytes: &[u8]) -> Result<Flushed, OrderError> {
    let wire: FlushedWire = read(bytes, "answer to an order")?;
    Ok(Flushed {
        blocks: wire.blocks,
        boundaries: wire.boundaries,
        host_objects: wire.host_objects,
        stored_objects: wire.stored_objects,
    })
}

/// The version is looked at before what follows it, which another version may have otherwise.
fn read<'a, T>(bytes: &'a [u8], what: &'static str) -> Result<T, OrderError>
where
    T: SchemaRead<'a, wincode::config::DefaultConfig, Dst = T>,
{
    let malformed = || OrderError::Malformed { what, bytes: bytes.len() };
    let rest = bytes.strip_prefix(&MARK.to_le_bytes()).ok_or_else(malformed)?;
    let version = rest.first_chunk().copied().map(u16::from_le_bytes).ok_or_else(malformed)?;
    if version != VERSION {
        return Err(OrderError::Version { what, found: version });
    }
    wincode::deserialize_exact(bytes).map_err(|_| malformed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_and_answers_have_fixed_bytes() {
        for (stores, last) in [(false, 0), (true, 1)] {
            let order = Order::Flush { stores };
            assert_eq!(order.encode(), [b'D', b'O', 1, 0, last]);
            assert_eq!(Order::decode(&order.encode()), Ok(order));
        }
        let flushed = Flushed { blocks: 1, boundaries: 2, host_objects: 3, stored_objects: 4 };
        let bytes = encode_flushed(flushed);
        assert_eq!((bytes.len(), &bytes[..6]), (36, &[b'D', b'O', 1, 0, 1, 0][..]));
        assert_eq!(decode_flushed(&bytes), Ok(flushed));
    }

    #[test]
    fn another_version_is_named_whatever_follows_it() {
        let found = Order::decode(b"DO\x02\x00 and more");
        assert_eq!(found, Err(OrderError::Version { what: "order", found: 2 }));
        for bad in [
            &b""[..],
            b"D",
            b"DO",
            b"DO\x01",
            b"DO\x01\x00",
            b"DO\x01\x00\x02",
            b"DO\x01\x00\x00\x00",
        ] {
            let malformed = OrderError::Malformed { what: "order", bytes: bad.len() };
            assert_eq!(Order::decode(bad), Err(malformed), "{bad:?}");
        }
    }
}
