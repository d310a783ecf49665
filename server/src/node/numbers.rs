//! The numbers of a worker for `/metrics` and the page.

use super::{NodeEngine, WorkerHandle};
use crate::audit::How;
use crate::engine::MetricKind::{Counter, Gauge};
use crate::engine::{Metric, MetricKind, PoolView, TierView, WorkerView};
use crate::glue::pools::POOLS;
use crate::net::kv_events::EventNumbers;
use crate::net::otlp::SpanSender;
use crate::worker::cache::CacheNumbers;
use crate::worker::{PoolNumbers, Role, Snapshot};
use hicache::Part;
use hicache::tiers::{Tier, TierCounters, TierUse};
use kv_pool::{BLOCK_TOKENS, PoolKind};
use std::sync::Arc;

impl NodeEngine {
    /// Sends the journeys that end from now on to a collector.
    pub fn record(&self, sender: &Arc<SpanSender>) {
        for worker in &self.workers {
            let sender = Arc::clone(sender);
            worker.shared.journeys.listen(Box::new(move |view| sender.send_journey(view)));
        }
    }
}

/// A worker as the page shows it.
pub(super) fn view_of(worker: &WorkerHandle, snapshot: &Snapshot) -> WorkerView {
    let pool = |(kind, n): (PoolKind, PoolNumbers)| PoolView {
        name: pool_name(kind),
        used: n.used,
        cached: n.cached,
        quarantined: n.quarantined,
        total: n.total,
    };
    let peer = |(address, driver): &(String, usize)| {
        let transport = worker.drivers.get(*driver).map_or("", |(name, _)| *name);
        (address.clone(), "connected".to_owned(), transport.to_owned())
    };
    WorkerView {
        role: worker.role.name().to_owned(),
        queued: snapshot.queued,
        running: snapshot.running,
        pools: POOLS.into_iter().zip(snapshot.pools).map(pool).collect(),
        tiers: snapshot.cache.iter().flat_map(tiers_of).collect(),
        peers: snapshot.peers.iter().map(peer).collect(),
        requests: worker.shared.journeys.views(),
        beat_age: worker.shared.heartbeat.age(),
    }
}

fn tiers_of(cache: &CacheNumbers) -> impl Iterator<Item = TierView> {
    Tier::ALL.into_iter().enumerate().filter_map(|(n, tier)| {
        let used = cache.used[n]?;
        Some(TierView {
            name: tier.name().to_owned(),
            bytes: used.bytes,
            bytes_max: used.bytes_max,
            hits: cache.counters[n].hits,
            mismatches: cache.counters[n].mismatches,
        })
    })
}

fn pool_name(kind: PoolKind) -> String {
    format!("{kind:?}").to_lowercase()
}

/// Everything that `/metrics` says of a worker.
pub(super) fn metrics_of(worker: &WorkerHandle, n: &Snapshot) -> Vec<Metric> {
    let plain = requests(n).into_iter().chain(handoffs(n)).chain(prefixes(n));
    let mut all: Vec<Metric> =
        plain.map(|(name, kind, value, help)| of(worker, name, kind, value, help)).collect();
    page_metrics(worker, n, &mut all);
    let help = "Time since the worker's thread last went round its loop";
    let mut age = of(worker, "dsv4:heartbeat_age_seconds", Gauge, 0, help);
    age.value = worker.shared.heartbeat.age().as_secs_f64();
    all.push(age);
    all.extend(n.peers.iter().filter_map(|peer| peer_metric(worker, peer)));
    for (event, peer, kind, count) in n.faults.iter() {
        let help = "What went wrong in hand-offs and what followed, by peer, transport and kind";
        let mut m = of(worker, "dsv4:handoff_faults_total", Counter, count, help);
        for (name, value) in [
            ("event", event.name()),
            ("peer", &peer.address),
            ("transport", peer.transport),
            ("kind", kind),
        ] {
            m = labelled(m, name, value);
        }
        all.push(m);
    }
    for (how, value) in ["finished", "cancelled", "failed"].into_iter().zip(n.ended) {
        let help = "Requests that ended, by how";
        let m = of(worker, "dsv4:requests_ended_total", Counter, value, help);
        all.push(labelled(m, "how", how));
    }
    audit_metrics(worker, n, &mut all);
    if let Some(cache) = &n.cache {
        cache_metrics(worker, cache, &mut all);
    }
    if let Some(events) = n.events {
        for (name, kind, value, help) in event_numbers(events) {
            all.push(of(worker, name, kind, value, help));
        }
    }
    #[cfg(feature = "faults")]
    all.extend(injected(worker));
    for (transport, driver) in &worker.drivers {
        for counter in driver.counters().all() {
            let name = format!("dsv4:transfer_{}_total", counter.name);
            let m = of(worker, &name, Counter, counter.value, counter.help);
            all.push(labelled(m, "transport", transport));
        }
    }
    if worker.drivers.iter().any(|(name, _)| *name == "ucx") {
        for counter in worker.ucx.snapshot().all() {
            let name = format!("dsv4:ucx_{}_total", counter.name);
            all.push(of(worker, &name, Counter, counter.value, counter.help));
        }
    }
    all
}

