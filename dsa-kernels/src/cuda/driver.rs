//! The driver's calls, each behind a function that checks its result. All unsafe code of the GPU
//! side is here.
#![expect(unsafe_code, reason = "calls of a C library that is opened at run time")]

use super::abi::{Arguments, TensorMap};
use crate::error::DeviceError;
use cudarc::driver::sys;
use std::ffi::{CStr, CString, c_void};
use std::sync::Arc;

/// Oldest driver with every call that is made here (12.0, as the driver counts).
const DRIVER_VERSION_MIN: i32 = 12_000;

fn check(call: &'static str, result: sys::CUresult) -> Result<(), DeviceError> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: `text` is a place for one pointer, which afterwards is null or a constant of the
    // driver.
    let known = unsafe { sys::cuGetErrorName(result, &raw mut text) };
    let name = if known == sys::CUresult::CUDA_SUCCESS && !text.is_null() {
        // SAFETY: the driver gave a terminated string that lives as long as the driver.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        String::new()
    };
    Err(DeviceError::Driver { call, code: result as u32, name })
}

/// Kinds of numbers that a device tells about itself.
#[derive(Clone, Copy, Debug)]
pub(super) enum Number {
    Major,
    Minor,
    Multiprocessors,
}

/// A device's primary context, retained until the last holder drops it.
pub(super) struct Gpu {
    device: sys::CUdevice,
    primary: sys::CUcontext,
}

