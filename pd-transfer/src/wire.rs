//! Messages and their bytes: types, size limits, encode and decode. Nothing else defines the format.
//!
//! A message travels in an envelope: a fixed header of [`HEADER_BYTES`] bytes, then the body. Both
//! are in bincode 1's format (little-endian, fixed-width integers, `u64` lengths, `u32` variant
//! numbers), written and read by `wincode`.
//!
//! Reading is bounded: the total length is checked first, then the checksum, and no collection is
//! allocated that is larger than a small multiple of the bytes that arrived.
#![expect(clippy::mem_forget, reason = "in the code that wincode's derive writes")]

use crate::hash::{PageSum, checksum64, hash128};

pub use crate::hash::manifest_hash;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use wincode::config::Configuration;
use wincode::{SchemaRead, SchemaWrite};

/// The version of everything in this file.
// PD-W8
pub const PROTO_VERSION: u32 = 2;
/// First four bytes of every envelope, `PDT1`.
pub const MAGIC: u32 = u32::from_le_bytes(*b"PDT1");
/// Bytes before the body: magic 4, version 4, incarnation 16, sequence 8, body length 4, checksum 8.
pub const HEADER_BYTES: usize = 44;
/// Largest request payload of a [`Message::Want`].
pub const MAX_REQUEST_BYTES: usize = 8 << 20;
/// Largest opaque payload of a [`FinalRecord`].
pub const MAX_PAYLOAD_BYTES: usize = 256 << 10;
/// Largest layout description of a [`Hello`].
pub const MAX_LAYOUT_BYTES: usize = 16 << 10;
/// Largest free text; two layout descriptions and the words around them fit.
pub const MAX_TEXT_BYTES: usize = 2 * MAX_LAYOUT_BYTES + 2048;
/// Most items of one [`Message::Ready`].
pub const MAX_READY_ITEMS: usize = 4096;
/// Most regions one peer may announce.
pub const MAX_REGIONS: usize = 256;
/// Most extents of an item or a target: payload and scales.
pub const MAX_EXTENTS: usize = 2;
/// Largest envelope.
pub const MAX_MESSAGE_BYTES: usize = MAX_REQUEST_BYTES + (64 << 10);

