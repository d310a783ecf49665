//! Operations on single rows and tokens: the shared bodies, compiled for AVX2 and spread over
//! threads.
//!
//! Every `pub(crate) unsafe fn` here asks for the same: the machine has AVX2, FMA and F16C.

#![expect(unsafe_code, reason = "vector instructions, and outputs filled by several threads")]

use super::gemm::{self, Input, Product};
use super::rows::load_row;
use super::team::{Parts, Scratch, Team};
use crate::cpu::{body, compress as pooling, rows};
use crate::error::KernelError;
use crate::math;
use crate::ops::{
    Choice, Compress, CompressSeq, Embed, HyperHead, HyperPost, HyperPre, HyperWeights, IndexQuery,
    LoadRows, PagedCache, Pooling, RmsNorm, Rope, RopeTable, Rounding, Route, RowTarget, StoreRows,
};
use std::ops::Range;

type Done = Result<(), KernelError>;

pub(crate) unsafe fn embed(team: &Team, mut a: Embed<'_>) -> Done {
    a.check()?;
    let table = gemm::own("embed", a.table)?;
    let (d, ids) = (a.table.cols(), a.ids);
    let streams = Parts::new(a.streams.f32()?);
    team.run_rows(ids.len(), 1, 4 * d, |tokens| {
        // SAFETY: each task has its own tokens.
        let out = unsafe { streams.range(tokens.start * 4 * d..tokens.end * 4 * d) };
        for (id, out) in ids[tokens].iter().zip(out.chunks_exact_mut(4 * d)) {
            let (first, rest) = out.split_at_mut(d);
            table.copy_row(*id as usize, first);
            rest.chunks_exact_mut(d).for_each(|s| s.copy_from_slice(first));
        }
        Ok(())
    })
}

#[target_feature(enable = "avx2,fma,f16c")]
fn rms_rows(a: &RmsNorm<'_>, x: &[f32], y: &mut [f32]) {
    for (x, y) in x.chunks_exact(a.dim).zip(y.chunks_exact_mut(a.dim)) {
        body::rms_norm(x, a.weight, a.eps, a.rounding, y);
    }
}

pub(crate) unsafe fn rms_norm(team: &Team, mut a: RmsNorm<'_>) -> Done {
    a.check()?;
    let (cols, count, x) = (a.x.cols(), a.x.rows(), a.x.f32()?);
    let out = std::mem::replace(&mut a.y, crate::TensorMut::from_f32(&mut [], 0, 0)?);
    let y = Parts::new(out.into_f32()?);
    team.run_rows(count, 1, cols / 4, |r| {
        let span = r.start * cols..r.end * cols;
        // SAFETY: each task has its own rows; CPU features are the caller's promise.
        unsafe { rms_rows(&a, &x[span.clone()], y.range(span)) };
        Ok(())
    })
}

#[target_feature(enable = "avx2,fma,f16c")]
fn rope_rows(x: &mut [f32], dim: usize, cols: usize, table: &[f32], inverse: bool, r: Rounding) {
    for (row, table) in x.chunks_exact_mut(cols).zip(table.chunks_exact(64)) {
        for head in row.chunks_exact_mut(dim) {
            body::rope(head, table, inverse, r);
        }
    }
}

pub(crate) unsafe fn rope(team: &Team, mut a: Rope<'_>) -> Done {
    a.check()?;
    let (cols, count, table) = (a.x.cols(), a.x.rows(), a.table.f32()?);
    let (dim, inverse, rounding) = (a.dim, a.inverse, a.rounding);
    if cols == 0 {
        return Ok(());
    }
    let x = Parts::new(a.x.f32()?);
    team.run_rows(count, 1, cols / dim * 40, |r| {
        // SAFETY: each task has its own rows; CPU features are the caller's promise.
        unsafe {
            let rows = x.range(r.start * cols..r.end * cols);
            rope_rows(rows, dim, cols, &table[64 * r.start..], inverse, rounding);
        }
        Ok(())
    })
}

