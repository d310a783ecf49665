//! Stores in folders: damage, foreign files, other layouts, locks, and the tools at rest.

use crate::folder::{Folder, LAYOUT, files, object_files, open, open_as, read_all};
use crate::format_cases::{rewritten, says_bytes};
use hicache::store::at_rest::{
    Problem, PruneConfig, PruneSummary, VerifySummary, prune, stores, verify,
};
use hicache::store::format::{FormatError, Header, verify_object};
use hicache::store::{BlobStore, StoreError};
use hicache::testing::conformance::{FINGERPRINT, key, object};
use hicache::{ObjectKey, Part};
use kv_pool::Fingerprint;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const OTHER: Fingerprint = Fingerprint([0xee; 16]);

/// What a tier does with an object: read it, verify it, and see that it is the right one.
fn is_accepted(store: &dyn BlobStore, bytes: usize) -> bool {
    let mut into = vec![0; bytes];
    store.read(&key(1), &mut into).is_ok()
        && verify_object(&into)
            .is_ok_and(|header| header.check_identity(&FINGERPRINT, &key(1)).is_ok())
}

fn names(store: &dyn BlobStore) -> Vec<ObjectKey> {
    read_all(store).into_iter().map(|(key, _)| key).collect()
}

#[test]
fn any_changed_byte_of_a_file_is_found() {
    let folder = Folder::new();
    let store = open(&folder);
    let whole = object(key(1), 0);
    store.write(&key(1), &whole).unwrap();
    let path = &object_files(&folder)[0];
    assert!(is_accepted(&store, whole.len()));
    // Every byte of the fixed part and the entries, ends and middle of each section, the padding.
    let mut places: Vec<usize> = (0..128 + 4 * 32).chain([1000, 4095]).collect();
    let header = Header::decode(&whole).unwrap();
    for (_, place) in header.places() {
        places.extend([place.start, place.start + 1, place.len() / 2 + place.start, place.end - 1]);
    }
    let end = 4096 + header.payload_bytes() as usize;
    places.extend([end, end + 1, whole.len() - 1]);
    for place in places {
        for change in [0x01, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[place] ^= change;
            fs::write(path, &bytes).unwrap();
            assert!(!is_accepted(&store, whole.len()), "byte {place} changed by {change:#x}");
        }
    }
    fs::write(path, &whole).unwrap();
    assert!(is_accepted(&store, whole.len()));
}

#[test]
fn a_file_of_another_length_is_an_error_and_not_listed() {
    let folder = Folder::new();
    let store = open(&folder);
    let whole = object(key(1), 0);
    store.write(&key(1), &whole).unwrap();
    let path = &object_files(&folder)[0];
    for bytes in [0, 1, 4095, whole.len() - 1, whole.len() + 1] {
        let file = File::options().write(true).open(path).unwrap();
        file.set_len(bytes as u64).unwrap();
        let error = store.read(&key(1), &mut vec![0; whole.len()]).unwrap_err();
        let StoreError::Length { found, .. } = error else { panic!("{error}") };
        assert_eq!(found, bytes as u64);
        assert_eq!((read_all(&store), store.skipped()), (Vec::new(), 1));
    }
    for bytes in [whole.len() - 4096, whole.len() + 4096] {
        File::options().write(true).open(path).unwrap().set_len(bytes as u64).unwrap();
        assert!(!is_accepted(&store, whole.len()), "not as long as was asked for");
        assert!(!is_accepted(&store, bytes), "not as long as it says");
    }
}

#[test]
fn a_file_that_says_that_it_is_huge_takes_no_memory() {
    let folder = Folder::new();
    let store = open(&folder);
    store.write(&key(1), &object(key(1), 0)).unwrap();
    let path = &object_files(&folder)[0];
    let payload = 0xf000_0000;
    fs::write(path, rewritten(|bytes| says_bytes(bytes, payload))).unwrap();
    // It is as long as it says, and takes no room.
    File::options().write(true).open(path).unwrap().set_len(payload + 4096).unwrap();
    let mut found = Vec::new();
    let summary = verify(&folder, &mut |finding| found.push(finding.problem)).unwrap();
    assert_eq!((summary.good_objects, summary.damaged), (0, 1));
    let [Problem::Damaged(error)] = &found[..] else { panic!("{found:?}") };
    assert_eq!(error.to_string(), "object of 4026535936 bytes, 268435456 may");
}

