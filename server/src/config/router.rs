//! Flags of `server router`.

use super::{AccessArgs, EdgeArgs, LogArgs, TraceArgs};
use crate::net::discovery::DiscoveryUrl;
use crate::router::RouterConfig;
use crate::router::choice::{ChoiceConfig, Policy};
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if (0.0..=1.0).contains(&number) => Ok(number),
        _ => Err("a number from 0 to 1 expected".to_owned()),
    }
}

fn at_least_one(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 1.0 => Ok(number),
        _ => Err("a number of 1 or more expected".to_owned()),
    }
}

/// A router has nobody to register with.
fn etcd(text: &str) -> Result<DiscoveryUrl, String> {
    match text.parse() {
        Ok(DiscoveryUrl::Router(_)) => Err("etcd://HOST:PORT[,HOST:PORT]/NAMESPACE expected; \
                                            without etcd workers register at --registry-port"
            .to_owned()),
        Ok(url) => Ok(url),
        Err(error) => Err(error.to_string()),
    }
}

/// Flags of the router.
#[derive(Clone, Debug, Args)]
pub struct RouterArgs {
    /// Base address of a decode or unified worker, like http://127.0.0.1:30002; several times.
    #[arg(
        long = "worker", value_name = "URL",
        required_unless_present_any = ["discovery", "registry_port"]
    )]
    pub workers: Vec<String>,
    /// etcd in which workers are found: etcd://HOST:PORT,HOST:PORT.../NAMESPACE.
    #[arg(long, value_name = "URL", value_parser = etcd, conflicts_with = "registry_port")]
    pub discovery: Option<DiscoveryUrl>,
    /// Port on which workers register without etcd, which only they may be able to reach; 0 picks a
    /// free one [default: none].
    #[arg(long, value_name = "PORT")]
    pub registry_port: Option<u16>,
    /// How a worker is chosen: by what it was sent and by load, by load alone, or in turn.
    #[arg(long, value_enum, default_value_t = Policy::CacheAware)]
    pub policy: Policy,
    /// Share of a prompt that a worker must have been sent before for that to count.
    #[arg(long, default_value_t = 0.3, value_parser = share, value_name = "SHARE")]
    pub cache_threshold: f64,
    /// Requests by which the busiest worker may be ahead of the least busy one before only load
    /// counts, if the next flag's limit is passed too.
    #[arg(long, default_value_t = 64, value_name = "REQUESTS")]
    pub balance_abs_threshold: u32,
    /// How many times as many requests as the least busy worker the busiest one may have.
    #[arg(long, default_value_t = 1.5, value_parser = at_least_one, value_name = "FACTOR")]
    pub balance_rel_threshold: f64,
    /// Seconds for which the router remembers what it sent where.
    #[arg(long, default_value_t = 600, value_name = "SECONDS")]
    pub router_ttl_secs: u64,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 picks a free one.
    #[arg(long, default_value_t = 30000)]
    pub port: u16,
    /// Most requests under way in all; one more is refused with 503.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub max_queued_requests: u32,
    /// What comes in over HTTP.
    #[command(flatten)]
    pub edge: EdgeArgs,
    /// Who may ask.
    #[command(flatten)]
    pub access: AccessArgs,
    /// What is recorded of traces.
    #[command(flatten)]
    pub trace: TraceArgs,
    /// What is logged, and how.
    #[command(flatten)]
    pub log: LogArgs,
    /// File (TOML) with flags, those of the router in its table named router.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

impl RouterArgs {
    /// How the router is to behave.
    #[must_use]
    pub fn router_config(&self) -> RouterConfig {
        RouterConfig {
            workers: self.workers.clone(),
            may_join: self.discovery.is_some() || self.registry_port.is_some(),
            choice: ChoiceConfig {
                policy: self.policy,
                cache_threshold: self.cache_threshold,
                balance_abs_threshold: self.balance_abs_threshold,
                balance_rel_threshold: self.balance_rel_threshold,
                ttl: Duration::from_secs(self.router_ttl_secs),
                ..ChoiceConfig::default()
            },
            max_queued_requests: self.max_queued_requests as usize,
            max_body_bytes: self.edge.max_body_bytes(),
            ..RouterConfig::default()
        }
    }
}
