//! Prefill-decode hand-off that can't corrupt silently: protocol, transports, and the order of
//! events up to verification.
//!
//! A prefill node computes the pages of a prompt, a decode node needs them. The decode side pulls:
//! it reads pages out of the prefill side's memory as they are sealed, and every byte that it uses
//! later was checked after it landed. The crate knows nothing of what the bytes mean: layouts,
//! pages and tags are opaque 16-byte values, and whether a page is right is asked of a
//! [`driver::Verifier`].
//!
//! # The happy path
//!
//! ```text
//! decode (receiver)                         prefill (sender)
//! Want{attempt, request, have}  ─────────►  Requested → compute
//!                               ◄─────────  Accepted
//!                               ◄─────────  Ready{pages, tags, guards}   (many, while it computes)
//! get page, guard before/after  ═════════►  (memory is read, never written, by the peer)
//! verify tag
//!                               ◄─────────  Final{record, hash}
//! all pages verified, counts, sums and hashes equal: Completed
//! Done                          ─────────►  Release: pages may be unpinned
//!                               ◄─────────  Closed
//! ```
//!
//! # The ways it goes wrong
//!
//! - **A page is wrong or was reused under the read.** The receiver asks for fresh target pages for
//!   that page's group, once ([`endpoint::Upcall::Fresh`]); a second time the attempt fails.
//! - **Somebody gives up** (rejection, cancellation, timeout, violation). The receiver starts no
//!   new get, waits for its own to end, then says `Quiet` to its upper layer and `Failed` to the
//!   sender, which releases its pages on that word. No timer ever releases a page.
//! - **The link is lost.** The transport stops every access first and then says so; both sides end
//!   their attempts on it.
//! - **Messages are lost, late, doubled or from another life.** Everything is idempotent: `Want`
//!   and `Resume` ask again, `Done` and `Failed` are repeated until `Closed`; sequence numbers and
//!   incarnations drop the rest, counted.
//!
//! # Layers
//!
//! [`sender`], [`receiver`] and [`link`] are state machines without IO; they move by the tables in
//! [`states`] and speak in the types of [`wire`]. [`endpoint`] joins them. [`group`] decides for several
//! ranks that hand over one request together. All that is `no_std`.
//! With the feature `std`, [`driver`] runs an endpoint on a thread over a [`transport`]:
//! [`inprocess`], [`shm`], [`tcp`] or [`ucx`]. The feature `testing` adds fault injection, the conformance
//! suite and a simulated world; `tools` measures links.

#![cfg_attr(not(feature = "std"), no_std)]

extern crate alloc;

#[macro_use]
mod guard;

#[cfg(feature = "std")]
pub mod copy;
pub mod counters;
#[cfg(feature = "std")]
pub mod driver;
pub mod endpoint;
#[cfg(feature = "std")]
mod gather;
pub mod get;
pub mod group;
#[cfg(feature = "std")]
mod guard_word;
pub mod hash;
pub mod id;
#[cfg(feature = "std")]
pub mod inprocess;
pub mod link;
pub mod manifest;
#[cfg(feature = "std")]
pub mod page_hash;
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
#[cfg(feature = "tools")]
pub mod tools;
#[cfg(feature = "std")]
pub mod transport;
#[cfg(feature = "std")]
pub mod ucx;
pub mod wire;

/// Compiles and runs the example of the README.
#[cfg(all(doctest, feature = "std"))]
#[doc = include_str!("../README.md")]
struct Readme;
