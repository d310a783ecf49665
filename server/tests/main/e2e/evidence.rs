//! Evidence of pages: the digest of each at every stop, joined over workers.

use super::client::{eventually, get, greedy, post_with};
use super::cluster::{MODEL, Pair, Server};
use super::prompts::prompt;
use super::tamper::{Damage, Tamper, Target, Victim};
use super::verify::Memory;
use super::workers::Workers;
use dsv4_model::config::ModelConfig;
use dsv4_server::engine::Engine as _;
use dsv4_server::evidence::{Event, Evidence, Stop};
use dsv4_server::node::NodeOptions;
use kv_pool::{CacheKind, Geometry, IndexKeyType, Numerics};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// Device memory for one long prompt or two.
const SMALL: &str = "--trace-pages 2 --hicache-size 0.2 --context-length 1536 \
    --max-running-requests 2 --kv-memory-mib 7 --chunked-prefill-size 256";

/// What names a page among those of a request.
type Place = (String, u64, u64, u64, u64);

fn place(event: &Value) -> Place {
    let number = |name: &str| event[name].as_u64().expect("a number");
    let kind = event["kind"].as_str().expect("a name").to_owned();
    (kind, number("layer"), number("page_no"), number("rows"), number("tokens"))
}

/// Digests of a worker's pages at a stop.
fn at(worker: &Value, stop: &str) -> BTreeMap<Place, String> {
    let events = worker["events"].as_array().expect("a list");
    let here = events.iter().filter(|event| event["stop"] == stop);
    here.map(|event| (place(event), event["digest"].as_str().expect("text").to_owned())).collect()
}

async fn traced(url: &str, id: &str) -> Value {
    let answer = get(&format!("{url}/trace/{id}")).await.expect("an answer").ok();
    assert_eq!(answer["request_id"], id);
    answer["workers"][0].clone()
}

async fn ask(url: &str, id: &str, ids: &[u32], tokens: u32) {
    let (url, headers) = (format!("{url}/v1/completions"), [("x-request-id", id)]);
    post_with(&url, &headers, &greedy(ids, tokens)).await.expect("an answer").ok();
}

#[tokio::test]
async fn pages_keep_their_digests_from_prefill_to_the_end_of_decode() {
    let pair = Pair::start("tcp", "--trace-pages 4");
    let (ids, begun) = (prompt(700), Instant::now());
    ask(&pair.decode.url, "first", &ids, 80).await;
    let (prefill, decode) =
        (traced(&pair.prefill.url, "first").await, traced(&pair.decode.url, "first").await);
    let most = begun.elapsed().as_micros();
    for event in
        prefill["events"].as_array().into_iter().chain(decode["events"].as_array()).flatten()
    {
        let since = event["at_us"].as_u64().expect("a number");
        assert!(u128::from(since) <= most, "since the request came: {event}");
    }
    assert_eq!((&prefill["role"], &decode["role"]), (&"prefill".into(), &"decode".into()));
    let (sealed, offered) = (at(&prefill, "sealed"), at(&prefill, "offered"));
    let arrived = at(&decode, "arrived");
    assert!(offered.len() > 20, "{offered:?}");
    assert_eq!(offered, arrived, "what was offered has arrived");
    let was_sealed = offered.iter().filter(|(place, digest)| sealed.get(place) == Some(digest));
    assert_eq!(was_sealed.count(), offered.len(), "as it was sealed");
    let attempt = &decode["attempts"][0];
    assert_eq!(
        (&attempt["transport"], &attempt["id"]),
        (&"tcp".into(), &prefill["attempts"][0]["id"])
    );
    // The output completes the third block: it is sealed at the decode worker, and stays.
    let (sealed, ended) = (at(&decode, "sealed"), at(&decode, "ended"));
    let third = |place: &Place| place.0 == "c4_kv" && place.2 == 2 && place.3 == 64;
    assert!(sealed.keys().any(third), "{sealed:?}");
    for (place, digest) in &sealed {
        // Window pages that no token sees any more went before.
        assert!(ended.get(place).is_none_or(|last| last == digest), "{place:?}");
    }
    let stayed = arrived.iter().filter(|(place, digest)| ended.get(place) == Some(digest));
    assert!(stayed.count() >= 10);
    assert_eq!((&decode["events_lost"], &decode["has_ended"]), (&0.into(), &true.into()));
    // The next one shares what is kept.
    ask(&pair.decode.url, "second", &ids, 4).await;
    let reused = at(&traced(&pair.decode.url, "second").await, "reused");
    let same = reused.iter().filter(|(place, digest)| arrived.get(place) == Some(digest));
    assert!(same.count() >= 10, "{reused:?}");
    let unknown = get(&format!("{}/trace/third", pair.decode.url)).await.expect("an answer");
    assert_eq!(unknown.status, 404);
    assert!(unknown.text().contains("--trace-pages"), "{}", unknown.text());
}

