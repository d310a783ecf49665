//! Measuring a link between two machines: a side that offers pages with known bytes, and a side that
//! pulls them, checks each one, and says how fast that was. The program `pd-link` is this with flags.
//!
//! It runs the same drivers, transports and checks as a hand-off, so that what it says about a link
//! is what a hand-off will meet there.

mod measure;
mod pages;
mod report;
mod serve;

pub use measure::{MeasureConfig, measure};
pub use report::{Bandwidth, Report, RoundTrip, SizeReport};
pub use serve::{ServeConfig, Server, serve};

use crate::driver::{DriverConfig, DriverError, DriverGone};
use crate::hash::hash128;
use crate::receiver::FailReason;
use crate::shm::Shm;
use crate::tcp::Tcp;
use crate::transport::{RegionOwner, TransportFactory};
use crate::ucx::Ucx;
use crate::wire::{Fingerprint, Incarnation, RefuseReason, Role};
use std::fmt;
use std::io::{self, Read};
use std::str::FromStr;
use std::sync::Arc;

/// A transport by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Sockets.
    Tcp,
    /// Shared memory of one host; addresses are `unix:PATH`.
    Shm,
    /// One-sided reads of the UCX library.
    Ucx,
}

impl Kind {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Shm, Self::Ucx];

    /// As in flags and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Shm => "shm",
            Self::Ucx => "ucx",
        }
    }

    /// Addresses of another kind would only ever be tried again.
    fn check_address(self, address: &str) -> Result<(), ToolError> {
        let is_path = address.starts_with("unix:");
        let wanted = match self {
            Self::Shm if !is_path => "unix:PATH",
            Self::Tcp | Self::Ucx if is_path || !address.contains(':') => "HOST:PORT",
            _ => return Ok(()),
        };
        Err(ToolError::Config(format!("address {address:?}: {self} needs {wanted}")))
    }

    /// Makes the transport with its default settings.
    #[must_use]
    pub fn factory(self) -> TransportFactory {
        match self {
            Self::Tcp => Tcp::factory(),
            Self::Shm => Shm::factory(2),
            Self::Ucx => Ucx::factory(Arc::default()),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| format!("no transport {text:?}, there are tcp, shm and ucx"))
    }
}

/// Why a link was not measured, or what is wrong with it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ToolError {
    /// The driver did not start: the address can't be used, the transport is not there.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The driver ended by itself.
    #[error(transparent)]
    Gone(#[from] DriverGone),
    /// The operating system says no.
    #[error("{during}: {source}")]
    Io {
        /// What was tried.
        during: &'static str,
        /// Its answer.
        source: io::Error,
    },
    /// Nobody answered.
    #[error("nobody answers at {address} over {kind} for {seconds} s{}", in_brackets(.said))]
    NoAnswer {
        /// Where.
        address: String,
        /// Over what.
        kind: Kind,
        /// How long.
        seconds: f64,
        /// What the transport said about it, if anything.
        said: String,
    },
    /// Something answered that is not the other side of this tool: another transport, another
    /// protocol version, a server.
    #[error("{address} refuses, {}: {text}", reason_text(*.reason))]
    Refused {
        /// Where.
        address: String,
        /// The class of the reason.
        reason: RefuseReason,
        /// Both sides' values.
        text: String,
    },
    /// A flag does not fit the peer or this tool.
    #[error("{0}")]
    Config(String),
    /// The link broke while it was measured.
    #[error("link lost: {0}")]
    Lost(String),
    /// A transfer failed.
    #[error("transfer of {pages} pages of {page_bytes} bytes: {why}")]
    Transfer {
        /// Pages of the transfer.
        pages: u32,
        /// Bytes of each.
        page_bytes: u32,
        /// Why.
        why: FailReason,
    },
    /// Nothing happened for too long.
    #[error("no news of the transfer for {seconds} s")]
    Stalled {
        /// How long.
        seconds: u64,
    },
    /// Bytes that arrived are not those that were sent. The link must not be used.
    #[error(
        "{wrong} of {checked} pages of {page_bytes} bytes arrived with other bytes; the first is page {first}"
    )]
    Mismatch {
        /// Bytes of a page.
        page_bytes: u32,
        /// Pages with wrong bytes.
        wrong: u64,
        /// Pages that were checked.
        checked: u64,
        /// The lowest number of a wrong page.
        first: u32,
    },
}

impl ToolError {
    /// What a program returns: 3 if bytes arrived wrong, 1 otherwise.
    #[must_use]
    pub const fn exit_code(&self) -> u8 {
        if matches!(self, Self::Mismatch { .. }) { 3 } else { 1 }
    }
}

fn in_brackets(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(" ({text})") }
}

fn reason_text(reason: RefuseReason) -> &'static str {
    match reason {
        RefuseReason::Protocol => "another protocol or transport",
        RefuseReason::Layout => "it has other pages, so it is no `pd-link serve`",
        RefuseReason::Role => "its role does not fit",
        RefuseReason::Busy => "it has no room for another link",
        RefuseReason::SelfLink => "it is this process",
    }
}

/// Sixteen random bytes.
fn random() -> Result<[u8; 16], ToolError> {
    let mut bytes = [0; 16];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|source| ToolError::Io { during: "read random bytes", source })?;
    Ok(bytes)
}

/// Both sides' configuration; pages of this tool fit no other program's.
fn driver_config(role: Role, memory: &Arc<dyn RegionOwner>) -> Result<DriverConfig, ToolError> {
    let layout = "pages of pd-link, version 1";
    let fingerprint = Fingerprint(hash128(layout.as_bytes()));
    let incarnation = Incarnation(random()?);
    let mut config = DriverConfig::new(role, incarnation, fingerprint, layout.into());
    config.regions.push(Arc::clone(memory));
    Ok(config)
}
