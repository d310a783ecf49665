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

/// Every state with every event, one line each: `machine state event result`.
#[must_use]
pub fn dump() -> String {
    let mut out = String::new();
    ReceiverState::dump(&mut out);
    SenderState::dump(&mut out);
    LinkState::dump(&mut out);
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
