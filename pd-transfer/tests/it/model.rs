//! Model checking of the production machines: every order of events with a bounded number of
//! faults, and each guard taken away in turn.

mod names;
pub(crate) mod node;
pub(crate) mod search;
mod view;
mod wide;

use node::Property;
use pd_transfer::testing::mutation::{Mutation, without};
use search::{Fault, Report, Search};

/// What a search looks at.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) requests: usize,
    /// Pages of a request.
    pub(crate) pages: usize,
    /// Attempts per request before its client is told that it failed.
    pub(crate) tries: u8,
    /// Pages of a node.
    pub(crate) pool: usize,
    pub(crate) faults: &'static [(Fault, u8)],
    /// Most faults together.
    pub(crate) total: u8,
    /// The first link is up at the start.
    pub(crate) is_greeted: bool,
    /// Messages of one direction arrive in order, unless a fault reorders them.
    pub(crate) is_fifo: bool,
    /// A get reads in two halves.
    pub(crate) is_torn: bool,
    /// The prefill node has another page layout.
    pub(crate) is_other_layout: bool,
    /// Attempt ids are slots: used again and again.
    pub(crate) is_slots: bool,
}

impl Setup {
    pub(crate) const PLAIN: Self = Self {
        requests: 1,
        pages: 2,
        tries: 1,
        pool: 4,
        faults: &[],
        total: 0,
        is_greeted: true,
        is_fifo: true,
        is_torn: false,
        is_other_layout: false,
        is_slots: false,
    };
}

/// Everything that can go wrong within the contract of transport and upper layer.
const EVERY: &[(Fault, u8)] = &[
    (Fault::Lose, 2),
    (Fault::Duplicate, 2),
    (Fault::Reorder, 2),
    (Fault::Cut, 1),
    (Fault::CrashDecode, 1),
    (Fault::CrashPrefill, 1),
    (Fault::Abort, 1),
    (Fault::Overwrite, 1),
    (Fault::Silent, 1),
    (Fault::Damage, 1),
    (Fault::GetError, 1),
    (Fault::Early, 2),
];

const SOME: &[(Fault, u8)] = &[(Fault::CrashPrefill, 1), (Fault::Abort, 1), (Fault::Damage, 1)];

/// More states than a search may have.
const STATES_MAX: usize = 4_000_000;

const SCOPES: &[(&str, Setup)] = &[
    (
        "two requests of two pages, one abort, damaged read or crash of prefill",
        Setup { requests: 2, faults: SOME, total: 1, ..Setup::PLAIN },
    ),
    (
        "one request of two pages, two tries, any two faults",
        Setup { tries: 2, faults: EVERY, total: 2, ..Setup::PLAIN },
    ),
    (
        "one page, two tries, from the first greeting on, any three faults",
        Setup { pages: 1, tries: 2, faults: EVERY, total: 3, is_greeted: false, ..Setup::PLAIN },
    ),
    (
        "two requests of one page, two tries, any one fault",
        Setup { requests: 2, pages: 1, tries: 2, faults: EVERY, total: 1, ..Setup::PLAIN },
    ),
    (
        "one request of two pages, messages in any order, any one fault",
        Setup { faults: EVERY, total: 1, is_fifo: false, ..Setup::PLAIN },
    ),
    (
        "one request of two pages, reads in two halves, any one fault",
        Setup { tries: 2, faults: EVERY, total: 1, is_torn: true, ..Setup::PLAIN },
    ),
];

/// A guard, what is removed to see it matter, and where.
struct Case {
    guard: &'static str,
    /// Every one is needed: with any of them back in place nothing is found.
    removed: &'static [Mutation],
    setup: Setup,
    property: Property,
    /// What else covers it, or where it is kept.
    note: &'static str,
}

