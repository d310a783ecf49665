//! `spec/protocol.md` against the code: the generated parts are current, and the field tables add
//! up to what the encoder writes. That clauses are cited is checked by `cargo xtask tidy`.

use pd_transfer::hash::hash128;
use pd_transfer::states::{
    FanOutEvent, FanOutState, LinkEvent, LinkState, Move, PullEvent, PullState, RankEvent,
    RankState, ReceiverEvent, ReceiverState, SenderEvent, SenderState,
};
use pd_transfer::wire::{
    AttemptId, FinalRecord, Fingerprint, HEADER_BYTES, Hello, Incarnation, Limits, MAGIC,
    MAX_EXTENTS, MAX_LAYOUT_BYTES, MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES, MAX_READY_ITEMS,
    MAX_REGIONS, MAX_REQUEST_BYTES, MAX_TEXT_BYTES, Message, PROTO_VERSION, RefuseReason, Role,
    code, encode,
};
use std::fmt::{Debug, Write as _};

const SPEC: &str = include_str!("../../spec/protocol.md");
const WIRE: &str = include_str!("../../src/wire.rs");
const END: &str = "<!-- end -->";

/// The hash of the format's source; white space does not count.
fn wire_hash() -> String {
    let text: String = WIRE.split_whitespace().collect();
    format!("`{:032x}`\n", u128::from_be_bytes(hash128(text.as_bytes())))
}

fn limits() -> String {
    let rows = [
        ("PROTO_VERSION", PROTO_VERSION as usize, "this version"),
        ("HEADER_BYTES", HEADER_BYTES, "bytes of a header"),
        ("MAX_MESSAGE_BYTES", MAX_MESSAGE_BYTES, "bytes of an envelope"),
        ("MAX_REQUEST_BYTES", MAX_REQUEST_BYTES, "bytes of the request of a `Want`"),
        ("MAX_PAYLOAD_BYTES", MAX_PAYLOAD_BYTES, "bytes of the payload of a `Final`"),
        ("MAX_LAYOUT_BYTES", MAX_LAYOUT_BYTES, "bytes of the layout of a `Hello`"),
        ("MAX_TEXT_BYTES", MAX_TEXT_BYTES, "bytes of any other text"),
        ("MAX_READY_ITEMS", MAX_READY_ITEMS, "pages of a `Ready`"),
        ("MAX_REGIONS", MAX_REGIONS, "regions of a `Hello`"),
        ("MAX_EXTENTS", MAX_EXTENTS, "extents of a page"),
    ];
    let mut out = String::from("| name | value | of what |\n|---|---|---|\n");
    for (name, value, what) in rows {
        let _ = writeln!(out, "| `{name}` | {value} | {what} |");
    }
    out
}

/// The smallest message of each kind, and who says it.
fn smallest() -> Vec<(Message, &'static str)> {
    let attempt = AttemptId([0; 16]);
    let hello = Hello {
        proto: PROTO_VERSION,
        incarnation: Incarnation([0; 16]),
        fingerprint: Fingerprint([0; 16]),
        layout: String::new(),
        role: Role::Both,
        limits: Limits { max_prompt_tokens: 0, max_items: 0, max_message_bytes: 0 },
        regions: Vec::new(),
        transport: String::new(),
    };
    let record = FinalRecord::new([0; 16], &[], Vec::new());
    let text = String::new();
    vec![
        (Message::Hello(hello.clone()), "connector"),
        (Message::HelloAck(hello), "acceptor"),
        (Message::Refuse { reason: RefuseReason::Protocol, text: text.clone() }, "both"),
        (Message::Want { attempt, request: Vec::new(), have: 0 }, "receiver"),
        (Message::Accepted { attempt }, "sender"),
        (Message::Ready { attempt, seq: 0, items: Vec::new() }, "sender"),
        (Message::Final { attempt, record, hash: [0; 16] }, "sender"),
        (Message::Reject { attempt, code: 0, text: text.clone() }, "sender"),
        (Message::Resume { attempt, next: 0 }, "receiver"),
        (Message::Cancel { attempt }, "receiver"),
        (Message::CancelAck { attempt }, "sender"),
        (Message::Done { attempt, bytes: 0 }, "receiver"),
        (Message::Failed { attempt, code: 0, text }, "receiver"),
        (Message::Closed { attempt }, "sender"),
        (Message::Ping { n: 0 }, "both"),
        (Message::Pong { n: 0 }, "both"),
        (Message::Bye { incarnation: Incarnation([0; 16]) }, "both"),
    ]
}

