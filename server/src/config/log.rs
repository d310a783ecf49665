//! Flags of the log, the same for workers and the router.

use clap::{Args, ValueEnum};
use tracing_subscriber::filter::LevelFilter;

/// How a line of the log is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object: `timestamp`, `level`, `target`, and in `fields` the `message` and what belongs
    /// to it.
    Json,
}

/// Flags about the log, which goes to standard error.
#[derive(Clone, Debug, Args)]
pub struct LogArgs {
    /// Most verbose level that is logged: error, warn, info, debug or trace.
    #[arg(long, default_value = "info")]
    pub log_level: LevelFilter,
    /// How lines of the log are written: for people, or as JSON.
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}
