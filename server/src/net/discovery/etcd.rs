//! etcd through its gateway, which speaks JSON (etcd 3.4 or later).
//!
//! Workers are keys `/dsv4/NAMESPACE/workers/ID` under leases.

use super::ask::{Asker, DiscoveryError};
use super::member::Member;
use axum::http::Method;
use axum::http::uri::{Authority, PathAndQuery};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

/// Most keys that are read: what is beyond them is not known.
const KEYS_MAX: usize = 2048;
/// Most bytes of a line of a watch that are looked at.
const LINE_MAX: usize = 1 << 20;
/// Most keys that were complained about; beyond it nothing more is said.
const FOREIGN_MAX: usize = 256;

/// One etcd, by whichever of its addresses answers.
#[derive(Debug)]
pub(super) struct Etcd {
    asker: Asker,
    endpoints: Vec<Authority>,
    /// The one that is asked now.
    at: usize,
    prefix: String,
    /// Keys whose values are no workers, so that they are said once.
    foreign: BTreeSet<String>,
}

impl Etcd {
    pub(super) fn new(endpoints: Vec<Authority>, namespace: &str, asker: Asker) -> Self {
        let prefix = format!("/dsv4/{namespace}/workers/");
        Self { asker, endpoints, at: 0, prefix, foreign: BTreeSet::new() }
    }

    fn endpoint(&self) -> &Authority {
        &self.endpoints[self.at % self.endpoints.len()]
    }

    fn odd(&self, what: &'static str) -> DiscoveryError {
        DiscoveryError::Odd { place: self.endpoint().to_string(), what }
    }

    /// Asks; after an error the next address is asked next.
    async fn ask(&mut self, path: &'static str, body: Value) -> Result<Value, DiscoveryError> {
        let path = PathAndQuery::from_static(path);
        let asked = self.asker.ask(Method::POST, self.endpoint(), path, &body).await;
        let answer = asked.and_then(|answer| {
            // A stream of one answer has a line end, which JSON passes over.
            serde_json::from_slice(&answer).map_err(|_| self.odd("no JSON"))
        });
        if answer.is_err() {
            self.at = (self.at + 1) % self.endpoints.len();
        }
        answer
    }

    /// The first and the last key of those with the prefix, the last not included.
    fn range(&self) -> (String, String) {
        let mut end = self.prefix.clone().into_bytes();
        if let Some(last) = end.last_mut() {
            // A slash, so there is a next one.
            *last += 1;
        }
        (STANDARD.encode(&self.prefix), STANDARD.encode(end))
    }

    /// All workers, and the revision of the list.
    pub(super) async fn list(&mut self) -> Result<(Vec<Member>, i64), DiscoveryError> {
        let (key, range_end) = self.range();
        let question = json!({"key": key, "range_end": range_end, "limit": KEYS_MAX});
        let answer = self.ask("/v3/kv/range", question).await?;
        let revision = answer.get("header").and_then(|header| header.get("revision"));
        let revision = revision.and_then(integer).ok_or_else(|| self.odd("no revision"))?;
        let keys = answer.get("kvs").and_then(Value::as_array);
        let mut members = Vec::new();
        for pair in keys.into_iter().flatten() {
            let field = |name: &str| {
                let text = pair.get(name).and_then(Value::as_str).unwrap_or_default();
                STANDARD.decode(text).unwrap_or_default()
            };
            let key = String::from_utf8_lossy(&field("key")).into_owned();
            match Member::read(&field("value")) {
                Ok(member) if key.strip_prefix(&self.prefix) == Some(&member.id) => {
                    members.push(member);
                }
                Ok(_) => self.complain(key, "a worker under the key of another"),
                Err(error) => self.complain(key, &error.to_string()),
            }
        }
        Ok((members, revision))
    }

    /// Says once that something under the prefix is none of ours.
    fn complain(&mut self, key: String, why: &str) {
        if self.foreign.len() < FOREIGN_MAX && !self.foreign.contains(&key) {
            tracing::warn!(key, "discovery: a key is passed over: {why}");
            self.foreign.insert(key);
        }
    }

