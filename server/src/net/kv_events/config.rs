//! The flag `--kv-events-config`: JSON with the fields that vLLM and SGLang have.

use serde_json::{Map, Value};
use std::fmt;
use std::str::FromStr;

/// Largest number in a field: of batches that wait or are kept.
const NUMBER_MAX: u64 = 1_000_000;
/// Most bytes of a topic.
const TOPIC_BYTES_MAX: usize = 255;
const FIELDS: [&str; 8] = [
    "enable_kv_cache_events",
    "publisher",
    "endpoint",
    "replay_endpoint",
    "buffer_steps",
    "hwm",
    "max_queue_size",
    "topic",
];

/// What `--kv-events-config` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventsConfig {
    /// Whether events are published at all.
    pub enabled: bool,
    /// Where they are published.
    pub endpoint: Endpoint,
    /// Where batches that a subscriber has missed can be asked for; always listened on.
    pub replay_endpoint: Option<Endpoint>,
    /// Batches that can be asked for.
    pub buffer_steps: usize,
    /// Batches that wait for one subscriber; it misses what comes then.
    pub hwm: usize,
    /// Batches that wait to be published; what comes then is dropped.
    pub max_queue_size: usize,
    /// First frame of every message, by which subscribers choose.
    pub topic: String,
}

/// `tcp://HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    host: String,
    port: u16,
}

/// The flag can't be used. Says which field is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadKvEvents {
    /// Not the JSON of an object.
    #[error("a JSON object expected: {0}")]
    NoObject(String),
    /// There is no such field.
    #[error("unknown field {field:?}, there are {}", FIELDS.join(", "))]
    UnknownField {
        /// Its name.
        field: String,
    },
    /// The value of a field is not possible.
    #[error("{field}: {expected} expected, not {found}")]
    Value {
        /// Which field.
        field: &'static str,
        /// What is possible.
        expected: &'static str,
        /// What was given.
        found: String,
    },
}

impl Endpoint {
    /// Name or address of the host; `*` for all addresses of this one.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Port; 0, where one is listened on, for any that is free.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Whether a publisher listens there; otherwise it connects to a subscriber that does. As in
    /// vLLM and SGLang, it listens where the host is a wildcard or has `::` in it.
    #[must_use]
    pub fn is_listened_on(&self) -> bool {
        self.host == "*" || self.host == "0.0.0.0" || self.host.contains("::")
    }

    /// What a listener binds to.
    #[must_use]
    pub fn listen_address(&self) -> (&str, u16) {
        (if self.host == "*" { "0.0.0.0" } else { &self.host }, self.port)
    }

    fn read(text: &str) -> Option<Self> {
        let (host, port) = text.strip_prefix("tcp://")?.rsplit_once(':')?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        let is_good = match bare {
            Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
            None => host == "*" || !host.is_empty() && host.chars().all(is_name),
        };
        let port = port.parse().ok().filter(|_| port.bytes().all(|byte| byte.is_ascii_digit()))?;
        is_good.then(|| Self { host: bare.unwrap_or(host).to_owned(), port })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') {
            write!(f, "tcp://[{host}]:{port}")
        } else {
            write!(f, "tcp://{host}:{port}")
        }
    }
}

/// The fields that were given; null counts as not given.
struct Fields(Map<String, Value>);

impl Fields {
    fn take<T>(
        &mut self,
        field: &'static str,
        expected: &'static str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, BadKvEvents> {
        match self.0.remove(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match read(&value) {
                Some(found) => Ok(Some(found)),
                None => Err(BadKvEvents::Value { field, expected, found: shown(&value) }),
            },
        }
    }

    fn number(&mut self, field: &'static str, least: u64) -> Result<Option<usize>, BadKvEvents> {
        let expected =
            if least == 0 { "a number of 0 to 1000000" } else { "a number of 1 to 1000000" };
        self.take(field, expected, |value| {
            let number = value.as_u64().filter(|n| (least..=NUMBER_MAX).contains(n))?;
            usize::try_from(number).ok()
        })
    }

    fn endpoint(&mut self, field: &'static str) -> Result<Option<Endpoint>, BadKvEvents> {
        self.take(field, "tcp://HOST:PORT", |value| Endpoint::read(value.as_str()?))
    }
}

fn shown(value: &Value) -> String {
    let mut text = value.to_string();
    if let Some((end, _)) = text.char_indices().nth(80) {
        text.truncate(end);
        text.push_str("..");
    }
    text
}

impl FromStr for KvEventsConfig {
    type Err = BadKvEvents;

