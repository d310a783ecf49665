//! Memory for what a call takes to the device and brings back.

use super::ExactKernels;
use crate::cuda::abi::{Arguments, Cache};
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::Launch;
use crate::cuda::ops::{address, cache_of};
use crate::device::{Device, Mem, MemSlice, Place};
use crate::error::{DeviceError, KernelError};
use crate::ops::{PagedCache, RowFormat};
use crate::tensor::{DType, TensorMut, TensorRef};
use std::sync::MutexGuard;

/// What each part begins with; it grows with what is asked of it.
const FIRST_BYTES: u64 = 1 << 20;
/// Pieces begin at a multiple of it.
const ALIGN: u64 = 256;

/// Memory that is handed out piece by piece, all of it anew for each call.
#[derive(Debug)]
struct Part {
    place: Place,
    mem: Mem,
    used: u64,
    /// Was too small within this call, and is in use until its end.
    outgrown: Vec<Mem>,
}

impl Part {
    fn new(device: &CudaDevice, place: Place) -> Result<Self, DeviceError> {
        let mem = device.alloc(place, FIRST_BYTES)?;
        Ok(Self { place, mem, used: 0, outgrown: Vec::new() })
    }

    fn take(&mut self, device: &CudaDevice, bytes: u64) -> Result<MemSlice, DeviceError> {
        let mut offset = self.used.next_multiple_of(ALIGN);
        if offset.saturating_add(bytes) > self.mem.len() {
            let more = device.alloc(self.place, bytes.max(self.mem.len()).saturating_mul(2))?;
            self.outgrown.push(std::mem::replace(&mut self.mem, more));
            offset = 0;
        }
        self.used = offset + bytes;
        Ok(MemSlice { mem: self.mem.clone(), offset, len: bytes })
    }

    fn clear(&mut self) {
        self.used = 0;
        self.outgrown.clear();
    }
}

/// Pinned memory, which the host writes, and device memory.
#[derive(Debug)]
pub(super) struct Arena {
    pinned: Part,
    device: Part,
    /// Nothing was enqueued since the stream was last waited for.
    is_idle: bool,
}

/// Bytes of pieces in use after which a call waits and begins anew.
const USED_MAX: u64 = 64 << 20;

impl Arena {
    pub(super) fn new(device: &CudaDevice) -> Result<Self, DeviceError> {
        let part = |place| Part::new(device, place);
        let (pinned, device) = (part(Place::Pinned)?, part(Place::Device)?);
        Ok(Self { pinned, device, is_idle: true })
    }

    fn is_full(&self) -> bool {
        let is_full = |part: &Part| part.used > USED_MAX || !part.outgrown.is_empty();
        is_full(&self.pinned) || is_full(&self.device)
    }
}

/// Page memory as kernels see it.
pub(super) struct Pages {
    /// What was copied to the device, if the memory is not there.
    copied: Option<MemSlice>,
    mem: Mem,
    offset: u64,
}

/// One call. Its pieces of the arena stay its own until the stream has been waited for.
pub(super) struct Call<'k> {
    kernels: &'k ExactKernels,
    op: &'static str,
    arena: MutexGuard<'k, Arena>,
}

impl<'k> Call<'k> {
    pub(super) fn new(
        kernels: &'k ExactKernels,
        op: &'static str,
        mut arena: MutexGuard<'k, Arena>,
    ) -> Result<Self, KernelError> {
        if arena.is_full() && !arena.is_idle {
            kernels.device().wait(kernels.stream)?;
            arena.is_idle = true;
        }
        if arena.is_idle {
            arena.pinned.clear();
            arena.device.clear();
        }
        Ok(Self { kernels, op, arena })
    }