/// That a prefill worker is connected, and how. One of those knows its peers by ports that change with each
/// connection, and says nothing of them here.
fn peer_metric(worker: &WorkerHandle, (address, driver): &(String, usize)) -> Option<Metric> {
    if worker.role != Role::Decode {
        return None;
    }
    let help = "1 for each prefill worker that is connected, with the transport that leads to it";
    let transport = worker.drivers.get(*driver).map_or("", |(name, _)| *name);
    let metric = of(worker, "dsv4:peer_connected", Gauge, 1, help);
    Some(labelled(labelled(metric, "peer", address), "transport", transport))
}

/// How often the fault has struck that is injected into this process.
#[cfg(feature = "faults")]
fn injected(worker: &WorkerHandle) -> Option<Metric> {
    let armed = crate::faults::armed()?;
    let help = "Times that the fault which is injected into this test build has struck";
    let m = of(worker, "dsv4:injected_faults_total", Counter, armed.struck(), help);
    Some(labelled(m, "fault", armed.injection.fault.name()))
}

/// Pages of each pool by what they are used for.
fn page_metrics(worker: &WorkerHandle, n: &Snapshot, all: &mut Vec<Metric>) {
    for (kind, pool) in POOLS.into_iter().zip(n.pools) {
        for (state, value) in [
            ("used", pool.used),
            ("cached", pool.cached),
            ("quarantined", pool.quarantined),
            ("draining", pool.draining),
            ("total", pool.total),
        ] {
            let m = of(
                worker,
                "dsv4:pages",
                Gauge,
                value,
                "Pages by pool and state; cached pages are used ones too",
            );
            all.push(labelled(labelled(m, "pool", &pool_name(kind)), "state", state));
        }
    }
}

/// What audits have looked at and found.
fn audit_metrics(worker: &WorkerHandle, n: &Snapshot, all: &mut Vec<Metric>) {
    let (name, help) = ("dsv4:audits_total", "Audits of pages that operators asked for");
    all.push(of(worker, name, Counter, n.audits.audits, help));
    let (name, help) = ("dsv4:audit_checked_total", "Pages and objects that audits looked at");
    all.push(of(worker, name, Counter, n.audits.checked, help));
    for (how, wrong) in How::ALL.into_iter().zip(n.audits.wrong) {
        let help =
            "Pages of a cache and layer that were found wrong in memory, by how they were found";
        let metric = of(worker, "dsv4:audit_mismatches_total", Counter, wrong, help);
        all.push(labelled(metric, "found_by", how.name()));
    }
}

