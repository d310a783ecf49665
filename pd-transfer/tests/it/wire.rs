//! The format: round trips, arbitrary bytes, limits, the committed bytes of version 1, and bincode
//! as a second reader.

use bincode::{Decode, Encode};
use pd_transfer::testing::Rng;
use pd_transfer::wire::{
    AttemptId, DecodeError, EncodeError, Extent, FinalRecord, Fingerprint, Guard, HEADER_BYTES,
    Hello, Identity, Incarnation, Item, Key, Limits, MAX_LAYOUT_BYTES, MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES, MAX_READY_ITEMS, MAX_REQUEST_BYTES, Message, PROTO_VERSION, ReadRequest,
    RefuseReason, RegionDesc, RegionId, Role, Tag, decode, decode_read, encode, encode_read,
};
use proptest::prelude::{any, proptest};
use std::fmt::Write as _;

fn bytes(rng: &mut Rng, max: u64) -> Vec<u8> {
    (0..rng.below(max)).map(|_| rng.next() as u8).collect()
}

fn item(rng: &mut Rng) -> Item {
    let extents = (0..1 + rng.below(2))
        .map(|_| Extent { offset: rng.next(), len: 1 + rng.below(50_000) as u32 })
        .collect();
    Item {
        key: Key(rng.id()),
        identity: Identity(rng.id()),
        tag: Tag(rng.id()),
        region: RegionId(rng.next() as u32),
        extents,
        guard: Guard {
            region: RegionId(rng.next() as u32),
            offset: rng.next(),
            expect: rng.next(),
        },
    }
}

fn hello(rng: &mut Rng) -> Hello {
    Hello {
        proto: rng.next() as u32,
        incarnation: Incarnation(rng.id()),
        fingerprint: Fingerprint(rng.id()),
        layout: String::from("c4 kv 64 x 585 \u{e9}"),
        role: [Role::Prefill, Role::Decode, Role::Both][rng.below(3) as usize],
        limits: Limits { max_prompt_tokens: 1, max_items: 2, max_message_bytes: 3 },
        regions: (0..rng.below(4))
            .map(|n| RegionDesc { region: RegionId(n as u32), bytes: rng.next() })
            .collect(),
        transport: String::from("tcp"),
    }
}

/// A message of kind `kind`.
fn message(kind: u64, rng: &mut Rng) -> Message {
    let attempt = AttemptId(rng.id());
    let text = format!("text {}", rng.next());
    match kind {
        0 => Message::Hello(hello(rng)),
        1 => Message::HelloAck(hello(rng)),
        2 => Message::Refuse { reason: RefuseReason::Layout, text },
        3 => Message::Want { attempt, request: bytes(rng, 40), have: rng.next() as u32 },
        4 => Message::Accepted { attempt },
        5 => {
            let items = (0..rng.below(5)).map(|_| item(rng)).collect();
            Message::Ready { attempt, seq: rng.next() as u32, items }
        }
        6 => {
            let items: Vec<Item> = (0..rng.below(3)).map(|_| item(rng)).collect();
            let record = FinalRecord::new(rng.id(), &items, bytes(rng, 40));
            let hash = record.hash().unwrap();
            Message::Final { attempt, record, hash }
        }
        7 => Message::Reject { attempt, code: rng.next() as u16, text },
        8 => Message::Resume { attempt, next: rng.next() as u32 },
        9 => Message::Cancel { attempt },
        10 => Message::CancelAck { attempt },
        11 => Message::Done { attempt, bytes: rng.next() },
        12 => Message::Failed { attempt, code: rng.next() as u16, text },
        13 => Message::Closed { attempt },
        14 => Message::Ping { n: rng.next() },
        15 => Message::Pong { n: rng.next() },
        _ => Message::Bye { incarnation: Incarnation(rng.id()) },
    }
}

const KINDS: u64 = 17;

fn golden() -> Vec<(Message, Vec<u8>)> {
    let mut rng = Rng::new(1);
    (0..KINDS)
        .map(|kind| {
            let message = message(kind, &mut rng);
            let bytes = encode(Incarnation([kind as u8; 16]), kind, &message).unwrap();
            (message, bytes)
        })
        .collect()
}

