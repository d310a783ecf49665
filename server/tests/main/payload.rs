//! What is read of peers that send anything: payloads of a hand-off, and what a subscriber says.

use dsv4_model::sample::{Sampled, SamplingParams};
use dsv4_server::engine::{CacheKeep, Flushed, ThinkingBudget};
use dsv4_server::glue::order::{Order, encode_flushed};
use dsv4_server::glue::payload::{self, FirstToken, PrefillRequest};
use dsv4_server::grammar::Source;
use dsv4_server::net::kv_events;
use dsv4_server::trace::TraceParent;
use pd_transfer::wire::MAX_PAYLOAD_BYTES;
use std::path::PathBuf;
use std::sync::Arc;

const CORPORA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/corpus");
const RUNS: u64 = 20_000;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// What reads bytes of others, and what those are when they are right.
struct Target {
    name: &'static str,
    read: fn(&[u8]),
    seeds: Vec<Vec<u8>>,
}

fn targets() -> [Target; 2] {
    let said = ["SUB", "DEALER"].map(crate::kv_events::said_by);
    [
        Target { name: "payload", read: payload::fuzz_target, seeds: payloads().to_vec() },
        Target { name: "zmtp", read: kv_events::fuzz_target, seeds: said.to_vec() },
    ]
}

fn payloads() -> [Vec<u8>; 5] {
    let request = |sampling| PrefillRequest {
        id: "a".to_owned(),
        request_id: "req-1".to_owned(),
        trace: Some(TraceParent { trace_id: [1; 16], span_id: [2; 8], is_sampled: true }),
        prompt: vec![1, 2, 3],
        output: 1,
        sampling,
        cache_salt: "tenant".to_owned(),
        cache_keep: CacheKeep::Seconds(300),
        turn: dsv4_server::engine::Turn::default(),
        not_first: vec![7],
        thinking: Some(ThinkingBudget { tokens: 100, end: 8 }),
        source: Some(Arc::new(Source { grammar: "start: \"a\"".to_owned(), after: Some(9) })),
    };
    let sampling = SamplingParams {
        logit_bias: vec![(3, -1.0), (4, 2.0)],
        logprobs: 2,
        want_logprob: true,
        ..SamplingParams::default()
    };
    let sampled = Sampled { token: 5, logprob: -0.5, top: vec![(5, -0.5), (6, -1.5)] };
    let first = FirstToken { tokens: 3, cached: 2, cached_below: [1, 0, 1], sampled };
    let flushed = Flushed { blocks: 1, boundaries: 2, host_objects: 3, stored_objects: 4 };
    [
        request(SamplingParams::greedy()).encode(),
        request(sampling).encode(),
        first.encode(),
        Order::Flush { stores: true }.encode(),
        encode_flushed(flushed),
    ]
}

fn folder(name: &str) -> PathBuf {
    PathBuf::from(CORPORA).join(name)
}

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let entries = std::fs::read_dir(folder(name)).expect("the corpus is there");
    let mut files: Vec<_> = entries.map(|entry| entry.expect("a file").path()).collect();
    files.sort();
    files.into_iter().map(|path| std::fs::read(path).expect("a file")).collect()
}

#[test]
fn the_corpus_is_read_without_a_finding_and_holds_the_seeds() {
    for Target { name, read, seeds } in targets() {
        for (n, bytes) in seeds.into_iter().enumerate() {
            let path = folder(name).join(format!("seed-{n:02}"));
            if std::env::var_os("DSV4_BLESS").is_some() {
                std::fs::create_dir_all(folder(name)).unwrap();
                std::fs::write(&path, &bytes).unwrap();
            }
            let found = std::fs::read(&path).unwrap_or_else(|e| panic!("{path:?}: {e}"));
            assert!(found == bytes, "{path:?} is another seed; DSV4_BLESS=1 writes it");
            assert!(bytes.len() < MAX_PAYLOAD_BYTES);
        }
        corpus(name).iter().for_each(|bytes| read(bytes));
    }
}

/// Changes bits, numbers and lengths; SplitMix64 decides, so a seed gives the same run.
fn mutate(next: &mut impl FnMut() -> u64, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = corpus[next() as usize % corpus.len()].clone();
    for _ in 0..1 + next() % 4 {
        let at = next() as usize % bytes.len().max(1);
        match next() % 4 {
            0 if at < bytes.len() => bytes[at] ^= 1 << (next() % 8),
            1 => {
                let end = bytes.len().min(at + 8);
                bytes[at..end].fill([0, 1, 0x7F, 0xFF][next() as usize % 4]);
            }
            2 => bytes.truncate(at),
            _ => bytes.extend((0..next() % 16).map(|n| n as u8)),
        }
    }
    bytes
}

#[test]
fn no_mutation_of_the_corpus_is_a_finding() {
    let seed = number("DSV4_TEST_SEED").unwrap_or(1);
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    for Target { name, read, .. } in targets() {
        let corpus = corpus(name);
        for _ in 0..number("DSV4_FUZZ_RUNS").unwrap_or(RUNS) {
            let input = mutate(&mut next, &corpus);
            let outcome = std::panic::catch_unwind(|| read(&input));
            let path = folder(name);
            assert!(outcome.is_ok(), "seed {seed}: put this into {path:?}: {input:02x?}");
        }
    }
}
