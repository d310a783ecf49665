//! The `server` program: flags, start, signals, exit codes.

use anyhow::Context;
use dsv4_server::cache_command::{self, CacheEnd};
use dsv4_server::clock::wall_time;
use dsv4_server::config::layers::{LayerError, Layered, Setting};
use dsv4_server::config::{
    self, CacheCommand, Command, ConfigError, EdgeArgs, LogArgs, LogFormat, Mode, RouterArgs,
    ServeArgs, VerifyArgs,
};
use dsv4_server::engine::{Engine, Health};
use dsv4_server::http::starting::Starting;
use dsv4_server::http::{self, Edge, HEADER_TIMEOUT, HttpConfig};
use dsv4_server::node::found::{self, Announced};
use dsv4_server::node::{Node, NodeEngine, NodeOptions, Published, Tell};
use dsv4_server::router::{ReverseProxy, RouterConfig};
use dsv4_server::verify_command::{self, VerifyEnd};
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{oneshot, watch};
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

pub(crate) fn main() -> ExitCode {
    abort_on_panic();
    let Layered { cli, settings, unknown } = match config::read() {
        Ok(layered) => layered,
        Err(error) => return usage(&error),
    };
    let result = match cli.command {
        Some(Command::Router(args)) => run_router(&args, &settings, &unknown),
        Some(Command::Cache(command)) => return run_cache(&command),
        Some(Command::Verify(args)) => return run_verify(&args),
        None => run_worker(&cli.serve, &settings, &unknown),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

/// Says what is wrong with the flags, or the help that was asked for.
fn usage(error: &LayerError) -> ExitCode {
    if let LayerError::Usage { error, note } = error {
        // Nowhere to say it means nobody to hear it.
        let _ = error.print();
        if let Some(note) = note {
            warn_of(note.trim_end());
        }
        return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(USAGE));
    }
    warn_of(&format!("error: {error}"));
    ExitCode::from(USAGE)
}

/// Exit code of wrong usage, clap's.
const USAGE: u8 = 2;

/// Exit code of a command that could not do what was asked; clap's for wrong usage is the same.
const NOT_DONE: u8 = 2;
/// Exit code of an audit that found nothing wrong and could not look at all that it was to look at.
const NOT_ALL: u8 = 3;

fn run_cache(command: &CacheCommand) -> ExitCode {
    let end = cache_command::run(command, wall_time(), &mut std::io::stdout().lock());
    match end {
        Ok(CacheEnd::Right) => ExitCode::SUCCESS,
        Ok(CacheEnd::Damaged) => ExitCode::FAILURE,
        Ok(CacheEnd::Unreadable) => ExitCode::from(NOT_DONE),
        Err(error) => {
            complain(&error.into());
            ExitCode::from(NOT_DONE)
        }
    }
}

fn run_verify(args: &VerifyArgs) -> ExitCode {
    match verify_command::run(args, &mut std::io::stdout().lock()) {
        Ok(VerifyEnd::Right) => ExitCode::SUCCESS,
        Ok(VerifyEnd::Wrong) => ExitCode::FAILURE,
        Ok(VerifyEnd::Partly) => ExitCode::from(NOT_ALL),
        Err(error) => {
            complain(&error.into());
            ExitCode::from(NOT_DONE)
        }
    }
}

fn complain(error: &anyhow::Error) {
    warn_of(&format!("error: {}", said_once(error)));
}

#[expect(clippy::print_stderr, reason = "the last word of a program that could not start")]
fn warn_of(line: &str) {
    eprintln!("{line}");
}

/// An error with its causes, without those whose text an error above them has in its own.
fn said_once(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[expect(clippy::print_stdout, reason = "the lines that tell a person what to do next")]
fn say(line: &str) {
    println!("{line}");
}

fn init_log(args: &LogArgs) {
    let level = args.log_level;
    let ansi = std::io::stderr().is_terminal();
    // It tells of each repetition; what came of them in the end is told by us.
    let filter = Targets::new()
        .with_default(level)
        .with_target("object_store", level.min(LevelFilter::WARN));
    let lines = tracing_subscriber::fmt::layer().with_ansi(ansi).with_writer(std::io::stderr);
    let lines = match args.log_format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    tracing_subscriber::registry().with(lines.with_filter(filter)).init();
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("http")
        .enable_all()
        .build()
        .context("start the HTTP threads")
}

async fn listen(host: &str, port: u16) -> Result<TcpListener, ConfigError> {
    listen_for(host, port, "--port").await
}

async fn listen_for(host: &str, port: u16, flag: &'static str) -> Result<TcpListener, ConfigError> {
    let bound = TcpListener::bind((host, port)).await;
    bound.map_err(|cause| ConfigError::listen(host, port, flag, &cause))
}

/// A file that would grow beyond the limit of a process is an error of the write then, and not the
/// end of the process.
fn survive_file_limit(runtime: &tokio::runtime::Runtime) -> anyhow::Result<()> {
    let _guard = runtime.enter();
    let kind = SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw());
    // The handler stays when its listener has gone.
    signal(kind).map(drop).context("handle the signal of the file size limit")
}

/// Says which flags are not left at their defaults, and where they come from.
fn log_settings(settings: &[Setting], unknown: &[String]) {
    for variable in unknown {
        tracing::warn!("no flag has this variable: {variable}");
    }
    let flags: Vec<String> = settings.iter().map(ToString::to_string).collect();
    tracing::info!("flags: {}", if flags.is_empty() { "none".to_owned() } else { flags.join(" ") });
}

fn run_worker(args: &ServeArgs, settings: &[Setting], unknown: &[String]) -> anyhow::Result<()> {
    init_log(&args.log);
    log_settings(settings, unknown);
    // What is wrong with the flags is said before a port is taken or weights are read.
    Node::check(args)?;
    let access = args.access.access()?;
    let traces = args.trace.traces(args.disaggregation_mode.name())?;
    let runtime = runtime()?;
    survive_file_limit(&runtime)?;
    let edge = edge(&args.edge, &runtime)?;
    let listener = runtime.block_on(listen(&args.host, args.port))?;
    let address = listener.local_addr().context("read the port that was given")?;
    let address = Address { scheme: scheme(&edge), socket: address };
    let counts = Arc::clone(&edge.counts);
    // Whoever asks while the model is loaded is told so.
    let starting = Starting::counted("loading the model", Arc::clone(&counts));
    let (begin_stop, stopped) = oneshot::channel();
    let served = {
        let app = http::access::protect(starting.app(), access.counted(Arc::clone(&counts)));
        // The sender lives until serving is to stop.
        let stop = async { drop(stopped.await) };
        runtime.spawn(serve(listener, app, edge, stop, Duration::from_secs(args.drain_timeout)))
    };
    // A signal is heard from here on: also while the model is loaded, and as soon as the line is read that
    // says that the worker is ready.
    let mut signalled = {
        let _context = runtime.enter();
        Box::pin(terminated())
    };
    let Some(mut node) = load(args, &starting, &runtime, &mut signalled)? else {
        tracing::info!("stopped by a signal while the model was loaded; nothing was served");
        return Ok(());
    };
    join(&node, args.disaggregation_mode, &runtime)?;
    if let Some(traces) = &traces {
        node.engine().record(&traces.sender);
    }
    let sampling = traces.as_ref().map(|traces| traces.sampling);
    let config = HttpConfig { traces: sampling, counts, ..HttpConfig::default() };
    starting.hand_over(endpoints(args, settings, &node, config));
    announce(&node, &runtime, address);
    hint(&node, args, address);
    let address = address.socket;
    let announced = {
        let _context = runtime.enter();
        found::announce(args, &mut node, address)?
    };
    let leaving = announced.as_ref().map(Announced::stopper);
    let (engine, seconds) = (node.engine(), args.drain_timeout);
    let served = async move {
        signalled.await;
        drain(engine, leaving, seconds);
        // Nobody listens when serving has ended by itself.
        let _ = begin_stop.send(());
        served.await
    };
    runtime.block_on(served).context("serve HTTP")?;
    if let Some(announced) = announced {
        runtime.block_on(leave(announced));
    }
    node.shutdown();
    if let Some(traces) = traces {
        traces.sender.close();
    }
    tracing::info!("stopped");
    Ok(())
}

/// Tells others that this worker has left. Whoever cannot be told finds out by himself.
async fn leave(announced: Announced) {
    let told = tokio::time::timeout(LAST_WORDS, announced.ended()).await.is_ok();
    tracing::debug!(told, "discovery: this worker has left");
}

/// Takes no new requests, and ends the running ones after so many seconds or at a second signal. Must
/// be called on a Tokio runtime.
fn drain(engine: Arc<NodeEngine>, leaving: Option<watch::Sender<bool>>, seconds: u64) {
    engine.drain();
    // Others learn at once that they are not to ask it any more.
    if let Some(leaving) = leaving {
        leaving.send_replace(true);
    }
    let open = engine.open_requests();
    tracing::info!(open, seconds, "draining: no new requests, the running ones may end");
    tokio::spawn(async move {
        let limit = tokio::time::sleep(Duration::from_secs(seconds));
        tokio::select! {
            () = terminated() => tracing::warn!("second signal: running requests are ended"),
            () = limit => tracing::warn!(seconds, "running requests are ended"),
        }
        engine.stop_now();
    });
}

/// Loads the model and starts the workers; none if the process is told to end before that is done. It is
/// done on a thread of its own, since it cannot be broken off.
fn load(
    args: &ServeArgs,
    starting: &Starting,
    runtime: &tokio::runtime::Runtime,
    signalled: &mut (impl Future<Output = ()> + Unpin),
) -> anyhow::Result<Option<Node>> {
    let (args, told) = (args.clone(), starting.clone());
    let (done, loaded) = oneshot::channel();
    let load = move || {
        let tell: Tell = Box::new(move |what| told.say(what));
        let options = NodeOptions { tell: Some(tell), ..NodeOptions::default() };
        // Whoever waited has been told to end.
        drop(done.send(Node::start_with(&args, &options)));
    };
    let thread = std::thread::Builder::new().name("load".to_owned());
    thread.spawn(load).context("start the thread that loads the model")?;
    runtime.block_on(async {
        tokio::select! {
            biased;
            () = signalled => Ok(None),
            loaded = loaded => loaded.context("load the model")?.map(Some),
        }
    })
}

/// The endpoints of a worker.
fn endpoints(
    args: &ServeArgs,
    settings: &[Setting],
    node: &Node,
    config: HttpConfig,
) -> axum::Router {
    let engine: Arc<dyn Engine> = node.engine();
    let config = HttpConfig {
        served_model_name: engine.info().model_id.clone(),
        default_thinking: args.default_thinking,
        recipe_sampling: args.recipe_sampling,
        strict_fields: args.strict_fields,
        max_body_bytes: args.edge.max_body_bytes(),
        about: args.about(settings),
        ..config
    };
    http::router(engine, node.tokenizer(), config)
}

/// How connections are treated. A certificate is read again whenever the process gets SIGHUP.
fn edge(args: &EdgeArgs, runtime: &tokio::runtime::Runtime) -> anyhow::Result<Edge> {
    let edge = args.edge()?;
    if let Some(tls) = edge.tls.clone() {
        let _context = runtime.enter();
        let mut hangup = signal(SignalKind::hangup()).context("hear SIGHUP")?;
        runtime.spawn(async move {
            while hangup.recv().await.is_some() {
                match tls.reload() {
                    Ok(()) => tracing::info!("the certificate was read again"),
                    Err(error) => tracing::warn!("the old certificate stays in use: {error}"),
                }
            }
        });
    }
    Ok(edge)
}

fn scheme(edge: &Edge) -> &'static str {
    if edge.tls.is_some() { "https" } else { "http" }
}