// SAFETY: a context handle may be used from any thread; the driver locks it.
unsafe impl Send for Gpu {}
// SAFETY: as above; there is no state on our side.
unsafe impl Sync for Gpu {}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").field("device", &self.device).finish()
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: the context was retained once in `open`.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl Gpu {
    /// Opens device `ordinal`.
    pub(super) fn open(ordinal: u32) -> Result<Arc<Self>, DeviceError> {
        // SAFETY: only looks for the library.
        if !unsafe { sys::is_culib_present() } {
            return Err(DeviceError::NoDriver { what: "libcuda.so.1 is not there" });
        }
        // SAFETY: the first call, as the driver asks; it may come many times.
        check("cuInit", unsafe { sys::cuInit(0) })?;
        let mut version = 0;
        // SAFETY: `version` is a place for one number.
        check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
        if version < DRIVER_VERSION_MIN {
            return Err(DeviceError::NoDriver { what: "the driver is older than CUDA 12.0" });
        }
        let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
        let (mut device, mut primary) = (0, std::ptr::null_mut());
        // SAFETY: `device` is a place for one handle.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, ordinal) })?;
        // SAFETY: `device` was given by the driver; `primary` is a place for one handle.
        let retained = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut primary, device) };
        check("cuDevicePrimaryCtxRetain", retained)?;
        Ok(Arc::new(Self { device, primary }))
    }

    /// Makes the context that of the calling thread.
    fn enter(&self) -> Result<(), DeviceError> {
        // SAFETY: the context is retained while `self` lives.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.primary) })
    }

    pub(super) fn name(&self) -> Result<String, DeviceError> {
        let mut text = [0; 256];
        // SAFETY: the driver writes at most 256 bytes with the terminating zero.
        let result = unsafe { sys::cuDeviceGetName(text.as_mut_ptr(), 256, self.device) };
        check("cuDeviceGetName", result)?;
        let bytes = text.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect::<Vec<_>>();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    pub(super) fn number(&self, number: Number) -> Result<u32, DeviceError> {
        use sys::CUdevice_attribute as A;
        let attribute = match number {
            Number::Major => A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            Number::Minor => A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            Number::Multiprocessors => A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        };
        let mut value = 0;
        // SAFETY: `value` is a place for one number.
        let result = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, self.device) };
        check("cuDeviceGetAttribute", result)?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    /// Waits for all work of the device.
    pub(super) fn wait(&self) -> Result<(), DeviceError> {
        self.enter()?;
        // SAFETY: a context is current.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// Device memory, not cleared.
    pub(super) fn alloc(&self, bytes: usize) -> Result<u64, DeviceError> {
        self.enter()?;
        let mut address = 0;
        // SAFETY: `address` is a place for one address.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) })?;
        Ok(address)
    }

    /// Page-locked host memory that all devices reach at the same address, not cleared.
    pub(super) fn alloc_pinned(&self, bytes: usize) -> Result<u64, DeviceError> {
        self.enter()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        let mut start = std::ptr::null_mut();
        // SAFETY: `start` is a place for one address.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut start, bytes, flags) })?;
        Ok(start as u64)
    }

    /// Frees memory of [`Gpu::alloc`] once no work of the device can use it.
    pub(super) fn free(&self, address: u64) {
        let _ = self.wait();
        // SAFETY: the address came from `alloc` and its owner calls this once, when dropped.
        let _ = unsafe { sys::cuMemFree_v2(address) };
    }

    /// The same for memory of [`Gpu::alloc_pinned`].
    pub(super) fn free_pinned(&self, address: u64) {
        let _ = self.wait();
        // SAFETY: as in `free`.
        let _ = unsafe { sys::cuMemFreeHost(address as *mut c_void) };
    }

    /// Sets bytes and waits. The caller checked the range against a live allocation.
    pub(super) fn fill(&self, address: u64, byte: u8, len: usize) -> Result<(), DeviceError> {
        self.enter()?;
        // SAFETY: the range is inside of an allocation that the caller holds.
        check("cuMemsetD8", unsafe { sys::cuMemsetD8_v2(address, byte, len) })?;
        // SAFETY: a context is current.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// Device to host; waits. The caller checked the device range.
    pub(super) fn read(&self, address: u64, into: &mut [u8]) -> Result<(), DeviceError> {
        self.enter()?;
        let to = into.as_mut_ptr().cast::<c_void>();
        // SAFETY: `into` has that many bytes; the caller holds the allocation that it checked.
        check("cuMemcpyDtoH", unsafe { sys::cuMemcpyDtoH_v2(to, address, into.len()) })
    }

    /// Host to device; waits. The caller checked the device range.
    pub(super) fn write(&self, address: u64, from: &[u8]) -> Result<(), DeviceError> {
        self.enter()?;
        let start = from.as_ptr().cast::<c_void>();
        // SAFETY: as in `read`.
        check("cuMemcpyHtoD", unsafe { sys::cuMemcpyHtoD_v2(address, start, from.len()) })?;
        // SAFETY: a context is current.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    pub(super) fn stream(self: &Arc<Self>) -> Result<Stream, DeviceError> {
        self.enter()?;
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a place for one handle.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut raw, flags) })?;
        Ok(Stream { gpu: Arc::clone(self), raw })
    }

    pub(super) fn event(self: &Arc<Self>) -> Result<Event, DeviceError> {
        self.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is a place for one handle.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, 0) })?;
        Ok(Event { gpu: Arc::clone(self), raw })
    }

    /// Loads a cubin.
    pub(super) fn module(self: &Arc<Self>, cubin: &[u8]) -> Result<Module, DeviceError> {
        self.enter()?;
        let mut raw = std::ptr::null_mut();
        let image = cubin.as_ptr().cast::<c_void>();
        // SAFETY: the image is a whole cubin: its hash is that of the manifest; the driver checks
        // its headers and copies it.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut raw, image) })?;
        Ok(Module { gpu: Arc::clone(self), raw })
    }

    /// A map of `pages` tiles of `rows` rows with `row_bytes` bytes, `stride` bytes apart, read in
    /// boxes of `box_bytes` x `rows`, in the 128-byte swizzle if `is_swizzled`.
    pub(super) fn tensor_map(&self, tiles: &Tiles) -> Result<TensorMap, DeviceError> {
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let extent = [tiles.row_bytes, tiles.rows, tiles.pages.max(1)];
        let strides = [tiles.row_bytes, tiles.stride];
        let part = [tiles.box_bytes, tiles.rows as u32, 1];
        let swizzle = if tiles.is_swizzled {
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B
        } else {
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE
        };
        // SAFETY: the arrays have the three (two for the strides) entries that the rank says; the
        // driver checks the numbers and reads no device memory.
        let result = unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
                3,
                tiles.address as *mut c_void,
                extent.as_ptr(),
                strides.as_ptr(),
                part.as_ptr(),
                [1, 1, 1].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check("cuTensorMapEncodeTiled", result)?;
        Ok(TensorMap { opaque: map.opaque })
    }
}

