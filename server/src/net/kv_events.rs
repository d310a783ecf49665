//! Publishes what a worker's cache gains and loses, in the format that vLLM and SGLang publish over
//! ZeroMQ, for routers that send a prompt to where its prefix is.
//!
//! The worker hands batches over with [`Outlet::publish`], which never waits: what finds no room is
//! dropped, and its number is missing. A thread called `kv-events` sends them to every subscriber
//! that is there, keeps the last ones, and answers who asks for those again. A subscriber that reads
//! too slowly misses batches, and one that does not read at all is hung up on.
//!
//! Every message has three frames: topic, number of the batch (eight bytes, big endian) and payload
//! ([`wire`]). A request on the replay endpoint has an empty frame and the first number wanted; it
//! is answered with one message of an empty frame, number and payload for each batch that is still
//! kept, and one whose number is -1 at the end.

mod config;
mod hub;
pub mod wire;
mod zmtp;

pub use config::{BadKvEvents, Endpoint, KvEventsConfig};

use hub::{Hub, replays, subscribers};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use wire::{Batch, KvEvent};

/// An endpoint that cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[error("--kv-events-config: {field} {endpoint} cannot be listened on ({source})")]
pub struct BindError {
    /// The field that names it.
    pub field: &'static str,
    /// What it says.
    pub endpoint: Endpoint,
    /// What the operating system said.
    pub source: std::io::Error,
}

/// Counted since start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventNumbers {
    /// Batches that were published, to however many subscribers.
    pub published: u64,
    /// Batches that found no room to wait.
    pub dropped: u64,
    /// Batches that a slow subscriber did not get, for each subscriber.
    pub missed: u64,
    /// Subscribers that are there.
    pub subscribers: u64,
}

#[derive(Debug, Default)]
struct Counters {
    published: AtomicU64,
    dropped: AtomicU64,
    missed: AtomicU64,
    subscribers: AtomicU64,
}

/// Where a worker puts its events.
#[derive(Debug)]
pub struct Outlet {
    batches: Sender<Batch>,
    next_seq: u64,
    counters: Arc<Counters>,
}

impl Outlet {
    /// Hands a batch over, or drops it if too many wait; never blocks.
    pub fn publish(&mut self, time_s: f64, events: Vec<KvEvent>) {
        let batch = Batch { seq: self.next_seq, time_s, events };
        self.next_seq += 1;
        if self.batches.try_send(batch).is_err() {
            self.counters.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counters since start.
    #[must_use]
    pub fn numbers(&self) -> EventNumbers {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        EventNumbers {
            published: read(&self.counters.published),
            dropped: read(&self.counters.dropped),
            missed: read(&self.counters.missed),
            subscribers: read(&self.counters.subscribers),
        }
    }
}

/// The sockets of a publisher, bound and not yet served.
#[derive(Debug)]
pub struct Publisher {
    config: KvEventsConfig,
    /// None if it connects to a subscriber that listens.
    events: Option<TcpListener>,
    replay: Option<TcpListener>,
}

impl Publisher {
    /// Binds what is to be listened on.
    ///
    /// # Errors
    ///
    /// [`BindError`], with the field that names the endpoint.
    pub fn bind(config: KvEventsConfig) -> Result<Self, BindError> {
        let listens = Some(&config.endpoint).filter(|endpoint| endpoint.is_listened_on());
        let events = listens.map(|endpoint| bind("endpoint", endpoint)).transpose()?;
        let replay = config.replay_endpoint.as_ref();
        let replay = replay.map(|endpoint| bind("replay_endpoint", endpoint)).transpose()?;
        Ok(Self { config, events, replay })
    }

    /// Where subscribers connect, if it is they who connect.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.events.as_ref().and_then(|listener| listener.local_addr().ok())
    }

    /// Where missed batches can be asked for.
    #[must_use]
    pub fn replay_address(&self) -> Option<SocketAddr> {
        self.replay.as_ref().and_then(|listener| listener.local_addr().ok())
    }

    /// Starts the thread that publishes. It ends when the outlet is dropped, after what was handed
    /// over by then has been sent, but a second later at the latest.
    ///
    /// # Errors
    ///
    /// What the operating system says of a new thread and its events.
    pub fn start(self) -> std::io::Result<(Outlet, JoinHandle<()>)> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let counters = Arc::new(Counters::default());
        let (batches, waiting) = channel(self.config.max_queue_size);
        let (events, replay) = {
            let _context = runtime.enter();
            let adopt = |listener: Option<TcpListener>| {
                listener.map(tokio::net::TcpListener::from_std).transpose()
            };
            (adopt(self.events)?, adopt(self.replay)?)
        };
        let hub = Hub::new(self.config, Arc::clone(&counters));
        let thread = std::thread::Builder::new().name("kv-events".to_owned()).spawn(move || {
            runtime.block_on(serve(hub, waiting, events, replay));
        })?;
        Ok((Outlet { batches, next_seq: 0, counters }, thread))
    }
}

fn bind(field: &'static str, endpoint: &Endpoint) -> Result<TcpListener, BindError> {
    let bound = TcpListener::bind(endpoint.listen_address());
    let listener = bound.and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    listener.map_err(|source| BindError { field, endpoint: endpoint.clone(), source })
}

/// All that a peer says, from the first byte on, as it would be read; for fuzzing.
pub fn fuzz_target(bytes: &[u8]) {
    hub::hear(bytes);
}

async fn serve(
    hub: Hub,
    mut waiting: Receiver<Batch>,
    events: Option<tokio::net::TcpListener>,
    replay: Option<tokio::net::TcpListener>,
) {
    let hub = Arc::new(hub);
    let accepting = tokio::spawn(subscribers(Arc::clone(&hub), events));
    let replaying = replay.map(|listener| tokio::spawn(replays(Arc::clone(&hub), listener)));
    while let Some(batch) = waiting.recv().await {
        hub.publish(&batch);
    }
    accepting.abort();
    if let Some(replaying) = replaying {
        replaying.abort();
    }
    hub.close().await;
}

/// An outlet that nobody listens to.
#[cfg(test)]
pub(crate) fn unserved() -> Outlet {
    Outlet { batches: channel(1).0, next_seq: 0, counters: Arc::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_finds_no_room_is_counted_and_leaves_a_gap() {
        let (batches, mut waiting) = channel(2);
        let mut outlet = Outlet { batches, next_seq: 0, counters: Arc::default() };
        let mut publish = |times| (0..times).for_each(|_| outlet.publish(1.5, Vec::new()));
        let mut seqs = || -> Vec<u64> {
            std::iter::from_fn(|| waiting.try_recv().ok()).map(|batch| batch.seq).collect()
        };
        publish(5);
        assert_eq!(seqs(), [0, 1]);
        publish(1);
        assert_eq!(seqs(), [5]);
        drop(waiting);
        outlet.publish(1.5, Vec::new());
        assert_eq!(outlet.numbers(), EventNumbers { dropped: 4, ..EventNumbers::default() });
    }
}
