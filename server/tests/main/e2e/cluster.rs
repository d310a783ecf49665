//! Server processes under test: start, addresses, kill, restart, and a judgement of their logs.

use rustix::process::Signal;
use std::io::{BufRead as _, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest wait for anything; reaching it is a failure, not a measurement.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

/// The mini model of this repository.
pub(crate) const MODEL: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../models/dsv4-mini/checkpoint");

/// Root of the workspace.
pub(crate) const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// A running `server` process. It is killed on drop, and an error in its log that the test did not
/// expect fails the test.
#[derive(Debug)]
pub(crate) struct Process {
    args: Vec<String>,
    /// What it has in its environment beside what this process has; counts from the next start on.
    pub(crate) variables: Vec<(String, String)>,
    /// The operating system's side of it.
    pub(crate) child: Child,
    stdout: Receiver<String>,
    said: Vec<String>,
    log: Arc<Mutex<Vec<String>>>,
    readers: Vec<JoinHandle<()>>,
    expected_errors: Vec<&'static str>,
    status: Option<ExitStatus>,
}

impl Process {
    /// Starts the binary with these flags, as they are.
    pub(crate) fn spawn(args: &[String]) -> Self {
        Self::spawn_with(args, &[])
    }

    /// The same with variables of its own.
    pub(crate) fn spawn_with(args: &[String], variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_server"));
        command.args(args);
        Self::spawn_command(command, args, variables)
    }

    /// The test build with faults, and these flags.
    #[cfg(feature = "faults")]
    fn spawn_faulty(args: &[String]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_server-faulty"));
        command.args(args);
        Self::spawn_command(command, args, &[])
    }

    /// The same after a shell has set a limit, like `ulimit -v 1000`.
    pub(crate) fn spawn_limited(limit: &str, flags: &str) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{limit} && exec \"$0\" \"$@\"")]);
        let args = words(flags);
        command.arg(env!("CARGO_BIN_EXE_server")).args(&args);
        Self::spawn_command(command, &args, &[])
    }

    fn spawn_command(mut command: Command, args: &[String], variables: &[(&str, &str)]) -> Self {
        command.current_dir(ROOT).env("NO_COLOR", "1").env_remove("RUST_LOG");
        command.env("UCX_NET_DEVICES", "lo").envs(variables.iter().copied());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("start the server binary");
        let (send, stdout) = channel();
        let log = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&log);
        let out = child.stdout.take().expect("stdout is piped");
        let err = child.stderr.take().expect("stderr is piped");
        let readers = vec![
            read_lines(out, move |line| drop(send.send(line))),
            read_lines(err, move |line| lines(&sink).push(line)),
        ];
        let (said, expected_errors) = (Vec::new(), Vec::new());
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        let variables = variables.iter().map(own).collect();
        Self {
            args: args.to_vec(),
            variables,
            child,
            stdout,
            said,
            log,
            readers,
            expected_errors,
            status: None,
        }
    }

    /// Waits for a line on stdout that contains `part`.
    pub(crate) fn wait_for(&mut self, part: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.stdout.recv_timeout(left) {
                Ok(line) => {
                    self.said.push(line.clone());
                    if line.contains(part) {
                        return line;
                    }
                }
                Err(error) => {
                    let why = match error {
                        RecvTimeoutError::Timeout => "nothing more came in time",
                        RecvTimeoutError::Disconnected => "the process ended",
                    };
                    panic!("{:?} never said {part:?}: {why}\n{}", self.args, self.log_text());
                }
            }
        }
    }

    /// Errors in the log that contain `part` are part of the test.
    pub(crate) fn expect_error(&mut self, part: &'static str) {
        self.expected_errors.push(part);
    }

    /// The log so far.
    pub(crate) fn log_text(&self) -> String {
        lines(&self.log).join("\n")
    }

    /// Waits until the log of a running process contains `part`, and returns it. What a process does
    /// can be seen elsewhere before the line about it has been written and read.
    pub(crate) fn logged(&self, part: &str) -> String {
        until(&format!("{part:?} in the log of {:?}", self.args), || {
            let log = self.log_text();
            log.contains(part).then_some(log)
        })
    }

    /// `kill -9`, and waits for the end.
    pub(crate) fn kill(&mut self) {
        if self.status.is_none() {
            self.child.kill().expect("kill a child");
            self.status = Some(self.child.wait().expect("wait for a killed child"));
        }
    }

    /// Its number.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// SIGTERM.
    pub(crate) fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Any signal to the running process.
    pub(crate) fn signal(&self, signal: Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("signal a running child");
    }

    /// Waits until the process ends by itself.
    pub(crate) fn wait_exit(&mut self) -> ExitStatus {
        let status = until("the process ends", || self.child.try_wait().expect("ask for its end"));
        self.status = Some(status);
        self.join();
        status
    }

    /// Restarts a killed process with the same flags.
    fn again(&mut self) {
        assert!(self.status.is_some(), "only a dead process is started again");
        let variables = self.variables.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let mut next = Self::spawn_with(&self.args, &variables.collect::<Vec<_>>());
        next.expected_errors.clone_from(&self.expected_errors);
        *self = next;
    }

    fn join(&mut self) {
        for reader in self.readers.drain(..) {
            reader.join().expect("a reader of lines does not panic");
        }
    }

    /// Lines of the log that no test expects.
    fn complaints(&self) -> Vec<String> {
        let log = lines(&self.log);
        let bad = |line: &&String| line.contains(" ERROR ") || line.contains("panicked at");
        let expected = |line: &&String| self.expected_errors.iter().any(|part| line.contains(part));
        log.iter().filter(bad).filter(|line| !expected(line)).cloned().collect()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        self.join();
        if std::thread::panicking() {
            note(&format!("--- log of {:?}\n{}", self.args, self.log_text()));
            return;
        }
        let complaints = self.complaints();
        assert!(complaints.is_empty(), "{:?} logged errors:\n{}", self.args, complaints.join("\n"));
    }
}

