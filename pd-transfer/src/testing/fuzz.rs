//! Bytes from anywhere against the decoders, and bytes as a list of calls and events against two
//! endpoints. Each target is a plain function that panics on a finding.
//!
//! The folder `fuzz` of the repository drives them with cargo-fuzz; the tests replay the files in
//! `tests/corpus` and mutate them with a seed.

mod endpoints;
mod links;

pub use endpoints::calls as endpoint_calls;
pub use links::{shm_link, tcp_link, ucx_greeting};

use super::Rng;
use crate::hash::checksum64;
use crate::testing::pages;
use crate::wire::{
    AttemptId, Extent, FinalRecord, Fingerprint, Guard, HEADER_BYTES, Hello, Identity, Incarnation,
    Item, Limits, MAGIC, Message, PROTO_VERSION, ReadRequest, RefuseReason, RegionDesc, RegionId,
    Role, Tag, decode, decode_read, encode, encode_read,
};
use std::vec::Vec;

/// A target: any bytes may be given to it.
pub type Target = fn(&[u8]);

/// Every target by the name of its corpus folder.
pub const TARGETS: [(&str, Target); 7] = [
    ("endpoint_calls", endpoint_calls),
    ("read_request", read_request),
    ("shm_link", shm_link),
    ("tcp_link", tcp_link),
    ("ucx_greeting", ucx_greeting),
    ("wire_body", wire_body),
    ("wire_envelope", wire_envelope),
];

/// Bytes that claim to be an envelope: an error, or a message with exactly these bytes.
pub fn wire_envelope(bytes: &[u8]) {
    if let Ok(envelope) = decode(bytes) {
        let again = encode(envelope.incarnation, envelope.seq, &envelope.message);
        assert_eq!(again.as_deref(), Ok(bytes), "another encoding of {envelope:?}");
    }
}

/// The same behind a header that is right, checksum included: it keeps random bytes out of the body.
pub fn wire_body(body: &[u8]) {
    wire_envelope(&envelope_of(body));
}

fn envelope_of(body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
    bytes.extend_from_slice(&MAGIC.to_le_bytes());
    bytes.extend_from_slice(&PROTO_VERSION.to_le_bytes());
    bytes.extend_from_slice(&[7; 16]);
    bytes.extend_from_slice(&1_u64.to_le_bytes());
    bytes.extend_from_slice(&u32::try_from(body.len()).unwrap_or(u32::MAX).to_le_bytes());
    let checksum = checksum64(&bytes, body);
    bytes.extend_from_slice(&checksum.to_le_bytes());
    bytes.extend_from_slice(body);
    bytes
}

/// Bytes that claim to be a read request.
pub fn read_request(bytes: &[u8]) {
    if let Ok(read) = decode_read(bytes) {
        assert_eq!(encode_read(&read).as_deref(), Ok(bytes), "another encoding of {read:?}");
    }
}

/// Good inputs of a target, from which mutations start; the same for ever.
///
/// # Panics
/// There is no such target.
#[must_use]
pub fn seeds(target: &str) -> Vec<Vec<u8>> {
    let mut rng = Rng::new(0x5EED);
    match target {
        "endpoint_calls" => endpoints::seeds(),
        "read_request" => vec![read_bytes(1), read_bytes(2)],
        "shm_link" => links::shm_seeds(),
        "tcp_link" => links::tcp_seeds(&envelopes(&mut rng), &read_bytes(1)),
        "ucx_greeting" => links::ucx_seeds(),
        "wire_body" => envelopes(&mut rng).iter().map(|e| e[HEADER_BYTES..].to_vec()).collect(),
        "wire_envelope" => envelopes(&mut rng),
        other => panic!("there is no target {other}"),
    }
}

