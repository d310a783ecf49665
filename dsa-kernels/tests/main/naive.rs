//! Every operation against an independent computation in f64.
//!
//! Tolerances: FP32 sums are within 1e-6 of the sum of magnitudes, elementary functions within 1e-6
//! of the value, attention within 1e-5 of the weighted magnitudes (its scores are sums too).

use dsa_kernels::cpu::{CpuKernels, CpuReference};
use dsa_kernels::ops::*;
use dsa_kernels::testing::{Matrix, Rng, random_rows};
use dsa_kernels::{CpuDevice, Device, Place, TensorMut, TensorRef};

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

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|v| f64::from(*v)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

#[track_caller]
fn near(what: &str, got: f32, want: f64, tolerance: f64) {
    assert!((f64::from(got) - want).abs() <= tolerance, "{what}: {got}, {want} expected");
}

/// Values of a matrix by formulas of its format.
fn values(m: &Matrix) -> Vec<Vec<f64>> {
    let power = |b: u8| 2f64.powi(i32::from(b) - 127);
    let e4m3 = |c: u8| {
        let (e, m) = (i32::from(c >> 3 & 15), f64::from(c & 7));
        let v = if e == 0 { m * 2f64.powi(-9) } else { (1.0 + m / 8.0) * 2f64.powi(e - 7) };
        if c < 128 { v } else { -v }
    };
    let e2m1 = |c: u8| {
        let v = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(c & 7)];
        if c & 8 == 0 { v } else { -v }
    };
    let (n, k) = (m.rows, m.cols);
    let value = |r: usize, c: usize| match m.format {
        WeightFormat::Fp8Block128 => {
            e4m3(m.data[r * k + c]) * power(m.scales[r / 128 * k.div_ceil(128) + c / 128])
        }
        WeightFormat::Fp4Group32 => {
            let byte = m.data[(r * k + c) / 2];
            let code = if c.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
            e2m1(code) * power(m.scales[r * k.div_ceil(32) + c / 32])
        }
        WeightFormat::Bf16 => {
            let at = 2 * (r * k + c);
            f64::from(half::bf16::from_le_bytes([m.data[at], m.data[at + 1]]).to_f32())
        }
        WeightFormat::F32 => {
            let at = 4 * (r * k + c);
            f64::from(f32::from_le_bytes(m.data[at..at + 4].try_into().unwrap()))
        }
    };
    (0..n).map(|r| (0..k).map(|c| value(r, c)).collect()).collect()
}

const FORMATS: [WeightFormat; 4] =
    [WeightFormat::Fp8Block128, WeightFormat::Fp4Group32, WeightFormat::Bf16, WeightFormat::F32];

#[test]
fn linear_equals_the_product_with_dequantised_weights() {
    let rng = &mut Rng::new(11);
    for kernels in both() {
        for (n, k, groups, t) in [(130, 260, 1, 3), (48, 96, 3, 7), (5, 700, 1, 1)] {
            for format in FORMATS {
                let m = Matrix::random(rng, format, n, k);
                let (w, x) = (values(&m), rng.floats(t * groups * k));
                let (weight, mut y) = (m.pack(&*kernels), vec![0.0; t * n]);
                let a = Linear {
                    x: mat(&x, groups * k),
                    weight: &weight,
                    groups,
                    quant: ActQuant::None,
                    rounding: Rounding::None,
                    y: mat_mut(&mut y, n),
                };
                kernels.linear(a).unwrap();
                for (i, got) in y.iter().enumerate() {
                    let (token, row) = (i / n, i % n);
                    let from = (token * groups + row / (n / groups)) * k;
                    let x = wide(&x[from..from + k]);
                    let size: f64 = x.iter().zip(&w[row]).map(|(a, b)| (a * b).abs()).sum();
                    near(&format!("{format:?} {n}x{k}"), *got, dot(&x, &w[row]), 1e-6 * size);
                }
            }
        }
    }
}