const CASES: &[Case] = &[
    Case {
        guard: "generation",
        removed: &[Mutation::Generation, Mutation::Digest],
        setup: Setup { faults: &[(Fault::Overwrite, 1)], total: 1, is_torn: true, ..Setup::PLAIN },
        property: Property::S3,
        note: "the digest covers it: either alone finds a page that was reused under the reader",
    },
    Case {
        guard: "drain proof",
        removed: &[Mutation::DrainProof],
        setup: Setup { faults: &[(Fault::Abort, 1)], total: 1, ..Setup::PLAIN },
        property: Property::S1,
        note: "",
    },
    Case {
        guard: "incarnation",
        removed: &[Mutation::Incarnation],
        setup: Setup {
            pages: 1,
            faults: &[(Fault::CrashDecode, 1), (Fault::Late, 1), (Fault::Lose, 3)],
            total: 5,
            ..Setup::PLAIN
        },
        property: Property::L2,
        note: "no byte is at risk, since attempts are bound to their link and ids are fresh; but a request of a dead process would hold pages for ever",
    },
    Case {
        guard: "count",
        removed: &[Mutation::Count],
        setup: Setup { faults: &[(Fault::Short, 1)], total: 1, ..Setup::PLAIN },
        property: Property::S2,
        note: "",
    },
    Case {
        guard: "seal before offer",
        removed: &[Mutation::SealBeforeOffer],
        setup: Setup::PLAIN,
        property: Property::S1,
        note: "kept by the prefill side's upper layer",
    },
    Case {
        guard: "record hash",
        removed: &[Mutation::RecordHash],
        setup: Setup { faults: &[(Fault::Spoil, 1)], total: 1, ..Setup::PLAIN },
        property: Property::S3,
        note: "",
    },
    Case {
        guard: "slot generation",
        removed: &[Mutation::SlotGeneration],
        setup: Setup {
            requests: 2,
            pages: 1,
            tries: 2,
            faults: &[(Fault::Early, 1)],
            total: 1,
            is_fifo: false,
            is_slots: true,
            ..Setup::PLAIN
        },
        property: Property::S1,
        note: "there are no slots: an attempt id is never used again; here ids are slots, and the memory of ended ids is removed",
    },
    Case {
        guard: "unknown kind",
        removed: &[Mutation::UnknownKind, Mutation::Count, Mutation::Manifest],
        setup: Setup { faults: &[(Fault::Unknown, 1)], total: 1, ..Setup::PLAIN },
        property: Property::S2,
        note: "count and manifest cover it, each alone",
    },
    Case {
        guard: "sibling completion",
        removed: &[Mutation::SiblingCompletion],
        setup: Setup { faults: &[(Fault::Damage, 1)], total: 1, ..Setup::PLAIN },
        property: Property::S1,
        note: "",
    },
    Case {
        guard: "stale lease",
        removed: &[Mutation::StaleLease],
        setup: Setup { faults: &[(Fault::Overdue, 1)], total: 1, ..Setup::PLAIN },
        property: Property::S1,
        note: "there is no lease: time raises an alarm and releases nothing; here the alarm is taken for an expiry",
    },
    Case {
        guard: "layout check",
        removed: &[Mutation::LayoutCheck, Mutation::Digest],
        setup: Setup { is_other_layout: true, ..Setup::PLAIN },
        property: Property::S3,
        note: "the digest covers it, since a tag is of bytes and layout",
    },
    Case {
        guard: "digest",
        removed: &[Mutation::Digest],
        setup: Setup { faults: &[(Fault::Damage, 1)], total: 1, ..Setup::PLAIN },
        property: Property::S3,
        note: "",
    },
    Case {
        guard: "fence",
        removed: &[Mutation::Fence],
        setup: Setup { faults: &[(Fault::Cut, 1)], total: 1, ..Setup::PLAIN },
        property: Property::S1,
        note: "kept by the transport",
    },
];

fn faults(setup: &Setup) -> String {
    if setup.faults == EVERY {
        return format!("any {}", setup.total);
    }
    let all: Vec<_> =
        setup.faults.iter().map(|(fault, count)| format!("{} {count}", fault.name())).collect();
    if all.is_empty() { String::from("none") } else { all.join(", ") }
}

fn no_counterexample(name: &str, report: &Report) {
    if let Some((violation, trace)) = &report.counterexample {
        panic!("{name}: {violation:?}\n{}", trace.join("\n"));
    }
}

