//! Speed of the hand-off between two processes of this machine, pinned to different cores: from the
//! request to the last page verified, over each transport, with the digest and without.
//!
//! Arguments: `shm`, `tcp`, `ucx` (all by default; `ucx` where its library is found). Per size,
//! rounds of all contestants alternate with a plain copy of the same pages; medians are printed.
#![expect(clippy::print_stdout, reason = "figures are the output of a bench")]
#![expect(unsafe_code, reason = "passes copies on to one of two hashes")]

use dsa_kernels::{CpuDevice, Device as _, Mem, Place};
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
use pd_transfer::ucx::{self, Ucx};
use pd_transfer::wire::{
    AttemptId, Extent, FinalRecord, Fingerprint, Guard, Identity, Incarnation, Item, Key, RegionId,
    Role, Tag,
};
use std::error::Error;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Bytes of a page, and pages of a round.
const CASES: [(u32, u32); 5] =
    [(8448, 16_384), (16_384, 16_384), (37_440, 16_384), (65_536, 16_384), (1 << 20, 4096)];
/// Bytes that the pages of a round rotate over: more than the caches hold.
const BUFFER: u64 = 256 << 20;
/// The guard word lies before the pages.
const FIRST: u64 = 64;
const ROUNDS: usize = 5;
/// Offered at a time.
const CHUNK: usize = 1024;
/// Gets under way at once.
const IN_FLIGHT: usize = 512;
/// Longest wait for anything; reaching it is a failure, not a measurement.
const PATIENCE: Duration = Duration::from_secs(120);
/// Makes this program the source of pages: transport and address.
const SOURCE: &str = "DSV4_BENCH_SOURCE";

fn main() -> Outcome<()> {
    if let Ok(of) = std::env::var(SOURCE) {
        let (transport, address) = of.split_once(' ').ok_or("want TRANSPORT ADDRESS")?;
        return serve(transport, address);
    }
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let mut transports = vec!["shm", "tcp", "ucx"];
    if !words.is_empty() {
        transports.retain(|name| words.iter().any(|word| word == name));
    }
    if transports.contains(&"ucx")
        && let Err(error) = ucx::version()
    {
        println!("ucx is left out: {error}");
        transports.retain(|name| *name != "ucx");
    }
    pin(1)?;
    let memory = memory()?;
    let copied = Mem::clone(&memory);
    fill(&copied)?;
    for (page, pages) in CASES {
        if let Ok(only) = std::env::var("ONLY")
            && only != page.to_string()
        {
            continue;
        }
        let mut ends = Vec::new();
        for name in &transports {
            ends.push((*name, End::new(name)?, Vec::new(), Vec::new()));
        }
        let mut plain_copy = Vec::new();
        for _ in 0..std::env::var("ROUNDS").map_or(ROUNDS, |r| r.parse().unwrap()) {
            plain_copy.push(copy_rate(&copied, page, pages)?);
            for (_, end, digest, plain) in &mut ends {
                digest.push(end.round(page, pages, true)?);
                plain.push(end.round(page, pages, false)?);
            }
        }
        let memcpy = median(plain_copy);
        println!("figure transfer.memcpy.{page} {memcpy:.2} GB/s");
        for t in std::fs::read_dir("/proc/self/task")? {
            let p = t?.path();
            let s = std::fs::read_to_string(p.join("schedstat"))?;
            let st = std::fs::read_to_string(p.join("status"))?;
            let cs: Vec<&str> = st.lines().filter(|l| l.contains("ctxt")).collect();
            println!("{} {} {:?}", std::fs::read_to_string(p.join("comm"))?.trim(), s.trim(), cs);
        }
        for (name, end, digest, plain) in ends {
            let (digest, plain) = (median(digest), median(plain));
            println!("figure transfer.{name}.{page}.digest {digest:.2} GB/s");
            println!("figure transfer.{name}.{page}.plain {plain:.2} GB/s");
            println!("figure transfer.{name}.{page}.vs_memcpy {:.2} ratio", digest / memcpy);
            end.stop()?;
        }
    }
    Ok(())
}

fn median(mut rounds: Vec<f64>) -> f64 {
    rounds.sort_by(f64::total_cmp);
    rounds[rounds.len() / 2]
}

/// All threads of this process, those to come too, run on one core, where there are two.
fn pin(core: usize) -> Outcome<()> {
    let mut cores = rustix::thread::CpuSet::new();
    cores.set(core % std::thread::available_parallelism()?.get());
    Ok(rustix::thread::sched_setaffinity(None, &cores)?)
}

fn memory() -> Outcome<Mem> {
    Ok(CpuDevice::default().alloc(Place::Shared, FIRST + BUFFER)?)
}

