//! A store in a folder: one file an object, written beside its place and moved there.

use super::blob::{BlobStore, Listed, StoreError, check_whole};
use super::folder::{self, Opened, OtherStore, What, failpoint, if_there, sync_folder};
use super::format::OBJECT_ALIGN;
use crate::object::ObjectKey;
use kv_pool::Fingerprint;
use rustix::fs::OFlags;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

/// Where a [`FileStore`] lies and what it holds.
#[derive(Clone, Debug)]
pub struct FileStoreConfig {
    /// Folder for stores of all fingerprints; made if it is not there.
    pub dir: PathBuf,
    /// Meaning of all bytes.
    pub fingerprint: Fingerprint,
    /// Text from which the fingerprint follows, see [`kv_pool::FingerprintInput::describe`].
    pub layout: String,
    /// Goes around the page cache where buffer and file system allow it.
    pub direct: bool,
}

/// Objects of one fingerprint as files in a folder, which it has for itself while it lives. A
/// folder that somebody removes meanwhile is made again by the next write; if another process was
/// first, writes and removals are [`StoreError::Locked`], and [`StoreError::Replaced`] when it has
/// gone and left objects.
///
/// A write is in place for good when it returns: the file's bytes and its name were synced.
/// Uses are kept as the files' times of modification.
#[derive(Debug)]
pub struct FileStore {
    dir: PathBuf,
    others: Vec<OtherStore>,
    leftovers: u64,
    exposed: Option<PathBuf>,
    skipped: AtomicU64,
    /// Direct IO is wanted, and the file system has not refused it.
    direct: AtomicBool,
    layout: String,
    lock: Mutex<Held>,
}

/// The lock of a store, which is ours while its file is the one of that name.
#[derive(Debug)]
struct Held {
    /// Held, not read.
    _file: File,
    id: folder::FileId,
}

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Buffered,
    Direct,
}

impl Mode {
    const fn flags(self) -> OFlags {
        match self {
            Self::Buffered => OFlags::empty(),
            Self::Direct => OFlags::DIRECT,
        }
    }
}

impl FileStore {
    /// Opens the store of a fingerprint in a folder and removes what dead writers left.
    ///
    /// # Errors
    ///
    /// [`StoreError::Locked`] if another process has it, [`StoreError::LayoutVersion`] and
    /// [`StoreError::LayoutDiffers`] if the folder is not what it is called, [`StoreError::Io`].
    /// No object was changed.
    pub fn open(config: FileStoreConfig) -> Result<Self, StoreError> {
        let FileStoreConfig { dir: parent, fingerprint, layout, direct } = config;
        let dir = folder::store_dir(&parent, &fingerprint);
        folder::make_folders(&dir)?;
        // A process that died may have made the folder without this.
        sync_folder(&parent)?;
        failpoint("open-folder");
        let lock = take(&dir)?;
        failpoint("open-locked");
        folder::claim_layout(&dir, &layout)?;
        let mut leftovers = 0;
        folder::scan(&dir, &mut |found| {
            // With the lock held, nobody writes any more what is unfinished.
            if found.what == What::Leftover && folder::remove_file(&found.path)? {
                leftovers += 1;
                failpoint("open-cleaning");
            }
            Ok(())
        })?;
        failpoint("open-cleaned");
        let others = folder::others(&parent, &fingerprint, &layout)?;
        let exposed = folder::exposed(&parent, &dir);
        let (skipped, direct) = (AtomicU64::new(0), AtomicBool::new(direct));
        let lock = Mutex::new(lock);
        Ok(Self { dir, others, leftovers, exposed, skipped, direct, layout, lock })
    }

    /// Makes sure that the folder is still the one whose lock we have. One that was removed or
    /// replaced is made and taken again, unless another process has it by now: without this, two
    /// would write and evict in one folder.
    fn keep(&self) -> Result<(), StoreError> {
        let mut held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        if folder::lock_id(&self.dir)? == Some(held.id) {
            return Ok(());
        }
        folder::make_folders(&self.dir)?;
        let taken = take(&self.dir)?;
        folder::claim_layout(&self.dir, &self.layout)?;
        // What another process has written there is not known here: it would neither be counted nor
        // go, not even when all is to be forgotten.
        folder::scan(&self.dir, &mut |_| Err(StoreError::Replaced { dir: self.dir.clone() }))?;
        *held = taken;
        Ok(())
    }

