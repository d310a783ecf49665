//! Devices, their memory, streams and events.
//!
//! A [`Device`] allocates [`Mem`] and copies between allocations in the order of a stream. On the
//! CPU a copy has finished when the call returns and an event is reached as soon as it is recorded;
//! callers are written for the general case, in which neither holds.

mod mem;

use crate::error::DeviceError;
#[cfg(feature = "cuda")]
pub(crate) use mem::Backing;
pub use mem::Mem;
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};

/// Where an allocation lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Private host memory.
    Host,
    /// Host memory behind a file descriptor (memfd) that another process can map.
    Shared,
    /// Memory of an accelerator.
    Device,
    /// Page-locked host memory that an accelerator reads and writes directly.
    Pinned,
}

impl Place {
    /// Name for messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Shared => "shared",
            Self::Device => "device",
            Self::Pinned => "pinned",
        }
    }
}

/// A byte range of an allocation.
#[derive(Clone, Debug)]
pub struct MemSlice {
    /// The allocation.
    pub mem: Mem,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// Number of a stream: work on one stream runs in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub u32);

/// Number of an event, given out by [`Device::record`] and never reused on that device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventId(pub u64);

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Device name.
    pub name: String,
    /// Hardware threads (CPU) or multiprocessors.
    pub threads: usize,
    /// Instruction set that the fast kernels use here.
    pub simd: &'static str,
    /// Kinds of memory that [`Device::alloc`] gives.
    pub places: Vec<Place>,
}

/// Allocation, copies and ordering on one device.
pub trait Device: Send + Sync + Debug {
    /// What this device is.
    fn caps(&self) -> Caps;
    /// Zeroed memory of `bytes` bytes.
    ///
    /// # Errors
    /// [`DeviceError::NoSuchPlace`] or [`DeviceError::Alloc`].
    fn alloc(&self, place: Place, bytes: u64) -> Result<Mem, DeviceError>;
    /// Enqueues a copy on stream `s`; the ranges have the same length and may overlap.
    ///
    /// # Errors
    /// A range outside of its memory, unequal lengths, or an unknown stream.
    fn copy(&self, s: StreamId, to: &MemSlice, from: &MemSlice) -> Result<(), DeviceError>;
    /// Records an event behind everything enqueued on `s` so far.
    ///
    /// # Errors
    /// An unknown stream.
    fn record(&self, s: StreamId) -> Result<EventId, DeviceError>;
    /// Lets later work on `s` wait for `e`.
    ///
    /// # Errors
    /// An unknown stream or event.
    fn after(&self, s: StreamId, e: EventId) -> Result<(), DeviceError>;
    /// Whether everything before `e` has finished.
    ///
    /// # Errors
    /// An unknown event.
    fn reached(&self, e: EventId) -> Result<bool, DeviceError>;
}

/// The host processor as a device: synchronous copies, [`Place::Host`] and [`Place::Shared`].
#[derive(Debug)]
pub struct CpuDevice {
    streams: u32,
    recorded: AtomicU64,
}

impl CpuDevice {
    /// A device with streams 0 to 15.
    #[must_use]
    pub fn new() -> Self {
        Self::with_streams(16)
    }

    /// A device with streams `0..streams`.
    #[must_use]
    pub fn with_streams(streams: u32) -> Self {
        Self { streams, recorded: AtomicU64::new(0) }
    }

    fn known_stream(&self, s: StreamId) -> Result<(), DeviceError> {
        if s.0 < self.streams {
            Ok(())
        } else {
            Err(DeviceError::UnknownId { what: "stream", id: u64::from(s.0) })
        }
    }

    fn known_event(&self, e: EventId) -> Result<(), DeviceError> {
        if e.0 >= 1 && e.0 <= self.recorded.load(Ordering::Acquire) {
            Ok(())
        } else {
            Err(DeviceError::UnknownId { what: "event", id: e.0 })
        }
    }
}

impl Default for CpuDevice {
    fn default() -> Self {
        Self::new()
    }
}

