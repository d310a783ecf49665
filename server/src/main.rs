//! The `server` program: flags, start, signals, exit codes.

use anyhow::Context;
use dsv4_server::cache_command::{self, CacheEnd};
use dsv4_server::clock::wall_time;
use dsv4_server::config::layers::{LayerError, Layered, Setting};
use dsv4_server::config::{self, CacheCommand, Command, ConfigError, Mode, RouterArgs, ServeArgs};
use dsv4_server::engine::{Engine, Health};
use dsv4_server::http::{self, HEADER_TIMEOUT, HttpConfig};
use dsv4_server::node::found::{self, Announced};
use dsv4_server::node::{Node, NodeEngine, Published};
use dsv4_server::router::{ReverseProxy, RouterConfig};
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::Layer as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

fn main() -> ExitCode {
    abort_on_panic();
    let Layered { cli, settings, unknown } = match config::read() {
        Ok(layered) => layered,
        Err(error) => return usage(&error),
    };
    let result = match cli.command {
        Some(Command::Router(args)) => run_router(&args, &settings, &unknown),
        Some(Command::Cache(command)) => return run_cache(&command),
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

/// Exit code of a cache command that could not do what was asked; clap's for wrong usage is the same.
const CACHE_NOT_DONE: u8 = 2;

fn run_cache(command: &CacheCommand) -> ExitCode {
    let end = cache_command::run(command, wall_time(), &mut std::io::stdout().lock());
    match end {
        Ok(CacheEnd::Right) => ExitCode::SUCCESS,
        Ok(CacheEnd::Damaged) => ExitCode::FAILURE,
        Ok(CacheEnd::Unreadable) => ExitCode::from(CACHE_NOT_DONE),
        Err(error) => {
            complain(&error.into());
            ExitCode::from(CACHE_NOT_DONE)
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

fn init_log(level: LevelFilter) {
    let ansi = std::io::stderr().is_terminal();
    // It tells of each repetition; what came of them in the end is told by us.
    let filter = Targets::new()
        .with_default(level)
        .with_target("object_store", level.min(LevelFilter::WARN));
    let lines = tracing_subscriber::fmt::layer().with_ansi(ansi).with_writer(std::io::stderr);
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
    init_log(args.log_level);
    log_settings(settings, unknown);
    // What is wrong with the flags is said before a port is taken or weights are read.
    Node::check(args)?;
    let access = args.access.access()?;
    let traces = args.trace.traces(args.disaggregation_mode.name())?;
    let runtime = runtime()?;
    survive_file_limit(&runtime)?;
    let listener = runtime.block_on(listen(&args.host, args.port))?;
    let address = listener.local_addr().context("read the port that was given")?;
    let mut node = Node::start(args)?;
    let engine: Arc<dyn Engine> = node.engine();
    let info = engine.info().clone();
    if let Some(traces) = &traces {
        node.engine().record(&traces.sender);
    }
    let config = HttpConfig {
        served_model_name: info.model_id.clone(),
        default_thinking: args.default_thinking,
        recipe_sampling: args.recipe_sampling,
        traces: traces.as_ref().map(|traces| traces.sampling),
        ..HttpConfig::default()
    };
    let app = http::access::protect(http::router(engine, node.tokenizer(), config), access);
    // A signal that comes as soon as the line below is read is heard.
    let signalled = {
        let _context = runtime.enter();
        terminated()
    };
    announce(&node, args.disaggregation_mode, &runtime, address)?;
    hint(&node, args.disaggregation_mode, address);
    let announced = {
        let _context = runtime.enter();
        found::announce(args, &mut node, address)?
    };
    let leaving = announced.as_ref().map(Announced::stopper);
    let draining = node.engine();
    let seconds = args.drain_timeout;
    let stop = async move {
        signalled.await;
        draining.drain();
        // Others learn at once that they are not to ask it any more.
        if let Some(leaving) = leaving {
            leaving.send_replace(true);
        }
        let open = draining.open_requests();
        tracing::info!(open, seconds, "draining: no new requests, the running ones may end");
        tokio::spawn(async move {
            let limit = tokio::time::sleep(Duration::from_secs(seconds));
            tokio::select! {
                () = terminated() => tracing::warn!("second signal: running requests are ended"),
                () = limit => tracing::warn!(seconds, "running requests are ended"),
            }
            draining.stop_now();
        });
    };
    runtime.block_on(serve(listener, app, stop, Duration::from_secs(seconds)));
    if let Some(announced) = announced {
        // Whoever cannot be told finds out by himself.
        let told = async { tokio::time::timeout(LAST_WORDS, announced.ended()).await.is_ok() };
        tracing::debug!(told = runtime.block_on(told), "discovery: this worker has left");
    }
    node.shutdown();
    if let Some(traces) = traces {
        traces.sender.close();
    }
    tracing::info!("stopped");
    Ok(())
}

/// Says who may connect where, and what to try.
fn hint(node: &Node, mode: Mode, address: std::net::SocketAddr) {
    if let Some(bootstrap) = node.bootstrap() {
        say(&format!("decode workers connect to {bootstrap}"));
    }
    if let Some(line) = node.published().and_then(told) {
        say(&line);
    }
    if mode != Mode::Prefill {
        say(&format!(
            "try: curl http://{address}/v1/chat/completions -H 'content-type: application/json' \
             -d '{{\"model\":\"{}\",\"messages\":[{{\"role\":\"user\",\"content\":\"Hi\"}}]}}'",
            node.engine().info().model_id
        ));
    }
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

/// Says where the worker serves, and that it is ready once it is.
///
/// A process with both workers waits for them to find each other: a prompt that came before would be
/// computed by the decode worker, without the hand-off that this mode is for. A decode worker whose
/// prefill workers are elsewhere serves at once and says so; `/health` answers 503 until then.
fn announce(
    node: &Node,
    mode: Mode,
    runtime: &tokio::runtime::Runtime,
    address: std::net::SocketAddr,
) -> anyhow::Result<()> {
    let engine = node.engine();
    let ready =
        format!("{} is ready on http://{address} ({})", engine.info().model_id, node.summary());
    if mode == Mode::Both {
        let joined = until_ready(Arc::clone(&engine));
        // The timer needs the runtime that the block runs in.
        let joined = runtime.block_on(async { tokio::time::timeout(JOIN_LIMIT, joined).await });
        let seconds = JOIN_LIMIT.as_secs();
        joined.with_context(|| {
            format!("the workers of this process did not find each other in {seconds} seconds")
        })??;
    }
    if let Health::Starting(why) = engine.health() {
        say(&format!("{} listens on http://{address} (not ready: {why})", engine.info().model_id));
        runtime.spawn(async move {
            if until_ready(engine).await.is_ok() {
                say(&ready);
            }
        });
    } else {
        say(&ready);
    }
    Ok(())
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
    init_log(args.log_level);
    log_settings(settings, unknown);
    let access = args.access.access()?;
    let runtime = runtime()?;
    runtime.block_on(async {
        let traces = args.trace.traces("router")?;
        let config = RouterConfig { traces: traces.clone(), ..args.router_config() };
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
        let stop = terminated();
        say(&format!("router is ready on http://{address} ({} workers)", args.workers.len()));
        if let Some(listener) = registry {
            let address = listener.local_addr().context("read the port that was given")?;
            say(&format!("workers register with --discovery http://{address}"));
            let never = std::future::pending();
            tokio::spawn(http::serve(listener, router.registry(), HEADER_TIMEOUT, never));
        }
        let app = http::access::protect(router.app(), access);
        drop(router);
        serve(listener, app, stop, ROUTER_DRAIN).await;
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
    stop: impl Future<Output = ()> + Send + 'static,
    drain: Duration,
) {
    let (stopped, heard) = tokio::sync::oneshot::channel();
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
        () = http::serve(listener, app, HEADER_TIMEOUT, stop) => {}
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
