//! Single rules of the tree.

use crate::common::{Books, Fresh, chain, keeper, page, tree};
use hicache::{Boundary, InsertError, Inserted, LeaseId, PinError};
use kv_pool::PoolKind;

#[test]
fn a_prefix_without_its_boundary_is_a_miss() {
    let mut tree = tree(10, 10, 10);
    let mut fresh = Fresh::default();
    let long = chain(&[1, 2, 3, 4]);
    let blocks = fresh.blocks(3);
    let boundary = fresh.boundary();
    let inserted = tree.insert(&long[..3], &blocks, Some(boundary.clone())).unwrap();
    assert_eq!(inserted, Inserted { blocks: 3, boundary: true });
    for (length, max) in [(1, 9), (2, 9), (4, 2), (4, 0), (0, 9)] {
        assert_eq!(tree.lookup(&long[..length], max), None, "{length} hashes, at most {max}");
    }
    let hit = tree.lookup(&long, 9).unwrap();
    assert_eq!((&hit.blocks, &hit.boundary), (&blocks, &boundary));
    let early = fresh.boundary();
    let inserted = tree.insert(&long[..1], &fresh.blocks(1), Some(early.clone())).unwrap();
    assert_eq!(inserted, Inserted { blocks: 0, boundary: true });
    let hit = tree.lookup(&long[..2], 9).unwrap();
    assert_eq!((&hit.blocks[..], &hit.boundary), (&blocks[..1], &early));
    let counters = tree.counters();
    assert_eq!((counters.lookups, counters.hits), (7, 2));
    assert_eq!((counters.blocks_taken, counters.blocks_duplicate), (3, 1));
    assert_eq!((counters.blocks_wanted, counters.blocks_hit), (1 + 2 + 2 + 4 + 2, 4));
}

#[test]
fn what_is_there_stays() {
    let mut tree = tree(10, 10, 10);
    let mut fresh = Fresh::default();
    let mut books = Books::default();
    let hashes = chain(&[1, 2]);
    let blocks = fresh.blocks(2);
    let boundary = fresh.boundary();
    tree.insert(&hashes, &blocks, Some(boundary.clone())).unwrap();
    books.settle(&mut tree);
    let again = tree.insert(&hashes, &fresh.blocks(2), Some(fresh.boundary())).unwrap();
    assert_eq!(again, Inserted { blocks: 0, boundary: false });
    assert_eq!(books.settle(&mut tree), []);
    let hit = tree.lookup(&hashes, 2).unwrap();
    assert_eq!((hit.blocks, hit.boundary), (blocks, boundary));
}

#[test]
fn least_recently_used_leaves_go_first() {
    let mut tree = tree(5, 10, 10);
    let mut fresh = Fresh::default();
    let mut books = Books::default();
    let (a, b, c) = (chain(&[0, 1]), chain(&[0, 2]), chain(&[0, 3, 4]));
    for chain in [&a, &b] {
        let blocks = fresh.blocks(chain.len());
        tree.insert(chain, &blocks, Some(fresh.boundary())).unwrap();
    }
    assert_eq!(tree.blocks(), 3);
    tree.lookup(&a, 9).unwrap();
    books.settle(&mut tree);
    let new = fresh.blocks(3);
    tree.insert(&c, &new, Some(fresh.boundary())).unwrap();
    assert_eq!(books.settle(&mut tree), [], "five fit");
    let d = chain(&[9]);
    tree.insert(&d, &fresh.blocks(1), Some(fresh.boundary())).unwrap();
    assert_eq!(books.settle(&mut tree).len(), 4, "a block page and a boundary");
    assert_eq!(tree.lookup(&b, 9), None);
    for kept in [&a, &c, &d] {
        assert_eq!(tree.lookup(kept, 9).unwrap().blocks.len(), kept.len());
    }
}

#[test]
fn a_boundary_that_goes_takes_useless_blocks_along() {
    let mut tree = tree(10, 2, 10);
    let mut fresh = Fresh::default();
    let mut books = Books::default();
    let hashes = chain(&[1, 2, 3, 4, 5]);
    tree.insert(&hashes, &fresh.blocks(5), Some(fresh.boundary())).unwrap();
    tree.insert(&hashes[..2], &fresh.blocks(2), Some(fresh.boundary())).unwrap();
    books.settle(&mut tree);
    // The third boundary displaces the oldest one, at block 5; blocks 3 to 5 are useless then.
    let other = chain(&[7]);
    tree.insert(&other, &fresh.blocks(1), Some(fresh.boundary())).unwrap();
    assert_eq!(books.settle(&mut tree).len(), 3 + 3);
    assert_eq!((tree.blocks(), tree.boundaries()), (3, 2));
    assert_eq!(tree.counters().blocks_useless, 3);
    assert_eq!(tree.lookup(&hashes, 9).unwrap().blocks.len(), 2);
    // A boundary in the middle goes alone.
    let deeper = chain(&[1, 2, 6]);
    tree.insert(&deeper, &fresh.blocks(3), Some(fresh.boundary())).unwrap();
    assert_eq!(tree.lookup(&other, 9), None);
    tree.lookup(&deeper, 9).unwrap();
    assert_eq!(tree.evict_boundaries(1), 1);
    assert_eq!(tree.lookup(&deeper[..2], 9), None);
    assert_eq!(tree.lookup(&deeper, 9).unwrap().blocks.len(), 3);
    assert_eq!(tree.evict_boundaries(9), 1);
    books.settle(&mut tree);
    assert_eq!((tree.blocks(), tree.boundaries()), (0, 0));
}

