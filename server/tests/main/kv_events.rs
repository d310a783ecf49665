//! KV events on the wire, between our publisher and sockets of another implementation of ZeroMQ;
//! and a copy of a worker's cache that is kept by them.

use dsv4_server::net::kv_events::wire::{BlockHash, KvEvent, Medium};
use dsv4_server::net::kv_events::{Outlet, Publisher};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::time::timeout;
use zeromq::{DealerSocket, Socket as _, SocketRecv as _, SocketSend as _, SubSocket, ZmqMessage};

/// Longest wait for anything; reaching it is a failure, not a measurement.
const PATIENCE: Duration = Duration::from_secs(60);
/// The number that ends a replay.
const END: u64 = u64::MAX;

/// What a router would believe of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mirror {
    /// Hashes by medium.
    pub(crate) blocks: BTreeMap<String, BTreeSet<i64>>,
    /// Parent and tokens of all blocks that ever were.
    pub(crate) contents: BTreeMap<i64, (Option<i64>, Vec<u32>)>,
    /// Events of each name.
    pub(crate) seen: BTreeMap<String, u64>,
}

impl Mirror {
    /// Takes a payload in; what the events say must fit what was said before.
    pub(crate) fn apply(&mut self, payload: &[u8]) {
        let batch: Value = rmp_serde::from_slice(payload).expect("MessagePack");
        let [time, events, rank] = &batch.as_array().expect("a list")[..] else {
            panic!("three parts of a batch: {batch}");
        };
        assert!(time.as_f64() > Some(1.7e9) && rank == 0, "{batch}");
        for event in events.as_array().expect("a list of events") {
            let [tag, rest @ ..] = &event.as_array().expect("a list")[..] else {
                panic!("{event}")
            };
            let tag = tag.as_str().expect("a name");
            *self.seen.entry(tag.to_owned()).or_default() += 1;
            match (tag, rest) {
                ("BlockStored", [hashes, parent, tokens, size, lora, medium]) => {
                    let [hash] = numbers(hashes)[..] else { panic!("one block: {event}") };
                    assert_eq!((size, lora), (&Value::from(256), &Value::Null));
                    let content =
                        (parent.as_i64(), serde_json::from_value(tokens.clone()).unwrap());
                    let before = self.contents.insert(hash, content.clone());
                    assert!(before.is_none_or(|before| before == content), "another {hash}");
                    assert!(self.medium(medium).insert(hash), "stored twice: {event}");
                }
                ("BlockRemoved", [hashes, medium]) => {
                    for hash in numbers(hashes) {
                        assert!(self.medium(medium).remove(&hash), "not there: {event}");
                    }
                }
                ("AllBlocksCleared", []) => self.blocks.clear(),
                _ => panic!("what is {event}?"),
            }
        }
    }

    fn medium(&mut self, name: &Value) -> &mut BTreeSet<i64> {
        self.blocks.entry(name.as_str().expect("a name").to_owned()).or_default()
    }

    /// Blocks in a medium.
    pub(crate) fn count(&self, medium: &str) -> usize {
        self.blocks.get(medium).map_or(0, BTreeSet::len)
    }

    /// The tokens of the prompt up to the end of a block.
    pub(crate) fn prefix(&self, hash: i64) -> Vec<u32> {
        let (parent, tokens) = &self.contents[&hash];
        let mut prefix = parent.map(|parent| self.prefix(parent)).unwrap_or_default();
        prefix.extend(tokens);
        prefix
    }
}

fn numbers(list: &Value) -> Vec<i64> {
    serde_json::from_value(list.clone()).expect("a list of signed numbers")
}

async fn soon<T>(what: &str, answer: impl Future<Output = T>) -> T {
    timeout(PATIENCE, answer).await.unwrap_or_else(|_| panic!("not in time: {what}"))
}

/// Frames of the next message.
pub(crate) async fn received(socket: &mut SubSocket) -> (String, u64, Vec<u8>) {
    let message = soon("a message", socket.recv()).await.expect("a message");
    let frames = message.into_vec();
    let [topic, seq, payload] = &frames[..] else { panic!("three frames: {frames:?}") };
    let seq = u64::from_be_bytes(seq[..].try_into().expect("eight bytes"));
    (String::from_utf8(topic.to_vec()).unwrap(), seq, payload.to_vec())
}

/// Numbers and payloads from `from` on.
pub(crate) async fn replayed(address: SocketAddr, from: u64) -> Vec<(u64, Vec<u8>)> {
    let mut socket = DealerSocket::new();
    socket.connect(&format!("tcp://127.0.0.1:{}", address.port())).await.expect("connect");
    let mut request = ZmqMessage::from(Vec::new());
    request.push_back(from.to_be_bytes().to_vec().into());
    socket.send(request).await.expect("ask");
    let mut batches = Vec::new();
    loop {
        let frames = soon("a batch", socket.recv()).await.expect("a batch").into_vec();
        let [empty, seq, payload] = &frames[..] else { panic!("three frames: {frames:?}") };
        assert!(empty.is_empty());
        match u64::from_be_bytes(seq[..].try_into().expect("eight bytes")) {
            END => {
                assert!(payload.is_empty());
                return batches;
            }
            seq => batches.push((seq, payload.to_vec())),
        }
    }
}