proptest! {
    #[test]
    fn what_is_encoded_is_decoded(seed in any::<u64>(), kind in 0..KINDS, seq in any::<u64>()) {
        let mut rng = Rng::new(seed);
        let message = message(kind, &mut rng);
        let incarnation = Incarnation(rng.id());
        let bytes = encode(incarnation, seq, &message).unwrap();
        let envelope = decode(&bytes).unwrap();
        assert_eq!((envelope.incarnation, envelope.seq), (incarnation, seq));
        assert_eq!(envelope.message, message);
    }

    #[test]
    fn any_bytes_are_a_message_or_an_error(noise in any::<Vec<u8>>()) {
        assert!(decode(&noise).is_err());
        let _ = decode_read(&noise);
    }

    // PD-W3
    #[test]
    fn any_damage_is_noticed(seed in any::<u64>(), kind in 0..KINDS, at in any::<u64>()) {
        let mut rng = Rng::new(seed);
        let mut bytes = encode(Incarnation([1; 16]), 1, &message(kind, &mut rng)).unwrap();
        let bit = at as usize % (bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(decode(&bytes).is_err());
        bytes[bit / 8] ^= 1 << (bit % 8);
        bytes.truncate(at as usize % bytes.len());
        assert!(decode(&bytes).is_err());
    }

    #[test]
    fn a_body_with_a_right_checksum_may_hold_anything(seed in any::<u64>(), kind in 0..KINDS) {
        let mut rng = Rng::new(seed);
        let mut bytes = encode(Incarnation([1; 16]), 1, &message(kind, &mut rng)).unwrap();
        for _ in 0..1 + rng.below(4) {
            let at = HEADER_BYTES + rng.below((bytes.len() - HEADER_BYTES) as u64) as usize;
            bytes[at] = rng.next() as u8;
        }
        reseal(&mut bytes);
        if let Ok(envelope) = decode(&bytes) {
            // What is accepted is inside the limits, so it can be said again.
            encode(Incarnation([1; 16]), 1, &envelope.message).unwrap();
        }
    }

    #[test]
    fn read_requests_come_back(seed in any::<u64>()) {
        let mut rng = Rng::new(seed);
        let Item { region, extents, guard, .. } = item(&mut rng);
        let read = ReadRequest { region, extents, guard };
        assert_eq!(decode_read(&encode_read(&read).unwrap()).unwrap(), read);
    }
}

/// Corrects length and checksum of a header after the body changed.
fn reseal(bytes: &mut [u8]) {
    let body = (bytes.len() - HEADER_BYTES) as u32;
    bytes[HEADER_BYTES - 12..HEADER_BYTES - 8].copy_from_slice(&body.to_le_bytes());
    let sum = pd_transfer::hash::checksum64(&bytes[..HEADER_BYTES - 8], &bytes[HEADER_BYTES..]);
    bytes[HEADER_BYTES - 8..HEADER_BYTES].copy_from_slice(&sum.to_le_bytes());
}

fn sealed(mut bytes: Vec<u8>, change: impl FnOnce(&mut Vec<u8>)) -> Result<Message, DecodeError> {
    change(&mut bytes);
    reseal(&mut bytes);
    decode(&bytes).map(|envelope| envelope.message)
}

// PD-W6
#[test]
fn limits_hold_on_both_sides() {
    let attempt = AttemptId([1; 16]);
    let incarnation = Incarnation([2; 16]);
    let want = |len| Message::Want { attempt, request: vec![7; len], have: 0 };
    let bytes = encode(incarnation, 0, &want(MAX_REQUEST_BYTES)).unwrap();
    assert!(bytes.len() <= MAX_MESSAGE_BYTES);
    assert_eq!(decode(&bytes).unwrap().message, want(MAX_REQUEST_BYTES));
    let mut rng = Rng::new(5);
    let ready = |count| Message::Ready { attempt, seq: 0, items: vec![item(&mut rng); count] };
    let mut ready = ready;
    let full = ready(MAX_READY_ITEMS);
    assert_eq!(decode(&encode(incarnation, 0, &full).unwrap()).unwrap().message, full);
    let mut long = hello(&mut Rng::new(1));
    long.layout = "x".repeat(MAX_LAYOUT_BYTES + 1);
    let record = FinalRecord::new([0; 16], &[], vec![0; MAX_PAYLOAD_BYTES + 1]);
    let mut none = item(&mut Rng::new(1));
    none.extents.clear();
    for bad in [
        want(MAX_REQUEST_BYTES + 1),
        ready(MAX_READY_ITEMS + 1),
        Message::Hello(long),
        Message::Final { attempt, record, hash: [0; 16] },
        Message::Ready { attempt, seq: 0, items: vec![none] },
    ] {
        let result = encode(incarnation, 0, &bad);
        assert!(matches!(result, Err(EncodeError::Limit { .. })), "{result:?}");
    }
}

// PD-W2 PD-W4
#[test]
fn headers_are_checked_first() {
    let good = encode(Incarnation([0; 16]), 0, &Message::Ping { n: 1 }).unwrap();
    assert_eq!(decode(&good[..10]), Err(DecodeError::Short(10)));
    let huge = vec![0; MAX_MESSAGE_BYTES + 1];
    assert_eq!(decode(&huge), Err(DecodeError::Long(MAX_MESSAGE_BYTES + 1)));
    let version = sealed(good.clone(), |bytes| bytes[4] = 9);
    assert_eq!(version, Err(DecodeError::Version(9)));
    assert!(matches!(sealed(good.clone(), |b| b[0] = 0), Err(DecodeError::Magic(_))));
    let kind = sealed(good.clone(), |bytes| bytes[HEADER_BYTES] = 99);
    assert!(matches!(kind, Err(DecodeError::Body(_))), "{kind:?}");
    let trailing = sealed(good.clone(), |bytes| bytes.push(0));
    assert!(matches!(trailing, Err(DecodeError::Body(_))), "{trailing:?}");
    let mut unsealed = good;
    unsealed.push(0);
    assert!(matches!(decode(&unsealed), Err(DecodeError::Length { .. })));
    assert_eq!(PROTO_VERSION, 2);
}

// PD-W5
#[test]
fn a_lie_about_a_length_allocates_nothing() {
    let attempt = AttemptId([1; 16]);
    let want = Message::Want { attempt, request: vec![1, 2, 3], have: 0 };
    let bytes = encode(Incarnation([0; 16]), 0, &want).unwrap();
    // Behind the variant number and the attempt is the length of the request.
    let at = HEADER_BYTES + 4 + 16;
    for lie in [8_u64 << 20, u64::MAX, 1 << 40, 9000] {
        let result = sealed(bytes.clone(), |bytes| {
            bytes[at..at + 8].copy_from_slice(&lie.to_le_bytes());
        });
        let Err(DecodeError::Body(text)) = result else { panic!("{result:?}") };
        assert!(text.contains("preallocation"), "{lie}: {text}");
    }
}

// PD-W8
#[test]
fn bytes_are_those_of_version_2() {
    let mut now = String::new();
    for (message, bytes) in golden() {
        let _ = write!(now, "{} ", message.name());
        for byte in bytes {
            let _ = write!(now, "{byte:02x}");
        }
        now.push('\n');
    }
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/wire_v2.txt");
        std::fs::write(path, &now).unwrap();
    }
    let committed = include_str!("wire_v2.txt");
    for (a, b) in now.lines().zip(committed.lines()) {
        assert_eq!(a, b, "a change of the format needs a new version");
    }
    assert_eq!(now.lines().count(), committed.lines().count());
}

