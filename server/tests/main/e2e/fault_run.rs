//! Real processes under faults: a seeded storm of kills, stops, freezes and cut sockets; a prefill
//! worker that is frozen in mid-transfer; clients that hang up. Long in the bench `faults`, short
//! as a test.

#[path = "fault_run/aborts.rs"]
mod aborts;
#[path = "fault_run/freeze.rs"]
mod freeze;
#[path = "fault_run/limits.rs"]
pub(crate) mod limits;
#[path = "fault_run/process.rs"]
mod process;
#[path = "fault_run/proxy.rs"]
mod proxy;
#[path = "fault_run/storm.rs"]
mod storm;

use super::client::{Metrics, complete, essence, get, greedy, post};
use super::cluster::{PATIENCE, Server};
use super::prompts::prompt;
use serde_json::Value;
use std::fmt;
use std::time::{Duration, Instant};

/// How much is run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Requests of the storm.
    pub(crate) requests: usize,
    /// Different prompts of the storm.
    pub(crate) prompts: usize,
    /// Requests whose client hangs up.
    pub(crate) aborts: usize,
    /// Decides on the faults, their order and their places, and on the prompts.
    pub(crate) seed: u64,
    /// `shm`, `tcp` or `ucx`.
    pub(crate) transport: String,
    /// Requests at once.
    pub(crate) at_once: usize,
    /// How long a prefill worker is frozen in mid-transfer.
    pub(crate) freeze: Duration,
}

/// Flags of every worker: chunks so short that even a short prompt is handed over in parts, and
/// little memory, so that kept prefixes are given up all the time.
const FLAGS: &str = "--kv-memory-mib 64 --context-length 4096 --chunked-prefill-size 128 \
                     --max-running-requests 16 --threads 1 --drain-timeout 5";
/// Longest wait for the pages to come back; whatever is owned then counts as leaked.
const SETTLED_MAX: Duration = Duration::from_secs(60);
/// Most that a process may still grow over the second half of the aborts.
pub(crate) const GROWTH_MAX_KIB: f64 = 1024.0;

/// A number of the run and what it must be.
#[derive(Clone, Debug)]
pub(crate) struct Figure {
    /// Without the prefix `faults.`.
    pub(crate) name: &'static str,
    /// The number.
    pub(crate) value: f64,
    /// Its unit.
    pub(crate) unit: &'static str,
    /// What it must be, if it is a bar.
    pub(crate) bar: Bar,
}

/// What a figure must be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Bar {
    /// Whatever it is.
    None,
    /// At most this.
    AtMost(f64),
    /// At least this.
    AtLeast(f64),
}

impl Bar {
    fn holds(self, value: f64) -> bool {
        match self {
            Self::None => true,
            Self::AtMost(most) => value <= most,
            Self::AtLeast(least) => value >= least,
        }
    }
}

impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("-"),
            Self::AtMost(most) => write!(f, "at most {most}"),
            Self::AtLeast(least) => write!(f, "at least {least}"),
        }
    }
}

impl Figure {
    /// A number without a bar.
    fn plain(name: &'static str, value: f64, unit: &'static str) -> Self {
        Self { name, value, unit, bar: Bar::None }
    }

    /// A number that must not be larger.
    fn at_most(name: &'static str, value: f64, unit: &'static str, most: f64) -> Self {
        Self { name, value, unit, bar: Bar::AtMost(most) }
    }

    /// A number that must not be smaller.
    fn at_least(name: &'static str, value: f64, unit: &'static str, least: f64) -> Self {
        Self { name, value, unit, bar: Bar::AtLeast(least) }
    }

    /// Whether it is what it must be.
    pub(crate) fn is_met(&self) -> bool {
        self.bar.holds(self.value)
    }
}

/// Runs everything.
pub(crate) async fn run(plan: &Plan) -> Vec<Figure> {
    let known = Known::ask(plan.prompts, plan.seed).await;
    let mut figures = storm::run(plan, &known).await;
    figures.extend(freeze::run(plan, &known).await);
    figures.extend(aborts::run(plan, &known).await);
    figures
}

/// SplitMix64: the same seed gives the same faults.
#[derive(Clone, Debug)]
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// Most tokens of an answer.
const OUTPUT: u32 = 6;
/// Tokens of the prompts that are in transfer when a worker is frozen.
const LONG: usize = 3000;

/// Greedy prompts with the answers of a worker that no fault reaches and that hands nothing over.
#[derive(Clone, Debug)]
struct Known {
    short: Vec<(Vec<u32>, Value)>,
    long: Vec<(Vec<u32>, Value)>,
}

impl Known {
    async fn ask(prompts: usize, seed: u64) -> Self {
        let oracle = Server::worker("null", &format!("{FLAGS} --disable-radix-cache"));
        let mut rng = Rng(seed);
        let (mut short, mut long) = (Vec::new(), Vec::new());
        for n in 0..prompts {
            // Up to two blocks and a bit, so that there are whole blocks, tails and windows.
            let ids = prompt(20 + rng.below(if n % 4 == 0 { 560 } else { 200 }) as usize);
            let answer = complete(&oracle.url, &ids, OUTPUT).await;
            short.push((ids, answer));
        }
        for n in 0..4 {
            let ids = prompt(LONG - 7 * n);
            let answer = complete(&oracle.url, &ids, OUTPUT).await;
            long.push((ids, answer));
        }
        Self { short, long }
    }
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    /// With the oracle's answer, token by token, log probabilities included.
    Right,
    /// With another one.
    Wrong,
    /// Loudly: an error with its status, or a connection that broke.
    Failed(String),
    /// Not at all.
    Hangs,
}

async fn ask(url: &str, ids: &[u32], answer: &Value) -> End {
    let url = format!("{url}/v1/completions");
    match post(&url, &greedy(ids, OUTPUT)).await {
        Ok(reply) if reply.status == 200 => {
            let found = essence(&reply.json());
            if found == *answer { End::Right } else { End::Wrong }
        }
        Ok(reply) => End::Failed(format!("status {}", reply.status)),
        Err(super::client::Broken::Connection(error)) => End::Failed(error),
        Err(super::client::Broken::Hangs) => End::Hangs,
    }
}

/// Waits until the process takes requests again.
async fn is_back(url: &str) {
    let deadline = Instant::now() + PATIENCE;
    let url = format!("{url}/health");
    while !get(&url).await.is_ok_and(|reply| reply.status == 200) {
        assert!(Instant::now() < deadline, "not back in time: {url}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Pages that are not free and that no kept prefix explains, set aside and lent ones included, and
/// requests that still run: all of it must be 0 when nobody asks.
async fn owned(url: &str) -> f64 {
    let metrics = Metrics::of(url).await;
    let pages = |state: &str| metrics.sum("dsv4:pages", &[&format!("state=\"{state}\"")]);
    (pages("used") - pages("cached")).abs()
        + pages("quarantined")
        + pages("draining")
        + metrics.sum("dsv4:prompts_lent", &[])
        + metrics.sum("sglang:num_running_reqs", &[])
        + metrics.sum("sglang:num_queue_reqs", &[])
}

/// What is owned once nothing comes back any more.
async fn owned_at_rest(url: &str) -> f64 {
    let deadline = Instant::now() + SETTLED_MAX;
    loop {
        let owned = owned(url).await;
        if owned == 0.0 || Instant::now() > deadline {
            return owned;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
