//! What the counters must say after all requests have ended.

use super::client::{Metrics, eventually};

/// Waits until nothing runs or waits and no page has an owner but the prefix tree.
pub(crate) async fn assert_all_given_back(urls: &[&str]) {
    for url in urls {
        eventually(&format!("{url} gives all pages back"), async || {
            let metrics = Metrics::of(url).await;
            let pages = |state| metrics.sum("dsv4:pages", &[state]);
            let busy = metrics.sum("sglang:num_running_reqs", &[])
                + metrics.sum("sglang:num_queue_reqs", &[])
                + metrics.sum("dsv4:prompts_lent", &[]);
            let astray = pages("state=\"quarantined\"") + pages("state=\"draining\"");
            let leaked = ["block", "window", "carry"].iter().any(|pool| {
                let pages =
                    |state| metrics.sum("dsv4:pages", &[state, &format!("pool=\"{pool}\"")]);
                pages("state=\"used\"") != pages("state=\"cached\"")
            });
            (busy + astray == 0.0 && !leaked).then_some(())
        })
        .await;
    }
}

/// Every page that was handed over was checked, and none was wrong.
pub(crate) async fn assert_all_pages_checked(prefill: &str, decode: &str) {
    let sender = Metrics::of(prefill).await;
    let receiver = Metrics::of(decode).await;
    let offered = sender.sum("dsv4:transfer_items_offered_total", &["prefill"]);
    let count = |name: &str| receiver.sum(&format!("dsv4:transfer_{name}_total"), &["decode"]);
    assert!(offered > 0.0);
    assert_eq!(count("items_received"), offered, "pages learned of");
    assert_eq!(count("items_checked"), offered, "pages checked");
    for name in ["mismatches", "stale_gets", "failed_gets", "group_retries", "attempts_failed"] {
        assert_eq!(count(name), 0.0, "{name}");
    }
}
