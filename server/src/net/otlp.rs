//! Spans of requests, sent to an OpenTelemetry collector (OTLP over HTTP).
//!
//! A worker's span lasts from when a request came until it ended, with a span below it for each stage of
//! its journey; a router's span lasts as long as it passed the request on. What they are called
//! follows OpenTelemetry's conventions for generative models
//! (<https://opentelemetry.io/docs/specs/semconv/gen-ai/>) where those have a name.

use crate::journey::{JourneyView, Outcome};
use crate::trace::{Sampling, Span, TraceParent};
use opentelemetry::trace::{
    SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState,
};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::{Protocol, SpanExporter as OtlpExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchSpanProcessor, SpanData, SpanEvents, SpanExporter, SpanLinks, SpanProcessor as _,
};
use reqwest::Url;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

/// Where collectors take spans, if an address has no path.
const PATH: &str = "/v1/traces";
/// Longest time that a batch of spans may take to be sent.
const SEND_MAX: Duration = Duration::from_secs(10);
/// Longest time that the last spans may take, when the process ends.
const LAST_SPANS: Duration = Duration::from_secs(2);

/// Address of a collector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtlpEndpoint(Url);

/// A collector or exporter that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OtlpError {
    /// Not the address of a collector.
    #[error(
        "--otlp-traces-endpoint {0:?} is no collector: http://HOST:PORT or https://HOST:PORT expected"
    )]
    Endpoint(String),
    /// The exporter does not start.
    #[error("export spans to {0}: {1}")]
    Exporter(OtlpEndpoint, String),
}

impl FromStr for OtlpEndpoint {
    type Err = OtlpError;

    fn from_str(text: &str) -> Result<Self, OtlpError> {
        let wrong = || OtlpError::Endpoint(without_secrets(text));
        let mut url = Url::parse(text).map_err(|_| wrong())?;
        let is_plain = url.query().is_none() && url.fragment().is_none();
        if !matches!(url.scheme(), "http" | "https") || !url.has_host() || !is_plain {
            return Err(wrong());
        }
        if url.path() == "/" {
            url.set_path(PATH);
        }
        Ok(Self(url))
    }
}

/// An address without what may be a secret: what is before an @, and a query.
pub(crate) fn without_secrets(text: &str) -> String {
    let text = text.split_once('?').map_or(text, |(before, _)| before);
    match (text.split_once("://"), text.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, host))) => format!("{scheme}://...@{host}"),
        _ => text.to_owned(),
    }
}

impl fmt::Display for OtlpEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = self.0.clone();
        // What is before an @ may be a secret, the name too where it is a token.
        if shown.password().is_some() || !shown.username().is_empty() {
            // An address with a host can have them.
            let _ = shown.set_password(None);
            let _ = shown.set_username("...");
        }
        write!(f, "{shown}")
    }
}

/// What a process records of traces.
#[derive(Clone, Debug)]
pub struct Traces {
    /// How many of those that begin here.
    pub sampling: Sampling,
    /// Where the spans go.
    pub sender: Arc<SpanSender>,
}

/// A request as a router has passed it on.
#[derive(Clone, Debug)]
pub struct Passed {
    /// The router's span.
    pub span: Span,
    /// Name of the request in logs.
    pub request_id: String,
    /// When it came.
    pub began_at: SystemTime,
    /// How long it took.
    pub lasted: Duration,
    /// Path of the endpoint.
    pub path: String,
    /// Addresses of the workers that were asked, in order.
    pub workers: Vec<String>,
    /// Status of the answer; none if there was none.
    pub status: Option<u16>,
    /// Why it broke off, if it did.
    pub broke_off: Option<String>,
}

/// An exporter whose failures are told when they begin, and when they end.
#[derive(Debug)]
struct Watched {
    exporter: OtlpExporter,
    endpoint: OtlpEndpoint,
    spans_lost: AtomicU64,
}

