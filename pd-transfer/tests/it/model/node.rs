//! One node of the model: the production `Endpoint` unchanged, and a small upper layer with a page
//! pool that keeps the real rules and checks the promises.

use super::Setup;
use pd_transfer::endpoint::{Action, Endpoint, EndpointConfig, Upcall};
use pd_transfer::get::{Get, GetOutcome};
use pd_transfer::hash::hash128;
use pd_transfer::id::{OpId, PeerId, Time};
use pd_transfer::link::{LinkConfig, Side};
use pd_transfer::receiver::{ReceiverConfig, RetargetError, Start, Target, Verify};
use pd_transfer::sender::{OfferError, SenderConfig};
use pd_transfer::testing::mutation::Mutation;
use pd_transfer::testing::pages::key;
use pd_transfer::wire::{
    AttemptId, Extent, FinalRecord, Fingerprint, Guard, Hello, Identity, Incarnation, Item, Key,
    Limits, MAX_MESSAGE_BYTES, PROTO_VERSION, RegionDesc, RegionId, Role, Tag, code,
};
use std::collections::BTreeMap;

/// Bytes of a page, as the machines see it.
const PAGE: u64 = 64;
/// Far beyond every clock of the model: timers of the link that a cut stands for.
const NEVER: u64 = 1 << 40;
const RESEND_US: u64 = 10;
const STALL_US: u64 = 25;
pub(crate) const OVERDUE_US: u64 = 50;

/// What a half of a page holds instead of its bytes.
pub(crate) type Half = u16;
const FREED: Half = 0xEE;
const OVERWRITTEN: Half = 0xDD;
/// What a damaged read brings.
pub(crate) const DAMAGED: Half = 0xBA;

/// What must never, or always, happen; the names are those of the design.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Property {
    /// No page is written that is not the writer's, or read by a peer that it is not pinned for.
    S1,
    /// No page is used that was not verified after its last write.
    S2,
    /// What completes is, byte for byte, what was asked for.
    S3,
    /// No page is lost: free pages and pages with a living owner are all there are.
    S4,
    /// Each attempt ends once, on each side.
    S5,
    /// Every request ends if faults stop.
    L1,
    /// Every page comes back if faults stop.
    L2,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Violation {
    pub(crate) property: Property,
    pub(crate) text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Seat {
    Decode,
    Prefill,
}

/// An event at one node. Together with the node's state it decides everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Local {
    Up {
        link: u8,
    },
    /// Bytes of message number `message` of the search.
    Bytes {
        link: u8,
        message: u32,
    },
    Lost {
        link: u8,
    },
    Tick,
    Start {
        request: u8,
    },
    Abort {
        request: u8,
    },
    /// Half of a get: what the source holds, and whether its guard word has the right value.
    Read {
        op: u64,
        value: Half,
        is_fresh: bool,
    },
    GetError {
        op: u64,
    },
    Verify {
        op: u64,
    },
    Compute {
        attempt: AttemptId,
    },
    /// The same, but the prefill side forgets the last page.
    Short {
        attempt: AttemptId,
    },
    /// The same, but the last page has a key that is not in the plan.
    Unknown {
        attempt: AttemptId,
    },
    /// Bytes of a page that was offered before they were written.
    Write {
        attempt: AttemptId,
        n: usize,
    },
    Overwrite {
        page: usize,
        is_silent: bool,
    },
}

