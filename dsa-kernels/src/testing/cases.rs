//! The conformance suite: every operation on odd and real shapes.

use super::caches::{Pages, random_rows};
use super::{Matrix, Pair, Rng};
use crate::cpu::CpuReference;
use crate::device::{CpuDevice, Device, Place};
use crate::error::KernelError;
use crate::ops::{
    ActQuant, Attend, Choice, Compress, CompressSeq, CompressedRows, Embed, ExpertWeights,
    HyperHead, HyperPost, HyperPre, HyperWeights, IndexQuery, IndexRounding, IndexSelect, Kernels,
    Linear, LoadRows, Moe, Pooling, RmsNorm, Rope, RopeTable, Rounding, Route, RowFormat,
    Selection, SeqPart, SeqRows, SeqWindow, WeightFormat, c4_carry_bytes, c128_carry_bytes,
};
use crate::tensor::{TensorMut, TensorRef};

const TOKENS: [usize; 7] = [1, 2, 3, 5, 31, 128, 513];
const ROUNDINGS: [Rounding; 2] = [Rounding::None, Rounding::Bf16];
const FORMATS: [WeightFormat; 4] =
    [WeightFormat::Fp8Block128, WeightFormat::Fp4Group32, WeightFormat::Bf16, WeightFormat::F32];

/// Compares `tested` with the reference on all operations. `seed` varies the data, not the shapes.
///
/// # Panics
/// On the first result that differs in a bit.
pub fn conformance(tested: &dyn Kernels, seed: u64) {
    let pair = Pair { tested, reference: CpuReference };
    let rng = &mut Rng::new(seed);
    elementwise(&pair, rng);
    hyper(&pair, rng);
    linear(&pair, rng);
    rows(&pair, rng);
    compress(&pair, rng);
    index_select(&pair, rng);
    attend(&pair, rng);
    route(&pair, rng);
    moe(&pair, rng);
    special_values(&pair, rng);
}

fn mat(data: &[f32], rows: usize, cols: usize) -> TensorRef<'_> {
    TensorRef::from_f32(data, rows, cols).expect("a generated matrix has the size it states")
}

fn mat_mut(data: &mut [f32], rows: usize, cols: usize) -> TensorMut<'_> {
    TensorMut::from_f32(data, rows, cols).expect("a generated matrix has the size it states")
}

fn done(result: Result<(), KernelError>) {
    result.expect("a generated case is valid");
}

