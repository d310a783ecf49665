//! Byte layout of every cache: the only place that multiplies tokens, rows, layers and bytes.
//!
//! A page of `n` rows is block-split: `n` data rows, then `n` scale rows, then zero padding.
//! `official` KV rows are FlashMLA's "V4" format (448 E4M3 bytes, 64 BF16, 8 scale bytes; the page
//! is padded to a multiple of 576 bytes); index-key pages are SGLang's. Carries are FP32.

mod describe;
mod row;

pub use row::{Extent, Extents, RowFormat, RowLayout};

use crate::id::{CacheKind, PoolKind};
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;

/// Tokens of one block, the unit of sharing and hashing.
pub const BLOCK_TOKENS: u32 = 256;
/// Positions of one window page.
pub const WINDOW_PAGE_ROWS: u32 = 64;
/// Width of the sliding window, the query's own position included.
pub const WINDOW_TOKENS: u32 = 128;
/// Version of the layout description; part of every fingerprint.
pub const SCHEMA_VERSION: u32 = 1;

/// Each section of a pool starts at a multiple of this many bytes.
const SECTION_ALIGN: u64 = 4096;
/// More layers than any model has, and few enough for every sum here to fit 64 bits.
const MAX_LAYERS: usize = 1024;
/// Bound of the head sizes in `reference` numerics.
const MAX_DIM: u32 = 4096;

/// A name that is none of the known ones.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} {name:?}, expected one of {expected}")]
pub struct UnknownName {
    /// What was being parsed.
    pub what: &'static str,
    /// The text, cut to 64 characters.
    pub name: String,
    /// The accepted names.
    pub expected: &'static str,
}

impl UnknownName {
    fn new(what: &'static str, name: &str, expected: &'static str) -> Self {
        Self { what, name: name.chars().take(64).collect(), expected }
    }
}

/// Storage type of index keys in `official` numerics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IndexKeyType {
    /// Packed E2M1 with one E8M0 scale per 32 values.
    Fp4,
    /// E4M3 with one FP32 scale a row.
    Fp8,
    /// BF16 without scales.
    Bf16,
}

impl IndexKeyType {
    /// All types.
    pub const ALL: [Self; 3] = [Self::Fp4, Self::Fp8, Self::Bf16];

    /// The name used on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fp4 => "fp4",
            Self::Fp8 => "fp8",
            Self::Bf16 => "bf16",
        }
    }
}

impl fmt::Display for IndexKeyType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for IndexKeyType {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let found = Self::ALL.into_iter().find(|value| value.name() == name);
        found.ok_or_else(|| UnknownName::new("index key type", name, "fp4, fp8, bf16"))
    }
}

/// Which numbers the engine computes, and with them the row formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Numerics {
    /// The rounding of DeepSeek's code: FP8 KV rows, index keys as [`IndexKeyType`] says.
    Official,
    /// FP32 everywhere.
    Reference,
}

impl Numerics {
    /// All values.
    pub const ALL: [Self; 2] = [Self::Official, Self::Reference];

    /// The name used on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Official => "official",
            Self::Reference => "reference",
        }
    }
}

impl fmt::Display for Numerics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Numerics {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let found = Self::ALL.into_iter().find(|value| value.name() == name);
        found.ok_or_else(|| UnknownName::new("numerics", name, "official, reference"))
    }
}

/// What a layer attends to besides its own window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LayerKind {
    /// Nothing.
    Window,
    /// Rows of 4 tokens chosen by an indexer.
    C4,
    /// All rows of 128 tokens.
    C128,
}

impl LayerKind {
    /// Short lower-case name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Window => "window",
            Self::C4 => "c4",
            Self::C128 => "c128",
        }
    }

    /// The kinds a layer keeps in `pool`, in section order.
    const fn kinds(self, pool: PoolKind) -> &'static [CacheKind] {
        match (pool, self) {
            (PoolKind::Window, _) => &[CacheKind::Window],
            (_, Self::Window) => &[],
            (PoolKind::Block, Self::C4) => &[CacheKind::C4Kv, CacheKind::C4Index],
            (PoolKind::Block, Self::C128) => &[CacheKind::C128Kv],
            (PoolKind::Carry, Self::C4) => &[CacheKind::C4Carry, CacheKind::IndexCarry],
            (PoolKind::Carry, Self::C128) => &[CacheKind::C128Carry],
        }
    }
}

/// The sizes of a model that decide its cache layout.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModelShape {
    /// Kind of each layer, in order.
    pub layers: Vec<LayerKind>,
    /// Values of a KV row (512).
    pub head_dim: u32,
    /// Rotated values at the end of a KV row (64).
    pub rope_dim: u32,
    /// Values of an index key (128).
    pub index_head_dim: u32,
    /// Width of the sliding window (128).
    pub window_tokens: u32,
}

