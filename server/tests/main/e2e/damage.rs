//! Pages and messages damaged in flight: the answer is the right one or an error, never another.

use super::cluster::{MODEL, PATIENCE, note};
use super::prompts::prompt;
use super::tamper::{DAMAGES, Damage, Tamper, Target, Victim};
use super::workers::{Answer, Workers};
use dsv4_model::config::ModelConfig;
use dsv4_server::engine::FailureKind;
use dsv4_server::node::NodeOptions;
use kv_pool::{CacheKind, Geometry, IndexKeyType, Numerics};
use pd_transfer::driver::Verifier;
use pd_transfer::get::Digest;
use pd_transfer::page_hash::{PageHash, Plain};
use pd_transfer::receiver::Verify;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// A full block, a part-filled one with rows of every cache, a part-filled window page, and open
/// windows of both compressors (507 = 3 mod 4 = 123 mod 128) that the output completes.
const LENGTH: usize = 507;
const OUTPUT: u32 = 8;
/// Prompts are computed in one step, and nothing is kept, so that every page travels.
const WHOLE: &str = "--chunked-prefill-size 2048 --disable-radix-cache";
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

async fn answer(workers: &Workers, prompt: Vec<u32>) -> Result<Answer, FailureKind> {
    workers.answer(prompt, OUTPUT).await.map(|(answer, _)| answer)
}

fn prompts() -> [Vec<u32>; 2] {
    let mut other = prompt(LENGTH + 1);
    other.truncate(LENGTH);
    [prompt(LENGTH), other]
}

async fn right_answers() -> [Answer; 2] {
    let unified = Workers::start("null", WHOLE, &NodeOptions::default());
    let [first, second] = prompts();
    let answers = [answer(&unified, first).await, answer(&unified, second).await];
    answers.map(|answer| answer.expect("an undisturbed worker answers"))
}

fn tamper() -> Tamper {
    let config = ModelConfig::from_dir(Path::new(MODEL)).expect("the mini model's configuration");
    let geometry = Geometry::new(config.shape(), Numerics::Official, IndexKeyType::Fp4);
    Tamper::new(geometry.expect("a layout of the mini model"))
}

async fn disturbed(tamper: &Tamper, flags: &str, options: NodeOptions) -> Workers {
    let wrapped = tamper.clone();
    let wrap = move |inner| wrapped.wrap(inner);
    let options = NodeOptions { wrap_transport: Some(Box::new(wrap)), ..options };
    let workers = Workers::start("both", flags, &options);
    workers.ready().await;
    tamper.set_pages(workers.pages());
    workers
}

/// Answers to the first prompt, or to both at once, so that an earlier one's bytes can be replayed
/// to the other.
async fn ask(workers: &Workers, both: bool) -> Vec<Result<Answer, FailureKind>> {
    let [first, second] = prompts();
    if both {
        let (first, second) = tokio::join!(answer(workers, first), answer(workers, second));
        return vec![first, second];
    }
    vec![answer(workers, first).await]
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
    let workers = disturbed(&tamper, WHOLE, NodeOptions::default()).await;
    for victim in victims() {
        for damage in DAMAGES {
            let before = ["mismatches", "group_retries"]
                .map(|name| workers.metric(&format!("dsv4:transfer_{name}_total"), "decode"));
            tamper.aim(Target::Pages { victim, damage, times: 1 });
            let what = format!("{damage:?} of {victim:?}");
            let found = ask(&workers, damage == Damage::Replay).await;
            assert!(tamper.done() > 0, "{what} never happened");
            let after = ["mismatches", "group_retries"]
                .map(|name| workers.metric(&format!("dsv4:transfer_{name}_total"), "decode"));
            assert!(after[0] > before[0], "{what} was not noticed");
            assert!(after[1] > before[1], "{what} was not retried");
            assert_right_or_error(&what, &right, found);
        }
    }
    assert!(
        workers.metric("dsv4:handoffs_total", "decode") > 0,
        "retries lead to verified prompts"
    );
}

#[tokio::test]
async fn page_damaged_again_and_again_leads_to_a_prompt_computed_here() {
    let right = right_answers().await;
    let tamper = tamper();
    let workers = disturbed(&tamper, WHOLE, NodeOptions::default()).await;
    for (n, victim) in victims().into_iter().enumerate() {
        let damage = DAMAGES[n % 3]; // a replayed page is never the first of its kind
        let recomputed = workers.metric("dsv4:prompts_recomputed_total", "decode");
        tamper.aim(Target::Pages { victim, damage, times: ALWAYS });
        let what = format!("{damage:?} of {victim:?}");
        assert_right_or_error(&what, &right, ask(&workers, false).await);
        let grown = workers.metric("dsv4:prompts_recomputed_total", "decode") - recomputed;
        assert_eq!(grown, 1, "{what}: prompts computed by the decode worker");
    }
}

#[tokio::test]
async fn damaged_record_or_offer_is_never_believed() {
    let right = right_answers().await;
    let tamper = tamper();
    let workers = disturbed(&tamper, WHOLE, NodeOptions::default()).await;
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
    let before = workers.metric("dsv4:handoffs_total", "decode");
    let deadline = Instant::now() + PATIENCE;
    while workers.metric("dsv4:handoffs_total", "decode") == before {
        assert_right_or_error("afterwards", &right, ask(&workers, false).await);
        assert!(Instant::now() < deadline, "prompts are not handed over any more");
    }
}

/// The check, removed.
#[derive(Debug)]
struct Believer;

impl Verifier for Believer {
    fn hash(&self) -> Box<dyn PageHash> {
        Box::new(Plain)
    }

    fn verify(&self, _: &Verify, _: Option<Digest>) -> bool {
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
    let workers = disturbed(&tamper, WHOLE, options).await;
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
    assert_eq!(workers.metric("dsv4:prompts_recomputed_total", "decode"), 0);
    assert!(harmless.is_empty(), "damage without effect: {harmless:?}");
}

/// What was pulled twice because it came damaged is kept for later prompts as it was meant.
#[tokio::test]
async fn damaged_blocks_are_not_kept_for_later_prompts() {
    let right = right_answers().await;
    let tamper = tamper();
    for (times, recomputed) in [(1, 0), (ALWAYS, 1)] {
        let workers = disturbed(&tamper, "", NodeOptions::default()).await;
        let kinds = [CacheKind::C4Kv, CacheKind::C4Index, CacheKind::C128Kv];
        let victim = Victim { kind: kinds[times as usize % 3], tail: false };
        tamper.aim(Target::Pages { victim, damage: Damage::Swap, times });
        let found = ask(&workers, false).await;
        assert!(tamper.done() > 0, "{victim:?} was never damaged");
        assert_right_or_error("damaged", &right, found);
        assert_eq!(workers.metric("dsv4:prompts_recomputed_total", "decode"), recomputed);
        let fault = |event| workers.metric("dsv4:handoff_faults_total", event);
        assert!(fault("mismatch") >= 1 && fault(victim.kind.name()) >= 1, "{victim:?} is named");
        assert!(fault("quarantine") >= 1 && fault("retry") >= 1);
        if recomputed > 0 {
            assert_eq!((fault("failed"), fault("recompute")), (1, 1));
        }
        tamper.aim(Target::Nothing);
        let kept = workers.metric("dsv4:prefix_reused_tokens_total", "decode");
        assert_eq!(ask(&workers, false).await, [Ok(right[0].clone())], "from what was kept");
        let reused = workers.metric("dsv4:prefix_reused_tokens_total", "decode") - kept;
        assert_eq!(reused, 256, "the full block was not pulled anew");
    }
}