/// Runs an operation with an I32 output and hands it on as floats.
fn through_i32(out: &mut [f32], cols: usize, run: impl FnOnce(TensorMut<'_>)) {
    let mut values = vec![i32::MIN; out.len()];
    run(TensorMut::from_i32(&mut values, out.len() / cols.max(1), cols).expect("same size"));
    out.iter_mut().zip(values).for_each(|(o, v)| *o = v as f32);
}

fn elementwise(pair: &Pair<'_>, rng: &mut Rng) {
    for t in TOKENS {
        let positions: Vec<u32> = (0..t).map(|_| rng.below(1 << 20) as u32).collect();
        let freqs: Vec<f32> = (0..32).map(|k| 10000f32.powf(-(k as f32) / 32.0)).collect();
        let mut table = vec![0.0; 64 * t];
        pair.compare(&format!("rope_table, {t} tokens"), &[64 * t], |k, out| {
            let table = mat_mut(&mut out[0], t, 64);
            done(k.rope_table(RopeTable { positions: &positions, freqs: &freqs, table }));
        });
        let full = mat_mut(&mut table, t, 64);
        done(CpuReference.rope_table(RopeTable {
            positions: &positions,
            freqs: &freqs,
            table: full,
        }));
        for rounding in ROUNDINGS {
            for (cols, dim, weighted) in [(256, 256, true), (512, 512, false), (24, 12, true)] {
                let (x, w) = (rng.floats(t * cols), rng.floats(dim));
                let weight = weighted.then_some(&w[..]);
                pair.compare(&format!("rms_norm, {t} x {cols}"), &[t * cols], |k, out| {
                    let y = mat_mut(&mut out[0], t, cols);
                    done(k.rms_norm(RmsNorm {
                        x: mat(&x, t, cols),
                        weight,
                        dim,
                        eps: 1e-6,
                        rounding,
                        y,
                    }));
                });
            }
            for (heads, dim, inverse) in [(4, 512, true), (1, 128, false), (3, 70, true)] {
                let x = rng.floats(t * heads * dim);
                pair.compare(&format!("rope, {t} x {heads} x {dim}"), &[x.len()], |k, out| {
                    out[0].copy_from_slice(&x);
                    let x = mat_mut(&mut out[0], t, heads * dim);
                    done(k.rope(Rope { x, dim, table: mat(&table, t, 64), inverse, rounding }));
                });
            }
        }
        let kinds =
            [IndexRounding::Fp4, IndexRounding::Fp8, IndexRounding::Bf16, IndexRounding::None];
        for kind in kinds {
            let q = rng.floats(t * 3 * 128);
            pair.compare(&format!("index_query {kind:?}, {t} tokens"), &[q.len()], |k, out| {
                out[0].copy_from_slice(&q);
                let q = mat_mut(&mut out[0], t, 3 * 128);
                done(k.index_query(IndexQuery { q, table: mat(&table, t, 64), kind }));
            });
        }
    }
}

fn hyper(pair: &Pair<'_>, rng: &mut Rng) {
    for (t, d) in TOKENS.into_iter().zip([256, 8, 33, 256, 64, 256, 20]) {
        let x = rng.bf16s(t * 4 * d);
        let maps = Matrix::random(rng, WeightFormat::F32, 24, 4 * d);
        let head = Matrix::random(rng, WeightFormat::F32, 4, 4 * d);
        let (base, scale) = (rng.floats(24), rng.floats(3));
        for rounding in ROUNDINGS {
            let sizes = [4 * t, 16 * t, d * t];
            pair.compare(&format!("hyper_pre, {t} x {d}"), &sizes, |k, out| {
                let weights =
                    HyperWeights { maps: maps.pack(k), base: base.clone(), scale: scale.clone() };
                let [post, comb, y] = out else { panic!("three outputs") };
                done(k.hyper_pre(HyperPre {
                    streams: mat(&x, t, 4 * d),
                    weights: &weights,
                    iters: 20,
                    hc_eps: 1e-6,
                    norm_eps: 1e-6,
                    rounding,
                    post: mat_mut(post, t, 4),
                    comb: mat_mut(comb, t, 16),
                    y: mat_mut(y, t, d),
                }));
            });
            pair.compare(&format!("hyper_head, {t} x {d}"), &[d * t], |k, out| {
                let (base, scale) = (base[..4].to_vec(), scale[..1].to_vec());
                let weights = HyperWeights { maps: head.pack(k), base, scale };
                let (streams, y) = (mat(&x, t, 4 * d), mat_mut(&mut out[0], t, d));
                let (hc_eps, norm_eps) = (1e-6, 1e-6);
                done(k.hyper_head(HyperHead {
                    streams,
                    weights: &weights,
                    hc_eps,
                    norm_eps,
                    rounding,
                    y,
                }));
            });
            let (o, post, comb) = (rng.floats(t * d), rng.floats(4 * t), rng.floats(16 * t));
            pair.compare(&format!("hyper_post, {t} x {d}"), &[4 * d * t], |k, out| {
                out[0].copy_from_slice(&x);
                let streams = mat_mut(&mut out[0], t, 4 * d);
                let (out, post, comb) = (mat(&o, t, d), mat(&post, t, 4), mat(&comb, t, 16));
                done(k.hyper_post(HyperPost { streams, out, post, comb, rounding }));
            });
        }
    }
}

fn linear(pair: &Pair<'_>, rng: &mut Rng) {
    let shapes = [(1, 2, 1), (16, 32, 1), (17, 34, 1), (24, 1024, 1), (130, 260, 1), (300, 130, 1)];
    let grouped = [(256, 128, 2), (40, 96, 4), (34, 66, 2), (6, 640, 3)];
    for (i, t) in TOKENS.into_iter().cycle().take(14).enumerate() {
        for (n, k, groups) in shapes.into_iter().chain(grouped) {
            let format = FORMATS[rng.below(4)];
            let w = Matrix::random(rng, format, n, k);
            let x = rng.floats(t * groups * k);
            let quant = [ActQuant::None, ActQuant::Q8Group128][(i + n) % 2];
            let rounding = ROUNDINGS[rng.below(2)];
            let case = format!("linear {format:?} {quant:?}, {t} x {n} x {k}, {groups} groups");
            pair.compare(&case, &[t * n], |kernels, out| {
                let (x, y) = (mat(&x, t, groups * k), mat_mut(&mut out[0], t, n));
                let weight = &w.pack(kernels);
                done(kernels.linear(Linear { x, weight, groups, quant, rounding, y }));
            });
        }
        for format in FORMATS {
            let w = Matrix::random(rng, format, 50, 34);
            let ids: Vec<u32> = (0..t).map(|_| rng.below(50) as u32).collect();
            pair.compare(&format!("embed {format:?}, {t} tokens"), &[t * 4 * 34], |k, out| {
                let streams = mat_mut(&mut out[0], t, 4 * 34);
                done(k.embed(Embed { ids: &ids, table: &w.pack(k), streams }));
            });
        }
    }
}

const ROW_FORMATS: [(RowFormat, u32); 8] = [
    (RowFormat::KvV4, 64),
    (RowFormat::KvV4, 2),
    (RowFormat::KvF32, 64),
    (RowFormat::KvF32, 2),
    (RowFormat::IndexFp8, 64),
    (RowFormat::IndexFp4, 64),
    (RowFormat::IndexBf16, 64),
    (RowFormat::IndexF32, 64),
];

fn rows(pair: &Pair<'_>, rng: &mut Rng) {
    for (format, per_page) in ROW_FORMATS {
        for count in [1, 2, 63, 64, 131] {
            let values = rng.floats(count * format.width());
            let seed = rng.bits();
            let pages = || Pages::new(&mut Rng::new(seed), format, per_page, count);
            let (got, want) = (pages(), pages());
            want.store(&pair.reference, 0, &values);
            got.store(pair.tested, 0, &values);
            assert!(got.bytes() == want.bytes(), "store_rows {format:?}: bytes differ");
            assert!(want.bytes().iter().any(|b| *b != 0), "store_rows wrote nothing");
            let sources: Vec<_> = (0..count).rev().map(|i| want.target(i)).collect();
            let case = format!("load_rows {format:?}, {count} rows");
            pair.compare(&case, &[values.len()], |k, out| {
                let rows = mat_mut(&mut out[0], count, format.width());
                done(k.load_rows(LoadRows { cache: want.cache(), sources: &sources, rows }));
            });
        }
    }
}

fn compress(pair: &Pair<'_>, rng: &mut Rng) {
    for (pooling, dim) in [
        (Pooling::C4, 512),
        (Pooling::C4, 128),
        (Pooling::C4, 11),
        (Pooling::C128, 512),
        (Pooling::C128, 13),
    ] {
        let (ratio, cols) = (pooling.ratio(), pooling.cols(dim));
        let ape = rng.floats(ratio as usize * cols);
        let bytes =
            if pooling == Pooling::C4 { c4_carry_bytes(dim) } else { c128_carry_bytes(dim) };
        for spans in
            [&[(0, 1)][..], &[(3, 1), (0, 5)], &[(6, 0), (126, 4), (7, 513)], &[(127, 300)]]
        {
            let (mut first, mut first_row, mut seqs) = (0, 0, Vec::new());
            for (i, (start_pos, count)) in spans.iter().enumerate() {
                let part = SeqPart { first, count: *count, start_pos: *start_pos };
                seqs.push(CompressSeq { part, carry_offset: (i * bytes) as u64, first_row });
                first += count;
                first_row += part.rows_emitted(ratio);
            }
            let (kv, gate) = (rng.floats(first * cols), rng.floats(first * cols));
            let before: Vec<u8> = rng
                .floats(spans.len() * bytes / 4)
                .iter()
                .flat_map(|v| v.abs().to_le_bytes())
                .collect();
            let sizes = [first_row * dim, before.len()];
            pair.compare(&format!("compress {pooling:?} {dim}, {spans:?}"), &sizes, |k, out| {
                let carry = CpuDevice::new().alloc(Place::Host, before.len() as u64);
                let carry = carry.expect("a small carry");
                carry.write(0, &before).expect("the whole carry");
                let [pooled, after] = out else { panic!("two outputs") };
                done(k.compress(Compress {
                    kv: mat(&kv, first, cols),
                    gate: mat(&gate, first, cols),
                    ape: &ape,
                    pooling,
                    dim,
                    carry: &carry,
                    seqs: &seqs,
                    rounding: Rounding::Bf16,
                    rows: mat_mut(pooled, first_row, dim),
                }));
                let mut bytes = vec![0; before.len()];
                carry.read(0, &mut bytes).expect("the whole carry");
                after.iter_mut().zip(bytes).for_each(|(o, b)| *o = f32::from(b));
            });
        }
    }
}

/// Sequences of a step as `(start_pos, count)`.
const STEPS: [&[(u32, usize)]; 9] = [
    &[(0, 1)],
    &[(2, 2)],
    &[(130, 3)],
    &[(500, 1), (0, 3), (259, 1)],
    &[(97, 31)],
    &[(0, 128)],
    &[(300, 129), (1, 7)],
    &[(40, 0), (255, 70)],
    &[(64, 513)],
];

fn parts(spans: &[(u32, usize)]) -> Vec<SeqPart> {
    let mut first = 0;
    let next = |(start_pos, count): &(u32, usize)| {
        first += count;
        SeqPart { first: first - count, count: *count, start_pos: *start_pos }
    };
    spans.iter().map(next).collect()
}

fn index_select(pair: &Pair<'_>, rng: &mut Rng) {
    let formats =
        [RowFormat::IndexFp8, RowFormat::IndexFp4, RowFormat::IndexBf16, RowFormat::IndexF32];
    for (i, spans) in STEPS.into_iter().enumerate() {
        let (heads, top_k) = ([8, 1, 3, 64, 8, 5, 2, 8, 4][i], [64, 1, 20][i % 3]);
        let parts = parts(spans);
        let tokens = parts.iter().map(|p| p.count).sum();
        let most = parts.iter().map(|p| p.end_pos() as usize / 4).max().unwrap_or(0);
        // One pool holds the rows of all sequences: each starts at another page of it.
        let keys = random_rows(rng, formats[i % 4], 8, most + 8 * parts.len());
        let seqs = parts.iter().enumerate();
        let seqs: Vec<_> =
            seqs.map(|(n, p)| SeqRows { part: *p, pages: &keys.list[n..] }).collect();
        let mut q = rng.floats(tokens * heads * 128);
        // Equal queries and keys make ties.
        q.chunks_exact_mut(128).step_by(3).for_each(|h| h.fill(0.0));
        let w = rng.floats(tokens * heads);
        let sizes = [tokens * top_k, tokens * (most + 2)];
        pair.compare(&format!("index_select {heads} heads, {spans:?}"), &sizes, |k, out| {
            let [selected, scores] = out else { panic!("two outputs") };
            through_i32(selected, top_k, |selected| {
                done(k.index_select(IndexSelect {
                    q: mat(&q, tokens, heads * 128),
                    w: mat(&w, tokens, heads),
                    keys: keys.cache(),
                    seqs: &seqs,
                    top_k,
                    selected,
                    scores: Some(mat_mut(scores, tokens, most + 2)),
                }));
            });
        });
        pair.compare(&format!("index_select without scores, {spans:?}"), &sizes[..1], |k, out| {
            through_i32(&mut out[0], top_k, |selected| {
                let (q, w) = (mat(&q, tokens, heads * 128), mat(&w, tokens, heads));
                let (keys, seqs) = (keys.cache(), &seqs[..]);
                done(k.index_select(IndexSelect {
                    q,
                    w,
                    keys,
                    seqs,
                    top_k,
                    selected,
                    scores: None,
                }));
            });
        });
    }
}

/// Ascending random rows below `visible`, at most `k`, then -1.
fn random_list(rng: &mut Rng, visible: usize, k: usize) -> Vec<i32> {
    let mut list: Vec<i32> =
        (0..visible as i32).filter(|_| rng.below(visible.max(1)) < k + 2).take(k).collect();
    list.resize(k, -1);
    list
}

fn attend(pair: &Pair<'_>, rng: &mut Rng) {
    for (i, spans) in STEPS.into_iter().enumerate() {
        let heads = [4, 8, 3, 1, 5, 4, 2, 6, 1][i];
        let (format, rounding) = ([RowFormat::KvV4, RowFormat::KvF32][i / 2 % 2], ROUNDINGS[i % 2]);
        let parts = parts(spans);
        let tokens: usize = parts.iter().map(|p| p.count).sum();
        let most = parts.iter().map(|p| p.end_pos() as usize).max().unwrap_or(0);
        let window = random_rows(rng, format, 64, most + 64 * parts.len());
        let skip = |p: &SeqPart| p.start_pos.saturating_sub(127) / 64;
        let windows: Vec<_> = parts
            .iter()
            .enumerate()
            .map(|(n, p)| SeqWindow {
                part: *p,
                first_page_no: skip(p),
                pages: &window.list[n + skip(p) as usize..],
            })
            .collect();
        let q = rng.bf16s(tokens * heads * 512);
        let sinks = rng.floats(heads);
        let far = random_rows(rng, format, 8, most / 4 + 8 * parts.len() + 8);
        let seqs = parts.iter().enumerate();
        let seqs: Vec<_> = seqs.map(|(n, p)| SeqRows { part: *p, pages: &far.list[n..] }).collect();
        let k_rows = 24;
        let mut list = Vec::new();
        for p in &parts {
            for t in 0..p.count {
                list.extend(random_list(rng, (p.start_pos as usize + t + 1) / 4, k_rows));
            }
        }
        for kind in ["window", "all 128", "all 4", "listed"] {
            let case = format!("attend {kind} {format:?} {rounding:?}, {heads} heads, {spans:?}");
            pair.compare(&case, &[q.len()], |k, out| {
                let selection = match kind {
                    "all 128" => Some(Selection::All { ratio: 128 }),
                    "all 4" => Some(Selection::All { ratio: 4 }),
                    "listed" => Some(Selection::Listed(
                        TensorRef::from_i32(&list, tokens, k_rows).expect("one list a token"),
                    )),
                    _ => None,
                };
                let compressed = selection.map(|selection| CompressedRows {
                    cache: far.cache(),
                    seqs: &seqs,
                    selection,
                });
                done(k.attend(Attend {
                    q: mat(&q, tokens, heads * 512),
                    window_cache: window.cache(),
                    window: &windows,
                    window_tokens: 128,
                    compressed,
                    sinks: &sinks,
                    scale: 512f32.powf(-0.5),
                    rounding,
                    out: mat_mut(&mut out[0], tokens, heads * 512),
                }));
            });
        }
    }
}

fn route(pair: &Pair<'_>, rng: &mut Rng) {
    for t in TOKENS {
        for (e, k) in [(16, 4), (7, 7), (256, 6), (1, 1)] {
            // Coarse values make ties.
            let logits: Vec<f32> = (0..t * e).map(|_| (rng.unit() * 8.0).round() / 2.0).collect();
            let bias: Vec<f32> = (0..e).map(|_| (rng.unit() * 4.0).round() / 4.0).collect();
            let ids: Vec<u32> = (0..t).map(|_| rng.below(30) as u32).collect();
            let table: Vec<u32> = (0..30 * k).map(|_| rng.below(e) as u32).collect();
            for hashed in [false, true] {
                let case = format!("route {t} x {e}, hashed {hashed}");
                pair.compare(&case, &[t * k, t * k], |kernels, out| {
                    let choice = if hashed {
                        Choice::Hash { table: &table, ids: &ids }
                    } else {
                        Choice::Biased(&bias)
                    };
                    let [experts, weights] = out else { panic!("two outputs") };
                    through_i32(experts, k, |experts| {
                        let (logits, weights) = (mat(&logits, t, e), mat_mut(weights, t, k));
                        done(kernels.route(Route {
                            logits,
                            choice,
                            k,
                            scale: 1.5,
                            experts,
                            weights,
                        }));
                    });
                });
            }
        }
    }
}

fn moe(pair: &Pair<'_>, rng: &mut Rng) {
    for (t, (d, inner)) in
        TOKENS.into_iter().zip([(256, 128), (64, 34), (130, 40)].into_iter().cycle())
    {
        let (n, k) = ([16, 5, 9][t % 3], 4);
        let formats = [WeightFormat::Fp4Group32, WeightFormat::Bf16, WeightFormat::Fp8Block128];
        let experts: Vec<[Matrix; 3]> = (0..=n)
            .map(|e| {
                let format = formats[e % 3];
                [(inner, d), (d, inner), (inner, d)].map(|(r, c)| Matrix::random(rng, format, r, c))
            })
            .collect();
        let x = rng.bf16s(t * d);
        let weights: Vec<f32> = (0..t * k).map(|_| rng.unit().abs()).collect();
        // Repeated experts of one token are allowed.
        let chosen: Vec<i32> = (0..t * k).map(|_| rng.below(n) as i32).collect();
        for (quant, rounding) in
            [(ActQuant::Q8Group128, Rounding::Bf16), (ActQuant::None, Rounding::None)]
        {
            pair.compare(
                &format!("moe {t} x {d} x {inner}, {quant:?}"),
                &[t * d],
                |kernels, out| {
                    let packed: Vec<ExpertWeights> = experts
                        .iter()
                        .map(|[w1, w2, w3]| ExpertWeights {
                            w1: w1.pack(kernels),
                            w2: w2.pack(kernels),
                            w3: w3.pack(kernels),
                        })
                        .collect();
                    done(kernels.moe(Moe {
                        x: mat(&x, t, d),
                        experts: TensorRef::from_i32(&chosen, t, k).expect("k experts a token"),
                        weights: mat(&weights, t, k),
                        routed: &packed[..n],
                        shared: &packed[n],
                        limit: 0.75,
                        quant,
                        rounding,
                        y: mat_mut(&mut out[0], t, d),
                    }));
                },
            );
        }
    }
}

/// NaN, infinities, huge and subnormal inputs: results agree, and a NaN appears in both or neither.
fn special_values(pair: &Pair<'_>, rng: &mut Rng) {
    let specials = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38, -1e-40, -0.0];
    let (t, k) = (14, 256);
    let mut x = rng.floats(t * k);
    for (i, row) in x.chunks_exact_mut(k).enumerate() {
        (0..=i % 3).for_each(|_| row[rng.below(k)] = specials[i % 6]);
    }
    let w = Matrix::random(rng, WeightFormat::Fp8Block128, 40, k);
    for quant in [ActQuant::None, ActQuant::Q8Group128] {
        let found =
            pair.compare_any(&format!("special linear {quant:?}"), &[t * 40], |kernels, out| {
                let (x, y) = (mat(&x, t, k), mat_mut(&mut out[0], t, 40));
                let (weight, groups, rounding) = (&w.pack(kernels), 1, Rounding::Bf16);
                done(kernels.linear(Linear { x, weight, groups, quant, rounding, y }));
            });
        assert!(found[0].iter().any(|v| v.is_nan()) && found[0].iter().any(|v| v.is_finite()));
    }
    pair.compare_any("special rms_norm", &[t * k], |kernels, out| {
        let (x, y) = (mat(&x, t, k), mat_mut(&mut out[0], t, k));
        let (dim, eps, rounding) = (128, 1e-6, Rounding::Bf16);
        done(kernels.rms_norm(RmsNorm { x, weight: None, dim, eps, rounding, y }));
    });
    special_rows(pair, rng, &x);
    let window = random_rows(rng, RowFormat::KvV4, 64, t);
    let mut q = rng.floats(t * 512);
    q.chunks_exact_mut(512).zip(&x).for_each(|(q, _)| q[rng.below(512)] = specials[rng.below(6)]);
    pair.compare_any("special attend", &[t * 512], |kernels, out| {
        let part = SeqPart { first: 0, count: t, start_pos: 0 };
        done(kernels.attend(Attend {
            q: mat(&q, t, 512),
            window_cache: window.cache(),
            window: &[SeqWindow { part, first_page_no: 0, pages: &window.list }],
            window_tokens: 128,
            compressed: None,
            sinks: &[0.5],
            scale: 512f32.powf(-0.5),
            rounding: Rounding::Bf16,
            out: mat_mut(&mut out[0], t, 512),
        }));
    });
}