/// Bytes that differ from word to word (SplitMix64).
fn fill(memory: &Mem) -> Outcome<()> {
    let mut state = 7_u64;
    let mut piece = vec![0; 1 << 20];
    for at in (FIRST..FIRST + BUFFER).step_by(piece.len()) {
        for word in piece.chunks_exact_mut(8) {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            word.copy_from_slice(&(z ^ (z >> 27)).to_le_bytes());
        }
        memory.write(at, &piece)?;
    }
    Ok(memory.store_word(0, 1)?)
}

/// Where page `n` lies: scattered, as in a pool. The same page of both sides, so that a page which
/// comes round again brings the bytes that are there.
fn place(n: u32, page: u32) -> Extent {
    let slots = BUFFER / u64::from(page);
    let slot = (u64::from(n) % slots) * 7919 % slots;
    Extent { offset: FIRST + slot * u64::from(page), len: page }
}

fn key(n: u32) -> Key {
    let mut key = [0; 16];
    key[..4].copy_from_slice(&n.to_be_bytes());
    Key(key)
}

/// One thread copies the pages of a round inside the process, to the other half of the buffer.
fn copy_rate(memory: &Mem, page: u32, pages: u32) -> Outcome<f64> {
    let mut target = vec![0_u8; (BUFFER / 2) as usize];
    let slots = BUFFER / 2 / u64::from(page);
    target.fill(1);
    let begin = Instant::now();
    for n in 0..pages {
        let at = ((u64::from(n) % slots) * u64::from(page)) as usize;
        memory.read(place(n, page).offset, &mut target[at..at + page as usize])?;
    }
    let rate = f64::from(page) * f64::from(pages) / begin.elapsed().as_secs_f64() / 1e9;
    std::hint::black_box(&target);
    Ok(rate)
}

fn factory(transport: &str) -> Outcome<TransportFactory> {
    match transport {
        "shm" => Ok(Shm::factory(1)),
        "tcp" => Ok(Tcp::factory()),
        "ucx" => Ok(Ucx::factory(Arc::default())),
        other => Err(format!("no transport {other:?}").into()),
    }
}

fn config(role: Role, memory: &Mem) -> Outcome<DriverConfig> {
    let mut incarnation = [0; 16];
    getrandom::fill(&mut incarnation)?;
    let (fingerprint, layout) = (Fingerprint([9; 16]), "pages of a bench".to_owned());
    let mut config = DriverConfig::new(role, Incarnation(incarnation), fingerprint, layout);
    config.regions.push(Arc::new(PoolRegion(memory.clone())));
    config.receiver.in_flight_max = IN_FLIGHT;
    Ok(config)
}

/// The source: offers what it is asked for, at once. Tags are made before the first offer of a
/// size and remembered.
fn serve(transport: &str, address: &str) -> Outcome<()> {
    pin(0)?;
    let memory = memory()?;
    fill(&memory)?;
    let handle: Arc<OnceLock<DriverHandle>> = Arc::default();
    let upcalls: UpcallSink = {
        let (handle, memory) = (Arc::clone(&handle), memory.clone());
        let known = std::sync::Mutex::new(std::collections::BTreeMap::new());
        Arc::new(move |upcall| {
            let Upcall::Requested { attempt, request, .. } = upcall else { return };
            let [page, pages] = [0, 4].map(|at| {
                u32::from_le_bytes(request[at..at + 4].try_into().expect("eight bytes of ours"))
            });
            let mut known = known.lock().expect("nothing panics with it");
            let items = known.entry(page).or_insert_with(|| items(&memory, page, pages));
            let record = FinalRecord::new([3; 16], &*items, Vec::new());
            let handle = handle.wait();
            for chunk in items.chunks(CHUNK) {
                handle.ready(attempt, chunk.to_vec()).expect("called by the driver");
            }
            handle.finish(attempt, record).expect("called by the driver");
        })
    };
    let mut config = config(Role::Prefill, &memory)?;
    config.listen = Some(address.to_owned());
    let driver = Driver::spawn(
        config,
        factory(transport)?,
        Arc::new(Check { is_on: Arc::default() }),
        upcalls,
    )?;
    println!("listening {}", driver.listen_address().unwrap_or_default());
    std::io::stdout().flush()?;
    handle.set(driver.clone()).map_err(|_| "set once")?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    driver.shutdown();
    Ok(())
}

fn items(memory: &Mem, page: u32, pages: u32) -> Vec<Item> {
    let item = |n| {
        let extent = place(n, page);
        Item {
            key: key(n),
            identity: Identity(key(n).0),
            tag: Tag(digest_of(&mut *page_hash(), memory, &[extent]).expect("inside the memory").0),
            region: RegionId(0),
            extents: vec![extent],
            guard: Guard { region: RegionId(0), offset: 0, expect: 1 },
        }
    };
    (0..pages).map(item).collect()
}

