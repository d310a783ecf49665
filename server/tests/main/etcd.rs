//! A real etcd on this machine, with its data in a temporary folder.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Path of the program.
const VARIABLE: &str = "DSV4_ETCD";
/// Longest wait for it; reaching it is a failure.
const PATIENCE: Duration = Duration::from_secs(120);

/// Its process. It is killed on drop, and its folder removed.
#[derive(Debug)]
pub(crate) struct Etcd {
    program: PathBuf,
    child: Option<Child>,
    folder: PathBuf,
    port: u16,
    peer_port: u16,
}

fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    listener.local_addr().expect("its number").port()
}

impl Etcd {
    /// An etcd that does not run yet; none where there is no such program.
    pub(crate) fn new() -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let Some(program) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) else {
            let missing = format!(
                "{VARIABLE} is not set: discovery by etcd was not tried; `cargo xtask test e2e` \
                 sets it"
            );
            assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "{missing}");
            note(&missing);
            return None;
        };
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("dsv4-etcd-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let (port, peer_port) = (free_port(), free_port());
        Some(Self { program: program.into(), child: None, folder, port, peer_port })
    }

    /// Starts it, with what it knew before, and waits until it answers.
    pub(crate) fn start(&mut self) {
        let client = format!("http://127.0.0.1:{}", self.port);
        let peer = format!("http://127.0.0.1:{}", self.peer_port);
        let mut command = Command::new(&self.program);
        command.arg("--data-dir").arg(&self.folder);
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &format!("default={peer}")]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.child = Some(command.spawn().expect("start etcd"));
        let deadline = Instant::now() + PATIENCE;
        while !self.ask("GET", "/health", "").is_some_and(|said| said.contains("true")) {
            assert!(Instant::now() < deadline, "etcd does not answer");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// `kill -9`.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("kill etcd");
            child.wait().expect("wait for its end");
        }
    }

    /// It knows nothing when it starts again.
    pub(crate) fn forget(&self) {
        assert!(self.child.is_none(), "it runs");
        std::fs::remove_dir_all(&self.folder).expect("remove its data");
    }

    /// For `--discovery`.
    pub(crate) fn url(&self) -> String {
        format!("etcd://127.0.0.1:{}/test", self.port)
    }

    /// Writes a value under a key.
    pub(crate) fn put(&self, key: &str, value: &[u8]) {
        let body = json!({"key": STANDARD.encode(key), "value": STANDARD.encode(value)});
        let said = self.ask("POST", "/v3/kv/put", &body.to_string()).expect("an answer of etcd");
        assert!(said.starts_with("HTTP/1.1 200"), "{said}");
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        let length = body.len();
        let head =
            format!("{method} {path} HTTP/1.1\r\nHost: etcd\r\nContent-Length: {length}\r\n");
        stream.write_all(format!("{head}Connection: close\r\n\r\n{body}").as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
        // It is not there if it never ran.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[expect(clippy::print_stderr, reason = "test output")]
fn note(line: &str) {
    eprintln!("{line}");
}