/// Changes bytes as a fuzzer without coverage would: bits, numbers at their limits, pieces cut out,
/// doubled and put together.
#[must_use]
pub fn mutate(rng: &mut Rng, corpus: &[Vec<u8>]) -> Vec<u8> {
    let pick = |rng: &mut Rng| corpus[rng.below(corpus.len() as u64) as usize].clone();
    let mut bytes = pick(rng);
    for _ in 0..1 + rng.below(4) {
        let len = bytes.len() as u64;
        let at = if len == 0 { 0 } else { rng.below(len) as usize };
        match rng.below(7) {
            0 if len > 0 => bytes[at] ^= 1 << rng.below(8),
            1 if len > 0 => bytes[at] = rng.next() as u8,
            2 => {
                let limit = [0, 1, 0x7F, 0x80, 0xFF][rng.below(5) as usize];
                let end = bytes.len().min(at + [1, 2, 4, 8][rng.below(4) as usize]);
                bytes[at..end].fill(limit);
            }
            3 => bytes.truncate(at),
            4 => {
                let piece = bytes[at..bytes.len().min(at + 16)].to_vec();
                bytes.splice(at..at, piece);
            }
            5 => {
                let other = pick(rng);
                let from = rng.below(other.len() as u64 + 1) as usize;
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
            _ => bytes.extend((0..rng.below(24)).map(|_| rng.next() as u8)),
        }
    }
    bytes.truncate(64 << 10);
    bytes
}

fn read_bytes(extents: u64) -> Vec<u8> {
    let extent = |n| Extent { offset: 64 * n, len: 64 };
    let read = ReadRequest {
        region: RegionId(0),
        extents: (0..extents).map(extent).collect(),
        guard: Guard { region: RegionId(0), offset: 8, expect: 1 },
    };
    encode_read(&read).expect("one or two extents fit")
}

/// One message of each kind.
fn envelopes(rng: &mut Rng) -> Vec<Vec<u8>> {
    let incarnation = Incarnation(rng.id());
    let message = |bytes: Message, seq| encode(incarnation, seq, &bytes).expect("it is small");
    messages(rng).into_iter().zip(0..).map(|(one, seq)| message(one, seq)).collect()
}

fn messages(rng: &mut Rng) -> Vec<Message> {
    let attempt = AttemptId(rng.id());
    let text = || "a reason".into();
    let hello = Hello {
        proto: PROTO_VERSION,
        incarnation: Incarnation(rng.id()),
        fingerprint: Fingerprint(rng.id()),
        layout: "a layout".into(),
        role: Role::Prefill,
        limits: Limits { max_prompt_tokens: 9, max_items: 9, max_message_bytes: 1 << 20 },
        regions: vec![RegionDesc { region: RegionId(0), bytes: 4096 }],
        transport: "tcp".into(),
    };
    let item = Item {
        key: pages::key(0),
        identity: Identity(rng.id()),
        tag: Tag(rng.id()),
        region: RegionId(0),
        extents: vec![Extent { offset: 0, len: 64 }, Extent { offset: 64, len: 8 }],
        guard: Guard { region: RegionId(0), offset: 8, expect: 1 },
    };
    let record = FinalRecord::new(rng.id(), [&item], vec![1, 2, 3]);
    let hash = record.hash().expect("a small payload");
    vec![
        Message::Hello(hello.clone()),
        Message::HelloAck(hello),
        Message::Refuse { reason: RefuseReason::Layout, text: text() },
        Message::Want { attempt, request: vec![1; 20], have: 1 },
        Message::Accepted { attempt },
        Message::Ready { attempt, seq: 0, items: vec![item] },
        Message::Final { attempt, record, hash },
        Message::Reject { attempt, code: 1, text: text() },
        Message::Resume { attempt, next: 1 },
        Message::Cancel { attempt },
        Message::CancelAck { attempt },
        Message::Done { attempt, bytes: 72 },
        Message::Failed { attempt, code: 2, text: text() },
        Message::Closed { attempt },
        Message::Ping { n: 1 },
        Message::Pong { n: 1 },
        Message::Bye { incarnation: Incarnation(rng.id()) },
    ]
}
