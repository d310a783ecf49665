//! The cache tiers: how fast objects come back from host memory and from disk beside a plain copy
//! and a plain read, what lookups and evictions cost, and what it all is to requests of the real
//! server.
//!
//! Arguments: parts (`host`, `disk`, `tree`, `ttft`, `turns`; all by default), `--dir DIR` for what
//! lies on disk (by default in the target folder), `--rounds N`, `--quick` for a look at whether
//! everything works.
//!
//! Rates are compared within one run: both sides take turns, round by round, and medians count.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "figures are the output of a bench")]

#[path = "../../tests/main/e2e/client.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod client;
#[path = "../../tests/main/e2e/cluster.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod cluster;
mod disk;
mod flash;
mod host;
mod pauses;
#[path = "../../tests/main/e2e/prompts.rs"]
mod prompts;
mod report;
mod stream;
mod tree;
mod ttft;
mod turns;

use report::Report;
use rustix::time::{ClockId, clock_gettime};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Instant;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Parts in the order in which they run.
const PARTS: [&str; 5] = ["host", "disk", "tree", "ttft", "turns"];

/// What the command line asks for.
struct Options {
    parts: Vec<&'static str>,
    dir: PathBuf,
    rounds: usize,
    is_quick: bool,
}

impl Options {
    fn read(mut words: impl Iterator<Item = String>) -> Outcome<Self> {
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let mut options = Self { parts: Vec::new(), dir, rounds: 7, is_quick: false };
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word} wants a value"));
            match word.as_str() {
                "--bench" => {} // from cargo
                "--quick" => options.is_quick = true,
                "--dir" => options.dir = PathBuf::from(value()?),
                "--rounds" => options.rounds = value()?.parse::<usize>()?.max(1),
                other => {
                    let part = PARTS.into_iter().find(|part| *part == other);
                    options.parts.push(part.ok_or_else(|| format!("unknown word {other:?}"))?);
                }
            }
        }
        if options.parts.is_empty() {
            options.parts = PARTS.to_vec();
        }
        if options.is_quick {
            options.rounds = 2;
        }
        Ok(options)
    }
}

/// A folder that goes with the part that it was made for.
struct Folder(PathBuf);

impl Folder {
    fn new(parent: &Path, name: &str) -> Outcome<Self> {
        let path = parent.join(format!("dsv4-cache-bench-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left behind is only in the way of nobody.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// When something began: by the clock on the wall, and by what this thread has computed so far.
#[derive(Clone, Copy, Debug)]
struct Begin {
    wall: Instant,
    core_ns: i64,
}

impl Begin {
    fn now() -> Self {
        Self { wall: Instant::now(), core_ns: core_ns() }
    }

    /// Nanoseconds since then, and how many of them this thread had a core.
    fn elapsed_ns(self) -> (f64, f64) {
        let wall = self.wall.elapsed();
        (wall.as_nanos() as f64, (core_ns() - self.core_ns) as f64)
    }
}

fn core_ns() -> i64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

/// The middle one of several values.
fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// The value that a share of all values does not exceed.
fn quantile(values: &[f64], share: f64) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let last = values.len() - 1;
    values[((values.len() as f64 * share) as usize).min(last)]
}

/// SplitMix64: the same numbers in every run.
#[derive(Clone, Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Number below `n`.
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn shuffle<T>(&mut self, values: &mut [T]) {
        for n in (1..values.len()).rev() {
            values.swap(n, self.below(n + 1));
        }
    }
}

fn main() -> Outcome<()> {
    let options = Options::read(std::env::args().skip(1))?;
    std::fs::create_dir_all(&options.dir)?;
    let cores = std::thread::available_parallelism()?;
    println!("{cores} cores; disk parts in {}", options.dir.display());
    let mut report = Report::default();
    for part in &options.parts {
        println!("\n{part}");
        match *part {
            "host" => host::measure(&options, &mut report)?,
            "disk" => disk::measure(&options, &mut report)?,
            "tree" => {
                tree::measure(&options, &mut report)?;
                pauses::measure(&options, &mut report)?;
            }
            "ttft" => ttft::measure(&options, &mut report)?,
            _ => turns::measure(&options, &mut report)?,
        }
    }
    report.table();
    report.figures();
    Ok(())
}
