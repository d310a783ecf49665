//! What happened so far, as plain numbers.

macro_rules! counters {
    ($(#[$of:meta])* $type:ident { $($name:ident: $help:literal,)+ }) => {
        $(#[$of])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $type {
            $(#[doc = $help] pub $name: u64,)+
        }

        impl $type {
            /// Every counter.
            #[must_use]
            pub fn all(&self) -> alloc::vec::Vec<Counter> {
                alloc::vec![
                    $(Counter { name: stringify!($name), help: $help, value: self.$name },)+
                ]
            }

            /// The sum of both, field by field.
            #[must_use]
            pub const fn plus(&self, other: &Self) -> Self {
                Self { $($name: self.$name.wrapping_add(other.$name),)+ }
            }
        }
    };
}

#[cfg(feature = "std")]
pub(crate) use counters;

/// One counter, told apart from the others by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter {
    /// As its field is called.
    pub name: &'static str,
    /// What is counted, one line for a person.
    pub help: &'static str,
    /// Total so far.
    pub value: u64,
}

counters! {
    /// Totals since the endpoint was made.
    Counters {
        attempts_started: "Hand-offs that the receiver opened.",
        attempts_completed: "Hand-offs whose pages all arrived and were verified.",
        attempts_failed: "Hand-offs that the receiver gave up, for any reason.",
        failed_rejected: "Hand-offs given up because the sender rejected them.",
        failed_peer_lost: "Hand-offs given up because the link was lost.",
        failed_timeout: "Hand-offs given up because nothing moved for too long.",
        failed_violation: "Hand-offs given up because the peer broke the protocol or the plan.",
        failed_mismatch: "Hand-offs given up because a page was wrong twice.",
        failed_stale: "Hand-offs given up because a page changed under the read twice.",
        failed_get: "Hand-offs given up because a read of a page ended in an error.",
        failed_cancelled: "Hand-offs given up because the request was cancelled.",
        failed_not_started: "Hand-offs given up because they could not be opened.",
        requests_taken: "Prompts of peers that the sender took.",
        requests_refused: "Prompts of peers that the sender refused by itself.",
        released_acknowledged: "Hand-offs whose pages the sender got back on the peer's word.",
        released_fenced: "Hand-offs whose pages the sender got back because the link was fenced.",
        items_offered: "Pages that the sender offered.",
        items_received: "Pages that the receiver was offered.",
        items_checked: "Pages whose tag the receiver checked.",
        bytes_pulled: "Bytes of the page reads that ended well.",
        mismatches: "Pages whose tag did not match.",
        stale_gets: "Page reads thrown away because the page changed meanwhile.",
        failed_gets: "Page reads that ended in an error.",
        group_retries: "Page groups that were read again into fresh pages.",
        dropped_foreign: "Messages dropped because they were for another incarnation.",
        dropped_duplicate: "Messages or pages dropped because they had come before.",
        dropped_late: "Messages dropped because they came too late or too early.",
        resends: "Requests to the sender that were sent again.",
        links_up: "Links that came up.",
        links_refused: "Links refused by this side or by the peer.",
        links_suspect: "Links closed because the peer was silent.",
        links_malformed: "Links closed because the peer sent nonsense.",
    }
}

/// Counters say what happened, never what happens next: machines that differ in them only hash
/// alike.
impl core::hash::Hash for Counters {
    fn hash<H: core::hash::Hasher>(&self, _: &mut H) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeSet;
    use alloc::vec::Vec;

    #[test]
    fn every_counter_says_in_its_own_words_what_it_counts() {
        let all = Counters { resends: 3, ..Counters::default() }.all();
        let names: BTreeSet<_> = all.iter().map(|counter| counter.name).collect();
        let helps: BTreeSet<_> = all.iter().map(|counter| counter.help).collect();
        assert_eq!((names.len(), helps.len()), (all.len(), all.len()));
        for Counter { name, help, .. } in &all {
            assert!(
                help.len() > 10 && help.ends_with('.') && !help.contains('\n'),
                "{name}: {help}"
            );
        }
        let values: Vec<_> = all.iter().filter(|counter| counter.value > 0).collect();
        assert_eq!(values.len(), 1);
        assert_eq!((values[0].name, values[0].value), ("resends", 3));
    }
}
