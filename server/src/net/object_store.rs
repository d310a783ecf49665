//! A store of the cache in a bucket that other servers read and write too.
//!
//! ```text
//! PREFIX/<32 hex of the fingerprint>/LAYOUT
//!                                    <first 2 hex of the chain>/<64 hex of the chain>.<part>
//! ```
//!
//! The calls block; the requests run on a thread called `cache-net`. None of them takes longer than
//! the timeout, repetitions included, so that a dead server fails soon. They must not be made on a
//! thread of another tokio runtime.

use super::config::{Manner, ObjectUrl, client};
use futures_util::StreamExt as _;
use hicache::store::format::OBJECT_ALIGN;
use hicache::store::{BlobStore, Listed, StoreError};
use hicache::{ObjectKey, Part};
use kv_pool::{ChainHash, Fingerprint};
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, Error, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutPayload,
    RetryConfig,
};
use std::fmt::{self, Write as _};
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Longest time of one operation unless the caller says otherwise.
pub const TIMEOUT: Duration = Duration::from_secs(5);
/// Repetitions of a request that failed.
const RETRIES_MAX: usize = 2;
/// Longest listing.
const LISTING_MAX: Duration = Duration::from_secs(24 * 3600);
/// First line of a layout object.
const LAYOUT_VERSION: &str = "dsv4 object store 1";
/// Beginning of all of them.
const LAYOUT_NAME: &str = "dsv4 object store ";
const LAYOUT: &str = "LAYOUT";
/// What a store says that has not what its address names.
const NO_BUCKET: &str = "there is no such bucket";
/// Most bytes of a layout object that are read.
const LAYOUT_BYTES_MAX: u64 = 1 << 20;
/// Most characters of a line or of a server's words in a message.
const SHOWN_CHARS: usize = 300;

/// Where a [`RemoteStore`] lies and what it holds.
#[derive(Clone, Debug)]
pub struct RemoteConfig {
    /// Bucket and prefix, for stores of all fingerprints.
    pub url: ObjectUrl,
    /// Meaning of all bytes.
    pub fingerprint: Fingerprint,
    /// Text from which the fingerprint follows, see [`kv_pool::FingerprintInput::describe`].
    pub layout: String,
    /// Longest time of one operation; of one page of names where it lists.
    pub timeout: Duration,
}

/// Why a remote store cannot be used, or not now.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// The environment does not make a client.
    #[error("object store {url}: {reason}: see the {variables} variables")]
    Client {
        /// Bucket and prefix.
        url: String,
        /// What is wrong.
        reason: String,
        /// How the names of those begin that configure it.
        variables: &'static str,
    },
    /// There can be no thread for it.
    #[error("start the thread of object store {url}: {source}")]
    Thread {
        /// Bucket and prefix.
        url: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// Our fingerprint has another layout there.
    #[error("{name} of object store {url} describes another layout: {differs}")]
    LayoutDiffers {
        /// Bucket and prefix.
        url: String,
        /// Name of the layout object.
        name: String,
        /// The first line that differs.
        differs: String,
    },
    /// The server did not answer, or not as it should.
    #[error("{during} {name} of object store {url}: {reason}")]
    Unreachable {
        /// Bucket and prefix.
        url: String,
        /// What was going on.
        during: &'static str,
        /// Name of the object or prefix.
        name: String,
        /// What was said.
        reason: String,
    },
}

/// How a listing ended that no server kept from its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    Complete,
    /// At a name that [`Path`] does not have, with an empty or a dotted part.
    AtUnspeakable,
}

/// Objects of one fingerprint in a bucket.
///
/// Writes are atomic, as far as the server's are. Uses are not noted: whoever minds the bucket's
/// size sees only when an object was written.
pub struct RemoteStore {
    client: Box<dyn ObjectStore>,
    /// Always there but in `drop`.
    runtime: Option<tokio::runtime::Runtime>,
    url: ObjectUrl,
    /// Prefix of the objects of our fingerprint.
    root: Path,
    /// With its first line.
    layout: String,
    /// The layout object was there and is right, or was written.
    is_claimed: AtomicBool,
    secrets: Vec<String>,
    /// There were some, of whatever length.
    has_credentials: bool,
    timeout: Duration,
}

impl fmt::Debug for RemoteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("RemoteStore");
        shown.field("url", &self.url).field("root", &self.root).finish_non_exhaustive()
    }
}

impl Drop for RemoteStore {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl RemoteStore {
    /// Makes a client. Nothing is sent, see [`RemoteStore::claim`].
    ///
    /// # Errors
    ///
    /// [`RemoteError::Client`], [`RemoteError::Thread`].
    pub fn new(config: RemoteConfig) -> Result<Self, RemoteError> {
        Self::with_variables(config, &[])
    }

