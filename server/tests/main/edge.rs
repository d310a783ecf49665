//! The edge: TLS, HTTP/2, and connections that are slow, silent, half open or full of garbage.

use crate::fake::{Plan, Server, output, token, tokens};
use crate::http::{CHAT, chat, with};
use crate::streams::begun;
use axum::http::{Request, Response, StatusCode, Version};
use bytes::Bytes;
use dsv4_server::engine::FinishReason;
use dsv4_server::http::Edge;
use dsv4_server::http::tls::{Tls, TlsError};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Short, for connections that are to be given up.
const SHORT: Duration = Duration::from_millis(200);
/// How a client of HTTP/2 begins: its preface and an empty frame of settings.
const SETTINGS: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// A folder with a certificate for `localhost` and its key.
pub(crate) struct Files(PathBuf);

impl Files {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("dsv4-tls-{}-{n}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        let files = Self(path);
        files.renew();
        files
    }

    pub(crate) fn cert(&self) -> PathBuf {
        self.0.join("cert.pem")
    }

    pub(crate) fn key(&self) -> PathBuf {
        self.0.join("key.pem")
    }

    /// Puts another certificate and key in place.
    pub(crate) fn renew(&self) {
        let CertifiedKey { cert, signing_key } =
            generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        std::fs::write(self.cert(), cert.pem()).unwrap();
        std::fs::write(self.key(), signing_key.serialize_pem()).unwrap();
    }

    fn tls(&self) -> Arc<Tls> {
        Arc::new(Tls::open(&self.cert(), &self.key()).unwrap())
    }

    /// A client that trusts the certificate of now and offers these protocols.
    fn connector(&self, protocols: &[&[u8]]) -> TlsConnector {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.cert()).unwrap()).unwrap();
        trusting(roots, protocols)
    }

    /// A connection to a server of these files.
    pub(crate) async fn connect(
        &self,
        address: std::net::SocketAddr,
        protocols: &[&[u8]],
    ) -> std::io::Result<TlsStream<TcpStream>> {
        let stream = TcpStream::connect(address).await?;
        let name = ServerName::try_from("localhost").unwrap();
        self.connector(protocols).connect(name, stream).await
    }
}

/// A client that trusts these and offers these protocols.
fn trusting(roots: RootCertStore, protocols: &[&[u8]]) -> TlsConnector {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
    TlsConnector::from(Arc::new(config))
}

