//! Random traffic against a flat oracle.

use crate::common::{Books, Fresh, chain, keeper, tree};
use hicache::{Boundary, Change, Hit, LeaseId, PrefixTree};
use kv_pool::{ChainHash, PageRef};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const BLOCKS: usize = 7;
const BOUNDARIES: usize = 3;
const LEASES: usize = 4;

type Path = Vec<u8>;

#[derive(Clone, Debug)]
struct Entry {
    block: PageRef,
    boundary: Option<Boundary>,
    used: u64,
    boundary_used: u64,
}

/// All prefixes in one map, searched from end to end for everything.
#[derive(Debug, Default)]
struct Oracle {
    entries: BTreeMap<Path, Entry>,
    leases: BTreeMap<u64, Path>,
    keep_blocks: bool,
    now: u64,
}

fn prefixes(path: &[u8]) -> impl Iterator<Item = Path> + '_ {
    (1..=path.len()).rev().map(|end| path[..end].to_vec())
}

impl Oracle {
    fn pinned(&self, path: &[u8]) -> bool {
        self.leases.values().any(|lease| lease.starts_with(path))
    }

    fn boundary_pinned(&self, path: &[u8]) -> bool {
        self.leases.values().any(|lease| lease == path)
    }

    fn boundaries(&self) -> usize {
        self.entries.values().filter(|entry| entry.boundary.is_some()).count()
    }

    fn is_leaf(&self, path: &[u8]) -> bool {
        !self.entries.keys().any(|other| other.len() > path.len() && other.starts_with(path))
    }

    fn used(&mut self, path: &[u8]) {
        for prefix in prefixes(path) {
            self.now += 1;
            self.entries.get_mut(&prefix).unwrap().used = self.now;
        }
        if !path.is_empty() {
            self.entries.get_mut(path).unwrap().boundary_used = self.now;
        }
    }

    fn lookup(&mut self, path: &[u8], max: usize) -> Option<(Vec<PageRef>, Boundary)> {
        let path = &path[..path.len().min(max)];
        let hit = prefixes(path).find(|prefix| {
            self.entries.get(prefix).is_some_and(|entry| entry.boundary.is_some())
        })?;
        self.used(&hit);
        let mut blocks: Vec<PageRef> =
            prefixes(&hit).map(|prefix| self.entries[&prefix].block).collect();
        blocks.reverse();
        Some((blocks, self.entries[&hit].boundary.clone().unwrap()))
    }

    fn lookup_blocks(&mut self, path: &[u8], max: usize) -> Vec<PageRef> {
        let path = &path[..path.len().min(max)];
        let found = prefixes(path).find(|prefix| self.entries.contains_key(prefix));
        let found = found.unwrap_or_default();
        self.used(&found);
        (1..=found.len()).map(|end| self.entries[&found[..end]].block).collect()
    }

    fn drop_boundary(&mut self, path: &[u8]) -> bool {
        let gone = !self.boundary_pinned(path)
            && self.entries.get_mut(path).is_some_and(|entry| entry.boundary.take().is_some());
        self.prune(&[]);
        gone
    }

    /// Removes leaves that cannot be hit, `keep` and what is before it excepted.
    fn prune(&mut self, keep: &[u8]) {
        if self.keep_blocks {
            return;
        }
        let useless = |oracle: &Self| {
            oracle.entries.iter().find_map(|(path, entry)| {
                let kept = keep.starts_with(path) || oracle.pinned(path);
                let useless = entry.boundary.is_none() && oracle.is_leaf(path) && !kept;
                useless.then(|| path.clone())
            })
        };
        while let Some(path) = useless(self) {
            self.entries.remove(&path);
        }
    }

    fn evict_block(&mut self, keep: &[u8]) -> bool {
        let candidates = self.entries.iter().filter(|(path, _)| {
            self.is_leaf(path) && !self.pinned(path) && !keep.starts_with(path)
        });
        let Some(victim) = candidates.min_by_key(|(_, entry)| entry.used) else { return false };
        let victim = victim.0.clone();
        self.entries.remove(&victim);
        self.prune(keep);
        true
    }

    fn evict_boundary(&mut self, keep: &[u8]) -> bool {
        let candidates = self
            .entries
            .iter()
            .filter(|(path, entry)| entry.boundary.is_some() && !self.boundary_pinned(path));
        let Some(victim) = candidates.min_by_key(|(_, entry)| entry.boundary_used) else {
            return false;
        };
        let victim = victim.0.clone();
        self.entries.get_mut(&victim).unwrap().boundary = None;
        self.prune(keep);
        true
    }

