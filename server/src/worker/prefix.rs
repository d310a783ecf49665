//! Prefixes that stay in a worker's pages when their sequence has ended, for later prompts that
//! begin with the same tokens.
//!
//! Pages that only the tree holds are promised to nobody: they are taken back, least recently used
//! first, whenever a sequence needs a page and none is free.

use super::cache::needs_boundary;
use super::sequence::{Origin, Sequence, State};
use super::{Role, Worker};
pub use crate::glue::objects::BOUNDARY_WINDOWS;
use crate::glue::pools::{PoolError, Pools};
use crate::scheduler::SeqId;
use hicache::tiers::{Tiers, objects_of};
use hicache::{Action, Boundary, Change, Config, Hit, NodeId, ObjectKey, PrefixTree};
use kv_pool::{
    BLOCK_TOKENS, ChainHash, Fingerprint, Namespace, Owner, PageRef, PoolKind, WINDOW_PAGE_ROWS,
};
use std::collections::BTreeSet;

/// Prompts stop at least this often, in tokens, at a place where another one can go on.
const BOUNDARY_EVERY: u32 = 2048;

/// What of a prefix is below the device and not on it.
#[derive(Debug)]
pub(super) struct Missing {
    /// Blocks of the prefix.
    pub(super) depth: usize,
    /// Pages of those that are here, the first ones.
    pub(super) blocks: Vec<PageRef>,
    /// Whether something is needed to go on from its end.
    pub(super) wants_boundary: bool,
    /// That, if it is here.
    pub(super) boundary: Option<Boundary>,
}

impl Missing {
    /// Names of the objects.
    pub(super) fn objects(&self, chain: &[ChainHash]) -> Vec<ObjectKey> {
        let with_boundary = self.wants_boundary && self.boundary.is_none();
        objects_of(chain, self.blocks.len(), self.depth, with_boundary)
    }
}

/// Blocks of a sequence that could come from a cache. The last token is computed, for its logits; a
/// decode worker gets those from its peer.
fn wanted_blocks(seq: &Sequence, role: Role) -> usize {
    let tokens = if needs_boundary(role) { seq.tokens.len() - 1 } else { seq.tokens.len() };
    (tokens / BLOCK_TOKENS as usize).min(seq.chain.len())
}

/// The prefix tree of a worker and what binds it to the worker's pools.
#[derive(Debug)]
pub(super) struct Prefixes {
    /// None if every prompt is to be computed from its first token.
    tree: Option<PrefixTree>,
    fingerprint: Fingerprint,
}

impl Prefixes {
    /// An empty tree over the pools of a worker; with `enabled` false it stays empty.
    pub(super) fn new(role: Role, pools: &Pools, fingerprint: Fingerprint, enabled: bool) -> Self {
        let config = Config {
            blocks_max: pools.count(PoolKind::Block) as usize,
            boundaries_max: pools.count(PoolKind::Carry) as usize,
            // A sequence owns the pages that it shares, so nothing is pinned.
            leases_max: 0,
            keep_blocks: role == Role::Decode,
        };
        let tree = enabled.then(|| PrefixTree::new(config));
        Self { tree, fingerprint }
    }

    /// Pages that the tree holds, in use by sequences as well or not.
    pub(super) fn held(&self, kind: PoolKind) -> u64 {
        let Some(tree) = &self.tree else { return 0 };
        match kind {
            PoolKind::Block => tree.blocks() as u64,
            PoolKind::Window => tree.boundaries() as u64 * u64::from(BOUNDARY_WINDOWS),
            PoolKind::Carry => tree.boundaries() as u64,
        }
    }

    /// Counted since start.
    pub(super) fn counters(&self) -> hicache::Counters {
        self.tree.as_ref().map(PrefixTree::counters).unwrap_or_default()
    }

    /// See [`PrefixTree::report_changes`].
    pub(super) fn report_changes(&mut self, most: usize) {
        if let Some(tree) = &mut self.tree {
            tree.report_changes(most);
        }
    }

    /// See [`PrefixTree::poll_change`].
    pub(super) fn poll_change(&mut self) -> Option<Change<ChainHash>> {
        self.tree.as_mut()?.poll_change()
    }

    /// See [`PrefixTree::changes_lost`].
    pub(super) fn changes_lost(&self) -> u64 {
        self.tree.as_ref().map_or(0, PrefixTree::changes_lost)
    }

