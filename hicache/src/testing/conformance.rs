//! One suite for all stores: what every implementation of the trait has to do.
//!
//! Each check panics with what went wrong. Nothing depends on time but the order of uses.

use crate::object::ObjectKey;
use crate::store::format::{Header, Section, verify_object};
use crate::store::{BlobStore, Listed, StoreError};
use kv_pool::{CacheKind, ChainHash, Fingerprint, PageTag};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Fingerprint of every [`object`].
pub const FINGERPRINT: Fingerprint = Fingerprint(*b"conformance test");
/// Objects that a reader and two writers pass each other.
const ROUNDS: u8 = 40;

/// Gives a fresh and empty store at each call.
pub type Fresh<'a> = &'a dyn Fn() -> Box<dyn BlobStore>;
/// Drops a store and opens it anew, as the next process would.
pub type Reopen<'a> = &'a dyn Fn(Box<dyn BlobStore>) -> Box<dyn BlobStore>;

/// A key that differs from those of other numbers in its first and in its last byte.
#[must_use]
pub fn key(number: u8) -> ObjectKey {
    let mut chain = [0x5a; 32];
    (chain[0], chain[31]) = (number, number);
    let chain = ChainHash(chain);
    if number.is_multiple_of(2) { ObjectKey::block(chain) } else { ObjectKey::boundary(chain) }
}

/// An object that verifies: sections of three layers, 12 KiB and more.
#[must_use]
pub fn object(key: ObjectKey, seed: u8) -> Vec<u8> {
    let section = |(layer, &kind): (usize, &CacheKind)| Section {
        kind,
        layer: layer as u16,
        rows: 64,
        page_no: 3,
        bytes: 2000 + 777 * layer as u32 + u32::from(seed),
        tag: PageTag([0; 16]),
    };
    let kinds = [CacheKind::C4Kv, CacheKind::C4Index, CacheKind::C128Kv];
    let sections = kinds.iter().enumerate().map(section).collect();
    let mut header = Header { fingerprint: FINGERPRINT, key, tokens: 1024, sections };
    let mut object = vec![0; header.object_bytes() as usize];
    for (position, byte) in object.iter_mut().enumerate() {
        *byte = (position as u8).wrapping_mul(31) ^ (position >> 8) as u8 ^ seed;
    }
    header.seal(&mut object).expect("an object of the right length");
    object
}

/// Every check, on fresh stores.
///
/// # Panics
///
/// If the store does not do what the trait says.
pub fn run(fresh: Fresh<'_>, reopen: Option<Reopen<'_>>) {
    what_is_written_is_read(&*fresh());
    what_is_missing_is_missing(&*fresh());
    another_length_is_an_error(&*fresh());
    what_is_not_whole_is_refused(&*fresh());
    a_later_write_replaces(&*fresh());
    both_parts_of_a_prefix_are_two_objects(&*fresh());
    the_list_is_complete(&*fresh());
    uses_are_ordered(&*fresh());
    many_threads_see_whole_objects(&*fresh());
    if let Some(reopen) = reopen {
        what_was_written_outlives_the_store(fresh(), reopen);
    }
}

fn read(store: &dyn BlobStore, key: &ObjectKey, bytes: usize) -> Vec<u8> {
    let mut into = vec![0xee; bytes];
    store.read(key, &mut into).expect("read an object");
    into
}

fn list(store: &dyn BlobStore) -> BTreeMap<ObjectKey, Listed> {
    let mut all = BTreeMap::new();
    let mut note = |listed: Listed| {
        assert_eq!(all.insert(listed.key, listed), None, "listed twice: {}", listed.key);
    };
    store.list(&mut note).expect("list objects");
    all
}

fn what_is_written_is_read(store: &dyn BlobStore) {
    assert!(!store.name().is_empty());
    for number in 0..4 {
        let (key, object) = (key(number), object(key(number), number));
        assert_eq!(store.size(&key).expect("look for an object"), None);
        store.write(&key, &object).expect("write an object");
        let bytes = store.size(&key).expect("look for an object");
        assert_eq!(bytes, Some(object.len() as u64));
        let found = read(store, &key, object.len());
        assert_eq!(found, object, "object {key} differs");
        verify_object(&found).expect("a whole object");
    }
}

fn what_is_missing_is_missing(store: &dyn BlobStore) {
    let (there, missing) = (key(2), key(4));
    let object = object(there, 0);
    store.write(&there, &object).expect("write an object");
    let is_missing = |result: Result<(), StoreError>| match result {
        Err(StoreError::Missing { key }) => assert_eq!(key, missing, "the error names the object"),
        other => panic!("an object that is not there: {other:?}"),
    };
    is_missing(store.read(&missing, &mut [0; 4096]));
    if store.notes_uses() {
        is_missing(store.touch(&missing));
    }
    store.remove(&missing).expect("remove what is not there");
    store.write(&missing, &object).expect("write an object");
    store.remove(&missing).expect("remove an object");
    is_missing(store.read(&missing, &mut vec![0; object.len()]));
    assert_eq!(store.size(&missing).expect("look for an object"), None);
    assert_eq!(read(store, &there, object.len()), object, "the other object is left alone");
}

