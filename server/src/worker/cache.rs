//! The cache tiers below the device, in a worker: what is saved of its prefixes, and how a prefix
//! comes back before its sequence starts.
//!
//! A prefix that comes back goes into the device's prefix tree; its sequence then finds it there
//! like any other. So there is one way to go on from a prefix, wherever it was.

use super::probe::{PROBES_OF_PROMPT, Probing};
use super::sequence::State;
use super::{Role, Worker};
use crate::clock::Clock;
use crate::engine::{CacheKeep, Flushed};
use crate::glue::mover::{HostMemory, Job, Mover, Report};
use crate::glue::objects::{ObjectError, ObjectMemory, ObjectPages};
use crate::glue::pools::PoolError;
use crate::scheduler::SeqId;
use hicache::tiers::{
    Action, FetchEnd, FetchId, MotionId, Move, Outcome, Slot, Store, Tier, TierCounters, TierUse,
    Tiers, WritePolicy, objects_of,
};
use hicache::{Boundary, Change, ObjectKey};
use kv_pool::{BLOCK_TOKENS, ChainHash, Owner, PageDigest, PageRef, PageState, PoolKind, Proof};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Times that a sequence's prefix is looked for below the device: each miss takes away an object.
const FETCHES_MAX: u32 = 3;
/// Objects that are being saved at a time: their pages are kept from others meanwhile.
pub const SAVES_MAX: usize = 4;
/// How long a fetch may take: this, and so much more per 1,024 tokens.
const FETCH_BASE: Duration = Duration::from_secs(1);
const FETCH_PER_KI: Duration = Duration::from_millis(250);
/// Nodes of the device's tree that are looked at for what is to be saved before it goes.
const COLDEST: usize = 32;
/// Objects that are removed at a time when a store is emptied.
const EMPTYING: usize = 256;
/// How long a worker that stops goes on writing what it has saved.
const LAST_WRITES: Duration = Duration::from_secs(5);
/// How long it waits after that for what is under way.
const LAST_MOTIONS: Duration = Duration::from_secs(1);

/// What a worker's cache is made of.
#[derive(Debug)]
pub struct CacheParts {
    /// What is where.
    pub tiers: Tiers,
    /// Memory of the host tier.
    pub host: HostMemory,
    /// Threads that copy.
    pub mover: Mover,
}

/// Numbers of a worker's cache at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct CacheNumbers {
    /// What each tier holds, in the order of [`Tier::ALL`]; none where there is no such tier.
    pub used: [Option<TierUse>; 3],
    /// Blocks that the host tier has room for.
    pub host_blocks: u64,
    /// Objects pinned in the host tier, in the order of [`hicache::Part::ALL`].
    pub pinned: [u64; 2],
    /// Whether each store is left alone for a while, in the order of [`Store::ALL`].
    pub paused: [bool; 2],
    /// What each tier has counted.
    pub counters: [TierCounters; 3],
    /// Motions out of each tier, and the microseconds that they took.
    pub climbs: [(u64, u64); 3],
    /// Fetches that ended complete, with a miss, at their deadline.
    pub fetches: [u64; 3],
    /// Prompt tokens that came from each tier.
    pub tokens: [u64; 3],
    /// Objects that were to be saved and had gone before their turn.
    pub saves_late: u64,
}

/// What a motion holds of the worker.
#[derive(Clone, Copy, Debug)]
struct Busy {
    what: Move,
    pages: Option<ObjectPages>,
}

