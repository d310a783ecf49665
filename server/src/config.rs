//! Flags, read once and checked once.

mod edge;
pub mod layers;
mod log;
mod router;
mod trace;
mod verify;

use crate::http::access::{Access, AccessError};
use clap::{Args, Parser, Subcommand, ValueEnum};
pub use edge::EdgeArgs;
use kv_pool::{Fingerprint, IndexKeyType, Numerics};
pub use log::{LogArgs, LogFormat};
pub use router::RouterArgs;
use std::path::PathBuf;
use std::time::Duration;
pub use trace::TraceArgs;
pub use verify::VerifyArgs;

/// DeepSeek-V4 serving engine: prefill and decode apart, every page verified.
#[derive(Debug, Parser)]
#[command(name = "server", version, about, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// Other programs in this binary.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Flags of a worker process.
    #[command(flatten)]
    pub serve: ServeArgs,
}

/// Reads the flags of this process.
///
/// # Errors
///
/// [`layers::LayerError`].
pub fn read() -> Result<layers::Layered, layers::LayerError> {
    let args = std::env::args_os();
    #[cfg(feature = "faults")]
    let args = crate::faults::arm(args)?;
    layers::parse(args, std::env::vars_os())
}

/// Programs beside the worker.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Spread requests over decode (or unified) workers.
    Router(Box<RouterArgs>),
    /// List, verify or prune what workers keep in the folder of --hicache-storage-dir.
    #[command(subcommand)]
    Cache(CacheCommand),
    /// Ask a live worker whether its pages are what they should be.
    ///
    /// It digests sealed pages and objects in host memory again, computes ends of prefixes again, and
    /// goes on serving. Exit code 0 if all is right, 1 if something is wrong, which is given up then,
    /// 2 if the worker could not be audited.
    Verify(VerifyArgs),
}

/// Which part of the work a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// A prefill and a decode worker in this process, pages handed over between them.
    Both,
    /// One worker that does both, without hand-off.
    Null,
    /// Computes prompts for decode workers.
    Prefill,
    /// Generates; pulls computed prompts from prefill workers.
    Decode,
}

impl Mode {
    /// Name as on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::Null => "null",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// How pages travel between processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// Shared memory when the peer's address is this host, TCP otherwise.
    Auto,
    /// Shared memory (one host).
    Shm,
    /// TCP.
    Tcp,
    /// UCX: RDMA where there is hardware for it; needs a libucp.so.0 of one minor version on both
    /// sides (DSV4_UCX_LIB is its path).
    Ucx,
}

/// When prefixes are copied to the tiers below the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum WritePolicyArg {
    /// As soon as they are complete.
    WriteThrough,
    /// When a second prompt uses them.
    WriteThroughSelective,
    /// When their pages are about to be needed for others.
    WriteBack,
}

/// A finite number above zero.
fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("a number above zero expected".to_owned()),
    }
}

fn up_to_half(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if (0.0..=0.5).contains(&number) => Ok(number),
        _ => Err("a number from 0 to 0.5 expected".to_owned()),
    }
}

/// Flags that say who may ask.
#[derive(Clone, Debug, Default, Args)]
pub struct AccessArgs {
    /// Key that requests must bring; may be given several times. Other users of the machine can see
    /// a command line: --api-key-file or the variable keep it from them [default: none is needed].
    #[arg(long, value_name = "KEY")]
    pub api_key: Vec<String>,
    /// File with such keys, one a line.
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Origin (scheme, host and port) whose web pages may ask, or *; may be given several times, or
    /// with commas [default: only the page of this server].
    #[arg(long, value_name = "ORIGIN", value_delimiter = ',')]
    pub allow_origins: Vec<String>,
}

impl AccessArgs {
    /// Who may ask.
    ///
    /// # Errors
    /// [`AccessError`].
    pub fn access(&self) -> Result<Access, AccessError> {
        Access::new(&self.api_key, self.api_key_file.as_deref(), &self.allow_origins)
    }

    /// Whether a request must bring a key.
    #[must_use]
    pub fn asks_for_keys(&self) -> bool {
        !self.api_key.is_empty() || self.api_key_file.is_some()
    }
}

