//! The receiver alone: what it refuses, when it asks for fresh pages, when it is quiet.

use super::*;
use crate::wire::Key;
use crate::wire::{Extent, Guard, Identity, Tag};
use alloc::vec;

const PEER: PeerId = PeerId(1);
const ID: AttemptId = AttemptId([9; 16]);

fn limits() -> Limits {
    Limits { max_prompt_tokens: 1, max_items: 100, max_message_bytes: 1 << 20 }
}

fn extents(n: u8) -> Vec<Extent> {
    vec![Extent { offset: u64::from(n) * 100, len: 100 }]
}

fn target(n: u8) -> Target {
    let group = u32::from(n / 2);
    Target { key: Key([n; 16]), group, region: RegionId(0), extents: extents(n) }
}

fn item(n: u8) -> Item {
    Item {
        key: Key([n; 16]),
        identity: Identity([n; 16]),
        tag: Tag([n; 16]),
        region: RegionId(0),
        extents: extents(n),
        guard: Guard { region: RegionId(0), offset: 0, expect: 1 },
    }
}

fn start(pages: u8) -> Start {
    Start {
        attempt: ID,
        peer: PEER,
        request: vec![1],
        have: 0,
        plan_hash: [5; 16],
        plan: (0..pages).map(target).collect(),
    }
}

struct Rig {
    receiver: Receiver,
    out: Vec<ReceiverOutput>,
}

impl Rig {
    fn idle() -> Self {
        let mut receiver = Receiver::new(ReceiverConfig::default());
        receiver.peer_up(PEER, limits(), &[RegionDesc { region: RegionId(0), bytes: 10_000 }]);
        Self { receiver, out: Vec::new() }
    }

    fn new(pages: u8) -> Self {
        let mut rig = Self::idle();
        rig.receiver.start(Time(0), start(pages)).unwrap();
        rig
    }

    fn take(&mut self) -> Vec<ReceiverOutput> {
        let mut out = core::mem::take(&mut self.out);
        out.extend(core::iter::from_fn(|| self.receiver.poll_output()));
        out
    }

    fn message(&mut self, message: Message) {
        self.receiver.handle_message(Time(1), PEER, message);
    }

    fn ready(&mut self, seq: u32, items: Vec<Item>) {
        self.message(Message::Ready { attempt: ID, seq, items });
    }

    fn finish(&mut self, items: &[Item]) {
        let record = FinalRecord::new([5; 16], items, vec![7]);
        let hash = record.hash().unwrap();
        self.message(Message::Final { attempt: ID, record, hash });
    }

    /// The open gets, in order.
    fn gets(&mut self) -> Vec<OpId> {
        let out = self.take();
        let gets = out
            .iter()
            .filter_map(|output| match output {
                ReceiverOutput::Get { get, .. } => Some(get.op),
                _ => None,
            })
            .collect();
        self.out = out;
        self.out.retain(|output| !matches!(output, ReceiverOutput::Get { .. }));
        gets
    }

    /// The get lands and the page is checked.
    fn land(&mut self, op: OpId, ok: bool) {
        self.receiver.handle_got(Time(2), op, GetOutcome::Done);
        let out = self.take();
        let verify = out
            .iter()
            .find_map(|output| match output {
                ReceiverOutput::Verify(verify) => Some(verify.op),
                _ => None,
            })
            .unwrap();
        self.out = out;
        self.out.retain(|output| !matches!(output, ReceiverOutput::Verify(_)));
        self.receiver.handle_verified(Time(3), verify, ok);
    }

    fn failed(&mut self) -> FailReason {
        let out = self.take();
        let found = out.iter().find_map(|output| match output {
            ReceiverOutput::Failed { why, .. } => Some(why.clone()),
            _ => None,
        });
        self.out = out;
        found.unwrap_or_else(|| panic!("no failure in {:?}", self.out))
    }

    fn is_quiet(&mut self) -> bool {
        self.take().contains(&ReceiverOutput::Quiet { attempt: ID })
    }
}