pub(crate) unsafe fn rope_table(team: &Team, mut a: RopeTable<'_>) -> Done {
    a.check()?;
    let (positions, freqs) = (a.positions, a.freqs);
    let table = Parts::new(a.table.f32()?);
    team.run_rows(positions.len(), 1, 2500, |r| {
        // SAFETY: each task has its own rows.
        let out = unsafe { table.range(64 * r.start..64 * r.end) };
        for (p, row) in positions[r].iter().zip(out.chunks_exact_mut(64)) {
            for (k, f) in freqs.iter().enumerate() {
                let (sin, cos) = libm::sincos(f64::from(*p as f32 * f));
                (row[k], row[32 + k]) = (cos as f32, sin as f32);
            }
        }
        Ok(())
    })
}

#[target_feature(enable = "avx2,fma,f16c")]
fn index_rows(q: &mut [f32], heads: usize, table: &[f32], kind: crate::ops::IndexRounding) {
    for (i, head) in q.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        body::index_query(head, &table[64 * (i / heads)..][..64], kind);
    }
}

pub(crate) unsafe fn index_query(team: &Team, mut a: IndexQuery<'_>) -> Done {
    a.check()?;
    let (cols, count, table, kind) = (a.q.cols(), a.q.rows(), a.table.f32()?, a.kind);
    let q = Parts::new(a.q.f32()?);
    team.run_rows(count, 1, 2 * cols, |r| {
        // SAFETY: each task has its own rows; CPU features are the caller's promise.
        unsafe {
            let rows = q.range(r.start * cols..r.end * cols);
            index_rows(rows, cols / 128, &table[64 * r.start..], kind);
        }
        Ok(())
    })
}

/// `z = (maps x) * factor` of a block of at most eight tokens, transposed into lanes.
///
/// # Safety
/// CPU features.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn hyper_lanes<const N: usize>(
    products: &[f32],
    streams: &[f32],
    cols: usize,
    norm_eps: f32,
) -> [[f32; 8]; N] {
    let mut z = [[0f32; 8]; N];
    for (l, (x, row)) in streams.chunks_exact(cols).zip(products.chunks_exact(N)).enumerate() {
        let factor = body::rms_factor(x, norm_eps);
        for (z, v) in z.iter_mut().zip(row) {
            z[l] = v * factor;
        }
    }
    z
}

#[target_feature(enable = "avx2,fma,f16c")]
fn maps_of_eight(z: &[[f32; 8]; 24], w: &HyperWeights, iters: u32, eps: f32) -> body::HyperMaps<8> {
    body::hyper_maps::<8>(z, &w.base, &w.scale, iters, eps)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn collapse(pre: [f32; 4], streams: &[f32], rounding: Rounding, y: &mut [f32]) {
    body::hyper_collapse(pre, streams, rounding, y);
}

/// Outputs of [`hyper_pre`] that its tasks share.
struct PreOutputs<'a> {
    post: Parts<'a, f32>,
    comb: Parts<'a, f32>,
    y: Parts<'a, f32>,
}

pub(crate) unsafe fn hyper_pre(team: &Team, mut a: HyperPre<'_>) -> Done {
    a.check()?;
    let maps = gemm::own("hyper_pre", &a.weights.maps)?;
    let (d, count, x) = (a.y.cols(), a.streams.rows(), a.streams.f32()?);
    let (iters, hc_eps, norm_eps, rounding) = (a.iters, a.hc_eps, a.norm_eps, a.rounding);
    let weights = a.weights;
    let out = PreOutputs {
        post: Parts::new(a.post.f32()?),
        comb: Parts::new(a.comb.f32()?),
        y: Parts::new(a.y.f32()?),
    };
    team.run_rows(count, 24, 6 * d, |r| {
        let mut products = Scratch::new(24 * r.len());
        let x = &x[r.start * 4 * d..r.end * 4 * d];
        let rows = Input::Floats(x, 4 * d);
        let product = Product { weight: maps, x: rows, m: r.len(), rounding: Rounding::None };
        // SAFETY: CPU features are the caller's promise; the scratch is this task's own.
        unsafe { product.run(0..24, Parts::new(&mut products), 0, 24) };
        for (i, x) in x.chunks(8 * 4 * d).enumerate() {
            let first = r.start + 8 * i;
            // SAFETY: CPU features; each task has its own tokens of all outputs.
            unsafe {
                let z = hyper_lanes::<24>(&products[8 * 24 * i..], x, 4 * d, norm_eps);
                let m = maps_of_eight(&z, weights, iters, hc_eps);
                for (l, x) in x.chunks_exact(4 * d).enumerate() {
                    let t = first + l;
                    let (post, comb) =
                        (out.post.range(4 * t..4 * t + 4), out.comb.range(16 * t..16 * t + 16));
                    post.iter_mut().zip(&m.post).for_each(|(o, v)| *o = v[l]);
                    comb.iter_mut().zip(&m.comb).for_each(|(o, v)| *o = v[l]);
                    collapse(m.pre.map(|v| v[l]), x, rounding, out.y.range(d * t..d * (t + 1)));
                }
            }
        }
        Ok(())
    })
}

