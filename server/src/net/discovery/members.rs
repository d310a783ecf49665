//! What lists of workers mean for one who listens: who has come, and who has left.
//!
//! Plain state: time is passed in. A worker that is missing in a list is not taken to have left
//! before it is still missing after a time of grace: etcd that lost everything, or that slept longer
//! than its leases last, says for a moment that nobody is there. Whether a worker answers is seen by
//! asking it and not here. Without lists nothing changes.

use super::member::{Member, MemberRole};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Most workers that are known at once.
const MEMBERS_MAX: usize = 1024;
/// Most workers that notices were given about; beyond it nothing more is said.
const NOTED_MAX: usize = 1024;

/// Who listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listening {
    /// A router: workers that take requests, all with one model, by address.
    Front,
    /// A decode worker: prefill workers with its layout, by bootstrap address.
    Peers {
        /// Its layout.
        fingerprint: String,
    },
}

/// Who has come or left, by address: that of HTTP for [`Listening::Front`] (`HOST:PORT`), otherwise
/// the bootstrap address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// May be used from now on.
    Joined(String),
    /// Is to be used no more; what it has begun it may end.
    Left(String),
}

/// A worker that is not used, said once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Its address.
    pub address: String,
    /// Why.
    pub why: String,
}

#[derive(Debug)]
struct Known {
    /// Where it counts.
    model: Option<String>,
    missing_since: Option<Duration>,
}

impl Known {
    fn is(&self, member: &Member) -> bool {
        self.model.as_ref().is_none_or(|model| *model == member.model)
    }
}

/// The workers that are known.
#[derive(Debug)]
pub struct Members {
    listening: Listening,
    grace: Duration,
    known: BTreeMap<String, Known>,
    changes: VecDeque<Change>,
    notices: VecDeque<Notice>,
    noted: BTreeSet<String>,
}

impl Members {
    /// Knows nobody yet. Who is missing in lists for `grace` has left.
    #[must_use]
    pub fn new(listening: Listening, grace: Duration) -> Self {
        Self {
            listening,
            grace,
            known: BTreeMap::new(),
            changes: VecDeque::new(),
            notices: VecDeque::new(),
            noted: BTreeSet::new(),
        }
    }

    /// Takes a whole list in.
    pub fn handle_listing(&mut self, now: Duration, listing: &[Member]) {
        let mut listed: BTreeMap<String, &Member> = BTreeMap::new();
        let mut seen = BTreeSet::new();
        for member in listing {
            let Some(address) = self.address_of(member) else { continue };
            match self.misfit(member) {
                Some(why) => self.note(&address, why),
                None => drop(listed.insert(address.clone(), member)),
            }
            seen.insert(address);
        }
        for (address, member) in &listed {
            if let Some(known) = self.known.get_mut(address)
                && known.is(member)
            {
                known.missing_since = None;
            } else if let Some(why) = self.unfit(member) {
                self.note(address, why);
            } else {
                let known = Known { model: self.model_of(member), missing_since: None };
                self.known.insert(address.clone(), known);
                self.changes.push_back(Change::Joined(address.clone()));
            }
        }
        let (grace, changes) = (self.grace, &mut self.changes);
        self.known.retain(|address, known| {
            if listed.get(address).is_some_and(|member| known.is(member)) {
                return true;
            }
            let since = *known.missing_since.get_or_insert(now);
            // One list alone is not enough, however long ago the one before it was.
            let is_over = since < now && now.saturating_sub(since) >= grace;
            if is_over {
                changes.push_back(Change::Left(address.clone()));
            }
            !is_over
        });
        self.noted.retain(|address| seen.contains(address));
    }

    /// The next change, in order.
    pub fn poll_change(&mut self) -> Option<Change> {
        self.changes.pop_front()
    }

    /// The next worker that is listed and not used.
    pub fn poll_notice(&mut self) -> Option<Notice> {
        self.notices.pop_front()
    }