/// Where a process listens, as a client would write it.
#[derive(Clone, Copy, Debug)]
struct Address {
    scheme: &'static str,
    socket: std::net::SocketAddr,
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}://{}", self.scheme, self.socket)
    }
}

/// Says who may connect where, and what to try.
fn hint(node: &Node, args: &ServeArgs, address: Address) {
    if let Some(bootstrap) = node.bootstrap() {
        say(&format!("decode workers connect to {bootstrap}"));
    }
    if let Some(line) = node.published().and_then(told) {
        say(&line);
    }
    if args.disaggregation_mode != Mode::Prefill {
        say(&example(args, address, &node.engine().info().model_id));
    }
}

/// A request that can be pasted into a shell; a key is not written, but taken from where it may be.
fn example(args: &ServeArgs, address: Address, model: &str) -> String {
    let mut line = format!("try: curl {address}/v1/chat/completions");
    if let Some(certificate) = &args.edge.ssl_certfile {
        let path = certificate.display().to_string().replace('\'', "'\\''");
        line += &format!(" --cacert '{path}'");
    }
    if args.access.asks_for_keys() {
        line += " -H \"authorization: Bearer $DSV4_API_KEY\"";
    }
    let body = format!(
        "{{\"model\":\"{model}\",\"messages\":[{{\"role\":\"user\",\"content\":\"Hi\"}}]}}"
    );
    format!("{line} -H 'content-type: application/json' -d '{}'", body.replace('\'', "'\\''"))
}

