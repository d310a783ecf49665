//! Index scores, selection, and both at once.

use super::{Gpu, STREAM, gpu, shuffled};
use dsa_kernels::cpu::CpuReference;
use dsa_kernels::cuda::{
    IndexKeys, QueryRows, ScorePath, ScoreRows, SelectFused, SelectRows, fused_scratch_bytes,
};
use dsa_kernels::math::order_key;
use dsa_kernels::ops::*;
use dsa_kernels::quant;
use dsa_kernels::testing::Rng;
use dsa_kernels::{CpuDevice, Device, Mem, MemSlice, Place, TensorRef};

const KINDS: [(RowFormat, IndexRounding); 3] = [
    (RowFormat::IndexFp8, IndexRounding::Fp8),
    (RowFormat::IndexFp4, IndexRounding::Fp4),
    (RowFormat::IndexBf16, IndexRounding::Bf16),
];

/// The choice by its definition: a stable sort.
fn best(scores: &[f32], top_k: usize) -> Vec<i32> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by_key(|i| std::cmp::Reverse(order_key(scores[*i])));
    order.truncate(top_k);
    order.sort_unstable();
    let mut rows: Vec<i32> = order.into_iter().map(|i| i as i32).collect();
    rows.resize(top_k, -1);
    rows
}

/// Paged keys of several sequences, and queries.
struct Case {
    format: RowFormat,
    keys: Mem,
    stride: u64,
    pages: Vec<u32>,
    pages_per_seq: usize,
    visible: Vec<u32>,
    tokens_per_seq: usize,
    /// De-quantised: keys `[sequence][row][128]`, queries `[token][64][128]`, weights.
    plain_keys: Vec<Vec<f32>>,
    plain_queries: Vec<f32>,
    weights: Vec<f32>,
    codes: MemSlice,
    weights_there: MemSlice,
}

/// Keys of sequences with `rows` rows in pages of 64 in scattered order, on the host.
struct Keys {
    bytes: Vec<u8>,
    stride: u64,
    pages: Vec<u32>,
    pages_per_seq: usize,
    plain: Vec<Vec<f32>>,
}

fn keys(rng: &mut Rng, format: RowFormat, rows: &[usize]) -> Keys {
    let row_bytes = (format.data_bytes() + format.scale_bytes()) as u64;
    let stride = 64 * row_bytes + 16 * rng.below(3) as u64;
    let pages_per_seq = rows.iter().max().unwrap().div_ceil(64).max(1);
    let count = rows.len() * pages_per_seq + 2;
    let host = CpuDevice::new().alloc(Place::Host, count as u64 * stride).unwrap();
    // Unwritten rows hold NaN in each format that has one.
    host.write(0, &vec![0xff; host.len() as usize]).unwrap();
    let mut pages = shuffled(rng, count);
    pages.truncate(rows.len() * pages_per_seq);
    let cache = PagedCache { mem: &host, base: 0, stride, rows_per_page: 64, format };
    let mut plain = Vec::new();
    for (own, rows) in pages.chunks(pages_per_seq).zip(rows) {
        let target = |i: usize| RowTarget { page: own[i / 64], row: (i % 64) as u32 };
        let targets: Vec<RowTarget> = (0..*rows).map(target).collect();
        let values = rng.bf16s(rows * 128);
        let values = TensorRef::from_f32(&values, *rows, 128).unwrap();
        CpuReference.store_rows(StoreRows { rows: values, cache, targets: &targets }).unwrap();
        let mut back = vec![0.0; rows * 128];
        let into = dsa_kernels::TensorMut::from_f32(&mut back, *rows, 128).unwrap();
        CpuReference.load_rows(LoadRows { cache, sources: &targets, rows: into }).unwrap();
        plain.push(back);
    }
    let mut bytes = vec![0; host.len() as usize];
    host.read(0, &mut bytes).unwrap();
    Keys { bytes, stride, pages, pages_per_seq, plain }
}

