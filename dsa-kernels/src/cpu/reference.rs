//! The definition of every operation: plain scalar loops in one fixed order.
//!
//! Orders that the fast version keeps:
//! - linear: each output is `acc = fma(x[k], w[k], acc)`, k ascending from 0;
//! - attention scores, sums of squares: eight lanes and a tree, [`crate::math::dot`];
//! - softmax denominators: eight lanes over the visible rows (window ascending, then compressed
//!   ascending), [`crate::math::sum`], then the sink;
//! - attention values: per channel, rows in the same order, fused;
//! - index scores: per row and head like a linear (k ascending, fused), then over heads ascending
//!   `score = fma(relu(dot), w, score)`; relu passes NaN on;
//! - routed experts: ascending expert number, then the shared expert.

#![forbid(unsafe_code)]

use super::{body, compress, pack, rows};
use crate::error::KernelError;
use crate::math;
use crate::ops::{
    Attend, Choice, Compress, Embed, ExpertWeights, HyperHead, HyperPost, HyperPre, IndexQuery,
    IndexSelect, Kernels, Linear, LoadRows, Moe, PackedWeight, RmsNorm, Rope, RopeTable, Rounding,
    Route, StoreRows, Weight, WeightDesc, rows_complete,
};
use std::any::Any;
use std::sync::Arc;

/// The reference implementation. One thread, no tuning.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuReference;

/// A de-quantised matrix, row-major.
#[derive(Debug)]
struct ReferenceWeight {
    rows: usize,
    cols: usize,
    values: Vec<f32>,
}

impl PackedWeight for ReferenceWeight {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn bytes(&self) -> usize {
        4 * self.values.len()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn own<'a>(op: &'static str, weight: &'a Weight) -> Result<&'a ReferenceWeight, KernelError> {
    weight.as_any().downcast_ref().ok_or(KernelError::ForeignWeight { op })
}

/// `sum_k x[k] * w[k]`, k ascending, fused.
fn ascending_dot(x: &[f32], w: &[f32]) -> f32 {
    x.iter().zip(w).fold(0.0, |acc, (x, w)| x.mul_add(*w, acc))
}

impl ReferenceWeight {
    fn row(&self, n: usize) -> &[f32] {
        &self.values[n * self.cols..(n + 1) * self.cols]
    }

    /// `round(W x)`.
    fn times(&self, x: &[f32], rounding: Rounding) -> Vec<f32> {
        (0..self.rows).map(|n| rounding.apply(ascending_dot(x, self.row(n)))).collect()
    }
}

/// One expert on one quantised token.
fn expert(a: &Moe<'_>, e: &ExpertWeights, x: &[f32], weight: f32) -> Result<Vec<f32>, KernelError> {
    let (w1, w2, w3) = (own("moe", &e.w1)?, own("moe", &e.w2)?, own("moe", &e.w3)?);
    let mut h = w1.times(x, a.rounding);
    let up = w3.times(x, a.rounding);
    body::gated(&mut h, &up, weight, a.limit, a.rounding);
    let inner = h.len();
    body::quantise_row(&mut h, inner, a.quant);
    Ok(w2.times(&h, a.rounding))
}

/// Visible rows of one query, de-quantised one after the other.
fn visible_rows(a: &Attend<'_>, seq: usize, t: usize) -> Result<Vec<f32>, KernelError> {
    let window = &a.window[seq];
    let p = window.part.start_pos + (t - window.part.first) as u32;
    let mut found = Vec::new();
    let mut row = [0f32; 512];
    for position in p.saturating_sub(a.window_tokens - 1)..=p {
        let (page, at) = window.row(position, a.window_cache.rows_per_page);
        rows::load("attend", &a.window_cache, page, at, &mut row)?;
        found.extend_from_slice(&row);
    }
    if let Some(c) = &a.compressed {
        for i in body::chosen_rows(&c.selection, t, p)? {
            let (page, at) = c.seqs[seq].row(i, c.cache.rows_per_page);
            rows::load("attend", &c.cache, page, at, &mut row)?;
            found.extend_from_slice(&row);
        }
    }
    Ok(found)
}

impl Kernels for CpuReference {
    fn pack(&self, desc: &WeightDesc<'_>) -> Result<Weight, KernelError> {
        desc.check()?;
        let mut values = vec![0.0; desc.rows * desc.cols];
        for (n, row) in values.chunks_exact_mut(desc.cols).enumerate() {
            pack::dequantise_row(desc, n, row);
        }
        Ok(Arc::new(ReferenceWeight { rows: desc.rows, cols: desc.cols, values }))
    }

