//! A block's or a boundary's device pages as one object of the cache tiers, and back.
//!
//! Every page's bytes are digested in the pass that copies them, out of the device and into it; its
//! tag binds them to layout, tokens, layer and page number. So an object that is wrong, or of
//! another prefix, or of another layout, never gets as far as a page that a sequence could use.

#[cfg(not(feature = "faults"))]
use super::hash::copy_in;
use super::hash::{copy_out, digest_slice, page_hash};
use super::pools::{PageCounts, Pools};
#[cfg(feature = "faults")]
use crate::faults::tiers::restore;
use dsa_kernels::{DeviceError, Mem};
use hicache::store::format::{FormatError, Header, Section, object_bytes};
use hicache::{ObjectKey, Part};
use kv_pool::{
    BLOCK_TOKENS, CacheKind, Fingerprint, Geometry, PageDigest, PageRef, PageTag, PlanEntry,
    PoolKind, WINDOW_PAGE_ROWS, WINDOW_TOKENS,
};
use std::sync::Arc;

/// Window pages without which nothing can go on from a 256-token boundary; a carry page is the rest.
pub const BOUNDARY_WINDOWS: u32 = WINDOW_TOKENS.div_ceil(WINDOW_PAGE_ROWS);

/// Device pages of one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectPages {
    /// Of a block.
    Block(PageRef),
    /// Of a boundary.
    Boundary {
        /// Window pages in order; the last one ends at the boundary.
        window: [PageRef; BOUNDARY_WINDOWS as usize],
        /// Carry.
        carry: PageRef,
    },
}

impl ObjectPages {
    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = PageRef> {
        let (first, rest) = match *self {
            Self::Block(page) => (page, &[][..]),
            Self::Boundary { ref window, carry } => (carry, &window[..]),
        };
        std::iter::once(first).chain(rest.iter().copied())
    }

    /// What they make up.
    #[must_use]
    pub const fn part(&self) -> Part {
        match self {
            Self::Block(_) => Part::Block,
            Self::Boundary { .. } => Part::Boundary,
        }
    }
}

/// Pages with their digests, one for each section of the page's pool over all rows, in that order: as
/// [`Pools::sealed_digests`] has them.
pub type Sealed = Vec<(PageRef, Vec<PageDigest>)>;

/// An object that is not what was wanted.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// Its header is damaged, or says that it is something else.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// It has other pages than this layout.
    #[error("section {section} is {found}, {wanted} wanted")]
    OtherPages {
        /// Number of the first one that differs.
        section: usize,
        /// What it is.
        found: String,
        /// What it should be.
        wanted: String,
    },
    /// Bytes of a page are not those that were saved.
    #[error("{kind} page {page_no} of layer {layer} does not match its tag")]
    Tag {
        /// Cache.
        kind: CacheKind,
        /// Layer number.
        layer: u16,
        /// Page number.
        page_no: u32,
    },
    /// A page to be saved is no longer what it was when it was sealed.
    #[error("{kind} of layer {layer} in {page} is {found}, and was {sealed} when it was sealed")]
    Changed {
        /// Cache.
        kind: CacheKind,
        /// Layer number.
        layer: u16,
        /// The page.
        page: PageRef,
        /// Its digest.
        found: PageDigest,
        /// That of then.
        sealed: PageDigest,
    },
    /// Memory outside of the pool.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Where an object's pages lie in the memory of a worker's pools, for movers of other threads.
#[derive(Clone, Debug)]
pub struct ObjectMemory {
    geometry: Arc<Geometry>,
    fingerprint: Fingerprint,
    counts: PageCounts,
    block: Mem,
    window: Mem,
    carry: Mem,
}

/// A section and where its device page lies.
struct Piece<'a> {
    section: Section,
    /// Its page, and its place among the sections of that page's pool.
    page: PageRef,
    number: usize,
    mem: &'a Mem,
    offset: u64,
}

impl ObjectMemory {
    /// The memory of these pools.
    #[must_use]
    pub fn new(pools: &Pools, fingerprint: Fingerprint) -> Self {
        let mem = |kind| pools.mem(kind).clone();
        Self {
            geometry: Arc::clone(pools.geometry()),
            fingerprint,
            counts: PageCounts {
                block: pools.count(PoolKind::Block),
                window: pools.count(PoolKind::Window),
                carry: pools.count(PoolKind::Carry),
            },
            block: mem(PoolKind::Block),
            window: mem(PoolKind::Window),
            carry: mem(PoolKind::Carry),
        }
    }

    /// Meaning of all bytes.
    #[must_use]
    pub const fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    /// Sections of a page of a pool, with room for tags.
    fn sections(
        geometry: &Geometry,
        pool: PoolKind,
        page_no: u32,
    ) -> impl Iterator<Item = Section> {
        geometry.sections(pool).iter().map(move |section| {
            let rows = geometry.rows_per_page(section.kind);
            Section {
                kind: section.kind,
                layer: section.layer,
                rows,
                page_no,
                bytes: geometry.extents(section.kind, rows).bytes(),
                tag: PageTag([0; 16]),
            }
        })
    }