fn body(message: &Message) -> Vec<u8> {
    encode(Incarnation([0; 16]), 0, message).unwrap().split_off(HEADER_BYTES)
}

fn number(body: &[u8]) -> u32 {
    u32::from_le_bytes(body[..4].try_into().unwrap())
}

fn messages() -> String {
    let mut out = String::from(
        "| number | message | said by | about an attempt | smallest body in bytes |\n|---|---|---|---|---|\n",
    );
    for (message, who) in smallest() {
        let body = body(&message);
        let about = if message.attempt().is_some() { "yes" } else { "no" };
        let (number, name, bytes) = (number(&body), message.name(), body.len());
        let _ = writeln!(out, "| {number} | `{name}` | {who} | {about} | {bytes} |");
    }
    out
}

fn codes() -> String {
    let rows = [
        (code::BUSY, "BUSY", "sender", "no room for another attempt"),
        (code::DUPLICATE, "DUPLICATE", "sender", "the id is in use or was used"),
        (code::TOO_LARGE, "TOO_LARGE", "sender", "the request exceeds a limit of the sender"),
        (code::UNKNOWN, "UNKNOWN", "both", "the attempt is not known here (any more)"),
        (code::VIOLATION, "VIOLATION", "receiver", "the sender broke the protocol or the plan"),
        (code::MISMATCH, "MISMATCH", "receiver", "a page had a wrong tag twice"),
        (code::STALE, "STALE", "receiver", "a page changed under the read twice"),
        (code::GET_ERROR, "GET_ERROR", "receiver", "a get ended in an error"),
        (code::TIMEOUT, "TIMEOUT", "receiver", "nothing moved for too long"),
        (code::CANCELLED, "CANCELLED", "receiver", "the upper layer gave up"),
        (code::INTERNAL, "INTERNAL", "sender", "an error of the sender itself"),
        (code::UPPER, "UPPER", "sender", "this and above belong to upper layers"),
    ];
    let mut out = String::from("| code | name | said by | meaning |\n|---|---|---|---|\n");
    for (code, name, who, meaning) in rows {
        let _ = writeln!(out, "| {code} | `{name}` | {who} | {meaning} |");
    }
    out
}

fn states<S: Debug + Copy, E: Debug + Copy>(
    states: &[S],
    events: &[E],
    on: impl Fn(S, E) -> Move<S>,
) -> String {
    let mut out = String::from("| state |");
    events.iter().for_each(|event| {
        let _ = write!(out, " {event:?} |");
    });
    let _ = writeln!(out, "\n|---|{}", "---|".repeat(events.len()));
    for state in states {
        let _ = write!(out, "| **{state:?}** |");
        for event in events {
            let _ = match on(*state, *event) {
                Move::To(to) => write!(out, " {to:?} |"),
                Move::Late => write!(out, " *late* |"),
                Move::Never => write!(out, " *never* |"),
            };
        }
        out.push('\n');
    }
    out
}

fn generated() -> [(&'static str, String); 10] {
    [
        ("wire hash", wire_hash()),
        ("limits", limits()),
        ("messages", messages()),
        ("codes", codes()),
        ("receiver states", states(ReceiverState::ALL, ReceiverEvent::ALL, ReceiverState::on)),
        ("sender states", states(SenderState::ALL, SenderEvent::ALL, SenderState::on)),
        ("link states", states(LinkState::ALL, LinkEvent::ALL, LinkState::on)),
        ("pull states", states(PullState::ALL, PullEvent::ALL, PullState::on)),
        ("rank states", states(RankState::ALL, RankEvent::ALL, RankState::on)),
        ("fan-out states", states(FanOutState::ALL, FanOutEvent::ALL, FanOutState::on)),
    ]
}

/// Text before, text of, and text behind the generated part `name`.
fn split<'a>(spec: &'a str, name: &str) -> (&'a str, &'a str, &'a str) {
    let start = format!("<!-- generated: {name} -->\n");
    let at =
        spec.find(&start).unwrap_or_else(|| panic!("protocol.md has no {start}")) + start.len();
    let end = at + spec[at..].find(END).unwrap_or_else(|| panic!("{name} has no {END}"));
    (&spec[..at], &spec[at..end], &spec[end..])
}

