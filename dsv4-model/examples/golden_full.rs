//! All golden dialogues and prompts in every numerics, as figures.
//!
//! `cargo run --release -p dsv4-model --example golden_full -- [reference|fp4|fp8|bf16]`
#![expect(clippy::print_stdout, reason = "figures are its output")]

use dsa_kernels::cpu::CpuKernels;
use dsa_kernels::{CpuDevice, Kernels};
use dsv4_model::{LoadOptions, LogitsWanted, Model, Part, Session, SessionLimits};
use kv_pool::{IndexKeyType, Numerics};
use serde::Deserialize;
use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

const CHUNK: usize = 512;

/// A conversation, its answers' token spans, and which of them FP32 has right, teacher-forced.
#[derive(Deserialize)]
struct Dialogue {
    ids: Vec<u32>,
    spans: Vec<[usize; 2]>,
    right: Vec<bool>,
}

/// A prompt and its greedy continuation in FP32.
#[derive(Deserialize)]
struct Prompt {
    ids: Vec<u32>,
    greedy: Vec<u32>,
}

fn argmax(logits: &[f32]) -> u32 {
    let better = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
    (0..logits.len()).fold(0, better) as u32
}

/// Answers right in FP32 and here, and right in FP32.
fn answers(session: &mut Session, d: &Dialogue) -> Result<(usize, usize), Box<dyn Error>> {
    let mut best = Vec::with_capacity(d.ids.len());
    let mut seq = session.open()?;
    for tokens in d.ids.chunks(CHUNK) {
        let part = Part { seq: &mut seq, tokens, logits: LogitsWanted::All };
        let out = session.step(&mut [part])?;
        best.extend((0..out.rows).map(|r| argmax(out.row(r))));
    }
    session.close(seq)?;
    let right = d.spans.iter().zip(&d.right).filter(|(_, right)| **right).map(|(span, _)| span);
    let (mut kept, mut total) = (0, 0);
    for &[from, to] in right {
        total += 1;
        kept += usize::from(best[from - 1..to - 1] == d.ids[from..to]);
    }
    Ok((kept, total))
}

/// Tokens equal to the FP32 continuation before the first that differs.
fn equal_tokens(session: &mut Session, p: &Prompt) -> Result<usize, Box<dyn Error>> {
    let mut seq = session.open()?;
    let mut token = argmax(session.prefill(&mut seq, &p.ids, CHUNK)?.row(0));
    let mut equal = 0;
    while equal < p.greedy.len() && token == p.greedy[equal] {
        equal += 1;
        let part = Part { seq: &mut seq, tokens: &[token], logits: LogitsWanted::Last };
        token = argmax(session.step(&mut [part])?.row(0));
    }
    session.close(seq)?;
    Ok(equal)
}

fn main() -> Result<(), Box<dyn Error>> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let read = |name: &str| std::fs::read(root.join("golden").join(name));
    let dialogues: Vec<Dialogue> = serde_json::from_slice(&read("dialogues.json")?)?;
    let prompts: Vec<Prompt> = serde_json::from_slice(&read("prompts.json")?)?;
    let threads = std::thread::available_parallelism()?.get();
    let kernels: Arc<dyn Kernels> = Arc::new(CpuKernels::new(threads));
    let variants = [
        ("reference", Numerics::Reference, IndexKeyType::Bf16),
        ("fp4", Numerics::Official, IndexKeyType::Fp4),
        ("fp8", Numerics::Official, IndexKeyType::Fp8),
        ("bf16", Numerics::Official, IndexKeyType::Bf16),
    ];
    let only = std::env::args().nth(1);
    let wanted = |name: &str| only.as_ref().is_none_or(|o| o == name);
    for (name, numerics, index_key) in variants.into_iter().filter(|v| wanted(v.0)) {
        let options = LoadOptions { numerics, index_key, kernels: Arc::clone(&kernels) };
        let model = Model::load(&root.join("../models/dsv4-mini/checkpoint"), options)?;
        let limits = SessionLimits { step_tokens: CHUNK, seqs: 1, cached_tokens: 8192 };
        let mut session = Session::new(Arc::new(model), &CpuDevice::new(), limits)?;
        let (mut equal, mut total) = (0, 0);
        for prompt in &prompts {
            equal += equal_tokens(&mut session, prompt)?;
            total += prompt.greedy.len();
        }
        println!("figure model.golden.{name}.continuation {equal} of {total} tokens");
        let (mut kept, mut total, mut tokens) = (0, 0, 0);
        let start = Instant::now();
        for dialogue in &dialogues {
            let (k, t) = answers(&mut session, dialogue)?;
            (kept, total, tokens) = (kept + k, total + t, tokens + dialogue.ids.len());
        }
        let rate = tokens as f64 / start.elapsed().as_secs_f64();
        println!("figure model.golden.{name}.answers {kept} of {total} kept, {rate:.0} tokens/s");
    }
    Ok(())
}