    fn insert(&mut self, path: &[u8], blocks: &[PageRef], boundary: Option<&Boundary>) -> bool {
        if boundary.is_none() && !self.keep_blocks {
            return false;
        }
        let has_boundary = self.entries.get(path).is_some_and(|entry| entry.boundary.is_some());
        let known = prefixes(path).find(|prefix| self.entries.contains_key(prefix));
        let known = known.unwrap_or_default();
        let takes = boundary.is_some() && !has_boundary;
        let kept = |path: &Path| self.pinned(path) || known.starts_with(path);
        let pinned = self.entries.keys().filter(|path| kept(path)).count();
        let held = self.entries.keys().filter(|path| self.boundary_pinned(path)).count();
        if pinned + path.len() - known.len() > BLOCKS || takes && held >= BOUNDARIES {
            return false;
        }
        while self.entries.len() + path.len() - known.len() > BLOCKS {
            assert!(self.evict_block(&known));
        }
        while takes && self.boundaries() >= BOUNDARIES {
            assert!(self.evict_boundary(&known));
        }
        for (end, &block) in (1..=path.len()).zip(blocks) {
            let entry = Entry { block, boundary: None, used: 0, boundary_used: 0 };
            self.entries.entry(path[..end].to_vec()).or_insert(entry);
        }
        let end = self.entries.get_mut(path).unwrap();
        end.boundary = end.boundary.take().or_else(|| boundary.cloned());
        self.used(path);
        true
    }
}

#[derive(Clone, Debug)]
enum Act {
    Lookup(Path, usize),
    LookupBlocks(Path, usize),
    Insert(Path),
    InsertBlocks(Path),
    DropBoundary(Path),
    Pin(u64, Path),
    Unpin(u64),
    EvictBlocks(usize),
    EvictBoundaries(usize),
}

fn act() -> impl Strategy<Value = Act> {
    let path = || prop::collection::vec(0_u8..2, 1..6);
    prop_oneof![
        4 => (path(), 0_usize..6).prop_map(|(path, max)| Act::Lookup(path, max)),
        2 => (path(), 0_usize..6).prop_map(|(path, max)| Act::LookupBlocks(path, max)),
        6 => path().prop_map(Act::Insert),
        2 => path().prop_map(Act::InsertBlocks),
        1 => path().prop_map(Act::DropBoundary),
        4 => (0_u64..5, path()).prop_map(|(lease, path)| Act::Pin(lease, path)),
        2 => (0_u64..5).prop_map(Act::Unpin),
        1 => (0_usize..3).prop_map(Act::EvictBlocks),
        1 => (0_usize..3).prop_map(Act::EvictBoundaries),
    ]
}

fn lookup(tree: &mut PrefixTree, oracle: &mut Oracle, path: &[u8], max: usize) -> Option<Hit> {
    let hit = tree.lookup(&chain(path), max);
    let expected = oracle.lookup(path, max);
    assert_eq!(hit.clone().map(|hit| (hit.blocks, hit.boundary)), expected);
    hit
}

fn step(tree: &mut PrefixTree, oracle: &mut Oracle, fresh: &mut Fresh, act: &Act) {
    match act {
        Act::Lookup(path, max) => {
            lookup(tree, oracle, path, *max);
        }
        Act::LookupBlocks(path, max) => {
            let expected = oracle.lookup_blocks(path, *max);
            assert_eq!(tree.lookup_blocks(&chain(path), *max), expected);
        }
        Act::DropBoundary(path) => {
            let hash = chain(path)[path.len() - 1];
            let had = oracle.entries.get(path).is_some_and(|entry| entry.boundary.is_some());
            assert_eq!(tree.has_boundary(&hash), had);
            assert_eq!(tree.drop_boundary(&hash), oracle.drop_boundary(path));
        }
        Act::Insert(path) | Act::InsertBlocks(path) => {
            let blocks = fresh.blocks(path.len());
            let boundary = matches!(act, Act::Insert(_)).then(|| fresh.boundary());
            let taken = oracle.insert(path, &blocks, boundary.as_ref());
            let result = tree.insert(&chain(path), &blocks, boundary);
            assert_eq!(result.is_ok(), taken, "{result:?}");
        }
        Act::Pin(lease, path) => {
            let Some(hit) = lookup(tree, oracle, path, usize::MAX) else { return };
            let fits = oracle.leases.len() < LEASES && !oracle.leases.contains_key(lease);
            assert_eq!(tree.pin(LeaseId(*lease), &hit).is_ok(), fits);
            if fits {
                oracle.leases.insert(*lease, path[..hit.blocks.len()].to_vec());
            }
        }
        Act::Unpin(lease) => {
            let path = oracle.leases.remove(lease);
            assert_eq!(tree.unpin(LeaseId(*lease)), path.is_some());
            if let Some(path) = path {
                oracle.used(&path);
            }
        }
        Act::EvictBlocks(count) => {
            let before = oracle.entries.len();
            while before - oracle.entries.len() < *count && oracle.evict_block(&[]) {}
            assert_eq!(tree.evict_blocks(*count), before - oracle.entries.len());
        }
        Act::EvictBoundaries(count) => {
            let expected = (0..*count).take_while(|_| oracle.evict_boundary(&[])).count();
            assert_eq!(tree.evict_boundaries(*count), expected);
        }
    }
}

