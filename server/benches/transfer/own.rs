//! The hand-off of this project as a contestant: a reader's driver and a source's driver in two
//! processes, from the request to the word that every page is there and, if asked, verified.

use crate::contest::Contestant;
use crate::pages::{
    FIRST, Outcome, PATIENCE, READER_CORE, SOURCE_CORE, clear, fill, memory, pin, place,
};
use dsa_kernels::Mem;
use dsv4_server::glue::hash::{digest_of, page_hash};
use dsv4_server::glue::regions::PoolRegion;
use pd_transfer::driver::{Driver, DriverConfig, DriverHandle, UpcallSink, Verifier};
use pd_transfer::endpoint::Upcall;
use pd_transfer::get::Digest;
use pd_transfer::id::PeerId;
use pd_transfer::page_hash::{PageHash, Plain};
use pd_transfer::receiver::{Start, Target, Verify};
use pd_transfer::shm::Shm;
use pd_transfer::tcp::Tcp;
use pd_transfer::transport::TransportFactory;
use pd_transfer::ucx::Ucx;
use pd_transfer::wire::{
    AttemptId, FinalRecord, Fingerprint, Guard, Identity, Incarnation, Item, Key, RegionId, Role,
    Tag,
};
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

/// Offered at a time.
const CHUNK: usize = 1024;
/// Gets under way at once.
const IN_FLIGHT: usize = 512;

fn key(n: u32) -> Key {
    let mut key = [0; 16];
    key[..4].copy_from_slice(&n.to_be_bytes());
    Key(key)
}

pub(crate) fn random() -> Outcome<[u8; 16]> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

pub(crate) fn factory(transport: &str) -> Outcome<TransportFactory> {
    match transport {
        "shm" => Ok(Shm::factory(1)),
        "tcp" => Ok(Tcp::factory()),
        "ucx" => Ok(Ucx::factory(Arc::default())),
        other => Err(format!("no transport {other:?}").into()),
    }
}

fn config(role: Role, memory: &Mem) -> Outcome<DriverConfig> {
    let (fingerprint, layout) = (Fingerprint([9; 16]), "pages of a bench".to_owned());
    let mut config = DriverConfig::new(role, Incarnation(random()?), fingerprint, layout);
    config.regions.push(Arc::new(PoolRegion(memory.clone())));
    config.receiver.in_flight_max = IN_FLIGHT;
    Ok(config)
}

/// The source: offers what it is asked for, at once. Tags are made before the first offer of a page
/// and remembered, so that no measured round makes any.
pub(crate) fn serve(transport: &str, address: &str, buffer: u64) -> Outcome<()> {
    pin(SOURCE_CORE)?;
    let memory = memory(buffer)?;
    fill(&memory)?;
    let handle: Arc<OnceLock<DriverHandle>> = Arc::default();
    let upcalls: UpcallSink = {
        let (handle, memory) = (Arc::clone(&handle), memory.clone());
        let known = Mutex::new(BTreeMap::<u32, Vec<Item>>::new());
        let records = Mutex::new(BTreeMap::<(u32, u32), FinalRecord>::new());
        Arc::new(move |upcall| {
            let Upcall::Requested { attempt, request, .. } = upcall else { return };
            let [page, pages] = [0, 4].map(|at| {
                u32::from_le_bytes(request[at..at + 4].try_into().expect("eight bytes of ours"))
            });
            let mut known = known.lock().expect("nothing panics with it");
            let all = known.entry(page).or_default();
            extend(all, &memory, page, pages);
            let items = &all[..pages as usize];
            let mut records = records.lock().expect("nothing panics with it");
            let record = || FinalRecord::new([3; 16], items, Vec::new());
            let record = records.entry((page, pages)).or_insert_with(record).clone();
            let handle = handle.wait();
            for chunk in items.chunks(CHUNK) {
                handle.ready(attempt, chunk.to_vec()).expect("called by the driver");
            }
            handle.finish(attempt, record).expect("called by the driver");
        })
    };
    let mut config = config(Role::Prefill, &memory)?;
    config.listen = Some(address.to_owned());
    let driver = Driver::spawn(config, factory(transport)?, Arc::new(Believes), upcalls)?;
    handle.set(driver.clone()).map_err(|_| "set once")?;
    say_and_wait(driver.listen_address().unwrap_or_default())?;
    driver.shutdown();
    Ok(())
}

/// Adds items until there are `pages`. A place that comes round again has the tag that it had.
fn extend(items: &mut Vec<Item>, memory: &Mem, page: u32, pages: u32) {
    let slots = ((memory.len() - FIRST) / u64::from(page)) as usize;
    let mut hash = page_hash();
    for n in items.len() as u32..pages {
        let extent = place(memory, n, page);
        let known = (n as usize).checked_sub(slots).map(|before| items[before].tag);
        let mut digest = || digest_of(&mut *hash, memory, &[extent]).expect("inside the memory").0;
        items.push(Item {
            key: key(n),
            identity: Identity(key(n).0),
            tag: known.unwrap_or_else(|| Tag(digest())),
            region: RegionId(0),
            extents: vec![extent],
            guard: Guard { region: RegionId(0), offset: 0, expect: 1 },
        });
    }
}

