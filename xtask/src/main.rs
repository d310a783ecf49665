//! Checks, tests, benches and release tasks: `cargo xtask --help`.

#![forbid(unsafe_code)]
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command-line tool talks on its standard streams"
)]

mod ab;
mod bench;
mod browser;
mod ci;
mod cpu_peers;
mod debian;
mod docs;
mod etcd;
mod external;
mod fences;
mod hooks;
mod kernels;
mod lex;
mod metadata;
mod moto;
mod node;
mod peers;
mod python;
mod sh;
mod test;
mod tidy;
mod ucx;
mod unsafe_audit;
mod versions;

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// Tasks of this workspace.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Formatting, tidy, fences, versions, clippy, each crate alone.
    Check,
    /// Rules about the text of the tree.
    Tidy,
    /// Edges between crates, unsafe code, IO-free cores; licences where cargo-deny is installed.
    Fences,
    /// Tests, by layer.
    Test {
        /// Layer to run.
        #[arg(value_enum, default_value_t = test::Layer::All)]
        layer: test::Layer,
        /// Seed of randomised tests.
        #[arg(long)]
        seed: Option<u64>,
        /// Requests with every fault on; layers `sim` and `faults` only.
        #[arg(long)]
        requests: Option<u64>,
        /// Requests whose client hangs up; layer `faults` only.
        #[arg(long)]
        aborts: Option<u64>,
        /// How pages travel: shm, tcp or ucx; layer `faults` only.
        #[arg(long)]
        transport: Option<String>,
        /// Use `cargo test` even where cargo-nextest is installed.
        #[arg(long)]
        plain: bool,
    },
    /// Benches; writes a record.
    Bench {
        #[command(subcommand)]
        compare: Option<BenchTask>,
        /// Benches to run.
        #[arg(value_enum, default_value_t = bench::Suite::All)]
        suite: bench::Suite,
        /// Leave NIXL and Mooncake out of the suite transfer.
        #[arg(long)]
        no_peers: bool,
        /// Set llama.cpp and transformers beside the suite engine: 6 GB of packages and models.
        #[arg(long)]
        peers: bool,
        /// Only see whether the suite transfer works: few pages, one round, no record.
        #[arg(long)]
        quick: bool,
    },
    /// The corruption lab over our own server: twelve cells of the mini model.
    Ab {
        /// Short prompts: 320 to 640 tokens, under ten minutes.
        #[arg(long, conflicts_with = "faults")]
        quick: bool,
        /// Historical faults in a test build, with the protection off and on.
        #[arg(long)]
        faults: bool,
        /// More arguments for `ab run` or `ab faults`.
        #[arg(last = true)]
        more: Vec<String>,
    },
    /// Documentation with warnings as errors.
    Docs,
    /// A crate outside of the workspace that uses each library.
    External,
    /// Versions and changelogs.
    Versions {
        #[command(subcommand)]
        task: VersionsTask,
    },
    /// Unsafe code against unsafe.toml.
    UnsafeAudit {
        /// Write unsafe.toml from the tree.
        #[arg(long)]
        bless: bool,
    },
    /// Makes .venv with the Python client for the end-to-end tests and prints its interpreter.
    Python,
    /// CUDA kernels.
    Kernels {
        #[command(subcommand)]
        task: KernelsTask,
    },
    /// Installs the git hook.
    Hooks,
    /// What the git hook runs.
    PreCommit,
    /// Everything, as on the CI machine.
    Ci,
}

#[derive(Debug, Subcommand)]
enum BenchTask {
    /// Ratios of two records.
    Compare {
        /// Record file, or its name below bench/record.
        a: PathBuf,
        /// The same for the newer one.
        b: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
enum VersionsTask {
    /// Checks them.
    Check,
}

#[derive(Debug, Subcommand)]
enum KernelsTask {
    /// Compiles them to target/kernels; no GPU is needed.
    Build {
        /// Cards to compile for.
        #[arg(long, value_enum, value_delimiter = ',', default_values_t = kernels::Arch::ALL)]
        arch: Vec<kernels::Arch>,
        /// Kernels, or a build for the test of their order (to target/kernels-VARIANT).
        #[arg(long, value_enum, default_value_t = kernels::Variant::Plain)]
        variant: kernels::Variant,
    },
}

fn main() -> ExitCode {
    match perform(Arguments::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn perform(task: Task) -> Result<()> {
    match task {
        Task::Check => ci::check(),
        Task::Tidy => tidy::run(),
        Task::Fences => fences::run(),
        Task::Test { layer, seed, requests, aborts, transport, plain } => {
            let runner = if plain { test::Runner::Cargo } else { test::Runner::Installed };
            test::run(layer, test::Numbers { seed, requests, aborts, transport }, runner)
        }
        Task::Bench { compare: Some(BenchTask::Compare { a, b }), .. } => bench::compare(&a, &b),
        Task::Bench { compare: None, suite, no_peers, peers, quick } => {
            let extent =
                bench::Extent { has_peers: !no_peers, has_engine_peers: peers, is_quick: quick };
            bench::run(suite, extent)
        }
        Task::Ab { faults: true, more, .. } => ab::run(ab::Plan::Faults, &more),
        Task::Ab { quick: true, more, .. } => ab::run(ab::Plan::Quick, &more),
        Task::Ab { more, .. } => ab::run(ab::Plan::Full, &more),
        Task::Docs => docs::run(),
        Task::External => external::run(),
        Task::Versions { task: VersionsTask::Check } => versions::check(),
        Task::UnsafeAudit { bless } => unsafe_audit::run(bless),
        Task::Python => {
            println!("{}", python::ensure()?.display());
            Ok(())
        }
        Task::Kernels { task: KernelsTask::Build { arch, variant } } => {
            kernels::build(&arch, variant)
        }
        Task::Hooks => hooks::install(),
        Task::PreCommit => hooks::pre_commit(),
        Task::Ci => ci::run(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn bench_takes_a_suite_or_compare() {
        let parse = |line: &[&str]| Arguments::try_parse_from(line);
        assert!(parse(&["xtask", "bench"]).is_ok());
        assert!(parse(&["xtask", "bench", "kernels"]).is_ok());
        assert!(parse(&["xtask", "bench", "compare", "a", "b"]).is_ok());
        assert!(parse(&["xtask", "bench", "transfer", "--no-peers", "--quick"]).is_ok());
        assert!(parse(&["xtask", "bench", "nothing"]).is_err());
        assert!(parse(&["xtask", "kernels", "build", "--arch", "sm_90a,sm_120a"]).is_ok());
        assert!(parse(&["xtask", "kernels", "build", "--arch", "sm_75"]).is_err());
        assert!(parse(&["xtask", "ab", "--faults", "--", "--only", "early_read"]).is_ok());
        assert!(parse(&["xtask", "ab", "--faults", "--quick"]).is_err());
        assert!(parse(&["xtask", "test", "sim", "--seed", "7"]).is_ok());
        assert!(parse(&["xtask", "test", "sim", "--requests", "100000"]).is_ok());
        assert!(parse(&["xtask", "test", "faults", "--aborts", "9", "--transport", "tcp"]).is_ok());
    }
}
