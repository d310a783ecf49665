//! `POST /verify`: an audit of the process's workers while they serve.

use super::error::ApiError;
use super::fields::Fields;
use super::{AppState, generate};
use crate::audit::{Finding, Looked, Wish, WorkerAudit};
use crate::glue::pools::POOLS;
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::Request;
use serde_json::{Value, json};
use std::sync::Arc;

/// Most prefixes of which a part is computed again, each worker's.
const WINDOWS_MAX: u32 = 64;
/// How many without a wish.
const WINDOWS: u32 = 4;
/// What may be asked.
const FIELDS: [&str; 3] = ["sample", "windows", "seed"];

/// Reads `{"sample": 0.1, "windows": 4, "seed": 7}`, all of which may be missing.
fn read(body: &[u8]) -> Result<Wish, ApiError> {
    let fields = Fields::parse(if body.is_empty() { b"{}" } else { body })?;
    if let Some(name) = fields.names().find(|name| !FIELDS.contains(name)) {
        let message = format!("there is no {name:?}: an audit has sample, windows and seed");
        return Err(ApiError::invalid(name, message));
    }
    Ok(Wish {
        sample: fields.share("sample")?.unwrap_or(1.0).into(),
        windows: fields.count("windows", 0, WINDOWS_MAX)?.unwrap_or(WINDOWS),
        seed: fields.whole("seed")?.unwrap_or_default(),
    })
}

/// `POST /verify`: digests sealed pages and objects in host memory again, computes the ends of some
/// prefixes again, and tells what differs. One at a time. Answers go on meanwhile.
pub(super) async fn verify(
    State(state): State<Arc<AppState>>,
    request: Request<Body>,
) -> Result<Json<Value>, ApiError> {
    let wish = read(&generate::read_body(&state, request).await?)?;
    let retry_after = state.config.retry_after_s;
    let refuse = |message: &str| ApiError::unavailable("busy", message, retry_after);
    let Ok(_turn) = state.audit_slot.try_acquire() else {
        return Err(refuse("an audit is under way, and there is one at a time"));
    };
    let audits = state.engine.audit(wish).await;
    if audits.len() < state.engine.stats().workers.len() {
        return Err(refuse("a worker gave no answer: it has ended, or ends"));
    }
    let wrong: u64 = audits.iter().map(WorkerAudit::wrong).sum();
    tracing::info!(sample = wish.sample, windows = wish.windows, wrong, "/verify");
    let workers: Vec<Value> = audits.iter().map(worker_json).collect();
    Ok(Json(json!({"mismatches": wrong, "sample": wish.sample, "workers": workers})))
}

fn worker_json(audit: &WorkerAudit) -> Value {
    let pages = POOLS.iter().zip(audit.pages);
    let pages: serde_json::Map<String, Value> =
        pages.map(|(kind, looked)| (kind.name().to_owned(), looked_json(looked))).collect();
    let mut windows = looked_json(audit.windows);
    windows["tokens"] = audit.window_tokens.into();
    windows["pages"] = audit.window_pages.into();
    let findings: Vec<Value> = audit.findings.iter().map(finding_json).collect();
    json!({
        "role": audit.role,
        "pages": pages,
        "open_pages": audit.open,
        "gone": audit.gone,
        "host": looked_json(audit.host),
        "windows": windows,
        "skipped": audit.skipped,
        "mismatches": findings,
        "more_mismatches": audit.more_findings,
        "seconds": audit.lasted.as_secs_f64(),
    })
}

fn looked_json(looked: Looked) -> Value {
    json!({"there": looked.there, "checked": looked.checked, "bytes": looked.bytes})
}

fn finding_json(finding: &Finding) -> Value {
    json!({
        "found_by": finding.how.name(),
        "kind": finding.kind,
        "layer": finding.layer,
        "page": finding.page,
        "page_no": finding.page_no,
        "row": finding.row,
        "expected": finding.expected,
        "found": finding.found,
        "held_by": finding.held_by,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wish_is_read_whole_or_refused_by_name() {
        let all = Wish { sample: 1.0, windows: WINDOWS, seed: 0 };
        assert_eq!(read(b"").ok(), Some(all));
        assert_eq!(read(b"{}").ok(), Some(all));
        let some = Wish { sample: 0.25, windows: 0, seed: 9 };
        assert_eq!(read(br#"{"sample": 0.25, "windows": 0, "seed": 9}"#).ok(), Some(some));
        let last = format!("{{\"seed\": {}}}", u64::MAX);
        assert_eq!(read(last.as_bytes()).ok(), Some(Wish { seed: u64::MAX, ..all }));
        for (body, names) in [
            (r#"{"sample": 0}"#, "sample is 0"),
            (r#"{"sample": 1.5}"#, "sample is 1.5"),
            (r#"{"windows": 65}"#, "windows is 65"),
            (r#"{"seed": -1}"#, "seed is -1"),
            (r#"{"pages": 3}"#, "\"pages\""),
            ("[]", "object"),
        ] {
            let error = read(body.as_bytes()).expect_err(body).to_string();
            assert!(error.contains(names), "{body}: {error}");
        }
    }
}
