//! What of a worker's cache routers are told: which blocks can be found where.
//!
//! The tree and the tiers say which blocks to look at again; what is published is the difference
//! between what was published of a block and where it is now. So a copy that is kept by events is
//! right whenever the worker has nothing more to do.
//!
//! A router finds prompts by their tokens, so a block is published as soon as its tokens are known
//! here, which is when a sequence has computed or loaded it. Blocks under a salt are never
//! published: by its tokens anybody's prompt would be sent to where only its own tenant may use it.

use super::{Role, Worker};
use crate::clock::wall_time;
use crate::net::kv_events::wire::{BlockHash, KvEvent, Medium};
use crate::net::kv_events::{EventNumbers, Outlet};
use crate::scheduler::SeqId;
use hicache::tiers::Tier;
use hicache::{ObjectKey, Part};
use kv_pool::{BLOCK_TOKENS, ChainHash, PoolKind};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

/// Changes that wait in the tree and in each tier until the worker looks; if there are more, it
/// looks at everything.
const CHANGES_MAX: usize = 4096;
/// Events of one batch.
const BATCH_EVENTS: usize = 64;
/// Hashes of one event.
const EVENT_HASHES: usize = 1024;

/// What a router has to know of a block.
#[derive(Clone, Debug)]
struct Content {
    parent: Option<BlockHash>,
    tokens: Arc<[u32]>,
}

#[derive(Debug, Default)]
struct Known {
    /// None if it is on disk alone, where tokens of many blocks would be too many.
    content: Option<Content>,
    /// In which media it was published, in the order of [`Medium::ALL`].
    published: [bool; 3],
    /// It is in [`KvEvents::recent`].
    is_recent: bool,
}

/// The books of what was published.
#[derive(Debug)]
pub(super) struct KvEvents {
    outlet: Outlet,
    known: BTreeMap<ChainHash, Known>,
    /// Blocks that were learned or left the device last: they may be on their way to the host, and
    /// are known until so many others were.
    recent: VecDeque<ChainHash>,
    recent_max: usize,
    /// To be looked at.
    touched: Vec<ChainHash>,
    /// Changes that were lost when everything was looked at last.
    lost: u64,
    /// Media of all known blocks in which they are published.
    published: usize,
    events: Vec<KvEvent>,
}

impl KvEvents {
    fn new(outlet: Outlet, recent_max: usize) -> Self {
        Self {
            outlet,
            known: BTreeMap::new(),
            recent: VecDeque::new(),
            recent_max,
            touched: Vec::new(),
            lost: 0,
            published: 0,
            // Whoever asks for all batches begins with nothing.
            events: vec![KvEvent::Cleared],
        }
    }

    pub(super) fn numbers(&self) -> EventNumbers {
        self.outlet.numbers()
    }

    /// The blocks of a chain have these tokens.
    fn learn(&mut self, chain: &[ChainHash], tokens: &[u32]) {
        let (blocks, _) = tokens.as_chunks::<{ BLOCK_TOKENS as usize }>();
        let mut parent = None;
        for (hash, block) in chain.iter().zip(blocks) {
            let known = self.known.entry(*hash).or_default();
            if known.content.is_none() {
                known.content = Some(Content { parent, tokens: block.as_slice().into() });
                self.touched.push(*hash);
                self.note_recent(*hash);
            }
            parent = Some(BlockHash::from(hash));
        }
    }

    fn note_recent(&mut self, hash: ChainHash) {
        let Some(known) = self.known.get_mut(&hash) else { return };
        if std::mem::replace(&mut known.is_recent, true) {
            return;
        }
        self.recent.push_back(hash);
        if self.recent.len() > self.recent_max
            && let Some(oldest) = self.recent.pop_front()
        {
            if let Some(known) = self.known.get_mut(&oldest) {
                known.is_recent = false;
            }
            self.forget(&oldest);
        }
    }

    /// Forgets of a block what is not needed.
    fn forget(&mut self, hash: &ChainHash) {
        let Some(known) = self.known.get_mut(hash).filter(|known| !known.is_recent) else { return };
        match known.published {
            [false, false, false] => drop(self.known.remove(hash)),
            [false, false, true] => known.content = None,
            _ => {}
        }
    }

    /// Notes what has to be said of a block that is in these media now.
    fn look_at(&mut self, hash: &ChainHash, is_in: [bool; 3]) {
        let Some(known) = self.known.get_mut(hash) else { return };
        let had_device = known.published[0];
        for (n, medium) in Medium::ALL.into_iter().enumerate() {
            match (known.published[n], is_in[n]) {
                (false, true) => {
                    // What is not known is not published, and then there is nothing to take back.
                    let Some(Content { parent, tokens }) = known.content.clone() else { continue };
                    let hash = BlockHash::from(hash);
                    self.events.push(KvEvent::Stored { hash, parent, tokens, medium });
                    self.published += 1;
                }
                (true, false) => {
                    push_removed(&mut self.events, BlockHash::from(hash), medium);
                    self.published -= 1;
                }
                _ => continue,
            }
            known.published[n] = is_in[n];
        }
        if had_device && !known.published[0] {
            self.note_recent(*hash);
        }
        self.forget(hash);
    }

