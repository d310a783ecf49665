//! A prefix that is found again is as good as one that was computed, wherever it ends and whatever
//! tier it comes from: at every block boundary of a conversation another one branches off.

use super::accounts::assert_all_given_back;
use super::client::{Metrics, essence, greedy, healthy, post};
use super::cluster::{Pair, Server};
use super::folder::Folder;
use super::prompts::prompt;
use super::warm::{OUTPUT, written};
use crate::moto::{BUCKET, Moto};
use serde_json::Value;

const BLOCK: usize = 256;
/// Tokens of a branch behind the boundary that it leaves at.
const TAIL: usize = 45;

/// A branch: its boundary in blocks, its prompt, and what a server without a cache answers.
struct Branch {
    blocks: usize,
    ids: Vec<u32>,
    answer: Value,
}

/// A conversation, and a branch at each of its boundaries.
struct Tree {
    trunk: Vec<u32>,
    branches: Vec<Branch>,
}

impl Tree {
    async fn new(cold: &Server, blocks: usize) -> Self {
        let trunk = prompt(2300);
        let mut branches = Vec::new();
        for blocks in 1..=blocks {
            let end = blocks * BLOCK;
            // What follows comes from elsewhere in the conversation.
            let ids = [&trunk[..end], &trunk[BLOCK / 2..BLOCK / 2 + TAIL]].concat();
            assert_ne!(ids[end..], trunk[end..end + TAIL], "it branches off");
            let answer = ask(&cold.url, &ids).await.0;
            branches.push(Branch { blocks, ids, answer });
        }
        Self { trunk, branches }
    }

    /// Has every boundary of the conversation kept: each is where one of these prompts ends.
    async fn grow(&self, url: &str) {
        for branch in &self.branches {
            ask(url, &self.trunk[..branch.blocks * BLOCK + 10]).await;
        }
    }
}

/// Answer and usage.
async fn ask(url: &str, ids: &[u32]) -> (Value, Value) {
    let reply = post(&format!("{url}/v1/completions"), &greedy(ids, OUTPUT)).await;
    let mut answer = reply.expect("an answer").ok();
    let usage = answer["usage"]["prompt_tokens_details"].take();
    (essence(&answer), usage)
}

/// Forgets what is on the device and in host memory.
async fn flush(url: &str) {
    post(&format!("{url}/flush_cache"), &Value::Null).await.expect("an answer").ok();
}

/// Asks for a branch; all up to its boundary has to come out of the cache, at least a block of it
/// from `tier`.
async fn assert_branch(url: &str, branch: &Branch, tier: &str, what: &str) {
    let Branch { blocks, ids, answer } = branch;
    let (found, usage) = ask(url, ids).await;
    assert_eq!(found, *answer, "{what}, {blocks} blocks from {tier}");
    assert_eq!(usage["cached_tokens"], blocks * BLOCK, "{what}: {usage}");
    let from = usage["cached_tokens_details"][tier].as_u64().expect("a number");
    assert!(from >= BLOCK as u64, "{what}, {blocks} blocks: {usage}");
}

async fn assert_nothing_wrong(url: &str, what: &str) {
    let metrics = Metrics::of(url).await;
    for bad in ["mismatches", "failures", "missing"] {
        let name = format!("dsv4:cache_{bad}_total");
        assert_eq!(metrics.sum(&name, &[]), 0.0, "{bad}, {what}");
    }
}

#[tokio::test]
async fn branches_at_every_boundary_are_right_from_device_and_disk() {
    let cold = Server::worker("null", "--disable-radix-cache");
    let tree = Tree::new(&cold, 8).await;
    for mode in ["null", "both"] {
        let dir = Folder::new();
        let warm = Server::worker(mode, &format!("--hicache-storage-dir {}", dir.0.display()));
        tree.grow(&warm.url).await;
        for branch in &tree.branches {
            assert_branch(&warm.url, branch, "device", mode).await;
        }
        written(&warm.url, "disk").await;
        for branch in &tree.branches {
            flush(&warm.url).await;
            assert_branch(&warm.url, branch, "disk", mode).await;
        }
        assert_nothing_wrong(&warm.url, mode).await;
        assert_all_given_back(&[&warm.url]).await;
    }
}

