//! `server cache`: the real program over folders of stores.

use hicache::ObjectKey;
use hicache::store::format::{Header, Section};
use hicache::store::{BlobStore, FileStore, FileStoreConfig};
use kv_pool::{CacheKind, ChainHash, Fingerprint, PageTag};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

const OURS: Fingerprint = Fingerprint([0xaa; 16]);
const OTHER: Fingerprint = Fingerprint([0xbb; 16]);
/// Bytes of an object with one small section: header and payload.
const OBJECT: u64 = 8192;

/// A folder that goes with its test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("dsv4-at-rest-test-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left behind is in nobody's way.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// How a command ended and what it said.
struct Said {
    code: i32,
    out: String,
    error: String,
}

/// Runs `server cache` with flags, the folder last.
fn cache(flags: &[&str], dir: &Path) -> Said {
    let mut command = Command::new(env!("CARGO_BIN_EXE_server"));
    let output = command.arg("cache").args(flags).arg(dir).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Said {
        code: output.status.code().unwrap(),
        out: text(output.stdout),
        error: text(output.stderr),
    }
}

fn open(dir: &Path, fingerprint: Fingerprint) -> FileStore {
    let layout =
        format!("layout schema 1\nnumerics official, index keys fp4\nmodel type {fingerprint}\n");
    FileStore::open(FileStoreConfig { dir: dir.to_owned(), fingerprint, layout, direct: false })
        .unwrap()
}

/// Writes the block or the boundary of a prefix that `number` names.
fn write(store: &FileStore, fingerprint: Fingerprint, key: ObjectKey) {
    let section = Section {
        kind: CacheKind::C4Kv,
        layer: 3,
        rows: 64,
        page_no: 0,
        bytes: 4000,
        tag: PageTag([0; 16]),
    };
    let mut header = Header { fingerprint, key, tokens: 256, sections: vec![section] };
    let mut object = vec![key.chain.0[0]; header.object_bytes() as usize];
    object[8096..].fill(0);
    header.seal(&mut object).unwrap();
    store.write(&key, &object).unwrap();
}

fn block(number: u8) -> ObjectKey {
    ObjectKey::block(ChainHash([number; 32]))
}

/// A prefill worker's store with three blocks and a boundary, and a decode worker's with one block.
fn two_workers(dir: &Path) {
    let store = open(&dir.join("prefill"), OURS);
    for number in 1..=3 {
        write(&store, OURS, block(number));
    }
    write(&store, OURS, ObjectKey::boundary(ChainHash([3; 32])));
    write(&open(&dir.join("decode"), OURS), OURS, block(1));
}

fn object_path(dir: &Path, worker: &str, number: u8) -> PathBuf {
    let chain = ChainHash([number; 32]).to_string();
    dir.join(worker).join(OURS.to_string()).join(&chain[..2]).join(format!("{chain}.block"))
}

fn flip_byte(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    bytes[5000] ^= 1;
    fs::write(path, bytes).unwrap();
}

/// All files below a folder with their lengths, in order.
fn files(dir: &Path) -> Vec<(PathBuf, u64)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        match entry.file_type().unwrap().is_dir() {
            true => all.extend(files(&entry.path())),
            false => all.push((entry.path(), entry.metadata().unwrap().len())),
        }
    }
    all.sort();
    all
}

fn blocks_of(dir: &Path, worker: &str) -> u64 {
    let found: Value = serde_json::from_str(&cache(&["ls", "--json"], dir).out).unwrap();
    let stores = found["stores"].as_array().unwrap().iter();
    let mine = stores.filter(|store| store["worker"] == worker);
    mine.map(|store| store["objects"]["block"].as_u64().unwrap()).sum()
}

