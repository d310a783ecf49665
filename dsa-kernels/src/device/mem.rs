//! Page memory: a mapping that is only ever read and written by raw copies.
#![expect(unsafe_code, reason = "mapped memory that another process may read")]

use super::Place;
use crate::error::DeviceError;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Shared handle of one allocation of page memory: zeroed, aligned to a memory page, unmapped with
/// the last handle.
///
/// It never becomes a slice, since a peer may be reading the same bytes. Every access is a
/// bounds-checked copy in or out. Two writers of the same bytes are excluded by the life of the
/// page that holds them; a read that races with a write may be torn, which the page's generation
/// and digest reveal.
#[derive(Clone)]
pub struct Mem {
    map: Arc<Map>,
}

struct Map {
    start: NonNull<u8>,
    /// Bytes that may be touched.
    len: usize,
    place: Place,
    owner: Owner,
}

/// Who gives the memory back.
enum Owner {
    /// We: bytes given to `mmap` (at least one), and the file behind a shared mapping.
    Mapping { mapped: usize, fd: Option<OwnedFd> },
    /// A device; when dropped.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only a GPU has such memory"))]
    Device(Box<dyn Backing>),
}

/// Memory of a device, freed when dropped. Ranges are checked by the caller; each call waits until
/// the bytes have moved. Only asked for where the host can't reach the memory itself.
pub(crate) trait Backing: Send + Sync {
    /// Copies bytes out.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), DeviceError>;
    /// Copies bytes in.
    fn write(&self, offset: u64, from: &[u8]) -> Result<(), DeviceError>;
    /// Sets bytes.
    fn fill(&self, offset: u64, byte: u8, len: usize) -> Result<(), DeviceError>;
}

// SAFETY: the mapping belongs to this value alone and is not tied to the thread that made it;
// `munmap` may be called from any thread.
unsafe impl Send for Map {}
// SAFETY: through `&Map` the bytes are touched by raw copies and atomics only, never by reference;
// `Mem`'s documentation says who excludes concurrent writers.
unsafe impl Sync for Map {}

impl Drop for Map {
    fn drop(&mut self) {
        let Owner::Mapping { mapped, .. } = &self.owner else { return };
        // SAFETY: `start` and `mapped` are those of the successful `mmap` in `Mem::map`, and this is
        // the only owner.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), *mapped) };
        debug_assert!(unmapped.is_ok(), "a mapping of our own can always be unmapped");
    }
}

impl fmt::Debug for Mem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mem").field("place", &self.map.place).field("len", &self.map.len).finish()
    }
}

