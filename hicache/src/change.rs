//! What has come and gone, for somebody who follows it.

use alloc::collections::VecDeque;

/// Something can be found where it could not be before, or can no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change<K> {
    /// It can be found from now on.
    Arrived(K),
    /// It can not be found any more, whatever has become of its bytes.
    Left(K),
}

impl<K> Change<K> {
    /// What came or went.
    pub const fn key(&self) -> &K {
        match self {
            Self::Arrived(key) | Self::Left(key) => key,
        }
    }
}

/// Changes that nobody has polled yet, at most so many.
#[derive(Debug)]
pub(crate) struct ChangeLog<K> {
    queue: VecDeque<Change<K>>,
    most: usize,
    lost: u64,
}

impl<K> Default for ChangeLog<K> {
    /// One that nobody follows: nothing is noted.
    fn default() -> Self {
        Self { queue: VecDeque::new(), most: 0, lost: 0 }
    }
}

impl<K> ChangeLog<K> {
    /// From now on up to `most` changes wait.
    pub(crate) fn follow(&mut self, most: usize) {
        self.most = most;
    }

    pub(crate) fn arrived(&mut self, key: K) {
        self.note(Change::Arrived(key));
    }

    pub(crate) fn left(&mut self, key: K) {
        self.note(Change::Left(key));
    }

    fn note(&mut self, change: Change<K>) {
        if self.queue.len() < self.most {
            self.queue.push_back(change);
        } else if self.most > 0 {
            self.lost += 1;
        }
    }

    pub(crate) fn poll(&mut self) -> Option<Change<K>> {
        self.queue.pop_front()
    }

    pub(crate) const fn lost(&self) -> u64 {
        self.lost
    }
}