// The same types once more, for a reader that shares no code with ours.

#[derive(Encode, Decode, Debug)]
struct TheirHeader {
    magic: u32,
    version: u32,
    incarnation: [u8; 16],
    seq: u64,
    body_bytes: u32,
    checksum: u64,
}

#[derive(Encode, Decode, Debug)]
enum TheirRole {
    Prefill,
    Decode,
    Both,
}

#[derive(Encode, Decode, Debug)]
enum TheirReason {
    Protocol,
    Layout,
    Role,
    Busy,
    SelfLink,
}

#[derive(Encode, Decode, Debug)]
struct TheirHello {
    proto: u32,
    incarnation: [u8; 16],
    fingerprint: [u8; 16],
    layout: String,
    role: TheirRole,
    limits: (u32, u32, u32),
    regions: Vec<(u32, u64)>,
    transport: String,
}

#[derive(Encode, Decode, Debug)]
struct TheirItem {
    key: [u8; 16],
    identity: [u8; 16],
    tag: [u8; 16],
    region: u32,
    extents: Vec<(u64, u32)>,
    guard: (u32, u64, u64),
}

#[derive(Encode, Decode, Debug)]
struct TheirRecord {
    plan_hash: [u8; 16],
    items: u32,
    bytes: u64,
    payload: Vec<u8>,
    manifest: [u8; 16],
}

#[derive(Encode, Decode, Debug)]
enum Theirs {
    Hello(TheirHello),
    HelloAck(TheirHello),
    Refuse { reason: TheirReason, text: String },
    Want { attempt: [u8; 16], request: Vec<u8>, have: u32 },
    Accepted { attempt: [u8; 16] },
    Ready { attempt: [u8; 16], seq: u32, items: Vec<TheirItem> },
    Final { attempt: [u8; 16], record: TheirRecord, hash: [u8; 16] },
    Reject { attempt: [u8; 16], code: u16, text: String },
    Resume { attempt: [u8; 16], next: u32 },
    Cancel { attempt: [u8; 16] },
    CancelAck { attempt: [u8; 16] },
    Done { attempt: [u8; 16], bytes: u64 },
    Failed { attempt: [u8; 16], code: u16, text: String },
    Closed { attempt: [u8; 16] },
    Ping { n: u64 },
    Pong { n: u64 },
    Bye { incarnation: [u8; 16] },
}

// PD-W1
#[test]
fn bincode_reads_and_writes_the_same_bytes() {
    let config = bincode::config::legacy();
    for (message, bytes) in golden() {
        let (header, used): (TheirHeader, usize) =
            bincode::decode_from_slice(&bytes, config).unwrap();
        assert_eq!(used, HEADER_BYTES);
        assert_eq!(header.body_bytes as usize, bytes.len() - used, "{header:?}");
        let (theirs, rest): (Theirs, usize) =
            bincode::decode_from_slice(&bytes[used..], config).unwrap();
        assert_eq!(used + rest, bytes.len());
        assert!(format!("{theirs:?}").starts_with(message.name()));
        assert_eq!(bincode::encode_to_vec(&theirs, config).unwrap(), bytes[used..]);
        assert_eq!(bincode::encode_to_vec(&header, config).unwrap(), bytes[..used]);
    }
}
