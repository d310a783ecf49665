//! Kernels on a GPU against the CPU reference. Without a device each test is skipped by name with
//! one line; `DSA_KERNELS` names the folder of the compiled kernels, `DSA_SEED` varies the data.

mod attend;
mod device;
mod exact;
mod index;
mod ordering;
mod pages;
mod rows;

use dsa_kernels::cuda::{CudaDevice, CudaKernels};
use dsa_kernels::testing::Rng;
use dsa_kernels::{Device, Mem, MemSlice, Place, StreamId};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

const STREAM: StreamId = StreamId(0);
/// What memory holds before a kernel writes it: a NaN as BF16 and as FP32, no valid row number.
const POISON: u8 = 0xff;

struct Gpu {
    kernels: Arc<CudaKernels>,
    seed: u64,
}

/// Where the compiled kernels are.
fn folder() -> PathBuf {
    std::env::var_os("DSA_KERNELS").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/kernels")),
        PathBuf::from,
    )
}

/// The GPU, or none where there is none. Kernels that are there and don't load are a failure.
fn gpu(test: &str) -> Option<&'static Gpu> {
    static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
    let gpu = GPU.get_or_init(|| {
        let device = match CudaDevice::open(0) {
            Ok(device) => Arc::new(device),
            Err(error) => {
                println!("no GPU: {error}");
                return None;
            }
        };
        let kernels = CudaKernels::load(device, &folder()).unwrap();
        let seed = std::env::var("DSA_SEED").ok().and_then(|text| text.parse().ok());
        Some(Gpu { kernels: Arc::new(kernels), seed: seed.unwrap_or(1) })
    });
    if gpu.is_none() {
        println!("{test}: skipped, no GPU");
    }
    gpu.as_ref()
}

impl Gpu {
    fn rng(&self, salt: u64) -> Rng {
        Rng::new(self.seed.wrapping_mul(1_000_003) ^ salt)
    }

    fn device(&self) -> &CudaDevice {
        self.kernels.device()
    }

    fn memory(&self, bytes: usize) -> Mem {
        self.device().alloc(Place::Device, bytes as u64).unwrap()
    }

    /// Device memory holding `bytes`.
    fn bytes(&self, bytes: &[u8]) -> MemSlice {
        let mem = self.memory(bytes.len());
        mem.write(0, bytes).unwrap();
        MemSlice { mem, offset: 0, len: bytes.len() as u64 }
    }

    fn f32s(&self, values: &[f32]) -> MemSlice {
        self.bytes(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    }

    fn u32s(&self, values: &[u32]) -> MemSlice {
        self.bytes(&values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    }

    fn bf16s(&self, values: &[f32]) -> MemSlice {
        let bits = |v: &f32| dsa_kernels::quant::bf16_encode(*v).to_le_bytes();
        self.bytes(&values.iter().flat_map(bits).collect::<Vec<_>>())
    }

    /// Device memory that holds nothing of use.
    fn poisoned(&self, bytes: usize) -> MemSlice {
        self.bytes(&vec![POISON; bytes])
    }

    /// Waits and reads.
    fn read(&self, slice: &MemSlice) -> Vec<u8> {
        self.device().wait(STREAM).unwrap();
        let mut bytes = vec![0; slice.len as usize];
        slice.mem.read(slice.offset, &mut bytes).unwrap();
        bytes
    }

    fn read_u32(&self, slice: &MemSlice) -> Vec<u32> {
        words(&self.read(slice))
    }

    fn read_f32(&self, slice: &MemSlice) -> Vec<f32> {
        self.read_u32(slice).into_iter().map(f32::from_bits).collect()
    }

    fn read_i32(&self, slice: &MemSlice) -> Vec<i32> {
        self.read_u32(slice).into_iter().map(|v| v as i32).collect()
    }

    fn read_bf16(&self, slice: &MemSlice) -> Vec<f32> {
        let bytes = self.read(slice);
        let decode = |b: &[u8; 2]| dsa_kernels::quant::bf16_decode(u16::from_le_bytes(*b));
        bytes.as_chunks::<2>().0.iter().map(decode).collect()
    }
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
}

fn shuffled(rng: &mut Rng, count: usize) -> Vec<u32> {
    let mut list: Vec<u32> = (0..count as u32).collect();
    for i in (1..count).rev() {
        list.swap(i, rng.below(i + 1));
    }
    list
}
