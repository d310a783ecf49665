//! Rank groups over real drivers: two decode ranks, three prefill ranks, one of which is lost in
//! the middle of a transfer.

use crate::it::processes::Process;
use pd_transfer::copy::read;
use pd_transfer::driver::{Driver, DriverConfig, DriverHandle};
use pd_transfer::endpoint::Upcall;
use pd_transfer::group::{
    GroupOutput, GroupStart, Rank, RankGroup, RankGroupConfig, RequestId, Source,
};
use pd_transfer::id::{PeerId, Time};
use pd_transfer::receiver::Start;
use pd_transfer::shm::{SharedRegion, Shm};
use pd_transfer::tcp::Tcp;
use pd_transfer::testing::conformance::PATIENCE;
use pd_transfer::testing::faulty::{Fault, Faulty};
use pd_transfer::testing::pages::{PageVerifier, Request, Trusting, page_bytes, targets};
use pd_transfer::testing::ranks::{RankRequest, RankServer};
use pd_transfer::transport::{RegionOwner, TransportFactory};
use pd_transfer::wire::{AttemptId, Fingerprint, Incarnation, RegionId, Role};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, channel};

const PAGES: Request = Request { pages: 200, page_bytes: 37_440 };
const REQUEST: RequestId = RequestId([5; 16]);
const SOURCES: u16 = 3;
/// The get of rank 0 that is damaged, which holds its attempt open until it is given fresh pages.
const HELD: u64 = 120;

static INCARNATIONS: AtomicU8 = AtomicU8::new(1);

fn config(role: Role, memory: &Arc<dyn RegionOwner>) -> DriverConfig {
    let n = INCARNATIONS.fetch_add(1, Ordering::Relaxed);
    let mut incarnation = [0xD; 16];
    incarnation[0] = n;
    let (incarnation, fingerprint) = (Incarnation(incarnation), Fingerprint([7; 16]));
    let mut config = DriverConfig::new(role, incarnation, fingerprint, String::from("test pages"));
    config.regions.push(Arc::clone(memory));
    config
}

/// A decode worker of several ranks, each with its own driver and memory.
struct Worker {
    group: RankGroup,
    ranks: Vec<(DriverHandle, Arc<dyn RegionOwner>)>,
    news: Receiver<(Rank, Upcall)>,
    /// Prefill ranks by address.
    sources: BTreeMap<String, Source>,
    /// Sources of each round, by rank.
    rounds: BTreeMap<u32, Vec<Source>>,
    verdicts: Vec<GroupOutput>,
    other: Vec<(Rank, Upcall)>,
}

impl Worker {
    fn new(factories: Vec<TransportFactory>, addresses: &[String]) -> Self {
        let (send, news) = channel();
        let mut ranks = Vec::new();
        for (rank, factory) in (0..).map(Rank).zip(factories) {
            let memory: Arc<dyn RegionOwner> = SharedRegion::new(8 << 20).unwrap();
            let send = send.clone();
            let sink = Arc::new(move |upcall| {
                // A test that is over does not listen any more.
                let _ = send.send((rank, upcall));
            });
            let handle =
                Driver::spawn(config(Role::Decode, &memory), factory, Arc::new(PageVerifier), sink)
                    .unwrap();
            ranks.push((handle, memory));
        }
        let source = |rank: u16| Source { group: 0, rank: Rank(rank) };
        let sources = addresses.iter().cloned().zip((0..).map(source)).collect();
        let group = RankGroup::new(RankGroupConfig::new(ranks.len() as u16, vec![SOURCES]));
        let (rounds, verdicts, other) = (BTreeMap::new(), Vec::new(), Vec::new());
        let mut worker = Self { group, ranks, news, sources, rounds, verdicts, other };
        for (handle, _) in &worker.ranks {
            addresses.iter().for_each(|address| handle.connect(address).unwrap());
        }
        let links = worker.ranks.len() * addresses.len();
        worker.until(|worker| {
            let up = |(_, upcall): &&(Rank, Upcall)| matches!(upcall, Upcall::PeerUp { .. });
            (worker.other.iter().filter(up).count() == links).then_some(())
        });
        worker
    }