#[test]
fn pinned_pages_stay_until_the_last_lease_ends() {
    let mut tree = tree(3, 3, 2);
    let mut fresh = Fresh::default();
    let mut books = Books::default();
    let hashes = chain(&[1, 2, 3]);
    tree.insert(&hashes, &fresh.blocks(3), Some(fresh.boundary())).unwrap();
    tree.insert(&hashes[..2], &fresh.blocks(2), Some(fresh.boundary())).unwrap();
    let hit = tree.lookup(&hashes[..2], 9).unwrap();
    tree.pin(LeaseId(1), &hit).unwrap();
    tree.pin(LeaseId(2), &hit).unwrap();
    assert_eq!(tree.pin(LeaseId(2), &hit), Err(PinError::Exists { lease: LeaseId(2) }));
    assert_eq!(tree.pin(LeaseId(3), &hit), Err(PinError::LeasesFull { limit: 2 }));
    assert_eq!(tree.evict_blocks(9), 1, "only what is behind the hit");
    assert_eq!(tree.evict_boundaries(9), 0);
    let other = chain(&[8, 9]);
    let full = InsertError::BlocksFull { wanted: 2, limit: 3, pinned: 2 };
    assert_eq!(tree.insert(&other, &fresh.blocks(2), Some(fresh.boundary())), Err(full));
    assert!(tree.unpin(LeaseId(1)));
    assert!(!tree.unpin(LeaseId(1)));
    assert_eq!(tree.evict_blocks(9), 0);
    assert!(tree.unpin(LeaseId(2)));
    assert_eq!(tree.evict_blocks(9), 2);
    books.settle(&mut tree);
    assert_eq!(tree.pin(LeaseId(3), &hit), Err(PinError::Gone { node: hit.node }));
    assert_eq!(tree.counters().inserts_refused, 1);
}

#[test]
fn a_hit_whose_boundary_was_replaced_cannot_be_pinned() {
    let mut tree = tree(9, 2, 2);
    let mut fresh = Fresh::default();
    let hashes = chain(&[1, 2]);
    tree.insert(&hashes[..1], &fresh.blocks(1), Some(fresh.boundary())).unwrap();
    tree.insert(&hashes, &fresh.blocks(2), Some(fresh.boundary())).unwrap();
    let hit = tree.lookup(&hashes[..1], 9).unwrap();
    tree.lookup(&hashes, 9).unwrap();
    assert_eq!(tree.evict_boundaries(1), 1);
    tree.insert(&hashes[..1], &fresh.blocks(1), Some(fresh.boundary())).unwrap();
    assert_eq!(tree.pin(LeaseId(1), &hit), Err(PinError::Gone { node: hit.node }));
    let hit = tree.lookup(&hashes[..1], 9).unwrap();
    assert_eq!(tree.pin(LeaseId(1), &hit), Ok(()));
}

#[test]
fn unfit_arguments_change_nothing() {
    let mut tree = tree(9, 1, 2);
    let mut fresh = Fresh::default();
    let hashes = chain(&[1, 2]);
    let boundary = fresh.boundary();
    tree.insert(&hashes, &fresh.blocks(2), Some(boundary.clone())).unwrap();
    let mut books = Books::default();
    books.settle(&mut tree);
    let two = fresh.blocks(2);
    let shape = |hashes, pages| Err(InsertError::Shape { hashes, pages });
    assert_eq!(tree.insert(&[], &[], Some(boundary.clone())), shape(0, 0));
    assert_eq!(tree.insert(&hashes, &two[..1], Some(boundary.clone())), shape(2, 1));
    let window = page(PoolKind::Window, 1);
    let wrong = Err(InsertError::WrongPool { page: window, expected: PoolKind::Block });
    assert_eq!(tree.insert(&hashes, &[two[0], window], Some(boundary.clone())), wrong);
    for count in [0, 1, 4] {
        let bundle = Boundary { window: vec![window; count], carry: boundary.carry };
        let expected = Err(InsertError::WindowPages { pages: count });
        assert_eq!(tree.insert(&hashes, &two, Some(bundle)), expected);
    }
    let bundle = Boundary { window: boundary.window.clone(), carry: two[0] };
    let wrong = Err(InsertError::WrongPool { page: two[0], expected: PoolKind::Carry });
    assert_eq!(tree.insert(&hashes, &two, Some(bundle)), wrong);
    // A hash behind another prefix, and one twice in a chain.
    let moved = [chain(&[5])[0], hashes[1]];
    let expected = Err(InsertError::Inconsistent { position: 1 });
    assert_eq!(tree.insert(&moved, &two, Some(boundary.clone())), expected);
    let twice = [chain(&[5])[0], chain(&[5])[0]];
    assert_eq!(tree.insert(&twice, &two, Some(boundary.clone())), expected);
    let hit = tree.lookup(&hashes, 9).unwrap();
    tree.pin(LeaseId(1), &hit).unwrap();
    let expected = Err(InsertError::BoundariesFull { limit: 1 });
    assert_eq!(tree.insert(&chain(&[5]), &two[..1], Some(boundary)), expected);
    assert_eq!(books.settle(&mut tree), []);
    assert_eq!((tree.blocks(), tree.boundaries(), tree.leases()), (2, 1, 1));
}

