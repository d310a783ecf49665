//! The bytes of an object: one format in host memory, on disk and in an object store.
//!
//! An object is a header, the payload, and zeros up to a multiple of 4096 bytes. Integers are
//! little-endian.
//!
//! | offset | bytes | content |
//! |---|---|---|
//! | 0 | 8 | `DSV4HIC\0` |
//! | 8 | 4 | version, 1 |
//! | 12 | 4 | bytes of the header: what the sections need, rounded up to 4096 |
//! | 16 | 16 | fingerprint |
//! | 32 | 32 | chain |
//! | 64 | 1 | part; three zeros follow |
//! | 68 | 4 | sections, at most 4096 |
//! | 72 | 8 | bytes of the payload |
//! | 80 | 4 | tokens of the prefix; twelve zeros follow |
//! | 96 | 16 | [`kv_pool::digest()`] of the whole header with this field zero; sixteen zeros follow |
//! | 128 | 32 each | sections; zeros follow up to the end of the header |
//!
//! A section's entry is kind (1), zero (1), layer (2), rows (4), page number (4), bytes (4) and tag
//! (16). The sections lie in the payload in this order, without gaps.
//!
//! Everything that a tag binds stands in the header, so an object can be verified without a model,
//! and its tags are those under which a hand-off passes the same pages.

use crate::object::{ObjectKey, Part};
use alloc::vec::Vec;
use core::ops::Range;
use kv_pool::{
    CacheKind, ChainHash, Fingerprint, PageDigest, PageTag, TagInput, digest, digest_parts, tag,
};

/// First bytes of every object.
pub const MAGIC: [u8; 8] = *b"DSV4HIC\0";
/// Version of the format; another one is refused.
pub const FORMAT_VERSION: u32 = 1;
/// Header and object are multiples of this many bytes, for direct IO.
pub const OBJECT_ALIGN: usize = 4096;
/// Most sections of an object.
pub const SECTIONS_MAX: usize = 4096;
/// Most bytes of an object. V4's are a few MiB; whoever reads one that nobody vouches for takes no
/// more memory than this.
pub const OBJECT_BYTES_MAX: u64 = 256 << 20;
/// Most bytes of a header.
pub const HEADER_BYTES_MAX: usize = Header::header_bytes(SECTIONS_MAX);

/// Bytes before the first section's entry.
const FIXED_BYTES: usize = 128;
const ENTRY_BYTES: usize = 32;
const DIGEST: Range<usize> = 96..112;
/// Reserved bytes of the fixed part.
const ZEROS: [Range<usize>; 3] = [65..68, 84..96, 112..128];

/// Bytes are no object, or not the one that was wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// Too few bytes for a header, or for this one.
    #[error("header of {wanted} bytes in {found} bytes")]
    Short {
        /// Bytes there are.
        found: usize,
        /// Bytes of the header, as far as they are known.
        wanted: usize,
    },
    /// The first bytes are not [`MAGIC`].
    #[error("begins with {found:02x?}, not as an object")]
    Magic {
        /// The first eight bytes.
        found: [u8; 8],
    },
    /// Another version of the format.
    #[error("object of version {found}, this is version {FORMAT_VERSION}")]
    Version {
        /// Version of the object.
        found: u32,
    },
    /// More than [`SECTIONS_MAX`].
    #[error("object of {found} sections, {SECTIONS_MAX} may")]
    Sections {
        /// Sections it says, or has.
        found: usize,
    },
    /// More than [`OBJECT_BYTES_MAX`].
    #[error("object of {found} bytes, {OBJECT_BYTES_MAX} may")]
    TooLong {
        /// Bytes of all of it.
        found: u64,
    },
    /// The header's length does not follow from its sections.
    #[error("header says {found} bytes, its sections need {wanted}")]
    HeaderBytes {
        /// Bytes it says.
        found: u32,
        /// Bytes that it must have.
        wanted: usize,
    },
    /// The header was changed after it was written.
    #[error("header has digest {found}, says {wanted}")]
    HeaderDigest {
        /// Digest of the bytes.
        found: PageDigest,
        /// Digest in the header.
        wanted: PageDigest,
    },
    /// A reserved byte of the header is not zero.
    #[error("reserved byte {offset} of the header is not zero")]
    Reserved {
        /// Its offset.
        offset: usize,
    },
    /// There is no such part.
    #[error("there is no part {found}")]
    UnknownPart {
        /// Number in the header.
        found: u8,
    },
    /// There is no such cache.
    #[error("section {section} is of cache {found}, which does not exist")]
    UnknownKind {
        /// Position of the section.
        section: usize,
        /// Number in its entry.
        found: u8,
    },
    /// The sections do not make up the payload.
    #[error("payload of {found} bytes, its sections have {wanted}")]
    PayloadBytes {
        /// Bytes that the header says.
        found: u64,
        /// Sum of the sections' bytes.
        wanted: u64,
    },
    /// The object is cut off or has something behind it.
    #[error("object has {found} bytes, its header says {wanted}")]
    ObjectBytes {
        /// Bytes there are.
        found: u64,
        /// Bytes there must be.
        wanted: u64,
    },
    /// A section's bytes are not those that were tagged.
    #[error("{kind} of layer {layer}, page {page_no}, is damaged: tag {found}, says {wanted}")]
    Damaged {
        /// Cache.
        kind: CacheKind,
        /// Layer.
        layer: u16,
        /// Page number of the section.
        page_no: u32,
        /// Tag of the bytes.
        found: PageTag,
        /// Tag in the header.
        wanted: PageTag,
    },
    /// A byte behind the payload is not zero.
    #[error("byte {offset} behind the payload is not zero")]
    Padding {
        /// Its offset in the object.
        offset: usize,
    },
    /// An object of another layout, model or tokenizer.
    #[error("object of fingerprint {found}, {wanted} wanted")]
    OtherFingerprint {
        /// Fingerprint of the object.
        found: Fingerprint,
        /// Fingerprint wanted.
        wanted: Fingerprint,
    },
    /// An object of another prefix.
    #[error("object of chain {found}, {wanted} wanted")]
    OtherChain {
        /// Chain of the object.
        found: ChainHash,
        /// Chain wanted.
        wanted: ChainHash,
    },
    /// The other part of the prefix.
    #[error("object is a {}, a {} wanted", found.name(), wanted.name())]
    OtherPart {
        /// Part of the object.
        found: Part,
        /// Part wanted.
        wanted: Part,
    },
}