// PD-R8 PD-R10
#[test]
fn pages_out_of_order_and_twice_complete_once() {
    let mut rig = Rig::new(3);
    let items = [item(0), item(1), item(2)];
    rig.finish(&items);
    rig.ready(1, vec![item(2)]);
    rig.ready(1, vec![item(2)]);
    rig.ready(0, vec![item(1), item(0)]);
    let gets = rig.gets();
    assert_eq!(gets.len(), 3);
    for op in gets {
        assert!(!rig.take().iter().any(|o| matches!(o, ReceiverOutput::Completed { .. })));
        rig.land(op, true);
    }
    let out = rig.take();
    assert!(out.iter().any(|o| matches!(o, ReceiverOutput::Completed { .. })), "{out:?}");
    assert!(!out.iter().any(|o| matches!(o, ReceiverOutput::Quiet { .. })));
    assert_eq!(rig.receiver.state(&ID), Some(ReceiverState::Closing));
    rig.message(Message::Closed { attempt: ID });
    assert_eq!(rig.receiver.state(&ID), Some(ReceiverState::Gone));
    assert_eq!(rig.receiver.counters().dropped_duplicate, 1);
}

// PD-R11
#[test]
fn nothing_completes_on_a_wrong_record() {
    let items = [item(0), item(1)];
    let good = FinalRecord::new([5; 16], &items, vec![]);
    let cases = [
        FinalRecord { plan_hash: [6; 16], ..good.clone() },
        FinalRecord { items: 3, ..good.clone() },
        FinalRecord { bytes: 201, ..good.clone() },
        FinalRecord { manifest: [0; 16], ..good.clone() },
    ];
    for record in cases {
        let mut rig = Rig::new(2);
        rig.ready(0, items.to_vec());
        for op in rig.gets() {
            rig.land(op, true);
        }
        let hash = record.hash().unwrap();
        rig.message(Message::Final { attempt: ID, record, hash });
        assert!(matches!(rig.failed(), FailReason::Violation(_)));
        assert!(rig.is_quiet());
    }
    let mut rig = Rig::new(2);
    rig.message(Message::Final { attempt: ID, record: good, hash: [0; 16] });
    assert!(matches!(rig.failed(), FailReason::Violation(_)));
}

// PD-R3 PD-R4 PD-R5 PD-R6 PD-R7
#[test]
fn pages_that_do_not_fit_the_plan_fail_it() {
    let mut other = item(0);
    other.tag = Tag([99; 16]);
    let mut short = item(0);
    short.extents[0].len = 99;
    let mut split = item(0);
    split.extents = vec![Extent { offset: 0, len: 50 }, Extent { offset: 50, len: 50 }];
    let mut outside = item(0);
    outside.extents[0].offset = 9_950;
    let mut guard = item(0);
    guard.guard.offset = 4;
    let mut region = item(0);
    region.region = RegionId(1);
    for bad in [
        vec![item(7)],
        vec![item(0), other],
        vec![short],
        vec![split],
        vec![outside],
        vec![guard],
        vec![region],
        vec![],
    ] {
        let mut rig = Rig::new(2);
        rig.ready(0, bad.clone());
        assert!(matches!(rig.failed(), FailReason::Violation(_)), "{bad:?}");
    }
    let mut rig = Rig::new(2);
    rig.ready(2, vec![item(0)]);
    assert!(matches!(rig.failed(), FailReason::Violation(_)));
}