#[test]
fn a_folder_that_was_removed_is_made_again() {
    let folder = Folder::new();
    let store = open(&folder);
    let whole = object(key(1), 0);
    store.write(&key(1), &whole).unwrap();
    fs::remove_dir_all(&*folder).unwrap();
    let missing = store.read(&key(1), &mut vec![0; whole.len()]).unwrap_err();
    assert!(matches!(missing, StoreError::Missing { .. }), "{missing}");
    store.write(&key(1), &whole).unwrap();
    assert!(is_accepted(&store, whole.len()));
    let second = open_as(&folder, FINGERPRINT, LAYOUT).unwrap_err();
    assert!(matches!(second, StoreError::Locked { .. }), "{second}");
    let in_use: Vec<bool> = stores(&folder).unwrap().iter().map(|store| store.in_use).collect();
    assert_eq!(in_use, [true], "the new lock is held");
    drop(store);
    assert_eq!(names(&open(&folder)), [key(1)], "and the layout is there");
}

#[test]
fn a_folder_that_another_process_has_made_meanwhile_is_left_to_it() {
    let folder = Folder::new();
    let (first, whole) = (open(&folder), object(key(1), 0));
    first.write(&key(1), &whole).unwrap();
    fs::remove_dir_all(first.dir()).unwrap();
    let second = open(&folder);
    second.write(&key(2), &object(key(2), 0)).unwrap();
    for result in [first.write(&key(1), &whole), first.remove(&key(2))] {
        let error = result.unwrap_err();
        assert!(matches!(error, StoreError::Locked { .. }), "{error}");
    }
    assert_eq!(names(&second), [key(2)]);
    drop(second);
    // It would not know of that object, neither to make room nor when all is to be forgotten.
    for _ in 0..2 {
        let error = first.write(&key(1), &whole).unwrap_err();
        assert!(matches!(error, StoreError::Replaced { .. }), "{error}");
    }
    fs::remove_dir_all(first.dir()).unwrap();
    first.write(&key(1), &whole).unwrap();
    assert_eq!(names(&first), [key(1)]);
}

#[test]
fn a_folder_in_its_place_of_another_version_stays_refused() {
    let folder = Folder::new();
    let store = open(&folder);
    fs::remove_dir_all(store.dir()).unwrap();
    fs::create_dir_all(store.dir()).unwrap();
    fs::write(store.dir().join("LAYOUT"), "dsv4 hicache store 2\nof the future\n").unwrap();
    for _ in 0..2 {
        let error = store.write(&key(1), &object(key(1), 0)).unwrap_err();
        assert!(matches!(error, StoreError::LayoutVersion { .. }), "{error}");
    }
    assert_eq!(object_files(&folder), Vec::<std::path::PathBuf>::new());
}

#[test]
fn what_is_no_plain_file_under_an_objects_name_is_told_at_once() {
    let folder = Folder::new();
    let store = open(&folder);
    let whole = object(key(1), 0);
    store.write(&key(1), &whole).unwrap();
    let path = &object_files(&folder)[0];
    let elsewhere = folder.join("elsewhere");
    fs::write(&elsewhere, &whole).unwrap();
    let make: [&dyn Fn(); 3] = [
        &|| fs::create_dir(path).unwrap(),
        &|| std::os::unix::fs::symlink(&elsewhere, path).unwrap(),
        &|| {
            let (fifo, mode) =
                (rustix::fs::FileType::Fifo, rustix::fs::Mode::from_bits_truncate(0o600));
            rustix::fs::mknodat(rustix::fs::CWD, path, fifo, mode, 0).unwrap();
        },
    ];
    for make in make {
        let _ = fs::remove_file(path);
        let _ = fs::remove_dir(path);
        make();
        let read = store.read(&key(1), &mut vec![0; whole.len()]).unwrap_err();
        assert!(matches!(read, StoreError::NotPlain { .. }), "{read}");
        assert!(matches!(store.touch(&key(1)), Err(StoreError::NotPlain { .. })));
        assert_eq!(store.size(&key(1)).unwrap(), None);
    }
    store.remove(&key(1)).unwrap();
    store.write(&key(1), &whole).unwrap();
    assert!(is_accepted(&store, whole.len()));
}