/// Shows a line to whoever reads the output of the tests.
#[expect(clippy::print_stderr, reason = "test output")]
pub(crate) fn note(line: &str) {
    eprintln!("{line}");
}

fn lines(log: &Mutex<Vec<String>>) -> MutexGuard<'_, Vec<String>> {
    log.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read_lines(
    stream: impl Read + Send + 'static,
    mut sink: impl FnMut(String) + Send + 'static,
) -> JoinHandle<()> {
    std::thread::spawn(move || {
        for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
            sink(String::from_utf8_lossy(&line).trim_end().to_owned());
        }
    })
}

/// Asks again and again until there is an answer; fails the test when there is none in time.
pub(crate) fn until<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < deadline, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// In the line that says where a process listens.
const LISTENS: &str = " on http://";
/// In the line that says so once the process is ready.
const READY: &str = "is ready on http://";

/// A worker or router process that has said where it listens. All but decode workers are ready then.
#[derive(Debug)]
pub(crate) struct Server {
    /// Its process.
    pub(crate) process: Process,
    /// Base address, like `http://127.0.0.1:4711`.
    pub(crate) url: String,
    /// Where decode workers connect, for a prefill worker.
    pub(crate) bootstrap: Option<String>,
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// The address in a line that says `.. on http://ADDR ..`.
fn address_in(line: &str) -> String {
    let from = line.find("http://").unwrap_or_else(|| panic!("an address in {line:?}"));
    line[from..].split_whitespace().next().expect("not empty").to_owned()
}

fn port_of(address: &str) -> &str {
    address.rsplit_once(':').expect("an address has a port").1
}

impl Server {
    /// Starts a worker on free ports, with these flags beside.
    pub(crate) fn worker(mode: &str, flags: &str) -> Self {
        Self::worker_that_says(LISTENS, mode, flags)
    }

