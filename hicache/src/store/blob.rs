//! The trait of a store of whole objects, and its errors.

use super::format::OBJECT_ALIGN;
use crate::object::ObjectKey;
use std::io;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// Keeps whole objects by their names. Calls block; any number of threads may call at once.
///
/// A caller may assume:
///
/// - After a write that succeeded, reads of the key give its bytes until it is removed or written
///   again. A write that failed, or whose process died, has left the old object or none, never a
///   part of one.
/// - A read that goes on while its object is written again gives one of both, whole.
/// - After any error the store can be used as before.
///
/// A caller may not assume that the bytes are right: disks and networks change bytes.
pub trait BlobStore: Send + Sync + std::fmt::Debug {
    /// Lower-case name of the kind of store, for metrics and logs.
    fn name(&self) -> &'static str;

    /// Reads a whole object into `into`, which has exactly its length.
    ///
    /// # Errors
    ///
    /// [`StoreError::Missing`]; [`StoreError::Length`] if the object is not as long as `into`;
    /// whatever keeps the store from reading. The content of `into` is then undefined.
    fn read(&self, key: &ObjectKey, into: &mut [u8]) -> Result<(), StoreError>;

    /// Writes a whole object, over an older one of this name.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotWhole`] if `bytes` is empty or not a multiple of 4096 bytes long;
    /// [`StoreError::NoSpace`]; whatever keeps the store from writing.
    fn write(&self, key: &ObjectKey, bytes: &[u8]) -> Result<(), StoreError>;

    /// Removes an object; one that is not there is fine. After a crash it may be there again.
    ///
    /// # Errors
    ///
    /// Whatever keeps the store from removing it.
    fn remove(&self, key: &ObjectKey) -> Result<(), StoreError>;

    /// Calls `found` once for each object, in no certain order. Objects that come or go meanwhile
    /// may be missing.
    ///
    /// # Errors
    ///
    /// Whatever keeps the store from listing; `found` may have been called before.
    fn list(&self, found: &mut dyn FnMut(Listed)) -> Result<(), StoreError>;

    /// Bytes of the object of this name; none if there is none.
    ///
    /// # Errors
    ///
    /// Whatever keeps the store from looking.
    fn size(&self, key: &ObjectKey) -> Result<Option<u64>, StoreError>;

    /// Whether uses are noted. Where not, [`Listed::used`] is when the object was written, and
    /// [`BlobStore::touch`] does nothing and always succeeds.
    fn notes_uses(&self) -> bool {
        true
    }

    /// Notes that the object was used now, as writing it does, so that [`Listed::used`] tells the
    /// order of uses after a restart.
    ///
    /// # Errors
    ///
    /// [`StoreError::Missing`]; whatever keeps the store from noting it.
    fn touch(&self, key: &ObjectKey) -> Result<(), StoreError>;
}

/// An object that a store has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub key: ObjectKey,
    /// Its length in bytes.
    pub bytes: u64,
    /// When it was written or last touched, in milliseconds since 1970.
    pub used: u64,
}

/// A store could not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// There is no such object.
    #[error("no object {key}")]
    Missing {
        /// The object.
        key: ObjectKey,
    },
    /// The disk, the quota or the store is full. The object was not written.
    #[error("no space for the {bytes} bytes of object {key}")]
    NoSpace {
        /// The object.
        key: ObjectKey,
        /// Its length.
        bytes: u64,
    },
    /// The object is not as long as the caller believes.
    #[error("object {key} has {found} bytes, {wanted} wanted")]
    Length {
        /// The object.
        key: ObjectKey,
        /// Its length in bytes.
        found: u64,
        /// The caller's length in bytes.
        wanted: u64,
    },
    /// Something else than a plain file has the object's name.
    #[error("what has the name of object {key} is no plain file")]
    NotPlain {
        /// The object.
        key: ObjectKey,
    },
    /// No whole object: empty, or not a multiple of 4096 bytes. It was not written.
    #[error("{bytes} bytes for object {key} are not a multiple of {OBJECT_ALIGN}")]
    NotWhole {
        /// The object.
        key: ObjectKey,
        /// Bytes given.
        bytes: u64,
    },
    /// Another process has the folder, or another store of this one.
    #[error("{} is in use by another process: stop that one, or name another folder", dir.display())]
    Locked {
        /// The folder.
        dir: PathBuf,
    },
    /// The folder was taken away while it was open, and there is another one in its place, with
    /// objects.
    #[error("{} was replaced by what another process has left; a restart uses that", dir.display())]
    Replaced {
        /// The folder.
        dir: PathBuf,
    },
    /// The folder's layout file is of another version, or none at all.
    #[error("{} begins with {found:?}, {wanted:?} wanted", path.display())]
    LayoutVersion {
        /// The layout file.
        path: PathBuf,
        /// Its first line, cut off at 120 characters.
        found: String,
        /// The first line of this version.
        wanted: &'static str,
    },
    /// The folder has our fingerprint and another layout.
    #[error("{} describes another layout: {differs}", path.display())]
    LayoutDiffers {
        /// The layout file.
        path: PathBuf,
        /// The first lines that differ.
        differs: String,
    },
    /// An operation on a file or folder failed.
    #[error("{during} {}: {source}", path.display())]
    Io {
        /// What was going on.
        during: &'static str,
        /// File or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// An operation of a store that has no files failed.
    #[error("{during} object {key}: {reason}")]
    Failed {
        /// What was going on.
        during: &'static str,
        /// The object.
        key: ObjectKey,
        /// What the store said.
        reason: String,
    },
}

impl StoreError {
    /// For `map_err` on calls of the system.
    pub(super) fn io(
        during: &'static str,
        path: &std::path::Path,
    ) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { during, path: path.to_owned(), source }
    }
}

/// Milliseconds since 1970; 0 for times before.
pub(crate) fn unix_ms(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Refuses what is no whole number of blocks.
pub(crate) fn check_whole(key: &ObjectKey, bytes: &[u8]) -> Result<(), StoreError> {
    if bytes.is_empty() || !bytes.len().is_multiple_of(OBJECT_ALIGN) {
        return Err(StoreError::NotWhole { key: *key, bytes: bytes.len() as u64 });
    }
    Ok(())
}