#[test]
fn an_object_under_another_name_is_found() {
    let folder = Folder::new();
    let store = open(&folder);
    store.write(&key(1), &object(key(3), 0)).unwrap();
    assert!(!is_accepted(&store, object(key(3), 0).len()));
    let mut problems = Vec::new();
    verify(&folder, &mut |finding| problems.push(finding.problem)).unwrap();
    let [Problem::Damaged(FormatError::OtherChain { found, wanted })] = problems[..] else {
        panic!("{problems:?}")
    };
    assert_eq!((found, wanted), (key(3).chain, key(1).chain));
}

#[test]
fn a_folder_belongs_to_one_store() {
    let folder = Folder::new();
    let store = open(&folder);
    let error = open_as(&folder, FINGERPRINT, LAYOUT).unwrap_err();
    assert!(matches!(&error, StoreError::Locked { dir } if dir == store.dir()), "{error}");
    let beside = open_as(&folder, OTHER, LAYOUT).unwrap();
    drop(store);
    open(&folder);
    drop(beside);
}

#[test]
fn another_layout_is_refused_or_reported() {
    let folder = Folder::new();
    let theirs = LAYOUT.replace("01", "02");
    open_as(&folder, OTHER, &theirs).unwrap().write(&key(1), &[1; 4096]).unwrap();
    fs::create_dir(folder.join("something else")).unwrap();
    let store = open(&folder);
    let [other] = store.others() else { panic!("{:?}", store.others()) };
    assert_eq!(other.dir, folder.join(OTHER.to_string()));
    assert_eq!(other.differs, "weights digest 02 there, weights digest 01 here");
    assert_eq!(read_all(&store), [], "the other store's objects are not ours");
    let layout = store.dir().join("LAYOUT");
    drop(store);

    let error = open_as(&folder, FINGERPRINT, &theirs).unwrap_err();
    let StoreError::LayoutDiffers { path, differs } = error else { panic!("{error}") };
    assert_eq!(path, layout);
    assert_eq!(differs, "weights digest 01 there, weights digest 02 here");
    let text = fs::read_to_string(&layout).unwrap();
    for other in [text.replace("store 1", "store 2"), String::new(), "\u{fffd}".repeat(200)] {
        fs::write(&layout, &other).unwrap();
        let error = open_as(&folder, FINGERPRINT, LAYOUT).unwrap_err();
        assert!(matches!(error, StoreError::LayoutVersion { .. }), "{error}");
        assert_eq!(fs::read_to_string(&layout).unwrap(), other, "it is left as it was");
    }
    fs::write(&layout, text).unwrap();
    fs::remove_file(folder.join(OTHER.to_string()).join("LAYOUT")).unwrap();
    assert_eq!(open(&folder).others()[0].differs, "it has no file LAYOUT");
    assert_eq!(object_files(&folder).len(), 1, "the other store's objects are left alone");
}

/// Files that are no objects, in all places; the number of them, and of leftovers.
fn litter(store: &Path) -> (u64, u64) {
    let path = object_files(store)[0].clone();
    let folder = path.parent().unwrap();
    let name = path.file_name().unwrap().to_str().unwrap();
    fs::write(folder.join(format!("{name}.tmp-77-3")), b"half").unwrap();
    fs::write(store.join("LAYOUT.tmp-77-4"), b"half").unwrap();
    fs::write(folder.join("notes.tmp-1"), b"of somebody else").unwrap();
    fs::write(folder.join(name.to_uppercase()), [0; 4096]).unwrap();
    fs::write(store.join(name), [0; 4096]).unwrap();
    fs::write(store.join("README"), b"hello").unwrap();
    fs::create_dir(folder.join(name.replace("boundary", "block"))).unwrap();
    fs::create_dir(store.join("zz")).unwrap();
    fs::create_dir_all(store.join("00")).unwrap();
    fs::write(store.join("00").join(name), [0; 4096]).unwrap();
    std::os::unix::fs::symlink(&path, store.join("00").join("link.block")).unwrap();
    (8, 2)
}