    /// Hands over what has happened.
    fn publish(&mut self) {
        let time_s = wall_time().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
        while !self.events.is_empty() {
            let rest = self.events.split_off(self.events.len().min(BATCH_EVENTS));
            self.outlet.publish(time_s, std::mem::replace(&mut self.events, rest));
        }
    }
}

/// Of several in a row, those of one medium are one event.
fn push_removed(events: &mut Vec<KvEvent>, hash: BlockHash, medium: Medium) {
    for event in events.iter_mut().rev().take(Medium::ALL.len()) {
        match event {
            KvEvent::Removed { hashes, medium: other }
                if *other == medium && hashes.len() < EVENT_HASHES =>
            {
                return hashes.push(hash);
            }
            KvEvent::Removed { .. } => {}
            KvEvent::Stored { .. } | KvEvent::Cleared => break,
        }
    }
    events.push(KvEvent::Removed { hashes: vec![hash], medium });
}

impl Worker {
    /// Publishes from now on what the worker's cache gains and loses; after
    /// [`Worker::cache_in`], if there is to be one.
    pub fn publish_events(&mut self, outlet: Outlet) {
        self.prefixes.report_changes(CHANGES_MAX);
        if let Some(cache) = &mut self.cache {
            cache.report_changes(CHANGES_MAX);
        }
        // Saves that wait are at most as many, and some are under way.
        let recent_max = self.pools.count(PoolKind::Block) as usize + super::cache::SAVES_MAX;
        let mut events = KvEvents::new(outlet, recent_max);
        events.publish();
        self.events = Some(events);
    }

    /// The tokens of a sequence's first blocks are known, and may be told.
    pub(super) fn learn_blocks(&mut self, id: SeqId, blocks: usize) {
        let (Some(events), Some(seq)) = (&mut self.events, self.sequences.get(&id)) else { return };
        if seq.salt.is_empty() {
            events.learn(&seq.chain[..blocks.min(seq.chain.len())], &seq.tokens);
        }
        self.tell_events();
    }

    /// Tells routers what has changed since the last call.
    pub(super) fn tell_events(&mut self) {
        let Some(events) = &mut self.events else { return };
        while let Some(change) = self.prefixes.poll_change() {
            events.touched.push(*change.key());
        }
        let mut lost = self.prefixes.changes_lost();
        if let Some(cache) = &mut self.cache {
            while let Some((_, change)) = cache.poll_change() {
                if change.key().part == Part::Block {
                    events.touched.push(change.key().chain);
                }
            }
            lost += cache.changes_lost();
        }
        if std::mem::replace(&mut events.lost, lost) != lost {
            events.touched.extend(events.known.keys());
        }
        for hash in std::mem::take(&mut events.touched) {
            let below = |tier| {
                let key = ObjectKey::block(hash);
                self.cache.as_ref().is_some_and(|cache| cache.is_in(tier, &key))
            };
            let is_in = [self.prefixes.contains(&hash), below(Tier::Host), below(Tier::Disk)];
            events.look_at(&hash, is_in);
        }
        events.publish();
    }

    /// After a flush, tells routers that nothing is left, if that is so.
    pub(super) fn tell_flushed(&mut self) {
        self.tell_events();
        let Some(events) = &mut self.events else { return };
        if events.published == 0 {
            events.events.push(KvEvent::Cleared);
            events.publish();
        }
    }
}

