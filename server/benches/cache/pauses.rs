//! How long a worker stands still at most: inserts into a full tree of a million blocks, and offers
//! to full tiers that know a million objects; every one makes others go.

use crate::report::Report;
use crate::tree::{Prompts, boundary, limits, page};
use crate::{Options, Outcome, quantile};
use hicache::tiers::{Action, MotionId, Outcome as Ended, Store, Tiers};
use hicache::{Config, ObjectKey, PrefixTree};
use kv_pool::{ChainHash, PoolKind};
use std::time::Instant;

const BLOCKS: usize = 1_000_000;
const QUICK_BLOCKS: usize = 2000;
/// Prompts that are measured.
const PROMPTS: usize = 40_000;
const QUICK_PROMPTS: usize = 100;

pub(crate) fn measure(options: &Options, report: &mut Report) -> Outcome<()> {
    let (count, prompts) = match options.is_quick {
        true => (QUICK_BLOCKS, QUICK_PROMPTS),
        false => (BLOCKS, PROMPTS),
    };
    let mut worst = [0.0_f64; 2];
    for (what, times) in [
        ("inserts into the tree", inserts(count, prompts)?),
        ("calls of the tiers", offers(count, prompts)?),
    ] {
        let of = |share| quantile(&times, share);
        let [p50, p99, p999, max] = [0.5, 0.99, 0.999, 1.0].map(of);
        println!(
            "{} {what} with {count} blocks: p50 {p50:.1} us, p99 {p99:.1} us, p99.9 {p999:.1} us, \
             longest {max:.1} us (with what the system takes the core away for)",
            times.len()
        );
        worst = [worst[0].max(p999), worst[1].max(max)];
    }
    report.say("pause_us_p999", worst[0], "us");
    report.say("pause_us_max", worst[1], "us");
    Ok(())
}

/// Microseconds of each insert into a full tree, with its actions.
fn inserts(count: usize, prompts: usize) -> Outcome<Vec<f64>> {
    let config = Config {
        blocks_max: count,
        boundaries_max: count / 16,
        leases_max: 64,
        keep_blocks: false,
    };
    let (mut tree, mut all) = (PrefixTree::new(config), Prompts::new(3));
    let (mut number, mut times) = (0, Vec::new());
    while times.len() < prompts {
        let (chain, _) = all.next();
        let pages: Vec<_> = (0..chain.len()).map(|n| page(PoolKind::Block, n)).collect();
        let boundary = boundary(number);
        let is_full = tree.counters().blocks_evicted > 0;
        number += 1;
        let begin = Instant::now();
        tree.insert(&chain, &pages, Some(boundary))?;
        while tree.poll_action().is_some() {}
        let took = begin.elapsed().as_nanos() as f64 / 1e3;
        if is_full {
            times.push(took);
        }
    }
    Ok(times)
}

/// Microseconds of each call that begins or ends a motion of full tiers.
fn offers(count: usize, prompts: usize) -> Outcome<Vec<f64>> {
    let mut tiers = Tiers::new(limits(count as u32 / 8, count));
    let mut all = Prompts::new(4);
    let mut adopted = 0;
    while adopted < count {
        for hash in all.next().0 {
            adopted += usize::from(tiers.adopt(Store::Disk, ObjectKey::block(hash)));
        }
    }
    let mut times = Vec::new();
    for _ in 0..prompts {
        let (chain, new) = all.next();
        let end: ChainHash = *chain.last().ok_or("a prompt has blocks")?;
        let blocks = chain.iter().rev().take(new).map(|hash| ObjectKey::block(*hash));
        for key in std::iter::once(ObjectKey::boundary(end)).chain(blocks) {
            offer(&mut tiers, key, &mut times)?;
        }
    }
    Ok(times)
}

/// Offers an object, and ends every motion that comes of it as if its bytes had been moved.
fn offer(tiers: &mut Tiers, key: ObjectKey, times: &mut Vec<f64>) -> Outcome<()> {
    let mut timed = |begin: Instant| times.push(begin.elapsed().as_nanos() as f64 / 1e3);
    let begin = Instant::now();
    let offered = tiers.offer(0, key);
    timed(begin);
    let mut motions: Vec<MotionId> = offered.iter().map(|(motion, _)| *motion).collect();
    while let Some(motion) = motions.pop() {
        let begin = Instant::now();
        tiers.handle_done(0, motion, Ended::Done)?;
        while let Some(action) = tiers.poll_action() {
            if let Action::Begin { motion, .. } = action {
                motions.push(motion);
            }
        }
        timed(begin);
    }
    Ok(())
}
