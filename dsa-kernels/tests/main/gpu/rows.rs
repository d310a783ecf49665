//! Row stores, index queries and compressor steps: bytes and bits of the CPU.

use super::{Gpu, STREAM, gpu};
use dsa_kernels::cpu::CpuReference;
use dsa_kernels::cuda::{CompressStep, FinishRows, Norm, QueryRows, StoreDeviceRows};
use dsa_kernels::ops::*;
use dsa_kernels::quant;
use dsa_kernels::testing::{Pages, Rng, same_bits};
use dsa_kernels::{Mem, MemSlice, TensorMut, TensorRef};

const FORMATS: [RowFormat; 4] =
    [RowFormat::KvV4, RowFormat::IndexFp8, RowFormat::IndexFp4, RowFormat::IndexBf16];
const COUNTS: [usize; 6] = [0, 1, 2, 61, 69, 576];

fn mat(data: &[f32], cols: usize) -> TensorRef<'_> {
    TensorRef::from_f32(data, data.len() / cols, cols).unwrap()
}

fn mat_mut(data: &mut [f32], cols: usize) -> TensorMut<'_> {
    let rows = data.len() / cols;
    TensorMut::from_f32(data, rows, cols).unwrap()
}

/// The same cache over device memory that holds the same bytes.
fn on_device<'a>(gpu: &Gpu, pages: &Pages, mem: &'a mut Option<Mem>) -> PagedCache<'a> {
    let mem = mem.insert(gpu.bytes(&pages.bytes()).mem);
    let host = pages.cache();
    PagedCache {
        mem,
        base: host.base,
        stride: host.stride,
        rows_per_page: host.rows_per_page,
        format: host.format,
    }
}

fn pairs(targets: &[RowTarget]) -> Vec<u32> {
    targets.iter().flat_map(|t| [t.page, t.row]).collect()
}

fn table(rng: &mut Rng, rows: usize) -> Vec<f32> {
    let positions: Vec<u32> = (0..rows).map(|_| rng.below(1 << 20) as u32).collect();
    let freqs: Vec<f32> = (0..32).map(|k| 10000f32.powf(-(k as f32) / 32.0)).collect();
    let mut table = vec![0.0; 64 * rows];
    let a = RopeTable { positions: &positions, freqs: &freqs, table: mat_mut(&mut table, 64) };
    CpuReference.rope_table(a).unwrap();
    table
}

/// Norm, rotation and store on the CPU.
fn finish(
    rows: &[f32],
    weight: &[f32],
    table: &[f32],
    rounding: Rounding,
    pages: &Pages,
    targets: &[RowTarget],
) {
    let width = pages.cache().format.width();
    let mut values = vec![0.0; rows.len()];
    let (x, y) = (mat(rows, width), mat_mut(&mut values, width));
    let norm = RmsNorm { x, weight: Some(weight), dim: width, eps: 1e-6, rounding, y };
    CpuReference.rms_norm(norm).unwrap();
    let x = mat_mut(&mut values, width);
    let rope = Rope { x, dim: width, table: mat(table, 64), inverse: false, rounding };
    CpuReference.rope(rope).unwrap();
    let store = StoreRows { rows: mat(&values, width), cache: pages.cache(), targets };
    CpuReference.store_rows(store).unwrap();
}

fn store(
    gpu: &Gpu,
    rng: &mut Rng,
    format: RowFormat,
    per_page: u32,
    count: usize,
    rounding: Rounding,
) {
    let width = format.width();
    let host = Pages::new(rng, format, per_page, count.max(1));
    let mut memory = None;
    let cache = on_device(gpu, &host, &mut memory);
    let (rows, weight, table) = (rng.floats(count * width), rng.floats(width), table(rng, count));
    let targets: Vec<RowTarget> = (0..count).map(|i| host.target(i)).collect();
    let (rows_there, weight_there) = (gpu.f32s(&rows), gpu.f32s(&weight));
    let (table_there, targets_there) = (gpu.f32s(&table), gpu.u32s(&pairs(&targets)));
    let a = StoreDeviceRows {
        rows: &rows_there,
        norm: Some(Norm { weight: &weight_there, eps: 1e-6 }),
        table: Some(&table_there),
        rounding,
        cache,
        targets: &targets_there,
        count: count as u32,
        refused: None,
    };
    gpu.kernels.store_device_rows(STREAM, &a).unwrap();
    finish(&rows, &weight, &table, rounding, &host, &targets);
    compare_pools(gpu, &format!("{format:?}, {count} rows, {rounding:?}"), &host, cache.mem);
    // Once more over the same pages without norm and rotation.
    let plain = StoreDeviceRows { norm: None, table: None, ..a };
    gpu.kernels.store_device_rows(STREAM, &plain).unwrap();
    host.store(&CpuReference, 0, &rows);
    compare_pools(gpu, &format!("{format:?}, {count} rows, plain"), &host, cache.mem);
}

