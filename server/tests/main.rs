//! Integration tests of the server: HTTP API and router.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "main/access.rs"]
mod access;
#[path = "main/at_rest.rs"]
mod at_rest;
#[path = "main/client.rs"]
mod client;
#[path = "main/conformance.rs"]
mod conformance;
#[path = "main/discovery.rs"]
mod discovery;
#[path = "main/e2e.rs"]
mod e2e;
#[path = "main/edge.rs"]
mod edge;
#[path = "main/etcd.rs"]
mod etcd;
#[path = "main/fake.rs"]
mod fake;
#[path = "main/fleet.rs"]
mod fleet;
#[path = "main/formats.rs"]
mod formats;
#[path = "main/golden.rs"]
mod golden;
#[path = "main/grammar.rs"]
mod grammar;
#[path = "main/http.rs"]
mod http;
#[path = "main/kv_events.rs"]
mod kv_events;
#[path = "main/malformed.rs"]
mod malformed;
#[path = "main/messages.rs"]
mod messages;
#[path = "main/moto.rs"]
mod moto;
#[path = "main/objects.rs"]
mod objects;
#[path = "main/operations.rs"]
mod operations;
#[path = "main/payload.rs"]
mod payload;
#[path = "main/props.rs"]
mod props;
#[path = "main/recipe.rs"]
mod recipe;
#[path = "main/refusals.rs"]
mod refusals;
#[path = "main/responses.rs"]
mod responses;
#[path = "main/router.rs"]
mod router;
#[path = "main/scheduler.rs"]
mod scheduler;
#[path = "main/streams.rs"]
mod streams;
#[path = "main/tokens.rs"]
mod tokens;
#[path = "main/wording.rs"]
mod wording;
