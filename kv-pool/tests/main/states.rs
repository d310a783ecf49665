//! Every operation in every state, compared with a committed table.

use crate::common::check_snapshot;
use kv_pool::{Owner, PageError, PagePool, PageRef, PageState, PoolKind, Proof};
use std::fmt::Write;

const SEQUENCE: Owner = Owner::Sequence(1);
const READER: Owner = Owner::RemoteReader(2);

/// A one-page pool whose page is in `state`; the reference is of its latest life.
fn page_in(state: PageState) -> (PagePool, PageRef) {
    let mut pool = PagePool::new(PoolKind::Window, 1);
    let page = pool.reserve(1, SEQUENCE).unwrap()[0];
    if state == PageState::Reserved {
        return (pool, page);
    }
    pool.begin_fill(page).unwrap();
    if state == PageState::Filling {
        return (pool, page);
    }
    pool.seal(page).unwrap();
    match state {
        PageState::Sealed => {}
        PageState::Draining => {
            pool.add_owner(page, READER).unwrap();
            pool.remove_owner(page, SEQUENCE, None).unwrap();
        }
        PageState::Quarantined => pool.quarantine(page).unwrap(),
        PageState::Free => {
            pool.remove_owner(page, SEQUENCE, None).unwrap();
        }
        PageState::Reserved | PageState::Filling => unreachable!("returned above"),
    }
    assert_eq!(pool.state(0), Some(state));
    (pool, page)
}

fn outcome<T: std::fmt::Debug>(result: Result<T, PageError>) -> String {
    match result {
        Ok(value) => format!("{value:?}"),
        Err(error) => format!("error: {error}"),
    }
}

type Operation = (String, Box<dyn Fn(&mut PagePool, PageRef) -> String>);

fn operations() -> Vec<Operation> {
    let mut all: Vec<Operation> = vec![
        ("check".into(), Box::new(|pool, page| outcome(pool.check(page)))),
        (
            "reserve 1".into(),
            Box::new(|pool, _| match pool.reserve(1, Owner::Tree(9)) {
                Ok(pages) => format!("{} pages", pages.len()),
                Err(error) => format!("error: {error}"),
            }),
        ),
        ("begin_fill".into(), Box::new(|pool, page| outcome(pool.begin_fill(page)))),
        ("seal".into(), Box::new(|pool, page| outcome(pool.seal(page)))),
        ("reopen".into(), Box::new(|pool, page| outcome(pool.reopen(page)))),
        ("quarantine".into(), Box::new(|pool, page| outcome(pool.quarantine(page)))),
    ];
    let proofs = [Proof::OwnCompletionDrained, Proof::PeerAcknowledged, Proof::LinkFenced];
    for proof in proofs {
        let run = move |pool: &mut PagePool, page| outcome(pool.release_quarantined(page, proof));
        all.push((format!("release_quarantined {proof:?}"), Box::new(run)));
        let run = move |pool: &mut PagePool, page| {
            // As after the last owner has left.
            for owner in pool.owners(page).map(<[Owner]>::to_vec).unwrap_or_default() {
                let _ = pool.remove_owner(page, owner, Some(Proof::LinkFenced));
            }
            outcome(pool.release_quarantined(page, proof))
        };
        all.push((format!("remove all, release_quarantined {proof:?}"), Box::new(run)));
    }
    for owner in [SEQUENCE, Owner::Sequence(7), Owner::Tree(7), Owner::LocalCopy(7), READER] {
        let run = move |pool: &mut PagePool, page| outcome(pool.add_owner(page, owner));
        all.push((format!("add_owner {owner:?}"), Box::new(run)));
        for proof in [None].into_iter().chain(proofs.map(Some)) {
            let run =
                move |pool: &mut PagePool, page| outcome(pool.remove_owner(page, owner, proof));
            all.push((format!("remove_owner {owner:?} {proof:?}"), Box::new(run)));
            let run = move |pool: &mut PagePool, page| {
                let _ = pool.add_owner(page, owner);
                let first = outcome(pool.remove_owner(page, SEQUENCE, None));
                let second = outcome(pool.remove_owner(page, owner, proof));
                format!("{first}, then {second}")
            };
            if owner != SEQUENCE {
                let name = format!("add {owner:?}, remove {SEQUENCE:?}, remove it {proof:?}");
                all.push((name, Box::new(run)));
            }
        }
        let run = move |pool: &mut PagePool, page| {
            let _ = pool.add_owner(page, owner);
            let seal = outcome(pool.seal(page));
            let reopen = outcome(pool.reopen(page));
            format!("seal {seal}, reopen {reopen}")
        };
        all.push((format!("add {owner:?}, seal, reopen"), Box::new(run)));
    }
    all
}

#[test]
fn no_transition_changed_unnoticed() {
    let mut table = String::new();
    for state in PageState::ALL {
        for (name, operation) in operations() {
            let (mut pool, page) = page_in(state);
            let result = operation(&mut pool, page);
            pool.audit().unwrap();
            let after = pool.state(0).unwrap();
            let life = pool.generation(0);
            writeln!(table, "{state:?} | {name} | {result} | {after:?} life {life}").unwrap();
        }
    }
    check_snapshot("states.txt", &table);
}

#[test]
fn a_page_freed_and_taken_again_cannot_be_filled_before_the_caller_knows() {
    let (mut pool, old) = page_in(PageState::Free);
    let page = pool.reserve(1, SEQUENCE).unwrap()[0];
    assert_eq!(page.generation, old.generation + 1);
    assert_eq!(pool.begin_fill(page), Err(PageError::NotDrained { page }));
    assert_eq!(pool.drain_freed(), [0]);
    assert_eq!(pool.begin_fill(page), Ok(()));
    assert_eq!(pool.drain_freed(), []);
}

#[test]
fn owners_are_bounded() {
    let (mut pool, page) = page_in(PageState::Sealed);
    for n in 1..kv_pool::MAX_OWNERS as u64 {
        pool.add_owner(page, Owner::Tree(n)).unwrap();
    }
    let limit = kv_pool::MAX_OWNERS;
    assert_eq!(pool.add_owner(page, READER), Err(PageError::TooManyOwners { page, limit }));
}
