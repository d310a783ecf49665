//! Two drivers over TCP: 100 pages go from a prefill side to a decode side, each one verified.

use pd_transfer::copy::{read, set_guard, write};
use pd_transfer::driver::{Driver, DriverConfig, Verifier};
use pd_transfer::endpoint::Upcall;
use pd_transfer::get::Digest;
use pd_transfer::hash::{Hash128, hash128};
use pd_transfer::page_hash::{Bounced, PageHash};
use pd_transfer::receiver::{Start, Target, Verify};
use pd_transfer::tcp::Tcp;
use pd_transfer::transport::{HeapRegion, RegionOwner};
use pd_transfer::wire::{
    AttemptId, Extent, FinalRecord, Fingerprint, Guard, Identity, Incarnation, Item, Key, RegionId,
    Role, Tag,
};
use std::error::Error;
use std::io::Write as _;
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};

const PAGES: u8 = 100;
const PAGE_BYTES: u32 = 8448;
/// The guard word lies before the pages.
const FIRST: u64 = 64;
const PLAN_HASH: [u8; 16] = *b"both sides agree";

fn extent(n: u8) -> Extent {
    Extent { offset: FIRST + u64::from(n) * u64::from(PAGE_BYTES), len: PAGE_BYTES }
}

/// A real tag also mixes in layout, cache, layer and tokens.
fn tag(memory: &dyn RegionOwner, extents: &[Extent]) -> Option<Tag> {
    let mut bytes = Vec::new();
    extents.iter().try_for_each(|extent| read(memory, extent, &mut bytes)).ok()?;
    Some(Tag(hash128(&bytes)))
}

#[derive(Debug)]
struct ByTag;

impl Verifier for ByTag {
    fn hash(&self) -> Box<dyn PageHash> {
        Box::new(Bounced::new(Hash128::new()))
    }

    fn verify(&self, page: &Verify, digest: Option<Digest>) -> bool {
        digest.map(Tag) == Some(page.tag)
    }
}

fn config(role: Role, memory: Arc<HeapRegion>) -> DriverConfig {
    // A real incarnation is random, a real fingerprint a hash over the whole page layout.
    let incarnation = Incarnation([role as u8 + 1; 16]);
    let layout = String::from("8448-byte pages");
    let mut config = DriverConfig::new(role, incarnation, Fingerprint([1; 16]), layout);
    config.regions = vec![memory];
    config
}

/// Pages with some bytes in them, sealed.
fn compute(memory: &HeapRegion) -> Option<Vec<Item>> {
    let guard = Guard { region: RegionId(0), offset: 0, expect: 1 };
    set_guard(memory, guard.offset, guard.expect).ok()?;
    let items = (0..PAGES).map(|n| {
        write(memory, extent(n).offset, &[n; PAGE_BYTES as usize]).ok()?;
        Some(Item {
            key: Key([n; 16]),
            identity: Identity([n; 16]),
            tag: tag(memory, &[extent(n)])?,
            region: RegionId(0),
            extents: vec![extent(n)],
            guard,
        })
    });
    items.collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let bytes = FIRST as usize + PAGES as usize * PAGE_BYTES as usize;
    let (source, target) = (HeapRegion::new(bytes), HeapRegion::new(bytes));

    let own = Arc::new(OnceLock::<pd_transfer::driver::DriverHandle>::new());
    let (answer, memory) = (Arc::clone(&own), Arc::clone(&source));
    let mut prefill_config = config(Role::Prefill, Arc::clone(&source));
    prefill_config.listen = Some(String::from("127.0.0.1:0"));
    let verifier = Arc::new(ByTag);
    let upcalls = move |upcall| {
        if let Upcall::Requested { attempt, .. } = upcall {
            let items = compute(&memory).unwrap_or_default();
            let record = FinalRecord::new(PLAN_HASH, &items, b"first token".to_vec());
            let handle = answer.wait();
            // An error means that the driver has ended, and with it the attempt.
            let _ = handle.ready(attempt, items).and_then(|()| handle.finish(attempt, record));
        }
    };
    let prefill = Driver::spawn(prefill_config, Tcp::factory(), verifier, Arc::new(upcalls))?;
    own.get_or_init(|| prefill.clone());

    let (send, news) = channel();
    let verifier = Arc::new(ByTag);
    let decode = Driver::spawn(
        config(Role::Decode, Arc::clone(&target)),
        Tcp::factory(),
        verifier,
        Arc::new(move |upcall| {
            let _ = send.send(upcall);
        }),
    )?;
    decode.connect(prefill.listen_address().ok_or("no address")?)?;

    let mut out = std::io::stdout();
    for upcall in news {
        match upcall {
            Upcall::PeerUp { peer, address, .. } => {
                writeln!(out, "{peer} at {address} is up")?;
                let target = |n| Target {
                    key: Key([n; 16]),
                    group: u32::from(n),
                    region: RegionId(0),
                    extents: vec![extent(n)],
                };
                decode.start(Start {
                    attempt: AttemptId([7; 16]),
                    peer,
                    request: b"prompt".to_vec(),
                    have: 0,
                    plan_hash: PLAN_HASH,
                    plan: (0..PAGES).map(target).collect(),
                })?;
            }
            Upcall::Completed { record, .. } => {
                writeln!(out, "{} pages, {} bytes, verified", record.items, record.bytes)?;
                break;
            }
            Upcall::Failed { why, .. } => return Err(why.into()),
            _ => {}
        }
    }
    decode.shutdown();
    prefill.shutdown();
    Ok(())
}