/// Stored rows with such values, read back.
fn special_rows(pair: &Pair<'_>, rng: &mut Rng, x: &[f32]) {
    for (format, per_page) in ROW_FORMATS {
        let width = format.width();
        let count = x.len() / width;
        let seed = rng.bits();
        let pages = || Pages::new(&mut Rng::new(seed), format, per_page, count);
        let (got, want) = (pages(), pages());
        want.store(&pair.reference, 0, x);
        got.store(pair.tested, 0, x);
        // The payload of a NaN is free in formats that keep one.
        let sources: Vec<_> = (0..count).map(|i| want.target(i)).collect();
        let load = |pages: &Pages| {
            pair.compare_any(
                &format!("special rows {format:?}"),
                &[count * width],
                |kernels, out| {
                    let rows = mat_mut(&mut out[0], count, width);
                    done(kernels.load_rows(LoadRows {
                        cache: pages.cache(),
                        sources: &sources,
                        rows,
                    }));
                },
            )
        };
        let (mut got, mut want) = (load(&got), load(&want));
        if format == RowFormat::IndexFp4 {
            // It has no NaN: one becomes the largest value with its own sign, which each processor
            // gives it as it likes.
            for value in got[0].iter_mut().chain(&mut want[0]) {
                *value = value.abs();
            }
        }
        super::same_bits(&format!("special store {format:?}"), &got[0], &want[0]);
    }
}
