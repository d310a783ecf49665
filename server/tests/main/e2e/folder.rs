//! Folders that go with their test.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

/// A folder that goes with its test.
#[derive(Debug)]
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("dsv4-cache-test-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).expect("make a folder");
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left behind is only in the way of nobody.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
