//! Rank groups: every order of events at a small group with one fault, and single rules.

use pd_transfer::endpoint::Upcall;
use pd_transfer::group::{
    GroupFail, GroupOutput, GroupStart, GroupStartError, Load, Rank, RankGroup, RankGroupConfig,
    RequestId, RequestKey, Source, assign,
};
use pd_transfer::id::{PeerId, Time};
use pd_transfer::receiver::FailReason;
use pd_transfer::states::PullState;
use pd_transfer::testing::mutation::{Mutation, without};
use pd_transfer::wire::{AttemptId, FinalRecord, code};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

const REQUEST: RequestId = RequestId([1; 16]);
const BYTES: u64 = 1000;
const WAIT_US: u64 = 500;

fn id(n: u16) -> AttemptId {
    let mut id = [0xA5; 16];
    id[..2].copy_from_slice(&n.to_le_bytes());
    AttemptId(id)
}

fn ids(first: u16, count: u16) -> Vec<AttemptId> {
    (first..first + count).map(id).collect()
}

fn record(token: u8) -> FinalRecord {
    FinalRecord::new([7; 16], &[], vec![token])
}

fn source(group: u16, rank: u16) -> Source {
    Source { group, rank: Rank(rank) }
}

/// The link of a rank to a source: the first one, or that after a reconnect.
fn link(rank: u16, at: Source, life: u64) -> PeerId {
    PeerId(u64::from(rank) * 1000 + u64::from(at.group) * 100 + u64::from(at.rank.0) + life * 10)
}

fn group(ranks: u16, sources: &[u16]) -> RankGroup {
    let mut config = RankGroupConfig::new(ranks, sources.to_vec());
    config.wait_us = WAIT_US;
    let mut group = RankGroup::new(config);
    for rank in 0..ranks {
        for (at, width) in (0..).zip(sources) {
            for p in 0..*width {
                group.link_up(Time(0), Rank(rank), source(at, p), link(rank, source(at, p), 0));
            }
        }
    }
    group
}

fn start(group: &mut RankGroup, request: RequestId, first: u16, ranks: u16) -> Vec<GroupOutput> {
    let attempts = ids(first, ranks * 3);
    group.start(Time(0), GroupStart { request, bytes: BYTES, attempts }).unwrap();
    outputs(group)
}

fn outputs(group: &mut RankGroup) -> Vec<GroupOutput> {
    std::iter::from_fn(|| group.poll_output()).collect()
}

/// Where each rank was sent, in the order of ranks.
fn sources(outputs: &[GroupOutput]) -> Vec<Source> {
    let starts = outputs.iter().filter_map(|output| match output {
        GroupOutput::Start { source, .. } => Some(*source),
        _ => None,
    });
    starts.collect()
}

fn attempts(outputs: &[GroupOutput]) -> Vec<AttemptId> {
    let starts = outputs.iter().filter_map(|output| match output {
        GroupOutput::Start { attempt, .. } => Some(*attempt),
        _ => None,
    });
    starts.collect()
}

fn completed(group: &mut RankGroup, rank: u16, attempt: AttemptId, token: u8) {
    let upcall = Upcall::Completed { attempt, record: record(token) };
    assert_eq!(group.handle_upcall(Time(1), Rank(rank), upcall), None);
}

fn failed(group: &mut RankGroup, rank: u16, attempt: AttemptId, why: FailReason) {
    assert_eq!(group.handle_upcall(Time(1), Rank(rank), Upcall::Failed { attempt, why }), None);
}

fn quiet(group: &mut RankGroup, rank: u16, attempt: AttemptId) {
    assert_eq!(group.handle_upcall(Time(1), Rank(rank), Upcall::Quiet { attempt }), None);
}

// Every order of events.

/// What may go wrong once in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Fault {
    None,
    /// The link of a rank to a source dies.
    Link,
    /// A rank is handed another record.
    Mismatch,
    /// A rank's attempt fails by itself.
    Get,
    /// The upper layer cancels.
    Cancel,
    /// A rank's process dies.
    Gone,
}

const FAULTS: [Fault; 6] =
    [Fault::None, Fault::Link, Fault::Mismatch, Fault::Get, Fault::Cancel, Fault::Gone];

