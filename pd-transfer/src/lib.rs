//! Prefill-decode hand-off.

#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;

#[cfg(feature = "std")]
pub mod copy;
pub mod counters;
#[cfg(feature = "std")]
pub mod driver;
pub mod endpoint;
pub mod get;
pub mod hash;
pub mod id;
#[cfg(feature = "std")]
pub mod inprocess;
pub mod link;
pub mod receiver;
pub mod sender;
#[cfg(feature = "std")]
pub mod shm;
#[cfg(feature = "std")]
mod socket;
pub mod states;
#[cfg(feature = "std")]
pub mod tcp;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(feature = "std")]
pub mod transport;
pub mod wire;