    /// The sections of an object at the end of a prefix of `blocks` blocks, in their order, with the
    /// pool of each.
    fn shape(
        geometry: &Geometry,
        part: Part,
        blocks: u32,
    ) -> impl Iterator<Item = (PoolKind, Section)> {
        let end = blocks * (BLOCK_TOKENS / WINDOW_PAGE_ROWS);
        let (pages, windows, carries) = match part {
            Part::Block => (blocks.saturating_sub(1)..blocks, 0..0, 0..0),
            Part::Boundary => (0..0, end.saturating_sub(BOUNDARY_WINDOWS)..end, 0..1),
        };
        let of = move |pool, numbers: std::ops::Range<u32>| {
            numbers.flat_map(move |page_no| {
                Self::sections(geometry, pool, page_no).map(move |section| (pool, section))
            })
        };
        of(PoolKind::Block, pages)
            .chain(of(PoolKind::Window, windows))
            .chain(of(PoolKind::Carry, carries))
    }

    /// Bytes of an object of a layout, with header and padding.
    #[must_use]
    pub fn object_bytes(geometry: &Geometry, part: Part) -> u64 {
        let (count, bytes) = Self::shape(geometry, part, 1)
            .fold((0, 0), |(count, bytes), (_, s)| (count + 1, bytes + u64::from(s.bytes)));
        object_bytes(count, bytes)
    }

    /// Bytes of an object, with header and padding.
    #[must_use]
    pub fn bytes_of(&self, part: Part) -> u64 {
        Self::object_bytes(&self.geometry, part)
    }

