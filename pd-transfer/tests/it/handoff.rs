//! Two drivers: whole hand-offs, damaged pages, refusals, cancellation, lost peers.

use crate::it::side::{Prefill, Side, attempt, layout};
use pd_transfer::copy::{read, write};
use pd_transfer::driver::Verifier;
use pd_transfer::endpoint::Upcall;
use pd_transfer::inprocess::InProcessNet;
use pd_transfer::receiver::{FailReason, StartError, Target};
use pd_transfer::sender::SenderConfig;
use pd_transfer::tcp::Tcp;
use pd_transfer::testing::faulty::{Fault, Faulty};
use pd_transfer::testing::pages::{Request, Trusting, number, targets};
use pd_transfer::transport::TransportFactory;
use pd_transfer::wire::{Extent, RegionId, code};
use std::sync::Arc;

const REQUEST: Request = Request { pages: 100, page_bytes: 8448 };

fn faulty(fault: Fault, is_hit: fn(u64) -> bool) -> TransportFactory {
    Faulty::factory(Tcp::factory(), Box::new(move |n, _| is_hit(n).then_some(fault)))
}

/// A decode side over `factory` with a link to a fresh prefill side.
fn linked(factory: TransportFactory, verifier: Option<Arc<dyn Verifier>>) -> (Prefill, Side) {
    let prefill = Prefill::new(Tcp::factory(), "127.0.0.1:0", SenderConfig::default());
    let mut decode = Side::decode(factory, verifier, layout());
    decode.connect(prefill.address());
    (prefill, decode)
}

#[test]
fn a_hundred_pages_arrive_verified() {
    for (factory, client, address) in [(Tcp::factory(), Tcp::factory(), "127.0.0.1:0"), {
        let net = InProcessNet::new();
        (net.factory(), net.factory(), "prefill")
    }] {
        let prefill = Prefill::new(factory, address, SenderConfig::default());
        let mut decode = Side::decode(client, None, layout());
        decode.connect(prefill.address());
        decode.start(attempt(1), REQUEST);
        decode.completed(attempt(1), REQUEST);
        prefill.released(attempt(1));
        let counters = decode.handle.counters();
        assert_eq!(counters.items_checked, 100);
        assert_eq!(counters.bytes_pulled, 844_800);
        assert_eq!((counters.mismatches, counters.attempts_failed), (0, 0));
    }
}

/// Slots of a table in an order that is not the source's; the first ones hold a prefix already.
// PD-R3 PD-G2
#[test]
fn after_a_prefix_hit_only_the_missing_pages_are_pulled_each_into_its_place() {
    const HAVE: u32 = 37;
    let slot = |n: u32| u64::from((n * 61 + 5) % 100) * 8448;
    let place = |mut target: Target| {
        target.extents[0].offset = slot(number(&target.key));
        target
    };
    let all: Vec<Target> = targets(REQUEST, RegionId(0), 0).into_iter().map(place).collect();
    let missing: Vec<Target> =
        all.iter().filter(|target| number(&target.key) >= HAVE).cloned().collect();
    let (prefill, mut decode) = linked(Tcp::factory(), None);
    for n in 0..HAVE {
        write(decode.memory(), slot(n), &[n as u8; 8448]).unwrap();
    }
    decode.start_from(attempt(1), REQUEST, HAVE, missing.clone());
    let record = decode.record(attempt(1));
    assert_eq!(record.items, 100 - HAVE);
    assert_eq!(decode.handle.counters().bytes_pulled, u64::from(100 - HAVE) * 8448);
    assert_eq!(decode.wrong_pages(attempt(1), REQUEST, 0), Vec::<u32>::new());
    for n in 0..HAVE {
        let (mut bytes, extent) = (Vec::new(), Extent { offset: slot(n), len: 8448 });
        read(decode.memory(), &extent, &mut bytes).unwrap();
        assert!(bytes == [n as u8; 8448], "page {n} of the prefix was written");
    }
    prefill.released(attempt(1));

    // A sender that counts the prefix differently ends the attempt; nothing is cut to fit.
    for have in [HAVE - 1, HAVE + 1] {
        let id = attempt(have as u8);
        decode.start_from(id, REQUEST, have, missing.clone());
        let why = decode.failed(id);
        assert!(matches!(why, FailReason::Violation(_)), "{why}");
        prefill.released(id);
    }
}

#[test]
fn many_attempts_share_a_link() {
    let (prefill, mut decode) = linked(Tcp::factory(), None);
    let request = Request { pages: 30, page_bytes: 1000 };
    for n in 0..40 {
        decode.start_at(attempt(n), request, u64::from(n) * 30_000);
    }
    for n in 0..40 {
        decode.completed(attempt(n), request);
        prefill.released(attempt(n));
    }
}

// PD-V2 PD-V3
#[test]
fn one_damaged_page_is_pulled_again_into_a_fresh_one() {
    for fault in [Fault::Zero, Fault::Swap, Fault::Truncate, Fault::Replay] {
        let (prefill, mut decode) = linked(faulty(fault, |n| n == 40), None);
        decode.start(attempt(1), REQUEST);
        let groups = decode.fresh(attempt(1));
        assert_eq!(groups.len(), 1, "{fault:?}");
        let spare = Request { pages: 100, ..REQUEST };
        let fresh = targets(spare, RegionId(0), 1 << 20)
            .into_iter()
            .filter(|target| target.group == groups[0].0)
            .collect();
        decode.handle.retarget(attempt(1), fresh).unwrap();
        let record = decode.record(attempt(1));
        assert_eq!(record.payload, attempt(1).0);
        prefill.released(attempt(1));
        let counters = decode.handle.counters();
        assert_eq!((counters.mismatches, counters.group_retries), (1, 1), "{fault:?}");
        assert_eq!(counters.items_checked, 101);
    }
}