/// Flags of a worker process.
#[derive(Clone, Debug, Args)]
pub struct ServeArgs {
    /// Folder of a checkpoint in DeepSeek's format [default: the mini model of this repository].
    #[arg(long, value_name = "DIR")]
    pub model_path: Option<PathBuf>,
    /// Model id in the API [default: the name of the model folder].
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub served_model_name: Option<String>,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 picks a free one.
    #[arg(long, default_value_t = 30000)]
    pub port: u16,
    /// What this process does.
    #[arg(long, value_enum, default_value_t = Mode::Both)]
    pub disaggregation_mode: Mode,
    /// Port on which a prefill worker meets decode workers; 0 picks a free one.
    #[arg(long, default_value_t = 8998)]
    pub disaggregation_bootstrap_port: u16,
    /// Bootstrap address of a prefill worker, for a decode worker; may be given several times.
    #[arg(long, value_name = "HOST:PORT")]
    pub disaggregation_bootstrap: Vec<String>,
    /// Where workers find each other and routers find them: etcd://HOST:PORT,HOST:PORT.../NAMESPACE,
    /// or http://HOST:PORT of a router's --registry-port [default: nowhere].
    #[arg(long, value_name = "URL")]
    pub discovery: Option<crate::net::discovery::DiscoveryUrl>,
    /// Host that others are told there [default: that of --host].
    #[arg(long, value_name = "HOST")]
    pub advertise_host: Option<String>,
    /// Last requests of which the digest of each page is kept at every stop of its way, for
    /// /trace/REQUEST; 0 for none.
    #[arg(long, default_value_t = 0, value_name = "REQUESTS", value_parser = clap::value_parser!(u32).range(..=4096))]
    pub trace_pages: u32,
    /// Uncached tokens of a prompt up to which a decode worker computes it itself; 0 for none.
    #[arg(long, default_value_t = 0, value_name = "TOKENS")]
    pub max_local_prefill_length: u32,
    /// How pages travel between processes.
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    pub disaggregation_transfer_backend: Backend,
    /// Type of the index keys: fp4 (the official model), fp8 (SGLang's) or bf16.
    #[arg(long, default_value = "fp4", value_name = "fp4|fp8|bf16")]
    pub index_k_dtype: IndexKeyType,
    /// Rounding of the forward pass: official or reference (FP32).
    #[arg(long, default_value = "official", value_name = "official|reference")]
    pub numerics: Numerics,
    /// Most tokens of one step; longer prompts are computed in chunks.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub chunked_prefill_size: u32,
    /// Most requests that run at once.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub max_running_requests: u32,
    /// Most requests that wait; one more is refused with 503.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub max_queued_requests: u32,
    /// Most prompt tokens of all requests that wait; one request may always wait alone [default: no
    /// limit].
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub max_queued_tokens: Option<u64>,
    /// Output tokens that a request has pages for when it begins, at most; more come as it needs
    /// them, from one that came later if there is no other way, which then goes on later.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub num_reserved_decode_tokens: u32,
    /// Seconds that a request may wait for its turn before it gets 503; 0 for no limit.
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    pub queue_timeout: u64,
    /// Seconds within which a request is to have its first token; otherwise it is ended with 503
    /// [default: no limit].
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..), value_name = "SECONDS")]
    pub first_token_timeout: Option<u64>,
    /// Tokens of prompt and output together [default: what the model was made for].
    #[arg(long)]
    pub context_length: Option<u32>,
    /// Compute every prompt from its first token: keep no prefixes of earlier ones.
    #[arg(long)]
    pub disable_radix_cache: bool,
    /// Keep prefixes in host memory too, and in a store if one is named.
    #[arg(
        long, value_name = "true|false", num_args = 0..=1, require_equals = true,
        default_value_t = true, default_missing_value = "true", action = clap::ArgAction::Set
    )]
    pub enable_hierarchical_cache: bool,
    /// Host memory for prefixes of each worker, as a multiple of its memory for pages.
    #[arg(long, default_value_t = 0.5, value_parser = positive, value_name = "RATIO")]
    pub hicache_ratio: f64,
    /// Host memory for prefixes of each worker, GiB, instead of --hicache-ratio.
    #[arg(long, value_parser = positive, value_name = "GIB")]
    pub hicache_size: Option<f64>,
    /// When prefixes are copied out of the pages: at once, when used again, or before they go.
    #[arg(long, value_enum, default_value_t = WritePolicyArg::WriteThrough)]
    pub hicache_write_policy: WritePolicyArg,
    /// Share of the host memory for prefixes that requests may pin (cache_control); 0 for none.
    #[arg(long, default_value_t = 0.5, value_parser = up_to_half, value_name = "SHARE")]
    pub hicache_pin_share: f64,
    /// Folder for prefixes that are to outlive the process [default: none].
    #[arg(long, value_name = "DIR")]
    pub hicache_storage_dir: Option<PathBuf>,
    /// Most bytes in that folder for each worker, GiB; the least recently used go first.
    #[arg(long, default_value_t = 16.0, value_parser = positive, value_name = "GIB")]
    pub hicache_storage_size: f64,
    /// Bucket for prefixes that other servers share: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or
    /// az://CONTAINER/PREFIX; credentials and endpoint come from the usual AWS_, GOOGLE_ or AZURE_
    /// variables [default: none].
    #[arg(long, value_name = "URL")]
    pub hicache_object_store: Option<crate::net::ObjectUrl>,
    /// Tell cache-aware routers which blocks are here, as vLLM and SGLang do: JSON with publisher,
    /// endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic [default: do not].
    #[arg(long, value_name = "JSON")]
    pub kv_events_config: Option<crate::net::kv_events::KvEventsConfig>,
    /// Memory for pages of each worker, MiB [default: a quarter of the machine's, at most 1024].
    #[arg(long)]
    pub kv_memory_mib: Option<u64>,
    /// Compute threads [default: one per core].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Seconds that running requests have to end after SIGTERM; a second signal ends them at once.
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    pub drain_timeout: u64,
    /// Seconds without a sign of life of a worker that has work after which /health and /readyz say
    /// that it has failed; 0 for no limit.
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    pub watchdog_timeout: u64,
    /// What comes in over HTTP.
    #[command(flatten)]
    pub edge: EdgeArgs,
    /// Who may ask.
    #[command(flatten)]
    pub access: AccessArgs,
    /// What is recorded of traces.
    #[command(flatten)]
    pub trace: TraceArgs,
    /// Think unless a request says otherwise.
    #[arg(long)]
    pub default_thinking: bool,
    /// In thinking mode use temperature 1 and top-p 1 whatever was asked, as DeepSeek's API does.
    #[arg(long)]
    pub recipe_sampling: bool,
    /// Refuse requests with fields that nobody reads, instead of naming those in the header
    /// x-ignored-fields of the answer.
    #[arg(long)]
    pub strict_fields: bool,
    /// What is logged, and how.
    #[command(flatten)]
    pub log: LogArgs,
    /// File (TOML) with flags that are neither here nor in a variable like DSV4_MAX_RUNNING_REQUESTS.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// What looks after a cache's folder.
