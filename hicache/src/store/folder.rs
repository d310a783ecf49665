//! What a store's folder looks like: names, the layout file, the lock, and what lies in it.
//!
//! ```text
//! DIR/<32 hex of the fingerprint>/LAYOUT
//!                                 LOCK
//!                                 <first 2 hex of the chain>/<64 hex of the chain>.<part>
//! ```
//!
//! A name with `.tmp-` in it is of a file that was not finished.
//!
//! What users said can be guessed from rows of a cache, and from the times of their use: folders and
//! files are their owner's alone.

use super::blob::{StoreError, unix_ms};
use super::format::OBJECT_ALIGN;
use crate::object::{ObjectKey, Part};
use kv_pool::{ChainHash, Fingerprint};
use rustix::fs::OFlags;
use std::fs::{self, DirBuilder, DirEntry, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(feature = "testing")]
pub(super) use crate::testing::failpoint;

/// Where a test may let the process die.
#[cfg(not(feature = "testing"))]
pub(super) const fn failpoint(_name: &str) {}

/// First line of a layout file.
pub(super) const LAYOUT_VERSION: &str = "dsv4 hicache store 1";
pub(super) const LAYOUT: &str = "LAYOUT";
pub(super) const LOCK: &str = "LOCK";
/// Most bytes of a layout file that are read.
const LAYOUT_BYTES_MAX: u64 = 1 << 20;
/// Most characters of a line, and most lines, that a message repeats.
const SHOWN_CHARS: usize = 120;
const SHOWN_LINES: usize = 3;
/// What stands in the name of an unfinished file.
const UNFINISHED: &str = ".tmp-";

/// Rights of files.
pub(super) const FILE_MODE: u32 = 0o600;
/// Rights of folders.
const FOLDER_MODE: u32 = 0o700;
/// Times that a lock is tried while only those hold it who look whether a process has it.
const LOOKERS_MAX: u32 = 1000;

/// A store of another fingerprint beside ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherStore {
    /// Its folder.
    pub dir: PathBuf,
    /// The first lines in which its layout differs from ours, for a log line.
    pub differs: String,
}

/// A file in a store's folder.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) path: PathBuf,
    pub(super) what: What,
    pub(super) bytes: u64,
    /// Milliseconds since 1970.
    pub(super) used: u64,
}

/// What a file is by its name and length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Object(ObjectKey),
    /// Named as an object, but not a whole number of blocks long.
    Misfit(ObjectKey),
    /// Left by a writer that died, if no writer lives.
    Leftover,
    /// None of our names.
    Strange,
}

pub(super) fn store_dir(dir: &Path, fingerprint: &Fingerprint) -> PathBuf {
    dir.join(fingerprint.to_string())
}

/// The folder of an object and its path.
pub(super) fn object_path(store: &Path, key: &ObjectKey) -> (PathBuf, PathBuf) {
    let chain = key.chain.to_string();
    let folder = store.join(&chain[..2]);
    let path = folder.join(format!("{chain}.{}", key.part.name()));
    (folder, path)
}

/// A name beside `path` that no other writer uses: by process, and by count within it.
pub(super) fn unfinished(path: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let (pid, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!("{UNFINISHED}{pid}-{count}"));
    path.with_file_name(name)
}

fn object_key(name: &str) -> Option<ObjectKey> {
    let (chain, part) = name.split_once('.')?;
    let part = Part::ALL.into_iter().find(|known| known.name() == part)?;
    Some(ObjectKey { chain: ChainHash(from_hex(chain)?), part })
}

/// The fingerprint that a folder is named after.
pub(super) fn fingerprint_of(folder: &Path) -> Option<Fingerprint> {
    from_hex(folder.file_name()?.to_str()?).map(Fingerprint)
}

/// Exactly `N` bytes in lower-case hex.
fn from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if pairs.len() != N || !rest.is_empty() {
        return None;
    }
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let mut value = [0; N];
    for (value, &[high, low]) in value.iter_mut().zip(pairs) {
        *value = digit(high)? << 4 | digit(low)?;
    }
    Some(value)
}

/// `Ok(None)` for what is not there (any more).
pub(super) fn if_there<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Makes a folder that is to last, in one that is there.
pub(super) fn make_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().mode(FOLDER_MODE).create(folder)
}

/// Makes a folder that is to last, and those above it; one that is there stays as it is.
pub(super) fn make_folders(folder: &Path) -> Result<(), StoreError> {
    let error = match make_folder(folder) {
        Ok(()) => return sync_above(folder),
        Err(error) if error.kind() == ErrorKind::AlreadyExists && folder.is_dir() => return Ok(()),
        Err(error) => error,
    };
    match folder.parent() {
        Some(above) if error.kind() == ErrorKind::NotFound => make_folders(above)?,
        _ => return Err(StoreError::io("make folder", folder)(error)),
    }
    match make_folder(folder) {
        // Another process was as quick.
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            Err(StoreError::io("make folder", folder)(error))
        }
        Ok(()) | Err(_) => sync_above(folder),
    }
}

