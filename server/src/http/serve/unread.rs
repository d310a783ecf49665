//! Answers of which a client takes nothing.
//!
//! A body that has something to say and is not asked for it, because its client has granted no window or
//! does not read, would keep its request for ever. After a limit it is dropped, which cancels the request.
//! A body that waits for its own next piece is the engine's to end, and is left alone.

use axum::body::Body;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is a single assignment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The answers of one connection that are on their way.
#[derive(Clone, Debug, Default)]
pub(super) struct Open(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    count: watch::Sender<usize>,
    answers: Mutex<(u64, BTreeMap<u64, Arc<Answer>>)>,
}

impl Default for Inner {
    fn default() -> Self {
        Self { count: watch::Sender::new(0), answers: Mutex::default() }
    }
}

impl Open {
    /// A request has come; it counts until the answer that [`Entered::body`] makes has been sent or given
    /// up.
    pub(super) fn enter(&self) -> Entered {
        self.0.count.send_modify(|count| *count += 1);
        Entered { open: self.clone(), key: None }
    }

    /// Resolves when there was no request for `limit`.
    pub(super) async fn idle(&self, limit: Duration) {
        let mut count = self.0.count.subscribe();
        loop {
            // The sender is here.
            let _ = count.wait_for(|count| *count == 0).await;
            if timeout(limit, count.changed()).await.is_err() {
                return;
            }
        }
    }

    /// Drops every answer of which the client takes nothing for `limit`; resolves when it has dropped
    /// some, with how many.
    pub(super) async fn cut_unread(&self, limit: Option<Duration>) -> usize {
        let Some(limit) = limit else { return std::future::pending().await };
        loop {
            tokio::time::sleep(limit / 4).await;
            let cut = self.cut(limit);
            if cut > 0 {
                return cut;
            }
        }
    }

    fn cut(&self, limit: Duration) -> usize {
        let all: Vec<Arc<Answer>> = lock(&self.0.answers).1.values().cloned().collect();
        all.iter().filter(|answer| answer.cut_after(limit)).count()
    }
}

/// A request, until its answer has been sent or given up.
#[derive(Debug)]
pub(super) struct Entered {
    open: Open,
    key: Option<u64>,
}

impl Entered {
    /// The answer to the request.
    pub(super) fn body(mut self, body: Body) -> Counted {
        let answer = Arc::new(Answer {
            part: Mutex::new(Some((body, None))),
            wait: Mutex::new(Wait { since: Some(Instant::now()), reader: None }),
        });
        let mut answers = lock(&self.open.0.answers);
        let key = answers.0;
        answers.0 += 1;
        answers.1.insert(key, Arc::clone(&answer));
        drop(answers);
        self.key = Some(key);
        lock(&answer.part).as_mut().expect("it was put there").1 = Some(self);
        Counted(answer)
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            let answer = lock(&self.open.0.answers).1.remove(&key);
            // Not under the lock: it may be the last that holds it.
            drop(answer);
        }
        self.open.0.count.send_modify(|count| *count -= 1);
    }
}

/// Whether an answer waits for its client.
#[derive(Debug)]
struct Wait {
    /// Since when it has something that is not asked for.
    since: Option<Instant>,
    /// Who is to be told that there is something.
    reader: Option<Waker>,
}

/// An answer on its way.
#[derive(Debug)]
struct Answer {
    /// The body, and what counts it; none once it was dropped.
    part: Mutex<Option<(Body, Option<Entered>)>>,
    wait: Mutex<Wait>,
}

impl Answer {
    /// Drops the body if its client has taken nothing for `limit`.
    fn cut_after(&self, limit: Duration) -> bool {
        let is_unread = lock(&self.wait).since.is_some_and(|since| since.elapsed() >= limit);
        let part = if is_unread { lock(&self.part).take() } else { None };
        // Not under the lock: what it holds has locks of its own.
        part.is_some()
    }
}

