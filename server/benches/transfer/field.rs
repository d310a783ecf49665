//! The field of contestants: which processes there are, and which settings of each take part.

use crate::pages::Outcome;
use crate::process::{Between, Process};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The interpreter for the peers, and the folder that their packages are in.
const PYTHON: &str = "DSV4_BENCH_PYTHON";
const PACKAGES: &str = "DSV4_BENCH_PEERS";
/// A name, and the variables that make it.
type Setting<'a> = (&'a str, &'a [(&'a str, &'a str)]);

/// Settings of UCX for contestants that use the library of this project: what UCX chooses itself,
/// and shared memory with copies across address spaces, which UCX only takes when asked where an
/// endpoint has to report a lost peer, and which not every machine allows.
const UCX: [Setting<'static>; 2] = [
    ("UCX_TLS=all", &[]),
    ("UCX_TLS=posix,cma", &[("UCX_TLS", "posix,cma"), ("UCX_POSIX_ERROR_HANDLING", "y")]),
];
/// For the figure over TCP alone.
const UCX_TCP: Setting<'static> = ("UCX_TLS=tcp", &[("UCX_TLS", "tcp")]);
/// Gets under way at once in the plain loop.
const OUTSTANDING: [&str; 2] = ["64", "1024"];
/// Descriptors of a batch of a peer; the second is more than any round has.
const BATCHES: [(&str, &str); 2] =
    [("4096", "4,096 descriptors a batch"), ("1048576", "one batch")];

/// One setting of a contestant.
pub(crate) struct Entry {
    /// Figures that it stands for, without the size: the best of them is the figure.
    pub(crate) figures: Vec<String>,
    /// Number of its process.
    pub(crate) process: usize,
    /// Its words in a round.
    pub(crate) words: String,
    /// The same for people.
    pub(crate) setting: String,
    /// Whether the bytes are compared with these words: once per process and direction.
    pub(crate) is_checked: bool,
}

/// Everyone who takes part.
pub(crate) struct Field {
    /// Bytes that the pages of a round rotate over.
    pub(crate) buffer: u64,
    pub(crate) processes: Vec<Process>,
    pub(crate) entries: Vec<Entry>,
}

impl Field {
    /// Starts the contestants of these names.
    pub(crate) fn start(names: &[&str], buffer: u64) -> Outcome<Self> {
        let mut field = Self { buffer, processes: Vec::new(), entries: Vec::new() };
        for name in names {
            match *name {
                "memcpy" => field.memcpy(buffer)?,
                "shm" | "tcp" => field.own(name, ("its defaults", &[]), buffer)?,
                "ucx" => {
                    for setting in UCX {
                        field.own("ucx", setting, buffer)?;
                    }
                }
                "ucp_get" => field.plain_gets(buffer)?,
                "nixl" => field.nixl(buffer)?,
                "mooncake" => field.mooncake(buffer)?,
                other => return Err(format!("there is no contestant {other:?}").into()),
            }
            let mut figures = field.entries.iter().flat_map(|entry| &entry.figures);
            if !figures.any(|figure| figure.split('.').next() == Some(name)) {
                return Err(format!("{name} can't be measured here").into());
            }
        }
        Ok(field)
    }