    /// The same with variables of its own.
    pub(crate) fn worker_with(mode: &str, flags: &str, variables: &[(&str, &str)]) -> Self {
        let args = Self::arguments(mode, flags);
        Self::after(LISTENS, Process::spawn_with(&args, variables), mode == "prefill")
    }

    /// A worker of the test build, with these flags beside.
    #[cfg(feature = "faults")]
    pub(crate) fn faulty(mode: &str, flags: &str) -> Self {
        let args = Self::arguments(mode, flags);
        Self::after(READY, Process::spawn_faulty(&args), mode == "prefill")
    }

    fn worker_that_says(said: &str, mode: &str, flags: &str) -> Self {
        let args = Self::arguments(mode, flags);
        Self::after(said, Process::spawn(&args), mode == "prefill")
    }

    fn arguments(mode: &str, flags: &str) -> Vec<String> {
        let mut args = words("--port 0");
        for default in ["--kv-memory-mib 192", "--context-length 16384"] {
            if !default.split(' ').take(1).any(|flag| flags.contains(flag)) {
                args.extend(words(default));
            }
        }
        args.extend(words(&format!("--disaggregation-mode {mode} {flags}")));
        args.extend(["--model-path".to_owned(), MODEL.to_owned()]);
        if mode == "prefill" {
            args.extend(words("--disaggregation-bootstrap-port 0"));
        }
        args
    }

    /// Starts a decode worker of this prefill worker.
    pub(crate) fn decode_of(prefill: &Self, flags: &str) -> Self {
        Self::worker("decode", &prefill.asked_with(flags))
    }

    pub(crate) fn asked_with(&self, flags: &str) -> String {
        let bootstrap = self.bootstrap.as_ref().expect("it is a prefill worker");
        format!("--disaggregation-bootstrap {bootstrap} {flags}")
    }

    /// Starts a router in front of workers.
    pub(crate) fn router(workers: &[&Self], flags: &str) -> Self {
        let mut args = words(&format!("router --port 0 {flags}"));
        for worker in workers {
            args.extend(["--worker".to_owned(), worker.url.clone()]);
        }
        Self::after(LISTENS, Process::spawn(&args), false)
    }

    fn after(said: &str, mut process: Process, has_bootstrap: bool) -> Self {
        let url = address_in(&process.wait_for(said));
        let bootstrap = has_bootstrap.then(|| {
            let line = process.wait_for("decode workers connect to ");
            line.rsplit_once(' ').expect("an address follows").1.to_owned()
        });
        Self { process, url, bootstrap }
    }

    /// Starts a killed process again, on the ports that it had.
    pub(crate) fn restart(&mut self) {
        let args = &mut self.process.args;
        set_flag(args, "--port", port_of(&self.url));
        if let Some(bootstrap) = &self.bootstrap {
            set_flag(args, "--disaggregation-bootstrap-port", port_of(bootstrap));
        }
        self.process.again();
        self.process.wait_for(LISTENS);
    }
}

fn set_flag(args: &mut [String], flag: &str, value: &str) {
    let at = args.iter().position(|arg| arg == flag).expect("the flag was given");
    value.clone_into(&mut args[at + 1]);
}

/// A prefill worker, its decode worker, and where requests go.
#[derive(Debug)]
pub(crate) struct Pair {
    /// Prefill worker.
    pub(crate) prefill: Server,
    /// Decode worker.
    pub(crate) decode: Server,
}

impl Pair {
    /// Two processes joined by `backend` (`shm`, `tcp` or `ucx`), when both are ready.
    pub(crate) fn start(backend: &str, flags: &str) -> Self {
        let flags = format!("--disaggregation-transfer-backend {backend} {flags}");
        let prefill = Server::worker("prefill", &flags);
        let decode = Server::worker_that_says(READY, "decode", &prefill.asked_with(&flags));
        Self { prefill, decode }
    }
}
