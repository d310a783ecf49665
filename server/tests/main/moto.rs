//! A real S3 server on this machine: moto, which keeps its objects in memory.

use rustix::process::{Pid, Signal};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// Path of the server's program.
const VARIABLE: &str = "DSV4_MOTO_SERVER";
/// The bucket that is made at the start.
pub(crate) const BUCKET: &str = "cache-test";

/// The server's process. It is killed on drop.
#[derive(Debug)]
pub(crate) struct Moto {
    program: PathBuf,
    child: Child,
    port: u16,
}

impl Moto {
    /// Starts the server on a free port; none where there is no such program.
    pub(crate) fn start() -> Option<Self> {
        let Some(program) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) else {
            let missing = format!(
                "{VARIABLE} is not set: the remote store was not tried; `cargo xtask test e2e` \
                 sets it"
            );
            assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "{missing}");
            note(&missing);
            return None;
        };
        let program = PathBuf::from(program);
        let (child, port) = spawn(&program, 0);
        let moto = Self { program, child, port };
        moto.make_bucket();
        Some(moto)
    }

    /// Variables for those who are to use it.
    pub(crate) fn variables(&self) -> Vec<(&'static str, String)> {
        vec![
            ("AWS_ACCESS_KEY_ID", "who".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "no-secret-of-anybody".to_owned()),
            ("AWS_DEFAULT_REGION", "us-east-1".to_owned()),
            ("AWS_ENDPOINT", format!("http://127.0.0.1:{}", self.port)),
        ]
    }

    /// `kill -9`: it forgets everything.
    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("kill the S3 server");
        self.child.wait().expect("wait for its end");
    }

    /// Starts it on its old port, with an empty bucket.
    pub(crate) fn restart(&mut self) {
        let (child, port) = spawn(&self.program, self.port);
        assert_eq!(port, self.port);
        self.child = child;
        self.make_bucket();
    }

    /// It answers nobody until it is told to go on.
    pub(crate) fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.child), signal).expect("signal it");
    }

    fn make_bucket(&self) {
        self.put(BUCKET);
    }

    /// Makes a bucket, or an empty object in one, of whatever name.
    pub(crate) fn put(&self, path: &str) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("connect to S3");
        let host = format!("127.0.0.1:{}", self.port);
        let head = format!("PUT /{path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n");
        stream.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes()).expect("ask S3");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer of S3");
        assert!(answer.contains(" 200 "), "{answer}");
    }
}

impl Drop for Moto {
    fn drop(&mut self) {
        // It may have ended before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts the program and waits until it says where it listens.
fn spawn(program: &PathBuf, port: u16) -> (Child, u16) {
    let mut command = Command::new(program);
    command.args(["-H", "127.0.0.1", "-p", &port.to_string()]).env("PYTHONUNBUFFERED", "1");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("start the S3 server");
    let mut lines = BufReader::new(child.stderr.take().expect("stderr is piped")).lines();
    let mut said = Vec::new();
    let port = loop {
        let line = lines.next().unwrap_or_else(|| panic!("the S3 server ended: {said:?}"));
        let line = line.expect("a line of the S3 server");
        let port = line
            .split("http://127.0.0.1:")
            .nth(1)
            .map(|rest| rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse());
        if let Some(Ok(port)) = port {
            break port;
        }
        said.push(line);
    };
    // It stops when nobody reads what it logs.
    std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
    (child, port)
}

#[expect(clippy::print_stderr, reason = "test output")]
fn note(line: &str) {
    eprintln!("{line}");
}
