//! How long the router takes to choose a worker.

use super::{figure, percentile};
use dsv4_server::router::choice::{
    BLOCK_BYTES, Choice, ChoiceConfig, HashKey, Prompt, Tenant, WorkerId,
};
use std::time::{Duration, Instant};

/// Workers behind the router.
const WORKERS: u64 = 16;
/// Conversations that take turns, each of so many blocks at first: 64 KiB, about 16,000 tokens.
const SESSIONS: usize = 256;
const BLOCKS: usize = 64;
/// Requests that are timed.
const REQUESTS: usize = 4096;

fn body(session: usize, bytes: usize) -> Vec<u8> {
    let text = format!("{session} says something to somebody. ").repeat(bytes / 30 + 1);
    serde_json::json!({"messages": [{"role": "user", "content": text[..bytes]}]})
        .to_string()
        .into_bytes()
}

pub(super) fn run() {
    let key = HashKey([3; 32]);
    let mut choice = Choice::new(ChoiceConfig::default());
    let workers: Vec<WorkerId> = (0..WORKERS).map(WorkerId).collect();
    workers.iter().for_each(|&worker| choice.handle_joined(worker));
    let bodies: Vec<Vec<u8>> = (0..SESSIONS).map(|n| body(n, BLOCKS * BLOCK_BYTES)).collect();
    let (mut hashing, mut choosing) = (Vec::new(), Vec::new());
    let mut homes = vec![None; SESSIONS];
    let mut moved = 0;
    for n in 0..REQUESTS {
        let session = n % SESSIONS;
        let start = Instant::now();
        let prompt = Prompt::of(&key, Tenant::default(), &bodies[session]);
        hashing.push(start.elapsed().as_secs_f64() * 1e6);
        let start = Instant::now();
        let now = Duration::from_millis(n as u64);
        let chosen = choice.choose(now, &prompt, &workers).expect("there are workers");
        choosing.push(start.elapsed().as_secs_f64() * 1e6);
        let home = homes[session].replace(chosen.worker);
        moved += u32::from(home.is_some_and(|home| home != chosen.worker));
        choice.handle_ended(chosen);
    }
    assert_eq!(moved, 0, "idle workers keep their conversations");
    figure("router.prompt_us", percentile(&mut hashing, 50), "us");
    figure("router.choose_us", percentile(&mut choosing, 50), "us");
    figure("router.choose_us_p99", percentile(&mut choosing, 99), "us");
}
