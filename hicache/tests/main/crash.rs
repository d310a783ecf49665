//! Processes that die while they have a store open, at each place and at any moment.
//!
//! The child is this program again, told by a variable which of the tests here it is to be.

use crate::folder::{Folder, LAYOUT, files, object_files, open, open_as, read_all};
use hicache::ObjectKey;
use hicache::store::format::{Header, Section, verify_object};
use hicache::store::{BlobStore, StoreError, at_rest};
use hicache::testing::conformance::{FINGERPRINT, key, object};
use hicache::testing::{FAILPOINT_VARIABLE, FAILPOINTS};
use kv_pool::{CacheKind, PageTag};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Variable with the folder in which a child works; without it a child's test does nothing.
const FOLDER: &str = "DSV4_TEST_FOLDER";
const SIGABRT: i32 = 6;
const SIGKILL: i32 = 9;
/// Rounds of kills at random moments.
const ROUNDS: u64 = 20;

fn child(test: &str, dir: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(FOLDER, dir).env_remove("RUST_BACKTRACE");
    // An abort must not leave a core file in the tree.
    command.current_dir(dir).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    command
}

/// An object of 2 MiB, so that a kill finds it half written now and then.
fn large(key: ObjectKey, seed: u8) -> Vec<u8> {
    let (kind, tag) = (CacheKind::C4Kv, PageTag([0; 16]));
    let section = Section { kind, layer: 2, rows: 64, page_no: 0, bytes: 1 << 21, tag };
    let (fingerprint, sections) = (FINGERPRINT, vec![section]);
    let mut header = Header { fingerprint, key, tokens: 256, sections };
    let mut bytes = vec![seed; header.object_bytes() as usize];
    header.seal(&mut bytes).expect("an object of the right length");
    bytes
}

/// A child that writes for ever, after its first writes; it does not outlive its test.
struct Writer(Child);

