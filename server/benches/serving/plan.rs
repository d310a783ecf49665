//! Scheduling of one step with a thousand sequences that run and ten thousand that wait.

use super::{figure, percentile};
use dsv4_server::scheduler::{Limits, PageNeed, Scheduler, Waiting};
use std::time::Instant;

const RUNNING: u64 = 1000;
const WAITING: u64 = 10_000;
/// Of the running ones, those that compute their prompt.
const PREFILLING: u64 = 50;
const STEPS: u64 = 4000;

fn waiting(id: u64, keys: u64) -> Waiting {
    let need = PageNeed { blocks: 8, window: 4, carry: 1 };
    Waiting {
        start: need,
        most: need.with_blocks(40),
        cost: 100 + (id.wrapping_mul(2_654_435_761) % 4000) as u32,
        priority: (id % 3) as i32,
        key: id % keys,
        deadline_us: Some(1_000_000_000 + id),
    }
}

/// Microseconds of each step: what has waited too long, admission, growth, the plan. In each a
/// sequence has ended and another has come.
fn steps(keys: u64) -> Vec<f64> {
    let pages = PageNeed { blocks: 20_000, window: 10_000, carry: 2_000 };
    let limits = Limits { step_tokens: 4096, running: RUNNING as usize, pages };
    let mut scheduler = Scheduler::new(limits);
    let total = RUNNING + WAITING;
    (0..total).for_each(|id| scheduler.enqueue(id, waiting(id, keys)));
    let mut running = std::collections::VecDeque::new();
    let mut times = Vec::new();
    for step in 0..STEPS {
        scheduler.enqueue(total + step, waiting(total + step, keys));
        if running.len() as u64 == RUNNING
            && let Some(id) = running.pop_front()
        {
            scheduler.remove(id);
        }
        let started = Instant::now();
        let late = scheduler.give_up(step);
        let mut admitted = Vec::new();
        while let Some(id) = scheduler.admit() {
            admitted.push(id);
        }
        for id in &admitted {
            if id % (RUNNING / PREFILLING) == 0 {
                scheduler.start_prefill(*id, 2000);
            } else {
                scheduler.start_decode(*id);
            }
        }
        let plan = scheduler.plan();
        for share in &plan.shares {
            // Every so often an output comes to a page that was not promised yet.
            scheduler.reserve(share.id, 8 + ((share.id + step) / 256 % 4) as u32);
        }
        let took = started.elapsed();
        assert_eq!(late, None, "nobody has waited for that long");
        running.extend(admitted);
        // Before that it is not full, or fills up.
        if step > 10 {
            assert_eq!(scheduler.admitted() as u64, RUNNING);
            assert!(plan.shares.len() as u64 >= RUNNING - PREFILLING * 2);
            times.push(took.as_secs_f64() * 1e6);
        }
    }
    times
}

pub(super) fn run() {
    // Many users with a few requests each, and one user with all of them.
    let mut times = steps(1000);
    figure("plan_us", percentile(&mut times, 50), "us");
    figure("plan_us_p99", percentile(&mut times, 99), "us");
    figure("plan_us.one_key", percentile(&mut steps(1), 50), "us");
    figure("plan_us.key_each", percentile(&mut steps(u64::MAX), 50), "us");
}
