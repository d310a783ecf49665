//! Measures the link between two machines with the hand-off's own transports and checks.

use clap::{Parser, Subcommand};
use pd_transfer::tools::{Kind, MeasureConfig, ServeConfig, ToolError, measure, serve};
use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

/// Measures a link as a prefill-decode hand-off uses it.
///
/// Start `pd-link serve` on one machine and `pd-link measure` on the other. The serving side has
/// pages with known bytes; the measuring side reads them out of its memory, checks the digest of each
/// page after it landed, and prints how fast that was. Both need the same --transport.
#[derive(Debug, Parser)]
#[command(name = "pd-link", version, after_help = EXIT_CODES)]
struct Flags {
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "Exit codes: 0 all went well; 1 no link, or it broke; 2 wrong flags; \
3 pages arrived with other bytes than were sent: do not use this link.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Offer pages until the process is ended.
    Serve {
        /// How pages travel: tcp, shm (two processes of one host), ucx (RDMA where there is some).
        #[arg(long, value_name = "tcp|shm|ucx")]
        transport: Kind,
        /// Where to wait: HOST:PORT, for shm unix:PATH. Port 0 picks a free one.
        #[arg(long, value_name = "ADDRESS")]
        listen: String,
        /// Memory to serve from: a number with KiB, MiB or GiB, or bytes.
        #[arg(long, value_name = "BYTES", default_value = "1GiB", value_parser = bytes)]
        bytes: u64,
    },
    /// Pull pages from a `pd-link serve`, check them, and print figures.
    Measure {
        /// How pages travel; as on the serving side.
        #[arg(long, value_name = "tcp|shm|ucx")]
        transport: Kind,
        /// Where the serving side listens, as it printed it.
        #[arg(long, value_name = "ADDRESS")]
        connect: String,
        /// Page sizes in bytes, or with KiB or MiB; each is measured by itself. The default has
        /// an index page, two others, and 1 MiB.
        #[arg(long, value_name = "BYTES,..", value_delimiter = ',', value_parser = size,
              default_value = "8448,16384,65536,1048576")]
        sizes: Vec<u32>,
        /// How long each figure is measured; there are three for each size.
        #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = seconds)]
        seconds: Duration,
        /// Most gets that are under way at once.
        #[arg(long, value_name = "N", default_value = "64", value_parser = in_flight)]
        in_flight: usize,
        /// How long to wait for an answer of the serving side.
        #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
        connect_timeout: Duration,
        /// Print one JSON object instead of a table.
        #[arg(long)]
        json: bool,
    },
}

/// A number with an optional unit.
fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|letter: char| !letter.is_ascii_digit());
    let unit = match &text[digits.len()..] {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        other => return Err(format!("no unit {other:?}, there are B, KiB, MiB and GiB")),
    };
    let number: u64 = digits.parse().map_err(|_| format!("{digits:?} is no whole number"))?;
    number.checked_mul(unit).ok_or_else(|| String::from("too large"))
}

fn size(text: &str) -> Result<u32, String> {
    u32::try_from(bytes(text)?).map_err(|_| String::from("too large for a page"))
}

/// A socket link serves so many reads of a peer at once, and is cut beyond.
const IN_FLIGHT_MAX: usize = 4096;

fn in_flight(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 1..=IN_FLIGHT_MAX) => Ok(count),
        _ => Err(format!("a number from 1 to {IN_FLIGHT_MAX} is wanted")),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text.parse().map_err(|_| format!("{text:?} is no number"))?;
    let found = Duration::try_from_secs_f64(number).map_err(|error| error.to_string())?;
    if found > Duration::from_secs(3600) { Err(String::from("at most 3600")) } else { Ok(found) }
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    match run(flags.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Without standard error the exit code has to do.
            let _ = writeln!(std::io::stderr(), "error: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(command: Command) -> Result<(), ToolError> {
    match command {
        Command::Serve { transport, listen, bytes } => {
            let config = ServeConfig { kind: transport, listen, bytes };
            let server = serve(&config, transport.factory())?;
            say(&format!("listening {}", server.address()))?;
            loop {
                std::thread::park();
            }
        }
        Command::Measure {
            transport,
            connect,
            sizes,
            seconds,
            in_flight,
            connect_timeout,
            json,
        } => {
            let config = MeasureConfig {
                kind: transport,
                connect,
                sizes,
                duration: seconds,
                in_flight,
                patience: connect_timeout,
            };
            let report = measure(&config, &|| transport.factory())?;
            say(&if json { report.to_json() } else { report.to_string() })
        }
    }
}

fn say(text: &str) -> Result<(), ToolError> {
    let mut out = std::io::stdout();
    writeln!(out, "{text}")
        .and_then(|()| out.flush())
        .map_err(|source| ToolError::Io { during: "write to standard output", source })
}