    fn from_str(text: &str) -> Result<Self, BadKvEvents> {
        let object = serde_json::from_str::<Map<String, Value>>(text);
        let mut fields = Fields(object.map_err(|error| BadKvEvents::NoObject(error.to_string()))?);
        let unknown = fields.0.keys().find(|field| !FIELDS.contains(&field.as_str()));
        if let Some(field) = unknown {
            return Err(BadKvEvents::UnknownField { field: field.clone() });
        }
        let wanted = fields.take("enable_kv_cache_events", "true or false", Value::as_bool)?;
        let publisher = fields.take("publisher", "\"zmq\" or \"null\"", |value| {
            let is_zmq = value.as_str()? == "zmq";
            (is_zmq || value == "null").then_some(is_zmq)
        })?;
        let endpoint = fields.endpoint("endpoint")?;
        let config = Self {
            // vLLM publishes by zmq if it is to publish at all, SGLang has to be told so.
            enabled: wanted.unwrap_or(true) && publisher.or(wanted).unwrap_or(false),
            endpoint: endpoint.unwrap_or_else(|| Endpoint { host: "*".to_owned(), port: 5557 }),
            replay_endpoint: fields.endpoint("replay_endpoint")?,
            buffer_steps: fields.number("buffer_steps", 0)?.unwrap_or(10_000),
            hwm: fields.number("hwm", 1)?.unwrap_or(100_000),
            max_queue_size: fields.number("max_queue_size", 1)?.unwrap_or(100_000),
            topic: fields
                .take("topic", "a text of at most 255 bytes", |value| {
                    value.as_str().filter(|topic| topic.len() <= TOPIC_BYTES_MAX).map(str::to_owned)
                })?
                .unwrap_or_default(),
        };
        if !config.endpoint.is_listened_on() && config.endpoint.port == 0 {
            let (field, expected) = ("endpoint", "a port to connect to");
            let found = config.endpoint.to_string();
            return Err(BadKvEvents::Value { field, expected, found });
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<KvEventsConfig, String> {
        text.parse::<KvEventsConfig>().map_err(|error| error.to_string())
    }

    #[test]
    fn what_both_projects_say_is_understood() {
        let bare = read("{}").unwrap();
        assert_eq!(bare.endpoint.to_string(), "tcp://*:5557");
        assert_eq!((bare.buffer_steps, bare.hwm, bare.max_queue_size), (10_000, 100_000, 100_000));
        assert_eq!((bare.replay_endpoint, bare.topic.as_str()), (None, ""));
        for (text, enabled) in [
            ("{}", false),
            (r#"{"publisher":"zmq"}"#, true),
            (r#"{"publisher":"null"}"#, false),
            (r#"{"enable_kv_cache_events":true}"#, true),
            (r#"{"enable_kv_cache_events":true,"publisher":null}"#, true),
            (r#"{"enable_kv_cache_events":true,"publisher":"null"}"#, false),
            (r#"{"enable_kv_cache_events":false,"publisher":"zmq"}"#, false),
        ] {
            assert_eq!(read(text).unwrap().enabled, enabled, "{text}");
        }
        let full = r#"{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://[::1]:0",
            "replay_endpoint":"tcp://127.0.0.1:5558","buffer_steps":0,"hwm":7,
            "max_queue_size":1000000,"topic":"kv@a@b"}"#;
        let full = read(full).unwrap();
        assert_eq!((full.endpoint.host(), full.endpoint.port()), ("::1", 0));
        assert_eq!(full.endpoint.to_string(), "tcp://[::1]:0");
        assert_eq!((full.buffer_steps, full.hwm, full.topic.as_str()), (0, 7, "kv@a@b"));
    }

    #[test]
    fn publishers_listen_on_wildcards_and_connect_to_names() {
        for (text, listens) in [
            ("tcp://*:5557", true),
            ("tcp://0.0.0.0:1", true),
            ("tcp://[::]:1", true),
            ("tcp://127.0.0.1:5557", false),
            ("tcp://router.ns.svc:5557", false),
        ] {
            assert_eq!(Endpoint::read(text).unwrap().is_listened_on(), listens, "{text}");
        }
    }

    #[test]
    fn what_is_wrong_is_said_with_its_field() {
        for (text, says) in [
            ("", "a JSON object"),
            ("[]", "a JSON object"),
            (r#"{"topics":"a"}"#, "\"topics\""),
            (r#"{"publisher":"nats"}"#, "publisher"),
            (r#"{"publisher":7}"#, "publisher"),
            (r#"{"enable_kv_cache_events":"yes"}"#, "enable_kv_cache_events"),
            (r#"{"endpoint":"ipc:///tmp/x"}"#, "endpoint"),
            (r#"{"endpoint":"tcp://*"}"#, "endpoint"),
            (r#"{"endpoint":"tcp://:5557"}"#, "endpoint"),
            (r#"{"endpoint":"tcp://*:+1"}"#, "endpoint"),
            (r#"{"endpoint":"tcp://[::x]:1"}"#, "endpoint"),
            (r#"{"endpoint":"tcp://host:0"}"#, "endpoint"),
            (r#"{"replay_endpoint":5558}"#, "replay_endpoint"),
            (r#"{"buffer_steps":-1}"#, "buffer_steps"),
            (r#"{"hwm":0}"#, "hwm"),
            (r#"{"hwm":1.5}"#, "hwm"),
            (r#"{"max_queue_size":1000001}"#, "max_queue_size"),
            (r#"{"topic":["a"]}"#, "topic"),
        ] {
            let error = read(text).unwrap_err();
            assert!(
                error.contains(says) && error.contains("expected") || error.contains("there are"),
                "{text}: {error}"
            );
        }
        let long = format!(r#"{{"topic":"{}"}}"#, "ä".repeat(200));
        assert!(read(&long).unwrap_err().len() < 300);
    }
}
