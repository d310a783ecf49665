//! A decode worker of two ranks pulls one prompt from a prefill worker of three ranks over TCP. One
//! prefill rank leaves in the middle, and the request completes in a second round without it.

use pd_transfer::copy::{set_guard, write};
use pd_transfer::driver::{Driver, DriverConfig, DriverHandle, Verifier};
use pd_transfer::endpoint::Upcall;
use pd_transfer::get::Digest;
use pd_transfer::group::{
    FanOut, FanOutConfig, FanOutOutput, GroupOutput, GroupStart, Join, Rank, RankGroup,
    RankGroupConfig, RequestId, RequestKey, Source,
};
use pd_transfer::hash::{Hash128, hash128};
use pd_transfer::id::Time;
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
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

const DECODE_RANKS: u16 = 2;
const PREFILL_RANKS: u16 = 3;
const PAGES: u8 = 100;
const PAGE_BYTES: u32 = 8448;
/// Rounds that the memory has room for.
const ROUNDS: u32 = 2;
/// The guard words of the rounds lie before the pages.
const FIRST: u64 = 64;
const PLAN_HASH: [u8; 16] = *b"both sides agree";

type Outcome<T> = Result<T, Box<dyn Error>>;
type News = (Rank, Upcall);

/// One rank: a driver with memory of its own, whose news carry the number of the rank.
struct Node {
    handle: DriverHandle,
    memory: Arc<HeapRegion>,
}

struct ByTag;

impl Verifier for ByTag {
    fn hash(&self) -> Box<dyn PageHash> {
        Box::new(Bounced::new(Hash128::new()))
    }

    fn verify(&self, page: &Verify, digest: Option<Digest>) -> bool {
        digest.is_some_and(|digest| tag(page.key, &digest) == page.tag)
    }
}

/// A real tag also mixes in layout, cache, layer and tokens.
fn tag(key: Key, digest: &Digest) -> Tag {
    Tag(hash128(&[key.0, *digest].concat()))
}

/// Page `n` of a round, counted from 0.
fn extent(round: u32, n: u8) -> Extent {
    let before = u64::from(round) * u64::from(PAGES) + u64::from(n);
    Extent { offset: FIRST + before * u64::from(PAGE_BYTES), len: PAGE_BYTES }
}

fn node(role: Role, rank: Rank, news: Sender<News>) -> Outcome<Node> {
    let memory = HeapRegion::new(extent(ROUNDS, 0).offset as usize);
    // A real incarnation is random, a real fingerprint a hash over the whole page layout.
    let incarnation = Incarnation([(role as u8 + 1) * 16 + rank.0 as u8; 16]);
    let layout = String::from("8448-byte pages");
    let mut config = DriverConfig::new(role, incarnation, Fingerprint([1; 16]), layout);
    config.regions = vec![Arc::clone(&memory) as Arc<dyn RegionOwner>];
    config.listen = role.sends().then(|| String::from("127.0.0.1:0"));
    let upcalls = Arc::new(move |upcall| {
        // At the end of the example nobody listens.
        let _ = news.send((rank, upcall));
    });
    let handle = Driver::spawn(config, Tcp::factory(), Arc::new(ByTag), upcalls)?;
    Ok(Node { handle, memory })
}

/// The prompt's pages, in the memory of one rank: the same bytes and names on each.
fn compute(memory: &HeapRegion, round: u32) -> Option<Vec<Item>> {
    let guard = Guard { region: RegionId(0), offset: u64::from(round) * 8, expect: 1 };
    set_guard(memory, guard.offset, guard.expect).ok()?;
    let items = (0..PAGES).map(|n| {
        let bytes = [n; PAGE_BYTES as usize];
        write(memory, extent(round, n).offset, &bytes).ok()?;
        Some(Item {
            key: Key([n; 16]),
            identity: Identity([n; 16]),
            tag: tag(Key([n; 16]), &hash128(&bytes)),
            region: RegionId(0),
            extents: vec![extent(round, n)],
            guard,
        })
    });
    items.collect()
}

/// The prefill worker: one fan-out for the attempts at all of its ranks. It holds the last page back
/// in the first round, and takes the rank away that serves the second attempt of it.
fn prefill(ranks: &[Node], news: Receiver<News>) -> Outcome<()> {
    let mut fan_out = FanOut::new(FanOutConfig::default());
    let mut served = Vec::new();
    for (rank, upcall) in news {
        match upcall {
            Upcall::Requested { attempt, request, have, .. } => {
                let (name, round) = request.split_at(16);
                let request_id = RequestId(name.try_into()?);
                let key = RequestKey {
                    request: request_id,
                    round: u32::from_le_bytes(round.try_into()?),
                };
                let ranks = DECODE_RANKS;
                fan_out.handle_requested(Join { rank, attempt, key, ranks, request, have });
            }
            Upcall::Cancelled { attempt } => fan_out.handle_cancelled(rank, attempt),
            Upcall::Release { attempt, .. } => fan_out.handle_released(Time(0), rank, attempt),
            _ => {}
        }
        while let Some(output) = fan_out.poll_output() {
            let handle = |rank: Rank| &ranks[usize::from(rank.0)].handle;
            // A rank that has left has lost its attempts too.
            let _ = match output {
                FanOutOutput::Compute { served, key, .. } => {
                    say(&format!("prefill: round {} is computed", key.round))?;
                    let mut all = Vec::new();
                    for (rank, node) in (0..).map(Rank).zip(ranks) {
                        all = compute(&node.memory, key.round - 1).ok_or("no room for a round")?;
                        let held = usize::from(key.round == 1);
                        fan_out.offer(served, rank, all[held..].to_vec())?;
                    }
                    if key.round > 1 {
                        let record = FinalRecord::new(PLAN_HASH, &all, b"first token".to_vec());
                        fan_out.finish(served, record)?;
                    }
                    Ok(())
                }
                FanOutOutput::Ready { rank, attempt, items } => {
                    served.push(rank);
                    handle(rank).ready(attempt, items)
                }
                FanOutOutput::Finish { rank, attempt, record } => {
                    handle(rank).finish(attempt, record)
                }
                FanOutOutput::Reject { rank, attempt, code, text } => {
                    handle(rank).reject(attempt, code, &text)
                }
                FanOutOutput::Stop { .. } => Ok(()),
                FanOutOutput::Release { .. } => {
                    say("prefill: released after the last rank")?;
                    Ok(())
                }
            };
        }
        if served.len() == usize::from(DECODE_RANKS) {
            let rank = served[1];
            say(&format!("prefill: {rank} leaves"))?;
            ranks[usize::from(rank.0)].handle.shutdown();
            served.push(rank);
        }
    }
    Ok(())
}

