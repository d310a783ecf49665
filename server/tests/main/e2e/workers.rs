//! The workers of a process without the process and without HTTP.

use super::cluster::{MODEL, PATIENCE};
use clap::Parser as _;
use dsv4_model::sample::SamplingParams;
use dsv4_server::config::Cli;
use dsv4_server::engine::{
    CacheKeep, Engine as _, Event, FailureKind, GenerateRequest, Generation, Health, Usage,
};
use dsv4_server::node::{Node, NodeOptions};
use std::time::Instant;
use tokio::time::timeout;

/// Tokens with the bits of their log probabilities.
pub(crate) type Answer = Vec<(u32, u32)>;

/// A process's workers without HTTP.
pub(crate) struct Workers(Option<Node>);

impl Workers {
    /// Starts them with these flags beside.
    pub(crate) fn start(mode: &str, flags: &str, options: &NodeOptions) -> Self {
        let flags = format!("--kv-memory-mib 192 --context-length 4096 {flags}");
        let args = ["server", "--disaggregation-mode", mode, "--model-path", MODEL];
        let cli = Cli::try_parse_from(args.into_iter().chain(flags.split_whitespace()))
            .expect("good flags");
        Self(Some(Node::start_with(&cli.serve, options).expect("the workers start")))
    }

    /// What runs them.
    pub(crate) fn node(&self) -> &Node {
        self.0.as_ref().expect("taken on drop only")
    }

    /// Waits until they take requests.
    pub(crate) async fn ready(&self) {
        let deadline = Instant::now() + PATIENCE;
        while self.node().engine().health() != Health::Ready {
            assert!(Instant::now() < deadline, "{:?}", self.node().engine().health());
            tokio::task::yield_now().await;
        }
    }

    /// Begins the greedy answer to a prompt.
    pub(crate) fn begin(&self, prompt: Vec<u32>, max_tokens: u32) -> Generation {
        let sampling = SamplingParams { want_logprob: true, ..SamplingParams::greedy() };
        let request = GenerateRequest {
            id: "test".to_owned(),
            prompt,
            max_tokens,
            stop_tokens: Vec::new(),
            min_tokens: 0,
            thinking: None,
            constraint: None,
            sampling,
            cache_salt: String::new(),
            cache_keep: CacheKeep::AsUsed,
            turn: dsv4_server::engine::Turn::default(),
            provenance: dsv4_server::engine::Provenance::default(),
        };
        self.node().engine().submit(request).expect("it is accepted")
    }

    /// The greedy answer to a prompt, and its counts.
    pub(crate) async fn answer(
        &self,
        prompt: Vec<u32>,
        max_tokens: u32,
    ) -> Result<(Answer, Usage), FailureKind> {
        Self::end_of(&mut self.begin(prompt, max_tokens)).await
    }

    /// What is left of an answer.
    pub(crate) async fn end_of(
        generation: &mut Generation,
    ) -> Result<(Answer, Usage), FailureKind> {
        let mut answer = Vec::new();
        loop {
            let event =
                timeout(PATIENCE, generation.events.recv()).await.expect("no request hangs");
            match event.expect("a stream of events has an end") {
                Event::Token(one) => answer.push((one.token, one.logprob.to_bits())),
                Event::Finished { usage, .. } => return Ok((answer, usage)),
                Event::Failed { kind, .. } => return Err(kind),
            }
        }
    }

    /// A number of the worker with this role.
    pub(crate) fn metric(&self, name: &str, role: &str) -> u64 {
        let is_it = |metric: &&dsv4_server::engine::Metric| {
            metric.name == name && metric.labels.iter().any(|(_, value)| value == role)
        };
        let stats = self.node().engine().stats();
        stats.metrics.iter().find(is_it).unwrap_or_else(|| panic!("a metric {name}")).value as u64
    }

    /// Pages of each pool.
    pub(crate) fn pages(&self) -> [u32; 3] {
        let stats = self.node().engine().stats();
        let pools = &stats.workers[0].pools;
        ["block", "window", "carry"].map(|name| {
            let pool = pools.iter().find(|pool| pool.name == name).expect("a pool of each kind");
            u32::try_from(pool.total).expect("few pages")
        })
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.0.take().expect("taken on drop only").shutdown();
    }
}