    /// Waits until a key has changed since `revision`, or until that cannot be told any more.
    pub(super) async fn changed(&self, revision: i64) -> Result<(), DiscoveryError> {
        let (key, range_end) = self.range();
        let question = json!({"create_request": {
            "key": key, "range_end": range_end, "start_revision": revision.to_string(),
        }});
        let path = PathAndQuery::from_static("/v3/watch");
        let response = self.asker.open(Method::POST, self.endpoint(), path, &question).await?;
        if !response.status().is_success() {
            return Err(self.odd("no watch"));
        }
        let mut body = response.into_body();
        let mut line: Vec<u8> = Vec::new();
        loop {
            let frame = body.frame().await.and_then(Result::ok);
            let frame = frame.ok_or_else(|| self.odd("a watch that ended"))?;
            let Some(bytes) = frame.data_ref() else { continue };
            for &byte in bytes {
                if byte != b'\n' {
                    line.push(byte);
                    // Whatever it is, it is not nothing.
                    if line.len() > LINE_MAX {
                        return Ok(());
                    }
                } else if says_more_than_hello(&line) {
                    return Ok(());
                } else {
                    line.clear();
                }
            }
        }
    }

    /// A lease, as the text that its number is.
    pub(super) async fn grant(&mut self, lease: Duration) -> Result<String, DiscoveryError> {
        let seconds = lease.as_secs().max(1).to_string();
        let answer = self.ask("/v3/lease/grant", json!({"TTL": seconds})).await?;
        let id = answer.get("ID").and_then(Value::as_str);
        id.map(str::to_owned).ok_or_else(|| self.odd("no lease"))
    }

    /// Renews a lease; false if it has ended.
    pub(super) async fn keep_alive(&mut self, lease: &str) -> Result<bool, DiscoveryError> {
        let answer = self.ask("/v3/lease/keepalive", json!({"ID": lease})).await?;
        if answer.get("error").is_some() {
            return Err(self.odd("a lease that is not renewed"));
        }
        let left = answer.get("result").and_then(|result| result.get("TTL"));
        Ok(left.and_then(integer).is_some_and(|seconds| seconds > 0))
    }

    /// Writes a worker's key under a lease.
    pub(super) async fn put(&mut self, member: &Member, lease: &str) -> Result<(), DiscoveryError> {
        let value = serde_json::to_vec(member).map_err(|_| self.odd("a worker without JSON"))?;
        let key = STANDARD.encode(format!("{}{}", self.prefix, member.id));
        let body = json!({"key": key, "value": STANDARD.encode(value), "lease": lease});
        self.ask("/v3/kv/put", body).await.map(drop)
    }

    /// Ends a lease, and with it the key.
    pub(super) async fn revoke(&mut self, lease: &str) -> Result<(), DiscoveryError> {
        self.ask("/v3/lease/revoke", json!({"ID": lease})).await.map(drop)
    }
}

/// The gateway writes 64-bit numbers as texts.
fn integer(value: &Value) -> Option<i64> {
    value.as_str().map_or_else(|| value.as_i64(), |text| text.parse().ok())
}

/// Whether a line of a watch is anything but the word that it has begun or goes on.
fn says_more_than_hello(line: &[u8]) -> bool {
    let Ok(line) = serde_json::from_slice::<Value>(line) else { return true };
    let Some(result) = line.get("result") else { return true };
    let has_events = result.get("events").and_then(Value::as_array).is_some_and(|e| !e.is_empty());
    let is_canceled = result.get("canceled").and_then(Value::as_bool) == Some(true);
    has_events || is_canceled
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_watch_are_told_apart() {
        for quiet in [
            &br#"{"result":{"header":{"revision":"5"},"created":true}}"#[..],
            br#"{"result":{"header":{"revision":"5"}}}"#,
            br#"{"result":{"events":[]}}"#,
        ] {
            assert!(!says_more_than_hello(quiet));
        }
        for news in [
            &br#"{"result":{"header":{},"events":[{"kv":{}}]}}"#[..],
            br#"{"result":{"canceled":true,"compact_revision":"3"}}"#,
            br#"{"error":{"message":"etcdserver: no leader"}}"#,
            b"<html>",
            b"",
        ] {
            assert!(says_more_than_hello(news));
        }
    }

    #[test]
    fn numbers_are_read_as_the_gateway_writes_them() {
        assert_eq!(integer(&json!("7587883212297104637")), Some(7_587_883_212_297_104_637));
        assert_eq!(integer(&json!(3)), Some(3));
        assert_eq!(integer(&json!("x")), None);
    }

    #[test]
    fn the_range_ends_after_the_last_key_with_the_prefix() {
        let etcd = Etcd::new(vec!["h:1".parse().unwrap()], "n", Asker::new(Duration::ZERO));
        let (key, end) = etcd.range();
        assert_eq!(STANDARD.decode(key).unwrap(), b"/dsv4/n/workers/");
        assert_eq!(STANDARD.decode(end).unwrap(), b"/dsv4/n/workers0");
    }
}