#[test]
fn quantised_input_is_within_the_step_of_its_group() {
    let rng = &mut Rng::new(12);
    for kernels in both() {
        // An identity matrix shows the rounded input itself.
        let k = 300;
        let data: Vec<u8> = (0..k * k)
            .flat_map(|i| (if i / k == i % k { 1f32 } else { 0.0 }).to_le_bytes())
            .collect();
        let m = Matrix { format: WeightFormat::F32, rows: k, cols: k, data, scales: Vec::new() };
        let (x, mut y) = (rng.floats(k), vec![0.0; k]);
        let weight = m.pack(&*kernels);
        let a = Linear {
            x: mat(&x, k),
            weight: &weight,
            groups: 1,
            quant: ActQuant::Q8Group128,
            rounding: Rounding::None,
            y: mat_mut(&mut y, k),
        };
        kernels.linear(a).unwrap();
        for (x, y) in x.chunks(128).zip(y.chunks(128)) {
            let amax = x.iter().fold(0f64, |m, v| m.max(f64::from(v.abs())));
            let scale = 2f64.powi((amax / 448.0).log2().ceil() as i32);
            for (x, y) in x.iter().zip(y) {
                // Three mantissa bits: half a step is at most 1/16 of the value; below 2^-6 the
                // step is 2^-9.
                let bound = (f64::from(x.abs()) / 16.0).max(scale * 2f64.powi(-10));
                near("rounded input", *y, f64::from(*x), bound);
            }
        }
        assert_ne!(x, y, "rounding has moved something");
    }
}

#[test]
fn hyper_connections_equal_their_formulas() {
    let (rng, d, t) = (&mut Rng::new(13), 40, 11);
    for kernels in both() {
        let m = Matrix::random(rng, WeightFormat::F32, 24, 4 * d);
        let w = values(&m);
        let (base, scale, x) = (rng.floats(24), vec![0.5, 1.0, 2.0], rng.floats(t * 4 * d));
        let weights =
            HyperWeights { maps: m.pack(&*kernels), base: base.clone(), scale: scale.clone() };
        let (mut post, mut comb, mut y) = (vec![0.0; 4 * t], vec![0.0; 16 * t], vec![0.0; t * d]);
        let a = HyperPre {
            streams: mat(&x, 4 * d),
            weights: &weights,
            iters: 20,
            hc_eps: 1e-6,
            norm_eps: 1e-6,
            rounding: Rounding::None,
            post: mat_mut(&mut post, 4),
            comb: mat_mut(&mut comb, 16),
            y: mat_mut(&mut y, d),
        };
        kernels.hyper_pre(a).unwrap();
        for token in 0..t {
            let x = wide(&x[token * 4 * d..(token + 1) * 4 * d]);
            let factor = 1.0 / (dot(&x, &x) / (4 * d) as f64 + 1e-6).sqrt();
            let part = [0, 1, 2].map(|p| f64::from(scale[p]));
            let z: Vec<f64> = (0..24)
                .map(|i| dot(&x, &w[i]) * factor * part[(i / 4).min(2)] + f64::from(base[i]))
                .collect();
            let sigmoid = |v: f64| 1.0 / (1.0 + (-v).exp());
            let mut c = [[0f64; 4]; 4];
            for j in 0..4 {
                let row: Vec<f64> = (0..4).map(|k| z[8 + 4 * j + k].exp()).collect();
                (0..4).for_each(|k| c[j][k] = row[k] / row.iter().sum::<f64>() + 1e-6);
            }
            for round in 0..20 {
                if round > 0 {
                    for row in &mut c {
                        let sum = row.iter().sum::<f64>() + 1e-6;
                        row.iter_mut().for_each(|v| *v /= sum);
                    }
                }
                for k in 0..4 {
                    let sum = (0..4).map(|j| c[j][k]).sum::<f64>() + 1e-6;
                    c.iter_mut().for_each(|row| row[k] /= sum);
                }
            }
            for j in 0..4 {
                near("post", post[4 * token + j], 2.0 * sigmoid(z[4 + j]), 5e-6);
                (0..4).for_each(|k| near("comb", comb[16 * token + 4 * j + k], c[j][k], 5e-6));
            }
            for i in 0..d {
                let want: f64 = (0..4).map(|j| (sigmoid(z[j]) + 1e-6) * x[j * d + i]).sum();
                near("y", y[token * d + i], want, 1e-4);
            }
        }
    }
}