/// What a tensor map describes; all in bytes but for `rows` and `pages`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiles {
    pub(super) address: u64,
    pub(super) row_bytes: u64,
    pub(super) rows: u64,
    pub(super) pages: u64,
    pub(super) stride: u64,
    pub(super) box_bytes: u32,
    pub(super) is_swizzled: bool,
}

/// A stream, destroyed when dropped.
#[derive(Debug)]
pub(super) struct Stream {
    gpu: Arc<Gpu>,
    raw: sys::CUstream,
}

// SAFETY: a stream handle may be used from any thread; the driver locks it.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.gpu.enter();
        // SAFETY: the handle came from `Gpu::stream` and is not used again.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
    }
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch {
    pub(super) grid: [u32; 3],
    pub(super) threads: u32,
    /// All blocks must be resident at once.
    pub(super) is_cooperative: bool,
    /// May begin before the kernel in front of it has ended.
    pub(super) overlaps: bool,
}

impl Stream {
    pub(super) fn wait(&self) -> Result<(), DeviceError> {
        self.gpu.enter()?;
        // SAFETY: the stream lives.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }

    /// Enqueues a copy. The caller checked both ranges; a device frees memory only when it is idle.
    pub(super) fn copy(&self, to: u64, from: u64, len: usize) -> Result<(), DeviceError> {
        self.gpu.enter()?;
        // SAFETY: both ranges are inside of allocations that the driver knows or that are ordinary
        // host memory, for which it finishes with the host side before it returns.
        check("cuMemcpyAsync", unsafe { sys::cuMemcpyAsync(to, from, len, self.raw) })
    }

    pub(super) fn record(&self, event: &Event) -> Result<(), DeviceError> {
        self.gpu.enter()?;
        // SAFETY: stream and event live.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.raw, self.raw) })
    }

    pub(super) fn after(&self, event: &Event) -> Result<(), DeviceError> {
        self.gpu.enter()?;
        // SAFETY: stream and event live.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) })
    }

    /// Launches a kernel that takes one `T` by value.
    pub(super) fn launch<T: Arguments>(
        &self,
        function: &Function,
        launch: &Launch,
        arguments: &T,
    ) -> Result<(), DeviceError> {
        use sys::CUlaunchAttributeID as Id;
        self.gpu.enter()?;
        let pair = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let mut attributes = [
            pair(
                Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
                sys::CUlaunchAttributeValue { cooperative: i32::from(launch.is_cooperative) },
            ),
            pair(
                Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                sys::CUlaunchAttributeValue {
                    programmaticStreamSerializationAllowed: i32::from(launch.overlaps),
                },
            ),
        ];
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: function.dynamic_bytes,
            hStream: self.raw,
            attrs: attributes.as_mut_ptr(),
            numAttrs: 2,
        };
        let mut parameters = [std::ptr::from_ref(arguments).cast_mut().cast::<c_void>()];
        // SAFETY: the kernel takes exactly one argument, whose layout is that of `T`: the manifest's
        // hash of the header was compared when the module was loaded. The driver copies it before it
        // returns. The ranges in it were checked against allocations by the operation's `check`, and
        // a device frees memory only when it is idle.
        let result = unsafe {
            let none = std::ptr::null_mut();
            sys::cuLaunchKernelEx(&raw const config, function.raw, parameters.as_mut_ptr(), none)
        };
        check("cuLaunchKernelEx", result)
    }

