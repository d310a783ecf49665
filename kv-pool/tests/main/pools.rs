//! Random operations on the pool against a naive oracle.

use kv_pool::{Owner, PageError, PagePool, PageRef, PageState, PoolFull, PoolKind, Proof, Removed};
use proptest::prelude::*;

const PAGES: u32 = 6;

/// A page as the rules describe it, kept without counters or lists.
#[derive(Clone, Debug)]
struct Naive {
    state: PageState,
    life: u64,
    owners: Vec<Owner>,
    told: bool,
}

/// The oracle's only error.
#[derive(Debug, PartialEq, Eq)]
struct Refused;

#[derive(Debug)]
struct Oracle {
    pages: Vec<Naive>,
}

fn is_local(owner: &Owner) -> bool {
    !matches!(owner, Owner::RemoteReader(_))
}

impl Oracle {
    fn new() -> Self {
        let page = Naive { state: PageState::Free, life: 1, owners: vec![], told: true };
        Self { pages: vec![page; PAGES as usize] }
    }

    fn live(&mut self, page: PageRef) -> Option<&mut Naive> {
        let naive = self.pages.get_mut(page.index as usize)?;
        let same = page.pool == PoolKind::Block && naive.life == page.generation;
        (same && naive.state != PageState::Free).then_some(naive)
    }

    fn free(naive: &mut Naive) {
        *naive =
            Naive { state: PageState::Free, life: naive.life + 1, owners: vec![], told: false };
    }

    /// The outcome if the operation is allowed; the state is changed then.
    fn apply(&mut self, op: &Op, page: PageRef) -> Result<Option<Removed>, Refused> {
        use PageState::{Filling, Quarantined, Reserved, Sealed};
        let naive = self.live(page).ok_or(Refused)?;
        let copying = naive.owners.iter().any(|o| matches!(o, Owner::LocalCopy(_)));
        match *op {
            Op::BeginFill if naive.state == Reserved && naive.told => naive.state = Filling,
            Op::Seal if naive.state == Filling && !copying => naive.state = Sealed,
            Op::Reopen if naive.state == Filling && !copying => naive.state = Reserved,
            Op::Quarantine if naive.state != Quarantined => naive.state = Quarantined,
            Op::Release(_) if naive.state == Quarantined && naive.owners.is_empty() => {
                Self::free(naive);
            }
            Op::Add(owner) => {
                let fits = match naive.state {
                    Sealed => true,
                    Reserved | Filling => is_local(&owner),
                    _ => false,
                };
                if !fits || naive.owners.contains(&owner) {
                    return Err(Refused);
                }
                naive.owners.push(owner);
            }
            Op::Remove(owner, proof) => {
                let proven = match owner {
                    Owner::Sequence(_) | Owner::Tree(_) => true,
                    Owner::LocalCopy(_) => {
                        proof.is_some_and(|proof| proof != Proof::PeerAcknowledged)
                    }
                    Owner::RemoteReader(_) => {
                        proof.is_some_and(|proof| proof != Proof::OwnCompletionDrained)
                    }
                };
                if !proven || !naive.owners.contains(&owner) {
                    return Err(Refused);
                }
                naive.owners.retain(|other| *other != owner);
                if naive.owners.iter().any(is_local) {
                    return Ok(Some(Removed::StillOwned));
                }
                if naive.state == Quarantined {
                    return Ok(Some(Removed::Draining));
                }
                if naive.owners.is_empty() {
                    Self::free(naive);
                    return Ok(Some(Removed::Freed));
                }
                naive.state = PageState::Draining;
                return Ok(Some(Removed::Draining));
            }
            _ => return Err(Refused),
        }
        Ok(None)
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    BeginFill,
    Seal,
    Reopen,
    Quarantine,
    Release(Proof),
    Add(Owner),
    Remove(Owner, Option<Proof>),
}

#[derive(Clone, Debug)]
enum Act {
    Reserve(u32, Owner),
    DrainFreed,
    /// An operation on one of the references ever handed out.
    On(usize, Op),
    /// Removal of one of the owners that such a page has.
    RemoveOne(usize, usize, Proof),
    /// The same on one that never was.
    Foreign(PageRef, Op),
}

fn owner() -> impl Strategy<Value = Owner> {
    (0_u8..6, 0_u64..2).prop_map(|(kind, number)| match kind {
        0 => Owner::Sequence(number),
        1 => Owner::Tree(number),
        2 => Owner::LocalCopy(number),
        _ => Owner::RemoteReader(number),
    })
}

fn proof() -> impl Strategy<Value = Proof> {
    prop::sample::select(vec![
        Proof::OwnCompletionDrained,
        Proof::PeerAcknowledged,
        Proof::LinkFenced,
    ])
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        10 => Just(Op::BeginFill),
        10 => Just(Op::Seal),
        1 => Just(Op::Reopen),
        1 => Just(Op::Quarantine),
        4 => proof().prop_map(Op::Release),
        12 => owner().prop_map(Op::Add),
        4 => (owner(), prop::option::weighted(0.6, proof())).prop_map(|(o, p)| Op::Remove(o, p)),
    ]
}

