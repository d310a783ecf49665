//! The twelve known races of prefill-decode hand-off, each as one order of events: what the guard
//! makes of it, and what happens without the guard.

use super::model::Setup;
use super::model::node::{Ask, Node, Property, Seat, Violation};
use super::model::search::{Event, Fault, Search, State};
use pd_transfer::testing::mutation::{Mutation, without};

/// One order of events, line by line.
struct Play {
    search: Search,
    state: State,
}

impl Play {
    fn new(setup: Setup) -> Self {
        let mut search = Search::new(setup);
        let state = search.first();
        Self { search, state }
    }

    fn find(&self, line: &str) -> Option<Event> {
        let mut events = Vec::new();
        self.search.events(&self.state, &mut events);
        events.into_iter().find(|event| self.search.describe(*event) == line)
    }

    fn can(&self, line: &str) -> bool {
        self.find(line).is_some()
    }

    fn step(&mut self, line: &str) -> Result<(), Violation> {
        let Some(event) = self.find(line) else {
            let mut events = Vec::new();
            self.search.events(&self.state, &mut events);
            let all: Vec<_> = events.into_iter().map(|e| self.search.describe(e)).collect();
            panic!("{line:?} is not possible, but {all:?}");
        };
        self.state = self.search.apply(&self.state, event)?;
        Ok(())
    }

    /// Steps that break no promise.
    fn go(&mut self, lines: &[&str]) {
        for line in lines {
            if let Err(violation) = self.step(line) {
                panic!("{line}: {violation:?}");
            }
        }
    }

    /// On, as a fair schedule without faults, until all is at rest.
    fn rest(&mut self) {
        for _ in 0..200 {
            if self.search.is_over(&self.state) {
                return;
            }
            let mut events = Vec::new();
            assert!(self.search.events(&self.state, &mut events) > 0, "stuck");
            let line = self.search.describe(events[0]);
            self.go(&[&line]);
        }
        panic!("does not come to rest");
    }

    fn decode(&self) -> &Node {
        self.search.node(&self.state, Seat::Decode)
    }

    fn prefill(&self) -> &Node {
        self.search.node(&self.state, Seat::Prefill)
    }

    fn served(&self) -> bool {
        self.decode().asks.iter().all(|ask| *ask == Ask::Served)
    }
}

/// Without `removed` the last line breaks `property`, and no line before it does.
fn breaks(removed: &[Mutation], setup: &Setup, lines: &[&str], property: Property) {
    without(removed, || {
        let mut play = Play::new(setup.clone());
        let (last, before) = lines.split_last().unwrap();
        play.go(before);
        let violation = play.step(last).expect_err("the guard is gone");
        assert_eq!(violation.property, property, "{violation:?}");
    });
}

const fn with(faults: &'static [(Fault, u8)]) -> Setup {
    Setup { faults, total: 9, ..Setup::PLAIN }
}

/// One page offered and its get under way.
const READING: &[&str] = &[
    "start request 1",
    "deliver Want 1.1",
    "deliver Accepted 1.1",
    "compute 1.1",
    "deliver Ready 1.1 #0",
];

/// The rest of the offer.
const OFFERED: &[&str] = &["compute 1.1", "deliver Ready 1.1 #1", "deliver Final 1.1"];

fn lines<'a>(parts: &[&[&'a str]]) -> Vec<&'a str> {
    parts.concat()
}

/// Target pages of an aborted request go to another one while the read still writes them: the
/// other request answers with this one's bytes.
#[test]
fn r1_page_reuse_while_a_read_is_in_flight() {
    let setup = with(&[(Fault::Abort, 1)]);
    let abort = lines(&[READING, &["client aborts request 1"]]);
    let mut play = Play::new(setup.clone());
    play.go(&abort);
    assert_eq!(play.decode().free_pages(), 2, "the targets are held until the read has ended");
    play.go(&["read 0"]);
    assert_eq!(play.decode().free_pages(), 4);
    play.rest();
    breaks(&[Mutation::DrainProof], &setup, &abort, Property::S1);
}

