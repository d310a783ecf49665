//! The simulated world: random faults, every promise checked, and a canary that shows that the
//! check on arrival is what keeps wrong bytes out.

use pd_transfer::counters::Counters;
use pd_transfer::testing::sim::{Check, Report, run, storm};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

const SEEDS: u64 = 200;

/// The first seed: in CI that of the commit.
fn first() -> u64 {
    number("DSV4_TEST_SEED").unwrap_or(0)
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Runs a seed; if it fails, says how to run it again.
fn checked(seed: u64, options: &str, world: fn(u64, Check) -> Report) -> Report {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let report = world(seed, Check::Tags);
        assert!(report.wrong.is_empty(), "wrong bytes in {:?}", report.wrong);
        report
    }));
    outcome.unwrap_or_else(|panic| {
        println!("seed {seed} fails; again: cargo xtask test sim --seed {seed}{options}");
        resume_unwind(panic)
    })
}

/// As many requests as `cargo xtask test sim --requests N` says, with every fault on; without it
/// the few of one seed.
#[test]
fn no_storm_gets_a_wrong_byte_through() {
    let wanted = number("DSV4_SIM_REQUESTS").unwrap_or(1);
    let (mut completed, mut failed, mut seed) = (0, 0, first());
    while completed + failed < wanted {
        let report = checked(seed, " --requests 1", storm);
        completed += report.completed as u64;
        failed += report.failed as u64;
        seed = seed.wrapping_add(1);
    }
    println!("{completed} completed, {failed} failed");
    assert!(completed > 0, "no request of {failed} survives");
}

// PD-V2 PD-R12 PD-S13 PD-G2 PD-G3 PD-G5
#[test]
fn no_fault_gets_a_wrong_byte_through() {
    let mut total = Counters::default();
    let (mut completed, mut failed) = (0, 0);
    for seed in first()..first().saturating_add(SEEDS) {
        let report = checked(seed, "", run);
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
    let mut seeds = first()..first().saturating_add(SEEDS);
    let found = seeds.find(|seed| !run(*seed, Check::Nothing).wrong.is_empty());
    assert!(found.is_some(), "the faults of the world do not reach the pages");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let seed = first();
    let (a, b) = (run(seed, Check::Tags), run(seed, Check::Tags));
    assert_eq!((a.completed, a.failed, a.counters), (b.completed, b.failed, b.counters));
}
