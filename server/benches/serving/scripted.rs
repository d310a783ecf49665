//! The two servers that are compared: ours over an engine that says what is in its script, and one
//! of axum that sends the bytes which ours has sent, at the same times.

use super::streams::{Mode, STEP, STREAMS, TOKENS};
use anyhow::Context as _;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::response::Response;
use axum::routing::post;
use dsv4_model::sample::Sampled;
use dsv4_model::text::Tokenizer;
use dsv4_server::audit::{Auditing, Wish};
use dsv4_server::engine::{
    CancelOnDrop, Engine, EngineInfo, Event, FinishReason, FlushReport, Flushing, GenerateRequest,
    Generation, Health, Stats, SubmitError, Usage,
};
use dsv4_server::evidence::Witnessing;
use dsv4_server::http::{HttpConfig, router, serve as serve_http};
use futures_util::stream;
use std::convert::Infallible;
use std::io::Read as _;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// What a model might say.
const TEXT: &str = "The quick brown fox jumps over the lazy dog, and then it thinks about prefill \
                    and decode workers: what arrived is what was meant. ";

/// Sends each stream its next piece every [`STEP`], once all are there; as an engine's steps do.
fn feed<T: Send + 'static>(
    streams: Receiver<UnboundedSender<T>>,
    pieces: impl Fn(usize) -> T + Send + 'static,
    count: usize,
    wait_for: usize,
) {
    std::thread::spawn(move || {
        loop {
            let Ok(senders) = (0..wait_for).map(|_| streams.recv()).collect::<Result<Vec<_>, _>>()
            else {
                return;
            };
            let started = std::time::Instant::now();
            for n in 0..count {
                for sender in &senders {
                    // A client that has gone shows on the other side.
                    let _ = sender.send(pieces(n));
                }
                let next = STEP * (n as u32 + 1);
                std::thread::sleep(next.saturating_sub(started.elapsed()));
            }
        }
    });
}

/// Says its script to whoever asks.
#[derive(Debug)]
struct Scripted {
    info: EngineInfo,
    streams: Mutex<Sender<UnboundedSender<Event>>>,
}

impl Engine for Scripted {
    fn submit(&self, _: GenerateRequest) -> Result<Generation, SubmitError> {
        let (events, receiver) = unbounded_channel();
        let streams = self.streams.lock().map_err(|_| SubmitError::Draining)?;
        streams.send(events).map_err(|_| SubmitError::Draining)?;
        Ok(Generation { events: receiver, cancel: CancelOnDrop::new(|| {}) })
    }

    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn stats(&self) -> Stats {
        Stats { metrics: Vec::new(), workers: Vec::new() }
    }

    fn health(&self) -> Health {
        Health::Ready
    }

    fn testify(&self, _: &str) -> Witnessing {
        Box::pin(async { Vec::new() })
    }

    fn audit(&self, _: Wish) -> Auditing {
        Box::pin(async { Vec::new() })
    }

    fn flush_cache(&self, _: bool) -> Flushing {
        Box::pin(async { FlushReport::default() })
    }
}

fn engine(tokenizer: &Tokenizer, wait_for: usize) -> anyhow::Result<Scripted> {
    let (streams, opened) = channel();
    let said = tokenizer.encode_with_special(&TEXT.repeat(TOKENS / 16))?;
    anyhow::ensure!(said.len() >= TOKENS, "a script of {} tokens", said.len());
    let event = move |n: usize| match said.get(n).filter(|_| n < TOKENS) {
        Some(&token) => Event::Token(Sampled { token, logprob: 0.0, top: Vec::new() }),
        None => {
            let usage = Usage {
                prompt_tokens: 10,
                completion_tokens: TOKENS as u32,
                cached_tokens: 0,
                cached_below: [0; 3],
            };
            Event::Finished { reason: FinishReason::Length, usage }
        }
    };
    feed(opened, event, TOKENS + 1, wait_for);
    let info = EngineInfo {
        model_id: "dsv4-mini".to_owned(),
        context_length: 16_384,
        vocab_size: u32::try_from(tokenizer.vocab_size())?,
        eos_token: tokenizer.token_id("<｜end▁of▁sentence｜>").context("an end token")?,
        mode: "null",
        numerics: "official".to_owned(),
        index_key_type: "fp4".to_owned(),
        fingerprint: "00112233445566778899aabbccddeeff".to_owned(),
        created: 1_700_000_000,
    };
    Ok(Scripted { info, streams: Mutex::new(streams) })
}

/// A stream of the plain server.
#[derive(Clone)]
struct Plain(Arc<Mutex<Sender<UnboundedSender<Bytes>>>>);

async fn plain(State(Plain(streams)): State<Plain>) -> Response {
    let (sender, receiver): (_, UnboundedReceiver<Bytes>) = unbounded_channel();
    if let Ok(streams) = streams.lock() {
        // The end of the thread ends the stream too.
        let _ = streams.send(sender);
    }
    let body = stream::unfold(receiver, |mut receiver| async {
        Some((Ok::<_, Infallible>(receiver.recv().await?), receiver))
    });
    let mut response = Response::new(Body::from_stream(body));
    let kind = axum::http::HeaderValue::from_static("text/event-stream");
    response.headers_mut().insert(axum::http::header::CONTENT_TYPE, kind);
    response
}

/// Serves until standard input ends; says its port first.
pub(super) fn serve(mode: Mode) -> anyhow::Result<()> {
    // One thread, so that what is measured is one core's work.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let transcript = mode.transcript()?;
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        println!("{}", listener.local_addr()?.port());
        let config = HttpConfig::default();
        let header_timeout = config.header_timeout;
        let app = match transcript {
            None => {
                let dir = Path::new(env!("CARGO_MANIFEST_DIR"));
                let dir = dir.join("../models/dsv4-mini/checkpoint");
                let tokenizer = Arc::new(Tokenizer::from_dir(&dir)?);
                let wait_for = if mode == Mode::One { 1 } else { STREAMS };
                router(Arc::new(engine(&tokenizer, wait_for)?), tokenizer, config)
            }
            Some(pieces) => {
                let (streams, opened) = channel();
                let count = pieces.len();
                feed(opened, move |n: usize| pieces[n].clone(), count, STREAMS);
                let state = Plain(Arc::new(Mutex::new(streams)));
                axum::Router::new().fallback(post(plain)).with_state(state)
            }
        };
        let closed = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
        serve_http(listener, app, header_timeout, async move {
            let _ = closed.await;
        })
        .await;
        Ok(())
    })
}
