//! NVIDIA GPUs: [`CudaDevice`] with memory, streams, events and graphs, and [`CudaKernels`], the
//! operations of the index and sparse-attention path on device memory.
//!
//! The driver is opened at run time: this builds and starts on a machine without CUDA, where
//! [`CudaDevice::open`] answers [`crate::DeviceError::NoDriver`]. Kernels are compiled ahead of time
//! (`cargo xtask kernels build`) and loaded from a folder with a manifest.
//!
//! Unlike [`crate::Kernels`], whose tensors are host slices, these operations take ranges of device
//! memory ([`crate::MemSlice`]) and a stream, and have not finished when they return. [`ExactKernels`]
//! is the exception: all of [`crate::Kernels`], with the reference's bits.

mod abi;
mod device;
mod driver;
mod exact;
mod library;
mod manifest;
mod ops;

pub use device::{CudaDevice, CudaGraph};
pub use exact::ExactKernels;
pub use library::{CudaKernels, LibraryError};
pub use manifest::{KernelInfo, Manifest};
pub use ops::{
    AttendPath, CompressStep, DeviceAttend, DeviceRows, DeviceSelection, DigestPages, FinishRows,
    IndexKeys, MovePages, Norm, PagePool, QueryRows, ScorePath, ScoreRows, SelectFused, SelectRows,
    StoreDeviceRows, expanded_bytes, fused_capacity, fused_scratch_bytes,
};
