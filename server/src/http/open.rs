//! Requests that are being answered, and how one is ended from outside (`/abort_request`).

use super::RequestId;
use super::error::ApiError;
use super::fields::Fields;
use crate::engine::{Event, FailureKind, Generation};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use tokio::sync::oneshot;

/// Most answers that may be on their way: what all queues hold, and as many again that their clients
/// have not read yet.
pub(super) const OPEN_MAX: usize = 1 << 17;
/// Longest id that is looked for, bytes.
const ID_MAX: usize = 256;

/// The names of a request: the header's id, and the id of its answer (for `/generate` the `rid`).
#[derive(Clone, Debug)]
pub(super) struct Names {
    pub(super) request: RequestId,
    pub(super) answer: String,
}

/// Which requests are to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AbortWish {
    /// All.
    All,
    /// Those with this id.
    One(String),
}

impl fmt::Display for AbortWish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::One(id) => write!(f, "rid {id:?}"),
        }
    }
}

impl AbortWish {
    /// Reads SGLang's body: `{"rid": "..."}` or `{"abort_all": true}`.
    pub(crate) fn read(body: &[u8]) -> Result<Self, ApiError> {
        let fields = Fields::parse(body)?;
        if fields.flag("abort_all")?.unwrap_or(false) {
            return Ok(Self::All);
        }
        match fields.string("rid")? {
            None => Err(ApiError::invalid("rid", "rid is missing, and abort_all is not true")),
            Some(id) if id.is_empty() || id.len() > ID_MAX => {
                let message = format!("rid has {} bytes, 1 to {ID_MAX} are possible", id.len());
                Err(ApiError::invalid("rid", message))
            }
            Some(id) => Ok(Self::One(id.to_owned())),
        }
    }

    fn means(&self, names: &Names) -> bool {
        match self {
            Self::All => true,
            Self::One(id) => names.request.as_str() == id || names.answer == *id,
        }
    }
}

#[derive(Debug)]
struct Entry {
    names: Names,
    abort: oneshot::Sender<()>,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    entries: BTreeMap<u64, Entry>,
}

/// The requests that are being answered.
#[derive(Debug, Default)]
pub(super) struct OpenRequests(Mutex<Table>);

impl OpenRequests {
    fn lock(&self) -> MutexGuard<'_, Table> {
        // Every change is a single insertion or removal.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a request that is about to be submitted; none if there are too many.
    pub(super) fn enter(self: &Arc<Self>, names: Names) -> Option<Entered> {
        let (abort, aborted) = oneshot::channel();
        let mut table = self.lock();
        if table.entries.len() >= OPEN_MAX {
            return None;
        }
        let key = table.next;
        table.next += 1;
        table.entries.insert(key, Entry { names, abort });
        drop(table);
        Some(Entered { open: Arc::clone(self), key, aborted })
    }

    /// Ends requests; says how many there were.
    pub(super) fn abort(&self, wish: &AbortWish) -> usize {
        let mut table = self.lock();
        let found = table.entries.iter().filter(|(_, entry)| wish.means(&entry.names));
        let keys: Vec<u64> = found.map(|(key, _)| *key).collect();
        let mut ended = BTreeSet::new();
        for key in keys {
            if let Some(Entry { names, abort }) = table.entries.remove(&key) {
                // Its answer may have ended just now.
                let _ = abort.send(());
                ended.insert((names.request.as_str().to_owned(), names.answer));
            }
        }
        ended.len()
    }

    /// How many answers are on their way.
    pub(super) fn count(&self) -> usize {
        self.lock().entries.len()
    }
}

/// A request in the table, for as long as this lives.
#[derive(Debug)]
pub(super) struct Entered {
    open: Arc<OpenRequests>,
    key: u64,
    aborted: oneshot::Receiver<()>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.open.lock().entries.remove(&self.key);
    }
}

/// An accepted request whose events can be cut short. Dropping it cancels the request.
#[derive(Debug)]
pub(super) struct Answering {
    /// None once it was aborted.
    generation: Option<Generation>,
    entered: Entered,
}

impl Answering {
    pub(super) fn new(generation: Generation, entered: Entered) -> Self {
        Self { generation: Some(generation), entered }
    }