/// One page of one layer in an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section {
    /// Cache.
    pub kind: CacheKind,
    /// Layer number.
    pub layer: u16,
    /// Written rows.
    pub rows: u32,
    /// Block number, window page number, 0 for a carry.
    pub page_no: u32,
    /// Bytes of the written rows.
    pub bytes: u32,
    /// Tag of these bytes, see [`Header::tag_of`].
    pub tag: PageTag,
}

impl Section {
    fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut entry = [0; ENTRY_BYTES];
        entry[0] = self.kind as u8;
        entry[2..4].copy_from_slice(&self.layer.to_le_bytes());
        entry[4..8].copy_from_slice(&self.rows.to_le_bytes());
        entry[8..12].copy_from_slice(&self.page_no.to_le_bytes());
        entry[12..16].copy_from_slice(&self.bytes.to_le_bytes());
        entry[16..].copy_from_slice(&self.tag.0);
        entry
    }

    fn decode(section: usize, entry: &[u8; ENTRY_BYTES]) -> Result<Self, FormatError> {
        if entry[1] != 0 {
            return Err(FormatError::Reserved { offset: FIXED_BYTES + section * ENTRY_BYTES + 1 });
        }
        let found = entry[0];
        let kind = CacheKind::try_from(found);
        Ok(Self {
            kind: kind.map_err(|_| FormatError::UnknownKind { section, found })?,
            layer: u16::from_le_bytes(at(entry, 2)),
            rows: u32::from_le_bytes(at(entry, 4)),
            page_no: u32::from_le_bytes(at(entry, 8)),
            bytes: u32::from_le_bytes(at(entry, 12)),
            tag: PageTag(at(entry, 16)),
        })
    }
}

/// What an object says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Meaning of all bytes.
    pub fingerprint: Fingerprint,
    /// Prefix and part.
    pub key: ObjectKey,
    /// Length of the prefix in tokens.
    pub tokens: u32,
    /// Pages, in the order in which they lie in the payload; at most [`SECTIONS_MAX`].
    pub sections: Vec<Section>,
}

impl Header {
    /// Bytes of a header of so many sections; [`SECTIONS_MAX`] at most.
    #[must_use]
    pub const fn header_bytes(sections: usize) -> usize {
        (FIXED_BYTES + sections * ENTRY_BYTES).next_multiple_of(OBJECT_ALIGN)
    }

