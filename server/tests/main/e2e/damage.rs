//! Pages and messages damaged in flight: the answer is the right one or an error, never another.

use super::cluster::{MODEL, PATIENCE, note};
use super::prompts::prompt;
use super::tamper::{DAMAGES, Damage, Tamper, Target, Victim};
use clap::Parser as _;
use dsv4_model::config::ModelConfig;
use dsv4_model::sample::SamplingParams;
use dsv4_server::config::Cli;
use dsv4_server::engine::{Engine as _, Event, FailureKind, GenerateRequest, Health};
use dsv4_server::node::{Node, NodeOptions};
use kv_pool::{CacheKind, Geometry, IndexKeyType, Numerics};
use pd_transfer::driver::Verifier;
use pd_transfer::receiver::Verify;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use tokio::time::timeout;

/// A full block, a part-filled one with rows of every cache, a part-filled window page, and open
/// windows of both compressors (507 = 3 mod 4 = 123 mod 128) that the output completes.
const LENGTH: usize = 507;
const OUTPUT: u32 = 8;
/// More often than the hand-off retries.
const ALWAYS: u32 = u32::MAX;

fn victims() -> Vec<Victim> {
    let whole = |kind| Victim { kind, tail: false };
    let tail = |kind| Victim { kind, tail: true };
    vec![
        whole(CacheKind::C4Kv),
        tail(CacheKind::C4Kv),
        whole(CacheKind::C4Index),
        tail(CacheKind::C4Index),
        whole(CacheKind::C128Kv),
        tail(CacheKind::C128Kv),
        whole(CacheKind::Window),
        tail(CacheKind::Window),
        whole(CacheKind::C4Carry),
        whole(CacheKind::IndexCarry),
        whole(CacheKind::C128Carry),
    ]
}

/// Tokens with the bits of their log probabilities.
type Answer = Vec<(u32, u32)>;

/// A process's workers without HTTP.
struct Workers(Option<Node>);

impl Workers {
    fn start(mode: &str, options: &NodeOptions) -> Self {
        let flags = "--kv-memory-mib 192 --context-length 4096 --chunked-prefill-size 2048";
        let args = ["server", "--disaggregation-mode", mode, "--model-path", MODEL];
        let cli =
            Cli::try_parse_from(args.into_iter().chain(flags.split(' '))).expect("good flags");
        Self(Some(Node::start_with(&cli.serve, options).expect("the workers start")))
    }

    fn node(&self) -> &Node {
        self.0.as_ref().expect("taken on drop only")
    }

    async fn ready(&self) {
        let deadline = Instant::now() + PATIENCE;
        while self.node().engine().health() != Health::Ready {
            assert!(Instant::now() < deadline, "{:?}", self.node().engine().health());
            tokio::task::yield_now().await;
        }
    }

    async fn answer(&self, prompt: Vec<u32>) -> Result<Answer, FailureKind> {
        let sampling = SamplingParams { want_logprob: true, ..SamplingParams::greedy() };
        let request = GenerateRequest {
            id: "damage".to_owned(),
            prompt,
            max_tokens: OUTPUT,
            stop_tokens: Vec::new(),
            sampling,
        };
        let mut generation = self.node().engine().submit(request).expect("it is accepted");
        let mut answer = Vec::new();
        loop {
            let event =
                timeout(PATIENCE, generation.events.recv()).await.expect("no request hangs");
            match event.expect("a stream of events has an end") {
                Event::Token(one) => answer.push((one.token, one.logprob.to_bits())),
                Event::Finished { .. } => return Ok(answer),
                Event::Failed { kind, .. } => return Err(kind),
            }
        }
    }

    fn metric(&self, name: &str) -> u64 {
        let is_it = |metric: &&dsv4_server::engine::Metric| {
            metric.name == name && metric.labels.iter().any(|(_, value)| value == "decode")
        };
        let stats = self.node().engine().stats();
        stats.metrics.iter().find(is_it).unwrap_or_else(|| panic!("a metric {name}")).value as u64
    }

    /// Pages of each pool.
    fn pages(&self) -> [u32; 3] {
        let stats = self.node().engine().stats();
        let pools = &stats.workers[0].pools;
        ["block", "window", "carry"].map(|name| {
            let pool = pools.iter().find(|(found, ..)| found == name).expect("a pool of each kind");
            u32::try_from(pool.2).expect("few pages")
        })
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.0.take().expect("taken on drop only").shutdown();
    }
}

fn prompts() -> [Vec<u32>; 2] {
    let mut other = prompt(LENGTH + 1);
    other.truncate(LENGTH);
    [prompt(LENGTH), other]
}

async fn right_answers() -> [Answer; 2] {
    let unified = Workers::start("null", &NodeOptions::default());
    let [first, second] = prompts();
    let answers = [unified.answer(first).await, unified.answer(second).await];
    answers.map(|answer| answer.expect("an undisturbed worker answers"))
}

fn tamper() -> Tamper {
    let config = ModelConfig::from_dir(Path::new(MODEL)).expect("the mini model's configuration");
    let geometry = Geometry::new(config.shape(), Numerics::Official, IndexKeyType::Fp4);
    Tamper::new(geometry.expect("a layout of the mini model"))
}