impl Writer {
    fn start(dir: &Path) -> Self {
        let mut writer = Self(child("crash::child_writes_for_ever", dir).spawn().unwrap());
        let mut lines = BufReader::new(writer.0.stdout.take().unwrap()).lines();
        let is_started = lines.any(|line| line.is_ok_and(|line| line.ends_with("started")));
        assert!(is_started, "the child did not get to writing");
        writer
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        assert_eq!(self.0.wait().unwrap().signal(), Some(SIGKILL));
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Passes every failpoint once: opens, replaces 1, writes 4 in a new folder, removes 2.
#[test]
fn child_lives_one_life() {
    let Some(dir) = std::env::var_os(FOLDER) else { return };
    let store = open(Path::new(&dir));
    store.write(&key(1), &object(key(1), 1)).unwrap();
    store.write(&key(4), &object(key(4), 1)).unwrap();
    store.remove(&key(2)).unwrap();
}

/// Writes the same few objects over and over, until it is killed.
#[test]
fn child_writes_for_ever() {
    let Some(dir) = std::env::var_os(FOLDER) else { return };
    let store = open(Path::new(&dir));
    let objects: Vec<_> = (0..10).map(|n| large(key(n % 5), n)).collect();
    for round in 0_u32.. {
        let number = (round % 5) as u8;
        store.write(&key(number), &objects[round as usize % 10]).unwrap();
        if round.is_multiple_of(7) {
            store.remove(&key((number + 1) % 5)).unwrap();
        }
        if round == 5 {
            println!("started");
        }
    }
}

/// What must hold after any death: the store opens, all in it verifies, nothing else is there.
fn survives(dir: &Path, what: &str) {
    let store = open(dir);
    println!("{what}: {} unfinished files", store.leftovers());
    for (key, bytes) in read_all(&store) {
        let header = verify_object(&bytes).unwrap_or_else(|e| panic!("{what}: {key}: {e}"));
        header.check_identity(&FINGERPRINT, &key).unwrap();
    }
    assert_eq!(store.skipped(), 0, "{what}: strange files");
    let unfinished: Vec<_> =
        files(dir).into_iter().filter(|path| path.to_string_lossy().contains(".tmp-")).collect();
    assert!(unfinished.is_empty(), "{what}: {unfinished:?}");
    let bytes = object(key(9), 9);
    store.write(&key(9), &bytes).unwrap();
    store.remove(&key(9)).unwrap();
}

#[test]
fn a_death_at_any_place_leaves_whole_objects() {
    for failpoint in FAILPOINTS {
        let folder = Folder::new();
        // The places at which the layout is written come only in a new folder.
        let is_new = failpoint.starts_with("layout-");
        let (old, kept) = (object(key(1), 0), object(key(3), 0));
        if !is_new {
            let store = open(&folder);
            for (key, bytes) in [(key(1), &old), (key(2), &object(key(2), 0)), (key(3), &kept)] {
                store.write(&key, bytes).unwrap();
            }
            // As if another writer had died before, for the place at which that is removed.
            let beside = object_files(&folder)[0].with_extension("block.tmp-1-1");
            fs::write(beside, b"half").unwrap();
        }
        let child = child("crash::child_lives_one_life", &folder)
            .env(FAILPOINT_VARIABLE, failpoint)
            .output()
            .unwrap();
        assert_eq!(child.status.signal(), Some(SIGABRT), "the child went past {failpoint}");
        survives(&folder, failpoint);
        if is_new {
            continue;
        }
        let all = read_all(&open(&folder));
        let find = |number| all.iter().find(|(found, _)| *found == key(number));
        let find = |number| find(number).map(|(_, bytes)| bytes);
        assert_eq!(find(3), Some(&kept), "{failpoint}: an object that nobody touched");
        let place = FAILPOINTS.iter().position(|name| *name == failpoint).unwrap();
        let renamed = FAILPOINTS.iter().position(|name| *name == "write-renamed").unwrap();
        let first = if place < renamed { old } else { object(key(1), 1) };
        assert_eq!(find(1), Some(&first), "{failpoint}: the old object up to the renaming");
        let fourth = failpoint.starts_with("remove").then(|| object(key(4), 1));
        assert_eq!(find(4), fourth.as_ref(), "{failpoint}: the life ended at its first write");
        assert_eq!(find(2).is_none(), failpoint == "remove-done", "{failpoint}");
    }
}

#[test]
fn a_kill_at_any_moment_leaves_whole_objects() {
    let folder = Folder::new();
    let seed = std::env::var("DSV4_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let mut state: u64 = seed.unwrap_or(1);
    for round in 0..ROUNDS {
        let writer = Writer::start(&folder);
        let Err(error) = open_as(&folder, FINGERPRINT, LAYOUT) else { panic!("two have it") };
        assert!(matches!(error, StoreError::Locked { .. }), "{error}");
        // Some time of our own goes by, of a length that the seed says.
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(round | 1);
        let bytes = vec![round as u8; 1 << 16];
        for _ in 0..(state >> 32) % 2000 {
            std::hint::black_box(kv_pool::digest(&bytes));
        }
        writer.kill();
        survives(&folder, "killed");
    }
}

#[test]
fn a_live_store_is_verified_beside_and_not_pruned() {
    let folder = Folder::new();
    let writer = Writer::start(&folder);
    for _ in 0..20 {
        let mut findings = Vec::new();
        at_rest::verify(&folder, &mut |finding| findings.push(finding.to_string())).unwrap();
        assert_eq!(findings, Vec::<String>::new());
    }
    let config = at_rest::PruneConfig { max_bytes: Some(0), ..at_rest::PruneConfig::default() };
    let error = at_rest::prune(&folder, &config, std::time::SystemTime::now()).unwrap_err();
    let dir = folder.join(FINGERPRINT.to_string());
    let says = format!("{} is in use by another process: stop that one", dir.display());
    assert!(error.to_string().starts_with(&says), "{error}");
    writer.kill();
    let summary = at_rest::prune(&folder, &config, std::time::SystemTime::now()).unwrap();
    assert_eq!(summary.kept_objects, 0);
    assert_eq!(object_files(&folder), Vec::<std::path::PathBuf>::new());
}

/// Fills the store until an object has no room, then makes room.
#[test]
fn child_fills_the_disk() {
    let Some(dir) = std::env::var_os(FOLDER) else { return };
    let dir = Path::new(&dir);
    let store = open(dir);
    let full = (0..=u8::MAX).find_map(|number| {
        let result = store.write(&key(number), &vec![number; 1 << 17]);
        result.err().map(|error| (number, error))
    });
    let (number, error) = full.expect("256 objects are more than there is room for");
    println!("full at {number}: {error:?}");
    assert_eq!(store.size(&key(number)).unwrap(), None);
    assert_eq!(object_files(dir).len(), usize::from(number), "the unfinished file is gone");
    let kept = read_all(&store);
    assert!(kept.iter().all(|(_, bytes)| bytes.iter().all(|&byte| byte == bytes[0])));
    if number > 0 {
        store.remove(&key(0)).unwrap();
        store.write(&key(number), &vec![number; 1 << 17]).unwrap();
    }
    store.write(&key(number), &[1; 4096]).unwrap();
    println!("went on");
}

fn fill_the_disk(shell: &str, wrapper: &[&str], dir: &Path) -> Result<String, String> {
    let mut command = Command::new(wrapper[0]);
    command.args(&wrapper[1..]).args(["sh", "-c", shell, "sh"]).arg(dir);
    command.arg(std::env::current_exe().unwrap());
    command.args(["--exact", "crash::child_fills_the_disk", "--nocapture"]);
    let output = command.env(FOLDER, dir).output().map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(text) } else { Err(format!("{text}{errors}")) }
}

/// On a file system of 1 MiB in a mount namespace of its own. Where that cannot be had the other
/// test of an object without room stands alone, and this one says so.
#[test]
fn a_full_disk_is_no_space_and_the_store_goes_on() {
    let folder = Folder::new();
    let mount = "mount -t tmpfs -o size=1m none \"$1\" || exit 77; shift; exec \"$@\"";
    let wrappers: [&[&str]; 2] =
        [&["unshare", "--mount"], &["unshare", "--mount", "--user", "--map-root-user"]];
    let may = |wrapper: &&[&str]| {
        let probe = "exec mount -t tmpfs none \"$1\"";
        let mut command = Command::new(wrapper[0]);
        command.args(&wrapper[1..]).args(["sh", "-c", probe, "sh"]).arg(&*folder);
        command.output().is_ok_and(|output| output.status.success())
    };
    let Some(wrapper) = wrappers.iter().copied().find(|wrapper| may(wrapper)) else {
        println!("no file system can be mounted here: only the limit of file sizes was tested");
        an_object_without_room_leaves_nothing();
        return;
    };
    let text = fill_the_disk(mount, wrapper, &folder).unwrap();
    assert!(text.contains("NoSpace") && text.contains("went on"), "{text}");
}

/// By the limit of a file's size, which everybody may lower: another error, the same way out.
#[test]
fn an_object_without_room_leaves_nothing() {
    let folder = Folder::new();
    // 64 KiB, in units of 512 bytes; the signal that comes with it is ignored.
    let limit = "shift; trap '' XFSZ; ulimit -f 128; exec \"$@\"";
    let text = fill_the_disk(limit, &["env"], &folder).unwrap();
    assert!(text.contains("full at 0: Io") && text.contains("went on"), "{text}");
}
