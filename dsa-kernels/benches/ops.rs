//! Timings of the operations on the shapes of a small DeepSeek-V4 (hidden 256, 4 heads of 512, 8
//! index heads, 16 experts of width 128), and what they add up to for a forward pass of six layers.
//!
//! Prints `figure kernels.<op>.<case> VALUE UNIT` lines. Arguments: number of threads (default 2),
//! `reference` to time the reference as well, `cpu` to measure processor time (one thread only).

#![expect(clippy::print_stdout, reason = "figures are the output of a bench")]

use dsa_kernels::cpu::{CpuKernels, CpuReference};
use dsa_kernels::ops::*;
use dsa_kernels::testing::{Matrix, Pages, Rng, random_rows};
use dsa_kernels::{CpuDevice, Device, Place, TensorMut, TensorRef};
use rustix::time::{ClockId, clock_gettime};
use std::hint::black_box;
use std::time::{Duration, Instant};

const HIDDEN: usize = 256;

fn has(argument: &str) -> bool {
    std::env::args().any(|a| a == argument)
}

/// Nanoseconds of the wall clock, or of this thread's processor time with the argument `cpu`, which
/// tells more about one thread on a machine that is busy.
fn now() -> f64 {
    let clock = if has("cpu") { ClockId::ThreadCPUTime } else { ClockId::Monotonic };
    let time = clock_gettime(clock);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Median nanoseconds of a call.
fn time(mut call: impl FnMut()) -> f64 {
    call();
    let (mut samples, begin) = (Vec::new(), Instant::now());
    while samples.len() < 5
        || (begin.elapsed() < Duration::from_millis(120) && samples.len() < 2000)
    {
        let start = now();
        call();
        samples.push(now() - start);
    }
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

fn figure(name: &str, value: f64, unit: &str) {
    println!("figure kernels.{name} {value:.2} {unit}");
}

fn mat(data: &[f32], cols: usize) -> TensorRef<'_> {
    TensorRef::from_f32(data, data.len() / cols, cols).expect("whole rows")
}

fn mat_mut(data: &mut [f32], cols: usize) -> TensorMut<'_> {
    let rows = data.len() / cols;
    TensorMut::from_f32(data, rows, cols).expect("whole rows")
}

/// One step of `t` tokens at `start`, and the sum over a forward pass.
struct Step<'a> {
    kernels: &'a dyn Kernels,
    name: &'static str,
    t: usize,
    start: u32,
    rng: Rng,
    total_ns: f64,
}

