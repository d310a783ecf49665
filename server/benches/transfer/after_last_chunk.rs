//! From the last chunk of a long prompt computed to a decode step that could start: the pages of a
//! Flash-shaped model are pulled over shared memory while the prompt is "computed", so that little is
//! left to move at its end.
//!
//! The plan, the tags, the offers and the checks are those of the server. Only the computing is not:
//! pages are filled before, and the source is kept busy for the time of a chunk.

use crate::own::{Believes, Source, address, factory, random, say_and_wait, wait_for_link};
use crate::pages::{Outcome, PATIENCE, READER_CORE, SOURCE_CORE, pin};
use crate::report::Report;
use dsa_kernels::{CpuDevice, Mem};
use dsv4_model::sample::SamplingParams;
use dsv4_server::engine::CacheKeep;
use dsv4_server::glue::handoff::{PageVerifier, TagBinding, offer, targets};
use dsv4_server::glue::hash::{digest_of, page_hash};
use dsv4_server::glue::payload::PrefillRequest;
use dsv4_server::glue::pools::{POOLS, PageCounts, Pools};
use dsv4_server::glue::regions::PoolRegion;
use dsv4_server::worker::OFFER_PAGES;
use kv_pool::{
    BLOCK_TOKENS, FingerprintInput, Geometry, IndexKeyType, LayerKind, ModelShape, Numerics, Owner,
    PageTable, PlanEntry, PoolKind, WINDOW_PAGE_ROWS, handoff_plan, plan_hash, window_start,
};
use pd_transfer::driver::{Driver, DriverConfig, DriverHandle, UpcallSink, Verifier};
use pd_transfer::endpoint::Upcall;
use pd_transfer::manifest::Manifest;
use pd_transfer::receiver::Start;
use pd_transfer::wire::{AttemptId, Extent, FinalRecord, Fingerprint, Incarnation, Role};
use rustix::time::{ClockId, clock_gettime};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Tokens of the prompt; a few for a quick look.
pub(crate) const TOKENS: u32 = 65_536;
pub(crate) const QUICK_TOKENS: u32 = 4096;
/// Tokens of a chunk.
const CHUNK: u32 = 2048;
const VOCAB: usize = 129_280;
const OWNER: Owner = Owner::Sequence(1);

/// The caches of DeepSeek-V4-Flash: 2 window layers, 21 of ratio 4, 20 of ratio 128.
fn geometry() -> Outcome<Geometry> {
    let mut layers = vec![LayerKind::Window; 2];
    layers.extend([LayerKind::C4, LayerKind::C128].into_iter().cycle().take(41));
    let shape =
        ModelShape { layers, head_dim: 512, rope_dim: 64, index_head_dim: 128, window_tokens: 128 };
    Ok(Geometry::new(shape, Numerics::Official, IndexKeyType::Fp8)?)
}

/// Memory, plan and table of one side.
struct Side {
    pools: Pools,
    fingerprint: kv_pool::Fingerprint,
    layout: String,
    plan: Vec<PlanEntry>,
    tokens: u32,
}

impl Side {
    fn new(tokens: u32) -> Outcome<Self> {
        let geometry = geometry()?;
        let plan = handoff_plan(&geometry, tokens, 0);
        let counts = PageCounts { block: tokens / BLOCK_TOKENS, window: 4, carry: 1 };
        let layout = geometry.describe();
        let pools = Pools::new(Arc::new(geometry.clone()), &CpuDevice::default(), counts)?;
        let (model_digest, tokenizer_digest) = ([0; 32], [0; 32]);
        let model_type = "pages of a bench".to_owned();
        let input = FingerprintInput { geometry, model_digest, tokenizer_digest, model_type };
        Ok(Self { pools, fingerprint: input.fingerprint(), layout, plan, tokens })
    }

    /// Zeroed pages for the whole prompt, as a worker takes them.
    fn table(&mut self) -> Outcome<PageTable> {
        let first = window_start(self.tokens) / WINDOW_PAGE_ROWS;
        let windows = self.tokens.div_ceil(WINDOW_PAGE_ROWS) - first;
        let mut table = PageTable::new(self.pools.take(PoolKind::Carry, 1, OWNER)?[0]);
        table.start_window(first);
        for page in self.pools.take(PoolKind::Block, self.tokens / BLOCK_TOKENS, OWNER)? {
            table.push_block(page);
        }
        for page in self.pools.take(PoolKind::Window, windows, OWNER)? {
            table.push_window(page);
        }
        Ok(table)
    }

