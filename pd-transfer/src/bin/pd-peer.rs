//! The other side in a process of its own, for tests and benches.
//!
//! - `pd-peer tcp|shm|ucx ADDRESS` is a prefill side: prints `listening ADDRESS` and serves pages
//!   with known bytes.
//! - `pd-peer rank tcp|shm|ucx ADDRESS` is the same as one rank of a prefill group: its pages follow
//!   from the request, and are the same at every rank.
//! - `pd-peer pull tcp|shm|ucx ADDRESS` is a decode side: pulls and verifies one attempt after the
//!   other and prints a line for each piece of news.
//! - `pd-peer conformance ucx` runs the conformance suite in this process, with its environment.
//! - `pd-peer version` prints the version of the UCX library that is found.
//!
//! The first three end when their standard input does.

use pd_transfer::driver::{Driver, DriverConfig, DriverHandle, UpcallSink};
use pd_transfer::endpoint::Upcall;
use pd_transfer::group::Rank;
use pd_transfer::id::PeerId;
use pd_transfer::receiver::Start;
use pd_transfer::shm::{SharedRegion, Shm};
use pd_transfer::tcp::Tcp;
use pd_transfer::testing::conformance::{Subject, run};
use pd_transfer::testing::pages::{PageServer, PageVerifier, Request, Trusting, targets};
use pd_transfer::testing::ranks::RankServer;
use pd_transfer::transport::{HeapRegion, RegionOwner, TransportFactory};
use pd_transfer::ucx::{self, Ucx};
use pd_transfer::wire::{AttemptId, Fingerprint, Incarnation, RegionId, Role};
use std::error::Error;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

const USAGE: &str = "want [pull|rank] tcp|shm|ucx ADDRESS, or conformance ucx, or version";
/// What each attempt of `pull` asks for.
const REQUEST: Request = Request { pages: 200, page_bytes: 37_440 };

type Outcome = Result<(), Box<dyn Error>>;

fn main() -> Outcome {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["version"] => say(&ucx::version()?.to_string()),
        ["conformance", "ucx"] => conformance(),
        ["pull", kind, address] => pull(factory(kind)?, address),
        ["rank", kind, address] => rank(factory(kind)?, address),
        [kind, address] => serve(factory(kind)?, address),
        _ => Err(USAGE.into()),
    }
}

fn factory(kind: &str) -> Result<TransportFactory, Box<dyn Error>> {
    match kind {
        "tcp" => Ok(Tcp::factory()),
        "shm" => Ok(Shm::factory(2)),
        "ucx" => Ok(Ucx::factory(Arc::default())),
        other => Err(format!("no transport {other:?}: {USAGE}").into()),
    }
}

fn say(line: &str) -> Outcome {
    let mut out = std::io::stdout();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

fn config(role: Role, memory: &Arc<dyn RegionOwner>) -> Result<DriverConfig, Box<dyn Error>> {
    let mut incarnation = [0; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut incarnation)?;
    let (fingerprint, layout) = (Fingerprint([7; 16]), String::from("test pages"));
    let mut config = DriverConfig::new(role, Incarnation(incarnation), fingerprint, layout);
    config.regions.push(Arc::clone(memory));
    Ok(config)
}

fn serve(factory: TransportFactory, address: &str) -> Outcome {
    let memory: Arc<dyn RegionOwner> = SharedRegion::new(128 << 20)?;
    let server = PageServer::new(Arc::clone(&memory), 64);
    let upcalls = server.sink(Arc::new(|_| {}));
    wait_for_end(factory, address, &memory, upcalls, |handle| server.attach(handle))
}

fn rank(factory: TransportFactory, address: &str) -> Outcome {
    let memory: Arc<dyn RegionOwner> = SharedRegion::new(128 << 20)?;
    let server = RankServer::new(vec![Arc::clone(&memory)]);
    let upcalls = server.sink(Rank(0), Arc::new(|_| {}));
    wait_for_end(factory, address, &memory, upcalls, |handle| server.attach(Rank(0), handle))
}

fn wait_for_end(
    factory: TransportFactory,
    address: &str,
    memory: &Arc<dyn RegionOwner>,
    upcalls: UpcallSink,
    attach: impl FnOnce(DriverHandle),
) -> Outcome {
    let mut config = config(Role::Prefill, memory)?;
    config.listen = Some(address.into());
    let handle = Driver::spawn(config, factory, Arc::new(Trusting), upcalls)?;
    attach(handle.clone());
    say(&format!("listening {}", handle.listen_address().unwrap_or_default()))?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    handle.shutdown();
    Ok(())
}

fn end_of_input(news: Sender<Option<Upcall>>) {
    std::thread::spawn(move || {
        // An input that can't be read is at its end too.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = news.send(None);
    });
}

fn start(handle: &DriverHandle, peer: PeerId, n: u64) -> Outcome {
    let mut attempt = AttemptId([0; 16]);
    attempt.0[..8].copy_from_slice(&n.to_le_bytes());
    attempt.0[8..].copy_from_slice(&u64::from(std::process::id()).to_le_bytes());
    let plan = targets(REQUEST, RegionId(0), 0);
    let (request, plan_hash) = (REQUEST.encode(), REQUEST.plan_hash(attempt));
    Ok(handle.start(Start { attempt, peer, request, have: 0, plan_hash, plan })?)
}

/// One attempt at a time; the next begins when the last has completed or is quiet and there is a
/// link.
fn pull(factory: TransportFactory, address: &str) -> Outcome {
    let memory: Arc<dyn RegionOwner> = SharedRegion::new(8 << 20)?;
    let config = config(Role::Decode, &memory)?;
    let verifier = Arc::new(PageVerifier);
    let (send, news) = channel();
    let upcalls = {
        let send = send.clone();
        Arc::new(move |upcall| {
            // The end of the process.
            let _ = send.send(Some(upcall));
        })
    };
    let handle = Driver::spawn(config, factory, verifier, upcalls)?;
    handle.connect(address)?;
    end_of_input(send);
    let (mut link, mut is_running, mut n) = (None, false, 0);
    while let Some(upcall) = news.recv()? {
        match upcall {
            Upcall::PeerUp { peer, .. } => link = Some(peer),
            Upcall::PeerDown { why, .. } => {
                link = None;
                say(&format!("down: {why}"))?;
            }
            Upcall::Completed { record, .. } => {
                is_running = false;
                say(&format!("completed: {} pages", record.items))?;
            }
            Upcall::Failed { why, .. } => say(&format!("failed: {why}"))?,
            Upcall::Quiet { .. } => is_running = false,
            Upcall::Refused { text, .. } => say(&format!("refused: {text}"))?,
            Upcall::Wrong { key, fault, .. } => say(&format!("wrong: page {key} {fault}"))?,
            Upcall::NotReached { text, .. } => say(&format!("not reached: {text}"))?,
            Upcall::Event(text) => say(&format!("event: {text}"))?,
            _ => {}
        }
        if let Some(peer) = link.filter(|_| !is_running) {
            is_running = true;
            n += 1;
            start(&handle, peer, n)?;
        }
    }
    handle.shutdown();
    Ok(())
}

fn conformance() -> Outcome {
    run(|_| Subject {
        factory: || Ucx::factory(Arc::default()),
        address: String::from("127.0.0.1:0"),
        nowhere: String::from("127.0.0.1:1"),
        memory: |bytes| HeapRegion::new(bytes),
    });
    say("conformance: passed")
}
