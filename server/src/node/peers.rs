//! The prefill workers of a decode worker: those that were named at the start, and those that come
//! and go.

use super::assembly::{Assembly, Hear, by_socket, is_blocked, socket_address};
use super::ways::{News, Step, Way, Ways};
use crate::config::{Backend, ConfigError, ServeArgs, is_local};
use crate::worker::{Role, Shared};
use anyhow::Context;
use pd_transfer::driver::{DriverGone, DriverHandle};
use pd_transfer::endpoint::Upcall;
use pd_transfer::shm::Shm;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

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
    links: Arc<Links>,
}

/// The drivers of a decode worker, and what each prefill worker is connected by.
#[derive(Debug, Default)]
struct Links {
    /// Shared memory, for workers of this host.
    near: OnceLock<DriverHandle>,
    /// What goes between hosts.
    far: OnceLock<DriverHandle>,
    /// By bootstrap address.
    connected: Mutex<BTreeMap<String, Connected>>,
    /// Where the worker finds who is to be there.
    shared: Arc<Shared>,
}

/// How a connection to a prefill worker is kept.
#[derive(Debug)]
enum Connected {
    /// By one transport.
    By(Way),
    /// By shared memory or TCP, whichever can be had.
    Either(Ways),
}

impl Connected {
    fn ways(&self) -> Vec<Way> {
        match self {
            Self::By(way) => vec![*way],
            Self::Either(ways) => ways.wanted().collect(),
        }
    }
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

/// What a driver knows a prefill worker by.
fn target_of(way: Way, address: &str) -> Result<String, ConfigError> {
    if way == Way::Far {
        return Ok(address.to_owned());
    }
    if !is_local(address) {
        return Err(ConfigError::NotLocal(address.to_owned()));
    }
    let port = address.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    port.map(socket_address).ok_or_else(|| ConfigError::BadAddress(address.to_owned()))
}

impl Links {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Connected>> {
        // Every change is a single insertion, removal or step of a machine.
        self.connected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn driver(&self, way: Way) -> Option<&DriverHandle> {
        match way {
            Way::Near => self.near.get(),
            Way::Far => self.far.get(),
        }
    }

    fn connect(&self, way: Way, address: &str) -> Result<(), PeerError> {
        let target = target_of(way, address)?;
        let bad = || ConfigError::BadAddress(address.to_owned());
        let driver = self.driver(way).ok_or_else(bad)?;
        self.shared.expect_peer(&target, address);
        Ok(driver.connect(&target)?)
    }

    fn disconnect(&self, way: Way, address: &str) -> Result<(), PeerError> {
        let target = target_of(way, address)?;
        self.shared.forget_peer(&target);
        match self.driver(way) {
            Some(driver) => Ok(driver.disconnect(&target)?),
            None => Ok(()),
        }
    }

    /// Takes in what a driver has to tell of its peers, on that driver's thread.
    fn hear(&self, way: Way, upcall: &Upcall) {
        let (target, news) = match upcall {
            Upcall::PeerUp { address, .. } => (address, News::Up),
            Upcall::PeerDown { address, .. } => (address, News::Down),
            Upcall::NotReached { address, text } => (address, News::Unreached(text.clone())),
            _ => return,
        };
        let mut steps = None;
        for (address, connected) in self.lock().iter_mut() {
            if let Connected::Either(ways) = connected
                && target_of(way, address).is_ok_and(|known| known == *target)
            {
                steps = Some((address.clone(), ways.handle(way, news)));
                break;
            }
        }
        let Some((address, steps)) = steps else { return };
        for step in steps {
            if let Err(error) = self.take(step, &address) {
                tracing::debug!(address, %error, "no hand-off to tell");
            }
        }
    }

    fn take(&self, step: Step, address: &str) -> Result<(), PeerError> {
        match step {
            Step::Connect(way) => self.connect(way, address)?,
            Step::Disconnect(way) => self.disconnect(way, address)?,
            Step::Settled(Way::Near, _) => {
                tracing::info!(address, "pages come through shared memory");
            }
            Step::Settled(Way::Far, why) => {
                let why = why.unwrap_or_default();
                let why = why.lines().next().unwrap_or_default();
                tracing::warn!(
                    address,
                    "pages come over TCP: the prefill worker is there, but not its shared memory \
                     ({why}); workers with another user, TMPDIR or container do not share any"
                );
            }
        }
        Ok(())
    }
}

impl Peers {
    /// Keeps a connection to the prefill worker with this bootstrap address; nothing if there is one.
    ///
    /// # Errors
    /// [`PeerError`], and the address is not tried.
    pub fn connect(&mut self, address: &str) -> Result<(), PeerError> {
        if self.links.lock().contains_key(address) {
            return Ok(());
        }
        self.connect_by(is_near(self.backend, address), address)
    }

    fn connect_by(&self, is_near: bool, address: &str) -> Result<(), PeerError> {
        let way = if is_near { Way::Near } else { Way::Far };
        target_of(way, address)?;
        let has_choice = is_near && self.backend == Backend::Auto;
        let connected =
            if has_choice { Connected::Either(Ways::new()) } else { Connected::By(way) };
        // Before the driver can have news of it.
        self.links.lock().insert(address.to_owned(), connected);
        let done = self.links.connect(way, address);
        if done.is_err() {
            self.links.lock().remove(address);
        }
        done
    }

    /// Gives the connection up: what is asked of the worker and not here yet is asked of another one
    /// or computed here.
    ///
    /// # Errors
    /// The hand-off has ended.
    pub fn disconnect(&mut self, address: &str) -> Result<(), PeerError> {
        let removed = self.links.lock().remove(address);
        let ways = removed.map(|connected| connected.ways()).unwrap_or_default();
        ways.into_iter().try_for_each(|way| self.links.disconnect(way, address))
    }
}

/// The links outlive their drivers, which would otherwise keep each other.
fn tell(links: &Weak<Links>, way: Way, upcall: &Upcall) {
    if let Some(links) = links.upgrade() {
        links.hear(way, upcall);
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
        let links = Links { shared: Arc::clone(&draft.shared), ..Links::default() };
        let links = Arc::new(links);
        let has_named_near = named.iter().any(|(is_near, _)| *is_near);
        if has_near || has_named_near {
            let heard = Arc::downgrade(&links);
            let hear: Hear = Arc::new(move |upcall| tell(&heard, Way::Near, upcall));
            self.drive(&mut draft, "shm", Shm::factory(1), (None, Some(hear)))?;
            let driver = draft.drivers.last().map(|(_, driver)| driver.clone());
            driver.into_iter().for_each(|driver| drop(links.near.set(driver)));
        }
        // Where the shared memory of a worker of this host is not to be had, TCP is.
        let may_fall_back = has_named_near && backend == Backend::Auto;
        if has_far || may_fall_back || named.iter().any(|(is_near, _)| !is_near) {
            let heard = Arc::downgrade(&links);
            let hear: Hear = Arc::new(move |upcall| tell(&heard, Way::Far, upcall));
            let (name, factory) = by_socket(backend, &draft.ucx);
            self.drive(&mut draft, name, factory, (None, Some(hear)))?;
            let driver = draft.drivers.last().map(|(_, driver)| driver.clone());
            driver.into_iter().for_each(|driver| drop(links.far.set(driver)));
        }
        let peers = Peers { backend, links };
        for (is_near, address) in named {
            peers.connect_by(is_near, address).context("connect to a prefill worker")?;
        }
        self.peers = Some(peers);
        self.launch(draft)
    }
}