macro_rules! opaque16 {
    ($($(#[$doc:meta])* $name:ident;)+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, SchemaWrite, SchemaRead)]
        pub struct $name(pub [u8; 16]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:032x}", u128::from_be_bytes(self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }
    )+};
}

opaque16! {
    /// Random per process; state of another incarnation means nothing.
    Incarnation;
    /// One hand-off attempt; random and never reused.
    AttemptId;
    /// What a page is for in the transfer plan; both ends compute it.
    Key;
    /// Which page it was at the source, generation included.
    Identity;
    /// Digest of a page's bytes mixed with what the page means.
    Tag;
    /// Digest of a page layout; unequal layouts never exchange a page.
    Fingerprint;
}

/// Memory registered with a transport, numbered by its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, SchemaWrite, SchemaRead)]
pub struct RegionId(pub u32);

/// A range of bytes inside a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, SchemaWrite, SchemaRead)]
pub struct Extent {
    /// First byte, from the start of the region.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

/// Up to [`MAX_EXTENTS`] extents in one place, without an allocation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extents {
    all: [Extent; MAX_EXTENTS],
    /// How many of them count; the others are zero.
    count: u8,
}

impl Extents {
    /// The extents; `None` if there are more than [`MAX_EXTENTS`].
    #[must_use]
    pub fn new(extents: &[Extent]) -> Option<Self> {
        let mut all = [Extent { offset: 0, len: 0 }; MAX_EXTENTS];
        all.get_mut(..extents.len())?.copy_from_slice(extents);
        Some(Self { all, count: extents.len() as u8 })
    }
}

impl From<Extent> for Extents {
    fn from(extent: Extent) -> Self {
        Self { all: [extent, Extent { offset: 0, len: 0 }], count: 1 }
    }
}

impl core::ops::Deref for Extents {
    type Target = [Extent];

    fn deref(&self) -> &[Extent] {
        &self.all[..usize::from(self.count)]
    }
}

impl core::ops::DerefMut for Extents {
    fn deref_mut(&mut self) -> &mut [Extent] {
        &mut self.all[..usize::from(self.count)]
    }
}

impl<'a> IntoIterator for &'a Extents {
    type Item = &'a Extent;
    type IntoIter = core::slice::Iter<'a, Extent>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl fmt::Debug for Extents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// A `u64` word at the source that must equal `expect` before and after a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, SchemaWrite, SchemaRead)]
pub struct Guard {
    /// Region of the source that holds the word.
    pub region: RegionId,
    /// Byte offset of the word, a multiple of 8.
    pub offset: u64,
    /// The value while the page is the one that was offered.
    pub expect: u64,
}

/// One page that the source offers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, SchemaWrite, SchemaRead)]
pub struct Item {
    /// Its place in the plan.
    pub key: Key,
    /// Which page it is.
    pub identity: Identity,
    /// What its bytes must hash to, meaning included.
    pub tag: Tag,
    /// Region of the source.
    pub region: RegionId,
    /// One or two ranges in that region, in the order of the target's.
    pub extents: Vec<Extent>,
    /// Detects reuse of the page while it is read.
    pub guard: Guard,
}

impl Item {
    /// Bytes of all extents.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        extents_bytes(&self.extents)
    }
}

/// Bytes of all extents together.
#[must_use]
pub fn extents_bytes(extents: &[Extent]) -> u64 {
    extents.iter().map(|extent| u64::from(extent.len)).sum()
}

/// What a node can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, SchemaWrite, SchemaRead)]
pub enum Role {
    /// Offers pages.
    Prefill,
    /// Pulls pages.
    Decode,
    /// Does both.
    Both,
}

impl Role {
    /// Whether a hand-off between the two can happen in some direction.
    #[must_use]
    pub const fn fits(self, peer: Self) -> bool {
        (self.sends() && peer.receives()) || (self.receives() && peer.sends())
    }

    /// Whether the node offers pages.
    #[must_use]
    pub const fn sends(self) -> bool {
        matches!(self, Self::Prefill | Self::Both)
    }

    /// Whether the node pulls pages.
    #[must_use]
    pub const fn receives(self) -> bool {
        matches!(self, Self::Decode | Self::Both)
    }
}

/// What a node accepts; exchanged so that the other side can refuse early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, SchemaWrite, SchemaRead)]
pub struct Limits {
    /// Longest prompt in tokens.
    pub max_prompt_tokens: u32,
    /// Most pages of one attempt.
    pub max_items: u32,
    /// Largest envelope in bytes.
    pub max_message_bytes: u32,
}

/// A region of the peer that gets may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, SchemaWrite, SchemaRead)]
pub struct RegionDesc {
    /// Its number at the owner.
    pub region: RegionId,
    /// Its length in bytes.
    pub bytes: u64,
}

/// Who a node is: first message of each side of a link.
#[derive(Clone, Debug, PartialEq, Eq, Hash, SchemaWrite, SchemaRead)]
pub struct Hello {
    /// [`PROTO_VERSION`] of the sender.
    pub proto: u32,
    /// The process.
    pub incarnation: Incarnation,
    /// Layout of its pages.
    pub fingerprint: Fingerprint,
    /// The same layout for people; goes into the text of a refusal.
    pub layout: String,
    /// What it does.
    pub role: Role,
    /// What it accepts.
    pub limits: Limits,
    /// What may be read from it.
    pub regions: Vec<RegionDesc>,
    /// Name of its transport.
    pub transport: String,
}

/// Why a link is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, SchemaWrite, SchemaRead)]
pub enum RefuseReason {
    /// Different protocol versions.
    Protocol,
    /// Different page layouts.
    Layout,
    /// Both sides only send or only receive.
    Role,
    /// Too many links.
    Busy,
    /// A node talks to itself.
    SelfLink,
}

/// Codes of [`Message::Reject`] and [`Message::Failed`] that this crate sends; upper layers use
/// values from [`code::UPPER`] on.
pub mod code {
    /// No room for another attempt, or for its items.
    pub const BUSY: u16 = 1;
    /// The attempt id was used before.
    pub const DUPLICATE: u16 = 2;
    /// The request exceeds a limit of the sender.
    pub const TOO_LARGE: u16 = 3;
    /// The attempt is not known here (any more).
    pub const UNKNOWN: u16 = 4;
    /// The other side broke the protocol or the plan.
    pub const VIOLATION: u16 = 5;
    /// A page failed verification twice.
    pub const MISMATCH: u16 = 6;
    /// A page changed while it was read, twice.
    pub const STALE: u16 = 7;
    /// A get ended in an error.
    pub const GET_ERROR: u16 = 8;
    /// No progress for too long.
    pub const TIMEOUT: u16 = 9;
    /// The receiver's upper layer gave up.
    pub const CANCELLED: u16 = 10;
    /// The upper layer of the sender made an error.
    pub const INTERNAL: u16 = 11;
    /// First code free for upper layers.
    pub const UPPER: u16 = 1000;
}

/// The last word on an attempt: exactly what was offered, and what decode needs beside the pages.
#[derive(Clone, Debug, PartialEq, Eq, Hash, SchemaWrite, SchemaRead)]
pub struct FinalRecord {
    /// Hash of the plan that both sides computed.
    pub plan_hash: [u8; 16],
    /// Number of pages.
    pub items: u32,
    /// Sum of their bytes.
    pub bytes: u64,
    /// Opaque: first token, sampling state.
    pub payload: Vec<u8>,
    /// [`manifest_hash`] over all pages.
    pub manifest: [u8; 16],
}

impl FinalRecord {
    /// The record for exactly `items`.
    #[must_use]
    pub fn new<'a>(
        plan_hash: [u8; 16],
        items: impl IntoIterator<Item = &'a Item>,
        payload: Vec<u8>,
    ) -> Self {
        let (mut count, mut bytes, mut sum) = (0_u32, 0_u64, PageSum::default());
        for item in items {
            count = count.saturating_add(1);
            bytes = bytes.saturating_add(item.bytes());
            // PD-W10
            sum.add(&item.key, &item.identity, &item.tag);
        }
        Self { plan_hash, items: count, bytes, payload, manifest: sum.hash() }
    }

    /// [`hash128`] of the record's encoded bytes.
    ///
    /// # Errors
    /// The payload is too large to be encoded.
    pub fn hash(&self) -> Result<[u8; 16], EncodeError> {
        let config = Configuration::default().with_preallocation_size_limit::<MAX_MESSAGE_BYTES>();
        Ok(hash128(&wincode::config::serialize(self, config).map_err(|_| EncodeError::Schema)?))
    }
}

