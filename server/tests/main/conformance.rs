//! The remote store against the suite of all stores, and what only it can do wrong.

use crate::moto::{BUCKET, Moto};
use dsv4_server::net::object_store::{RemoteConfig, RemoteError, RemoteStore, TIMEOUT};
use hicache::store::{BlobStore, StoreError};
use hicache::testing::conformance::{self, FINGERPRINT, key, object};
use std::cell::Cell;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

fn config(prefix: &str, layout: &str, timeout: Duration) -> RemoteConfig {
    RemoteConfig {
        url: format!("s3://{BUCKET}/{prefix}").parse().expect("a good address"),
        fingerprint: FINGERPRINT,
        layout: layout.to_owned(),
        timeout,
    }
}

fn open(moto: &Moto, config: RemoteConfig) -> RemoteStore {
    let variables = moto.variables();
    let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    RemoteStore::with_variables(config, &variables).expect("a client")
}

/// With the tests' server, or a store of your own: `DSV4_OBJECT_STORE` has its address, and the usual
/// variables say how to reach it.
#[test]
fn remote_store_does_what_a_store_does() {
    if let Ok(store) = std::env::var("DSV4_OBJECT_STORE") {
        let now = std::time::UNIX_EPOCH.elapsed().expect("a clock").as_nanos();
        return conforms(|prefix| {
            let url = format!("{store}/{now}-{prefix}").parse().expect("a good address");
            let config = RemoteConfig { url, ..config(prefix, "layout", TIMEOUT) };
            RemoteStore::new(config).expect("a client")
        });
    }
    let Some(moto) = Moto::start() else { return };
    conforms(|prefix| open(&moto, config(prefix, "layout", TIMEOUT)));
}

fn conforms(open: impl Fn(&str) -> RemoteStore) {
    let made = Cell::new(0);
    let again = || open(&format!("fresh-{}", made.get()));
    let fresh = || {
        made.set(made.get() + 1);
        Box::new(again()) as Box<dyn BlobStore>
    };
    let reopen = |old: Box<dyn BlobStore>| {
        drop(old);
        Box::new(again()) as Box<dyn BlobStore>
    };
    conformance::run(&fresh, Some(&reopen));
}

#[test]
fn another_layout_under_our_fingerprint_is_refused() {
    let Some(moto) = Moto::start() else { return };
    let ours = open(&moto, config("layouts", "rows 64\n", TIMEOUT));
    ours.claim().expect("nobody was there");
    open(&moto, config("layouts", "rows 64\n", TIMEOUT)).claim().expect("the same layout");
    let other = open(&moto, config("layouts", "rows 32\n", TIMEOUT));
    match other.claim() {
        Err(RemoteError::LayoutDiffers { differs, .. }) => {
            assert!(differs.contains("rows 64") && differs.contains("rows 32"), "{differs}");
        }
        result => panic!("another layout: {result:?}"),
    }
    let refused = other.write(&key(1), &object(key(1), 1));
    assert!(matches!(refused, Err(StoreError::Failed { .. })), "{refused:?}");
    assert_eq!(ours.size(&key(1)).expect("look for it"), None);
    let mut found = 0;
    ours.list(&mut |_| found += 1).expect("list");
    assert_eq!(found, 0, "the layout is no object");
}

#[test]
fn a_name_that_cannot_be_said_does_not_hide_the_others() {
    let Some(moto) = Moto::start() else { return };
    let store = open(&moto, config("names", "layout", TIMEOUT));
    for number in [1, 2, 4, 9] {
        store.write(&key(number), &object(key(number), 1)).expect("write an object");
    }
    // Behind `01` and the beginning of `02`, before our object there.
    let root = format!("{BUCKET}/names/{FINGERPRINT}");
    for name in ["02/./x", "02//x", "05//x"] {
        moto.put(&format!("{root}/{name}"));
    }
    let mut found = Vec::new();
    store.list(&mut |listed| found.push(listed.key)).expect("list");
    assert_eq!(found, [key(1), key(4), key(9)], "but for what shares the part of that name");
    assert!(store.size(&key(2)).expect("look for it").is_some());
}

#[test]
fn dead_and_silent_servers_are_errors_that_name_what_was_tried_and_no_secret() {
    let Some(mut moto) = Moto::start() else { return };
    let store = open(&moto, config("dead", "layout", Duration::from_millis(500)));
    store.write(&key(1), &object(key(1), 1)).expect("write an object");
    let tries = || {
        let mut into = vec![0; object(key(1), 1).len()];
        let listed = store.list(&mut |_| {});
        let errors = [
            store.read(&key(1), &mut into),
            store.write(&key(2), &object(key(2), 1)),
            store.size(&key(1)).map(drop),
            store.remove(&key(1)),
            listed,
        ];
        for (error, during) in errors.into_iter().zip(["read", "write", "look", "remove", "list"]) {
            let text = error.expect_err(during).to_string();
            assert!(text.starts_with(during), "{text}");
            assert!(!text.contains("no-secret-of-anybody"), "{text}");
        }
    };
    moto.signal(rustix::process::Signal::STOP);
    tries();
    moto.signal(rustix::process::Signal::CONT);
    store.write(&key(3), &object(key(3), 1)).expect("it is back");
    moto.kill();
    tries();
    moto.restart();
    store.write(&key(3), &object(key(3), 1)).expect("it is back");
    assert!(store.size(&key(3)).expect("look for it").is_some());
}

/// A server that says that something went wrong, and does not stop saying so: its address, and how
/// much of it was taken.
fn endless_server() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let taken = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&taken);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (Ok(mut stream), count) = (stream, Arc::clone(&count)) else { continue };
            std::thread::spawn(move || {
                let mut request = [0; 4096];
                let _ = stream.read(&mut request);
                let head = "HTTP/1.1 500 Oh\r\ncontent-type: text/plain\r\n\r\n";
                let mut sent = stream.write_all(head.as_bytes());
                while sent.is_ok() {
                    sent = stream.write_all(&[b'x'; 1 << 16]);
                    count.fetch_add(1 << 16, Ordering::Relaxed);
                }
            });
        }
    });
    (address, taken)
}

#[test]
fn endless_answers_are_not_gathered() {
    let (address, taken) = endless_server();
    let endpoint = format!("http://user:pa55w0rd@{address}");
    let variables = [
        ("AWS_ENDPOINT", endpoint.as_str()),
        ("AWS_ACCESS_KEY_ID", "who"),
        ("AWS_SECRET_ACCESS_KEY", "no-secret-of-anybody"),
    ];
    let config = config("endless", "layout", Duration::from_secs(5));
    let store = RemoteStore::with_variables(config, &variables).expect("a client");
    let mut into = vec![0; 8192];
    for (error, during) in [
        (store.read(&key(1), &mut into).expect_err("an error").to_string(), "read"),
        (store.claim().expect_err("an error").to_string(), "claim"),
        (store.list(&mut |_| {}).expect_err("an error").to_string(), "list"),
    ] {
        assert!(!error.contains("pa55w0rd") && error.len() < 1000, "{during}: {error}");
    }
    // Nine requests, each with what the system holds for it.
    let taken = taken.load(Ordering::Relaxed);
    assert!(taken < 100 << 20, "{taken} bytes were taken");
}
