//! Objects below the device tier: their bytes, and who keeps them.
//!
//! [`format`](mod@format) is the one byte format. With the feature `std`, a [`BlobStore`] keeps
//! objects and [`FileStore`] is one in a folder; [`at_rest`] looks after such folders from outside.
//!
//! A store moves bytes and does not vouch for them: who reads an object verifies it, see
//! [`format::verify_object`], before a byte of it is used.

pub mod format;

#[cfg(feature = "std")]
pub mod at_rest;
#[cfg(feature = "std")]
mod blob;
#[cfg(feature = "std")]
mod file;
#[cfg(feature = "std")]
mod folder;

#[cfg(feature = "std")]
pub use blob::{BlobStore, Listed, StoreError};
#[cfg(feature = "testing")]
pub(crate) use blob::{check_whole, unix_ms};
#[cfg(feature = "std")]
pub use file::{FileStore, FileStoreConfig};
#[cfg(feature = "std")]
pub use folder::OtherStore;
