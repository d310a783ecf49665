//! One page from inside: row formats, row offsets, and the ranges that the written rows occupy.

use super::{BLOCK_TOKENS, IndexKeyType, ModelShape, Numerics, WINDOW_PAGE_ROWS, tokens_per_row};
use crate::id::CacheKind;

/// Unit that "V4" KV pages are padded to: the data bytes of one row.
const V4_DATA_BYTES: u32 = 576;
/// Scale bytes of a "V4" row: 7 E8M0 and one unused.
const V4_SCALE_BYTES: u32 = 8;

/// Element format of the rows of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowFormat {
    /// 448 E4M3, 64 BF16; scales: 7 E8M0 (one per 64 values) and a zero byte.
    KvV4,
    /// FP32 values.
    KvF32,
    /// E4M3; one FP32 scale, amax/448.
    IndexFp8,
    /// Packed E2M1, even value in the low nibble; one E8M0 scale per 32 values.
    IndexFp4,
    /// BF16.
    IndexBf16,
    /// FP32 values.
    IndexF32,
    /// FP32: four rows (KV A, score A) of the last closed window, then three open rows
    /// (KV A, KV B, score A, score B).
    C4CarryF32,
    /// FP32: maxima, sums, weighted sums.
    C128CarryF32,
}

impl RowFormat {
    pub(super) const fn of(
        kind: CacheKind,
        numerics: Numerics,
        index: IndexKeyType,
    ) -> Option<Self> {
        Some(match (kind, numerics) {
            (CacheKind::Window | CacheKind::C4Kv | CacheKind::C128Kv, Numerics::Official) => {
                Self::KvV4
            }
            (CacheKind::Window | CacheKind::C4Kv | CacheKind::C128Kv, Numerics::Reference) => {
                Self::KvF32
            }
            (CacheKind::C4Index, Numerics::Reference) => Self::IndexF32,
            (CacheKind::C4Index, Numerics::Official) => match index {
                IndexKeyType::Fp4 => Self::IndexFp4,
                IndexKeyType::Fp8 => Self::IndexFp8,
                IndexKeyType::Bf16 => Self::IndexBf16,
            },
            (CacheKind::C4Carry | CacheKind::IndexCarry, _) => Self::C4CarryF32,
            (CacheKind::C128Carry, _) => Self::C128CarryF32,
            (CacheKind::Draft, _) => return None,
        })
    }

    /// Data and scale bytes of a row of `dim` values.
    const fn row_bytes(self, dim: u32) -> (u32, u32) {
        match self {
            Self::KvV4 => (V4_DATA_BYTES, V4_SCALE_BYTES),
            Self::KvF32 | Self::IndexF32 => (dim * 4, 0),
            Self::IndexFp8 => (dim, 4),
            Self::IndexFp4 => (dim / 2, dim / 32),
            Self::IndexBf16 => (dim * 2, 0),
            Self::C4CarryF32 => ((4 * 2 * dim + 3 * 4 * dim) * 4, 0),
            Self::C128CarryF32 => (3 * dim * 4, 0),
        }
    }
}

/// Where the rows of one kind of page lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowLayout {
    /// Rows of a page.
    pub rows: u32,
    /// Data bytes of a row.
    pub data_bytes: u32,
    /// Scale bytes of a row, 0 if it has none.
    pub scale_bytes: u32,
    /// Bytes from page to page, padding included.
    pub page_bytes: u32,
}

