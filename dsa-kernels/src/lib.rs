//! Device memory and the operations of DeepSeek-V4's forward pass.
//!
//! Every operation is a method of [`Kernels`] with an argument struct in [`ops`]. The plain scalar
//! version in [`cpu`] is its definition, including the order of every floating-point reduction;
//! the fast CPU version returns the same bits for every batch, chunk and thread count.

#![cfg_attr(doctest, doc = include_str!("../README.md"))]

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
pub mod error;
pub mod math;
pub mod ops;
pub mod quant;
pub mod tensor;
#[cfg(feature = "testing")]
pub mod testing;

pub use device::{Caps, CpuDevice, Device, EventId, Mem, MemSlice, Place, StreamId};
pub use error::{DeviceError, KernelError};
pub use ops::Kernels;
pub use tensor::{Buffer, DType, TensorMut, TensorRef};
