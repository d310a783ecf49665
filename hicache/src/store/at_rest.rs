//! What looks after folders of stores from outside: lists, verifies, prunes.
//!
//! [`stores`] and [`verify`] only read, and may run beside a process that uses the stores; the
//! first one shares each lock for a moment, which keeps nobody from taking it. [`prune`] takes the locks of the stores that it may remove from.

use super::blob::{StoreError, unix_ms};
use super::folder::{self, Found, What, if_there};
use super::format::{FormatError, HEADER_BYTES_MAX, Header, verify_object};
use crate::object::{ObjectKey, Part};
use kv_pool::Fingerprint;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// What a store holds, by names and lengths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreSummary {
    /// Meaning of all bytes.
    pub fingerprint: Fingerprint,
    /// Its folder.
    pub dir: PathBuf,
    /// Its layout file: a line with the version, then the layout. None if there is no such file.
    pub layout: Option<String>,
    /// Objects of each part, in the order of [`Part::ALL`].
    pub objects: [u64; Part::ALL.len()],
    /// Bytes of all objects.
    pub bytes: u64,
    /// Least recent use of an object, in milliseconds since 1970.
    pub oldest_use: Option<u64>,
    /// Most recent use of an object, in milliseconds since 1970.
    pub newest_use: Option<u64>,
    /// Unfinished files; some may be under way if a process has the store.
    pub leftovers: u64,
    /// Files that are no objects, by name or length.
    pub strange: u64,
    /// Whether a process had it, or pruned it, when it was looked at.
    pub in_use: bool,
}

/// A file that is not as it should be.
#[derive(Debug)]
pub struct Finding {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub problem: Problem,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = folder::printable(&self.path.to_string_lossy());
        write!(f, "{path}: {}", self.problem)
    }
}

/// What can be wrong with a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// An object does not verify, or is not the one that it is called.
    #[error(transparent)]
    Damaged(FormatError),
    /// An object could not be read.
    #[error("could not be read: {0}")]
    Unreadable(io::Error),
    /// A name that no store gives.
    #[error("is no file of a store")]
    Strange,
}

/// What [`verify`] looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerifySummary {
    /// Stores.
    pub stores: u64,
    /// Objects that verify.
    pub good_objects: u64,
    /// Bytes of the objects that verify.
    pub good_bytes: u64,
    /// Objects that do not verify.
    pub damaged: u64,
    /// Objects that could not be read.
    pub unreadable: u64,
    /// Files with names that no store gives.
    pub strange: u64,
    /// Unfinished files; they are no finding.
    pub leftovers: u64,
}

/// What [`prune`] removes. With the default, only what dead writers left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PruneConfig {
    /// Removes the least recently used objects of all stores until this many bytes are left.
    pub max_bytes: Option<u64>,
    /// Removes objects that were not used for so long.
    pub older_than: Option<Duration>,
    /// Removes objects that do not verify. One that cannot be read stays.
    pub damaged: bool,
    /// Removes the stores of all other fingerprints, and the folders with them. If this is the
    /// only wish, the store of this fingerprint is left alone and may be in use.
    pub other_layouts_than: Option<Fingerprint>,
    /// Counts and removes nothing.
    pub dry_run: bool,
}

/// What [`prune`] removed, or would have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PruneSummary {
    /// Objects removed.
    pub removed_objects: u64,
    /// Bytes of the objects removed.
    pub removed_bytes: u64,
    /// Objects left.
    pub kept_objects: u64,
    /// Bytes of the objects left.
    pub kept_bytes: u64,
    /// Unfinished files removed.
    pub leftovers: u64,
    /// Stores removed with their folders.
    pub stores: u64,
    /// Folders of other layouts that hold files of somebody else, and so were left.
    pub stores_left: u64,
    /// Objects that could not be read, and so were left.
    pub unreadable: u64,
}

/// The stores in a folder, in the order of their fingerprints.
///
/// # Errors
///
/// [`StoreError::Io`] for a folder or layout file that cannot be read.
pub fn stores(dir: &Path) -> Result<Vec<StoreSummary>, StoreError> {
    check_folder(dir)?;
    folder::store_dirs(dir)?.into_iter().filter_map(|store| summary(store).transpose()).collect()
}

fn summary(dir: PathBuf) -> Result<Option<StoreSummary>, StoreError> {
    let Some(fingerprint) = folder::fingerprint_of(&dir) else { return Ok(None) };
    let layout = folder::read_layout(&dir)?;
    let in_use = folder::is_locked(&dir)?;
    let mut objects = [0; Part::ALL.len()];
    let (mut bytes, mut leftovers, mut strange) = (0, 0, 0);
    let (mut oldest_use, mut newest_use) = (None, None);
    folder::scan(&dir, &mut |found| {
        match found.what {
            What::Object(key) => {
                objects[Part::ALL.iter().position(|&part| part == key.part).unwrap_or(0)] += 1;
                bytes += found.bytes;
                oldest_use = Some(oldest_use.map_or(found.used, |oldest| found.used.min(oldest)));
                newest_use = newest_use.max(Some(found.used));
            }
            What::Leftover => leftovers += 1,
            What::Misfit(_) | What::Strange => strange += 1,
        }
        Ok(())
    })?;
    Ok(Some(StoreSummary {
        fingerprint,
        dir,
        layout,
        objects,
        bytes,
        oldest_use,
        newest_use,
        leftovers,
        strange,
        in_use,
    }))
}

