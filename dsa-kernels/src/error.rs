//! Errors of device memory and of the operations.

use crate::tensor::DType;

/// A failed memory or stream operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// An access outside of the allocation.
    #[error("range {offset}+{len} is outside of memory of {capacity} bytes")]
    OutOfRange {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Bytes allocated.
        capacity: u64,
    },
    /// The system gave no memory.
    #[error("allocate {bytes} bytes of {place} memory: {source}")]
    Alloc {
        /// Bytes asked for.
        bytes: u64,
        /// Where.
        place: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// The device has no memory of that kind.
    #[error("{place} memory is not available on this device")]
    NoSuchPlace {
        /// Where.
        place: &'static str,
    },
    /// A copy between ranges of different lengths.
    #[error("copy of {from} bytes into a range of {to}")]
    UnequalLengths {
        /// Bytes of the target.
        to: u64,
        /// Bytes of the source.
        from: u64,
    },
    /// A word access at an offset that 8 does not divide.
    #[error("word at offset {offset} is not aligned to 8 bytes")]
    Misaligned {
        /// Byte offset.
        offset: u64,
    },
    /// The driver of an accelerator is not there or too old.
    #[error("no CUDA driver: {what}")]
    NoDriver {
        /// What is missing.
        what: &'static str,
    },
    /// The driver refused a call, or work enqueued before it failed.
    #[error("{call}: error {code} {name}")]
    Driver {
        /// Call.
        call: &'static str,
        /// The driver's number.
        code: u32,
        /// The driver's name for it.
        name: String,
    },
    /// An event or stream that was never made on this device.
    #[error("{what} {id} is unknown to this device")]
    UnknownId {
        /// `"stream"` or `"event"`.
        what: &'static str,
        /// Its number.
        id: u64,
    },
}

/// A refused or failed operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// Instructions that are unknown or not there.
    #[error("no instruction set `{name}` on this machine: portable, avx2 and avx512 are known")]
    Instructions {
        /// Name asked for.
        name: String,
    },
    /// A tensor of another element type.
    #[error("tensor holds {found:?}, {want:?} expected")]
    Dtype {
        /// Expected.
        want: DType,
        /// Found.
        found: DType,
    },
    /// A tensor in device memory, asked for by an operation of the host.
    #[error("tensor is on a device, host memory expected")]
    OnDevice,
    /// A view larger than its buffer.
    #[error("view of {want} elements in a buffer of {len}")]
    ViewTooLarge {
        /// Elements asked for.
        want: usize,
        /// Elements there.
        len: usize,
    },
    /// A shape that does not fit the operation.
    #[error("{op}: {what} is {found}, {want} expected")]
    Shape {
        /// Operation.
        op: &'static str,
        /// Argument and dimension.
        what: &'static str,
        /// Expected.
        want: usize,
        /// Found.
        found: usize,
    },
    /// An argument outside of what the operation supports.
    #[error("{op}: {what}")]
    Argument {
        /// Operation.
        op: &'static str,
        /// What is wrong.
        what: &'static str,
    },
    /// A page or row outside of its cache.
    #[error("{op}: page {page}, row {row} is outside of its cache")]
    Row {
        /// Operation.
        op: &'static str,
        /// Page index.
        page: u32,
        /// Row.
        row: u32,
    },
    /// A weight packed by another implementation.
    #[error("{op}: weight was packed by another implementation")]
    ForeignWeight {
        /// Operation.
        op: &'static str,
    },
    /// Memory that the device can't reach at full speed, or that is not aligned as it must be.
    #[error(
        "{op}: {what} is {place} memory at {address:#x}, device memory aligned to {align} expected"
    )]
    Memory {
        /// Operation.
        op: &'static str,
        /// Argument.
        what: &'static str,
        /// Where the memory is.
        place: &'static str,
        /// Address.
        address: u64,
        /// Alignment in bytes.
        align: u64,
    },
    /// A kernel that the loaded library does not have.
    #[error("kernel {name} is not in the loaded library")]
    NoKernel {
        /// Entry point.
        name: &'static str,
    },
    /// A memory error.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl KernelError {
    pub(crate) fn in_buffer(want: usize, len: usize) -> Result<(), Self> {
        if want > len { Err(Self::ViewTooLarge { want, len }) } else { Ok(()) }
    }
}
