//! The decode side of a rank group: rounds of attempts, and one verdict per request.

use super::assign::{Load, assign};
use super::types::{
    GroupCounters, GroupFail, GroupOutput, GroupStart, GroupStartError, Rank, RankGroupConfig,
    RecordText, RequestId, RequestKey, Source,
};
use crate::endpoint::Upcall;
use crate::id::{PeerId, Time};
use crate::receiver::{FailReason, StartError};
use crate::states::{PullEvent, PullState, RankEvent, RankState};
use crate::wire::{AttemptId, FinalRecord};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

/// A rank's part of a round.
#[derive(Clone, Debug, Hash)]
struct Member {
    source: Source,
    peer: PeerId,
    attempt: AttemptId,
    state: RankState,
    record: Option<FinalRecord>,
}

#[derive(Clone, Debug, Hash)]
struct Pull {
    state: PullState,
    bytes: u64,
    /// One for each rank and round.
    ids: Vec<AttemptId>,
    /// Rounds begun.
    rounds: u32,
    /// Since when it waits for a source.
    since: Time,
    /// Failures of each source in this request.
    strikes: BTreeMap<Source, u32>,
    /// The round, by rank; empty while waiting.
    members: Vec<Member>,
}

/// The decode side of a rank group. See the [module text](super).
///
/// A driver of one of its ranks runs only attempts that the group asked for.
#[derive(Clone, Debug, Hash)]
pub struct RankGroup {
    config: RankGroupConfig,
    links: BTreeMap<(Rank, Source), PeerId>,
    gone: BTreeSet<Rank>,
    pulls: BTreeMap<RequestId, Pull>,
    /// Every id of an open request.
    ids: BTreeSet<AttemptId>,
    /// Attempts of rounds that are under way.
    attempts: BTreeMap<AttemptId, (RequestId, Rank)>,
    open_bytes: BTreeMap<Source, u64>,
    outputs: VecDeque<GroupOutput>,
    counters: GroupCounters,
}

impl RankGroup {
    /// A group without links.
    #[must_use]
    pub fn new(config: RankGroupConfig) -> Self {
        Self {
            config,
            links: BTreeMap::new(),
            gone: BTreeSet::new(),
            pulls: BTreeMap::new(),
            ids: BTreeSet::new(),
            attempts: BTreeMap::new(),
            open_bytes: BTreeMap::new(),
            outputs: VecDeque::new(),
            counters: GroupCounters::default(),
        }
    }

    /// The totals.
    #[must_use]
    pub const fn counters(&self) -> &GroupCounters {
        &self.counters
    }

    /// Requests that have not ended.
    #[must_use]
    pub fn open_requests(&self) -> usize {
        self.pulls.len()
    }

    /// The state of a request; `None` if it never was or has ended.
    #[must_use]
    pub fn state(&self, request: &RequestId) -> Option<PullState> {
        self.pulls.get(request).map(|pull| pull.state)
    }

    /// Bytes that ranks are reading from `source`.
    #[must_use]
    pub fn open_bytes(&self, source: Source) -> u64 {
        self.open_bytes.get(&source).copied().unwrap_or(0)
    }

    /// A rank's driver has a link to a source. Ranks and sources outside of the configuration are
    /// ignored.
    pub fn link_up(&mut self, now: Time, rank: Rank, source: Source, peer: PeerId) {
        let ranks = self.config.sources.get(usize::from(source.group));
        if rank.0 < self.config.ranks && ranks.is_some_and(|ranks| source.rank.0 < *ranks) {
            self.links.insert((rank, source), peer);
            let waiting =
                |(id, pull): (&RequestId, &Pull)| (pull.state == PullState::Waiting).then_some(*id);
            let waiting: Vec<RequestId> = self.pulls.iter().filter_map(waiting).collect();
            waiting.into_iter().for_each(|id| self.begin(now, id));
        }
    }