    fn start(&mut self) {
        let ids = (0..self.ranks.len() as u8 * 3).map(|n| AttemptId([n + 1; 16])).collect();
        let bytes = u64::from(PAGES.pages) * u64::from(PAGES.page_bytes);
        self.group.start(Time(0), GroupStart { request: REQUEST, bytes, attempts: ids }).unwrap();
        self.act();
    }

    fn act(&mut self) {
        while let Some(output) = self.group.poll_output() {
            match output {
                GroupOutput::Start { rank, peer, source, attempt, key } => {
                    self.rounds.entry(key.round).or_default().push(source);
                    let ranks = self.ranks.len() as u16;
                    let asked = RankRequest { key, ranks, pages: PAGES };
                    let start = Start {
                        attempt,
                        peer,
                        request: asked.encode(),
                        have: 0,
                        plan_hash: asked.plan_hash(),
                        plan: targets(PAGES, RegionId(0), 0),
                    };
                    self.ranks[usize::from(rank.0)].0.start(start).unwrap();
                }
                GroupOutput::Cancel { rank, attempt } => {
                    self.ranks[usize::from(rank.0)].0.cancel(attempt).unwrap();
                }
                verdict => self.verdicts.push(verdict),
            }
        }
    }

    /// Takes news until `done` has what it wants.
    fn until<T>(&mut self, done: impl Fn(&Self) -> Option<T>) -> T {
        loop {
            if let Some(value) = done(self) {
                return value;
            }
            let Ok((rank, upcall)) = self.news.recv_timeout(PATIENCE) else {
                panic!("no news; {:?}, {:?}", self.verdicts, self.other);
            };
            let Some(upcall) = self.group.handle_upcall(Time(0), rank, upcall) else {
                self.act();
                continue;
            };
            if let Upcall::PeerUp { peer, address, .. } = &upcall {
                self.link_up(rank, *peer, address);
            }
            self.other.push((rank, upcall));
        }
    }

    fn link_up(&mut self, rank: Rank, peer: PeerId, address: &str) {
        self.group.link_up(Time(0), rank, self.sources[address], peer);
        self.act();
    }

    /// Rank 0 waits for fresh pages in the middle of its transfer; returns where it reads.
    fn held(&mut self) -> Source {
        self.until(|worker| {
            let is_fresh = |(rank, upcall): &&(Rank, Upcall)| {
                *rank == Rank(0) && matches!(upcall, Upcall::Fresh { .. })
            };
            worker.other.iter().find(is_fresh).map(|_| ())
        });
        self.rounds[&1][0]
    }

    /// The request completes in the second round, away from `lost`, with the right bytes in the
    /// memory of every rank.
    fn completes_elsewhere(&mut self, lost: Source) {
        self.until(|worker| {
            let is_verdict =
                |output: &&GroupOutput| !matches!(output, GroupOutput::RoundFailed { .. });
            worker.verdicts.iter().find(is_verdict).map(|_| ())
        });
        let [GroupOutput::RoundFailed { .. }, GroupOutput::Completed { record, .. }] =
            &self.verdicts[..]
        else {
            panic!("{:?}", self.verdicts)
        };
        assert_eq!((record.items, &record.payload[..]), (PAGES.pages, &b"first token"[..]));
        assert_eq!(self.rounds.len(), 2);
        assert!(!self.rounds[&2].contains(&lost), "{:?}", self.rounds);
        // Two ranks and at least two sources that are left.
        assert_ne!(self.rounds[&2][0], self.rounds[&2][1]);
        for (_, memory) in &self.ranks {
            for target in targets(PAGES, RegionId(0), 0) {
                let mut bytes = Vec::new();
                read(&**memory, &target.extents[0], &mut bytes).unwrap();
                let right = page_bytes(AttemptId(REQUEST.0), target.group, bytes.len());
                assert!(bytes == right, "page {}", target.group);
            }
        }
        assert_eq!(self.group.open_requests(), 0);
        (0..SOURCES).for_each(|rank| {
            assert_eq!(self.group.open_bytes(Source { group: 0, rank: Rank(rank) }), 0);
        });
    }
}

fn factories(make: fn() -> TransportFactory) -> Vec<TransportFactory> {
    let hold = |n, _: &_| (n == HELD).then_some(Fault::Zero);
    vec![Faulty::factory(make(), Box::new(hold)), make()]
}

/// Addresses of prefill ranks over shared memory, which a killed process leaves behind.
struct Sockets(Vec<String>);