fn act() -> impl Strategy<Value = Act> {
    let foreign = (0_u8..3, 0..PAGES + 2, 0_u64..4).prop_map(|(pool, index, generation)| PageRef {
        pool: PoolKind::try_from(pool).unwrap(),
        index,
        generation,
    });
    let local = owner().prop_filter("local", is_local);
    prop_oneof![
        3 => (0_u32..4, local).prop_map(|(n, owner)| Act::Reserve(n, owner)),
        2 => Just(Act::DrainFreed),
        4 => (any::<prop::sample::Index>(), 0_usize..4, proof())
            .prop_map(|(n, owner, proof)| Act::RemoveOne(n.index(64), owner, proof)),
        24 => (any::<prop::sample::Index>(), op()).prop_map(|(n, op)| Act::On(n.index(64), op)),
        1 => (foreign, op()).prop_map(|(page, op)| Act::Foreign(page, op)),
    ]
}

fn operate(pool: &mut PagePool, op: &Op, page: PageRef) -> Result<Option<Removed>, PageError> {
    match *op {
        Op::BeginFill => pool.begin_fill(page).map(|()| None),
        Op::Seal => pool.seal(page).map(|()| None),
        Op::Reopen => pool.reopen(page).map(|()| None),
        Op::Quarantine => pool.quarantine(page).map(|()| None),
        Op::Release(proof) => pool.release_quarantined(page, proof).map(|()| None),
        Op::Add(owner) => pool.add_owner(page, owner).map(|()| None),
        Op::Remove(owner, proof) => pool.remove_owner(page, owner, proof).map(Some),
    }
}

fn compare(pool: &PagePool, oracle: &Oracle) {
    pool.audit().unwrap();
    let counts = pool.counts();
    let count = |state| oracle.pages.iter().filter(|page| page.state == state).count() as u32;
    assert_eq!(counts.free, count(PageState::Free));
    assert_eq!(counts.reserved, count(PageState::Reserved));
    assert_eq!(counts.filling, count(PageState::Filling));
    assert_eq!(counts.sealed, count(PageState::Sealed));
    assert_eq!(counts.draining, count(PageState::Draining));
    assert_eq!(counts.quarantined, count(PageState::Quarantined));
    assert_eq!(counts.total, PAGES);
    let mut owned = pool.owned();
    for (index, naive) in (0..).zip(&oracle.pages) {
        assert_eq!(pool.state(index), Some(naive.state), "page {index}");
        assert_eq!(pool.generation(index), naive.life, "page {index}");
        let page = PageRef { pool: PoolKind::Block, index, generation: naive.life };
        if naive.state == PageState::Free {
            assert!(pool.check(page).is_err());
        } else {
            assert_eq!(owned.next(), Some((page, naive.owners.as_slice())));
            assert_eq!(pool.owners(page), Ok(naive.owners.as_slice()));
        }
    }
    assert_eq!(owned.next(), None);
}