    /// Bytes of all sections together.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        self.sections.iter().map(|section| u64::from(section.bytes)).sum()
    }

    /// Bytes of the whole object, with its padding.
    #[must_use]
    pub fn object_bytes(&self) -> u64 {
        object_bytes(self.sections.len(), self.payload_bytes())
    }

    /// Each section with its place in the object.
    ///
    /// Places saturate where the address space ends before the object does.
    pub fn places(&self) -> impl Iterator<Item = (&Section, Range<usize>)> {
        let mut start = Self::header_bytes(self.sections.len());
        self.sections.iter().map(move |section| {
            let bytes = usize::try_from(section.bytes).unwrap_or(usize::MAX);
            let end = start.saturating_add(bytes);
            (section, core::mem::replace(&mut start, end)..end)
        })
    }

    /// The tag that `section` must have if its bytes have this digest.
    #[must_use]
    pub fn tag_of(&self, section: &Section, digest: &PageDigest) -> PageTag {
        let &Section { kind, layer, rows, page_no, .. } = section;
        let (fingerprint, chain) = (self.fingerprint, self.key.chain);
        tag(digest, &TagInput { fingerprint, kind, layer, chain, page_no, rows })
    }

    /// Writes the header to the beginning of `target`, and zeros to what of `target` lies behind
    /// the payload. The payload is left alone.
    ///
    /// # Errors
    ///
    /// [`FormatError::Sections`], [`FormatError::TooLong`], and [`FormatError::Short`] if the header
    /// has no room; nothing was written.
    pub fn encode_into(&self, target: &mut [u8]) -> Result<(), FormatError> {
        let count = self.sections.len();
        if count > SECTIONS_MAX {
            return Err(FormatError::Sections { found: count });
        }
        self.check_not_too_long()?;
        let (found, wanted) = (target.len(), Self::header_bytes(count));
        let header = target.get_mut(..wanted).ok_or(FormatError::Short { found, wanted })?;
        header.fill(0);
        header[..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        header[12..16].copy_from_slice(&(wanted as u32).to_le_bytes());
        header[16..32].copy_from_slice(&self.fingerprint.0);
        header[32..64].copy_from_slice(&self.key.chain.0);
        header[64] = self.key.part as u8;
        header[68..72].copy_from_slice(&(count as u32).to_le_bytes());
        header[72..80].copy_from_slice(&self.payload_bytes().to_le_bytes());
        header[80..84].copy_from_slice(&self.tokens.to_le_bytes());
        let (entries, _) = header[FIXED_BYTES..].as_chunks_mut::<ENTRY_BYTES>();
        for (entry, section) in entries.iter_mut().zip(&self.sections) {
            *entry = section.encode();
        }
        let value = digest(header);
        header[DIGEST].copy_from_slice(&value.0);
        if let Some(padding) = target.get_mut(self.payload_end()..) {
            padding.fill(0);
        }
        Ok(())
    }

    /// Tags the sections by the bytes that lie in `object`, then [`Header::encode_into`].
    ///
    /// For who made the bytes. Who was handed them together with tags keeps those: a tag made
    /// after a copy would hide what the copy did.
    ///
    /// # Errors
    ///
    /// [`FormatError::ObjectBytes`] if `object` has not exactly the object's length, and those of
    /// [`Header::encode_into`].
    pub fn seal(&mut self, object: &mut [u8]) -> Result<(), FormatError> {
        self.check_object_bytes(object)?;
        let places: Vec<Range<usize>> = self.places().map(|(_, place)| place).collect();
        for (number, place) in places.into_iter().enumerate() {
            let value = digest(&object[place]);
            self.sections[number].tag = self.tag_of(&self.sections[number], &value);
        }
        self.encode_into(object)
    }

    /// Reads a header; `bytes` may go on behind it.
    ///
    /// # Errors
    ///
    /// A [`FormatError`] that says what is wrong with the header. The payload is not looked at.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let header = bounds(bytes)?;
        let wanted = PageDigest(at(header, DIGEST.start));
        let (before, after) = (&header[..DIGEST.start], &header[DIGEST.end..]);
        let found = digest_parts(&[before, &[0; 16], after]);
        if found != wanted {
            return Err(FormatError::HeaderDigest { found, wanted });
        }
        let count = u32::from_le_bytes(at(header, 68)) as usize;
        let entries_end = FIXED_BYTES + count * ENTRY_BYTES;
        let mut zeros = ZEROS.into_iter().chain(core::iter::once(entries_end..header.len()));
        if let Some(offset) = zeros.find_map(|range| first_nonzero(header, range)) {
            return Err(FormatError::Reserved { offset });
        }
        let part = Part::ALL.into_iter().find(|&part| part as u8 == header[64]);
        let part = part.ok_or(FormatError::UnknownPart { found: header[64] })?;
        let (entries, _) = header[FIXED_BYTES..entries_end].as_chunks::<ENTRY_BYTES>();
        let sections = entries.iter().enumerate();
        let sections = sections.map(|(number, entry)| Section::decode(number, entry));
        let header = Self {
            fingerprint: Fingerprint(at(header, 16)),
            key: ObjectKey { chain: ChainHash(at(header, 32)), part },
            tokens: u32::from_le_bytes(at(header, 80)),
            sections: sections.collect::<Result<_, _>>()?,
        };
        let (found, wanted) = (u64::from_le_bytes(at(bytes, 72)), header.payload_bytes());
        if found != wanted {
            return Err(FormatError::PayloadBytes { found, wanted });
        }
        header.check_not_too_long()?;
        Ok(header)
    }

    /// Compares with what was asked for.
    ///
    /// # Errors
    ///
    /// [`FormatError::OtherFingerprint`], [`FormatError::OtherChain`] or
    /// [`FormatError::OtherPart`], in this order.
    pub fn check_identity(
        &self,
        fingerprint: &Fingerprint,
        key: &ObjectKey,
    ) -> Result<(), FormatError> {
        if self.fingerprint != *fingerprint {
            let (found, wanted) = (self.fingerprint, *fingerprint);
            return Err(FormatError::OtherFingerprint { found, wanted });
        }
        if self.key.chain != key.chain {
            return Err(FormatError::OtherChain { found: self.key.chain, wanted: key.chain });
        }
        if self.key.part != key.part {
            return Err(FormatError::OtherPart { found: self.key.part, wanted: key.part });
        }
        Ok(())
    }

    /// Offset at which the padding begins.
    fn payload_end(&self) -> usize {
        let start = Self::header_bytes(self.sections.len());
        self.places().last().map_or(start, |(_, place)| place.end)
    }

    fn check_not_too_long(&self) -> Result<(), FormatError> {
        let found = self.object_bytes();
        if found > OBJECT_BYTES_MAX { Err(FormatError::TooLong { found }) } else { Ok(()) }
    }

    fn check_object_bytes(&self, object: &[u8]) -> Result<(), FormatError> {
        let (found, wanted) = (object.len() as u64, self.object_bytes());
        if found == wanted { Ok(()) } else { Err(FormatError::ObjectBytes { found, wanted }) }
    }
}