/// Where routers hear what is in the cache.
fn told(published: Published) -> Option<String> {
    let Published { events, replay } = published;
    let events = events.map(|address| format!("KV events are published on tcp://{address}"));
    let replay = replay.map(|address| format!("missed KV events are replayed on tcp://{address}"));
    match (events, replay) {
        (Some(events), Some(replay)) => Some(format!("{events}, {replay}")),
        (one, other) => one.or(other),
    }
}

/// Waits, in a process with both workers, for them to find each other: a prompt that came before would
/// be computed by the decode worker, without the hand-off that this mode is for.
fn join(node: &Node, mode: Mode, runtime: &tokio::runtime::Runtime) -> anyhow::Result<()> {
    if mode != Mode::Both {
        return Ok(());
    }
    let joined = until_ready(node.engine());
    // The timer needs the runtime that the block runs in.
    let joined = runtime.block_on(async { tokio::time::timeout(JOIN_LIMIT, joined).await });
    let seconds = JOIN_LIMIT.as_secs();
    joined.with_context(|| {
        format!("the workers of this process did not find each other in {seconds} seconds")
    })?
}

/// Says where the worker serves, and that it is ready once it is. A decode worker whose prefill workers
/// are elsewhere serves at once and says so; `/health` answers 503 until then.
fn announce(node: &Node, runtime: &tokio::runtime::Runtime, address: Address) {
    let engine = node.engine();
    let ready = format!("{} is ready on {address} ({})", engine.info().model_id, node.summary());
    if let Health::Starting(why) = engine.health() {
        say(&format!("{} listens on {address} (not ready: {why})", engine.info().model_id));
        runtime.spawn(async move {
            if until_ready(engine).await.is_ok() {
                say(&ready);
            }
        });
    } else {
        say(&ready);
    }
}

