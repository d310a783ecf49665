//! `server cache`: lists, verifies and prunes what workers keep in the folder of
//! `--hicache-storage-dir`.

use crate::config::{CacheCommand, CachePruneArgs};
use hicache::Part;
use hicache::store::StoreError;
use hicache::store::at_rest::{
    self, Finding, PruneConfig, PruneSummary, StoreSummary, VerifySummary,
};
use kv_pool::Fingerprint;
use serde_json::{Value, json};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const GIB: f64 = (1_u64 << 30) as f64;
/// Folders of workers in the folder that the flag names.
const WORKERS: [&str; 2] = ["prefill", "decode"];

/// How a command ended that did what was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheEnd {
    /// Nothing is damaged, as far as it was asked.
    Right,
    /// An object is damaged.
    Damaged,
    /// No object was found damaged, and one could not be read.
    Unreadable,
}

/// A command could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// Nothing there.
    #[error("there is no folder {}", dir.display())]
    NoFolder {
        /// What was given.
        dir: PathBuf,
    },
    /// A file, say.
    #[error("{} is not a folder", dir.display())]
    NotAFolder {
        /// What was given.
        dir: PathBuf,
    },
    /// One layout's store alone.
    #[error(
        "{} is the store of one layout; give the folder that it lies in, {}",
        dir.display(), dir.parent().unwrap_or(dir).display()
    )]
    OneLayout {
        /// What was given.
        dir: PathBuf,
    },
    /// Files of somebody else.
    #[error(
        "{} is no folder of a cache: it has files, and no store is among them; \
         give the folder that --hicache-storage-dir named",
        dir.display()
    )]
    NotACache {
        /// The folder without stores.
        dir: PathBuf,
    },
    /// Everything would go.
    #[error("no store in {} has the layout {keep}, which is to stay: see `server cache ls`", dir.display())]
    NothingToKeep {
        /// The folder.
        dir: PathBuf,
        /// The layout.
        keep: Fingerprint,
    },
    /// Workers run.
    #[error(
        "in use by another process: {}; nothing was removed; \
         stop the worker first, or use --other-layouts alone",
        list(dirs)
    )]
    InUse {
        /// The stores.
        dirs: Vec<PathBuf>,
    },
    /// Of the store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Of the folder itself.
    #[error("look at {}: {source}", dir.display())]
    Look {
        /// The folder.
        dir: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The output has no reader, or no room.
    #[error("write the output: {0}")]
    Output(#[from] io::Error),
}

fn list(dirs: &[PathBuf]) -> String {
    dirs.iter().map(|dir| dir.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Does what was asked and writes what there is to say. `now` is what ages are measured against.
///
/// Verifying holds one object in memory at a time. A reader that has gone ends the output, not the
/// work.
///
/// # Errors
/// [`CacheError`]; a prune that ends so may have removed something, unless a store was in use.
pub fn run(
    command: &CacheCommand,
    now: SystemTime,
    out: &mut dyn Write,
) -> Result<CacheEnd, CacheError> {
    let mut out = Patient { out, gone: false };
    match command {
        CacheCommand::Ls(args) => ls(&args.dir, args.json, now, &mut out),
        CacheCommand::Verify(args) => verify(&args.dir, &mut out),
        CacheCommand::Prune(args) => prune(args, now, &mut out),
    }
}

/// Output whose reader may go, as that of `| head` does.
struct Patient<'a> {
    out: &'a mut dyn Write,
    gone: bool,
}

impl Patient<'_> {
    fn say(&mut self, line: &str) -> io::Result<()> {
        if self.gone {
            return Ok(());
        }
        match writeln!(self.out, "{line}").and_then(|()| self.out.flush()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                self.gone = true;
                Ok(())
            }
            written => written,
        }
    }
}

/// The stores of one worker.
struct WorkerFolder {
    name: &'static str,
    dir: PathBuf,
    stores: Vec<StoreSummary>,
}