    /// Records what `enqueue` puts on this stream instead of running it.
    pub(super) fn capture<E: From<DeviceError>>(
        &self,
        enqueue: impl FnOnce() -> Result<(), E>,
    ) -> Result<Graph, E> {
        self.gpu.enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.raw, mode) })?;
        let enqueued = enqueue();
        let mut graph = std::ptr::null_mut();
        // SAFETY: a capture was begun on this stream; `graph` is a place for one handle.
        let ended = unsafe { sys::cuStreamEndCapture(self.raw, &raw mut graph) };
        enqueued?;
        check("cuStreamEndCapture", ended)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the capture gave the graph; `raw` is a place for one handle.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut raw, graph, 0) };
        // SAFETY: the graph is not used again; what was made from it stands alone.
        let _ = unsafe { sys::cuGraphDestroy(graph) };
        check("cuGraphInstantiateWithFlags", made)?;
        Ok(Graph { gpu: Arc::clone(&self.gpu), raw })
    }

    pub(super) fn replay(&self, graph: &Graph) -> Result<(), DeviceError> {
        self.gpu.enter()?;
        // SAFETY: stream and graph live.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.raw, self.raw) })
    }
}

/// An event, destroyed when dropped.
#[derive(Debug)]
pub(super) struct Event {
    gpu: Arc<Gpu>,
    raw: sys::CUevent,
}

// SAFETY: an event handle may be used from any thread; the driver locks it.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.gpu.enter();
        // SAFETY: the handle came from `Gpu::event` and is not used again.
        let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}

impl Event {
    pub(super) fn is_reached(&self) -> Result<bool, DeviceError> {
        self.gpu.enter()?;
        // SAFETY: the event lives.
        let result = unsafe { sys::cuEventQuery(self.raw) };
        if result == sys::CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        check("cuEventQuery", result).map(|()| true)
    }

    /// Microseconds from `earlier` to this one; waits for this one.
    pub(super) fn us_since(&self, earlier: &Self) -> Result<f64, DeviceError> {
        self.gpu.enter()?;
        // SAFETY: the event lives.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })?;
        let mut ms = 0.0;
        // SAFETY: both events live; `ms` is a place for one number.
        let result = unsafe { sys::cuEventElapsedTime_v2(&raw mut ms, earlier.raw, self.raw) };
        check("cuEventElapsedTime", result)?;
        Ok(f64::from(ms) * 1000.0)
    }
}

/// Work recorded once and replayed as a whole.
#[derive(Debug)]
pub(super) struct Graph {
    gpu: Arc<Gpu>,
    raw: sys::CUgraphExec,
}

// SAFETY: a graph handle may be sent between threads; launches of it are serialised by the driver.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.gpu.enter();
        // SAFETY: the handle came from `Stream::capture` and is not used again.
        let _ = unsafe { sys::cuGraphExecDestroy(self.raw) };
    }
}

/// A loaded cubin.
#[derive(Debug)]
pub(super) struct Module {
    gpu: Arc<Gpu>,
    raw: sys::CUmodule,
}

// SAFETY: a module handle may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.gpu.wait();
        // SAFETY: the handle came from `Gpu::module`; its functions are dropped with their library,
        // and the device is idle.
        let _ = unsafe { sys::cuModuleUnload(self.raw) };
    }
}

/// A kernel of a module, valid as long as the module.
#[derive(Clone, Copy, Debug)]
pub(super) struct Function {
    raw: sys::CUfunction,
    dynamic_bytes: u32,
}

// SAFETY: a function handle may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Module {
    pub(super) fn function(&self, name: &str, dynamic_bytes: u32) -> Result<Function, DeviceError> {
        use sys::CUfunction_attribute as Id;
        self.gpu.enter()?;
        let text = CString::new(name).unwrap_or_default();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module lives; `raw` is a place for one handle; the name ends with a zero.
        let found = unsafe { sys::cuModuleGetFunction(&raw mut raw, self.raw, text.as_ptr()) };
        check("cuModuleGetFunction", found)?;
        let bytes = i32::try_from(dynamic_bytes).unwrap_or(i32::MAX);
        // A kernel whose cluster has more than eight blocks must ask; for others it changes nothing.
        for (attribute, value) in [
            (Id::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes),
            (Id::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
        ] {
            // SAFETY: the function is one of the module.
            check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(raw, attribute, value) })?;
        }
        Ok(Function { raw, dynamic_bytes })
    }
}