#[derive(Clone, Debug, Subcommand)]
pub enum CacheCommand {
    /// Say what lies in the folder: one line for each worker and layout.
    Ls(CacheLsArgs),
    /// Read every object and say which are damaged; may run beside workers.
    ///
    /// Exit code 0 if all is right, 1 if something is damaged, 2 if the folder or an object could
    /// not be read.
    Verify(CacheVerifyArgs),
    /// Remove what is old, too much, damaged or of another layout; not while workers run.
    ///
    /// Without a flag only files go that a writer which died left unfinished. Flags may be combined.
    /// Exit code 0 if it was done, 2 if not.
    Prune(CachePruneArgs),
}

/// Flags of `cache ls`.
#[derive(Clone, Debug, Args)]
pub struct CacheLsArgs {
    /// Folder that was given to --hicache-storage-dir, or one worker's folder in it.
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Print one JSON object: bytes, and milliseconds since 1970.
    #[arg(long)]
    pub json: bool,
}

/// Flags of `cache verify`.
#[derive(Clone, Debug, Args)]
pub struct CacheVerifyArgs {
    /// Folder that was given to --hicache-storage-dir, or one worker's folder in it.
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

/// Flags of `cache prune`.
#[derive(Clone, Debug, Args)]
pub struct CachePruneArgs {
    /// Folder that was given to --hicache-storage-dir, or one worker's folder in it.
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Most GiB to leave in each worker's folder; the least recently used objects go first.
    #[arg(long, value_parser = not_negative, value_name = "GIB")]
    pub max_size: Option<f64>,
    /// Remove what was not used for so long: a number with s, m, h or d, like 7d, 12h or 30m.
    #[arg(long, value_parser = duration, value_name = "DURATION")]
    pub older_than: Option<Duration>,
    /// Read every object, and remove those that are damaged.
    #[arg(long)]
    pub damaged: bool,
    /// Remove all layouts but one; alone, it may run while a worker uses that one.
    #[arg(long, requires = "keep")]
    pub other_layouts: bool,
    /// The layout that stays: its 32 hex digits, as `cache ls` and the log of a worker show them.
    #[arg(long, requires = "other_layouts", value_parser = fingerprint, value_name = "FINGERPRINT")]
    pub keep: Option<Fingerprint>,
    /// Say what would go, and remove nothing.
    #[arg(long)]
    pub dry_run: bool,
}

/// A finite number that is not below zero.
fn not_negative(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("a number of zero or more expected".to_owned()),
    }
}