/// A model shape without a defined layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// No layers, or too many.
    #[error("{layers} layers, expected 1 to {limit}")]
    Layers {
        /// Layers given.
        layers: usize,
        /// Largest supported number.
        limit: usize,
    },
    /// The window width is not the one that window pages are made for.
    #[error("window of {window_tokens} tokens, only {WINDOW_TOKENS} has a page format")]
    Window {
        /// Width given.
        window_tokens: u32,
    },
    /// Head sizes without a row format.
    #[error(
        "no {numerics} row format for head sizes {head_dim} (rotary {rope_dim}) and {index_head_dim}"
    )]
    HeadSizes {
        /// Numerics asked for.
        numerics: Numerics,
        /// Values of a KV row.
        head_dim: u32,
        /// Rotated values.
        rope_dim: u32,
        /// Values of an index key.
        index_head_dim: u32,
    },
}

/// The pages of one cache of one layer, as a contiguous part of a pool's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Section {
    /// What the pages hold.
    pub kind: CacheKind,
    /// Layer number.
    pub layer: u16,
    /// Bytes from page to page.
    pub page_bytes: u32,
}

/// Layout of every cache of one model under one choice of numerics and index-key type.
///
/// ```
/// use kv_pool::{CacheKind, Geometry, IndexKeyType, LayerKind, ModelShape, Numerics, PoolKind};
/// let shape = ModelShape {
///     layers: vec![LayerKind::Window, LayerKind::C4, LayerKind::C128],
///     head_dim: 512,
///     rope_dim: 64,
///     index_head_dim: 128,
///     window_tokens: 128,
/// };
/// let geometry = Geometry::new(shape, Numerics::Official, IndexKeyType::Fp8)?;
/// assert_eq!(geometry.page_bytes(CacheKind::C4Index), 8448);
/// assert_eq!(geometry.bytes_per_index(PoolKind::Block), 37_440 + 8448 + 1728);
/// # Ok::<(), kv_pool::GeometryError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    shape: ModelShape,
    numerics: Numerics,
    index: IndexKeyType,
    /// By `CacheKind` number.
    layouts: [RowLayout; CacheKind::ALL.len()],
    /// By `PoolKind` number.
    sections: [Vec<Section>; PoolKind::ALL.len()],
    /// Per pool and layer, the number of the layer's first section.
    first_section: [Vec<usize>; PoolKind::ALL.len()],
}

impl Geometry {
    /// Computes the layout.
    ///
    /// # Errors
    ///
    /// [`GeometryError`] if the shape has no defined layout. `official` numerics define 512/64/128
    /// head sizes only; `reference` takes multiples of 8 up to 4096.
    pub fn new(
        shape: ModelShape,
        numerics: Numerics,
        index: IndexKeyType,
    ) -> Result<Self, GeometryError> {
        check_shape(&shape, numerics)?;
        let layouts = CacheKind::ALL.map(|kind| RowLayout::of(kind, &shape, numerics, index));
        let mut sections: [Vec<Section>; 3] = Default::default();
        let mut first_section: [Vec<usize>; 3] = Default::default();
        for pool in PoolKind::ALL {
            let sections = &mut sections[pool as usize];
            for (layer, kind) in (0_u16..).zip(&shape.layers) {
                first_section[pool as usize].push(sections.len());
                sections.extend(kind.kinds(pool).iter().map(|&kind| Section {
                    kind,
                    layer,
                    page_bytes: layouts[kind as usize].page_bytes,
                }));
            }
        }
        Ok(Self { shape, numerics, index, layouts, sections, first_section })
    }

    /// The model's sizes.
    #[must_use]
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// The numerics chosen at start.
    #[must_use]
    pub fn numerics(&self) -> Numerics {
        self.numerics
    }

    /// The index-key type chosen at start.
    #[must_use]
    pub fn index_key_type(&self) -> IndexKeyType {
        self.index
    }

    /// Rows of one page: 64 for window, C4 KV and C4 index, 2 for C128 KV, 1 for carries, 0 for
    /// [`CacheKind::Draft`].
    #[must_use]
    pub fn rows_per_page(&self, kind: CacheKind) -> u32 {
        self.layouts[kind as usize].rows
    }

    /// Tokens that one row stands for: 1, 4 or 128; 0 for carries and drafts.
    #[must_use]
    pub fn tokens_per_row(&self, kind: CacheKind) -> u32 {
        tokens_per_row(kind)
    }

    /// Bytes from one page to the next.
    #[must_use]
    pub fn page_bytes(&self, kind: CacheKind) -> u32 {
        self.layouts[kind as usize].page_bytes
    }

    /// Element format of the rows; none for [`CacheKind::Draft`].
    #[must_use]
    pub fn row_format(&self, kind: CacheKind) -> Option<RowFormat> {
        RowFormat::of(kind, self.numerics, self.index)
    }

