//! One computation for all attempts of a round: every order of events, and single rules.

use pd_transfer::group::{
    FanOut, FanOutConfig, FanOutError, FanOutOutput, Join, Rank, RequestId, RequestKey, ServedId,
};
use pd_transfer::id::Time;
use pd_transfer::states::FanOutState;
use pd_transfer::testing::mutation::{Mutation, without};
use pd_transfer::wire::{
    AttemptId, Extent, FinalRecord, Guard, Identity, Item, Key, RegionId, Tag, code,
};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

const KEY: RequestKey = RequestKey { request: RequestId([1; 16]), round: 1 };
const HOLD_US: u64 = 100;
const PAGES: u8 = 2;

fn id(n: u8) -> AttemptId {
    AttemptId([n; 16])
}

/// Page `n` in the memory of a rank: the same name, another place.
fn item(rank: Rank, n: u8) -> Item {
    Item {
        key: Key([n; 16]),
        identity: Identity([n; 16]),
        tag: Tag([n; 16]),
        region: RegionId(0),
        extents: vec![Extent { offset: u64::from(rank.0) * 1000 + u64::from(n) * 10, len: 10 }],
        guard: Guard { region: RegionId(0), offset: 0, expect: 1 },
    }
}

fn record() -> FinalRecord {
    FinalRecord::new([3; 16], &[], vec![1])
}

fn config() -> FanOutConfig {
    FanOutConfig { hold_us: HOLD_US, ..FanOutConfig::default() }
}

fn join(n: u8, rank: u16, ranks: u16) -> Join {
    let request = vec![1, 2, 3];
    Join { rank: Rank(rank), attempt: id(n), key: KEY, ranks, request, have: 0 }
}

fn outputs(fan_out: &mut FanOut) -> Vec<FanOutOutput> {
    std::iter::from_fn(|| fan_out.poll_output()).collect()
}

/// What happened to one attempt.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Seen {
    served: Option<ServedId>,
    is_cancelled: bool,
    is_released: bool,
    items: Vec<Item>,
    has_last: bool,
}

#[derive(Clone, Debug, Hash)]
struct World {
    fan_out: FanOut,
    widths: (u8, u16),
    attempts: BTreeMap<u8, Seen>,
    /// Open computations, with the pages that each rank has offered; `None` once finished.
    open: BTreeMap<ServedId, Option<Vec<u8>>>,
    released: BTreeSet<ServedId>,
    computed: usize,
    now: u64,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Arrive(u8),
    Cancel(u8),
    Release(u8),
    Offer(ServedId, u16),
    Finish(ServedId),
    Reject(ServedId),
    Wait,
}

impl World {
    fn new(attempts: u8, width: u16) -> Self {
        Self {
            fan_out: FanOut::new(config()),
            widths: (attempts, width),
            attempts: BTreeMap::new(),
            open: BTreeMap::new(),
            released: BTreeSet::new(),
            computed: 0,
            now: 0,
        }
    }

    fn rank(&self, n: u8) -> Rank {
        Rank(u16::from(n) % self.widths.1)
    }

    fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        for n in 0..self.widths.0 {
            match self.attempts.get(&n) {
                None => steps.push(Step::Arrive(n)),
                Some(seen) if seen.is_released => {}
                Some(seen) => {
                    if !seen.is_cancelled {
                        steps.push(Step::Cancel(n));
                    }
                    steps.push(Step::Release(n));
                }
            }
        }
        for (served, offered) in &self.open {
            let Some(offered) = offered else { continue };
            for (rank, pages) in (0..).zip(offered) {
                if *pages < PAGES {
                    steps.push(Step::Offer(*served, rank));
                }
            }
            steps.push(Step::Reject(*served));
            if offered.iter().all(|pages| *pages == PAGES) {
                steps.push(Step::Finish(*served));
            }
        }
        if self.fan_out.poll_timeout().is_some() {
            steps.push(Step::Wait);
        }
        steps
    }

    fn step(&mut self, step: Step) -> Result<(), String> {
        match step {
            Step::Arrive(n) => {
                let (rank, ranks) = (self.rank(n), u16::from(self.widths.0));
                self.fan_out.handle_requested(join(n, rank.0, ranks));
                let joinable = self.open.keys().next_back().copied();
                self.attempts.insert(n, Seen { served: joinable, ..Seen::default() });
            }
            Step::Cancel(n) => {
                self.attempts.get_mut(&n).unwrap().is_cancelled = true;
                self.fan_out.handle_cancelled(self.rank(n), id(n));
            }
            Step::Release(n) => {
                self.attempts.get_mut(&n).unwrap().is_released = true;
                self.fan_out.handle_released(Time(self.now), self.rank(n), id(n));
            }
            Step::Offer(served, rank) => {
                let Some(Some(offered)) = self.open.get_mut(&served) else { unreachable!() };
                let n = offered[usize::from(rank)];
                offered[usize::from(rank)] += 1;
                let items = vec![item(Rank(rank), n)];
                self.fan_out.offer(served, Rank(rank), items).map_err(|error| error.to_string())?;
            }
            Step::Finish(served) => {
                self.open.insert(served, None);
                self.fan_out.finish(served, record()).map_err(|error| error.to_string())?;
            }
            Step::Reject(served) => {
                self.open.insert(served, None);
                let text = String::from("no room");
                self.fan_out.reject(served, 1000, text).map_err(|error| error.to_string())?;
            }
            Step::Wait => {
                self.now = self.fan_out.poll_timeout().unwrap().0;
                self.fan_out.handle_timeout(Time(self.now));
            }
        }
        self.take(step)
    }

    fn take(&mut self, step: Step) -> Result<(), String> {
        for output in outputs(&mut self.fan_out) {
            match output {
                FanOutOutput::Compute { served, .. } => {
                    // PD-M10 PD-M16
                    let Step::Arrive(n) = step else { return Err(format!("{step:?} computes")) };
                    self.computed += 1;
                    self.open.insert(served, Some(vec![0; usize::from(self.widths.1)]));
                    self.attempts.get_mut(&n).unwrap().served = Some(served);
                }
                // PD-M14
                FanOutOutput::Stop { served } => {
                    let wanted = |seen: &&Seen| {
                        seen.served == Some(served) && !seen.is_cancelled && !seen.is_released
                    };
                    if let Some(seen) = self.attempts.values().find(wanted) {
                        return Err(format!("{served} stops, {seen:?} wants it"));
                    }
                    self.open.insert(served, None);
                }
                FanOutOutput::Ready { rank, attempt, items } => {
                    let seen = self.told(rank, attempt)?;
                    seen.items.extend(items);
                }
                FanOutOutput::Finish { rank, attempt, .. } => {
                    let seen = self.told(rank, attempt)?;
                    seen.has_last = true;
                    // PD-M13
                    let all: Vec<Item> = (0..PAGES).map(|n| item(rank, n)).collect();
                    if seen.items != all {
                        return Err(format!("{attempt} was told {:?}", seen.items));
                    }
                }
                FanOutOutput::Reject { rank, attempt, .. } => {
                    self.told(rank, attempt)?.has_last = true;
                }
                // PD-M12
                FanOutOutput::Release { served } => {
                    if !self.released.insert(served) {
                        return Err(format!("{served} is released twice"));
                    }
                    self.open.remove(&served);
                    let reads = |seen: &&Seen| seen.served == Some(served) && !seen.is_released;
                    if let Some(seen) = self.attempts.values().find(reads) {
                        return Err(format!("{served} is released, {seen:?} reads it"));
                    }
                }
            }
        }
        Ok(())
    }

    fn told(&mut self, rank: Rank, attempt: AttemptId) -> Result<&mut Seen, String> {
        let n = attempt.0[0];
        let is_right = self.rank(n) == rank;
        let seen = self.attempts.get_mut(&n).unwrap();
        if seen.is_cancelled || seen.is_released || seen.has_last || !is_right {
            return Err(format!("{attempt} is told something at {rank}: {seen:?}"));
        }
        Ok(seen)
    }
}

