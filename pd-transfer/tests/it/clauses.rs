//! Clauses of the specification about the machines that no other test states: one test each, on
//! one machine or on two endpoints, without threads and clocks.

use pd_transfer::endpoint::{Action, Endpoint, EndpointConfig, Upcall};
use pd_transfer::get::{Get, GetOutcome};
use pd_transfer::id::{OpId, PeerId, Time};
use pd_transfer::link::{CloseReason, Link, LinkConfig, LinkOutput, Side};
use pd_transfer::receiver::{
    FailReason, Receiver, ReceiverConfig, ReceiverOutput, Start, StartError, Target,
};
use pd_transfer::sender::{OfferError, Proof, Sender, SenderConfig, SenderOutput};
use pd_transfer::states::{LinkState, ReceiverState};
use pd_transfer::wire::{
    AttemptId, Extent, FinalRecord, Fingerprint, Guard, Hello, Identity, Incarnation, Item, Key,
    Limits, MAX_MESSAGE_BYTES, MAX_TEXT_BYTES, Message, PROTO_VERSION, RefuseReason, RegionDesc,
    RegionId, Role, Tag, code, decode, encode,
};

const PEER: PeerId = PeerId(1);
const OTHER: PeerId = PeerId(2);
const ID: AttemptId = AttemptId([9; 16]);

fn item(n: u8) -> Item {
    Item {
        key: Key([n; 16]),
        identity: Identity([n; 16]),
        tag: Tag([n; 16]),
        region: RegionId(0),
        extents: vec![Extent { offset: u64::from(n) * 100, len: 100 }],
        guard: Guard { region: RegionId(0), offset: 0, expect: 1 },
    }
}

fn hello(n: u8, role: Role) -> Hello {
    Hello {
        proto: PROTO_VERSION,
        incarnation: Incarnation([n; 16]),
        fingerprint: Fingerprint([1; 16]),
        layout: String::from("pages of 8448 B"),
        role,
        limits: Limits {
            max_prompt_tokens: 1,
            max_items: 100,
            max_message_bytes: MAX_MESSAGE_BYTES as u32,
        },
        regions: vec![RegionDesc { region: RegionId(0), bytes: 10_000 }],
        transport: String::from("test"),
    }
}

// The link.

fn listener(n: u8) -> Link {
    Link::new(Time(0), LinkConfig::default(), hello(n, Role::Prefill), Side::Acceptor)
}

fn link_outputs(link: &mut Link) -> Vec<LinkOutput> {
    std::iter::from_fn(|| link.poll_output()).collect()
}

fn want(request: Vec<u8>) -> Message {
    Message::Want { attempt: ID, request, have: 0 }
}

// PD-L1
#[test]
fn nothing_is_delivered_before_both_sides_agreed() {
    let mut link = listener(2);
    let bytes = encode(Incarnation([1; 16]), 0, &want(vec![1])).unwrap();
    link.handle_bytes(Time(1), &bytes);
    assert_eq!(link_outputs(&mut link), []);
    assert_eq!(link.state(), LinkState::Listening);
    assert_eq!(link.counters().dropped_late, 1);
}

/// A message as a node of protocol version 9 might say it: only the start of the header is known.
fn of_version_9(seq: u64) -> Vec<u8> {
    let mut bytes = encode(Incarnation([1; 16]), seq, &Message::Ping { n: 0 }).unwrap();
    bytes[4..8].copy_from_slice(&9_u32.to_le_bytes());
    bytes.extend_from_slice(b"a longer header and a body that nobody here can read");
    bytes
}

