//! Pool memory as transfer regions.
#![expect(unsafe_code, reason = "one unsafe trait implementation: memory that stays mapped")]

use dsa_kernels::Mem;
use pd_transfer::transport::RegionOwner;
use std::os::fd::BorrowedFd;

/// A pool's memory, registered with a transport.
#[derive(Clone, Debug)]
pub struct PoolRegion(pub Mem);

// SAFETY: `Mem` is a reference-counted mapping that is neither moved nor unmapped while a clone of
// it lives (dsa-kernels, device memory); `PoolRegion` holds such a clone.
unsafe impl RegionOwner for PoolRegion {
    fn base(&self) -> *mut u8 {
        self.0.as_ptr()
    }

    fn len(&self) -> u64 {
        self.0.len()
    }

    fn shared_fd(&self) -> Option<BorrowedFd<'_>> {
        self.0.shared_fd()
    }
}
