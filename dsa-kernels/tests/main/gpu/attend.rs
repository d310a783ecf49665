//! Attention against FP64.

use super::{Gpu, STREAM, gpu, shuffled};
use dsa_kernels::cpu::CpuReference;
use dsa_kernels::cuda::{AttendPath, DeviceAttend, DeviceRows, DeviceSelection, expanded_bytes};
use dsa_kernels::ops::*;
use dsa_kernels::testing::Rng;
use dsa_kernels::{CpuDevice, Device, Mem, Place, TensorMut, TensorRef};

/// A pool of 584-byte rows; unwritten ones hold NaN.
struct Pool {
    mem: Mem,
    stride: u64,
    /// Page tables of the sequences.
    pages: Vec<u32>,
    per_seq: usize,
    /// De-quantised rows of each sequence.
    plain: Vec<Vec<f32>>,
}

fn pool(gpu: &Gpu, rng: &mut Rng, rows: &[usize], rows_per_page: usize) -> Pool {
    let stride = (rows_per_page * 584).next_multiple_of(576) as u64;
    let per_seq = rows.iter().max().unwrap().div_ceil(rows_per_page).max(1);
    let count = rows.len() * per_seq + 1;
    let host = CpuDevice::new().alloc(Place::Host, count as u64 * stride).unwrap();
    host.write(0, &vec![0xff; host.len() as usize]).unwrap();
    let format = RowFormat::KvV4;
    let cache =
        PagedCache { mem: &host, base: 0, stride, rows_per_page: rows_per_page as u32, format };
    let pages = shuffled(rng, count);
    let mut plain = Vec::new();
    for (n, rows) in rows.iter().enumerate() {
        let own = &pages[n * per_seq..(n + 1) * per_seq];
        let target =
            |i: usize| RowTarget { page: own[i / rows_per_page], row: (i % rows_per_page) as u32 };
        let targets: Vec<RowTarget> = (0..*rows).map(target).collect();
        let values = rng.bf16s(rows * 512);
        let values = TensorRef::from_f32(&values, *rows, 512).unwrap();
        CpuReference.store_rows(StoreRows { rows: values, cache, targets: &targets }).unwrap();
        let mut back = vec![0.0; rows * 512];
        let rows = TensorMut::from_f32(&mut back, *rows, 512).unwrap();
        CpuReference.load_rows(LoadRows { cache, sources: &targets, rows }).unwrap();
        plain.push(back);
    }
    let mut bytes = vec![0; host.len() as usize];
    host.read(0, &mut bytes).unwrap();
    let pages = pages[..plain.len() * per_seq].to_vec();
    Pool { mem: gpu.bytes(&bytes).mem, stride, pages, per_seq, plain }
}

impl Pool {
    fn cache(&self, rows_per_page: u32) -> PagedCache<'_> {
        PagedCache {
            mem: &self.mem,
            base: 0,
            stride: self.stride,
            rows_per_page,
            format: RowFormat::KvV4,
        }
    }
}

/// Compressed rows of a case.
enum Choice {
    None,
    All(u32),
    Listed(usize),
}

struct Case {
    window: Pool,
    first: Vec<u32>,
    far: Option<Pool>,
    ratio: u32,
    list: Vec<i32>,
    top_k: usize,
    positions: Vec<u32>,
    q: Vec<f32>,
    sinks: Vec<f32>,
    tokens_per_seq: usize,
}

/// One sequence for each last position, with `tokens_per_seq` tokens that end there.
fn case(
    gpu: &Gpu,
    rng: &mut Rng,
    last: &[u32],
    tokens_per_seq: usize,
    heads: usize,
    choice: &Choice,
) -> Case {
    let positions: Vec<u32> = last
        .iter()
        .flat_map(|p| {
            (0..tokens_per_seq as u32)
                .map(move |i| (p + 1 + i).saturating_sub(tokens_per_seq as u32))
        })
        .collect();
    let lens: Vec<usize> = last.iter().map(|p| *p as usize + 1).collect();
    let window = pool(gpu, rng, &lens, 64);
    let (ratio, top_k) = match choice {
        Choice::None => (0, 0),
        Choice::All(ratio) => (*ratio, 0),
        Choice::Listed(top_k) => (4, *top_k),
    };
    let far = (ratio > 0).then(|| {
        let rows: Vec<usize> = last.iter().map(|p| (*p as usize + 1) / ratio as usize).collect();
        pool(gpu, rng, &rows, if matches!(choice, Choice::All(_)) { 2 } else { 64 })
    });
    let mut list = Vec::new();
    for p in &positions {
        let visible = (*p as usize + 1) / 4;
        let mut rows: Vec<i32> =
            shuffled(rng, visible).into_iter().take(top_k).map(|r| r as i32).collect();
        rows.sort_unstable();
        rows.resize(top_k, -1);
        // Rows that do not exist may stand anywhere.
        if top_k > 4 && rng.below(2) == 0 {
            rows[rng.below(top_k)] = -1;
            rows[top_k - 1] = i32::MAX;
        }
        list.extend(rows);
    }
    let tokens = positions.len();
    Case {
        window,
        first: vec![0; last.len()],
        far,
        ratio,
        list,
        top_k,
        positions,
        q: rng.bf16s(tokens * heads * 512),
        sinks: rng.floats(heads),
        tokens_per_seq,
    }
}

