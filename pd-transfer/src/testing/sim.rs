//! A world of prefill and decode nodes in one thread, with virtual time and every fault we know:
//! delay, loss, duplication, reordering, partition, cuts, crashes, torn and late reads, damaged
//! pages, pages rewritten under the reader, computations that hang, cancellation. The same seed gives the same run.
//!
//! The real endpoints run unchanged; the world plays transport, memory and upper layers, and
//! asserts on the way: no write into a page that its attempt does not own, every attempt ends
//! once, every request is released once, nothing is held once all is quiet.

use super::Rng;
use super::pages::tag;
use super::sim_nodes::{Flight, Memory, Node, PAGE, PAGES};
use crate::counters::Counters;
use crate::endpoint::{Action, Endpoint, EndpointConfig, Upcall};
use crate::get::GetOutcome;
use crate::id::{OpId, PeerId, Time};
use crate::link::{LinkConfig, Side};
use crate::receiver::{ReceiverConfig, RetargetError, Verify};
use crate::sender::SenderConfig;
use crate::wire::{
    AttemptId, Fingerprint, Hello, Incarnation, Limits, MAX_MESSAGE_BYTES, PROTO_VERSION,
    RegionDesc, RegionId, Role, code,
};
use std::collections::{BTreeMap, BTreeSet};

/// Whether landed pages are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// By their tags, as in production.
    Tags,
    /// Not at all: the canary that shows what the check is worth.
    Nothing,
}

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Report {
    /// Attempts that completed.
    pub completed: usize,
    /// Attempts that failed.
    pub failed: usize,
    /// Completed attempts with wrong bytes: attempt and pages.
    pub wrong: Vec<(AttemptId, Vec<usize>)>,
    /// Totals of all nodes, crashed ones included.
    pub counters: Counters,
}

const PREFILL: usize = 2;
const DECODE: usize = 2;
const FAULTS_UNTIL: Time = Time(20_000_000);
const QUIET_BY: Time = Time(80_000_000);

/// How likely each fault is, per mille of its occasions; a random subset is off.
#[derive(Clone, Debug)]
struct Faults {
    delay_us: u64,
    loss: u64,
    duplicate: u64,
    damage: u64,
    cancel: u64,
    cut: u64,
    partition: u64,
    crash: u64,
    reuse: u64,
    hang: u64,
}

impl Faults {
    fn swarm(rng: &mut Rng) -> Self {
        let mut some = |max: u64| if rng.chance(500) { 1 + rng.below(max) } else { 0 };
        Self {
            delay_us: 200 + some(200_000),
            loss: some(150),
            duplicate: some(200),
            damage: some(60),
            cancel: some(150),
            cut: some(60),
            partition: some(60),
            crash: some(20),
            reuse: some(200),
            hang: some(60),
        }
    }

    /// Every fault, as likely as [`Self::swarm`] makes it on average where it is on.
    const fn every() -> Self {
        Self {
            delay_us: 100_000,
            loss: 75,
            duplicate: 100,
            damage: 30,
            cancel: 75,
            cut: 30,
            partition: 30,
            crash: 10,
            reuse: 100,
            hang: 30,
        }
    }

    const fn none() -> Self {
        Self {
            delay_us: 500,
            loss: 0,
            duplicate: 0,
            damage: 0,
            cancel: 0,
            cut: 0,
            partition: 0,
            crash: 0,
            reuse: 0,
            hang: 0,
        }
    }
}

#[derive(Clone, Debug)]
enum Event {
    /// Something may go wrong, or a new attempt begin.
    Tick,
    Deliver {
        link: usize,
        to: usize,
        bytes: Vec<u8>,
    },
    /// The first or the second half of a get is read.
    Read {
        node: usize,
        epoch: u64,
        op: u64,
        half: usize,
    },
    Verified {
        node: usize,
        epoch: u64,
        op: u64,
    },
    Lost {
        link: usize,
        node: usize,
        epoch: u64,
    },
    Connect {
        decode: usize,
        prefill: usize,
    },
    Compute {
        node: usize,
        epoch: u64,
        attempt: AttemptId,
    },
    Heal {
        link: usize,
    },
}