/// What a given folder holds: workers' folders, or stores.
fn folders(dir: &Path) -> Result<Vec<WorkerFolder>, CacheError> {
    let look = |source| CacheError::Look { dir: dir.to_owned(), source };
    match std::fs::metadata(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(CacheError::NoFolder { dir: dir.to_owned() });
        }
        Err(error) => return Err(look(error)),
        Ok(found) if !found.is_dir() => {
            return Err(CacheError::NotAFolder { dir: dir.to_owned() });
        }
        Ok(_) => {}
    }
    let of_workers = WORKERS.map(|name| (name, dir.join(name)));
    let there: Vec<_> = of_workers.into_iter().filter(|(_, dir)| dir.is_dir()).collect();
    if !there.is_empty() {
        return there.into_iter().map(|(name, dir)| worker_folder(name, dir)).collect();
    }
    // Without a worker's name if it is called otherwise.
    let own = dir.canonicalize().map_err(look)?;
    let name = WORKERS.into_iter().find(|name| own.ends_with(name)).unwrap_or("-");
    Ok(vec![worker_folder(name, dir.to_owned())?])
}

fn worker_folder(name: &'static str, dir: PathBuf) -> Result<WorkerFolder, CacheError> {
    let stores = at_rest::stores(&dir)?;
    if stores.is_empty() {
        if dir.join("LAYOUT").is_file() {
            return Err(CacheError::OneLayout { dir });
        }
        let look = |source| CacheError::Look { dir: dir.clone(), source };
        if std::fs::read_dir(&dir).map_err(look)?.next().is_some() {
            return Err(CacheError::NotACache { dir });
        }
    }
    Ok(WorkerFolder { name, dir, stores })
}

fn ls(
    dir: &Path,
    as_json: bool,
    now: SystemTime,
    out: &mut Patient<'_>,
) -> Result<CacheEnd, CacheError> {
    let folders = folders(dir)?;
    if as_json {
        out.say(&ls_json(dir, &folders).to_string())?;
        return Ok(CacheEnd::Right);
    }
    let stores = || folders.iter().flat_map(|folder| &folder.stores);
    if stores().next().is_none() {
        out.say(&format!("{} is empty", dir.display()))?;
        return Ok(CacheEnd::Right);
    }
    for line in table(&folders, now) {
        out.say(&line)?;
    }
    let mut layouts: Vec<&StoreSummary> = stores().collect();
    layouts.sort_by_key(|store| store.fingerprint.0);
    layouts.dedup_by_key(|store| store.fingerprint);
    for store in layouts {
        out.say(&format!("\nlayout {}", store.fingerprint))?;
        for line in telling(store.layout.as_deref()) {
            out.say(&format!("  {line}"))?;
        }
    }
    let strange: u64 = stores().map(|store| store.strange).sum();
    if strange > 0 {
        out.say(&format!(
            "\n{} no objects; `server cache verify` names them",
            are(strange, "file")
        ))?;
    }
    Ok(CacheEnd::Right)
}

fn ls_json(dir: &Path, folders: &[WorkerFolder]) -> Value {
    let store = |worker: &str, store: &StoreSummary| {
        let objects: serde_json::Map<_, _> =
            Part::ALL.iter().zip(store.objects).map(|(p, n)| (p.name().into(), n.into())).collect();
        json!({
            "worker": worker,
            "dir": store.dir.to_string_lossy(),
            "fingerprint": store.fingerprint.to_string(),
            "layout": store.layout,
            "objects": objects,
            "bytes": store.bytes,
            "oldest_use_ms": store.oldest_use,
            "newest_use_ms": store.newest_use,
            "leftovers": store.leftovers,
            "strange": store.strange,
            "in_use": store.in_use,
        })
    };
    let stores = folders.iter().flat_map(|f| f.stores.iter().map(|s| store(f.name, s)));
    json!({ "dir": dir.to_string_lossy(), "stores": stores.collect::<Vec<_>>() })
}

const COLUMNS: [&str; 9] = [
    "worker",
    "layout",
    "blocks",
    "boundaries",
    "size",
    "oldest use",
    "newest use",
    "unfinished",
    "in use",
];
/// Columns of text, which begin where their heading does; numbers end there.
const TEXTS: [usize; 3] = [0, 1, 8];

