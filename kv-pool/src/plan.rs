//! The hand-off plan: which bytes of which pages move, computed by both ends with one function.

use crate::geometry::{BLOCK_TOKENS, Geometry, WINDOW_PAGE_ROWS, WINDOW_TOKENS, tokens_per_row};
use crate::id::{CacheKind, PoolKind, UnknownKind};
use alloc::vec::Vec;

/// Domain of the plan hash; not a secret.
const PLAN_KEY: &[u8; 32] = b"kv-pool 2026-01 plan hash v1 ...";

/// One page of one cache of one layer that has to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PlanEntry {
    /// Cache.
    pub kind: CacheKind,
    /// Layer number.
    pub layer: u16,
    /// The pool of `kind`.
    pub pool: PoolKind,
    /// Block number, window page number (position / 64), or 0 for a carry.
    pub page_no: u32,
    /// Written rows; the extents of that many rows move.
    pub rows: u32,
    /// Bytes of those extents.
    pub bytes: u32,
}

impl PlanEntry {
    /// The entry as sixteen bytes: kind, pool, layer, page number, rows, bytes (little-endian).
    #[must_use]
    pub fn key(&self) -> [u8; 16] {
        let &Self { kind, layer, pool, page_no, rows, bytes } = self;
        let mut key = [0; 16];
        key[0] = kind as u8;
        key[1] = pool as u8;
        key[2..4].copy_from_slice(&layer.to_le_bytes());
        key[4..8].copy_from_slice(&page_no.to_le_bytes());
        key[8..12].copy_from_slice(&rows.to_le_bytes());
        key[12..].copy_from_slice(&bytes.to_le_bytes());
        key
    }

    /// Reads [`PlanEntry::key`] back. Only the kinds are checked: whether the entry is part of a
    /// plan, the plan says.
    ///
    /// # Errors
    ///
    /// [`UnknownKind`] for a kind this build does not know.
    pub fn from_key(key: [u8; 16]) -> Result<Self, UnknownKind> {
        let [kind, pool, l0, l1, p0, p1, p2, p3, r0, r1, r2, r3, b0, b1, b2, b3] = key;
        Ok(Self {
            kind: CacheKind::try_from(kind)?,
            pool: PoolKind::try_from(pool)?,
            layer: u16::from_le_bytes([l0, l1]),
            page_no: u32::from_le_bytes([p0, p1, p2, p3]),
            rows: u32::from_le_bytes([r0, r1, r2, r3]),
            bytes: u32::from_le_bytes([b0, b1, b2, b3]),
        })
    }
}

/// First position whose window row is still needed after `n_tokens` tokens: the next query sees
/// itself and the 127 positions before it.
#[must_use]
pub const fn window_start(n_tokens: u32) -> u32 {
    n_tokens.saturating_sub(WINDOW_TOKENS - 1)
}

/// Rows of page `page_no` of a cache that are written after `n_tokens` tokens; 1 for carries.
#[must_use]
pub fn written_rows(geometry: &Geometry, kind: CacheKind, page_no: u32, n_tokens: u32) -> u32 {
    let rows = geometry.rows_per_page(kind);
    match tokens_per_row(kind) {
        0 => rows,
        ratio => {
            let before = u64::from(page_no) * u64::from(rows);
            u64::from(n_tokens / ratio).saturating_sub(before).min(u64::from(rows)) as u32
        }
    }
}

/// What must move when a sequence of `n_tokens` tokens changes hands and the target has its first
/// `have_blocks` blocks already.
///
/// In this order: for each missing block, for each layer, the block's pages with their written
/// rows (none with 0 rows); for each window page that holds one of the last 127 positions, each
/// layer's rows; each layer's carry. The sequence's length bounds the result, so the caller limits
/// `n_tokens` before it asks.
///
/// ```
/// use kv_pool::{Geometry, IndexKeyType, LayerKind, ModelShape, Numerics, handoff_plan};
/// let shape = ModelShape {
///     layers: vec![LayerKind::C4],
///     head_dim: 512,
///     rope_dim: 64,
///     index_head_dim: 128,
///     window_tokens: 128,
/// };
/// let geometry = Geometry::new(shape, Numerics::Official, IndexKeyType::Fp8)?;
/// let plan = handoff_plan(&geometry, 260, 1);
/// // C4 KV and index key (1 row each), window pages 2, 3 and 4, two carries.
/// assert_eq!(plan.len(), 2 + 3 + 2);
/// assert_eq!((plan[0].page_no, plan[0].rows, plan[0].bytes), (1, 1, 584));
/// # Ok::<(), kv_pool::GeometryError>(())
/// ```
#[must_use]
pub fn handoff_plan(geometry: &Geometry, n_tokens: u32, have_blocks: u32) -> Vec<PlanEntry> {
    let mut plan = Vec::new();
    for block in have_blocks..n_tokens.div_ceil(BLOCK_TOKENS) {
        push_page(&mut plan, geometry, PoolKind::Block, block, n_tokens);
    }
    let first = window_start(n_tokens) / WINDOW_PAGE_ROWS;
    for page_no in first..n_tokens.div_ceil(WINDOW_PAGE_ROWS) {
        push_page(&mut plan, geometry, PoolKind::Window, page_no, n_tokens);
    }
    push_page(&mut plan, geometry, PoolKind::Carry, 0, n_tokens);
    plan
}

fn push_page(
    plan: &mut Vec<PlanEntry>,
    geometry: &Geometry,
    pool: PoolKind,
    page_no: u32,
    n_tokens: u32,
) {
    for section in geometry.sections(pool) {
        let &crate::geometry::Section { kind, layer, page_bytes: _ } = section;
        let rows = written_rows(geometry, kind, page_no, n_tokens);
        if rows > 0 {
            let bytes = geometry.extents(kind, rows).bytes();
            plan.push(PlanEntry { kind, layer, pool, page_no, rows, bytes });
        }
    }
}

/// Hash of a plan, order included: first 16 bytes of keyed BLAKE3 over the keys.
#[must_use]
pub fn plan_hash(plan: &[PlanEntry]) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new_keyed(PLAN_KEY);
    hasher.update(&(plan.len() as u64).to_le_bytes());
    for entry in plan {
        hasher.update(&entry.key());
    }
    let mut value = [0; 16];
    value.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    value
}