/// One of the latest references; older ones are mostly stale.
fn recent(known: &[PageRef], number: usize) -> Option<PageRef> {
    let back = 1 + number % known.len().clamp(1, 8);
    known.len().checked_sub(back).map(|position| known[position])
}

fn operate_on_both(pool: &mut PagePool, oracle: &mut Oracle, op: &Op, page: PageRef) {
    let stale = oracle.live(page).is_none();
    let expected = oracle.apply(op, page);
    let actual = operate(pool, op, page);
    assert_eq!(actual.map_err(|_| Refused), expected, "{op:?} of {page}: {actual:?}");
    assert_eq!(stale, matches!(actual, Err(PageError::Stale { .. })));
}

fn step(pool: &mut PagePool, oracle: &mut Oracle, known: &mut Vec<PageRef>, act: &Act) {
    match act {
        Act::Reserve(wanted, owner) => {
            let free = pool.counts().free;
            match pool.reserve(*wanted, *owner) {
                Ok(pages) => {
                    assert_eq!(pages.len() as u32, *wanted);
                    for page in pages {
                        let naive = &mut oracle.pages[page.index as usize];
                        assert_eq!(naive.state, PageState::Free, "a page given out twice");
                        assert_eq!(naive.life, page.generation);
                        naive.state = PageState::Reserved;
                        naive.owners.push(*owner);
                        known.push(page);
                    }
                }
                Err(error) => {
                    assert!(*wanted > free);
                    assert_eq!(error, PoolFull { wanted: *wanted, free, total: PAGES });
                }
            }
        }
        Act::DrainFreed => {
            let mut drained = pool.drain_freed();
            drained.sort_unstable();
            let untold: Vec<u32> = (0..PAGES).filter(|&i| !oracle.pages[i as usize].told).collect();
            assert_eq!(drained, untold);
            for page in &mut oracle.pages {
                page.told = true;
            }
        }
        Act::On(number, op) => {
            if let Some(page) = recent(known, *number) {
                operate_on_both(pool, oracle, op, page);
            }
        }
        Act::RemoveOne(number, owner, proof) => {
            let Some(page) = recent(known, *number) else { return };
            let owners = pool.owners(page).unwrap_or_default();
            if let Some(owner) = owners.get(owner % owners.len().max(1)) {
                operate_on_both(pool, oracle, &Op::Remove(*owner, Some(*proof)), page);
            }
        }
        Act::Foreign(page, op) => {
            let expected = oracle.apply(op, *page);
            assert_eq!(
                operate(pool, op, *page).map_err(|_| Refused),
                expected,
                "{op:?} of foreign {page}"
            );
        }
    }
}

/// Failures are printed with their input; no file is written.
fn config() -> ProptestConfig {
    ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn pool_agrees_with_the_oracle(acts in prop::collection::vec(act(), 1..160)) {
        let mut pool = PagePool::new(PoolKind::Block, PAGES);
        let mut oracle = Oracle::new();
        let mut known = Vec::new();
        for act in &acts {
            step(&mut pool, &mut oracle, &mut known, act);
            compare(&pool, &oracle);
        }
    }
}

/// The random runs are worth something only if they reach every state and every way out.
#[test]
fn random_runs_reach_every_state() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut seen = [0_u32; 6];
    let mut lives = 0;
    for _ in 0..60 {
        let acts = prop::collection::vec(act(), 160).new_tree(&mut runner).unwrap().current();
        let mut pool = PagePool::new(PoolKind::Block, PAGES);
        let mut oracle = Oracle::new();
        let mut known = Vec::new();
        for act in &acts {
            step(&mut pool, &mut oracle, &mut known, act);
            for index in 0..PAGES {
                seen[pool.state(index).unwrap() as usize] += 1;
            }
        }
        lives += (0..PAGES).map(|index| pool.generation(index) - 1).sum::<u64>();
    }
    assert!(seen.iter().all(|&count| count > 100), "{seen:?}");
    assert!(lives > 200, "{lives} pages freed");
}
