//! What happened so far, as plain numbers.

macro_rules! counters {
    ($(#[$of:meta])* $type:ident { $($(#[$doc:meta])* $name:ident,)+ }) => {
        $(#[$of])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $type {
            $($(#[$doc])* pub $name: u64,)+
        }

        impl $type {
            /// Every counter with its name.
            #[must_use]
            pub fn all(&self) -> alloc::vec::Vec<(&'static str, u64)> {
                alloc::vec![$((stringify!($name), self.$name),)+]
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

counters! {
    /// Totals since the endpoint was made.
    Counters {
        /// Attempts that the receiver opened.
        attempts_started,
        /// Attempts whose pages all arrived and were verified.
        attempts_completed,
        /// Attempts that the receiver gave up, for any reason.
        attempts_failed,
        /// … because the sender rejected them.
        failed_rejected,
        /// … because the link was lost.
        failed_peer_lost,
        /// … because nothing moved for too long.
        failed_timeout,
        /// … because the peer broke the protocol or the plan.
        failed_violation,
        /// … because a page was wrong twice.
        failed_mismatch,
        /// … because a page changed under the read twice.
        failed_stale,
        /// … because a get ended in an error.
        failed_get,
        /// … because the upper layer cancelled.
        failed_cancelled,
        /// … because they could not be opened.
        failed_not_started,
        /// Requests that the sender took.
        requests_taken,
        /// Requests that the sender refused by itself.
        requests_refused,
        /// Attempts whose pages the sender released after the peer's word.
        released_acknowledged,
        /// Attempts whose pages the sender released because the link was fenced.
        released_fenced,
        /// Pages that the sender offered.
        items_offered,
        /// Pages that the receiver learned of.
        items_received,
        /// Pages whose tag was checked.
        items_checked,
        /// Bytes of the gets that ended well.
        bytes_pulled,
        /// Tag checks that failed.
        mismatches,
        /// Gets that ended stale.
        stale_gets,
        /// Gets that ended in an error.
        failed_gets,
        /// Page groups that were pulled again into fresh pages.
        group_retries,
        /// Messages of another incarnation, dropped.
        dropped_foreign,
        /// Messages or items seen before, dropped.
        dropped_duplicate,
        /// Messages too late or too early for the state they met, dropped.
        dropped_late,
        /// `Want` or `Resume` sent again.
        resends,
        /// Links that came up.
        links_up,
        /// Links refused by us or by the peer.
        links_refused,
        /// Links closed because the peer was silent.
        links_suspect,
        /// Links closed because the peer sent nonsense.
        links_malformed,
    }
}
