//! Which worker gets a request: the one where least has to be computed before its first token.
//!
//! The router remembers which beginnings of prompts it sent where, and takes it that a worker still
//! has them. That is a belief and no more: the worker may have let them go. A wrong belief costs
//! time and can never cost an answer, since a worker computes whatever it does not have.
//!
//! The cost of a worker is what Dynamo's router counts, in blocks of [`BLOCK_BYTES`]: those of the
//! prompt that it was not sent yet, those of other prompts that it is still computing, and one for
//! each request under way. What a worker has counts less the more it is behind the others, and not
//! at all once requests are as unevenly spread as SGLang's balance thresholds say.
//!
//! Plain state: time is passed in, and the key of the hashes is given.

mod index;
mod prompt;

#[cfg(test)]
mod tests;

use index::Index;
pub use prompt::{BLOCK_BYTES, BLOCKS_MAX, HashKey, Prompt, Tenant};
use std::collections::BTreeMap;
use std::time::Duration;

/// How a worker is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Policy {
    /// Where least has to be computed, by what was sent where and by load.
    CacheAware,
    /// The fewest requests under way.
    LeastLoad,
    /// One after the other.
    RoundRobin,
}

impl Policy {
    /// Name, as the flag has it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::CacheAware => "cache_aware",
            Self::LeastLoad => "least_load",
            Self::RoundRobin => "round_robin",
        }
    }
}

/// Blocks that a request under way counts for: decoding has its cost too.
const ACTIVE_WEIGHT: f64 = 1.0;
/// Blocks behind the least busy worker at which what a worker has counts half: 64 blocks are a
/// prompt of about 16,000 tokens.
const HALF_CREDIT_BLOCKS: f64 = 64.0;

/// How workers are weighed against each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChoiceConfig {
    /// The rule.
    pub policy: Policy,
    /// Share of a prompt's blocks, 0 to 1, that a worker must have been sent for them to count: a
    /// system prompt that all share must not bring all to one worker.
    pub cache_threshold: f64,
    /// Requests by which the busiest worker may be ahead of the least busy one before only load
    /// counts, if `balance_rel_threshold` is passed too.
    pub balance_abs_threshold: u32,
    /// How many times as many requests as the least busy worker the busiest one may have.
    pub balance_rel_threshold: f64,
    /// How long a block is remembered after it was last sent.
    pub ttl: Duration,
    /// Most blocks that are remembered for each worker; the least recently sent go first.
    pub blocks_max: usize,
}

impl Default for ChoiceConfig {
    fn default() -> Self {
        Self {
            policy: Policy::CacheAware,
            cache_threshold: 0.3,
            balance_abs_threshold: 64,
            balance_rel_threshold: 1.5,
            // Dynamo's 120 s end in the middle of a conversation with a person; a worker keeps what
            // it has until it needs the room.
            ttl: Duration::from_secs(600),
            blocks_max: 1 << 16,
        }
    }
}

/// A worker of this router; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WorkerId(pub u64);

/// A request that was given to a worker. It goes back with [`Choice::handle_ended`].
#[derive(Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Who got it.
    pub worker: WorkerId,
    /// Blocks of the prompt.
    pub prompt_blocks: u32,
    /// Those at its beginning that the worker was believed to have.
    pub overlap_blocks: u32,
    /// Blocks that count as being computed.
    uncached: u32,
}

/// What is known of one worker.
#[derive(Debug)]
struct Known {
    index: Index,
    /// Requests under way.
    active: u32,
    /// Blocks that it is computing for them.
    uncached: u64,
}

/// What was sent where, and what is under way.
#[derive(Debug)]
pub struct Choice {
    config: ChoiceConfig,
    workers: BTreeMap<WorkerId, Known>,
    /// Breaks ties, so that equal workers take turns.
    turn: usize,
}

impl Choice {
    /// Knows no worker yet.
    #[must_use]
    pub fn new(config: ChoiceConfig) -> Self {
        Self { config, workers: BTreeMap::new(), turn: 0 }
    }

    /// A worker that may be chosen from now on.
    pub fn handle_joined(&mut self, worker: WorkerId) {
        let index = Index::new(self.config.blocks_max);
        self.workers.entry(worker).or_insert(Known { index, active: 0, uncached: 0 });
    }

    /// A worker that will not come back.
    pub fn handle_left(&mut self, worker: WorkerId) {
        self.workers.remove(&worker);
    }

    /// A worker has nothing any more of what it was sent: it stopped answering, and will have begun anew
    /// when it answers again, or it was told to forget it.
    pub fn handle_lost(&mut self, worker: WorkerId) {
        if let Some(known) = self.workers.get_mut(&worker) {
            known.index.clear();
        }
    }