// PD-L2 PD-W2
#[test]
fn another_version_is_refused_by_number_on_both_sides() {
    let mut acceptor = listener(2);
    acceptor.handle_bytes(Time(1), &of_version_9(0));
    assert_eq!(acceptor.state(), LinkState::Refusing);
    let out = link_outputs(&mut acceptor);
    let [LinkOutput::Transmit(bytes), LinkOutput::Refused { reason, text }] = &out[..] else {
        panic!("{out:?}")
    };
    assert_eq!(*reason, RefuseReason::Protocol);
    assert!(text.contains(&PROTO_VERSION.to_string()) && text.contains('9'), "{text}");
    let said = decode(bytes).unwrap().message;
    assert_eq!(said, Message::Refuse { reason: RefuseReason::Protocol, text: text.clone() });
    // It repeats itself; it is told again, and nobody else is.
    acceptor.handle_bytes(Time(2), &of_version_9(1));
    assert!(matches!(link_outputs(&mut acceptor)[..], [LinkOutput::Transmit(_)]));
    assert_eq!(acceptor.counters().links_refused, 1);
    assert_eq!(acceptor.counters().links_malformed, 0);

    let own = hello(1, Role::Decode);
    let mut connector = Link::new(Time(0), LinkConfig::default(), own, Side::Connector);
    link_outputs(&mut connector);
    connector.handle_bytes(Time(1), &of_version_9(0));
    let out = link_outputs(&mut connector);
    assert!(
        matches!(
            &out[..],
            [
                LinkOutput::Transmit(_),
                LinkOutput::Refused { reason: RefuseReason::Protocol, .. },
                LinkOutput::Close(CloseReason::Refused(_)),
            ]
        ),
        "{out:?}"
    );
}

// PD-L2
#[test]
fn a_version_that_changes_on_an_open_link_is_malformed() {
    let mut link = listener(2);
    let greeting = Message::Hello(hello(1, Role::Decode));
    link.handle_bytes(Time(1), &encode(Incarnation([1; 16]), 0, &greeting).unwrap());
    assert_eq!(link.state(), LinkState::Up);
    link_outputs(&mut link);
    link.handle_bytes(Time(2), &of_version_9(1));
    let out = link_outputs(&mut link);
    assert!(matches!(out[..], [LinkOutput::Close(CloseReason::Malformed(_))]), "{out:?}");
}

// PD-L9
#[test]
fn a_hello_that_names_another_process_closes_the_link() {
    let mut link = listener(2);
    let greeting = Message::Hello(hello(1, Role::Decode));
    link.handle_bytes(Time(1), &encode(Incarnation([7; 16]), 0, &greeting).unwrap());
    let out = link_outputs(&mut link);
    assert!(matches!(out[..], [LinkOutput::Close(CloseReason::Malformed(_))]), "{out:?}");
}

// PD-L15
#[test]
fn a_farewell_closes_the_link_at_once() {
    let mut link = listener(2);
    let peer = Incarnation([1; 16]);
    let greeting = Message::Hello(hello(1, Role::Decode));
    link.handle_bytes(Time(1), &encode(peer, 0, &greeting).unwrap());
    link_outputs(&mut link);
    link.handle_bytes(Time(2), &encode(peer, 1, &Message::Bye { incarnation: peer }).unwrap());
    assert_eq!(link_outputs(&mut link), [LinkOutput::Close(CloseReason::Bye)]);
}

// Two endpoints and what they say to each other.

fn endpoint(hello: Hello, peers_max: usize) -> Endpoint {
    Endpoint::new(EndpointConfig {
        hello,
        link: LinkConfig::default(),
        sender: SenderConfig::default(),
        receiver: ReceiverConfig::default(),
        peers_max,
    })
}

/// Carries messages between the ends of one link until both are silent. Returns the news and the
/// cuts of both; everything of other links is dropped.
fn talk(a: &mut Endpoint, at_a: PeerId, b: &mut Endpoint, at_b: PeerId) -> [Vec<Action>; 2] {
    let (mut rest_a, mut rest_b) = (Vec::new(), Vec::new());
    while carry(a, at_a, b, at_b, &mut rest_a) | carry(b, at_b, a, at_a, &mut rest_b) {}
    [rest_a, rest_b]
}

/// One direction; false if there was nothing to do.
fn carry(
    from: &mut Endpoint,
    name: PeerId,
    to: &mut Endpoint,
    arrives: PeerId,
    rest: &mut Vec<Action>,
) -> bool {
    let mut is_busy = false;
    while let Some(action) = from.poll_action() {
        is_busy = true;
        match action {
            Action::Transmit { peer, bytes } if peer == name => {
                to.handle_bytes(Time(1), arrives, &bytes);
            }
            Action::Transmit { .. } => {}
            other => rest.push(other),
        }
    }
    is_busy
}

fn join(decode: &mut Endpoint, prefill: &mut Endpoint, at_prefill: PeerId) -> [Vec<Action>; 2] {
    prefill.handle_peer_up(Time(0), at_prefill, String::from("decode"), Side::Acceptor);
    decode.handle_peer_up(Time(0), PEER, String::from("prefill"), Side::Connector);
    talk(decode, PEER, prefill, at_prefill)
}