    /// Where rows and scales lie inside a page.
    #[must_use]
    pub fn row_layout(&self, kind: CacheKind) -> RowLayout {
        self.layouts[kind as usize]
    }

    /// The byte ranges of a page that hold its first `rows` rows and their scales, ascending.
    ///
    /// Ranges that touch are merged, so a full page is one range. Padding is in none.
    ///
    /// # Panics
    ///
    /// If `rows` is larger than [`Geometry::rows_per_page`].
    #[must_use]
    pub fn extents(&self, kind: CacheKind, rows: u32) -> Extents {
        self.layouts[kind as usize].extents(rows)
    }

    /// The sections of a pool: layer by layer, and inside a C4 layer KV before index.
    #[must_use]
    pub fn sections(&self, pool: PoolKind) -> &[Section] {
        &self.sections[pool as usize]
    }

    /// Position of a cache of a layer in [`Geometry::sections`] of its pool; none if the layer has
    /// no such cache.
    #[must_use]
    pub fn section(&self, kind: CacheKind, layer: u16) -> Option<usize> {
        let pool = kind.pool()? as usize;
        let first = *self.first_section[pool].get(usize::from(layer))?;
        let same_layer = |section: &&Section| section.layer == layer;
        let mut candidates = self.sections[pool][first..].iter().take_while(same_layer);
        candidates.position(|section| section.kind == kind).map(|offset| first + offset)
    }

    /// Bytes of a pool's memory for `pages` page indices.
    #[must_use]
    pub fn pool_bytes(&self, pool: PoolKind, pages: u32) -> u64 {
        self.section_base(pool, self.sections(pool).len(), pages)
    }

    /// Offset of a section's page 0 in a pool of `pages` page indices: sections lie one behind the
    /// other, each starting at a multiple of 4096 bytes. The number of sections is accepted too and
    /// gives the end.
    ///
    /// # Panics
    ///
    /// If `section` is larger than the number of sections.
    #[must_use]
    pub fn section_base(&self, pool: PoolKind, section: usize, pages: u32) -> u64 {
        let before = &self.sections(pool)[..section];
        let bytes = |section: &Section| {
            (u64::from(pages) * u64::from(section.page_bytes)).next_multiple_of(SECTION_ALIGN)
        };
        before.iter().map(bytes).sum()
    }

    /// Offset of page `index` of a section in a pool of `pages` page indices.
    ///
    /// # Panics
    ///
    /// If there is no such section, or `index` is not below `pages`.
    #[must_use]
    pub fn page_offset(&self, pool: PoolKind, section: usize, pages: u32, index: u32) -> u64 {
        assert!(index < pages, "page {index} of a {pool} pool with {pages} pages");
        let stride = self.sections(pool)[section].page_bytes;
        self.section_base(pool, section, pages) + u64::from(index) * u64::from(stride)
    }

    /// Bytes of all sections of one page index.
    #[must_use]
    pub fn bytes_per_index(&self, pool: PoolKind) -> u64 {
        self.sections(pool).iter().map(|section| u64::from(section.page_bytes)).sum()
    }

    /// Canonical, exhaustive text: two geometries are equal exactly when their descriptions are.
    ///
    /// One line per cache. The text is hashed into the [`crate::Fingerprint`]; changing a word of
    /// it changes every fingerprint.
    #[must_use]
    pub fn describe(&self) -> String {
        describe::describe(self)
    }
}

/// Tokens per row of a cache; 0 for carries and drafts.
pub(crate) const fn tokens_per_row(kind: CacheKind) -> u32 {
    match kind {
        CacheKind::Window => 1,
        CacheKind::C4Kv | CacheKind::C4Index => 4,
        CacheKind::C128Kv => 128,
        CacheKind::C4Carry | CacheKind::IndexCarry | CacheKind::C128Carry | CacheKind::Draft => 0,
    }
}

fn check_shape(shape: &ModelShape, numerics: Numerics) -> Result<(), GeometryError> {
    let &ModelShape { ref layers, head_dim, rope_dim, index_head_dim, window_tokens } = shape;
    if layers.is_empty() || layers.len() > MAX_LAYERS {
        return Err(GeometryError::Layers { layers: layers.len(), limit: MAX_LAYERS });
    }
    if window_tokens != WINDOW_TOKENS {
        return Err(GeometryError::Window { window_tokens });
    }
    let fits = |dim: u32| dim > 0 && dim <= MAX_DIM && dim.is_multiple_of(8);
    let sizes_fit = match numerics {
        Numerics::Official => (head_dim, rope_dim, index_head_dim) == (512, 64, 128),
        Numerics::Reference => {
            fits(head_dim) && fits(rope_dim) && fits(index_head_dim) && rope_dim <= head_dim
        }
    };
    if !sizes_fit {
        return Err(GeometryError::HeadSizes { numerics, head_dim, rope_dim, index_head_dim });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