/// A slot is used again, and a message of its last user is taken for one of the next: the second
/// request reads pages that were offered to the first and are anybody's by now.
#[test]
fn r2_slot_reuse() {
    let setup = Setup {
        requests: 2,
        pages: 1,
        is_slots: true,
        is_fifo: false,
        ..with(&[(Fault::Early, 1)])
    };
    let reuse = &[
        "start request 1",
        "deliver Want 1.0",
        "compute 1.0",
        "deliver Final 1.0",
        "early timer",
        "deliver Ready 1.0 #0",
        "deliver Resume 1.0",
        "read 0",
        "verify 1",
        "deliver Done 1.0",
        "deliver Closed 1.0",
        "start request 2",
    ];
    let mut play = Play::new(setup.clone());
    play.go(reuse);
    assert_eq!(play.decode().asks, [Ask::Served, Ask::Failed], "the id was used before");
    play.go(&["deliver Ready 1.0 #0"]);
    assert!(play.decode().flights.is_empty());
    play.rest();
    let late = lines(&[reuse, &["deliver Ready 1.0 #0"]]);
    breaks(&[Mutation::SlotGeneration], &setup, &late, Property::S1);
}

/// The word that all is there is faster than the pages: decode starts on memory that nobody has
/// written yet.
#[test]
fn r3_notification_overtakes_data() {
    let setup = Setup { is_fifo: false, ..with(&[]) };
    let overtake =
        &["start request 1", "deliver Want 1.1", "compute 1.1", "compute 1.1", "deliver Final 1.1"];
    let mut play = Play::new(setup.clone());
    play.go(overtake);
    assert!(!play.served(), "the record alone completes nothing");
    play.go(&["deliver Ready 1.1 #1", "read 0", "verify 1"]);
    assert!(!play.served(), "nor does one page of two");
    play.rest();
    assert!(play.served());
    breaks(&[Mutation::Count, Mutation::Manifest], &setup, overtake, Property::S2);
}

/// The link is lost and its pages are given to others, but a read goes on and brings their bytes.
#[test]
fn r4_late_access_after_an_abort() {
    let setup = with(&[(Fault::Cut, 1)]);
    let cut = lines(&[READING, &["cut the link", "prefill learns that the link is lost"]]);
    let mut play = Play::new(setup.clone());
    play.go(&cut);
    assert_eq!(play.prefill().free_pages(), 4, "released, since the link is fenced");
    assert!(!play.can("read 0"), "no byte moves on a lost link");
    assert_eq!(play.decode().free_pages(), 2, "decode does not know yet");
    play.rest();
    breaks(&[Mutation::Fence], &setup, &cut, Property::S1);
}

/// A page is offered while the step that fills it still runs: the reader gets half of it.
#[test]
fn r5_read_before_write() {
    let setup = with(&[]);
    let mut play = Play::new(setup.clone());
    play.go(&["start request 1", "deliver Want 1.1", "compute 1.1", "deliver Accepted 1.1"]);
    assert!(!play.can("write page 0 of 1.1"), "the last write came before the offer");
    play.rest();
    assert!(play.served());
    let late = ["start request 1", "deliver Want 1.1", "compute 1.1", "write page 0 of 1.1"];
    breaks(&[Mutation::SealBeforeOffer], &setup, &late, Property::S1);
}

/// A page is written over between the two halves of a copy: the copy is of two pages.
#[test]
fn r6_copy_of_a_page_that_is_overwritten() {
    let setup = Setup { is_torn: true, ..with(&[(Fault::Overwrite, 1)]) };
    let torn = &["read 0", "reuse source page 1 early", "read 0, guard changed"];
    let mut play = Play::new(setup.clone());
    play.go(&lines(&[READING, torn]));
    assert!(!play.can("verify 1"), "a stale page is not even hashed");
    play.rest();
    assert_eq!(
        play.decode().asks,
        [Ask::Failed],
        "the source stays wrong, so both reads are stale"
    );
    let all = lines(&[READING, torn, &["verify 1"], OFFERED, &["read 2", "read 2", "verify 3"]]);
    breaks(&[Mutation::Generation, Mutation::Digest], &setup, &all, Property::S3);
}

/// A page that is being read leaves the cache because it was there for long.
#[test]
fn r7_eviction_in_mid_transfer() {
    let setup = Setup { is_torn: true, ..with(&[(Fault::Overdue, 1)]) };
    let alarm = lines(&[READING, &["read 0", "overdue alarm"]]);
    let mut play = Play::new(setup.clone());
    play.go(&alarm);
    assert_eq!(play.prefill().free_pages(), 2, "an alarm unpins nothing");
    play.rest();
    assert!(play.served());
    breaks(&[Mutation::StaleLease], &setup, &alarm, Property::S1);
}

