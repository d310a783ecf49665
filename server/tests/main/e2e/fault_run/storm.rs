//! The storm: requests one after another while workers are killed, stopped, frozen and cut off.

use super::super::client::{Metrics, eventually, healthy};
use super::super::cluster::{Server, note};
use super::proxy::Proxy;
use super::{End, FLAGS, Figure, Known, Plan, Rng, ask, is_back, owned_at_rest};
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::task::{JoinHandle, block_in_place};

/// Requests between two faults in a long run, on average.
const GAP: u64 = 20;
/// The same in a short one.
const SHORT_GAP: u64 = 4;
/// Requests of a run that is no short one.
const LONG_RUN: usize = 1000;

/// What happened to the workers.
#[derive(Debug, Default)]
struct Faults {
    kills: usize,
    stops: usize,
    freezes: usize,
    restarts: usize,
    cuts: usize,
    /// Prompts handed over and reads that the check refused, over all lives of the decode worker.
    handoffs: f64,
    refused: f64,
}

/// Two prefill workers and the decode worker that clients talk to.
struct Cluster {
    prefills: [Server; 2],
    decode: Server,
    /// In front of the prefill workers' bootstrap ports.
    proxies: Vec<Proxy>,
    faults: Faults,
}

impl Cluster {
    fn start(transport: &str) -> Self {
        let flags = format!("{FLAGS} --disaggregation-transfer-backend {transport}");
        let prefills = [0, 1].map(|_| Server::worker("prefill", &flags));
        let bootstrap = |server: &Server| server.bootstrap.clone().expect("a prefill worker");
        let mut addresses: Vec<String> = prefills.iter().map(bootstrap).collect();
        let mut proxies = Vec::new();
        if transport == "tcp" {
            proxies = addresses.iter().map(|address| Proxy::start(address)).collect();
            addresses = proxies.iter().map(|proxy| proxy.address.clone()).collect();
        }
        let peers: String =
            addresses.iter().map(|a| format!("--disaggregation-bootstrap {a} ")).collect();
        let mut decode = Server::worker("decode", &format!("{peers}{flags}"));
        // Where a frame is damaged that says who the peer is.
        decode.process.expect_error("hand-off refused");
        Self { prefills, decode, proxies, faults: Faults::default() }
    }

    /// Keeps the numbers of the decode worker before they are lost.
    async fn note_numbers(&mut self) {
        let metrics = Metrics::of(&self.decode.url).await;
        self.faults.handoffs += metrics.sum("dsv4:handoffs_total", &["decode"]);
        for name in ["mismatches", "stale_gets"] {
            self.faults.refused += metrics.sum(&format!("dsv4:transfer_{name}_total"), &[]);
        }
    }

    /// Ends a worker, roughly or in good order, and starts it again on its ports.
    async fn replace(&mut self, which: u64, is_rough: bool) {
        if which == 2 {
            self.note_numbers().await;
        }
        let server = match which {
            2 => &mut self.decode,
            n => &mut self.prefills[n as usize],
        };
        block_in_place(|| {
            if is_rough {
                server.process.kill();
            } else {
                server.process.terminate();
                let status = server.process.wait_exit();
                assert!(status.success(), "a stop in good order ends with {status}");
            }
            server.restart();
        });
        if is_rough {
            self.faults.kills += 1;
        } else {
            self.faults.stops += 1;
        }
        self.faults.restarts += 1;
    }

    /// One fault, chosen by the seed; the first two kill either side, whatever the seed says.
    async fn fault(&mut self, number: usize, rng: &mut Rng) {
        let (which, what) = match number {
            0 => (rng.below(2), 0),
            1 => (2, 0),
            _ => (rng.below(3), rng.below(8)),
        };
        match what {
            0..=2 => self.replace(which, true).await,
            3 => self.replace(which, false).await,
            4 | 5 => {
                let server = match which {
                    2 => &self.decode,
                    n => &self.prefills[n as usize],
                };
                server.process.signal(Signal::STOP);
                // For how long is part of the fault; nothing waits for it.
                tokio::time::sleep(Duration::from_millis(50 + rng.below(1500))).await;
                server.process.signal(Signal::CONT);
                self.faults.freezes += 1;
            }
            n => match self.proxies.get(which as usize % 2) {
                Some(proxy) if n == 6 => self.faults.cuts += proxy.cut(),
                Some(proxy) => {
                    // Messages, then mostly pages.
                    let bytes = [1 << 10, 8 << 10, 32 << 10][rng.below(3) as usize];
                    proxy.flip(1 + rng.below(3), bytes);
                }
                None => self.replace(which % 2, true).await,
            },
        }
    }
}

/// The requests of all clients.
struct Work {
    url: String,
    known: Vec<(Vec<u32>, serde_json::Value)>,
    requests: usize,
    seed: u64,
    next: AtomicUsize,
    ended: AtomicUsize,
}

