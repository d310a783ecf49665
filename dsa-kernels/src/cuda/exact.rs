//! [`ExactKernels`]: every operation of the forward pass on a GPU, with the reference's bits.

mod arena;
mod attend;
mod linear;
mod rows;
mod streams;

use super::abi;
use super::device::CudaDevice;
use super::library::CudaKernels;
use crate::device::{Device, Mem, Place, StreamId};
use crate::error::{DeviceError, KernelError};
use crate::ops::{
    Attend, Compress, Embed, HyperHead, HyperPost, HyperPre, IndexQuery, IndexSelect, Kernels,
    Linear, LoadRows, Moe, PackedWeight, RmsNorm, Rope, RopeTable, Route, StoreRows, Weight,
    WeightDesc, WeightFormat,
};
use crate::tensor::{Buffer, DType, TensorMut, TensorRef};
use arena::{Arena, Call};
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

/// Every operation of [`Kernels`] on a GPU, with the bits of [`crate::cpu::CpuReference`].
///
/// Each output is summed in the reference's order by one thread, so this is no fast path: it is what
/// faster kernels are held against on the card itself, and it lets a whole model run there.
/// Matrices stay in the checkpoint's format.
///
/// Tensors may be on the device ([`Kernels::buffer`]) or on the host; what is on the host is copied there
/// and back by each call. Page and carry memory that is on the device stays there; other memory is
/// copied there and back as a whole, which is for tests. A call that has no outputs on the host has not
/// finished when it returns: [`CudaDevice::wait`], or [`Kernels::fetch`] of what it gives.
#[derive(Debug)]
pub struct ExactKernels {
    cuda: Arc<CudaKernels>,
    stream: StreamId,
    arena: Mutex<Arena>,
}