/// A socket that is subscribed to everything.
pub(crate) async fn subscribed(address: SocketAddr) -> SubSocket {
    let mut socket = SubSocket::new();
    socket.connect(&format!("tcp://127.0.0.1:{}", address.port())).await.expect("connect");
    socket.subscribe("").await.expect("subscribe");
    socket
}

struct Running {
    outlet: Outlet,
    thread: JoinHandle<()>,
    events: Option<SocketAddr>,
    replay: Option<SocketAddr>,
    published: u64,
}

fn start(config: &str) -> Running {
    let publisher = Publisher::bind(config.parse().unwrap()).unwrap();
    let (events, replay) = (publisher.address(), publisher.replay_address());
    let (outlet, thread) = publisher.start().unwrap();
    Running { outlet, thread, events, replay, published: 0 }
}

impl Running {
    /// Publishes a batch that nobody takes for another one.
    fn publish(&mut self) {
        self.published += 1;
        let hashes = vec![BlockHash(self.published as i64)];
        let events = vec![KvEvent::Removed { hashes, medium: Medium::Disk }];
        self.outlet.publish(2e9, events);
    }

    /// Until the thread has sent all that it was given.
    async fn sent(&self) {
        let all = async {
            while self.outlet.numbers().published < self.published {
                tokio::task::yield_now().await;
            }
        };
        soon("all is published", all).await;
    }

    /// Publishes until the first batch arrives; its number.
    async fn reach(&mut self, socket: &mut SubSocket) -> u64 {
        let first = async {
            loop {
                self.publish();
                // Only how often is asked depends on this time.
                let arrived = timeout(Duration::from_millis(20), received(socket)).await;
                if let Ok((_, seq, _)) = arrived {
                    return seq;
                }
            }
        };
        soon("a first batch", first).await
    }
}

const LISTEN: &str = r#""publisher":"zmq","endpoint":"tcp://*:0""#;

