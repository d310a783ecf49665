//! What the operating system says of a process: memory and descriptors.

use super::super::cluster::Process;

/// Memory and descriptors of a process at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Usage {
    /// Heap and stacks in use, KiB. Page memory is counted by itself below.
    pub(super) anonymous_kib: f64,
    /// Shared memory that was touched, KiB: at most the pools, which are allocated at the start.
    pub(super) shared_kib: f64,
    /// Open descriptors.
    pub(super) descriptors: f64,
    /// Threads.
    pub(super) threads: f64,
}

impl Usage {
    /// Of a running process.
    pub(super) fn of(process: &Process) -> Self {
        let folder = format!("/proc/{}", process.child.id());
        let status = std::fs::read_to_string(format!("{folder}/status")).expect("it runs");
        let number = |name: &str| -> f64 {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
            number.unwrap_or_else(|| panic!("{name} in {status}"))
        };
        let descriptors = std::fs::read_dir(format!("{folder}/fd")).expect("it runs").count();
        Self {
            anonymous_kib: number("RssAnon:"),
            shared_kib: number("RssShmem:"),
            descriptors: descriptors as f64,
            threads: number("Threads:"),
        }
    }
}