// PD-V3 PD-V4 PD-V5 PD-G4
#[test]
fn fresh_pages_are_asked_for_when_the_whole_group_is_still() {
    let mut rig = Rig::new(3);
    rig.ready(0, vec![item(0), item(1), item(2)]);
    let gets = rig.gets();
    rig.land(gets[0], false);
    assert!(!rig.take().iter().any(|o| matches!(o, ReceiverOutput::Fresh { .. })));
    rig.land(gets[1], true);
    let groups = vec![(0, vec![Key([0; 16]), Key([1; 16])])];
    assert!(rig.take().contains(&ReceiverOutput::Fresh { attempt: ID, groups }));
    let mut fresh = [target(0), target(1)];
    fresh[0].extents[0].offset = 5000;
    let receiver = &mut rig.receiver;
    let half = receiver.retarget(Time(4), ID, vec![fresh[0].clone()]);
    assert!(matches!(half, Err(RetargetError::Missing { .. })), "{half:?}");
    let other = receiver.retarget(Time(4), ID, vec![target(2)]);
    assert!(matches!(other, Err(RetargetError::NotAsked(_))), "{other:?}");
    let mut wrong = fresh.clone();
    wrong[0].extents[0].len = 99;
    let wrong = receiver.retarget(Time(4), ID, wrong.to_vec());
    assert!(matches!(wrong, Err(RetargetError::Shape { .. })), "{wrong:?}");
    receiver.retarget(Time(4), ID, fresh.to_vec()).unwrap();
    let again = rig.gets();
    assert_eq!(again.len(), 2);
    rig.land(again[0], true);
    rig.receiver.handle_got(Time(5), again[1], GetOutcome::Stale);
    assert!(matches!(rig.failed(), FailReason::Stale { .. }));
    assert!(!rig.is_quiet(), "the page of the other group is still under way");
    rig.receiver.handle_got(Time(6), gets[2], GetOutcome::Done);
    assert!(rig.is_quiet());
}

// PD-G3 PD-F6
#[test]
fn quiet_waits_for_own_gets_and_for_nothing_else() {
    for by_loss in [false, true] {
        let mut rig = Rig::new(2);
        rig.ready(0, vec![item(0), item(1)]);
        let gets = rig.gets();
        if by_loss {
            rig.receiver.peer_lost(PEER);
        } else {
            rig.receiver.cancel(Time(2), ID);
        }
        rig.failed();
        assert!(!rig.is_quiet());
        rig.receiver.handle_timeout(Time(u64::MAX / 2));
        assert!(!rig.is_quiet(), "time is no proof");
        rig.receiver.handle_got(Time(3), gets[0], GetOutcome::Done);
        assert!(!rig.is_quiet());
        let last = if by_loss { GetOutcome::Lost } else { GetOutcome::Error("x".into()) };
        rig.receiver.handle_got(Time(3), gets[1], last);
        let out = rig.take();
        assert!(out.contains(&ReceiverOutput::Quiet { attempt: ID }));
        let told = out.iter().any(|output| {
            matches!(output, ReceiverOutput::Send { message: Message::Failed { .. }, .. })
        });
        assert_eq!(told, !by_loss);
    }
}

// PD-R14 PD-F5
#[test]
fn what_is_not_answered_is_said_again() {
    let mut rig = Rig::new(2);
    rig.take();
    let said = |rig: &mut Rig, at: u64| {
        rig.receiver.handle_timeout(Time(at));
        let out = rig.take();
        out.iter().find_map(|output| match output {
            ReceiverOutput::Send { message, .. } => Some(message.clone()),
            _ => None,
        })
    };
    assert_eq!(said(&mut rig, 10), None);
    let config = ReceiverConfig::default();
    let again = said(&mut rig, config.resend_us);
    assert!(matches!(again, Some(Message::Want { .. })), "{again:?}");
    rig.ready(0, vec![item(1)]);
    rig.take();
    let again = said(&mut rig, 2 * config.resend_us);
    assert_eq!(again, Some(Message::Resume { attempt: ID, next: 1 }));
    rig.receiver.handle_timeout(Time(2 * config.stall_us));
    assert!(matches!(rig.failed(), FailReason::Timeout { .. }));
}

// PD-R9
#[test]
fn the_window_of_gets_is_bounded() {
    let mut rig = Rig::idle();
    rig.receiver.config.in_flight_max = 2;
    rig.receiver.start(Time(0), start(5)).unwrap();
    rig.ready(0, (0..5).map(item).collect());
    let mut open = rig.gets();
    let mut landed = 0;
    while let Some(op) = open.pop() {
        assert!(open.len() < 2);
        rig.land(op, true);
        landed += 1;
        open.extend(rig.gets());
    }
    assert_eq!(landed, 5);
}

