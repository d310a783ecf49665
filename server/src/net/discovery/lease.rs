//! Leases of workers that a router keeps by itself, without etcd.
//!
//! Plain state: time is passed in.

use super::member::Member;
use std::collections::BTreeMap;
use std::time::Duration;

/// Most workers that are registered at once.
pub const LEASES_MAX: usize = 1024;

/// There is no room for another worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{LEASES_MAX} workers are registered, which is the limit")]
pub struct Full;

/// Who is registered, and until when.
#[derive(Debug, Default)]
pub struct Leases {
    by_id: BTreeMap<String, (Member, Duration)>,
    is_used: bool,
}

impl Leases {
    /// A worker says that it is there for another `lease`.
    ///
    /// # Errors
    /// [`Full`], for one that is not registered yet.
    pub fn handle_registered(
        &mut self,
        now: Duration,
        member: Member,
        lease: Duration,
    ) -> Result<(), Full> {
        self.expire(now);
        if self.by_id.len() >= LEASES_MAX && !self.by_id.contains_key(&member.id) {
            return Err(Full);
        }
        self.is_used = true;
        self.by_id.insert(member.id.clone(), (member, now.saturating_add(lease)));
        Ok(())
    }

    /// A worker says that it has left; false if it was not registered.
    pub fn handle_removed(&mut self, id: &str) -> bool {
        self.by_id.remove(id).is_some()
    }

    /// Whether anybody has ever registered here.
    #[must_use]
    pub const fn is_used(&self) -> bool {
        self.is_used
    }

    /// Those whose leases have not ended.
    pub fn listing(&mut self, now: Duration) -> Vec<Member> {
        self.expire(now);
        self.by_id.values().map(|(member, _)| member.clone()).collect()
    }

    fn expire(&mut self, now: Duration) {
        self.by_id.retain(|_, (_, until)| now < *until);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::discovery::MemberRole;

    fn member(id: &str) -> Member {
        Member {
            id: id.to_owned(),
            role: MemberRole::Null,
            url: "http://h:1".to_owned(),
            bootstrap: None,
            model: "m".to_owned(),
            fingerprint: "f".to_owned(),
        }
    }

    #[test]
    fn leases_end_unless_they_are_renewed() {
        let (mut leases, lease) = (Leases::default(), Duration::from_secs(10));
        let at = Duration::from_secs;
        leases.handle_registered(at(0), member("a"), lease).unwrap();
        leases.handle_registered(at(1), member("b"), lease).unwrap();
        leases.handle_registered(at(9), member("a"), lease).unwrap();
        assert_eq!(leases.listing(at(10)), [member("a"), member("b")]);
        assert_eq!(leases.listing(at(11)), [member("a")]);
        assert!(leases.handle_removed("a") && !leases.handle_removed("a"));
        assert_eq!(leases.listing(at(11)), []);
    }

    #[test]
    fn no_more_are_registered_than_the_limit() {
        let (mut leases, lease) = (Leases::default(), Duration::from_secs(10));
        for n in 0..LEASES_MAX {
            leases.handle_registered(Duration::ZERO, member(&n.to_string()), lease).unwrap();
        }
        let mut more = |now, id| leases.handle_registered(now, member(id), lease);
        assert_eq!(more(Duration::ZERO, "x"), Err(Full));
        assert_eq!(more(Duration::ZERO, "7"), Ok(()));
        assert_eq!(more(lease, "x"), Ok(()), "the others have ended");
    }
}