/// `rows` of each sequence; each sequence's tokens see up to `tokens_per_seq - 1` rows less.
fn case(
    gpu: &Gpu,
    rng: &mut Rng,
    (format, rounding): (RowFormat, IndexRounding),
    rows: &[usize],
    tokens_per_seq: usize,
) -> Case {
    let keys = keys(rng, format, rows);
    let tokens = rows.len() * tokens_per_seq;
    let visible: Vec<u32> = (0..tokens)
        .map(|t| {
            let less = tokens_per_seq - 1 - t % tokens_per_seq;
            (rows[t / tokens_per_seq] as u32).saturating_sub(less as u32)
        })
        .collect();
    let weights = rng.floats(tokens * 64);
    let table: Vec<f32> = (0..tokens * 64).map(|i| if i % 64 < 32 { 0.6 } else { 0.8 }).collect();
    let (q, table) = (gpu.f32s(&rng.floats(tokens * 64 * 128)), gpu.f32s(&table));
    let codes = gpu.poisoned(tokens * 64 * if format == RowFormat::IndexFp8 { 128 } else { 256 });
    let (weights_in, weights_there) = (gpu.f32s(&weights), gpu.poisoned(4 * tokens * 64));
    let a = QueryRows {
        q: &q,
        table: &table,
        weights: &weights_in,
        kind: rounding,
        codes: &codes,
        weights_out: &weights_there,
        tokens: tokens as u32,
        heads: 64,
    };
    gpu.kernels.query_rows(STREAM, &a).unwrap();
    let plain_queries = if format == RowFormat::IndexFp8 {
        gpu.read(&codes).into_iter().map(quant::e4m3_decode).collect()
    } else {
        gpu.read_bf16(&codes)
    };
    Case {
        format,
        keys: gpu.bytes(&keys.bytes).mem,
        stride: keys.stride,
        pages: keys.pages,
        pages_per_seq: keys.pages_per_seq,
        visible,
        tokens_per_seq,
        plain_keys: keys.plain,
        plain_queries,
        weights: gpu.read_f32(&weights_there),
        codes,
        weights_there,
    }
}

impl Case {
    fn tokens(&self) -> usize {
        self.visible.len()
    }

