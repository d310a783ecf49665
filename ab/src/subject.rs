//! Our own servers, started for a cell and ended with it.

use crate::matrix::{Setup, Topology};
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Longest wait for a server to be ready.
const START_MAX: Duration = Duration::from_secs(300);

/// A server that did not start.
#[derive(Debug, thiserror::Error)]
pub enum SubjectError {
    /// The program cannot be run.
    #[error("run {0}: {1}")]
    Spawn(PathBuf, std::io::Error),
    /// It said something else, or nothing.
    #[error("{program} did not say {wanted:?}; its log is {log}: {last}")]
    Silent {
        /// Program.
        program: PathBuf,
        /// What was waited for.
        wanted: &'static str,
        /// Where all that it said is.
        log: PathBuf,
        /// The last line of it.
        last: String,
    },
    /// No file for its log.
    #[error("write {0}: {1}")]
    Log(PathBuf, std::io::Error),
}

/// The processes that run, for [`end_all`].
static RUNNING: Mutex<Vec<Arc<Mutex<Child>>>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Kills all servers, and waits for their end: for a signal, which drops nothing.
pub fn end_all() {
    for child in lock(&RUNNING).drain(..) {
        end(&child);
    }
}

fn end(child: &Mutex<Child>) {
    let mut child = lock(child);
    // It may have ended by itself.
    let _ = child.kill();
    let _ = child.wait();
}

/// One process, killed when dropped.
#[derive(Debug)]
struct Process {
    program: PathBuf,
    child: Arc<Mutex<Child>>,
    lines: Receiver<String>,
    log: PathBuf,
    last: String,
}

impl Process {
    fn start(program: &Path, args: &[String], log: PathBuf) -> Result<Self, SubjectError> {
        let bad_log = |error| SubjectError::Log(log.clone(), error);
        let stderr = File::create(&log).map_err(bad_log)?;
        let mut copy = stderr.try_clone().map_err(bad_log)?;
        let mut child = Command::new(program)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .map_err(|error| SubjectError::Spawn(program.to_owned(), error))?;
        let stdout = child.stdout.take().expect("it is piped");
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                // The log is for people; whoever waits may have gone.
                let _ = writeln!(copy, "{line}");
                let _ = send.send(line);
            }
        });
        let child = Arc::new(Mutex::new(child));
        lock(&RUNNING).push(Arc::clone(&child));
        Ok(Self { program: program.to_owned(), child, lines, log, last: String::new() })
    }

    /// Waits for a line with these words; gives it.
    fn wait_for(&mut self, wanted: &'static str) -> Result<String, SubjectError> {
        let until = Instant::now() + START_MAX;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) if line.contains(wanted) => return Ok(line),
                Ok(line) => self.last = line,
                Err(_) => {
                    return Err(SubjectError::Silent {
                        program: self.program.clone(),
                        wanted,
                        log: self.log.clone(),
                        last: self.last_words(),
                    });
                }
            }
        }
    }
}

impl Process {
    /// The last line that it wrote to its log or said.
    fn last_words(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let mut lines = log.lines().map(str::trim).filter(|line| !line.is_empty());
        // Programs that do not like their arguments say so first, and how to be used last.
        let error = lines.clone().find(|line| line.starts_with("error"));
        error.or_else(|| lines.next_back()).unwrap_or(&self.last).to_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        lock(&RUNNING).retain(|child| !Arc::ptr_eq(child, &self.child));
        end(&self.child);
    }
}

/// Servers of a cell.
#[derive(Debug)]
pub struct Servers {
    /// Base address that takes requests.
    pub url: String,
    /// Base addresses whose `/metrics` say what happened.
    pub metrics: Vec<String>,
    /// The one that others need ends last.
    _processes: Vec<Process>,
}

/// The address in a line like `… http://HOST:PORT …`.
fn address_in(line: &str) -> String {
    let from = line.find("http://").unwrap_or(line.len());
    line[from..].split_whitespace().next().unwrap_or_default().to_owned()
}

impl Servers {
    /// Starts what a cell needs, on free ports; logs go to `folder`, with names that begin with the
    /// cell's.
    ///
    /// # Errors
    /// [`SubjectError`].
    pub fn start(
        program: &Path,
        setup: &Setup,
        flags: &[String],
        (folder, name): (&Path, &str),
    ) -> Result<Self, SubjectError> {
        let args = |mode: &str, more: &[&str]| -> Vec<String> {
            let own = ["--port", "0", "--disaggregation-mode", mode];
            let own = own.iter().chain(more).map(|word| (*word).to_owned());
            own.chain(flags.iter().cloned()).chain(setup.flags.iter().cloned()).collect()
        };
        let begin = |mode: &str, more: &[&str]| {
            Process::start(program, &args(mode, more), folder.join(format!("{name}-{mode}.log")))
        };
        let ready = "is ready on http://";
        if setup.topology != Topology::Pair {
            let mode = if setup.topology == Topology::Both { "both" } else { "null" };
            let mut process = begin(mode, &[])?;
            let url = address_in(&process.wait_for(ready)?);
            return Ok(Self { metrics: vec![url.clone()], url, _processes: vec![process] });
        }
        let mut prefill = begin("prefill", &["--disaggregation-bootstrap-port", "0"])?;
        let prefill_url = address_in(&prefill.wait_for(ready)?);
        let line = prefill.wait_for("decode workers connect to ")?;
        let bootstrap = line.rsplit(' ').next().unwrap_or_default().to_owned();
        let mut decode = begin("decode", &["--disaggregation-bootstrap", &bootstrap])?;
        let url = address_in(&decode.wait_for(ready)?);
        let metrics = vec![prefill_url, url.clone()];
        Ok(Self { url, metrics, _processes: vec![decode, prefill] })
    }
}
