//! Server-sent events.

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream;
use serde::Serialize;
use std::convert::Infallible;
use std::time::Duration;

/// Produces the frames of a stream.
pub(super) trait Frames: Send + 'static {
    /// The next frame, or `None` at the end. May be called again after it was cancelled.
    fn frame(&mut self) -> impl Future<Output = Option<Bytes>> + Send;
}

/// A `data:` frame with a JSON value.
pub(super) fn data(value: &impl Serialize) -> Bytes {
    // The values are trees of strings and finite numbers with string keys.
    let json = serde_json::to_string(value).expect("a response value is always JSON");
    format!("data: {json}\n\n").into()
}

/// A frame with a name and a JSON value.
pub(super) fn event(name: &str, value: &impl Serialize) -> Bytes {
    let json = serde_json::to_string(value).expect("a response value is always JSON");
    format!("event: {name}\ndata: {json}\n\n").into()
}

/// A frame that clients pass over, for streams in which nothing else is known to keep the
/// connection alive.
pub(super) const COMMENT: Bytes = Bytes::from_static(b": keep-alive\n\n");

/// The frame that ends a complete stream.
pub(super) const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");

/// A streaming response. While no frame comes, `filler` every `keep_alive` keeps the connection
/// from looking dead to proxies. The frames are dropped when the client goes away.
pub(super) fn response(frames: impl Frames, keep_alive: Duration, filler: Bytes) -> Response {
    let stream = stream::unfold(frames, move |mut frames| {
        let filler = filler.clone();
        async move {
            let frame = match tokio::time::timeout(keep_alive, frames.frame()).await {
                Ok(frame) => frame?,
                Err(_) => filler,
            };
            Some((Ok::<_, Infallible>(frame), frames))
        }
    });
    let mut response = Response::new(Body::from_stream(stream));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Tells nginx not to collect the stream before it passes it on.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