    /// The folder of this fingerprint.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Stores of other fingerprints that were beside this one when it was opened.
    #[must_use]
    pub fn others(&self) -> &[OtherStore] {
        &self.others
    }

    /// A folder of the store that somebody else owns or may write, if there was one when it was
    /// opened: who may write there can put in objects of their own making, which no digest finds.
    #[must_use]
    pub fn exposed(&self) -> Option<&Path> {
        self.exposed.as_deref()
    }

    /// Unfinished files of dead writers that were removed when it was opened.
    #[must_use]
    pub const fn leftovers(&self) -> u64 {
        self.leftovers
    }

    /// Files that the last whole [`BlobStore::list`] left out, by name or length.
    #[must_use]
    pub fn skipped(&self) -> u64 {
        self.skipped.load(Ordering::Relaxed)
    }

    /// Whether aligned buffers go around the page cache: wanted, and not refused so far.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    fn mode(&self, buffer: &[u8]) -> Mode {
        let aligned = buffer.as_ptr().addr().is_multiple_of(OBJECT_ALIGN)
            && buffer.len().is_multiple_of(OBJECT_ALIGN);
        if aligned && self.is_direct() { Mode::Direct } else { Mode::Buffered }
    }

    /// Does `work`, a second time without direct IO if the file system does not have it.
    fn with_mode<T>(
        &self,
        mode: Mode,
        mut work: impl FnMut(Mode) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        match work(mode) {
            Err(StoreError::Io { source, .. })
                if mode == Mode::Direct && source.kind() == ErrorKind::InvalidInput =>
            {
                self.direct.store(false, Ordering::Relaxed);
                work(Mode::Buffered)
            }
            result => result,
        }
    }

    /// Writes the unfinished file and moves it to its place.
    fn place(&self, key: &ObjectKey, bytes: &[u8], mode: Mode) -> Result<(), StoreError> {
        let (folder, path) = folder::object_path(&self.dir, key);
        let temporary = folder::unfinished(&path);
        let file = match options(mode).write(true).create_new(true).open(&temporary) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                make_folder(&self.dir, &folder, key, bytes)?;
                options(mode).write(true).create_new(true).open(&temporary)
            }
            opened => opened,
        };
        let written = file.and_then(|file| {
            failpoint("write-created");
            fill(file, bytes)?;
            fs::rename(&temporary, &path)
        });
        if let Err(error) = written {
            // What stays in spite of this goes when the store is opened the next time.
            let _ = fs::remove_file(&temporary);
            return Err(write_error(key, bytes, &path, error));
        }
        failpoint("write-renamed");
        sync_folder(&folder)?;
        failpoint("write-folder-synced");
        Ok(())
    }

    fn fetch(&self, key: &ObjectKey, into: &mut [u8], mode: Mode) -> Result<(), StoreError> {
        let (_, path) = folder::object_path(&self.dir, key);
        let io = || StoreError::io("read", &path);
        let opened = folder::open_object(&path, options(mode).read(true), mode.flags());
        let mut file = match opened.map_err(io())? {
            Opened::Plain(file) => file,
            Opened::Nothing => return Err(StoreError::Missing { key: *key }),
            Opened::Other => return Err(StoreError::NotPlain { key: *key }),
        };
        let (found, wanted) = (file.metadata().map_err(io())?.len(), into.len() as u64);
        if found != wanted {
            return Err(StoreError::Length { key: *key, found, wanted });
        }
        file.read_exact(into).map_err(io())
    }
}