    fn with_keys<R>(&self, gpu: &Gpu, path: ScorePath, run: impl FnOnce(IndexKeys<'_>) -> R) -> R {
        let (pages, visible) = (gpu.u32s(&self.pages), gpu.u32s(&self.visible));
        run(IndexKeys {
            cache: PagedCache {
                mem: &self.keys,
                base: 0,
                stride: self.stride,
                rows_per_page: 64,
                format: self.format,
            },
            pages: &pages,
            pages_per_seq: self.pages_per_seq as u32,
            visible: &visible,
            tokens_per_seq: self.tokens_per_seq as u32,
            codes: &self.codes,
            weights: &self.weights_there,
            tokens: self.tokens() as u32,
            path,
        })
    }

    fn stride_rows(&self) -> usize {
        64 * self.pages_per_seq
    }

    /// Scores of all tokens; behind the visible rows the poison stays.
    fn scores(&self, gpu: &Gpu, path: ScorePath) -> (Vec<f32>, MemSlice) {
        let out = gpu.poisoned(4 * self.tokens() * self.stride_rows());
        self.with_keys(gpu, path, |keys| {
            let a = ScoreRows { keys, scores: &out, score_stride: self.stride_rows() as u32 };
            gpu.kernels.score_rows(STREAM, &a).unwrap();
            (gpu.read_f32(&out), out.clone())
        })
    }

    fn select(&self, gpu: &Gpu, scores: &MemSlice, top_k: usize) -> Vec<i32> {
        let (visible, selected) =
            (gpu.u32s(&self.visible), gpu.poisoned(4 * self.tokens() * top_k));
        let a = SelectRows {
            scores,
            score_stride: self.stride_rows() as u32,
            visible: &visible,
            tokens: self.tokens() as u32,
            top_k: top_k as u32,
            selected: &selected,
        };
        gpu.kernels.select_rows(STREAM, &a).unwrap();
        gpu.read_i32(&selected)
    }

    /// Twice with the same scratch memory, which each launch leaves zeroed.
    fn fused(&self, gpu: &Gpu, path: ScorePath, top_k: usize) -> Vec<i32> {
        let bytes = fused_scratch_bytes(self.tokens() as u32, self.pages_per_seq as u32);
        let scratch = gpu.bytes(&vec![0; bytes as usize]);
        self.with_keys(gpu, path, |keys| {
            let run = || {
                let selected = gpu.poisoned(4 * self.tokens() * top_k);
                let a = SelectFused {
                    keys,
                    top_k: top_k as u32,
                    selected: &selected,
                    scratch: &scratch,
                };
                gpu.kernels.select_fused(STREAM, &a).unwrap();
                gpu.read_i32(&selected)
            };
            let first = run();
            assert_eq!(first, run(), "two runs");
            first
        })
    }

    /// Scores in FP64 from the de-quantised values, and the sum of magnitudes behind each.
    fn wide(&self, t: usize) -> Vec<(f64, f64)> {
        let keys = &self.plain_keys[t / self.tokens_per_seq];
        let q = &self.plain_queries[t * 64 * 128..(t + 1) * 64 * 128];
        keys.chunks(128)
            .take(self.visible[t] as usize)
            .map(|key| {
                let mut sum = (0.0, 0.0);
                for (h, q) in q.chunks(128).enumerate() {
                    let products = q.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b));
                    let (dot, size) = products.fold((0.0, 0.0), |(d, s), p| (d + p, s + p.abs()));
                    let w = f64::from(self.weights[t * 64 + h]);
                    sum = (sum.0 + dot.max(0.0) * w, sum.1 + size * w.abs());
                }
                sum
            })
            .collect()
    }
}

fn check(gpu: &Gpu, c: &Case, path: ScorePath, top_ks: &[usize], worst: &mut f64) {
    let case =
        format!("{:?} {path:?}, {:?} rows, {} tokens each", c.format, c.visible, c.tokens_per_seq);
    let (scores, there) = c.scores(gpu, path);
    let (again, _) = c.scores(gpu, path);
    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&scores), bits(&again), "{case}: two runs");
    for t in 0..c.tokens() {
        let got = &scores[t * c.stride_rows()..(t + 1) * c.stride_rows()];
        let (seen, rest) = got.split_at(c.visible[t] as usize);
        assert!(rest.iter().all(|s| s.to_bits() == u32::MAX), "{case}: token {t} behind its rows");
        for (row, (s, (want, size))) in seen.iter().zip(c.wide(t)).enumerate() {
            let error = (f64::from(*s) - want).abs() / size.max(1e-30);
            assert!(
                error < 3e-4,
                "{case}: token {t}, row {row}: {s} for {want}, {error:e} of {size}"
            );
            *worst = worst.max(error);
        }
    }
    for top_k in top_ks {
        let want: Vec<i32> = (0..c.tokens())
            .flat_map(|t| best(&scores[t * c.stride_rows()..][..c.visible[t] as usize], *top_k))
            .collect();
        assert_eq!(c.select(gpu, &there, *top_k), want, "{case}: top {top_k}");
        if gpu.kernels.fits_fused(c.tokens() as u32, c.pages_per_seq as u32) {
            assert_eq!(c.fused(gpu, path, *top_k), want, "{case}: fused top {top_k}");
        }
    }
}