/// Which worker of a process publishes: that which computes prompts, where there is one.
#[must_use]
pub const fn publishes(role: Role, is_alone: bool) -> bool {
    is_alone || !matches!(role, Role::Decode)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::kv_events::unserved;
    use std::collections::BTreeSet;

    const RECENT: usize = 8;
    const BLOCK: usize = BLOCK_TOKENS as usize;

    /// Prompts that share beginnings, and their chains.
    fn prompts() -> Vec<(Vec<ChainHash>, Vec<u32>)> {
        let prompt = |n: u32| {
            let first = |block: u32| if block < 2 { n / 4 } else { n };
            let tokens: Vec<u32> = (0..6)
                .flat_map(|block| (0..256).map(move |t| first(block) << 16 | block << 8 | t))
                .collect();
            let hash = |end: u32| {
                let mut bytes = [0; 32];
                bytes[0] = end as u8;
                bytes[1] = first(end - 1) as u8;
                ChainHash(bytes)
            };
            ((1..=6).map(hash).collect(), tokens)
        };
        (0..12).map(prompt).collect()
    }

    /// What a router believes.
    fn follow(mirror: &mut BTreeSet<(Medium, BlockHash)>, events: &mut KvEvents) {
        for event in std::mem::take(&mut events.events) {
            match event {
                KvEvent::Stored { hash, medium, tokens, .. } => {
                    assert_eq!(tokens.len(), BLOCK);
                    assert!(mirror.insert((medium, hash)), "stored twice");
                }
                KvEvent::Removed { hashes, medium } => {
                    assert!(hashes.into_iter().all(|hash| mirror.remove(&(medium, hash))));
                }
                KvEvent::Cleared => assert!(mirror.is_empty()),
            }
        }
    }

    #[test]
    fn what_was_published_is_where_known_blocks_are_and_the_books_stay_small() {
        let mut state = 3_u64;
        let mut below = |n: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % n
        };
        let prompts = prompts();
        let mut events = KvEvents::new(unserved(), RECENT);
        let mut mirror = BTreeSet::new();
        let mut there: BTreeMap<ChainHash, [bool; 3]> = BTreeMap::new();
        let mut seen = [0_usize; 4];
        for _ in 0..20_000 {
            let (chain, tokens) = &prompts[below(prompts.len())];
            if below(3) == 0 {
                events.learn(&chain[..below(chain.len() + 1)], tokens);
            } else {
                let hash = chain[below(chain.len())];
                there.entry(hash).or_default()[below(3)] ^= true;
                events.touched.push(hash);
            }
            for hash in std::mem::take(&mut events.touched) {
                events.look_at(&hash, there.get(&hash).copied().unwrap_or_default());
            }
            follow(&mut mirror, &mut events);
            assert_eq!(events.published, mirror.len());
            assert!(events.recent.len() <= RECENT);
            let with_tokens = events.known.values().filter(|known| known.content.is_some());
            let above_disk = there.values().filter(|is_in| is_in[0] || is_in[1]).count();
            assert!(with_tokens.count() <= above_disk + RECENT);
            for (hash, is_in) in &there {
                let name = BlockHash::from(hash);
                let told = Medium::ALL.map(|medium| mirror.contains(&(medium, name)));
                let known = events.known.get(hash);
                if known.is_some_and(|known| known.content.is_some()) {
                    assert_eq!(told, *is_in, "what is known is told");
                }
                let is_true = told.iter().zip(is_in).all(|(told, is_in)| !told || *is_in);
                assert!(is_true, "what is told is true");
                assert_eq!(
                    known.is_some_and(|known| known.published != [false; 3]),
                    told != [false; 3]
                );
            }
            for (n, medium) in Medium::ALL.into_iter().enumerate() {
                seen[n] += usize::from(mirror.iter().any(|(other, _)| *other == medium));
            }
            seen[3] += usize::from(events.known.values().any(|known| known.content.is_none()));
        }
        assert!(seen.iter().all(|times| *times > 1000), "{seen:?}");
    }

    /// A copy to the host may end after the pages have gone.
    #[test]
    fn block_that_left_the_device_is_known_until_its_copy_can_have_arrived() {
        let prompts = prompts();
        let mut events = KvEvents::new(unserved(), RECENT);
        let look = |events: &mut KvEvents, hash: &ChainHash, is_in| {
            events.touched.clear();
            events.events.clear();
            events.look_at(hash, is_in);
            events.events.len()
        };
        let (chain, tokens) = &prompts[0];
        events.learn(&chain[..1], tokens);
        assert_eq!(look(&mut events, &chain[0], [true, false, false]), 1);
        // So many others that it is no longer one of the last that were learned.
        let others = |n: usize| (&prompts[4 + n].0, &prompts[4 + n].1);
        for n in [0, 4] {
            events.learn(others(n).0, others(n).1);
        }
        assert_eq!(look(&mut events, &chain[0], [false; 3]), 1);
        assert_eq!(look(&mut events, &chain[0], [false, true, false]), 1, "it is known still");
        assert_eq!(look(&mut events, &chain[0], [false; 3]), 1);
        for n in [1, 2, 3, 5, 6, 7] {
            events.learn(others(n).0, others(n).1);
        }
        assert_eq!(look(&mut events, &chain[0], [false, true, false]), 0, "and not for ever");
    }

    #[test]
    fn parents_and_tokens_are_those_of_the_prompt() {
        let (chain, tokens) = prompts().remove(0);
        let mut events = KvEvents::new(unserved(), 100);
        events.events.clear();
        events.learn(&chain[..3], &tokens);
        for hash in std::mem::take(&mut events.touched) {
            events.look_at(&hash, [true, false, true]);
        }
        for (n, pair) in events.events.chunks(2).enumerate() {
            for (event, medium) in pair.iter().zip([Medium::Device, Medium::Disk]) {
                let expected = KvEvent::Stored {
                    hash: BlockHash::from(&chain[n]),
                    parent: n.checked_sub(1).map(|before| BlockHash::from(&chain[before])),
                    tokens: tokens[n * BLOCK..(n + 1) * BLOCK].into(),
                    medium,
                };
                assert_eq!(*event, expected);
            }
        }
        assert_eq!(events.events.len(), 6);
        events.events.clear();
        for hash in &chain[..3] {
            events.look_at(hash, [false; 3]);
        }
        let removed = |medium| {
            let hashes = chain[..3].iter().map(BlockHash::from).collect();
            KvEvent::Removed { hashes, medium }
        };
        assert_eq!(events.events, [removed(Medium::Device), removed(Medium::Disk)]);
    }
}
