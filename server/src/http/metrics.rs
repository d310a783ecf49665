//! Counters and latency histograms of the HTTP side, and the Prometheus text format.

use super::counts::HttpCounts;
use crate::engine::{Metric, MetricKind, Usage};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Upper bounds of the buckets of the time to first token, seconds.
const TTFT_BUCKETS: [f64; 14] =
    [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0];
/// Upper bounds of the buckets of the time of a whole request, seconds.
const E2E_BUCKETS: [f64; 15] =
    [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0];
/// Upper bounds of the buckets of the time between two tokens, seconds.
const ITL_BUCKETS: [f64; 12] =
    [0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.5, 1.0, 5.0];

#[derive(Debug)]
struct Histogram {
    name: &'static str,
    help: &'static str,
    bounds: &'static [f64],
    /// One per bound, then one for what is above all of them.
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    fn new(name: &'static str, help: &'static str, bounds: &'static [f64]) -> Self {
        Self { name, help, bounds, counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    fn observe(&mut self, value: f64, times: u64) {
        self.counts[self.bounds.partition_point(|&bound| bound < value)] += times;
        self.sum += value * times as f64;
    }

    fn write(&self, label: &str, out: &mut String) {
        header(out, self.name, self.help, "histogram");
        let mut total = 0;
        let bounds = self.bounds.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        for (bound, count) in bounds.zip(&self.counts) {
            total += count;
            line(out, format_args!("{}_bucket{{{label},le=\"{bound}\"}} {total}", self.name));
        }
        line(out, format_args!("{}_sum{{{label}}} {}", self.name, self.sum));
        line(out, format_args!("{}_count{{{label}}} {total}", self.name));
    }
}

#[derive(Debug)]
struct Numbers {
    requests: u64,
    aborted: u64,
    failed: u64,
    prompt_tokens: u64,
    generation_tokens: u64,
    cached_tokens: u64,
    ttft: Histogram,
    itl: Histogram,
    e2e: Histogram,
}

/// What the HTTP side counts.
#[derive(Debug)]
pub struct HttpMetrics {
    model: String,
    numbers: Mutex<Numbers>,
    counts: Arc<HttpCounts>,
}

/// The counters that the page shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestCounts {
    /// Accepted requests.
    pub requests: u64,
    /// Requests whose client went away, or that `/abort_request` has ended.
    pub aborted: u64,
    /// Requests that ended with an error after they were accepted.
    pub failed: u64,
    /// Prompt tokens of requests that ended.
    pub prompt_tokens: u64,
    /// Those of them that came from a cache.
    pub cached_tokens: u64,
}

impl HttpMetrics {
    /// Counters at zero, labelled with a model name; responses are counted in `counts`.
    #[must_use]
    pub fn new(model: &str, counts: Arc<HttpCounts>) -> Self {
        Self {
            model: model.to_owned(),
            counts,
            numbers: Mutex::new(Numbers {
                requests: 0,
                aborted: 0,
                failed: 0,
                prompt_tokens: 0,
                generation_tokens: 0,
                cached_tokens: 0,
                ttft: Histogram::new(
                    "sglang:time_to_first_token_seconds",
                    "Time from request to first token.",
                    &TTFT_BUCKETS,
                ),
                itl: Histogram::new(
                    "sglang:inter_token_latency_seconds",
                    "Mean time between two tokens of a request, once per token.",
                    &ITL_BUCKETS,
                ),
                e2e: Histogram::new(
                    "sglang:e2e_request_latency_seconds",
                    "Time from request to last token.",
                    &E2E_BUCKETS,
                ),
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Numbers> {
        // Only additions happen under the lock.
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Current counts.
    #[must_use]
    pub fn counts(&self) -> RequestCounts {
        let numbers = self.lock();
        RequestCounts {
            requests: numbers.requests,
            aborted: numbers.aborted,
            failed: numbers.failed,
            prompt_tokens: numbers.prompt_tokens,
            cached_tokens: numbers.cached_tokens,
        }
    }

    /// All of it in Prometheus text format 0.0.4, the engine's numbers first. A name that the
    /// engine reports itself is not repeated.
    #[must_use]
    pub fn render(&self, engine: &[Metric]) -> String {
        let mut out = render_metrics(engine);
        let taken: BTreeSet<&str> = engine.iter().map(|metric| metric.name.as_str()).collect();
        self.write_own(&taken, &mut out);
        out
    }

    fn write_own(&self, taken: &BTreeSet<&str>, out: &mut String) {
        let numbers = self.lock();
        let model = label("model_name", &self.model);
        for (name, help, value) in [
            ("sglang:num_requests_total", "Requests accepted.", numbers.requests),
            (
                "sglang:num_aborted_requests_total",
                "Requests whose client left, or that were ended by /abort_request.",
                numbers.aborted,
            ),
            ("sglang:num_failed_requests_total", "Accepted requests that failed.", numbers.failed),
            (
                "sglang:prompt_tokens_total",
                "Prompt tokens of ended requests.",
                numbers.prompt_tokens,
            ),
            ("sglang:generation_tokens_total", "Tokens generated.", numbers.generation_tokens),
            ("sglang:cached_tokens_total", "Prompt tokens from a cache.", numbers.cached_tokens),
        ] {
            if !taken.contains(name) {
                header(out, name, help, "counter");
                line(out, format_args!("{name}{{{model}}} {value}"));
            }
        }
        for histogram in [&numbers.ttft, &numbers.itl, &numbers.e2e] {
            if !taken.contains(histogram.name) {
                histogram.write(&model, out);
            }
        }
        drop(numbers);
        let (requests, probes) = self.counts.responses();
        let probed =
            "HTTP responses to probes (/health, /readyz, /health_generate, /metrics, /stats.json).";
        for (name, help, responses) in [
            ("http_requests_total", "HTTP responses, apart from those to probes.", requests),
            ("http_probes_total", probed, probes),
        ] {
            header(out, name, help, "counter");
            for ((method, path, status), count) in responses {
                let labels = [
                    label("method", method),
                    label("handler", path),
                    label("status", &status.to_string()),
                ];
                line(out, format_args!("{name}{{{}}} {count}", labels.join(",")));
            }
        }
        let name = "dsv4:http_connections_ended_total";
        header(out, name, CONNECTIONS_ENDED, "counter");
        for (why, count) in self.counts.closed() {
            line(out, format_args!("{name}{{{}}} {count}", label("reason", why)));
        }
    }
}

/// What the count of ended connections is.
pub(crate) const CONNECTIONS_ENDED: &str =
    "Connections ended here, by reason; for unread, answers.";

/// Numbers in Prometheus text format 0.0.4, in order of their names.
#[must_use]
pub fn render_metrics(metrics: &[Metric]) -> String {
    let mut out = String::new();
    let mut by_name: BTreeMap<&str, Vec<&Metric>> = BTreeMap::new();
    for metric in metrics {
        by_name.entry(&metric.name).or_default().push(metric);
    }
    for (name, metrics) in &by_name {
        let kind = match metrics[0].kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
        };
        header(&mut out, name, metrics[0].help, kind);
        for metric in metrics {
            let labels: Vec<String> =
                metric.labels.iter().map(|(key, value)| label(key, value)).collect();
            let braces =
                if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
            line(&mut out, format_args!("{name}{braces} {}", metric.value));
        }
    }
    out
}

fn header(out: &mut String, name: &str, help: &str, kind: &str) {
    line(out, format_args!("# HELP {name} {}", help.replace('\\', "\\\\").replace('\n', "\\n")));
    line(out, format_args!("# TYPE {name} {kind}"));
}

fn line(out: &mut String, line: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{line}");
}

fn label(key: &str, value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("{key}=\"{value}\"")
}

/// Follows one accepted request. Dropped before it ended, it counts as aborted: the client left.
#[derive(Debug)]
pub(super) struct RequestTimer {
    metrics: Arc<HttpMetrics>,
    start: Instant,
    first_token: Option<Instant>,
    ended: bool,
}

impl RequestTimer {
    pub(super) fn start(metrics: &Arc<HttpMetrics>, start: Instant) -> Self {
        metrics.lock().requests += 1;
        Self { metrics: Arc::clone(metrics), start, first_token: None, ended: false }
    }

    pub(super) fn first_token(&mut self) {
        if self.first_token.is_none() {
            let now = Instant::now();
            self.first_token = Some(now);
            self.metrics.lock().ttft.observe((now - self.start).as_secs_f64(), 1);
        }
    }

    pub(super) fn finish(&mut self, usage: Usage) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let now = Instant::now();
        let mut numbers = self.metrics.lock();
        numbers.prompt_tokens += u64::from(usage.prompt_tokens);
        numbers.generation_tokens += u64::from(usage.completion_tokens);
        numbers.cached_tokens += u64::from(usage.cached_tokens);
        numbers.e2e.observe((now - self.start).as_secs_f64(), 1);
        let gaps = u64::from(usage.completion_tokens.saturating_sub(1));
        if let (Some(first), 1..) = (self.first_token, gaps) {
            numbers.itl.observe((now - first).as_secs_f64() / gaps as f64, gaps);
        }
    }

    /// It was ended from outside: as if its client had left.
    pub(super) fn abort(&mut self) {
        if !std::mem::replace(&mut self.ended, true) {
            self.metrics.lock().aborted += 1;
        }
    }

    pub(super) fn fail(&mut self) {
        if !std::mem::replace(&mut self.ended, true) {
            self.metrics.lock().failed += 1;
        }
    }
}

impl Drop for RequestTimer {
    fn drop(&mut self) {
        self.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_format_groups_names_and_escapes_labels() {
        let counts = Arc::new(HttpCounts::default());
        let metrics = HttpMetrics::new("a\"b", Arc::clone(&counts));
        counts.count_response("GET", "/health", 200);
        counts.count_response("GET", "/health", 200);
        let metric = |name: &str, pool: &str, value| Metric {
            name: name.to_owned(),
            labels: vec![("pool".to_owned(), pool.to_owned())],
            value,
            kind: MetricKind::Gauge,
            help: "Pages.",
        };
        let engine = [
            metric("dsv4:pages", "x", 1.0),
            metric("sglang:prompt_tokens_total", "all", 2.0),
            metric("dsv4:pages", "y\n", 3.5),
        ];
        let text = metrics.render(&engine);
        let begin = "# HELP dsv4:pages Pages.\n# TYPE dsv4:pages gauge\n\
                     dsv4:pages{pool=\"x\"} 1\ndsv4:pages{pool=\"y\\n\"} 3.5\n";
        assert!(text.starts_with(begin), "{text}");
        assert_eq!(text.matches("# TYPE sglang:prompt_tokens_total").count(), 1);
        assert!(text.contains("sglang:num_requests_total{model_name=\"a\\\"b\"} 0\n"));
        let http = "http_probes_total{method=\"GET\",handler=\"/health\",status=\"200\"} 2\n";
        assert!(text.contains(http), "{text}");
    }

    #[test]
    fn histogram_buckets_are_cumulative_and_inclusive() {
        let mut histogram = Histogram::new("h", "H.", &[1.0, 2.0]);
        for value in [0.5, 1.0, 1.5, 9.0] {
            histogram.observe(value, 1);
        }
        let mut text = String::new();
        histogram.write("m=\"\"", &mut text);
        for line in [
            "h_bucket{m=\"\",le=\"1\"} 2",
            "h_bucket{m=\"\",le=\"2\"} 3",
            "h_bucket{m=\"\",le=\"+Inf\"} 4",
            "h_sum{m=\"\"} 12",
            "h_count{m=\"\"} 4",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
    }

    #[test]
    fn a_request_ends_once_in_one_way() {
        let metrics = Arc::new(HttpMetrics::new("m", Arc::default()));
        let begin = || RequestTimer::start(&metrics, Instant::now());
        let mut done = begin();
        done.first_token();
        done.finish(Usage {
            prompt_tokens: 5,
            completion_tokens: 3,
            cached_tokens: 1,
            cached_below: [0; 3],
        });
        done.fail();
        drop(done);
        begin().fail();
        drop(begin());
        let counts = RequestCounts {
            requests: 3,
            aborted: 1,
            failed: 1,
            prompt_tokens: 5,
            cached_tokens: 1,
        };
        assert_eq!(metrics.counts(), counts);
        let numbers = metrics.lock();
        assert_eq!((numbers.prompt_tokens, numbers.generation_tokens), (5, 3));
        assert_eq!(numbers.itl.counts.iter().sum::<u64>(), 2);
    }
}
