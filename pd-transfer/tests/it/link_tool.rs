//! `pd-link` from outside: figures over two transports, and each way in which there are none.

use crate::it::side::Prefill;
use pd_transfer::sender::SenderConfig;
use pd_transfer::tcp::Tcp;
use pd_transfer::testing::faulty::{Fault, Faulty};
use pd_transfer::tools::{Kind, MeasureConfig, ServeConfig, ToolError, measure, serve};
use pd_transfer::wire::{Incarnation, Message, encode};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const PROGRAM: &str = env!("CARGO_BIN_EXE_pd-link");

/// `pd-link serve` until this is dropped.
struct Serving {
    child: Child,
    address: String,
}

impl Serving {
    fn new(kind: &str, listen: &str) -> Self {
        let mut child = Command::new(PROGRAM)
            .args(["serve", "--transport", kind, "--listen", listen, "--bytes", "8MiB"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening ").unwrap().into();
        Self { child, address }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Exit code, standard output and standard error of `pd-link measure`.
fn run(kind: &str, address: &str, more: &[&str]) -> (i32, String, String) {
    let output = Command::new(PROGRAM)
        .args(["measure", "--transport", kind, "--connect", address, "--seconds", "0"])
        .args(more)
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn measures(kind: &str, listen: &str) {
    let serving = Serving::new(kind, listen);
    let (code, out, error) =
        run(kind, &serving.address, &["--sizes", "8448,64KiB,16MiB", "--json", "--in-flight", "8"]);
    // A page that is larger than what is served is refused before anything moves.
    assert_eq!((code, &out[..]), (1, ""), "{error}");
    assert!(error.contains("no page of 16777216 fits"), "{error}");

    let (code, out, error) =
        run(kind, &serving.address, &["--sizes", "8448,64KiB", "--json", "--in-flight", "8"]);
    assert_eq!((code, &error[..]), (0, ""));
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(report["transport"], kind);
    assert_eq!(report["address"], serving.address);
    assert_eq!(report["in_flight"], 8);
    for (size, page_bytes) in report["sizes"].as_array().unwrap().iter().zip([8448_u64, 65_536]) {
        assert_eq!(size["page_bytes"], page_bytes);
        let pages = (8 << 20) / page_bytes;
        assert_eq!(size["transfer_pages"], pages);
        for figure in ["verified", "copied"] {
            let figure = &size[figure];
            // Two transfers are open from the start.
            assert_eq!(figure["pages"], 2 * pages);
            assert_eq!(figure["bytes"], 2 * pages * page_bytes);
            assert!(figure["gb_per_s"].as_f64().unwrap() > 0.0, "{figure}");
        }
        let round_trip = &size["round_trip"];
        assert_eq!(round_trip["samples"], 1);
        assert!(round_trip["p99_us"].as_u64() >= round_trip["p50_us"].as_u64());
    }
    assert_eq!(report["sizes"].as_array().unwrap().len(), 2);

    let (code, table, _) = run(kind, &serving.address, &["--sizes", "8448"]);
    assert_eq!(code, 0);
    assert!(table.contains("verified GB/s") && table.contains("8448"), "{table}");
}

#[test]
fn a_link_is_measured_over_tcp() {
    measures("tcp", "127.0.0.1:0");
}

#[test]
fn a_link_is_measured_over_shared_memory() {
    let path = std::env::temp_dir().join(format!("pd-link-{}", std::process::id()));
    measures("shm", &format!("unix:{}", path.display()));
    // The serving process was killed; its socket is all that it left.
    std::fs::remove_file(path).unwrap();
}

fn fails(kind: &str, address: &str, words: &[&str]) {
    let (code, out, error) = run(kind, address, &["--connect-timeout", "20"]);
    assert_eq!((code, &out[..]), (1, ""), "{error}");
    for word in words {
        assert!(error.contains(word), "{word:?} is not in {error}");
    }
}

#[test]
fn nobody_who_listens_is_an_error() {
    // Bound and not listening any more.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let (code, _, error) = run("tcp", &address, &["--connect-timeout", "0.2"]);
    assert_eq!(code, 1);
    assert!(error.contains("nobody answers at") && error.contains(&address), "{error}");
}

#[test]
fn an_address_of_another_transport_is_an_error() {
    fails("tcp", "unix:/nowhere", &["unix:/nowhere", "tcp needs HOST:PORT"]);
    fails("ucx", "nowhere", &["ucx needs HOST:PORT"]);
    fails("shm", "127.0.0.1:7000", &["127.0.0.1:7000", "shm needs unix:PATH"]);
}

/// A listener that says `answer` to everybody.
fn says(answer: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            // The other side may hang up at any byte.
            let _ = stream.write_all(&answer);
            let _ = stream.read_to_end(&mut Vec::new());
        }
    });
    address
}

#[test]
fn another_transport_at_the_peer_is_named() {
    let address = says(b"PDUCX\0\0\x01".to_vec());
    fails("tcp", &address, &["by ucx, this side by tcp"]);
}

// PD-L2
#[test]
fn another_version_at_the_peer_is_named() {
    let mut envelope = encode(Incarnation([1; 16]), 0, &Message::Ping { n: 0 }).unwrap();
    envelope[4..8].copy_from_slice(&9_u32.to_le_bytes());
    let mut answer = b"PDTCP\0\0\x02\x01\0\0\0".to_vec();
    answer.extend_from_slice(&(envelope.len() as u32).to_le_bytes());
    answer.extend_from_slice(&0_u64.to_le_bytes());
    answer.extend_from_slice(&envelope);
    fails("tcp", &says(answer), &["another protocol", "9"]);
}

// PD-L3
#[test]
fn a_node_that_is_no_pd_link_is_named() {
    let server = Prefill::new(Tcp::factory(), "127.0.0.1:0", SenderConfig::default());
    fails("tcp", server.address(), &["no `pd-link serve`", "test pages"]);
}

#[test]
fn wrong_flags_are_explained() {
    for flags in [
        &["--sizes", "0"][..],
        &["--sizes", "64MiB"],
        &["--in-flight", "0"],
        &["--sizes", "8XiB"],
        &["--seconds", "-1"],
    ] {
        let (code, out, error) = run("tcp", "127.0.0.1:1", flags);
        assert!(matches!(code, 1 | 2) && out.is_empty(), "{code} {out}");
        assert!(error.starts_with("error: "), "{error}");
    }
    let (code, _, error) = run("carrier-pigeon", "127.0.0.1:1", &[]);
    assert!(code == 2 && error.contains("tcp, shm and ucx"), "{error}");
    let help = Command::new(PROGRAM).args(["measure", "--help"]).output().unwrap();
    assert!(String::from_utf8(help.stdout).unwrap().contains("as on the serving side"));
}

/// Measures over a transport that damages what `choose` says; what is wrong with the bytes then.
fn damaged(fault: Fault, numbers: &'static [u64]) -> ToolError {
    let serve_config =
        ServeConfig { kind: Kind::Tcp, listen: String::from("127.0.0.1:0"), bytes: 1 << 20 };
    let server = serve(&serve_config, Tcp::factory()).unwrap();
    let config = MeasureConfig {
        kind: Kind::Tcp,
        connect: server.address().into(),
        sizes: vec![8448],
        duration: Duration::ZERO,
        in_flight: 4,
        patience: Duration::from_secs(20),
    };
    let choose = move |n, _: &_| numbers.contains(&n).then_some(fault);
    measure(&config, &|| Faulty::factory(Tcp::factory(), Box::new(choose))).unwrap_err()
}

// PD-V2
#[test]
fn wrong_bytes_are_counted_and_named() {
    for fault in [Fault::Zero, Fault::Swap] {
        for numbers in [&[7][..], &[20, 40, 60]] {
            let error = damaged(fault, numbers);
            let ToolError::Mismatch { page_bytes: 8448, wrong, checked, first } = error else {
                panic!("{error}")
            };
            assert_eq!(wrong, numbers.len() as u64, "{fault:?}");
            // Both transfers were looked at to their end.
            assert_eq!(checked, 2 * ((1 << 20) / 8448), "{fault:?}");
            assert_eq!(u64::from(first), numbers[0], "gets are posted in the order of pages");
            assert_eq!(error.exit_code(), 3);
            assert!(error.to_string().contains("of 8448 bytes"), "{error}");
        }
    }
}