// PD-V3
#[test]
fn a_page_damaged_twice_fails_the_attempt() {
    let (prefill, mut decode) = linked(faulty(Fault::Zero, |_| true), None);
    decode.start(attempt(1), Request { pages: 1, page_bytes: 64 });
    let groups = decode.fresh(attempt(1));
    let fresh = targets(Request { pages: 1, page_bytes: 64 }, RegionId(0), 4096);
    assert_eq!(groups[0].1, [fresh[0].key]);
    decode.handle.retarget(attempt(1), fresh).unwrap();
    let why = decode.failed(attempt(1));
    assert!(matches!(why, FailReason::Mismatch { .. }), "{why}");
    prefill.released(attempt(1));
}

// PD-V2
#[test]
fn without_the_check_a_damaged_page_gets_through() {
    let (_prefill, mut decode) = linked(faulty(Fault::Zero, |n| n == 40), Some(Arc::new(Trusting)));
    decode.start(attempt(1), REQUEST);
    decode.record(attempt(1));
    assert_eq!(decode.wrong_pages(attempt(1), REQUEST, 0).len(), 1);
}

// PD-L3
#[test]
fn other_layouts_are_refused_with_both_descriptions() {
    let prefill = Prefill::new(Tcp::factory(), "127.0.0.1:0", SenderConfig::default());
    let mut decode = Side::decode(Tcp::factory(), None, ([8; 16], "index keys bf16, 16384 B"));
    decode.handle.connect(prefill.address()).unwrap();
    for side in [&mut decode, &mut prefill.side.lock().unwrap()] {
        let text = side.wait(|upcall| match upcall {
            Upcall::Refused { text, .. } => Some(text.clone()),
            _ => None,
        });
        assert!(text.contains("16384 B"), "{text}");
        assert!(text.contains(layout().1), "{text}");
    }
    assert_eq!(decode.handle.peers().iter().filter(|peer| peer.is_up()).count(), 0);
}

#[test]
fn a_full_sender_says_so() {
    let config = SenderConfig { attempts_max: 0, ..SenderConfig::default() };
    let prefill = Prefill::new(Tcp::factory(), "127.0.0.1:0", config);
    let mut decode = Side::decode(Tcp::factory(), None, layout());
    decode.connect(prefill.address());
    decode.start(attempt(1), REQUEST);
    let why = decode.failed(attempt(1));
    assert!(matches!(why, FailReason::Rejected { code: code::BUSY, .. }), "{why}");
}

// PD-F7
#[test]
fn a_request_that_does_not_fit_is_rejected_by_the_upper_layer() {
    let (prefill, mut decode) = linked(Tcp::factory(), None);
    let request = Request { pages: 1000, page_bytes: 1 << 20 };
    decode.start_at(attempt(1), Request { pages: 1, ..request }, 0);
    decode.completed(attempt(1), Request { pages: 1, ..request });
    decode.start_raw(attempt(2), request, Request { pages: 1, page_bytes: 64 });
    let why = decode.failed(attempt(2));
    assert!(matches!(why, FailReason::Rejected { code: code::UPPER, .. }), "{why}");
    prefill.released(attempt(2));
}

// PD-R11
#[test]
fn a_plan_that_differs_is_a_violation() {
    let (prefill, mut decode) = linked(Tcp::factory(), None);
    let ours = Request { pages: 9, page_bytes: 64 };
    decode.start_raw(attempt(1), Request { pages: 10, ..ours }, ours);
    let why = decode.failed(attempt(1));
    assert!(matches!(why, FailReason::Violation(_)), "{why}");
    prefill.released(attempt(1));
    decode.start_raw(attempt(2), Request { page_bytes: 65, ..ours }, ours);
    let why = decode.failed(attempt(2));
    assert!(matches!(why, FailReason::Violation(_)), "{why}");
    prefill.released(attempt(2));
}

// PD-S10
#[test]
fn a_cancelled_attempt_gets_quiet_and_is_released() {
    // The damaged page makes the attempt wait for fresh targets, so it can't complete first.
    let (prefill, mut decode) = linked(faulty(Fault::Zero, |n| n == 0), None);
    decode.start(attempt(1), REQUEST);
    decode.fresh(attempt(1));
    decode.handle.cancel(attempt(1)).unwrap();
    assert_eq!(decode.failed(attempt(1)), FailReason::Cancelled);
    prefill.released(attempt(1));
    decode.start(attempt(1), REQUEST);
    let why = decode.failed(attempt(1));
    assert!(matches!(why, FailReason::NotStarted(StartError::DuplicateAttempt(_))), "{why}");
}

// PD-L15 PD-F6
#[test]
fn a_leaving_peer_ends_its_attempts() {
    let (prefill, mut decode) = linked(faulty(Fault::Zero, |n| n == 0), None);
    decode.start(attempt(1), REQUEST);
    decode.fresh(attempt(1));
    prefill.side.lock().unwrap().handle.shutdown();
    assert_eq!(decode.failed(attempt(1)), FailReason::PeerLost);
    assert!(decode.down(), "it said that it was leaving");
    prefill.released(attempt(1));
    assert_eq!(prefill.server.pinned(), 0);
    let counters = prefill.side.lock().unwrap().handle.counters();
    assert_eq!(counters.released_fenced, 1);
}