    /// Starts a contestant with one of its settings. The setting that not every machine has is left
    /// out aloud if it does not start.
    fn begin(
        &mut self,
        name: &str,
        setting: &str,
        command: &mut Command,
        between: Between,
    ) -> Outcome<Option<usize>> {
        match Process::start(name, command, between) {
            Ok(process) => Ok(Some(self.add(process))),
            Err(error) if setting == UCX[1].0 => {
                println!("{name} is left out: {error}");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn add(&mut self, process: Process) -> usize {
        self.processes.push(process);
        self.processes.len() - 1
    }

    fn memcpy(&mut self, buffer: u64) -> Outcome<()> {
        let mut command = this_program(&["memcpy", &buffer.to_string()])?;
        let process = Process::start("memcpy", &mut command, Between::LeftAlone)?;
        let (process, words) = (self.add(process), "copy".to_owned());
        let (figures, setting) = (vec!["memcpy".to_owned()], "one thread".to_owned());
        self.entries.push(Entry { figures, process, words, setting, is_checked: true });
        Ok(())
    }

    fn own(&mut self, transport: &str, of: Setting<'_>, buffer: u64) -> Outcome<()> {
        let (setting, variables) = of;
        for words in ["digest", "plain"] {
            let arguments = ["reader", transport, words, &buffer.to_string()];
            let mut command = this_program(&arguments)?;
            command.envs(variables.iter().copied());
            let name = format!("{transport} {words} {setting}");
            let begun = self.begin(&name, setting, &mut command, Between::LeftAlone)?;
            let Some(process) = begun else { continue };
            let (figures, setting) = (vec![format!("{transport}.{words}")], setting.to_owned());
            let (words, is_checked) = (words.to_owned(), true);
            self.entries.push(Entry { figures, process, words, setting, is_checked });
        }
        Ok(())
    }

    fn plain_gets(&mut self, buffer: u64) -> Outcome<()> {
        for (setting, variables) in UCX {
            for loss in ["reported", "unnoticed"] {
                let mut command = this_program(&["plain-reader", loss, &buffer.to_string()])?;
                command.envs(variables.iter().copied());
                let name = format!("ucp_get {setting}, a lost peer is {loss}");
                let begun = self.begin(&name, setting, &mut command, Between::Stopped)?;
                let Some(process) = begun else { continue };
                for words in OUTSTANDING {
                    let setting = format!("{setting}, {words} under way, a lost peer is {loss}");
                    let (figures, is_checked) =
                        (vec!["ucp_get".to_owned()], words == OUTSTANDING[0]);
                    let words = words.to_owned();
                    self.entries.push(Entry { figures, process, words, setting, is_checked });
                }
            }
        }
        Ok(())
    }

    fn nixl(&mut self, buffer: u64) -> Outcome<()> {
        for (setting, variables) in UCX.into_iter().chain([UCX_TCP]) {
            for progress in ["0", "1"] {
                let mut command = peer("nixl_peer.py", buffer)?;
                command.args(["--progress", progress]).envs(variables.iter().copied());
                let thread =
                    if progress == "1" { "a progress thread" } else { "no progress thread" };
                let name = format!("nixl {setting}, {thread}");
                let begun = self.begin(&name, setting, &mut command, Between::Stopped)?;
                let Some(process) = begun else { continue };
                let is_tcp = setting == UCX_TCP.0;
                let figures = if is_tcp { &["nixl", "nixl_tcp"][..] } else { &["nixl"] };
                self.peer_entries(figures, process, &format!("{setting}, {thread}"));
            }
        }
        Ok(())
    }

    fn mooncake(&mut self, buffer: u64) -> Outcome<()> {
        let mut command = peer("mooncake_peer.py", buffer)?;
        let process = Process::start("mooncake", &mut command, Between::Stopped)?;
        let process = self.add(process);
        self.peer_entries(&["mooncake"], process, "TCP");
        Ok(())
    }

    /// Both directions, with each size of a batch.
    fn peer_entries(&mut self, figures: &[&str], process: usize, setting: &str) {
        for operation in ["READ", "WRITE"] {
            for (batch, said) in BATCHES {
                let words = format!("{operation} {batch}");
                let setting = format!("{setting}, {operation}, {said}");
                let is_checked = batch == BATCHES[0].0;
                let figures = figures.iter().map(|&name| name.to_owned()).collect();
                self.entries.push(Entry { figures, process, words, setting, is_checked });
            }
        }
    }

    /// Ends all of them.
    pub(crate) fn stop(self) -> Outcome<()> {
        self.processes.into_iter().try_for_each(Process::stop)
    }
}

fn this_program(arguments: &[&str]) -> Outcome<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(arguments);
    Ok(command)
}

fn variable(name: &str) -> Outcome<OsString> {
    std::env::var_os(name).ok_or_else(|| {
        format!(
            "{name} is not set, so NIXL and Mooncake can't be measured: run `cargo xtask bench \
             transfer`, which fetches them, or leave them out with --no-peers"
        )
        .into()
    })
}

/// A peer's script with the packages of the peers.
fn peer(script: &str, buffer: u64) -> Outcome<Command> {
    let mut command = Command::new(variable(PYTHON)?);
    let folder: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/peers");
    command.arg(folder.join(script)).args(["--buffer", &buffer.to_string()]);
    command.env("PYTHONPATH", variable(PACKAGES)?).env("PYTHONDONTWRITEBYTECODE", "1");
    Ok(command)
}