/// A prefix on its way to the device.
#[derive(Debug)]
struct Loading {
    seq: SeqId,
    owner: Owner,
    /// Block pages of the whole prefix, and what is needed to go on; the sequence owns them all.
    blocks: Vec<PageRef>,
    boundary: Option<Boundary>,
    /// Pages that are being filled: for each object its depth in blocks and its pages.
    targets: BTreeMap<ObjectKey, (u32, ObjectPages)>,
    /// Digests of pages that are filled.
    sealed: BTreeMap<PageRef, Vec<PageDigest>>,
    in_motion: usize,
    end: Option<LoadEnd>,
    /// Tokens from each tier.
    tokens: [u64; 3],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LoadEnd {
    Fetched(FetchEnd),
    Cancelled,
}

/// A saved object's turn has not come yet.
#[derive(Clone, Copy, Debug)]
struct Pending {
    key: ObjectKey,
    blocks: u32,
    pages: ObjectPages,
}

/// The tiers of a worker and what binds them to its pools.
#[derive(Debug)]
pub(super) struct Cache {
    pub(super) tiers: Tiers,
    host: HostMemory,
    mover: Mover,
    clock: Clock,
    busy: BTreeMap<MotionId, Busy>,
    pending: VecDeque<Pending>,
    pending_max: usize,
    loading: BTreeMap<FetchId, Loading>,
    next_fetch: u64,
    pub(super) probing: Probing,
    /// The stores are to be emptied.
    emptying: bool,
    numbers: CacheNumbers,
}

impl Cache {
    pub(super) fn new(parts: CacheParts, pending_max: usize) -> Self {
        let CacheParts { tiers, host, mover } = parts;
        Self {
            tiers,
            host,
            mover,
            clock: Clock::start(),
            busy: BTreeMap::new(),
            pending: VecDeque::new(),
            pending_max,
            loading: BTreeMap::new(),
            next_fetch: 0,
            probing: Probing::default(),
            emptying: false,
            numbers: CacheNumbers::default(),
        }
    }

    pub(super) fn now_us(&self) -> u64 {
        self.clock.elapsed().as_micros().try_into().unwrap_or(u64::MAX)
    }

    pub(super) const fn tiers(&self) -> &Tiers {
        &self.tiers
    }

    /// How long until something is due.
    pub(super) fn pause(&self) -> Option<Duration> {
        let due = self.tiers.poll_timeout().into_iter().chain(self.probing.due()).min()?;
        Some(Duration::from_micros(due.saturating_sub(self.now_us())))
    }

    /// See [`Tiers::report_changes`].
    pub(super) fn report_changes(&mut self, most: usize) {
        self.tiers.report_changes(most);
    }

    /// See [`Tiers::poll_change`].
    pub(super) fn poll_change(&mut self) -> Option<(Tier, Change<ObjectKey>)> {
        self.tiers.poll_change()
    }

    /// See [`Tiers::changes_lost`].
    pub(super) fn changes_lost(&self) -> u64 {
        self.tiers.changes_lost()
    }

    /// See [`Tiers::is_in`].
    pub(super) fn is_in(&self, tier: Tier, key: &ObjectKey) -> bool {
        self.tiers.is_in(tier, key)
    }

    /// The object in a slot of host memory.
    pub(super) fn object(&self, slot: Slot) -> Option<&[u8]> {
        self.host.peek(slot)
    }

    /// Whether anything is under way or waits for its turn.
    fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.tiers.motions() == 0 && self.tiers.backlog() == [0, 0, 0]
    }

    pub(super) fn numbers(&self) -> CacheNumbers {
        CacheNumbers {
            used: Tier::ALL.map(|tier| self.tiers.used(tier)),
            host_blocks: self.tiers.limits().host_blocks.into(),
            pinned: self.tiers.pins(),
            paused: Store::ALL.map(|store| self.tiers.is_paused(store)),
            counters: Tier::ALL.map(|tier| self.tiers.counters(tier)),
            ..self.numbers
        }
    }
}

impl Worker {
    /// Saves the blocks that a sequence has sealed since the last call, and with `boundary` what is
    /// needed to go on from their end, if the tree has it.
    pub(super) fn save_prefix(&mut self, id: SeqId, boundary: bool) {
        self.witness_chain(id);
        let (Some(cache), Some(seq)) = (&mut self.cache, self.sequences.get_mut(&id)) else {
            return;
        };
        let waits = cache.tiers.limits().policy == WritePolicy::Back;
        if waits && seq.keep == CacheKeep::AsUsed {
            return;
        }
        let Some(table) = &seq.table else { return };
        let count = (seq.computed / BLOCK_TOKENS).min(seq.chain.len() as u32);
        let from = std::mem::replace(&mut seq.blocks_saved, count).min(count);
        let end = count.checked_sub(1).map(|last| seq.chain[last as usize]);
        let kept = end.filter(|_| boundary).and_then(|end| self.prefixes.boundary_at(&end));
        if let (Some(end), Some(Boundary { window, carry })) = (end, kept)
            && let Ok(window) = window.try_into()
        {
            let pages = ObjectPages::Boundary { window, carry };
            cache.want_save(Pending { key: ObjectKey::boundary(end), blocks: count, pages });
        }
        // The last one first: it is the first that may go again.
        for block in (from..count).rev() {
            let key = ObjectKey::block(seq.chain[block as usize]);
            let pages = ObjectPages::Block(table.blocks()[block as usize]);
            cache.want_save(Pending { key, blocks: block + 1, pages });
        }
        self.pump_saves();
    }

