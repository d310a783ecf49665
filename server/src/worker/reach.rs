//! Whether the prefill workers that a decode worker is to have are there, and why not.

use super::Shared;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How it went when a peer was tried last.
#[derive(Debug, Default)]
struct Reach {
    /// What people call the peer; it may be tried at several addresses.
    name: String,
    is_there: bool,
    /// It was connected at least once.
    was_there: bool,
    /// Why it is not.
    why: Option<String>,
}

/// That of each peer, by address.
#[derive(Debug, Default)]
pub(super) struct Reaches(Mutex<BTreeMap<String, Reach>>);

impl Reaches {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Reach>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    /// A connection to this address, which leads to the peer `name`, is kept from now on.
    pub(crate) fn expect_peer(&self, address: &str, name: &str) {
        let mut kept = self.reach.lock();
        kept.entry(address.to_owned()).or_default().name = name.to_owned();
    }

    /// What people call the peer at this address.
    pub(super) fn name_of(&self, address: &str) -> String {
        let kept = self.reach.lock();
        kept.get(address).map_or(address, |reach| &reach.name).to_owned()
    }

    /// No longer. Nothing is remembered of it, so that those that come and go leave nothing behind.
    pub(crate) fn forget_peer(&self, address: &str) {
        self.reach.lock().remove(address);
    }

    /// A peer could not be reached; says whether that is news. Of one that was there before it is none.
    pub(super) fn note_unreached(&self, address: &str, text: &str) -> bool {
        let mut kept = self.reach.lock();
        let Some(entry) = kept.get_mut(address) else { return false };
        let is_news = !entry.was_there && entry.why.as_deref() != Some(text);
        entry.is_there = false;
        entry.why = Some(text.to_owned());
        is_news
    }

    /// A peer was reached.
    pub(super) fn reached(&self, address: &str) {
        if let Some(entry) = self.reach.lock().get_mut(address) {
            (entry.is_there, entry.was_there, entry.why) = (true, true, None);
        }
    }

    /// A peer is gone.
    pub(super) fn note_lost(&self, address: &str, text: &str) {
        if let Some(entry) = self.reach.lock().get_mut(address) {
            entry.is_there = false;
            entry.why = Some(text.to_owned());
        }
    }

    /// Names of peers that are not connected at any address, and why if that is known.
    pub(super) fn absent_peers(&self) -> Vec<(String, Option<String>)> {
        let kept = self.reach.lock();
        let mut absent: BTreeMap<&str, Option<&str>> = BTreeMap::new();
        for reach in kept.values().filter(|reach| !reach.is_there) {
            let why = absent.entry(&reach.name).or_default();
            *why = why.or(reach.why.as_deref());
        }
        for reach in kept.values().filter(|reach| reach.is_there) {
            absent.remove(reach.name.as_str());
        }
        let owned = |(name, why): (&str, Option<&str>)| (name.to_owned(), why.map(str::to_owned));
        absent.into_iter().map(owned).collect()
    }

    /// Why a decode worker is connected to no prefill worker yet.
    #[must_use]
    pub fn why_alone(&self) -> String {
        self.refusal().unwrap_or_else(|| {
            let kept = self.reach.lock();
            let why: Vec<String> = kept
                .iter()
                .filter_map(|(address, reach)| Some(format!("{address}: {}", reach.why.as_ref()?)))
                .collect();
            let colon = if why.is_empty() { "" } else { ": " };
            format!("no prefill worker is connected yet{colon}{}", why.join("; "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_of_a_peer_goes_with_it() {
        let shared = Shared::default();
        assert!(!shared.note_unreached("a", "refused"), "nobody expects it");
        assert_eq!(shared.why_alone(), "no prefill worker is connected yet");
        shared.expect_peer("a", "n");
        assert_eq!((shared.name_of("a"), shared.name_of("b")), ("n".to_owned(), "b".to_owned()));
        assert_eq!(shared.absent_peers(), [("n".to_owned(), None)]);
        assert!(shared.note_unreached("a", "refused") && !shared.note_unreached("a", "refused"));
        assert_eq!(shared.why_alone(), "no prefill worker is connected yet: a: refused");
        shared.reached("a");
        assert!(shared.absent_peers().is_empty());
        shared.note_lost("a", "died");
        assert_eq!(shared.absent_peers(), [("n".to_owned(), Some("died".to_owned()))]);
        assert!(!shared.note_unreached("a", "refused"), "it was there before");
        // It is reached in another way.
        shared.expect_peer("b", "n");
        shared.reached("b");
        assert!(shared.absent_peers().is_empty());
        shared.forget_peer("b");
        assert_eq!(shared.absent_peers().len(), 1);
        shared.forget_peer("a");
        shared.note_lost("a", "late news");
        assert!(shared.absent_peers().is_empty());
    }
}