impl Mem {
    /// Maps `bytes` zeroed bytes.
    pub(crate) fn map(place: Place, bytes: u64) -> Result<Self, DeviceError> {
        let failed =
            |source: std::io::Error| DeviceError::Alloc { bytes, place: place.name(), source };
        let too_large = || failed(std::io::ErrorKind::OutOfMemory.into());
        let len = usize::try_from(bytes).map_err(|_| too_large())?;
        if isize::try_from(len).is_err() {
            return Err(too_large());
        }
        let mapped = len.max(1);
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let (start, fd) = match place {
            Place::Host => {
                // SAFETY: no address is asked for, so the new mapping replaces nothing.
                let start = unsafe {
                    mmap_anonymous(std::ptr::null_mut(), mapped, access, MapFlags::PRIVATE)
                };
                (start.map_err(|e| failed(e.into()))?, None)
            }
            Place::Shared => {
                let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
                let fd = memfd_create("dsa-kernels", flags).map_err(|e| failed(e.into()))?;
                // Every page of the file exists from now on: a full machine is an error here, and not
                // a fault at the first touch, of ours or of a peer that maps the file.
                fallocate(&fd, FallocateFlags::empty(), 0, mapped as u64)
                    .map_err(|e| failed(e.into()))?;
                // A process that maps the file can rely on its size: nobody can make it fault.
                fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)
                    .map_err(|e| failed(e.into()))?;
                // SAFETY: as above; the file has `mapped` bytes, is sealed against shrinking, and
                // nobody else has its descriptor yet.
                let start =
                    unsafe { mmap(std::ptr::null_mut(), mapped, access, MapFlags::SHARED, &fd, 0) };
                (start.map_err(|e| failed(e.into()))?, Some(fd))
            }
            Place::Device | Place::Pinned => {
                return Err(DeviceError::NoSuchPlace { place: place.name() });
            }
        };
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(too_large)?;
        let owner = Owner::Mapping { mapped, fd };
        Ok(Self { map: Arc::new(Map { start, len, place, owner }) })
    }

    /// Memory that a device allocated at `address`; [`Place::Pinned`] memory is reached by the host
    /// at the same address, other memory through `owner` only.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_device(
        place: Place,
        address: u64,
        len: usize,
        owner: Box<dyn Backing>,
    ) -> Result<Self, DeviceError> {
        let refused = || DeviceError::NoSuchPlace { place: place.name() };
        let start = NonNull::new(address as *mut u8).ok_or_else(refused)?;
        let owner = Owner::Device(owner);
        Ok(Self { map: Arc::new(Map { start, len, place, owner }) })
    }

    /// The device, where the host can't reach the bytes itself.
    fn beyond_host(&self) -> Option<&dyn Backing> {
        match &self.map.owner {
            Owner::Device(owner) if self.map.place != Place::Pinned => Some(&**owner),
            _ => None,
        }
    }

    /// Address of `offset` as a number, after checking that `len` bytes follow.
    #[cfg(feature = "cuda")]
    pub(crate) fn address(&self, offset: u64, len: u64) -> Result<u64, DeviceError> {
        self.range(offset, len).map(|start| start as u64)
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.map.len as u64
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.map.len == 0
    }

    /// Where it lives.
    #[must_use]
    pub fn place(&self) -> Place {
        self.map.place
    }

    /// Descriptor of a [`Place::Shared`] allocation.
    #[must_use]
    pub fn shared_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.map.owner {
            Owner::Mapping { fd, .. } => fd.as_ref().map(AsFd::as_fd),
            Owner::Device(_) => None,
        }
    }

    /// Address of the first byte, valid as long as a handle lives. For registration with a
    /// transport; dereferencing it is the caller's affair.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.map.start.as_ptr()
    }

    /// Address of `offset`, after checking that `len` bytes follow.
    fn range(&self, offset: u64, len: u64) -> Result<*mut u8, DeviceError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len() => {
                // An address of a device is no pointer of ours: only its number is formed.
                Ok(self.map.start.as_ptr().wrapping_add(offset as usize))
            }
            _ => Err(DeviceError::OutOfRange { offset, len, capacity: self.len() }),
        }
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    #[inline]
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), DeviceError> {
        let from = self.range(offset, into.len() as u64)?;
        if let Some(device) = self.beyond_host() {
            return device.read(offset, into);
        }
        // SAFETY: `range` checked the bounds; `into` is ordinary Rust memory and can't overlap the
        // mapping, which is never handed out as a slice.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    #[inline]
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), DeviceError> {
        let to = self.range(offset, from.len() as u64)?;
        if let Some(device) = self.beyond_host() {
            return device.write(offset, from);
        }
        // SAFETY: as in `read`, in the other direction.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
        Ok(())
    }

    /// Sets bytes to zero.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    pub fn zero(&self, offset: u64, len: u64) -> Result<(), DeviceError> {
        let to = self.range(offset, len)?;
        if let Some(device) = self.beyond_host() {
            return device.fill(offset, 0, len as usize);
        }
        // SAFETY: `range` checked the bounds.
        unsafe { std::ptr::write_bytes(to, 0, len as usize) };
        Ok(())
    }

    /// Copies `len` bytes from `from` (possibly the same memory, possibly overlapping).
    pub(super) fn copy_from(
        &self,
        offset: u64,
        from: &Self,
        from_offset: u64,
        len: u64,
    ) -> Result<(), DeviceError> {
        let to = self.range(offset, len)?;
        let start = from.range(from_offset, len)?;
        if self.beyond_host().is_some() || from.beyond_host().is_some() {
            let mut bytes = vec![0; len as usize];
            from.read(from_offset, &mut bytes)?;
            return self.write(offset, &bytes);
        }
        // SAFETY: both ranges were checked and are the host's; `copy` allows overlap.
        unsafe { std::ptr::copy(start, to, len as usize) };
        Ok(())
    }

    /// The word at `offset`, for in-memory flags and generations.
    fn word(&self, offset: u64) -> Result<&AtomicU64, DeviceError> {
        if !offset.is_multiple_of(8) {
            return Err(DeviceError::Misaligned { offset });
        }
        let word = self.range(offset, 8)?;
        if self.beyond_host().is_some() {
            return Err(DeviceError::NoSuchPlace { place: "atomic words in device" });
        }
        // SAFETY: eight bytes inside of a mapping that lives as long as `self`, aligned because the
        // mapping is aligned to a memory page and `offset` to 8. An `AtomicU64` may be shared.
        Ok(unsafe { AtomicU64::from_ptr(word.cast()) })
    }

    /// Atomic read with acquire order of the native-endian word at `offset`.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`], or [`DeviceError::Misaligned`] unless 8 divides `offset`.
    pub fn load_word(&self, offset: u64) -> Result<u64, DeviceError> {
        Ok(self.word(offset)?.load(Ordering::Acquire))
    }

    /// Atomic write with release order.
    ///
    /// # Errors
    /// As [`Mem::load_word`].
    pub fn store_word(&self, offset: u64, value: u64) -> Result<(), DeviceError> {
        self.word(offset)?.store(value, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_zeroed_and_keeps_what_is_written() {
        for place in [Place::Host, Place::Shared] {
            let mem = Mem::map(place, 10_000).unwrap();
            let mut all = vec![1; 10_000];
            mem.read(0, &mut all).unwrap();
            assert!(all.iter().all(|b| *b == 0));
            mem.write(9_999, &[7]).unwrap();
            mem.write(0, &[1, 2, 3]).unwrap();
            mem.zero(1, 1).unwrap();
            mem.read(0, &mut all).unwrap();
            assert_eq!((&all[..4], all[9_999]), (&[1, 0, 3, 0][..], 7));
            assert_eq!(mem.as_ptr() as usize % 4096, 0);
            assert_eq!((mem.len(), mem.is_empty(), mem.place()), (10_000, false, place));
        }
    }

    #[test]
    fn every_access_is_bounded() {
        let mem = Mem::map(Place::Host, 64).unwrap();
        assert!(mem.read(64, &mut []).is_ok());
        assert!(mem.read(64, &mut [0]).is_err());
        assert!(mem.write(60, &[0; 5]).is_err());
        assert!(mem.zero(u64::MAX, 2).is_err());
        assert!(mem.load_word(64).is_err());
        assert!(matches!(mem.load_word(4), Err(DeviceError::Misaligned { offset: 4 })));
        assert!(matches!(
            Mem::map(Place::Host, u64::MAX),
            Err(DeviceError::Alloc { bytes: u64::MAX, .. })
        ));
        let empty = Mem::map(Place::Shared, 0).unwrap();
        assert!(empty.is_empty() && empty.write(0, &[1]).is_err());
    }

    #[test]
    fn shared_memory_is_seen_through_its_descriptor() {
        use std::io::Read;
        let mem = Mem::map(Place::Shared, 4096).unwrap();
        mem.write(100, b"page").unwrap();
        let fd = mem.shared_fd().unwrap().try_clone_to_owned().unwrap();
        let mut bytes = Vec::new();
        std::fs::File::from(fd).read_to_end(&mut bytes).unwrap();
        assert_eq!((bytes.len(), &bytes[100..104]), (4096, &b"page"[..]));
        assert!(Mem::map(Place::Host, 1).unwrap().shared_fd().is_none());
    }

    #[test]
    fn shared_memory_has_all_its_pages_before_the_first_touch() {
        let bytes = 3 << 20;
        let mem = Mem::map(Place::Shared, bytes).unwrap();
        let stat = rustix::fs::fstat(mem.shared_fd().unwrap()).unwrap();
        let (size, blocks) = (stat.st_size as u64, stat.st_blocks as u64);
        assert_eq!(size, bytes);
        assert!(blocks * 512 >= bytes, "{blocks} blocks of 512 bytes for {bytes} bytes");
    }

    #[test]
    fn word_published_by_another_thread_carries_its_bytes() {
        let mem = Mem::map(Place::Host, 4096).unwrap();
        let writer = {
            let mem = mem.clone();
            std::thread::spawn(move || {
                mem.write(64, &[9; 256]).unwrap();
                mem.store_word(8, 1).unwrap();
            })
        };
        while mem.load_word(8).unwrap() == 0 {
            std::hint::spin_loop();
        }
        let mut got = [0; 256];
        mem.read(64, &mut got).unwrap();
        assert_eq!(got, [9; 256]);
        writer.join().unwrap();
    }
}