    /// The same, with variables that count instead of those of the environment.
    ///
    /// # Errors
    ///
    /// [`RemoteError::Client`], [`RemoteError::Thread`].
    pub fn with_variables(
        config: RemoteConfig,
        variables: &[(&str, &str)],
    ) -> Result<Self, RemoteError> {
        let RemoteConfig { url, fingerprint, layout, timeout } = config;
        super::choose_cryptography();
        let options = ClientOptions::new().with_timeout(timeout).with_connect_timeout(timeout / 2);
        let backoff = BackoffConfig {
            init_backoff: Duration::from_millis(50),
            max_backoff: Duration::from_millis(500),
            base: 2.0,
        };
        let retry = RetryConfig { backoff, max_retries: RETRIES_MAX, retry_timeout: timeout };
        let (client, secrets, has_credentials) = client(&url, variables, Manner { options, retry });
        let client = client.map_err(|error| RemoteError::Client {
            url: url.to_string(),
            reason: reason(&error, &secrets),
            variables: url.variables(),
        })?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("cache-net")
            .enable_all()
            .build()
            .map_err(|source| RemoteError::Thread { url: url.to_string(), source })?;
        let fingerprint = hex(&fingerprint.0);
        let root = Path::from_iter(url.prefix().iter().map(String::as_str).chain([&*fingerprint]));
        Ok(Self {
            client,
            runtime: Some(runtime),
            url,
            root,
            layout: format!("{LAYOUT_VERSION}\n{layout}"),
            is_claimed: AtomicBool::new(false),
            secrets,
            has_credentials,
            timeout,
        })
    }

    /// Bucket and prefix.
    #[must_use]
    pub const fn url(&self) -> &ObjectUrl {
        &self.url
    }

    /// Compares the layout object with ours, and writes it where there is none. Until that was done,
    /// each write does it before.
    ///
    /// # Errors
    ///
    /// [`RemoteError::LayoutDiffers`]; [`RemoteError::Unreachable`].
    pub fn claim(&self) -> Result<(), RemoteError> {
        if self.is_claimed.load(Ordering::Acquire) {
            return Ok(());
        }
        let path = self.root.clone().join(LAYOUT);
        let unreachable = |during, reason| RemoteError::Unreachable {
            url: self.url.to_string(),
            during,
            name: path.to_string(),
            reason,
        };
        let found = self.ask(self.layout_there(&path));
        let theirs = match found.map_err(|reason| unreachable("read", self.hint(reason)))? {
            Some(theirs) => theirs,
            None => {
                let payload = PutPayload::from(self.layout.clone());
                let put = self.ask(async {
                    match self.client.put(&path, payload).await {
                        Err(Error::NotFound { .. }) => {
                            Err(Error::Generic { store: "object store", source: NO_BUCKET.into() })
                        }
                        put => put.map(drop),
                    }
                });
                put.map_err(|reason| unreachable("write", self.hint(reason)))?;
                self.layout.clone()
            }
        };
        if !theirs.starts_with(LAYOUT_NAME) {
            // Not even of another version: somebody else answers, or its name was in use.
            return Err(unreachable("read", "what is there is no layout of a cache".to_owned()));
        }
        if theirs != self.layout {
            let differs = first_difference(&theirs, &self.layout);
            let (url, name) = (self.url.to_string(), path.to_string());
            return Err(RemoteError::LayoutDiffers { url, name, differs });
        }
        self.is_claimed.store(true, Ordering::Release);
        Ok(())
    }

    /// Says what may be behind an error of a store that was never reached.
    fn hint(&self, reason: String) -> String {
        // A bucket that is not there is another matter.
        if !self.has_credentials && !reason.contains(NO_BUCKET) {
            let variables = self.url.variables();
            return format!("{reason}; no credentials are set, see the {variables} variables");
        }
        reason
    }

    /// The text of the layout object, as much of it as counts; none if there is no such object.
    async fn layout_there(&self, path: &Path) -> Result<Option<String>, Error> {
        let got = match self.client.get(path).await {
            Err(Error::NotFound { .. }) => return Ok(None),
            got => got?,
        };
        if got.meta.size > LAYOUT_BYTES_MAX {
            return Ok(Some(format!("{} bytes", got.meta.size)));
        }
        Ok(Some(String::from_utf8_lossy(&got.bytes().await?).into_owned()))
    }

    /// As [`BlobStore::list`], for at most so long; what was found until then was told.
    ///
    /// # Errors
    ///
    /// [`RemoteError::Unreachable`].
    pub fn list_within(
        &self,
        limit: Duration,
        found: &mut dyn FnMut(Listed),
    ) -> Result<(), RemoteError> {
        let until = Instant::now() + limit.min(LISTING_MAX);
        let mut told = None;
        match self.list_below(&self.root, until, &mut told, found)? {
            Ended::Complete => return Ok(()),
            Ended::AtUnspeakable => {}
        }
        // Somebody has put a name there that no client of this kind can say, which ends a listing:
        // in parts, at most the one with that name is lost.
        for first in 0..=u8::MAX {
            self.list_below(&self.root.clone().join(hex(&[first])), until, &mut told, found)?;
        }
        Ok(())
    }

