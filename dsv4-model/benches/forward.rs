//! Speed of the forward pass on the mini model: `figure model.<case> VALUE tokens/s` lines.
//!
//! `cargo bench -p dsv4-model --bench forward -- [CASE_FILTER]`; with `PROFILE` set in the
//! environment a table of time per operation follows each case, and `CHECKPOINT` names another
//! model's folder. Run without `--bench` (as tests do) every case is computed once.
#![expect(clippy::print_stdout, reason = "figures are the output of a bench")]

use dsa_kernels::cpu::CpuKernels;
use dsa_kernels::ops::{
    Attend, Compress, Embed, HyperHead, HyperPost, HyperPre, IndexQuery, IndexSelect, Linear,
    LoadRows, Moe, RmsNorm, Rope, RopeTable, Route, StoreRows, Weight, WeightDesc,
};
use dsa_kernels::{CpuDevice, KernelError, Kernels};
use dsv4_model::{LoadOptions, LogitsWanted, Model, Part, Sequence, Session, SessionLimits};
use kv_pool::{IndexKeyType, Numerics};
use std::collections::BTreeMap;
use std::error::Error;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Tokens of a prefill step.
const CHUNK: usize = 512;

/// Counts and times every operation.
#[derive(Debug)]
struct Timed {
    inner: CpuKernels,
    spent: Mutex<BTreeMap<&'static str, (u64, Duration)>>,
}

impl Timed {
    fn timed<T>(&self, name: &'static str, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        let mut spent = self.spent.lock().expect("no operation panics");
        let entry = spent.entry(name).or_default();
        entry.0 += 1;
        entry.1 += start.elapsed();
        result
    }

    /// Prints and clears what `total` was spent on.
    fn report(&self, total: Duration) {
        let spent = std::mem::take(&mut *self.spent.lock().expect("no operation panics"));
        let inside: Duration = spent.values().map(|s| s.1).sum();
        let mut rows: Vec<_> = spent.into_iter().map(|(name, (n, t))| (name, n, t)).collect();
        rows.push(("outside of operations", 1, total.saturating_sub(inside)));
        rows.sort_by_key(|row| std::cmp::Reverse(row.2));
        for (name, calls, time) in rows {
            let share = 100.0 * time.as_secs_f64() / total.as_secs_f64();
            println!("    {name:<24} {calls:>7} calls {time:>12.2?} {share:>5.1} %");
        }
    }
}

macro_rules! timed {
    ($($name:ident: $args:ident,)*) => {
        $(fn $name(&self, a: $args<'_>) -> Result<(), KernelError> {
            self.timed(stringify!($name), || self.inner.$name(a))
        })*
    };
}

impl Kernels for Timed {
    fn pack(&self, desc: &WeightDesc<'_>) -> Result<Weight, KernelError> {
        self.inner.pack(desc)
    }

    fn linear(&self, a: Linear<'_>) -> Result<(), KernelError> {
        let name = match (a.weight.rows(), a.groups) {
            (4096, 1) => "linear head",
            (2048, 1) => "linear wq_b",
            (_, 1) => "linear other",
            _ => "linear wo_a",
        };
        self.timed(name, || self.inner.linear(a))
    }

    timed! {
        embed: Embed,
        hyper_pre: HyperPre,
        hyper_post: HyperPost,
        hyper_head: HyperHead,
        rms_norm: RmsNorm,
        rope_table: RopeTable,
        rope: Rope,
        index_query: IndexQuery,
        store_rows: StoreRows,
        load_rows: LoadRows,
        compress: Compress,
        index_select: IndexSelect,
        attend: Attend,
        route: Route,
        moe: Moe,
    }
}

struct Bench {
    model: Arc<Model>,
    timed: Option<Arc<Timed>>,
    repeats: usize,
    filter: Option<String>,
}

