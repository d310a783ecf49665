//! Digests of pages that were made on their way here, and are not made again when the pages are sealed: of
//! a long prompt that would be a pass over hundreds of megabytes before its first step.

use crate::glue::handoff::Arrival;
use crate::glue::pools::{PoolError, Pools};
use kv_pool::{Geometry, PageDigest, PageRef, PoolKind};
use std::collections::BTreeMap;

/// Digests of all sections of full pages, by pool and number of the page.
#[derive(Debug, Default)]
pub(super) struct Known(BTreeMap<(PoolKind, u32), Vec<PageDigest>>);

impl Known {
    /// Those of what has landed and is right. Pages with rows to come are sealed later, with others.
    pub(super) fn of(geometry: &Geometry, arrived: &[Arrival]) -> Self {
        let mut pages: BTreeMap<(PoolKind, u32), Vec<Option<PageDigest>>> = BTreeMap::new();
        for (entry, digest, is_right) in arrived {
            let is_full = entry.rows == geometry.rows_per_page(entry.kind);
            let section = geometry.section(entry.kind, entry.layer);
            if let (true, true, Some(section)) = (*is_right, is_full, section) {
                let sections = geometry.sections(entry.pool).len();
                let page = pages.entry((entry.pool, entry.page_no));
                page.or_insert_with(|| vec![None; sections])[section] = Some(*digest);
            }
        }
        let whole = |(page, digests): (_, Vec<Option<PageDigest>>)| {
            Some((page, digests.into_iter().collect::<Option<Vec<_>>>()?))
        };
        Self(pages.into_iter().filter_map(whole).collect())
    }

    /// Seals a page with its digests, which are made now if they are not known.
    pub(super) fn seal(
        &self,
        pools: &mut Pools,
        page: PageRef,
        page_no: u32,
    ) -> Result<(), PoolError> {
        match self.0.get(&(page.pool, page_no)) {
            Some(digests) => pools.seal_as(page, digests.clone()),
            None => pools.seal(page),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_pool::{IndexKeyType, LayerKind, ModelShape, Numerics, PlanEntry};

    fn geometry() -> Geometry {
        let layers = vec![LayerKind::Window, LayerKind::C4, LayerKind::C128];
        let shape = ModelShape {
            layers,
            head_dim: 512,
            rope_dim: 64,
            index_head_dim: 128,
            window_tokens: 128,
        };
        Geometry::new(shape, Numerics::Official, IndexKeyType::Fp8).expect("a layout")
    }

    /// Each section of a block, with a digest that says which it is.
    fn block(geometry: &Geometry, page_no: u32) -> Vec<Arrival> {
        let section = |(number, section): (usize, &kv_pool::Section)| {
            let (kind, layer) = (section.kind, section.layer);
            let (pool, rows) = (PoolKind::Block, geometry.rows_per_page(kind));
            let entry = PlanEntry { kind, layer, pool, page_no, rows, bytes: 1 };
            (entry, PageDigest([number as u8 + 1; 16]), true)
        };
        geometry.sections(PoolKind::Block).iter().enumerate().map(section).collect()
    }

    #[test]
    fn only_whole_and_right_pages_are_known_in_the_order_of_their_sections() {
        let geometry = geometry();
        let mut arrived = block(&geometry, 0);
        arrived.reverse();
        // One section is missing, one was wrong, one has rows to come.
        arrived.extend(block(&geometry, 1).into_iter().skip(1));
        let mut wrong = block(&geometry, 2);
        wrong[0].2 = false;
        let mut open = block(&geometry, 3);
        open[1].0.rows -= 1;
        arrived.extend(wrong.into_iter().chain(open));
        let known = Known::of(&geometry, &arrived);
        let sections = geometry.sections(PoolKind::Block).len();
        let expected = (0..sections).map(|number| PageDigest([number as u8 + 1; 16])).collect();
        assert!(sections > 2);
        assert_eq!(known.0, BTreeMap::from([((PoolKind::Block, 0), expected)]));
    }
}