/// Everything one node says to another. The variant order is part of the format.
#[derive(Clone, Debug, PartialEq, Eq, Hash, SchemaWrite, SchemaRead)]
pub enum Message {
    /// Opens a link.
    Hello(Hello),
    /// Accepts a link.
    HelloAck(Hello),
    /// Refuses a link; nothing else follows.
    Refuse {
        /// Why.
        reason: RefuseReason,
        /// For people; for a layout it holds both descriptions.
        text: String,
    },
    /// Receiver: compute this and offer the pages. Repeated until answered.
    Want {
        /// The attempt that this message opens.
        attempt: AttemptId,
        /// Opaque to this crate.
        request: Vec<u8>,
        /// Prefix blocks that the receiver already has.
        have: u32,
    },
    /// Sender: the request was taken.
    Accepted {
        /// The attempt.
        attempt: AttemptId,
    },
    /// Sender: these pages are sealed and may be read.
    Ready {
        /// The attempt.
        attempt: AttemptId,
        /// 0, 1, 2 … over the `Ready` messages of the attempt.
        seq: u32,
        /// At most [`MAX_READY_ITEMS`].
        items: Vec<Item>,
    },
    /// Sender: nothing more follows.
    Final {
        /// The attempt.
        attempt: AttemptId,
        /// What was offered.
        record: FinalRecord,
        /// [`FinalRecord::hash`].
        hash: [u8; 16],
    },
    /// Sender: there will be no (more) pages.
    Reject {
        /// The attempt.
        attempt: AttemptId,
        /// See [`code`].
        code: u16,
        /// For people.
        text: String,
    },
    /// Receiver: say again what you have from `Ready` number `next` on.
    Resume {
        /// The attempt.
        attempt: AttemptId,
        /// Lowest `Ready` number not seen yet.
        next: u32,
    },
    /// Receiver: stop computing. Reads may still be under way until `Failed`.
    Cancel {
        /// The attempt.
        attempt: AttemptId,
    },
    /// Sender: cancellation seen.
    CancelAck {
        /// The attempt.
        attempt: AttemptId,
    },
    /// Receiver: all pages arrived and were verified; no read is under way.
    Done {
        /// The attempt.
        attempt: AttemptId,
        /// Sum of the bytes read.
        bytes: u64,
    },
    /// Receiver: given up; no read is under way.
    Failed {
        /// The attempt.
        attempt: AttemptId,
        /// See [`code`].
        code: u16,
        /// For people.
        text: String,
    },
    /// Sender: `Done` or `Failed` seen; the attempt is forgotten.
    Closed {
        /// The attempt.
        attempt: AttemptId,
    },
    /// Are you there?
    Ping {
        /// Comes back in the `Pong`.
        n: u64,
    },
    /// Yes.
    Pong {
        /// From the `Ping`.
        n: u64,
    },
    /// The process is leaving.
    Bye {
        /// Which process.
        incarnation: Incarnation,
    },
}