#[test]
fn blocks_alone_are_kept_only_where_they_are_of_use() {
    let mut fresh = Fresh::default();
    let mut books = Books::default();
    let hashes = chain(&[1, 2, 3]);
    let blocks = fresh.blocks(3);
    let mut computing = tree(10, 10, 10);
    assert_eq!(computing.insert(&hashes, &blocks, None), Err(InsertError::NoBoundary));
    assert_eq!((computing.blocks(), computing.poll_action()), (0, None));
    let mut pulling = keeper(10, 10, 10);
    let inserted = pulling.insert(&hashes[..2], &blocks[..2], None).unwrap();
    assert_eq!(inserted, Inserted { blocks: 2, boundary: false });
    assert_eq!(books.settle(&mut pulling), []);
    assert_eq!(pulling.lookup(&hashes, 3), None, "nothing can be computed from there");
    assert_eq!(pulling.lookup_blocks(&hashes, 3), blocks[..2]);
    assert_eq!(pulling.lookup_blocks(&hashes, 1), blocks[..1]);
    pulling.insert(&hashes, &blocks, Some(fresh.boundary())).unwrap();
    assert_eq!(pulling.evict_boundaries(1), 1);
    assert_eq!(pulling.lookup_blocks(&hashes, 3), blocks, "the blocks stay");
    assert_eq!(pulling.evict_blocks(9), 3);
}

#[test]
fn a_superseded_boundary_goes_alone() {
    let mut tree = tree(10, 10, 10);
    let mut fresh = Fresh::default();
    let mut books = Books::default();
    let hashes = chain(&[1, 2]);
    let blocks = fresh.blocks(2);
    let first = fresh.boundary();
    tree.insert(&hashes[..1], &blocks[..1], Some(first.clone())).unwrap();
    tree.insert(&hashes, &blocks, Some(fresh.boundary())).unwrap();
    books.settle(&mut tree);
    assert!(tree.has_boundary(&hashes[0]));
    assert!(tree.drop_boundary(&hashes[0]));
    assert_eq!(books.settle(&mut tree), first.pages().collect::<Vec<_>>());
    assert!(!tree.drop_boundary(&hashes[0]), "it has gone already");
    assert_eq!(tree.lookup(&hashes, 1), None);
    let hit = tree.lookup(&hashes, 2).unwrap();
    tree.pin(LeaseId(1), &hit).unwrap();
    assert!(!tree.drop_boundary(&hashes[1]), "a lease needs it");
    assert_eq!(tree.lookup(&hashes, 2), Some(hit));
}

#[test]
fn what_holds_wrong_bytes_goes_with_all_that_follows_it_and_nothing_else() {
    let mut tree = tree(10, 10, 10);
    let mut fresh = Fresh::default();
    let mut books = Books::default();
    let (long, other) = (chain(&[0, 1, 2]), chain(&[0, 5]));
    let blocks = fresh.blocks(3);
    tree.insert(&long[..1], &blocks[..1], Some(fresh.boundary())).unwrap();
    tree.insert(&long, &blocks, Some(fresh.boundary())).unwrap();
    tree.insert(&other, &[blocks[0], fresh.blocks(1)[0]], Some(fresh.boundary())).unwrap();
    books.settle(&mut tree);
    let hit = tree.lookup(&long, 9).unwrap();
    tree.pin(LeaseId(1), &hit).unwrap();
    let (owner, _) = tree.held().find(|(_, page)| *page == blocks[1]).unwrap();
    let kv_pool::Owner::Tree(node) = owner else { panic!("{owner:?}") };
    let node = hicache::NodeId(node);
    assert_eq!(tree.prefix_of(node), Some((long[1], 2)));
    let gone = tree.give_up(node);
    assert_eq!(gone, [(long[2], blocks[2]), (long[1], blocks[1])]);
    assert_eq!(books.settle(&mut tree).len(), 2 + 3, "two blocks and a boundary");
    assert_eq!((tree.blocks(), tree.boundaries(), tree.leases()), (2, 2, 0));
    assert_eq!(tree.lookup(&long, 9).unwrap().blocks, blocks[..1], "what is before it stays");
    assert_eq!(tree.lookup(&other, 9).unwrap().blocks.len(), 2, "and what is beside it");
    assert_eq!((tree.give_up(node), tree.prefix_of(node)), (Vec::new(), None));
    // Nothing is left of it that could not be put in again.
    tree.insert(&long, &[blocks[0], blocks[1], blocks[2]], Some(fresh.boundary())).unwrap();
    assert_eq!(tree.lookup(&long, 9).unwrap().blocks, blocks);
}
