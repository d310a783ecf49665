//! Attention over window and compressed rows.

use crate::{BF16, Bench, STREAM, floor_us, shuffled};
use dsa_kernels::MemSlice;
use dsa_kernels::cuda::{AttendPath, DeviceAttend, DeviceRows, DeviceSelection, expanded_bytes};
use dsa_kernels::ops::{PagedCache, RowFormat};

const STRIDE: u64 = 37_440;

pub(crate) fn run(b: &mut Bench) {
    for batch in [1, 8, 32, 64, 128, 256] {
        for (name, listed) in
            [("window", 0), ("w128_512", 512), ("w128_1024", 1024), ("w128_4096", 4096)]
        {
            attend(b, &format!("attend.b{batch}_{name}"), batch, 64, listed, AttendPath::Five);
            attend(b, &format!("attend_ten.b{batch}_{name}"), batch, 64, listed, AttendPath::Ten);
            attend(b, &format!("attend_two.b{batch}_{name}"), batch, 64, listed, AttendPath::Two);
        }
    }
    attend(b, "attend.b64_h128_512", 64, 128, 512, AttendPath::Five);
    attend(b, "attend_two.b64_h128_512", 64, 128, 512, AttendPath::Two);
    attend(b, "attend_portable.b1_w128_512", 1, 64, 512, AttendPath::Portable);
    attend(b, "attend_portable.b64_w128_512", 64, 64, 512, AttendPath::Portable);
    for (tokens, listed) in [(1024, 512), (4096, 512), (4096, 1920)] {
        let case = format!("q{tokens}_{listed}");
        prefill(b, &format!("attend_prefill.{case}"), tokens, listed, AttendPath::Expanded);
        prefill(b, &format!("attend_prefill_two.{case}"), tokens, listed, AttendPath::Two);
    }
}

/// A pool of 65,536 rows: codes of ordinary size, scales of 2^-8 or so, BF16 values in [-1, 1).
fn pool(b: &mut Bench, rows: u32) -> MemSlice {
    let mut page = Vec::new();
    for _ in 0..64 {
        page.extend((0..448).map(|_| (b.rng.bits() as u8 & 0x87) | ((b.rng.below(15) as u8) << 3)));
        let value = |b: &mut Bench| dsa_kernels::quant::bf16_encode(b.rng.unit()).to_le_bytes();
        page.extend((0..64).flat_map(|_| value(b)));
    }
    page.extend((0..64).flat_map(|_| [119, 120, 118, 119, 119, 120, 118, 0]));
    page.resize(STRIDE as usize, 0);
    b.filled(rows as usize / 64 * STRIDE as usize, &page)
}

struct Input {
    q: MemSlice,
    window_pages: MemSlice,
    list: MemSlice,
    far_pages: MemSlice,
    out: MemSlice,
    workspace: Option<MemSlice>,
}

/// Queries of one case: `tokens_per_seq` of each sequence, whose last position is `LAST`.
struct Shape {
    tokens: u32,
    tokens_per_seq: u32,
    heads: u32,
    listed: u32,
}

const LAST: u32 = 131_071;

impl Shape {
    fn values(&self) -> usize {
        self.tokens as usize * self.heads as usize * 512
    }

    /// Page number of the first entry of a window page table.
    fn first_page(&self) -> u32 {
        (LAST + 1 - self.tokens_per_seq - 127) / 64
    }

    fn window_pages(&self) -> u32 {
        LAST / 64 + 1 - self.first_page()
    }
}

/// Queries, page tables and chosen rows; `listed` of 32,768 rows each.
fn input(b: &mut Bench, shape: &Shape) -> Input {
    let value_count = shape.values();
    let bits: Vec<u8> = (0..value_count.min(1 << 20))
        .flat_map(|_| dsa_kernels::quant::bf16_encode(0.2 * b.rng.unit()).to_le_bytes())
        .collect();
    let seqs = shape.tokens / shape.tokens_per_seq;
    let window_pages: Vec<u32> =
        (0..shape.window_pages() * seqs).map(|_| b.rng.below(1024) as u32).collect();
    let mut list = Vec::new();
    for _ in 0..shape.tokens {
        let mut chosen = shuffled(&mut b.rng, 32_768);
        chosen.truncate(shape.listed as usize);
        chosen.sort_unstable();
        list.extend(chosen);
    }
    let far_pages: Vec<u32> = (0..seqs).flat_map(|_| shuffled(&mut b.rng, 512)).collect();
    Input {
        q: b.filled(2 * value_count, &bits),
        window_pages: b.u32s(&window_pages),
        list: b.u32s(&list),
        far_pages: b.u32s(&far_pages),
        out: b.random(2 * value_count),
        workspace: None,
    }
}

