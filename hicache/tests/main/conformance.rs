//! The suite of stores on each of them.

use crate::folder::{Folder, LAYOUT, open};
use hicache::store::format::{FormatError, verify_object};
use hicache::store::{BlobStore, FileStore, FileStoreConfig, StoreError};
use hicache::testing::conformance::{self, FINGERPRINT, key, object};
use hicache::testing::{Fault, MemStore};
use std::cell::RefCell;

fn files_conform(direct: bool) {
    let folders = RefCell::new(Vec::new());
    let open_last = || {
        let folders = folders.borrow();
        let dir = <Folder as std::ops::Deref>::deref(folders.last().unwrap()).to_owned();
        let (fingerprint, layout) = (FINGERPRINT, LAYOUT.to_owned());
        FileStore::open(FileStoreConfig { dir, fingerprint, layout, direct }).unwrap()
    };
    let fresh = || -> Box<dyn BlobStore> {
        folders.borrow_mut().push(Folder::new());
        Box::new(open_last())
    };
    let reopen = |store: Box<dyn BlobStore>| -> Box<dyn BlobStore> {
        drop(store);
        Box::new(open_last())
    };
    conformance::run(&fresh, Some(&reopen));
}

#[test]
fn files_conform_through_the_page_cache() {
    files_conform(false);
}

#[test]
fn files_conform_with_direct_io() {
    files_conform(true);
}

#[test]
fn memory_conforms() {
    conformance::run(&|| Box::new(MemStore::default()), None);
}

/// Sees that the suite would notice: a store that loses, tears or mixes up fails it.
#[test]
fn a_store_that_does_not_conform_is_noticed() {
    for fault in [
        Fault::Read,
        Fault::Write,
        Fault::NoSpace,
        Fault::TornWrite { kept_bytes: 5000 },
        Fault::TornRead { kept_bytes: 5000 },
        Fault::FlippedBit { bit: 60_001 },
    ] {
        let run = || {
            let faulty = || -> Box<dyn BlobStore> {
                let store = MemStore::default();
                store.inject(fault);
                Box::new(store)
            };
            conformance::run(&faulty, None);
        };
        assert!(std::panic::catch_unwind(run).is_err(), "{fault:?} went unnoticed");
    }
}

#[test]
fn faults_happen_once_and_are_found_by_verifying() {
    let store = MemStore::new(64 * 1024);
    let (key, bytes) = (key(1), object(key(1), 0));
    let mut into = vec![0; bytes.len()];
    store.inject(Fault::Write);
    assert!(matches!(store.write(&key, &bytes), Err(StoreError::Failed { .. })));
    store.inject(Fault::NoSpace);
    assert!(matches!(store.write(&key, &bytes), Err(StoreError::NoSpace { .. })));
    assert_eq!(store.size(&key).unwrap(), None);
    store.inject(Fault::TornWrite { kept_bytes: 6000 });
    store.write(&key, &bytes).unwrap();
    store.read(&key, &mut into).unwrap();
    assert!(matches!(verify_object(&into), Err(FormatError::Damaged { .. })));
    store.write(&key, &bytes).unwrap();
    store.inject(Fault::TornRead { kept_bytes: 100 });
    store.inject(Fault::FlippedBit { bit: 4096 * 8 + 1 });
    for _ in 0..2 {
        store.read(&key, &mut into).unwrap();
        assert!(verify_object(&into).is_err());
    }
    store.read(&key, &mut into).unwrap();
    assert_eq!((into == bytes, store.faults_waiting()), (true, 0));
    assert!(store.damage(&key, 9999));
    store.read(&key, &mut into).unwrap();
    assert!(verify_object(&into).is_err());
    let other = conformance::key(2);
    assert!(matches!(store.write(&other, &[1; 64 * 1024]), Err(StoreError::NoSpace { .. })));
}

#[test]
fn aligned_buffers_go_around_the_page_cache_or_fall_back() {
    let folder = Folder::new();
    drop(open(&folder));
    let (dir, fingerprint, layout) = (folder.to_owned(), FINGERPRINT, LAYOUT.to_owned());
    let store =
        FileStore::open(FileStoreConfig { dir, fingerprint, layout, direct: true }).unwrap();
    let (key, object) = (key(1), object(key(1), 0));
    // One of these offsets is aligned.
    let mut memory = vec![0; object.len() + 4096];
    let aligned = memory.as_ptr().align_offset(4096);
    for start in [aligned, (aligned + 8) % 4096] {
        let buffer = &mut memory[start..start + object.len()];
        buffer.copy_from_slice(&object);
        store.write(&key, buffer).unwrap();
        buffer.fill(0);
        store.read(&key, buffer).unwrap();
        assert_eq!(buffer, object);
    }
    println!("direct IO: {}", store.is_direct());
}
