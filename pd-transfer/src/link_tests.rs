//! One link alone: greeting, refusal, order, foreign messages, silence.

use super::*;
use crate::wire::{AttemptId, Fingerprint, Limits, Role, encode};
use alloc::vec;

fn hello(n: u8, role: Role) -> Hello {
    Hello {
        proto: PROTO_VERSION,
        incarnation: Incarnation([n; 16]),
        fingerprint: Fingerprint([1; 16]),
        layout: "pages of 8448 B".into(),
        role,
        limits: Limits { max_prompt_tokens: 1, max_items: 1, max_message_bytes: 100_000 },
        regions: vec![],
        transport: "test".into(),
    }
}

fn pair(a: Hello, b: Hello) -> (Link, Link) {
    let config = LinkConfig::default();
    (Link::new(Time(0), config, a, Side::Connector), Link::new(Time(0), config, b, Side::Acceptor))
}

fn take(link: &mut Link) -> Vec<LinkOutput> {
    core::iter::from_fn(|| link.poll_output()).collect()
}

/// Carries everything over; returns what else came out of `from`.
fn carry(from: &mut Link, to: &mut Link) -> Vec<LinkOutput> {
    let mut rest = Vec::new();
    for output in take(from) {
        match output {
            LinkOutput::Transmit(bytes) => to.handle_bytes(Time(1), &bytes),
            other => rest.push(other),
        }
    }
    rest
}

fn up() -> (Link, Link) {
    let (mut a, mut b) = pair(hello(1, Role::Decode), hello(2, Role::Prefill));
    carry(&mut a, &mut b);
    carry(&mut b, &mut a);
    take(&mut a);
    assert_eq!((a.state(), b.state()), (LinkState::Up, LinkState::Up));
    (a, b)
}

fn want() -> Message {
    Message::Want { attempt: AttemptId([3; 16]), request: vec![], have: 0 }
}

#[test]
fn both_sides_learn_who_the_other_is() {
    let (mut a, mut b) = pair(hello(1, Role::Decode), hello(2, Role::Prefill));
    carry(&mut a, &mut b);
    assert_eq!(carry(&mut b, &mut a), [LinkOutput::Up(hello(1, Role::Decode))]);
    assert_eq!(take(&mut a), [LinkOutput::Up(hello(2, Role::Prefill))]);
}

// PD-L3 PD-L4 PD-L5 PD-L7
#[test]
fn misfits_are_refused_and_both_know_why() {
    let base = hello(2, Role::Prefill);
    let cases = [
        (Hello { proto: 9, ..base.clone() }, RefuseReason::Protocol, "9"),
        (
            Hello {
                fingerprint: Fingerprint([2; 16]),
                layout: "pages of 16384 B".into(),
                ..base.clone()
            },
            RefuseReason::Layout,
            "16384 B",
        ),
        (Hello { role: Role::Decode, ..base.clone() }, RefuseReason::Role, "Decode"),
        (Hello { incarnation: Incarnation([1; 16]), ..base }, RefuseReason::SelfLink, "0101"),
    ];
    for (other, want, words) in cases {
        let (mut a, mut b) = pair(hello(1, Role::Decode), other);
        carry(&mut a, &mut b);
        assert_eq!(b.state(), LinkState::Refusing);
        let at_b = carry(&mut b, &mut a);
        let at_a = take(&mut a);
        for out in [&at_a[0], &at_b[0]] {
            let LinkOutput::Refused { reason, text } = out else { panic!("{out:?}") };
            assert_eq!(*reason, want);
            assert!(text.contains(words), "{text}");
            assert!(want != RefuseReason::Layout || text.contains("8448 B"), "{text}");
        }
        assert!(matches!(at_a[1], LinkOutput::Close(CloseReason::Refused(_))), "{at_a:?}");
        b.handle_timeout(Time(10_000_000));
        assert!(matches!(take(&mut b)[..], [LinkOutput::Close(CloseReason::Handshake(_))]));
    }
}

// PD-L8 PD-L10
#[test]
fn duplicates_and_foreign_messages_are_dropped_and_counted() {
    let (mut a, mut b) = up();
    let bytes = a.seal(&want()).unwrap().unwrap();
    b.handle_bytes(Time(2), &bytes);
    b.handle_bytes(Time(2), &bytes);
    assert_eq!(take(&mut b), [LinkOutput::Deliver(want())]);
    assert_eq!(b.counters().dropped_duplicate, 1);
    let foreign = encode(Incarnation([77; 16]), 50, &want()).unwrap();
    b.handle_bytes(Time(2), &foreign);
    assert_eq!(take(&mut b), []);
    assert_eq!(b.counters().dropped_foreign, 1);
}

// PD-L10 PD-L11
#[test]
fn order_does_not_matter_within_the_window() {
    let (mut a, mut b) = up();
    let sent: Vec<_> = (0..2000).map(|_| a.seal(&want()).unwrap().unwrap()).collect();
    for bytes in sent[..900].iter().rev() {
        b.handle_bytes(Time(2), bytes);
    }
    assert_eq!(take(&mut b).len(), 900);
    b.handle_bytes(Time(2), &sent[1999]);
    assert_eq!(take(&mut b).len(), 1);
    // So far behind that nobody knows whether it was seen.
    b.handle_bytes(Time(2), &sent[901]);
    assert_eq!(take(&mut b), []);
}

// PD-L12
#[test]
fn a_silent_peer_is_asked_then_suspect() {
    let (mut a, mut b) = up();
    let config = LinkConfig::default();
    assert_eq!(a.poll_timeout(), Some(Time(1 + config.ping_after_us)));
    a.handle_timeout(Time(1 + config.ping_after_us));
    carry(&mut a, &mut b);
    let Some(LinkOutput::Transmit(pong)) = b.poll_output() else { panic!("no pong") };
    a.handle_bytes(Time(2 + config.ping_after_us), &pong);
    assert_eq!(take(&mut a), []);
    let late = Time(10 + config.ping_after_us + config.suspect_after_us);
    a.handle_timeout(late);
    assert!(matches!(take(&mut a)[..], [LinkOutput::Close(CloseReason::Suspect(_))]));
    assert_eq!(a.state(), LinkState::Closed);
    assert_eq!(a.poll_timeout(), None);
    assert_eq!(a.seal(&want()).unwrap(), None);
}

// PD-L13
#[test]
fn nonsense_closes_the_link() {
    let (mut a, _) = up();
    a.handle_bytes(Time(2), b"GET / HTTP/1.1\r\n");
    assert!(matches!(take(&mut a)[..], [LinkOutput::Close(CloseReason::Malformed(_))]));
    a.handle_bytes(Time(2), b"more");
    assert_eq!(take(&mut a), []);
}

// PD-L14
#[test]
fn a_lost_answer_is_given_again() {
    let (mut a, mut b) = pair(hello(1, Role::Decode), hello(2, Role::Prefill));
    carry(&mut a, &mut b);
    take(&mut b);
    a.handle_timeout(Time(LinkConfig::default().hello_resend_us));
    carry(&mut a, &mut b);
    carry(&mut b, &mut a);
    assert_eq!(take(&mut a), [LinkOutput::Up(hello(2, Role::Prefill))]);
}

// PD-W7
#[test]
fn messages_larger_than_the_peer_takes_are_not_sent() {
    let (mut a, _) = up();
    let large = Message::Want { attempt: AttemptId([3; 16]), request: vec![0; 100_000], have: 0 };
    assert!(matches!(a.seal(&large), Err(EncodeError::Peer { .. })));
}