    pub(super) const fn op(&self) -> &'static str {
        self.op
    }

    fn device(&self) -> &'k CudaDevice {
        self.kernels.device()
    }

    pub(super) fn wait(&mut self) -> Result<(), KernelError> {
        self.device().wait(self.kernels.stream)?;
        self.arena.is_idle = true;
        Ok(())
    }

    pub(super) fn copy(&mut self, to: &MemSlice, from: &MemSlice) -> Result<(), KernelError> {
        self.arena.is_idle = false;
        Ok(self.device().copy(self.kernels.stream, to, from)?)
    }

    /// Device memory that holds anything.
    pub(super) fn room(&mut self, bytes: usize) -> Result<MemSlice, KernelError> {
        Ok(self.arena.device.take(self.kernels.device(), bytes as u64)?)
    }

    /// The same for so many values of four bytes.
    pub(super) fn values(&mut self, count: usize) -> Result<MemSlice, KernelError> {
        self.room(count * 4)
    }

    fn pinned(&mut self, bytes: usize) -> Result<MemSlice, KernelError> {
        Ok(self.arena.pinned.take(self.kernels.device(), bytes as u64)?)
    }

    /// Bytes in device memory.
    pub(super) fn bytes(&mut self, bytes: &[u8]) -> Result<MemSlice, KernelError> {
        let (from, to) = (self.pinned(bytes.len())?, self.room(bytes.len())?);
        from.mem.write(from.offset, bytes)?;
        self.copy(&to, &from)?;
        Ok(to)
    }

    pub(super) fn u32s(&mut self, values: &[u32]) -> Result<MemSlice, KernelError> {
        self.bytes(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
    }

    pub(super) fn f32s(&mut self, values: &[f32]) -> Result<MemSlice, KernelError> {
        self.bytes(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
    }

    /// A tensor's values in device memory.
    pub(super) fn input(&mut self, tensor: &TensorRef<'_>) -> Result<MemSlice, KernelError> {
        if let Some(there) = tensor.device() {
            return Ok(there);
        }
        match tensor.dtype() {
            DType::F32 => self.f32s(tensor.f32()?),
            DType::I32 => {
                let values = tensor.i32()?.iter().flat_map(|value| value.to_le_bytes());
                self.bytes(&values.collect::<Vec<_>>())
            }
        }
    }

    /// Device memory for a tensor's values: its own, or a piece.
    pub(super) fn target(&mut self, tensor: &TensorMut<'_>) -> Result<MemSlice, KernelError> {
        match tensor.device() {
            Some(there) => Ok(there),
            None => self.values(tensor.rows() * tensor.cols()),
        }
    }

    /// A tensor's values in device memory, to be changed there.
    pub(super) fn changed(&mut self, tensor: &mut TensorMut<'_>) -> Result<MemSlice, KernelError> {
        match tensor.device() {
            Some(there) => Ok(there),
            None => self.f32s(tensor.f32()?),
        }
    }

    /// Bytes out of device memory, when all work is done.
    fn fetch(&mut self, from: &MemSlice) -> Result<Vec<u8>, KernelError> {
        let to = self.pinned(from.len as usize)?;
        self.copy(&to, from)?;
        self.wait()?;
        let mut bytes = vec![0; from.len as usize];
        to.mem.read(to.offset, &mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn fetch_f32s(&mut self, from: &MemSlice) -> Result<Vec<f32>, KernelError> {
        let bytes = self.fetch(from)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word)).collect())
    }

    /// A tensor's values out of device memory, if it is on the host.
    pub(super) fn output(
        &mut self,
        tensor: &mut TensorMut<'_>,
        from: &MemSlice,
    ) -> Result<(), KernelError> {
        if tensor.device().is_some() {
            return Ok(());
        }
        let bytes = self.fetch(from)?;
        let words = bytes.as_chunks::<4>().0.iter();
        if let Ok(values) = tensor.f32() {
            values.iter_mut().zip(words).for_each(|(v, word)| *v = f32::from_le_bytes(*word));
        } else {
            let values = tensor.i32()?.iter_mut();
            values.zip(words).for_each(|(v, word)| *v = i32::from_le_bytes(*word));
        }
        Ok(())
    }

    /// Page memory where kernels reach it.
    pub(super) fn pages(&mut self, mem: &Mem) -> Result<Pages, KernelError> {
        if matches!(mem.place(), Place::Device | Place::Pinned) {
            return Ok(Pages { copied: None, mem: mem.clone(), offset: 0 });
        }
        let mut bytes = vec![0; mem.len() as usize];
        mem.read(0, &mut bytes)?;
        let copied = self.bytes(&bytes)?;
        let (mem, offset) = (copied.mem.clone(), copied.offset);
        Ok(Pages { copied: Some(copied), mem, offset })
    }

    /// Brings page memory back that a kernel has written.
    pub(super) fn give_back(&mut self, pages: &Pages, mem: &Mem) -> Result<(), KernelError> {
        let Some(copied) = &pages.copied else { return Ok(()) };
        let bytes = self.fetch(copied)?;
        Ok(mem.write(0, &bytes)?)
    }

    pub(super) fn launch<T: Arguments>(
        &mut self,
        name: &'static str,
        grid: [usize; 3],
        threads: u32,
        arguments: &T,
    ) -> Result<(), KernelError> {
        let fits = |n: usize, most: u32| u32::try_from(n).ok().filter(|n| *n <= most);
        let sizes = (fits(grid[0], i32::MAX as u32), fits(grid[1], 65_535), fits(grid[2], 65_535));
        let (Some(x), Some(y), Some(z)) = sizes else {
            return Err(KernelError::Argument { op: self.op, what: "too much for one launch" });
        };
        let launch = Launch { grid: [x, y, z], threads, is_cooperative: false, overlaps: false };
        self.arena.is_idle = false;
        self.kernels.cuda.launch(self.kernels.stream, name, &launch, arguments)
    }

    /// What launches other kernels on [`Call::stream`].
    pub(super) fn cuda(&mut self) -> &'k crate::cuda::CudaKernels {
        self.arena.is_idle = false;
        &self.kernels.cuda
    }

    pub(super) fn stream(&self) -> crate::device::StreamId {
        self.kernels.stream
    }

    /// Address of a piece.
    pub(super) fn address(&self, slice: &MemSlice) -> Result<u64, KernelError> {
        address(self.op, "a piece of the arena", slice, slice.len, 4)
    }

    /// A cache in its memory.
    pub(super) fn cache(
        &self,
        pages: &Pages,
        cache: &PagedCache<'_>,
    ) -> Result<Cache, KernelError> {
        cache_of(self.op, &pages.of(cache), &FORMATS)
    }
}

const FORMATS: [RowFormat; 6] = [
    RowFormat::KvV4,
    RowFormat::KvF32,
    RowFormat::IndexFp8,
    RowFormat::IndexFp4,
    RowFormat::IndexBf16,
    RowFormat::IndexF32,
];

/// The number by which kernels know a format.
pub(super) fn code_of(format: RowFormat) -> u32 {
    match format {
        RowFormat::KvV4 => 0,
        RowFormat::KvF32 => 1,
        RowFormat::IndexFp8 => 2,
        RowFormat::IndexFp4 => 3,
        RowFormat::IndexBf16 => 4,
        RowFormat::IndexF32 => 5,
    }
}

impl Pages {
    /// The cache where its bytes are now.
    pub(super) fn of<'a>(&'a self, cache: &PagedCache<'_>) -> PagedCache<'a> {
        PagedCache {
            mem: &self.mem,
            base: self.offset + cache.base,
            stride: cache.stride,
            rows_per_page: cache.rows_per_page,
            format: cache.format,
        }
    }

    /// Address of the first byte.
    pub(super) fn start(&self) -> Result<u64, KernelError> {
        Ok(self.mem.address(self.offset, 0)?)
    }
}