#[target_feature(enable = "avx2,fma,f16c")]
fn gates_of_eight(z: &[[f32; 8]; 4], w: &HyperWeights, eps: f32) -> [[f32; 4]; 8] {
    std::array::from_fn(|l| body::head_gates(z.map(|v| v[l]), &w.base, w.scale[0], eps))
}

pub(crate) unsafe fn hyper_head(team: &Team, mut a: HyperHead<'_>) -> Done {
    a.check()?;
    let maps = gemm::own("hyper_head", &a.weights.maps)?;
    let (d, count, x) = (a.y.cols(), a.streams.rows(), a.streams.f32()?);
    let (hc_eps, norm_eps, rounding, weights) = (a.hc_eps, a.norm_eps, a.rounding, a.weights);
    let y = Parts::new(a.y.f32()?);
    team.run_rows(count, 24, 4 * d, |r| {
        let mut products = Scratch::new(4 * r.len());
        let x = &x[r.start * 4 * d..r.end * 4 * d];
        let rows = Input::Floats(x, 4 * d);
        let product = Product { weight: maps, x: rows, m: r.len(), rounding: Rounding::None };
        // SAFETY: CPU features are the caller's promise; the scratch is this task's own.
        unsafe { product.run(0..4, Parts::new(&mut products), 0, 4) };
        for (i, x) in x.chunks(8 * 4 * d).enumerate() {
            // SAFETY: CPU features; each task has its own tokens.
            unsafe {
                let z = hyper_lanes::<4>(&products[8 * 4 * i..], x, 4 * d, norm_eps);
                let gates = gates_of_eight(&z, weights, hc_eps);
                for (l, x) in x.chunks_exact(4 * d).enumerate() {
                    let t = r.start + 8 * i + l;
                    collapse(gates[l], x, rounding, y.range(d * t..d * (t + 1)));
                }
            }
        }
        Ok(())
    })
}

#[target_feature(enable = "avx2,fma,f16c")]
fn post_token(streams: &mut [f32], out: &[f32], post: &[f32], comb: &[f32], rounding: Rounding) {
    body::hyper_post(streams, out, post, comb, rounding);
}

pub(crate) unsafe fn hyper_post(team: &Team, mut a: HyperPost<'_>) -> Done {
    a.check()?;
    let (d, count, rounding) = (a.out.cols(), a.out.rows(), a.rounding);
    let (out, post, comb) = (a.out.f32()?, a.post.f32()?, a.comb.f32()?);
    let streams = Parts::new(a.streams.f32()?);
    team.run_rows(count, 1, 2 * d, |r| {
        for t in r {
            let (post, comb) = (&post[4 * t..4 * t + 4], &comb[16 * t..16 * t + 16]);
            // SAFETY: CPU features are the caller's promise; each task has its own tokens.
            unsafe {
                let x = streams.range(4 * d * t..4 * d * (t + 1));
                post_token(x, &out[d * t..d * (t + 1)], post, comb, rounding);
            }
        }
        Ok(())
    })
}

#[target_feature(enable = "avx2,fma,f16c")]
fn store_some(cache: &PagedCache<'_>, values: &[f32], targets: &[RowTarget]) -> Done {
    let mut row = [0f32; 512];
    let row = &mut row[..cache.format.width()];
    for (values, target) in values.chunks_exact(row.len()).zip(targets) {
        row.copy_from_slice(values);
        rows::store("store_rows", cache, target.page, target.row, row)?;
    }
    Ok(())
}