    fn embed(&self, mut a: Embed<'_>) -> Result<(), KernelError> {
        a.check()?;
        let table = own("embed", a.table)?;
        let d = table.cols;
        for (id, streams) in a.ids.iter().zip(a.streams.f32()?.chunks_exact_mut(4 * d)) {
            for stream in streams.chunks_exact_mut(d) {
                stream.copy_from_slice(table.row(*id as usize));
            }
        }
        Ok(())
    }

    fn hyper_pre(&self, mut a: HyperPre<'_>) -> Result<(), KernelError> {
        a.check()?;
        let (maps, d) = (own("hyper_pre", &a.weights.maps)?, a.y.cols());
        let (post, comb, y) = (a.post.f32()?, a.comb.f32()?, a.y.f32()?);
        for (t, x) in a.streams.f32()?.chunks_exact(4 * d).enumerate() {
            let factor = body::rms_factor(x, a.norm_eps);
            let z = std::array::from_fn(|n| [ascending_dot(x, maps.row(n)) * factor]);
            let (base, scale) = (&a.weights.base, &a.weights.scale);
            let m = body::hyper_maps::<1>(&z, base, scale, a.iters, a.hc_eps);
            post[4 * t..4 * t + 4].copy_from_slice(m.post.as_flattened());
            comb[16 * t..16 * t + 16].copy_from_slice(m.comb.as_flattened());
            let pre = m.pre.map(|[v]| v);
            body::hyper_collapse(pre, x, a.rounding, &mut y[d * t..d * (t + 1)]);
        }
        Ok(())
    }

    fn hyper_post(&self, mut a: HyperPost<'_>) -> Result<(), KernelError> {
        a.check()?;
        let d = a.out.cols();
        let (out, post, comb) = (a.out.f32()?, a.post.f32()?, a.comb.f32()?);
        if d == 0 {
            return Ok(());
        }
        for (t, x) in a.streams.f32()?.chunks_exact_mut(4 * d).enumerate() {
            let (post, comb) = (&post[4 * t..4 * t + 4], &comb[16 * t..16 * t + 16]);
            body::hyper_post(x, &out[d * t..d * (t + 1)], post, comb, a.rounding);
        }
        Ok(())
    }

    fn hyper_head(&self, mut a: HyperHead<'_>) -> Result<(), KernelError> {
        a.check()?;
        let (maps, d) = (own("hyper_head", &a.weights.maps)?, a.y.cols());
        let y = a.y.f32()?;
        for (x, y) in a.streams.f32()?.chunks_exact(4 * d).zip(y.chunks_exact_mut(d)) {
            let factor = body::rms_factor(x, a.norm_eps);
            let z = std::array::from_fn(|n| ascending_dot(x, maps.row(n)) * factor);
            let gates = body::head_gates(z, &a.weights.base, a.weights.scale[0], a.hc_eps);
            body::hyper_collapse(gates, x, a.rounding, y);
        }
        Ok(())
    }

    fn rms_norm(&self, mut a: RmsNorm<'_>) -> Result<(), KernelError> {
        a.check()?;
        let y = a.y.f32()?;
        for (x, y) in a.x.f32()?.chunks_exact(a.dim).zip(y.chunks_exact_mut(a.dim)) {
            body::rms_norm(x, a.weight, a.eps, a.rounding, y);
        }
        Ok(())
    }

    fn linear(&self, mut a: Linear<'_>) -> Result<(), KernelError> {
        a.check()?;
        let w = own("linear", a.weight)?;
        let (n, k) = (w.rows, w.cols);
        let y = a.y.f32()?;
        for (x, y) in a.x.f32()?.chunks_exact(a.groups * k).zip(y.chunks_exact_mut(n)) {
            let mut x = x.to_vec();
            body::quantise_row(&mut x, k, a.quant);
            for (i, y) in y.iter_mut().enumerate() {
                let group = i / (n / a.groups);
                let acc = ascending_dot(&x[group * k..(group + 1) * k], w.row(i));
                *y = a.rounding.apply(acc);
            }
        }
        Ok(())
    }