/// The attempt at the driver of a rank.
#[derive(Clone, Debug, Hash)]
struct Running {
    attempt: AttemptId,
    source: Source,
    round: u32,
    is_cancelled: bool,
    /// `Failed` was said and `Quiet` was not.
    has_failed: bool,
}

#[derive(Clone, Debug, Hash)]
struct World {
    group: RankGroup,
    sources: u16,
    fault: Fault,
    drivers: Vec<Option<Running>>,
    /// Records of the ranks that completed in the newest round.
    landed: BTreeMap<u16, FinalRecord>,
    dead_links: BTreeSet<(u16, Source)>,
    dead_ranks: BTreeSet<u16>,
    used: BTreeSet<AttemptId>,
    round: u32,
    said: Vec<&'static str>,
    now: u64,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Complete { rank: u16, token: u8 },
    Fail { rank: u16 },
    Quiet { rank: u16 },
    KillLink { rank: u16, source: Source },
    Reconnect { rank: u16, source: Source },
    Cancel,
    KillRank { rank: u16 },
    Wait,
}

impl World {
    fn new(ranks: u16, sources: u16, fault: Fault) -> Result<Self, String> {
        let mut world = Self {
            group: group(ranks, &[sources]),
            sources,
            fault,
            drivers: (0..ranks).map(|_| None).collect(),
            landed: BTreeMap::new(),
            dead_links: BTreeSet::new(),
            dead_ranks: BTreeSet::new(),
            used: BTreeSet::new(),
            round: 0,
            said: Vec::new(),
            now: 0,
        };
        let attempts = ids(0, ranks * 3);
        let start = GroupStart { request: REQUEST, bytes: BYTES, attempts };
        world.group.start(Time(0), start).unwrap();
        world.take()?;
        Ok(world)
    }

    fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        for (rank, driver) in (0..).zip(&self.drivers) {
            let Some(running) = driver else { continue };
            if running.has_failed {
                steps.push(Step::Quiet { rank });
                continue;
            }
            let is_dead = self.dead_links.contains(&(rank, running.source));
            if running.is_cancelled || is_dead || self.fault == Fault::Get {
                steps.push(Step::Fail { rank });
            }
            if !is_dead {
                steps.push(Step::Complete { rank, token: 0 });
                if self.fault == Fault::Mismatch {
                    steps.push(Step::Complete { rank, token: 9 });
                }
            }
        }
        for rank in 0..self.drivers.len() as u16 {
            if self.fault == Fault::Gone {
                steps.push(Step::KillRank { rank });
            }
            for source in (0..self.sources).map(|p| source(0, p)) {
                if self.fault == Fault::Link {
                    steps.push(Step::KillLink { rank, source });
                }
                let idle = self.drivers[usize::from(rank)].is_none();
                if idle && self.dead_links.contains(&(rank, source)) {
                    steps.push(Step::Reconnect { rank, source });
                }
            }
        }
        if self.fault == Fault::Cancel {
            steps.push(Step::Cancel);
        }
        if self.group.poll_timeout().is_some() {
            steps.push(Step::Wait);
        }
        steps
    }

    fn tell(&mut self, rank: u16, upcall: Upcall) -> Result<(), String> {
        match self.group.handle_upcall(Time(self.now), Rank(rank), upcall) {
            None => Ok(()),
            Some(back) => Err(format!("{back:?} came back")),
        }
    }

    fn step(&mut self, step: Step) -> Result<(), String> {
        match step {
            Step::Complete { rank, token } => {
                let running = self.drivers[usize::from(rank)].take().unwrap();
                if token != 0 {
                    self.fault = Fault::None;
                }
                if running.round == self.round {
                    self.landed.insert(rank, record(token));
                }
                let upcall = Upcall::Completed { attempt: running.attempt, record: record(token) };
                self.tell(rank, upcall)?;
            }
            Step::Fail { rank } => {
                let running = self.drivers[usize::from(rank)].as_mut().unwrap();
                running.has_failed = true;
                let attempt = running.attempt;
                let why = if self.dead_links.contains(&(rank, running.source)) {
                    FailReason::PeerLost
                } else if running.is_cancelled {
                    FailReason::Cancelled
                } else {
                    self.fault = Fault::None;
                    FailReason::Timeout { silent_us: 1 }
                };
                self.tell(rank, Upcall::Failed { attempt, why })?;
            }
            Step::Quiet { rank } => {
                let attempt = self.drivers[usize::from(rank)].take().unwrap().attempt;
                self.tell(rank, Upcall::Quiet { attempt })?;
            }
            Step::KillLink { rank, source } => {
                self.fault = Fault::None;
                self.dead_links.insert((rank, source));
                self.group.link_down(Rank(rank), link(rank, source, 0));
            }
            Step::Reconnect { rank, source } => {
                self.dead_links.remove(&(rank, source));
                self.group.link_up(Time(self.now), Rank(rank), source, link(rank, source, 1));
            }
            Step::Cancel => {
                self.fault = Fault::None;
                self.group.cancel(Time(self.now), REQUEST);
            }
            Step::KillRank { rank } => {
                self.fault = Fault::None;
                self.dead_ranks.insert(rank);
                self.drivers[usize::from(rank)] = None;
                self.group.handle_rank_gone(Time(self.now), Rank(rank));
            }
            Step::Wait => {
                self.now = self.group.poll_timeout().unwrap().0;
                self.group.handle_timeout(Time(self.now));
            }
        }
        self.take()
    }

    /// Takes the outputs and holds them against the rules.
    fn take(&mut self) -> Result<(), String> {
        for output in outputs(&mut self.group) {
            match output {
                GroupOutput::Start { rank, peer, source, attempt, key } => {
                    if key.round != self.round {
                        // PD-M4
                        if let Some(open) = self.drivers.iter().flatten().next() {
                            return Err(format!("round {} begins over {open:?}", key.round));
                        }
                        self.round = key.round;
                        self.landed.clear();
                    }
                    // PD-M5
                    if !self.used.insert(attempt) {
                        return Err(format!("{attempt} is used again"));
                    }
                    if self.dead_links.contains(&(rank.0, source)) {
                        return Err(format!("{rank} reads over the dead {peer}"));
                    }
                    let is_cancelled = false;
                    let round = key.round;
                    let running =
                        Running { attempt, source, round, is_cancelled, has_failed: false };
                    self.drivers[usize::from(rank.0)] = Some(running);
                }
                GroupOutput::Cancel { rank, attempt } => {
                    // The command meets whatever the driver is at by then.
                    if let Some(running) = &mut self.drivers[usize::from(rank.0)]
                        && running.attempt == attempt
                    {
                        running.is_cancelled = true;
                    }
                }
                GroupOutput::RoundFailed { .. } => {}
                GroupOutput::Completed { record, .. } => self.on_completed(&record)?,
                GroupOutput::Failed { .. } => self.say("failed")?,
                GroupOutput::Quiet { .. } => {
                    if let Some(open) = self.drivers.iter().flatten().next() {
                        return Err(format!("quiet with {open:?}"));
                    }
                    self.say("quiet")?;
                }
            }
        }
        Ok(())
    }

    // PD-M1 PD-M2
    fn on_completed(&mut self, record: &FinalRecord) -> Result<(), String> {
        if self.landed.len() < self.drivers.len() {
            return Err(format!("completed, and only {:?} have", self.landed.keys()));
        }
        if self.landed.values().any(|other| other != record) {
            return Err(String::from("completed with two records"));
        }
        self.say("completed")
    }

    // PD-M9
    fn say(&mut self, what: &'static str) -> Result<(), String> {
        self.said.push(what);
        match &self.said[..] {
            ["completed"] | ["failed"] | ["failed", "quiet"] => Ok(()),
            said => Err(format!("said {said:?}")),
        }
    }

    fn is_over(&self) -> Result<(), String> {
        let open: u64 = (0..self.sources).map(|p| self.group.open_bytes(source(0, p))).sum();
        let said = &self.said[..];
        if !matches!(said, ["completed"] | ["failed", "quiet"]) {
            return Err(format!("ends with {said:?} in {:?}", self.group.state(&REQUEST)));
        }
        if open != 0 || self.group.open_requests() != 0 {
            return Err(format!("{open} bytes and {} requests left", self.group.open_requests()));
        }
        Ok(())
    }
}

