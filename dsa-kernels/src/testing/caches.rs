//! Page pools filled with random rows, with pages in scattered order.

use super::Rng;
use crate::cpu::CpuReference;
use crate::device::{CpuDevice, Device, Mem, Place};
use crate::ops::{Kernels, PagedCache, RowFormat, RowTarget, StoreRows};
use crate::tensor::TensorRef;

/// A pool of pages of one format, and the pages of one sequence inside it.
#[derive(Debug)]
pub struct Pages {
    mem: Mem,
    rows_per_page: u32,
    format: RowFormat,
    /// Page indices of the sequence in order.
    pub list: Vec<u32>,
}

impl Pages {
    const BASE: u64 = 192;

    /// Pages for `rows` rows, in scattered order inside of a pool with one page to spare.
    ///
    /// # Panics
    /// If the machine has no memory left.
    #[must_use]
    pub fn new(rng: &mut Rng, format: RowFormat, rows_per_page: u32, rows: usize) -> Self {
        let count = rows.div_ceil(rows_per_page as usize);
        let bytes = Self::BASE + (count as u64 + 1) * Self::stride_of(format, rows_per_page);
        let mem = CpuDevice::new().alloc(Place::Host, bytes).expect("a test pool is small");
        let mut list: Vec<u32> = (0..=count as u32).collect();
        for i in (1..list.len()).rev() {
            list.swap(i, rng.below(i + 1));
        }
        list.truncate(count);
        Self { mem, rows_per_page, format, list }
    }

    fn stride_of(format: RowFormat, rows_per_page: u32) -> u64 {
        let row = (format.data_bytes() + format.scale_bytes()) as u64;
        (u64::from(rows_per_page) * row).next_multiple_of(576)
    }

    /// The cache over all pages.
    #[must_use]
    pub fn cache(&self) -> PagedCache<'_> {
        PagedCache {
            mem: &self.mem,
            base: Self::BASE,
            stride: Self::stride_of(self.format, self.rows_per_page),
            rows_per_page: self.rows_per_page,
            format: self.format,
        }
    }

    /// Where row `i` of the sequence is.
    #[must_use]
    pub fn target(&self, i: usize) -> RowTarget {
        let per_page = self.rows_per_page as usize;
        RowTarget { page: self.list[i / per_page], row: (i % per_page) as u32 }
    }

    /// Stores rows `first..` with an implementation.
    ///
    /// # Panics
    /// If the implementation refuses it.
    pub fn store(&self, kernels: &dyn Kernels, first: usize, values: &[f32]) {
        let width = self.format.width();
        let count = values.len() / width;
        let targets: Vec<RowTarget> = (first..first + count).map(|i| self.target(i)).collect();
        let rows = TensorRef::from_f32(values, count, width).expect("whole rows");
        let store = StoreRows { rows, cache: self.cache(), targets: &targets };
        kernels.store_rows(store).expect("rows of the sequence are inside of the pool");
    }

    /// All bytes of the pool.
    ///
    /// # Panics
    /// Never: the range is the whole allocation.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut all = vec![0; self.mem.len() as usize];
        self.mem.read(0, &mut all).expect("the whole allocation");
        all
    }
}

/// Pages holding `rows` random rows.
#[must_use]
pub fn random_rows(rng: &mut Rng, format: RowFormat, rows_per_page: u32, rows: usize) -> Pages {
    let pages = Pages::new(rng, format, rows_per_page, rows);
    pages.store(&CpuReference, 0, &rng.bf16s(rows * format.width()));
    pages
}