#[test]
fn generated_parts_are_current() {
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        let mut now = SPEC.to_owned();
        for (name, text) in generated() {
            let (before, _, after) = split(&now, name);
            now = format!("{before}\n{text}\n{after}");
        }
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/spec/protocol.md");
        std::fs::write(path, now).unwrap();
        return;
    }
    for (name, text) in generated() {
        let (_, committed, _) = split(SPEC, name);
        let advice = match name {
            "wire hash" => {
                "src/wire.rs changed: see that sections 4 and 5 of spec/protocol.md still tell the \
                 truth, and whether the bytes need a new PROTO_VERSION; then"
            }
            _ => "spec/protocol.md is behind the code; look at the clauses about it, then",
        };
        assert_eq!(
            committed.trim(),
            text.trim(),
            "{name}: {advice} run `UPDATE_SNAPSHOTS=1 cargo test -p pd-transfer --features testing spec`"
        );
    }
    assert_eq!(SPEC.matches("<!-- generated: ").count(), generated().len());
}

/// The bytes that the field table under `#### heading` gives to a message without lists and texts.
fn fixed_bytes(heading: &str) -> Option<usize> {
    let at = SPEC.find(&format!("\n#### {heading}\n"))?;
    let section = &SPEC[at + 6..];
    let section = section.split("\n#").next()?;
    // The table of an item stands behind the one of its message.
    let table = section.split("\n\nAn item:").next()?;
    let rows = table.lines().filter(|line| line.starts_with('|')).skip(2);
    let bytes = rows.map(|row| {
        let cell = row.split('|').nth(3).unwrap_or_default().trim();
        let fixed = cell.split(' ').next().unwrap_or_default();
        fixed.parse::<usize>().unwrap_or_else(|_| panic!("{heading}: no bytes in {row}"))
    });
    Some(bytes.sum())
}

// PD-W1
#[test]
fn field_tables_add_up_to_the_bytes() {
    let same = [
        ("HelloAck", "Hello"),
        ("Failed", "Reject"),
        ("CancelAck", "Cancel"),
        ("Closed", "Cancel"),
        ("Pong", "Ping"),
    ];
    for (message, _) in smallest() {
        let name = message.name();
        let heading = same.iter().find(|(twin, _)| *twin == name).map_or(name, |(_, of)| *of);
        let fixed = fixed_bytes(heading).unwrap_or_else(|| panic!("no section for {heading}"));
        assert_eq!(4 + fixed, body(&message).len(), "{name}");
    }
}

// PD-W1 PD-W2
#[test]
fn the_header_is_where_the_table_says() {
    let bytes = encode(Incarnation([7; 16]), 5, &Message::Ping { n: 9 }).unwrap();
    assert_eq!(bytes[..4], MAGIC.to_le_bytes());
    assert_eq!(bytes[..4], *b"PDT1");
    assert_eq!(bytes[4..8], PROTO_VERSION.to_le_bytes());
    assert_eq!(bytes[8..24], [7; 16]);
    assert_eq!(bytes[24..32], 5_u64.to_le_bytes());
    assert_eq!(bytes[32..36], ((bytes.len() - HEADER_BYTES) as u32).to_le_bytes());
    let sum = pd_transfer::hash::checksum64(&bytes[..36], &bytes[HEADER_BYTES..]);
    assert_eq!(bytes[36..44], sum.to_le_bytes());
}

#[test]
fn numbers_of_roles_and_reasons_are_those_in_the_tables() {
    let said = |prefix: &str| SPEC.lines().find(|line| line.starts_with(prefix)).unwrap();
    let roles = [(Role::Prefill, "prefill"), (Role::Decode, "decode"), (Role::Both, "both")];
    for (role, name) in roles {
        let (Message::Hello(mut hello), _) = smallest().remove(0) else { panic!("no hello") };
        hello.role = role;
        // Behind the variant number, three fixed fields and an empty layout.
        let number = number(&body(&Message::Hello(hello))[4 + 36 + 8..]);
        assert!(said("| role | enum |").contains(&format!("{number} {name}")), "{name}");
    }
    let reasons = [
        (RefuseReason::Protocol, "protocol"),
        (RefuseReason::Layout, "layout"),
        (RefuseReason::Role, "role"),
        (RefuseReason::Busy, "busy"),
        (RefuseReason::SelfLink, "self link"),
    ];
    for (reason, name) in reasons {
        let number = number(&body(&Message::Refuse { reason, text: String::new() })[4..]);
        assert!(said("| reason | enum |").contains(&format!("{number} {name}")), "{name}");
    }
}
