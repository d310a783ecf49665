//! Compiles the CUDA kernels to cubins with a manifest, on a machine without a GPU.
//!
//! A compiled file is kept until its sources, the flags or the compiler change. Register spills and
//! shared memory over the card's limit are errors.

mod elf;
mod manifest;
mod report;

use crate::{python, sh};
use anyhow::{Context as _, Result, bail};
use manifest::{File, Manifest};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;

/// Where the sources are.
const SOURCES: &str = "dsa-kernels/kernels";
/// The header whose hash binds compiled kernels to the Rust code that calls them.
const ABI: &str = "abi.h";
/// Below it, a folder for each architecture.
pub(crate) const OUTPUT: &str = "target/kernels";
/// The compiler, in the version whose output a driver of CUDA 13.0 loads.
const WHEELS: [&str; 4] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
];
/// Only the fused operations that are written are fused: results have the reference's bits.
const FLAGS: [&str; 6] =
    ["-cubin", "-std=c++17", "-O3", "-fmad=false", "-Xptxas=-v", "-Werror=all-warnings"];

/// A card generation that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Arch {
    /// Hopper.
    #[value(name = "sm_90a")]
    Sm90a,
    /// Data-centre Blackwell.
    #[value(name = "sm_100a")]
    Sm100a,
    /// Workstation Blackwell.
    #[value(name = "sm_120a")]
    Sm120a,
}

impl Arch {
    /// All of them.
    pub(crate) const ALL: [Self; 3] = [Self::Sm90a, Self::Sm100a, Self::Sm120a];

    fn number(self) -> &'static str {
        match self {
            Self::Sm90a => "90a",
            Self::Sm100a => "100a",
            Self::Sm120a => "120a",
        }
    }

    fn name(self) -> String {
        format!("sm_{}", self.number())
    }

    /// Most bytes of shared memory that a block may have (CUDA programming guide, table of
    /// technical specifications by compute capability).
    fn shared_bytes_max(self) -> u64 {
        match self {
            Self::Sm90a | Self::Sm100a => 227 * 1024,
            Self::Sm120a => 99 * 1024,
        }
    }
}

/// What is built: the kernels, or one of the two builds for the test of their ordering rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Variant {
    /// The kernels.
    Plain,
    /// No kernel waits for the one before it.
    WithoutWait,
    /// Each block holds back for two milliseconds before it reads or writes.
    Late,
}

impl Variant {
    fn define(self) -> Option<&'static str> {
        match self {
            Self::Plain => None,
            Self::WithoutWait => Some("-DWITHOUT_WAIT"),
            Self::Late => Some("-DLATE_US=2000"),
        }
    }

    /// Below the output of the plain build's name.
    fn folder(self) -> String {
        match self {
            Self::Plain => OUTPUT.to_owned(),
            Self::WithoutWait => format!("{OUTPUT}-without-wait"),
            Self::Late => format!("{OUTPUT}-late"),
        }
    }
}

/// One compilation.
#[derive(Clone, Debug)]
struct Job {
    arch: Arch,
    variant: Variant,
    source: PathBuf,
    hash: u64,
}

/// What `cargo xtask ci` does: everything for all cards, with figures.
pub(crate) fn check() -> Result<()> {
    build(&Arch::ALL, Variant::Plain)
}

/// Compiles all kernels for `archs` and writes a manifest for each.
pub(crate) fn build(archs: &[Arch], variant: Variant) -> Result<()> {
    let started = Instant::now();
    let nvcc = nvcc()?;
    let jobs = jobs(archs, variant, &nvcc)?;
    let files = compile_all(&nvcc, &jobs)?;
    let abi = hash(&std::fs::read(sh::root().join(SOURCES).join(ABI)).context("read the ABI")?);
    let (mut spills, mut findings) = (0, Vec::new());
    for arch in archs {
        let of_arch = jobs.iter().zip(&files).filter(|(job, _)| job.arch == *arch);
        let files: Vec<File> = of_arch.map(|(_, file)| file.clone()).collect();
        let manifest = Manifest { arch: arch.name(), abi, files };
        spills += manifest.kernels().map(|kernel| kernel.spill_bytes).sum::<u64>();
        findings.extend(manifest.findings(arch.shared_bytes_max()));
        let path = folder(*arch, variant).join("manifest.txt");
        std::fs::write(&path, manifest.to_string())
            .with_context(|| format!("write {}", path.display()))?;
        println!("{}: {} kernels", arch.name(), manifest.kernels().count());
    }
    println!("figure kernels.spills {spills} count");
    println!("figure kernels.build_s {:.1} s", started.elapsed().as_secs_f64());
    if !findings.is_empty() {
        bail!("kernels: {}", findings.join("; "));
    }
    Ok(())
}

fn folder(arch: Arch, variant: Variant) -> PathBuf {
    sh::root().join(variant.folder()).join(arch.name())
}