    /// Lists what lies below a prefix and behind `told`, in the order of names, which is that in
    /// which servers list.
    fn list_below(
        &self,
        prefix: &Path,
        until: Instant,
        told: &mut Option<Path>,
        found: &mut dyn FnMut(Listed),
    ) -> Result<Ended, RemoteError> {
        let unreachable = |reason| RemoteError::Unreachable {
            url: self.url.to_string(),
            during: "list",
            name: prefix.to_string(),
            reason,
        };
        let mut all = self.client.list(Some(prefix));
        loop {
            if Instant::now() > until {
                return Err(unreachable("not done in time".to_owned()));
            }
            match self.ask_typed(all.next()).map_err(unreachable)? {
                Some(Ok(meta)) => {
                    if told.as_ref().is_none_or(|told| *told < meta.location) {
                        self.listed(&meta).into_iter().for_each(&mut *found);
                        *told = Some(meta.location);
                    }
                }
                Some(Err(Error::InvalidPath { .. })) => return Ok(Ended::AtUnspeakable),
                Some(Err(error)) => return Err(unreachable(reason(&error, &self.secrets))),
                None => return Ok(Ended::Complete),
            }
        }
    }

    /// An object of ours, if it is one.
    fn listed(&self, meta: &ObjectMeta) -> Option<Listed> {
        let key = key_of(meta.location.filename()?)?;
        let used = u64::try_from(meta.last_modified.timestamp_millis()).unwrap_or(0);
        (self.path(&key) == meta.location).then_some(Listed { key, bytes: meta.size, used })
    }

    fn path(&self, key: &ObjectKey) -> Path {
        let chain = hex(&key.chain.0);
        self.root.clone().join(&chain[..2]).join(format!("{chain}.{}", key.part.name()))
    }

    /// Waits for an answer, for as long as the timeout; an error is told without secrets.
    fn ask<T>(&self, answer: impl Future<Output = Result<T, Error>>) -> Result<T, String> {
        self.ask_typed(answer)?.map_err(|error| reason(&error, &self.secrets))
    }

    fn ask_typed<T>(&self, answer: impl Future<Output = T>) -> Result<T, String> {
        let runtime = self.runtime.as_ref().ok_or("it is closed")?;
        let answer = async { tokio::time::timeout(self.timeout, answer).await };
        runtime
            .block_on(answer)
            .map_err(|_| format!("no answer within {} ms", self.timeout.as_millis()))
    }

    /// Waits for an answer about an object.
    fn ask_about<T>(
        &self,
        during: &'static str,
        key: &ObjectKey,
        answer: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, StoreError> {
        let failed = |reason| StoreError::Failed { during, key: *key, reason };
        match self.ask_typed(answer).map_err(failed)? {
            Ok(answer) => Ok(answer),
            Err(Error::NotFound { .. }) => Err(StoreError::Missing { key: *key }),
            Err(error) => Err(failed(reason(&error, &self.secrets))),
        }
    }
}

impl BlobStore for RemoteStore {
    fn name(&self) -> &'static str {
        "remote"
    }

    fn read(&self, key: &ObjectKey, into: &mut [u8]) -> Result<(), StoreError> {
        let wanted = into.len() as u64;
        let found = self.ask_about("read", key, async {
            let got = self.client.get(&self.path(key)).await?;
            if got.meta.size != wanted {
                return Ok(got.meta.size);
            }
            let (mut stream, mut at) = (got.into_stream(), 0);
            while let Some(chunk) = stream.next().await {
                let chunk = chunk?;
                if let Some(space) = into.get_mut(at..at + chunk.len()) {
                    space.copy_from_slice(&chunk);
                }
                at += chunk.len();
                if at > into.len() {
                    break;
                }
            }
            Ok(at as u64)
        });
        if matches!(found, Err(StoreError::Missing { .. })) {
            // It was there. If all of them have gone, so has the layout: the next write sees to it.
            self.is_claimed.store(false, Ordering::Release);
        }
        let found = found?;
        if found == wanted {
            return Ok(());
        }
        Err(StoreError::Length { key: *key, found, wanted })
    }

