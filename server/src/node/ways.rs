//! By which transport a decode worker reaches a prefill worker of its own host: through shared memory if
//! that can be had, over TCP otherwise.
//!
//! The socket of the shared memory is not found by workers that have another user, `TMPDIR` or container.
//! That cannot be told from a prefill worker that is not there yet, so where it is not reached TCP is tried
//! beside it: who is reached over TCP and then still not through shared memory stays with TCP, until that
//! link is lost. Plain state; what it wants done is done by whoever asks.

/// A transport to one prefill worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Shared memory.
    Near,
    /// TCP.
    Far,
}

/// What is heard of a way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum News {
    Up,
    Down,
    Unreached(String),
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Connect(Way),
    Disconnect(Way),
    /// This way is the one; the other was not had because of that.
    Settled(Way, Option<String>),
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    is_wanted: bool,
    is_up: bool,
}

/// The ways to one prefill worker.
#[derive(Debug)]
pub(super) struct Ways {
    near: State,
    far: State,
}

impl Ways {
    /// Shared memory is being tried.
    pub(super) fn new() -> Self {
        Self { near: State { is_wanted: true, is_up: false }, far: State::default() }
    }

    /// The ways that a connection is kept by.
    pub(super) fn wanted(&self) -> impl Iterator<Item = Way> {
        let all = [(Way::Near, self.near), (Way::Far, self.far)];
        all.into_iter().filter(|(_, state)| state.is_wanted).map(|(way, _)| way)
    }

    /// Takes news in. Those of a way that was given up meanwhile are none.
    pub(super) fn handle(&mut self, way: Way, news: News) -> Vec<Step> {
        let state = match way {
            Way::Near => &mut self.near,
            Way::Far => &mut self.far,
        };
        if !state.is_wanted {
            return Vec::new();
        }
        state.is_up = news == News::Up;
        match (way, news) {
            (Way::Near, News::Up) => {
                let was_wanted = std::mem::take(&mut self.far).is_wanted;
                let settled = Step::Settled(Way::Near, None);
                if was_wanted { vec![Step::Disconnect(Way::Far), settled] } else { vec![settled] }
            }
            (Way::Near, News::Unreached(why)) if self.far.is_up => {
                self.near = State::default();
                vec![Step::Disconnect(Way::Near), Step::Settled(Way::Far, Some(why))]
            }
            (Way::Near, News::Unreached(_)) if !self.far.is_wanted => {
                self.far.is_wanted = true;
                vec![Step::Connect(Way::Far)]
            }
            (Way::Far, News::Down) if !self.near.is_wanted => {
                // It may come back as one that can be reached through shared memory.
                self.near.is_wanted = true;
                vec![Step::Connect(Way::Near)]
            }
            (Way::Near, News::Unreached(_) | News::Down) | (Way::Far, _) => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unreached() -> News {
        News::Unreached("no socket".to_owned())
    }

    #[test]
    fn shared_memory_is_used_where_it_can_be_had() {
        let mut ways = Ways::new();
        assert_eq!(ways.handle(Way::Near, News::Up), [Step::Settled(Way::Near, None)]);
        assert!(ways.handle(Way::Near, News::Down).is_empty());
        // The prefill worker was restarted: TCP listens first, and is not preferred for that.
        assert_eq!(ways.handle(Way::Near, unreached()), [Step::Connect(Way::Far)]);
        assert!(ways.handle(Way::Far, News::Up).is_empty());
        let back = [Step::Disconnect(Way::Far), Step::Settled(Way::Near, None)];
        assert_eq!(ways.handle(Way::Near, News::Up), back);
        assert!(ways.handle(Way::Far, News::Down).is_empty(), "it was given up here");
        assert_eq!(ways.wanted().collect::<Vec<_>>(), [Way::Near]);
    }

    #[test]
    fn tcp_is_used_where_a_worker_is_there_and_its_socket_is_not() {
        let mut ways = Ways::new();
        assert_eq!(ways.handle(Way::Near, unreached()), [Step::Connect(Way::Far)]);
        assert!(ways.handle(Way::Near, unreached()).is_empty(), "nobody is there yet");
        assert!(ways.handle(Way::Far, unreached()).is_empty());
        assert!(ways.handle(Way::Far, News::Up).is_empty());
        let why = Some("no socket".to_owned());
        let settled = [Step::Disconnect(Way::Near), Step::Settled(Way::Far, why)];
        assert_eq!(ways.handle(Way::Near, unreached()), settled);
        assert!(ways.handle(Way::Near, unreached()).is_empty(), "late news");
        assert_eq!(ways.wanted().collect::<Vec<_>>(), [Way::Far]);
        // Lost: whoever comes back may be reached through shared memory.
        assert_eq!(ways.handle(Way::Far, News::Down), [Step::Connect(Way::Near)]);
        let back = [Step::Disconnect(Way::Far), Step::Settled(Way::Near, None)];
        assert_eq!(ways.handle(Way::Near, News::Up), back);
    }

    /// Whatever comes in whatever order, a connection is kept, and none is asked for twice.
    #[test]
    fn there_is_always_a_way_that_is_tried() {
        let mut seed = 1_u64;
        let mut next = |n: u64| {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % n
        };
        for _ in 0..200 {
            let mut ways = Ways::new();
            let mut kept = [true, false];
            for _ in 0..50 {
                let way = if next(2) == 0 { Way::Near } else { Way::Far };
                let news = [News::Up, News::Down, unreached()][next(3) as usize].clone();
                for step in ways.handle(way, news) {
                    match step {
                        Step::Connect(way) => {
                            assert!(!std::mem::replace(&mut kept[way as usize], true));
                        }
                        Step::Disconnect(way) => {
                            assert!(std::mem::replace(&mut kept[way as usize], false));
                        }
                        Step::Settled(way, _) => assert!(kept[way as usize]),
                    }
                }
                assert!(kept[0] || kept[1]);
                assert_eq!(kept, [Way::Near, Way::Far].map(|way| ways.wanted().any(|w| w == way)));
            }
        }
    }
}
