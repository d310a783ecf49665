//! Speed of the engine, official numerics: prefill and decode of the model in process, decode after
//! long contexts, start and memory of the real server, and the machine's GEMM and copy rates beside.
//!
//! `cargo xtask bench engine --peers` adds a random model of 450 M parameters, and llama.cpp and
//! transformers with the same models, in turns.
#![expect(clippy::print_stdout, reason = "figures are the output of a bench")]

#[path = "../tests/main/e2e/client.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod client;
#[path = "../tests/main/e2e/cluster.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod cluster;
#[path = "engine/limits.rs"]
mod limits;
#[path = "engine/peers.rs"]
mod peers;
#[path = "../tests/main/e2e/prompts.rs"]
mod prompts;

use client::complete;
use cluster::{MODEL, Process};
use dsa_kernels::cpu::CpuKernels;
use dsa_kernels::ops::{ActQuant, Linear, Rounding, WeightDesc, WeightFormat};
use dsa_kernels::{Buffer, CpuDevice, Kernels};
use dsv4_model::{LoadOptions, LogitsWanted, Model, Part, Sequence, Session, SessionLimits};
use kv_pool::{IndexKeyType, Numerics};
use peers::{Peers, Rates};
use prompts::prompt;
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tokens of a prefill step.
const CHUNK: usize = 512;
/// Most sequences of a decode step.
const BATCH: usize = 32;
/// Cached tokens of a sequence that decodes.
const CONTEXT: usize = 512;
/// Decode steps of one measurement.
const STEPS: usize = 32;
/// Rounds in which ours and llama.cpp take turns.
const ROUNDS: usize = 5;
/// Cached tokens after which decode is measured, and their names.
const LENGTHS: [(usize, &str); 6] =
    [(1024, "1k"), (2048, "2k"), (4096, "4k"), (8192, "8k"), (16_384, "16k"), (32_768, "32k")];

fn figure(name: &str, value: f64, unit: &str) {
    println!("figure engine.{name} {value:.1} {unit}");
}