fn sync_above(folder: &Path) -> Result<(), StoreError> {
    match folder.parent() {
        Some(above) if above.as_os_str().is_empty() => sync_folder(Path::new(".")),
        Some(above) => sync_folder(above),
        None => Ok(()),
    }
}

/// Makes a folder's entries last.
pub(super) fn sync_folder(folder: &Path) -> Result<(), StoreError> {
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(StoreError::io("sync folder", folder))
}

/// Calls `visit` for each entry of a folder; a folder that is not there has none.
fn entries(
    folder: &Path,
    visit: &mut dyn FnMut(DirEntry) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let during = "list folder";
    let list = if_there(fs::read_dir(folder)).map_err(StoreError::io(during, folder))?;
    for entry in list.into_iter().flatten() {
        visit(entry.map_err(StoreError::io(during, folder))?)?;
    }
    Ok(())
}

/// Folders in `dir` that are named after a fingerprint, in the order of their names.
pub(super) fn store_dirs(dir: &Path) -> Result<Vec<PathBuf>, StoreError> {
    let mut stores = Vec::new();
    entries(dir, &mut |entry| {
        let path = entry.path();
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_folder && fingerprint_of(&path).is_some() {
            stores.push(path);
        }
        Ok(())
    })?;
    stores.sort();
    Ok(stores)
}

/// Calls `visit` for each file of a store except its lock and its layout.
///
/// Files that disappear meanwhile are left out.
pub(super) fn scan(
    store: &Path,
    visit: &mut dyn FnMut(Found) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    entries(store, &mut |entry| {
        let name = entry.file_name();
        let folder = entry.path();
        if name == LAYOUT || name == LOCK {
            return Ok(());
        }
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let prefix = name.to_str().filter(|name| is_folder && from_hex::<1>(name).is_some());
        let Some(prefix) = prefix else {
            return describe(&entry, None)?.map_or(Ok(()), &mut *visit);
        };
        entries(&folder, &mut |entry| describe(&entry, Some(prefix))?.map_or(Ok(()), &mut *visit))
    })
}

fn describe(entry: &DirEntry, prefix: Option<&str>) -> Result<Option<Found>, StoreError> {
    let path = entry.path();
    // Of the entry itself: a link is nothing of ours.
    let metadata = if_there(entry.metadata()).map_err(StoreError::io("look at", &path))?;
    let Some(metadata) = metadata else { return Ok(None) };
    let name = entry.file_name();
    let what = what(name.to_str().unwrap_or_default(), prefix, &metadata);
    let used = unix_ms(metadata.modified().map_err(StoreError::io("look at", &path))?);
    Ok(Some(Found { path, what, bytes: metadata.len(), used }))
}

fn what(name: &str, prefix: Option<&str>, metadata: &Metadata) -> What {
    if !metadata.is_file() {
        return What::Strange;
    }
    if let Some((name, _)) = name.split_once(UNFINISHED) {
        // Only of names that we write.
        let ours = if prefix.is_some() { object_key(name).is_some() } else { name == LAYOUT };
        return if ours { What::Leftover } else { What::Strange };
    }
    match object_key(name) {
        Some(key) if prefix.is_some_and(|prefix| name.starts_with(prefix)) => {
            let bytes = metadata.len();
            if bytes > 0 && bytes.is_multiple_of(OBJECT_ALIGN as u64) {
                What::Object(key)
            } else {
                What::Misfit(key)
            }
        }
        _ => What::Strange,
    }
}

/// Removes a file; true if it was there.
pub(super) fn remove_file(path: &Path) -> Result<bool, StoreError> {
    let removed = if_there(fs::remove_file(path)).map_err(StoreError::io("remove", path))?;
    Ok(removed.is_some())
}

/// Opens a file of a store, which is a file and nothing else: through a link somebody else would say
/// what is written where, and a pipe would never answer.
fn open_plain(path: &Path, options: &mut OpenOptions) -> Result<Option<File>, StoreError> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let opened = if_there(options.custom_flags(flags.bits().cast_signed()).open(path));
    let Some(file) = opened.map_err(StoreError::io("open", path))? else { return Ok(None) };
    let metadata = file.metadata().map_err(StoreError::io("look at", path))?;
    if !metadata.is_file() {
        let source = io::Error::new(ErrorKind::InvalidInput, "it is not a plain file");
        return Err(StoreError::io("open", path)(source));
    }
    Ok(Some(file))
}

