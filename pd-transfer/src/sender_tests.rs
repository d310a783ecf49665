//! The sender alone: each rule that keeps pages pinned, and each answer to a bad message.

use super::*;
use crate::wire::{Extent, Guard, Identity, RegionId, Tag};
use alloc::vec;

const PEER: PeerId = PeerId(1);
const OTHER: PeerId = PeerId(2);
const ID: AttemptId = AttemptId([9; 16]);

fn sender(config: SenderConfig) -> Sender {
    let mut sender = Sender::new(config);
    sender.peer_up(PEER);
    sender.peer_up(OTHER);
    sender
}

fn outputs(sender: &mut Sender) -> Vec<SenderOutput> {
    core::iter::from_fn(|| sender.poll_output()).collect()
}

fn want(sender: &mut Sender, peer: PeerId, attempt: AttemptId) -> Vec<SenderOutput> {
    let message = Message::Want { attempt, request: vec![1, 2], have: 3 };
    sender.handle_message(Time(0), peer, message);
    outputs(sender)
}

fn item(n: u8) -> Item {
    Item {
        key: Key([n; 16]),
        identity: Identity([n; 16]),
        tag: Tag([n; 16]),
        region: RegionId(0),
        extents: vec![Extent { offset: 0, len: 10 }],
        guard: Guard { region: RegionId(0), offset: 0, expect: 1 },
    }
}

fn rejected(outputs: &[SenderOutput], want: u16) -> bool {
    matches!(
        outputs,
        [SenderOutput::Send { message: Message::Reject { code, .. }, .. }] if *code == want
    )
}

fn released(outputs: &[SenderOutput], want: Proof) -> bool {
    let count = outputs
        .iter()
        .filter(|output| matches!(output, SenderOutput::Release { proof, .. } if *proof == want))
        .count();
    count == 1
}