#[tokio::test]
async fn subscribers_get_every_batch_in_order_and_the_last_before_the_end() {
    let mut running = start(&format!(r#"{{{LISTEN},"topic":"kv@here"}}"#));
    let mut sockets = Vec::new();
    for _ in 0..2 {
        let mut socket = subscribed(running.events.unwrap()).await;
        let first = running.reach(&mut socket).await;
        sockets.push((socket, first));
    }
    for _ in 0..100 {
        running.publish();
    }
    assert_eq!(running.outlet.numbers().subscribers, 2);
    let published = running.published;
    let Running { outlet, thread, .. } = running;
    drop(outlet);
    for (socket, first) in &mut sockets {
        for expected in *first + 1..published {
            let (topic, seq, payload) = received(socket).await;
            assert_eq!((topic.as_str(), seq), ("kv@here", expected));
            let batch: Value = rmp_serde::from_slice(&payload).unwrap();
            assert_eq!(batch[1][0][1][0], seq + 1);
        }
    }
    thread.join().unwrap();
}

#[tokio::test]
async fn missed_batches_are_replayed_as_far_as_they_are_kept() {
    let config = format!(r#"{{{LISTEN},"replay_endpoint":"tcp://127.0.0.1:0","buffer_steps":3}}"#);
    let mut running = start(&config);
    let replay = running.replay.unwrap();
    assert!(replayed(replay, 0).await.is_empty());
    for _ in 0..5 {
        running.publish();
    }
    running.sent().await;
    let seqs = async |from| -> Vec<u64> {
        replayed(replay, from).await.into_iter().map(|(seq, _)| seq).collect()
    };
    assert_eq!(seqs(0).await, [2, 3, 4]);
    assert_eq!(seqs(4).await, [4]);
    assert!(seqs(5).await.is_empty());
    let (_, payload) = replayed(replay, 4).await.remove(0);
    let batch: Value = rmp_serde::from_slice(&payload).unwrap();
    assert_eq!(batch, serde_json::json!([2e9, [["BlockRemoved", [5], "DISK"]], 0]));
}

/// A subscriber that does nothing but what it is told.
fn raw(address: SocketAddr, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", address.port())).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    // A publisher that hangs up early is what some of these are for.
    let _ = stream.write_all(bytes);
    stream
}

/// Greeting, READY and, for a subscriber of everything, its subscription.
fn hello(kind: &str) -> Vec<u8> {
    let mut bytes = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0];
    bytes.extend_from_slice(b"NULL");
    bytes.resize(64, 0);
    let mut ready = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
    ready.push(kind.len() as u8);
    ready.extend_from_slice(kind.as_bytes());
    bytes.extend_from_slice(&[4, ready.len() as u8]);
    bytes.extend(ready);
    bytes
}

/// All that a subscriber, or one who asks for missed batches, says.
pub(crate) fn said_by(kind: &str) -> Vec<u8> {
    let mut bytes = hello(kind);
    match kind {
        "SUB" => bytes.extend_from_slice(b"\0\x05\x01kv@a\0\x01\x01\0\x05\0kv@a"),
        _ => bytes.extend_from_slice(b"\x01\0\0\x08\0\0\0\0\0\0\0\x05"),
    }
    bytes.extend_from_slice(b"\x04\x0a\x04PING\0\x0aabc");
    bytes
}

/// A subscriber of everything that never reads.
pub(crate) fn sleeper(address: SocketAddr) -> TcpStream {
    raw(address, &[hello("SUB"), vec![0, 1, 1]].concat())
}

#[tokio::test]
async fn slow_subscriber_misses_batches_and_nobody_else_does() {
    let mut running = start(&format!(r#"{{{LISTEN},"hwm":4}}"#));
    let address = running.events.unwrap();
    let slow = sleeper(address);
    let mut fast = subscribed(address).await;
    let mut next = running.reach(&mut fast).await + 1;
    // What was published meanwhile.
    while next < running.published {
        assert_eq!(received(&mut fast).await.1, next);
        next += 1;
    }
    let large =
        vec![KvEvent::Removed { hashes: vec![BlockHash(-7); 50_000], medium: Medium::Host }];
    let mut rounds = 0;
    while running.outlet.numbers().missed == 0 {
        running.outlet.publish(2e9, large.clone());
        assert_eq!(received(&mut fast).await.1, next);
        next += 1;
        rounds += 1;
        assert!(rounds < 2000, "no socket holds a gigabyte");
    }
    let numbers = running.outlet.numbers();
    assert_eq!((numbers.dropped, numbers.subscribers), (0, 2));
    drop(slow);
}

#[tokio::test]
async fn peers_that_send_anything_are_hung_up_on() {
    let config = format!(r#"{{{LISTEN},"replay_endpoint":"tcp://127.0.0.1:0"}}"#);
    let mut running = start(&config);
    let endless = [2, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
    for address in [running.events.unwrap(), running.replay.unwrap()] {
        let kind = if Some(address) == running.events { "SUB" } else { "DEALER" };
        for bytes in [
            b"GET / HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\nAccept: */*\r\n\r\n...."
                .to_vec(),
            vec![0; 64],
            hello("PUSH"),
            [hello(kind), endless.to_vec()].concat(),
            [&hello(kind)[..64], &endless].concat(),
            [hello(kind), vec![1, 0, 1, 0, 1, 0, 1, 0]].concat(),
            [hello(kind), vec![4, 0]].concat(),
        ] {
            let mut stream = raw(address, &bytes);
            let mut answer = Vec::new();
            let ended = tokio::task::spawn_blocking(move || stream.read_to_end(&mut answer)).await;
            // Hung up on, with what was not read or without.
            let reset =
                |error: &std::io::Error| error.kind() == std::io::ErrorKind::ConnectionReset;
            assert!(ended.unwrap().as_ref().err().is_none_or(reset), "{bytes:?}");
        }
    }
    let mut socket = subscribed(running.events.unwrap()).await;
    running.reach(&mut socket).await;
}

#[tokio::test]
async fn publisher_connects_to_a_subscriber_that_listens_and_again_after_it_was_gone() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let mut running = start(&format!(r#"{{"publisher":"zmq","endpoint":"tcp://{address}"}}"#));
    assert_eq!(running.events, None);
    let mut last = None;
    for _ in 0..2 {
        let mut socket = SubSocket::new();
        socket.subscribe("").await.expect("subscribe");
        soon("its port is free", async {
            while socket.bind(&format!("tcp://{address}")).await.is_err() {
                tokio::task::yield_now().await;
            }
        })
        .await;
        let seq = running.reach(&mut socket).await;
        assert!(last.replace(seq) < Some(seq));
    }
}

#[test]
fn endpoints_that_are_taken_are_refused_with_their_field() {
    let taken = TcpListener::bind(("0.0.0.0", 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    for (field, config) in [
        ("endpoint", format!(r#"{{"publisher":"zmq","endpoint":"tcp://*:{port}"}}"#)),
        ("replay_endpoint", format!(r#"{{{LISTEN},"replay_endpoint":"tcp://0.0.0.0:{port}"}}"#)),
    ] {
        let error = Publisher::bind(config.parse().unwrap()).unwrap_err();
        assert_eq!(error.field, field);
        let says = error.to_string();
        assert!(says.contains(field) && says.contains(&format!("{port}")), "{says}");
    }
}