async fn disturbed(tamper: &Tamper, options: NodeOptions) -> Workers {
    let wrapped = tamper.clone();
    let wrap = move |inner| wrapped.wrap(inner);
    let workers =
        Workers::start("both", &NodeOptions { wrap_transport: Some(Box::new(wrap)), ..options });
    workers.ready().await;
    tamper.set_pages(workers.pages());
    workers
}

/// Answers to the first prompt, or to both at once, so that an earlier one's bytes can be replayed
/// to the other.
async fn ask(workers: &Workers, both: bool) -> Vec<Result<Answer, FailureKind>> {
    let [first, second] = prompts();
    if both {
        let (first, second) = tokio::join!(workers.answer(first), workers.answer(second));
        return vec![first, second];
    }
    vec![workers.answer(first).await]
}

#[track_caller]
fn assert_right_or_error(what: &str, right: &[Answer; 2], found: Vec<Result<Answer, FailureKind>>) {
    for (right, found) in right.iter().zip(found) {
        if let Ok(found) = found {
            assert_eq!(&found, right, "{what}: a different answer");
        }
    }
}

#[tokio::test]
async fn page_damaged_once_is_pulled_again_and_the_answer_is_right() {
    let right = right_answers().await;
    let tamper = tamper();
    let workers = disturbed(&tamper, NodeOptions::default()).await;
    for victim in victims() {
        for damage in DAMAGES {
            let before = ["mismatches", "group_retries"]
                .map(|name| workers.metric(&format!("dsv4:transfer_{name}_total")));
            tamper.aim(Target::Pages { victim, damage, times: 1 });
            let what = format!("{damage:?} of {victim:?}");
            let found = ask(&workers, damage == Damage::Replay).await;
            assert!(tamper.done() > 0, "{what} never happened");
            let after = ["mismatches", "group_retries"]
                .map(|name| workers.metric(&format!("dsv4:transfer_{name}_total")));
            assert!(after[0] > before[0], "{what} was not noticed");
            assert!(after[1] > before[1], "{what} was not retried");
            assert_right_or_error(&what, &right, found);
        }
    }
    assert!(workers.metric("dsv4:handoffs_total") > 0, "retries lead to verified prompts");
}

#[tokio::test]
async fn page_damaged_again_and_again_leads_to_a_prompt_computed_here() {
    let right = right_answers().await;
    let tamper = tamper();
    let workers = disturbed(&tamper, NodeOptions::default()).await;
    for (n, victim) in victims().into_iter().enumerate() {
        let damage = DAMAGES[n % 3]; // a replayed page is never the first of its kind
        let recomputed = workers.metric("dsv4:prompts_recomputed_total");
        tamper.aim(Target::Pages { victim, damage, times: ALWAYS });
        let what = format!("{damage:?} of {victim:?}");
        assert_right_or_error(&what, &right, ask(&workers, false).await);
        let grown = workers.metric("dsv4:prompts_recomputed_total") - recomputed;
        assert_eq!(grown, 1, "{what}: prompts computed by the decode worker");
    }
}

#[tokio::test]
async fn damaged_record_or_offer_is_never_believed() {
    let right = right_answers().await;
    let tamper = tamper();
    let workers = disturbed(&tamper, NodeOptions::default()).await;
    let mut targets = vec![Target::FirstToken, Target::Tags];
    for name in ["Final", "Ready"] {
        targets.extend(DAMAGES.map(|damage| Target::Message { name, damage }));
    }
    assert_right_or_error("nothing damaged", &right, ask(&workers, true).await);
    for target in targets {
        workers.ready().await;
        tamper.aim(target);
        let found = ask(&workers, false).await;
        assert!(tamper.done() > 0, "{target:?} never happened");
        assert_right_or_error(&format!("{target:?}"), &right, found);
    }
    // The links recover from it all.
    tamper.aim(Target::Nothing);
    let before = workers.metric("dsv4:handoffs_total");
    let deadline = Instant::now() + PATIENCE;
    while workers.metric("dsv4:handoffs_total") == before {
        assert_right_or_error("afterwards", &right, ask(&workers, false).await);
        assert!(Instant::now() < deadline, "prompts are not handed over any more");
    }
}

/// The check, removed.
#[derive(Debug)]
struct Believer;

impl Verifier for Believer {
    fn verify(&self, _: &Verify) -> bool {
        true
    }
}

/// Proves that the tests above can fail: without the check the same damage changes answers.
#[tokio::test]
async fn without_the_check_damaged_pages_change_answers() {
    let right = right_answers().await;
    let tamper = tamper();
    let options = NodeOptions {
        wrap_verifier: Some(Box::new(|_| Arc::new(Believer))),
        ..NodeOptions::default()
    };
    let workers = disturbed(&tamper, options).await;
    let mut harmless = Vec::new();
    for victim in victims() {
        let mut changed = 0;
        for damage in [Damage::Zero, Damage::Swap] {
            tamper.aim(Target::Pages { victim, damage, times: ALWAYS });
            let found = ask(&workers, false).await;
            assert!(tamper.done() > 0, "{damage:?} of {victim:?} never happened");
            changed += usize::from(found[0].as_ref() != Ok(&right[0]));
        }
        note(&format!("{victim:?}: {changed} of 2 answers changed"));
        if changed == 0 {
            harmless.push(victim);
        }
    }
    assert_eq!(workers.metric("dsv4:prompts_recomputed_total"), 0);
    assert!(harmless.is_empty(), "damage without effect: {harmless:?}");
}