impl Bench {
    fn new() -> Result<Self, Box<dyn Error>> {
        let args: Vec<String> = std::env::args().skip(1).collect();
        let real = args.iter().any(|a| a == "--bench");
        let threads = std::thread::available_parallelism()?.get();
        let inner = CpuKernels::from_env(threads)?;
        let mut timed = None;
        let kernels: Arc<dyn Kernels> = if std::env::var_os("PROFILE").is_some() {
            let wrapped = Arc::new(Timed { inner, spent: Mutex::default() });
            timed = Some(Arc::clone(&wrapped));
            wrapped
        } else {
            Arc::new(inner)
        };
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        let options =
            LoadOptions { numerics: Numerics::Official, index_key: IndexKeyType::Fp4, kernels };
        let mini = || root.join("../models/dsv4-mini/checkpoint");
        let checkpoint = std::env::var_os("CHECKPOINT").map_or_else(mini, PathBuf::from);
        let model = Model::load(&checkpoint, options)?;
        let filter = args.into_iter().find(|a| !a.starts_with("--"));
        Ok(Self { model: Arc::new(model), timed, repeats: if real { 5 } else { 1 }, filter })
    }

    /// Runs `work` a few times; it returns tokens and the time they took. Prints the best rate.
    fn case(
        &self,
        name: &str,
        mut work: impl FnMut() -> Result<(usize, Duration), Box<dyn Error>>,
    ) -> Result<(), Box<dyn Error>> {
        if self.filter.as_ref().is_some_and(|f| !name.contains(f.as_str())) {
            return Ok(());
        }
        if self.repeats > 1 {
            work()?;
        }
        self.timed.iter().for_each(|t| t.spent.lock().expect("no operation panics").clear());
        let (mut best, mut total) = (0.0_f64, Duration::ZERO);
        for _ in 0..self.repeats {
            let (tokens, time) = work()?;
            total += time;
            best = best.max(tokens as f64 / time.as_secs_f64());
        }
        println!("figure model.{name} {best:.0} tokens/s");
        self.timed.iter().for_each(|t| t.report(total));
        Ok(())
    }

    fn session(&self, seqs: usize, tokens: usize) -> Result<Session, Box<dyn Error>> {
        let limits = SessionLimits { step_tokens: CHUNK, seqs, cached_tokens: tokens };
        Ok(Session::new(Arc::clone(&self.model), &CpuDevice::new(), limits)?)
    }

    fn prefill(&self, tokens: usize) -> Result<(), Box<dyn Error>> {
        let prompt = text(tokens, 0);
        let mut session = self.session(1, tokens)?;
        self.case(&format!("prefill.{tokens}"), || {
            let mut seq = session.open()?;
            let start = Instant::now();
            session.prefill(&mut seq, &prompt, CHUNK)?;
            let time = start.elapsed();
            session.close(seq)?;
            Ok((tokens, time))
        })
    }

    /// Steps of `seqs` sequences that have about 700 tokens each, so that the index chooses.
    fn decode(&self, seqs: usize) -> Result<(), Box<dyn Error>> {
        let steps = if self.repeats > 1 { 32 } else { 2 };
        let mut session = self.session(seqs, seqs * 1024)?;
        let mut open: Option<Vec<Sequence>> = None;
        self.case(&format!("decode.b{seqs}"), || {
            if open.is_none() {
                let mut all = Vec::new();
                for n in 0..seqs {
                    let mut seq = session.open()?;
                    session.prefill(&mut seq, &text(690 + n, n), CHUNK)?;
                    all.push(seq);
                }
                open = Some(all);
                self.timed.iter().for_each(|t| {
                    t.spent.lock().expect("no operation panics").clear();
                });
            }
            let all = open.as_mut().expect("opened above");
            let start = Instant::now();
            for step in 0..steps {
                let token = [text(1, step)[0]];
                let mut parts: Vec<Part<'_>> = all
                    .iter_mut()
                    .map(|seq| Part { seq, tokens: &token, logits: LogitsWanted::Last })
                    .collect();
                session.step(&mut parts)?;
            }
            Ok((steps * seqs, start.elapsed()))
        })
    }
}

/// Token ids of no meaning.
fn text(len: usize, seed: usize) -> Vec<u32> {
    (0..len as u32).map(|i| 3 + (i * 7919 + seed as u32 * 104_729) % 4000).collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let bench = Bench::new()?;
    bench.prefill(512)?;
    bench.prefill(4096)?;
    for seqs in [1, 8, 32] {
        bench.decode(seqs)?;
    }
    Ok(())
}