/// Reads and verifies every object of every store, and calls `finding` for what is wrong.
///
/// An object that disappears meanwhile is fine. One object is in memory at a time.
///
/// # Errors
///
/// [`StoreError::Io`] for a folder that cannot be listed; objects that cannot be read are findings.
pub fn verify(dir: &Path, finding: &mut dyn FnMut(Finding)) -> Result<VerifySummary, StoreError> {
    check_folder(dir)?;
    let mut summary = VerifySummary::default();
    let mut buffer = Vec::new();
    for store in folder::store_dirs(dir)? {
        let Some(fingerprint) = folder::fingerprint_of(&store) else { continue };
        summary.stores += 1;
        folder::scan(&store, &mut |found| {
            let problem = match found.what {
                What::Object(key) | What::Misfit(key) => {
                    match examine(&found.path, &fingerprint, &key, &mut buffer) {
                        Verdict::Gone => return Ok(()),
                        Verdict::Good => {
                            summary.good_objects += 1;
                            summary.good_bytes += found.bytes;
                            return Ok(());
                        }
                        Verdict::Damaged(error) => {
                            summary.damaged += 1;
                            Problem::Damaged(error)
                        }
                        Verdict::Unreadable(error) => {
                            summary.unreadable += 1;
                            Problem::Unreadable(error)
                        }
                    }
                }
                What::Strange => {
                    summary.strange += 1;
                    Problem::Strange
                }
                What::Leftover => {
                    summary.leftovers += 1;
                    return Ok(());
                }
            };
            finding(Finding { path: found.path, problem });
            Ok(())
        })?;
    }
    Ok(summary)
}

/// What reading an object said of it.
#[derive(Debug)]
enum Verdict {
    Good,
    Damaged(FormatError),
    Unreadable(io::Error),
    /// It was removed since it was listed.
    Gone,
}

fn examine(
    path: &Path,
    fingerprint: &Fingerprint,
    key: &ObjectKey,
    buffer: &mut Vec<u8>,
) -> Verdict {
    match if_there(read_bounded(path, buffer)) {
        Ok(None) => return Verdict::Gone,
        Err(error) => return Verdict::Unreadable(error),
        Ok(Some(Err(error))) => return Verdict::Damaged(error),
        Ok(Some(Ok(()))) => {}
    }
    let checked = verify_object(buffer).and_then(|header| header.check_identity(fingerprint, key));
    checked.map_or_else(Verdict::Damaged, |()| Verdict::Good)
}

/// Reads a file as long as its header says, or what is wrong with that.
///
/// The header is checked before memory is taken for the rest.
fn read_bounded(path: &Path, buffer: &mut Vec<u8>) -> io::Result<Result<(), FormatError>> {
    let mut file = File::open(path)?;
    let found = file.metadata()?.len();
    buffer.clear();
    file.by_ref().take(HEADER_BYTES_MAX as u64).read_to_end(buffer)?;
    let wanted = match Header::decode(buffer) {
        Ok(header) => header.object_bytes(),
        Err(error) => return Ok(Err(error)),
    };
    if found != wanted {
        return Ok(Err(FormatError::ObjectBytes { found, wanted }));
    }
    let rest = wanted.saturating_sub(buffer.len() as u64);
    let room = usize::try_from(rest).map_err(|_| ErrorKind::OutOfMemory)?;
    buffer.try_reserve_exact(room)?;
    file.take(rest).read_to_end(buffer)?;
    Ok(Ok(()))
}

/// Removes objects by age, space, damage or layout, and what dead writers left.
///
/// `now` is the time against which ages are measured.
///
/// # Errors
///
/// [`StoreError::Locked`] if a process has one of the stores; nothing was removed.
/// [`StoreError::Io`] for a file that cannot be removed; some may have been removed before.
pub fn prune(
    dir: &Path,
    config: &PruneConfig,
    now: SystemTime,
) -> Result<PruneSummary, StoreError> {
    check_folder(dir)?;
    let mut work = Pruning { config, now, kept: Vec::new(), summary: PruneSummary::default() };
    // Every lock is taken before anything is removed.
    let mut stores = Vec::new();
    for store in folder::store_dirs(dir)? {
        let Some(fingerprint) = folder::fingerprint_of(&store) else { continue };
        let is_other = config.other_layouts_than.is_some_and(|ours| ours != fingerprint);
        if is_other || !work.is_only_about_others() {
            stores.push((folder::lock(&store)?, store, fingerprint, is_other));
        } else {
            // Perhaps a process has it: it is only counted.
            work.count_kept(&store)?;
        }
    }
    for (_, store, fingerprint, is_other) in &stores {
        if *is_other {
            work.remove_store(store)?;
        } else {
            work.sort_out(store, fingerprint)?;
        }
    }
    work.make_room()?;
    Ok(work.summary)
}

