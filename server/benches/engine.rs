//! Speed of the engine with the mini model, official numerics: prefill and decode of the model in
//! process, start and memory of the real server, and the machine's GEMM and copy rates beside.
#![expect(clippy::print_stdout, reason = "figures are the output of a bench")]

#[path = "../tests/main/e2e/client.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod client;
#[path = "../tests/main/e2e/cluster.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod cluster;
#[path = "../tests/main/e2e/prompts.rs"]
mod prompts;

use client::complete;
use cluster::{MODEL, Process};
use dsa_kernels::cpu::CpuKernels;
use dsa_kernels::ops::{ActQuant, Linear, Rounding, WeightDesc, WeightFormat};
use dsa_kernels::{Buffer, CpuDevice, Kernels};
use dsv4_model::{LoadOptions, LogitsWanted, Model, Part, Sequence, Session, SessionLimits};
use kv_pool::{IndexKeyType, Numerics};
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

fn kernels() -> Arc<CpuKernels> {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    Arc::new(CpuKernels::new(threads))
}

fn session(kernels: Arc<CpuKernels>) -> Session {
    let options =
        LoadOptions { numerics: Numerics::Official, index_key: IndexKeyType::Fp4, kernels };
    let model = Model::load(Path::new(MODEL), options).expect("load the mini model");
    let cached_tokens = (CONTEXT + 256) * (BATCH + 1) + 4096 + 256;
    let limits = SessionLimits { step_tokens: CHUNK, seqs: BATCH + 1, cached_tokens };
    Session::new(Arc::new(model), &CpuDevice::default(), limits).expect("allocate pages")
}

/// Prompt tokens a second.
fn prefill(session: &mut Session, tokens: usize) -> f64 {
    // The longest recorded conversation, repeated: its text is of no matter here.
    let ids: Vec<u32> = prompt(3900).into_iter().cycle().take(tokens).collect();
    let seconds = median(5, || {
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
fn decode(session: &mut Session, batch: usize) -> f64 {
    let seconds = median(3, || {
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
    figure("gemm_gflops", gemm(&kernels), "GFLOP/s");
    figure("memcpy_gbps", memcpy(), "GB/s");
    let mut session = session(kernels);
    figure("prefill.512", prefill(&mut session, 512), "tokens/s");
    figure("prefill.4096", prefill(&mut session, 4096), "tokens/s");
    for batch in [1, 8, BATCH] {
        figure(&format!("decode.b{batch}"), decode(&mut session, batch), "tokens/s");
    }
    drop(session);
    let (ready_ms, rss) = process();
    figure("ready_ms", ready_ms, "ms");
    figure("rss_mib", rss, "MiB");
}