/// `NVCC`, the one on the path, or that of the wheels, which are fetched if they are not there.
fn nvcc() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("NVCC").filter(|path| !path.is_empty()) {
        return Ok(path.into());
    }
    if sh::succeeds(sh::command("nvcc").arg("--version")) {
        return Ok("nvcc".into());
    }
    let nvcc = python::install(&python::ensure()?, "nvcc", &WHEELS)?.join("nvidia/cu13/bin/nvcc");
    if !nvcc.exists() {
        bail!("{} is not there: remove target/nvcc", nvcc.display());
    }
    Ok(nvcc)
}

/// Every source for every card, in the order of cards, then names.
fn jobs(archs: &[Arch], variant: Variant, nvcc: &Path) -> Result<Vec<Job>> {
    let folder = sh::root().join(SOURCES);
    let mut sources = BTreeSet::new();
    let mut shared = sh::output(sh::command(nvcc).arg("--version"))?.into_bytes();
    shared.extend(FLAGS.concat().into_bytes());
    shared.extend(variant.define().unwrap_or_default().bytes());
    for entry in std::fs::read_dir(&folder).with_context(|| format!("list {SOURCES}"))? {
        sources.insert(entry?.path());
    }
    let is_source = |path: &&PathBuf| path.extension().is_some_and(|end| end == "cu");
    for header in sources.iter().filter(|path| !is_source(path)) {
        shared.extend(std::fs::read(header).context("read a header")?);
    }
    let mut jobs = Vec::new();
    for arch in archs {
        for source in sources.iter().filter(is_source) {
            let mut bytes = shared.clone();
            bytes.extend(std::fs::read(source).context("read a source")?);
            jobs.push(Job { arch: *arch, variant, source: source.clone(), hash: hash(&bytes) });
        }
    }
    Ok(jobs)
}

/// Compiles in parallel what is not up to date; results in the order of `jobs`.
fn compile_all(nvcc: &Path, jobs: &[Job]) -> Result<Vec<File>> {
    let next = Mutex::new(0..jobs.len());
    let done: Vec<Mutex<Option<Result<File>>>> = jobs.iter().map(|_| Mutex::new(None)).collect();
    let take = || next.lock().map_or(None, |mut rest| rest.next());
    let workers = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(n) = take() {
                    let file = compile(nvcc, &jobs[n]);
                    if let Ok(mut slot) = done[n].lock() {
                        *slot = Some(file);
                    }
                }
            });
        }
    });
    let result = |slot: Mutex<Option<Result<File>>>| {
        slot.into_inner().ok().flatten().context("a compilation did not end")?
    };
    done.into_iter().map(result).collect()
}

/// One file for one card, or what is there of it.
fn compile(nvcc: &Path, job: &Job) -> Result<File> {
    let folder = folder(job.arch, job.variant);
    std::fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    let stem = job.source.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let (cubin, log) = (folder.join(format!("{stem}.cubin")), folder.join(format!("{stem}.log")));
    let stamp = format!("// {:016x}\n", job.hash);
    let kept = std::fs::read_to_string(&log).ok().filter(|text| text.starts_with(&stamp));
    let text = match kept.filter(|_| cubin.exists()) {
        Some(text) => text,
        None => {
            let text = format!("{stamp}{}", call(nvcc, job, &cubin)?);
            std::fs::write(&log, &text).with_context(|| format!("write {}", log.display()))?;
            text
        }
    };
    let bytes = std::fs::read(&cubin).with_context(|| format!("read {}", cubin.display()))?;
    let mut kernels = report::kernels(&text)?;
    for kernel in &mut kernels {
        let symbol = format!("{}_shared", kernel.name);
        kernel.dynamic_bytes = elf::word(&bytes, &symbol)?.map_or(0, u64::from);
    }
    Ok(File { name: format!("{stem}.cubin"), source: job.hash, bytes: hash(&bytes), kernels })
}

/// Runs the compiler; gives what ptxas reports.
fn call(nvcc: &Path, job: &Job, cubin: &Path) -> Result<String> {
    let number = job.arch.number();
    let mut command = sh::command(nvcc);
    command.args(FLAGS).args(job.variant.define());
    command.arg(format!("-gencode=arch=compute_{number},code=sm_{number}"));
    command.arg("-o").arg(cubin).arg(&job.source);
    let started = Instant::now();
    let output = command.output().with_context(|| format!("start {}", nvcc.display()))?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let name = job.source.file_name().unwrap_or_default().to_string_lossy();
    if !output.status.success() {
        bail!("{name} for sm_{number}: {}\n{text}", output.status);
    }
    println!("compiled {name} for sm_{number} in {:.1} s", started.elapsed().as_secs_f64());
    Ok(text)
}

/// FNV-1a, 64 bits: tells versions apart; it is no defence.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_fnv_1a() {
        assert_eq!(hash(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(hash(b"a"), 0xaf63_dc4c_8601_ec8c);
    }

    #[test]
    fn workstation_blackwell_has_less_shared_memory() {
        assert_eq!(Arch::Sm120a.shared_bytes_max(), 101_376);
        assert_eq!(Arch::Sm90a.shared_bytes_max(), 232_448);
    }
}