impl Message {
    /// The name of the variant.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Hello(_) => "Hello",
            Self::HelloAck(_) => "HelloAck",
            Self::Refuse { .. } => "Refuse",
            Self::Want { .. } => "Want",
            Self::Accepted { .. } => "Accepted",
            Self::Ready { .. } => "Ready",
            Self::Final { .. } => "Final",
            Self::Reject { .. } => "Reject",
            Self::Resume { .. } => "Resume",
            Self::Cancel { .. } => "Cancel",
            Self::CancelAck { .. } => "CancelAck",
            Self::Done { .. } => "Done",
            Self::Failed { .. } => "Failed",
            Self::Closed { .. } => "Closed",
            Self::Ping { .. } => "Ping",
            Self::Pong { .. } => "Pong",
            Self::Bye { .. } => "Bye",
        }
    }

    /// The attempt that the message is about, if it is about one.
    #[must_use]
    pub const fn attempt(&self) -> Option<AttemptId> {
        match self {
            Self::Want { attempt, .. }
            | Self::Accepted { attempt }
            | Self::Ready { attempt, .. }
            | Self::Final { attempt, .. }
            | Self::Reject { attempt, .. }
            | Self::Resume { attempt, .. }
            | Self::Cancel { attempt }
            | Self::CancelAck { attempt }
            | Self::Done { attempt, .. }
            | Self::Failed { attempt, .. }
            | Self::Closed { attempt } => Some(*attempt),
            Self::Hello(_)
            | Self::HelloAck(_)
            | Self::Refuse { .. }
            | Self::Ping { .. }
            | Self::Pong { .. }
            | Self::Bye { .. } => None,
        }
    }

    /// Checks the sizes that the format allows.
    fn check(&self) -> Result<(), LimitError> {
        match self {
            Self::Hello(hello) | Self::HelloAck(hello) => {
                within("layout", hello.layout.len(), MAX_LAYOUT_BYTES)?;
                within("transport", hello.transport.len(), 256)?;
                within("regions", hello.regions.len(), MAX_REGIONS)
            }
            Self::Want { request, .. } => within("request", request.len(), MAX_REQUEST_BYTES),
            Self::Ready { items, .. } => {
                within("items", items.len(), MAX_READY_ITEMS)?;
                items.iter().try_for_each(|item| {
                    within("extents", item.extents.len(), MAX_EXTENTS)?;
                    if item.extents.is_empty() || item.extents.iter().any(|extent| extent.len == 0)
                    {
                        return Err(LimitError { field: "extents", value: 0, limit: MAX_EXTENTS });
                    }
                    Ok(())
                })
            }
            Self::Final { record, .. } => {
                within("payload", record.payload.len(), MAX_PAYLOAD_BYTES)
            }
            Self::Refuse { text, .. } | Self::Reject { text, .. } | Self::Failed { text, .. } => {
                within("text", text.len(), MAX_TEXT_BYTES)
            }
            Self::Accepted { .. }
            | Self::Resume { .. }
            | Self::Cancel { .. }
            | Self::CancelAck { .. }
            | Self::Done { .. }
            | Self::Closed { .. }
            | Self::Ping { .. }
            | Self::Pong { .. }
            | Self::Bye { .. } => Ok(()),
        }
    }
}

/// [`hash128`] of a request, to tell a repeated request from another one under the same id.
#[must_use]
pub fn hash_request(request: &[u8]) -> [u8; 16] {
    hash128(request)
}