fn walk(world: World) -> Result<usize, String> {
    let (mut seen, mut most) = (HashSet::new(), 0);
    let mut open = vec![world];
    while let Some(world) = open.pop() {
        let mut hasher = DefaultHasher::new();
        world.hash(&mut hasher);
        if !seen.insert(hasher.finish()) {
            continue;
        }
        most = most.max(world.computed);
        let steps = world.steps();
        if steps.is_empty() && (world.fan_out.open() > 0 || world.released.len() != world.computed)
        {
            return Err(format!("ends with {} open", world.fan_out.open()));
        }
        for step in steps {
            let mut next = world.clone();
            next.step(step).map_err(|why| format!("{step:?}: {why}; before: {world:?}"))?;
            open.push(next);
        }
    }
    Ok(most)
}

// PD-M10 PD-M12 PD-M13 PD-M14 PD-M16
#[test]
fn every_order_of_events_serves_each_attempt_whole_and_releases_after_the_last() {
    for attempts in 1..=3 {
        for width in 1..=2 {
            let most = walk(World::new(attempts, width)).unwrap();
            // Each of them may come after the one before has ended.
            assert_eq!(most, usize::from(attempts));
        }
    }
}

// PD-M12
#[test]
fn without_the_wait_for_the_last_pages_are_released_under_a_reader() {
    let found = without(&[Mutation::LastRelease], || walk(World::new(2, 1)));
    assert!(found.unwrap_err().contains("reads it"));
}

fn served(out: &[FanOutOutput]) -> ServedId {
    let found = out.iter().find_map(|output| match output {
        FanOutOutput::Compute { served, .. } => Some(*served),
        _ => None,
    });
    found.unwrap()
}

// PD-M10 PD-M13 PD-M17
#[test]
fn a_late_rank_is_told_everything_in_one_go_and_from_the_memory_of_its_own_source() {
    let mut fan_out = FanOut::new(config());
    fan_out.handle_requested(join(0, 0, 3));
    let computing = served(&outputs(&mut fan_out));
    for rank in [Rank(0), Rank(1)] {
        fan_out.offer(computing, rank, vec![item(rank, 0)]).unwrap();
        fan_out.offer(computing, rank, vec![item(rank, 1)]).unwrap();
    }
    assert_eq!(outputs(&mut fan_out).len(), 2, "rank 1 has no attempt yet");
    fan_out.handle_requested(join(1, 1, 3));
    let (rank, attempt) = (Rank(1), id(1));
    let items = vec![item(rank, 0), item(rank, 1)];
    assert_eq!(
        outputs(&mut fan_out),
        [FanOutOutput::Ready { rank, attempt, items: items.clone() }]
    );
    fan_out.finish(computing, record()).unwrap();
    assert_eq!(outputs(&mut fan_out).len(), 2);
    fan_out.handle_requested(join(2, 1, 3));
    let attempt = id(2);
    let last = FanOutOutput::Finish { rank, attempt, record: record() };
    assert_eq!(outputs(&mut fan_out), [FanOutOutput::Ready { rank, attempt, items }, last]);
    assert_eq!((fan_out.counters().computed, fan_out.counters().joined), (1, 2));
}

// PD-M11
#[test]
fn another_request_under_the_same_key_is_rejected() {
    let other_prompt = Join { request: vec![9], ..join(1, 0, 2) };
    let other_prefix = Join { have: 1, ..join(1, 0, 2) };
    let other_width = join(1, 0, 3);
    for other in [other_prompt, other_prefix, other_width] {
        let mut fan_out = FanOut::new(config());
        fan_out.handle_requested(join(0, 0, 2));
        outputs(&mut fan_out);
        fan_out.handle_requested(other);
        let out = outputs(&mut fan_out);
        assert!(matches!(out[..], [FanOutOutput::Reject { code: code::DUPLICATE, .. }]), "{out:?}");
        // It never joined, so its end releases nothing.
        fan_out.handle_released(Time(0), Rank(0), id(1));
        assert_eq!(outputs(&mut fan_out), []);
        assert_eq!(fan_out.open(), 1);
    }
}