/// What has an object's name.
pub(super) enum Opened {
    Nothing,
    Plain(File),
    /// A folder, a link, a pipe: none of ours.
    Other,
}

/// Opens what has an object's name, without following a link or waiting for a pipe.
pub(super) fn open_object(
    path: &Path,
    options: &mut OpenOptions,
    flags: OFlags,
) -> io::Result<Opened> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    match if_there(options.custom_flags(flags.bits().cast_signed()).open(path)) {
        Ok(None) => Ok(Opened::Nothing),
        Ok(Some(file)) if file.metadata()?.is_file() => Ok(Opened::Plain(file)),
        Ok(Some(_)) => Ok(Opened::Other),
        // A file system may refuse to open a folder or a link with these flags in its own way.
        Err(error) => match fs::symlink_metadata(path) {
            Ok(found) if !found.is_file() => Ok(Opened::Other),
            _ => Err(error),
        },
    }
}

/// The first of a store's folders, from the one above `dir` down to its own, that others than its
/// owner may write, or that somebody else owns: who may write there may put in objects of their own
/// making, or another folder in place of ours. The one above may be root's, and with its sticky bit
/// set everybody's, as the temporary folder is.
pub(super) fn exposed(dir: &Path, store: &Path) -> Option<PathBuf> {
    let ours = rustix::process::geteuid().as_raw();
    let found = |path: &Path, may_be_above: bool| {
        let found = fs::metadata(path).ok()?;
        let is_others = found.uid() != ours && !(may_be_above && found.uid() == 0);
        let is_sticky = may_be_above && found.mode() & 0o1000 != 0;
        (is_others || found.mode() & 0o022 != 0 && !is_sticky).then(|| path.to_owned())
    };
    let above = fs::canonicalize(dir).ok().and_then(|dir| dir.parent().map(Path::to_owned));
    above
        .and_then(|above| found(&above, true))
        .or_else(|| found(dir, false))
        .or_else(|| found(store, false))
}

/// What tells a file from all others that are there at the same time: device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileId(u64, u64);

pub(super) fn id_of(file: &File) -> io::Result<FileId> {
    file.metadata().map(|found| FileId(found.dev(), found.ino()))
}

/// The file that is a store's lock by its name; none if there is none.
pub(super) fn lock_id(store: &Path) -> Result<Option<FileId>, StoreError> {
    let path = store.join(LOCK);
    let found = if_there(fs::symlink_metadata(&path)).map_err(StoreError::io("look at", &path))?;
    Ok(found.map(|found| FileId(found.dev(), found.ino())))
}

/// Takes a store's lock, until the file is dropped.
pub(super) fn lock(store: &Path) -> Result<File, StoreError> {
    let path = store.join(LOCK);
    let mut lookers = 0;
    loop {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(FILE_MODE);
        let Some(file) = open_plain(&path, &mut options)? else {
            // Its folder went with whoever pruned it.
            return Err(StoreError::io("open", &path)(ErrorKind::NotFound.into()));
        };
        match file.try_lock() {
            Ok(()) => {}
            // Somebody who only looks lets go at once.
            Err(TryLockError::WouldBlock) if lookers < LOOKERS_MAX && !is_held(&file, &path)? => {
                lookers += 1;
                std::thread::yield_now();
                continue;
            }
            Err(TryLockError::WouldBlock) => {
                return Err(StoreError::Locked { dir: store.to_owned() });
            }
            Err(TryLockError::Error(source)) => return Err(StoreError::io("lock", &path)(source)),
        }
        // Whoever pruned the store away may have removed the name that this lock was opened by.
        let held = id_of(&file).map_err(StoreError::io("look at", &path))?;
        if lock_id(store)? == Some(held) {
            return Ok(file);
        }
    }
}

/// Whether a process has a store, or prunes it.
pub(super) fn is_locked(store: &Path) -> Result<bool, StoreError> {
    let path = store.join(LOCK);
    let file = open_plain(&path, OpenOptions::new().read(true))?;
    file.map_or(Ok(false), |file| is_held(&file, &path))
}

/// Whether somebody else has the lock for itself. Shares it for a moment.
fn is_held(file: &File, path: &Path) -> Result<bool, StoreError> {
    match file.try_lock_shared() {
        Ok(()) => file.unlock().map(|()| false).map_err(StoreError::io("unlock", path)),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(source)) => Err(StoreError::io("lock", path)(source)),
    }
}

