//! The state tables: what each state makes of each event. The machines move by these tables only.

use alloc::string::String;
use core::fmt::Write as _;

/// What an event does in a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move<S> {
    /// Go to the state (or stay in it).
    To(S),
    /// The event came too late or twice: count it, change nothing.
    Late,
    /// Can't happen: a bug in this crate.
    Never,
}

macro_rules! table {
    (
        $(#[$doc:meta])* $machine:literal $state:ident { $($(#[$state_doc:meta])* $s:ident,)+ }
        $event:ident { $($(#[$event_doc:meta])* $e:ident,)+ }
        $($from:ident: { $($on:ident => $how:ident $(($to:ident))?,)+ })+
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $state { $($(#[$state_doc])* $s,)+ }

        #[doc = concat!("Events of the ", $machine, " table.")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $event { $($(#[$event_doc])* $e,)+ }

        impl $state {
            /// Every state.
            pub const ALL: &'static [Self] = &[$(Self::$s,)+];

            /// The table.
            #[must_use]
            pub const fn on(self, event: $event) -> Move<Self> {
                match (self, event) {
                    $($((Self::$from, $event::$on) => Move::$how $((Self::$to))?,)+)+
                }
            }

            /// The state after `event`, `None` if the event is late.
            ///
            /// # Panics
            /// The table says that the event can't happen here.
            #[must_use]
            pub fn after(self, event: $event) -> Option<Self> {
                match self.on(event) {
                    Move::To(state) => Some(state),
                    // PD-F8
                    Move::Late => None,
                    Move::Never => panic!("{}: {event:?} in {self:?}", $machine),
                }
            }

            fn dump(out: &mut String) {
                for state in Self::ALL {
                    for event in $event::ALL {
                        let _ = match state.on(*event) {
                            Move::To(to) => writeln!(out, "{} {state:?} {event:?} {to:?}", $machine),
                            Move::Late => writeln!(out, "{} {state:?} {event:?} late", $machine),
                            Move::Never => writeln!(out, "{} {state:?} {event:?} never", $machine),
                        };
                    }
                }
            }
        }

        impl $event {
            /// Every event.
            pub const ALL: &'static [Self] = &[$(Self::$e,)+];
        }
    };
}

table! {
    /// One attempt at the receiver (decode side).
    "receiver" ReceiverState {
        /// `Want` sent, nothing heard.
        Wanting,
        /// The sender answered; pages are pulled and verified as they are offered.
        Pulling,
        /// Given up; own gets and verifications are still under way.
        Draining,
        /// `Done` or `Failed` sent, not acknowledged; nothing under way.
        Closing,
        /// Link lost while own gets or verifications are under way.
        Orphaned,
        /// Forgotten, but the id is not used again.
        Gone,
    }
    ReceiverEvent {
        /// `Accepted`, `Ready` or `Final`.
        Answered,
        /// Every page verified and the record matches.
        Complete,
        /// Any reason to give up, the link excepted.
        Fail,
        /// The link is gone.
        LinkLost,
        /// No own get or verification is under way (after giving up).
        Drained,
        /// `Closed` arrived.
        Acknowledged,
    }
    Wanting: {
        Answered => To(Pulling), Complete => Never, Fail => To(Draining), LinkLost => To(Orphaned),
        Drained => Never, Acknowledged => Late,
    }
    Pulling: {
        Answered => To(Pulling), Complete => To(Closing), Fail => To(Draining),
        LinkLost => To(Orphaned), Drained => Never, Acknowledged => Late,
    }
    Draining: {
        Answered => Late, Complete => Never, Fail => Late, LinkLost => To(Orphaned),
        Drained => To(Closing), Acknowledged => Late,
    }
    Closing: {
        Answered => Late, Complete => Never, Fail => Late, LinkLost => To(Gone),
        Drained => Never, Acknowledged => To(Gone),
    }
    Orphaned: {
        Answered => Late, Complete => Never, Fail => Late, LinkLost => Late,
        Drained => To(Gone), Acknowledged => Late,
    }
    Gone: {
        Answered => Late, Complete => Never, Fail => Late, LinkLost => Never,
        Drained => Never, Acknowledged => Late,
    }
}

table! {
    /// One attempt at the sender (prefill side).
    "sender" SenderState {
        /// The upper layer computes; pages are offered as they are sealed.
        Computing,
        /// `Final` sent; waiting for the receiver's word.
        Finished,
        /// `Reject` sent; waiting for the receiver's word.
        Rejected,
        /// The receiver cancelled but may still read; waiting for its word.
        Withdrawn,
        /// Released; the id is not used again.
        Gone,
    }
    SenderEvent {
        /// The upper layer offers pages.
        Ready,
        /// The upper layer has offered all pages.
        Finish,
        /// The upper layer gives up.
        Reject,
        /// `Cancel` arrived.
        Cancel,
        /// `Done` or `Failed` arrived: the receiver reads nothing of this attempt any more.
        Ended,
        /// The link is gone and with it every access of the peer.
        LinkLost,
    }
    // PD-S10 PD-S11
    Computing: {
        Ready => To(Computing), Finish => To(Finished), Reject => To(Rejected),
        Cancel => To(Withdrawn), Ended => To(Gone), LinkLost => To(Gone),
    }
    Finished: {
        Ready => Late, Finish => Late, Reject => Late,
        Cancel => To(Withdrawn), Ended => To(Gone), LinkLost => To(Gone),
    }
    Rejected: {
        Ready => Late, Finish => Late, Reject => Late,
        Cancel => To(Rejected), Ended => To(Gone), LinkLost => To(Gone),
    }
    Withdrawn: {
        Ready => Late, Finish => Late, Reject => Late,
        Cancel => To(Withdrawn), Ended => To(Gone), LinkLost => To(Gone),
    }
    Gone: {
        Ready => Late, Finish => Late, Reject => Late,
        Cancel => Late, Ended => Late, LinkLost => Never,
    }
}

table! {
    /// One link.
    "link" LinkState {
        /// We connected and said `Hello`.
        Greeting,
        /// The peer connected and has to say `Hello`.
        Listening,
        /// Both sides agreed.
        Up,
        /// `Refuse` sent; the peer is given time to read it.
        Refusing,
        /// The link has to be cut, or was.
        Closed,
    }
    LinkEvent {
        /// A `Hello` that fits.
        Greeted,
        /// A `Hello` that does not fit.
        Misfit,
        /// A `HelloAck` that fits.
        Agreed,
        /// `Refuse` arrived.
        Refused,
        /// Any other message.
        Message,
        /// `Bye` arrived.
        Bye,
        /// Nothing heard for too long.
        Silence,
        /// Bytes that are no message, or a message that breaks the order.
        Malformed,
    }
    Greeting: {
        Greeted => To(Closed), Misfit => To(Closed), Agreed => To(Up), Refused => To(Closed),
        Message => Late, Bye => To(Closed), Silence => To(Closed), Malformed => To(Closed),
    }
    Listening: {
        Greeted => To(Up), Misfit => To(Refusing), Agreed => To(Closed), Refused => To(Closed),
        Message => Late, Bye => To(Closed), Silence => To(Closed), Malformed => To(Closed),
    }
    Up: {
        Greeted => To(Up), Misfit => To(Closed), Agreed => Late, Refused => To(Closed),
        Message => To(Up), Bye => To(Closed), Silence => To(Closed), Malformed => To(Closed),
    }
    Refusing: {
        Greeted => Late, Misfit => To(Refusing), Agreed => Late, Refused => Late,
        Message => Late, Bye => To(Closed), Silence => To(Closed), Malformed => To(Closed),
    }
    Closed: {
        Greeted => Late, Misfit => Late, Agreed => Late, Refused => Late,
        Message => Late, Bye => Late, Silence => Late, Malformed => Late,
    }
}

table! {
    /// One request at a rank group (decode side).
    "pull" PullState {
        /// No source can be reached by every rank, or none was looked for yet.
        Waiting,
        /// A round is under way at every rank.
        Pulling,
        /// The round has failed and another one may follow, once every rank is quiet.
        Breaking,
        /// The request has failed; some rank is not quiet.
        Ending,
        /// Completed, or failed and quiet.
        Gone,
    }
    PullEvent {
        /// Every rank has a source: a round begins.
        Assigned,
        /// Every rank completed with the same record.
        Agreed,
        /// A rank failed, or completed with another record.
        Broken,
        /// Cancelled, out of rounds, out of time, or a rank is gone.
        GiveUp,
        /// Every rank is quiet (after the round has failed).
        Settled,
    }
    // PD-M1 PD-M4 PD-M9
    Waiting: {
        Assigned => To(Pulling), Agreed => Never, Broken => Never, GiveUp => To(Ending),
        Settled => Never,
    }
    Pulling: {
        Assigned => Never, Agreed => To(Gone), Broken => To(Breaking), GiveUp => To(Ending),
        Settled => Never,
    }
    Breaking: {
        Assigned => Never, Agreed => Never, Broken => Late, GiveUp => To(Ending),
        Settled => To(Waiting),
    }
    Ending: {
        Assigned => Never, Agreed => Never, Broken => Late, GiveUp => Late,
        Settled => To(Gone),
    }
    Gone: {
        Assigned => Never, Agreed => Never, Broken => Late, GiveUp => Late, Settled => Never,
    }
}

table! {
    /// One rank in one round (decode side).
    "rank" RankState {
        /// Its attempt is open.
        Pulling,
        /// Completed; its targets are verified and the group's, which has no verdict yet.
        Landed,
        /// Cancelled, and nothing heard since.
        Leaving,
        /// Failed; its targets may still be written.
        Draining,
        /// Its targets are free.
        Quiet,
    }
    RankEvent {
        /// Its attempt completed.
        Completed,
        /// Its attempt failed.
        Failed,
        /// Its attempt is quiet.
        Drained,
        /// The group lets go of the round.
        Cancel,
        /// The rank is gone, and with it the memory of its targets.
        Lost,
    }
    Pulling: {
        Completed => To(Landed), Failed => To(Draining), Drained => Late, Cancel => To(Leaving),
        Lost => To(Quiet),
    }
    Landed: {
        Completed => Late, Failed => Late, Drained => Late, Cancel => To(Quiet), Lost => To(Quiet),
    }
    // A completion that crossed the cancellation: no `Quiet` follows it.
    Leaving: {
        Completed => To(Quiet), Failed => To(Draining), Drained => Late, Cancel => Late,
        Lost => To(Quiet),
    }
    Draining: {
        Completed => Late, Failed => Late, Drained => To(Quiet), Cancel => Late, Lost => To(Quiet),
    }
    Quiet: {
        Completed => Late, Failed => Late, Drained => Late, Cancel => Late, Lost => Late,
    }
}

table! {
    /// One computation that serves several attempts (prefill side).
    "fan-out" FanOutState {
        /// The upper layer computes.
        Computing,
        /// Everything was offered.
        Finished,
        /// The upper layer gave up.
        Rejected,
        /// Every attempt was cancelled while it was computed; takes no more attempts.
        Stopped,
        /// Released.
        Gone,
    }
    FanOutEvent {
        /// An attempt with the same key and request.
        Join,
        /// The upper layer offers pages.
        Offer,
        /// The upper layer has offered all pages.
        Finish,
        /// The upper layer gives up.
        Reject,
        /// The last attempt that was not cancelled was.
        Deserted,
        /// Every attempt is released and no rank is waited for.
        Released,
    }
    // PD-M12 PD-M14
    Computing: {
        Join => To(Computing), Offer => To(Computing), Finish => To(Finished),
        Reject => To(Rejected), Deserted => To(Stopped), Released => To(Gone),
    }
    Finished: {
        Join => To(Finished), Offer => Late, Finish => Late, Reject => Late, Deserted => Late,
        Released => To(Gone),
    }
    Rejected: {
        Join => To(Rejected), Offer => Late, Finish => Late, Reject => Late, Deserted => Late,
        Released => To(Gone),
    }
    Stopped: {
        Join => Late, Offer => Late, Finish => Late, Reject => Late, Deserted => Late,
        Released => To(Gone),
    }
    Gone: {
        Join => Late, Offer => Late, Finish => Late, Reject => Late, Deserted => Late,
        Released => Late,
    }
}

/// Every state with every event, one line each: `machine state event result`.
#[must_use]
pub fn dump() -> String {
    let mut out = String::new();
    ReceiverState::dump(&mut out);
    SenderState::dump(&mut out);
    LinkState::dump(&mut out);
    PullState::dump(&mut out);
    RankState::dump(&mut out);
    FanOutState::dump(&mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    // PD-S10
    #[test]
    fn only_an_ended_peer_or_a_lost_link_releases() {
        for state in SenderState::ALL {
            for event in SenderEvent::ALL {
                if state.on(*event) == Move::To(SenderState::Gone) {
                    assert!(matches!(event, SenderEvent::Ended | SenderEvent::LinkLost));
                }
            }
        }
    }

    // PD-M4
    #[test]
    fn only_quiet_ranks_let_a_round_follow() {
        for state in PullState::ALL {
            for event in PullEvent::ALL {
                if state.on(*event) == Move::To(PullState::Waiting) {
                    assert_eq!((*state, *event), (PullState::Breaking, PullEvent::Settled));
                }
            }
        }
        for state in [RankState::Pulling, RankState::Leaving, RankState::Draining] {
            assert_ne!(state.after(RankEvent::Cancel), Some(RankState::Quiet));
        }
    }

    // PD-F3
    #[test]
    fn only_a_drained_receiver_lets_go_after_a_failure() {
        assert_eq!(
            ReceiverState::Draining.after(ReceiverEvent::Drained),
            Some(ReceiverState::Closing)
        );
        assert_eq!(
            ReceiverState::Orphaned.after(ReceiverEvent::Drained),
            Some(ReceiverState::Gone)
        );
        assert_eq!(ReceiverState::Draining.after(ReceiverEvent::Acknowledged), None);
    }
}