// PD-M15
#[test]
fn attempts_computations_and_pages_are_bounded() {
    let bounds = FanOutConfig { joins_max: 2, requests_max: 1, items_max: 1, ..config() };
    let mut fan_out = FanOut::new(bounds);
    fan_out.handle_requested(join(0, 0, 9));
    let computing = served(&outputs(&mut fan_out));
    fan_out.handle_requested(join(1, 0, 9));
    fan_out.handle_requested(join(2, 0, 9));
    let other = RequestKey { round: 2, ..KEY };
    fan_out.handle_requested(Join { key: other, ..join(3, 0, 9) });
    let busy = outputs(&mut fan_out);
    let is_busy =
        |output: &FanOutOutput| matches!(output, FanOutOutput::Reject { code: code::BUSY, .. });
    assert!(busy.len() == 2 && busy.iter().all(is_busy), "{busy:?}");
    let items = vec![item(Rank(0), 0), item(Rank(0), 1)];
    let error = fan_out.offer(computing, Rank(0), items).unwrap_err();
    let (rank, served) = (Rank(0), computing);
    assert_eq!(error, FanOutError::TooManyItems { served, rank, wanted: 2, limit: 1 });
    assert_eq!(outputs(&mut fan_out), []);
}

// PD-M16
#[test]
fn pages_wait_for_the_other_ranks_for_a_bounded_time_and_what_comes_later_is_new() {
    let mut fan_out = FanOut::new(config());
    fan_out.handle_requested(join(0, 0, 2));
    let first = served(&outputs(&mut fan_out));
    fan_out.finish(first, record()).unwrap();
    fan_out.handle_released(Time(10), Rank(0), id(0));
    fan_out.handle_timeout(Time(10 + HOLD_US - 1));
    assert_eq!(outputs(&mut fan_out).len(), 1, "the record, and no release");
    // The second rank comes in time, and then there is nobody left to wait for.
    let mut in_time = fan_out.clone();
    in_time.handle_requested(join(1, 0, 2));
    in_time.handle_timeout(Time(1_000_000));
    assert!(matches!(outputs(&mut in_time)[..], [FanOutOutput::Finish { .. }]));
    in_time.handle_released(Time(1_000_000), Rank(0), id(1));
    assert_eq!(outputs(&mut in_time), [FanOutOutput::Release { served: first }]);

    assert_eq!(fan_out.poll_timeout(), Some(Time(10 + HOLD_US)));
    fan_out.handle_timeout(Time(10 + HOLD_US));
    assert_eq!(outputs(&mut fan_out), [FanOutOutput::Release { served: first }]);
    assert_eq!(fan_out.counters().incomplete, 1);
    fan_out.handle_requested(join(1, 0, 2));
    assert_ne!(served(&outputs(&mut fan_out)), first);
}

// PD-M14
#[test]
fn the_computation_goes_on_while_one_rank_wants_it() {
    let mut fan_out = FanOut::new(config());
    fan_out.handle_requested(join(0, 0, 2));
    fan_out.handle_requested(join(1, 1, 2));
    let computing = served(&outputs(&mut fan_out));
    fan_out.handle_cancelled(Rank(0), id(0));
    assert_eq!(outputs(&mut fan_out), []);
    fan_out.handle_cancelled(Rank(1), id(1));
    assert_eq!(outputs(&mut fan_out), [FanOutOutput::Stop { served: computing }]);
    assert_eq!(fan_out.state(computing), Some(FanOutState::Stopped));
    let late = fan_out.offer(computing, Rank(0), vec![item(Rank(0), 0)]);
    assert_eq!(late, Err(FanOutError::Ended(computing)));
    fan_out.handle_released(Time(1), Rank(0), id(0));
    assert_eq!(outputs(&mut fan_out), [], "rank 1 may still read");
    fan_out.handle_released(Time(1), Rank(1), id(1));
    assert_eq!(outputs(&mut fan_out), [FanOutOutput::Release { served: computing }]);
}