/// How long the two workers of one process may take to find each other.
const JOIN_LIMIT: Duration = Duration::from_secs(60);

/// Waits until the process is ready; an error if it never will be.
async fn until_ready(engine: Arc<NodeEngine>) -> anyhow::Result<()> {
    loop {
        match engine.health() {
            Health::Ready => return Ok(()),
            Health::Starting(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            Health::Draining => anyhow::bail!("the worker is shutting down"),
            Health::Failed(why) => anyhow::bail!(why),
        }
    }
}

fn run_router(args: &RouterArgs, settings: &[Setting], unknown: &[String]) -> anyhow::Result<()> {
    init_log(&args.log);
    log_settings(settings, unknown);
    let access = args.access.access()?;
    let runtime = runtime()?;
    let edge = edge(&args.edge, &runtime)?;
    runtime.block_on(async {
        let traces = args.trace.traces("router")?;
        let counts = Arc::clone(&edge.counts);
        let access = access.counted(Arc::clone(&counts));
        let mut config = RouterConfig { traces: traces.clone(), counts, ..args.router_config() };
        config.about.flags = settings.to_vec();
        let router = ReverseProxy::new(config)?;
        let listener = listen(&args.host, args.port).await?;
        let address = listener.local_addr().context("read the port that was given")?;
        let registry = match args.registry_port {
            Some(port) => Some(listen_for(&args.host, port, "--registry-port").await?),
            None => None,
        };
        tokio::spawn(router.clone().watch_workers());
        if let Some(url) = &args.discovery {
            tokio::spawn(router.discover(url.clone()));
        }
        // A signal that comes as soon as the line below is read is heard.
        let (signalled, draining) = (terminated(), router.clone());
        let stop = async move {
            signalled.await;
            draining.drain();
        };
        let address = Address { scheme: scheme(&edge), socket: address };
        let count = args.workers.len();
        let plural = if count == 1 { "" } else { "s" };
        say(&format!("router listens on {address} ({count} worker{plural} named)"));
        if let Some(listener) = registry {
            let address = listener.local_addr().context("read the port that was given")?;
            say(&format!("workers register with --discovery http://{address}"));
            let never = std::future::pending();
            tokio::spawn(http::serve(listener, router.registry(), HEADER_TIMEOUT, never));
        }
        let app = http::access::protect(router.app(), access);
        drop(router);
        serve(listener, app, edge, stop, ROUTER_DRAIN).await;
        if let Some(traces) = traces {
            // It waits for a thread.
            tokio::task::spawn_blocking(move || traces.sender.close()).await?;
        }
        Ok(())
    })
}

/// How long a router waits for running answers after a signal.
const ROUTER_DRAIN: Duration = Duration::from_secs(30);
/// How long a client has to take its last event after the requests were ended.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Serves until `stop`, then as long as requests run, but no longer than `drain`: a connection that
/// neither sends nor reads must not keep the process.
async fn serve(
    listener: TcpListener,
    app: axum::Router,
    edge: Edge,
    stop: impl Future<Output = ()> + Send + 'static,
    drain: Duration,
) {
    let (stopped, heard) = oneshot::channel();
    let stop = async move {
        stop.await;
        // Nobody listens when serving has ended by itself.
        let _ = stopped.send(());
    };
    let limit = async {
        // Without a signal there is no limit.
        if heard.await.is_err() {
            std::future::pending::<()>().await;
        }
        tokio::select! {
            () = tokio::time::sleep(drain) => {}
            () = terminated() => {}
        }
        tokio::time::sleep(LAST_WORDS).await;
    };
    tokio::select! {
        () = http::serve_with(listener, app, edge, stop) => {}
        () = limit => tracing::warn!("connections are left open"),
    }
}

/// Ends the process when a thread panics that others rely on (workers, hand-off): it must not look
/// alive. A panic in an HTTP task ends that request only.
fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        if std::thread::current().name() != Some("http") {
            std::process::abort();
        }
    }));
}

/// Resolves at SIGTERM or SIGINT. Signals are heard from the call on, which needs a runtime.
fn terminated() -> impl Future<Output = ()> + Send + 'static {
    use tokio::signal::unix::{SignalKind, signal};
    let (term, int) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()));
    async {
        match (term, int) {
            (Ok(mut term), Ok(mut int)) => {
                tokio::select! {
                    _ = term.recv() => {}
                    _ = int.recv() => {}
                }
            }
            (Err(error), _) | (_, Err(error)) => {
                tracing::error!(%error, "signals cannot be heard; stop the process with SIGKILL");
                std::future::pending::<()>().await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Signal, getpid, kill_process};

    #[test]
    fn a_signal_between_the_call_and_the_first_look_is_heard() {
        let runtime = runtime().unwrap();
        let signalled = {
            let _context = runtime.enter();
            terminated()
        };
        // Ends this process if nobody listens yet.
        kill_process(getpid(), Signal::TERM).unwrap();
        runtime.block_on(async {
            tokio::time::timeout(Duration::from_secs(30), signalled).await.expect("it was heard");
        });
    }
}
