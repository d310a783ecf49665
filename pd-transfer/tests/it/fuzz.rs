//! The targets of fuzzing on committed corpora, and a short seeded mutation of them.

use pd_transfer::testing::Rng;
use pd_transfer::testing::fuzz::{TARGETS, endpoint_calls, mutate, seeds};
use pd_transfer::testing::mutation::{Mutation, without};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const CORPUS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/corpus");
/// Mutations of each target, unless `DSV4_FUZZ_RUNS` says another number.
const RUNS: u64 = 20_000;
/// Targets over sockets take as long as a link takes.
const LINK_RUNS: u64 = 500;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// The files of a target, in the order of their names.
fn corpus(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(CORPUS).join(target);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{folder:?}: {e}"));
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
}

#[test]
fn nothing_in_the_corpora_is_a_finding() {
    for (name, target) in TARGETS {
        let files = corpus(name);
        assert!(!files.is_empty(), "{name} has no corpus");
        for (path, bytes) in files {
            println!("{}", path.display());
            target(&bytes);
        }
    }
}

/// The committed files are those of the generator, findings beside. `DSV4_BLESS=1` writes them.
#[test]
fn the_corpora_hold_what_the_generator_makes() {
    for (name, _) in TARGETS {
        let folder = Path::new(CORPUS).join(name);
        for (n, bytes) in seeds(name).into_iter().enumerate() {
            let path = folder.join(format!("seed-{n:02}"));
            if std::env::var_os("DSV4_BLESS").is_some() {
                std::fs::create_dir_all(&folder).unwrap();
                std::fs::write(&path, &bytes).unwrap();
            }
            let found = std::fs::read(&path).unwrap_or_else(|e| panic!("{path:?}: {e}"));
            assert!(found == bytes, "{path:?} is another input; DSV4_BLESS=1 writes it");
        }
    }
}

#[test]
fn no_mutation_of_the_corpora_is_a_finding() {
    let seed = number("DSV4_TEST_SEED").unwrap_or(1);
    for (name, target) in TARGETS {
        let inputs: Vec<Vec<u8>> = corpus(name).into_iter().map(|(_, bytes)| bytes).collect();
        let usual = if name.ends_with("_link") { LINK_RUNS } else { RUNS };
        let mut rng = Rng::new(seed);
        let (start, runs) = (Instant::now(), number("DSV4_FUZZ_RUNS").unwrap_or(usual));
        for run in 0..runs {
            let input = mutate(&mut rng, &inputs);
            let outcome = std::panic::catch_unwind(|| target(&input));
            let Err(panic) = outcome else { continue };
            println!("{name}, seed {seed}, run {run}: put this into tests/corpus/{name}/");
            println!("{input:02x?}");
            std::panic::resume_unwind(panic);
        }
        let each = start.elapsed().checked_div(runs as u32).unwrap_or(Duration::ZERO);
        println!("{name}: {runs} mutations, {each:?} each");
    }
}

/// Runs mutated lists of calls without a guard; whether one of them is a finding.
fn is_found(removed: Mutation) -> bool {
    let inputs = seeds("endpoint_calls");
    let mut rng = Rng::new(1);
    (0..RUNS).any(|_| {
        let input = mutate(&mut rng, &inputs);
        std::panic::catch_unwind(|| without(&[removed], || endpoint_calls(&input))).is_err()
    })
}

#[test]
fn calls_without_the_wait_for_own_gets_are_a_finding() {
    assert!(is_found(Mutation::DrainProof));
}
