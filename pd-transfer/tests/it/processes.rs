//! The other side in a process of its own, over shared memory, TCP and UCX, killed without warning.

use crate::it::side::{Side, attempt, layout};
use crate::it::ucx::{Library, Peer, TLS, libraries, libraries_for};
use pd_transfer::receiver::FailReason;
use pd_transfer::shm::Shm;
use pd_transfer::tcp::Tcp;
use pd_transfer::testing::faulty::{Fault, Faulty};
use pd_transfer::testing::pages::Request;
use pd_transfer::transport::TransportFactory;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

const REQUEST: Request = Request { pages: 200, page_bytes: 37_440 };

pub(super) struct Process {
    child: Child,
    pub(super) address: String,
}

impl Process {
    fn new(kind: &str, address: &str) -> Self {
        Self::of(&[kind, address])
    }

    pub(super) fn of(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_pd-peer"))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening ").unwrap().into();
        Self { child, address }
    }

    /// SIGKILL.
    pub(super) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have been killed by the test.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Hand-off, kill in the middle of another, restart at the same address, hand-off.
// PD-F6
fn survives_a_kill(kind: &str, address: &str, factory: TransportFactory) {
    // The first page of the second attempt is damaged, which holds the attempt open.
    let hold = move |n, _: &_| (n == 200).then_some(Fault::Zero);
    let mut decode = Side::decode(Faulty::factory(factory, Box::new(hold)), None, layout());
    let mut process = Process::new(kind, address);
    let first = decode.connect(&process.address);
    decode.start(attempt(1), REQUEST);
    decode.completed(attempt(1), REQUEST);
    decode.start(attempt(2), REQUEST);
    decode.fresh(attempt(2));
    process.kill();
    assert_eq!(decode.failed(attempt(2)), FailReason::PeerLost);
    assert!(!decode.down(), "a killed process says nothing");
    let again = Process::new(kind, &process.address);
    assert_eq!(again.address, process.address);
    assert_ne!(decode.up(), first, "a new process has a new incarnation");
    decode.start(attempt(3), REQUEST);
    decode.completed(attempt(3), REQUEST);
}

#[test]
fn shared_memory_between_processes() {
    let path = std::env::temp_dir().join(format!("pd-process-{}", std::process::id()));
    let address = format!("unix:{}", path.display());
    survives_a_kill("shm", &address, Shm::factory(2));
    // The last process was killed; its socket is all that it left.
    std::fs::remove_file(path).unwrap();
}

#[test]
fn tcp_between_processes() {
    survives_a_kill("tcp", "127.0.0.1:0", Tcp::factory());
}

/// Both sides are children: hand-offs, a kill in the middle of them, a new process at the same
/// address, hand-offs again.
fn ucx_survives_a_kill(library: &Library, tls: &str) {
    let prefill = |address: &str| Peer::new(library.peer(tls, &["ucx", address]));
    let mut first = prefill("127.0.0.1:0");
    let address = first.line("listening");
    let mut decode = Peer::new(library.peer(tls, &["pull", "ucx", &address]));
    assert_eq!(decode.line("completed:"), "200 pages");
    first.kill();
    decode.line("down:");
    let mut again = prefill(&address);
    assert_eq!(again.line("listening"), address);
    assert_eq!(decode.line("completed:"), "200 pages");
}

#[test]
fn ucx_between_processes() {
    for tls in TLS {
        for library in libraries_for(tls) {
            ucx_survives_a_kill(&library, tls);
        }
    }
}

#[test]
fn versions_of_ucx_that_do_not_understand_each_other_say_so() {
    let libraries = libraries();
    let [given, loaded] = &libraries[..] else {
        println!("left out: there are not two UCX libraries");
        return;
    };
    assert_ne!(given.minor(), loaded.minor(), "two versions are needed");
    for (prefill, decode) in [(given, loaded), (loaded, given)] {
        let mut listener = Peer::new(prefill.peer("tcp", &["ucx", "127.0.0.1:0"]));
        let address = listener.line("listening");
        let mut connector = Peer::new(decode.peer("tcp", &["pull", "ucx", &address]));
        let text = connector.line("refused:");
        for version in [&prefill.version, &decode.version] {
            assert!(text.contains(&format!("UCX {version}")), "{text}");
        }
    }
}

/// Flags that differ must not look like a peer that is not there yet.
#[test]
fn two_transports_refuse_each_other_and_both_are_named() {
    let Some(library) = libraries().into_iter().next() else { return };
    for (ours, theirs) in [("tcp", "ucx"), ("ucx", "tcp")] {
        let mut listener = Peer::new(library.peer("tcp", &[theirs, "127.0.0.1:0"]));
        let address = listener.line("listening");
        let mut connector = Peer::new(library.peer("tcp", &["pull", ours, &address]));
        let text = connector.line("refused:");
        assert!(text.contains(&format!("by {theirs}, this side by {ours}")), "{text}");
    }
}