fn scope_lines(name: &str, setup: &Setup) -> (usize, String) {
    let report = Search::new(setup.clone()).run(STATES_MAX);
    no_counterexample(name, &report);
    // A search that reaches nothing proves nothing.
    assert!(report.served > 0 && report.failed > 0, "{name}: {report:?}");
    let line = format!(
        "{name}\n  {} states, {} transitions, depth {}, {} states of one node; at rest {} served, {} not\n",
        report.states,
        report.transitions,
        report.depth,
        report.node_states,
        report.served,
        report.failed
    );
    (report.states, line)
}

/// Compares a section of the committed log with a fresh one, or writes it with `UPDATE_SNAPSHOTS`.
fn committed(section: &str, fresh: &str) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/spec/model-check.txt");
    let (start, end) = (format!("== {section} ==\n"), "== end ==\n");
    let text = std::fs::read_to_string(path).unwrap();
    let from = text.find(&start).expect("the section is there") + start.len();
    let to = from + text[from..].find(end).expect("the section ends");
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        let text = format!("{}{fresh}{}", &text[..from], &text[to..]);
        return std::fs::write(path, text).unwrap();
    }
    for (line, (now, then)) in fresh.lines().zip(text[from..to].lines()).enumerate() {
        assert_eq!(now, then, "{section}, line {}", line + 1);
    }
    assert_eq!(fresh.lines().count(), text[from..to].lines().count(), "{section}");
}

#[test]
fn every_order_of_events_keeps_the_promises() {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let done = std::sync::Mutex::new(vec![None; SCOPES.len()]);
    std::thread::scope(|threads| {
        for _ in 0..2 {
            threads.spawn(|| {
                loop {
                    let at = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    let Some((name, setup)) = SCOPES.get(at) else { return };
                    let lines = scope_lines(name, setup);
                    println!("{}", lines.1);
                    done.lock().unwrap()[at] = Some(lines);
                }
            });
        }
    });
    let done: Vec<(usize, String)> = done.into_inner().unwrap().into_iter().flatten().collect();
    assert_eq!(done.len(), SCOPES.len());
    let total: usize = done.iter().map(|(states, _)| states).sum();
    assert!(total > 1_000_000, "{total} states");
    let mut text: String = done.into_iter().map(|(_, lines)| lines).collect();
    text.push_str(&format!("together\n  {total} states\n"));
    committed("promises", &text);
}

#[test]
fn each_guard_is_needed() {
    let mut text = String::new();
    for case in CASES {
        let run = |removed: &[Mutation]| {
            without(removed, || Search::new(case.setup.clone()).run(STATES_MAX))
        };
        // With one guard more nothing is found: it is the removed ones that the trace needs.
        let mut states = Vec::new();
        for kept in case.removed {
            let rest: Vec<_> = case.removed.iter().copied().filter(|one| one != kept).collect();
            let report = run(&rest);
            no_counterexample(&format!("{} with {kept:?}", case.guard), &report);
            states.push(format!("{kept:?} back: {} states, nothing found", report.states));
        }
        let report = run(case.removed);
        let Some((violation, trace)) = report.counterexample else {
            panic!("{}: no trace in {} states", case.guard, report.states);
        };
        println!("{}: {violation:?}\n{}\n", case.guard, trace.join("\n"));
        assert_eq!(violation.property, case.property, "{}", case.guard);
        let removed: Vec<_> = case.removed.iter().map(|one| format!("{one:?}")).collect();
        let names = removed.join(" and ");
        text.push_str(&format!(
            "{}\n  removed: {names}; faults: {}\n",
            case.guard,
            faults(&case.setup)
        ));
        if !case.note.is_empty() {
            text.push_str(&format!("  note: {}\n", case.note));
        }
        text.push_str(&format!(
            "  {:?} falls in {} steps: {}\n",
            violation.property,
            trace.len(),
            violation.text
        ));
        for line in states {
            text.push_str(&format!("  {line}\n"));
        }
        for (n, step) in trace.iter().enumerate() {
            text.push_str(&format!("    {:>2} {step}\n", n + 1));
        }
    }
    committed("guards", &text);
}