fn is_up(actions: &[Action]) -> bool {
    actions.iter().any(|action| matches!(action, Action::Upcall(Upcall::PeerUp { .. })))
}

fn refused(actions: &[Action]) -> Option<(RefuseReason, String)> {
    actions.iter().find_map(|action| match action {
        Action::Upcall(Upcall::Refused { reason, text, .. }) => Some((*reason, text.clone())),
        _ => None,
    })
}

// PD-L6
#[test]
fn a_link_too_many_is_told_why_and_the_others_stay() {
    let mut prefill = endpoint(hello(1, Role::Prefill), 1);
    let mut first = endpoint(hello(2, Role::Decode), 4);
    let [at_first, at_prefill] = join(&mut first, &mut prefill, PeerId(10));
    assert!(is_up(&at_first) && is_up(&at_prefill));

    let mut second = endpoint(hello(3, Role::Decode), 4);
    let [at_second, at_prefill] = join(&mut second, &mut prefill, PeerId(11));
    for actions in [&at_second, &at_prefill] {
        let (reason, text) = refused(actions).unwrap();
        assert_eq!(reason, RefuseReason::Busy);
        assert!(text.contains("1 links"), "{text}");
        assert!(!is_up(actions));
    }
    assert!(at_second.contains(&Action::Cut { peer: PEER }));
    prefill.handle_peer_lost(Time(2), PeerId(11), "closed");
    assert_eq!(prefill.peers().len(), 1);

    // Whoever does not hang up after a refusal can't fill the table with that.
    for n in 0..100 {
        prefill.handle_peer_up(Time(3), PeerId(100 + n), String::from("x"), Side::Acceptor);
    }
    let cuts = std::iter::from_fn(|| prefill.poll_action())
        .filter(|action| matches!(action, Action::Cut { .. }))
        .count();
    assert!(cuts > 0 && prefill.peers().len() + cuts == 101, "{cuts} cuts");

    // Once there is room again, the next one comes in.
    prefill.handle_peer_lost(Time(4), PeerId(10), "closed");
    let mut third = endpoint(hello(4, Role::Decode), 4);
    let [at_third, _] = join(&mut third, &mut prefill, PeerId(12));
    assert!(is_up(&at_third), "{at_third:?}");
}

// PD-L6
#[test]
fn a_full_node_opens_no_link_either() {
    let mut decode = endpoint(hello(1, Role::Decode), 0);
    decode.handle_peer_up(Time(0), PEER, String::from("prefill"), Side::Connector);
    let actions: Vec<Action> = std::iter::from_fn(|| decode.poll_action()).collect();
    assert_eq!(refused(&actions).unwrap().0, RefuseReason::Busy);
    assert!(actions.contains(&Action::Cut { peer: PEER }));
}

fn begin(endpoint: &mut Endpoint, plan: Vec<Target>) {
    let start =
        Start { attempt: ID, peer: PEER, request: vec![1], have: 0, plan_hash: [5; 16], plan };
    endpoint.start(Time(1), start);
}

// PD-S17
#[test]
fn pages_that_do_not_fit_the_peers_messages_reject_the_attempt() {
    let mut small = hello(2, Role::Decode);
    small.limits.max_message_bytes = 1000;
    let mut decode = endpoint(small, 4);
    let mut prefill = endpoint(hello(1, Role::Prefill), 4);
    join(&mut decode, &mut prefill, PeerId(10));
    begin(&mut decode, (0..20).map(target).collect());
    talk(&mut decode, PEER, &mut prefill, PeerId(10));
    prefill.ready(Time(2), ID, (0..20).map(item).collect());
    let [at_decode, at_prefill] = talk(&mut decode, PEER, &mut prefill, PeerId(10));
    let failed = at_decode.iter().find_map(|action| match action {
        Action::Upcall(Upcall::Failed { why, .. }) => Some(why.clone()),
        _ => None,
    });
    let Some(FailReason::Rejected { code: code::INTERNAL, text }) = failed else {
        panic!("{failed:?}")
    };
    assert!(text.contains("1000"), "{text}");
    let released = Upcall::Release { attempt: ID, proof: Proof::PeerAcknowledged };
    assert!(at_prefill.contains(&Action::Upcall(released)), "{at_prefill:?}");
}