/// Digests what lands, or believes it. One hash serves both, so that a round can switch.
struct Check {
    is_on: Arc<AtomicBool>,
}

struct Switched {
    hash: Box<dyn PageHash>,
    is_on: Arc<AtomicBool>,
}

impl PageHash for Switched {
    unsafe fn copy(&mut self, source: *const u8, target: *mut u8, bytes: usize) {
        if self.is_on.load(Ordering::Relaxed) {
            // SAFETY: the caller's contract is that of the call.
            unsafe { self.hash.copy(source, target, bytes) };
        } else {
            // SAFETY: as above.
            unsafe { Plain.copy(source, target, bytes) };
        }
    }

    unsafe fn read(&mut self, source: *const u8, bytes: usize) {
        if self.is_on.load(Ordering::Relaxed) {
            // SAFETY: the caller's contract is that of the call.
            unsafe { self.hash.read(source, bytes) };
        }
    }

    fn finish(&mut self) -> Option<Digest> {
        self.hash.finish()
    }
}

impl Verifier for Check {
    fn hash(&self) -> Box<dyn PageHash> {
        Box::new(Switched { hash: page_hash(), is_on: Arc::clone(&self.is_on) })
    }

    fn verify(&self, page: &Verify, digest: Option<Digest>) -> bool {
        !self.is_on.load(Ordering::Relaxed) || digest == Some(page.tag.0)
    }
}

/// A reader and the process that it reads from.
struct End {
    source: Child,
    driver: DriverHandle,
    news: Receiver<Upcall>,
    peer: PeerId,
    check: Arc<Check>,
    rounds: u64,
}

impl End {
    fn new(transport: &str) -> Outcome<Self> {
        let path = std::env::temp_dir().join(format!("dsv4-bench-{}.sock", std::process::id()));
        let address = match transport {
            "shm" => format!("unix:{}", path.display()),
            _ => "127.0.0.1:0".to_owned(),
        };
        let mut source = Command::new(std::env::current_exe()?)
            .env(SOURCE, format!("{transport} {address}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        let out = source.stdout.take().ok_or("stdout is piped")?;
        BufReader::new(out).read_line(&mut line)?;
        let address = line.trim().strip_prefix("listening ").ok_or("the source did not start")?;
        let memory = memory()?;
        let check = Arc::new(Check { is_on: Arc::default() });
        let (send, news) = channel();
        let upcalls: UpcallSink = Arc::new(move |upcall| {
            // The end of the bench.
            let _ = send.send(upcall);
        });
        let config = config(Role::Decode, &memory)?;
        let driver = Driver::spawn(config, factory(transport)?, check.clone(), upcalls)?;
        driver.connect(address)?;
        let peer = loop {
            match news.recv_timeout(PATIENCE)? {
                Upcall::PeerUp { peer, .. } => break peer,
                Upcall::Refused { text, .. } => return Err(text.into()),
                _ => {}
            }
        };
        Ok(Self { source, driver, news, peer, check, rounds: 0 })
    }

    /// GB/s from the request to the word that every page is there and, with `digest`, right.
    fn round(&mut self, page: u32, pages: u32, digest: bool) -> Outcome<f64> {
        self.check.is_on.store(digest, Ordering::Relaxed);
        self.rounds += 1;
        let mut attempt = [0; 16];
        getrandom::fill(&mut attempt)?;
        let target = |n| Target {
            key: key(n),
            group: n,
            region: RegionId(0),
            extents: vec![place(n, page)],
        };
        let request = [page.to_le_bytes(), pages.to_le_bytes()].concat();
        let (attempt, plan) = (AttemptId(attempt), (0..pages).map(target).collect());
        let start = Start { attempt, peer: self.peer, request, have: 0, plan_hash: [3; 16], plan };
        let begin = Instant::now();
        self.driver.start(start)?;
        loop {
            match self.news.recv_timeout(PATIENCE)? {
                Upcall::Completed { .. } => break,
                Upcall::Failed { why, .. } => return Err(why.to_string().into()),
                Upcall::Fresh { .. } => return Err("a page was wrong".into()),
                _ => {}
            }
        }
        let seconds = begin.elapsed().as_secs_f64();
        Ok(f64::from(page) * f64::from(pages) / seconds / 1e9)
    }

    fn stop(mut self) -> Outcome<()> {
        self.driver.shutdown();
        drop(self.source.stdin.take());
        self.source.wait()?;
        Ok(())
    }
}