/// Median time of several runs, after one that warms up.
fn median(runs: usize, mut run: impl FnMut() -> Duration) -> f64 {
    run();
    let mut times: Vec<f64> = (0..runs).map(|_| run().as_secs_f64()).collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

fn kernels() -> Arc<CpuKernels> {
    Arc::new(CpuKernels::from_env(threads()).expect("instructions that this machine has"))
}

fn session(kernels: Arc<CpuKernels>, model: &Path) -> Session {
    let options =
        LoadOptions { numerics: Numerics::Official, index_key: IndexKeyType::Fp4, kernels };
    let model = Model::load(model, options).expect("load the model");
    let cached_tokens = (CONTEXT + 256) * (BATCH + 1) + LENGTHS[5].0 + 512;
    let limits = SessionLimits { step_tokens: CHUNK, seqs: BATCH + 1, cached_tokens };
    Session::new(Arc::new(model), &CpuDevice::default(), limits).expect("allocate pages")
}

/// Prompt tokens a second.
fn prefill(session: &mut Session, tokens: usize, runs: usize) -> f64 {
    // The longest recorded conversation, repeated: its text is of no matter here.
    let ids: Vec<u32> = prompt(3900).into_iter().cycle().take(tokens).collect();
    let seconds = median(runs, || {
        let mut seq = session.open().expect("a free carry page");
        let start = Instant::now();
        session.prefill(&mut seq, &ids, CHUNK).expect("a prefill step");
        let took = start.elapsed();
        session.close(seq).expect("close the sequence");
        took
    });
    tokens as f64 / seconds
}

/// Generated tokens a second over `batch` sequences.
fn decode(session: &mut Session, batch: usize, runs: usize) -> f64 {
    let seconds = median(runs, || {
        let mut seqs: Vec<Sequence> = (0..batch).map(|n| started(session, n)).collect();
        let start = Instant::now();
        for step in 0..STEPS {
            let token = [100 + step as u32];
            let part = |seq| Part { seq, tokens: &token[..], logits: LogitsWanted::Last };
            let mut parts: Vec<Part<'_>> = seqs.iter_mut().map(part).collect();
            let out = session.step(&mut parts).expect("a decode step");
            assert_eq!(black_box(out).rows, batch);
        }
        let took = start.elapsed();
        for seq in seqs {
            session.close(seq).expect("close the sequence");
        }
        took
    });
    (batch * STEPS) as f64 / seconds
}

fn started(session: &mut Session, n: usize) -> Sequence {
    let mut seq = session.open().expect("a free carry page");
    let ids: Vec<u32> = prompt(3900)[n..n + CONTEXT].to_vec();
    session.prefill(&mut seq, &ids, CHUNK).expect("a prefill step");
    seq
}

/// Decode steps a second of one sequence after each of [`LENGTHS`], the plot of what a long context
/// costs.
fn decode_after(session: &mut Session) {
    let prompt: Vec<u32> = prompt(3900).into_iter().cycle().take(LENGTHS[5].0).collect();
    let mut seq = session.open().expect("a free carry page");
    let mut rates = Vec::new();
    for (length, name) in LENGTHS {
        let more = &prompt[seq.len()..length - STEPS];
        session.prefill(&mut seq, more, CHUNK).expect("a prefill step");
        let mut times: Vec<f64> = (0..STEPS)
            .map(|step| {
                let tokens = [100 + step as u32];
                let start = Instant::now();
                let part = Part { seq: &mut seq, tokens: &tokens, logits: LogitsWanted::Last };
                black_box(session.step(&mut [part]).expect("a decode step"));
                start.elapsed().as_secs_f64()
            })
            .collect();
        times.sort_by(f64::total_cmp);
        rates.push(1.0 / times[STEPS / 2]);
        figure(&format!("mini.decode.after_{name}"), rates[rates.len() - 1], "tokens/s");
    }
    session.close(seq).expect("close the sequence");
    ratio("mini.decode.after_32k.vs_1k", rates[5] / rates[0]);
}

fn ratio(name: &str, value: f64) {
    println!("figure engine.{name} {value:.2} x");
}

fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Ours and, in turns with it, llama.cpp; transformers takes its turn once.
fn contest(name: &str, checkpoint: &Path, kernels: &Arc<CpuKernels>, peers: &Peers) {
    let mut session = session(Arc::clone(kernels), checkpoint);
    let (mut ours, mut theirs): (Vec<Rates>, Vec<Rates>) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let mut rates = Rates::new();
        for tokens in [512, 2048] {
            rates.insert(format!("prefill.{tokens}"), prefill(&mut session, tokens, 3));
        }
        for batch in [1, BATCH] {
            rates.insert(format!("decode.b{batch}"), decode(&mut session, batch, 3));
        }
        ours.push(rates);
        theirs.push(peers.llama(name, threads()));
    }
    let median = |rounds: &[Rates], case: &str| middle(rounds.iter().map(|r| r[case]).collect());
    let slow = peers.transformers(checkpoint, threads());
    for case in ["decode.b1", "prefill.512", "prefill.2048"] {
        let (our, llama) = (median(&ours, case), median(&theirs, case));
        figure(&format!("{name}.{case}"), our, "tokens/s");
        figure(&format!("{name}.{case}.llamacpp"), llama, "tokens/s");
        figure(&format!("{name}.{case}.transformers"), slow[case], "tokens/s");
        ratio(&format!("{name}.{case}.vs_llamacpp"), our / llama);
        ratio(&format!("{name}.{case}.vs_transformers"), our / slow[case]);
    }
    let batched = median(&ours, "decode.b32");
    figure(&format!("{name}.decode.b32"), batched, "tokens/s");
    ratio(&format!("{name}.decode.b32.vs_b1"), batched / median(&ours, "decode.b1"));
    let needs = limits::per_token(checkpoint);
    let read = needs.bytes * median(&ours, "decode.b1") / limits::bandwidth(threads());
    figure(&format!("{name}.decode.b1.of_bandwidth"), 100.0 * read, "%");
    if let Some(peak) = dsa_kernels::testing::bf16_peak(threads()) {
        let used = needs.flops * median(&ours, "prefill.2048") / peak;
        figure(&format!("{name}.prefill.2048.of_peak"), 100.0 * used, "%");
    }
}