    /// A rank's link is gone. Attempts over it end by the upcalls of their driver.
    pub fn link_down(&mut self, rank: Rank, peer: PeerId) {
        self.links.retain(|(at, _), link| *at != rank || *link != peer);
    }

    /// A rank is gone for good: its process has ended, and with it every access to its memory. No
    /// request can complete any more; those under way fail.
    pub fn handle_rank_gone(&mut self, now: Time, rank: Rank) {
        self.gone.insert(rank);
        self.links.retain(|(at, _), _| *at != rank);
        let open: Vec<RequestId> = self.pulls.keys().copied().collect();
        for id in open {
            self.move_rank(id, rank, RankEvent::Lost);
            self.give_up(id, GroupFail::RankGone(rank));
            self.settle(now, id);
        }
    }

    /// Takes a request. It ends with exactly one `Completed`, or one `Failed` and later `Quiet`.
    ///
    /// # Errors
    /// The request breaks a bound or is malformed; nothing was taken and no output follows.
    pub fn start(&mut self, now: Time, start: GroupStart) -> Result<(), GroupStartError> {
        if let Some(rank) = self.gone.first() {
            return Err(GroupStartError::RankGone(*rank));
        }
        let (open, limit) = (self.pulls.len(), self.config.requests_max);
        if open >= limit {
            return Err(GroupStartError::Busy { open, limit });
        }
        if self.pulls.contains_key(&start.request) {
            return Err(GroupStartError::DuplicateRequest);
        }
        // PD-M6
        let rounds = usize::try_from(self.config.rounds_max).unwrap_or(usize::MAX);
        let wanted = usize::from(self.config.ranks).saturating_mul(rounds);
        let given = start.attempts.len();
        if given != wanted {
            return Err(GroupStartError::IdCount { given, wanted });
        }
        // PD-M5
        let mut own = BTreeSet::new();
        for id in &start.attempts {
            if !own.insert(*id) || self.ids.contains(id) {
                return Err(GroupStartError::DuplicateAttempt(*id));
            }
        }
        self.ids.append(&mut own);
        let pull = Pull {
            state: PullState::Waiting,
            bytes: start.bytes.max(1),
            ids: start.attempts,
            rounds: 0,
            since: now,
            strikes: BTreeMap::new(),
            members: Vec::new(),
        };
        self.pulls.insert(start.request, pull);
        self.counters.requests_started += 1;
        self.begin(now, start.request);
        Ok(())
    }

    /// Gives a request up. `Failed` follows unless it ended already, then `Quiet`.
    pub fn cancel(&mut self, now: Time, request: RequestId) {
        self.give_up(request, GroupFail::Cancelled);
        self.settle(now, request);
    }

    /// News of a rank's driver. What is about an attempt stays here; what is not for the group comes
    /// back: links, and `Fresh`, which the owner of the rank's memory answers.
    pub fn handle_upcall(&mut self, now: Time, rank: Rank, upcall: Upcall) -> Option<Upcall> {
        match upcall {
            Upcall::Completed { attempt, record } => {
                self.on_completed(now, rank, attempt, record);
                None
            }
            Upcall::Failed { attempt, why } => {
                self.on_failed(now, rank, attempt, why);
                None
            }
            Upcall::Quiet { attempt } => {
                if let Some(id) = self.find(rank, attempt) {
                    self.move_rank(id, rank, RankEvent::Drained);
                    self.settle(now, id);
                }
                None
            }
            Upcall::PeerDown { peer, .. } => {
                self.link_down(rank, peer);
                Some(upcall)
            }
            _ => Some(upcall),
        }
    }

