//! An HTTP client for tests.

use axum::http::{HeaderMap, Method, Request, StatusCode};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Talks to one server.
#[derive(Clone)]
pub(crate) struct Client {
    address: SocketAddr,
    inner: hyper_util::client::legacy::Client<HttpConnector, Full<Bytes>>,
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error} in {:?}", self.body))
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }
}

/// An answer that is still coming.
pub(crate) struct Streaming {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    body: Incoming,
    pending: String,
}

impl Streaming {
    /// The next event's data; `None` at the end.
    pub(crate) async fn event(&mut self) -> Option<String> {
        loop {
            let frame = self.frame().await?;
            if let Some(data) = frame.strip_prefix("data: ") {
                return Some(data.to_owned());
            }
            assert!(frame.starts_with(':'), "neither data nor comment: {frame:?}");
        }
    }

    /// The next event or comment as it is; `None` at the end.
    pub(crate) async fn frame(&mut self) -> Option<String> {
        loop {
            if let Some((frame, rest)) = self.pending.split_once("\n\n") {
                let frame = frame.to_owned();
                self.pending = rest.to_owned();
                return Some(frame);
            }
            let frame = self.body.frame().await?.unwrap();
            self.pending += std::str::from_utf8(frame.data_ref().unwrap()).unwrap();
        }
    }

    /// The next piece of the body; an error if the connection broke.
    pub(crate) async fn piece(&mut self) -> Option<Result<Bytes, hyper::Error>> {
        let frame = self.body.frame().await?;
        Some(frame.map(|frame| frame.into_data().unwrap()))
    }

    /// All events up to the end.
    pub(crate) async fn events(mut self) -> Vec<String> {
        let mut events = Vec::new();
        while let Some(event) = self.event().await {
            events.push(event);
        }
        assert_eq!(self.pending, "", "an unfinished event");
        events
    }
}

impl Client {
    pub(crate) fn new(address: SocketAddr) -> Self {
        let inner = hyper_util::client::legacy::Client::builder(TokioExecutor::new()).build_http();
        Self { address, inner }
    }

    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Streaming {
        let mut request =
            Request::builder().method(method).uri(format!("http://{}{path}", self.address));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body.into())).unwrap();
        let response = self.inner.request(request).await.unwrap();
        let (parts, body) = response.into_parts();
        Streaming { status: parts.status, headers: parts.headers, body, pending: String::new() }
    }

    pub(crate) async fn ask(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Answer {
        let Streaming { status, headers, body, .. } = self.send(method, path, headers, body).await;
        Answer { status, headers, body: body.collect().await.unwrap().to_bytes() }
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.ask(Method::GET, path, &[], "").await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        let json = [("content-type", "application/json")];
        self.ask(Method::POST, path, &json, body.to_string()).await
    }

    pub(crate) async fn stream(&self, path: &str, body: &Value) -> Streaming {
        let json = [("content-type", "application/json")];
        self.send(Method::POST, path, &json, body.to_string()).await
    }

    /// Sends bytes on a connection of their own and reads to its end.
    pub(crate) async fn raw(&self, text: &str) -> String {
        let stream = TcpStream::connect(self.address).await.unwrap();
        stream.writable().await.unwrap();
        assert_eq!(stream.try_write(text.as_bytes()).unwrap(), text.len());
        let mut answer = Vec::new();
        while read_some(&stream, &mut answer).await > 0 {}
        String::from_utf8(answer).unwrap()
    }

    /// The same for any bytes, where the server may not want them all.
    pub(crate) async fn raw_bytes(&self, bytes: &[u8]) -> Vec<u8> {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        // The server may have closed it by then.
        let _ = stream.write_all(bytes).await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        answer
    }
}

/// Reads what has arrived; 0 at the end.
pub(crate) async fn read_some(stream: &TcpStream, bytes: &mut Vec<u8>) -> usize {
    let mut buffer = [0; 1024];
    loop {
        stream.readable().await.unwrap();
        match stream.try_read(&mut buffer) {
            Ok(count) => {
                bytes.extend_from_slice(&buffer[..count]);
                return count;
            }
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
        }
    }
}