/// A step of decoding: each query is of a sequence of its own.
fn attend(b: &mut Bench, name: &str, tokens: u32, heads: u32, listed: u32, path: AttendPath) {
    measure(b, name, &Shape { tokens, tokens_per_seq: 1, heads, listed }, path);
}

/// A chunk of the prompt of one sequence.
fn prefill(b: &mut Bench, name: &str, tokens: u32, listed: u32, path: AttendPath) {
    measure(b, name, &Shape { tokens, tokens_per_seq: tokens, heads: 64, listed }, path);
}

/// What all input sets of a case share.
struct Common {
    window: MemSlice,
    far: MemSlice,
    positions: MemSlice,
    first: MemSlice,
    sinks: MemSlice,
}

fn common(b: &mut Bench, shape: &Shape) -> Common {
    let seqs = (shape.tokens / shape.tokens_per_seq) as usize;
    let positions: Vec<u32> = (LAST + 1 - shape.tokens_per_seq..=LAST).collect();
    Common {
        window: pool(b, 65_536),
        far: pool(b, 65_536),
        positions: b.u32s(&positions.repeat(seqs)),
        first: b.u32s(&vec![shape.first_page(); seqs]),
        sinks: b.floats(shape.heads as usize),
    }
}

fn cache(memory: &MemSlice) -> PagedCache<'_> {
    let format = RowFormat::KvV4;
    PagedCache { mem: &memory.mem, base: 0, stride: STRIDE, rows_per_page: 64, format }
}

fn arguments<'a>(i: &'a Input, c: &'a Common, shape: &Shape, path: AttendPath) -> DeviceAttend<'a> {
    let compressed = (shape.listed > 0).then(|| DeviceRows {
        cache: cache(&c.far),
        pages: &i.far_pages,
        pages_per_seq: 512,
        selection: DeviceSelection::Listed { rows: &i.list, top_k: shape.listed },
    });
    DeviceAttend {
        q: &i.q,
        positions: &c.positions,
        window: cache(&c.window),
        window_pages: &i.window_pages,
        window_first: &c.first,
        window_pages_per_seq: shape.window_pages(),
        window_tokens: 128,
        compressed,
        sinks: &c.sinks,
        scale: 512f32.powf(-0.5),
        out: &i.out,
        tokens: shape.tokens,
        heads: shape.heads,
        tokens_per_seq: shape.tokens_per_seq,
        path,
        workspace: i.workspace.as_ref(),
    }
}

fn measure(b: &mut Bench, name: &str, shape: &Shape, path: AttendPath) {
    if !b.wants(name) {
        return;
    }
    let common = common(b, shape);
    let sets = if shape.tokens >= 1024 { 1 } else { 3 };
    let mut inputs: Vec<Input> = (0..sets).map(|_| input(b, shape)).collect();
    for i in &mut inputs {
        let bytes = expanded_bytes(&arguments(i, &common, shape, path));
        i.workspace = (path == AttendPath::Expanded).then(|| b.random(bytes as usize));
    }
    let us = b.time(sets, |set| {
        b.kernels.attend_rows(STREAM, &arguments(&inputs[set], &common, shape, path))
    });
    let seen = f64::from(128 + shape.listed) * f64::from(shape.tokens);
    let operations = 4.0 * f64::from(shape.heads) * 512.0 * seen;
    let bytes = seen * 588.0 + 4.0 * shape.values() as f64;
    b.report(name, us, floor_us(bytes, operations, BF16));
    println!("figure {name}.rate {:.1} TFLOP/s", operations / us / 1e6);
}
