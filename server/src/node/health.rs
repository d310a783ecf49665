//! Whether the workers of a process are well.

use super::WorkerHandle;
use crate::engine::Health;
use crate::worker::{Role, Shared};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Health of a process: that of the first worker that is not ready. One that has work and whose
/// thread gave no sign of life for `watchdog` has failed, also while it drains.
pub(super) fn health_of(workers: &[WorkerHandle], watchdog: Option<Duration>) -> Health {
    for worker in workers {
        let (shared, role) = (&worker.shared, worker.role.name());
        if shared.stopped.load(Ordering::Acquire) {
            return Health::Failed(format!("the {role} worker has ended"));
        }
        if let Some(age) = watchdog.and_then(|limit| stalled(shared, limit)) {
            let seconds = age.as_secs();
            return Health::Failed(format!(
                "the {role} worker makes no progress since {seconds} s"
            ));
        }
        if shared.draining.load(Ordering::Acquire) {
            return Health::Draining;
        }
        if worker.role == Role::Decode && !shared.had_peer.load(Ordering::Acquire) {
            return Health::Starting(shared.why_alone());
        }
    }
    Health::Ready
}

/// For how long a worker that has work has given no sign of life, if that is longer than `limit`.
fn stalled(shared: &Shared, limit: Duration) -> Option<Duration> {
    let age = shared.heartbeat.age();
    (age > limit && has_work(shared)).then_some(age)
}

/// What was accepted since the thread last said what it has counts too.
fn has_work(shared: &Shared) -> bool {
    let snapshot = shared.snapshot();
    shared.queued.load(Ordering::Acquire) > 0 || snapshot.queued + snapshot.running > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_without_work_is_not_stalled_however_still_it_is() {
        let shared = Shared::default();
        while shared.heartbeat.age() == Duration::ZERO {}
        assert_eq!(stalled(&shared, Duration::ZERO), None);
        shared.enter_queue(1, 8, 8).unwrap();
        assert!(stalled(&shared, Duration::ZERO).is_some());
        assert_eq!(stalled(&shared, Duration::from_secs(3600)), None);
        shared.leave_queue(1);
        assert_eq!(stalled(&shared, Duration::ZERO), None);
    }
}