impl SpanExporter for Watched {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let count = batch.len() as u64;
        let result = self.exporter.export(batch).await;
        // Calls follow each other.
        match &result {
            Err(error) => {
                let before = self.spans_lost.fetch_add(count, Ordering::Relaxed);
                if before == 0 {
                    tracing::warn!(collector = %self.endpoint, %error, "spans are not taken");
                }
            }
            Ok(()) => {
                let spans_lost = self.spans_lost.swap(0, Ordering::Relaxed);
                if spans_lost > 0 {
                    tracing::info!(collector = %self.endpoint, spans_lost, "spans are taken again");
                }
            }
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

/// Sends spans from a thread of its own. Where that does not keep up, spans are dropped; nothing
/// waits for a collector.
#[derive(Debug)]
pub struct SpanSender {
    processor: BatchSpanProcessor,
    scope: InstrumentationScope,
}

impl SpanSender {
    /// Sends to `endpoint` what the process with the role `role` does.
    ///
    /// # Errors
    /// [`OtlpError::Exporter`]. Whether the collector answers is not asked.
    pub fn start(endpoint: &OtlpEndpoint, role: &'static str) -> Result<Self, OtlpError> {
        super::choose_cryptography();
        let exporter = OtlpExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(endpoint.0.as_str())
            .with_timeout(SEND_MAX)
            .build()
            .map_err(|error| OtlpError::Exporter(endpoint.clone(), error.to_string()))?;
        let endpoint = endpoint.clone();
        let exporter = Watched { exporter, endpoint, spans_lost: AtomicU64::new(0) };
        let mut processor = BatchSpanProcessor::builder(exporter).build();
        let resource = Resource::builder()
            .with_service_name(format!("dsv4-{role}"))
            .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
            .build();
        processor.set_resource(&resource);
        let scope =
            InstrumentationScope::builder("dsv4").with_version(env!("CARGO_PKG_VERSION")).build();
        Ok(Self { processor, scope })
    }

    /// Sends the spans of a journey that has ended, if its trace is recorded.
    pub fn send_journey(&self, view: &JourneyView) {
        let Some(span) = view.span.filter(|span| span.context.is_sampled) else { return };
        for stage in &view.stages {
            let Some(id) = crate::trace::new_span_id() else { return };
            let below = Span::below(span.context, id);
            let times = (stage.began_at, stage.lasted);
            let what = (stage.stage.name(), SpanKind::Internal);
            self.send(below, what, times, Vec::new(), None);
        }
        let mut about = vec![
            KeyValue::new("dsv4.request_id", view.request_id.clone()),
            KeyValue::new("dsv4.role", view.role),
            KeyValue::new("gen_ai.usage.input_tokens", i64::from(view.prompt_tokens)),
            KeyValue::new("gen_ai.usage.cache_read.input_tokens", i64::from(view.cached_tokens)),
            KeyValue::new("gen_ai.usage.output_tokens", i64::from(view.output_tokens)),
        ];
        if let Some((address, transport)) = &view.peer {
            about.push(KeyValue::new("dsv4.peer", address.clone()));
            about.push(KeyValue::new("dsv4.transport", *transport));
        }
        about.extend(view.outcome.map(|outcome| KeyValue::new("dsv4.outcome", outcome.name())));
        let reason = || view.reason.clone().unwrap_or_default();
        let error = view.outcome.filter(|outcome| *outcome == Outcome::Failed).map(|_| reason());
        let times = (view.began_at, view.lasted);
        self.send(span, (view.role, SpanKind::Server), times, about, error);
    }

    /// Sends the span of a request that was passed on, if its trace is recorded.
    pub fn send_passed(&self, passed: Passed) {
        if !passed.span.context.is_sampled {
            return;
        }
        let mut about = vec![
            KeyValue::new("dsv4.request_id", passed.request_id),
            KeyValue::new("url.path", passed.path),
            KeyValue::new("dsv4.workers", passed.workers.join(",")),
        ];
        let status = passed.status.map(i64::from);
        about.extend(status.map(|status| KeyValue::new("http.response.status_code", status)));
        let refused = || status.filter(|status| *status >= 500).map(|s| format!("status {s}"));
        let error = passed.broke_off.or_else(refused);
        let times = (passed.began_at, passed.lasted);
        self.send(passed.span, ("router", SpanKind::Server), times, about, error);
    }

    fn send(
        &self,
        span: Span,
        (name, span_kind): (&'static str, SpanKind),
        (start_time, lasted): (SystemTime, Duration),
        attributes: Vec<KeyValue>,
        error: Option<String>,
    ) {
        let parent = span.parent.map_or(SpanId::INVALID, SpanId::from_bytes);
        self.processor.on_end(SpanData {
            span_context: context_of(span.context),
            parent_span_id: parent,
            parent_span_is_remote: span_kind == SpanKind::Server && span.parent.is_some(),
            span_kind,
            name: name.into(),
            start_time,
            end_time: start_time + lasted,
            attributes,
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: error.map_or(Status::Unset, Status::error),
            instrumentation_scope: self.scope.clone(),
        });
    }

    /// Sends what waits, for at most two seconds; then no more.
    pub fn close(&self) {
        if let Err(error) = self.processor.shutdown_with_timeout(LAST_SPANS) {
            tracing::warn!(%error, "the last spans were not sent");
        }
    }
}

fn context_of(context: TraceParent) -> SpanContext {
    let flags = if context.is_sampled { TraceFlags::SAMPLED } else { TraceFlags::default() };
    let (trace, span) =
        (TraceId::from_bytes(context.trace_id), SpanId::from_bytes(context.span_id));
    SpanContext::new(trace, span, flags, false, TraceState::default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_collectors_are_checked() {
        let shown = |text: &str| text.parse::<OtlpEndpoint>().map(|endpoint| endpoint.to_string());
        assert_eq!(shown("http://c:4318"), Ok("http://c:4318/v1/traces".to_owned()));
        assert_eq!(shown("http://c:4318/v1/traces"), Ok("http://c:4318/v1/traces".to_owned()));
        assert_eq!(shown("https://c/otlp"), Ok("https://c/otlp".to_owned()));
        assert_eq!(shown("http://u:secret@c/x"), Ok("http://...@c/x".to_owned()));
        assert_eq!(shown("http://token@c/x"), Ok("http://...@c/x".to_owned()));
        for bad in ["", "c:4318", "grpc://c:4317", "http://", "http://c#x"] {
            assert_eq!(shown(bad), Err(OtlpError::Endpoint(bad.to_owned())));
        }
        for (bad, told) in [
            ("http://c?token=secret", "http://c"),
            ("http://u:secret@c/x?token=secret", "http://...@c/x"),
            ("grpc://u:se@cret@c", "grpc://...@c"),
        ] {
            assert_eq!(shown(bad), Err(OtlpError::Endpoint(told.to_owned())));
        }
    }
}
