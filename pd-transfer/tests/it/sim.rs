//! The simulated world: random faults, every promise checked, and a canary that shows that the
//! check on arrival is what keeps wrong bytes out.

use pd_transfer::counters::Counters;
use pd_transfer::testing::sim::{Check, run};

const SEEDS: u64 = 200;

// PD-V2 PD-R12 PD-S13 PD-G2 PD-G3 PD-G5
#[test]
fn no_fault_gets_a_wrong_byte_through() {
    let mut total = Counters::default();
    let (mut completed, mut failed) = (0, 0);
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let report = run(seed, Check::Tags);
        assert!(report.wrong.is_empty(), "seed {seed}: wrong bytes in {:?}", report.wrong);
        completed += report.completed;
        failed += report.failed;
        total = total.plus(&report.counters);
    }
    // The seeds reach every branch that matters.
    assert!(completed > 1000 && failed > 1000, "{completed} completed, {failed} failed");
    // A link is never reused by another process here, and no side breaks the protocol.
    let elsewhere = ["failed_violation", "links_malformed", "links_refused", "dropped_foreign"];
    let missing: Vec<&str> = total
        .all()
        .into_iter()
        .filter(|counter| counter.value == 0 && !elsewhere.contains(&counter.name))
        .map(|counter| counter.name)
        .collect();
    assert!(missing.is_empty(), "no seed counted {missing:?}");
}

#[test]
fn without_the_check_wrong_bytes_get_through() {
    let found = (0..SEEDS).find(|seed| !run(*seed, Check::Nothing).wrong.is_empty());
    assert!(found.is_some(), "the faults of the world do not reach the pages");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let (a, b) = (run(3, Check::Tags), run(3, Check::Tags));
    assert_eq!((a.completed, a.failed, a.counters), (b.completed, b.failed, b.counters));
}
