//! What a worker says about itself.

use axum::http::Uri;
use axum::http::uri::Authority;
use serde::{Deserialize, Serialize};

/// Most bytes of a text in it.
const TEXT_MAX: usize = 512;

/// What a worker does for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemberRole {
    /// Computes prompts for decode workers.
    Prefill,
    /// Answers requests, with the help of prefill workers.
    Decode,
    /// Answers requests alone.
    Null,
    /// Answers requests with a prefill worker of its own.
    Both,
}

impl MemberRole {
    /// Whether requests may be sent to it.
    #[must_use]
    pub const fn takes_requests(self) -> bool {
        !matches!(self, Self::Prefill)
    }
}

/// A worker as others know it. What it does not know of is passed over, so that later versions can
/// say more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Of this process; never used twice.
    pub id: String,
    /// What it does.
    pub role: MemberRole,
    /// Base address, like `http://10.0.0.1:30001`.
    pub url: String,
    /// Where decode workers connect to a prefill worker, `HOST:PORT`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootstrap: Option<String>,
    /// Id of its model in the API.
    pub model: String,
    /// Layout of its pages: a prefill and a decode worker need the same.
    pub fingerprint: String,
}

/// Something that no worker of ours has said.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadMember {
    /// No JSON with these fields.
    #[error("no worker: {0}")]
    NoWorker(String),
    /// A text that is too long to be kept or logged.
    #[error("{0} is longer than {TEXT_MAX} bytes")]
    TooLong(&'static str),
    /// An id that cannot stand in a path.
    #[error("id: 1 to 128 characters of a-z, A-Z, 0-9 and - expected")]
    Id,
    /// An address that no request can be sent to.
    #[error("url: http://HOST:PORT expected")]
    Url,
    /// A prefill worker that nobody could connect to.
    #[error("bootstrap: HOST:PORT of a prefill worker expected")]
    Bootstrap,
}

impl Member {
    /// Reads and checks what is said of a worker.
    ///
    /// # Errors
    /// [`BadMember`] for what is no worker of ours.
    pub fn read(bytes: &[u8]) -> Result<Self, BadMember> {
        let member: Self = serde_json::from_slice(bytes).map_err(|error| {
            // Without what was found, which may be long.
            let what = if error.is_data() { "a field is missing or wrong" } else { "no JSON" };
            BadMember::NoWorker(what.to_owned())
        })?;
        member.check()?;
        Ok(member)
    }

    /// Checks what others will rely on.
    ///
    /// # Errors
    /// [`BadMember`], the first that is wrong.
    pub fn check(&self) -> Result<(), BadMember> {
        let texts = [
            ("url", &self.url),
            ("model", &self.model),
            ("fingerprint", &self.fingerprint),
            ("bootstrap", self.bootstrap.as_ref().unwrap_or(&self.url)),
        ];
        if let Some((name, _)) = texts.into_iter().find(|(_, text)| text.len() > TEXT_MAX) {
            return Err(BadMember::TooLong(name));
        }
        let is_good = |c: char| c.is_ascii_alphanumeric() || c == '-';
        if !(1..=128).contains(&self.id.len()) || !self.id.chars().all(is_good) {
            return Err(BadMember::Id);
        }
        if self.authority().is_none() {
            return Err(BadMember::Url);
        }
        let is_reachable = |address: &String| {
            let parts = address.rsplit_once(':').filter(|(host, _)| !host.is_empty());
            parts.and_then(|(_, port)| port.parse::<u16>().ok()).is_some_and(|port| port > 0)
        };
        if self.role == MemberRole::Prefill && !self.bootstrap.as_ref().is_some_and(is_reachable) {
            return Err(BadMember::Bootstrap);
        }
        Ok(())
    }

    /// Host and port of its address.
    #[must_use]
    pub fn authority(&self) -> Option<Authority> {
        let parts = self.url.parse::<Uri>().ok()?.into_parts();
        let is_http = parts.scheme.as_ref().is_some_and(|scheme| scheme.as_str() == "http");
        let is_base = parts.path_and_query.is_none_or(|path| path == "/" || path == "");
        let is_plain = |authority: &Authority| {
            authority.port_u16().is_some_and(|port| port > 0) && !authority.as_str().contains('@')
        };
        parts.authority.filter(|authority| is_http && is_base && is_plain(authority))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_worker_is_told_apart() {
        let good = r#"{"id":"a-1","role":"decode","url":"http://h:1","model":"m","fingerprint":"f","new":[1]}"#;
        let member = Member::read(good.as_bytes()).unwrap();
        assert_eq!((member.role, member.bootstrap.as_deref()), (MemberRole::Decode, None));
        let again = serde_json::to_vec(&member).unwrap();
        assert_eq!(Member::read(&again).unwrap(), member);
        let with = |from: &str, to: &str| Member::read(good.replace(from, to).as_bytes());
        assert!(matches!(Member::read(b"\xff\x00"), Err(BadMember::NoWorker(_))));
        assert!(matches!(Member::read(b"[]"), Err(BadMember::NoWorker(_))));
        assert!(matches!(with("decode", "other"), Err(BadMember::NoWorker(_))));
        assert!(matches!(with("\"model\":\"m\",", ""), Err(BadMember::NoWorker(_))));
        assert_eq!(with("a-1", "a/1"), Err(BadMember::Id));
        for bad in
            ["", "h:1", "https://h:1", "http://h", "http://h:0", "http://h:1/x", "http://u@h:1"]
        {
            assert_eq!(with("http://h:1", bad), Err(BadMember::Url), "{bad}");
        }
        assert_eq!(with("decode", "prefill"), Err(BadMember::Bootstrap));
        assert_eq!(
            with("\"m\"", &format!("\"{}\"", "m".repeat(513))),
            Err(BadMember::TooLong("model"))
        );
    }
}
