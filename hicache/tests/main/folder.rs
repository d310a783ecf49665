//! Folders that go away by themselves, and stores in them.

use hicache::store::{BlobStore, FileStore, FileStoreConfig, StoreError};
use hicache::testing::conformance::FINGERPRINT;
use kv_pool::Fingerprint;
use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

pub(crate) const LAYOUT: &str = "three layers\nweights digest 01\n";

/// A folder of its own for a test.
#[derive(Debug)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("hicache-test-{}-{count}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Deref for Folder {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A store of any fingerprint and layout in `dir`.
pub(crate) fn open_as(
    dir: &Path,
    fingerprint: Fingerprint,
    layout: &str,
) -> Result<FileStore, StoreError> {
    let (dir, layout) = (dir.to_owned(), layout.to_owned());
    FileStore::open(FileStoreConfig { dir, fingerprint, layout, direct: false })
}

/// The usual store in `dir`.
pub(crate) fn open(dir: &Path) -> FileStore {
    open_as(dir, FINGERPRINT, LAYOUT).unwrap()
}

/// All files below `dir`, in order.
pub(crate) fn files(dir: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            all.extend(files(&entry.path()));
        } else {
            all.push(entry.path());
        }
    }
    all.sort();
    all
}

/// The files of objects below `dir`, finished or not.
pub(crate) fn object_files(dir: &Path) -> Vec<PathBuf> {
    let mut all = files(dir);
    all.retain(|path| path.extension().is_some());
    all
}

/// All bytes of everything that a store lists.
pub(crate) fn read_all(store: &dyn BlobStore) -> Vec<(hicache::ObjectKey, Vec<u8>)> {
    let mut all = Vec::new();
    store.list(&mut |listed| all.push((listed.key, vec![0; listed.bytes as usize]))).unwrap();
    for (key, bytes) in &mut all {
        store.read(key, bytes).unwrap();
    }
    all.sort();
    all
}