#[test]
fn strange_files_are_neither_listed_nor_touched() {
    let folder = Folder::new();
    let store = open(&folder);
    store.write(&key(1), &object(key(1), 0)).unwrap();
    let dir = store.dir().to_owned();
    drop(store);
    let (strange, leftovers) = litter(&dir);
    let before = files(&folder).len();
    let summary = &stores(&folder).unwrap()[0];
    assert_eq!((summary.strange, summary.leftovers), (strange, leftovers));
    let store = open(&folder);
    assert_eq!(store.leftovers(), leftovers);
    assert_eq!((read_all(&store).len(), store.skipped()), (1, strange));
    assert_eq!(files(&folder).len() as u64, before as u64 - leftovers);
    drop(store);
    let mut problems = Vec::new();
    let summary = verify(&folder, &mut |finding| problems.push(finding.problem)).unwrap();
    assert_eq!((summary.good_objects, summary.strange, summary.damaged), (1, strange, 0));
    assert!(problems.iter().all(|problem| matches!(problem, Problem::Strange)));
    // Somebody else's files stay, and the folders with them.
    let config = PruneConfig { other_layouts_than: Some(OTHER), ..PruneConfig::default() };
    let summary = prune(&folder, &config, SystemTime::now()).unwrap();
    assert_eq!((summary.removed_objects, summary.stores, summary.stores_left), (1, 0, 1));
}

/// Sets an object's last use.
fn used_at(folder: &Path, seconds: u64, number: u8) {
    let chain = key(number).chain.to_string();
    let all = object_files(folder);
    let path = all.iter().find(|path| path.to_string_lossy().contains(&chain)).unwrap();
    let time = UNIX_EPOCH + Duration::from_secs(seconds);
    File::open(path).unwrap().set_modified(time).unwrap();
}

/// Objects 0 to 5, used at 100, 200, .. seconds.
fn filled(folder: &Path) -> u64 {
    let store = open(folder);
    for number in 0..6 {
        store.write(&key(number), &object(key(number), 0)).unwrap();
        used_at(folder, 100 * (u64::from(number) + 1), number);
    }
    object(key(0), 0).len() as u64
}

fn numbers(folder: &Path) -> Vec<u8> {
    let all = read_all(&open(folder));
    (0..6).filter(|&number| all.iter().any(|(found, _)| *found == key(number))).collect()
}

#[test]
fn stores_are_summed_up() {
    let folder = Folder::new();
    let bytes = filled(&folder);
    open_as(&folder, OTHER, "x\n").unwrap();
    let [ours, other] = &stores(&folder).unwrap()[..] else { panic!("two stores") };
    assert_eq!((ours.fingerprint, other.fingerprint), (FINGERPRINT, OTHER));
    assert_eq!((ours.objects, ours.bytes), ([3, 3], 6 * bytes));
    assert_eq!(Part::ALL[0], Part::Block);
    assert_eq!((ours.oldest_use, ours.newest_use), (Some(100_000), Some(600_000)));
    assert_eq!(ours.layout.as_deref(), Some(&*format!("dsv4 hicache store 1\n{LAYOUT}")));
    assert_eq!((other.objects, other.oldest_use), ([0, 0], None));
    let missing = folder.join("missing");
    assert!(matches!(stores(&missing), Err(StoreError::Io { path, .. }) if path == missing));
}