fn another_length_is_an_error(store: &dyn BlobStore) {
    let (key, object) = (key(1), object(key(1), 9));
    store.write(&key, &object).expect("write an object");
    for length in [0, 4096, object.len() - 1, object.len() + 1, object.len() + 4096] {
        match store.read(&key, &mut vec![0; length]) {
            Err(StoreError::Length { key: named, found, wanted }) => {
                assert_eq!((named, found, wanted), (key, object.len() as u64, length as u64));
            }
            other => panic!("{length} bytes of an object of {}: {other:?}", object.len()),
        }
    }
    assert_eq!(read(store, &key, object.len()), object);
}

fn what_is_not_whole_is_refused(store: &dyn BlobStore) {
    let (key, object) = (key(1), object(key(1), 0));
    for length in [0, 1, 4095, object.len() - 1] {
        match store.write(&key, &object[..length]) {
            Err(StoreError::NotWhole { key: named, bytes }) => {
                assert_eq!((named, bytes), (key, length as u64));
            }
            other => panic!("{length} bytes are no object: {other:?}"),
        }
    }
    assert!(list(store).is_empty(), "something was written");
}

fn a_later_write_replaces(store: &dyn BlobStore) {
    let key = key(3);
    let (long, short) = (object(key, 1), vec![7; 4096]);
    for bytes in [&long, &short, &long] {
        store.write(&key, bytes).expect("write an object");
        assert_eq!(read(store, &key, bytes.len()), *bytes);
        assert_eq!(list(store)[&key].bytes, bytes.len() as u64);
    }
}

fn both_parts_of_a_prefix_are_two_objects(store: &dyn BlobStore) {
    let chain = ChainHash([9; 32]);
    let (block, boundary) = (ObjectKey::block(chain), ObjectKey::boundary(chain));
    store.write(&block, &[1; 4096]).expect("write a block");
    store.write(&boundary, &[2; 8192]).expect("write a boundary");
    assert_eq!(read(store, &block, 4096), [1; 4096]);
    assert_eq!(read(store, &boundary, 8192), [2; 8192]);
    store.remove(&block).expect("remove a block");
    assert_eq!(list(store).into_keys().collect::<Vec<_>>(), [boundary]);
}

fn the_list_is_complete(store: &dyn BlobStore) {
    assert!(list(store).is_empty(), "a fresh store is empty");
    for number in 0..30 {
        store.write(&key(number), &vec![number; 4096]).expect("write an object");
    }
    for number in 0..10 {
        store.remove(&key(number)).expect("remove an object");
    }
    let all = list(store);
    assert!(all.keys().eq((10..30).map(key).collect::<std::collections::BTreeSet<_>>().iter()));
    assert!(all.values().all(|listed| listed.bytes == 4096 && listed.used > 0));
}

fn uses_are_ordered(store: &dyn BlobStore) {
    let (first, second) = (key(1), key(2));
    store.write(&first, &[1; 4096]).expect("write an object");
    let written = list(store)[&first].used;
    store.write(&second, &[2; 4096]).expect("write an object");
    assert!(list(store)[&second].used >= written, "a later write is an earlier use");
    store.touch(&first).expect("touch an object");
    let all = list(store);
    let is_later = all[&first].used >= all[&second].used;
    assert!(is_later || !store.notes_uses(), "a touch is not a use");
    assert_eq!(read(store, &first, 4096), [1; 4096], "a touch changes nothing else");
}

/// Two writers write the same keys over and over, each with bytes of its own, while a reader looks.
fn many_threads_see_whole_objects(store: &dyn BlobStore) {
    let is_over = AtomicBool::new(false);
    let keys = [key(1), key(2)];
    let is_whole = |key: &ObjectKey| {
        let mut into = vec![0; 64 * 4096];
        match store.read(key, &mut into) {
            Ok(()) => assert!(into.iter().all(|&byte| byte == into[0]), "{key} is of two writes"),
            Err(StoreError::Missing { .. }) => {}
            Err(error) => panic!("read while it is written: {error}"),
        }
    };
    thread::scope(|scope| {
        let write = |writer: u8| {
            for round in 0..ROUNDS {
                let bytes = vec![writer * ROUNDS + round; 64 * 4096];
                for key in &keys {
                    store.write(key, &bytes).expect("write while another one writes");
                }
                if round % 8 == 7 {
                    store.remove(&keys[0]).expect("remove while another one writes");
                }
            }
        };
        let writers = [scope.spawn(move || write(0)), scope.spawn(move || write(1))];
        let reader = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                keys.iter().for_each(is_whole);
            }
        });
        let ended = writers.map(thread::ScopedJoinHandle::join);
        is_over.store(true, Ordering::Relaxed);
        reader.join().expect("the reader sees whole objects");
        ended.into_iter().for_each(|ended| ended.expect("a writer comes to its end"));
    });
    assert!(list(store).values().all(|listed| listed.bytes == 64 * 4096));
    assert!(list(store).contains_key(&keys[1]));
}

fn what_was_written_outlives_the_store(store: Box<dyn BlobStore>, reopen: Reopen<'_>) {
    let objects: Vec<_> = (0..4).map(|number| (key(number), object(key(number), 3))).collect();
    for (key, object) in &objects {
        store.write(key, object).expect("write an object");
    }
    store.remove(&key(0)).expect("remove an object");
    store.touch(&key(1)).expect("touch an object");
    let before = list(&*store);
    let store = reopen(store);
    assert_eq!(list(&*store), before, "objects and uses survive");
    for (key, object) in &objects[1..] {
        assert_eq!(read(&*store, key, object.len()), *object);
    }
}
