//! Bandwidth of gets over each transport, beside a plain memcpy of the same pages.
//!
//! Prints `figure pd_transfer.<transport>.<page bytes> VALUE GB/s`, the median of five rounds. Both
//! ends run in this process; bytes are compared after each series. UCX is left out where there is no
//! library, and takes its settings (`UCX_TLS`, `UCX_NET_DEVICES`) from the environment. Without `--bench` (as in
//! `cargo test`) or with `--quick` the inputs are tiny.

use crossbeam_channel::{Receiver, unbounded};
use pd_transfer::copy::{read, set_guard, write};
use pd_transfer::get::{Get, GetOutcome};
use pd_transfer::hash::hash128;
use pd_transfer::id::{OpId, PeerId};
use pd_transfer::inprocess::InProcessNet;
use pd_transfer::shm::{SharedRegion, Shm};
use pd_transfer::tcp::Tcp;
use pd_transfer::testing::Rng;
use pd_transfer::transport::{
    RegionOwner, Transport, TransportError, TransportEvent, TransportFactory,
};
use pd_transfer::ucx::{self, Totals, Ucx};
use pd_transfer::wire::{Extent, Extents, Guard, RegionId};
use std::error::Error;
use std::io::Write as _;
use std::sync::Arc;
use std::time::Instant;

/// Gets under way at once, as the receiver's default.
const WINDOW: u64 = 64;

struct End {
    transport: Box<dyn Transport>,
    events: Receiver<TransportEvent>,
    memory: Arc<SharedRegion>,
}

fn end(factory: TransportFactory, bytes: usize) -> Result<End, TransportError> {
    let (send, events) = unbounded();
    let mut transport = factory(Arc::new(move |event| {
        // The end of the bench.
        let _ = send.send(event);
    }))?;
    let memory = SharedRegion::new(bytes)?;
    transport.register(Arc::clone(&memory) as Arc<dyn RegionOwner>)?;
    Ok(End { transport, events, memory })
}

fn round(target: &mut End, peer: PeerId, pages: u64, page: u32) -> Result<f64, Box<dyn Error>> {
    let begin = Instant::now();
    let (mut asked, mut done) = (0, 0);
    while done < pages {
        let mut gets = Vec::new();
        while asked < pages && asked - done < WINDOW {
            // Scattered, as pages of a pool are: the source in another order than the target.
            let from = (asked * 7919) % pages;
            let at = |n: u64| Extents::from(Extent { offset: 64 + n * u64::from(page), len: page });
            let get = Get {
                op: OpId(asked),
                source_region: RegionId(0),
                source: at(from),
                guard: Guard { region: RegionId(0), offset: 0, expect: 1 },
                target_region: RegionId(0),
                target: at(from),
            };
            gets.push(get);
            asked += 1;
        }
        if let Some((op, error)) = target.transport.get_many(peer, gets).pop() {
            return Err(format!("{op}: {error}").into());
        }
        match target.events.recv()? {
            TransportEvent::Ended { gets, .. }
                if gets.iter().all(|get| get.outcome == GetOutcome::Done) =>
            {
                done += gets.len() as u64;
            }
            other => return Err(format!("{other:?}").into()),
        }
    }
    Ok((pages * u64::from(page)) as f64 / begin.elapsed().as_secs_f64() / 1e9)
}

fn contents(memory: &SharedRegion, bytes: u64) -> Result<[u8; 16], Box<dyn Error>> {
    let mut all = Vec::new();
    read(memory, &Extent { offset: 64, len: u32::try_from(bytes)? }, &mut all)?;
    Ok(hash128(&all))
}

fn median(mut rounds: Vec<f64>) -> f64 {
    rounds.sort_by(f64::total_cmp);
    rounds[rounds.len() / 2]
}

fn series(
    factory: impl Fn() -> TransportFactory,
    address: &str,
    pages: u64,
    page: u32,
) -> Result<f64, Box<dyn Error>> {
    let bytes = pages * u64::from(page);
    let mut source = end(factory(), bytes as usize + 64)?;
    let mut target = end(factory(), bytes as usize + 64)?;
    let mut rng = Rng::new(3);
    let fill: Vec<u8> = (0..bytes.div_ceil(8)).flat_map(|_| rng.next().to_le_bytes()).collect();
    write(&*source.memory, 64, &fill[..bytes as usize])?;
    set_guard(&*source.memory, 0, 1)?;
    let address = source.transport.listen(address)?;
    let peer = target.transport.connect(&address)?;
    let up = target.events.recv()?;
    assert!(matches!(up, TransportEvent::PeerUp { .. }), "{up:?}");
    let rounds = (0..5).map(|_| round(&mut target, peer, pages, page)).collect::<Result<_, _>>()?;
    assert_eq!(contents(&source.memory, bytes)?, contents(&target.memory, bytes)?, "wrong bytes");
    Ok(median(rounds))
}

fn memcpy(pages: u64, page: u32) -> f64 {
    let bytes = pages as usize * page as usize;
    let source = vec![1_u8; bytes];
    let mut target = vec![0_u8; bytes];
    let rounds = (0..5).map(|_| {
        let begin = Instant::now();
        for n in 0..pages {
            let at = (n * 7919 % pages) as usize * page as usize;
            let range = at..at + page as usize;
            target[range.clone()].copy_from_slice(&source[range]);
        }
        bytes as f64 / begin.elapsed().as_secs_f64() / 1e9
    });
    let median = median(rounds.collect());
    assert_eq!(target, source, "wrong bytes");
    median
}

fn main() -> Result<(), Box<dyn Error>> {
    let has = |word: &str| std::env::args().any(|argument| argument == word);
    let is_bench = has("--bench") && !has("--quick");
    let total: u64 = if is_bench { 128 << 20 } else { 1 << 20 };
    let path = std::env::temp_dir().join(format!("pd-bench-{}", std::process::id()));
    let unix = format!("unix:{}", path.display());
    let mut out = std::io::stdout();
    let ucx = ucx::version();
    match &ucx {
        Ok(version) => writeln!(out, "UCX {version}")?,
        Err(why) => writeln!(out, "ucx is left out: {why}")?,
    }
    for page in [8448_u32, 37_440] {
        let pages = total / u64::from(page);
        let net = InProcessNet::new();
        let mut figures = vec![
            ("inprocess", series(|| net.factory(), "bench", pages, page)?),
            ("shm", series(|| Shm::factory(1), &unix, pages, page)?),
            ("tcp", series(Tcp::factory, "127.0.0.1:0", pages, page)?),
        ];
        if ucx.is_ok() {
            let totals = Arc::new(Totals::default());
            let factory = || Ucx::factory(Arc::clone(&totals));
            figures.push(("ucx", series(factory, "127.0.0.1:0", pages, page)?));
            let counted = totals.snapshot();
            // Guard words go together, so there is little more than a transfer per page.
            assert_eq!(counted.gets, 5 * pages);
            assert!(counted.posts < 10 * pages, "{counted:?}");
        }
        figures.push(("memcpy", memcpy(pages, page)));
        for (name, value) in figures {
            writeln!(out, "figure pd_transfer.{name}.{page} {value:.2} GB/s")?;
        }
    }
    Ok(())
}