/// Says where this source listens; returns when its reader has ended.
pub(crate) fn say_and_wait(address: &str) -> Outcome<()> {
    let mut out = std::io::stdout();
    writeln!(out, "{address}")?;
    out.flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// For a source, which has nothing to verify, and for a reader without digests.
pub(crate) struct Believes;

impl Verifier for Believes {
    fn hash(&self) -> Box<dyn PageHash> {
        Box::new(Plain)
    }

    fn verify(&self, _: &Verify, _: Option<Digest>) -> bool {
        true
    }
}

/// Compares the digest of what landed.
struct Check;

impl Verifier for Check {
    fn hash(&self) -> Box<dyn PageHash> {
        page_hash()
    }

    fn verify(&self, page: &Verify, digest: Option<Digest>) -> bool {
        digest == Some(page.tag.0)
    }
}

/// A source in a process of its own, which ends with this value.
pub(crate) struct Source {
    child: Child,
    /// What it said first: where it listens.
    pub(crate) said: String,
}

impl Source {
    /// Starts this program once more, with these arguments.
    pub(crate) fn start(arguments: &[&str]) -> Outcome<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut said = String::new();
        let out = child.stdout.take().ok_or("stdout is piped")?;
        BufReader::new(out).read_line(&mut said)?;
        let source = Self { child, said: said.trim().to_owned() };
        match source.said.is_empty() {
            true => Err("the source did not start".into()),
            false => Ok(source),
        }
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        // It has ended by itself before, or ends now that its input has.
        let _ = self.child.wait();
    }
}

/// A fresh address for a transport.
pub(crate) fn address(transport: &str) -> String {
    let path = std::env::temp_dir().join(format!("dsv4-bench-{}.sock", std::process::id()));
    match transport {
        "shm" => format!("unix:{}", path.display()),
        _ => "127.0.0.1:0".to_owned(),
    }
}

/// Waits for the link that a driver was told to open.
pub(crate) fn wait_for_link(news: &Receiver<Upcall>) -> Outcome<PeerId> {
    loop {
        match news.recv_timeout(PATIENCE)? {
            Upcall::PeerUp { peer, .. } => return Ok(peer),
            Upcall::Refused { text, .. } => return Err(text.into()),
            _ => {}
        }
    }
}

/// A reader and the process that it reads from. The driver is dropped before the source ends.
pub(crate) struct Reader {
    driver: DriverHandle,
    news: Receiver<Upcall>,
    peer: PeerId,
    memory: Mem,
    _source: Source,
}

impl Reader {
    /// `mode` is `digest`, where each page is verified, or `plain`.
    pub(crate) fn new(transport: &str, mode: &str, buffer: u64) -> Outcome<Self> {
        let check: Arc<dyn Verifier> = match mode {
            "digest" => Arc::new(Check),
            "plain" => Arc::new(Believes),
            other => return Err(format!("no mode {other:?}").into()),
        };
        let arguments = ["source", transport, &address(transport), &buffer.to_string()];
        let source = Source::start(&arguments)?;
        pin(READER_CORE)?;
        let memory = memory(buffer)?;
        clear(&memory)?; // so that no page is touched for the first time in a round
        let (send, news) = channel();
        let upcalls: UpcallSink = Arc::new(move |upcall| {
            // The end of the bench.
            let _ = send.send(upcall);
        });
        let config = config(Role::Decode, &memory)?;
        let driver = Driver::spawn(config, factory(transport)?, check, upcalls)?;
        driver.connect(&source.said)?;
        let peer = wait_for_link(&news)?;
        Ok(Self { driver, news, peer, memory, _source: source })
    }
}

impl Contestant for Reader {
    fn memory(&self) -> &Mem {
        &self.memory
    }

    /// From the request to the last page.
    fn run(&mut self, page: u32, pages: u32, _: &str) -> Outcome<f64> {
        let target = |n| Target {
            key: key(n),
            group: n,
            region: RegionId(0),
            extents: vec![place(&self.memory, n, page)],
        };
        let request = [page.to_le_bytes(), pages.to_le_bytes()].concat();
        let (attempt, plan) = (AttemptId(random()?), (0..pages).map(target).collect());
        let start = Start { attempt, peer: self.peer, request, have: 0, plan_hash: [3; 16], plan };
        let begin = Instant::now();
        self.driver.start(start)?;
        loop {
            match self.news.recv_timeout(PATIENCE)? {
                Upcall::Completed { .. } => return Ok(begin.elapsed().as_secs_f64()),
                Upcall::Failed { why, .. } => return Err(why.to_string().into()),
                Upcall::Fresh { .. } => return Err("a page was wrong".into()),
                Upcall::PeerDown { why, .. } => return Err(why.into()),
                _ => {}
            }
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.driver.shutdown();
    }
}