    fn write(&self, key: &ObjectKey, bytes: &[u8]) -> Result<(), StoreError> {
        if bytes.is_empty() || !bytes.len().is_multiple_of(OBJECT_ALIGN) {
            return Err(StoreError::NotWhole { key: *key, bytes: bytes.len() as u64 });
        }
        self.claim().map_err(|error| StoreError::Failed {
            during: "claim the store for",
            key: *key,
            reason: error.to_string(),
        })?;
        let payload = PutPayload::from(bytes.to_vec());
        let put = async { self.client.put(&self.path(key), payload).await.map(drop) };
        match self.ask_about("write", key, put) {
            // Of a bucket that is not there.
            Err(StoreError::Missing { key }) => Err(StoreError::Failed {
                during: "write",
                key,
                reason: format!("there is no bucket {}", self.url),
            }),
            result => result,
        }
    }

    fn remove(&self, key: &ObjectKey) -> Result<(), StoreError> {
        match self.ask_about("remove", key, async { self.client.delete(&self.path(key)).await }) {
            Err(StoreError::Missing { .. }) => Ok(()),
            result => result,
        }
    }

    fn list(&self, found: &mut dyn FnMut(Listed)) -> Result<(), StoreError> {
        self.list_within(Duration::MAX, found).map_err(|error| StoreError::Failed {
            during: "list",
            // There is none to be named.
            key: ObjectKey::block(ChainHash([0; 32])),
            reason: error.to_string(),
        })
    }

    fn size(&self, key: &ObjectKey) -> Result<Option<u64>, StoreError> {
        match self.ask_about("look for", key, async { self.client.head(&self.path(key)).await }) {
            Ok(found) => Ok(Some(found.size)),
            Err(StoreError::Missing { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn notes_uses(&self) -> bool {
        false
    }

    fn touch(&self, _: &ObjectKey) -> Result<(), StoreError> {
        Ok(())
    }
}

/// An error and its first cause, without what a server repeats of a request and without secrets.
fn reason(error: &Error, secrets: &[String]) -> String {
    let mut text = match error {
        Error::PermissionDenied { .. } => "permission denied".to_owned(),
        Error::Unauthenticated { .. } => "the credentials were not accepted".to_owned(),
        other => other.to_string(),
    };
    let is_short = !text.contains("Generic");
    let first = std::iter::successors(std::error::Error::source(error), |error| error.source())
        .last()
        .map(ToString::to_string)
        .filter(|cause| !is_short && !text.contains(cause.as_str()));
    if let Some(cause) = first {
        text = format!("{text}: {cause}");
    }
    // Bodies of answers are XML, and the one about a token that has expired has the token in it.
    let bare = text.split('<').next().unwrap_or_default().trim_end();
    let bare = secrets.iter().fold(bare.to_owned(), |text, secret| text.replace(secret, "..."));
    bare.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(SHOWN_CHARS).collect()
}

/// The first line of ours that is another one there.
fn first_difference(theirs: &str, ours: &str) -> String {
    let (mut there, mut here) = (theirs.lines(), ours.lines());
    loop {
        let (a, b) = (there.next(), here.next());
        if a == b && a.is_some() {
            continue;
        }
        let cut = |line: Option<&str>| -> String {
            line.unwrap_or("nothing").chars().take(SHOWN_CHARS / 3).collect()
        };
        return format!("{:?} there, {:?} here", cut(a), cut(b));
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The key in the last part of an object's name.
fn key_of(name: &str) -> Option<ObjectKey> {
    let (chain, part) = name.split_once('.')?;
    let part = Part::ALL.into_iter().find(|candidate| candidate.name() == part)?;
    if chain.len() != 64 || !chain.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    let mut hash = [0; 32];
    for (byte, digits) in hash.iter_mut().zip(chain.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(ObjectKey { chain: ChainHash(hash), part })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_others_are_none() {
        let key = ObjectKey::boundary(ChainHash([0xa7; 32]));
        let name = format!("{}.boundary", hex(&key.chain.0));
        assert_eq!(key_of(&name), Some(key));
        for bad in ["LAYOUT", "", ".block", &name[1..], &name.to_uppercase(), "ä.block"] {
            assert_eq!(key_of(bad), None, "{bad}");
        }
    }

    #[test]
    fn reasons_have_neither_bodies_nor_secrets() {
        let says = |text: &str| Error::Generic { store: "S3", source: text.to_owned().into() };
        let secrets = ["hunter2".to_owned()];
        let text = reason(&says("status 400: <Error><Token>abc</Token></Error>"), &secrets);
        assert!(text.contains("status 400") && !text.contains("abc"), "{text}");
        let text = reason(&says("sent hunter2 in vain"), &secrets);
        assert!(text.contains("in vain") && !text.contains("hunter2"), "{text}");
    }

    #[test]
    fn the_first_line_that_differs_is_named() {
        assert_eq!(first_difference("a\nb\n", "a\nc\n"), "\"b\" there, \"c\" here");
        assert_eq!(first_difference("a\n", "a\nc\n"), "\"nothing\" there, \"c\" here");
    }
}
