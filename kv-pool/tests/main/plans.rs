//! The hand-off plan: complete, without overlap, and equal at both ends.

use crate::common::small_geometry;
use kv_pool::{
    CacheKind, Geometry, IndexKeyType, Numerics, PlanEntry, PoolKind, handoff_plan, plan_hash,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

fn geometries() -> Vec<Geometry> {
    let mut all = vec![small_geometry(Numerics::Reference, IndexKeyType::Fp4)];
    all.extend(IndexKeyType::ALL.map(|index| small_geometry(Numerics::Official, index)));
    all
}

/// Which rows the state after `n` tokens consists of, from the definition: token by token.
fn rows_by_definition(
    geometry: &Geometry,
    n: u32,
    have_blocks: u32,
) -> BTreeMap<(CacheKind, u16, u32), BTreeSet<u32>> {
    let mut rows: BTreeMap<_, BTreeSet<u32>> = BTreeMap::new();
    for pool in PoolKind::ALL {
        for section in geometry.sections(pool) {
            let (kind, layer) = (section.kind, section.layer);
            let per_page = geometry.rows_per_page(kind);
            let mut add = |row: u32| {
                rows.entry((kind, layer, row / per_page)).or_default().insert(row % per_page);
            };
            match pool {
                PoolKind::Carry => add(0),
                // Every written row of a page that holds a visible position.
                PoolKind::Window => {
                    let visible = n.saturating_sub(127)..n;
                    let page = |p: u32| p / 64;
                    (0..n).filter(|&p| visible.clone().any(|v| page(v) == page(p))).for_each(add);
                }
                PoolKind::Block => {
                    let ratio = geometry.tokens_per_row(kind);
                    for last in (0..n).filter(|p| (p + 1) % ratio == 0) {
                        if last / 256 >= have_blocks {
                            add(last / ratio);
                        }
                    }
                }
            }
        }
    }
    rows
}

fn check_plan(geometry: &Geometry, n: u32, have_blocks: u32) {
    let plan = handoff_plan(geometry, n, have_blocks);
    let mut expected = rows_by_definition(geometry, n, have_blocks);
    for entry in &plan {
        let &PlanEntry { kind, layer, pool, page_no, rows, bytes } = entry;
        assert_eq!(kind.pool(), Some(pool));
        let written = expected.remove(&(kind, layer, page_no)).expect("a page with rows, once");
        assert_eq!(written, (0..rows).collect(), "{entry:?}");
        assert_eq!(bytes, geometry.extents(kind, rows).bytes());
        assert_eq!(PlanEntry::from_key(entry.key()), Ok(*entry));
    }
    assert!(expected.is_empty(), "not in the plan: {:?}", expected.keys());
    let keys: BTreeSet<[u8; 16]> = plan.iter().map(PlanEntry::key).collect();
    assert_eq!(keys.len(), plan.len());
}

#[test]
fn every_short_length_is_complete() {
    let geometry = small_geometry(Numerics::Official, IndexKeyType::Fp8);
    for n in (0..=520).chain([766, 767, 768, 769, 895, 896, 1023, 1024, 1025]) {
        check_plan(&geometry, n, 0);
        check_plan(&geometry, n, n / 256);
        check_plan(&geometry, n, n / 256 + 1);
    }
}

#[test]
fn a_known_plan() {
    let geometry = small_geometry(Numerics::Official, IndexKeyType::Bf16);
    let plan = handoff_plan(&geometry, 300, 1);
    let of = |pool| plan.iter().filter(|entry| entry.pool == pool).collect::<Vec<_>>();
    // 44 tokens of block 1: 11 C4 rows, no C128 row.
    let block = of(PoolKind::Block);
    assert_eq!(block.len(), 4);
    assert!(block.iter().all(|entry| entry.page_no == 1 && entry.rows == 11));
    assert_eq!(block[0].bytes, 11 * 584);
    assert_eq!(block[1].bytes, 11 * 256);
    // Positions 173..300: window pages 2, 3 whole and 44 rows of 4, in six layers.
    let window = of(PoolKind::Window);
    assert_eq!(window.len(), 18);
    let pages: Vec<_> = window.iter().step_by(6).map(|entry| (entry.page_no, entry.rows)).collect();
    assert_eq!(pages, [(2, 64), (3, 64), (4, 44)]);
    assert_eq!(of(PoolKind::Carry).len(), 6);
}

#[test]
fn plan_hash_depends_on_every_field_and_the_order() {
    let geometry = small_geometry(Numerics::Official, IndexKeyType::Fp4);
    let plan = handoff_plan(&geometry, 700, 0);
    let hash = plan_hash(&plan);
    assert_eq!(hash, plan_hash(&handoff_plan(&geometry, 700, 0)));
    assert_ne!(hash, plan_hash(&plan[..plan.len() - 1]));
    let mut swapped = plan.clone();
    swapped.swap(3, 4);
    assert_ne!(hash, plan_hash(&swapped));
    let changes: [fn(&mut PlanEntry); 6] = [
        |entry| entry.kind = CacheKind::Draft,
        |entry| entry.layer += 1,
        |entry| entry.pool = PoolKind::Carry,
        |entry| entry.page_no += 1,
        |entry| entry.rows -= 1,
        |entry| entry.bytes += 1,
    ];
    for change in changes {
        let mut changed = plan.clone();
        change(&mut changed[5]);
        assert_ne!(hash, plan_hash(&changed));
    }
    let shorter = handoff_plan(&geometry, 699, 0);
    assert_ne!(hash, plan_hash(&shorter));
}

#[test]
fn unknown_kinds_in_a_key_are_errors() {
    let geometry = small_geometry(Numerics::Official, IndexKeyType::Fp4);
    let key = handoff_plan(&geometry, 5, 0)[0].key();
    for (position, value) in [(0, 8), (0, 255), (1, 3)] {
        let mut bad = key;
        bad[position] = value;
        assert!(PlanEntry::from_key(bad).is_err());
    }
}

/// When it gets a place, the fingerprint changes: nobody can leave it out unnoticed.
#[test]
fn drafting_state_has_a_number_and_no_place_yet() {
    for numerics in Numerics::ALL {
        for index in IndexKeyType::ALL {
            let geometry = small_geometry(numerics, index);
            assert!(geometry.describe().contains("cache 7 draft: none\n"));
            let plan = handoff_plan(&geometry, 1000, 0);
            assert!(plan.iter().all(|entry| entry.kind != CacheKind::Draft));
            // A peer that plans for it speaks of a page that is in no plan of ours.
            let draft = PlanEntry { kind: CacheKind::Draft, ..plan[plan.len() - 1] };
            assert_eq!(PlanEntry::from_key(draft.key()), Ok(draft));
            assert!(plan.iter().all(|entry| entry.key() != draft.key()));
        }
    }
    assert_eq!((CacheKind::Draft as u8, CacheKind::Draft.pool()), (7, None));
}

/// A pool's memory with distinct bytes in it.
fn filled(bytes: u64, seed: u32) -> Vec<u8> {
    let mut state = seed | 1;
    let step = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..bytes).map(step).collect()
}