// The sender.

fn sender() -> Sender {
    let mut sender = Sender::new(SenderConfig::default());
    sender.peer_up(PEER);
    sender.handle_message(Time(0), PEER, want(vec![1]));
    said(&mut sender);
    sender
}

fn said(sender: &mut Sender) -> Vec<SenderOutput> {
    std::iter::from_fn(|| sender.poll_output()).collect()
}

// PD-S7
#[test]
fn the_last_word_is_the_last() {
    let mut done = sender();
    let items = [item(1)];
    done.ready(Time(0), ID, items.to_vec()).unwrap();
    let record = FinalRecord::new([0; 16], &items, Vec::new());
    done.finish(Time(0), ID, record.clone()).unwrap();
    let mut given_up = sender();
    given_up.reject(Time(0), ID, code::UPPER, "no").unwrap();
    for mut sender in [done, given_up] {
        said(&mut sender);
        assert_eq!(sender.ready(Time(1), ID, vec![item(2)]), Err(OfferError::Ended(ID)));
        assert_eq!(sender.finish(Time(1), ID, record.clone()), Err(OfferError::Ended(ID)));
        assert_eq!(sender.reject(Time(1), ID, code::UPPER, "no"), Err(OfferError::Ended(ID)));
        assert_eq!(said(&mut sender), []);
    }
}

// PD-G6
#[test]
fn pages_that_come_after_the_release_are_given_back_at_once() {
    let mut sender = sender();
    sender.peer_lost(PEER);
    let out = said(&mut sender);
    let release = SenderOutput::Release { attempt: ID, proof: Proof::LinkFenced };
    assert!(out.contains(&release), "{out:?}");
    assert_eq!(sender.ready(Time(1), ID, vec![item(1)]), Err(OfferError::Ended(ID)));
}

// PD-W11
#[test]
fn a_reason_of_any_length_can_be_sent() {
    let mut sender = sender();
    // Every cut in the middle would be inside of a character.
    let text = "\u{20ac}".repeat(MAX_TEXT_BYTES);
    sender.reject(Time(0), ID, code::UPPER, &text).unwrap();
    let out = said(&mut sender);
    let [SenderOutput::Send { message, .. }] = &out[..] else { panic!("{} outputs", out.len()) };
    let bytes = encode(Incarnation([1; 16]), 0, message).unwrap();
    let Message::Reject { text: arrived, .. } = decode(&bytes).unwrap().message else {
        panic!("not a rejection")
    };
    assert!(arrived.len() > MAX_TEXT_BYTES - 4 && text.starts_with(&arrived));
}

// The receiver.

fn target(n: u8) -> Target {
    Target { key: Key([n; 16]), group: u32::from(n), region: RegionId(0), extents: item(n).extents }
}

fn limits() -> Limits {
    Limits { max_prompt_tokens: 1, max_items: 100, max_message_bytes: 1 << 20 }
}

fn start(attempt: AttemptId, peer: PeerId, pages: u8) -> Start {
    let plan = (0..pages).map(target).collect();
    Start { attempt, peer, request: vec![1], have: 0, plan_hash: [5; 16], plan }
}

fn receiver(config: ReceiverConfig) -> Receiver {
    let mut receiver = Receiver::new(config);
    for peer in [PEER, OTHER] {
        receiver.peer_up(peer, limits(), &[RegionDesc { region: RegionId(0), bytes: 10_000 }]);
    }
    receiver
}

fn pulling(config: ReceiverConfig, pages: u8) -> (Receiver, Vec<Get>) {
    let mut receiver = receiver(config);
    receiver.start(Time(0), start(ID, PEER, pages)).unwrap();
    let items = (0..pages).map(item).collect();
    receiver.handle_message(Time(1), PEER, Message::Ready { attempt: ID, seq: 0, items });
    let gets = gets(&news(&mut receiver));
    (receiver, gets)
}

fn news(receiver: &mut Receiver) -> Vec<ReceiverOutput> {
    std::iter::from_fn(|| receiver.poll_output()).collect()
}

fn gets(out: &[ReceiverOutput]) -> Vec<Get> {
    out.iter()
        .filter_map(|output| match output {
            ReceiverOutput::Get { get, .. } => Some(*get),
            _ => None,
        })
        .collect()
}

