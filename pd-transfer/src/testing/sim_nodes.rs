//! The nodes of the simulated world: memory in pages with owners, and the two upper layers.

use super::Rng;
use super::pages::{key, page_bytes, tag};
use crate::endpoint::Endpoint;
use crate::get::Get;
use crate::hash::hash128;
use crate::id::PeerId;
use crate::receiver::{Start, Target, Verify};
use crate::wire::{AttemptId, Extent, FinalRecord, Guard, Identity, Item, Key, RegionId};
use std::collections::BTreeMap;

/// Bytes of a simulated page.
pub(super) const PAGE: usize = 64;
/// Pages of a node.
pub(super) const PAGES: usize = 48;

/// Pages with owners; a page is written by its owner only.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) bytes: Vec<u8>,
    /// One word per page, changed whenever the page changes hands.
    pub(super) generations: Vec<u64>,
    pub(super) owners: Vec<Option<AttemptId>>,
    /// Last freed, first used: reuse as early as possible.
    free: Vec<usize>,
}

impl Memory {
    pub(super) fn new(fill: u8) -> Self {
        Self {
            bytes: vec![fill; PAGE * PAGES],
            generations: vec![1; PAGES],
            owners: vec![None; PAGES],
            free: (0..PAGES).rev().collect(),
        }
    }

    pub(super) fn page(&self, page: usize) -> &[u8] {
        &self.bytes[page * PAGE..(page + 1) * PAGE]
    }

    pub(super) fn page_mut(&mut self, page: usize) -> &mut [u8] {
        &mut self.bytes[page * PAGE..(page + 1) * PAGE]
    }

    pub(super) fn reserve(&mut self, owner: AttemptId, count: usize) -> Option<Vec<usize>> {
        let rest = self.free.len().checked_sub(count)?;
        let pages = self.free.split_off(rest);
        for page in &pages {
            assert_eq!(self.owners[*page], None, "a free page has no owner");
            self.owners[*page] = Some(owner);
        }
        Some(pages)
    }

    pub(super) fn release(&mut self, owner: AttemptId, page: usize) {
        assert_eq!(self.owners[page], Some(owner), "only the owner releases a page");
        self.owners[page] = None;
        self.generations[page] += 1;
        self.page_mut(page).fill(0xEE);
        self.free.push(page);
    }

    pub(super) const fn free_pages(&self) -> usize {
        self.free.len()
    }
}

/// One request at a prefill node.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) pages: Vec<usize>,
    pub(super) items: Vec<Item>,
    pub(super) is_cancelled: bool,
}

/// One attempt at a decode node.
#[derive(Debug)]
pub(super) struct Run {
    /// The page of each key.
    pub(super) pages: Vec<usize>,
    pub(super) quarantined: Vec<usize>,
    pub(super) is_failed: bool,
}

/// A get under way.
#[derive(Clone, Debug)]
pub(super) struct Flight {
    pub(super) peer: PeerId,
    pub(super) get: Get,
    pub(super) page: usize,
    pub(super) owner: AttemptId,
    pub(super) generation: u64,
    /// What the target held before.
    pub(super) before: Vec<u8>,
    pub(super) is_stale: bool,
}

/// One node: the endpoint under test and what stands in for the rest of the process.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) endpoint: Endpoint,
    /// Grows with each crash; events of an earlier life are dropped.
    pub(super) epoch: u64,
    pub(super) memory: Memory,
    pub(super) jobs: BTreeMap<AttemptId, Job>,
    pub(super) runs: BTreeMap<AttemptId, Run>,
    pub(super) flights: BTreeMap<u64, Flight>,
    pub(super) verifying: BTreeMap<u64, Verify>,
    pub(super) peers: Vec<PeerId>,
}

pub(super) fn plan_hash(attempt: AttemptId, count: usize) -> [u8; 16] {
    let mut bytes = attempt.0.to_vec();
    bytes.push(count as u8);
    hash128(&bytes)
}

fn target(n: usize, page: usize) -> Target {
    let extents = vec![Extent { offset: (page * PAGE) as u64, len: PAGE as u32 }];
    // Pairs of pages lie together, as the caches of one block do.
    Target { key: key(n as u32), group: n as u32 / 2, region: RegionId(0), extents }
}

impl Node {
    pub(super) fn new(endpoint: Endpoint, epoch: u64, fill: u8) -> Self {
        Self {
            endpoint,
            epoch,
            memory: Memory::new(fill),
            jobs: BTreeMap::new(),
            runs: BTreeMap::new(),
            flights: BTreeMap::new(),
            verifying: BTreeMap::new(),
            peers: Vec::new(),
        }
    }

    /// Prefill: reserves the pages of a request. None if they do not fit.
    pub(super) fn take_job(&mut self, attempt: AttemptId, request: &[u8]) -> Option<()> {
        let count = usize::from(*request.first()?);
        let pages = self.memory.reserve(attempt, count)?;
        let job = Job { pages, items: Vec::new(), is_cancelled: false };
        assert!(self.jobs.insert(attempt, job).is_none(), "an attempt is requested once");
        Some(())
    }