// PD-R1 PD-R2
#[test]
fn bad_starts_open_nothing() {
    let mut twice = start(2);
    twice.plan[1].key = twice.plan[0].key;
    let mut empty = start(1);
    empty.plan[0].extents.clear();
    let large = Start { request: vec![0; 2 << 20], ..start(1) };
    let many = start(101);
    let stranger = Start { peer: PeerId(7), ..start(1) };
    for bad in [twice, empty, large, many, stranger] {
        let mut rig = Rig::idle();
        assert!(rig.receiver.start(Time(0), bad).is_err());
        assert_eq!(rig.receiver.open_attempts(), 0);
        assert_eq!(rig.take(), []);
    }
    let mut rig = Rig::new(1);
    let again = rig.receiver.start(Time(0), start(1));
    assert_eq!(again, Err(StartError::DuplicateAttempt(ID)));
}

// PD-R15
#[test]
fn a_sender_that_believes_in_a_forgotten_attempt_is_told() {
    let mut rig = Rig::idle();
    rig.ready(0, vec![item(0)]);
    let out = rig.take();
    assert!(
        matches!(
            &out[..],
            [ReceiverOutput::Send { message: Message::Failed { code: code::UNKNOWN, .. }, .. }]
        ),
        "{out:?}"
    );
}

// PD-R16 PD-F6
#[test]
fn messages_of_a_lost_peer_change_nothing() {
    let mut rig = Rig::new(2);
    rig.ready(0, vec![item(0)]);
    let gets = rig.gets();
    rig.receiver.peer_lost(PEER);
    rig.receiver.peer_lost(PEER);
    rig.failed();
    rig.ready(1, vec![item(1)]);
    rig.message(Message::Closed { attempt: ID });
    rig.message(Message::Reject { attempt: ID, code: 1, text: "late".into() });
    assert_eq!(rig.receiver.state(&ID), Some(ReceiverState::Orphaned));
    assert!(!rig.is_quiet());
    rig.receiver.handle_got(Time(3), gets[0], GetOutcome::Lost);
    rig.receiver.handle_got(Time(3), gets[0], GetOutcome::Done);
    assert!(rig.is_quiet());
    assert_eq!(rig.receiver.state(&ID), Some(ReceiverState::Gone));
}

/// What follows when page 0 of two lands, with the check at once or in a step of its own: all that
/// can be seen, but for the numbers of operations.
fn landed(at_once: bool, is_called_off: bool, ok: bool) -> Vec<String> {
    let mut rig = Rig::new(2);
    rig.ready(0, vec![item(0), item(1)]);
    let gets = rig.gets();
    rig.land(gets[1], true);
    rig.finish(&[item(0), item(1)]);
    if is_called_off {
        rig.receiver.cancel(Time(2), ID);
    }
    if at_once {
        rig.receiver.handle_landed(Time(3), gets[0], |verify| {
            assert_eq!((verify.key, verify.tag), (item(0).key, item(0).tag));
            ok
        });
        rig.receiver.handle_landed(Time(3), gets[0], |_| panic!("the get has ended before"));
    } else {
        rig.receiver.handle_got(Time(3), gets[0], GetOutcome::Done);
        let verify = rig.take().into_iter().find_map(|output| match output {
            ReceiverOutput::Verify(verify) => Some(verify.op),
            other => {
                rig.out.push(other);
                None
            }
        });
        if let Some(op) = verify {
            rig.receiver.handle_verified(Time(3), op, ok);
        }
        rig.receiver.handle_got(Time(3), gets[0], GetOutcome::Done);
    }
    let seen = rig.take().into_iter().map(|output| format!("{output:?}"));
    let Receiver { attempts, counters, ended, .. } = &rig.receiver;
    let state = format!("{attempts:?} {counters:?} {ended:?} {}", rig.receiver.ops_in_flight());
    seen.chain([state]).collect()
}

// PD-V1
#[test]
fn a_check_at_once_does_what_a_check_in_its_own_step_does() {
    for is_called_off in [false, true] {
        for ok in [false, true] {
            let (first, second) =
                (landed(true, is_called_off, ok), landed(false, is_called_off, ok));
            assert_eq!(first, second, "called off: {is_called_off}, right: {ok}");
        }
    }
    assert!(landed(true, false, true).iter().any(|seen| seen.starts_with("Completed")));
    assert!(landed(true, false, false).iter().any(|seen| seen.starts_with("Fresh")));
    assert!(landed(true, true, true).iter().any(|seen| seen.starts_with("Quiet")));
}
