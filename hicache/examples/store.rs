//! An object in a folder, damaged on purpose: `cargo run -p hicache --example store`.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "an example shows its results")]

use hicache::ObjectKey;
use hicache::store::format::{Header, Section, verify_object};
use hicache::store::{BlobStore, FileStore, FileStoreConfig, at_rest};
use kv_pool::{CacheKind, Fingerprint, Namespace, PageTag};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = std::env::temp_dir().join(format!("hicache-example-{}", std::process::id()));
    let fingerprint = Fingerprint([1; 16]);
    let layout = "one layer\n".to_owned();
    let store =
        FileStore::open(FileStoreConfig { dir: dir.clone(), fingerprint, layout, direct: true })?;

    let chain = Namespace::new(fingerprint, b"tenant").chain(&[7; 256])[0];
    let key = ObjectKey::block(chain);
    let (kind, tag) = (CacheKind::C4Kv, PageTag([0; 16]));
    let section = Section { kind, layer: 0, rows: 64, page_no: 0, bytes: 37_376, tag };
    let mut header = Header { fingerprint, key, tokens: 256, sections: vec![section] };
    let mut object = vec![42; usize::try_from(header.object_bytes())?];
    header.seal(&mut object)?;
    store.write(&key, &object)?;

    let mut found = vec![0; object.len()];
    store.read(&key, &mut found)?;
    verify_object(&found)?.check_identity(&fingerprint, &key)?;
    println!("{key}: {} bytes verified", found.len());

    found[5000] ^= 1;
    store.write(&key, &found)?;
    drop(store);
    let summary = at_rest::verify(&dir, &mut |finding| println!("{}", finding.problem))?;
    println!("{} of {} damaged", summary.damaged, summary.damaged + summary.good_objects);
    std::fs::remove_dir_all(&dir)?;
    Ok(())
}