    /// Addresses of those that are known.
    pub fn addresses(&self) -> impl Iterator<Item = &str> {
        self.known.keys().map(String::as_str)
    }

    /// Where it is found, for those that are of interest here.
    fn address_of(&self, member: &Member) -> Option<String> {
        match &self.listening {
            Listening::Front if member.role.takes_requests() => {
                member.authority().map(|authority| authority.to_string())
            }
            Listening::Peers { .. } if member.role == MemberRole::Prefill => {
                member.bootstrap.clone()
            }
            Listening::Front | Listening::Peers { .. } => None,
        }
    }

    /// Why one could never be used.
    fn misfit(&self, member: &Member) -> Option<String> {
        let Listening::Peers { fingerprint } = &self.listening else { return None };
        let theirs = &member.fingerprint;
        (theirs != fingerprint).then(|| format!("its layout is {theirs}, ours is {fingerprint}"))
    }

    /// Its model, where that counts.
    fn model_of(&self, member: &Member) -> Option<String> {
        (self.listening == Listening::Front).then(|| member.model.clone())
    }

    /// Why one that is not known yet cannot be used.
    fn unfit(&self, member: &Member) -> Option<String> {
        if self.known.len() >= MEMBERS_MAX {
            return Some(format!("{MEMBERS_MAX} workers are known, which is the limit"));
        }
        let first = self.known.values().next().and_then(|known| known.model.as_ref())?;
        // Answers of two models under one address would be wrong for whoever asked.
        (*first != member.model)
            .then(|| format!("its model is {}, that of the others {first}", member.model))
    }