/// One line for each store under its headings, in columns.
fn table(folders: &[WorkerFolder], now: SystemTime) -> Vec<String> {
    let mut rows = vec![COLUMNS.map(str::to_owned)];
    for folder in folders {
        for store in &folder.stores {
            let [blocks, boundaries] = store.objects;
            rows.push([
                folder.name.to_owned(),
                store.fingerprint.to_string(),
                blocks.to_string(),
                boundaries.to_string(),
                size(store.bytes),
                age(store.oldest_use, now),
                age(store.newest_use, now),
                store.leftovers.to_string(),
                if store.in_use { "yes" } else { "no" }.to_owned(),
            ]);
        }
    }
    let width = |n: usize| rows.iter().map(|row| row[n].len()).max().unwrap_or(0);
    let widths: [usize; COLUMNS.len()] = std::array::from_fn(width);
    let line = |row: &[String; COLUMNS.len()]| {
        let cells = row.iter().zip(widths).enumerate().map(|(n, (cell, width))| {
            if TEXTS.contains(&n) { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// The lines of a layout by which a person tells it from others.
fn telling(layout: Option<&str>) -> Vec<String> {
    let Some(layout) = layout else { return vec!["it has no file LAYOUT".to_owned()] };
    let starts = ["numerics ", "layers ", "model ", "tokenizer "];
    let is_telling = |line: &&str| starts.iter().any(|start| line.starts_with(start));
    let lines: Vec<String> = layout.lines().filter(is_telling).map(cut).collect();
    // The first line is the version of the file.
    if lines.is_empty() { layout.lines().skip(1).take(4).map(cut).collect() } else { lines }
}

/// A line without its end, if it is long. A file's bytes move no cursor.
fn cut(line: &str) -> String {
    const CHARS_MAX: usize = 100;
    let mut text: String =
        line.chars().take(CHARS_MAX).map(|c| if c.is_control() { '?' } else { c }).collect();
    if line.chars().nth(CHARS_MAX).is_some() {
        text.push_str("...");
    }
    text
}

fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut number, mut unit) = (bytes as f64, 0);
    while number >= 1024.0 && unit + 1 < UNITS.len() {
        (number, unit) = (number / 1024.0, unit + 1);
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{number:.1} {}", UNITS[unit]) }
}

fn age(used_ms: Option<u64>, now: SystemTime) -> String {
    let Some(used) = used_ms else { return "-".to_owned() };
    let since = now.duration_since(UNIX_EPOCH + Duration::from_millis(used)).unwrap_or_default();
    let seconds = since.as_secs();
    match seconds {
        0..120 => format!("{seconds} s ago"),
        120..7_200 => format!("{} min ago", seconds / 60),
        7_200..172_800 => format!("{} h ago", seconds / 3_600),
        _ => format!("{} d ago", seconds / 86_400),
    }
}

/// A number of things.
fn some(count: u64, thing: &str) -> String {
    if count == 1 { format!("1 {thing}") } else { format!("{count} {thing}s") }
}

/// A number of things, that are something.
fn are(count: u64, thing: &str) -> String {
    format!("{} {}", some(count, thing), if count == 1 { "is" } else { "are" })
}

fn verify(dir: &Path, out: &mut Patient<'_>) -> Result<CacheEnd, CacheError> {
    let mut all = VerifySummary::default();
    for folder in folders(dir)? {
        let mut written = Ok(());
        let mut tell = |finding: Finding| {
            if written.is_ok() {
                written = out.say(&finding.to_string());
            }
        };
        let summary = at_rest::verify(&folder.dir, &mut tell)?;
        written?;
        all = add(all, summary);
    }
    out.say(&verdict(&all))?;
    Ok(match all {
        VerifySummary { damaged: 1.., .. } => CacheEnd::Damaged,
        VerifySummary { unreadable: 1.., .. } => CacheEnd::Unreadable,
        _ => CacheEnd::Right,
    })
}

const fn add(a: VerifySummary, b: VerifySummary) -> VerifySummary {
    VerifySummary {
        stores: a.stores + b.stores,
        good_objects: a.good_objects + b.good_objects,
        good_bytes: a.good_bytes + b.good_bytes,
        damaged: a.damaged + b.damaged,
        unreadable: a.unreadable + b.unreadable,
        strange: a.strange + b.strange,
        leftovers: a.leftovers + b.leftovers,
    }
}

fn verdict(all: &VerifySummary) -> String {
    let mut text = format!(
        "{}: {} right ({}), {} damaged",
        some(all.stores, "store"),
        are(all.good_objects, "object"),
        size(all.good_bytes),
        all.damaged
    );
    if all.unreadable > 0 {
        text.push_str(&format!(", {} could not be read", all.unreadable));
    }
    if all.strange > 0 {
        text.push_str(&format!("; {} not of a store", are(all.strange, "file")));
    }
    if all.leftovers > 0 {
        text.push_str(&format!("; {} unfinished", are(all.leftovers, "file")));
    }
    text
}

fn prune(
    args: &CachePruneArgs,
    now: SystemTime,
    out: &mut Patient<'_>,
) -> Result<CacheEnd, CacheError> {
    let folders = folders(&args.dir)?;
    check_kept(args, &folders)?;
    let config = PruneConfig {
        max_bytes: args.max_size.map(|gib| (gib * GIB) as u64),
        older_than: args.older_than,
        damaged: args.damaged,
        other_layouts_than: args.keep,
        dry_run: args.dry_run,
    };
    // Before anything goes; a worker that starts after this is found by its lock.
    check_in_use(&config, &folders)?;
    for folder in &folders {
        let summary = at_rest::prune(&folder.dir, &config, now)?;
        out.say(&format!("{}: {}", folder.dir.display(), pruned(&summary, args.dry_run)))?;
    }
    Ok(CacheEnd::Right)
}

/// A layout that is not there would let all others go, by a slip of the hand.
fn check_kept(args: &CachePruneArgs, folders: &[WorkerFolder]) -> Result<(), CacheError> {
    let Some(keep) = args.keep else { return Ok(()) };
    let mut stores = folders.iter().flat_map(|folder| &folder.stores);
    if stores.any(|store| store.fingerprint == keep) {
        return Ok(());
    }
    Err(CacheError::NothingToKeep { dir: args.dir.clone(), keep })
}

fn check_in_use(config: &PruneConfig, folders: &[WorkerFolder]) -> Result<(), CacheError> {
    let only_others = config.max_bytes.is_none() && config.older_than.is_none() && !config.damaged;
    let is_left_alone =
        |store: &StoreSummary| only_others && config.other_layouts_than == Some(store.fingerprint);
    let stores = folders.iter().flat_map(|folder| &folder.stores);
    let used = stores.filter(|store| store.in_use && !is_left_alone(store));
    let dirs: Vec<PathBuf> = used.map(|store| store.dir.clone()).collect();
    if dirs.is_empty() { Ok(()) } else { Err(CacheError::InUse { dirs }) }
}

fn pruned(summary: &PruneSummary, dry_run: bool) -> String {
    let mut text = format!(
        "{} {} ({}), {} and {}; {} ({}) {}",
        if dry_run { "would remove" } else { "removed" },
        some(summary.removed_objects, "object"),
        size(summary.removed_bytes),
        some(summary.leftovers, "unfinished file"),
        some(summary.stores, "whole layout"),
        some(summary.kept_objects, "object"),
        size(summary.kept_bytes),
        if dry_run { "would stay" } else { "stay" },
    );
    if summary.stores_left > 0 {
        let left = some(summary.stores_left, "folder");
        text.push_str(&format!("; {left} of other layouts left, for files that are not a store's"));
    }
    if summary.unreadable > 0 {
        text.push_str(&format!(
            "; {} left that could not be read",
            some(summary.unreadable, "object")
        ));
    }
    text
}