/// A whole number with a unit.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 60 * 60,
        "d" => 24 * 60 * 60,
        _ => return Err("a whole number with s, m, h or d expected, like 7d".to_owned()),
    };
    let number = number.parse::<u64>().ok().and_then(|number| number.checked_mul(seconds));
    number.map(Duration::from_secs).ok_or_else(|| "a smaller whole number expected".to_owned())
}

/// 32 hex digits.
fn fingerprint(text: &str) -> Result<Fingerprint, String> {
    let number = (text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit()))
        .then(|| u128::from_str_radix(text, 16).ok());
    let number = number.flatten().ok_or("32 hex digits expected, as `cache ls` shows them")?;
    Ok(Fingerprint(number.to_be_bytes()))
}

/// A flag that cannot be used with the others.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A decode worker without peers.
    #[error(
        "--disaggregation-mode decode needs --disaggregation-bootstrap HOST:PORT of at least one prefill worker, or --discovery"
    )]
    NoBootstrap,
    /// Bootstrap addresses outside decode mode.
    #[error("--disaggregation-bootstrap is for --disaggregation-mode decode, not {0}")]
    BootstrapUnused(&'static str),
    /// Not HOST:PORT.
    #[error("--disaggregation-bootstrap {0}: HOST:PORT expected, without http:// and path")]
    BadAddress(String),
    /// Shared memory to another host.
    #[error("--disaggregation-transfer-backend shm: {0} is not this host")]
    NotLocal(String),
    /// A context that the model does not have.
    #[error(
        "--context-length {wanted}: must be between 1 and {limit}, what the model was made for"
    )]
    Context {
        /// Asked for.
        wanted: u32,
        /// Model's limit.
        limit: u32,
    },
    /// Others would be told an address that is none.
    #[error("--discovery: others cannot reach {0}: give --advertise-host HOST")]
    Unreachable(String),
    /// An address for others, and nobody to tell it to.
    #[error("--advertise-host is told to others, see --discovery")]
    NobodyIsTold,
    /// A router would speak plain HTTP to a port with TLS.
    #[error(
        "--ssl-certfile: routers speak plain HTTP to workers, so a worker with TLS cannot be announced with --discovery; give the router the certificate"
    )]
    FoundBehindTls,
    /// Somebody else listens there.
    #[error(
        "address {address} is in use: stop the process that listens there, or give another {flag} (0 picks a free port)"
    )]
    AddressInUse {
        /// HOST:PORT.
        address: String,
        /// The flag that names the port.
        flag: &'static str,
    },
    /// The address cannot be listened on for another reason.
    #[error("address {address} cannot be listened on ({reason}): see --host and {flag}")]
    Listen {
        /// HOST:PORT.
        address: String,
        /// The flag that names the port.
        flag: &'static str,
        /// The operating system's answer.
        reason: String,
    },
    /// More memory than the machine has.
    #[error("--kv-memory-mib {mib}: this machine has {machine} MiB")]
    TooMuchMemory {
        /// Given.
        mib: u64,
        /// Memory of the machine.
        machine: u64,
    },
    /// More memory than is free now.
    #[error("the pages of a worker need {needed} MiB, {free} MiB are free: see --kv-memory-mib")]
    NoRoom {
        /// MiB for its pages.
        needed: u64,
        /// MiB that the machine can still give.
        free: u64,
    },
    /// Events without anything that could come or go.
    #[error("--kv-events-config: without prefixes there are no events, see --disable-radix-cache")]
    EventsWithoutPrefixes,
    /// A store needs buffers in host memory.
    #[error(
        "{0} needs the host tier: it can't go with --disable-radix-cache or --enable-hierarchical-cache=false"
    )]
    StorageWithoutHost(&'static str),
    /// Not even one object of each kind fits.
    #[error(
        "host memory of {bytes} bytes for prefixes is too little, at least {needed} are needed: see --hicache-size and --hicache-ratio, or --enable-hierarchical-cache=false"
    )]
    HostTooSmall {
        /// Given.
        bytes: u64,
        /// Needed.
        needed: u64,
    },
    /// More host memory than is free now.
    #[error(
        "the host tier of a worker's cache needs {needed} MiB, {free} MiB are free: see --hicache-size and --hicache-ratio"
    )]
    NoHostRoom {
        /// MiB for its objects.
        needed: u64,
        /// MiB that the machine can still give.
        free: u64,
    },
    /// Too little memory for one request of full length.
    #[error(
        "--kv-memory-mib {mib}: one sequence of {context} tokens needs {needed} MiB, or give a smaller --context-length"
    )]
    Memory {
        /// Given.
        mib: u64,
        /// Context length.
        context: u32,
        /// Needed.
        needed: u64,
    },
}