#[test]
fn norm_and_rotation_equal_their_formulas() {
    let (rng, t) = (&mut Rng::new(14), 5);
    for kernels in both() {
        let (x, w, mut y) = (rng.floats(t * 96), rng.floats(48), vec![0.0; t * 96]);
        let a = RmsNorm {
            x: mat(&x, 96),
            weight: Some(&w),
            dim: 48,
            eps: 1e-6,
            rounding: Rounding::None,
            y: mat_mut(&mut y, 96),
        };
        kernels.rms_norm(a).unwrap();
        for (x, y) in x.chunks(48).zip(y.chunks(48)) {
            let x = wide(x);
            let factor = 1.0 / (dot(&x, &x) / 48.0 + 1e-6).sqrt();
            for i in 0..48 {
                near("norm", y[i], x[i] * factor * f64::from(w[i]), 2e-6 * (x[i] * factor).abs());
            }
        }
        let positions = [0u32, 1, 77, 65_535, 1_000_003];
        let freqs: Vec<f32> = (0..32).map(|k| 10000f32.powf(-(k as f32) / 32.0)).collect();
        let mut table = vec![0.0; 64 * t];
        let a = RopeTable { positions: &positions, freqs: &freqs, table: mat_mut(&mut table, 64) };
        kernels.rope_table(a).unwrap();
        let x = rng.floats(t * 128);
        let mut turned = x.clone();
        let a = Rope {
            x: mat_mut(&mut turned, 128),
            dim: 128,
            table: mat(&table, 64),
            inverse: true,
            rounding: Rounding::None,
        };
        kernels.rope(a).unwrap();
        for (p, (x, y)) in positions.iter().zip(x.chunks(128).zip(turned.chunks(128))) {
            assert_eq!(x[..64], y[..64]);
            for k in 0..32 {
                let angle = -f64::from(*p as f32 * freqs[k]);
                let (a, b) = (f64::from(x[64 + 2 * k]), f64::from(x[65 + 2 * k]));
                let bound = 1e-6 * (a.abs() + b.abs());
                near("even", y[64 + 2 * k], a * angle.cos() - b * angle.sin(), bound);
                near("odd", y[65 + 2 * k], a * angle.sin() + b * angle.cos(), bound);
            }
        }
    }
}

#[test]
fn attention_equals_a_direct_softmax() {
    let rng = &mut Rng::new(15);
    for kernels in both() {
        for (start, count, heads, ratio) in [(0, 5, 3, 4), (130, 9, 4, 4), (255, 2, 1, 128)] {
            let rows = start + count;
            let window = random_rows(rng, RowFormat::KvV4, 64, rows);
            let far = random_rows(rng, RowFormat::KvV4, 2, rows / ratio + 1);
            let load = |pages: &dsa_kernels::testing::Pages, n: usize| -> Vec<Vec<f64>> {
                let sources: Vec<RowTarget> = (0..n).map(|i| pages.target(i)).collect();
                let mut out = vec![0.0; n * 512];
                let rows = mat_mut(&mut out, 512);
                kernels
                    .load_rows(LoadRows { cache: pages.cache(), sources: &sources, rows })
                    .unwrap();
                out.chunks(512).map(wide).collect()
            };
            let (near_rows, far_rows) = (load(&window, rows), load(&far, rows / ratio + 1));
            let (q, sinks) = (rng.floats(count * heads * 512), rng.floats(heads));
            let mut out = vec![0.0; q.len()];
            let part = SeqPart { first: 0, count, start_pos: start as u32 };
            let seqs = [SeqRows { part, pages: &far.list }];
            let a = Attend {
                q: mat(&q, heads * 512),
                window_cache: window.cache(),
                window: &[SeqWindow { part, first_page_no: 0, pages: &window.list }],
                window_tokens: 128,
                compressed: Some(CompressedRows {
                    cache: far.cache(),
                    seqs: &seqs,
                    selection: Selection::All { ratio: ratio as u32 },
                }),
                sinks: &sinks,
                scale: 512f32.powf(-0.5),
                rounding: Rounding::None,
                out: mat_mut(&mut out, heads * 512),
            };
            kernels.attend(a).unwrap();
            for (i, (q, out)) in q.chunks(512).zip(out.chunks(512)).enumerate() {
                let (p, q) = (start + i / heads, wide(q));
                let first = p.saturating_sub(127);
                let visible: Vec<&Vec<f64>> =
                    near_rows[first..=p].iter().chain(&far_rows[..(p + 1) / ratio]).collect();
                let e: Vec<f64> =
                    visible.iter().map(|r| (dot(&q, r) / 512f64.sqrt()).exp()).collect();
                let sum: f64 = e.iter().sum::<f64>() + f64::from(sinks[i % heads]).exp();
                for c in 0..512 {
                    let want = e.iter().zip(&visible).map(|(e, r)| e * r[c]).sum::<f64>() / sum;
                    let size =
                        e.iter().zip(&visible).map(|(e, r)| e * r[c].abs()).sum::<f64>() / sum;
                    near("attention", out[c], want, 1e-5 * size + 1e-7);
                }
            }
        }
    }
}