/// As much of `text` as a message may carry.
#[must_use]
pub fn clip(text: &str) -> String {
    // PD-W11
    let mut end = text.len().min(MAX_TEXT_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].into()
}

fn within(field: &'static str, value: usize, limit: usize) -> Result<(), LimitError> {
    if value > limit { Err(LimitError { field, value, limit }) } else { Ok(()) }
}

/// A field is empty that must not be, or larger than the format allows.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{field}: {value} is outside 1..={limit}")]
pub struct LimitError {
    /// The field.
    pub field: &'static str,
    /// Its length.
    pub value: usize,
    /// The largest length.
    pub limit: usize,
}

/// A message that can't be put into bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum EncodeError {
    /// A field exceeds the format's limits.
    #[error("encode {kind}: {limit}")]
    Limit {
        /// The message.
        kind: &'static str,
        /// The field.
        limit: LimitError,
    },
    /// The encoded message exceeds [`MAX_MESSAGE_BYTES`].
    #[error("encode: larger than {MAX_MESSAGE_BYTES} bytes")]
    Schema,
    /// The encoded message exceeds what the peer said it takes.
    #[error("encode {kind}: {bytes} bytes, the peer takes {limit}")]
    Peer {
        /// The message.
        kind: &'static str,
        /// Its size.
        bytes: usize,
        /// The peer's limit.
        limit: usize,
    },
}

/// Bytes that are no message.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// Shorter than a header.
    #[error("envelope of {0} bytes, a header has {HEADER_BYTES}")]
    Short(usize),
    /// Longer than any message.
    #[error("envelope of {0} bytes, at most {MAX_MESSAGE_BYTES} are allowed")]
    Long(usize),
    /// Not this protocol.
    #[error("magic {0:#010x}, want {MAGIC:#010x}")]
    Magic(u32),
    /// Another version of this protocol.
    #[error("protocol version {0}, want {PROTO_VERSION}")]
    Version(u32),
    /// Body length and envelope length disagree.
    #[error("body of {actual} bytes, header says {stated}")]
    Length {
        /// From the header.
        stated: u32,
        /// What arrived.
        actual: usize,
    },
    /// Damaged on the way.
    #[error("checksum {actual:#018x}, header says {stated:#018x}")]
    Checksum {
        /// From the header.
        stated: u64,
        /// Of what arrived.
        actual: u64,
    },
    /// The body is no message: unknown kind, bad length, bad text, or bytes left over.
    #[error("body: {0}")]
    Body(String),
    /// A field exceeds the format's limits.
    #[error("{kind}: {limit}")]
    Limit {
        /// The message.
        kind: &'static str,
        /// The field.
        limit: LimitError,
    },
}

#[derive(SchemaWrite, SchemaRead)]
struct Header {
    magic: u32,
    version: u32,
    incarnation: Incarnation,
    seq: u64,
    body_bytes: u32,
    checksum: u64,
}

/// A decoded message with where it came from.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Envelope {
    /// The process that sent it.
    pub incarnation: Incarnation,
    /// 0, 1, 2 … over the messages of one side of one link.
    pub seq: u64,
    /// The message.
    pub message: Message,
}

/// The bytes of one envelope.
///
/// # Errors
/// A field of `message` exceeds the format's limits.
pub fn encode(
    incarnation: Incarnation,
    seq: u64,
    message: &Message,
) -> Result<Vec<u8>, EncodeError> {
    // PD-W6
    message.check().map_err(|limit| EncodeError::Limit { kind: message.name(), limit })?;
    let config = Configuration::default().with_preallocation_size_limit::<MAX_MESSAGE_BYTES>();
    let body = wincode::config::serialize(message, config).map_err(|_| EncodeError::Schema)?;
    let body_bytes = u32::try_from(body.len()).map_err(|_| EncodeError::Schema)?;
    if HEADER_BYTES + body.len() > MAX_MESSAGE_BYTES {
        return Err(EncodeError::Schema);
    }
    let mut header =
        // PD-W1
        Header { magic: MAGIC, version: PROTO_VERSION, incarnation, seq, body_bytes, checksum: 0 };
    let mut bytes = wincode::config::serialize(&header, config).map_err(|_| EncodeError::Schema)?;
    header.checksum = checksum64(&bytes[..HEADER_BYTES - 8], &body);
    bytes[HEADER_BYTES - 8..].copy_from_slice(&header.checksum.to_le_bytes());
    bytes.extend_from_slice(&body);
    Ok(bytes)
}