impl RowLayout {
    pub(super) const fn of(
        kind: CacheKind,
        shape: &ModelShape,
        numerics: Numerics,
        index: IndexKeyType,
    ) -> Self {
        let Some(format) = RowFormat::of(kind, numerics, index) else {
            return Self { rows: 0, data_bytes: 0, scale_bytes: 0, page_bytes: 0 };
        };
        let rows = match kind {
            CacheKind::Window => WINDOW_PAGE_ROWS,
            CacheKind::C4Kv | CacheKind::C4Index | CacheKind::C128Kv => {
                BLOCK_TOKENS / tokens_per_row(kind)
            }
            CacheKind::C4Carry
            | CacheKind::IndexCarry
            | CacheKind::C128Carry
            | CacheKind::Draft => 1,
        };
        let dim = match kind {
            CacheKind::C4Index | CacheKind::IndexCarry => shape.index_head_dim,
            _ => shape.head_dim,
        };
        let (data_bytes, scale_bytes) = format.row_bytes(dim);
        let raw_bytes = rows * (data_bytes + scale_bytes);
        let page_bytes = match format {
            RowFormat::KvV4 => raw_bytes.next_multiple_of(V4_DATA_BYTES),
            _ => raw_bytes,
        };
        Self { rows, data_bytes, scale_bytes, page_bytes }
    }

    /// Offset of a row's data in its page.
    ///
    /// # Panics
    ///
    /// If the page has no such row.
    #[must_use]
    pub const fn data_offset(&self, row: u32) -> u32 {
        assert!(row < self.rows, "row number beyond the page");
        row * self.data_bytes
    }

    /// Offset of a row's scales in its page; meaningless when `scale_bytes` is 0.
    ///
    /// # Panics
    ///
    /// If the page has no such row.
    #[must_use]
    pub const fn scale_offset(&self, row: u32) -> u32 {
        assert!(row < self.rows, "row number beyond the page");
        self.rows * self.data_bytes + row * self.scale_bytes
    }

    /// See [`super::Geometry::extents`].
    ///
    /// # Panics
    ///
    /// If `rows` is larger than the page's rows.
    #[must_use]
    pub fn extents(&self, rows: u32) -> Extents {
        assert!(rows <= self.rows, "{rows} rows of a page of {}", self.rows);
        let data = Extent { offset: 0, len: rows * self.data_bytes };
        let scales = Extent { offset: self.rows * self.data_bytes, len: rows * self.scale_bytes };
        if data.len == 0 {
            Extents { ranges: [data, data], count: 0 }
        } else if scales.len == 0 {
            Extents { ranges: [data, data], count: 1 }
        } else if data.len == scales.offset {
            let whole = Extent { offset: 0, len: data.len + scales.len };
            Extents { ranges: [whole, whole], count: 1 }
        } else {
            Extents { ranges: [data, scales], count: 2 }
        }
    }
}

/// A byte range inside a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// Bytes from the start of the page.
    pub offset: u32,
    /// Bytes, never 0.
    pub len: u32,
}

impl Extent {
    /// The range as slice bounds.
    #[must_use]
    pub const fn range(&self) -> core::ops::Range<usize> {
        self.offset as usize..self.offset as usize + self.len as usize
    }
}

/// At most two ascending, disjoint ranges inside a page. Dereferences to a slice.
#[derive(Clone, Copy, Debug)]
pub struct Extents {
    ranges: [Extent; 2],
    count: u8,
}

impl Extents {
    /// The ranges in ascending order.
    #[must_use]
    pub fn as_slice(&self) -> &[Extent] {
        &self.ranges[..usize::from(self.count)]
    }

    /// Bytes of all ranges.
    #[must_use]
    pub fn bytes(&self) -> u32 {
        self.as_slice().iter().map(|extent| extent.len).sum()
    }
}

impl core::ops::Deref for Extents {
    type Target = [Extent];

    fn deref(&self) -> &[Extent] {
        self.as_slice()
    }
}

impl PartialEq for Extents {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl Eq for Extents {}

impl IntoIterator for Extents {
    type Item = Extent;
    type IntoIter = core::iter::Take<core::array::IntoIter<Extent, 2>>;

    fn into_iter(self) -> Self::IntoIter {
        self.ranges.into_iter().take(usize::from(self.count))
    }
}

impl<'a> IntoIterator for &'a Extents {
    type Item = &'a Extent;
    type IntoIter = core::slice::Iter<'a, Extent>;

    fn into_iter(self) -> Self::IntoIter {
        self.as_slice().iter()
    }
}
