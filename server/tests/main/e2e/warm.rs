//! What tests of prefixes share: requests that say what was cached, conversations, stores at rest.

use super::client::{Metrics, essence, eventually, greedy, post};
use super::prompts::prompt;
use serde_json::Value;

/// Tokens of an answer.
pub(crate) const OUTPUT: u32 = 8;

/// Answer and cached tokens.
pub(crate) async fn ask(url: &str, ids: &[u32]) -> (Value, u64) {
    let reply = post(&format!("{url}/v1/completions"), &greedy(ids, OUTPUT)).await;
    let answer = reply.expect("an answer").ok();
    let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    (essence(&answer), cached.as_u64().expect("cached tokens are counted"))
}

/// A prompt that shares no block with those of another `talk`.
pub(crate) fn talk(number: u32, tokens: usize) -> Vec<u32> {
    let mut ids = prompt(2100)[..tokens].to_vec();
    ids[0] ^= number;
    ids
}

/// Waits until a store has as many objects as the host tier was given.
pub(crate) async fn written(url: &str, tier: &str) {
    eventually("what is saved is written", async || {
        let metrics = Metrics::of(url).await;
        let stored = |tier: &str| metrics.sum("dsv4:cache_stored_total", &[tier]);
        (stored(tier) > 0.0 && stored(tier) >= stored("host")).then_some(())
    })
    .await;
}
