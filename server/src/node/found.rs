//! A worker among others: it says where it is, and a decode worker finds its prefill workers.

use super::Node;
use super::peers::Peers;
use crate::clock::Clock;
use crate::config::{ConfigError, Mode, ServeArgs};
use crate::engine::Engine as _;
use crate::net::discovery::{
    self, Change, DiscoveryUrl, Listening, Member, MemberRole, Members, Notice, Pace,
};
use anyhow::Context as _;
use std::net::SocketAddr;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The part of a process that tells others about it.
#[derive(Debug)]
pub struct Announced {
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Announced {
    /// Who can say that the worker leaves; others are told at once.
    #[must_use]
    pub fn stopper(&self) -> watch::Sender<bool> {
        self.stop.clone()
    }

    /// Waits until others were told, or could not be.
    pub async fn ended(self) {
        self.stop.send_replace(true);
        // It can only have ended.
        let _ = self.task.await;
    }
}

/// Connects to prefill workers as lists of them say.
struct Finder {
    members: Members,
    peers: Peers,
    clock: Clock,
}

impl Finder {
    fn hear(&mut self, listing: &[Member]) {
        self.members.handle_listing(self.clock.elapsed(), listing);
        while let Some(change) = self.members.poll_change() {
            let done = match &change {
                Change::Joined(address) => {
                    tracing::info!(address, "discovery: a prefill worker has joined");
                    self.peers.connect(address)
                }
                Change::Left(address) => {
                    tracing::info!(address, "discovery: a prefill worker has left");
                    self.peers.disconnect(address)
                }
            };
            if let Err(error) = done {
                tracing::warn!("discovery: {error}");
            }
        }
        while let Some(Notice { address, why }) = self.members.poll_notice() {
            tracing::warn!(address, "discovery: a prefill worker is not used: {why}");
        }
    }
}

/// What others are told.
fn member_of(args: &ServeArgs, node: &Node, address: SocketAddr) -> anyhow::Result<Member> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).context("read random bytes for this worker's id")?;
    let host = args.advertised_host();
    let at = |port: &str| {
        if host.contains(':') && !host.starts_with('[') {
            format!("[{host}]:{port}")
        } else {
            format!("{host}:{port}")
        }
    };
    let port = node.bootstrap().and_then(|address| address.rsplit_once(':'));
    let engine = node.engine();
    let member = Member {
        id: format!("{:032x}", u128::from_be_bytes(bytes)),
        role: match args.disaggregation_mode {
            Mode::Prefill => MemberRole::Prefill,
            Mode::Decode => MemberRole::Decode,
            Mode::Null => MemberRole::Null,
            Mode::Both => MemberRole::Both,
        },
        url: format!("http://{}", at(&address.port().to_string())),
        bootstrap: port.map(|(_, port)| at(port)),
        model: engine.info().model_id.clone(),
        fingerprint: engine.info().fingerprint.clone(),
    };
    member.check().context("--advertise-host cannot be told to others")?;
    Ok(member)
}

/// Tells others of this worker, and a decode worker of its prefill workers, as long as the process
/// runs. Must be called on a Tokio runtime. None without `--discovery`.
///
/// # Errors
/// There are no random bytes, or an address that others could not use.
pub fn announce(
    args: &ServeArgs,
    node: &mut Node,
    address: SocketAddr,
) -> anyhow::Result<Option<Announced>> {
    let Some(url) = args.discovery.clone() else { return Ok(None) };
    let pace = Pace::default();
    let member = member_of(args, node, address)?;
    let listening = Listening::Peers { fingerprint: member.fingerprint.clone() };
    let members = Members::new(listening, pace.grace);
    let finder = node.peers.take().map(|peers| Finder { members, peers, clock: Clock::start() });
    let (stop, stopped) = watch::channel(false);
    let task = tokio::spawn(async move {
        match (finder, &url) {
            (Some(mut finder), DiscoveryUrl::Etcd { .. }) => {
                let found = discovery::follow(&url, pace, |listing| finder.hear(&listing));
                // The list is of use for as long as this worker is in it.
                tokio::select! {
                    () = found => {}
                    () = discovery::announce(&url, &member, pace, stopped, |_| {}) => {}
                }
            }
            (Some(mut finder), DiscoveryUrl::Router(_)) => {
                let hear = |listing: Vec<Member>| finder.hear(&listing);
                discovery::announce(&url, &member, pace, stopped, hear).await;
            }
            (None, _) => discovery::announce(&url, &member, pace, stopped, |_| {}).await,
        }
    });
    Ok(Some(Announced { stop, task }))
}

impl ServeArgs {
    /// The host that others are told.
    #[must_use]
    pub fn advertised_host(&self) -> &str {
        self.advertise_host.as_deref().unwrap_or(&self.host)
    }

    /// Whether others could reach the host that they would be told.
    pub(crate) fn check_discovery(&self) -> Result<(), ConfigError> {
        let host = self.advertised_host().trim_start_matches('[').trim_end_matches(']');
        let is_any = host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_unspecified());
        match self.discovery {
            Some(_) if is_any || host.is_empty() => {
                Err(ConfigError::Unreachable(self.advertised_host().to_owned()))
            }
            None if self.advertise_host.is_some() => Err(ConfigError::NobodyIsTold),
            _ => Ok(()),
        }
    }
}
