//! Where workers are told and heard of.

use axum::http::uri::Authority;
use std::fmt;
use std::str::FromStr;

/// Most addresses of one etcd.
const ENDPOINTS_MAX: usize = 16;

/// A place that knows workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiscoveryUrl {
    /// `etcd://HOST:PORT[,HOST:PORT]/NAMESPACE`: etcd's clients' port, spoken to in JSON.
    Etcd {
        /// Its addresses; one that answers is enough.
        endpoints: Vec<Authority>,
        /// Those with one namespace hear of each other.
        namespace: String,
    },
    /// `http://HOST:PORT`: a router's registry port.
    Router(Authority),
}

/// Not such a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("etcd://HOST:PORT[,HOST:PORT]/NAMESPACE or http://HOST:PORT expected: {0}")]
pub struct BadDiscoveryUrl(&'static str);

fn authority(text: &str) -> Result<Authority, BadDiscoveryUrl> {
    let bad = BadDiscoveryUrl("an address is not like HOST:PORT");
    let authority: Authority = text.parse().map_err(|_| bad)?;
    let has_port = authority.port_u16().is_some_and(|port| port > 0);
    let is_plain = !authority.as_str().contains('@') && !authority.host().is_empty();
    if has_port && is_plain { Ok(authority) } else { Err(bad) }
}

impl FromStr for DiscoveryUrl {
    type Err = BadDiscoveryUrl;

    fn from_str(text: &str) -> Result<Self, BadDiscoveryUrl> {
        if let Some(rest) = text.strip_prefix("http://") {
            return Ok(Self::Router(authority(rest.strip_suffix('/').unwrap_or(rest))?));
        }
        let rest = text.strip_prefix("etcd://").ok_or(BadDiscoveryUrl("another scheme"))?;
        let (hosts, namespace) =
            rest.split_once('/').ok_or(BadDiscoveryUrl("the namespace is missing"))?;
        let endpoints: Result<Vec<Authority>, _> = hosts.split(',').map(authority).collect();
        let endpoints = endpoints?;
        if endpoints.len() > ENDPOINTS_MAX {
            return Err(BadDiscoveryUrl("at most 16 addresses can be given"));
        }
        let is_good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if !(1..=128).contains(&namespace.len()) || !namespace.chars().all(is_good) {
            return Err(BadDiscoveryUrl(
                "a namespace has 1 to 128 characters of a-z, A-Z, 0-9, -, _ and .",
            ));
        }
        Ok(Self::Etcd { endpoints, namespace: namespace.to_owned() })
    }
}

impl fmt::Display for DiscoveryUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Etcd { endpoints, namespace } => {
                let hosts: Vec<&str> = endpoints.iter().map(Authority::as_str).collect();
                write!(f, "etcd://{}/{namespace}", hosts.join(","))
            }
            Self::Router(authority) => write!(f, "http://{authority}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_whole_or_not_at_all() {
        for good in ["etcd://a:1/n", "etcd://a:1,[::1]:2,10.0.0.1:3/my-ns_1.x", "http://r:30100"] {
            let url: DiscoveryUrl = good.parse().unwrap();
            assert_eq!(url.to_string(), good);
        }
        assert_eq!("http://r:1/".parse::<DiscoveryUrl>().unwrap().to_string(), "http://r:1");
        for (bad, says) in [
            ("", "another scheme"),
            ("https://a:1", "another scheme"),
            ("etcd://a:1", "the namespace is missing"),
            ("etcd://a:1/", "1 to 128 characters"),
            ("etcd://a:1/a/b", "1 to 128 characters"),
            ("etcd:///n", "HOST:PORT"),
            ("etcd://a/n", "HOST:PORT"),
            ("etcd://a:0/n", "HOST:PORT"),
            ("etcd://a:1,/n", "HOST:PORT"),
            ("etcd://user:password@a:1/n", "HOST:PORT"),
            ("http://a:1/workers", "HOST:PORT"),
            ("http://:1", "HOST:PORT"),
        ] {
            let error = bad.parse::<DiscoveryUrl>().unwrap_err().to_string();
            assert!(error.contains(says), "{bad}: {error}");
            assert!(!error.contains("password"), "{error}");
        }
    }
}