impl Step<'_> {
    fn report(&mut self, op: &str, calls: usize, call: impl FnMut()) {
        let ns = time(call);
        self.total_ns += ns * calls as f64;
        figure(&format!("{op}.{}", self.name), ns / 1000.0, "us");
    }

    fn linear(&mut self, op: &str, calls: usize, shape: (usize, usize, usize), quant: ActQuant) {
        let (n, k, groups) = shape;
        let format =
            if quant == ActQuant::None { WeightFormat::Bf16 } else { WeightFormat::Fp8Block128 };
        let weight = &Matrix::random(&mut self.rng, format, n, k).pack(self.kernels);
        let x = self.rng.floats(self.t * groups * k);
        let mut y = vec![0.0; self.t * n];
        let kernels = self.kernels;
        self.report(op, calls, || {
            let (x, y) = (mat(&x, groups * k), mat_mut(&mut y, n));
            let rounding = Rounding::Bf16;
            kernels.linear(Linear { x, weight, groups, quant, rounding, y }).expect("valid");
        });
    }

    fn linears(&mut self) {
        let q8 = ActQuant::Q8Group128;
        self.linear("linear.wq_a", 6, (256, 256, 1), q8);
        self.linear("linear.wq_b", 6, (2048, 256, 1), q8);
        self.linear("linear.wkv", 6, (512, 256, 1), q8);
        self.linear("linear.wo_a", 6, (256, 1024, 2), ActQuant::None);
        self.linear("linear.wo_b", 6, (256, 256, 1), q8);
        self.linear("linear.c4_main", 4, (1024, 256, 1), ActQuant::None);
        self.linear("linear.c4_index", 4, (256, 256, 1), ActQuant::None);
        self.linear("linear.c128", 4, (512, 256, 1), ActQuant::None);
        self.linear("linear.index_wq_b", 2, (1024, 256, 1), q8);
        self.linear("linear.index_weights", 2, (8, 256, 1), ActQuant::None);
        self.linear("linear.router", 6, (16, 256, 1), ActQuant::None);
        let head = usize::from(self.t == 1);
        self.linear("linear.head", head, (4096, 256, 1), ActQuant::None);
    }

    fn hyper(&mut self) {
        let (t, kernels, rounding) = (self.t, self.kernels, Rounding::Bf16);
        let maps = Matrix::random(&mut self.rng, WeightFormat::F32, 24, 4 * HIDDEN).pack(kernels);
        let (base, scale) = (self.rng.floats(24), self.rng.floats(3));
        let weights = &HyperWeights { maps, base, scale };
        let mut x = self.rng.bf16s(t * 4 * HIDDEN);
        let (mut post, mut comb, mut y) =
            (vec![0.0; 4 * t], vec![0.0; 16 * t], vec![0.0; t * HIDDEN]);
        let streams = x.clone();
        self.report("hyper_pre", 12, || {
            let a = HyperPre {
                streams: mat(&streams, 4 * HIDDEN),
                weights,
                iters: 20,
                hc_eps: 1e-6,
                norm_eps: 1e-6,
                rounding,
                post: mat_mut(&mut post, 4),
                comb: mat_mut(&mut comb, 16),
                y: mat_mut(&mut y, HIDDEN),
            };
            kernels.hyper_pre(a).expect("valid");
        });
        let out = y.clone();
        self.report("hyper_post", 12, || {
            let streams = mat_mut(&mut x, 4 * HIDDEN);
            let (out, post, comb) = (mat(&out, HIDDEN), mat(&post, 4), mat(&comb, 16));
            kernels.hyper_post(HyperPost { streams, out, post, comb, rounding }).expect("valid");
        });
        for (op, calls, cols, dim) in
            [("hidden", 19, 256, 256), ("kv", 6, 512, 512), ("q", 6, 2048, 512)]
        {
            let x = self.rng.floats(t * cols);
            let mut y = vec![0.0; t * cols];
            self.report(&format!("rms_norm.{op}"), calls, || {
                let (x, y) = (mat(&x, cols), mat_mut(&mut y, cols));
                kernels
                    .rms_norm(RmsNorm { x, weight: None, dim, eps: 1e-6, rounding, y })
                    .expect("valid");
            });
        }
    }

    fn rotary(&mut self) {
        let (t, kernels) = (self.t, self.kernels);
        let positions: Vec<u32> = (0..t as u32).map(|i| i + self.start).collect();
        let freqs: Vec<f32> = (0..32).map(|k| 10000f32.powf(-(k as f32) / 32.0)).collect();
        let mut table = vec![0.0; 64 * t];
        self.report("rope_table", 3, || {
            let table = mat_mut(&mut table, 64);
            kernels
                .rope_table(RopeTable { positions: &positions, freqs: &freqs, table })
                .expect("valid");
        });
        for (op, calls, cols) in [("q", 12, 2048), ("kv", 6, 512)] {
            let mut x = self.rng.floats(t * cols);
            self.report(&format!("rope.{op}"), calls, || {
                let (x, table) = (mat_mut(&mut x, cols), mat(&table, 64));
                let (dim, inverse, rounding) = (512, false, Rounding::Bf16);
                kernels.rope(Rope { x, dim, table, inverse, rounding }).expect("valid");
            });
        }
        let mut q = self.rng.floats(t * 1024);
        self.report("index_query", 2, || {
            let (q, table) = (mat_mut(&mut q, 1024), mat(&table, 64));
            kernels.index_query(IndexQuery { q, table, kind: IndexRounding::Fp4 }).expect("valid");
        });
    }

    fn compressors(&mut self) {
        let (t, kernels, mem) = (self.t, self.kernels, CpuDevice::new());
        let part = SeqPart { first: 0, count: t, start_pos: self.start };
        let seqs = [CompressSeq { part, carry_offset: 0, first_row: 0 }];
        for (op, pooling, dim) in [
            ("c4_main", Pooling::C4, 512),
            ("c4_index", Pooling::C4, 128),
            ("c128", Pooling::C128, 512),
        ] {
            let cols = pooling.cols(dim);
            let (kv, gate) = (self.rng.floats(t * cols), self.rng.floats(t * cols));
            let ape = self.rng.floats(pooling.ratio() as usize * cols);
            let carry = mem.alloc(Place::Host, pooling.carry_bytes(dim) as u64).expect("small");
            let mut rows = vec![0.0; part.rows_emitted(pooling.ratio()) * dim];
            self.report(&format!("compress.{op}"), 2, || {
                let (kv, gate, rows) = (mat(&kv, cols), mat(&gate, cols), mat_mut(&mut rows, dim));
                let (ape, carry, seqs, rounding) = (&ape, &carry, &seqs, Rounding::Bf16);
                let a = Compress { kv, gate, ape, pooling, dim, carry, seqs, rounding, rows };
                kernels.compress(a).expect("valid");
            });
        }
        let values = self.rng.bf16s(t * 512);
        let pages = Pages::new(&mut self.rng, RowFormat::KvV4, 64, t);
        self.report("store_rows.kv", 7, || pages.store(kernels, 0, &values));
    }

    fn attention(&mut self) {
        let (t, kernels) = (self.t, self.kernels);
        let part = SeqPart { first: 0, count: t, start_pos: self.start };
        let rows = part.end_pos() as usize;
        let q = self.rng.bf16s(t * 2048);
        let mut out = vec![0.0; t * 2048];
        let window = random_rows(&mut self.rng, RowFormat::KvV4, 64, rows);
        let far = random_rows(&mut self.rng, RowFormat::KvV4, 64, rows / 4);
        let list: Vec<i32> = (0..t)
            .flat_map(|i| {
                let visible = (self.start as usize + i + 1) / 4;
                // Clustered choices, as neighbouring queries choose alike.
                let (stride, shift) = ((visible / 64).max(1), i / 16 % 3);
                (0..64).map(move |n| (n * stride + shift.min(stride - 1)) as i32)
            })
            .collect();
        let windows = [SeqWindow { part, first_page_no: 0, pages: &window.list }];
        let seqs = [SeqRows { part, pages: &far.list }];
        for op in ["window", "c4", "c128"] {
            self.report(&format!("attend.{op}"), 2, || {
                let selection = match op {
                    "c4" => {
                        Selection::Listed(TensorRef::from_i32(&list, t, 64).expect("whole rows"))
                    }
                    _ => Selection::All { ratio: 128 },
                };
                let rows = CompressedRows { cache: far.cache(), seqs: &seqs, selection };
                let a = Attend {
                    q: mat(&q, 2048),
                    window_cache: window.cache(),
                    window: &windows,
                    window_tokens: 128,
                    compressed: (op != "window").then_some(rows),
                    sinks: &[0.0; 4],
                    scale: 512f32.powf(-0.5),
                    rounding: Rounding::Bf16,
                    out: mat_mut(&mut out, 2048),
                };
                kernels.attend(a).expect("valid");
            });
        }
        let keys = random_rows(&mut self.rng, RowFormat::IndexFp4, 64, rows / 4);
        let seqs = [SeqRows { part, pages: &keys.list }];
        let (q, w) = (self.rng.floats(t * 1024), self.rng.floats(t * 8));
        let mut chosen = vec![0; t * 64];
        self.report("index_select", 2, || {
            let selected = TensorMut::from_i32(&mut chosen, t, 64).expect("whole rows");
            let (q, w, keys, seqs) = (mat(&q, 1024), mat(&w, 8), keys.cache(), &seqs);
            let a = IndexSelect { q, w, keys, seqs, top_k: 64, selected, scores: None };
            kernels.index_select(a).expect("valid");
        });
    }

    fn experts(&mut self) {
        let (t, kernels) = (self.t, self.kernels);
        let logits = self.rng.floats(t * 16);
        let (mut chosen, mut weights) = (vec![0; t * 4], vec![0.0; t * 4]);
        self.report("route", 6, || {
            let experts = TensorMut::from_i32(&mut chosen, t, 4).expect("whole rows");
            let (logits, weights) = (mat(&logits, 16), mat_mut(&mut weights, 4));
            let (choice, k, scale) = (Choice::Biased(&[0.0; 16]), 4, 1.5);
            kernels.route(Route { logits, choice, k, scale, experts, weights }).expect("valid");
        });
        let all: Vec<ExpertWeights> = (0..17)
            .map(|e| {
                let fp8 = WeightFormat::Fp8Block128;
                let format = if e < 16 { WeightFormat::Fp4Group32 } else { fp8 };
                let [w1, w2, w3] = [(128, 256), (256, 128), (128, 256)]
                    .map(|(n, k)| Matrix::random(&mut self.rng, format, n, k).pack(kernels));
                ExpertWeights { w1, w2, w3 }
            })
            .collect();
        let x = self.rng.bf16s(t * HIDDEN);
        let mut y = vec![0.0; t * HIDDEN];
        self.report("moe", 6, || {
            let a = Moe {
                x: mat(&x, HIDDEN),
                experts: TensorRef::from_i32(&chosen, t, 4).expect("whole rows"),
                weights: mat(&weights, 4),
                routed: &all[..16],
                shared: &all[16],
                limit: 10.0,
                quant: ActQuant::Q8Group128,
                rounding: Rounding::Bf16,
                y: mat_mut(&mut y, HIDDEN),
            };
            kernels.moe(a).expect("valid");
        });
    }

    /// All operations, then tokens a second of the whole pass.
    fn run(mut self) {
        self.linears();
        self.hyper();
        self.rotary();
        self.compressors();
        self.attention();
        self.experts();
        figure(&format!("forward.{}", self.name), self.t as f64 / self.total_ns * 1e9, "tokens/s");
    }
}

