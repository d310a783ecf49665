//! The prefill workers of a decode worker: those that were named at the start, and those that come
//! and go.

use super::{Assembly, by_socket, is_blocked, socket_address};
use crate::config::{Backend, ConfigError, ServeArgs, is_local};
use crate::worker::Role;
use anyhow::Context;
use pd_transfer::driver::{DriverGone, DriverHandle};
use pd_transfer::shm::Shm;
use std::collections::BTreeMap;

/// A prefill worker that cannot be connected to.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// Its address is none, or not for this transport.
    #[error(transparent)]
    Address(#[from] ConfigError),
    /// The hand-off has ended.
    #[error("the hand-off has ended")]
    Ended(#[from] DriverGone),
}

/// Connects a decode worker to prefill workers, by the transport that leads to each.
#[derive(Debug)]
pub struct Peers {
    backend: Backend,
    /// Shared memory, for workers of this host.
    near: Option<DriverHandle>,
    /// What goes between hosts.
    far: Option<DriverHandle>,
    /// What each worker's driver knows it by.
    connected: BTreeMap<String, (DriverHandle, String)>,
}

/// Whether a prefill worker is reached through shared memory.
fn is_near(backend: Backend, address: &str) -> bool {
    match backend {
        Backend::Tcp | Backend::Ucx => false,
        Backend::Shm => true,
        // Where a file blocks the socket the prefill worker has TCP only.
        Backend::Auto => is_local(address) && !is_blocked(address),
    }
}

impl Peers {
    /// Keeps a connection to the prefill worker with this bootstrap address; nothing if there is one.
    ///
    /// # Errors
    /// [`PeerError`], and the address is not tried.
    pub fn connect(&mut self, address: &str) -> Result<(), PeerError> {
        if self.connected.contains_key(address) {
            return Ok(());
        }
        self.connect_by(is_near(self.backend, address), address)
    }

    fn connect_by(&mut self, is_near: bool, address: &str) -> Result<(), PeerError> {
        let bad = || ConfigError::BadAddress(address.to_owned());
        let (driver, target) = if is_near {
            if !is_local(address) {
                return Err(ConfigError::NotLocal(address.to_owned()).into());
            }
            let port = address.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
            (&self.near, socket_address(port.ok_or_else(bad)?))
        } else {
            (&self.far, address.to_owned())
        };
        let driver = driver.clone().ok_or_else(bad)?;
        driver.connect(&target)?;
        self.connected.insert(address.to_owned(), (driver, target));
        Ok(())
    }

    /// Gives the connection up: what is asked of the worker and not here yet is asked of another one
    /// or computed here.
    ///
    /// # Errors
    /// The hand-off has ended.
    pub fn disconnect(&mut self, address: &str) -> Result<(), PeerError> {
        let Some((driver, target)) = self.connected.remove(address) else { return Ok(()) };
        Ok(driver.disconnect(&target)?)
    }
}

impl Assembly<'_> {
    /// A decode worker, connected to the prefill workers that were named; more may follow where
    /// there is discovery.
    pub(super) fn add_decode(&mut self, args: &ServeArgs) -> anyhow::Result<()> {
        let mut draft = self.draft(Role::Decode)?;
        let backend = args.disaggregation_transfer_backend;
        let named: Vec<(bool, &String)> = args
            .disaggregation_bootstrap
            .iter()
            .map(|address| (is_near(backend, address), address))
            .collect();
        // A driver is made before its worker starts, so where any worker may come there are both.
        let may_come = args.discovery.is_some();
        let has_near = may_come && matches!(backend, Backend::Auto | Backend::Shm);
        let has_far = may_come && backend != Backend::Shm;
        let mut peers = Peers { backend, near: None, far: None, connected: BTreeMap::new() };
        if has_near || named.iter().any(|(is_near, _)| *is_near) {
            self.drive(&mut draft, "shm", Shm::factory(1), None)?;
            peers.near = draft.drivers.last().map(|(_, driver)| driver.clone());
        }
        if has_far || named.iter().any(|(is_near, _)| !is_near) {
            let (name, factory) = by_socket(backend, &draft.ucx);
            self.drive(&mut draft, name, factory, None)?;
            peers.far = draft.drivers.last().map(|(_, driver)| driver.clone());
        }
        for (is_near, address) in named {
            peers.connect_by(is_near, address).context("connect to a prefill worker")?;
        }
        self.peers = Some(peers);
        self.launch(draft)
    }
}