fn compare_pools(gpu: &Gpu, case: &str, host: &Pages, mem: &Mem) {
    let got = gpu.read(&MemSlice { mem: mem.clone(), offset: 0, len: mem.len() });
    let want = host.bytes();
    if let Some(at) = got.iter().zip(&want).position(|(a, b)| a != b) {
        let count = got.iter().zip(&want).filter(|(a, b)| a != b).count();
        panic!("{case}: byte {at} is {}, {} expected; {count} differ", got[at], want[at]);
    }
}

#[test]
fn stored_pages_have_the_bytes_of_the_cpu() {
    let Some(gpu) = gpu("stored_pages_have_the_bytes_of_the_cpu") else { return };
    let rng = &mut gpu.rng(11);
    for format in FORMATS {
        for (n, count) in COUNTS.into_iter().enumerate() {
            let per_page = if n % 2 == 0 { 64 } else { 2 };
            for rounding in [Rounding::Bf16, Rounding::None] {
                store(gpu, rng, format, per_page, count, rounding);
            }
        }
    }
}

#[test]
fn rows_without_a_place_are_left_out() {
    let Some(gpu) = gpu("rows_without_a_place_are_left_out") else { return };
    let rng = &mut gpu.rng(12);
    for format in FORMATS {
        let host = Pages::new(rng, format, 64, 100);
        let mut memory = None;
        let cache = on_device(gpu, &host, &mut memory);
        let before = host.bytes();
        let rows = gpu.f32s(&rng.floats(4 * format.width()));
        // -1, a page behind the pool, a row behind the page, and a page far away.
        let targets = gpu.u32s(&[u32::MAX, 0, 3, 0, 0, 64, u32::MAX - 1, 1]);
        let refused = gpu.u32s(&[0]);
        let a = StoreDeviceRows {
            rows: &rows,
            norm: None,
            table: None,
            rounding: Rounding::Bf16,
            cache,
            targets: &targets,
            count: 4,
            refused: Some(&refused),
        };
        gpu.kernels.store_device_rows(STREAM, &a).unwrap();
        assert_eq!(gpu.read_u32(&refused), [3], "{format:?}");
        let mem = cache.mem.clone();
        assert!(gpu.read(&MemSlice { len: mem.len(), mem, offset: 0 }) == before, "{format:?}");
    }
}

#[test]
fn index_queries_have_the_bits_of_the_cpu() {
    let Some(gpu) = gpu("index_queries_have_the_bits_of_the_cpu") else { return };
    let rng = &mut gpu.rng(13);
    for kind in [IndexRounding::Fp8, IndexRounding::Fp4, IndexRounding::Bf16] {
        for tokens in COUNTS {
            let heads = 64;
            let count = tokens * heads;
            let (q, table) = (rng.floats(count * 128), table(rng, tokens));
            let mut want = q.clone();
            let a = IndexQuery { q: mat_mut(&mut want, heads * 128), table: mat(&table, 64), kind };
            CpuReference.index_query(a).unwrap();
            let (q, table) = (gpu.f32s(&q), gpu.f32s(&table));
            // Weights of 1 show the scale of FP8 codes.
            let (weights, weights_out) = (gpu.f32s(&vec![1.0; count]), gpu.poisoned(4 * count));
            let codes = gpu.poisoned(count * if kind == IndexRounding::Fp8 { 128 } else { 256 });
            let a = QueryRows {
                q: &q,
                table: &table,
                weights: &weights,
                kind,
                codes: &codes,
                weights_out: &weights_out,
                tokens: tokens as u32,
                heads: heads as u32,
            };
            gpu.kernels.query_rows(STREAM, &a).unwrap();
            let scales = gpu.read_f32(&weights_out);
            let got: Vec<f32> = if kind == IndexRounding::Fp8 {
                let codes = gpu.read(&codes);
                codes
                    .iter()
                    .enumerate()
                    .map(|(i, c)| quant::e4m3_decode(*c) * scales[i / 128])
                    .collect()
            } else {
                assert!(scales.iter().all(|s| *s == 1.0));
                gpu.read_bf16(&codes)
            };
            same_bits(&format!("{kind:?}, {tokens} tokens"), &got, &want);
        }
    }
}

/// Several sequences through several steps, on both sides.
struct Compressor {
    pooling: Pooling,
    dim: usize,
    format: RowFormat,
    ape: Vec<f32>,
    weight: Vec<f32>,
    positions: Vec<usize>,
    rounding: Rounding,
    /// What the kernel is told of the windows that a sequence completes, if not the truth.
    windows_told: Option<u32>,
}

