//! Subscribers, the batches that wait for each of them, and those that can be asked for again.

use super::Counters;
use super::config::KvEventsConfig;
use super::wire::Batch;
use super::zmtp::{Incoming, Kind, handshake, message, pong};
use bytes::Bytes;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};

/// Subscribers at a time; one more is hung up on.
const SUBSCRIBERS_MAX: u32 = 64;
/// Connections to the replay endpoint at a time.
const REPLAYS_MAX: u32 = 16;
/// Topics that one subscriber may have subscribed to.
const TOPICS_MAX: usize = 64;
/// Most bytes that wait for one subscriber, however few batches they are.
const WAITING_BYTES_MAX: usize = 64 << 20;
/// Most bytes of batches that are kept, however few batches they are.
const KEPT_BYTES_MAX: usize = 256 << 20;
/// How long a peer has for its part of the handshake.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// How long a peer may take to read one message.
const WRITE_LIMIT: Duration = Duration::from_secs(60);
/// Pause before the next attempt to connect, or to accept after an error.
const AGAIN: Duration = Duration::from_millis(500);
/// How long subscribers have to read the last batches when the process ends.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// The number that ends the answer to a request.
const END: [u8; 8] = (-1_i64).to_be_bytes();

/// One subscriber, as the publisher sees it.
#[derive(Debug)]
struct Subscriber {
    messages: Sender<Bytes>,
    /// Bytes that wait in there.
    waiting: Arc<AtomicUsize>,
}

#[derive(Debug, Default)]
struct Kept {
    batches: VecDeque<(u64, Bytes)>,
    bytes: usize,
}

#[derive(Debug)]
pub(super) struct Hub {
    config: KvEventsConfig,
    counters: Arc<Counters>,
    subscribers: Mutex<Vec<Subscriber>>,
    kept: Mutex<Kept>,
    /// One for each subscriber that may come.
    seats: Arc<Semaphore>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Hub {
    pub(super) fn new(config: KvEventsConfig, counters: Arc<Counters>) -> Self {
        Self {
            config,
            counters,
            subscribers: Mutex::default(),
            kept: Mutex::default(),
            seats: Arc::new(Semaphore::new(SUBSCRIBERS_MAX as usize)),
        }
    }

    /// Sends a batch to whoever is there, as far as there is room, and keeps it.
    pub(super) fn publish(&self, batch: &Batch) {
        let payload = Bytes::from(batch.encode());
        let seq = batch.seq.to_be_bytes();
        let bytes = Bytes::from(message(&[self.config.topic.as_bytes(), &seq, &payload]));
        let mut subscribers = lock(&self.subscribers);
        subscribers.retain(|subscriber| {
            if subscriber.messages.is_closed() {
                return false;
            }
            let waiting = subscriber.waiting.fetch_add(bytes.len(), Ordering::Relaxed);
            let has_room = waiting <= WAITING_BYTES_MAX;
            if !has_room || subscriber.messages.try_send(bytes.clone()).is_err() {
                subscriber.waiting.fetch_sub(bytes.len(), Ordering::Relaxed);
                self.counters.missed.fetch_add(1, Ordering::Relaxed);
            }
            true
        });
        drop(subscribers);
        self.keep(batch.seq, payload);
        self.counters.published.fetch_add(1, Ordering::Relaxed);
    }

    fn keep(&self, seq: u64, payload: Bytes) {
        let mut kept = lock(&self.kept);
        kept.bytes += payload.len();
        kept.batches.push_back((seq, payload));
        while kept.batches.len() > self.config.buffer_steps || kept.bytes > KEPT_BYTES_MAX {
            let Some((_, oldest)) = kept.batches.pop_front() else { return };
            kept.bytes -= oldest.len();
        }
    }

    /// Batches that are kept from this number on.
    fn kept_from(&self, seq: u64) -> Vec<(u64, Bytes)> {
        let kept = lock(&self.kept);
        kept.batches.iter().filter(|(number, _)| *number >= seq).cloned().collect()
    }

    fn join(&self) -> (Receiver<Bytes>, Arc<AtomicUsize>) {
        let (messages, receiver) = channel(self.config.hwm);
        let waiting = Arc::new(AtomicUsize::new(0));
        lock(&self.subscribers).push(Subscriber { messages, waiting: Arc::clone(&waiting) });
        (receiver, waiting)
    }

    /// Lets subscribers read what waits for them, for a while.
    pub(super) async fn close(&self) {
        lock(&self.subscribers).clear();
        // They give their seats back when they have read all.
        let all = self.seats.acquire_many(SUBSCRIBERS_MAX);
        if timeout(LAST_WORDS, all).await.is_err() {
            tracing::debug!("subscribers of KV events have not read all");
        }
    }
}

/// Serves whoever subscribes; without a listener, connects to the one subscriber that listens.
pub(super) async fn subscribers(hub: Arc<Hub>, listener: Option<TcpListener>) {
    let Some(listener) = listener else { return connect(hub).await };
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let Ok(seat) = Arc::clone(&hub.seats).try_acquire_owned() else {
                    tracing::warn!(SUBSCRIBERS_MAX, "one more subscriber of KV events is refused");
                    continue;
                };
                tokio::spawn(subscriber(Arc::clone(&hub), stream, seat));
            }
            // No descriptor is free, for instance.
            Err(_) => sleep(AGAIN).await,
        }
    }
}

