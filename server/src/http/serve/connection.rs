//! One connection, from its first byte to its end.

use super::Edge;
use super::prefixed::{Prefixed, Version};
use crate::http::tls::HTTP_2;
use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::server::conn::{http1, http2};
use hyper::service::{Service as _, service_fn};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
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
                    Ok(Err(error)) => return tracing::debug!(%error, "TLS handshake"),
                    Err(_) => return tracing::debug!("a TLS handshake took too long"),
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
                    Err(_) => return,
                }
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "connection");
        }
    }

    async fn one(mut self, stream: impl Stream) -> hyper::Result<()> {
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.edge.header_timeout)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(self.app));
        let mut served = pin!(served);
        tokio::select! {
            // What has arrived is looked at first: a connection on which nothing was asked is closed.
            biased;
            ended = &mut served => ended,
            _ = self.stopping.changed() => {
                served.as_mut().graceful_shutdown();
                served.await
            }
        }
    }

    async fn two(mut self, stream: impl Stream) -> hyper::Result<()> {
        let open = Open(watch::Sender::new(0));
        let (app, edge) = (TowerToHyperService::new(self.app), self.edge);
        let counted = open.clone();
        let service = service_fn(move |request: Request<Incoming>| {
            let entered = counted.enter();
            let answer = app.call(request);
            async move {
                let response: Response<Body> = answer.await?;
                Ok::<_, Infallible>(response.map(|body| Counted { body, _entered: entered }))
            }
        });
        let served = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(edge.ping)
            .keep_alive_timeout(edge.ping)
            .max_concurrent_streams(STREAMS_MAX)
            .max_header_list_size(HEADERS_MAX)
            .max_send_buf_size(UNREAD_MAX)
            .serve_connection(TokioIo::new(stream), service);
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

/// A connection, plain or not.
trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for S {}

/// How many requests of a connection are being answered.
#[derive(Clone, Debug)]
struct Open(watch::Sender<usize>);

impl Open {
    fn enter(&self) -> Entered {
        self.0.send_modify(|count| *count += 1);
        Entered(self.clone())
    }

    /// Resolves when there was no request for `limit`.
    async fn idle(&self, limit: Duration) {
        let mut count = self.0.subscribe();
        loop {
            // The sender is here.
            let _ = count.wait_for(|count| *count == 0).await;
            if timeout(limit, count.changed()).await.is_err() {
                return;
            }
        }
    }
}

/// A request, until its answer has been sent or given up.
#[derive(Debug)]
struct Entered(Open);

impl Drop for Entered {
    fn drop(&mut self) {
        self.0.0.send_modify(|count| *count -= 1);
    }
}

/// A body that counts as being sent until it is dropped.
struct Counted {
    body: Body,
    _entered: Entered,
}

impl HttpBody for Counted {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

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
