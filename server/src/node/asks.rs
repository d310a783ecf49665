//! What is asked of all workers of a process.

use super::WorkerHandle;
use crate::audit::{Auditing, Wish};
use crate::evidence::Witnessing;
use crate::worker::WorkerMsg;
use tokio::sync::oneshot::{Receiver, Sender, channel};

/// Asks every worker at once; one that has ended answers nothing.
fn ask<T>(workers: &[WorkerHandle], question: impl Fn(Sender<T>) -> WorkerMsg) -> Vec<Receiver<T>> {
    let ask = |worker: &WorkerHandle| {
        let (done, answer) = channel();
        drop(worker.inbox.send(question(done)));
        answer
    };
    workers.iter().map(ask).collect()
}

/// See [`crate::engine::Engine::audit`].
pub(super) fn audit(workers: &[WorkerHandle], wish: Wish) -> Auditing {
    let answers = ask(workers, |done| WorkerMsg::Audit { wish, done });
    Box::pin(async move {
        let mut audits = Vec::with_capacity(answers.len());
        for answer in answers {
            audits.extend(answer.await.ok());
        }
        audits
    })
}

/// See [`crate::engine::Engine::testify`].
pub(super) fn testify(workers: &[WorkerHandle], request_id: &str) -> Witnessing {
    let question = |done| WorkerMsg::Testify { request_id: request_id.to_owned(), done };
    let answers = ask(workers, question);
    Box::pin(async move {
        let mut known = Vec::new();
        for answer in answers {
            known.extend(answer.await.unwrap_or_default());
        }
        known
    })
}