    /// Keeps the prefix that a sequence stands at the end of in host memory, if its request wants
    /// that: the blocks, and at the end of the prompt what is needed to go on from there.
    pub(super) fn pin_prefix(&mut self, id: SeqId) {
        let (Some(cache), Some(seq)) = (&mut self.cache, self.sequences.get(&id)) else { return };
        let now = cache.now_us();
        let until = match seq.keep {
            CacheKeep::AsUsed => return,
            CacheKeep::Seconds(seconds) => now.saturating_add(u64::from(seconds) * 1_000_000),
            CacheKeep::Pinned => u64::MAX,
        };
        let count = ((seq.computed / BLOCK_TOKENS) as usize).min(seq.chain.len());
        let is_last = count >= (seq.prompt_len - 1) / BLOCK_TOKENS as usize;
        let with_boundary = is_last && needs_boundary(self.config.role);
        let mut refused = 0;
        for key in objects_of(&seq.chain, 0, count, with_boundary) {
            refused += usize::from(!cache.tiers.pin(now, key, until));
        }
        if refused > 0 {
            tracing::debug!(request = seq.name, refused, "no room for more pinned objects");
        }
    }
}

impl Cache {
    fn want_save(&mut self, pending: Pending) {
        if self.pending.len() >= self.pending_max {
            self.pending.pop_front();
            self.numbers.saves_late += 1;
        }
        self.pending.push_back(pending);
    }
}

impl Worker {
    /// Begins saves as far as they may begin.
    fn pump_saves(&mut self) {
        let Some(cache) = &mut self.cache else { return };
        let mut saving =
            cache.busy.values().filter(|b| matches!(b.what, Move::Save { .. })).count();
        while saving < SAVES_MAX
            && let Some(Pending { key, blocks, pages }) = cache.pending.pop_front()
        {
            let sealed =
                |page: PageRef| self.pools.pages(page.pool).check(page) == Ok(PageState::Sealed);
            if !pages.iter().all(sealed) {
                cache.numbers.saves_late += 1;
                continue;
            }
            let Some((motion, slot)) = cache.tiers.offer(cache.now_us(), key) else { continue };
            for page in pages.iter() {
                if let Err(error) = self.pools.add_owner(page, Owner::LocalCopy(motion.0)) {
                    panic!("keep the pages of {key} while they are saved: {error}");
                }
            }
            let buffer = cache.host.take(slot);
            let what = Move::Save { key, slot };
            cache.busy.insert(motion, Busy { what, pages: Some(pages) });
            let known = |page| Some((page, self.pools.sealed_digests(page)?.to_vec()));
            let sealed = pages.iter().filter_map(known).collect();
            cache.mover.begin(motion, None, Job::Save { key, blocks, pages, sealed, buffer });
            saving += 1;
        }
        self.act_cache();
    }

    /// A motion has ended.
    pub(super) fn moved(&mut self, report: Report) {
        let Some(cache) = &mut self.cache else { return };
        let Report { motion, outcome, filled, read, sealed, changed, took_us } = report;
        drop(read);
        let Some(Busy { what, pages }) = cache.busy.remove(&motion) else { return };
        let good = outcome == Outcome::Done;
        if let (Move::Save { slot, .. } | Move::Read { slot, .. }, Some(buffer)) = (what, filled) {
            cache.host.put(slot, buffer, good);
        }
        let climb = match what {
            Move::Load { .. } => Some(Tier::Host),
            Move::Read { store, .. } => Some(store.tier()),
            Move::Save { .. } | Move::Write { .. } | Move::Remove { .. } | Move::Probe { .. } => {
                None
            }
        };
        if let Some(tier) = climb {
            let (count, us) = &mut cache.numbers.climbs[tier as usize];
            (*count, *us) = (*count + 1, *us + took_us);
        }
        if let Move::Load { fetch, .. } = what
            && let Some(loading) = cache.loading.get_mut(&fetch)
        {
            loading.in_motion -= 1;
            loading.sealed.extend(sealed);
        }
        let now = cache.now_us();
        if let Err(error) = cache.tiers.handle_done(now, motion, outcome) {
            panic!("report a motion of the cache: {error}");
        }
        if good {
            self.witness_moved(what, pages);
        }
        for page in pages.iter().flat_map(ObjectPages::iter) {
            let (owner, proof) = (Owner::LocalCopy(motion.0), Proof::OwnCompletionDrained);
            if let Err(error) = self.pools.remove_owner(page, owner, Some(proof)) {
                panic!("let go of a page that was copied: {error}");
            }
        }
        if let Some(error) = changed {
            self.save_was_wrong(&error);
        }
        self.act_cache();
        match what {
            Move::Load { fetch, .. } => self.end_loading(fetch),
            Move::Probe { .. } => self.end_probing(),
            _ => {}
        }
        self.empty_stores();
        self.pump_saves();
    }

