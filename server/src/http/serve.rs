//! Connections: accepting them, giving up those that send nothing, ending in good order.

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::io;
use std::pin::pin;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};

/// Longest time in which the head of a request must arrive, unless a test wants it shorter. It also
/// ends connections that are kept open between requests.
pub const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause after an error of `accept` that another try at once would only repeat, such as too many
/// open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until `shutdown` resolves; then no connection is accepted, and the ones in use are
/// finished. A connection on which no whole request head arrives within `header_timeout` is closed.
pub async fn serve(
    listener: TcpListener,
    app: Router,
    header_timeout: Duration,
    shutdown: impl Future<Output = ()> + Send + 'static,
) {
    let (stop, stopping) = watch::channel(());
    // Every connection holds a sender; the receiver ends when the last one has gone.
    let (open, mut closed) = mpsc::channel::<()>(1);
    let mut shutdown = pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut shutdown => break,
        };
        match accepted {
            Ok((stream, _)) => {
                let connection = connection(stream, app.clone(), header_timeout, stopping.clone());
                let open = open.clone();
                tokio::spawn(async move {
                    connection.await;
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

/// Answers the requests of one connection, until it ends or `stopping` says so.
async fn connection(
    stream: TcpStream,
    app: Router,
    header_timeout: Duration,
    mut stopping: watch::Receiver<()>,
) {
    // A token a packet: waiting to fill one would only add latency.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY");
    }
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(header_timeout)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(app));
    let mut served = pin!(served);
    let ended = tokio::select! {
        ended = &mut served => ended,
        // The sender is dropped when serving stops.
        _ = stopping.changed() => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "connection");
    }
}