impl ConfigError {
    /// Why `host` and `port`, which `flag` gave, cannot be listened on. Holds the cause's text, so
    /// that it is said once.
    #[must_use]
    pub fn listen(host: &str, port: u16, flag: &'static str, cause: &std::io::Error) -> Self {
        let address =
            if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        match cause.kind() {
            std::io::ErrorKind::AddrInUse => Self::AddressInUse { address, flag },
            _ => Self::Listen { address, flag, reason: cause.to_string() },
        }
    }
}

/// Whether an address `HOST:PORT` names this host.
#[must_use]
pub fn is_local(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host).to_ascii_lowercase();
    matches!(host.as_str(), "localhost" | "[::1]" | "::1") || host.starts_with("127.")
}

impl ServeArgs {
    /// Whether routers are to be told what is in the cache.
    #[must_use]
    pub fn publishes_events(&self) -> bool {
        self.kv_events_config.as_ref().is_some_and(|config| config.enabled)
    }

    /// Checks what can be checked without the model.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let mode = self.disaggregation_mode;
        self.check_discovery()?;
        if self.is_found_behind_tls() {
            return Err(ConfigError::FoundBehindTls);
        }
        let has_peers = !self.disaggregation_bootstrap.is_empty() || self.discovery.is_some();
        if mode == Mode::Decode && !has_peers {
            return Err(ConfigError::NoBootstrap);
        }
        if mode != Mode::Decode && !self.disaggregation_bootstrap.is_empty() {
            return Err(ConfigError::BootstrapUnused(mode.name()));
        }
        if self.disable_radix_cache && self.publishes_events() {
            return Err(ConfigError::EventsWithoutPrefixes);
        }
        for address in &self.disaggregation_bootstrap {
            let is_host = |(host, _): &(&str, &str)| !host.is_empty() && !host.contains('/');
            let port = address.rsplit_once(':').filter(is_host);
            // Nobody can be reached at port 0.
            if port.and_then(|(_, port)| port.parse::<u16>().ok()).is_none_or(|port| port == 0) {
                return Err(ConfigError::BadAddress(address.clone()));
            }
            if self.disaggregation_transfer_backend == Backend::Shm && !is_local(address) {
                return Err(ConfigError::NotLocal(address.clone()));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<(), String> {
        let cli = Cli::try_parse_from(std::iter::once("server").chain(args.iter().copied()))
            .map_err(|e| e.to_string())?;
        cli.serve.validate().map_err(|e| e.to_string())
    }

    #[test]
    fn flags_that_do_not_go_together_are_refused_by_name() {
        assert_eq!(parse(&[]), Ok(()));
        assert_eq!(
            parse(&[
                "--disaggregation-mode",
                "decode",
                "--disaggregation-bootstrap",
                "127.0.0.1:1"
            ]),
            Ok(())
        );
        let found = ["--disaggregation-mode", "decode", "--discovery", "etcd://a:1/n"];
        assert_eq!(parse(&found), Ok(()));
        assert_eq!(
            parse(&[&found[2..], &["--host", "0.0.0.0", "--advertise-host", "h"]].concat()),
            Ok(())
        );
        for (args, says) in [
            (&["--disaggregation-mode", "decode"][..], "needs --disaggregation-bootstrap"),
            (&["--disaggregation-bootstrap", "a:1"], "not both"),
            (
                &["--disaggregation-mode", "decode", "--disaggregation-bootstrap", "nowhere"],
                "HOST:PORT expected",
            ),
            (
                &["--disaggregation-mode", "decode", "--disaggregation-bootstrap", "127.0.0.1:0"],
                "HOST:PORT expected",
            ),
            (
                &["--disaggregation-mode", "decode", "--disaggregation-bootstrap", "http://a:1"],
                "without http://",
            ),
            (&["--discovery", "etcd://a:1"], "the namespace is missing"),
            (&["--discovery", "etcd://a:1/n", "--host", "0.0.0.0"], "give --advertise-host"),
            (&["--discovery", "http://a:1", "--host", "::"], "give --advertise-host"),
            (&["--advertise-host", "a"], "see --discovery"),
            (&["--served-model-name", ""], "--served-model-name"),
            (&["--index-k-dtype", "fp5"], "fp5"),
            (&["--numerics", "exact"], "exact"),
            (&["--chunked-prefill-size", "0"], "0"),
            (&["--port", "70000"], "70000"),
            (&["--threads", "0"], "0"),
            (&["--kv-events-config", r#"{"hwm":0}"#], "hwm: a number of 1"),
            (
                &["--disable-radix-cache", "--kv-events-config", r#"{"publisher":"zmq"}"#],
                "--disable-radix-cache",
            ),
        ] {
            let error = parse(args).expect_err(says);
            assert!(error.contains(says), "{args:?}: {error}");
        }
    }

    #[test]
    fn a_taken_address_is_said_once_and_with_what_to_do() {
        let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = taken.local_addr().unwrap().port();
        let cause = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap_err();
        let error = ConfigError::listen("127.0.0.1", port, "--port", &cause);
        assert_eq!(
            error.to_string(),
            format!(
                "address 127.0.0.1:{port} is in use: stop the process that listens there, or give \
                 another --port (0 picks a free port)"
            )
        );
        assert!(std::error::Error::source(&error).is_none(), "its cause would be said again");
        let other = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        let error = ConfigError::listen("::1", 80, "--port", &other).to_string();
        assert!(error.starts_with("address [::1]:80 cannot be listened on (permission"), "{error}");
    }

    #[test]
    fn ages_and_layouts_are_read_whole_or_not_at_all() {
        assert_eq!(duration("7d"), Ok(Duration::from_secs(7 * 86_400)));
        assert_eq!(duration("12h"), Ok(Duration::from_secs(43_200)));
        assert_eq!(duration("30m"), Ok(Duration::from_secs(1800)));
        for bad in ["", "7", "d", "-1d", "1.5h", "7 d", "7days", "999999999999999999d"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
        let text = "00112233445566778899aabbccddeeff";
        assert_eq!(fingerprint(text).map(|keep| keep.to_string()), Ok(text.to_owned()));
        for bad in ["", "00", "+0112233445566778899aabbccddeeff", &text.replace('f', "g")] {
            assert!(fingerprint(bad).is_err(), "{bad}");
        }
        assert_eq!(not_negative("0"), Ok(0.0));
        assert!(not_negative("-1").is_err() && not_negative("nan").is_err());
    }

    #[test]
    fn local_addresses_are_known() {
        assert!(is_local("127.0.0.1:8998") && is_local("LocalHost:1") && is_local("[::1]:1"));
        assert!(!is_local("10.0.0.1:8998"));
    }
}