    /// See [`PrefixTree::contains`].
    pub(super) fn contains(&self, hash: &ChainHash) -> bool {
        self.tree.as_ref().is_some_and(|tree| tree.contains(hash))
    }

    /// Where the computation of a prompt stops next.
    pub(super) fn stop(&self, computed: u32, end: u32) -> u32 {
        if self.tree.is_some() { next_stop(computed, end) } else { end }
    }

    /// Takes pages for one owner, from the tree where none is free.
    pub(super) fn take(
        &mut self,
        pools: &mut Pools,
        kind: PoolKind,
        count: u32,
        owner: Owner,
    ) -> Result<Vec<PageRef>, PoolError> {
        while pools.pages(kind).counts().free < count && self.give_back(pools, kind)? {}
        pools.take(kind, count, owner)
    }

    /// Gives up the least recently used page of a kind; false if there is none. It may be in use
    /// by a sequence still, so that nothing becomes free by it.
    fn give_back(&mut self, pools: &mut Pools, kind: PoolKind) -> Result<bool, PoolError> {
        let Some(tree) = &mut self.tree else { return Ok(false) };
        let gone = match kind {
            PoolKind::Block => tree.evict_blocks(1),
            PoolKind::Window | PoolKind::Carry => tree.evict_boundaries(1),
        };
        self.act(pools)?;
        Ok(gone > 0)
    }

    /// Does in the pools what the tree wants done.
    fn act(&mut self, pools: &mut Pools) -> Result<(), PoolError> {
        while let Some(action) = self.tree.as_mut().and_then(PrefixTree::poll_action) {
            match action {
                Action::Retain { owner, page } => pools.add_owner(page, owner)?,
                Action::Release { owner, page } => {
                    pools.remove_owner(page, owner, None)?;
                }
            }
        }
        Ok(())
    }

    /// Extends a sequence's hashes to all its full blocks.
    fn hash(&self, Sequence { chain, tokens, salt, .. }: &mut Sequence) {
        if tokens.len() / BLOCK_TOKENS as usize <= chain.len() {
            return;
        }
        let namespace = Namespace::new(self.fingerprint, salt.as_bytes());
        let mut parent = chain.last().copied().unwrap_or_else(|| namespace.root());
        let (full, _) = tokens.as_chunks::<{ BLOCK_TOKENS as usize }>();
        for block in full.iter().skip(chain.len()) {
            parent = namespace.next(&parent, block);
            chain.push(parent);
        }
    }

    /// What of a prompt need not be computed; its last token always is, for its logits.
    fn find(&mut self, seq: &mut Sequence) -> Option<Hit> {
        self.tree.as_ref()?;
        self.hash(seq);
        let most = (seq.tokens.len() - 1) / BLOCK_TOKENS as usize;
        self.tree.as_mut()?.lookup(&seq.chain, most)
    }

    /// Tokens of a sequence that need not be computed, as it looks now.
    pub(super) fn reach(&self, tiers: Option<&Tiers>, seq: &mut Sequence, role: Role) -> u32 {
        let Some(tree) = &self.tree else { return 0 };
        self.hash(seq);
        let chain = &seq.chain[..wanted_blocks(seq, role)];
        let here = tree.peek_blocks(chain).len();
        let boundary = |hash: &ChainHash| tree.has_boundary(hash);
        let blocks = if needs_boundary(role) {
            let device = (1..=here).rev().find(|depth| boundary(&chain[depth - 1])).unwrap_or(0);
            let below =
                tiers.and_then(|tiers| tiers.reach(chain, here, device, chain.len(), boundary));
            below.unwrap_or(device)
        } else {
            tiers.map_or(here, |tiers| tiers.reach_blocks(chain, here, chain.len()))
        };
        blocks as u32 * BLOCK_TOKENS
    }

    /// The longest prefix of a sequence that is below the device and, as it is needed, not on it.
    pub(super) fn missing(
        &mut self,
        tiers: &Tiers,
        seq: &mut Sequence,
        role: Role,
    ) -> Option<Missing> {
        self.tree.as_ref()?;
        self.hash(seq);
        let tree = self.tree.as_ref()?;
        let wants_boundary = needs_boundary(role);
        let most = wanted_blocks(seq, role);
        let chain = &seq.chain[..most];
        let mut blocks = tree.peek_blocks(chain);
        let depth = if wants_boundary {
            let floor = (0..=blocks.len())
                .rev()
                .find(|&depth| depth == 0 || tree.has_boundary(&chain[depth - 1]))?;
            tiers.reach(chain, blocks.len(), floor, most, |hash| tree.has_boundary(hash))?
        } else {
            Some(tiers.reach_blocks(chain, blocks.len(), most)).filter(|n| *n > blocks.len())?
        };
        blocks.truncate(depth);
        let end = chain.get(depth.checked_sub(1)?)?;
        let boundary = if wants_boundary { tree.boundary(end).cloned() } else { None };
        Some(Missing { depth, blocks, wants_boundary, boundary })
    }