    fn driver(
        &self,
        role: Role,
        listen: Option<String>,
        verifier: Arc<dyn Verifier>,
    ) -> Outcome<(DriverHandle, Receiver<Upcall>)> {
        let (fingerprint, layout) = (Fingerprint(self.fingerprint.0), self.layout.clone());
        let mut config = DriverConfig::new(role, Incarnation(random()?), fingerprint, layout);
        for kind in POOLS {
            config.regions.push(Arc::new(PoolRegion(self.pools.mem(kind).clone())));
        }
        config.listen = listen;
        let (send, news) = channel();
        let upcalls: UpcallSink = Arc::new(move |upcall| {
            // The end of the bench.
            let _ = send.send(upcall);
        });
        Ok((Driver::spawn(config, factory("shm")?, verifier, upcalls)?, news))
    }
}

/// Nanoseconds of the clock that all processes of this machine share.
fn now_ns() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// The source. Arguments: address, tokens, milliseconds of a chunk.
pub(crate) fn serve(arguments: &[&str]) -> Outcome<()> {
    let [address, tokens, pace_ms] = *arguments else {
        return Err("want ADDRESS TOKENS PACE".into());
    };
    pin(SOURCE_CORE)?;
    let mut side = Side::new(tokens.parse()?)?;
    let table = side.table()?;
    fill(&side, &table)?;
    let pace = Duration::from_millis(pace_ms.parse()?);
    let verifier = Arc::new(Believes);
    let (driver, news) = side.driver(Role::Prefill, Some(address.to_owned()), verifier)?;
    let handle = driver.clone();
    let prefill = std::thread::spawn(move || {
        for upcall in news {
            if let Upcall::Requested { attempt, request, .. } = upcall
                && let Err(error) = prefill(&side, &table, &handle, attempt, &request, pace)
            {
                // The reader says that its request failed.
                let _ = handle.reject(attempt, u16::MAX, &error.to_string());
            }
        }
    });
    say_and_wait(driver.listen_address().unwrap_or_default())?;
    driver.shutdown();
    drop(driver);
    prefill.join().map_err(|_| "the source's worker panicked".into())
}

/// Bytes in every page of the plan.
fn fill(side: &Side, table: &PageTable) -> Outcome<()> {
    let mut word = 1_u64;
    for target in targets(&side.pools, table, &side.plan)? {
        let mem = side.pools.mem(POOLS[target.region.0 as usize]);
        for Extent { offset, len } in target.extents {
            let mut bytes = vec![0; len as usize];
            for piece in bytes.chunks_mut(8) {
                word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                piece.copy_from_slice(&word.to_le_bytes()[..piece.len()]);
            }
            mem.write(offset, &bytes)?;
        }
    }
    Ok(())
}

/// One request: chunk by chunk, then what is only there at the end, as the worker does it.
fn prefill(
    side: &Side,
    table: &PageTable,
    driver: &DriverHandle,
    attempt: AttemptId,
    request: &[u8],
    pace: Duration,
) -> Outcome<()> {
    let request = PrefillRequest::decode(request, VOCAB)?;
    let binding = TagBinding::new(side.fingerprint, &request.prompt);
    let (blocks, at_once) = (side.tokens / BLOCK_TOKENS, CHUNK / BLOCK_TOKENS);
    let mut offered = Manifest::new();
    for from in (0..blocks).step_by(at_once as usize) {
        compute(side.pools.mem(PoolKind::Block), pace)?;
        let (until, computed) = (from + at_once, now_ns());
        let is_ripe = |entry: &&PlanEntry| match entry.pool {
            PoolKind::Block => (from..until).contains(&entry.page_no),
            PoolKind::Window | PoolKind::Carry => until >= blocks,
        };
        let ripe: Vec<PlanEntry> = side.plan.iter().filter(is_ripe).copied().collect();
        for some in ripe.chunks(OFFER_PAGES) {
            let items = offer(&side.pools, table, &binding, some)?;
            offered.extend(&items);
            driver.ready(attempt, items)?;
        }
        let tagged = now_ns();
        if until >= blocks {
            let payload = [computed.to_le_bytes(), tagged.to_le_bytes()].concat();
            driver.finish(attempt, offered.record(plan_hash(&side.plan), payload))?;
        }
    }
    Ok(())
}