#[test]
fn scores_are_those_of_fp64_and_the_choice_is_the_sorted_one() {
    let Some(gpu) = gpu("scores_are_those_of_fp64_and_the_choice_is_the_sorted_one") else {
        return;
    };
    let rng = &mut gpu.rng(21);
    for kind in KINDS {
        let paths: &[ScorePath] = if kind.0 == RowFormat::IndexFp8 {
            &[ScorePath::Best, ScorePath::Warp]
        } else {
            &[ScorePath::Best]
        };
        for path in paths {
            let mut worst = 0.0;
            for rows in [&[0, 1, 2, 61, 69][..], &[576], &[511, 512, 513, 2048], &[64], &[1500; 9]]
            {
                check(gpu, &case(gpu, rng, kind, rows, 1), *path, &[1, 61, 512, 1024], &mut worst);
            }
            for tokens in [2, 3, 8] {
                check(
                    gpu,
                    &case(gpu, rng, kind, &[700, 3, 1025], tokens),
                    *path,
                    &[512],
                    &mut worst,
                );
            }
            check(gpu, &case(gpu, rng, kind, &[9000, 100], 1), *path, &[512], &mut worst);
            check(gpu, &case(gpu, rng, kind, &[300; 150], 1), *path, &[64], &mut worst);
            println!("{:?} {path:?}: largest error {worst:.2e} of the sum of magnitudes", kind.0);
        }
    }
}

