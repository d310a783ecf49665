//! Flags for traces.

use crate::net::otlp::{OtlpError, SpanSender, Traces};
use crate::trace::Sampling;
use clap::Args;
use std::sync::Arc;

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if (0.0..=1.0).contains(&number) => Ok(number),
        _ => Err("a number from 0 to 1 expected".to_owned()),
    }
}

/// Flags that say what is recorded of traces.
#[derive(Clone, Debug, Args)]
pub struct TraceArgs {
    /// OpenTelemetry collector that is told the way of each request (OTLP over HTTP), like
    /// http://HOST:4318 [default: none].
    #[arg(long, value_name = "URL")]
    pub otlp_traces_endpoint: Option<String>,
    /// Share of the requests without a traceparent header for which a trace begins.
    #[arg(long, default_value_t = 1.0, value_parser = share, value_name = "SHARE")]
    pub trace_sampling_ratio: f64,
}

impl Default for TraceArgs {
    fn default() -> Self {
        Self { otlp_traces_endpoint: None, trace_sampling_ratio: 1.0 }
    }
}

impl TraceArgs {
    /// What a process with this role records, if anything. Starts the thread that sends it.
    ///
    /// # Errors
    /// [`OtlpError`].
    pub fn traces(&self, role: &'static str) -> Result<Option<Traces>, OtlpError> {
        // Read here: what the command line cannot read it shows as it was given, secrets and all.
        let Some(endpoint) = &self.otlp_traces_endpoint else { return Ok(None) };
        let sender = Arc::new(SpanSender::start(&endpoint.parse()?, role)?);
        Ok(Some(Traces { sampling: Sampling::of(self.trace_sampling_ratio), sender }))
    }
}
