//! Who else is there: workers say where they are, routers and decode workers hear of it.
//!
//! Two places can be told: etcd, under keys that live as long as a lease is renewed, or a router that
//! keeps such leases itself. What is heard is always the whole list, read anew whenever something
//! may have changed, so that nothing depends on having seen every change.
//!
//! A place that is dead or silent changes nothing of what runs: nobody hears a list then, and what
//! was heard last stays true. [`Members`] says what a list means for those who listen.

mod ask;
mod etcd;
mod lease;
mod member;
mod members;
mod url;

pub use ask::DiscoveryError;
pub use lease::{Full, LEASES_MAX, Leases};
pub use member::{BadMember, Member, MemberRole};
pub use members::{Change, Listening, Members, Notice};
pub use url::{BadDiscoveryUrl, DiscoveryUrl};

use ask::Asker;
use etcd::Etcd;
use std::time::Duration;
use tokio::sync::watch;

/// How often things are done.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// How long a worker counts as there after it last said so, whole seconds.
    pub lease: Duration,
    /// Time between two readings of the list while nothing changes.
    pub refresh: Duration,
    /// Longest wait for an answer.
    pub timeout: Duration,
    /// Pause after a first error; it doubles up to `pause_max`.
    pub pause: Duration,
    /// Longest pause between two attempts.
    pub pause_max: Duration,
    /// How long one that is missing in lists is still taken to be there.
    pub grace: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(10),
            refresh: Duration::from_secs(3),
            timeout: Duration::from_secs(3),
            pause: Duration::from_millis(250),
            pause_max: Duration::from_secs(4),
            // Longer than those who are there need to say so again after etcd lost everything.
            grace: Duration::from_secs(15),
        }
    }
}

/// Says once when a place stops answering, and once when it answers again.
struct Voice {
    what: &'static str,
    place: String,
    is_up: Option<bool>,
    pace: Pace,
    pause: Duration,
}

impl Voice {
    fn new(what: &'static str, url: &DiscoveryUrl, pace: Pace) -> Self {
        Self { what, place: url.to_string(), is_up: None, pace, pause: pace.pause }
    }

    fn up(&mut self) {
        self.pause = self.pace.pause;
        if self.is_up != Some(true) {
            tracing::info!(place = self.place, "discovery: {}", self.what);
        }
        self.is_up = Some(true);
    }

    /// Waits before the next attempt.
    async fn down(&mut self, error: &DiscoveryError) {
        if self.is_up == Some(false) {
            tracing::debug!(place = self.place, "discovery: {error}");
        } else {
            tracing::warn!(place = self.place, "discovery: {error}; what is known stays");
        }
        self.is_up = Some(false);
        tokio::time::sleep(self.pause).await;
        self.pause = (self.pause * 2).min(self.pace.pause_max);
    }
}

/// Tells every list of members that can be read to `heard`, for ever. At a router that keeps leases
/// only members hear lists, see [`announce`].
pub async fn follow(url: &DiscoveryUrl, pace: Pace, mut heard: impl FnMut(Vec<Member>) + Send) {
    let DiscoveryUrl::Etcd { endpoints, namespace } = url else { return };
    let mut etcd = Etcd::new(endpoints.clone(), namespace, Asker::new(pace.timeout));
    let mut voice = Voice::new("the list of workers is read", url, pace);
    loop {
        match etcd.list().await {
            Ok((members, revision)) => {
                voice.up();
                heard(members);
                // A watch says when to read again, and no more: the list says what is true. One that
                // cannot be had or breaks off is the next reading's to find out.
                match tokio::time::timeout(pace.refresh, etcd.changed(revision + 1)).await {
                    // What comes at once is read at once.
                    Ok(Ok(())) => tokio::time::sleep(pace.pause / 8).await,
                    Ok(Err(_)) => tokio::time::sleep(pace.refresh).await,
                    Err(_) => {}
                }
            }
            Err(error) => voice.down(&error).await,
        }
    }
}

/// Says that `member` is there, again and again until `stop` holds true or its sender is gone; then
/// that it has left. `heard` gets the lists that the place answers with, if it does.
pub async fn announce(
    url: &DiscoveryUrl,
    member: &Member,
    pace: Pace,
    mut stop: watch::Receiver<bool>,
    heard: impl FnMut(Vec<Member>) + Send,
) {
    let asker = Asker::new(pace.timeout);
    match url {
        DiscoveryUrl::Etcd { endpoints, namespace } => {
            let mut etcd = Etcd::new(endpoints.clone(), namespace, asker);
            let mut lease = None;
            tokio::select! {
                () = keep_in_etcd(&mut etcd, url, member, pace, &mut lease) => {}
                _ = stop.wait_for(|&stop| stop) => {}
            }
            // Without an answer the lease ends by itself.
            if let Some(lease) = lease {
                let _ = etcd.revoke(&lease).await;
            }
        }
        DiscoveryUrl::Router(authority) => {
            let at = ask::RouterLease::new(authority.clone(), member, asker);
            tokio::select! {
                () = keep_at_router(&at, url, pace, heard) => {}
                _ = stop.wait_for(|&stop| stop) => {}
            }
            let _ = at.remove().await;
        }
    }
}

/// Keeps a key under a lease; `lease` holds the one that is alive.
async fn keep_in_etcd(
    etcd: &mut Etcd,
    url: &DiscoveryUrl,
    member: &Member,
    pace: Pace,
    lease: &mut Option<String>,
) {
    let mut voice = Voice::new("this worker is in the list", url, pace);
    loop {
        let kept = match lease.clone() {
            Some(id) => etcd.keep_alive(&id).await,
            None => enter(etcd, member, pace, lease).await.map(|()| true),
        };
        match kept {
            Ok(true) => {
                voice.up();
                tokio::time::sleep(pace.lease / 3).await;
            }
            // It ended while nobody could renew it, or etcd has lost it: the next one follows at once.
            Ok(false) => *lease = None,
            Err(error) => voice.down(&error).await,
        }
    }
}

/// Writes the key under a new lease.
async fn enter(
    etcd: &mut Etcd,
    member: &Member,
    pace: Pace,
    lease: &mut Option<String>,
) -> Result<(), DiscoveryError> {
    let id = etcd.grant(pace.lease).await?;
    *lease = Some(id.clone());
    let written = etcd.put(member, &id).await;
    if written.is_err() {
        // Whether the key is there is not known: a new lease settles it, and this one ends by itself.
        *lease = None;
    }
    written
}

async fn keep_at_router(
    at: &ask::RouterLease,
    url: &DiscoveryUrl,
    pace: Pace,
    mut heard: impl FnMut(Vec<Member>) + Send,
) {
    let mut voice = Voice::new("this worker is registered", url, pace);
    loop {
        match at.renew(pace.lease).await {
            Ok(members) => {
                voice.up();
                heard(members);
                tokio::time::sleep(pace.lease / 3).await;
            }
            Err(error) => voice.down(&error).await,
        }
    }
}