    /// Saves what would go first from the device, for the policy that saves then: when an eighth of
    /// its pages is left, or too few for what is looked at. What goes sooner than it could be saved
    /// is lost to the tiers below: nobody waits for a copy.
    fn save_coldest(&mut self) {
        let Some(cache) = &mut self.cache else { return };
        if cache.tiers.limits().policy != WritePolicy::Back || !cache.pending.is_empty() {
            return;
        }
        let is_short = |kind| {
            let counts = self.pools.pages(kind).counts();
            counts.free < (counts.total / 8).max(COLDEST as u32)
        };
        if ![PoolKind::Block, PoolKind::Carry].into_iter().any(is_short) {
            return;
        }
        for (chain, blocks, page, boundary) in self.prefixes.coldest(COLDEST) {
            let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
            let mut offer = |key, pages| {
                if cache.tiers.holds(&key).is_none() {
                    cache.want_save(Pending { key, blocks, pages });
                }
            };
            offer(ObjectKey::block(chain), ObjectPages::Block(page));
            if let Some(Boundary { window, carry }) = boundary.cloned()
                && let Ok(window) = window.try_into()
            {
                offer(ObjectKey::boundary(chain), ObjectPages::Boundary { window, carry });
            }
        }
        self.pump_saves();
    }

    /// Forgets what is kept for later prompts, on the device and in host memory, and with `stores`
    /// in the stores too. Pages that sequences use stay theirs.
    pub(super) fn flush(&mut self, stores: bool) -> Flushed {
        let mut flushed = match self.prefixes.flush(&mut self.pools) {
            Ok((blocks, boundaries)) => Flushed { blocks, boundaries, ..Flushed::default() },
            Err(error) => panic!("give up all kept prefixes: {error}"),
        };
        if let Some(cache) = &mut self.cache {
            cache.pending.clear();
            let sum = |tier| cache.tiers.used(tier).map_or(0, |used| used.objects.iter().sum());
            flushed.host_objects = sum(Tier::Host);
            if stores {
                flushed.stored_objects = sum(Tier::Disk);
                cache.tiers.want_empty(Store::Disk);
                cache.emptying = true;
            }
            cache.tiers.flush_host();
        }
        self.empty_stores();
        flushed
    }

    /// Goes on removing what is stored, a part at a time.
    fn empty_stores(&mut self) {
        let Some(cache) = &mut self.cache else { return };
        if !cache.emptying || cache.tiers.motions() > EMPTYING {
            return;
        }
        cache.emptying = cache.tiers.evict(Store::Disk, EMPTYING) > 0;
        self.act_cache();
    }

    /// Ends what is late, and saves what is about to go.
    pub(super) fn tend_cache(&mut self) {
        self.save_coldest();
        let Some(cache) = &mut self.cache else { return };
        if cache.pause().is_some_and(|pause| pause.is_zero()) {
            cache.tiers.handle_timeout(cache.now_us());
            self.act_cache();
            self.end_probing();
        }
    }

    /// Does what the tiers want done.
    fn act_cache(&mut self) {
        while let Some(action) = self.cache.as_mut().and_then(|cache| cache.tiers.poll_action()) {
            match action {
                Action::Begin { motion, what } => self.begin_motion(motion, what),
                Action::Fetched { fetch, end } => {
                    if let Some(loading) =
                        self.cache.as_mut().and_then(|cache| cache.loading.get_mut(&fetch))
                    {
                        loading.end = Some(LoadEnd::Fetched(end));
                    }
                    self.end_loading(fetch);
                }
            }
        }
    }

