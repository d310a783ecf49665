//! Times the GPU kernels: `figure OP.CASE VALUE us` is the median of replays of a graph that holds
//! the same operation over several input sets, divided by their number.
//!
//! `.of_floor` is the time that the bytes (4.3 TB/s, as a copy moves on an H200) or the products
//! (790 BF16, 1,580 FP8 TFLOP/s) need at least, over the time; `.vs_peer` the time over that of a
//! public kernel, from the file that `DSA_PEERS` names (lines `NAME VALUE`, made by
//! `bench/peers/kernel_tables.py` from the peers' own run). Without a GPU there is one line.

#![expect(clippy::print_stdout, reason = "a bench prints figures")]

mod cases {
    pub(crate) mod attend;
    pub(crate) mod index;
    pub(crate) mod pages;
    pub(crate) mod rows;
}

use dsa_kernels::cuda::{CudaDevice, CudaKernels};
use dsa_kernels::testing::Rng;
use dsa_kernels::{Device, DeviceError, KernelError, MemSlice, Place, StreamId};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

const STREAM: StreamId = StreamId(0);
const REPLAYS: usize = 31;
/// Bytes a second, BF16 and FP8 operations a second.
const BYTES: f64 = 4.3e12;
const BF16: f64 = 790e12;
const FP8: f64 = 1580e12;

/// A bench run: kernels, peers' times, generator.
#[derive(Debug)]
pub(crate) struct Bench {
    kernels: CudaKernels,
    peers: BTreeMap<String, f64>,
    rng: Rng,
    only: Option<String>,
}

impl Bench {
    fn device(&self) -> &CudaDevice {
        self.kernels.device()
    }

    /// Device memory with `bytes` random bytes, made of a repeated random megabyte.
    fn random(&mut self, bytes: usize) -> MemSlice {
        let block: Vec<u8> = (0..131_072).flat_map(|_| self.rng.bits().to_le_bytes()).collect();
        self.filled(bytes, &block)
    }

    /// Device memory filled with repetitions of `block`.
    fn filled(&self, bytes: usize, block: &[u8]) -> MemSlice {
        let mem = self.device().alloc(Place::Device, bytes as u64).expect("the card has room");
        let first = block.len().min(bytes);
        mem.write(0, &block[..first]).expect("inside");
        let mut have = first;
        while have < bytes {
            let len = have.min(bytes - have) as u64;
            let part = |offset| MemSlice { mem: mem.clone(), offset, len };
            self.device().copy(STREAM, &part(have as u64), &part(0)).expect("inside");
            have += len as usize;
        }
        self.device().wait(STREAM).expect("copies");
        MemSlice { mem, offset: 0, len: bytes as u64 }
    }

    fn bytes(&self, bytes: &[u8]) -> MemSlice {
        self.filled(bytes.len(), bytes)
    }

    fn u32s(&self, values: &[u32]) -> MemSlice {
        self.bytes(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    }

    /// FP32 values in [-1, 1).
    fn floats(&mut self, count: usize) -> MemSlice {
        let block: Vec<u8> =
            (0..count.min(1 << 18)).flat_map(|_| self.rng.unit().to_le_bytes()).collect();
        self.filled(4 * count, &block)
    }

    /// Input sets so that the whole exceeds the cache several times, as the peers' scripts do.
    fn sets(bytes: usize) -> usize {
        (384_000_000usize).div_ceil(bytes.max(1)).clamp(1, 6)
    }

    /// Median time of one call of `run(set)`, in us.
    fn time(&self, sets: usize, run: impl Fn(usize) -> Result<(), KernelError>) -> f64 {
        let device = self.device();
        for set in 0..sets {
            run(set).expect("a case of the bench is valid");
        }
        device.wait(STREAM).expect("the kernel ran");
        let calls = sets * (16 / sets).max(1);
        let all = || (0..calls).try_for_each(|i| run(i % sets));
        let graph = device.capture(STREAM, all).expect("operations can be recorded");
        let mut times: Vec<f64> = (0..REPLAYS + 3)
            .map(|_| {
                let replay = || device.replay(STREAM, &graph);
                device.time_us(STREAM, replay).expect("the graph ran") / calls as f64
            })
            .skip(3)
            .collect();
        times.sort_by(f64::total_cmp);
        times[REPLAYS / 2]
    }

    /// Whether the case is wanted.
    fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| only.split(',').any(|part| name.starts_with(part)))
    }

    /// Prints a case's figures.
    fn report(&self, name: &str, us: f64, floor_us: f64) {
        println!("figure {name} {us:.2} us");
        println!("figure {name}.of_floor {:.3} ratio", floor_us / us);
        // The peer is one kernel, whatever the cut of ours.
        let of_peer = name.replacen("_ten.", ".", 1).replacen("_two.", ".", 1);
        if let Some(peer) = self.peers.get(&of_peer) {
            println!("figure {name}.peer {peer:.2} us");
            println!("figure {name}.vs_peer {:.3} ratio", us / peer);
        }
    }
}

/// Least time for `bytes` and `operations` at `rate`, in us.
fn floor_us(bytes: f64, operations: f64, rate: f64) -> f64 {
    1e6 * (bytes / BYTES).max(operations / rate)
}

fn shuffled(rng: &mut Rng, count: usize) -> Vec<u32> {
    let mut list: Vec<u32> = (0..count as u32).collect();
    for i in (1..count).rev() {
        list.swap(i, rng.below(i + 1));
    }
    list
}

fn peers() -> BTreeMap<String, f64> {
    let text = std::env::var_os("DSA_PEERS").and_then(|path| std::fs::read_to_string(path).ok());
    let parse = |line: &str| {
        let (name, value) = line.split_once(' ')?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    text.map(|text| text.lines().filter_map(parse).collect()).unwrap_or_default()
}

fn open() -> Result<CudaDevice, DeviceError> {
    CudaDevice::open(0)
}

fn main() {
    let device = match open() {
        Ok(device) => Arc::new(device),
        Err(error) => {
            println!("cuda: skipped, {error}");
            return;
        }
    };
    println!("{} with {} multiprocessors", device.caps().name, device.multiprocessors());
    let folder = std::env::var_os("DSA_KERNELS").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/kernels")),
        PathBuf::from,
    );
    let kernels = CudaKernels::load(device, &folder).expect("cargo xtask kernels build ran before");
    // Arguments that are not flags are the beginnings of the names to run.
    let only = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let mut bench = Bench { kernels, peers: peers(), rng: Rng::new(1), only };
    cases::pages::run(&mut bench);
    cases::rows::run(&mut bench);
    cases::index::run(&mut bench);
    cases::attend::run(&mut bench);
}