/// The text of a layout file with its first line; none if there is no such file.
pub(super) fn read_layout(store: &Path) -> Result<Option<String>, StoreError> {
    let path = store.join(LAYOUT);
    let during = "read";
    let Some(file) = open_plain(&path, OpenOptions::new().read(true))? else { return Ok(None) };
    let mut bytes = Vec::new();
    let read = file.take(LAYOUT_BYTES_MAX).read_to_end(&mut bytes);
    read.map_err(StoreError::io(during, &path))?;
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}

/// Compares a store's layout file with ours, and writes it where there is none.
pub(super) fn claim_layout(store: &Path, layout: &str) -> Result<(), StoreError> {
    let path = store.join(LAYOUT);
    let ours = format!("{LAYOUT_VERSION}\n{layout}");
    let Some(theirs) = read_layout(store)? else {
        return write_layout(store, &path, &ours);
    };
    if theirs == ours {
        return Ok(());
    }
    let first = theirs.lines().next().unwrap_or_default();
    if first != LAYOUT_VERSION {
        let (found, wanted) = (shown(first), LAYOUT_VERSION);
        return Err(StoreError::LayoutVersion { path, found, wanted });
    }
    Err(StoreError::LayoutDiffers { path, differs: differs(&theirs, &ours) })
}

fn write_layout(store: &Path, path: &Path, text: &str) -> Result<(), StoreError> {
    let temporary = unfinished(path);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(FILE_MODE);
    let written = options.open(&temporary).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        failpoint("layout-written");
        file.sync_data()?;
        fs::rename(&temporary, path)
    });
    if let Err(source) = written {
        // What is left of it goes when the store is opened the next time.
        let _ = fs::remove_file(&temporary);
        return Err(StoreError::io("write", path)(source));
    }
    failpoint("layout-renamed");
    sync_folder(store)
}

/// Stores beside the one of `fingerprint`, and how their layouts differ from `layout`.
pub(super) fn others(
    dir: &Path,
    fingerprint: &Fingerprint,
    layout: &str,
) -> Result<Vec<OtherStore>, StoreError> {
    let ours = format!("{LAYOUT_VERSION}\n{layout}");
    let mut stores = store_dirs(dir)?;
    stores.retain(|store| fingerprint_of(store).as_ref() != Some(fingerprint));
    let other = |dir: PathBuf| {
        let differs = match read_layout(&dir) {
            Ok(Some(theirs)) => differs(&theirs, &ours),
            Ok(None) => format!("it has no file {LAYOUT}"),
            // Nothing of ours depends on that folder.
            Err(error) => error.to_string(),
        };
        OtherStore { dir, differs }
    };
    Ok(stores.into_iter().map(other).collect())
}

/// The first lines that differ, by position.
fn differs(theirs: &str, ours: &str) -> String {
    let (mut there, mut here) = (theirs.lines(), ours.lines());
    let mut found = Vec::new();
    while found.len() < SHOWN_LINES {
        let line = |line: Option<&str>| line.map_or("nothing".into(), |line| shown(line.trim()));
        match (there.next(), here.next()) {
            (None, None) => break,
            (a, b) if a == b => {}
            (a, b) => found.push(format!("{} there, {} here", line(a), line(b))),
        }
    }
    if found.is_empty() { "only the ends of lines differ".into() } else { found.join("; ") }
}

fn shown(line: &str) -> String {
    printable(line).chars().take(SHOWN_CHARS).collect()
}

/// A text that cannot move a terminal's cursor, or begin a line of its own.
pub(super) fn printable(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            let is_plain = !c.is_control();
            is_plain
                .then_some(c)
                .into_iter()
                .chain((!is_plain).then(|| c.escape_default()).into_iter().flatten())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_there_and_back() {
        let key = ObjectKey::boundary(ChainHash([0xa7; 32]));
        let (folder, path) = object_path(Path::new("s"), &key);
        assert_eq!(folder, Path::new("s/a7"));
        let name = path.file_name().unwrap().to_str().unwrap();
        assert_eq!(name, format!("{}.boundary", "a7".repeat(32)));
        assert_eq!(object_key(name), Some(key));
        for bad in ["", ".", "a7.block", &name.to_uppercase(), &name[1..], &format!("{name}.x")] {
            assert_eq!(object_key(bad), None, "{bad}");
        }
        assert!(unfinished(&path) != unfinished(&path));
    }

    #[test]
    fn the_first_lines_that_differ_are_named() {
        assert_eq!(differs("a\nweights 1\n", "a\nweights 2\n"), "weights 1 there, weights 2 here");
        assert_eq!(differs("a\n", "a\nb\n"), "nothing there, b here");
        assert_eq!(differs("a", "a\n"), "only the ends of lines differ");
        assert_eq!(differs("1\n2\n3\n4\n", "").matches("there").count(), SHOWN_LINES);
        assert!(differs(&"x".repeat(1000), "").len() < 200);
    }
}