#[derive(Clone, Debug, Hash)]
pub(crate) struct Page {
    pub(crate) owner: Option<AttemptId>,
    pub(crate) generation: u64,
    pub(crate) halves: [Half; 2],
    pub(crate) is_overwritten: bool,
    is_verified: bool,
    is_offered: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Ask {
    Pending { tries: u8 },
    Running { tries: u8, attempt: AttemptId },
    Served,
    Failed,
}

#[derive(Clone, Debug, Hash)]
pub(crate) struct Run {
    request: u8,
    pages: Vec<usize>,
    is_failed: bool,
}

#[derive(Clone, Debug, Hash)]
pub(crate) struct Flight {
    pub(crate) peer: PeerId,
    pub(crate) attempt: AttemptId,
    /// Page of the source and the generation it was offered with.
    pub(crate) source: usize,
    pub(crate) expect: u64,
    pub(crate) half: u8,
    target: usize,
    generation: u64,
    is_stale: bool,
}

#[derive(Clone, Debug, Hash)]
pub(crate) struct Job {
    request: u8,
    pub(crate) pages: Vec<usize>,
    items: Vec<Item>,
    unwritten: Vec<usize>,
    is_cancelled: bool,
    is_finished: bool,
}

#[derive(Clone, Debug, Hash)]
pub(crate) struct Node {
    pub(crate) seat: Seat,
    pub(crate) endpoint: Endpoint,
    pub(crate) now: Time,
    pub(crate) life: u8,
    /// The link that is up.
    pub(crate) link: Option<PeerId>,
    pub(crate) pages: Vec<Page>,
    free: Vec<usize>,
    pub(crate) asks: Vec<Ask>,
    pub(crate) runs: BTreeMap<AttemptId, Run>,
    pub(crate) flights: BTreeMap<u64, Flight>,
    pub(crate) verifying: BTreeMap<u64, Verify>,
    pub(crate) jobs: BTreeMap<AttemptId, Job>,
    pub(crate) is_refused: bool,
}

/// What a step did to the world.
#[derive(Debug, Default)]
pub(crate) struct Effects {
    pub(crate) sent: Vec<(PeerId, Vec<u8>)>,
    pub(crate) cut: Option<PeerId>,
    pub(crate) violation: Option<Violation>,
}

impl Effects {
    fn promise(&mut self, holds: bool, property: Property, text: &str) {
        if !holds && self.violation.is_none() {
            self.violation = Some(Violation { property, text: text.to_string() });
        }
    }
}

/// The bytes of half `half` of page `n` of a request: a function of what was asked, not of who
/// computed it. A node with another layout has the halves the other way round.
fn content(request: u8, n: usize, half: usize, is_swapped: bool) -> Half {
    let half = if is_swapped { 1 - half } else { half };
    0x1000 + u16::from(request) * 0x100 + n as u16 * 0x10 + half as u16
}

fn fingerprint(is_swapped: bool) -> Fingerprint {
    Fingerprint([if is_swapped { 2 } else { 1 }; 16])
}

fn tag(key: &Key, halves: [Half; 2], is_swapped: bool) -> Tag {
    let mut bytes = key.0.to_vec();
    bytes.extend_from_slice(&fingerprint(is_swapped).0);
    bytes.extend(halves.iter().flat_map(|half| half.to_le_bytes()));
    Tag(hash128(&bytes))
}

/// Hash of the plan's shape; on purpose it does not tell requests apart.
fn plan_hash(count: usize) -> [u8; 16] {
    hash128(&[count as u8])
}

fn extents(page: usize) -> Vec<Extent> {
    vec![Extent { offset: page as u64 * PAGE, len: PAGE as u32 }]
}

/// The two pages of a request lie together, as the caches of one block do.
fn target(n: usize, page: usize) -> Target {
    Target { key: key(n as u32), group: 0, region: RegionId(0), extents: extents(page) }
}

fn endpoint(setup: &Setup, seat: Seat, life: u8) -> Endpoint {
    let is_swapped = seat == Seat::Prefill && setup.is_other_layout;
    let region = |region, bytes| RegionDesc { region: RegionId(region), bytes };
    let hello = Hello {
        proto: PROTO_VERSION,
        incarnation: Incarnation([seat as u8 + 1, life, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        fingerprint: fingerprint(is_swapped),
        layout: String::new(),
        role: if seat == Seat::Decode { Role::Decode } else { Role::Prefill },
        limits: Limits {
            max_prompt_tokens: 1,
            max_items: setup.pool as u32,
            max_message_bytes: MAX_MESSAGE_BYTES as u32,
        },
        regions: vec![region(0, setup.pool as u64 * PAGE), region(1, setup.pool as u64 * 8)],
        transport: String::new(),
    };
    Endpoint::new(EndpointConfig {
        hello,
        link: LinkConfig {
            handshake_us: NEVER,
            hello_resend_us: RESEND_US,
            ping_after_us: NEVER,
            suspect_after_us: NEVER,
        },
        sender: SenderConfig { overdue_us: OVERDUE_US, ..SenderConfig::default() },
        receiver: ReceiverConfig {
            resend_us: RESEND_US,
            stall_us: STALL_US,
            ..ReceiverConfig::default()
        },
        peers_max: 4,
    })
}

impl Node {
    pub(crate) fn new(setup: &Setup, seat: Seat, life: u8, asks: Vec<Ask>) -> Self {
        let page = Page {
            owner: None,
            generation: 1,
            halves: [FREED; 2],
            is_overwritten: false,
            is_verified: false,
            is_offered: false,
        };
        Self {
            seat,
            endpoint: endpoint(setup, seat, life),
            now: Time(0),
            life,
            link: None,
            pages: vec![page; setup.pool],
            free: (0..setup.pool).rev().collect(),
            asks,
            runs: BTreeMap::new(),
            flights: BTreeMap::new(),
            verifying: BTreeMap::new(),
            jobs: BTreeMap::new(),
            is_refused: false,
        }
    }

    /// The process dies and another takes its place: nothing is left but the clients that still
    /// wait for their first answer.
    pub(crate) fn restarted(&self, setup: &Setup) -> Self {
        let asks = self.asks.iter().map(|ask| match ask {
            Ask::Running { .. } => Ask::Failed,
            Ask::Pending { .. } | Ask::Served | Ask::Failed => *ask,
        });
        Self::new(setup, self.seat, self.life + 1, asks.collect())
    }

    /// One event, and everything that follows from it at this node.
    pub(crate) fn step(&mut self, setup: &Setup, event: Local, bytes: &[u8]) -> Effects {
        let mut effects = Effects::default();
        match event {
            Local::Up { link } => {
                let side = match self.seat {
                    Seat::Decode => Side::Connector,
                    Seat::Prefill => Side::Acceptor,
                };
                let address = String::from("peer");
                self.endpoint.handle_peer_up(self.now, PeerId(u64::from(link)), address, side);
            }
            Local::Bytes { link, .. } => {
                self.endpoint.handle_bytes(self.now, PeerId(u64::from(link)), bytes);
            }
            Local::Lost { link } => self.lost(PeerId(u64::from(link))),
            Local::Tick => {
                if let Some(at) = self.endpoint.poll_timeout() {
                    self.now = self.now.max(at);
                    self.endpoint.handle_timeout(self.now);
                }
            }
            Local::Start { request } => self.start(setup, request),
            Local::Abort { request } => {
                if let Ask::Running { attempt, .. } = self.asks[usize::from(request)] {
                    self.endpoint.cancel(self.now, attempt);
                }
            }
            Local::Read { op, value, is_fresh } => {
                self.read(setup, op, value, is_fresh, &mut effects);
            }
            Local::GetError { op } => {
                self.flights.remove(&op);
                let outcome = GetOutcome::Error(String::from("no"));
                self.endpoint.handle_got(self.now, OpId(op), outcome);
            }
            Local::Verify { op } => self.verify(op),
            Local::Compute { attempt } | Local::Short { attempt } | Local::Unknown { attempt } => {
                self.compute(setup, attempt, event);
            }
            Local::Write { attempt, n } => self.write(setup, attempt, n, &mut effects),
            Local::Overwrite { page, is_silent } => {
                let page = &mut self.pages[page];
                page.generation += u64::from(!is_silent);
                page.halves = [OVERWRITTEN; 2];
                page.is_overwritten = true;
            }
        }
        self.act(setup, &mut effects);
        self.check(&mut effects);
        effects
    }

    fn act(&mut self, setup: &Setup, effects: &mut Effects) {
        while let Some(action) = self.endpoint.poll_action() {
            match action {
                Action::Transmit { peer, bytes } => effects.sent.push((peer, bytes)),
                Action::Get { peer, get, .. } => self.fly(peer, &get, effects),
                Action::Verify(verify) => {
                    self.verifying.insert(verify.op.0, verify);
                }
                Action::Cut { peer } => effects.cut = Some(peer),
                Action::Upcall(upcall) => self.upcall(setup, upcall, effects),
            }
        }
    }

    fn fly(&mut self, peer: PeerId, get: &Get, effects: &mut Effects) {
        let target = (get.target[0].offset / PAGE) as usize;
        let Some(attempt) = self.pages[target].owner else {
            return effects.promise(false, Property::S1, "a get goes to a page without an owner");
        };
        let flight = Flight {
            peer,
            attempt,
            source: (get.source[0].offset / PAGE) as usize,
            expect: get.guard.expect,
            half: 0,
            target,
            generation: self.pages[target].generation,
            is_stale: false,
        };
        self.flights.insert(get.op.0, flight);
    }

    /// The transport tells of a lost link: its gets end first.
    fn lost(&mut self, peer: PeerId) {
        let lost = self.flights.iter().filter(|(_, flight)| flight.peer == peer);
        for op in lost.map(|(op, _)| *op).collect::<Vec<_>>() {
            self.flights.remove(&op);
            self.endpoint.handle_got(self.now, OpId(op), GetOutcome::Lost);
        }
        self.link = self.link.filter(|link| *link != peer);
        self.endpoint.handle_peer_lost(self.now, peer, "lost");
    }

    /// A part of a get lands: a half, or the whole page where the setup does not care.
    fn read(&mut self, setup: &Setup, op: u64, value: Half, is_fresh: bool, effects: &mut Effects) {
        let Some(mut flight) = self.flights.get(&op).cloned() else { return };
        let page = &mut self.pages[flight.target];
        let is_own = page.owner == Some(flight.attempt) && page.generation == flight.generation;
        effects.promise(is_own, Property::S1, "a get writes a page that is not its attempt's");
        page.is_verified = false;
        page.halves[usize::from(flight.half)] = value;
        flight.is_stale |= !is_fresh && !Mutation::Generation.is_removed();
        flight.half += 1;
        if !setup.is_torn {
            // Both halves are of one moment; a damaged or overwritten page is so as a whole.
            page.halves[1] = if (0x1000..0xF000).contains(&value) { value ^ 1 } else { value };
            flight.half = 2;
        }
        if flight.half < 2 {
            self.flights.insert(op, flight);
            return;
        }
        self.flights.remove(&op);
        let outcome = if flight.is_stale { GetOutcome::Stale } else { GetOutcome::Done };
        self.endpoint.handle_got(self.now, OpId(op), outcome);
    }

    fn verify(&mut self, op: u64) {
        let Some(verify) = self.verifying.remove(&op) else { return };
        let page = &mut self.pages[(verify.extents[0].offset / PAGE) as usize];
        // The decode side hashes with its own layout.
        let is_right = tag(&verify.key, page.halves, false) == verify.tag;
        let ok = is_right || Mutation::Digest.is_removed();
        page.is_verified = ok;
        self.endpoint.handle_verified(self.now, OpId(op), ok);
    }

    fn start(&mut self, setup: &Setup, request: u8) {
        let (Ask::Pending { tries }, Some(peer)) = (self.asks[usize::from(request)], self.link)
        else {
            return;
        };
        let mut id = [0; 16];
        // Without slots an id is never used again, across lives too.
        let parts = if setup.is_slots { [1, 0, 0] } else { [request + 1, tries + 1, self.life] };
        id[..3].copy_from_slice(&parts);
        let attempt = AttemptId(id);
        let Some(pages) = self.reserve(attempt, setup.pages) else { return };
        self.asks[usize::from(request)] = Ask::Running { tries: tries + 1, attempt };
        let plan = pages.iter().enumerate().map(|(n, page)| target(n, *page)).collect();
        self.runs.insert(attempt, Run { request, pages, is_failed: false });
        let start = Start {
            attempt,
            peer,
            request: vec![request],
            have: 0,
            plan_hash: plan_hash(setup.pages),
            plan,
        };
        self.endpoint.start(self.now, start);
    }

    fn compute(&mut self, setup: &Setup, attempt: AttemptId, how: Local) {
        let Some(job) = self.jobs.get_mut(&attempt) else { return };
        let is_swapped = setup.is_other_layout;
        let is_late = Mutation::SealBeforeOffer.is_removed();
        let n = job.items.len();
        let is_forgotten = matches!(how, Local::Short { .. }) && n + 1 == job.pages.len();
        let mut fresh = Vec::new();
        if !is_forgotten {
            let page = job.pages[n];
            let halves = [0, 1].map(|half| content(job.request, n, half, is_swapped));
            let is_unknown = matches!(how, Local::Unknown { .. });
            let key = key(if is_unknown { 99 } else { n as u32 });
            let entry = &mut self.pages[page];
            if is_late {
                job.unwritten.push(n);
            } else {
                entry.halves = halves;
            }
            entry.is_offered = true;
            let mut identity = [0; 16];
            identity[..2].copy_from_slice(&[page as u8, entry.generation as u8]);
            fresh.push(Item {
                key,
                identity: Identity(identity),
                tag: tag(&key, halves, is_swapped),
                region: RegionId(0),
                extents: extents(page),
                guard: Guard {
                    region: RegionId(1),
                    offset: page as u64 * 8,
                    expect: entry.generation,
                },
            });
            job.items.extend(fresh.clone());
        }
        job.is_finished = is_forgotten || job.items.len() == job.pages.len();
        let record = job
            .is_finished
            .then(|| FinalRecord::new(plan_hash(setup.pages), &job.items, vec![job.request, 7]));
        if !fresh.is_empty() {
            self.endpoint.ready(self.now, attempt, fresh);
        }
        if let Some(record) = record {
            self.endpoint.finish(self.now, attempt, record);
        }
    }

    fn write(&mut self, setup: &Setup, attempt: AttemptId, n: usize, effects: &mut Effects) {
        let Some(job) = self.jobs.get_mut(&attempt) else { return };
        job.unwritten.retain(|waiting| *waiting != n);
        let page = &mut self.pages[job.pages[n]];
        effects.promise(!page.is_offered, Property::S1, "a page that a peer may read is written");
        page.halves = [0, 1].map(|half| content(job.request, n, half, setup.is_other_layout));
    }

    fn upcall(&mut self, setup: &Setup, upcall: Upcall, effects: &mut Effects) {
        match upcall {
            Upcall::Requested { attempt, request, .. } => {
                self.requested(setup, attempt, request[0], effects);
            }
            Upcall::Cancelled { attempt } => {
                if let Some(job) = self.jobs.get_mut(&attempt) {
                    job.is_cancelled = true;
                }
            }
            Upcall::Release { attempt, .. } => {
                let job = self.jobs.remove(&attempt);
                effects.promise(job.is_some(), Property::S5, "released what was not requested");
                self.release(attempt, job.map(|job| job.pages).unwrap_or_default());
            }
            // A lease that time alone ends: what the alarm must not be taken for.
            Upcall::Overdue { attempt, .. } if Mutation::StaleLease.is_removed() => {
                if let Some(job) = self.jobs.get_mut(&attempt) {
                    job.is_cancelled = true;
                    let pages = std::mem::take(&mut job.pages);
                    self.release(attempt, pages);
                }
            }
            Upcall::Fresh { attempt, groups } => self.fresh(setup, attempt, groups.len(), effects),
            Upcall::Completed { attempt, record } => self.completed(attempt, &record, effects),
            Upcall::Failed { attempt, .. } => match self.runs.get_mut(&attempt) {
                Some(run) if !run.is_failed => run.is_failed = true,
                Some(_) | None => effects.promise(false, Property::S5, "failed after its end"),
            },
            Upcall::Quiet { attempt } => {
                let run = self.runs.remove(&attempt).filter(|run| run.is_failed);
                let Some(run) = run else {
                    return effects.promise(false, Property::S5, "quiet without a failure");
                };
                self.release(attempt, run.pages);
                let ask = &mut self.asks[usize::from(run.request)];
                if let Ask::Running { tries, .. } = *ask {
                    let is_over = tries >= setup.tries;
                    *ask = if is_over { Ask::Failed } else { Ask::Pending { tries } };
                }
            }
            Upcall::PeerUp { peer, .. } => self.link = Some(peer),
            Upcall::PeerDown { peer, .. } => self.link = self.link.filter(|link| *link != peer),
            Upcall::Refused { .. } => {
                self.is_refused = true;
                self.asks.fill(Ask::Failed);
            }
            // A peer that asked for it ended it in between.
            Upcall::NotOffered { error: OfferError::Ended(_), .. }
            | Upcall::NotRetargeted { error: RetargetError::Ended(_), .. }
            | Upcall::Overdue { .. }
            | Upcall::Wrong { .. }
            | Upcall::NotReached { .. }
            | Upcall::Event(_) => {}
            Upcall::NotOffered { error, .. } => {
                effects.promise(false, Property::S5, &error.to_string());
            }
            Upcall::NotRetargeted { error, .. } => {
                effects.promise(false, Property::S5, &error.to_string());
            }
        }
    }

    fn requested(&mut self, setup: &Setup, attempt: AttemptId, request: u8, effects: &mut Effects) {
        let reserved = self.reserve(attempt, setup.pages);
        let is_full = reserved.is_none();
        let job = Job {
            request,
            pages: reserved.unwrap_or_default(),
            items: Vec::new(),
            unwritten: Vec::new(),
            is_cancelled: is_full,
            is_finished: false,
        };
        let before = self.jobs.insert(attempt, job);
        effects.promise(before.is_none(), Property::S5, "requested twice");
        if is_full {
            self.endpoint.reject(self.now, attempt, code::UPPER, "no pages");
        }
    }

    /// The old targets go back to the pool at once: no get writes them any more.
    fn fresh(&mut self, setup: &Setup, attempt: AttemptId, groups: usize, effects: &mut Effects) {
        effects.promise(groups == 1, Property::S5, "there is one group");
        let Some(run) = self.runs.get_mut(&attempt).filter(|run| !run.is_failed) else {
            return effects.promise(false, Property::S5, "fresh pages for an attempt that ended");
        };
        let old = std::mem::take(&mut run.pages);
        self.release(attempt, old);
        let Some(pages) = self.reserve(attempt, setup.pages) else {
            return self.endpoint.cancel(self.now, attempt);
        };
        let targets = pages.iter().enumerate().map(|(n, page)| target(n, *page)).collect();
        if let Some(run) = self.runs.get_mut(&attempt) {
            run.pages = pages;
        }
        self.endpoint.retarget(self.now, attempt, targets);
    }

    fn completed(&mut self, attempt: AttemptId, record: &FinalRecord, effects: &mut Effects) {
        let Some(run) = self.runs.remove(&attempt).filter(|run| !run.is_failed) else {
            return effects.promise(false, Property::S5, "completed after its end");
        };
        for (n, page) in run.pages.iter().enumerate() {
            let page = &self.pages[*page];
            effects.promise(page.is_verified, Property::S2, "a page is used unverified");
            let is_right =
                (0..2).all(|half| page.halves[half] == content(run.request, n, half, false));
            effects.promise(is_right, Property::S3, "a page holds other bytes than asked for");
        }
        let is_right = record.payload == [run.request, 7];
        effects.promise(is_right, Property::S3, "the record is not that of the request");
        self.release(attempt, run.pages);
        self.asks[usize::from(run.request)] = Ask::Served;
    }

    fn reserve(&mut self, owner: AttemptId, count: usize) -> Option<Vec<usize>> {
        let rest = self.free.len().checked_sub(count)?;
        let pages = self.free.split_off(rest);
        for page in &pages {
            self.pages[*page].owner = Some(owner);
        }
        Some(pages)
    }

    fn release(&mut self, owner: AttemptId, pages: Vec<usize>) {
        for index in pages {
            let page = &mut self.pages[index];
            assert_eq!(page.owner, Some(owner), "pages go back once");
            page.owner = None;
            page.generation += 1;
            page.halves = [FREED; 2];
            (page.is_overwritten, page.is_verified, page.is_offered) = (false, false, false);
            self.free.push(index);
        }
    }

    /// What holds after every step at one node.
    fn check(&self, effects: &mut Effects) {
        for flight in self.flights.values() {
            let page = &self.pages[flight.target];
            let is_own = page.owner == Some(flight.attempt) && page.generation == flight.generation;
            let text = "a page is let go of while a get may write it";
            effects.promise(is_own, Property::S1, text);
        }
        let owned = self.pages.iter().filter_map(|page| page.owner);
        let count = owned.clone().count();
        let text = "free and owned pages are not all pages";
        effects.promise(count + self.free.len() == self.pages.len(), Property::S4, text);
        let mut living =
            owned.map(|owner| self.runs.contains_key(&owner) || self.jobs.contains_key(&owner));
        effects.promise(living.all(|is| is), Property::S4, "a page's owner is gone");
    }

    pub(crate) fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// All requests have ended and nothing is held or remembered as open.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.is_ended()
            && self.free.len() == self.pages.len()
            && self.endpoint.receiver().is_none_or(|receiver| {
                receiver.open_attempts() == 0 && receiver.ops_in_flight() == 0
            })
            && self.endpoint.sender().is_none_or(|sender| sender.open_attempts() == 0)
    }

    /// All requests have ended.
    pub(crate) fn is_ended(&self) -> bool {
        self.asks.iter().all(|ask| matches!(ask, Ask::Served | Ask::Failed)) && self.runs.is_empty()
    }

    /// Whether page `n` of a job may still be computed, and what is left to write.
    pub(crate) fn work(&self) -> (Vec<AttemptId>, Vec<(AttemptId, usize)>) {
        let open = |job: &Job| !job.is_cancelled && !job.is_finished;
        let compute = self.jobs.iter().filter(|(_, job)| open(job)).map(|(id, _)| *id);
        let unwritten =
            self.jobs.iter().flat_map(|(id, job)| job.unwritten.iter().map(|n| (*id, *n)));
        (compute.collect(), unwritten.collect())
    }

    /// Pages that were offered and not overwritten yet.
    pub(crate) fn offered(&self) -> Vec<usize> {
        let pages = self.pages.iter().enumerate();
        pages.filter(|(_, page)| page.is_offered && !page.is_overwritten).map(|(n, _)| n).collect()
    }

    /// Whether attempt `id` would offer its last page next.
    pub(crate) fn is_last(&self, id: &AttemptId) -> bool {
        self.jobs.get(id).is_some_and(|job| job.items.len() + 1 == job.pages.len())
    }
}
