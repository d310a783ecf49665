//! Two conversations that share a system prompt: `cargo run -p hicache --example prefixes`.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "an example shows its results")]

use hicache::{Action, Boundary, Config, LeaseId, PrefixTree};
use kv_pool::{Fingerprint, Namespace, Owner, PagePool, PageRef, PoolKind};

/// The pools whose books the tree's wishes change.
struct Pools([PagePool; 3]);

impl Pools {
    fn of(&mut self, page: PageRef) -> &mut PagePool {
        &mut self.0[page.pool as usize]
    }

    /// Stands in for a forward pass: reserves pages and seals them.
    fn compute(
        &mut self,
        kind: PoolKind,
        count: u32,
        owner: Owner,
    ) -> Result<Vec<PageRef>, Box<dyn std::error::Error>> {
        let pool = &mut self.0[kind as usize];
        let pages = pool.reserve(count, owner)?;
        for &page in &pages {
            pool.begin_fill(page)?;
            pool.seal(page)?;
        }
        Ok(pages)
    }

    fn settle(&mut self, tree: &mut PrefixTree) -> Result<(), Box<dyn std::error::Error>> {
        while let Some(action) = tree.poll_action() {
            match action {
                Action::Retain { owner, page } => self.of(page).add_owner(page, owner)?,
                Action::Release { owner, page } => {
                    let left = self.of(page).remove_owner(page, owner, None)?;
                    println!("{page} released: {left:?}");
                }
            }
        }
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut pools = Pools(PoolKind::ALL.map(|kind| PagePool::new(kind, 16)));
    let mut tree = PrefixTree::new(Config {
        blocks_max: 8,
        boundaries_max: 4,
        leases_max: 4,
        keep_blocks: false,
    });
    let namespace = Namespace::new(Fingerprint([1; 16]), b"tenant");
    let system: Vec<u32> = (0..512).collect();
    for (number, question) in [(1, 7_000), (2, 9_000)] {
        let tokens: Vec<u32> = system.iter().copied().chain(question..question + 300).collect();
        let full = tokens.len() / 256;
        let chain = &namespace.chain(&tokens)[..full];
        // The last token is computed anew: its logits are what the request is about.
        let hit = tree.lookup(chain, (tokens.len() - 1) / 256);
        let known = hit.as_ref().map_or(0, |hit| hit.blocks.len());
        println!("conversation {number}: {known} of {full} blocks found");
        if let Some(hit) = &hit {
            tree.pin(LeaseId(number), hit)?;
        }
        let sequence = Owner::Sequence(number);
        let mut blocks = hit.map_or(Vec::new(), |hit| hit.blocks);
        blocks.extend(pools.compute(PoolKind::Block, (full - known) as u32, sequence)?);
        // Boundaries at the end of the system prompt and at the last full block.
        for end in [2, full] {
            let window = pools.compute(PoolKind::Window, 2, sequence)?;
            let carry = pools.compute(PoolKind::Carry, 1, sequence)?[0];
            let boundary = Boundary { window, carry };
            let inserted = tree.insert(&chain[..end], &blocks[..end], Some(boundary))?;
            println!("  up to block {end}: {inserted:?}");
            pools.settle(&mut tree)?;
        }
        tree.unpin(LeaseId(number));
    }
    tree.evict_blocks(1);
    pools.settle(&mut tree)?;
    println!("{:?}", tree.counters());
    Ok(())
}