    /// The first objects, of at most so many, that a prompt would want and that are neither here nor
    /// known to be in a tier: blocks, and what is needed to go on from the end of each.
    pub(super) fn unknown(
        &self,
        tiers: &Tiers,
        seq: &Sequence,
        role: Role,
        objects_max: usize,
    ) -> Vec<ObjectKey> {
        let Some(tree) = &self.tree else { return Vec::new() };
        let chain = &seq.chain[..wanted_blocks(seq, role)];
        let here = tree.peek_blocks(chain).len();
        let reach = tiers.reach_blocks(chain, here, chain.len());
        let objects = chain[reach..].iter().flat_map(|hash| {
            let boundary = needs_boundary(role).then(|| ObjectKey::boundary(*hash));
            std::iter::once(ObjectKey::block(*hash)).chain(boundary)
        });
        objects.take(objects_max).collect()
    }

    /// Blocks that would go first, see [`PrefixTree::coldest`].
    pub(super) fn coldest(
        &self,
        count: usize,
    ) -> impl Iterator<Item = (ChainHash, usize, PageRef, Option<&Boundary>)> {
        self.tree.iter().flat_map(move |tree| tree.coldest(count))
    }

    /// Gives up all that is kept; how many blocks and boundaries that were.
    pub(super) fn flush(&mut self, pools: &mut Pools) -> Result<(u64, u64), PoolError> {
        let Some(tree) = &mut self.tree else { return Ok((0, 0)) };
        let kept = (tree.blocks() as u64, tree.boundaries() as u64);
        tree.evict_boundaries(usize::MAX);
        tree.evict_blocks(usize::MAX);
        self.act(pools)?;
        Ok(kept)
    }

    /// Gives up a node that holds wrong bytes, and what follows it. The hashes of what went; those who
    /// compute with any of its blocks are added to `users`.
    pub(super) fn give_up(
        &mut self,
        pools: &mut Pools,
        node: u64,
        users: &mut BTreeSet<SeqId>,
    ) -> Result<Vec<ChainHash>, PoolError> {
        let Some(tree) = &mut self.tree else { return Ok(Vec::new()) };
        let gone = tree.give_up(NodeId(node));
        for (_, page) in &gone {
            let owners = pools.pages(page.pool).owners(*page).unwrap_or_default();
            users.extend(owners.iter().filter_map(|owner| match owner {
                Owner::Sequence(id) => Some(*id),
                Owner::Tree(_) | Owner::LocalCopy(_) | Owner::RemoteReader(_) => None,
            }));
        }
        self.act(pools)?;
        Ok(gone.into_iter().map(|(hash, _)| hash).collect())
    }

    /// The prefix that a node of the tree ends, and its blocks.
    pub(super) fn prefix_of(&self, node: u64) -> Option<(ChainHash, usize)> {
        self.tree.as_ref()?.prefix_of(NodeId(node))
    }

    /// Hashes of the full blocks of a text, and the pages of those that are here.
    pub(super) fn blocks_of(&self, tokens: &[u32], salt: &str) -> (Vec<ChainHash>, Vec<PageRef>) {
        let namespace = Namespace::new(self.fingerprint, salt.as_bytes());
        let mut parent = namespace.root();
        let (full, _) = tokens.as_chunks::<{ BLOCK_TOKENS as usize }>();
        let chain: Vec<ChainHash> = full
            .iter()
            .map(|block| {
                parent = namespace.next(&parent, block);
                parent
            })
            .collect();
        let pages = self.tree.as_ref().map(|tree| tree.peek_blocks(&chain)).unwrap_or_default();
        (chain, pages)
    }

    /// What is kept to go on from the end of a prefix.
    pub(super) fn boundary_at(&self, end: &ChainHash) -> Option<Boundary> {
        self.tree.as_ref()?.boundary(end).cloned()
    }

