//! Audits of live workers: what is right is found right, what was damaged is found, named and given up.

use super::client::{Events, Metrics, eventually, greedy, post};
use super::cluster::{Pair, Server};
use super::prompts::prompt;
use super::warm::{ask, talk};
use super::workers::Workers;
use dsa_kernels::Mem;
use dsv4_server::audit::{Finding, How, Wish, WorkerAudit};
use dsv4_server::engine::{Engine as _, FailureKind};
use dsv4_server::node::NodeOptions;
use hicache::store::format::{MAGIC, OBJECT_ALIGN};
use kv_pool::{CacheKind, Geometry, PageRef, PoolKind};
use serde_json::{Value, json};
use std::os::unix::fs::FileExt as _;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::timeout;

const ALL: Wish = Wish { sample: 1.0, windows: 8, seed: 0 };

/// What `server verify` says, and its exit code.
fn verify(url: &str, flags: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_server"));
    let output = command.args(["verify", url]).args(flags).output().expect("it runs");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// The one worker of an audit that found nothing wrong.
fn sound(url: &str) -> Value {
    let (code, out, err) = verify(url, &["--json"]);
    assert_eq!(code, Some(0), "{out}{err}");
    let answer: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(answer["mismatches"], 0);
    let worker = answer["workers"][0].clone();
    assert_eq!(worker["skipped"], json!([]), "{worker}");
    for kind in ["block", "window", "carry"] {
        assert_eq!(worker["pages"][kind]["there"], worker["pages"][kind]["checked"]);
    }
    worker
}

#[tokio::test]
async fn healthy_workers_are_found_right_while_they_serve() {
    let alone = Server::worker("null", "--hicache-size 1");
    let pair = Pair::start("tcp", "");
    for number in 0..3 {
        ask(&alone.url, &talk(number, 700)).await;
        ask(&pair.decode.url, &talk(number, 700)).await;
    }
    eventually("blocks are saved", async || {
        let saved = Metrics::of(&alone.url).await.sum("dsv4:cache_stored_total", &["host"]);
        (saved >= 6.0).then_some(())
    })
    .await;
    // An answer is under way meanwhile.
    let completions = format!("{}/v1/completions", alone.url);
    let mut stream = greedy(&prompt(600), 400);
    stream["stream"] = true.into();
    let mut open = Events::open(&completions, &stream).await.expect("a stream");
    open.next().await.expect("a token").expect("more to come");
    let found = sound(&alone.url);
    assert!(found["host"]["checked"].as_u64() >= Some(6), "{found}");
    assert!(found["open_pages"].as_u64() >= Some(1), "the answer is being written: {found}");
    drop(open);
    for (url, role) in
        [(&alone.url, "unified"), (&pair.prefill.url, "prefill"), (&pair.decode.url, "decode")]
    {
        let found = sound(url);
        assert_eq!(found["role"], role);
        assert!(found["pages"]["block"]["checked"].as_u64() >= Some(6), "{found}");
        assert!(found["pages"]["block"]["bytes"].as_u64() > Some(0), "{found}");
        assert!(found["windows"]["checked"].as_u64() >= Some(3), "{found}");
        assert!(found["windows"]["pages"].as_u64() >= Some(6), "{found}");
        let checked = Metrics::of(url).await.sum("dsv4:audit_checked_total", &[role]);
        assert!(checked >= 12.0);
    }
    let (code, out, _) = verify(&alone.url, &["--sample", "0.5", "--windows", "0"]);
    assert_eq!(code, Some(0));
    assert!(out.contains("unified worker") && out.contains("all that was looked at is right"));
    let wrong = Metrics::of(&alone.url).await.sum("dsv4:audit_mismatches_total", &[]);
    assert!(wrong.abs() < 0.5, "{wrong}");
}

#[tokio::test]
async fn audits_that_cannot_be_done_say_why() {
    let worker = Server::worker("null", "--api-key secret");
    let router = Server::router(&[], "--worker http://127.0.0.1:1");
    for (url, flags, says) in [
        ("nowhere", &[][..], "\"nowhere\" is no address"),
        ("ftp://127.0.0.1:1", &[], "is no address"),
        ("http://127.0.0.1:1", &[], "ask http://127.0.0.1:1/verify: "),
        (&worker.url, &[], "answers 401"),
        (&worker.url, &["--api-key", "secret", "--sample", "2"], "above 0 and at most 1"),
        (&router.url, &[], "a router is not audited"),
    ] {
        let (code, out, err) = verify(url, flags);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{url} {flags:?}: {err}");
        assert!(err.contains(says), "{url} {flags:?}: {err}");
    }
    let (code, out, err) = verify(&worker.url, &["--api-key", "secret"]);
    assert_eq!(code, Some(0), "{out}{err}");
    // The endpoint wants a key like the other operations.
    let refused = post(&format!("{}/verify", worker.url), &json!({})).await.expect("an answer");
    assert_eq!(refused.status, 401);
}

#[tokio::test]
async fn an_audit_that_nobody_waits_for_is_not_in_the_way_of_the_next() {
    let alone = Server::worker("null", "");
    for number in 0..4 {
        ask(&alone.url, &talk(number, 1500)).await;
    }
    let (url, wish) = (format!("{}/verify", alone.url), json!({"windows": 64}));
    for round in 0..5 {
        // Windows take longer than that.
        let given_up = timeout(Duration::from_millis(20), post(&url, &wish)).await;
        assert!(given_up.is_err(), "round {round} was done at once");
        // Its connection is seen to be closed a moment later.
        eventually("the next audit begins and ends", async || {
            let answer = post(&url, &json!({"windows": 0})).await.expect("an answer");
            let text = answer.text();
            assert!(answer.status == 200 || text.contains("one at a time"), "{text}");
            (answer.status == 200).then_some(())
        })
        .await;
    }
}

type Pages = Arc<Mutex<Vec<(Arc<Geometry>, u32, [Mem; 3])>>>;

/// The memory of workers' pools, to be damaged.
pub(crate) struct Memory(Pages);

impl Memory {
    pub(crate) fn see() -> (Self, NodeOptions) {
        let pages = Pages::default();
        let seen = Arc::clone(&pages);
        let see_pools: dsv4_server::node::SeePools = Box::new(move |_, pools| {
            let mem = dsv4_server::glue::pools::POOLS.map(|kind| pools.mem(kind).clone());
            let of = (Arc::clone(pools.geometry()), pools.count(PoolKind::Block), mem);
            seen.lock().unwrap().push(of);
        });
        (Self(pages), NodeOptions { see_pools: Some(see_pools), ..NodeOptions::default() })
    }

    /// Flips a bit in the first row of a block page of a worker.
    fn flip(&self, worker: usize, (kind, layer): (CacheKind, u16), index: u32) {
        let pages = self.0.lock().unwrap();
        let (geometry, count, mem) = &pages[worker];
        let section = geometry.section(kind, layer).expect("a layer with this cache");
        let offset = geometry.page_offset(PoolKind::Block, section, *count, index);
        let mut byte = [0];
        mem[0].read(offset + 5, &mut byte).expect("inside the pool");
        byte[0] ^= 0x10;
        mem[0].write(offset + 5, &byte).expect("inside the pool");
    }

    /// All rows of a block page of a worker.
    pub(crate) fn rows(
        &self,
        worker: usize,
        (kind, layer): (CacheKind, u16),
        index: u32,
    ) -> Vec<u8> {
        let pages = self.0.lock().unwrap();
        let (geometry, count, mem) = &pages[worker];
        let section = geometry.section(kind, layer).expect("a layer with this cache");
        let base = geometry.page_offset(PoolKind::Block, section, *count, index);
        let mut bytes = Vec::new();
        for extent in geometry.extents(kind, geometry.rows_per_page(kind)).iter() {
            let at = bytes.len();
            bytes.resize(at + extent.len as usize, 0);
            let offset = base + u64::from(extent.offset);
            mem[0].read(offset, &mut bytes[at..]).expect("inside the pool");
        }
        bytes
    }

    /// The first layer with a cache.
    fn layer(&self, kind: CacheKind) -> (CacheKind, u16) {
        let pages = self.0.lock().unwrap();
        let sections = pages[0].0.sections(PoolKind::Block);
        let found = sections.iter().find(|section| section.kind == kind);
        (kind, found.expect("the mini has every cache").layer)
    }
}

async fn audit(workers: &Workers) -> Vec<WorkerAudit> {
    workers.node().engine().audit(ALL).await
}

fn named(found: &[Finding]) -> Vec<(How, &str, Option<u16>, Option<u32>)> {
    found.iter().map(|f| (f.how, f.kind.as_str(), f.layer, f.page_no)).collect()
}

fn first_of(pool: PoolKind, index: u32) -> String {
    PageRef { pool, index, generation: 1 }.to_string()
}

#[tokio::test]
async fn flipped_bit_of_a_kept_page_is_found_named_and_given_up() {
    let (memory, options) = Memory::see();
    let workers = Workers::start("null", "", &options);
    let ids = prompt(800);
    let (right, _) = workers.answer(ids.clone(), 8).await.expect("an answer");
    let (again, usage) = workers.answer(ids.clone(), 8).await.expect("an answer");
    assert_eq!((again, usage.cached_tokens), (right.clone(), 768));
    let clean = audit(&workers).await;
    assert_eq!((clean[0].wrong(), clean[0].pages[0].checked), (0, 3), "{clean:?}");
    assert!(clean[0].windows.checked >= 1 && clean[0].skipped.is_empty(), "{clean:?}");
    let kinds = [CacheKind::C4Kv, CacheKind::C4Index, CacheKind::C128Kv];
    for (round, kind) in kinds.into_iter().enumerate() {
        let place @ (_, layer) = memory.layer(kind);
        // The prefix has the first three pages; which block this one is, the audit says.
        memory.flip(0, place, 1);
        let found = audit(&workers).await;
        let findings = &found[0].findings;
        assert_eq!(findings.len(), 1, "{round}: {findings:?}");
        let finding = &findings[0];
        assert_eq!((finding.how, finding.kind.as_str()), (How::Digest, kind.name()));
        assert_eq!(finding.layer, Some(layer));
        assert_ne!(finding.expected, finding.found);
        assert!(finding.held_by[0].starts_with("prefix "), "{finding:?}");
        // What it was is not served: what is left of the prefix is.
        let kept = u64::from(finding.page_no.expect("it has a number"));
        let (after, usage) = workers.answer(ids.clone(), 8).await.expect("an answer");
        assert_eq!(after, right, "{kind} {round}");
        assert!(u64::from(usage.cached_tokens) <= kept * 256, "{usage:?} {finding:?}");
        let clean = audit(&workers).await;
        assert_eq!(clean[0].wrong(), 0, "{clean:?}");
        let counted = workers.metric("dsv4:audit_mismatches_total", "digest");
        assert_eq!(counted, round as u64 + 1);
    }
    let stats = workers.node().engine().stats();
    let quarantined: u64 = stats.workers[0].pools.iter().map(|pool| pool.quarantined).sum();
    assert_eq!(quarantined, 0, "they are free again");
}

#[tokio::test]
async fn page_damaged_before_it_was_sealed_is_found_by_computing_it_again() {
    let (memory, options) = Memory::see();
    let workers = Arc::new(Workers::start("null", "", &options));
    let place @ (kind, layer) = memory.layer(CacheKind::C4Kv);
    let mut generation = workers.begin(prompt(300), 230);
    generation.events.recv().await.expect("a first token");
    // The second block of the first sequence: eleven of its rows are there, and it is not sealed.
    memory.flip(0, place, 1);
    while generation.events.recv().await.is_some() {}
    let found = audit(&workers).await;
    let findings = &found[0].findings;
    assert!(findings.iter().all(|finding| finding.how == How::Recompute), "{findings:?}");
    let it = findings.iter().find(|f| f.layer == Some(layer) && f.kind == kind.name());
    let it = it.unwrap_or_else(|| panic!("{findings:?}"));
    assert_eq!((it.page_no, it.row), (Some(1), Some(0)));
    assert_eq!(it.page, Some(first_of(PoolKind::Block, 1)));
    let clean = audit(&workers).await;
    assert_eq!(clean[0].wrong(), 0, "{clean:?}");
    assert_eq!(workers.metric("dsv4:audit_mismatches_total", "digest"), 0);
}

#[tokio::test]
async fn answer_that_rests_on_a_damaged_page_ends_with_an_error_and_others_go_on() {
    let (memory, options) = Memory::see();
    let workers = Workers::start("null", "", &options);
    let mut damaged = workers.begin(prompt(400), 2000);
    damaged.events.recv().await.expect("a first token");
    let other = talk(5, 700);
    let (right, _) = workers.answer(other.clone(), 8).await.expect("an answer");
    memory.flip(0, memory.layer(CacheKind::C4Index), 0);
    let found = audit(&workers).await;
    assert_eq!(found[0].wrong(), 1, "{found:?}");
    let held_by = found[0].findings[0].held_by.join(", ");
    assert!(held_by.contains("request test") && held_by.contains("prefix "), "{held_by}");
    assert_eq!(Workers::end_of(&mut damaged).await, Err(FailureKind::Integrity));
    let (after, usage) = workers.answer(other, 8).await.expect("an answer");
    assert_eq!((after, usage.cached_tokens), (right, 512), "the other prefix is kept");
}

#[tokio::test]
async fn page_damaged_before_it_is_saved_never_becomes_an_object() {
    let (memory, options) = Memory::see();
    // What a second prompt uses is saved.
    let flags = "--hicache-size 0.2 --hicache-write-policy write_through_selective";
    let workers = Workers::start("null", flags, &options);
    let ids = prompt(800);
    let (right, _) = workers.answer(ids.clone(), 8).await.expect("an answer");
    memory.flip(0, memory.layer(CacheKind::C4Index), 1);
    // Pages that are used where they are are not looked at: this answer is an error, if the save was
    // before its end, or rests on the page.
    let _second = workers.answer(ids.clone(), 8).await;
    eventually("the save is refused", async || {
        (workers.metric("dsv4:audit_mismatches_total", "save") == 1).then_some(())
    })
    .await;
    let (after, usage) = workers.answer(ids.clone(), 8).await.expect("an answer");
    assert_eq!(after, right);
    assert!(usage.cached_tokens < 768, "the page and what followed it were given up: {usage:?}");
    let clean = audit(&workers).await;
    assert_eq!(clean[0].wrong(), 0, "{clean:?}");
}

#[tokio::test]
async fn page_damaged_at_the_prefill_worker_is_never_believed_by_its_peer() {
    let (memory, options) = Memory::see();
    let workers = Workers::start("both", "--disable-radix-cache", &NodeOptions::default());
    workers.ready().await;
    let ids = prompt(700);
    let (right, _) = workers.answer(ids.clone(), 8).await.expect("an answer");
    drop(workers);
    let workers = Workers::start("both", "", &options);
    workers.ready().await;
    assert_eq!(workers.answer(ids.clone(), 8).await.expect("an answer").0, right);
    // The prefill worker keeps its pages, and offers them again to one that has flushed its own.
    let place = memory.layer(CacheKind::C4Kv);
    memory.flip(0, place, 0);
    memory.flip(1, place, 0);
    let found = audit(&workers).await;
    let named: Vec<_> = found.iter().map(|audit| named(&audit.findings)).collect();
    let expected = vec![(How::Digest, "c4_kv", Some(place.1), Some(0))];
    assert_eq!(named, [expected.clone(), expected]);
    assert_eq!(workers.answer(ids.clone(), 8).await.expect("an answer").0, right);
    // Damaged again, and not audited: what is offered carries the tag of what was sealed.
    let clean = audit(&workers).await;
    assert_eq!(clean.iter().map(WorkerAudit::wrong).sum::<u64>(), 0, "{clean:?}");
}

/// Where the payloads of host objects are in a process, by the headers before them.
fn objects_in(pid: u32) -> Vec<u64> {
    const LONGEST: u64 = 1 << 30;
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("its memory");
    let memory = std::fs::File::open(format!("/proc/{pid}/mem")).expect("its memory");
    let mut found = Vec::new();
    for line in maps.lines().filter(|line| line.contains(" rw-p ")) {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let (from, to) = range.expect("an address range");
        let address = |text| u64::from_str_radix(text, 16).expect("an address");
        let (from, to) = (address(from), address(to));
        let mut bytes = vec![0; (to - from).min(LONGEST) as usize];
        // What is not there any more has no object.
        if memory.read_exact_at(&mut bytes, from).is_err() {
            continue;
        }
        for (number, block) in bytes.chunks_exact(OBJECT_ALIGN).enumerate() {
            if block[..8] == MAGIC {
                let header = u32::from_le_bytes([block[12], block[13], block[14], block[15]]);
                found.push(from + (number * OBJECT_ALIGN) as u64 + u64::from(header));
            }
        }
    }
    found
}

/// As memory that forgets a bit: the process has nothing to do with it.
#[tokio::test]
async fn flipped_bit_of_an_object_in_host_memory_of_a_live_process_is_found_and_named() {
    const FLAGS: &str = "--hicache-size 0.2 --context-length 1536 --max-running-requests 2 \
        --kv-memory-mib 7 --chunked-prefill-size 256";
    let mut server = Server::worker("null", FLAGS);
    server.process.expect_error("are not what was computed");
    let ids = talk(3, 700);
    let (right, _) = ask(&server.url, &ids).await;
    let host = sound_once(&server.url, |host| host["there"].as_u64() >= Some(3)).await;
    assert_eq!(host["there"], host["checked"]);
    let objects = objects_in(server.process.id());
    assert_eq!(objects.len() as u64, host["there"].as_u64().expect("a count"));
    let path = format!("/proc/{}/mem", server.process.id());
    let memory = std::fs::File::options().read(true).write(true).open(path).expect("its memory");
    for &object in &objects {
        let mut byte = [0];
        memory.read_exact_at(&mut byte, object).expect("its memory");
        byte[0] ^= 1;
        memory.write_all_at(&byte, object).expect("its memory");
    }
    let (code, out, _) = verify(&server.url, &["--json"]);
    let answer: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(code, Some(1), "{out}");
    assert_eq!(answer["mismatches"], objects.len());
    let findings = answer["workers"][0]["mismatches"].as_array().expect("a list").clone();
    for finding in &findings {
        assert_eq!(finding["found_by"], "host", "{finding}");
        assert!(finding["layer"].is_u64() && finding["page_no"].is_u64(), "{finding}");
        let holder = finding["held_by"][0].as_str().expect("a holder");
        assert!(holder.starts_with("object ") && holder.ends_with(" in host memory"), "{holder}");
    }
    let log = server.process.logged("are not what was computed");
    assert!(log.contains("in host memory"), "{log}");
    // They are given up: others take the device's pages, and the prompt is computed again.
    for number in 10..22 {
        ask(&server.url, &talk(number, 900)).await;
    }
    let (after, cached) = ask(&server.url, &ids).await;
    assert_eq!((after, cached), (right, 0));
    sound(&server.url);
}

/// The host tier's part of an audit that found nothing wrong, once it fits.
async fn sound_once(url: &str, fits: impl Fn(&Value) -> bool) -> Value {
    eventually("the audit fits", async || {
        let host = sound(url)["host"].clone();
        fits(&host).then_some(host)
    })
    .await
}