#[derive(Clone, Debug)]
struct SimLink {
    /// Decode node, prefill node.
    nodes: [usize; 2],
    epochs: [u64; 2],
    is_open: bool,
    /// Which ends know that it is not.
    is_told: [bool; 2],
    is_partitioned: bool,
}

struct World {
    rng: Rng,
    faults: Faults,
    check: Check,
    now: Time,
    order: u64,
    queue: BTreeMap<(Time, u64), Event>,
    /// Decode nodes first.
    nodes: Vec<Node>,
    links: Vec<SimLink>,
    open_requests: BTreeSet<(usize, AttemptId)>,
    report: Report,
}

/// Runs the world of `seed` with a random subset of the faults.
///
/// # Panics
/// A promise was broken; the message says which.
#[must_use]
pub fn run(seed: u64, check: Check) -> Report {
    let mut rng = Rng::new(seed);
    let faults = Faults::swarm(&mut rng);
    simulate(rng, faults, check)
}

/// Runs the world of `seed` with every fault on.
///
/// # Panics
/// A promise was broken; the message says which.
#[must_use]
pub fn storm(seed: u64, check: Check) -> Report {
    simulate(Rng::new(seed), Faults::every(), check)
}

fn simulate(rng: Rng, faults: Faults, check: Check) -> Report {
    let mut world = World {
        rng,
        faults,
        check,
        now: Time(0),
        order: 0,
        queue: BTreeMap::new(),
        nodes: Vec::new(),
        links: Vec::new(),
        open_requests: BTreeSet::new(),
        report: Report {
            completed: 0,
            failed: 0,
            wrong: Vec::new(),
            counters: Counters::default(),
        },
    };
    for node in 0..DECODE + PREFILL {
        let endpoint = world.endpoint(node);
        world.nodes.push(Node::new(endpoint, 0, node as u8));
    }
    for decode in 0..DECODE {
        for prefill in DECODE..DECODE + PREFILL {
            world.later(0, Event::Connect { decode, prefill });
        }
    }
    world.later(1000, Event::Tick);
    world.run();
    world.finish()
}

/// The link's name at one of its ends.
const fn peer_at(link: usize, end: usize) -> PeerId {
    PeerId(link as u64 * 2 + end as u64)
}

impl World {
    fn endpoint(&mut self, node: usize) -> Endpoint {
        let role = if node < DECODE { Role::Decode } else { Role::Prefill };
        let region = |region, bytes: usize| RegionDesc { region, bytes: bytes as u64 };
        let hello = Hello {
            proto: PROTO_VERSION,
            incarnation: Incarnation(self.rng.id()),
            fingerprint: Fingerprint([1; 16]),
            layout: String::from("64-byte pages"),
            role,
            limits: Limits {
                max_prompt_tokens: 1,
                max_items: PAGES as u32,
                max_message_bytes: MAX_MESSAGE_BYTES as u32,
            },
            regions: vec![region(RegionId(0), PAGES * PAGE), region(RegionId(1), PAGES * 8)],
            transport: String::from("sim"),
        };
        Endpoint::new(EndpointConfig {
            hello,
            link: LinkConfig {
                handshake_us: 2_000_000,
                hello_resend_us: 300_000,
                ping_after_us: 500_000,
                suspect_after_us: 2_500_000,
            },
            sender: SenderConfig { attempts_max: 6, ..SenderConfig::default() },
            receiver: ReceiverConfig {
                attempts_max: 8,
                in_flight_max: 5,
                resend_us: 400_000,
                stall_us: 6_000_000,
                ..ReceiverConfig::default()
            },
            peers_max: 16,
        })
    }

    fn later(&mut self, delay: u64, event: Event) {
        self.order += 1;
        self.queue.insert((self.now.after(delay), self.order), event);
    }