    /// Gives a request to one of `usable`, which all have joined; none if there is none.
    pub fn choose(
        &mut self,
        now: Duration,
        prompt: &Prompt,
        usable: &[WorkerId],
    ) -> Option<Chosen> {
        let rated = self.rate(now, prompt, usable);
        let least = rated.iter().map(|&(cost, ..)| cost).min_by(f64::total_cmp)?;
        let best: Vec<_> = rated.iter().filter(|(cost, ..)| *cost <= least).collect();
        let &&(_, worker, overlap_blocks) = best.get(self.turn % best.len())?;
        self.turn = self.turn.wrapping_add(1);
        let uncached = prompt.blocks().saturating_sub(overlap_blocks);
        let known = self.workers.get_mut(&worker)?;
        known.active += 1;
        known.uncached += u64::from(uncached);
        if self.config.policy == Policy::CacheAware {
            known.index.insert(prompt.chain(), now, self.config.ttl);
        }
        Some(Chosen { worker, prompt_blocks: prompt.blocks(), overlap_blocks, uncached })
    }

    /// The first token of a request is there: its prompt is computed.
    pub fn handle_first_token(&mut self, chosen: &mut Chosen) {
        if let Some(known) = self.workers.get_mut(&chosen.worker) {
            known.uncached = known.uncached.saturating_sub(u64::from(chosen.uncached));
        }
        chosen.uncached = 0;
    }

    /// A worker did not take a request, so it does not have its prompt either.
    pub fn handle_refused(&mut self, chosen: &Chosen, prompt: &Prompt) {
        let fresh = prompt.chain().get(chosen.overlap_blocks as usize..).unwrap_or_default();
        if let Some(known) = self.workers.get_mut(&chosen.worker) {
            known.index.remove(fresh);
        }
    }

    /// A request has ended, however.
    pub fn handle_ended(&mut self, mut chosen: Chosen) {
        self.handle_first_token(&mut chosen);
        if let Some(known) = self.workers.get_mut(&chosen.worker) {
            known.active = known.active.saturating_sub(1);
        }
    }

    /// Blocks that are remembered for a worker.
    #[must_use]
    pub fn remembered(&self, worker: WorkerId) -> usize {
        self.workers.get(&worker).map_or(0, |known| known.index.len())
    }

    /// Blocks that a worker is computing for requests under way.
    #[must_use]
    pub fn uncached_under_way(&self, worker: WorkerId) -> u64 {
        self.workers.get(&worker).map_or(0, |known| known.uncached)
    }

    /// Cost of each worker with the blocks that it has of the prompt.
    fn rate(
        &self,
        now: Duration,
        prompt: &Prompt,
        usable: &[WorkerId],
    ) -> Vec<(f64, WorkerId, u32)> {
        let known = |id: &WorkerId| self.workers.get(id).map(|known| (*id, known));
        let known: Vec<(WorkerId, &Known)> = usable.iter().filter_map(known).collect();
        let least = known.iter().map(|(_, known)| known.uncached).min().unwrap_or(0);
        let is_balanced = self.is_balanced(&known);
        let rate = |&(id, known): &(WorkerId, &Known)| match self.config.policy {
            Policy::RoundRobin => (0.0, id, 0),
            Policy::LeastLoad => (f64::from(known.active), id, 0),
            Policy::CacheAware => {
                let overlap = known.index.overlap(prompt.chain(), now, self.config.ttl);
                let blocks = f64::from(prompt.blocks());
                let is_much = f64::from(overlap) >= self.config.cache_threshold * blocks;
                let behind = (known.uncached - least) as f64;
                let credit = if is_balanced && is_much {
                    HALF_CREDIT_BLOCKS / (HALF_CREDIT_BLOCKS + behind)
                } else {
                    0.0
                };
                let own = (blocks - credit * f64::from(overlap)).max(0.0);
                let cost = own + known.uncached as f64 + ACTIVE_WEIGHT * f64::from(known.active);
                (cost, id, overlap)
            }
        };
        known.iter().map(rate).collect()
    }

    /// Whether requests are spread evenly enough for anything else to count.
    fn is_balanced(&self, known: &[(WorkerId, &Known)]) -> bool {
        let active = || known.iter().map(|(_, known)| known.active);
        let (Some(least), Some(most)) = (active().min(), active().max()) else { return true };
        most - least <= self.config.balance_abs_threshold
            || f64::from(most) <= self.config.balance_rel_threshold * f64::from(least)
    }
}