fn compare(tree: &PrefixTree, oracle: &Oracle) {
    assert_eq!(tree.blocks(), oracle.entries.len());
    assert_eq!(tree.boundaries(), oracle.boundaries());
    assert_eq!(tree.leases(), oracle.leases.len());
    assert!(tree.blocks() <= BLOCKS && tree.boundaries() <= BOUNDARIES);
    let mut held: Vec<PageRef> = tree.held().map(|(_, page)| page).collect();
    let boundary = |entry: &Entry| entry.boundary.iter().flat_map(Boundary::pages).collect();
    let mut expected: Vec<PageRef> = oracle.entries.values().map(|entry| entry.block).collect();
    expected.extend(oracle.entries.values().flat_map(|entry| -> Vec<PageRef> { boundary(entry) }));
    held.sort_unstable();
    expected.sort_unstable();
    assert_eq!(held, expected);
    for path in oracle.entries.keys() {
        let leaf = oracle.is_leaf(path);
        let useful = oracle.entries[path].boundary.is_some() || oracle.keep_blocks;
        assert!(!leaf || useful, "a leaf that cannot be hit");
    }
}

/// Blocks that are there, by the changes that were reported; what is behind another came after it.
fn follow(tree: &mut PrefixTree, oracle: &Oracle, mirror: &mut BTreeSet<ChainHash>) {
    while let Some(change) = tree.poll_change() {
        match change {
            Change::Arrived(hash) => assert!(mirror.insert(hash), "{hash:?} came twice"),
            Change::Left(hash) => assert!(mirror.remove(&hash), "{hash:?} left twice"),
        }
    }
    let end_of = |path: &Path| chain(path)[path.len() - 1];
    let there: BTreeSet<ChainHash> = oracle.entries.keys().map(end_of).collect();
    assert_eq!(*mirror, there);
    assert!(there.iter().all(|hash| tree.contains(hash)));
    assert_eq!((tree.blocks(), tree.changes_lost()), (there.len(), 0));
}

/// Failures are printed with their input; no file is written.
fn config() -> ProptestConfig {
    ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn tree_agrees_with_the_flat_oracle(
        acts in prop::collection::vec(act(), 1..120),
        keep_blocks: bool,
    ) {
        let make = if keep_blocks { keeper } else { tree };
        let mut tree = make(BLOCKS, BOUNDARIES, LEASES);
        let mut oracle = Oracle { keep_blocks, ..Oracle::default() };
        let mut fresh = Fresh::default();
        let mut books = Books::default();
        let mut mirror = BTreeSet::new();
        tree.report_changes(4 * BLOCKS);
        for act in &acts {
            step(&mut tree, &mut oracle, &mut fresh, act);
            books.settle(&mut tree);
            compare(&tree, &oracle);
            follow(&mut tree, &oracle, &mut mirror);
        }
        for lease in 0..5 {
            tree.unpin(LeaseId(lease));
        }
        tree.evict_blocks(usize::MAX);
        books.settle(&mut tree);
        prop_assert_eq!((tree.blocks(), tree.boundaries()), (0, 0));
    }
}

/// The random runs are worth something only if they reach evictions, refusals and hits.
#[test]
fn random_runs_reach_every_outcome() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut totals = [0; 6];
    for _ in 0..40 {
        let acts = prop::collection::vec(act(), 120).new_tree(&mut runner).unwrap().current();
        let mut tree = tree(BLOCKS, BOUNDARIES, LEASES);
        let mut oracle = Oracle::default();
        let mut fresh = Fresh::default();
        for act in &acts {
            step(&mut tree, &mut oracle, &mut fresh, act);
        }
        let c = tree.counters();
        let seen = [
            c.hits,
            c.lookups - c.hits,
            c.inserts_refused,
            c.blocks_duplicate,
            c.blocks_evicted - c.blocks_useless,
            c.blocks_useless,
        ];
        for (total, seen) in totals.iter_mut().zip(seen) {
            *total += seen;
        }
    }
    assert!(totals.iter().all(|&total| total > 20), "{totals:?}");
}