/// Rate of the kernels' matrix product, FP32 values, GFLOP/s.
fn gemm(kernels: &CpuKernels) -> f64 {
    const T: usize = 512;
    const N: usize = 1024;
    const K: usize = 1024;
    let data: Vec<u8> =
        (0..N * K).flat_map(|i| (((i % 13) as f32 - 6.0) / 8.0).to_le_bytes()).collect();
    let desc = WeightDesc {
        format: WeightFormat::F32,
        rows: N,
        cols: K,
        data: &data,
        scales: &[],
        round_to_bf16: false,
    };
    let weight = kernels.pack(&desc).expect("pack a matrix");
    let x = Buffer::from_f32((0..T * K).map(|i| ((i % 7) as f32 - 3.0) / 4.0).collect());
    let mut y = Buffer::from_f32(vec![0.0; T * N]);
    let seconds = median(9, || {
        let start = Instant::now();
        let linear = Linear {
            x: x.view(T, K).expect("its shape"),
            weight: &weight,
            groups: 1,
            quant: ActQuant::None,
            rounding: Rounding::None,
            y: y.view_mut(T, N).expect("its shape"),
        };
        kernels.linear(linear).expect("a product");
        start.elapsed()
    });
    2.0 * (T * N * K) as f64 / seconds / 1e9
}

/// Copy rate of one thread, GB/s.
fn memcpy() -> f64 {
    const BYTES: usize = 64 << 20;
    let (source, mut target) = (vec![1_u8; BYTES], vec![0_u8; BYTES]);
    let seconds = median(9, || {
        let start = Instant::now();
        target.copy_from_slice(black_box(&source));
        black_box(&mut target);
        start.elapsed()
    });
    BYTES as f64 / seconds / 1e9
}

/// Resident memory of a process, MiB.
fn rss_mib(pid: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a running process");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("a line VmRSS");
    let kib: f64 = line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number");
    kib / 1024.0
}

/// Start to ready in ms, and memory after one request in MiB, of the server as it starts bare.
fn process() -> (f64, f64) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("start the client's thread");
    let mut rss = 0.0;
    let ready = median(3, || {
        let start = Instant::now();
        let mut process = Process::spawn(&["--port".to_owned(), "0".to_owned()]);
        let line = process.wait_for("is ready on http://");
        let took = start.elapsed();
        let url = line.split_whitespace().find(|word| word.starts_with("http://"));
        runtime.block_on(complete(url.expect("an address"), &prompt(512), 16));
        rss = rss_mib(process.child.id());
        took
    });
    (ready * 1e3, rss)
}

fn main() {
    let kernels = kernels();
    println!("instructions: {}", kernels.instructions());
    figure("gemm_gflops", gemm(&kernels), "GFLOP/s");
    figure("memcpy_gbps", memcpy(), "GB/s");
    figure("read_gbps", limits::bandwidth(threads()) / 1e9, "GB/s");
    let mut session = session(Arc::clone(&kernels), Path::new(MODEL));
    figure("prefill.512", prefill(&mut session, 512, 5), "tokens/s");
    figure("prefill.4096", prefill(&mut session, 4096, 5), "tokens/s");
    for batch in [1, 8, BATCH] {
        figure(&format!("decode.b{batch}"), decode(&mut session, batch, 3), "tokens/s");
    }
    decode_after(&mut session);
    drop(session);
    match Peers::found() {
        Some(peers) => {
            contest("mini", Path::new(MODEL), &kernels, &peers);
            contest("tiny451", &peers.tiny451(), &kernels, &peers);
        }
        None => println!("llama.cpp, transformers and tiny451 are left out: run with --peers"),
    }
    let (ready_ms, rss) = process();
    figure("ready_ms", ready_ms, "ms");
    figure("rss_mib", rss, "MiB");
}
