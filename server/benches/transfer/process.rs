//! A contestant seen from outside: a process that is asked in lines and, if it would burn a core while
//! others run, is stopped between its rounds.

use crate::pages::{Outcome, PATIENCE};
use rustix::process::{Pid, Signal, kill_process_group};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

/// Whether a contestant is stopped while it is not its turn. Those stopped are in the hand of the
/// system: when this bench ends in whatever way, their process group is orphaned and hung up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Between {
    /// It sleeps by itself.
    LeftAlone,
    /// Its threads poll.
    Stopped,
}

/// See the module text.
pub(crate) struct Process {
    name: String,
    child: Child,
    /// Of the process and what it started.
    group: Option<Pid>,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    between: Between,
}

impl Process {
    /// Starts a contestant and waits until it is ready.
    pub(crate) fn start(name: &str, command: &mut Command, between: Between) -> Outcome<Self> {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child = command.spawn().map_err(|error| format!("start {name}: {error}"))?;
        let out = child.stdout.take().ok_or("stdout is piped")?;
        let (send, lines) = channel();
        // Ends with the process's output, or with who listens.
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        let (group, stdin) =
            (i32::try_from(child.id()).ok().and_then(Pid::from_raw), child.stdin.take());
        let process = Self { name: name.to_owned(), child, group, stdin, lines, between };
        let said = process.hear()?;
        if !said.starts_with("ready") {
            return Err(format!("{name} is not ready: {said}").into());
        }
        process.signal_between(Signal::STOP);
        Ok(process)
    }

    fn hear(&self) -> Outcome<String> {
        let line = self.lines.recv_timeout(PATIENCE);
        line.map_err(|_| format!("{} says nothing more", self.name).into())
    }

    fn signal(&self, signal: Signal) {
        if let Some(group) = self.group {
            // A group that has ended needs no signal.
            let _ = kill_process_group(group, signal);
        }
    }

    fn signal_between(&self, signal: Signal) {
        if self.between == Between::Stopped {
            self.signal(signal);
        }
    }

    fn ask(&mut self, line: &str) -> Outcome<String> {
        self.signal_between(Signal::CONT);
        let stdin = self.stdin.as_mut().ok_or("its input is open until it ends")?;
        writeln!(stdin, "{line}").map_err(|error| format!("{}: {error}", self.name))?;
        let said = self.hear();
        self.signal_between(Signal::STOP);
        let said = said?;
        match said.strip_prefix("error") {
            Some(text) => Err(format!("{} ({line}):{text}", self.name).into()),
            None => Ok(said),
        }
    }

    /// GB/s of a round.
    pub(crate) fn round(&mut self, page: u32, pages: u32, words: &str) -> Outcome<f64> {
        let said = self.ask(&format!("round {page} {pages} {words}"))?;
        let seconds = said.strip_prefix("seconds ").and_then(|text| text.parse::<f64>().ok());
        let seconds = seconds.filter(|seconds| *seconds > 0.0);
        let seconds = seconds.ok_or_else(|| format!("{} said {said:?}", self.name))?;
        Ok(f64::from(page) * f64::from(pages) / seconds / 1e9)
    }

    /// Has the pages of a round moved into cleared memory and compared.
    pub(crate) fn check(&mut self, page: u32, pages: u32, words: &str) -> Outcome<()> {
        match self.ask(&format!("check {page} {pages} {words}"))?.as_str() {
            "right" => Ok(()),
            said => Err(format!("{} said {said:?}", self.name).into()),
        }
    }

    /// Ends it in good order.
    pub(crate) fn stop(mut self) -> Outcome<()> {
        self.signal_between(Signal::CONT);
        drop(self.stdin.take());
        // Its output ends with it.
        while self.lines.recv_timeout(PATIENCE).is_ok() {}
        let status = self.child.wait()?;
        match status.success() {
            true => Ok(()),
            false => Err(format!("{} ended with {status}", self.name).into()),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Ok(Some(_)) = self.child.try_wait() {
            return;
        }
        self.signal(Signal::KILL);
        // Killed, so that it ends now.
        let _ = self.child.wait();
    }
}