#[test]
fn index_scores_equal_their_formula_and_the_best_are_chosen() {
    let (rng, heads, t, start) = (&mut Rng::new(16), 5, 7, 90u32);
    for kernels in both() {
        let keys = random_rows(rng, RowFormat::IndexF32, 64, 30);
        let sources: Vec<RowTarget> = (0..30).map(|i| keys.target(i)).collect();
        let mut loaded = vec![0.0; 30 * 128];
        let rows = mat_mut(&mut loaded, 128);
        kernels.load_rows(LoadRows { cache: keys.cache(), sources: &sources, rows }).unwrap();
        let (q, w) = (rng.floats(t * heads * 128), rng.floats(t * heads));
        let (mut chosen, mut scores) = (vec![0; t * 6], vec![0.0; t * 30]);
        let part = SeqPart { first: 0, count: t, start_pos: start };
        let a = IndexSelect {
            q: mat(&q, heads * 128),
            w: mat(&w, heads),
            keys: keys.cache(),
            seqs: &[SeqRows { part, pages: &keys.list }],
            top_k: 6,
            selected: TensorMut::from_i32(&mut chosen, t, 6).unwrap(),
            scores: Some(mat_mut(&mut scores, 30)),
        };
        kernels.index_select(a).unwrap();
        for token in 0..t {
            let visible = (start as usize + token + 1) / 4;
            let row = &scores[token * 30..(token + 1) * 30];
            for (i, got) in row[..visible].iter().enumerate() {
                let key = wide(&loaded[i * 128..(i + 1) * 128]);
                let want: f64 = (0..heads)
                    .map(|h| {
                        let q = wide(&q[(token * heads + h) * 128..][..128]);
                        dot(&q, &key).max(0.0) * f64::from(w[token * heads + h])
                    })
                    .sum();
                near("score", *got, want, 2e-4);
            }
            assert!(row[visible..].iter().all(|s| *s == f32::NEG_INFINITY));
            let mut order: Vec<i32> = (0..visible as i32).collect();
            order.sort_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]));
            order.truncate(6);
            order.sort_unstable();
            assert_eq!(chosen[token * 6..(token + 1) * 6], order);
        }
    }
}

#[test]
fn pooling_equals_a_softmax_over_each_window() {
    let (rng, n) = (&mut Rng::new(17), 263);
    for kernels in both() {
        for (pooling, dim) in [(Pooling::C4, 9), (Pooling::C128, 10)] {
            let (cols, ratio) = (pooling.cols(dim), pooling.ratio() as usize);
            let (kv, gate, ape) =
                (rng.floats(n * cols), rng.floats(n * cols), rng.floats(ratio * cols));
            let carry =
                CpuDevice::new().alloc(Place::Host, pooling.carry_bytes(dim) as u64).unwrap();
            let mut rows = vec![0.0; n / ratio * dim];
            let part = SeqPart { first: 0, count: n, start_pos: 0 };
            let a = Compress {
                kv: mat(&kv, cols),
                gate: mat(&gate, cols),
                ape: &ape,
                pooling,
                dim,
                carry: &carry,
                seqs: &[CompressSeq { part, carry_offset: 0, first_row: 0 }],
                rounding: Rounding::None,
                rows: mat_mut(&mut rows, dim),
            };
            kernels.compress(a).unwrap();
            for (i, row) in rows.chunks(dim).enumerate() {
                for (c, got) in row.iter().enumerate() {
                    let slot = |t: usize, col: usize| {
                        let score = f64::from(gate[t * cols + col])
                            + f64::from(ape[t % ratio * cols + col]);
                        (score.exp(), f64::from(kv[t * cols + col]))
                    };
                    let own = (i * ratio..(i + 1) * ratio)
                        .map(|t| slot(t, if pooling == Pooling::C4 { dim + c } else { c }));
                    let slots: Vec<(f64, f64)> = if pooling == Pooling::C4 && i > 0 {
                        ((i - 1) * 4..i * 4).map(|t| slot(t, c)).chain(own).collect()
                    } else {
                        own.collect()
                    };
                    let sum: f64 = slots.iter().map(|s| s.0).sum();
                    let want = slots.iter().map(|s| s.0 * s.1).sum::<f64>() / sum;
                    near(&format!("{pooling:?} row {i}"), *got, want, 1e-5 * want.abs().max(1.0));
                }
            }
        }
    }
}

