//! How long a worker stands still at most: inserts into a full tree of a million blocks, and offers
//! to full tiers that know a million objects; every one makes others go.

use crate::report::Report;
use crate::tree::{Prompts, boundary, limits, page};
use crate::{Begin, Options, Outcome, quantile};
use hicache::tiers::{Action, MotionId, Outcome as Ended, Store, Tiers};
use hicache::{Config, ObjectKey, PrefixTree};
use kv_pool::{ChainHash, PoolKind};

const BLOCKS: usize = 1_000_000;
const QUICK_BLOCKS: usize = 2000;
/// Prompts that are measured.
const PROMPTS: usize = 40_000;
const QUICK_PROMPTS: usize = 100;

/// Microseconds of each call: all in all, and on a core.
#[derive(Default)]
struct Times {
    wall: Vec<f64>,
    core: Vec<f64>,
}

impl Times {
    fn note(&mut self, begin: Begin) {
        let (wall, core) = begin.elapsed_ns();
        self.wall.push(wall / 1e3);
        self.core.push(core / 1e3);
    }
}

pub(crate) fn measure(options: &Options, report: &mut Report) -> Outcome<()> {
    let (count, prompts) = match options.is_quick {
        true => (QUICK_BLOCKS, QUICK_PROMPTS),
        false => (BLOCKS, PROMPTS),
    };
    let (mut p999, mut core_p999, mut max) = (0.0_f64, 0.0_f64, 0.0_f64);
    for (what, times) in [
        ("inserts into the tree", inserts(count, prompts)?),
        ("calls of the tiers", offers(count, prompts)?),
    ] {
        println!("{} {what} with {count} blocks, us:", times.wall.len());
        for (how, times) in [("all in all", &times.wall), ("on a core", &times.core)] {
            let [p50, p99, p999, max] = [0.5, 0.99, 0.999, 1.0].map(|share| quantile(times, share));
            println!("  {how}: p50 {p50:.1}, p99 {p99:.1}, p99.9 {p999:.1}, longest {max:.1}");
        }
        p999 = p999.max(quantile(&times.wall, 0.999));
        core_p999 = core_p999.max(quantile(&times.core, 0.999));
        max = max.max(quantile(&times.wall, 1.0));
    }
    report.say("pause_us_p999", p999, "us");
    report.say("pause_on_core_us_p999", core_p999, "us");
    report.say("pause_us_max", max, "us");
    Ok(())
}

/// Microseconds of each insert into a full tree, with its actions.
fn inserts(count: usize, prompts: usize) -> Outcome<Times> {
    let config = Config {
        blocks_max: count,
        boundaries_max: count / 16,
        leases_max: 64,
        keep_blocks: false,
    };
    let (mut tree, mut all) = (PrefixTree::new(config), Prompts::new(3));
    let (mut number, mut times) = (0, Times::default());
    while times.wall.len() < prompts {
        let (chain, _) = all.next();
        let pages: Vec<_> = (0..chain.len()).map(|n| page(PoolKind::Block, n)).collect();
        let boundary = boundary(number);
        let is_full = tree.counters().blocks_evicted > 0;
        number += 1;
        let begin = Begin::now();
        tree.insert(&chain, &pages, Some(boundary))?;
        while tree.poll_action().is_some() {}
        if is_full {
            times.note(begin);
        }
    }
    Ok(times)
}

/// Microseconds of each call that begins or ends a motion of full tiers.
fn offers(count: usize, prompts: usize) -> Outcome<Times> {
    let mut tiers = Tiers::new(limits(count as u32 / 8, count));
    let mut all = Prompts::new(4);
    let mut adopted = 0;
    while adopted < count {
        for hash in all.next().0 {
            adopted += usize::from(tiers.adopt(Store::Disk, ObjectKey::block(hash)));
        }
    }
    let mut times = Times::default();
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
fn offer(tiers: &mut Tiers, key: ObjectKey, times: &mut Times) -> Outcome<()> {
    let begin = Begin::now();
    let offered = tiers.offer(0, key);
    times.note(begin);
    let mut motions: Vec<MotionId> = offered.iter().map(|(motion, _)| *motion).collect();
    while let Some(motion) = motions.pop() {
        let begin = Begin::now();
        tiers.handle_done(0, motion, Ended::Done)?;
        while let Some(action) = tiers.poll_action() {
            if let Action::Begin { motion, .. } = action {
                motions.push(motion);
            }
        }
        times.note(begin);
    }
    Ok(())
}
