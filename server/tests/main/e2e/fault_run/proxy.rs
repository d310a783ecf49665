//! A TCP proxy between two workers that cuts its connections and flips bits on demand.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

#[derive(Debug, Default)]
struct State {
    open: Mutex<BTreeMap<u64, [TcpStream; 2]>>,
    next: AtomicU64,
    /// Chunks that are still to be damaged, and how many bytes they must have.
    flips: AtomicU64,
    least: AtomicUsize,
    flipped: AtomicU64,
    is_ending: AtomicBool,
}

impl State {
    fn open(&self) -> MutexGuard<'_, BTreeMap<u64, [TcpStream; 2]>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Flips a bit in the middle of a chunk, if one is due.
    fn damage(&self, bytes: &mut [u8]) {
        if bytes.len() < self.least.load(Ordering::Acquire) {
            return;
        }
        let one_less = |left: u64| left.checked_sub(1);
        if self.flips.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_less).is_ok() {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1 << (middle % 8);
            self.flipped.fetch_add(1, Ordering::AcqRel);
        }
    }
}

/// See the module text. Connections end with it.
#[derive(Debug)]
pub(super) struct Proxy {
    /// Where it listens, HOST:PORT.
    pub(super) address: String,
    state: Arc<State>,
}

impl Proxy {
    /// In front of `target`.
    pub(super) fn start(target: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind a proxy");
        let address = listener.local_addr().expect("the proxy's address").to_string();
        let state = Arc::new(State::default());
        let (shared, target) = (Arc::clone(&state), target.to_owned());
        thread::spawn(move || accept(&listener, &shared, &target));
        Self { address, state }
    }

    /// Cuts every connection; says how many there were.
    pub(super) fn cut(&self) -> usize {
        let open = self.state.open();
        for stream in open.values().flatten() {
            // One that is cut already is as good.
            let _ = stream.shutdown(Shutdown::Both);
        }
        open.len()
    }

    /// Damages the next `chunks` chunks of at least `bytes` that pass: large ones are pages, small
    /// ones messages.
    pub(super) fn flip(&self, chunks: u64, bytes: usize) {
        self.state.least.store(bytes, Ordering::Release);
        self.state.flips.store(chunks, Ordering::Release);
    }

    /// Chunks that were damaged so far.
    pub(super) fn flipped(&self) -> u64 {
        self.state.flipped.load(Ordering::Acquire)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.is_ending.store(true, Ordering::Release);
        self.cut();
        // Wakes the acceptor.
        let _ = TcpStream::connect(&self.address);
    }
}

fn accept(listener: &TcpListener, state: &Arc<State>, target: &str) {
    while let Ok((near, _)) = listener.accept() {
        if state.is_ending.load(Ordering::Acquire) {
            return;
        }
        // Nobody listens behind the proxy: the connection ends, as it would without a proxy.
        let Ok(far) = TcpStream::connect(target) else { continue };
        let copy = |stream: &TcpStream| stream.try_clone().expect("copy a descriptor");
        let number = state.next.fetch_add(1, Ordering::AcqRel);
        state.open().insert(number, [copy(&near), copy(&far)]);
        for (from, to) in [(copy(&near), copy(&far)), (far, near)] {
            let state = Arc::clone(state);
            thread::spawn(move || {
                pump(from, to, &state);
                state.open().remove(&number);
            });
        }
    }
}

/// Passes bytes on until one side ends; then both end.
fn pump(mut from: TcpStream, mut to: TcpStream, state: &State) {
    let mut chunk = vec![0; 64 << 10];
    while let Ok(len @ 1..) = from.read(&mut chunk) {
        state.damage(&mut chunk[..len]);
        if to.write_all(&chunk[..len]).is_err() {
            break;
        }
    }
    for stream in [&from, &to] {
        // The other direction may have ended it.
        let _ = stream.shutdown(Shutdown::Both);
    }
}