impl Compressor {
    /// The sequences of a step of `counts` tokens, as the CPU takes them and as bytes, and the rows
    /// that they complete.
    fn advance(&mut self, counts: &[usize]) -> (Vec<CompressSeq>, Vec<u8>, usize) {
        let (mut seqs, mut bytes, mut first, mut rows) = (Vec::new(), Vec::new(), 0, 0);
        for (n, count) in counts.iter().enumerate() {
            let start_pos = self.positions[n] as u32;
            let part = SeqPart { first, count: *count, start_pos };
            let carry_offset = (n * self.pooling.carry_bytes(self.dim)) as u64;
            seqs.push(CompressSeq { part, carry_offset, first_row: rows });
            bytes.extend(carry_offset.to_le_bytes());
            for value in [first as u32, *count as u32, start_pos, rows as u32] {
                bytes.extend(value.to_le_bytes());
            }
            first += count;
            rows += part.rows_emitted(self.pooling.ratio());
            self.positions[n] += count;
        }
        (seqs, bytes, rows)
    }

    fn step(
        &mut self,
        gpu: &Gpu,
        rng: &mut Rng,
        counts: &[usize],
        carry: &Mem,
        carry_there: &MemSlice,
    ) {
        let (cols, ratio) = (self.pooling.cols(self.dim), self.pooling.ratio());
        let tokens: usize = counts.iter().sum();
        let (kv, gate) = (rng.floats(tokens * cols), rng.floats(tokens * cols));
        let (seqs, bytes, rows) = self.advance(counts);
        let windows_max = seqs.iter().map(|seq| seq.part.rows_emitted(ratio)).max().unwrap_or(0);
        let host = Pages::new(rng, self.format, 64, rows.max(1));
        let targets: Vec<RowTarget> = (0..rows).map(|i| host.target(i)).collect();
        let table = table(rng, rows);
        let mut memory = None;
        let cache = on_device(gpu, &host, &mut memory);
        let (kv_there, gate_there) = (gpu.f32s(&kv), gpu.f32s(&gate));
        let (ape_there, seqs_there) = (gpu.f32s(&self.ape), gpu.bytes(&bytes));
        let (weight_there, table_there) = (gpu.f32s(&self.weight), gpu.f32s(&table));
        let (rows_there, targets_there) =
            (gpu.poisoned(4 * rows * self.dim), gpu.u32s(&pairs(&targets)));
        let refused = gpu.u32s(&[0]);
        let a = CompressStep {
            kv: &kv_there,
            gate: &gate_there,
            ape: &ape_there,
            carry: carry_there,
            seqs: &seqs_there,
            seq_count: counts.len() as u32,
            tokens: tokens as u32,
            windows_max: self.windows_told.unwrap_or(windows_max as u32),
            rows_max: rows as u32,
            pooling: self.pooling,
            dim: self.dim as u32,
            rounding: self.rounding,
            rows: Some(&rows_there),
            finish: Some(FinishRows {
                norm: Some(Norm { weight: &weight_there, eps: 1e-6 }),
                table: Some(&table_there),
                cache,
                targets: &targets_there,
            }),
            refused: Some(&refused),
        };
        gpu.kernels.compress_step(STREAM, &a).unwrap();
        let mut want = vec![0.0; rows * self.dim];
        let on_cpu = Compress {
            kv: mat(&kv, cols),
            gate: mat(&gate, cols),
            ape: &self.ape,
            pooling: self.pooling,
            dim: self.dim,
            carry,
            seqs: &seqs,
            rounding: self.rounding,
            rows: mat_mut(&mut want, self.dim),
        };
        CpuReference.compress(on_cpu).unwrap();
        let case = format!("{:?} {} {:?}, {counts:?} tokens", self.pooling, self.dim, self.format);
        assert_eq!(gpu.read_u32(&refused), [0], "{case}");
        same_bits(&format!("{case}: rows"), &gpu.read_f32(&rows_there), &want);
        let mut carried = vec![0; carry.len() as usize];
        carry.read(0, &mut carried).unwrap();
        let got = gpu.read(carry_there);
        assert_eq!(got.iter().zip(&carried).position(|(a, b)| a != b), None, "{case}: carry");
        finish(&want, &self.weight, &table, self.rounding, &host, &targets);
        compare_pools(gpu, &case, &host, cache.mem);
    }
}