    fn rope_table(&self, mut a: RopeTable<'_>) -> Result<(), KernelError> {
        a.check()?;
        for (p, row) in a.positions.iter().zip(a.table.f32()?.chunks_exact_mut(64)) {
            for (k, f) in a.freqs.iter().enumerate() {
                let angle = f64::from(*p as f32 * f);
                row[k] = libm::cos(angle) as f32;
                row[32 + k] = libm::sin(angle) as f32;
            }
        }
        Ok(())
    }

    fn rope(&self, mut a: Rope<'_>) -> Result<(), KernelError> {
        a.check()?;
        let (cols, table) = (a.x.cols(), a.table.f32()?);
        for (t, head) in a.x.f32()?.chunks_exact_mut(a.dim).enumerate() {
            let row = t / (cols / a.dim);
            body::rope(head, &table[64 * row..64 * (row + 1)], a.inverse, a.rounding);
        }
        Ok(())
    }

    fn index_query(&self, mut a: IndexQuery<'_>) -> Result<(), KernelError> {
        a.check()?;
        let (heads, table) = (a.q.cols() / 128, a.table.f32()?);
        for (i, head) in a.q.f32()?.as_chunks_mut::<128>().0.iter_mut().enumerate() {
            let row = i / heads;
            body::index_query(head, &table[64 * row..64 * (row + 1)], a.kind);
        }
        Ok(())
    }

    fn store_rows(&self, a: StoreRows<'_>) -> Result<(), KernelError> {
        a.check()?;
        let width = a.rows.cols();
        let mut row = vec![0.0; width];
        for (values, target) in a.rows.f32()?.chunks_exact(width).zip(a.targets) {
            row.copy_from_slice(values);
            rows::store("store_rows", &a.cache, target.page, target.row, &mut row)?;
        }
        Ok(())
    }

    fn load_rows(&self, mut a: LoadRows<'_>) -> Result<(), KernelError> {
        a.check()?;
        let width = a.rows.cols();
        for (row, source) in a.rows.f32()?.chunks_exact_mut(width).zip(a.sources) {
            rows::load("load_rows", &a.cache, source.page, source.row, row)?;
        }
        Ok(())
    }

    fn compress(&self, mut a: Compress<'_>) -> Result<(), KernelError> {
        a.check()?;
        let (kv, gate) = (a.kv.f32()?, a.gate.f32()?);
        let (ape, dim, carry, rounding) = (a.ape, a.dim, a.carry, a.rounding);
        let inputs = compress::Inputs { kv, gate, ape, dim, carry, rounding };
        let out = a.rows.f32()?;
        for seq in a.seqs {
            compress::run(&inputs, a.pooling, seq, 0..dim, |row, values| {
                out[row * dim..(row + 1) * dim].copy_from_slice(values);
            })?;
        }
        Ok(())
    }

    fn index_select(&self, mut a: IndexSelect<'_>) -> Result<(), KernelError> {
        a.check()?;
        let (q, w, heads) = (a.q.f32()?, a.w.f32()?, a.w.cols());
        let selected = a.selected.i32()?;
        let mut dump = match &mut a.scores {
            Some(s) => {
                let cols = s.cols();
                let all = s.f32()?;
                all.fill(f32::NEG_INFINITY);
                Some((cols, all))
            }
            None => None,
        };
        let mut sort = Vec::new();
        for seq in a.seqs {
            let mut keys = vec![0.0; 128 * rows_complete(seq.part.end_pos(), 4) as usize];
            for (i, key) in keys.chunks_exact_mut(128).enumerate() {
                let (page, row) = seq.row(i as u32, a.keys.rows_per_page);
                rows::load("index_select", &a.keys, page, row, key)?;
            }
            for i in 0..seq.part.count {
                let t = seq.part.first + i;
                let visible = rows_complete(seq.part.start_pos + i as u32 + 1, 4) as usize;
                let (q, w) = (&q[t * heads * 128..], &w[t * heads..(t + 1) * heads]);
                let score = |key: &[f32]| {
                    w.iter().zip(q.chunks_exact(128)).fold(0.0, |acc, (w, q)| {
                        let dot = ascending_dot(q, key);
                        (if 0.0 > dot { 0.0 } else { dot }).mul_add(*w, acc)
                    })
                };
                let scores: Vec<f32> = keys.chunks_exact(128).take(visible).map(score).collect();
                let chosen = &mut selected[t * a.top_k..(t + 1) * a.top_k];
                body::select_top_k(&scores, chosen, &mut sort);
                if let Some((cols, all)) = &mut dump {
                    all[t * *cols..][..visible].copy_from_slice(&scores);
                }
            }
        }
        Ok(())
    }