#[test]
fn a_folder_is_shown_to_people_and_to_machines() {
    let dir = Folder::new();
    two_workers(&dir.0);
    let held = open(&dir.0.join("decode"), OURS);
    let said = cache(&["ls"], &dir.0);
    assert_eq!((said.code, &*said.error), (0, ""));
    let lines: Vec<Vec<&str>> =
        said.out.lines().map(|line| line.split_whitespace().collect()).collect();
    let ours = OURS.to_string();
    assert_eq!(lines[1][..6], ["prefill", &ours, "3", "1", "32.0", "KiB"], "{}", said.out);
    assert_eq!(lines[2][..6], ["decode", &ours, "1", "0", "8.0", "KiB"], "{}", said.out);
    assert_eq!((lines[1].last(), lines[2].last()), (Some(&"no"), Some(&"yes")), "{}", said.out);
    assert_eq!(said.out.matches("numerics official, index keys fp4").count(), 1, "{}", said.out);

    let said = cache(&["ls", "--json"], &dir.0);
    let found: Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!(said.out.lines().count(), 1);
    let prefill = &found["stores"][0];
    assert_eq!(prefill["objects"], serde_json::json!({"block": 3, "boundary": 1}));
    assert_eq!(prefill["bytes"], 4 * OBJECT);
    assert_eq!((&prefill["in_use"], &found["stores"][1]["in_use"]), (&false.into(), &true.into()));
    assert!(prefill["oldest_use_ms"].as_u64() <= prefill["newest_use_ms"].as_u64());
    // Whoever looked has left the lock.
    drop(held);
    drop(open(&dir.0.join("decode"), OURS));

    let one = cache(&["ls"], &dir.0.join("decode"));
    assert!(one.out.contains("\ndecode ") && !one.out.contains("prefill"), "{}", one.out);
}

#[test]
fn damaged_objects_are_named_and_then_removed() {
    let dir = Folder::new();
    two_workers(&dir.0);
    let said = cache(&["verify"], &dir.0);
    assert_eq!(said.out, "2 stores: 5 objects are right (40.0 KiB), 0 damaged\n");
    assert_eq!((said.code, &*said.error), (0, ""));

    let (flipped, cut) = (object_path(&dir.0, "prefill", 2), object_path(&dir.0, "decode", 1));
    flip_byte(&flipped);
    fs::OpenOptions::new().write(true).open(&cut).unwrap().set_len(4096).unwrap();
    let said = cache(&["verify"], &dir.0);
    assert_eq!(said.code, 1, "{}", said.out);
    let lines: Vec<&str> = said.out.lines().collect();
    assert!(lines[0].starts_with(&format!("{}: ", flipped.display())), "{}", lines[0]);
    assert!(lines[0].contains(" of layer 3, page 0, is damaged: tag "), "{}", lines[0]);
    let why = "object has 4096 bytes, its header says 8192";
    assert_eq!(lines[1], format!("{}: {why}", cut.display()));
    assert_eq!(lines[2], "2 stores: 3 objects are right (24.0 KiB), 2 damaged");

    let said = cache(&["prune", "--damaged"], &dir.0);
    assert_eq!((said.code, &*said.error), (0, ""));
    assert_eq!(said.out.matches("removed 1 object (").count(), 2, "{}", said.out);
    assert!(!flipped.exists() && !cut.exists());
    assert_eq!(cache(&["verify"], &dir.0).code, 0);
}

#[test]
fn objects_go_by_age_and_by_room() {
    let dir = Folder::new();
    two_workers(&dir.0);
    let old = SystemTime::now() - Duration::from_secs(8 * 86_400);
    let file = fs::File::open(object_path(&dir.0, "prefill", 1)).unwrap();
    file.set_modified(old).unwrap();
    let said = cache(&["prune", "--older-than", "9d"], &dir.0);
    assert_eq!((said.code, blocks_of(&dir.0, "prefill")), (0, 3), "{}", said.out);
    let said = cache(&["prune", "--older-than", "7d"], &dir.0);
    let path = dir.0.join("prefill");
    let line = format!(
        "{}: removed 1 object (8.0 KiB), 0 unfinished files and 0 whole layouts; \
         3 objects (24.0 KiB) stay\n",
        path.display()
    );
    assert!(said.out.starts_with(&line), "{}", said.out);
    assert!(!object_path(&dir.0, "prefill", 1).exists());

    // Room for one object of each worker.
    let said = cache(&["prune", "--max-size", "0.00001"], &dir.0);
    assert_eq!(said.code, 0, "{}", said.error);
    assert_eq!(files(&path).iter().filter(|(_, bytes)| *bytes == OBJECT).count(), 1);
    assert_eq!(blocks_of(&dir.0, "decode"), 1);
}

