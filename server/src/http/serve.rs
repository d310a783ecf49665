//! Connections: accepting them, TLS, HTTP/1.1 and HTTP/2, giving up those that send nothing, ending in
//! good order.

mod connection;
mod prefixed;
mod unread;

use super::counts::HttpCounts;
use super::tls::Tls;
use axum::Router;
use connection::Serving;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};

/// Longest time in which the head of a request must arrive, unless a test wants it shorter. It also
/// ends connections that are kept open between requests.
pub const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause after an error of `accept` that another try at once would only repeat, such as too many
/// open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How connections are treated.
#[derive(Clone, Debug)]
pub struct Edge {
    /// Longest time in which the head of a request must arrive, and for which a connection is kept
    /// without one.
    pub header_timeout: Duration,
    /// Longest time that a TLS handshake may take.
    pub handshake_timeout: Duration,
    /// Silence on an HTTP/2 connection after which its client is asked whether it is there, and the
    /// time that it has to answer.
    pub ping: Duration,
    /// Longest time for which a client may take nothing of an answer that waits for it.
    pub send_timeout: Option<Duration>,
    /// Where it is counted why connections were ended.
    pub counts: Arc<HttpCounts>,
    /// Certificate; without one connections are plain.
    pub tls: Option<Arc<Tls>>,
}

impl Default for Edge {
    fn default() -> Self {
        Self {
            header_timeout: HEADER_TIMEOUT,
            handshake_timeout: Duration::from_secs(10),
            ping: Duration::from_secs(20),
            send_timeout: Some(Duration::from_secs(60)),
            counts: Arc::default(),
            tls: None,
        }
    }
}

/// Serves plain connections until `shutdown` resolves; then no connection is accepted, and the ones
/// in use are finished. A connection on which no whole request head arrives within `header_timeout`
/// is closed.
pub async fn serve(
    listener: TcpListener,
    app: Router,
    header_timeout: Duration,
    shutdown: impl Future<Output = ()> + Send + 'static,
) {
    let edge = Edge { header_timeout, ..Edge::default() };
    serve_with(listener, app, edge, shutdown).await;
}

/// The same for connections that are treated as `edge` says.
pub async fn serve_with(
    listener: TcpListener,
    app: Router,
    edge: Edge,
    shutdown: impl Future<Output = ()> + Send + 'static,
) {
    let (stop, stopping) = watch::channel(());
    // Every connection holds a sender; the receiver ends when the last one has gone.
    let (open, mut closed) = mpsc::channel::<()>(1);
    let edge = Arc::new(edge);
    let mut shutdown = pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut shutdown => break,
        };
        match accepted {
            Ok((stream, _)) => {
                let serving = Serving::new(app.clone(), Arc::clone(&edge), stopping.clone());
                let open = open.clone();
                tokio::spawn(async move {
                    serving.connection(stream).await;
                    drop(open);
                });
            }
            // It was gone before it was taken; the next one may be well.
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                tracing::error!(%error, "no connection can be accepted");
                tokio::select! {
                    () = tokio::time::sleep(ACCEPT_PAUSE) => {}
                    () = &mut shutdown => break,
                }
            }
        }
    }
    drop((listener, stop, open));
    let _none = closed.recv().await;
}

fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionRefused | ConnectionAborted | ConnectionReset)
}