fn compressor(
    (gpu, rng): (&Gpu, &mut Rng),
    (pooling, dim): (Pooling, usize),
    format: RowFormat,
    rounding: Rounding,
    (windows_told, steps): (Option<u32>, &[[usize; 4]]),
) {
    use dsa_kernels::{CpuDevice, Device, Place};
    let (cols, ratio) = (pooling.cols(dim), pooling.ratio() as usize);
    let bytes = 4 * pooling.carry_bytes(dim);
    let carry = CpuDevice::new().alloc(Place::Host, bytes as u64).unwrap();
    // What a carry has before its first token means nothing.
    let before = rng.floats(bytes / 4);
    let before: Vec<u8> = before.iter().flat_map(|value| value.to_le_bytes()).collect();
    carry.write(0, &before).unwrap();
    let carry_there = gpu.bytes(&before);
    let (ape, weight) = (rng.floats(ratio * cols), rng.floats(dim));
    let positions = vec![0; 4];
    let mut c = Compressor { pooling, dim, format, ape, weight, positions, rounding, windows_told };
    for counts in steps {
        c.step(gpu, rng, counts, &carry, &carry_there);
    }
}

/// All poolings, widths, formats and roundings.
fn compressors(gpu: &Gpu, seed: u64, windows_told: Option<u32>, steps: &[[usize; 4]]) {
    let rng = &mut gpu.rng(seed);
    let told = (windows_told, steps);
    for rounding in [Rounding::Bf16, Rounding::None] {
        let wide = RowFormat::KvV4;
        compressor((gpu, rng), (Pooling::C4, 512), wide, rounding, told);
        compressor((gpu, rng), (Pooling::C128, 512), wide, rounding, told);
        for format in &FORMATS[1..] {
            compressor((gpu, rng), (Pooling::C4, 128), *format, rounding, told);
        }
    }
}

#[test]
fn compressor_steps_have_the_bits_of_the_cpu() {
    let Some(gpu) = gpu("compressor_steps_have_the_bits_of_the_cpu") else { return };
    let steps = [
        [1, 3, 0, 576],
        [1, 1, 61, 1],
        [2, 128, 69, 8],
        [1, 1, 1, 1],
        [5, 4, 300, 127],
        [1, 2, 3, 4],
        [4, 1, 3, 2],
    ];
    // What is told of the windows decides which kernel it is, and about no bit.
    for told in [None, Some(1), Some(2)] {
        compressors(gpu, 14, told, &steps);
    }
}

#[test]
fn steps_of_decoding_have_the_bits_of_the_cpu() {
    let Some(gpu) = gpu("steps_of_decoding_have_the_bits_of_the_cpu") else { return };
    // From the first token on, and each sequence at another place of its window.
    compressors(gpu, 16, None, &[[1; 4]; 9]);
    let mut steps = vec![[0, 1, 2, 7]];
    steps.extend([[1; 4]; 5]);
    compressors(gpu, 17, None, &steps);
}

#[test]
fn sequences_outside_of_their_memory_are_left_out() {
    let Some(gpu) = gpu("sequences_outside_of_their_memory_are_left_out") else { return };
    let rng = &mut gpu.rng(15);
    let carry_bytes = c4_carry_bytes(128);
    let (kv, gate, ape) = (
        gpu.f32s(&rng.floats(8 * 256)),
        gpu.f32s(&rng.floats(8 * 256)),
        gpu.f32s(&rng.floats(4 * 256)),
    );
    let carry = gpu.bytes(&vec![0; carry_bytes]);
    // Tokens behind the step, a carry that does not fit, a crooked one, a row too many.
    let seqs: [(u64, [u32; 4]); 4] =
        [(0, [5, 4, 0, 0]), (16, [0, 1, 0, 0]), (2, [0, 1, 0, 0]), (0, [0, 8, 0, 1])];
    let bytes: Vec<u8> = seqs
        .iter()
        .flat_map(|(offset, rest)| {
            offset.to_le_bytes().into_iter().chain(rest.iter().flat_map(|v| v.to_le_bytes()))
        })
        .collect();
    let (seqs, rows) = (gpu.bytes(&bytes), gpu.poisoned(2 * 512));
    for windows_max in [1, 2] {
        let refused = gpu.u32s(&[0]);
        let a = CompressStep {
            kv: &kv,
            gate: &gate,
            ape: &ape,
            carry: &carry,
            seqs: &seqs,
            seq_count: 4,
            tokens: 8,
            windows_max,
            rows_max: 2,
            pooling: Pooling::C4,
            dim: 128,
            rounding: Rounding::None,
            rows: Some(&rows),
            finish: None,
            refused: Some(&refused),
        };
        gpu.kernels.compress_step(STREAM, &a).unwrap();
        assert_eq!(gpu.read_u32(&refused), [4]);
        assert!(gpu.read(&rows).iter().all(|b| *b == super::POISON));
        assert!(gpu.read(&carry).iter().all(|b| *b == 0));
    }
}