/// What the tiers below the device hold and have done, tier by tier.
fn cache_metrics(worker: &WorkerHandle, cache: &CacheNumbers, all: &mut Vec<Metric>) {
    for (n, tier) in Tier::ALL.into_iter().enumerate() {
        let Some(used) = cache.used[n] else { continue };
        let mut add = |metric| all.push(labelled(metric, "tier", tier.name()));
        for (part, objects) in Part::ALL.into_iter().zip(used.objects) {
            let help = "Objects of the cache, by tier and part";
            let metric = of(worker, "dsv4:cache_objects", Gauge, objects, help);
            add(labelled(metric, "part", part.name()));
        }
        for (name, kind, value, help) in tier_numbers(cache, n, &used) {
            add(of(worker, name, kind, value, help));
        }
        if used.bytes_max > 0 {
            let help = "Most bytes of objects in a tier";
            add(of(worker, "dsv4:cache_bytes_max", Gauge, used.bytes_max, help));
        }
        if tier != Tier::Host {
            let help = "1 while a tier is left alone because it failed three times in a row";
            let is_paused = u64::from(cache.paused[n - 1]);
            add(of(worker, "dsv4:cache_paused", Gauge, is_paused, help));
        }
        if tier == Tier::Remote {
            for (name, value, help) in probe_numbers(&cache.counters[n]) {
                add(of(worker, name, Counter, value, help));
            }
        }
        let help = "Time that objects took on their way up from a tier";
        let mut climbing = of(worker, "dsv4:cache_climb_seconds_total", Counter, 0, help);
        climbing.value = cache.climbs[n].1 as f64 / 1e6;
        add(climbing);
    }
    if let Some(host) = cache.used[Tier::Host as usize] {
        let tokens = |blocks: u64| blocks * u64::from(BLOCK_TOKENS);
        let (name, help) = ("sglang:hicache_host_used_tokens", "Tokens of blocks in host memory");
        all.push(of(worker, name, Gauge, tokens(host.objects[0]), help));
        let (name, help) =
            ("sglang:hicache_host_total_tokens", "Tokens that host memory has room for");
        all.push(of(worker, name, Gauge, tokens(cache.host_blocks), help));
    }
    if cache.used[Tier::Host as usize].is_some() {
        for (part, pinned) in Part::ALL.into_iter().zip(cache.pinned) {
            let help = "Objects that requests pinned in host memory, by part";
            let metric = of(worker, "dsv4:cache_pinned_objects", Gauge, pinned, help);
            all.push(labelled(metric, "part", part.name()));
        }
        let refused = cache.counters[Tier::Host as usize].pins_refused;
        let (name, help) =
            ("dsv4:cache_pins_refused_total", "Objects not pinned: too many are already");
        all.push(of(worker, name, Counter, refused, help));
    }
    for (end, value) in ["complete", "miss", "late"].into_iter().zip(cache.fetches) {
        let help = "Prefixes fetched from below the device, by how that ended";
        let metric = of(worker, "dsv4:cache_fetches_total", Counter, value, help);
        all.push(labelled(metric, "end", end));
    }
    let (name, help) = ("dsv4:cache_saves_late_total", "Objects gone before they could be saved");
    all.push(of(worker, name, Counter, cache.saves_late, help));
}

fn probe_numbers(c: &TierCounters) -> [(&'static str, u64, &'static str); 3] {
    [
        ("dsv4:cache_probes_total", c.probes, "Objects looked for in a tier without being known"),
        ("dsv4:cache_probes_found_total", c.probes_found, "Objects looked for and found"),
        (
            "dsv4:cache_probes_dropped_total",
            c.probes_dropped,
            "Objects not looked for: too many at a time, or the tier was left alone",
        ),
    ]
}

fn tier_numbers(cache: &CacheNumbers, n: usize, used: &TierUse) -> [Plain; 14] {
    let c = &cache.counters[n];
    let counter = |name, value, help| (name, Counter, value, help);
    [
        ("dsv4:cache_bytes", Gauge, used.bytes, "Bytes in a tier"),
        counter("dsv4:cache_tokens_total", cache.tokens[n], "Prompt tokens that came from a tier"),
        counter("dsv4:cache_hits_total", c.hits, "Objects that climbed from a tier, verified"),
        counter("dsv4:cache_hit_bytes_total", c.hit_bytes, "Bytes that climbed from a tier"),
        counter("dsv4:cache_climbs_total", cache.climbs[n].0, "Objects tried to climb from a tier"),
        counter("dsv4:cache_stored_total", c.stored, "Objects put into a tier"),
        counter("dsv4:cache_stored_bytes_total", c.stored_bytes, "Bytes put into a tier"),
        counter("dsv4:cache_evicted_total", c.evicted, "Objects given up for room"),
        counter(
            "dsv4:cache_dropped_total",
            c.dropped,
            "Objects not put into a tier: no room or time",
        ),
        counter("dsv4:cache_mismatches_total", c.mismatches, "Objects that failed verification"),
        counter("dsv4:cache_missing_total", c.missing, "Objects that were not there any more"),
        counter(
            "dsv4:cache_failures_total",
            c.failures,
            "Reads, writes and removals that a tier could not do",
        ),
        counter("dsv4:cache_late_total", c.late, "Prefixes that came too late from a tier"),
        counter("dsv4:cache_pauses_total", c.pauses, "Times that a tier was left alone"),
    ]
}