    /// The next event; one that was aborted ends with [`FailureKind::Aborted`].
    pub(super) fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        let Some(generation) = &mut self.generation else { return Poll::Ready(None) };
        // An error means that the entry has gone, which it does with this.
        if let Poll::Ready(Ok(())) = Pin::new(&mut self.entered.aborted).poll(cx) {
            self.generation = None;
            let message = "the request was ended by /abort_request".to_owned();
            return Poll::Ready(Some(Event::Failed { kind: FailureKind::Aborted, message }));
        }
        generation.events.poll_recv(cx)
    }

    /// The next event. Cancel-safe.
    pub(super) async fn event(&mut self) -> Option<Event> {
        poll_fn(|cx| self.poll_event(cx)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::CancelOnDrop;
    use axum::http::HeaderValue;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn names(request: &'static str, answer: &str) -> Names {
        let request = RequestId {
            value: HeaderValue::from_static(request),
            span: None,
            told: Arc::default(),
        };
        Names { request, answer: answer.to_owned() }
    }

    fn one(id: &str) -> AbortWish {
        AbortWish::One(id.to_owned())
    }

    #[test]
    fn wishes_are_read_or_refused() {
        let read = |text: &str| AbortWish::read(text.as_bytes());
        assert_eq!(read(r#"{"rid": "a"}"#), Ok(one("a")));
        assert_eq!(read(r#"{"rid": "a", "abort_all": true, "other": 1}"#), Ok(AbortWish::All));
        assert_eq!(read(r#"{"rid": "a", "abort_all": false}"#), Ok(one("a")));
        let long = format!(r#"{{"rid": "{}"}}"#, "a".repeat(257));
        for (bad, param) in [
            ("{}", "rid"),
            (r#"{"rid": ""}"#, "rid"),
            (r#"{"rid": 7}"#, "rid"),
            (r#"{"rid": null, "abort_all": false}"#, "rid"),
            (r#"{"abort_all": "yes"}"#, "abort_all"),
            (&long, "rid"),
        ] {
            assert_eq!(read(bad).unwrap_err().param.as_deref(), Some(param), "{bad}");
        }
        assert_eq!(read("[]").unwrap_err().code, Some("invalid_request"));
        assert_eq!(read("{").unwrap_err().code, Some("invalid_json"));
    }

    #[test]
    fn an_entry_goes_with_its_request() {
        let open = Arc::new(OpenRequests::default());
        let first = open.enter(names("r1", "a1")).unwrap();
        let second = open.enter(names("r2", "a2")).unwrap();
        assert_eq!(open.count(), 2);
        drop(first);
        assert_eq!((open.count(), open.abort(&one("r1")), open.abort(&one("a2"))), (1, 0, 1));
        drop(second);
        assert_eq!((open.count(), open.abort(&AbortWish::All)), (0, 0));
    }

    #[tokio::test]
    async fn an_abort_ends_what_waits_and_cancels_it() {
        let open = Arc::new(OpenRequests::default());
        let cancelled = Arc::new(AtomicBool::new(false));
        let (events, receiver) = tokio::sync::mpsc::unbounded_channel();
        let flag = Arc::clone(&cancelled);
        let cancel = CancelOnDrop::new(move || flag.store(true, Ordering::SeqCst));
        let entered = open.enter(names("r", "a")).unwrap();
        let mut answering = Answering::new(Generation { events: receiver, cancel }, entered);
        let ended = tokio::spawn(async move {
            let event = answering.event().await;
            let after = answering.event().await;
            (event, after, answering)
        });
        tokio::task::yield_now().await;
        // A second answer to the same request counts once.
        let other = open.enter(names("r", "a")).unwrap();
        assert_eq!(open.abort(&one("r")), 1);
        let (event, after, answering) = ended.await.unwrap();
        assert!(matches!(event, Some(Event::Failed { kind: FailureKind::Aborted, .. })));
        assert!(after.is_none() && cancelled.load(Ordering::SeqCst) && events.is_closed());
        drop((answering, other));
        assert_eq!(open.count(), 0);
    }
}