pub(crate) unsafe fn store_rows(team: &Team, a: StoreRows<'_>) -> Done {
    a.check()?;
    let (width, values) = (a.rows.cols(), a.rows.f32()?);
    team.run_rows(a.targets.len(), 1, width, |r| {
        // SAFETY: CPU features are the caller's promise.
        unsafe { store_some(&a.cache, &values[r.start * width..], &a.targets[r]) }
    })
}

pub(crate) unsafe fn load_rows(team: &Team, mut a: LoadRows<'_>) -> Done {
    a.check()?;
    let (width, cache, sources) = (a.rows.cols(), a.cache, a.sources);
    let out = Parts::new(a.rows.f32()?);
    team.run_rows(sources.len(), 1, width / 2, |r| {
        // SAFETY: CPU features are the caller's promise; each task has its own rows.
        unsafe {
            let rows = out.range(r.start * width..r.end * width);
            for (row, s) in rows.chunks_exact_mut(width).zip(&sources[r]) {
                load_row("load_rows", &cache, (s.page, s.row), row)?;
            }
        }
        Ok(())
    })
}

#[target_feature(enable = "avx2,fma,f16c")]
fn pool_channels(
    inputs: &pooling::Inputs<'_>,
    kind: Pooling,
    seq: &CompressSeq,
    channels: Range<usize>,
    rows: Parts<'_, f32>,
) -> Done {
    let (dim, start) = (inputs.dim, channels.start);
    pooling::run(inputs, kind, seq, channels, |row, values| {
        let at = row * dim + start;
        // SAFETY: each task has its own channels of the rows of its own sequence.
        unsafe { rows.range(at..at + values.len()) }.copy_from_slice(values);
    })
}

pub(crate) unsafe fn compress(team: &Team, mut a: Compress<'_>) -> Done {
    a.check()?;
    let (kv, gate) = (a.kv.f32()?, a.gate.f32()?);
    let (ape, dim, carry, rounding) = (a.ape, a.dim, a.carry, a.rounding);
    let inputs = pooling::Inputs { kv, gate, ape, dim, carry, rounding };
    let (seqs, kind, tokens) = (a.seqs, a.pooling, a.kv.rows());
    let rows = Parts::new(a.rows.f32()?);
    let width = 64.min(dim.div_ceil(2 * team.threads()).next_multiple_of(8));
    let width = if team.shares(tokens * dim) { width } else { dim };
    let split = dim.div_ceil(width);
    team.run(seqs.len() * split, tokens * dim, |task| {
        let channels = task % split * width..dim.min((task % split + 1) * width);
        // SAFETY: CPU features are the caller's promise.
        unsafe { pool_channels(&inputs, kind, &seqs[task / split], channels, rows) }
    })
}

pub(crate) unsafe fn route(team: &Team, mut a: Route<'_>) -> Done {
    a.check()?;
    let (e, k, count, logits) = (a.logits.cols(), a.k, a.logits.rows(), a.logits.f32()?);
    let (choice, scale) = (a.choice, a.scale);
    let (experts, weights) = (Parts::new(a.experts.i32()?), Parts::new(a.weights.f32()?));
    team.run_rows(count, 1, 40 * e, |r| {
        let mut scores = Scratch::new(e);
        for t in r {
            for (s, z) in scores.iter_mut().zip(&logits[t * e..]) {
                *s = math::softplus(*z).sqrt();
            }
            let span = t * k..(t + 1) * k;
            // SAFETY: each task has its own tokens.
            let (chosen, w) = unsafe { (experts.range(span.clone()), weights.range(span)) };
            match choice {
                Choice::Biased(bias) => body::choose_experts(&scores, bias, chosen),
                Choice::Hash { table, ids } => {
                    let from = ids[t] as usize * k;
                    chosen.iter_mut().zip(&table[from..]).for_each(|(c, e)| *c = *e as i32);
                }
            }
            body::route_weights(&scores, chosen, scale, w);
        }
        Ok(())
    })
}