fn event_numbers(n: EventNumbers) -> [Plain; 4] {
    [
        ("dsv4:kv_events_published_total", Counter, n.published, "Batches of KV events published"),
        (
            "dsv4:kv_events_dropped_total",
            Counter,
            n.dropped,
            "Batches of KV events that found no room to wait",
        ),
        (
            "dsv4:kv_events_missed_total",
            Counter,
            n.missed,
            "Batches of KV events that a slow subscriber did not get",
        ),
        ("dsv4:kv_events_subscribers", Gauge, n.subscribers, "Subscribers to KV events"),
    ]
}

fn of(
    worker: &WorkerHandle,
    name: &str,
    kind: MetricKind,
    value: u64,
    help: &'static str,
) -> Metric {
    let labels = vec![("role".to_owned(), worker.role.name().to_owned())];
    Metric { name: name.to_owned(), labels, value: value as f64, kind, help }
}

fn labelled(mut metric: Metric, name: &str, value: &str) -> Metric {
    metric.labels.push((name.to_owned(), value.to_owned()));
    metric
}

type Plain = (&'static str, MetricKind, u64, &'static str);

fn requests(n: &Snapshot) -> [Plain; 9] {
    let waits_again = "Requests that gave their pages to others and wait to go on";
    let retracted = "Times that a request gave its pages to others";
    [
        ("sglang:num_running_reqs", Gauge, n.running, "Requests that run"),
        ("sglang:num_queue_reqs", Gauge, n.queued, "Requests that wait"),
        ("sglang:num_retracted_reqs", Gauge, n.retracted, waits_again),
        ("sglang:num_retracted_requests_total", Counter, n.retractions, retracted),
        ("sglang:prompt_tokens_total", Counter, n.prefill_tokens, "Prompt tokens computed"),
        ("sglang:generation_tokens_total", Counter, n.generation_tokens, "Tokens generated"),
        ("dsv4:steps_total", Counter, n.steps, "Forward passes"),
        ("dsv4:queued_tokens", Gauge, n.queued_tokens, "Uncached prompt tokens that wait"),
        ("dsv4:requests_late_total", Counter, n.late, "Requests that had waited too long"),
    ]
}

fn handoffs(n: &Snapshot) -> [Plain; 7] {
    let failed = "Prompts computed here after a failed hand-off";
    let alone = "Prompts computed here because no prefill worker was connected";
    let short = "Prompts that a decode worker computed because little of them was uncached";
    let set_aside = "Page groups set aside after a failed check";
    [
        ("dsv4:handoffs_total", Counter, n.handoffs, "Prompts handed over"),
        ("dsv4:prompts_recomputed_total", Counter, n.recomputed, failed),
        ("dsv4:prompts_without_peer_total", Counter, n.without_peer, alone),
        ("dsv4:prompts_kept_local_total", Counter, n.kept_local, short),
        ("dsv4:page_groups_quarantined_total", Counter, n.quarantined_total, set_aside),
        ("dsv4:prompts_lent", Gauge, n.lent, "Prompts whose pages a peer may read"),
        ("dsv4:peers", Gauge, n.peers.len() as u64, "Connected peers"),
    ]
}

fn prefixes(n: &Snapshot) -> [Plain; 8] {
    let p = n.prefixes;
    let counter = |name, value, help| (name, Counter, value, help);
    [
        counter("dsv4:prefix_reused_tokens_total", n.reused_tokens, "Prompt tokens reused"),
        counter("dsv4:prefix_lookups_total", p.lookups, "Prompts looked up in the prefix tree"),
        counter("dsv4:prefix_hits_total", p.hits, "Prompts of which the prefix tree had a part"),
        counter("dsv4:prefix_blocks_taken_total", p.blocks_taken, "Blocks kept for later prompts"),
        counter("dsv4:prefix_blocks_evicted_total", p.blocks_evicted, "Kept blocks given up"),
        counter(
            "dsv4:prefix_boundaries_taken_total",
            p.boundaries_taken,
            "Places to go on from that were kept",
        ),
        counter(
            "dsv4:prefix_boundaries_evicted_total",
            p.boundaries_evicted,
            "Kept places to go on from that were given up, for room or for a later one",
        ),
        counter(
            "dsv4:prefix_inserts_refused_total",
            p.inserts_refused,
            "Prefixes that found no room in the tree",
        ),
    ]
}