/// What a walk through every order of events met.
#[derive(Debug, Default)]
struct Met {
    states: HashSet<u64>,
    ends: BTreeMap<Vec<&'static str>, usize>,
    most_rounds: u32,
}

fn walk(world: World, met: &mut Met) -> Result<(), String> {
    let mut open = vec![world];
    while let Some(world) = open.pop() {
        let mut hasher = DefaultHasher::new();
        world.hash(&mut hasher);
        if !met.states.insert(hasher.finish()) {
            continue;
        }
        met.most_rounds = met.most_rounds.max(world.round);
        let steps = world.steps();
        if world.drivers.iter().all(Option::is_none) && !world.said.is_empty() {
            world.is_over()?;
            *met.ends.entry(world.said.clone()).or_default() += 1;
        } else if steps.is_empty() {
            world.is_over()?;
        }
        for step in steps {
            let mut next = world.clone();
            next.step(step).map_err(|why| format!("{step:?}: {why}; before: {world:?}"))?;
            open.push(next);
        }
    }
    Ok(())
}

// PD-M1 PD-M2 PD-M3 PD-M4 PD-M5 PD-M6 PD-M8 PD-M9
#[test]
fn every_order_of_events_ends_with_one_verdict_and_quiet_targets() {
    for ranks in 1..=3 {
        for sources in 1..=3 {
            for fault in FAULTS {
                let mut met = Met::default();
                let world = World::new(ranks, sources, fault).unwrap();
                walk(world, &mut met).unwrap_or_else(|why| {
                    panic!("{ranks} ranks, {sources} sources, {fault:?}: {why}")
                });
                let completed = met.ends.contains_key(&vec!["completed"]);
                assert!(completed, "{ranks} ranks, {sources} sources, {fault:?}: {:?}", met.ends);
                // One rank alone can't disagree with itself.
                let retries = match fault {
                    Fault::Link | Fault::Get => true,
                    Fault::Mismatch => ranks > 1,
                    Fault::None | Fault::Cancel | Fault::Gone => false,
                };
                assert_eq!(met.most_rounds > 1, retries, "{ranks}, {sources}, {fault:?}");
                let fails = met.ends.contains_key(&vec!["failed", "quiet"]);
                let gives_up = matches!(fault, Fault::Cancel | Fault::Gone)
                    || (fault == Fault::Link && sources == 1);
                assert_eq!(fails, gives_up, "{ranks}, {sources}, {fault:?}: {:?}", met.ends);
            }
        }
    }
}

// PD-M2
#[test]
fn without_the_comparison_two_records_complete() {
    let found = without(&[Mutation::RecordCompare], || {
        walk(World::new(2, 2, Fault::Mismatch).unwrap(), &mut Met::default())
    });
    assert!(found.unwrap_err().contains("completed with two records"));
}

// PD-M4
#[test]
fn without_the_wait_a_round_begins_over_targets_that_are_written() {
    let found = without(&[Mutation::RoundQuiet], || {
        walk(World::new(2, 2, Fault::Get).unwrap(), &mut Met::default())
    });
    assert!(found.unwrap_err().contains("begins over"));
}

// Balance.

// PD-M7
#[test]
fn every_shape_is_spread_evenly() {
    for ranks in 1..=8_u16 {
        for width in 1..=8_u16 {
            let mut group = group(ranks, &[width]);
            let out = start(&mut group, REQUEST, 0, ranks);
            let sources = sources(&out);
            assert_eq!(sources.len(), usize::from(ranks));
            let readers =
                (0..width).map(|p| sources.iter().filter(|at| **at == source(0, p)).count() as u16);
            let (least, most) = (readers.clone().min().unwrap(), readers.max().unwrap());
            assert_eq!(least, ranks / width, "{ranks} over {width}");
            assert_eq!(most, ranks.div_ceil(width), "{ranks} over {width}");
        }
    }
}

// PD-M7
#[test]
fn requests_that_are_open_together_take_turns_at_the_sources() {
    let mut group = group(2, &[3]);
    for n in 0..6_u16 {
        start(&mut group, RequestId([n as u8; 16]), n * 10, 2);
    }
    for p in 0..3 {
        assert_eq!(group.open_bytes(source(0, p)), 4 * BYTES);
    }
}