#[test]
fn verifying_finds_what_is_damaged() {
    let folder = Folder::new();
    let bytes = filled(&folder);
    let all = object_files(&folder);
    let mut damaged = fs::read(&all[2]).unwrap();
    damaged[5000] ^= 1;
    fs::write(&all[2], damaged).unwrap();
    File::options().write(true).open(&all[4]).unwrap().set_len(100).unwrap();
    let mut paths = Vec::new();
    let summary = verify(&folder, &mut |finding| paths.push(finding.path)).unwrap();
    paths.sort();
    assert_eq!(paths, [all[2].clone(), all[4].clone()]);
    let (good_objects, good_bytes) = (4, 4 * bytes);
    let wanted = VerifySummary { stores: 1, good_objects, good_bytes, damaged: 2, ..summary };
    assert_eq!(summary, wanted);
    // A header that is right and promises more than there is takes no memory for it.
    let key = key(1);
    let mut header = Header::decode(&object(key, 0)).unwrap();
    let section = header.sections[0];
    header.sections = vec![hicache::store::format::Section { bytes: 60_000, ..section }; 4096];
    let mut huge = vec![0; Header::header_bytes(4096)];
    header.encode_into(&mut huge).unwrap();
    fs::write(&all[1], huge).unwrap();
    let summary = verify(&folder, &mut |_| {}).unwrap();
    assert_eq!((summary.good_objects, summary.damaged), (3, 3));
    let config = PruneConfig { damaged: true, ..PruneConfig::default() };
    let summary = prune(&folder, &config, SystemTime::now()).unwrap();
    assert_eq!((summary.removed_objects, summary.kept_objects), (3, 3));
    assert_eq!(verify(&folder, &mut |_| panic!("a finding")).unwrap().good_objects, 3);
}

#[test]
fn pruning_takes_the_oldest_first() {
    let folder = Folder::new();
    let bytes = filled(&folder);
    let now = UNIX_EPOCH + Duration::from_secs(1000);
    let run = |config: PruneConfig| prune(&folder, &config, now).unwrap();
    let nothing = run(PruneConfig::default());
    let wanted = PruneSummary { kept_objects: 6, kept_bytes: 6 * bytes, ..PruneSummary::default() };
    assert_eq!(nothing, wanted);
    // Object 1 was used at 200 seconds, which is not longer ago than 800.
    let older_than = Some(Duration::from_secs(800));
    let dry = run(PruneConfig { older_than, dry_run: true, ..PruneConfig::default() });
    assert_eq!((dry.removed_objects, dry.kept_objects), (1, 5));
    assert_eq!(numbers(&folder), [0, 1, 2, 3, 4, 5]);
    let real = run(PruneConfig { older_than, ..PruneConfig::default() });
    assert_eq!((real, numbers(&folder)), (dry, vec![1, 2, 3, 4, 5]));
    open(&folder).touch(&key(1)).unwrap();
    let max_bytes = Some(3 * bytes + 1);
    let summary = run(PruneConfig { max_bytes, ..PruneConfig::default() });
    assert_eq!((summary.removed_bytes, summary.kept_bytes), (2 * bytes, 3 * bytes));
    assert_eq!(numbers(&folder), [1, 4, 5]);
    let max_bytes = Some(3 * bytes);
    assert_eq!(run(PruneConfig { max_bytes, ..PruneConfig::default() }).removed_objects, 0);
    let older_than = Some(Duration::MAX);
    assert_eq!(run(PruneConfig { older_than, ..PruneConfig::default() }).removed_objects, 0);
}

#[test]
fn other_layouts_go_with_their_folders() {
    let folder = Folder::new();
    filled(&folder);
    let other = open_as(&folder, OTHER, "x\n").unwrap();
    other.write(&key(1), &object(key(1), 0)).unwrap();
    let ours = open(&folder);
    let wish = PruneConfig { other_layouts_than: Some(FINGERPRINT), ..PruneConfig::default() };
    let now = SystemTime::now();
    let refused = prune(&folder, &wish, now).unwrap_err();
    assert!(matches!(&refused, StoreError::Locked { dir } if dir == other.dir()), "{refused}");
    drop(other);
    // Ours is in use, and not concerned.
    let dry = prune(&folder, &PruneConfig { dry_run: true, ..wish }, now).unwrap();
    assert_eq!(stores(&folder).unwrap().len(), 2);
    let summary = prune(&folder, &wish, now).unwrap();
    assert_eq!((summary.stores, summary.removed_objects), (1, 1));
    assert_eq!(summary, dry);
    assert!(!folder.join(OTHER.to_string()).exists());
    let both = PruneConfig { max_bytes: Some(0), ..wish };
    assert!(matches!(prune(&folder, &both, now), Err(StoreError::Locked { .. })));
    assert_eq!(read_all(&ours).len(), 6, "nothing was removed");
    open_as(&folder, OTHER, "x\n").unwrap();
}

