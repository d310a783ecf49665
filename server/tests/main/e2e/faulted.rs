//! The run under faults, short: the long one is `cargo xtask test faults`.

use super::cluster::note;
use super::fault_run::{Figure, Plan, limits, run};
use std::time::Duration;

fn seed() -> u64 {
    std::env::var("DSV4_TEST_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

async fn all_bars_are_met(transport: &str, aborts: usize) {
    let seed = seed();
    let transport = transport.to_owned();
    // The frozen worker thaws when the requests that it had have ended.
    let freeze = Duration::ZERO;
    let plan = Plan { requests: 48, prompts: 10, aborts, seed, transport, at_once: 4, freeze };
    let figures = run(&plan).await;
    for figure in &figures {
        note(&format!("{} {} {}", figure.name, figure.value, figure.unit));
    }
    // How much a process grows is seen over many more aborts.
    let missed: Vec<&Figure> =
        figures.iter().filter(|f| !f.is_met() && !f.name.ends_with("_growth")).collect();
    assert!(missed.is_empty(), "seed {seed}: {missed:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_fault_gives_a_wrong_token_or_keeps_a_page_over_shm() {
    all_bars_are_met("shm", 100).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_fault_gives_a_wrong_token_or_keeps_a_page_over_tcp() {
    all_bars_are_met("tcp", 20).await;
}

#[test]
fn page_memory_that_is_not_there_is_an_error_at_the_start() {
    // No file may have more than 16 MiB: page memory is a file that is filled at the start, so that
    // no later touch can find it missing.
    let word = limits::last_word("ulimit -f 16384", "--kv-memory-mib 192");
    assert!(
        word.contains("allocate the page pools: allocate ") && word.contains("shared"),
        "{word}"
    );
}