#[test]
fn a_score_does_not_depend_on_the_batch() {
    let Some(gpu) = gpu("a_score_does_not_depend_on_the_batch") else { return };
    let rng = &mut gpu.rng(22);
    for kind in KINDS {
        let whole = case(gpu, rng, kind, &[700, 61, 2000, 130, 513], 1);
        let (scores, _) = whole.scores(gpu, ScorePath::Best);
        let order = shuffled(rng, 5);
        let (query_bytes, n) = (whole.codes.len as usize / 5, whole.stride_rows());
        let (codes, weights) = (gpu.read(&whole.codes), gpu.read(&whole.weights_there));
        for size in [1, 2, 5] {
            for group in order.chunks(size) {
                let pick = |bytes: &[u8], each: usize| -> Vec<u8> {
                    group
                        .iter()
                        .flat_map(|s| bytes[*s as usize * each..][..each].to_vec())
                        .collect()
                };
                let part = Case {
                    keys: whole.keys.clone(),
                    pages: group
                        .iter()
                        .flat_map(|s| {
                            whole.pages[*s as usize * whole.pages_per_seq..][..whole.pages_per_seq]
                                .to_vec()
                        })
                        .collect(),
                    visible: group.iter().map(|s| whole.visible[*s as usize]).collect(),
                    codes: gpu.bytes(&pick(&codes, query_bytes)),
                    weights_there: gpu.bytes(&pick(&weights, 256)),
                    plain_keys: Vec::new(),
                    plain_queries: Vec::new(),
                    weights: Vec::new(),
                    format: whole.format,
                    stride: whole.stride,
                    pages_per_seq: whole.pages_per_seq,
                    tokens_per_seq: 1,
                };
                let (got, _) = part.scores(gpu, ScorePath::Best);
                for (i, s) in group.iter().enumerate() {
                    let rows = part.visible[i] as usize;
                    let (a, b) = (&got[i * n..][..rows], &scores[*s as usize * n..][..rows]);
                    assert!(
                        a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()),
                        "{kind:?} {group:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn rows_of_pages_that_do_not_exist_are_chosen_last() {
    let Some(gpu) = gpu("rows_of_pages_that_do_not_exist_are_chosen_last") else { return };
    let rng = &mut gpu.rng(23);
    for kind in KINDS {
        let mut c = case(gpu, rng, kind, &[640, 640], 1);
        c.pages[3] = u32::MAX;
        c.pages[17] = 1 << 30;
        let (scores, there) = c.scores(gpu, ScorePath::Best);
        assert!(scores[3 * 64..4 * 64].iter().all(|s| s.is_nan()));
        assert!(scores[..3 * 64].iter().chain(&scores[4 * 64..640]).all(|s| !s.is_nan()));
        let want: Vec<i32> = scores.chunks(640).flat_map(|s| best(s, 512)).collect();
        assert_eq!(c.select(gpu, &there, 512), want);
        assert_eq!(c.fused(gpu, ScorePath::Best, 512), want);
        assert!(want[..512].iter().all(|row| !(192..256).contains(row)));
    }
}

#[test]
fn selection_is_exact_for_difficult_values() {
    let Some(gpu) = gpu("selection_is_exact_for_difficult_values") else { return };
    let rng = &mut gpu.rng(24);
    let specials = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, 1e-40, -1.0];
    for rows in
        [0, 1, 2, 61, 69, 511, 512, 513, 576, 1024, 2047, 2048, 2049, 8192, 8193, 30_000, 262_144]
    {
        let stride = rows + rng.below(3).min(262_144 - rows);
        let kinds: [&dyn Fn(&mut Rng) -> f32; 5] = [
            &|rng| rng.unit(),
            &|rng| rng.below(5) as f32 - 2.0,
            &|_| 1.5,
            &|rng| if rng.below(3) == 0 { specials[rng.below(7)] } else { rng.unit() },
            &|rng| f32::from_bits(0x3f80_0000 + rng.below(700) as u32),
        ];
        let scores: Vec<f32> = kinds
            .iter()
            .flat_map(|kind| {
                let mut row: Vec<f32> = (0..rows).map(|_| kind(rng)).collect();
                row.resize(stride, f32::INFINITY);
                row
            })
            .collect();
        let (there, visible) = (gpu.f32s(&scores), gpu.u32s(&[rows as u32; 5]));
        for top_k in [1, 61, 512, 1024] {
            let selected = gpu.poisoned(4 * 5 * top_k);
            let a = SelectRows {
                scores: &there,
                score_stride: stride as u32,
                visible: &visible,
                tokens: 5,
                top_k: top_k as u32,
                selected: &selected,
            };
            gpu.kernels.select_rows(STREAM, &a).unwrap();
            let got = gpu.read_i32(&selected);
            for (n, got) in got.chunks(top_k).enumerate() {
                let want = best(&scores[n * stride..][..rows], top_k);
                assert!(got == want, "{rows} rows, top {top_k}, values {n}");
            }
        }
    }
}

#[test]
fn a_choice_does_not_depend_on_the_batch() {
    let Some(gpu) = gpu("a_choice_does_not_depend_on_the_batch") else { return };
    let rng = &mut gpu.rng(25);
    // Rows of scores are cut over fewer blocks the more there are.
    for (tokens, stride) in [(1, 9001), (16, 33_000), (20, 40_000), (40, 20_000), (70, 9000)] {
        let values: [&dyn Fn(&mut Rng) -> f32; 4] = [
            &|rng| rng.unit(),
            &|rng| rng.below(3) as f32,
            &|rng| f32::from_bits(0x4700_0000 + rng.below(1 << 26) as u32),
            &|rng| f32::from_bits(0xbf80_0000 + rng.below(30_000) as u32),
        ];
        let scores: Vec<f32> =
            (0..tokens).flat_map(|n| vec![n; stride]).map(|n| values[n % 4](rng)).collect();
        let visible: Vec<u32> = (0..tokens)
            .map(|n| if n % 5 == 4 { rng.below(stride) } else { stride - rng.below(70) } as u32)
            .collect();
        let (there, visible_there) = (gpu.f32s(&scores), gpu.u32s(&visible));
        for top_k in [1, 512, 1024] {
            let selected = gpu.poisoned(4 * tokens * top_k);
            let a = SelectRows {
                scores: &there,
                score_stride: stride as u32,
                visible: &visible_there,
                tokens: tokens as u32,
                top_k: top_k as u32,
                selected: &selected,
            };
            gpu.kernels.select_rows(STREAM, &a).unwrap();
            let got = gpu.read_i32(&selected);
            for (n, got) in got.chunks(top_k).enumerate() {
                let want = best(&scores[n * stride..][..visible[n] as usize], top_k);
                assert!(got == want, "{tokens} tokens of {stride} rows, token {n}, top {top_k}");
            }
        }
    }
}