#[test]
fn folders_and_files_are_their_owners_alone() {
    let folder = Folder::new();
    let dir = folder.join("above").join("stores");
    let store = open(&dir);
    store.write(&key(1), &object(key(1), 0)).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let files = files(&dir);
    assert_eq!(files.len(), 3, "an object, the layout and the lock");
    for file in &files {
        assert_eq!(mode(file), 0o600, "{}", file.display());
        // Up to what was there before, which is somebody else's to set.
        for made in file.ancestors().skip(1).take_while(|above| **above != *folder) {
            assert_eq!(mode(made), 0o700, "{}", made.display());
        }
    }
    let theirs = folder.join("theirs");
    fs::create_dir(&theirs).unwrap();
    fs::set_permissions(&theirs, fs::Permissions::from_mode(0o750)).unwrap();
    open(&theirs);
    assert_eq!(mode(&theirs), 0o750);
    assert!(matches!(open_as(&files[0], OTHER, LAYOUT), Err(StoreError::Io { .. })));
}

#[test]
fn looking_whether_a_store_is_in_use_keeps_nobody_out() {
    let folder = Folder::new();
    let in_use = || stores(&folder).unwrap()[0].in_use;
    let store = open(&folder);
    assert!(in_use() && in_use());
    assert!(matches!(open_as(&folder, FINGERPRINT, LAYOUT), Err(StoreError::Locked { .. })));
    drop(store);
    assert!(!in_use());
    std::thread::scope(|scope| {
        let looking = scope.spawn(|| (0..2000).for_each(|_| drop(stores(&folder).unwrap())));
        while !looking.is_finished() {
            drop(open(&folder));
        }
    });
}

/// What is no file is not waited for, and what is a link is not followed.
#[test]
fn pipes_and_links_in_place_of_a_stores_own_files_are_refused() {
    for name in ["LAYOUT", "LOCK"] {
        for kind in ["pipe", "link"] {
            let folder = Folder::new();
            let dir = open(&folder).dir().to_owned();
            let path = dir.join(name);
            fs::remove_file(&path).unwrap();
            let elsewhere = folder.join("elsewhere");
            if kind == "pipe" {
                let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
                assert!(made.success());
            } else {
                std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
            }
            let error = open_as(&folder, FINGERPRINT, LAYOUT).expect_err("it is no file");
            assert!(matches!(error, StoreError::Io { .. }), "{name}, {kind}: {error}");
            assert!(!elsewhere.exists(), "a link was followed");
            let listed = stores(&folder).expect_err("it is no file");
            assert!(listed.to_string().contains(name), "{name}, {kind}: {listed}");
        }
    }
}

#[test]
fn findings_cannot_write_to_a_terminal() {
    let folder = Folder::new();
    let dir = open(&folder).dir().to_owned();
    fs::write(dir.join("\u{1b}[31mred\n0 damaged"), "x").unwrap();
    let mut lines = Vec::new();
    verify(&folder, &mut |finding| lines.push(finding.to_string())).unwrap();
    assert_eq!(lines.len(), 1);
    assert!(!lines[0].chars().any(char::is_control), "{:?}", lines[0]);
    assert!(lines[0].contains("\\u{1b}[31mred\\n0 damaged"), "{}", lines[0]);
}

#[test]
fn folders_that_others_may_write_are_named() {
    let folder = Folder::new();
    let store = open(&folder);
    let dir = store.dir().to_owned();
    assert_eq!(store.exposed(), None);
    drop(store);
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
    assert_eq!(open(&folder).exposed(), Some(&*dir));
}