impl Sockets {
    fn new(name: &str) -> Self {
        let path = |n| {
            let name = format!("pd-{name}-{}-{n}", std::process::id());
            format!("unix:{}", std::env::temp_dir().join(name).display())
        };
        Self((0..SOURCES).map(path).collect())
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        for address in &self.0 {
            // A process that ended in good order has removed its own.
            let _ = std::fs::remove_file(address.trim_start_matches("unix:"));
        }
    }
}

fn shm() -> TransportFactory {
    Shm::factory(1)
}

// PD-M4 PD-M6 PD-M7 PD-M17
fn survives_a_killed_rank(kind: &str, at: &[String], make: fn() -> TransportFactory) {
    let mut prefill: Vec<Process> =
        at.iter().map(|address| Process::of(&["rank", kind, address])).collect();
    let addresses: Vec<String> = prefill.iter().map(|rank| rank.address.clone()).collect();
    let mut decode = Worker::new(factories(make), &addresses);
    decode.start();
    let lost = decode.held();
    prefill[usize::from(lost.rank.0)].kill();
    decode.completes_elsewhere(lost);
}

#[test]
fn a_killed_prefill_rank_is_replaced_over_tcp() {
    let at: Vec<String> = (0..SOURCES).map(|_| String::from("127.0.0.1:0")).collect();
    survives_a_killed_rank("tcp", &at, Tcp::factory);
}

#[test]
fn a_killed_prefill_rank_is_replaced_over_shared_memory() {
    let sockets = Sockets::new("ranks");
    survives_a_killed_rank("shm", &sockets.0, shm);
}

/// The prefill ranks share one process and one fan-out, as one worker does.
// PD-M10 PD-M12
fn computes_once_per_round(at: &[String], make: fn() -> TransportFactory) {
    let memory = || SharedRegion::new(32 << 20).unwrap() as Arc<dyn RegionOwner>;
    let memories: Vec<Arc<dyn RegionOwner>> = at.iter().map(|_| memory()).collect();
    let server = RankServer::new(memories.clone());
    let mut handles = Vec::new();
    let (send, released) = channel();
    let (ask, requested) = channel();
    for ((rank, memory), address) in (0..).map(Rank).zip(&memories).zip(at) {
        let mut config = config(Role::Prefill, memory);
        config.listen = Some(address.clone());
        let (send, ask) = (send.clone(), ask.clone());
        // A test that is over does not listen any more.
        let next = Arc::new(move |upcall| match upcall {
            Upcall::Release { attempt, .. } => {
                let _ = send.send(attempt);
            }
            Upcall::Requested { attempt, .. } => {
                let _ = ask.send(attempt);
            }
            _ => {}
        });
        let sink = server.sink(rank, next);
        let handle = Driver::spawn(config, make(), Arc::new(Trusting), sink).unwrap();
        server.attach(rank, handle.clone());
        handles.push(handle);
    }
    let addresses: Vec<String> =
        handles.iter().map(|handle| handle.listen_address().unwrap().to_owned()).collect();
    let mut decode = Worker::new(factories(make), &addresses);
    decode.start();
    let lost = decode.held();
    (0..2).for_each(|_| {
        requested.recv_timeout(PATIENCE).unwrap();
    });
    assert_eq!((server.counters().computed, server.counters().joined), (1, 1));
    assert_eq!(server.pinned(), 1, "rank 0 has not ended");
    handles[usize::from(lost.rank.0)].shutdown();
    decode.completes_elsewhere(lost);
    // Two attempts in each of two rounds.
    (0..4).for_each(|_| {
        released.recv_timeout(PATIENCE).unwrap();
    });
    let counters = server.counters();
    assert_eq!((counters.computed, counters.joined, counters.released), (2, 2, 2));
    assert_eq!((server.pinned(), counters.refused, counters.dropped_late), (0, 0, 0));
    handles.iter().for_each(DriverHandle::shutdown);
}

#[test]
fn ranks_of_one_worker_compute_once_per_round_over_tcp() {
    let at: Vec<String> = (0..SOURCES).map(|_| String::from("127.0.0.1:0")).collect();
    computes_once_per_round(&at, Tcp::factory);
}

#[test]
fn ranks_of_one_worker_compute_once_per_round_over_shared_memory() {
    let sockets = Sockets::new("one-worker");
    computes_once_per_round(&sockets.0, shm);
}
