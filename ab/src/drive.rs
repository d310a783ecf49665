//! Asks a server what a plan says, and writes down what comes back.

use crate::judge::Ending;
use crate::record::Line;
use crate::sse::{Assembly, shortened};
use crate::workload::{Ask, Workload};
use reqwest::{Client, Response, StatusCode, header};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Most bytes of an answer's body that is no stream.
const BODY_MAX: usize = 8 << 20;
/// Longest wait for a connection.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// Longest time for what a server says of itself.
const GET_MAX: Duration = Duration::from_secs(60);

/// How a server is asked.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Base address, like `http://127.0.0.1:30000`.
    pub url: String,
    /// Key, if one is needed.
    pub api_key: Option<String>,
    /// Longest time for an answer.
    pub answer: Duration,
}

/// A client that cannot be made, or nobody who answers it.
#[derive(Debug, thiserror::Error)]
#[error("{}", chain(.0))]
pub struct ClientError(#[from] reqwest::Error);

/// Runs conversations of a workload against a server, at most so many at once; each line goes to `lines` as
/// soon as its request has ended. A conversation that met a refusal goes on: its history does not depend
/// on what was said.
///
/// # Errors
/// [`ClientError`].
pub async fn run(
    subject: Subject,
    (cell, workload, seed): (String, Workload, u64),
    sessions: Range<u32>,
    at_once: u32,
    lines: UnboundedSender<Line>,
) -> Result<(), ClientError> {
    let (first, begun) = (sessions.start, Instant::now());
    let client = client()
        // Requests do not share the fate of a connection.
        .pool_max_idle_per_host(0)
        .build()?;
    let next = Arc::new(AtomicU32::new(sessions.start));
    let mut clients = JoinSet::new();
    for _ in 0..at_once.min(sessions.len() as u32).max(1) {
        let (client, subject, lines) = (client.clone(), subject.clone(), lines.clone());
        let (cell, workload, next) = (cell.clone(), workload.clone(), Arc::clone(&next));
        let sessions = sessions.clone();
        clients.spawn(async move {
            loop {
                let session = next.fetch_add(1, Ordering::Relaxed);
                if session >= sessions.end {
                    return;
                }
                if let Some(burst) = workload.burst {
                    tokio::time::sleep_until((begun + burst.begin(session - first)).into()).await;
                }
                for ask in workload.session(seed, session) {
                    let line = ask_once(&client, &subject, &cell, &ask).await;
                    // Nobody wants to know any more.
                    if lines.send(line).is_err() {
                        return;
                    }
                }
            }
        });
    }
    while clients.join_next().await.is_some() {}
    Ok(())
}

async fn ask_once(client: &Client, subject: &Subject, cell: &str, ask: &Ask) -> Line {
    let begun = Instant::now();
    let mut first = None;
    let mut left = false;
    let answer = read_answer(client, subject, ask, (&mut first, &mut left), begun);
    let patience = ask.hangs_up_ms.map(|ms| Duration::from_millis(ms.into()));
    let longest = patience.map_or(subject.answer, |patience| patience.min(subject.answer));
    let ending = match timeout(longest, answer).await {
        Ok(ending) => ending,
        Err(_) if longest < subject.answer => {
            left = true;
            Ending::Lost("its client hung up".to_owned())
        }
        Err(_) => Ending::Lost(format!("no end within {} s", subject.answer.as_secs())),
    };
    let us = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    Line::new(cell, ask, ending, left, (first.map(us), us(begun.elapsed())))
}

async fn read_answer(
    client: &Client,
    subject: &Subject,
    ask: &Ask,
    (first, left): (&mut Option<Duration>, &mut bool),
    begun: Instant,
) -> Ending {
    let mut request = client
        .post(format!("{}/v1/chat/completions", subject.url.trim_end_matches('/')))
        .header(header::CONTENT_TYPE, "application/json")
        .body(ask.body.to_string());
    if let Some(key) = &subject.api_key {
        request = request.bearer_auth(key);
    }
    let response = match request.send().await {
        Ok(response) => response,
        Err(error) => return Ending::Lost(chain(&error)),
    };
    if response.status() != StatusCode::OK {
        return refused(response).await;
    }
    let kind = response.headers().get(header::CONTENT_TYPE);
    let streams = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
    match take(response, streams, ask, (first, left), begun).await {
        Ok(assembly) if *left => {
            // What came until then is kept; it has no end.
            let answer = assembly.so_far();
            Ending::Answered(answer)
        }
        Ok(assembly) => assembly.finish().map_or_else(Ending::Lost, Ending::Answered),
        Err(why) => Ending::Lost(why),
    }
}

async fn take(
    mut response: Response,
    streams: bool,
    ask: &Ask,
    (first, left): (&mut Option<Duration>, &mut bool),
    begun: Instant,
) -> Result<Assembly, String> {
    let (mut assembly, mut whole) = (Assembly::default(), Vec::new());
    while let Some(bytes) = response.chunk().await.map_err(|error| chain(&error))? {
        if streams {
            assembly.handle_bytes(&bytes).map_err(|error| error.to_string())?;
            if assembly.pieces() > 0 {
                first.get_or_insert(begun.elapsed());
            }
            if ask.leaves_after.is_some_and(|pieces| assembly.pieces() >= pieces) {
                *left = true;
                return Ok(assembly);
            }
        } else {
            whole.extend_from_slice(&bytes);
            if whole.len() > BODY_MAX {
                return Err(format!("a body of more than {BODY_MAX} bytes"));
            }
        }
    }
    if !streams {
        assembly.handle_whole(&whole).map_err(|error| error.to_string())?;
    }
    Ok(assembly)
}

async fn refused(mut response: Response) -> Ending {
    let status = response.status().as_u16();
    let mut body = Vec::new();
    while let Ok(Some(bytes)) = response.chunk().await {
        body.extend_from_slice(&bytes);
        if body.len() > BODY_MAX {
            break;
        }
    }
    Ending::Refused { status, body: shortened(&String::from_utf8_lossy(&body)) }
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// A client of which every request is on its own.
fn client() -> reqwest::ClientBuilder {
    // The one implementation of cryptography that is linked; that it was chosen before is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Client::builder().connect_timeout(CONNECT_MAX)
}

/// Status and text of a GET.
///
/// # Errors
/// [`ClientError`] if nobody answers, within a minute.
pub async fn get(url: &str, api_key: Option<&str>) -> Result<(u16, String), ClientError> {
    let mut request = client().timeout(GET_MAX).build()?.get(url);
    if let Some(key) = api_key {
        request = request.bearer_auth(key);
    }
    let response = request.send().await?;
    let status = response.status().as_u16();
    Ok((status, response.text().await?))
}