    fn attend(&self, mut a: Attend<'_>) -> Result<(), KernelError> {
        a.check()?;
        let (q, heads) = (a.q.f32()?, a.sinks.len());
        let parts: Vec<_> = a.window.iter().map(|s| s.part).enumerate().collect();
        for (seq, part) in parts {
            for t in part.first..part.first + part.count {
                let visible = visible_rows(&a, seq, t)?;
                let out = a.out.f32()?;
                for h in 0..heads {
                    let at = (t * heads + h) * 512;
                    let q = &q[at..at + 512];
                    let score = |row: &[f32]| math::dot(q, row) * a.scale;
                    let mut terms: Vec<f32> = visible.chunks_exact(512).map(score).collect();
                    let denominator = body::softmax_terms(&mut terms, a.sinks[h]);
                    let out = &mut out[at..at + 512];
                    out.fill(0.0);
                    for (e, row) in terms.iter().zip(visible.chunks_exact(512)) {
                        let e = a.rounding.apply(*e);
                        for (o, v) in out.iter_mut().zip(row) {
                            *o = e.mul_add(*v, *o);
                        }
                    }
                    for o in out {
                        *o = a.rounding.apply(*o / denominator);
                    }
                }
            }
        }
        Ok(())
    }

    fn route(&self, mut a: Route<'_>) -> Result<(), KernelError> {
        a.check()?;
        let (e, k) = (a.logits.cols(), a.k);
        let (experts, weights) = (a.experts.i32()?, a.weights.f32()?);
        for (t, logits) in a.logits.f32()?.chunks_exact(e).enumerate() {
            let scores: Vec<f32> = logits.iter().map(|z| math::softplus(*z).sqrt()).collect();
            let chosen = &mut experts[t * k..(t + 1) * k];
            match a.choice {
                Choice::Biased(bias) => body::choose_experts(&scores, bias, chosen),
                Choice::Hash { table, ids } => {
                    let from = ids[t] as usize * k;
                    for (c, e) in chosen.iter_mut().zip(&table[from..from + k]) {
                        *c = *e as i32;
                    }
                }
            }
            body::route_weights(&scores, chosen, a.scale, &mut weights[t * k..(t + 1) * k]);
        }
        Ok(())
    }

    fn moe(&self, mut a: Moe<'_>) -> Result<(), KernelError> {
        a.check()?;
        let (d, k) = (a.x.cols(), a.experts.cols());
        let (chosen, weights) = (a.experts.i32()?, a.weights.f32()?);
        for (t, x) in a.x.f32()?.chunks_exact(d).enumerate() {
            let mut x = x.to_vec();
            body::quantise_row(&mut x, d, a.quant);
            let mut slots: Vec<usize> = (t * k..(t + 1) * k).collect();
            slots.sort_by_key(|s| chosen[*s]);
            let mut sum = vec![0.0; d];
            for s in slots {
                let routed = expert(&a, &a.routed[chosen[s] as usize], &x, weights[s])?;
                sum.iter_mut().zip(&routed).for_each(|(y, r)| *y += r);
            }
            let shared = expert(&a, a.shared, &x, 1.0)?;
            let y = &mut a.y.f32()?[t * d..(t + 1) * d];
            for ((y, s), r) in y.iter_mut().zip(&sum).zip(&shared) {
                *y = a.rounding.apply(s + r);
            }
        }
        Ok(())
    }
}