    /// Acts on everything that is due; early calls do nothing.
    // PD-M8
    pub fn handle_timeout(&mut self, now: Time) {
        let wait_us = self.config.wait_us;
        let is_due = |(id, pull): (&RequestId, &Pull)| {
            let is_due = pull.state == PullState::Waiting && now.since(pull.since) >= wait_us;
            is_due.then_some((*id, now.since(pull.since)))
        };
        let due: Vec<(RequestId, u64)> = self.pulls.iter().filter_map(is_due).collect();
        for (id, waited_us) in due {
            self.give_up(id, GroupFail::NoSource { waited_us });
            self.settle(now, id);
        }
    }

    /// When [`Self::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        let waiting = self.pulls.values().filter(|pull| pull.state == PullState::Waiting);
        waiting.map(|pull| pull.since.after(self.config.wait_us)).min()
    }

    /// The next thing to do or to know.
    pub fn poll_output(&mut self) -> Option<GroupOutput> {
        self.outputs.pop_front()
    }

    /// Begins a round if some prefill group is linked to every rank.
    fn begin(&mut self, now: Time, id: RequestId) {
        let Some(pull) = self.pulls.get(&id) else { return };
        let Some(sources) = self.choose(pull) else { return };
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let Some(state) = pull.state.after(PullEvent::Assigned) else { return };
        pull.state = state;
        pull.since = now;
        let first = pull.rounds as usize * sources.len();
        pull.rounds += 1;
        let key = RequestKey { request: id, round: pull.rounds };
        self.counters.rounds_started += 1;
        // `start` has seen to it that there are as many ids as ranks times rounds.
        let ids = pull.ids[first..][..sources.len()].iter().copied();
        for ((rank, attempt), (source, peer)) in (0..).map(Rank).zip(ids).zip(sources) {
            self.attempts.insert(attempt, (id, rank));
            *self.open_bytes.entry(source).or_default() += pull.bytes;
            let state = RankState::Pulling;
            pull.members.push(Member { source, peer, attempt, state, record: None });
            self.outputs.push_back(GroupOutput::Start { rank, peer, source, attempt, key });
        }
    }

    /// The best prefill group that every rank can reach: fewest strikes, then the smallest load of
    /// its busiest source, then the smallest load in all, then each in turn.
    fn choose(&self, pull: &Pull) -> Option<Vec<(Source, PeerId)>> {
        let rotation = usize::try_from(self.counters.rounds_started).unwrap_or(0);
        let groups = self.config.sources.len();
        let first = rotation.checked_rem(groups)?;
        let mut best = None;
        for group in 0..u16::try_from(groups).unwrap_or(u16::MAX) {
            let Some(sources) = self.choose_in(pull, group, rotation) else { continue };
            let mut loads: BTreeMap<Source, u64> = BTreeMap::new();
            let mut strikes = 0_u64;
            for (source, _) in &sources {
                let open = loads.entry(*source).or_insert_with(|| self.open_bytes(*source));
                *open = open.saturating_add(pull.bytes);
                strikes += u64::from(pull.strikes.get(source).copied().unwrap_or(0));
            }
            let sum = loads.values().fold(0_u64, |sum, load| sum.saturating_add(*load));
            let turn = (usize::from(group) + groups - first) % groups;
            let cost = (strikes, loads.into_values().max(), sum, turn);
            if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                best = Some((cost, sources));
            }
        }
        best.map(|(_, sources)| sources)
    }

    fn choose_in(&self, pull: &Pull, group: u16, turn: usize) -> Option<Vec<(Source, PeerId)>> {
        let sources = *self.config.sources.get(usize::from(group))?;
        let source = |rank| Source { group, rank };
        let load = |rank| Load {
            strikes: pull.strikes.get(&source(rank)).copied().unwrap_or(0),
            open_bytes: self.open_bytes(source(rank)),
        };
        let loads: Vec<Load> = (0..sources).map(|rank| load(Rank(rank))).collect();
        let reach = |rank: Rank| {
            let is_linked = |at: &Rank| self.links.contains_key(&(rank, source(*at)));
            (0..sources).map(Rank).filter(is_linked).collect()
        };
        let links: Vec<Vec<Rank>> = (0..self.config.ranks).map(|rank| reach(Rank(rank))).collect();
        let chosen = assign(&links, &loads, pull.bytes, turn)?;
        let with_link = |(rank, at): (u16, Rank)| {
            Some((source(at), *self.links.get(&(Rank(rank), source(at)))?))
        };
        (0..).zip(chosen).map(with_link).collect()
    }

    /// The request of an attempt, if `rank` runs it. Anything else is counted.
    fn find(&mut self, rank: Rank, attempt: AttemptId) -> Option<RequestId> {
        let found = self.attempts.get(&attempt).filter(|(_, at)| *at == rank).map(|(id, _)| *id);
        if found.is_none() {
            self.counters.dropped_late += 1;
        }
        found
    }

    /// The new state of a rank, `None` if the event is late.
    fn move_rank(&mut self, id: RequestId, rank: Rank, event: RankEvent) -> Option<RankState> {
        let pull = self.pulls.get_mut(&id)?;
        let member = pull.members.get_mut(usize::from(rank.0))?;
        let Some(state) = member.state.after(event) else {
            // A cancellation goes to every rank, and means nothing to those that have ended.
            if event != RankEvent::Cancel {
                self.counters.dropped_late += 1;
            }
            return None;
        };
        let is_reading = |state| !matches!(state, RankState::Landed | RankState::Quiet);
        if is_reading(member.state) && !is_reading(state) {
            let open = self.open_bytes.entry(member.source).or_default();
            *open = open.saturating_sub(pull.bytes);
        }
        member.state = state;
        Some(state)
    }

    fn on_completed(&mut self, now: Time, rank: Rank, attempt: AttemptId, record: FinalRecord) {
        let Some(id) = self.find(rank, attempt) else { return };
        if self.move_rank(id, rank, RankEvent::Completed) != Some(RankState::Landed) {
            return self.settle(now, id);
        }
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let source_rank = pull.members[usize::from(rank.0)].source;
        let mut landed = (0..).map(Rank).zip(&pull.members);
        let other = landed.find_map(|(at, member)| Some((at, member, member.record.as_ref()?)));
        // PD-M2
        let mismatch = other.and_then(|(first, member, theirs)| {
            let is_same = guard!(RecordCompare, *theirs == record);
            (!is_same).then(|| GroupFail::RecordMismatch {
                rank,
                source_rank,
                first,
                first_source: member.source,
                ours: RecordText::new(&record),
                theirs: RecordText::new(theirs),
            })
        });
        if let Some(why) = mismatch {
            self.counters.record_mismatches += 1;
            self.on_broken(id, why);
            return self.settle(now, id);
        }
        pull.members[usize::from(rank.0)].record = Some(record);
        self.check_agreed(id);
    }

    // PD-M1 PD-M9
    fn check_agreed(&mut self, id: RequestId) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        if !pull.members.iter().all(|member| member.state == RankState::Landed) {
            return;
        }
        pull.state = pull.state.after(PullEvent::Agreed).expect("the table never drops a verdict");
        let Some(record) = pull.members.first_mut().and_then(|member| member.record.take()) else {
            return;
        };
        self.counters.requests_completed += 1;
        self.outputs.push_back(GroupOutput::Completed { request: id, record });
        self.forget(id);
    }

    fn on_failed(&mut self, now: Time, rank: Rank, attempt: AttemptId, why: FailReason) {
        let Some(id) = self.find(rank, attempt) else { return };
        if self.move_rank(id, rank, RankEvent::Failed).is_none() {
            return;
        }
        let Some(pull) = self.pulls.get(&id) else { return };
        if matches!(why, FailReason::PeerLost | FailReason::NotStarted(StartError::UnknownPeer(_)))
        {
            // The news of the link itself comes after this, and the next round must not use it.
            let peer = pull.members[usize::from(rank.0)].peer;
            self.link_down(rank, peer);
        }
        let Some(pull) = self.pulls.get(&id) else { return };
        // After a cancellation this is what was asked for.
        if pull.state == PullState::Pulling {
            let source_rank = pull.members[usize::from(rank.0)].source;
            self.on_broken(id, GroupFail::Attempt { rank, source_rank, why });
        }
        self.settle(now, id);
    }

    /// The round has failed: the other ranks are cancelled, and the request with them if this was
    /// its last round.
    fn on_broken(&mut self, id: RequestId, why: GroupFail) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let Some(state) = pull.state.after(PullEvent::Broken) else { return };
        pull.state = state;
        self.counters.rounds_failed += 1;
        self.strike(id, &why);
        self.cancel_ranks(id);
        let Some(pull) = self.pulls.get(&id) else { return };
        // PD-M6
        if pull.rounds >= self.config.rounds_max {
            return self.give_up(id, why);
        }
        let key = RequestKey { request: id, round: pull.rounds };
        self.outputs.push_back(GroupOutput::RoundFailed { key, why });
    }

    /// Remembers where rather not to go next: to the source that failed, or, if its whole group said
    /// no or its ranks disagree, to none of them.
    fn strike(&mut self, id: RequestId, why: &GroupFail) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let (at, is_whole_group) = match why {
            GroupFail::Attempt { source_rank, why, .. } => {
                (*source_rank, matches!(why, FailReason::Rejected { .. }))
            }
            GroupFail::RecordMismatch { source_rank, .. } => (*source_rank, true),
            GroupFail::Cancelled | GroupFail::NoSource { .. } | GroupFail::RankGone(_) => return,
        };
        let ranks = self.config.sources.get(usize::from(at.group)).copied().unwrap_or(0);
        for rank in (0..ranks).map(Rank).filter(|rank| is_whole_group || *rank == at.rank) {
            *pull.strikes.entry(Source { rank, ..at }).or_default() += 1;
        }
    }

    fn give_up(&mut self, id: RequestId, why: GroupFail) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let Some(state) = pull.state.after(PullEvent::GiveUp) else { return };
        pull.state = state;
        self.counters.requests_failed += 1;
        self.outputs.push_back(GroupOutput::Failed { request: id, why });
        self.cancel_ranks(id);
    }

    // PD-M3
    fn cancel_ranks(&mut self, id: RequestId) {
        for rank in (0..self.config.ranks).map(Rank) {
            if self.move_rank(id, rank, RankEvent::Cancel) == Some(RankState::Leaving)
                && let Some(pull) = self.pulls.get(&id)
            {
                let attempt = pull.members[usize::from(rank.0)].attempt;
                self.outputs.push_back(GroupOutput::Cancel { rank, attempt });
            }
        }
    }

    /// After a failure, once every rank is quiet: the next round, or the end.
    // PD-M4
    fn settle(&mut self, now: Time, id: RequestId) {
        let Some(pull) = self.pulls.get_mut(&id) else { return };
        let is_over = matches!(pull.state, PullState::Breaking | PullState::Ending);
        let is_quiet = pull.members.iter().all(|member| member.state == RankState::Quiet);
        if !is_over || !guard!(RoundQuiet, is_quiet) {
            return;
        }
        let Some(state) = pull.state.after(PullEvent::Settled) else { return };
        pull.state = state;
        for member in pull.members.drain(..) {
            self.attempts.remove(&member.attempt);
        }
        if state == PullState::Gone {
            self.outputs.push_back(GroupOutput::Quiet { request: id });
            return self.forget(id);
        }
        pull.since = now;
        self.begin(now, id);
    }

    fn forget(&mut self, id: RequestId) {
        for attempt in self.pulls.remove(&id).into_iter().flat_map(|pull| pull.ids) {
            self.ids.remove(&attempt);
            self.attempts.remove(&attempt);
        }
    }
}