/// Bytes of a whole object of so many sections, at most [`SECTIONS_MAX`], with its padding.
#[must_use]
pub const fn object_bytes(sections: usize, payload_bytes: u64) -> u64 {
    let bytes = (Header::header_bytes(sections) as u64).saturating_add(payload_bytes);
    bytes.div_ceil(OBJECT_ALIGN as u64).saturating_mul(OBJECT_ALIGN as u64)
}

/// Verifies a whole object: header, every section's tag, padding.
///
/// Who wants a certain object also calls [`Header::check_identity`].
///
/// # Errors
///
/// A [`FormatError`] that names what is wrong, [`FormatError::Damaged`] with cache and layer for a
/// section's bytes.
pub fn verify_object(bytes: &[u8]) -> Result<Header, FormatError> {
    let header = Header::decode(bytes)?;
    header.check_object_bytes(bytes)?;
    for (section, place) in header.places() {
        let found = header.tag_of(section, &digest(&bytes[place]));
        if found != section.tag {
            let &Section { kind, layer, page_no, tag: wanted, .. } = section;
            return Err(FormatError::Damaged { kind, layer, page_no, found, wanted });
        }
    }
    match first_nonzero(bytes, header.payload_end()..bytes.len()) {
        Some(offset) => Err(FormatError::Padding { offset }),
        None => Ok(header),
    }
}

/// The header's bytes, once its magic, version and lengths are in order.
fn bounds(bytes: &[u8]) -> Result<&[u8], FormatError> {
    if bytes.len() < FIXED_BYTES {
        return Err(FormatError::Short { found: bytes.len(), wanted: FIXED_BYTES });
    }
    let magic = at(bytes, 0);
    if magic != MAGIC {
        return Err(FormatError::Magic { found: magic });
    }
    let version = u32::from_le_bytes(at(bytes, 8));
    if version != FORMAT_VERSION {
        return Err(FormatError::Version { found: version });
    }
    let sections = u32::from_le_bytes(at(bytes, 68)) as usize;
    if sections > SECTIONS_MAX {
        return Err(FormatError::Sections { found: sections });
    }
    let (found, wanted) = (u32::from_le_bytes(at(bytes, 12)), Header::header_bytes(sections));
    if found as usize != wanted {
        return Err(FormatError::HeaderBytes { found, wanted });
    }
    bytes.get(..wanted).ok_or(FormatError::Short { found: bytes.len(), wanted })
}

fn first_nonzero(bytes: &[u8], range: Range<usize>) -> Option<usize> {
    let start = range.start;
    bytes.get(range)?.iter().position(|&byte| byte != 0).map(|position| start + position)
}

/// `N` bytes from an offset that is known to be inside.
fn at<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    let mut value = [0; N];
    value.copy_from_slice(&bytes[offset..offset + N]);
    value
}