#[test]
fn requests_that_come_one_by_one_do_not_all_read_from_the_first() {
    let mut group = group(1, &[3]);
    let mut seen = BTreeSet::new();
    for n in 0..3 {
        let out = start(&mut group, RequestId([n as u8; 16]), n * 10, 1);
        seen.extend(sources(&out));
        completed(&mut group, 0, attempts(&out)[0], 0);
    }
    assert_eq!(seen.len(), 3);
}

// PD-M7
#[test]
fn the_emptier_prefill_group_is_taken() {
    let mut group = group(2, &[2, 2]);
    let first = sources(&start(&mut group, REQUEST, 0, 2));
    let second = sources(&start(&mut group, RequestId([2; 16]), 10, 2));
    assert_eq!(first[0].group, first[1].group);
    assert_eq!(second[0].group, second[1].group);
    assert_ne!(first[0].group, second[0].group);
}

fn spread(chosen: &[Rank], loads: &[Load], bytes: u64) -> (u64, u128) {
    let strikes = chosen.iter().map(|at| u64::from(loads[usize::from(at.0)].strikes)).sum();
    let open = (0..).zip(loads).map(|(p, load)| {
        let readers = chosen.iter().filter(|at| at.0 == p).count() as u64;
        u128::from(load.open_bytes + readers * bytes).pow(2)
    });
    (strikes, open.sum())
}

/// The best of all choices, by trying them.
fn best(links: &[Vec<Rank>], loads: &[Load], bytes: u64) -> Option<(u64, u128)> {
    let mut choices: Vec<Vec<Rank>> = vec![Vec::new()];
    for reach in links {
        choices = choices
            .iter()
            .flat_map(|choice| reach.iter().map(|at| [&choice[..], &[*at]].concat()))
            .collect();
    }
    choices.iter().map(|choice| spread(choice, loads, bytes)).min()
}

proptest! {
    // PD-M7
    #[test]
    fn no_other_choice_is_more_even(
        links in prop::collection::vec(prop::collection::btree_set(0_u16..4, 0..4), 1..6),
        loads in prop::collection::vec((0_u32..3, 0_u64..8), 4),
        rotation in 0_usize..9,
    ) {
        let links: Vec<Vec<Rank>> =
            links.into_iter().map(|reach| reach.into_iter().map(Rank).collect()).collect();
        let loads: Vec<Load> = loads
            .into_iter()
            .map(|(strikes, open)| Load { strikes, open_bytes: open * BYTES })
            .collect();
        let chosen = assign(&links, &loads, BYTES, rotation);
        prop_assert_eq!(&chosen, &assign(&links, &loads, BYTES, rotation));
        let Some(chosen) = chosen else {
            prop_assert!(links.iter().any(Vec::is_empty));
            return Ok(());
        };
        for (reach, at) in links.iter().zip(&chosen) {
            prop_assert!(reach.contains(at));
        }
        prop_assert_eq!(Some(spread(&chosen, &loads, BYTES)), best(&links, &loads, BYTES));
    }
}

#[test]
fn ranks_and_sources_that_are_not_there_are_ignored() {
    assert_eq!(assign(&[vec![Rank(5)]], &[Load::default()], 1, 0), None);
    assert_eq!(assign(&[vec![]], &[], 1, 3), None);
    let mut group = group(1, &[1]);
    group.link_up(Time(0), Rank(9), source(0, 0), PeerId(900));
    group.link_up(Time(0), Rank(0), source(7, 7), PeerId(901));
    assert_eq!(sources(&start(&mut group, REQUEST, 0, 1)), [source(0, 0)]);
}

// Single rules.