// PD-S1
#[test]
fn a_request_is_passed_on_once_and_answered_again() {
    let mut sender = sender(SenderConfig::default());
    let first = want(&mut sender, PEER, ID);
    assert!(matches!(first[1], SenderOutput::Requested { have: 3, .. }), "{first:?}");
    sender.ready(Time(1), ID, vec![item(1)]).unwrap();
    outputs(&mut sender);
    let again = want(&mut sender, PEER, ID);
    let names: Vec<&str> = again
        .iter()
        .map(|output| match output {
            SenderOutput::Send { message, .. } => message.name(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(names, ["Accepted", "Ready"]);
}

// PD-S2
#[test]
fn an_attempt_id_is_used_once() {
    let mut sender = sender(SenderConfig::default());
    want(&mut sender, PEER, ID);
    assert!(rejected(&want(&mut sender, OTHER, ID), code::DUPLICATE));
    let message = Message::Want { attempt: ID, request: vec![9], have: 3 };
    sender.handle_message(Time(0), PEER, message);
    assert!(rejected(&outputs(&mut sender), code::DUPLICATE));
    sender.handle_message(Time(0), PEER, Message::Done { attempt: ID, bytes: 0 });
    outputs(&mut sender);
    assert_eq!(sender.state(&ID), Some(SenderState::Gone));
    assert!(rejected(&want(&mut sender, PEER, ID), code::DUPLICATE));
}

// PD-S15
#[test]
fn a_cancel_that_overtakes_its_request_wins() {
    let mut sender = sender(SenderConfig::default());
    sender.handle_message(Time(0), PEER, Message::Cancel { attempt: ID });
    outputs(&mut sender);
    assert!(rejected(&want(&mut sender, PEER, ID), code::DUPLICATE));
}

// PD-S3
#[test]
fn full_is_an_answer() {
    let mut sender = sender(SenderConfig { attempts_max: 1, ..SenderConfig::default() });
    want(&mut sender, PEER, ID);
    assert!(rejected(&want(&mut sender, PEER, AttemptId([8; 16])), code::BUSY));
    let mut sender = self::sender(SenderConfig { request_bytes_max: 1, ..Default::default() });
    assert!(rejected(&want(&mut sender, PEER, ID), code::TOO_LARGE));
    assert_eq!(sender.counters().requests_refused, 1);
}

// PD-S7 PD-S10 PD-S11 PD-S14 PD-S16
#[test]
fn a_peer_that_ends_nothing_leaves_room_for_others() {
    let config = SenderConfig { attempts_max: 3, attempts_per_peer_max: 2, ..Default::default() };
    let mut sender = sender(config);
    let (second, third, others) = (AttemptId([8; 16]), AttemptId([7; 16]), AttemptId([6; 16]));
    want(&mut sender, PEER, ID);
    want(&mut sender, PEER, second);
    // Offered pages count as much as pages that are still computed.
    sender.ready(Time(1), ID, vec![item(1)]).unwrap();
    sender.finish(Time(1), ID, FinalRecord::new([0; 16], &[item(1)], Vec::new())).unwrap();
    outputs(&mut sender);
    assert!(rejected(&want(&mut sender, PEER, third), code::BUSY));
    let taken = want(&mut sender, OTHER, others);
    assert!(taken.iter().any(|output| matches!(output, SenderOutput::Requested { .. })));
    // An end makes room, and the refused id may be asked for again.
    let bytes = item(1).bytes();
    sender.handle_message(Time(2), PEER, Message::Done { attempt: ID, bytes });
    outputs(&mut sender);
    let taken = want(&mut sender, PEER, third);
    assert!(taken.iter().any(|output| matches!(output, SenderOutput::Requested { .. })));
}

#[test]
fn a_cancelled_attempt_keeps_its_pages_until_the_peer_has_drained() {
    let mut sender = sender(SenderConfig::default());
    want(&mut sender, PEER, ID);
    sender.ready(Time(1), ID, vec![item(1)]).unwrap();
    outputs(&mut sender);
    sender.handle_message(Time(2), PEER, Message::Cancel { attempt: ID });
    let out = outputs(&mut sender);
    assert!(out.contains(&SenderOutput::Cancelled { attempt: ID }));
    assert!(!out.iter().any(|output| matches!(output, SenderOutput::Release { .. })));
    assert_eq!(sender.ready(Time(3), ID, vec![item(2)]), Err(OfferError::Ended(ID)));
    // Time alone releases nothing, it only raises an alarm.
    sender.handle_timeout(Time(u64::MAX / 2));
    assert!(matches!(outputs(&mut sender)[..], [SenderOutput::Overdue { .. }]));
    let failed = Message::Failed { attempt: ID, code: 10, text: "cancelled".into() };
    sender.handle_message(Time(4), PEER, failed.clone());
    assert!(released(&outputs(&mut sender), Proof::PeerAcknowledged));
    sender.handle_message(Time(5), PEER, failed);
    let again = outputs(&mut sender);
    assert_eq!(
        again,
        [SenderOutput::Send { peer: PEER, message: Message::Closed { attempt: ID } }]
    );
}

// PD-S10 PD-S12 PD-S13 PD-S16 PD-F6
#[test]
fn only_the_peer_of_an_attempt_ends_it() {
    let mut sender = sender(SenderConfig::default());
    want(&mut sender, PEER, ID);
    sender.handle_message(Time(0), OTHER, Message::Done { attempt: ID, bytes: 0 });
    // It hears that nobody waits for it; the attempt is as it was.
    let closed = Message::Closed { attempt: ID };
    assert_eq!(outputs(&mut sender), [SenderOutput::Send { peer: OTHER, message: closed }]);
    assert_eq!(sender.state(&ID), Some(SenderState::Computing));
    sender.peer_lost(OTHER);
    assert_eq!(outputs(&mut sender), []);
    sender.peer_lost(PEER);
    assert!(released(&outputs(&mut sender), Proof::LinkFenced));
    sender.peer_lost(PEER);
    assert_eq!(outputs(&mut sender), []);
}

// PD-S6
#[test]
fn the_record_must_describe_what_was_offered() {
    let mut sender = sender(SenderConfig::default());
    want(&mut sender, PEER, ID);
    let items = vec![item(1), item(2)];
    sender.ready(Time(0), ID, items.clone()).unwrap();
    outputs(&mut sender);
    let short = FinalRecord::new([0; 16], &items[..1], Vec::new());
    let result = sender.finish(Time(0), ID, short);
    assert!(matches!(result, Err(OfferError::Record { .. })), "{result:?}");
    let other = FinalRecord::new([0; 16], &[item(1), item(3)], Vec::new());
    let result = sender.finish(Time(0), ID, other);
    assert!(matches!(result, Err(OfferError::Record { .. })), "{result:?}");
    let large = FinalRecord::new([0; 16], &items, vec![0; MAX_PAYLOAD_BYTES + 1]);
    let result = sender.finish(Time(0), ID, large);
    assert!(matches!(result, Err(OfferError::Payload { .. })), "{result:?}");
    sender.finish(Time(0), ID, FinalRecord::new([0; 16], &items, Vec::new())).unwrap();
    assert_eq!(sender.state(&ID), Some(SenderState::Finished));
}

// PD-S4 PD-S5
#[test]
fn bad_pages_are_not_offered() {
    let mut sender = sender(SenderConfig { items_max: 2, ..SenderConfig::default() });
    want(&mut sender, PEER, ID);
    let mut empty = item(1);
    empty.extents.clear();
    let too_many = vec![item(1), item(2), item(3)];
    for bad in [vec![item(1), item(1)], vec![empty], too_many] {
        assert!(sender.ready(Time(0), ID, bad).is_err());
    }
    assert_eq!(outputs(&mut sender), []);
    sender.ready(Time(0), ID, vec![item(1)]).unwrap();
    let again = sender.ready(Time(0), ID, vec![item(1)]);
    assert_eq!(again, Err(OfferError::DuplicateKey { attempt: ID, key: item(1).key }));
}

// PD-S8 PD-S9
#[test]
fn a_resume_gets_what_it_lacks() {
    let mut sender = sender(SenderConfig::default());
    want(&mut sender, PEER, ID);
    for n in 1..4 {
        sender.ready(Time(0), ID, vec![item(n)]).unwrap();
    }
    sender.reject(Time(0), ID, 1234, "no").unwrap();
    outputs(&mut sender);
    sender.handle_message(Time(0), PEER, Message::Resume { attempt: ID, next: 2 });
    let out = outputs(&mut sender);
    assert!(
        matches!(
            &out[..],
            [
                SenderOutput::Send { message: Message::Accepted { .. }, .. },
                SenderOutput::Send { message: Message::Ready { seq: 2, .. }, .. },
                SenderOutput::Send { message: Message::Reject { code: 1234, .. }, .. },
            ]
        ),
        "{out:?}"
    );
    let unknown = AttemptId([1; 16]);
    sender.handle_message(Time(0), PEER, Message::Resume { attempt: unknown, next: 0 });
    assert!(rejected(&outputs(&mut sender), code::UNKNOWN));
}