/// A node restarts under the same address, and a message to or from its last life is believed:
/// here prefill computes for a process that is dead and keeps the pages for ever.
#[test]
fn r8_stale_messages_after_a_restart() {
    let setup =
        Setup { pages: 1, ..with(&[(Fault::CrashDecode, 1), (Fault::Late, 1), (Fault::Lose, 1)]) };
    let restart = &[
        "start request 1",
        "decode crashes and restarts",
        "prefill learns that the link is lost",
        "connect",
        "deliver Hello",
        "deliver Want 1.1 of an earlier life",
        "lose HelloAck",
    ];
    let mut play = Play::new(setup.clone());
    play.go(restart);
    assert!(play.prefill().jobs.is_empty());
    play.rest();
    without(&[Mutation::Incarnation], || {
        let mut play = Play::new(setup);
        play.go(restart);
        assert_eq!(play.prefill().jobs.len(), 1);
        let news = ["deliver Accepted 1.1", "compute 1.1", "deliver Ready 1.1 #0"];
        play.go(&news);
        // The old message took a sequence number, so the next greeting is lost too.
        play.go(&["deliver Final 1.1", "timer", "deliver Hello", "timer", "deliver Hello"]);
        play.go(&["deliver HelloAck"]);
        let mut events = Vec::new();
        assert_eq!(play.search.events(&play.state, &mut events), 0, "nothing happens any more");
        assert_eq!(play.prefill().free_pages(), 3, "and the page does not come back");
    });
}

/// Prefill frees pages before decode has pulled them, because a time has passed: decode reads the
/// pages of whoever has them now.
#[test]
fn r9_freed_before_the_pull() {
    let setup = with(&[(Fault::Overdue, 1)]);
    let (offer, pull) = READING.split_at(4);
    let early = lines(&[offer, &["overdue alarm"], pull]);
    let mut play = Play::new(setup.clone());
    play.go(&early);
    play.go(&["read 0", "verify 1"]);
    play.rest();
    assert!(play.served());
    breaks(&[Mutation::StaleLease], &setup, &early, Property::S1);
}

/// One read of a group fails and the pages of all are given away, while the others still write.
#[test]
fn r10_sibling_reads() {
    let setup = with(&[(Fault::Damage, 1)]);
    let both = lines(&[READING, &["compute 1.1", "deliver Ready 1.1 #1", "read 0 damaged"]]);
    let fail = lines(&[&both, &["verify 2"]]);
    let mut play = Play::new(setup.clone());
    play.go(&fail);
    let held = play.decode().flights.values().next().unwrap().clone();
    assert!(play.can("read 1"), "the other read goes on into pages that are still held");
    assert_eq!((held.half, play.decode().free_pages()), (0, 2));
    play.rest();
    assert!(play.served(), "the group was pulled again");
    breaks(&[Mutation::SiblingCompletion], &setup, &fail, Property::S1);
}

/// A page counts as there because it was asked for, or landed, and not because it was checked.
#[test]
fn r11_published_before_it_is_checked() {
    let setup = with(&[(Fault::Damage, 1)]);
    let landed = lines(&[READING, OFFERED, &["read 0 damaged", "read 1"]]);
    let mut play = Play::new(setup.clone());
    play.go(&landed);
    assert!(!play.served(), "all bytes are there, and none is checked");
    play.go(&["verify 3"]);
    assert!(!play.served());
    play.rest();
    assert!(play.served(), "after the damaged page was pulled again");
    let believed = lines(&[&landed, &["verify 2", "verify 3"]]);
    breaks(&[Mutation::Digest], &setup, &believed, Property::S3);
}

/// Fewer pages than planned, or pages of a kind nobody planned, and the lists are cut to the
/// shorter one: the request "succeeds" with missing pages.
#[test]
fn r12_silent_truncation_and_unknown_kinds() {
    let setup = with(&[(Fault::Short, 1), (Fault::Unknown, 1)]);
    let checked = lines(&[READING, &["read 0", "verify 1"]]);
    let short = lines(&[&checked, &["forget the last page of 1.1", "deliver Final 1.1"]]);
    let mut play = Play::new(setup.clone());
    play.go(&short);
    assert!(!play.served());
    play.rest();
    assert_eq!(play.decode().endpoint.counters().failed_violation, 1);
    breaks(&[Mutation::Count], &setup, &short, Property::S2);
    let unknown = lines(&[
        &checked,
        &["offer an unknown page of 1.1", "deliver Ready 1.1 #1", "deliver Final 1.1"],
    ]);
    let mut play = Play::new(setup.clone());
    play.go(&unknown);
    play.rest();
    assert_eq!(play.decode().endpoint.counters().failed_violation, 1);
    let all = [Mutation::UnknownKind, Mutation::Count, Mutation::Manifest];
    breaks(&all, &setup, &unknown, Property::S2);
}