fn messages(out: &[ReceiverOutput]) -> Vec<Message> {
    out.iter()
        .filter_map(|output| match output {
            ReceiverOutput::Send { message, .. } => Some(message.clone()),
            _ => None,
        })
        .collect()
}

fn failure(out: &[ReceiverOutput]) -> Option<FailReason> {
    out.iter().find_map(|output| match output {
        ReceiverOutput::Failed { why, .. } => Some(why.clone()),
        _ => None,
    })
}

/// Gets and checks end well, and the sender says its last word.
fn complete(receiver: &mut Receiver, gets: &[Get], pages: u8) -> Vec<ReceiverOutput> {
    for get in gets {
        receiver.handle_got(Time(2), get.op, GetOutcome::Done);
    }
    let checks: Vec<OpId> = news(receiver)
        .iter()
        .filter_map(|output| match output {
            ReceiverOutput::Verify(verify) => Some(verify.op),
            _ => None,
        })
        .collect();
    assert_eq!(checks.len(), gets.len());
    for op in checks {
        receiver.handle_verified(Time(3), op, true);
    }
    let items: Vec<Item> = (0..pages).map(item).collect();
    let record = FinalRecord::new([5; 16], &items, vec![7]);
    let hash = record.hash().unwrap();
    receiver.handle_message(Time(4), PEER, Message::Final { attempt: ID, record, hash });
    news(receiver)
}

// PD-L16
#[test]
fn what_one_link_announced_does_not_hold_on_the_next() {
    let mut receiver = receiver(ReceiverConfig::default());
    receiver.peer_lost(PEER);
    let old = receiver.start(Time(0), start(ID, PEER, 1));
    assert_eq!(old, Err(StartError::UnknownPeer(PEER)));
    // The process was restarted with less memory; the page it offers is where the old one had it.
    let next = PeerId(3);
    receiver.peer_up(next, limits(), &[RegionDesc { region: RegionId(0), bytes: 50 }]);
    receiver.start(Time(1), start(ID, next, 1)).unwrap();
    let ready = Message::Ready { attempt: ID, seq: 0, items: vec![item(0)] };
    receiver.handle_message(Time(2), next, ready);
    let out = news(&mut receiver);
    assert!(matches!(failure(&out), Some(FailReason::Violation(_))), "{out:?}");
    assert_eq!(gets(&out), []);
}

// PD-R12
#[test]
fn an_attempt_ends_once() {
    let (mut receiver, gets) = pulling(ReceiverConfig::default(), 2);
    let out = complete(&mut receiver, &gets, 2);
    let is_end = |output: &&ReceiverOutput| {
        matches!(
            output,
            ReceiverOutput::Completed { .. }
                | ReceiverOutput::Failed { .. }
                | ReceiverOutput::Quiet { .. }
        )
    };
    assert_eq!(out.iter().filter(is_end).count(), 1, "{out:?}");
    receiver.cancel(Time(5), ID);
    let late = Message::Reject { attempt: ID, code: 1, text: String::from("late") };
    receiver.handle_message(Time(5), PEER, late);
    receiver.handle_timeout(Time(u64::MAX / 2));
    receiver.peer_lost(PEER);
    let out = news(&mut receiver);
    assert_eq!(out.iter().filter(is_end).count(), 0, "{out:?}");
}

// PD-F4
#[test]
fn the_last_word_is_repeated_until_it_is_acknowledged() {
    let config = ReceiverConfig::default();
    let (mut done, gets) = pulling(config, 1);
    complete(&mut done, &gets, 1);
    let (mut failed, gets) = pulling(config, 1);
    failed.cancel(Time(2), ID);
    failed.handle_got(Time(3), gets[0].op, GetOutcome::Done);
    news(&mut failed);
    for (mut receiver, name) in [(done, "Done"), (failed, "Failed")] {
        for round in 1..4 {
            receiver.handle_timeout(Time(10 + round * config.resend_us));
            let said = messages(&news(&mut receiver));
            assert_eq!(said.iter().map(Message::name).collect::<Vec<_>>(), [name]);
        }
        receiver.handle_message(Time(5_000_000), PEER, Message::Closed { attempt: ID });
        receiver.handle_timeout(Time(u64::MAX / 2));
        assert_eq!(news(&mut receiver), []);
        assert_eq!(receiver.state(&ID), Some(ReceiverState::Gone));
    }
}

