//! Keys, and web pages that may ask.

use crate::client::Client;
use crate::fake::Server;
use crate::http::{CHAT, assert_error, chat};
use axum::http::Method;
use dsv4_server::engine::FinishReason;
use dsv4_server::http::access::{Access, protect};
use dsv4_server::http::{HEADER_TIMEOUT, serve};
use dsv4_server::router::{ReverseProxy, RouterConfig};
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use tokio::net::TcpListener;

fn access(keys: &[&str], origins: &[&str]) -> Access {
    let own = |list: &[&str]| list.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
    Access::new(&own(keys), None::<&Path>, &own(origins)).unwrap()
}

async fn ask(client: &Client, path: &str, headers: &[(&str, &str)]) -> (u16, serde_json::Value) {
    let json = ("content-type", "application/json");
    let headers: Vec<_> = headers.iter().copied().chain([json]).collect();
    let answer = client.ask(Method::POST, path, &headers, chat().to_string()).await;
    (answer.status.as_u16(), answer.json())
}

#[tokio::test]
async fn a_key_is_wanted_where_there_are_keys() {
    let server = Server::protected(access(&["sk-one", "sk-two"], &[])).await;
    let answer = server.client.post(CHAT, &chat()).await;
    assert_error(&answer, 401, "invalid_api_key", None, "no key");
    assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
    assert!(answer.header("x-request-id").is_some());
    for wrong in
        ["Bearer sk-on", "Bearer sk-one1", "Bearer sk-tw0", "Bearer ", "sk-one", "Basic sk-one"]
    {
        let (status, _) = ask(&server.client, CHAT, &[("authorization", wrong)]).await;
        assert_eq!(status, 401, "{wrong}");
    }
    assert!(server.engine.submitted.lock().unwrap().is_empty());
    for right in [
        ("authorization", "Bearer sk-one"),
        ("authorization", "bearer sk-two"),
        ("x-api-key", "sk-two"),
    ] {
        server.plan_tokens(&[5], FinishReason::Stop);
        assert_eq!(ask(&server.client, CHAT, &[right]).await.0, 200, "{right:?}");
    }
    for open in ["/", "/assets/page.js", "/health", "/readyz", "/metrics"] {
        assert_eq!(server.client.get(open).await.status, 200, "{open}");
    }
    for closed in [
        "/stats.json",
        "/v1/models",
        "/nothing",
        "/metricsx",
        "/assetsx",
        "/index.html",
        "/health_generate",
        "/healthz",
        "/readyz/",
        "/server_info",
        "/get_server_info",
        "/model_info",
        "/get_model_info",
    ] {
        assert_eq!(server.client.get(closed).await.status, 401, "{closed}");
    }
    for closed in ["/abort_request", "/flush_cache"] {
        assert_eq!(ask(&server.client, closed, &[]).await.0, 401, "{closed}");
    }
    // What is refused before the endpoints is counted with what they answer, and probes apart.
    let metrics = server.client.get("/metrics").await.text().to_owned();
    for line in [
        "http_requests_total{method=\"POST\",handler=\"/v1/chat/completions\",status=\"401\"} 7",
        "http_requests_total{method=\"POST\",handler=\"/v1/chat/completions\",status=\"200\"} 3",
        "http_requests_total{method=\"GET\",handler=\"/v1/models\",status=\"401\"} 1",
        "http_probes_total{method=\"GET\",handler=\"/health\",status=\"200\"} 1",
        "http_probes_total{method=\"GET\",handler=\"/health_generate\",status=\"401\"} 1",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line}: {metrics}");
    }
    let (status, error) = ask(&server.client, "/v1/messages", &[]).await;
    assert_eq!((status, &error["error"]["type"]), (401, &json!("authentication_error")));
    server.finish().await;
}

#[tokio::test]
async fn a_router_counts_what_it_refuses_and_probes_apart() {
    let config = RouterConfig { may_join: true, ..RouterConfig::default() };
    let counts = Arc::clone(&config.counts);
    let app = ReverseProxy::new(config).unwrap().app();
    let app = protect(app, access(&["k"], &[]).counted(counts));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = Client::new(listener.local_addr().unwrap());
    tokio::spawn(serve(listener, app, HEADER_TIMEOUT, std::future::pending()));
    for _ in 0..3 {
        assert_eq!(ask(&client, CHAT, &[]).await.0, 401);
        assert_eq!(client.get("/readyz").await.status, 503);
    }
    assert_eq!(ask(&client, CHAT, &[("x-api-key", "k")]).await.0, 503);
    let metrics = client.get("/metrics").await.text().to_owned();
    for line in [
        "dsv4_router:responses_total{handler=\"/v1/chat/completions\",status=\"401\"} 3",
        "dsv4_router:responses_total{handler=\"/v1/chat/completions\",status=\"503\"} 1",
        "dsv4_router:probes_total{handler=\"/readyz\",status=\"503\"} 3",
        "dsv4_router:http_connections_ended_total{reason=\"malformed\"} 0",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line}: {metrics}");
    }
}

#[tokio::test]
async fn pages_of_named_origins_may_ask() {
    let server = Server::protected(access(&["k"], &["https://a.example"])).await;
    let preflight = [
        ("origin", "https://a.example"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization, content-type"),
    ];
    let answer = server.client.ask(Method::OPTIONS, CHAT, &preflight, "").await;
    assert_eq!(answer.status, 204);
    assert_eq!(answer.header("access-control-allow-origin"), Some("https://a.example"));
    assert_eq!(answer.header("access-control-allow-headers"), Some("authorization, content-type"));
    let other = [("origin", "https://b.example"), ("access-control-request-method", "POST")];
    let answer = server.client.ask(Method::OPTIONS, CHAT, &other, "").await;
    assert_eq!(answer.header("access-control-allow-origin"), None);
    assert_eq!(answer.header("access-control-allow-methods"), None);
    // Errors can be read by the page as well.
    let answer = server.client.ask(Method::POST, CHAT, &[preflight[0]], "").await;
    assert_eq!((answer.status.as_u16(), answer.header("vary")), (401, Some("origin")));
    assert_eq!(answer.header("access-control-allow-origin"), Some("https://a.example"));
    server.finish().await;
    let server = Server::protected(access(&[], &["*"])).await;
    let answer = server.client.ask(Method::GET, "/v1/models", &[("origin", "null")], "").await;
    assert_eq!(
        (answer.status.as_u16(), answer.header("access-control-allow-origin")),
        (200, Some("*"))
    );
    server.finish().await;
    let server = Server::protected(access(&[], &[])).await;
    let answer =
        server.client.ask(Method::GET, "/v1/models", &[("origin", "https://a.example")], "").await;
    assert_eq!(answer.header("access-control-allow-origin"), None);
    server.finish().await;
}