/// Where the bytes of an entry lie in its pool's memory, for a page map of the sequence.
fn ranges(
    geometry: &Geometry,
    entry: &PlanEntry,
    pages: u32,
    index: u32,
) -> Vec<std::ops::Range<usize>> {
    let section = geometry.section(entry.kind, entry.layer).unwrap();
    let page = geometry.page_offset(entry.pool, section, pages, index) as usize;
    let extents = geometry.extents(entry.kind, entry.rows);
    extents.iter().map(|e| page + e.range().start..page + e.range().end).collect()
}

/// Failures are printed with their input; no file is written.
fn config() -> ProptestConfig {
    ProptestConfig { cases: 60, failure_persistence: None, ..Default::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn plans_are_complete(n in 0_u32..3000, have in 0_u32..12, which in 0_usize..4) {
        check_plan(&geometries()[which], n, have.min(n / 256));
    }

    /// Gathering an entry from one worker's pages and scattering it into another's, at other page
    /// indices of pools of another size, moves exactly the planned bytes, each once.
    #[test]
    fn gather_then_scatter_is_the_identity(n in 1_u32..700, which in 0_usize..4, seed: u32) {
        let geometry = &geometries()[which];
        let (source_pages, target_pages) = (5, 4);
        let memory = |pages, seed| {
            PoolKind::ALL.map(|pool| filled(geometry.pool_bytes(pool, pages), seed))
        };
        let source = memory(source_pages, seed);
        let before = memory(target_pages, !seed);
        let mut target = before.clone();
        let mut written = target.each_ref().map(|bytes| vec![false; bytes.len()]);
        let source_index = |no: u32| (no * 2 + 1) % source_pages;
        let target_index = |no: u32| (no + 3) % target_pages;
        let plan = handoff_plan(geometry, n, 0);
        for entry in &plan {
            let pool = entry.pool as usize;
            let from = ranges(geometry, entry, source_pages, source_index(entry.page_no));
            let to = ranges(geometry, entry, target_pages, target_index(entry.page_no));
            let gathered: Vec<u8> =
                from.into_iter().flat_map(|range| source[pool][range].to_vec()).collect();
            prop_assert_eq!(gathered.len(), entry.bytes as usize);
            let mut rest = gathered.as_slice();
            for range in to {
                let (part, left) = rest.split_at(range.len());
                prop_assert!(!written[pool][range.clone()].contains(&true), "written twice");
                written[pool][range.clone()].fill(true);
                target[pool][range].copy_from_slice(part);
                rest = left;
            }
            prop_assert!(rest.is_empty());
        }
        for pool in 0..3 {
            let untouched = (0..target[pool].len()).filter(|&at| !written[pool][at]);
            prop_assert!(untouched.into_iter().all(|at| target[pool][at] == before[pool][at]));
        }
        for entry in &plan {
            let pool = entry.pool as usize;
            let from = ranges(geometry, entry, source_pages, source_index(entry.page_no));
            let to = ranges(geometry, entry, target_pages, target_index(entry.page_no));
            for (from, to) in from.into_iter().zip(to) {
                prop_assert_eq!(&source[pool][from], &target[pool][to]);
            }
        }
    }
}
