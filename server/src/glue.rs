//! Adapters between the crates: page memory over the device, pages as transfer regions, digests
//! as the hand-off's verifier. Nothing else in the server touches page bytes.

pub mod handoff;
pub mod hash;
pub mod ledger;
pub mod mover;
pub mod objects;
pub mod order;
pub mod payload;
pub mod pools;
pub mod regions;