#[test]
fn other_layouts_go_while_the_kept_one_is_in_use() {
    let dir = Folder::new();
    two_workers(&dir.0);
    write(&open(&dir.0.join("prefill"), OTHER), OTHER, block(9));
    let _held = open(&dir.0.join("prefill"), OURS);
    let (ours, unknown) = (OURS.to_string(), Fingerprint([0xcc; 16]).to_string());

    let before = files(&dir.0);
    let said = cache(&["prune", "--other-layouts", "--keep", &unknown], &dir.0);
    assert_eq!((said.code, &*said.out), (2, ""));
    assert!(said.error.contains(&format!("has the layout {unknown}, which is to stay")));
    assert_eq!(files(&dir.0), before);

    let said = cache(&["prune", "--other-layouts", "--keep", &ours], &dir.0);
    assert_eq!((said.code, &*said.error), (0, ""));
    assert!(said.out.contains("removed 1 object (8.0 KiB), 0 unfinished files and 1 whole layout"));
    assert!(!dir.0.join("prefill").join(OTHER.to_string()).exists());
    assert_eq!(blocks_of(&dir.0, "prefill"), 3);
}

#[test]
fn a_store_in_use_is_refused_by_name_before_anything_goes() {
    let dir = Folder::new();
    two_workers(&dir.0);
    // The second one of two.
    let held = open(&dir.0.join("decode"), OURS);
    let before = files(&dir.0);
    for flags in [&["prune", "--max-size", "0"][..], &["prune"], &["prune", "--damaged"]] {
        let said = cache(flags, &dir.0);
        assert_eq!((said.code, &*said.out), (2, ""), "{flags:?}");
        let name = held.dir().display();
        assert!(
            said.error.contains(&format!("in use by another process: {name}; ")),
            "{}",
            said.error
        );
        assert_eq!(files(&dir.0), before, "{flags:?}");
    }
    assert_eq!(cache(&["verify"], &dir.0).code, 0, "reading needs no lock");
}

#[test]
fn a_dry_run_says_what_would_go_and_removes_nothing() {
    let dir = Folder::new();
    two_workers(&dir.0);
    write(&open(&dir.0.join("prefill"), OTHER), OTHER, block(9));
    let unfinished = object_path(&dir.0, "decode", 1).with_extension("block.tmp-1-1");
    fs::write(&unfinished, "half").unwrap();
    let before = files(&dir.0);
    let keep = OURS.to_string();
    let said = cache(
        &["prune", "--dry-run", "--max-size", "0", "--other-layouts", "--keep", &keep],
        &dir.0,
    );
    assert_eq!((said.code, &*said.error), (0, ""));
    assert!(said.out.contains("would remove 5 objects (40.0 KiB), 0 unfinished files and 1 whole layout; 0 objects (0 B) would stay"), "{}", said.out);
    assert!(
        said.out.contains("would remove 1 object (8.0 KiB), 1 unfinished file and"),
        "{}",
        said.out
    );
    assert_eq!(files(&dir.0), before);
}

#[test]
fn folders_that_are_no_cache_are_refused_and_empty_ones_are_not() {
    let dir = Folder::new();
    for flags in [&["ls"][..], &["verify"], &["prune", "--max-size", "0"]] {
        let said = cache(flags, &dir.0);
        assert_eq!((said.code, &*said.error), (0, ""), "{flags:?}");
    }
    assert_eq!(cache(&["ls"], &dir.0).out, format!("{} is empty\n", dir.0.display()));

    let (nothing, file, store) = (dir.0.join("x"), dir.0.join("notes"), dir.0.join("cache"));
    fs::write(&file, "mine").unwrap();
    write(&open(&store, OURS), OURS, block(1));
    let of_one = store.join(OURS.to_string());
    let foreign = dir.0.join("photos");
    fs::create_dir(&foreign).unwrap();
    fs::write(foreign.join("cat"), "mine").unwrap();
    for (given, says) in [
        (&nothing, "error: there is no folder "),
        (&file, "notes is not a folder"),
        (&foreign, "photos is no folder of a cache: "),
        (&of_one, "is the store of one layout; give the folder that it lies in, "),
    ] {
        for flags in [&["ls"][..], &["verify"], &["prune", "--max-size", "0"]] {
            let said = cache(flags, given);
            assert_eq!((said.code, &*said.out), (2, ""), "{flags:?} {}", given.display());
            assert!(said.error.contains(says), "{}", said.error);
            assert_eq!(said.error.lines().count(), 1, "{}", said.error);
        }
    }
    assert!(foreign.join("cat").exists());
    for flags in [&["prune", "--older-than", "soon"][..], &["prune", "--other-layouts"], &["mend"]]
    {
        assert_eq!(cache(flags, &store).code, 2, "{flags:?}");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let dir = Folder::new();
    two_workers(&dir.0);
    let script = format!(
        "{{ '{}' cache ls '{}'; echo $? >&2; }} | true",
        env!("CARGO_BIN_EXE_server"),
        dir.0.display()
    );
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "0\n");
}
