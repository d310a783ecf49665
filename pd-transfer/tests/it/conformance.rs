//! The conformance suite over every transport; over UCX in child processes.

use crate::it::ucx::{TLS, libraries_for};
use pd_transfer::inprocess::InProcessNet;
use pd_transfer::shm::{SharedRegion, Shm, has_foreign_file};
use pd_transfer::tcp::Tcp;
use pd_transfer::testing::conformance::{Subject, run};
use pd_transfer::testing::faulty::Faulty;
use pd_transfer::transport::{HeapRegion, RegionOwner, TransportFactory};
use std::sync::{Arc, LazyLock};

static NET: LazyLock<InProcessNet> = LazyLock::new(InProcessNet::new);

fn heap(bytes: usize) -> Arc<dyn RegionOwner> {
    HeapRegion::new(bytes)
}

fn shared(bytes: usize) -> Arc<dyn RegionOwner> {
    SharedRegion::new(bytes).unwrap()
}

fn socket(kind: &str, name: &str) -> String {
    let dir = std::env::temp_dir();
    format!("unix:{}/pd-{}-{kind}-{name}", dir.display(), std::process::id())
}

#[test]
fn in_process() {
    run(|name| Subject {
        factory: || NET.factory(),
        address: format!("in-{name}"),
        nowhere: String::from("in-nowhere"),
        memory: heap,
    });
}

#[test]
fn tcp() {
    run(|_| Subject {
        factory: Tcp::factory,
        address: String::from("127.0.0.1:0"),
        nowhere: String::from("127.0.0.1:1"),
        memory: heap,
    });
}

#[test]
fn shared_memory() {
    run(|name| Subject {
        factory: || Shm::factory(2),
        address: socket("shm", name),
        nowhere: socket("shm", "nobody"),
        memory: shared,
    });
}

#[test]
fn a_socket_of_a_dead_process_is_replaced_and_a_foreign_file_is_not() {
    let address = socket("shm", "left");
    let path = address.strip_prefix("unix:").unwrap();
    let open = || (Shm::factory(1))(Arc::new(|_| {})).unwrap();
    // A listener that is dropped leaves its file, as a killed process does.
    drop(std::os::unix::net::UnixListener::bind(path).unwrap());
    assert!(!has_foreign_file(&address));
    let mut first = open();
    assert_eq!(first.listen(&address).unwrap(), address);
    let taken = open().listen(&address).unwrap_err().to_string();
    assert!(taken.contains(path) && taken.contains("another process listens"), "{taken}");
    drop(first);
    std::fs::write(path, "mine").unwrap();
    assert!(has_foreign_file(&address));
    let refused = open().listen(&address).unwrap_err().to_string();
    assert!(refused.contains(path) && refused.contains("no socket"), "{refused}");
    assert_eq!(std::fs::read_to_string(path).unwrap(), "mine");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_faulty_transport_without_faults() {
    fn factory() -> TransportFactory {
        Faulty::factory(Tcp::factory(), Box::new(|_, _| None))
    }
    run(|_| Subject {
        factory,
        address: String::from("127.0.0.1:0"),
        nowhere: String::from("127.0.0.1:1"),
        memory: heap,
    });
}

/// Every library; `pd-peer` panics with what went wrong.
fn ucx(tls: &str) {
    for library in libraries_for(tls) {
        let status = library.peer(tls, &["conformance", "ucx"]).status().unwrap();
        assert!(status.success(), "UCX {} over {tls}: {status}", library.version);
    }
}

#[test]
fn ucx_by_sockets() {
    ucx(TLS[0]);
}

#[test]
fn ucx_by_shared_memory() {
    ucx(TLS[1]);
}

#[test]
fn ucx_by_its_own_choice() {
    ucx(TLS[2]);
}