    fn begin_motion(&mut self, motion: MotionId, what: Move) {
        let Some(cache) = &mut self.cache else { return };
        let mut busy = Busy { what, pages: None };
        let (store, job) = match what {
            Move::Save { .. } => panic!("saves begin where pages are offered"),
            Move::Load { key, slot, fetch } => {
                let Some(loading) = cache.loading.get_mut(&fetch) else {
                    panic!("{key} is loaded for a fetch that is not there");
                };
                let Some(&(blocks, pages)) = loading.targets.get(&key) else {
                    panic!("{key} is loaded for a fetch that has no pages for it");
                };
                loading.in_motion += 1;
                busy.pages = Some(pages);
                (None, Job::Load { key, blocks, pages, buffer: cache.host.share(slot) })
            }
            Move::Read { store, key, slot } => {
                (Some(store), Job::Read { key, buffer: cache.host.take(slot) })
            }
            Move::Write { store, key, slot } => {
                (Some(store), Job::Write { key, buffer: cache.host.share(slot) })
            }
            Move::Remove { store, key } => (Some(store), Job::Remove { key }),
            Move::Probe { store, key } => (Some(store), Job::Probe { key }),
        };
        for page in busy.pages.iter().flat_map(ObjectPages::iter) {
            if let Err(error) = self.pools.add_owner(page, Owner::LocalCopy(motion.0)) {
                panic!("give a page to the motion that fills it: {error}");
            }
        }
        cache.busy.insert(motion, busy);
        cache.mover.begin(motion, store, job);
    }

    /// Starts to bring what a waiting prompt will want into host memory, and to look for more of it
    /// where others write too.
    pub(super) fn prefetch(&mut self, id: SeqId) {
        let (Some(cache), Some(seq)) = (&mut self.cache, self.sequences.get_mut(&id)) else {
            return;
        };
        let role = self.config.role;
        let missing = self.prefixes.missing(&cache.tiers, seq, role);
        let keys = missing.map(|missing| missing.objects(&seq.chain)).unwrap_or_default();
        let now = cache.now_us();
        cache.tiers.prefetch(now, keys);
        if cache.tiers.used(Tier::Remote).is_some() {
            let keys = self.prefixes.unknown(&cache.tiers, seq, role, PROBES_OF_PROMPT);
            cache.tiers.probe(now, keys);
        }
        self.act_cache();
    }

    /// Starts to bring the prefix of an admitted sequence to the device, if more of it is below than
    /// there is here; false if not. The sequence starts when that has ended, however it has.
    pub(super) fn fetch_prefix(&mut self, id: SeqId) -> bool {
        let (Some(cache), Some(seq)) = (&mut self.cache, self.sequences.get_mut(&id)) else {
            return false;
        };
        if seq.fetches >= FETCHES_MAX {
            return false;
        }
        let Some(missing) = self.prefixes.missing(&cache.tiers, seq, self.config.role) else {
            return false;
        };
        seq.fetches += 1;
        let keys = missing.objects(&seq.chain);
        if keys.len() > cache.tiers.limits().fetch_objects_max {
            return false;
        }
        let depth = missing.depth;
        let mut loading = match self.reserve_prefix(id, missing) {
            Ok(loading) => loading,
            Err(PoolError::Full(_)) => return false,
            Err(error) => panic!("reserve pages for the prefix of sequence {id}: {error}"),
        };
        let (Some(cache), Some(seq)) = (&mut self.cache, self.sequences.get_mut(&id)) else {
            return false;
        };
        for key in keys.iter().filter(|key| key.part == hicache::Part::Block) {
            if let Some(tier) = cache.tiers.origin(key) {
                loading.tokens[tier as usize] += u64::from(BLOCK_TOKENS);
            }
        }
        let fetch = FetchId(cache.next_fetch);
        cache.next_fetch += 1;
        let now = cache.now_us();
        let limit = FETCH_BASE + FETCH_PER_KI * (depth as u32 * BLOCK_TOKENS).div_ceil(1024);
        let deadline = now + u64::try_from(limit.as_micros()).unwrap_or(u64::MAX);
        if let Err(error) = cache.tiers.fetch(now, fetch, &keys, deadline) {
            tracing::debug!(request = seq.name, %error, "prefix not fetched");
            self.free_loading(&loading);
            return false;
        }
        cache.tiers.touch(&seq.chain[..depth]);
        seq.enter(State::Loading { fetch });
        cache.loading.insert(fetch, loading);
        self.act_cache();
        true
    }