impl Case {
    fn run(&self, gpu: &Gpu, path: AttendPath) -> Vec<f32> {
        let (q, positions) = (gpu.bf16s(&self.q), gpu.u32s(&self.positions));
        let (window_pages, window_first) = (gpu.u32s(&self.window.pages), gpu.u32s(&self.first));
        let list = gpu.bytes(&self.list.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>());
        let far_pages = self.far.as_ref().map(|far| gpu.u32s(&far.pages));
        let (sinks, out) = (gpu.f32s(&self.sinks), gpu.poisoned(2 * self.q.len()));
        let selection = if self.top_k > 0 {
            DeviceSelection::Listed { rows: &list, top_k: self.top_k as u32 }
        } else {
            DeviceSelection::All { ratio: self.ratio.max(1) }
        };
        let per_page = if self.top_k > 0 { 64 } else { 2 };
        let compressed = self.far.as_ref().zip(far_pages.as_ref()).map(|(far, pages)| DeviceRows {
            cache: far.cache(per_page),
            pages,
            pages_per_seq: far.per_seq as u32,
            selection,
        });
        let mut a = DeviceAttend {
            q: &q,
            positions: &positions,
            window: self.window.cache(64),
            window_pages: &window_pages,
            window_first: &window_first,
            window_pages_per_seq: self.window.per_seq as u32,
            window_tokens: 128,
            compressed,
            sinks: &sinks,
            scale: 512f32.powf(-0.5),
            out: &out,
            tokens: self.positions.len() as u32,
            heads: self.sinks.len() as u32,
            tokens_per_seq: self.tokens_per_seq as u32,
            path,
            workspace: None,
        };
        let workspace = gpu.poisoned(expanded_bytes(&a) as usize);
        a.workspace = Some(&workspace);
        gpu.kernels.attend_rows(STREAM, &a).unwrap();
        gpu.read_bf16(&out)
    }

    /// Rows that token `t` sees.
    fn rows(&self, t: usize) -> Vec<&[f32]> {
        let (seq, p) = (t / self.tokens_per_seq, self.positions[t] as usize);
        let mut rows: Vec<&[f32]> = (p.saturating_sub(127)..=p)
            .map(|i| &self.window.plain[seq][512 * i..512 * (i + 1)])
            .collect();
        if let Some(far) = &self.far {
            let all: Vec<i32> = if self.top_k > 0 {
                self.list[t * self.top_k..(t + 1) * self.top_k].to_vec()
            } else {
                (0..((p + 1) / self.ratio as usize) as i32).collect()
            };
            let exists = |r: &i32| *r >= 0 && (*r as usize) < far.plain[seq].len() / 512;
            rows.extend(
                all.iter()
                    .filter(|r| exists(r))
                    .map(|r| &far.plain[seq][512 * *r as usize..][..512]),
            );
        }
        rows
    }

    /// FP64 from the same BF16 queries and de-quantised rows.
    fn wide(&self, t: usize, h: usize) -> Vec<f64> {
        let rows = self.rows(t);
        let q = &self.q[(t * self.sinks.len() + h) * 512..][..512];
        let dot = |row: &&[f32]| {
            q.iter().zip(*row).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
        };
        let scores: Vec<f64> = rows.iter().map(|row| dot(row) * 512f64.powf(-0.5)).collect();
        let sink = f64::from(self.sinks[h]);
        let most = scores.iter().fold(sink, |m, s| m.max(*s));
        let sum = scores.iter().map(|s| (s - most).exp()).sum::<f64>() + (sink - most).exp();
        let mut out = vec![0.0; 512];
        for (s, row) in scores.iter().zip(&rows) {
            let e = (s - most).exp() / sum;
            out.iter_mut().zip(*row).for_each(|(o, v)| *o += e * f64::from(*v));
        }
        out
    }

