//! Discovery against a gateway that says what a test wants, right or wrong.

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Response, StatusCode, Uri};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use dsv4_server::http::{HEADER_TIMEOUT, serve};
use dsv4_server::net::discovery::{DiscoveryUrl, Member, MemberRole, Pace, announce, follow};
use futures_util::stream;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;

const FAST: Pace = Pace {
    lease: Duration::from_millis(30),
    refresh: Duration::from_millis(20),
    timeout: Duration::from_millis(200),
    pause: Duration::from_millis(1),
    pause_max: Duration::from_millis(4),
    grace: Duration::from_secs(15),
};

/// What is said to one question.
enum Say {
    Json(Value),
    Bytes(StatusCode, Vec<u8>),
    /// A body without end.
    Endless,
    /// Nothing at all.
    Nothing,
}

#[derive(Clone)]
struct Gateway {
    /// For questions at a path, in order; the last one is repeated.
    plans: Arc<Mutex<VecDeque<(&'static str, Say)>>>,
    asked: UnboundedSender<(String, Value)>,
}

async fn answer(State(gateway): State<Gateway>, uri: Uri, body: Bytes) -> Response<Body> {
    let question = serde_json::from_slice(&body).unwrap_or_default();
    // The test may have ended.
    let _ = gateway.asked.send((uri.path().to_owned(), question));
    let say = {
        let mut plans = gateway.plans.lock().unwrap();
        let at = plans.iter().position(|(path, _)| *path == uri.path());
        at.map(|at| {
            let is_last = plans.iter().filter(|(path, _)| *path == uri.path()).count() == 1;
            match &plans[at].1 {
                Say::Json(value) if is_last => Say::Json(value.clone()),
                _ => plans.remove(at).unwrap().1,
            }
        })
    };
    let response = Response::builder();
    match say {
        Some(Say::Json(value)) => response.body(Body::from(value.to_string())).unwrap(),
        Some(Say::Bytes(status, bytes)) => response.status(status).body(Body::from(bytes)).unwrap(),
        Some(Say::Endless) => {
            let piece = || Ok::<_, std::io::Error>(Bytes::from_static(&[b' '; 65536]));
            response.body(Body::from_stream(stream::repeat_with(piece))).unwrap()
        }
        Some(Say::Nothing) => std::future::pending().await,
        None => response.status(StatusCode::NOT_FOUND).body(Body::empty()).unwrap(),
    }
}

/// A gateway with these plans, and what it is asked.
async fn gateway(
    plans: Vec<(&'static str, Say)>,
) -> (DiscoveryUrl, UnboundedReceiver<(String, Value)>) {
    let (asked, questions) = unbounded_channel();
    let gateway = Gateway { plans: Arc::new(Mutex::new(plans.into())), asked };
    let app = Router::new().fallback(answer).with_state(gateway);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve(listener, app, HEADER_TIMEOUT, std::future::pending()));
    // The first address is one at which nobody listens.
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    (format!("etcd://{nobody},{address}/n").parse().unwrap(), questions)
}

fn member(id: &str) -> Member {
    Member {
        id: id.to_owned(),
        role: MemberRole::Null,
        url: "http://h:1".to_owned(),
        bootstrap: None,
        model: "m".to_owned(),
        fingerprint: "f".to_owned(),
    }
}

fn pair(key: &str, value: &[u8]) -> Value {
    json!({"key": STANDARD.encode(key), "value": STANDARD.encode(value)})
}

fn ranged(pairs: &[Value]) -> Say {
    Say::Json(json!({"header": {"revision": "7"}, "kvs": pairs}))
}

#[tokio::test]
async fn only_whole_lists_of_workers_are_heard() {
    let own = serde_json::to_vec(&member("a")).unwrap();
    let range = "/v3/kv/range";
    let (url, _questions) = gateway(vec![
        (range, Say::Bytes(StatusCode::INTERNAL_SERVER_ERROR, b"no leader".to_vec())),
        (range, Say::Bytes(StatusCode::OK, b"\xff\x00<html>".to_vec())),
        (range, Say::Json(json!({"kvs": []}))),
        (range, Say::Json(json!({"header": {"revision": "x"}}))),
        (range, Say::Endless),
        (range, Say::Nothing),
        (
            range,
            ranged(&[
                pair("/dsv4/n/workers/a", &own),
                pair("/dsv4/n/workers/b", &own),
                pair("/dsv4/n/workers/c", b"{}"),
                json!({"key": "not base64!", "value": 7}),
                json!(7),
            ]),
        ),
        (range, ranged(&[])),
    ])
    .await;
    let (heard, mut lists) = unbounded_channel();
    let following = tokio::spawn(async move {
        follow(&url, FAST, |list| drop(heard.send(list))).await;
    });
    assert_eq!(lists.recv().await.unwrap(), [member("a")]);
    assert_eq!(lists.recv().await.unwrap(), []);
    following.abort();
}

#[tokio::test]
async fn a_change_is_read_when_a_watch_tells_of_one() {
    let news = b"{\"result\":{\"created\":true}}\n{\"result\":{\"events\":[{\"kv\":{}}]}}\n";
    let (url, mut questions) = gateway(vec![
        ("/v3/kv/range", ranged(&[])),
        ("/v3/watch", Say::Bytes(StatusCode::OK, news.to_vec())),
        ("/v3/watch", Say::Nothing),
    ])
    .await;
    // Nothing else would make it read again within the test.
    let pace = Pace { refresh: Duration::from_secs(3600), ..FAST };
    let (heard, mut lists) = unbounded_channel();
    let following = tokio::spawn(async move {
        follow(&url, pace, |list| drop(heard.send(list))).await;
    });
    assert_eq!(lists.recv().await.unwrap(), []);
    assert_eq!(lists.recv().await.unwrap(), []);
    let watched = loop {
        let (path, question) = questions.recv().await.unwrap();
        if path == "/v3/watch" {
            break question;
        }
    };
    assert_eq!(watched["create_request"]["start_revision"], "8");
    following.abort();
}

#[tokio::test]
async fn a_lease_that_has_ended_is_followed_by_another_and_the_last_one_is_ended() {
    let alive = |seconds: &str| Say::Json(json!({"result": {"ID": "1", "TTL": seconds}}));
    let keep = "/v3/lease/keepalive";
    let (url, mut questions) = gateway(vec![
        ("/v3/lease/grant", Say::Json(json!({"ID": "1", "TTL": "1"}))),
        ("/v3/lease/grant", Say::Json(json!({"ID": "2", "TTL": "1"}))),
        ("/v3/kv/put", Say::Bytes(StatusCode::OK, b"{}".to_vec())),
        ("/v3/kv/put", Say::Json(json!({}))),
        (keep, alive("1")),
        (keep, Say::Bytes(StatusCode::SERVICE_UNAVAILABLE, Vec::new())),
        (keep, Say::Json(json!({"result": {"ID": "1"}}))),
        (keep, alive("1")),
        ("/v3/lease/revoke", Say::Json(json!({}))),
    ])
    .await;
    let (stop, stopped) = watch::channel(false);
    let announcing = tokio::spawn(async move {
        announce(&url, &member("a"), FAST, stopped, |_| {}).await;
    });
    let mut leases = Vec::new();
    while leases.len() < 2 {
        let (path, question) = questions.recv().await.unwrap();
        if path == "/v3/kv/put" {
            assert_eq!(question["key"], STANDARD.encode("/dsv4/n/workers/a"));
            let value = STANDARD.decode(question["value"].as_str().unwrap()).unwrap();
            assert_eq!(Member::read(&value).unwrap(), member("a"));
            leases.push(question["lease"].clone());
        }
    }
    assert_eq!(leases, ["1", "2"]);
    stop.send_replace(true);
    announcing.await.unwrap();
    let mut last = None;
    while let Ok(question) = questions.try_recv() {
        last = Some(question);
    }
    assert_eq!(last, Some(("/v3/lease/revoke".to_owned(), json!({"ID": "2"}))));
}