    /// Takes over a prefix that came from below.
    pub(super) fn adopt(
        &mut self,
        pools: &mut Pools,
        chain: &[ChainHash],
        blocks: &[PageRef],
        boundary: Option<Boundary>,
    ) -> Result<(), PoolError> {
        let Some(tree) = &mut self.tree else { return Ok(()) };
        if let Err(error) = tree.insert(chain, blocks, boundary) {
            tracing::debug!(%error, "a prefix from below was not kept");
        }
        self.act(pools)
    }

    /// Keeps the blocks that a sequence has computed, and with `snapshot` what is needed to go on
    /// from where it stands. Says whether that place is kept now.
    fn keep(
        &mut self,
        pools: &mut Pools,
        seq: &mut Sequence,
        snapshot: bool,
    ) -> Result<bool, PoolError> {
        if self.tree.is_none() {
            return Ok(false);
        }
        self.hash(seq);
        let count = (seq.computed / BLOCK_TOKENS) as usize;
        let Some(end) = count.checked_sub(1).and_then(|last| seq.chain.get(last)).copied() else {
            return Ok(false);
        };
        let is_known = self.tree.as_ref().is_some_and(|tree| tree.has_boundary(&end));
        let boundary = if snapshot && !is_known { self.snapshot(pools, seq)? } else { None };
        let carry = boundary.as_ref().map(|boundary| boundary.carry);
        let (Some(tree), Some(table)) = (&mut self.tree, &seq.table) else { return Ok(false) };
        if boundary.is_some() || !snapshot {
            let result = tree.insert(&seq.chain[..count], &table.blocks()[..count], boundary);
            if let Err(error) = result {
                tracing::debug!(sequence = seq.id, %error, "prefix not kept");
            }
        }
        let kept = tree.has_boundary(&end);
        self.act(pools)?;
        if let Some(carry) = carry {
            pools.remove_owner(carry, seq.owner, None)?;
        }
        Ok(kept)
    }

    /// The pages to go on from the 256-token boundary where a sequence stands: its own last window
    /// pages, and a copy of its carry, which belongs to the sequence until the tree has it. None if
    /// there is no page for the copy.
    fn snapshot(
        &mut self,
        pools: &mut Pools,
        seq: &Sequence,
    ) -> Result<Option<Boundary>, PoolError> {
        let Some(table) = &seq.table else { return Ok(None) };
        let end = seq.computed / WINDOW_PAGE_ROWS - table.window_first_no();
        let Some(first) = end.checked_sub(BOUNDARY_WINDOWS) else { return Ok(None) };
        let window = table.window()[first as usize..end as usize].to_vec();
        let carry = match self.take(pools, PoolKind::Carry, 1, seq.owner) {
            Ok(pages) => pages[0],
            Err(PoolError::Full(_)) => return Ok(None),
            Err(error) => return Err(error),
        };
        pools.copy_page(table.carry(), carry)?;
        pools.seal(carry)?;
        Ok(Some(Boundary { window, carry }))
    }
}

/// Where the computation of a prompt stops next on its way from `computed` to `end`: so that
/// something is kept every [`BOUNDARY_EVERY`] tokens and at the last full block before the end.
fn next_stop(computed: u32, end: u32) -> u32 {
    let mark = (computed / BOUNDARY_EVERY + 1) * BOUNDARY_EVERY;
    let last = end.saturating_sub(1) / BLOCK_TOKENS * BLOCK_TOKENS;
    match last {
        last if mark < last => mark,
        last if computed < last => last,
        _ => end,
    }
}

impl Worker {
    /// Shares the pages of the longest kept prefix with a sequence that is about to compute its
    /// prompt, and has just its carry page.
    pub(super) fn reuse(&mut self, id: SeqId) -> Result<(), PoolError> {
        let Some(seq) = self.sequences.get_mut(&id) else { return Ok(()) };
        let Some(hit) = self.prefixes.find(seq) else { return Ok(()) };
        let Some(table) = seq.table.as_mut() else { return Ok(()) };
        self.pools.copy_page(hit.boundary.carry, table.carry())?;
        for &page in &hit.blocks {
            self.pools.add_owner(page, seq.owner)?;
            table.push_block(page);
        }
        let blocks = hit.blocks.len() as u32;
        seq.computed = blocks * BLOCK_TOKENS;
        seq.cached = seq.computed;
        seq.blocks_sealed = blocks;
        seq.windows_sealed = seq.computed / WINDOW_PAGE_ROWS;
        table.start_window(seq.windows_sealed - hit.boundary.window.len() as u32);
        for &page in &hit.boundary.window {
            self.pools.add_owner(page, seq.owner)?;
            table.push_window(page);
        }
        if matches!(seq.origin, Origin::Audit) {
            return Ok(());
        }
        self.numbers.reused_tokens += u64::from(seq.cached);
        self.witness_reused(id);
        self.pin_prefix(id);
        // It may have gone from below meanwhile, or be worth saving now that it is used again.
        self.save_prefix(id, true);
        Ok(())
    }

