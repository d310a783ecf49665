//! Lookups in a tree of 100,000 blocks, and in tiers that hold as many. Chains of hashes are given:
//! hashing tokens is not measured.

use crate::flash::name;
use crate::report::Report;
use crate::{Begin, Options, Outcome, Random, median};
use hicache::tiers::{Limits, Store, StoreLimits, Tiers, WritePolicy};
use hicache::{Boundary, Config, ObjectKey, PrefixTree};
use kv_pool::{ChainHash, PageRef, PoolKind};
use std::hint::black_box;

const BLOCKS: usize = 100_000;
const QUICK_BLOCKS: usize = 2000;
/// Longest chain: a prompt of 65,536 tokens.
pub(crate) const DEPTH_MAX: usize = 256;
/// Most blocks that a prompt adds to the prefix that it shares with an earlier one.
pub(crate) const NEW_MAX: usize = 32;
const LOOKUPS: usize = 4000;

/// Prompts of which half go on from where an earlier one was at any block.
pub(crate) struct Prompts {
    random: Random,
    chains: Vec<Vec<ChainHash>>,
}

impl Prompts {
    pub(crate) fn new(seed: u64) -> Self {
        Self { random: Random(seed), chains: Vec::new() }
    }

    /// The next prompt, and how many of its blocks are new.
    pub(crate) fn next(&mut self) -> (Vec<ChainHash>, usize) {
        let new = 1 + self.random.below(NEW_MAX);
        let mut chain = Vec::new();
        if !self.chains.is_empty() && self.random.below(2) == 0 {
            // A late one: what is old may be gone.
            let late = self.random.below(self.chains.len().min(512));
            let before = &self.chains[self.chains.len() - 1 - late];
            let shared = 1 + self.random.below(before.len());
            chain = before[..shared.min(DEPTH_MAX - new)].to_vec();
        }
        chain.extend((0..new).map(|_| name(&mut self.random)));
        self.chains.push(chain.clone());
        (chain, new)
    }
}

/// A page of a pool that nobody else uses.
pub(crate) fn page(pool: PoolKind, index: usize) -> PageRef {
    PageRef { pool, index: index as u32, generation: 0 }
}

/// The boundary of the prompt of this number.
pub(crate) fn boundary(number: usize) -> Boundary {
    let window = (0..2).map(|n| page(PoolKind::Window, 2 * number + n)).collect();
    Boundary { window, carry: page(PoolKind::Carry, number) }
}

/// Limits of tiers for so many objects, without a bound on what may wait.
pub(crate) fn limits(host: u32, disk: usize) -> Limits {
    Limits {
        host_blocks: host,
        host_boundaries: host,
        object_bytes: [1 << 20; 2],
        disk: Some(StoreLimits {
            bytes_max: Some((disk as u64) << 20),
            objects_max: disk,
            motions_max: 2,
            owned: true,
        }),
        remote: None,
        policy: WritePolicy::Through,
        saves_max: 4,
        fetches_max: 64,
        fetch_objects_max: DEPTH_MAX + 1,
        prefetch_max: 4096,
        writes_max: 4096,
        probes_max: 0,
        pins_max: [0; 2],
        pause_us: 10_000_000,
        failures_max: 3,
    }
}

pub(crate) fn measure(options: &Options, report: &mut Report) -> Outcome<()> {
    let count = if options.is_quick { QUICK_BLOCKS } else { BLOCKS };
    let config =
        Config { blocks_max: 2 * count, boundaries_max: count, leases_max: 64, keep_blocks: false };
    let (mut tree, mut tiers) = (PrefixTree::new(config), Tiers::new(limits(16, 2 * count)));
    let (mut prompts, mut number) = (Prompts::new(1), 0);
    while tree.blocks() < count {
        let (chain, _) = prompts.next();
        let pages: Vec<_> = (0..chain.len()).map(|n| page(PoolKind::Block, n)).collect();
        tree.insert(&chain, &pages, Some(boundary(number)))?;
        while tree.poll_action().is_some() {}
        for hash in &chain {
            tiers.adopt(Store::Disk, ObjectKey::block(*hash));
        }
        tiers.adopt(Store::Disk, ObjectKey::boundary(*chain.last().expect("it has blocks")));
        number += 1;
    }
    let (mut chains, mut random) = (prompts.chains, Random(2));
    random.shuffle(&mut chains);
    chains.truncate(LOOKUPS);
    let total: usize = chains.iter().map(Vec::len).sum();
    println!(
        "{} blocks of {number} prompts; {} lookups of {:.0} blocks on average, {} rounds",
        tree.blocks(),
        chains.len(),
        total as f64 / chains.len() as f64,
        options.rounds
    );
    let in_tree = rounds(options.rounds, &chains, |chain| {
        tree.lookup(chain, chain.len()).map_or(0, |hit| hit.blocks.len())
    })?;
    let in_tiers = rounds(options.rounds, &chains, |chain| {
        tiers.reach(chain, 0, 0, chain.len(), |_| false).unwrap_or(0)
    })?;
    for (name, (wall, core)) in [("lookup_ns", in_tree), ("tiers_lookup_ns", in_tiers)] {
        println!("{name}: {wall:.0} ns a block, {core:.0} of them on a core");
        report.say(name, wall, "ns");
    }
    Ok(())
}

/// Median over rounds of the nanoseconds for each block that is found, all in all and on a core; all
/// of them are there.
fn rounds(
    rounds: usize,
    chains: &[Vec<ChainHash>],
    mut look: impl FnMut(&[ChainHash]) -> usize,
) -> Outcome<(f64, f64)> {
    let (mut walls, mut cores) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        let (mut found, mut wanted) = (0, 0);
        let begin = Begin::now();
        for chain in chains {
            found += black_box(look(black_box(chain)));
            wanted += chain.len();
        }
        let (wall, core) = begin.elapsed_ns();
        if found != wanted {
            return Err(format!("{found} of {wanted} blocks were found").into());
        }
        if round > 0 {
            walls.push(wall / found as f64);
            cores.push(core / found as f64);
        }
    }
    Ok((median(&walls), median(&cores)))
}
