//! Results do not depend on company: chunks, batches and thread counts.

use super::instructions::each;
use dsa_kernels::cpu::{CpuKernels, CpuReference};
use dsa_kernels::ops::*;
use dsa_kernels::testing::{Matrix, Pages, Rng, random_rows, same_bits};
use dsa_kernels::{CpuDevice, Device, Mem, Place, TensorMut, TensorRef};

fn both() -> [Box<dyn Kernels>; 2] {
    [Box::new(CpuReference), Box::new(CpuKernels::new(2))]
}

fn mat(data: &[f32], cols: usize) -> TensorRef<'_> {
    TensorRef::from_f32(data, data.len() / cols, cols).unwrap()
}

fn mat_mut(data: &mut [f32], cols: usize) -> TensorMut<'_> {
    let rows = data.len() / cols;
    TensorMut::from_f32(data, rows, cols).unwrap()
}

/// Inputs of one sequence's compressor.
struct Pool {
    pooling: Pooling,
    dim: usize,
    kv: Vec<f32>,
    gate: Vec<f32>,
    ape: Vec<f32>,
}

impl Pool {
    fn random(rng: &mut Rng, pooling: Pooling, dim: usize, tokens: usize) -> Self {
        let (cols, ratio) = (pooling.cols(dim), pooling.ratio() as usize);
        let (kv, gate) = (rng.floats(tokens * cols), rng.floats(tokens * cols));
        Self { pooling, dim, kv, gate, ape: rng.floats(ratio * cols) }
    }

    fn carry(&self) -> Mem {
        CpuDevice::new().alloc(Place::Host, self.pooling.carry_bytes(self.dim) as u64).unwrap()
    }

    /// Tokens `from..to`; returns the emitted rows.
    fn run(&self, kernels: &dyn Kernels, carry: &Mem, from: usize, to: usize) -> Vec<f32> {
        let cols = self.pooling.cols(self.dim);
        let part = SeqPart { first: 0, count: to - from, start_pos: from as u32 };
        let mut rows = vec![0.0; part.rows_emitted(self.pooling.ratio()) * self.dim];
        let a = Compress {
            kv: mat(&self.kv[from * cols..to * cols], cols),
            gate: mat(&self.gate[from * cols..to * cols], cols),
            ape: &self.ape,
            pooling: self.pooling,
            dim: self.dim,
            carry,
            seqs: &[CompressSeq { part, carry_offset: 0, first_row: 0 }],
            rounding: Rounding::None,
            rows: mat_mut(&mut rows, self.dim),
        };
        kernels.compress(a).unwrap();
        rows
    }

    /// Rows and final carry of a run cut behind the tokens `cuts`.
    fn cut(&self, kernels: &dyn Kernels, cuts: &[usize], tokens: usize) -> (Vec<f32>, Vec<u8>) {
        let carry = self.carry();
        let (mut rows, mut from) = (Vec::new(), 0);
        for to in cuts.iter().copied().chain([tokens]) {
            rows.extend(self.run(kernels, &carry, from, to));
            from = to;
        }
        let mut bytes = vec![0; carry.len() as usize];
        carry.read(0, &mut bytes).unwrap();
        (rows, bytes)
    }
}

#[test]
fn c4_rows_are_the_published_ones_for_every_split() {
    let pool = Pool {
        pooling: Pooling::C4,
        dim: 1,
        kv: (0..12).flat_map(|t| [(t + 1) as f32, 10.0 * (t + 1) as f32]).collect(),
        gate: (0..12).flat_map(|t| [(3 * t % 5) as f32 / 2.0, (2 * t % 7) as f32 / 4.0]).collect(),
        ape: (0..4).flat_map(|j| [0.1 * j as f32, -0.2 * j as f32]).collect(),
    };
    for kernels in both() {
        let (whole, carry) = pool.cut(&*kernels, &[], 12);
        for (got, want) in whole.iter().zip([28.657_551_3f64, 18.145_933_5, 45.132_505_2]) {
            assert!((f64::from(*got) - want).abs() < 1e-5, "{got} {want}");
        }
        for mask in 0..1 << 11 {
            let cuts: Vec<usize> = (1..12).filter(|c| mask >> (c - 1) & 1 == 1).collect();
            let (rows, after) = pool.cut(&*kernels, &cuts, 12);
            same_bits(&format!("cuts {cuts:?}"), &rows, &whole);
            assert_eq!(after, carry, "cuts {cuts:?}");
        }
    }
}

#[test]
fn pooling_has_the_same_bits_for_random_splits() {
    let rng = &mut Rng::new(21);
    for (pooling, dim, tokens) in
        [(Pooling::C4, 128, 61), (Pooling::C128, 72, 300), (Pooling::C128, 72, 256)]
    {
        let pool = Pool::random(rng, pooling, dim, tokens);
        let (whole, carry) = pool.cut(&CpuReference, &[], tokens);
        if tokens == 256 {
            assert!(carry.iter().all(|b| *b == 0), "nothing is open at a boundary");
        }
        for kernels in both() {
            for cut in 0..8 {
                let share = [1, 2, 9, 60][cut % 4];
                let cuts: Vec<usize> = (1..tokens).filter(|_| rng.below(share) == 0).collect();
                let (rows, after) = pool.cut(&*kernels, &cuts, tokens);
                same_bits(&format!("{pooling:?} cuts {cuts:?}"), &rows, &whole);
                assert_eq!(after, carry, "{pooling:?} cuts {cuts:?}");
            }
        }
    }
}

