//! Row stores and compressor steps.

use crate::{Bench, STREAM, floor_us, shuffled};
use dsa_kernels::MemSlice;
use dsa_kernels::cuda::{CompressStep, FinishRows, Norm, StoreDeviceRows};
use dsa_kernels::ops::{PagedCache, Pooling, Rounding, RowFormat};

pub(crate) fn run(b: &mut Bench) {
    for (name, format) in [
        ("kv", RowFormat::KvV4),
        ("index_fp8", RowFormat::IndexFp8),
        ("index_fp4", RowFormat::IndexFp4),
        ("index_bf16", RowFormat::IndexBf16),
    ] {
        for count in [1, 64, 512, 65_536] {
            store(b, &format!("store_{name}.r{count}"), format, count);
        }
    }
    for (name, dim, format) in
        [("c4", 512, RowFormat::KvV4), ("c4_index", 128, RowFormat::IndexFp8)]
    {
        for batch in [1, 8, 64, 128, 512] {
            let case = format!("{name}_step.b{batch}");
            step(b, &case, (Pooling::C4, dim), format, (batch, Phase::End));
        }
        for batch in [64, 512] {
            let case = format!("{name}_step.mixed.b{batch}");
            step(b, &case, (Pooling::C4, dim), format, (batch, Phase::Mixed));
        }
    }
    for batch in [1, 64, 512] {
        let case = format!("c128_step.b{batch}");
        step(b, &case, (Pooling::C128, 512), RowFormat::KvV4, (batch, Phase::End));
    }
}

/// A cache of `rows` rows in pages of 64, and a place for each row.
fn cache_of(b: &mut Bench, format: RowFormat, rows: u32) -> (MemSlice, u64, MemSlice) {
    let row = (format.data_bytes() + format.scale_bytes()) as u64;
    let stride = (64 * row).next_multiple_of(576);
    let pages = rows.div_ceil(64) + 1;
    let memory = b.random((stride * u64::from(pages)) as usize);
    let places = shuffled(&mut b.rng, rows as usize);
    let targets: Vec<u32> = places.iter().flat_map(|p| [p / 64, p % 64]).collect();
    (memory, stride, b.u32s(&targets))
}

fn store(b: &mut Bench, name: &str, format: RowFormat, count: u32) {
    if !b.wants(name) {
        return;
    }
    let (width, n) = (format.width(), count as usize);
    let (memory, stride, targets) = cache_of(b, format, count);
    let (rows, weight, table) = (b.floats(n * width), b.floats(width), b.floats(64 * n));
    let a = StoreDeviceRows {
        rows: &rows,
        norm: Some(Norm { weight: &weight, eps: 1e-6 }),
        table: Some(&table),
        rounding: Rounding::Bf16,
        cache: PagedCache { mem: &memory.mem, base: 0, stride, rows_per_page: 64, format },
        targets: &targets,
        count,
        refused: None,
    };
    let us = b.time(1, |_| b.kernels.store_device_rows(STREAM, &a));
    let bytes = n * (4 * width + 256 + 8 + format.data_bytes() + format.scale_bytes());
    b.report(name, us, floor_us(bytes as f64, 0.0, 1.0));
}

/// Where the tokens of a step are in their windows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Each completes one.
    End,
    /// As many at each place.
    Mixed,
}

/// One token of each sequence.
fn step(
    b: &mut Bench,
    name: &str,
    (pooling, dim): (Pooling, u32),
    format: RowFormat,
    (batch, phase): (u32, Phase),
) {
    if !b.wants(name) {
        return;
    }
    let (cols, n, ratio) = (pooling.cols(dim as usize), batch as usize, pooling.ratio());
    let carry_bytes = pooling.carry_bytes(dim as usize);
    let (memory, stride, targets) = cache_of(b, format, batch);
    let (kv, gate, ape) = (b.floats(n * cols), b.floats(n * cols), b.floats(ratio as usize * cols));
    let (carry, weight, table) =
        (b.floats(n * carry_bytes / 4), b.floats(dim as usize), b.floats(64 * n));
    let mut seqs = Vec::new();
    for i in 0..batch {
        seqs.extend((u64::from(i) * carry_bytes as u64).to_le_bytes());
        let place = if phase == Phase::End { ratio - 1 } else { i % ratio };
        for value in [i, 1, 4096 + place, i] {
            seqs.extend(value.to_le_bytes());
        }
    }
    let seqs = b.bytes(&seqs);
    let a = CompressStep {
        kv: &kv,
        gate: &gate,
        ape: &ape,
        carry: &carry,
        seqs: &seqs,
        seq_count: batch,
        tokens: batch,
        windows_max: 1,
        rows_max: batch,
        pooling,
        dim,
        rounding: Rounding::Bf16,
        rows: None,
        finish: Some(FinishRows {
            norm: Some(Norm { weight: &weight, eps: 1e-6 }),
            table: Some(&table),
            cache: PagedCache { mem: &memory.mem, base: 0, stride, rows_per_page: 64, format },
            targets: &targets,
        }),
        refused: None,
    };
    let us = b.time(1, |_| b.kernels.compress_step(STREAM, &a));
    // A token inside of a window of C4 brings four rows.
    let (ends, others) =
        if phase == Phase::End { (n, 0) } else { (n / ratio as usize, n - n / ratio as usize) };
    let row = 2 * carry_bytes + 256 + format.data_bytes() + format.scale_bytes();
    let bytes = 8 * cols * n + row * ends + 16 * dim as usize * others;
    b.report(name, us, floor_us(bytes as f64, 0.0, 1.0));
}