/// How requests ended.
#[derive(Debug, Default)]
struct Ends {
    right: usize,
    wrong: usize,
    hung: usize,
    failed: BTreeMap<String, usize>,
}

impl Work {
    /// One client: asks, and after a failure waits until somebody is there again.
    async fn client(self: Arc<Self>) -> Ends {
        let mut ends = Ends::default();
        loop {
            let number = self.next.fetch_add(1, Ordering::AcqRel);
            if number >= self.requests {
                return ends;
            }
            let mut rng = Rng(self.seed ^ ((number as u64) << 20));
            let (ids, answer) = &self.known[rng.below(self.known.len() as u64) as usize];
            match ask(&self.url, ids, answer).await {
                End::Right => ends.right += 1,
                End::Wrong => {
                    note(&format!("request {number}: wrong tokens"));
                    ends.wrong += 1;
                }
                End::Hangs => {
                    note(&format!("request {number}: no end"));
                    ends.hung += 1;
                }
                End::Failed(why) => {
                    *ends.failed.entry(why).or_default() += 1;
                    is_back(&self.url).await;
                }
            }
            self.ended.fetch_add(1, Ordering::AcqRel);
        }
    }
}

async fn settle(clients: Vec<JoinHandle<Ends>>) -> Ends {
    let mut all = Ends::default();
    for client in clients {
        let ends = client.await.expect("a client does not panic");
        all.right += ends.right;
        all.wrong += ends.wrong;
        all.hung += ends.hung;
        for (why, count) in ends.failed {
            *all.failed.entry(why).or_default() += count;
        }
    }
    all
}

/// Runs the requests of the plan under faults.
pub(super) async fn run(plan: &Plan, known: &Known) -> Vec<Figure> {
    let start = Instant::now();
    let mut cluster = Cluster::start(&plan.transport);
    healthy(&cluster.decode.url).await;
    let work = Arc::new(Work {
        url: cluster.decode.url.clone(),
        known: known.short.clone(),
        requests: plan.requests,
        seed: plan.seed,
        next: AtomicUsize::new(0),
        ended: AtomicUsize::new(0),
    });
    let clients: Vec<_> =
        (0..plan.at_once).map(|_| tokio::spawn(Arc::clone(&work).client())).collect();
    let mut rng = Rng(plan.seed);
    let is_long = plan.requests >= LONG_RUN;
    let gap = if is_long { GAP } else { SHORT_GAP };
    let (mut due, mut faults) = (1 + rng.below(gap) as usize, 0);
    while due < plan.requests {
        eventually("requests end", async || {
            (work.ended.load(Ordering::Acquire) >= due || clients.iter().all(|c| c.is_finished()))
                .then_some(())
        })
        .await;
        cluster.fault(faults, &mut rng).await;
        faults += 1;
        due += 1 + rng.below(2 * gap) as usize;
        if faults % 10 == 0 {
            note(&format!("{faults} faults, {due} requests, {:?}", start.elapsed()));
        }
    }
    let ends = settle(clients).await;
    cluster.note_numbers().await;
    let mut owned = owned_at_rest(&cluster.decode.url).await;
    for prefill in &cluster.prefills {
        owned += owned_at_rest(&prefill.url).await;
    }
    for (why, count) in &ends.failed {
        note(&format!("{count} requests ended with: {why}"));
    }
    let flipped: u64 = cluster.proxies.iter().map(Proxy::flipped).sum();
    let Faults { kills, stops, freezes, restarts, cuts, handoffs, refused } = cluster.faults;
    let failed: usize = ends.failed.values().sum();
    let least = plan.requests as f64;
    let handoffs_min = if is_long { least / 10.0 } else { 1.0 };
    vec![
        Figure::at_least("requests", (ends.right + failed) as f64, "requests", least),
        Figure::at_most("wrong", ends.wrong as f64, "requests", 0.0),
        Figure::at_most("hung", ends.hung as f64, "requests", 0.0),
        Figure::at_least("right", ends.right as f64, "requests", least / 4.0),
        Figure::plain("failed_loudly", failed as f64, "requests"),
        Figure::at_least("handoffs", handoffs, "prompts", handoffs_min),
        Figure::plain("refused_reads", refused, "pages"),
        Figure::at_least("kills", kills as f64, "processes", 1.0),
        Figure::plain("stops", stops as f64, "processes"),
        Figure::plain("freezes", freezes as f64, "processes"),
        Figure::at_least("restarts", restarts as f64, "processes", 1.0),
        Figure::plain("cut_sockets", cuts as f64, "connections"),
        Figure::plain("flipped_chunks", flipped as f64, "chunks"),
        Figure::at_most("storm_pages_owned", owned, "pages", 0.0),
        Figure::plain("storm_seconds", start.elapsed().as_secs_f64(), "s"),
    ]
}
