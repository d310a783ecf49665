//! The `server` program: flags, start, signals, exit codes.

use anyhow::Context;
use clap::Parser;
use dsv4_server::config::{Cli, Command, Mode, RouterArgs, ServeArgs};
use dsv4_server::engine::Engine;
use dsv4_server::http::{self, HttpConfig};
use dsv4_server::node::Node;
use dsv4_server::router::{self, RouterConfig};
use std::process::ExitCode;
use std::sync::Arc;
use tokio::net::TcpListener;
use tracing_subscriber::filter::LevelFilter;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        Some(Command::Router(args)) => run_router(&args),
        None => run_worker(&cli.serve),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

#[expect(clippy::print_stderr, reason = "the last word of a program that could not start")]
fn complain(error: &anyhow::Error) {
    eprintln!("error: {error:#}");
}

#[expect(clippy::print_stdout, reason = "the lines that tell a person what to do next")]
fn say(line: &str) {
    println!("{line}");
}

fn init_log(level: LevelFilter) {
    tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).init();
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("http")
        .enable_all()
        .build()
        .context("start the HTTP threads")
}

async fn listen(host: &str, port: u16) -> anyhow::Result<TcpListener> {
    TcpListener::bind((host, port)).await.with_context(|| format!("listen on {host}:{port}"))
}

fn run_worker(args: &ServeArgs) -> anyhow::Result<()> {
    init_log(args.log_level);
    args.validate()?;
    let runtime = runtime()?;
    let listener = runtime.block_on(listen(&args.host, args.port))?;
    let address = listener.local_addr().context("read the port that was given")?;
    let node = Node::start(args)?;
    let engine: Arc<dyn Engine> = node.engine();
    let info = engine.info().clone();
    let config = HttpConfig {
        served_model_name: info.model_id.clone(),
        default_thinking: args.default_thinking,
        recipe_sampling: args.recipe_sampling,
        ..HttpConfig::default()
    };
    let app = http::router(engine, node.tokenizer(), config);
    say(&format!("{} is ready on http://{address} ({})", info.model_id, node.summary()));
    if let Some(bootstrap) = node.bootstrap() {
        say(&format!("decode workers connect to {bootstrap}"));
    }
    if args.disaggregation_mode != Mode::Prefill {
        say(&format!(
            "try: curl http://{address}/v1/chat/completions -H 'content-type: application/json' \
             -d '{{\"model\":\"{}\",\"messages\":[{{\"role\":\"user\",\"content\":\"Hi\"}}]}}'",
            info.model_id
        ));
    }
    let draining = node.engine();
    let stop = async move {
        terminated().await;
        tracing::info!("draining: no new requests, the running ones end");
        draining.drain();
    };
    runtime.block_on(http::serve(listener, app, stop)).context("serve HTTP")?;
    node.shutdown();
    Ok(())
}

fn run_router(args: &RouterArgs) -> anyhow::Result<()> {
    init_log(args.log_level);
    let runtime = runtime()?;
    runtime.block_on(async {
        let listener = listen(&args.host, args.port).await?;
        let address = listener.local_addr().context("read the port that was given")?;
        let config = RouterConfig {
            workers: args.workers.clone(),
            max_queued_requests: args.max_queued_requests,
            ..RouterConfig::default()
        };
        let app = router::app(config)?;
        say(&format!("router is ready on http://{address} ({} workers)", args.workers.len()));
        http::serve(listener, app, terminated()).await.context("serve HTTP")
    })
}

/// Resolves at SIGTERM or SIGINT.
async fn terminated() {
    use tokio::signal::unix::{SignalKind, signal};
    let (term, int) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()));
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