    /// Blocks of a prompt that need not be pulled, with the sequence as an owner.
    pub(super) fn reuse_blocks(&mut self, id: SeqId) -> Result<Vec<PageRef>, PoolError> {
        let Some(seq) = self.sequences.get_mut(&id) else { return Ok(Vec::new()) };
        self.prefixes.hash(seq);
        let Some(tree) = &mut self.prefixes.tree else { return Ok(Vec::new()) };
        let pages = tree.lookup_blocks(&seq.chain, seq.chain.len());
        for &page in &pages {
            self.pools.add_owner(page, seq.owner)?;
        }
        self.numbers.reused_tokens += pages.len() as u64 * u64::from(BLOCK_TOKENS);
        Ok(pages)
    }

    /// Keeps the blocks of a prompt that has arrived.
    pub(super) fn keep_blocks(&mut self, id: SeqId) -> Result<(), PoolError> {
        let Some(seq) = self.sequences.get_mut(&id) else { return Ok(()) };
        self.prefixes.keep(&mut self.pools, seq, false)?;
        let blocks = (seq.computed / BLOCK_TOKENS) as usize;
        self.learn_blocks(id, blocks);
        self.pin_prefix(id);
        self.save_prefix(id, false);
        Ok(())
    }

    /// Keeps what a sequence has computed if it stands where that can be of use: where its prompt
    /// stops ([`next_stop`]), at the end of one of full blocks, or behind a full block of output.
    pub(super) fn keep_boundary(&mut self, id: SeqId) -> Result<(), PoolError> {
        let Some(seq) = self.sequences.get_mut(&id) else { return Ok(()) };
        // What an audit computes is compared with what is kept, and not kept itself.
        if !seq.computed.is_multiple_of(BLOCK_TOKENS) || matches!(seq.origin, Origin::Audit) {
            return Ok(());
        }
        let decoding = seq.state == State::Decoding;
        if !(decoding || seq.state == State::Prefilling && seq.computed == seq.leg_end) {
            return Ok(());
        }
        let kept = self.prefixes.keep(&mut self.pools, seq, true)?;
        let blocks = (seq.computed / BLOCK_TOKENS) as usize;
        self.learn_blocks(id, blocks);
        if !decoding {
            self.pin_prefix(id);
        }
        // Of an output the boundary is saved when it has ended.
        self.save_prefix(id, !decoding);
        let Some(seq) = self.sequences.get_mut(&id) else { return Ok(()) };
        if !kept || !decoding {
            return Ok(());
        }
        // Of a long output only the last boundary is worth its pages.
        let hash = seq.chain[(seq.computed / BLOCK_TOKENS) as usize - 1];
        if let Some(before) = seq.output_boundary.replace(hash)
            && let Some(tree) = &mut self.prefixes.tree
        {
            tree.drop_boundary(&before);
            self.prefixes.act(&mut self.pools)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::next_stop;

    fn stops(from: u32, end: u32) -> Vec<u32> {
        let mut stops = vec![from];
        while let Some(&at) = stops.last().filter(|at| **at < end) {
            stops.push(next_stop(at, end));
        }
        stops
    }

    #[test]
    fn prompts_stop_at_marks_and_at_their_last_full_block() {
        assert_eq!(stops(0, 1), [0, 1]);
        assert_eq!(stops(0, 256), [0, 256]);
        assert_eq!(stops(0, 257), [0, 256, 257]);
        assert_eq!(stops(0, 512), [0, 256, 512]);
        assert_eq!(stops(256, 512), [256, 512]);
        assert_eq!(stops(0, 2048), [0, 1792, 2048]);
        assert_eq!(stops(0, 2049), [0, 2048, 2049]);
        assert_eq!(stops(0, 5000), [0, 2048, 4096, 4864, 5000]);
        assert_eq!(stops(4352, 5000), [4352, 4864, 5000]);
    }
}