/// `y += w2 . (weight * silu(min(w1 . x, limit)) * clamp(w3 . x, limit))`.
fn add_expert(y: &mut [f64], x: &[f64], matrices: &[Matrix; 3], weight: f64, limit: f64) {
    let [w1, w2, w3] = [0, 1, 2].map(|i| values(&matrices[i]));
    let gated = |(w1, w3): (&Vec<f64>, &Vec<f64>)| {
        let (g, u) = (dot(x, w1).min(limit), dot(x, w3).clamp(-limit, limit));
        weight * g / (1.0 + (-g).exp()) * u
    };
    let h: Vec<f64> = w1.iter().zip(&w3).map(gated).collect();
    y.iter_mut().zip(&w2).for_each(|(y, w)| *y += dot(&h, w));
}

#[test]
fn router_and_experts_equal_their_formulas() {
    let (rng, t, d, inner, n, k) = (&mut Rng::new(18), 6, 64, 32, 5, 2);
    for kernels in both() {
        let (logits, bias) = (rng.floats(t * n), rng.floats(n));
        let (mut chosen, mut weights) = (vec![0; t * k], vec![0.0; t * k]);
        let a = Route {
            logits: mat(&logits, n),
            choice: Choice::Biased(&bias),
            k,
            scale: 1.5,
            experts: TensorMut::from_i32(&mut chosen, t, k).unwrap(),
            weights: mat_mut(&mut weights, k),
        };
        kernels.route(a).unwrap();
        for token in 0..t {
            let s: Vec<f64> =
                wide(&logits[token * n..][..n]).iter().map(|z| z.exp().ln_1p().sqrt()).collect();
            let mut order: Vec<usize> = (0..n).collect();
            order.sort_by(|a, b| {
                (s[*b] + f64::from(bias[*b])).total_cmp(&(s[*a] + f64::from(bias[*a])))
            });
            let sum: f64 = order[..k].iter().map(|e| s[*e]).sum();
            for (slot, e) in order[..k].iter().enumerate() {
                assert_eq!(chosen[token * k + slot], *e as i32);
                near("weight", weights[token * k + slot], s[*e] / sum * 1.5, 1e-6);
            }
        }
        let all: Vec<[Matrix; 3]> = (0..=n)
            .map(|e| {
                [(inner, d), (d, inner), (inner, d)]
                    .map(|(r, c)| Matrix::random(rng, FORMATS[e % 4], r, c))
            })
            .collect();
        let packed: Vec<ExpertWeights> = all
            .iter()
            .map(|[a, b, c]| {
                let [w1, w2, w3] = [a, b, c].map(|m| m.pack(&*kernels));
                ExpertWeights { w1, w2, w3 }
            })
            .collect();
        let (x, mut y) = (rng.floats(t * d), vec![0.0; t * d]);
        let a = Moe {
            x: mat(&x, d),
            experts: TensorRef::from_i32(&chosen, t, k).unwrap(),
            weights: mat(&weights, k),
            routed: &packed[..n],
            shared: &packed[n],
            limit: 0.5,
            quant: ActQuant::None,
            rounding: Rounding::None,
            y: mat_mut(&mut y, d),
        };
        kernels.moe(a).unwrap();
        for token in 0..t {
            let x = wide(&x[token * d..][..d]);
            let mut want = vec![0.0; d];
            let routed = (0..k).map(|s| (chosen[token * k + s] as usize, weights[token * k + s]));
            for (e, weight) in routed.chain([(n, 1.0)]) {
                add_expert(&mut want, &x, &all[e], f64::from(weight), 0.5);
            }
            (0..d).for_each(|i| near("moe", y[token * d + i], want[i], 1e-5));
        }
    }
}
