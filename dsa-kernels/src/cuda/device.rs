//! [`CudaDevice`]: one GPU as a [`Device`].

use super::driver::{Event, Gpu, Graph, Number, Stream};
use crate::device::{Backing, Caps, Device, EventId, Mem, MemSlice, Place, StreamId};
use crate::error::DeviceError;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One GPU: [`Place::Device`] and [`Place::Pinned`] memory beside the host's, streams that run
/// independently of each other, and events.
///
/// Copies and operations are enqueued and have not finished on return. Memory is freed when its last
/// handle is dropped, after the device has become idle. [`Mem::read`] and [`Mem::write`] on device
/// memory wait for the copy, but not for work on streams: [`CudaDevice::wait`] does.
#[derive(Debug)]
pub struct CudaDevice {
    gpu: Arc<Gpu>,
    streams: Vec<Stream>,
    events: Mutex<Events>,
    multiprocessors: u32,
    compute: (u32, u32),
}

/// Events not known to be reached yet.
#[derive(Debug, Default)]
struct Events {
    open: BTreeMap<u64, Event>,
    recorded: u64,
}

/// Work recorded with [`CudaDevice::capture`].
#[derive(Debug)]
pub struct CudaGraph {
    graph: Graph,
}

/// Device or pinned memory behind a [`Mem`].
#[derive(Debug)]
struct Allocation {
    gpu: Arc<Gpu>,
    address: u64,
    place: Place,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        match self.place {
            Place::Pinned => self.gpu.free_pinned(self.address),
            _ => self.gpu.free(self.address),
        }
    }
}

impl Backing for Allocation {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), DeviceError> {
        self.gpu.read(self.address + offset, into)
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), DeviceError> {
        self.gpu.write(self.address + offset, from)
    }

    fn fill(&self, offset: u64, byte: u8, len: usize) -> Result<(), DeviceError> {
        self.gpu.fill(self.address + offset, byte, len)
    }
}

impl CudaDevice {
    /// Opens GPU `ordinal` with four streams.
    ///
    /// # Errors
    /// [`DeviceError::NoDriver`] where there is no driver, [`DeviceError::Driver`] for what it
    /// refuses.
    pub fn open(ordinal: u32) -> Result<Self, DeviceError> {
        Self::with_streams(ordinal, 4)
    }

    /// Opens GPU `ordinal` with streams `0..streams`.
    ///
    /// # Errors
    /// As [`CudaDevice::open`].
    pub fn with_streams(ordinal: u32, streams: u32) -> Result<Self, DeviceError> {
        let gpu = Gpu::open(ordinal)?;
        let streams = (0..streams).map(|_| gpu.stream()).collect::<Result<_, _>>()?;
        let multiprocessors = gpu.number(Number::Multiprocessors)?;
        let compute = (gpu.number(Number::Major)?, gpu.number(Number::Minor)?);
        Ok(Self { gpu, streams, events: Mutex::default(), multiprocessors, compute })
    }

    /// Compute capability, as in (9, 0).
    #[must_use]
    pub fn compute(&self) -> (u32, u32) {
        self.compute
    }

    /// Multiprocessors.
    #[must_use]
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Blocks until everything enqueued on `s` has finished. A fault of a kernel shows here at the
    /// latest.
    ///
    /// # Errors
    /// An unknown stream, or what the work failed with.
    pub fn wait(&self, s: StreamId) -> Result<(), DeviceError> {
        self.stream(s)?.wait()
    }

    /// Records what `enqueue` puts on `s`, to be replayed as a whole.
    ///
    /// # Errors
    /// What `enqueue` returns, an unknown stream, or work that can't be recorded.
    pub fn capture<E: From<DeviceError>>(
        &self,
        s: StreamId,
        enqueue: impl FnOnce() -> Result<(), E>,
    ) -> Result<CudaGraph, E> {
        Ok(CudaGraph { graph: self.stream(s)?.capture(enqueue)? })
    }

    /// Enqueues a recorded graph.
    ///
    /// # Errors
    /// An unknown stream, or what the driver refuses.
    pub fn replay(&self, s: StreamId, graph: &CudaGraph) -> Result<(), DeviceError> {
        self.stream(s)?.replay(&graph.graph)
    }