#[tokio::test]
async fn what_goes_to_host_memory_and_comes_back_is_followed() {
    let server = Server::worker("null", SMALL);
    let ids = prompt(700);
    ask(&server.url, "first", &ids, 4).await;
    let first = eventually("its objects are saved", async || {
        let first = traced(&server.url, "first").await;
        let blocks = at(&first, "saved").into_keys().filter(|place| place.0 == "c4_kv");
        let is_saved = blocks.map(|place| place.2).max() >= Some(1);
        (is_saved && at(&first, "saved").keys().any(|p| p.0 == "c4_carry")).then_some(first)
    })
    .await;
    let (sealed, saved) = (at(&first, "sealed"), at(&first, "saved"));
    for (place, digest) in saved.iter().filter(|(place, _)| place.0.contains("kv")) {
        assert_eq!(sealed.get(place), Some(digest), "{place:?}");
    }
    // Others take the device's pages.
    for number in 0..12 {
        let mut other = prompt(900);
        other[0] ^= number + 1;
        ask(&server.url, "other", &other, 4).await;
    }
    ask(&server.url, "again", &ids, 4).await;
    let again = traced(&server.url, "again").await;
    let (loaded, reused) = (at(&again, "loaded"), at(&again, "reused"));
    assert!(loaded.len() > 10, "it came back: {again}");
    for (place, digest) in &loaded {
        assert_eq!(saved.get(place), Some(digest), "{place:?}");
        assert!(place.0.ends_with("carry") || reused.get(place) == Some(digest), "{place:?}");
    }
}

async fn known(workers: &Workers) -> Vec<Evidence> {
    workers.node().engine().testify("test").await
}

#[tokio::test]
async fn digests_are_those_of_the_bytes_in_memory_and_nothing_is_kept_without_the_flag() {
    let (memory, options) = Memory::see();
    let workers = Workers::start("null", "--trace-pages 1", &options);
    workers.answer(prompt(600), 4).await.expect("an answer");
    let known_of = known(&workers).await;
    let mut compared = 0;
    for event in &known_of[0].events {
        if event.stop != Stop::Sealed || event.part.kind == CacheKind::Window {
            continue;
        }
        // The first sequence has the first pages.
        let bytes = memory.rows(0, (event.part.kind, event.part.layer), event.part.page_no);
        assert_eq!(event.digest, kv_pool::digest(&bytes), "{event:?}");
        compared += 1;
    }
    assert!(compared >= 6, "{compared}");
    let silent = Workers::start("null", "", &NodeOptions::default());
    silent.answer(prompt(600), 4).await.expect("an answer");
    assert_eq!(known(&silent).await, []);
}

#[tokio::test]
async fn page_damaged_on_its_way_is_seen_where_it_arrived() {
    let config = ModelConfig::from_dir(Path::new(MODEL)).expect("the mini model's configuration");
    let geometry = Geometry::new(config.shape(), Numerics::Official, IndexKeyType::Fp4);
    let tamper = Tamper::new(geometry.expect("a layout"));
    let wrapped = tamper.clone();
    let wrap_transport: dsv4_server::node::WrapTransport =
        Box::new(move |inner| wrapped.wrap(inner));
    let options = NodeOptions { wrap_transport: Some(wrap_transport), ..NodeOptions::default() };
    let workers = Workers::start("both", "--trace-pages 4", &options);
    workers.ready().await;
    tamper.set_pages(workers.pages());
    let victim = Victim { kind: CacheKind::C4Index, tail: false };
    tamper.aim(Target::Pages { victim, damage: Damage::Zero, times: 1 });
    workers.answer(prompt(507), 4).await.expect("an answer");
    let damaged = tamper.done() as usize;
    assert!(damaged > 0);
    let known = known(&workers).await;
    let decode = known.iter().find(|known| known.role == "decode").expect("both are asked");
    let prefill = known.iter().find(|known| known.role == "prefill").expect("both are asked");
    let wrong: Vec<&Event> =
        decode.events.iter().filter(|event| event.is_right == Some(false)).collect();
    assert_eq!(wrong.len(), damaged, "{wrong:?}");
    assert_eq!((wrong[0].stop, wrong[0].part.kind), (Stop::Arrived, CacheKind::C4Index));
    let offered = prefill
        .events
        .iter()
        .find(|event| event.stop == Stop::Offered && event.part == wrong[0].part);
    let offered = offered.expect("it was offered");
    assert_ne!(offered.digest, wrong[0].digest);
    let right = decode
        .events
        .iter()
        .rfind(|event| event.stop == Stop::Arrived && event.part == wrong[0].part);
    assert_eq!(right.map(|event| event.digest), Some(offered.digest), "read again");
}