    /// Pages for what is missing, and a share in what is there, owned by the sequence.
    fn reserve_prefix(
        &mut self,
        id: SeqId,
        missing: super::prefix::Missing,
    ) -> Result<Loading, PoolError> {
        let Some(seq) = self.sequences.get(&id) else {
            panic!("reserve pages for sequence {id}, which is not there");
        };
        let owner = seq.owner;
        let mut loading = Loading {
            seq: id,
            owner,
            blocks: Vec::with_capacity(missing.depth),
            boundary: None,
            targets: BTreeMap::new(),
            sealed: BTreeMap::new(),
            in_motion: 0,
            end: None,
            tokens: [0; 3],
        };
        let chain = seq.chain[..missing.depth].to_vec();
        // What is here must not make room for what comes.
        for page in missing.blocks {
            self.pools.add_owner(page, owner)?;
            loading.blocks.push(page);
        }
        if let Some(boundary) = missing.boundary {
            for page in boundary.pages() {
                self.pools.add_owner(page, owner)?;
            }
            loading.boundary = Some(boundary);
        }
        let have = loading.blocks.len();
        let mut fill = || {
            let count = (missing.depth - have) as u32;
            let fresh = self.prefixes.take(&mut self.pools, PoolKind::Block, count, owner)?;
            for (page, hash) in fresh.iter().zip(&chain[have..]) {
                loading.blocks.push(*page);
                let target = (loading.blocks.len() as u32, ObjectPages::Block(*page));
                loading.targets.insert(ObjectKey::block(*hash), target);
            }
            if !missing.wants_boundary || loading.boundary.is_some() {
                return Ok(());
            }
            let carry = self.prefixes.take(&mut self.pools, PoolKind::Carry, 1, owner)?[0];
            let windows = super::prefix::BOUNDARY_WINDOWS;
            let window = self.prefixes.take(&mut self.pools, PoolKind::Window, windows, owner);
            let window = match window {
                Ok(window) => window,
                Err(error) => {
                    self.pools.remove_owner(carry, owner, None)?;
                    return Err(error);
                }
            };
            if let (Ok(pages), Some(end)) = (<[PageRef; 2]>::try_from(&window[..]), chain.last()) {
                let pages = ObjectPages::Boundary { window: pages, carry };
                let target = (missing.depth as u32, pages);
                loading.targets.insert(ObjectKey::boundary(*end), target);
            }
            loading.boundary = Some(Boundary { window, carry });
            Ok(())
        };
        match fill() {
            Ok(()) => Ok(loading),
            Err(error) => {
                self.free_loading(&loading);
                Err(error)
            }
        }
    }

    /// The sequence lets go of the pages of a prefix.
    fn free_loading(&mut self, loading: &Loading) {
        let boundary = loading.boundary.iter().flat_map(Boundary::pages);
        for page in loading.blocks.iter().copied().chain(boundary) {
            if let Err(error) = self.pools.remove_owner(page, loading.owner, None) {
                panic!("free the pages of a prefix of sequence {}: {error}", loading.seq);
            }
        }
    }

    /// The client of a sequence whose prefix is being loaded has gone.
    pub(super) fn cancel_loading(&mut self, fetch: FetchId) {
        let Some(cache) = &mut self.cache else { return };
        cache.tiers.cancel(fetch);
        if let Some(loading) = cache.loading.get_mut(&fetch) {
            loading.end = Some(LoadEnd::Cancelled);
        }
        self.end_loading(fetch);
    }