impl Drop for Files {
    fn drop(&mut self) {
        // Whatever is left lies in the temporary folder.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

async fn with_tls(files: &Files) -> Server {
    let edge = Edge {
        header_timeout: SHORT * 10,
        handshake_timeout: SHORT,
        tls: Some(files.tls()),
        ..Edge::default()
    };
    Server::over(edge).await
}

type Two = http2::SendRequest<Full<Bytes>>;

/// An HTTP/2 client on a connection.
async fn two(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> Two {
    two_until(stream).await.0
}

/// The same, and the end of the connection.
async fn two_until(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> (Two, tokio::task::JoinHandle<()>) {
    let io = TokioIo::new(stream);
    let (sender, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
    // How it ends is seen by the requests.
    (sender, tokio::spawn(async move { drop(connection.await) }))
}

fn get(path: &str) -> Request<Full<Bytes>> {
    Request::get(format!("http://localhost{path}")).body(Full::default()).unwrap()
}

fn post(path: &str, body: &serde_json::Value) -> Request<Full<Bytes>> {
    let request = Request::post(format!("http://localhost{path}"));
    let request = request.header("content-type", "application/json");
    request.body(Full::from(body.to_string())).unwrap()
}

async fn text(response: Response<Incoming>) -> String {
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[tokio::test]
async fn both_versions_are_spoken_on_one_plain_port() {
    let server = Server::start().await;
    let mut client = two(TcpStream::connect(server.address).await.unwrap()).await;
    let answer = client.send_request(get("/health")).await.unwrap();
    assert_eq!((answer.status(), answer.version()), (StatusCode::OK, Version::HTTP_2));
    assert!(answer.headers().contains_key("x-request-id"));
    // Requests at once on one connection, one of them streamed.
    server.plan_tokens(&tokens("one two"), FinishReason::Stop);
    server.plan_tokens(&tokens("one two"), FinishReason::Stop);
    let mut other = client.clone();
    let stream = with(chat(), &json!({"stream": true}));
    let (whole, streamed) = tokio::join!(
        client.send_request(post(CHAT, &chat())),
        other.send_request(post(CHAT, &stream)),
    );
    let (whole, streamed) = (text(whole.unwrap()).await, text(streamed.unwrap()).await);
    assert!(whole.contains("one two") && streamed.ends_with("data: [DONE]\n\n"), "{streamed}");
    assert_eq!(server.client.get("/health").await.status, 200, "HTTP/1.1 as well");
    drop((client, other));
    server.finish().await;
}

#[tokio::test]
async fn both_versions_are_spoken_over_tls() {
    let files = Files::new();
    let server = with_tls(&files).await;
    for (offer, taken) in [
        (&[&b"h2"[..], b"http/1.1"][..], Some(&b"h2"[..])),
        (&[b"http/1.1"], Some(b"http/1.1")),
        (&[], None),
    ] {
        let stream = files.connect(server.address, offer).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), taken);
        server.plan_tokens(&tokens("one two"), FinishReason::Stop);
        let answer = if taken == Some(b"h2") {
            two(stream).await.send_request(post(CHAT, &chat())).await.unwrap()
        } else {
            let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
            tokio::spawn(async move { drop(connection.await) });
            sender.send_request(post(CHAT, &chat())).await.unwrap()
        };
        assert_eq!(answer.status(), StatusCode::OK);
        assert_eq!(answer.version() == Version::HTTP_2, taken == Some(b"h2"));
        assert!(text(answer).await.contains("one two"));
    }
    server.finish().await;
}

#[tokio::test]
async fn what_is_no_handshake_is_closed_and_harms_nobody() {
    let files = Files::new();
    let mut server = with_tls(&files).await;
    let stream = files.connect(server.address, &[b"h2"]).await.unwrap();
    let mut client = two(stream).await;
    server.plan(Plan::Manual);
    let asked = client.send_request(post(CHAT, &with(chat(), &json!({"stream": true}))));
    let asked = tokio::spawn(asked);
    let open = server.open().await;
    open.events.send(token(tokens("a")[0])).unwrap();
    let running = asked.await.unwrap().unwrap();
    let garbage: String = (0..4000).map(|n| char::from(b'!' + (n % 90) as u8)).collect();
    // Plain HTTP, garbage, the beginning of a handshake and then nothing, nothing at all.
    let (http, garbage, half, silent) = tokio::join!(
        closed(&server, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"),
        closed(&server, garbage.as_bytes()),
        closed(&server, &[0x16, 0x03, 0x01, 0x02, 0x00, 0x01]),
        closed(&server, b""),
    );
    for found in [http, garbage, half, silent] {
        assert!(!found.windows(5).any(|part| part == b"HTTP/"), "{found:?}");
    }
    for event in output(&tokens("b"), FinishReason::Stop) {
        open.events.send(event).unwrap();
    }
    assert!(text(running).await.ends_with("data: [DONE]\n\n"), "it was not disturbed");
    drop(client);
    server.finish().await;
}

/// Sends bytes and nothing more; what comes until the server closes the connection.
async fn closed(server: &Server, bytes: &[u8]) -> Vec<u8> {
    server.client.raw_bytes(bytes).await
}

#[tokio::test]
async fn a_renewed_certificate_is_used_and_a_bad_one_is_not() {
    let files = Files::new();
    let tls = files.tls();
    let edge = Edge { tls: Some(Arc::clone(&tls)), ..Edge::default() };
    let server = Server::over(edge).await;
    let old = files.connector(&[b"http/1.1"]);
    let address = server.address;
    let connect = |connector: TlsConnector| async move {
        let stream = TcpStream::connect(address).await.unwrap();
        connector.connect(ServerName::try_from("localhost").unwrap(), stream).await
    };
    connect(old.clone()).await.unwrap();
    // A new certificate that was not read yet, one that cannot be, and one that was.
    files.renew();
    assert!(files.connect(server.address, &[]).await.is_err(), "the old one is in use");
    let good = std::fs::read(files.key()).unwrap();
    std::fs::write(files.key(), "no key").unwrap();
    assert_eq!(tls.reload(), Err(TlsError::NoKey(files.key().display().to_string())));
    connect(old.clone()).await.unwrap();
    std::fs::write(files.key(), good).unwrap();
    tls.reload().unwrap();
    files.connect(server.address, &[]).await.unwrap();
    assert!(connect(old).await.is_err(), "the new one is in use");
    server.finish().await;
}

#[tokio::test]
async fn certificates_are_renewed_under_load_without_a_handshake_that_fails() {
    let files = Files::new();
    let tls = files.tls();
    let server = Server::over(Edge { tls: Some(Arc::clone(&tls)), ..Edge::default() }).await;
    let make = |_| generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let next: Vec<CertifiedKey<_>> = (0..8).map(make).collect();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(files.cert()).unwrap()).unwrap();
    next.iter().for_each(|pair| roots.add(pair.cert.der().clone()).unwrap());
    let connector = trusting(roots, &[b"h2"]);
    let mut before = two(files.connect(server.address, &[b"h2"]).await.unwrap()).await;
    let (done, is_over) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
    let clients: Vec<_> = (0..4)
        .map(|_| {
            let (connector, address) = (connector.clone(), server.address);
            let (done, is_over) = (Arc::clone(&done), Arc::clone(&is_over));
            tokio::spawn(async move {
                while !is_over.load(Ordering::Acquire) {
                    let stream = TcpStream::connect(address).await.unwrap();
                    let name = ServerName::try_from("localhost").unwrap();
                    let mut client = two(connector.connect(name, stream).await.unwrap()).await;
                    let answer = client.send_request(get("/health")).await.unwrap();
                    assert_eq!(answer.status(), StatusCode::OK);
                    done.fetch_add(1, Ordering::AcqRel);
                }
            })
        })
        .collect();
    for CertifiedKey { cert, signing_key } in &next {
        std::fs::write(files.cert(), cert.pem()).unwrap();
        // Between the two files they do not fit: the old ones stay in use.
        assert!(matches!(tls.reload(), Err(TlsError::Mismatch { .. })));
        std::fs::write(files.key(), signing_key.serialize_pem()).unwrap();
        tls.reload().unwrap();
        let seen = done.load(Ordering::Acquire);
        while done.load(Ordering::Acquire) < seen + 8 {
            tokio::task::yield_now().await;
        }
        files.connect(server.address, &[b"h2"]).await.expect("the new one is in use");
    }
    is_over.store(true, Ordering::Release);
    for client in clients {
        client.await.expect("no handshake failed");
    }
    let answer = before.send_request(get("/health")).await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK, "open connections go on");
    drop(before);
    server.finish().await;
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let (files, other) = (Files::new(), Files::new());
    let open = |cert: &Path, key: &Path| Tls::open(cert, key).unwrap_err().to_string();
    let (cert, key) = (files.cert(), files.key());
    let nowhere = files.0.join("nowhere");
    let text = open(&nowhere, &key);
    assert!(text.starts_with("--ssl-certfile ") && text.contains("nowhere: No such"), "{text}");
    let text = open(&cert, &nowhere);
    assert!(text.starts_with("--ssl-keyfile ") && text.contains("nowhere: No such"), "{text}");
    let text = open(&key, &key);
    assert!(text.contains("there is no certificate in it"), "{text}");
    let text = open(&cert, &cert);
    assert!(text.contains("there is no private key in it"), "{text}");
    let text = open(&cert, &other.key());
    assert!(text.contains("is not the key of the certificate"), "{text}");
    let damaged = std::fs::read_to_string(&cert).unwrap().replace("MII", "!!!");
    std::fs::write(&cert, damaged).unwrap();
    assert!(open(&cert, &key).starts_with("--ssl-certfile "));
}

#[tokio::test]
async fn connections_of_either_version_that_ask_nothing_are_closed() {
    let server = Server::over(Edge { header_timeout: SHORT, ..Edge::default() }).await;
    // The preface in parts, whole, and with settings; then silence.
    let preface = &SETTINGS[..24];
    // The head of a request that goes on in a frame that never comes.
    let open_head = [SETTINGS, &[0, 0, 1, 1, 0, 0, 0, 0, 1, 0x82]].concat();
    let garbage = [preface, &[0xff; 64]].concat();
    tokio::join!(
        closed(&server, b"P"),
        closed(&server, b"PR"),
        closed(&server, &preface[..10]),
        closed(&server, preface),
        closed(&server, SETTINGS),
        closed(&server, &open_head),
        closed(&server, &garbage),
    );
    // One that was used and is idle now.
    let (mut client, ended) = two_until(TcpStream::connect(server.address).await.unwrap()).await;
    assert_eq!(client.send_request(get("/health")).await.unwrap().status(), StatusCode::OK);
    ended.await.unwrap();
    server.finish().await;
}

#[tokio::test]
async fn an_http2_stream_that_runs_is_not_cut_off_by_the_wait_for_requests() {
    let mut server = Server::over(Edge { header_timeout: SHORT, ..Edge::default() }).await;
    let mut client = two(TcpStream::connect(server.address).await.unwrap()).await;
    server.plan(Plan::Manual);
    let asked = client.send_request(post(CHAT, &with(chat(), &json!({"stream": true}))));
    let asked = tokio::spawn(asked);
    let open = server.open().await;
    open.events.send(token(tokens("a")[0])).unwrap();
    let running = asked.await.unwrap().unwrap();
    // Several times longer than a connection may ask nothing, told by another one that does.
    for _ in 0..3 {
        closed(&server, b"GET /health HT").await;
    }
    for event in output(&tokens("b"), FinishReason::Stop) {
        open.events.send(event).unwrap();
    }
    assert!(text(running).await.ends_with("data: [DONE]\n\n"));
    drop(client);
    server.finish().await;
}

#[tokio::test]
async fn a_client_that_does_not_answer_pings_loses_its_requests() {
    let ping = Duration::from_millis(100);
    let mut server = Server::over(Edge { ping, ..Edge::default() }).await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let body = with(chat(), &json!({"stream": true})).to_string();
    server.plan(Plan::Manual);
    stream.write_all(&raw_post(&body)).await.unwrap();
    // It reads, and acknowledges nothing.
    let open = server.open().await;
    open.events.send(token(tokens("a")[0])).unwrap();
    open.cancelled.await.unwrap();
    drop(stream);
    server.finish().await;
}

#[tokio::test]
async fn an_answer_of_which_a_client_takes_nothing_is_given_up() {
    let edge = Edge { send_timeout: Some(Duration::from_millis(200)), ..Edge::default() };
    let mut server = Server::over(edge).await;
    // HTTP/2: a window of nothing, and every ping is answered.
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder.initial_stream_window_size(0);
    let stream = TcpStream::connect(server.address).await.unwrap();
    let (mut client, connection) = builder.handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(async move { drop(connection.await) });
    let mut opened = Vec::new();
    let mut running = Vec::new();
    for _ in 0..3 {
        server.plan(Plan::Manual);
        let asked = client.send_request(post(CHAT, &with(chat(), &json!({"stream": true}))));
        let asked = tokio::spawn(asked);
        let open = server.open().await;
        open.events.send(token(tokens("a")[0])).unwrap();
        running.push(asked.await.unwrap().unwrap());
        opened.push(open);
    }
    for open in opened {
        open.cancelled.await.expect("the request is ended");
    }
    drop((running, client));
    // HTTP/1.1: what the system keeps for it is full, and it reads nothing.
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let body = with(chat(), &json!({"stream": true})).to_string();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    server.plan(Plan::Manual);
    stream.write_all(&[head.as_bytes(), body.as_bytes()].concat()).await.unwrap();
    let open = server.open().await;
    let word = tokens("a")[0];
    let cancelled = open.cancelled;
    tokio::pin!(cancelled);
    loop {
        for _ in 0..1000 {
            // It may be gone.
            drop(open.events.send(token(word)));
        }
        tokio::select! {
            ended = &mut cancelled => break ended.expect("the request is ended"),
            () = tokio::time::sleep(Duration::from_millis(1)) => {}
        }
    }
    drop(stream);
    let metrics = server.client.get("/metrics").await.text().to_owned();
    let line = "dsv4:http_connections_ended_total{reason=\"unread\"} 4";
    assert!(metrics.lines().any(|found| found == line), "{metrics}");
    server.finish().await;
}

/// A request as HTTP/2 without compression of names: preface, settings, a head, a body.
fn raw_post(body: &str) -> Vec<u8> {
    let mut head = vec![0x83, 0x86];
    for (name, value) in
        [(":path", CHAT), (":authority", "x"), ("content-type", "application/json")]
    {
        head.push(0);
        for text in [name, value] {
            head.push(u8::try_from(text.len()).unwrap());
            head.extend_from_slice(text.as_bytes());
        }
    }
    let frame = |kind: u8, flags: u8, id: u8, payload: &[u8]| {
        let len = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&len[1..], &[kind, flags, 0, 0, 0, id], payload].concat()
    };
    let frames = [frame(1, 4, 1, &head), frame(0, 1, 1, body.as_bytes())];
    [SETTINGS, &frames.concat()].concat()
}

#[tokio::test]
async fn large_heads_and_many_streams_are_bounded() {
    let server = Server::over(Edge { header_timeout: SHORT, ..Edge::default() }).await;
    let mut client = two(TcpStream::connect(server.address).await.unwrap()).await;
    // Small enough for the client to send before it knows the limit.
    let large = "x".repeat(20 << 10);
    let mut request = get("/health");
    for name in ["x-a", "x-b", "x-c"] {
        request.headers_mut().insert(name, large.parse().unwrap());
    }
    let refused = match client.send_request(request).await {
        Ok(answer) => answer.status() == StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        Err(_) => true,
    };
    assert!(refused, "more than 32 KiB of header fields");
    // What the server says that it takes: streams (3) and bytes of header fields (6).
    let said = closed(&server, SETTINGS).await;
    for setting in [[0, 3, 0, 0, 0, 128], [0, 6, 0, 0, 0x80, 0]] {
        assert!(said.windows(6).any(|six| six == setting), "{setting:?} in {said:?}");
    }
    drop(client);
    server.finish().await;
}

#[tokio::test]
async fn shutdown_finishes_what_runs_in_both_versions() {
    let files = Files::new();
    let edge = Edge { tls: Some(files.tls()), ..Edge::default() };
    let mut server = Server::over(edge).await;
    let mut client = two(files.connect(server.address, &[b"h2"]).await.unwrap()).await;
    server.plan(Plan::Manual);
    let asked = client.send_request(post(CHAT, &with(chat(), &json!({"stream": true}))));
    let asked = tokio::spawn(asked);
    let open = server.open().await;
    open.events.send(token(tokens("a")[0])).unwrap();
    let running = asked.await.unwrap().unwrap();
    // Connections on which nothing was asked, one of them in the middle of its handshake.
    let _half = TcpStream::connect(server.address).await.unwrap();
    let (_idle, ended) = two_until(files.connect(server.address, &[b"h2"]).await.unwrap()).await;
    server.begin_shutdown();
    for event in output(&tokens("b"), FinishReason::Stop) {
        open.events.send(event).unwrap();
    }
    assert!(text(running).await.ends_with("data: [DONE]\n\n"));
    ended.await.unwrap();
    server.finish().await;
    // HTTP/2 on a plain port, beside HTTP/1.1.
    let mut server = Server::start().await;
    let (one, mut stream) = begun(&mut server, tokens("a")[0]).await;
    let mut client = two(TcpStream::connect(server.address).await.unwrap()).await;
    assert_eq!(client.send_request(get("/health")).await.unwrap().status(), StatusCode::OK);
    stream.event().await.unwrap();
    server.begin_shutdown();
    for event in output(&tokens("b"), FinishReason::Stop) {
        one.events.send(event).unwrap();
    }
    assert_eq!(stream.events().await.last().unwrap(), "[DONE]");
    server.finish().await;
}