// PD-M2 PD-M3 PD-M6
#[test]
fn ranks_that_disagree_are_named_and_the_other_prefill_group_is_asked() {
    let mut group = group(2, &[2, 2]);
    let first = start(&mut group, REQUEST, 0, 2);
    let (old, used) = (attempts(&first), sources(&first)[0].group);
    completed(&mut group, 0, old[0], 1);
    assert_eq!(outputs(&mut group), [], "half a verdict is none");
    completed(&mut group, 1, old[1], 2);
    let out = outputs(&mut group);
    let [GroupOutput::RoundFailed { key, why }, starts @ ..] = &out[..] else { panic!("{out:?}") };
    assert_eq!(*key, RequestKey { request: REQUEST, round: 1 });
    let GroupFail::RecordMismatch { rank: Rank(1), first: Rank(0), ours, theirs, .. } = why else {
        panic!("{why}")
    };
    assert_ne!(ours.hash, theirs.hash);
    assert!(why.to_string().contains("rank 1") && why.to_string().contains("rank 0"), "{why}");
    // Both had landed, so both are quiet.
    assert_eq!(starts.len(), 2);
    assert!(sources(starts).iter().all(|at| at.group != used), "{starts:?}");
    assert!(attempts(starts).iter().all(|id| !old.contains(id)));
    assert_eq!(group.counters().record_mismatches, 1);
}

// PD-M3 PD-M4 PD-M6
#[test]
fn the_next_round_waits_for_every_rank_and_avoids_the_source_that_failed() {
    let mut group = group(2, &[3]);
    let first = start(&mut group, REQUEST, 0, 2);
    let (old, at) = (attempts(&first), sources(&first));
    failed(&mut group, 0, old[0], FailReason::Timeout { silent_us: 1 });
    let out = outputs(&mut group);
    assert_eq!(out[0], GroupOutput::Cancel { rank: Rank(1), attempt: old[1] });
    assert!(matches!(out[1], GroupOutput::RoundFailed { .. }), "{out:?}");
    quiet(&mut group, 0, old[0]);
    failed(&mut group, 1, old[1], FailReason::Cancelled);
    assert_eq!(outputs(&mut group), [], "rank 1 may still be written");
    quiet(&mut group, 1, old[1]);
    let second = outputs(&mut group);
    assert_eq!(second.len(), 2);
    assert!(!sources(&second).contains(&at[0]), "{second:?}");
    for (rank, attempt) in (0..).zip(attempts(&second)) {
        completed(&mut group, rank, attempt, 4);
    }
    let verdict = GroupOutput::Completed { request: REQUEST, record: record(4) };
    assert_eq!(outputs(&mut group), [verdict]);
}

// PD-M6
#[test]
fn rounds_are_bounded_and_a_rejection_speaks_against_the_whole_prefill_group() {
    let mut group = group(1, &[2, 2]);
    let mut round = start(&mut group, REQUEST, 0, 1);
    let mut groups = Vec::new();
    for n in 0..3 {
        let (attempt, at) = (attempts(&round)[0], sources(&round)[0]);
        groups.push(at.group);
        let why = FailReason::Rejected { code: code::BUSY, text: String::from("full") };
        failed(&mut group, 0, attempt, why.clone());
        quiet(&mut group, 0, attempt);
        round = outputs(&mut group);
        if n == 2 {
            let why = GroupFail::Attempt { rank: Rank(0), source_rank: at, why };
            let failed = GroupOutput::Failed { request: REQUEST, why };
            assert_eq!(round, [failed, GroupOutput::Quiet { request: REQUEST }]);
        }
    }
    assert_ne!(groups[0], groups[1]);
    assert_eq!(group.counters().rounds_failed, 3);
}

// PD-M8
#[test]
fn a_request_without_a_source_waits_for_a_link_and_not_for_ever() {
    let mut group = group(2, &[1]);
    group.link_down(Rank(1), link(1, source(0, 0), 0));
    assert_eq!(start(&mut group, REQUEST, 0, 2), []);
    assert_eq!(group.state(&REQUEST), Some(PullState::Waiting));
    group.link_up(Time(2), Rank(1), source(0, 0), PeerId(77));
    let out = outputs(&mut group);
    assert!(matches!(out[1], GroupOutput::Start { peer: PeerId(77), .. }), "{out:?}");

    let other = RequestId([2; 16]);
    group.link_down(Rank(1), PeerId(77));
    assert_eq!(start(&mut group, other, 20, 2), []);
    assert_eq!(group.poll_timeout(), Some(Time(WAIT_US)));
    group.handle_timeout(Time(WAIT_US - 1));
    assert_eq!(outputs(&mut group), []);
    group.handle_timeout(Time(WAIT_US));
    let why = GroupFail::NoSource { waited_us: WAIT_US };
    let failed = GroupOutput::Failed { request: other, why };
    assert_eq!(outputs(&mut group), [failed, GroupOutput::Quiet { request: other }]);
}