// PD-F1 PD-F2
#[test]
fn after_giving_up_no_get_starts_and_the_sender_is_told_only_when_all_have_ended() {
    let config = ReceiverConfig { in_flight_max: 2, ..ReceiverConfig::default() };
    let (mut receiver, gets) = pulling(config, 5);
    assert_eq!(gets.len(), 2);
    receiver.cancel(Time(2), ID);
    let mut out = news(&mut receiver);
    assert_eq!(failure(&out), Some(FailReason::Cancelled));
    receiver.handle_got(Time(3), gets[0].op, GetOutcome::Done);
    out.extend(news(&mut receiver));
    assert_eq!(messages(&out), [Message::Cancel { attempt: ID }]);
    receiver.handle_got(Time(3), gets[1].op, GetOutcome::Stale);
    let out = news(&mut receiver);
    let said = messages(&out);
    let [Message::Failed { code: code::CANCELLED, .. }] = &said[..] else { panic!("{said:?}") };
    assert!(out.contains(&ReceiverOutput::Quiet { attempt: ID }));
    assert_eq!(self::gets(&out), []);
}

// PD-F3
#[test]
fn an_acknowledged_cancellation_is_no_proof() {
    let (mut receiver, gets) = pulling(ReceiverConfig::default(), 1);
    receiver.cancel(Time(2), ID);
    news(&mut receiver);
    receiver.handle_message(Time(3), PEER, Message::CancelAck { attempt: ID });
    receiver.handle_message(Time(3), PEER, Message::Closed { attempt: ID });
    assert_eq!(news(&mut receiver), []);
    assert_eq!(receiver.state(&ID), Some(ReceiverState::Draining));
    receiver.handle_got(Time(4), gets[0].op, GetOutcome::Done);
    assert!(news(&mut receiver).contains(&ReceiverOutput::Quiet { attempt: ID }));
}

// PD-R13
#[test]
fn only_the_link_of_an_attempt_moves_it() {
    let (mut receiver, gets) = pulling(ReceiverConfig::default(), 1);
    let reject = Message::Reject { attempt: ID, code: 1, text: String::from("not yours") };
    receiver.handle_message(Time(2), OTHER, reject);
    receiver.peer_lost(OTHER);
    assert_eq!(failure(&news(&mut receiver)), None);
    receiver.peer_up(OTHER, limits(), &[RegionDesc { region: RegionId(0), bytes: 10_000 }]);
    let ready = Message::Ready { attempt: ID, seq: 0, items: vec![item(0)] };
    receiver.handle_message(Time(2), OTHER, ready);
    let said = messages(&news(&mut receiver));
    assert!(matches!(said[..], [Message::Failed { code: code::UNKNOWN, .. }]), "{said:?}");
    let out = complete(&mut receiver, &gets, 1);
    assert!(out.iter().any(|o| matches!(o, ReceiverOutput::Completed { .. })), "{out:?}");
}

// PD-V1
#[test]
fn a_page_that_was_not_checked_completes_nothing() {
    let (mut receiver, gets) = pulling(ReceiverConfig::default(), 1);
    // The number of the get is not that of the check, neither before its end nor after.
    receiver.handle_verified(Time(2), gets[0].op, true);
    receiver.handle_got(Time(2), gets[0].op, GetOutcome::Done);
    receiver.handle_verified(Time(3), gets[0].op, true);
    let record = FinalRecord::new([5; 16], &[item(0)], vec![7]);
    let hash = record.hash().unwrap();
    receiver.handle_message(Time(4), PEER, Message::Final { attempt: ID, record, hash });
    let out = news(&mut receiver);
    assert!(!out.iter().any(|o| matches!(o, ReceiverOutput::Completed { .. })), "{out:?}");
    let check = out.iter().find_map(|output| match output {
        ReceiverOutput::Verify(verify) => Some(verify.clone()),
        _ => None,
    });
    let check = check.unwrap();
    assert_eq!((check.region, check.extents), (RegionId(0), gets[0].target));
    receiver.handle_verified(Time(5), check.op, true);
    let out = news(&mut receiver);
    assert!(out.iter().any(|o| matches!(o, ReceiverOutput::Completed { .. })), "{out:?}");
}
