//! The span of a request that the router passes on.

use super::RouterState;
use super::workers::Worker;
use crate::clock::{Clock, wall_time};
use crate::http::RequestId;
use crate::net::otlp::{Passed, SpanSender};
use std::sync::Arc;
use std::time::Duration;

/// A request on its way; its span is sent when this is dropped.
#[derive(Debug)]
pub(super) struct Trip {
    sender: Arc<SpanSender>,
    clock: Clock,
    passed: Passed,
}

impl Trip {
    /// A request has come; none if it is not recorded.
    pub(super) fn begin(state: &RouterState, id: &RequestId, path: &str) -> Option<Self> {
        let sender = Arc::clone(&state.config.traces.as_ref()?.sender);
        let passed = Passed {
            span: id.span().filter(|span| span.context.is_sampled)?,
            request_id: id.as_str().to_owned(),
            began_at: wall_time(),
            lasted: Duration::ZERO,
            path: path.to_owned(),
            workers: Vec::new(),
            status: None,
            broke_off: None,
        };
        Some(Self { sender, clock: Clock::start(), passed })
    }

    /// Those were asked, and this is the status of the answer.
    pub(super) fn answered(&mut self, tried: &[Arc<Worker>], status: u16) {
        self.passed.workers = tried.iter().map(|worker| worker.address().to_owned()).collect();
        self.passed.status = Some(status);
    }

    /// The answer ends before its end.
    pub(super) fn broke_off(&mut self, reason: &str) {
        self.passed.broke_off = Some(reason.to_owned());
    }
}

impl Drop for Trip {
    fn drop(&mut self) {
        self.passed.lasted = self.clock.elapsed();
        self.sender.send_passed(self.passed.clone());
    }
}