/// Before each branch come other conversations, so many that its blocks are evicted.
#[tokio::test]
async fn branches_at_every_boundary_are_right_from_host_memory() {
    let cold = Server::worker("null", "--disable-radix-cache");
    let tree = Tree::new(&cold, 5).await;
    let others: Vec<Vec<u32>> = (1..5)
        .map(|number| {
            let mut ids = prompt(2300)[..5 * BLOCK + 10].to_vec();
            ids[0] ^= number;
            ids
        })
        .collect();
    for mode in ["null", "both"] {
        let small = "--context-length 1536 --max-running-requests 2 --kv-memory-mib 7 \
                     --chunked-prefill-size 256 --hicache-size 0.2";
        let warm = Server::worker(mode, small);
        tree.grow(&warm.url).await;
        for branch in &tree.branches {
            for ids in &others {
                ask(&warm.url, ids).await;
            }
            assert_branch(&warm.url, branch, "host", mode).await;
        }
        assert_nothing_wrong(&warm.url, mode).await;
        assert_all_given_back(&[&warm.url]).await;
    }
}

#[tokio::test]
async fn branches_at_every_boundary_are_right_from_a_remote_store() {
    let Some(moto) = Moto::start() else { return };
    let cold = Server::worker("null", "--disable-radix-cache");
    let tree = Tree::new(&cold, 8).await;
    let variables = moto.variables();
    let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let flags = format!("--hicache-object-store s3://{BUCKET}/branches");
    let warm = Server::worker_with("null", &flags, &variables);
    tree.grow(&warm.url).await;
    written(&warm.url, "remote").await;
    for branch in &tree.branches {
        flush(&warm.url).await;
        assert_branch(&warm.url, branch, "remote", "null").await;
    }
    assert_nothing_wrong(&warm.url, "remote").await;
    assert_all_given_back(&[&warm.url]).await;
}

/// The decode worker has blocks alone and the prefill worker all; what one has not the other one
/// sends, so all but the tail of a prompt is computed once, wherever it lies.
#[tokio::test]
async fn branches_at_every_boundary_are_right_after_a_handoff() {
    let cold = Server::worker("null", "--disable-radix-cache");
    let tree = Tree::new(&cold, 8).await;
    for backend in ["shm", "tcp"] {
        let dir = Folder::new();
        let pair = Pair::start(backend, &format!("--hicache-storage-dir {}", dir.0.display()));
        healthy(&pair.decode.url).await;
        tree.grow(&pair.decode.url).await;
        written(&pair.prefill.url, "disk").await;
        written(&pair.decode.url, "disk").await;
        let computed = async || {
            let metrics = Metrics::of(&pair.prefill.url).await;
            metrics.sum("sglang:prompt_tokens_total", &[])
        };
        for (n, branch) in tree.branches.iter().enumerate() {
            let before = computed().await;
            // Each side finds it on its device, and on its disk, in turns.
            if n % 2 == 1 {
                flush(&pair.prefill.url).await;
            }
            if n % 3 == 1 {
                flush(&pair.decode.url).await;
            }
            let (found, _) = ask(&pair.decode.url, &branch.ids).await;
            assert_eq!(found, branch.answer, "{backend}, {} blocks", branch.blocks);
            assert_eq!(computed().await - before, TAIL as f64, "{backend}, {n}");
        }
        for url in [&pair.prefill.url, &pair.decode.url] {
            assert_nothing_wrong(url, backend).await;
            let disk = Metrics::of(url).await.sum("dsv4:cache_tokens_total", &["disk"]);
            assert!(disk >= 2.0 * BLOCK as f64, "{backend}: {disk} tokens from disk");
        }
        assert_all_given_back(&[&pair.prefill.url, &pair.decode.url]).await;
    }
}