    fn check(&self, gpu: &Gpu, case: &str, path: AttendPath, worst: &mut f64) {
        let (got, again) = (self.run(gpu, path), self.run(gpu, path));
        assert!(
            got.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits()),
            "{case}: two runs"
        );
        let heads = self.sinks.len();
        for t in 0..self.positions.len() {
            // All heads of a few, to keep the time bounded.
            for h in (0..heads).filter(|h| h % 16 == t % 16 || *h == heads - 1) {
                let got = &got[(t * heads + h) * 512..][..512];
                let want = self.wide(t, h);
                let most = want.iter().fold(0f64, |m, v| m.max(v.abs()));
                for (i, (g, w)) in got.iter().zip(&want).enumerate() {
                    let error = (f64::from(*g) - w).abs() / most.max(1e-6);
                    assert!(error < 1.0 / 128.0, "{case}: token {t}, head {h}, {i}: {g} for {w}");
                    *worst = worst.max(error);
                }
            }
        }
    }
}

const PATHS: [AttendPath; 5] = [
    AttendPath::Ten,
    AttendPath::Five,
    AttendPath::Two,
    AttendPath::Expanded,
    AttendPath::Portable,
];
const LAST: [u32; 9] = [0, 1, 2, 61, 69, 127, 128, 576, 2600];

#[test]
fn attention_is_that_of_fp64() {
    let Some(gpu) = gpu("attention_is_that_of_fp64") else { return };
    let rng = &mut gpu.rng(31);
    for path in PATHS {
        let mut worst = 0.0;
        for heads in [16, 64, 128] {
            for choice in [
                Choice::None,
                Choice::All(128),
                Choice::All(4),
                Choice::Listed(61),
                Choice::Listed(512),
            ] {
                let name = match choice {
                    Choice::None => "window".to_owned(),
                    Choice::All(ratio) => format!("all, ratio {ratio}"),
                    Choice::Listed(top_k) => format!("{top_k} listed"),
                };
                let c = case(gpu, rng, &LAST, 1, heads, &choice);
                c.check(gpu, &format!("{path:?}, {heads} heads, {name}"), path, &mut worst);
            }
            let c = case(gpu, rng, &[8, 700], 8, heads, &Choice::Listed(512));
            c.check(gpu, &format!("{path:?}, {heads} heads, 8 tokens"), path, &mut worst);
        }
        println!("attend {path:?}: largest error {worst:.2e} of a head's largest output");
    }
}

#[test]
fn attention_does_not_depend_on_the_batch() {
    let Some(gpu) = gpu("attention_does_not_depend_on_the_batch") else { return };
    let rng = &mut gpu.rng(32);
    for path in PATHS {
        let whole = case(gpu, rng, &[600, 61, 2600, 130, 513], 1, 64, &Choice::Listed(512));
        let together = whole.run(gpu, path);
        let far = whole.far.as_ref().unwrap();
        for n in 0..5 {
            let of = |pool: &Pool| Pool {
                mem: pool.mem.clone(),
                stride: pool.stride,
                pages: pool.pages[n * pool.per_seq..(n + 1) * pool.per_seq].to_vec(),
                per_seq: pool.per_seq,
                plain: Vec::new(),
            };
            let alone = Case {
                window: of(&whole.window),
                first: vec![0],
                far: Some(of(far)),
                list: whole.list[n * 512..(n + 1) * 512].to_vec(),
                positions: vec![whole.positions[n]],
                q: whole.q[n * 64 * 512..(n + 1) * 64 * 512].to_vec(),
                sinks: whole.sinks.clone(),
                ratio: whole.ratio,
                top_k: whole.top_k,
                tokens_per_seq: 1,
            };
            let got = alone.run(gpu, path);
            let want = &together[n * 64 * 512..(n + 1) * 64 * 512];
            assert!(
                got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits()),
                "{path:?}, sequence {n}"
            );
        }
    }
}

#[test]
fn many_queries_over_expanded_rows_are_right() {
    let Some(gpu) = gpu("many_queries_over_expanded_rows_are_right") else { return };
    let rng = &mut gpu.rng(33);
    // More queries than multiprocessors, so that each takes several, of different lengths.
    for (heads, choice, name) in [
        (64, Choice::Listed(512), "512 listed"),
        (64, Choice::All(4), "all, ratio 4"),
        (128, Choice::None, "window"),
    ] {
        let c = case(gpu, rng, &[1700, 300], 300, heads, &choice);
        let path = AttendPath::Expanded;
        let mut worst = 0.0;
        c.check(gpu, &format!("{path:?}, {heads} heads, {name}"), path, &mut worst);
        println!("600 queries, {name}: largest error {worst:.2e} of a head's largest output");
    }
}