    fn note(&mut self, address: &str, why: String) {
        if self.noted.len() < NOTED_MAX && self.noted.insert(address.to_owned()) {
            self.notices.push_back(Notice { address: address.to_owned(), why });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GRACE: Duration = Duration::from_secs(15);

    fn member(role: MemberRole, port: u16) -> Member {
        Member {
            id: format!("id-{port}"),
            role,
            url: format!("http://h:{port}"),
            bootstrap: (role == MemberRole::Prefill).then(|| format!("b:{port}")),
            model: "m".to_owned(),
            fingerprint: "f".to_owned(),
        }
    }

    fn decode(port: u16) -> Member {
        member(MemberRole::Decode, port)
    }

    fn front() -> Members {
        Members::new(Listening::Front, GRACE)
    }

    fn changes(members: &mut Members) -> Vec<Change> {
        std::iter::from_fn(|| members.poll_change()).collect()
    }

    fn joined(address: &str) -> Change {
        Change::Joined(address.to_owned())
    }

    fn left(address: &str) -> Change {
        Change::Left(address.to_owned())
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn workers_come_at_once_and_leave_after_the_grace() {
        let mut members = front();
        members.handle_listing(at(0), &[decode(1), decode(2), member(MemberRole::Prefill, 3)]);
        assert_eq!(changes(&mut members), [joined("h:1"), joined("h:2")]);
        members.handle_listing(at(1), &[decode(2)]);
        members.handle_listing(at(15), &[decode(2)]);
        assert_eq!(changes(&mut members), []);
        members.handle_listing(at(16), &[decode(2)]);
        assert_eq!(changes(&mut members), [left("h:1")]);
        members.handle_listing(at(17), &[decode(1), decode(2)]);
        assert_eq!(changes(&mut members), [joined("h:1")]);
    }

    #[test]
    fn a_list_that_was_lost_for_a_moment_changes_nothing() {
        let mut members = front();
        members.handle_listing(at(0), &[decode(1), decode(2)]);
        changes(&mut members);
        members.handle_listing(at(5), &[]);
        members.handle_listing(at(19), &[decode(1)]);
        // After a long silence one list is not enough: nobody could say so in between.
        members.handle_listing(at(19), &[decode(1), decode(2)]);
        members.handle_listing(at(3600), &[]);
        assert_eq!(changes(&mut members), []);
        members.handle_listing(at(3601), &[decode(1), decode(2)]);
        assert_eq!(changes(&mut members), []);
        assert_eq!(members.addresses().collect::<Vec<_>>(), ["h:1", "h:2"]);
    }

    #[test]
    fn a_restarted_worker_under_its_old_address_is_the_same() {
        let mut members = front();
        members.handle_listing(at(0), &[decode(1)]);
        changes(&mut members);
        // The old key has not ended yet.
        let new = Member { id: "new".to_owned(), ..decode(1) };
        members.handle_listing(at(1), &[decode(1), new.clone()]);
        members.handle_listing(at(60), &[new]);
        assert_eq!(changes(&mut members), []);
    }

    #[test]
    fn two_models_are_not_mixed() {
        let mut members = front();
        let other = Member { model: "x".to_owned(), ..decode(2) };
        members.handle_listing(at(0), &[decode(1), other.clone()]);
        members.handle_listing(at(1), &[decode(1), other.clone()]);
        assert_eq!(changes(&mut members), [joined("h:1")]);
        let notice = members.poll_notice().unwrap();
        assert_eq!(
            (&*notice.address, &*notice.why),
            ("h:2", "its model is x, that of the others m")
        );
        assert_eq!(members.poll_notice(), None, "it is said once");
        // Once the others have left it is the one.
        members.handle_listing(at(2), std::slice::from_ref(&other));
        members.handle_listing(at(17), std::slice::from_ref(&other));
        members.handle_listing(at(18), &[other]);
        assert_eq!(changes(&mut members), [left("h:1"), joined("h:2")]);
        // A worker that comes back with another model is another worker.
        members.handle_listing(at(20), &[decode(2)]);
        members.handle_listing(at(35), &[decode(2)]);
        members.handle_listing(at(36), &[decode(2)]);
        assert_eq!(changes(&mut members), [left("h:2"), joined("h:2")]);
    }

    #[test]
    fn decode_workers_hear_of_prefill_workers_with_their_layout() {
        let listening = Listening::Peers { fingerprint: "f".to_owned() };
        let mut members = Members::new(listening, GRACE);
        let prefill = |port| member(MemberRole::Prefill, port);
        let other = Member { fingerprint: "g".to_owned(), ..prefill(2) };
        let list = [prefill(1), other, decode(3)];
        members.handle_listing(at(0), &list);
        members.handle_listing(at(1), &list);
        assert_eq!(changes(&mut members), [joined("b:1")]);
        assert_eq!(members.poll_notice().unwrap().address, "b:2");
    }

    #[test]
    fn no_more_are_known_than_the_limit() {
        let mut members = front();
        let all: Vec<Member> = (1..1100).map(decode).collect();
        members.handle_listing(at(0), &all);
        assert_eq!(members.addresses().count(), MEMBERS_MAX);
        assert!(members.poll_notice().unwrap().why.contains("the limit"));
    }

    proptest! {
        #[test]
        fn changes_lead_to_who_is_known(lists in prop::collection::vec(
            (0_u64..20, prop::collection::btree_set(1_u16..6, 0..5)), 1..40,
        )) {
            let mut members = front();
            let mut known = BTreeSet::new();
            let mut seen = BTreeMap::new();
            let mut now = at(0);
            for (pause, ports) in lists {
                now += at(pause);
                let listing: Vec<Member> = ports.iter().map(|&port| decode(port)).collect();
                members.handle_listing(now, &listing);
                for port in &ports {
                    seen.insert(format!("h:{port}"), now);
                }
                for change in changes(&mut members) {
                    match change {
                        Change::Joined(address) => prop_assert!(known.insert(address)),
                        Change::Left(address) => {
                            prop_assert!(known.remove(&address));
                            prop_assert!(now - seen[&address] >= GRACE);
                        }
                    }
                }
                let has_all = ports.iter().all(|port| known.contains(&format!("h:{port}")));
                prop_assert!(has_all);
                prop_assert!(members.addresses().eq(known.iter().map(String::as_str)));
            }
        }
    }
}