    fn delay(&mut self) -> u64 {
        10 + self.rng.below(self.faults.delay_us)
    }

    fn run(&mut self) {
        loop {
            let due = self.nodes.iter().filter_map(|node| node.endpoint.poll_timeout()).min();
            let next = self.queue.keys().next().map(|(at, _)| *at);
            let Some(at) = [due, next].into_iter().flatten().min() else { return };
            if at >= QUIET_BY {
                return;
            }
            self.now = self.now.max(at);
            if next == Some(at) {
                if let Some((_, event)) = self.queue.pop_first() {
                    self.on_event(event);
                }
            } else {
                for node in 0..self.nodes.len() {
                    self.nodes[node].endpoint.handle_timeout(self.now);
                }
            }
            for node in 0..self.nodes.len() {
                self.act(node);
            }
        }
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Tick => self.on_tick(),
            Event::Deliver { link, to, bytes } => {
                let SimLink { nodes, epochs, is_open, is_partitioned, .. } = self.links[link];
                if is_open && !is_partitioned && self.nodes[nodes[to]].epoch == epochs[to] {
                    let peer = peer_at(link, to);
                    self.nodes[nodes[to]].endpoint.handle_bytes(self.now, peer, &bytes);
                }
            }
            Event::Read { node, epoch, op, half } => self.on_read(node, epoch, op, half),
            Event::Verified { node, epoch, op } => {
                if self.nodes[node].epoch == epoch
                    && let Some(verify) = self.nodes[node].verifying.remove(&op)
                {
                    let ok = is_right(self.check, &self.nodes[node].memory, &verify);
                    self.nodes[node].endpoint.handle_verified(self.now, OpId(op), ok);
                }
            }
            Event::Lost { link, node, epoch } => self.on_lost(link, node, epoch),
            Event::Connect { decode, prefill } => self.on_connect(decode, prefill),
            Event::Compute { node, epoch, attempt } => self.on_compute(node, epoch, attempt),
            Event::Heal { link } => self.links[link].is_partitioned = false,
        }
    }

    fn on_tick(&mut self) {
        if self.now >= FAULTS_UNTIL {
            self.faults = Faults::none();
            for link in &mut self.links {
                link.is_partitioned = false;
            }
            return;
        }
        let pause = 20_000 + self.rng.below(80_000);
        self.later(pause, Event::Tick);
        self.start_one();
        let link = self.rng.below(self.links.len().max(1) as u64) as usize;
        if link < self.links.len() {
            if self.rng.chance(self.faults.cut) {
                self.close(link);
            }
            if self.rng.chance(self.faults.partition) {
                self.links[link].is_partitioned = true;
                let heal = self.rng.below(5_000_000);
                self.later(heal, Event::Heal { link });
            }
        }
        let decode = self.rng.below(DECODE as u64) as usize;
        if self.rng.chance(self.faults.cancel) {
            let runs: Vec<AttemptId> = self.nodes[decode].runs.keys().copied().collect();
            if !runs.is_empty() {
                let attempt = runs[self.rng.below(runs.len() as u64) as usize];
                self.nodes[decode].endpoint.cancel(self.now, attempt);
            }
        }
        if self.rng.chance(self.faults.reuse) {
            let prefill = DECODE + self.rng.below(PREFILL as u64) as usize;
            let is_silent = self.rng.chance(500);
            self.nodes[prefill].reuse_early(&mut self.rng, is_silent);
        }
        if self.rng.chance(self.faults.crash) {
            let node = self.rng.below((DECODE + PREFILL) as u64) as usize;
            self.crash(node);
        }
    }

    fn start_one(&mut self) {
        let decode = self.rng.below(DECODE as u64) as usize;
        let peers = &self.nodes[decode].peers;
        if peers.is_empty() {
            return;
        }
        let peer = peers[self.rng.below(peers.len() as u64) as usize];
        let count = self.rng.below(12) as usize;
        let attempt = AttemptId(self.rng.id());
        if let Some(start) = self.nodes[decode].open(attempt, peer, count) {
            self.nodes[decode].endpoint.start(self.now, start);
        }
    }

    fn crash(&mut self, node: usize) {
        let mine: Vec<usize> = (0..self.links.len())
            .filter(|link| self.links[*link].is_open && self.links[*link].nodes.contains(&node))
            .collect();
        for link in mine {
            self.close(link);
        }
        let endpoint = self.endpoint(node);
        let epoch = self.nodes[node].epoch + 1;
        self.report.counters = self.report.counters.plus(&self.nodes[node].endpoint.counters());
        self.nodes[node] = Node::new(endpoint, epoch, 0xCC);
        self.open_requests.retain(|(at, _)| *at != node);
    }

    /// From now on no byte moves; both ends learn of it some time later.
    fn close(&mut self, link: usize) {
        if !std::mem::replace(&mut self.links[link].is_open, false) {
            return;
        }
        let SimLink { nodes, epochs, .. } = self.links[link];
        for end in 0..2 {
            let delay = self.delay();
            self.later(delay, Event::Lost { link, node: nodes[end], epoch: epochs[end] });
        }
        let delay = 100_000 + self.rng.below(400_000);
        self.later(delay, Event::Connect { decode: nodes[0], prefill: nodes[1] });
    }

    fn on_lost(&mut self, link: usize, node: usize, epoch: u64) {
        if self.nodes[node].epoch != epoch {
            return;
        }
        let end = usize::from(node >= DECODE);
        let peer = peer_at(link, end);
        self.links[link].is_told[end] = true;
        let lost: Vec<u64> = self.nodes[node]
            .flights
            .iter()
            .filter_map(|(op, flight)| (flight.peer == peer).then_some(*op))
            .collect();
        for op in lost {
            self.nodes[node].flights.remove(&op);
            self.nodes[node].endpoint.handle_got(self.now, OpId(op), GetOutcome::Lost);
        }
        self.nodes[node].endpoint.handle_peer_lost(self.now, peer, "lost");
    }

    fn on_connect(&mut self, decode: usize, prefill: usize) {
        let link = self.links.len();
        let nodes = [decode, prefill];
        self.links.push(SimLink {
            nodes,
            epochs: nodes.map(|node| self.nodes[node].epoch),
            is_open: true,
            is_told: [false; 2],
            is_partitioned: false,
        });
        for (end, side) in [(1, Side::Acceptor), (0, Side::Connector)] {
            let address = format!("node {}", nodes[1 - end]);
            let endpoint = &mut self.nodes[nodes[end]].endpoint;
            endpoint.handle_peer_up(self.now, peer_at(link, end), address, side);
        }
    }

    fn on_compute(&mut self, node: usize, epoch: u64, attempt: AttemptId) {
        if self.nodes[node].epoch != epoch {
            return;
        }
        let count = 1 + self.rng.below(4) as usize;
        let Some((items, record)) = self.nodes[node].compute(attempt, count) else { return };
        let endpoint = &mut self.nodes[node].endpoint;
        endpoint.ready(self.now, attempt, items);
        if let Some(record) = record {
            endpoint.finish(self.now, attempt, record);
        } else {
            let delay = self.rng.below(300_000);
            self.later(delay, Event::Compute { node, epoch, attempt });
        }
    }

    /// A get reads in two halves at two moments, the guard before the first and after the second.
    fn on_read(&mut self, node: usize, epoch: u64, op: u64, half: usize) {
        if self.nodes[node].epoch != epoch {
            return;
        }
        let Some(mut flight) = self.nodes[node].flights.get(&op).cloned() else { return };
        let link = (flight.peer.0 / 2) as usize;
        // Lost links answer their gets when the loss is told.
        if !self.links[link].is_open {
            return;
        }
        let source = &self.nodes[self.links[link].nodes[1]].memory;
        let guarded = (flight.get.guard.offset / 8) as usize;
        flight.is_stale |= source.generations[guarded] != flight.get.guard.expect;
        let from = flight.get.source[0].offset as usize + half * PAGE / 2;
        let bytes = source.bytes[from..from + PAGE / 2].to_vec();
        let memory = &mut self.nodes[node].memory;
        assert_eq!(
            (memory.owners[flight.page], memory.generations[flight.page]),
            (Some(flight.owner), flight.generation),
            "a get writes a page that its attempt does not own"
        );
        let to = flight.page * PAGE + half * PAGE / 2;
        memory.bytes[to..to + PAGE / 2].copy_from_slice(&bytes);
        if half == 0 {
            self.nodes[node].flights.insert(op, flight);
            let delay = self.delay();
            return self.later(delay, Event::Read { node, epoch, op, half: 1 });
        }
        self.damage(node, &flight);
        self.nodes[node].flights.remove(&op);
        let outcome = if self.rng.chance(self.faults.damage / 8) {
            GetOutcome::Error(String::from("the transport gave up"))
        } else if flight.is_stale {
            GetOutcome::Stale
        } else {
            GetOutcome::Done
        };
        // A driver checks a page in the step in which its get ends; other owners may take their time.
        if self.rng.below(2) == 0 {
            return self.nodes[node].endpoint.handle_got(self.now, OpId(op), outcome);
        }
        let (check, Node { endpoint, memory, .. }) = (self.check, &mut self.nodes[node]);
        let ended = [(OpId(op), outcome, ())];
        endpoint.handle_ended(self.now, ended, |verify, ()| is_right(check, memory, verify));
    }

    fn damage(&mut self, node: usize, flight: &Flight) {
        if !self.rng.chance(self.faults.damage) {
            return;
        }
        let how = self.rng.below(4);
        let other = self.rng.below(PAGES as u64) as usize;
        let swapped = self.nodes[node].memory.page(other).to_vec();
        let page = self.nodes[node].memory.page_mut(flight.page);
        match how {
            0 => page.fill(0),
            1 => page.copy_from_slice(&swapped),
            2 => page[PAGE / 2..].copy_from_slice(&flight.before[PAGE / 2..]),
            _ => page.copy_from_slice(&flight.before),
        }
    }

    fn act(&mut self, node: usize) {
        while let Some(action) = self.nodes[node].endpoint.poll_action() {
            let epoch = self.nodes[node].epoch;
            match action {
                Action::Transmit { peer, bytes } => self.transmit(peer, &bytes),
                Action::Get { peer, get, .. }
                    if self.links[(peer.0 / 2) as usize].is_told[(peer.0 % 2) as usize] =>
                {
                    self.nodes[node].endpoint.handle_got(self.now, get.op, GetOutcome::Lost);
                }
                Action::Get { peer, get, .. } => {
                    let page = get.target[0].offset as usize / PAGE;
                    let memory = &self.nodes[node].memory;
                    let flight = Flight {
                        peer,
                        page,
                        owner: memory.owners[page].expect("gets go to pages with an owner"),
                        generation: memory.generations[page],
                        before: memory.page(page).to_vec(),
                        is_stale: false,
                        get,
                    };
                    let op = flight.get.op.0;
                    self.nodes[node].flights.insert(op, flight);
                    let delay = self.delay();
                    self.later(delay, Event::Read { node, epoch, op, half: 0 });
                }
                Action::Verify(verify) => {
                    let op = verify.op.0;
                    self.nodes[node].verifying.insert(op, verify);
                    let delay = self.rng.below(1000);
                    self.later(delay, Event::Verified { node, epoch, op });
                }
                Action::Cut { peer } => self.close((peer.0 / 2) as usize),
                Action::Upcall(upcall) => self.on_upcall(node, upcall),
            }
        }
    }

    fn transmit(&mut self, peer: PeerId, bytes: &[u8]) {
        let link = (peer.0 / 2) as usize;
        let to = 1 - (peer.0 % 2) as usize;
        if self.rng.chance(self.faults.loss) {
            return;
        }
        let copies = if self.rng.chance(self.faults.duplicate) { 2 } else { 1 };
        for _ in 0..copies {
            let delay = self.delay();
            self.later(delay, Event::Deliver { link, to, bytes: bytes.to_vec() });
        }
    }

    fn on_upcall(&mut self, node: usize, upcall: Upcall) {
        let now = self.now;
        match upcall {
            Upcall::Requested { attempt, request, .. } => {
                assert!(self.open_requests.insert((node, attempt)), "{attempt} requested twice");
                if self.nodes[node].take_job(attempt, &request).is_none() {
                    self.nodes[node].endpoint.reject(now, attempt, code::UPPER, "no pages");
                } else if !self.rng.chance(self.faults.hang) {
                    let epoch = self.nodes[node].epoch;
                    self.later(100, Event::Compute { node, epoch, attempt });
                }
            }
            Upcall::Cancelled { attempt } => {
                if let Some(job) = self.nodes[node].jobs.get_mut(&attempt) {
                    job.is_cancelled = true;
                }
            }
            Upcall::Release { attempt, .. } => {
                assert!(self.open_requests.remove(&(node, attempt)), "{attempt} released twice");
                self.nodes[node].release_job(attempt);
            }
            Upcall::Fresh { attempt, groups } => match self.nodes[node].replace(attempt, &groups) {
                Some(targets) => self.nodes[node].endpoint.retarget(now, attempt, targets),
                None => self.nodes[node].endpoint.cancel(now, attempt),
            },
            Upcall::Completed { attempt, record } => {
                self.report.completed += 1;
                let wrong = self.nodes[node].complete(attempt, &record);
                if !wrong.is_empty() {
                    self.report.wrong.push((attempt, wrong));
                }
            }
            Upcall::Failed { attempt, .. } => {
                self.report.failed += 1;
                self.nodes[node].fail(attempt);
            }
            Upcall::Quiet { attempt } => self.nodes[node].quiet(attempt),
            Upcall::PeerUp { peer, .. } => self.nodes[node].peers.push(peer),
            Upcall::PeerDown { peer, .. } => {
                self.nodes[node].peers.retain(|known| *known != peer);
            }
            Upcall::NotOffered { error, .. } => panic!("{error}"),
            // It failed while the fresh pages were looked for; they go with its other pages.
            Upcall::NotRetargeted { error: RetargetError::Ended(_), .. } => {}
            Upcall::NotRetargeted { error, .. } => panic!("{error}"),
            Upcall::Refused { text, .. } => panic!("{text}"),
            Upcall::Overdue { .. }
            | Upcall::Wrong { .. }
            | Upcall::NotReached { .. }
            | Upcall::Event(_) => {}
        }
    }

    /// All is quiet: nothing may be held any more.
    fn finish(mut self) -> Report {
        for (index, node) in self.nodes.iter().enumerate() {
            assert!(node.runs.is_empty(), "node {index}: attempts did not end: {:?}", node.runs);
            assert!(node.jobs.is_empty(), "node {index}: pages are pinned: {:?}", node.jobs);
            assert!(node.flights.is_empty(), "node {index}: gets did not end");
            assert_eq!(node.memory.free_pages(), PAGES, "node {index}: pages leaked");
            assert!(node.memory.owners.iter().all(Option::is_none));
            if let Some(receiver) = node.endpoint.receiver() {
                assert_eq!((receiver.open_attempts(), receiver.ops_in_flight()), (0, 0));
            }
            if let Some(sender) = node.endpoint.sender() {
                assert_eq!(sender.open_attempts(), 0);
            }
            self.report.counters = self.report.counters.plus(&node.endpoint.counters());
        }
        assert!(self.open_requests.is_empty(), "requests were not released");
        self.report
    }
}

/// Whether a page that landed has its tag, for a node that looks.
fn is_right(check: Check, memory: &Memory, verify: &Verify) -> bool {
    let page = verify.extents[0].offset as usize / PAGE;
    check == Check::Nothing || tag(&verify.key, memory.page(page)) == verify.tag
}