async fn connect(hub: Arc<Hub>) {
    let address = (hub.config.endpoint.host().to_owned(), hub.config.endpoint.port());
    loop {
        if let Ok(Ok(stream)) = timeout(HANDSHAKE_LIMIT, TcpStream::connect(&address)).await
            && let Ok(seat) = Arc::clone(&hub.seats).acquire_owned().await
        {
            // A task of its own, so that the last batches are sent when this one is ended.
            let ended = tokio::spawn(subscriber(Arc::clone(&hub), stream, seat)).await;
            if ended.is_err() {
                return;
            }
        }
        sleep(AGAIN).await;
    }
}

async fn subscriber(hub: Arc<Hub>, stream: TcpStream, seat: OwnedSemaphorePermit) {
    hub.counters.subscribers.fetch_add(1, Ordering::Relaxed);
    if let Err(error) = feed(&hub, stream).await {
        tracing::debug!(%error, "a subscriber of KV events has gone");
    }
    hub.counters.subscribers.fetch_sub(1, Ordering::Relaxed);
    drop(seat);
}

/// Sends messages to a subscriber until one of both sides ends.
async fn feed(hub: &Hub, stream: TcpStream) -> io::Result<()> {
    // Batches come one at a time, and each is wanted at once.
    stream.set_nodelay(true)?;
    let (read, mut write) = stream.into_split();
    let hands = handshake(read, &mut write, Kind::Pub);
    let mut reader = timeout(HANDSHAKE_LIMIT, hands).await??;
    let (mut messages, waiting) = hub.join();
    let mut topics = Topics(Vec::new());
    loop {
        tokio::select! {
            // What it has subscribed to counts for what comes after.
            biased;
            incoming = reader.next() => match incoming? {
                Some(Incoming::Message(frames)) => topics.note(&frames),
                Some(Incoming::Command(name, rest)) => {
                    let answer = Some(rest).filter(|_| name == b"PING").and_then(|rest| pong(&rest));
                    if let Some(answer) = answer {
                        send(&mut write, &answer).await?;
                    }
                }
                None => return Ok(()),
            },
            message = messages.recv() => {
                let Some(message) = message else { return write.shutdown().await };
                waiting.fetch_sub(message.len(), Ordering::Relaxed);
                if topics.want(hub.config.topic.as_bytes()) {
                    send(&mut write, &message).await?;
                }
            }
        }
    }
}

async fn send(write: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    timeout(WRITE_LIMIT, write.write_all(bytes)).await?
}

/// Beginnings of topics that a subscriber wants.
struct Topics(Vec<Vec<u8>>);

impl Topics {
    fn note(&mut self, frames: &[Vec<u8>]) {
        match frames.first().and_then(|frame| frame.split_first()) {
            Some((1, topic)) if self.0.len() < TOPICS_MAX => self.0.push(topic.to_vec()),
            Some((0, topic)) => {
                if let Some(at) = self.0.iter().position(|other| other == topic) {
                    self.0.swap_remove(at);
                }
            }
            _ => {}
        }
    }

    fn want(&self, topic: &[u8]) -> bool {
        self.0.iter().any(|beginning| topic.starts_with(beginning))
    }
}

/// Answers requests for batches that were missed.
pub(super) async fn replays(hub: Arc<Hub>, listener: TcpListener) {
    let seats = Arc::new(Semaphore::new(REPLAYS_MAX as usize));
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let Ok(seat) = Arc::clone(&seats).try_acquire_owned() else { continue };
                let hub = Arc::clone(&hub);
                tokio::spawn(async move {
                    if let Err(error) = replay(&hub, stream).await {
                        tracing::debug!(%error, "who asked for missed KV events has gone");
                    }
                    drop(seat);
                });
            }
            Err(_) => sleep(AGAIN).await,
        }
    }
}

async fn replay(hub: &Hub, stream: TcpStream) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let hands = handshake(read, &mut write, Kind::Router);
    let mut reader = timeout(HANDSHAKE_LIMIT, hands).await??;
    while let Some(incoming) = reader.next().await? {
        match incoming {
            Incoming::Message(frames) => {
                let Some(from) = wanted(&frames) else {
                    tracing::debug!("a request for missed KV events that is none");
                    continue;
                };
                for (seq, payload) in hub.kept_from(from) {
                    send(&mut write, &message(&[b"", &seq.to_be_bytes(), &payload])).await?;
                }
                send(&mut write, &message(&[b"", &END, b""])).await?;
            }
            Incoming::Command(name, rest) if name == b"PING" => {
                if let Some(answer) = pong(&rest) {
                    send(&mut write, &answer).await?;
                }
            }
            Incoming::Command(..) => {}
        }
    }
    Ok(())
}

/// The first number that a request asks for. Who it comes from is known from its connection.
fn wanted(frames: &[Vec<u8>]) -> Option<u64> {
    match frames {
        [empty, seq] if empty.is_empty() => {
            Some(u64::from_be_bytes(seq.as_slice().try_into().ok()?))
        }
        _ => None,
    }
}

/// All that a peer says, from the first byte on, as both sockets read it.
pub(super) fn hear(bytes: &[u8]) {
    use futures_util::FutureExt as _;
    for kind in [Kind::Pub, Kind::Router] {
        let (mut topics, mut said) = (Topics(Vec::new()), Vec::new());
        // Bytes in memory are always there, so nothing waits.
        let Some(Ok(mut reader)) = handshake(bytes, &mut said, kind).now_or_never() else {
            continue;
        };
        while let Some(Ok(Some(incoming))) = reader.next().now_or_never() {
            match incoming {
                Incoming::Message(frames) => {
                    topics.note(&frames);
                    let _ = wanted(&frames);
                }
                Incoming::Command(_, rest) => said.extend(pong(&rest).unwrap_or_default()),
            }
            assert!(topics.0.len() <= TOPICS_MAX && said.len() <= bytes.len() + 256);
            said.truncate(256);
        }
    }
}
