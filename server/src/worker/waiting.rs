//! Requests that wait for their turn, and those that have waited too long.

use super::sequence::{Origin, Sequence};
use super::{Shared, Worker, pages};
use crate::engine::FailureKind;
use crate::scheduler::{PageNeed, SeqId, Waiting};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How long a client may wait.
#[derive(Clone, Copy, Debug, Default)]
pub struct Patience {
    /// For admission.
    pub queue: Option<Duration>,
    /// For the first token, from when the request came.
    pub first_token: Option<Duration>,
}

impl Shared {
    /// A request of a client is about to be queued, if no more than so many requests and so many
    /// prompt tokens wait then; otherwise how many do.
    pub fn enter_queue(
        &self,
        prompt: u64,
        requests_max: usize,
        tokens_max: u64,
    ) -> Result<(), QueueFull> {
        let requests = self.queued.fetch_add(1, Ordering::AcqRel);
        let tokens = self.queued_tokens.fetch_add(prompt, Ordering::AcqRel);
        // A prompt that is longer than the limit may wait alone.
        let are_many = tokens > 0 && tokens.saturating_add(prompt) > tokens_max;
        if requests < requests_max && !are_many {
            return Ok(());
        }
        self.leave_queue(prompt);
        Err(if requests >= requests_max {
            QueueFull::Requests(requests)
        } else {
            QueueFull::Tokens(tokens)
        })
    }

    /// A request of a client waits no longer.
    pub fn leave_queue(&self, prompt: u64) {
        self.queued.fetch_sub(1, Ordering::AcqRel);
        self.queued_tokens.fetch_sub(prompt, Ordering::AcqRel);
    }
}

/// What there is too much of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueFull {
    /// So many requests wait.
    Requests(usize),
    /// Requests with so many prompt tokens wait.
    Tokens(u64),
}

impl Worker {
    fn now_us(&self) -> u64 {
        self.clock.elapsed().as_micros().try_into().unwrap_or(u64::MAX)
    }

    /// Queues a sequence, and starts to bring what it will want of the cache nearer.
    pub(super) fn enqueue(&mut self, id: SeqId, most: PageNeed) {
        let now = self.now_us();
        let Some(seq) = self.sequences.get_mut(&id) else { return };
        seq.most = most;
        let start = pages::start(&self.config, seq.tokens.len(), most);
        let tiers = self.cache.as_ref().map(super::Cache::tiers);
        let found = self.prefixes.reach(tiers, seq, self.config.role);
        let cost = (seq.tokens.len() as u32).saturating_sub(found).max(1);
        let after = |patience: Duration| {
            now.saturating_add(u64::try_from(patience.as_micros()).unwrap_or(u64::MAX))
        };
        let patience = match seq.origin {
            Origin::Client { .. } => self.config.patience,
            // Its decode worker minds how long it waits.
            Origin::Peer { .. } | Origin::Audit => Patience::default(),
        };
        let waiting = Waiting {
            start,
            most,
            cost,
            priority: seq.turn.priority,
            key: seq.turn.key,
            deadline_us: patience.queue.map(after),
        };
        self.scheduler.enqueue(id, waiting);
        self.witness_begin(id);
        if let Some(first_token) = patience.first_token {
            self.first_tokens.insert((after(first_token), id));
        }
        if !matches!(self.sequences.get(&id).map(|seq| &seq.origin), Some(Origin::Audit)) {
            self.prefetch(id);
        }
    }

    /// How long until somebody has waited too long.
    pub(super) fn patience(&self) -> Option<Duration> {
        let first_token = self.first_tokens.first().map(|(at, _)| *at);
        let due = self.scheduler.due().into_iter().chain(first_token).min()?;
        Some(Duration::from_micros(due.saturating_sub(self.now_us())))
    }

    /// Ends what has waited too long, for its turn or for its first token.
    pub(super) fn end_late(&mut self) {
        let now = self.now_us();
        while let Some(id) = self.scheduler.give_up(now) {
            self.give_up(id, "waited too long for its turn", "--queue-timeout");
        }
        while let Some(&(at, id)) = self.first_tokens.first().filter(|(at, _)| *at <= now) {
            self.first_tokens.remove(&(at, id));
            let is_late = |seq: &Sequence| seq.tokens.len() == seq.prompt_len;
            if self.sequences.get(&id).is_some_and(is_late) {
                self.give_up(id, "waited too long for its first token", "--first-token-timeout");
            }
        }
    }

    fn give_up(&mut self, id: SeqId, what: &str, flag: &str) {
        let Some(seq) = self.sequences.get(&id) else { return };
        tracing::warn!(request = seq.name, flag, "a request {what}");
        self.numbers.ended[2] += 1;
        self.numbers.late += 1;
        seq.fail(FailureKind::Unavailable, &format!("the request {what} ({flag})"));
        self.abandon(id);
    }
}
