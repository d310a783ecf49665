//! Read-only memory maps of weight files.
#![expect(unsafe_code, reason = "mapping a file is unsafe: others could truncate it")]

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::{Advice, Mmap};

/// A file's bytes. Weight files must not be truncated while a process has them open: the system
/// kills it with SIGBUS on reading a page that is gone.
#[derive(Debug)]
pub(super) struct Mapping {
    map: Mmap,
}

impl Mapping {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        // SAFETY: the map is private to this type, read-only, and only read through `bytes`. Its
        // contents are checked or copied where they are used, and any byte is a valid `u8`. A
        // writer in another process could change bytes under the borrow; weight files are
        // written once, and replacing one by rename leaves this map's file alone.
        let map = unsafe { Mmap::map(&file)? };
        // Else each sample of the digest reads megabytes ahead. A hint: refusal changes no result.
        let _ = map.advise(Advice::Random);
        Ok(Self { map })
    }

    /// Has the system read a range ahead of its use.
    pub(super) fn will_need(&self, start: usize, len: usize) {
        if len > 0 && start.checked_add(len).is_some_and(|end| end <= self.map.len()) {
            let _ = self.map.advise_range(Advice::WillNeed, start, len);
        }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.map
    }
}