impl ExactKernels {
    /// Runs on one stream of the device of `cuda`.
    ///
    /// # Errors
    /// No memory for what goes to and fro.
    pub fn new(cuda: Arc<CudaKernels>, stream: StreamId) -> Result<Self, DeviceError> {
        let arena = Mutex::new(Arena::new(cuda.device())?);
        Ok(Self { cuda, stream, arena })
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<CudaDevice> {
        self.cuda.device()
    }

    fn call(&self, op: &'static str) -> Result<Call<'_>, KernelError> {
        let arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
        Call::new(self, op, arena)
    }
}

/// A matrix in device memory, as the checkpoint has it.
#[derive(Debug)]
struct DeviceMatrix {
    /// Elements, then scales from a multiple of 16 on.
    mem: Mem,
    scales_at: u64,
    rows: usize,
    cols: usize,
    format: WeightFormat,
    is_rounded: bool,
}

impl PackedWeight for DeviceMatrix {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn bytes(&self) -> usize {
        self.mem.len() as usize
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl DeviceMatrix {
    fn new(device: &CudaDevice, desc: &WeightDesc<'_>) -> Result<Self, DeviceError> {
        let scales_at = (desc.data.len() as u64).next_multiple_of(16);
        let mem = device.alloc(Place::Device, scales_at + desc.scales.len() as u64)?;
        mem.write(0, desc.data)?;
        mem.write(scales_at, desc.scales)?;
        let (rows, cols, format) = (desc.rows, desc.cols, desc.format);
        Ok(Self { mem, scales_at, rows, cols, format, is_rounded: desc.round_to_bf16 })
    }

    fn argument(&self) -> Result<abi::Matrix, DeviceError> {
        let start = self.mem.address(0, self.mem.len())?;
        Ok(abi::Matrix {
            data: start,
            scales: start + self.scales_at,
            rows: self.rows as u32,
            cols: self.cols as u32,
            format: match self.format {
                WeightFormat::Fp8Block128 => 0,
                WeightFormat::Fp4Group32 => 1,
                WeightFormat::Bf16 => 2,
                WeightFormat::F32 => 3,
            },
            rounded: self.is_rounded.into(),
        })
    }
}

/// A matrix that was packed here, as kernels see it.
fn matrix(op: &'static str, weight: &Weight) -> Result<abi::Matrix, KernelError> {
    let own: Option<&DeviceMatrix> = weight.as_any().downcast_ref();
    Ok(own.ok_or(KernelError::ForeignWeight { op })?.argument()?)
}

impl Kernels for ExactKernels {
    fn buffer(&self, dtype: DType, len: usize) -> Result<Buffer, KernelError> {
        Ok(Buffer::on_device(dtype, self.device().alloc(Place::Device, 4 * len as u64)?))
    }

    fn fetch(&self, x: TensorRef<'_>) -> Result<Vec<f32>, KernelError> {
        let mut call = self.call("fetch")?;
        let values = call.input(&x)?;
        let values = call.fetch_f32s(&values)?;
        Ok(match x.dtype() {
            DType::F32 => values,
            DType::I32 => values.into_iter().map(|v| v.to_bits() as i32 as f32).collect(),
        })
    }

    fn put(&self, mut x: TensorMut<'_>, values: &[f32]) -> Result<(), KernelError> {
        let (want, found) = (x.rows() * x.cols(), values.len());
        if want != found {
            return Err(KernelError::Shape { op: "put", what: "values", want, found });
        }
        let mut call = self.call("put")?;
        let from = call.f32s(values)?;
        if let Some(there) = x.device() {
            return call.copy(&there, &from);
        }
        call.output(&mut x, &from)
    }

    fn finish(&self) -> Result<(), KernelError> {
        self.call("finish")?.wait()
    }

    fn scale(&self, x: TensorMut<'_>, factor: f32) -> Result<(), KernelError> {
        streams::scale(self.call("scale")?, x, factor)
    }

    fn pack(&self, desc: &WeightDesc<'_>) -> Result<Weight, KernelError> {
        desc.check()?;
        let fits = desc.rows < 1 << 31 && desc.cols < 1 << 31;
        super::ops::holds("pack", fits, "a matrix with 2^31 or more rows or columns")?;
        Ok(Arc::new(DeviceMatrix::new(self.device(), desc)?))
    }

    fn embed(&self, a: Embed<'_>) -> Result<(), KernelError> {
        a.check()?;
        streams::embed(self.call("embed")?, a)
    }

    fn hyper_pre(&self, a: HyperPre<'_>) -> Result<(), KernelError> {
        a.check()?;
        streams::hyper_pre(self.call("hyper_pre")?, a)
    }

    fn hyper_post(&self, a: HyperPost<'_>) -> Result<(), KernelError> {
        a.check()?;
        streams::hyper_post(self.call("hyper_post")?, a)
    }

    fn hyper_head(&self, a: HyperHead<'_>) -> Result<(), KernelError> {
        a.check()?;
        streams::hyper_head(self.call("hyper_head")?, a)
    }

    fn rms_norm(&self, a: RmsNorm<'_>) -> Result<(), KernelError> {
        a.check()?;
        streams::rms_norm(self.call("rms_norm")?, a)
    }

    fn linear(&self, a: Linear<'_>) -> Result<(), KernelError> {
        a.check()?;
        linear::linear(self.call("linear")?, a)
    }

    fn rope_table(&self, a: RopeTable<'_>) -> Result<(), KernelError> {
        a.check()?;
        streams::rope_table(self.call("rope_table")?, a)
    }

    fn rope(&self, a: Rope<'_>) -> Result<(), KernelError> {
        a.check()?;
        streams::rope(self.call("rope")?, a)
    }

    fn index_query(&self, a: IndexQuery<'_>) -> Result<(), KernelError> {
        a.check()?;
        streams::index_query(self.call("index_query")?, a)
    }

    fn store_rows(&self, a: StoreRows<'_>) -> Result<(), KernelError> {
        a.check()?;
        rows::store(self.call("store_rows")?, &a)
    }

    fn load_rows(&self, a: LoadRows<'_>) -> Result<(), KernelError> {
        a.check()?;
        rows::load(self.call("load_rows")?, a)
    }

    fn compress(&self, a: Compress<'_>) -> Result<(), KernelError> {
        a.check()?;
        rows::compress(self.call("compress")?, a)
    }

    fn index_select(&self, a: IndexSelect<'_>) -> Result<(), KernelError> {
        a.check()?;
        attend::index_select(self.call("index_select")?, a)
    }

    fn attend(&self, a: Attend<'_>) -> Result<(), KernelError> {
        a.check()?;
        attend::attend(self.call("attend")?, a)
    }

    fn route(&self, a: Route<'_>) -> Result<(), KernelError> {
        a.check()?;
        linear::route(self.call("route")?, a)
    }

    fn moe(&self, a: Moe<'_>) -> Result<(), KernelError> {
        a.check()?;
        linear::moe(self.call("moe")?, a)
    }
}