    /// Microseconds that the device takes for what `enqueue` puts on `s`; blocks until it is done.
    ///
    /// # Errors
    /// What `enqueue` returns, or what the driver refuses.
    pub fn time_us(
        &self,
        s: StreamId,
        enqueue: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<f64, DeviceError> {
        let (stream, begin, end) = (self.stream(s)?, self.gpu.event()?, self.gpu.event()?);
        stream.record(&begin)?;
        enqueue()?;
        stream.record(&end)?;
        end.us_since(&begin)
    }

    pub(super) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    pub(super) fn stream(&self, s: StreamId) -> Result<&Stream, DeviceError> {
        let unknown = DeviceError::UnknownId { what: "stream", id: u64::from(s.0) };
        self.streams.get(s.0 as usize).ok_or(unknown)
    }

    fn events(&self) -> MutexGuard<'_, Events> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(events: &Events, e: EventId) -> Result<(), DeviceError> {
        if e.0 >= 1 && e.0 <= events.recorded {
            return Ok(());
        }
        Err(DeviceError::UnknownId { what: "event", id: e.0 })
    }

    /// A copy inside of one allocation whose ranges overlap goes through memory of its own.
    fn copy_through(
        &self,
        stream: &Stream,
        to: u64,
        from: u64,
        len: usize,
    ) -> Result<(), DeviceError> {
        let between = Allocation {
            gpu: Arc::clone(&self.gpu),
            address: self.gpu.alloc(len)?,
            place: Place::Device,
        };
        stream.copy(between.address, from, len)?;
        stream.copy(to, between.address, len)
    }
}

impl Device for CudaDevice {
    fn caps(&self) -> Caps {
        Caps {
            name: self.gpu.name().unwrap_or_default(),
            threads: self.multiprocessors as usize,
            simd: "cuda",
            places: vec![Place::Host, Place::Shared, Place::Device, Place::Pinned],
        }
    }

    fn alloc(&self, place: Place, bytes: u64) -> Result<Mem, DeviceError> {
        if matches!(place, Place::Host | Place::Shared) {
            return Mem::map(place, bytes);
        }
        let failed =
            |source: std::io::Error| DeviceError::Alloc { bytes, place: place.name(), source };
        let len = usize::try_from(bytes).ok().filter(|len| isize::try_from(*len).is_ok());
        let len = len.ok_or_else(|| failed(std::io::ErrorKind::OutOfMemory.into()))?;
        let out_of_memory = |error| match error {
            DeviceError::Driver { code: 2, .. } => failed(std::io::ErrorKind::OutOfMemory.into()),
            other => other,
        };
        let address = match place {
            Place::Pinned => self.gpu.alloc_pinned(len.max(1)),
            _ => self.gpu.alloc(len.max(1)),
        };
        let address = address.map_err(out_of_memory)?;
        let allocation = Allocation { gpu: Arc::clone(&self.gpu), address, place };
        self.gpu.fill(address, 0, len)?;
        Mem::of_device(place, address, len, Box::new(allocation))
    }

    fn copy(&self, s: StreamId, to: &MemSlice, from: &MemSlice) -> Result<(), DeviceError> {
        let stream = self.stream(s)?;
        if to.len != from.len {
            return Err(DeviceError::UnequalLengths { to: to.len, from: from.len });
        }
        let (target, source) =
            (to.mem.address(to.offset, to.len)?, from.mem.address(from.offset, from.len)?);
        let len = to.len as usize;
        if len == 0 {
            return Ok(());
        }
        if target < source + from.len && source < target + to.len {
            return self.copy_through(stream, target, source, len);
        }
        stream.copy(target, source, len)
    }

    fn record(&self, s: StreamId) -> Result<EventId, DeviceError> {
        let stream = self.stream(s)?;
        let event = self.gpu.event()?;
        stream.record(&event)?;
        let mut events = self.events();
        events.recorded += 1;
        let id = events.recorded;
        events.open.insert(id, event);
        Ok(EventId(id))
    }

    fn after(&self, s: StreamId, e: EventId) -> Result<(), DeviceError> {
        let stream = self.stream(s)?;
        let events = self.events();
        Self::known(&events, e)?;
        events.open.get(&e.0).map_or(Ok(()), |event| stream.after(event))
    }

    fn reached(&self, e: EventId) -> Result<bool, DeviceError> {
        let mut events = self.events();
        Self::known(&events, e)?;
        let reached = events.open.get(&e.0).map_or(Ok(true), Event::is_reached)?;
        if reached {
            events.open.remove(&e.0);
        }
        Ok(reached)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_driver_the_answer_is_an_error_that_says_so() {
        // On a machine with a GPU there is nothing to see here.
        if let Err(error) = CudaDevice::open(0) {
            let text = error.to_string();
            assert!(text.starts_with("no CUDA driver") || text.contains("CUDA_ERROR"), "{text}");
        }
    }
}
