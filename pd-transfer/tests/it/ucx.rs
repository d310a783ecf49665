//! What tests of the UCX transport share: the libraries there are, and `pd-peer` with an
//! environment of its own. UCX reads its settings from the environment, so it runs in children.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, Stdio};

const VARIABLE: &str = "DSV4_UCX_LIB";
/// UCX over sockets, over shared memory alone, and over what it chooses itself.
pub(super) const TLS: [&str; 3] = ["tcp", "posix,self", "all"];

/// A UCX library.
#[derive(Clone, Debug)]
pub(super) struct Library {
    /// None is the one that the loader finds.
    path: Option<OsString>,
    pub(super) version: String,
}

impl Library {
    fn find(path: Option<OsString>) -> Result<Self, String> {
        let mut library = Self { path, version: String::new() };
        let output = library.peer("tcp", &["version"]).output().unwrap();
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        library.version = String::from_utf8(output.stdout).unwrap().trim().into();
        Ok(library)
    }

    /// `pd-peer` with this library and these transports, on loopback.
    pub(super) fn peer(&self, tls: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pd-peer"));
        command.args(arguments).env("UCX_TLS", tls).env("UCX_NET_DEVICES", "lo");
        // Without this UCX's shared memory does not report a lost peer and is not taken.
        let handles_errors = if tls == TLS[1] { "y" } else { "n" };
        command.env("UCX_POSIX_ERROR_HANDLING", handles_errors);
        match &self.path {
            Some(path) => command.env(VARIABLE, path),
            None => command.env_remove(VARIABLE),
        };
        command
    }

    /// The numbers that decide who understands whom.
    pub(super) fn minor(&self) -> &str {
        self.version.rsplit_once('.').unwrap().0
    }
}

/// Those that can close an endpoint over `tls`: UCX 1.13 reads uninitialised fields of requests that
/// wait in the queue of its shared memory then, and crashes every now and again.
pub(super) fn libraries_for(tls: &str) -> Vec<Library> {
    let mut libraries = libraries();
    if tls == TLS[1] {
        libraries.retain(|library| library.minor() != "1.13");
    }
    libraries
}

/// The library that `DSV4_UCX_LIB` names and the one that the loader finds. Without any, the tests
/// are left out; CI has the first.
pub(super) fn libraries() -> Vec<Library> {
    let given = std::env::var_os(VARIABLE).filter(|path| !path.is_empty());
    let is_ci = std::env::var_os("CI").is_some();
    assert!(given.is_some() || !is_ci, "CI sets {VARIABLE}");
    let mut found = Vec::new();
    if let Some(path) = given {
        found.push(Library::find(Some(path)).unwrap());
    }
    match Library::find(None) {
        Ok(library) => found.push(library),
        Err(why) => println!("the loader's UCX is left out: {}", why.trim()),
    }
    found
}

/// A running `pd-peer`.
pub(super) struct Peer {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Peer {
    pub(super) fn new(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// The rest of the next line that begins like this.
    pub(super) fn line(&mut self, start: &str) -> String {
        loop {
            let line = self.lines.next().expect("the peer is still there").unwrap();
            if let Some(rest) = line.strip_prefix(start) {
                return rest.trim().into();
            }
        }
    }

    /// SIGKILL.
    pub(super) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have been killed by the test.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