    /// Prefill: computes up to `count` more pages. The record comes with the last ones.
    pub(super) fn compute(
        &mut self,
        attempt: AttemptId,
        count: usize,
    ) -> Option<(Vec<Item>, Option<FinalRecord>)> {
        let job = self.jobs.get_mut(&attempt).filter(|job| !job.is_cancelled)?;
        let first = job.items.len();
        let last = (first + count).min(job.pages.len());
        for n in first..last {
            let page = job.pages[n];
            let bytes = page_bytes(attempt, n as u32, PAGE);
            self.memory.page_mut(page).copy_from_slice(&bytes);
            let key = key(n as u32);
            let generation = self.memory.generations[page];
            let mut identity = [0; 16];
            identity[..8].copy_from_slice(&(page as u64).to_le_bytes());
            identity[8..].copy_from_slice(&generation.to_le_bytes());
            let offset = (page * PAGE) as u64;
            job.items.push(Item {
                key,
                identity: Identity(identity),
                tag: tag(&key, &bytes),
                region: RegionId(0),
                extents: vec![Extent { offset, len: PAGE as u32 }],
                guard: Guard { region: RegionId(1), offset: page as u64 * 8, expect: generation },
            });
        }
        let fresh = job.items[first..].to_vec();
        let record = (last == job.pages.len()).then(|| {
            let hash = plan_hash(attempt, job.pages.len());
            FinalRecord::new(hash, &job.items, attempt.0.to_vec())
        });
        Some((fresh, record))
    }

    /// Prefill: the pages of an attempt are unpinned, once.
    pub(super) fn release_job(&mut self, attempt: AttemptId) {
        // A rejected request has no pages, but it has its one release.
        if let Some(job) = self.jobs.remove(&attempt) {
            for page in job.pages {
                self.memory.release(attempt, page);
            }
        }
    }

    /// Prefill gone wrong: a page is rewritten while it is offered.
    pub(super) fn reuse_early(&mut self, rng: &mut Rng, is_silent: bool) {
        let offered: Vec<usize> =
            self.jobs.values().flat_map(|job| job.pages[..job.items.len()].to_vec()).collect();
        if offered.is_empty() {
            return;
        }
        let page = offered[rng.below(offered.len() as u64) as usize];
        if !is_silent {
            self.memory.generations[page] += 1;
        }
        self.memory.page_mut(page).fill(0xDD);
    }

    /// Decode: reserves targets and describes the attempt. None if they do not fit.
    pub(super) fn open(&mut self, attempt: AttemptId, peer: PeerId, count: usize) -> Option<Start> {
        let pages = self.memory.reserve(attempt, count)?;
        let plan = pages.iter().enumerate().map(|(n, page)| target(n, *page)).collect();
        self.runs.insert(attempt, Run { pages, quarantined: Vec::new(), is_failed: false });
        Some(Start {
            attempt,
            peer,
            request: vec![count as u8],
            have: 0,
            plan_hash: plan_hash(attempt, count),
            plan,
        })
    }

    /// Decode: fresh pages for groups. None if they do not fit.
    pub(super) fn replace(
        &mut self,
        attempt: AttemptId,
        groups: &[(u32, Vec<Key>)],
    ) -> Option<Vec<Target>> {
        let run = self.runs.get_mut(&attempt).expect("fresh pages are for an open attempt");
        assert!(!run.is_failed, "a failed attempt asks for nothing");
        let mut targets = Vec::new();
        for n in groups.iter().flat_map(|(_, keys)| keys).map(super::pages::number) {
            let fresh = self.memory.reserve(attempt, 1)?[0];
            let old = std::mem::replace(&mut run.pages[n as usize], fresh);
            run.quarantined.push(old);
            targets.push(target(n as usize, fresh));
        }
        Some(targets)
    }

    /// Decode: everything arrived. Returns which pages are not what they should be.
    pub(super) fn complete(&mut self, attempt: AttemptId, record: &FinalRecord) -> Vec<usize> {
        let run = self.runs.remove(&attempt).expect("an attempt ends once");
        assert!(!run.is_failed, "a failed attempt does not complete");
        assert_eq!(record.payload, attempt.0, "the record is that of the attempt");
        assert_eq!(record.items as usize, run.pages.len());
        let mut wrong = Vec::new();
        for (n, page) in run.pages.iter().enumerate() {
            if self.memory.page(*page) != page_bytes(attempt, n as u32, PAGE) {
                wrong.push(n);
            }
        }
        self.let_go(attempt, run);
        wrong
    }

    /// Decode: the attempt failed; its pages are still held.
    pub(super) fn fail(&mut self, attempt: AttemptId) {
        let run = self.runs.get_mut(&attempt).expect("an attempt ends once");
        assert!(!run.is_failed, "an attempt fails once");
        run.is_failed = true;
    }

    /// Decode: nothing writes the pages any more.
    pub(super) fn quiet(&mut self, attempt: AttemptId) {
        let run = self.runs.remove(&attempt).expect("an attempt is quiet once");
        assert!(run.is_failed, "only a failed attempt gets quiet");
        self.let_go(attempt, run);
    }

    fn let_go(&mut self, attempt: AttemptId, run: Run) {
        assert!(
            !self.flights.values().any(|flight| flight.owner == attempt),
            "a get of {attempt} is under way when its pages are released"
        );
        for page in run.pages.into_iter().chain(run.quarantined) {
            self.memory.release(attempt, page);
        }
    }
}