impl Device for CpuDevice {
    fn caps(&self) -> Caps {
        Caps {
            name: "cpu".to_owned(),
            threads: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            simd: crate::cpu::InstructionSet::best().name(),
            places: vec![Place::Host, Place::Shared],
        }
    }

    fn alloc(&self, place: Place, bytes: u64) -> Result<Mem, DeviceError> {
        Mem::map(place, bytes)
    }

    fn copy(&self, s: StreamId, to: &MemSlice, from: &MemSlice) -> Result<(), DeviceError> {
        self.known_stream(s)?;
        if to.len != from.len {
            return Err(DeviceError::UnequalLengths { to: to.len, from: from.len });
        }
        to.mem.copy_from(to.offset, &from.mem, from.offset, from.len)
    }

    fn record(&self, s: StreamId) -> Result<EventId, DeviceError> {
        self.known_stream(s)?;
        Ok(EventId(self.recorded.fetch_add(1, Ordering::AcqRel) + 1))
    }

    fn after(&self, s: StreamId, e: EventId) -> Result<(), DeviceError> {
        self.known_stream(s)?;
        self.known_event(e)
    }

    fn reached(&self, e: EventId) -> Result<bool, DeviceError> {
        self.known_event(e).map(|()| true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_between_allocations_and_overlapping_ranges() {
        let device = CpuDevice::new();
        let a = device.alloc(Place::Host, 100).unwrap();
        let b = device.alloc(Place::Shared, 50).unwrap();
        a.write(10, &[1, 2, 3, 4, 5]).unwrap();
        let slice = |mem: &Mem, offset, len| MemSlice { mem: mem.clone(), offset, len };
        device.copy(StreamId(0), &slice(&b, 45, 5), &slice(&a, 10, 5)).unwrap();
        let mut got = [0; 5];
        b.read(45, &mut got).unwrap();
        assert_eq!(got, [1, 2, 3, 4, 5]);
        device.copy(StreamId(3), &slice(&a, 12, 5), &slice(&a, 10, 5)).unwrap();
        let mut got = [0; 8];
        a.read(10, &mut got).unwrap();
        assert_eq!(got, [1, 2, 1, 2, 3, 4, 5, 0]);
    }

    #[test]
    fn refused_copies_name_the_numbers() {
        let device = CpuDevice::with_streams(1);
        let a = device.alloc(Place::Host, 16).unwrap();
        let slice = |offset, len| MemSlice { mem: a.clone(), offset, len };
        let text = |r: Result<(), DeviceError>| r.unwrap_err().to_string();
        assert_eq!(
            text(device.copy(StreamId(0), &slice(0, 4), &slice(0, 5))),
            "copy of 5 bytes into a range of 4"
        );
        assert_eq!(
            text(device.copy(StreamId(0), &slice(12, 5), &slice(0, 5))),
            "range 12+5 is outside of memory of 16 bytes"
        );
        assert!(matches!(
            device.copy(StreamId(0), &slice(0, 5), &slice(u64::MAX, 5)),
            Err(DeviceError::OutOfRange { .. })
        ));
        assert_eq!(
            text(device.copy(StreamId(1), &slice(0, 4), &slice(4, 4))),
            "stream 1 is unknown to this device"
        );
    }

    #[test]
    fn events_are_reached_once_recorded_and_unknown_before() {
        let device = CpuDevice::new();
        assert!(device.reached(EventId(0)).is_err());
        assert!(device.reached(EventId(1)).is_err());
        let e = device.record(StreamId(2)).unwrap();
        assert!(device.reached(e).unwrap());
        device.after(StreamId(1), e).unwrap();
        assert!(device.after(StreamId(1), EventId(e.0 + 1)).is_err());
        assert!(device.record(StreamId(16)).is_err());
        assert_ne!(device.record(StreamId(2)).unwrap(), e);
    }

    #[test]
    fn device_memory_is_refused_and_caps_say_so() {
        let device = CpuDevice::new();
        assert!(matches!(
            device.alloc(Place::Device, 1),
            Err(DeviceError::NoSuchPlace { place: "device" })
        ));
        let caps = device.caps();
        assert!(!caps.places.contains(&Place::Device));
        assert!(caps.threads >= 1);
    }
}