/// Reads one envelope; the inverse of [`encode`].
///
/// # Errors
/// The bytes are not exactly one envelope of this protocol version. Memory used is bounded by a
/// small multiple of `bytes.len()` rounded up to the next of 4 KiB, 256 KiB and
/// [`MAX_MESSAGE_BYTES`].
pub fn decode(bytes: &[u8]) -> Result<Envelope, DecodeError> {
    if bytes.len() > MAX_MESSAGE_BYTES {
        return Err(DecodeError::Long(bytes.len()));
    }
    let Some((head, body)) = bytes.split_at_checked(HEADER_BYTES) else {
        return Err(DecodeError::Short(bytes.len()));
    };
    let header: Header = wincode::config::deserialize_exact(head, Configuration::default())
        .map_err(|error| DecodeError::Body(alloc::format!("{error}")))?;
    // PD-W2
    if header.magic != MAGIC {
        return Err(DecodeError::Magic(header.magic));
    }
    if header.version != PROTO_VERSION {
        return Err(DecodeError::Version(header.version));
    }
    // PD-W3
    if header.body_bytes as usize != body.len() {
        return Err(DecodeError::Length { stated: header.body_bytes, actual: body.len() });
    }
    let actual = checksum64(&head[..HEADER_BYTES - 8], body);
    if actual != header.checksum {
        return Err(DecodeError::Checksum { stated: header.checksum, actual });
    }
    let message = decode_body(body)?;
    // PD-W4
    message.check().map_err(|limit| DecodeError::Limit { kind: message.name(), limit })?;
    Ok(Envelope { incarnation: header.incarnation, seq: header.seq, message })
}

/// Decodes with an allocation limit that follows the number of bytes that really arrived: a value
/// takes at most twice its encoded size in memory, so the factor 2 refuses only lies.
fn decode_body(body: &[u8]) -> Result<Message, DecodeError> {
    // PD-W5
    const SMALL: usize = 4 << 10;
    const MEDIUM: usize = 256 << 10;
    let config = Configuration::default();
    let message = if body.len() <= SMALL {
        let config = config.with_preallocation_size_limit::<{ 2 * SMALL }>();
        wincode::config::deserialize_exact::<Message, _>(body, config)
    } else if body.len() <= MEDIUM {
        let config = config.with_preallocation_size_limit::<{ 2 * MEDIUM }>();
        wincode::config::deserialize_exact::<Message, _>(body, config)
    } else {
        let config = config.with_preallocation_size_limit::<MAX_MESSAGE_BYTES>();
        wincode::config::deserialize_exact::<Message, _>(body, config)
    };
    message.map_err(|error| DecodeError::Body(alloc::format!("{error}")))
}

/// What a socket transport asks for in a get.
#[derive(Clone, Debug, PartialEq, Eq, Hash, SchemaWrite, SchemaRead)]
pub struct ReadRequest {
    /// Region of the source.
    pub region: RegionId,
    /// Ranges in it, in the order of the answer.
    pub extents: Vec<Extent>,
    /// Must hold before and after.
    pub guard: Guard,
}

/// The bytes of a read request.
///
/// # Errors
/// There are more extents than allowed.
pub fn encode_read(read: &ReadRequest) -> Result<Vec<u8>, EncodeError> {
    within("extents", read.extents.len(), MAX_EXTENTS)
        .map_err(|limit| EncodeError::Limit { kind: "read", limit })?;
    wincode::config::serialize(read, Configuration::default()).map_err(|_| EncodeError::Schema)
}

/// Reads a read request; the inverse of [`encode_read`].
///
/// # Errors
/// The bytes are not exactly one request.
pub fn decode_read(bytes: &[u8]) -> Result<ReadRequest, DecodeError> {
    const LIMIT: usize = 64;
    let config = Configuration::default().with_preallocation_size_limit::<LIMIT>();
    let read: ReadRequest = wincode::config::deserialize_exact(bytes, config)
        .map_err(|error| DecodeError::Body(alloc::format!("{error}")))?;
    within("extents", read.extents.len(), MAX_EXTENTS)
        .map_err(|limit| DecodeError::Limit { kind: "read", limit })?;
    Ok(read)
}