#[test]
fn a_link_that_is_lost_is_not_used_again_before_the_news_of_it() {
    let mut group = group(1, &[1]);
    let out = start(&mut group, REQUEST, 0, 1);
    failed(&mut group, 0, attempts(&out)[0], FailReason::PeerLost);
    quiet(&mut group, 0, attempts(&out)[0]);
    assert_eq!(sources(&outputs(&mut group)), []);
    assert_eq!(group.state(&REQUEST), Some(PullState::Waiting));
}

// PD-M5
#[test]
fn ids_are_given_by_the_caller_and_used_once() {
    let mut group = group(2, &[1]);
    let wrong = |group: &mut RankGroup, request, attempts| {
        group.start(Time(0), GroupStart { request, bytes: 1, attempts }).unwrap_err()
    };
    let error = wrong(&mut group, REQUEST, ids(0, 5));
    assert_eq!(error, GroupStartError::IdCount { given: 5, wanted: 6 });
    let twice = [ids(0, 5), ids(0, 1)].concat();
    assert_eq!(wrong(&mut group, REQUEST, twice), GroupStartError::DuplicateAttempt(id(0)));
    start(&mut group, REQUEST, 0, 2);
    assert_eq!(wrong(&mut group, REQUEST, ids(50, 6)), GroupStartError::DuplicateRequest);
    // One of the first request's later rounds, and one that is under way.
    for taken in [5, 0] {
        let mut attempts = ids(50, 6);
        attempts[3] = id(taken);
        let error = wrong(&mut group, RequestId([2; 16]), attempts);
        assert_eq!(error, GroupStartError::DuplicateAttempt(id(taken)));
    }
}

#[test]
fn requests_are_bounded() {
    let mut config = RankGroupConfig::new(1, vec![1]);
    config.requests_max = 1;
    let mut group = RankGroup::new(config);
    start(&mut group, REQUEST, 0, 1);
    let second = GroupStart { request: RequestId([2; 16]), bytes: 1, attempts: ids(10, 3) };
    let error = group.start(Time(0), second).unwrap_err();
    assert_eq!(error, GroupStartError::Busy { open: 1, limit: 1 });
}

#[test]
fn what_is_late_or_of_another_rank_changes_nothing_and_what_is_not_ours_comes_back() {
    let mut group = group(2, &[1]);
    let out = start(&mut group, REQUEST, 0, 2);
    let ids = attempts(&out);
    completed(&mut group, 1, ids[0], 0);
    completed(&mut group, 0, ids[0], 0);
    completed(&mut group, 0, ids[0], 0);
    completed(&mut group, 0, id(999), 0);
    assert_eq!(group.counters().dropped_late, 3);
    assert_eq!(outputs(&mut group), []);
    let fresh = Upcall::Fresh { attempt: ids[0], groups: Vec::new() };
    assert_eq!(group.handle_upcall(Time(1), Rank(0), fresh.clone()), Some(fresh));
}

// PD-M9
#[test]
fn a_rank_that_is_gone_ends_every_request_and_takes_no_other() {
    let mut group = group(2, &[1]);
    let out = start(&mut group, REQUEST, 0, 2);
    group.handle_rank_gone(Time(1), Rank(0));
    let why = GroupFail::RankGone(Rank(0));
    let ids = attempts(&out);
    let cancel = GroupOutput::Cancel { rank: Rank(1), attempt: ids[1] };
    assert_eq!(outputs(&mut group), [GroupOutput::Failed { request: REQUEST, why }, cancel]);
    // Its completion crossed the cancellation.
    completed(&mut group, 1, ids[1], 0);
    assert_eq!(outputs(&mut group), [GroupOutput::Quiet { request: REQUEST }]);
    let start = GroupStart { request: REQUEST, bytes: 1, attempts: self::ids(50, 6) };
    assert_eq!(group.start(Time(2), start), Err(GroupStartError::RankGone(Rank(0))));
}