/// A prune under way, all locks held.
#[derive(Debug)]
struct Pruning<'a> {
    config: &'a PruneConfig,
    now: SystemTime,
    /// Objects that may have to make room: use, path, bytes.
    kept: Vec<(u64, PathBuf, u64)>,
    summary: PruneSummary,
}

impl Pruning<'_> {
    fn is_only_about_others(&self) -> bool {
        let PruneConfig { max_bytes, older_than, damaged, other_layouts_than, dry_run: _ } =
            self.config;
        other_layouts_than.is_some() && max_bytes.is_none() && older_than.is_none() && !damaged
    }

    /// Counts the objects of a store that stays as it is.
    fn count_kept(&mut self, store: &Path) -> Result<(), StoreError> {
        folder::scan(store, &mut |found| {
            if let What::Object(_) | What::Misfit(_) = found.what {
                self.summary.kept_objects += 1;
                self.summary.kept_bytes += found.bytes;
            }
            Ok(())
        })
    }

    /// Removes what is too old, damaged or unfinished, and notes the rest.
    fn sort_out(&mut self, store: &Path, fingerprint: &Fingerprint) -> Result<(), StoreError> {
        let limit = self.config.older_than.map(|age| {
            // An age from before all times keeps everything.
            unix_ms(self.now.checked_sub(age).unwrap_or(SystemTime::UNIX_EPOCH))
        });
        let mut buffer = Vec::new();
        folder::scan(store, &mut |found| {
            let (key, is_misfit) = match found.what {
                What::Object(key) => (key, false),
                What::Misfit(key) => (key, true),
                What::Leftover => return self.remove_leftover(&found),
                What::Strange => return Ok(()),
            };
            if limit.is_some_and(|limit| found.used < limit)
                || self.is_damaged(&found, fingerprint, &key, &mut buffer)
            {
                return self.remove_object(&found.path, found.bytes);
            }
            if !is_misfit {
                self.kept.push((found.used, found.path, found.bytes));
            }
            Ok(())
        })
    }

    fn is_damaged(
        &mut self,
        found: &Found,
        fingerprint: &Fingerprint,
        key: &ObjectKey,
        buffer: &mut Vec<u8>,
    ) -> bool {
        if !self.config.damaged {
            return false;
        }
        let verdict = examine(&found.path, fingerprint, key, buffer);
        self.summary.unreadable += u64::from(matches!(verdict, Verdict::Unreadable(_)));
        matches!(verdict, Verdict::Damaged(_))
    }

    /// Removes the least recently used objects until the rest fits.
    fn make_room(&mut self) -> Result<(), StoreError> {
        let mut kept = std::mem::take(&mut self.kept);
        kept.sort();
        let mut bytes: u64 = kept.iter().map(|(_, _, bytes)| bytes).sum();
        for (_, path, object_bytes) in kept {
            if self.config.max_bytes.is_some_and(|max| bytes > max) {
                bytes -= object_bytes;
                self.remove_object(&path, object_bytes)?;
            } else {
                self.summary.kept_objects += 1;
                self.summary.kept_bytes += object_bytes;
            }
        }
        Ok(())
    }

    /// Removes all files of a store that have its names, then its folders, its lock last.
    fn remove_store(&mut self, store: &Path) -> Result<(), StoreError> {
        let mut strange = 0;
        folder::scan(store, &mut |found| match found.what {
            What::Object(_) | What::Misfit(_) => self.remove_object(&found.path, found.bytes),
            What::Leftover => self.remove_leftover(&found),
            What::Strange => {
                strange += 1;
                Ok(())
            }
        })?;
        if strange > 0 {
            self.summary.stores_left += 1;
            return Ok(());
        }
        self.summary.stores += 1;
        if self.config.dry_run {
            return Ok(());
        }
        for prefix in 0..=u8::MAX {
            remove_folder(&store.join(format!("{prefix:02x}")))?;
        }
        folder::remove_file(&store.join(folder::LAYOUT))?;
        folder::remove_file(&store.join(folder::LOCK))?;
        remove_folder(store)
    }

    fn remove_object(&mut self, path: &Path, bytes: u64) -> Result<(), StoreError> {
        if self.config.dry_run || folder::remove_file(path)? {
            self.summary.removed_objects += 1;
            self.summary.removed_bytes += bytes;
        }
        Ok(())
    }

    fn remove_leftover(&mut self, found: &Found) -> Result<(), StoreError> {
        if self.config.dry_run || folder::remove_file(&found.path)? {
            self.summary.leftovers += 1;
        }
        Ok(())
    }
}

/// Removes an empty folder; one that is not there is fine.
fn remove_folder(path: &Path) -> Result<(), StoreError> {
    if_there(fs::remove_dir(path)).map_err(StoreError::io("remove folder", path)).map(drop)
}

/// A folder of stores that is not there is a wrong argument, not an empty one.
fn check_folder(dir: &Path) -> Result<(), StoreError> {
    fs::read_dir(dir).map_err(StoreError::io("list folder", dir)).map(drop)
}