fn gemm(kernels: &dyn Kernels, threads: usize) {
    let rng = &mut Rng::new(5);
    for (t, n, k) in [(512, 2048, 256), (512, 1024, 1024), (1, 2048, 2048), (4, 2048, 2048)] {
        let weight = &Matrix::random(rng, WeightFormat::Bf16, n, k).pack(kernels);
        let (x, mut y) = (rng.floats(t * k), vec![0.0; t * n]);
        let ns = time(|| {
            let (x, y) = (mat(&x, k), mat_mut(&mut y, n));
            let (quant, rounding) = (ActQuant::None, Rounding::None);
            kernels.linear(Linear { x, weight, groups: 1, quant, rounding, y }).expect("valid");
        });
        let name = format!("gemm.{t}x{n}x{k}_threads{threads}");
        figure(&name, (2 * t * n * k) as f64 / ns, "GFLOP/s");
    }
}

fn main() {
    let threads = std::env::args().find_map(|a| a.parse().ok()).unwrap_or(2);
    let from = vec![1u8; 64 << 20];
    let mut to = vec![0u8; 64 << 20];
    let ns = time(|| black_box(&mut to).copy_from_slice(black_box(&from)));
    figure("memcpy.64MiB", from.len() as f64 / ns, "GB/s");
    let fast = CpuKernels::new(threads);
    gemm(&CpuKernels::new(1), 1);
    gemm(&fast, threads);
    let step = |kernels, name, t, start| {
        Step { kernels, name, t, start, rng: Rng::new(9), total_ns: 0.0 }.run();
    };
    step(&fast, "prefill_512_at_2048", 512, 2048);
    step(&fast, "decode_1_at_2048", 1, 2051);
    step(&fast, "decode_8_at_2048", 8, 2048);
    if has("reference") {
        step(&CpuReference, "reference_decode_1_at_2048", 1, 2051);
    }
}