impl Wake for Answer {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    /// There is something; whoever reads for the client does not ask for it as long as that takes nothing.
    fn wake_by_ref(self: &Arc<Self>) {
        let mut wait = lock(&self.wait);
        wait.since.get_or_insert_with(Instant::now);
        let reader = wait.reader.clone();
        drop(wait);
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}

/// A body whose client is watched.
#[derive(Debug)]
pub(super) struct Counted(Arc<Answer>);

impl Drop for Counted {
    fn drop(&mut self) {
        let part = lock(&self.0.part).take();
        drop(part);
    }
}

impl HttpBody for Counted {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let answer = &self.0;
        {
            let mut wait = lock(&answer.wait);
            wait.since = None;
            match &mut wait.reader {
                Some(reader) => reader.clone_from(cx.waker()),
                none => *none = Some(cx.waker().clone()),
            }
        }
        let waker = Waker::from(Arc::clone(answer));
        let polled = match lock(&answer.part).as_mut() {
            Some((body, _)) => Pin::new(body).poll_frame(&mut Context::from_waker(&waker)),
            None => {
                let error = io::Error::other("the client took nothing of the answer for too long");
                Poll::Ready(Some(Err(axum::Error::new(error))))
            }
        };
        if matches!(polled, Poll::Ready(Some(Ok(_)))) {
            // What comes next waits for the client to take this.
            lock(&answer.wait).since = Some(Instant::now());
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        lock(&self.0.part).as_ref().is_some_and(|(body, _)| body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        lock(&self.0.part).as_ref().map_or_else(SizeHint::default, |(body, _)| body.size_hint())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::stream;
    use http_body_util::BodyExt as _;
    use std::convert::Infallible;

    const LONG: Duration = Duration::from_secs(3600);

    fn pieces(count: usize) -> Body {
        let piece = |_| Ok::<_, Infallible>(Bytes::from_static(b"x"));
        Body::from_stream(stream::iter((0..count).map(piece)))
    }

    #[tokio::test]
    async fn an_answer_that_nobody_takes_is_dropped_after_the_limit() {
        let open = Open::default();
        let mut read = open.enter().body(pieces(3));
        let mut unread = open.enter().body(pieces(3));
        for body in [&mut read, &mut unread] {
            assert!(body.frame().await.unwrap().is_ok());
        }
        assert_eq!(open.cut(LONG), 0);
        while read.frame().await.is_some() {}
        // One has ended, though it is still held; the other has more, which is not asked for.
        assert_eq!((open.cut(Duration::ZERO), open.cut(Duration::ZERO)), (1, 0));
        assert!(unread.frame().await.unwrap().is_err(), "it is no complete answer");
        drop(read);
        // Nothing is open any more, though the one that was cut is still held.
        open.idle(Duration::ZERO).await;
    }

    #[tokio::test]
    async fn an_answer_that_has_nothing_yet_is_waited_for_until_it_has() {
        let open = Open::default();
        let (sender, receiver) = tokio::sync::mpsc::unbounded_channel::<Bytes>();
        let source = stream::unfold(receiver, |mut receiver| async {
            Some((Ok::<_, Infallible>(receiver.recv().await?), receiver))
        });
        let mut body = open.enter().body(Body::from_stream(source));
        let polled = Pin::new(&mut body).poll_frame(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending());
        assert_eq!(open.cut(Duration::ZERO), 0, "the engine takes its time");
        // Its client is told that there is something, and does not come for it.
        sender.send(Bytes::from_static(b"x")).unwrap();
        assert_eq!((open.cut(LONG), open.cut(Duration::ZERO)), (0, 1));
        assert!(sender.is_closed(), "the request is given up");
    }

    #[tokio::test]
    async fn an_answer_that_was_never_asked_for_is_dropped_too() {
        let open = Open::default();
        let _held = open.enter().body(pieces(1));
        assert_eq!((open.cut(LONG), open.cut(Duration::ZERO)), (0, 1));
        open.idle(Duration::ZERO).await;
    }
}