    /// Goes on once a fetch has ended and none of its pages is in motion.
    fn end_loading(&mut self, fetch: FetchId) {
        let Some(cache) = &mut self.cache else { return };
        let over = |loading: &Loading| loading.in_motion == 0 && loading.end.is_some();
        if !cache.loading.get(&fetch).is_some_and(over) {
            return;
        }
        let Some(loading) = cache.loading.remove(&fetch) else { return };
        let id = loading.seq;
        let Some(seq) = self.sequences.get(&id) else { return self.free_loading(&loading) };
        let name = seq.name.clone();
        match loading.end {
            Some(LoadEnd::Fetched(FetchEnd::Complete)) => {
                cache.numbers.fetches[0] += 1;
                for (total, tokens) in cache.numbers.tokens.iter_mut().zip(loading.tokens) {
                    *total += tokens;
                }
                if let Err(error) = self.keep_loaded(id, &loading) {
                    panic!("keep the prefix of sequence {id}: {error}");
                }
            }
            Some(LoadEnd::Fetched(FetchEnd::Miss { key })) => {
                cache.numbers.fetches[1] += 1;
                tracing::debug!(request = name, %key, "a prefix could not be had whole");
            }
            Some(LoadEnd::Fetched(FetchEnd::TimedOut)) => {
                cache.numbers.fetches[2] += 1;
                tracing::warn!(
                    request = name,
                    "a prefix took too long to come from the cache; it is computed"
                );
                if let Some(seq) = self.sequences.get_mut(&id) {
                    seq.fetches = FETCHES_MAX;
                }
            }
            Some(LoadEnd::Cancelled) | None => {
                self.free_loading(&loading);
                return self.drop_sequence(id);
            }
        }
        self.free_loading(&loading);
        self.start(id);
    }

    /// A prefix is here and right: seals its pages and gives them to the tree.
    fn keep_loaded(&mut self, id: SeqId, loading: &Loading) -> Result<(), PoolError> {
        // What was here of it may have turned out to be wrong meanwhile.
        let boundary = loading.boundary.iter().flat_map(Boundary::pages);
        let is_wrong =
            |page: PageRef| self.pools.pages(page.pool).check(page) == Ok(PageState::Quarantined);
        if loading.blocks.iter().copied().chain(boundary).any(is_wrong) {
            return Ok(());
        }
        for page in loading.targets.values().flat_map(|(_, pages)| pages.iter()) {
            match loading.sealed.get(&page) {
                // They were made, and compared with the tags, on the way.
                Some(digests) => self.pools.seal_as(page, digests.clone())?,
                None => self.pools.seal(page)?,
            }
        }
        let Some(seq) = self.sequences.get_mut(&id) else { return Ok(()) };
        for (total, tokens) in seq.from_tiers.iter_mut().zip(loading.tokens) {
            *total += tokens as u32;
        }
        let depth = loading.blocks.len();
        let chain = seq.chain[..depth].to_vec();
        self.prefixes.adopt(&mut self.pools, &chain, &loading.blocks, loading.boundary.clone())?;
        self.learn_blocks(id, depth);
        Ok(())
    }

    /// What these blocks and the places behind them were made of was wrong: no tier has them any more.
    pub(super) fn forget_below(&mut self, gone: &[ChainHash]) {
        let Some(cache) = &mut self.cache else { return };
        cache.pending.retain(|pending| !gone.contains(&pending.key.chain));
        for hash in gone {
            cache.tiers.give_up(ObjectKey::block(*hash));
            cache.tiers.give_up(ObjectKey::boundary(*hash));
        }
        self.act_cache();
    }

    /// Looks at an object in host memory: its bytes, or what is wrong with it, which is given up then.
    /// None if it has gone.
    pub(super) fn audit_object(
        &mut self,
        key: ObjectKey,
        memory: &ObjectMemory,
    ) -> Option<Result<u64, ObjectError>> {
        let cache = self.cache.as_mut()?;
        let slot = cache.tiers.host_slot(&key)?;
        let object = cache.host.peek(slot)?;
        let bytes = object.len() as u64;
        let result = memory.verify(object, key);
        if result.is_err() {
            cache.tiers.found_wrong(&key);
            self.act_cache();
        }
        Some(result.map(|()| bytes))
    }

    /// Writes what is saved and not written, for a while.
    pub(super) fn close_cache(&mut self) {
        let clock = Clock::start();
        while self.cache.as_ref().is_some_and(|cache| !cache.is_idle())
            && let Some(left) = LAST_WRITES.checked_sub(clock.elapsed())
        {
            match self.inbox.recv_timeout(left) {
                Ok(super::WorkerMsg::Moved(report)) => self.moved(report),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        if let Some(cache) = self.cache.take() {
            if !cache.is_idle() {
                tracing::warn!("the cache had more to write than there was time for");
            }
            cache.mover.stop(LAST_MOTIONS);
        }
    }
}

/// What `role` computes from a prefix: a decode worker asks a peer for the rest, and needs only
/// blocks.
pub(super) const fn needs_boundary(role: Role) -> bool {
    !matches!(role, Role::Decode)
}