#[test]
fn c4_carry_is_laid_out_as_documented() {
    let rng = &mut Rng::new(22);
    let pool = Pool::random(rng, Pooling::C4, 3, 7);
    for kernels in both() {
        let (_, bytes) = pool.cut(&*kernels, &[2, 5], 7);
        let floats: Vec<f32> =
            bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let score = |t: usize, c: usize| pool.gate[t * 6 + c] + pool.ape[t % 4 * 6 + c];
        for slot in 0..4 {
            for c in 0..3 {
                assert_eq!(floats[slot * 6 + c], pool.kv[slot * 6 + c]);
                assert_eq!(floats[slot * 6 + 3 + c], score(slot, c));
            }
        }
        for slot in 0..3 {
            for c in 0..6 {
                let (t, at) = (4 + slot, 24 + slot * 12 + c);
                assert_eq!(floats[at], pool.kv[t * 6 + c]);
                assert_eq!(floats[at + 6], score(t, c));
            }
        }
        let (_, bytes) = pool.cut(&*kernels, &[], 4);
        assert!(bytes[24 * 4..].iter().all(|b| *b == 0), "no open rows at a boundary");
    }
}

#[test]
fn attention_of_a_token_is_the_same_alone_and_in_a_chunk() {
    let (rng, heads, start, count) = (&mut Rng::new(23), 4, 100usize, 70);
    let window = random_rows(rng, RowFormat::KvV4, 64, start + count);
    let far = random_rows(rng, RowFormat::KvV4, 64, (start + count) / 4);
    let q = rng.bf16s(count * heads * 512);
    // With the larger queries most terms of the softmax are smaller than BF16 products can have.
    for factor in [1.0, 64.0] {
        let q: Vec<f32> = q.iter().map(|x| x * factor).collect();
        attention_alone_and_in_a_chunk(&q, (&window, &far), heads, start);
    }
}

fn attention_alone_and_in_a_chunk(
    q: &[f32],
    (window, far): (&Pages, &Pages),
    heads: usize,
    start: usize,
) {
    let count = q.len() / (heads * 512);
    let list: Vec<i32> = (0..count)
        .flat_map(|i| {
            let visible = ((start + i + 1) / 4) as i32;
            let mut rows: Vec<i32> = (0..visible).filter(|r| (r * 7 + i as i32) % 3 == 0).collect();
            rows.resize(20, -1);
            rows
        })
        .collect();
    let run = |kernels: &dyn Kernels, from: usize, to: usize| {
        let part = SeqPart { first: 0, count: to - from, start_pos: (start + from) as u32 };
        let mut out = vec![0.0; (to - from) * heads * 512];
        let list = TensorRef::from_i32(&list[from * 20..to * 20], to - from, 20).unwrap();
        let a = Attend {
            q: mat(&q[from * heads * 512..to * heads * 512], heads * 512),
            window_cache: window.cache(),
            window: &[SeqWindow { part, first_page_no: 0, pages: &window.list }],
            window_tokens: 128,
            compressed: Some(CompressedRows {
                cache: far.cache(),
                seqs: &[SeqRows { part, pages: &far.list }],
                selection: Selection::Listed(list),
            }),
            sinks: &[0.3, -0.2, 0.0, 1.0],
            scale: 512f32.powf(-0.5),
            rounding: Rounding::Bf16,
            out: mat_mut(&mut out, heads * 512),
        };
        kernels.attend(a).unwrap();
        out
    };
    let whole = run(&CpuReference, 0, count);
    for threads in [1, 2, 5] {
        each(threads, |kernels| {
            same_bits("whole", &run(kernels, 0, count), &whole);
            let alone: Vec<f32> = (0..count).flat_map(|i| run(kernels, i, i + 1)).collect();
            same_bits("one by one", &alone, &whole);
        });
    }
}

#[test]
fn a_row_of_a_linear_is_the_same_in_every_batch() {
    let rng = &mut Rng::new(24);
    let x = rng.bf16s(150 * 256);
    for format in [WeightFormat::Fp8Block128, WeightFormat::Fp4Group32, WeightFormat::Bf16] {
        let m = Matrix::random(rng, format, 272, 256);
        for threads in [1, 2, 4] {
            each(threads, |kernels| linear_in_every_batch(kernels, &m, &x));
        }
    }
}

fn linear_in_every_batch(kernels: &CpuKernels, m: &Matrix, x: &[f32]) {
    let weight = m.pack(kernels);
    let run = |x: &[f32]| {
        let mut y = vec![0.0; x.len() / 256 * 272];
        let a = Linear {
            x: mat(x, 256),
            weight: &weight,
            groups: 1,
            quant: ActQuant::Q8Group128,
            rounding: Rounding::Bf16,
            y: mat_mut(&mut y, 272),
        };
        kernels.linear(a).unwrap();
        y
    };
    let whole = run(x);
    for size in [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 50] {
        let parts: Vec<f32> = x.chunks(size * 256).flat_map(run).collect();
        same_bits(&format!("batches of {size}"), &parts, &whole);
    }
}
