//! One connection, from its first byte to its end.

use super::Edge;
use super::prefixed::{Prefixed, Version};
use super::unread::{Counted, Open};
use crate::http::counts::{Closed, HttpCounts};
use crate::http::tls::HTTP_2;
use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::{Service, service_fn};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

/// Most requests at once on one HTTP/2 connection.
const STREAMS_MAX: u32 = 128;
/// Most bytes of a request's header fields on such a connection.
const HEADERS_MAX: u32 = 32 << 10;
/// How long the first byte of a connection may still take when serving stops.
const LAST_LOOK: Duration = Duration::from_secs(1);
/// Most bytes of an answer that wait for a client that reads slowly.
const UNREAD_MAX: usize = 64 << 10;

/// What is needed to serve a connection.
pub(super) struct Serving {
    app: Router,
    edge: Arc<Edge>,
    /// Its sender is dropped when serving stops.
    stopping: watch::Receiver<()>,
}

impl Serving {
    pub(super) fn new(app: Router, edge: Arc<Edge>, stopping: watch::Receiver<()>) -> Self {
        Self { app, edge, stopping }
    }

    /// Answers the requests of one connection, until it ends or serving stops.
    pub(super) async fn connection(mut self, stream: TcpStream) {
        // A token a packet: waiting to fill one would only add latency.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY");
        }
        let edge = Arc::clone(&self.edge);
        let ended = match &edge.tls {
            Some(tls) => {
                let handshake = timeout(edge.handshake_timeout, tls.acceptor().accept(stream));
                let stream = tokio::select! {
                    done = handshake => done,
                    // Nothing was asked yet.
                    _ = self.stopping.changed() => return,
                };
                match stream {
                    Ok(Ok(stream)) => match stream.get_ref().1.alpn_protocol() {
                        Some(HTTP_2) => self.two(stream).await,
                        _ => self.one(stream).await,
                    },
                    Ok(Err(error)) => {
                        edge.counts.count_closed(Closed::HandshakeFailed);
                        return tracing::debug!(%error, "TLS handshake");
                    }
                    Err(_) => {
                        edge.counts.count_closed(Closed::HandshakeSlow);
                        return tracing::debug!("a TLS handshake took too long");
                    }
                }
            }
            None => {
                let mut sniffed = pin!(timeout(edge.header_timeout, Prefixed::sniff(stream)));
                let sniffed = tokio::select! {
                    done = &mut sniffed => done,
                    // What is on its way already is still answered.
                    _ = self.stopping.changed() => match timeout(LAST_LOOK, sniffed).await {
                        Ok(done) => done,
                        Err(_) => return,
                    },
                };
                match sniffed {
                    Ok(Ok((Version::One, stream))) => self.one(stream).await,
                    Ok(Ok((Version::Two, stream))) => self.two(stream).await,
                    Ok(Err(error)) => return tracing::debug!(%error, "connection"),
                    Err(_) => return edge.counts.count_closed(Closed::Idle),
                }
            }
        };
        ended.note(&edge.counts);
    }

    async fn one(mut self, stream: impl Stream) -> Ended {
        let open = Open::default();
        let service = counted(self.app, open.clone());
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.edge.header_timeout)
            .serve_connection(TokioIo::new(stream), service);
        let mut served = pin!(served);
        let mut unread = pin!(open.cut_unread(self.edge.send_timeout));
        tokio::select! {
            // What has arrived is looked at first: a connection on which nothing was asked is closed.
            biased;
            ended = &mut served => return ended.into(),
            _ = self.stopping.changed() => served.as_mut().graceful_shutdown(),
            // There is one answer at a time, and its client does not take it.
            count = &mut unread => return Ended::Unread(count),
        }
        tokio::select! {
            ended = served => ended.into(),
            count = unread => Ended::Unread(count),
        }
    }

    async fn two(self, stream: impl Stream) -> Ended {
        let (open, counts) = (Open::default(), Arc::clone(&self.edge.counts));
        let limit = self.edge.send_timeout;
        let cut = async {
            loop {
                let count = open.cut_unread(limit).await;
                note_unread(&counts, count);
            }
        };
        tokio::select! {
            biased;
            ended = self.two_of(stream, open.clone()) => ended.into(),
            never = cut => never,
        }
    }

    async fn two_of(mut self, stream: impl Stream, open: Open) -> hyper::Result<()> {
        let edge = self.edge;
        let served = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(edge.ping)
            .keep_alive_timeout(edge.ping)
            .max_concurrent_streams(STREAMS_MAX)
            .max_header_list_size(HEADERS_MAX)
            .max_send_buf_size(UNREAD_MAX)
            .serve_connection(TokioIo::new(stream), counted(self.app, open.clone()));
        let mut served = pin!(served);
        tokio::select! {
            biased;
            ended = &mut served => return ended,
            _ = self.stopping.changed() => {
                served.as_mut().graceful_shutdown();
                return served.await;
            }
            () = open.idle(edge.header_timeout) => {}
        }
        // Nobody has asked for a while. What comes now may still be answered, and who says nothing to
        // the farewell is left.
        served.as_mut().graceful_shutdown();
        tokio::select! {
            ended = &mut served => ended,
            () = open.idle(edge.header_timeout) => Ok(()),
        }
    }
}

/// How a connection ended.
#[derive(Debug)]
enum Ended {
    /// By itself, or with an error.
    Served(hyper::Result<()>),
    /// Its client took nothing of so many answers.
    Unread(usize),
}

impl From<hyper::Result<()>> for Ended {
    fn from(served: hyper::Result<()>) -> Self {
        Self::Served(served)
    }
}

impl Ended {
    /// Counts an end that the client did not want.
    fn note(self, counts: &HttpCounts) {
        match self {
            Self::Served(Ok(())) => {}
            Self::Served(Err(error)) => {
                if error.is_parse() {
                    counts.count_closed(Closed::Malformed);
                } else if error.is_timeout() {
                    counts.count_closed(Closed::Idle);
                }
                tracing::debug!(%error, "connection");
            }
            Self::Unread(count) => note_unread(counts, count),
        }
    }
}

fn note_unread(counts: &HttpCounts, count: usize) {
    (0..count).for_each(|_| counts.count_closed(Closed::Unread));
    tracing::info!(
        answers = count,
        "given up: their client takes nothing of them (--send-timeout)"
    );
}

/// Endpoints whose answers are counted, and watched, until they were sent.
fn counted(
    app: Router,
    open: Open,
) -> impl Service<
    Request<Incoming>,
    Response = Response<Counted>,
    Error = Infallible,
    Future: Send + 'static,
> {
    let app = TowerToHyperService::new(app);
    service_fn(move |request: Request<Incoming>| {
        let entered = open.enter();
        let answer = app.call(request);
        async move {
            let response: Response<Body> = answer.await?;
            Ok::<_, Infallible>(response.map(|body| entered.body(body)))
        }
    })
}

/// A connection, plain or not.
trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for S {}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn a_request_that_is_there_when_serving_stops_is_answered() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let (stop, stopping) = watch::channel(());
        drop(stop);
        let app = Router::new().route("/", get(async || "yes"));
        Serving::new(app, Arc::default(), stopping).connection(stream).await;
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("yes"), "{answer}");
    }
}