fn say(line: &str) -> Outcome<()> {
    writeln!(std::io::stdout().lock(), "{line}")?;
    Ok(())
}

fn plan() -> Vec<Target> {
    let target = |n| Target {
        key: Key([n; 16]),
        group: u32::from(n),
        region: RegionId(0),
        extents: vec![extent(0, n)],
    };
    (0..PAGES).map(target).collect()
}

/// Does what the group wants; true once there is a verdict.
fn act(group: &mut RankGroup, ranks: &[Node]) -> Outcome<bool> {
    while let Some(output) = group.poll_output() {
        match output {
            GroupOutput::Start { rank, peer, source, attempt, key } => {
                say(&format!("decode: round {}, {rank} reads from {source}", key.round))?;
                let mut request = key.request.0.to_vec();
                request.extend_from_slice(&key.round.to_le_bytes());
                let (plan_hash, plan) = (PLAN_HASH, plan());
                let start = Start { attempt, peer, request, have: 0, plan_hash, plan };
                ranks[usize::from(rank.0)].handle.start(start)?;
            }
            GroupOutput::Cancel { rank, attempt } => {
                ranks[usize::from(rank.0)].handle.cancel(attempt)?;
            }
            GroupOutput::RoundFailed { key, why } => {
                say(&format!("decode: round {} failed: {why}", key.round))?;
            }
            GroupOutput::Completed { record, .. } => {
                let (items, bytes) = (record.items, record.bytes);
                say(&format!("decode: {items} pages, {bytes} bytes at every rank, verified"))?;
                return Ok(true);
            }
            GroupOutput::Failed { why, .. } => return Err(why.into()),
            GroupOutput::Quiet { .. } => {}
        }
    }
    Ok(false)
}

fn decode(ranks: &[Node], news: &Receiver<News>, sources: &[Node]) -> Outcome<()> {
    let addresses: Vec<&str> = sources.iter().filter_map(|n| n.handle.listen_address()).collect();
    for node in ranks {
        addresses.iter().try_for_each(|address| node.handle.connect(address))?;
    }
    let mut group = RankGroup::new(RankGroupConfig::new(DECODE_RANKS, vec![PREFILL_RANKS]));
    let mut links = 0;
    for (rank, upcall) in news {
        // The verdict is the group's; what comes back is about links and fresh pages.
        if let Some(Upcall::PeerUp { peer, address, .. }) =
            group.handle_upcall(Time(0), rank, upcall)
        {
            let at = addresses.iter().position(|known| *known == address);
            let source = Source { group: 0, rank: Rank(at.ok_or("a stranger")? as u16) };
            group.link_up(Time(0), rank, source, peer);
            links += 1;
            if links == usize::from(DECODE_RANKS * PREFILL_RANKS) {
                // Real ids are random.
                let attempts = (1..=6).map(|n| AttemptId([n; 16])).collect();
                let bytes = u64::from(PAGES) * u64::from(PAGE_BYTES);
                group
                    .start(Time(0), GroupStart { request: RequestId([9; 16]), bytes, attempts })?;
            }
        }
        if act(&mut group, ranks)? {
            return Ok(());
        }
    }
    Err("the drivers have ended".into())
}

fn main() -> Outcome<()> {
    let nodes = |role, count| -> Outcome<(Vec<Node>, Receiver<News>)> {
        let (send, news) = channel();
        let ranks = (0..count).map(|rank| node(role, Rank(rank), send.clone()));
        Ok((ranks.collect::<Outcome<_>>()?, news))
    };
    let (sources, prefill_news) = nodes(Role::Prefill, PREFILL_RANKS)?;
    let (ranks, decode_news) = nodes(Role::Decode, DECODE_RANKS)?;
    let sources = &sources[..];
    std::thread::scope(|scope| {
        let serving =
            scope.spawn(move || prefill(sources, prefill_news).map_err(|error| error.to_string()));
        let outcome = decode(&ranks, &decode_news, sources);
        // With the last driver the news of the prefill side end, and so does its thread.
        ranks.iter().chain(sources).for_each(|node| node.handle.shutdown());
        serving.join().map_err(|_| "the prefill side panicked")??;
        outcome
    })
}