/// Keeps this core busy, and its caches, for the time that a chunk takes.
fn compute(memory: &Mem, pace: Duration) -> Outcome<()> {
    let (begin, mut hash) = (Instant::now(), page_hash());
    while begin.elapsed() < pace {
        std::hint::black_box(digest_of(&mut *hash, memory, &[Extent { offset: 0, len: 4 << 20 }])?);
    }
    Ok(())
}

/// Milliseconds of each request: in all, and for the tags of the last chunk.
type Times = (Vec<f64>, Vec<f64>);

/// Asks for the prompt several times, after once to warm up, and says the medians.
pub(crate) fn measure(
    tokens: u32,
    requests: usize,
    pace_ms: u64,
    report: &mut Report,
) -> Outcome<()> {
    let (address, pace) = (address("shm"), pace_ms.to_string());
    let source = Source::start(&["prefill", &address, &tokens.to_string(), &pace])?;
    // A thread of its own is pinned, and the driver's with it, but not the processes to come.
    let reads = std::thread::spawn(move || {
        // Errors of this bench can't be sent to another thread.
        read(&source, tokens, requests).map_err(|error| error.to_string())
    });
    let (all_ms, tags_ms) = reads.join().map_err(|_| "the reader panicked")??;
    println!("each request, ms: {all_ms:.2?}");
    report.say("after_last_chunk_ms", crate::median(&all_ms), "ms");
    report.say("after_last_chunk_ms.tags", crate::median(&tags_ms), "ms");
    Ok(())
}

fn read(source: &Source, tokens: u32, requests: usize) -> Outcome<Times> {
    pin(READER_CORE)?;
    let mut reader = Side::new(tokens)?;
    let bytes: u64 = reader.plan.iter().map(|entry| u64::from(entry.bytes)).sum();
    let items = reader.plan.len();
    println!("{tokens} tokens in chunks of {CHUNK}: {items} items, {bytes} bytes");
    let verifier = Arc::new(PageVerifier::default());
    let (driver, news) = reader.driver(Role::Decode, None, verifier.clone())?;
    driver.connect(&source.said)?;
    let peer = wait_for_link(&news)?;
    let prompt: Vec<u32> = (0..tokens).map(|n| n.wrapping_mul(2_654_435_761) % 129_280).collect();
    let mut times = Times::default();
    for number in 0..=requests {
        let (attempt, table) = (AttemptId(random()?), reader.table()?);
        verifier.expect(attempt, Arc::new(TagBinding::new(reader.fingerprint, &prompt)));
        let request = PrefillRequest {
            id: format!("bench {number}"),
            request_id: String::new(),
            trace: None,
            prompt: prompt.clone(),
            output: 0,
            sampling: SamplingParams::default(),
            cache_salt: String::new(),
            cache_keep: CacheKeep::AsUsed,
            turn: dsv4_server::engine::Turn::default(),
            not_first: Vec::new(),
            thinking: None,
            source: None,
        };
        driver.start(Start {
            attempt,
            peer,
            request: request.encode(),
            have: 0,
            plan_hash: plan_hash(&reader.plan),
            plan: targets(&reader.pools, &table, &reader.plan)?,
        })?;
        let record = completed(&news)?;
        for page in table.all_pages() {
            reader.pools.seal(page)?;
        }
        let done = now_ns();
        verifier.forget(attempt);
        reader.pools.free_table(&table, OWNER)?;
        let ([computed, tagged], _) = record.payload.as_chunks::<8>() else {
            return Err("the final record has no times".into());
        };
        let [computed, tagged] = [computed, tagged].map(|bytes| i64::from_le_bytes(*bytes));
        if number > 0 {
            times.0.push((done - computed) as f64 / 1e6);
            times.1.push((tagged - computed) as f64 / 1e6);
        }
    }
    driver.shutdown();
    Ok(times)
}

fn completed(news: &Receiver<Upcall>) -> Outcome<FinalRecord> {
    loop {
        match news.recv_timeout(PATIENCE)? {
            Upcall::Completed { record, .. } => return Ok(record),
            Upcall::Failed { why, .. } => return Err(why.to_string().into()),
            Upcall::Fresh { .. } => return Err("a page was wrong".into()),
            Upcall::PeerDown { why, .. } => return Err(why.into()),
            _ => {}
        }
    }
}