    /// Sections with the places of their pages.
    fn pieces(&self, pages: &ObjectPages, blocks: u32) -> Vec<Piece<'_>> {
        let mut seen = [0; 3];
        Self::shape(&self.geometry, pages.part(), blocks)
            .map(|(pool, section)| {
                let sections = self.geometry.sections(pool).len();
                let nth = &mut seen[pool as usize];
                let (page, number) = (*nth / sections, *nth % sections);
                *nth += 1;
                let (page, mem) = match *pages {
                    ObjectPages::Block(page) => (page, &self.block),
                    ObjectPages::Boundary { ref window, .. } if pool == PoolKind::Window => {
                        (window[page], &self.window)
                    }
                    ObjectPages::Boundary { carry, .. } => (carry, &self.carry),
                };
                let count = self.counts.of(pool);
                let offset = self.geometry.page_offset(pool, number, count, page.index);
                Piece { section, page, number, mem, offset }
            })
            .collect()
    }

    /// Makes an object of sealed pages that nobody writes meanwhile: those of the last of `blocks`
    /// blocks, or of the boundary behind them. `target` has the object's length. What has another
    /// digest than in `sealed` is no longer what was computed, and becomes no object; of pages that
    /// are not there nothing is known.
    ///
    /// # Errors
    /// [`ObjectError`] if pages and object do not fit each other, or a page has changed.
    pub fn save(
        &self,
        pages: &ObjectPages,
        key: ObjectKey,
        blocks: u32,
        sealed: &Sealed,
        target: &mut [u8],
    ) -> Result<(), ObjectError> {
        let pieces = self.pieces(pages, blocks);
        let mut header = Header {
            fingerprint: self.fingerprint,
            key,
            tokens: blocks * BLOCK_TOKENS,
            sections: pieces.iter().map(|piece| piece.section).collect(),
        };
        let places: Vec<_> = header.places().map(|(_, place)| place).collect();
        let (found, wanted) = (target.len() as u64, header.object_bytes());
        if found != wanted {
            return Err(FormatError::ObjectBytes { found, wanted }.into());
        }
        let mut hash = page_hash();
        for (number, (piece, place)) in pieces.iter().zip(places).enumerate() {
            let digest = copy_out(&mut *hash, piece.mem, piece.offset, &mut target[place])?;
            let known = sealed.iter().find(|(page, _)| *page == piece.page);
            let known = known.and_then(|(_, digests)| digests.get(piece.number));
            if let Some(sealed) = known.filter(|sealed| **sealed != digest) {
                let Section { kind, layer, .. } = piece.section;
                let (page, sealed) = (piece.page, *sealed);
                return Err(ObjectError::Changed { kind, layer, page, found: digest, sealed });
            }
            header.sections[number].tag = header.tag_of(&piece.section, &digest);
        }
        Ok(header.encode_into(target)?)
    }

    /// Copies an object into pages that belong to the caller alone, and checks every byte on the
    /// way; the digests of what the pages hold then. After an error they hold anything.
    ///
    /// # Errors
    /// [`ObjectError`] that says what is wrong, and where.
    pub fn load(
        &self,
        source: &[u8],
        key: ObjectKey,
        blocks: u32,
        pages: &ObjectPages,
    ) -> Result<Sealed, ObjectError> {
        #[cfg(feature = "faults")]
        let source = &*crate::faults::tiers::source(key, source);
        let header = self.check(source, key)?;
        let pieces = self.pieces(pages, blocks);
        same_pages(&header, &pieces)?;
        let mut hash = page_hash();
        // Sections are small: without a hint each would begin with a wait for memory.
        let mut starts = header.places().skip(1).map(|(_, place)| source[place].as_ptr());
        let mut sealed = Sealed::new();
        for ((section, place), piece) in header.places().zip(&pieces) {
            hash.expect_next(starts.next().unwrap_or(std::ptr::null()));
            let page = (piece.mem, piece.offset);
            let digest = restore(&mut *hash, section.kind, &source[place], page)?;
            check_tag(&header, section, &digest)?;
            match sealed.last_mut() {
                Some((page, digests)) if *page == piece.page => digests.push(digest),
                _ => sealed.push((piece.page, vec![digest])),
            }
        }
        Ok(sealed)
    }

    /// The header of an object that says that it is what is wanted, whole.
    fn check(&self, object: &[u8], key: ObjectKey) -> Result<Header, ObjectError> {
        let header = Header::decode(object)?;
        header.check_identity(&self.fingerprint, &key)?;
        let (found, wanted) = (object.len() as u64, header.object_bytes());
        if found != wanted {
            return Err(FormatError::ObjectBytes { found, wanted }.into());
        }
        Ok(header)
    }

    /// The digest of each page in an object.
    ///
    /// # Errors
    /// [`ObjectError`] for an object that is not what it should be; tags are not compared.
    pub fn digests(
        &self,
        object: &[u8],
        key: ObjectKey,
    ) -> Result<Vec<(PlanEntry, PageDigest)>, ObjectError> {
        let header = self.check(object, key)?;
        let mut hash = page_hash();
        let digest = |(section, place): (&Section, std::ops::Range<usize>)| {
            let Section { kind, layer, rows, page_no, bytes, .. } = *section;
            let pools = PoolKind::ALL.into_iter();
            let mut pools = pools.filter(|pool| {
                self.geometry.sections(*pool).iter().any(|section| section.kind == kind)
            });
            let pool = pools.next().unwrap_or(PoolKind::Block);
            let entry = PlanEntry { kind, layer, pool, page_no, rows, bytes };
            (entry, digest_slice(&mut *hash, &object[place]))
        };
        Ok(header.places().map(digest).collect())
    }

    /// Checks an object that came from a store, without a device page in sight.
    ///
    /// # Errors
    /// [`ObjectError`] that says what is wrong, and where.
    pub fn verify(&self, object: &[u8], key: ObjectKey) -> Result<(), ObjectError> {
        let header = self.check(object, key)?;
        let mut hash = page_hash();
        for (section, place) in header.places() {
            let digest = digest_slice(&mut *hash, &object[place]);
            check_tag(&header, section, &digest)?;
        }
        Ok(())
    }
}

/// Copies a page of an object to the device.
#[cfg(not(feature = "faults"))]
fn restore(
    hash: &mut dyn pd_transfer::page_hash::PageHash,
    _: CacheKind,
    page: &[u8],
    (mem, offset): (&Mem, u64),
) -> Result<PageDigest, DeviceError> {
    copy_in(hash, page, mem, offset)
}

fn check_tag(header: &Header, section: &Section, digest: &PageDigest) -> Result<(), ObjectError> {
    #[cfg(feature = "faults")]
    if crate::faults::is_trusting() {
        return Ok(());
    }
    if header.tag_of(section, digest) == section.tag {
        return Ok(());
    }
    let &Section { kind, layer, page_no, .. } = section;
    Err(ObjectError::Tag { kind, layer, page_no })
}

/// The object has the pages that are to be filled, in their order.
fn same_pages(header: &Header, pieces: &[Piece<'_>]) -> Result<(), ObjectError> {
    let untagged = |section: &Section| Section { tag: PageTag([0; 16]), ..*section };
    let name = |section: Option<Section>| match section {
        None => "missing".to_owned(),
        Some(s) => format!(
            "{} page {} of layer {} with {} rows in {} bytes",
            s.kind, s.page_no, s.layer, s.rows, s.bytes
        ),
    };
    for number in 0..header.sections.len().max(pieces.len()) {
        let found = header.sections.get(number).map(untagged);
        let wanted = pieces.get(number).map(|piece| piece.section);
        if found != wanted {
            let (found, wanted) = (name(found), name(wanted));
            return Err(ObjectError::OtherPages { section: number, found, wanted });
        }
    }
    Ok(())
}
