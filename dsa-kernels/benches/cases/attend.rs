//! Attention over window and compressed rows.

use crate::{BF16, Bench, STREAM, floor_us, shuffled};
use dsa_kernels::MemSlice;
use dsa_kernels::cuda::{AttendPath, DeviceAttend, DeviceRows, DeviceSelection};
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
    attend(b, "attend_prefill.q4096_512", 4096, 64, 512, AttendPath::Five);
    attend(b, "attend_prefill_two.q4096_512", 4096, 64, 512, AttendPath::Two);
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
}

/// Queries, page tables and chosen rows of `n` tokens; `listed` of 32,768 rows each.
fn input(b: &mut Bench, n: usize, value_count: usize, listed: usize) -> Input {
    let bits: Vec<u8> = (0..value_count.min(1 << 20))
        .flat_map(|_| dsa_kernels::quant::bf16_encode(0.2 * b.rng.unit()).to_le_bytes())
        .collect();
    let window_pages: Vec<u32> = (0..3 * n).map(|_| b.rng.below(1024) as u32).collect();
    let mut list = Vec::new();
    for _ in 0..n {
        let mut chosen = shuffled(&mut b.rng, 32_768);
        chosen.truncate(listed);
        chosen.sort_unstable();
        list.extend(chosen);
    }
    let far_pages: Vec<u32> = (0..n).flat_map(|_| shuffled(&mut b.rng, 512)).collect();
    Input {
        q: b.filled(2 * value_count, &bits),
        window_pages: b.u32s(&window_pages),
        list: b.u32s(&list),
        far_pages: b.u32s(&far_pages),
        out: b.random(2 * value_count),
    }
}

fn attend(b: &mut Bench, name: &str, tokens: u32, heads: u32, listed: u32, path: AttendPath) {
    if !b.wants(name) {
        return;
    }
    let (rows, n) = (65_536u32, tokens as usize);
    let (window, far) = (pool(b, rows), pool(b, rows));
    let value_count = n * heads as usize * 512;
    let sets = if tokens > 1024 { 1 } else { 3 };
    let inputs: Vec<Input> = (0..sets).map(|_| input(b, n, value_count, listed as usize)).collect();
    let (positions, first) = (b.u32s(&vec![131_071; n]), b.u32s(&vec![2046; n]));
    let sinks = b.floats(heads as usize);
    let cache = |memory| PagedCache {
        mem: memory,
        base: 0,
        stride: STRIDE,
        rows_per_page: 64,
        format: RowFormat::KvV4,
    };
    let us = b.time(sets, |set| {
        let i = &inputs[set];
        let compressed = (listed > 0).then_some(DeviceRows {
            cache: cache(&far.mem),
            pages: &i.far_pages,
            pages_per_seq: 512,
            selection: DeviceSelection::Listed { rows: &i.list, top_k: listed },
        });
        let a = DeviceAttend {
            q: &i.q,
            positions: &positions,
            window: cache(&window.mem),
            window_pages: &i.window_pages,
            window_first: &first,
            window_pages_per_seq: 3,
            window_tokens: 128,
            compressed,
            sinks: &sinks,
            scale: 512f32.powf(-0.5),
            out: &i.out,
            tokens,
            heads,
            tokens_per_seq: 1,
            path,
        };
        b.kernels.attend_rows(STREAM, &a)
    });
    let seen = f64::from(128 + listed) * f64::from(tokens);
    let operations = 4.0 * f64::from(heads) * 512.0 * seen;
    let bytes = seen * 588.0 + 4.0 * value_count as f64;
    b.report(name, us, floor_us(bytes, operations, BF16));
    println!("figure {name}.rate {:.1} TFLOP/s", operations / us / 1e6);
}
