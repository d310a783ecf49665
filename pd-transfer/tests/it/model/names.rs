//! Messages and events of the model, as its traces and the races name them.

use super::node::Local;
use pd_transfer::wire::{self, AttemptId, Message};

/// `Want 1.1`: the kind, the request and which try it is.
pub(super) fn name(bytes: &[u8]) -> String {
    let Ok(envelope) = wire::decode(bytes) else { return String::from("nonsense") };
    let message = envelope.message;
    let attempt = message.attempt().map(|id| attempt_name(&id)).unwrap_or_default();
    match &message {
        Message::Ready { seq, .. } => format!("Ready {attempt} #{seq}"),
        _ => format!("{} {attempt}", message.name()).trim_end().to_string(),
    }
}

fn attempt_name(id: &AttemptId) -> String {
    if id.0[2] == 0 {
        format!("{}.{}", id.0[0], id.0[1])
    } else {
        format!("{}.{}'{}", id.0[0], id.0[1], id.0[2])
    }
}

pub(super) fn describe(local: Local) -> String {
    match local {
        Local::Up { .. } => String::from("link up"),
        Local::Bytes { message, .. } => format!("message {message}"),
        Local::Lost { .. } => String::from("link lost"),
        Local::Tick => String::from("timer"),
        Local::Start { request } => format!("start request {}", request + 1),
        Local::Abort { request } => format!("client aborts request {}", request + 1),
        Local::Read { op, is_fresh: true, .. } => format!("read {op}"),
        Local::Read { op, is_fresh: false, .. } => format!("read {op}, guard changed"),
        Local::GetError { op } => format!("read {op} fails"),
        Local::Verify { op } => format!("verify {op}"),
        Local::Compute { attempt } => format!("compute {}", attempt_name(&attempt)),
        Local::Short { attempt } => format!("forget the last page of {}", attempt_name(&attempt)),
        Local::Unknown { attempt } => {
            format!("offer an unknown page of {}", attempt_name(&attempt))
        }
        Local::Write { attempt, n } => format!("write page {n} of {}", attempt_name(&attempt)),
        Local::Overwrite { page, is_silent: false } => format!("reuse source page {page} early"),
        Local::Overwrite { page, is_silent: true } => {
            format!("overwrite source page {page}, generation kept")
        }
    }
}