impl BlobStore for FileStore {
    fn name(&self) -> &'static str {
        "disk"
    }

    fn read(&self, key: &ObjectKey, into: &mut [u8]) -> Result<(), StoreError> {
        let mode = self.mode(into);
        self.with_mode(mode, |mode| self.fetch(key, into, mode))
    }

    fn write(&self, key: &ObjectKey, bytes: &[u8]) -> Result<(), StoreError> {
        check_whole(key, bytes)?;
        self.keep()?;
        self.with_mode(self.mode(bytes), |mode| self.place(key, bytes, mode))
    }

    fn remove(&self, key: &ObjectKey) -> Result<(), StoreError> {
        self.keep()?;
        failpoint("remove-begun");
        folder::remove_file(&folder::object_path(&self.dir, key).1)?;
        failpoint("remove-done");
        Ok(())
    }

    fn list(&self, found: &mut dyn FnMut(Listed)) -> Result<(), StoreError> {
        let mut skipped = 0;
        folder::scan(&self.dir, &mut |file| {
            match file.what {
                What::Object(key) => found(Listed { key, bytes: file.bytes, used: file.used }),
                What::Misfit(_) | What::Strange => skipped += 1,
                // Somebody writes it at this moment.
                What::Leftover => {}
            }
            Ok(())
        })?;
        self.skipped.store(skipped, Ordering::Relaxed);
        Ok(())
    }

    fn size(&self, key: &ObjectKey) -> Result<Option<u64>, StoreError> {
        let (_, path) = folder::object_path(&self.dir, key);
        let metadata = if_there(fs::symlink_metadata(&path));
        let metadata = metadata.map_err(StoreError::io("look at", &path))?;
        Ok(metadata.filter(fs::Metadata::is_file).map(|metadata| metadata.len()))
    }

    fn touch(&self, key: &ObjectKey) -> Result<(), StoreError> {
        let (_, path) = folder::object_path(&self.dir, key);
        let io = || StoreError::io("touch", &path);
        let opened = folder::open_object(&path, OpenOptions::new().read(true), OFlags::empty());
        match opened.map_err(io())? {
            Opened::Plain(file) => file.set_modified(now()).map_err(io()),
            Opened::Nothing => Err(StoreError::Missing { key: *key }),
            Opened::Other => Err(StoreError::NotPlain { key: *key }),
        }
    }
}

fn take(dir: &Path) -> Result<Held, StoreError> {
    let file = folder::lock(dir)?;
    let id = folder::id_of(&file).map_err(StoreError::io("look at the lock of", dir))?;
    Ok(Held { _file: file, id })
}

fn options(mode: Mode) -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(folder::FILE_MODE).custom_flags(mode.flags().bits().cast_signed());
    options
}

/// The time of uses. The file system's own times are coarser and would lie before it.
fn now() -> SystemTime {
    SystemTime::now()
}

fn fill(mut file: File, bytes: &[u8]) -> io::Result<()> {
    // In two steps, so that a test can die between them; whole blocks for direct IO.
    let half = bytes.len() / 2 / OBJECT_ALIGN * OBJECT_ALIGN;
    file.write_all(&bytes[..half])?;
    failpoint("write-half");
    file.write_all(&bytes[half..])?;
    failpoint("write-written");
    file.set_modified(now())?;
    file.sync_data()?;
    failpoint("write-synced");
    Ok(())
}

fn make_folder(
    store: &Path,
    folder: &Path,
    key: &ObjectKey,
    bytes: &[u8],
) -> Result<(), StoreError> {
    match folder::make_folder(folder) {
        Ok(()) => sync_folder(store),
        // Another thread made it.
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(write_error(key, bytes, folder, error)),
    }
}

fn write_error(key: &ObjectKey, bytes: &[u8], path: &Path, error: io::Error) -> StoreError {
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            StoreError::NoSpace { key: *key, bytes: bytes.len() as u64 }
        }
        _ => StoreError::io("write", path)(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_pool::ChainHash;

    #[test]
    fn a_full_disk_and_a_full_quota_are_no_space() {
        let key = ObjectKey::block(ChainHash([0; 32]));
        let error = |code| {
            write_error(&key, &[0; 4096], Path::new("x"), io::Error::from_raw_os_error(code))
        };
        for full in [rustix::io::Errno::NOSPC, rustix::io::Errno::DQUOT] {
            let error = error(full.raw_os_error());
            assert!(matches!(error, StoreError::NoSpace { bytes: 4096, .. }), "{error}");
        }
        let other = error(rustix::io::Errno::IO.raw_os_error());
        assert!(matches!(other, StoreError::Io { .. }), "{other}");
    }
}
