//! The arithmetic of each operation on one row, token or lane group, shared by the reference and
//! the fast version.
//!
//! Everything here is `#[inline(always)]` and written over fixed-size lanes where it matters, so
//! that the fast version compiles the same statements for AVX2 and gets the same bits.

#![expect(clippy::needless_range_loop, reason = "a lane number indexes several arrays")]

use crate::math;
use crate::ops::{ActQuant, IndexRounding, Rounding, Selection};
use crate::quant;

impl Rounding {
    #[inline(always)]
    pub(crate) fn apply(self, x: f32) -> f32 {
        match self {
            Self::None => x,
            Self::Bf16 => quant::bf16_round(x),
        }
    }
}

/// Rounds a linear's input row, whose column groups of `k` values are quantised on their own.
#[inline(always)]
pub(crate) fn quantise_row(row: &mut [f32], k: usize, quant: ActQuant) {
    match quant {
        ActQuant::None => {}
        ActQuant::Q8Group128 => {
            for part in row.chunks_mut(k) {
                for group in part.chunks_mut(128) {
                    quant::q8_round(group);
                }
            }
        }
    }
}

#[inline(always)]
pub(crate) fn rms_factor(x: &[f32], eps: f32) -> f32 {
    1.0 / (math::sum_squares(x) / x.len() as f32 + eps).sqrt()
}

/// RMS norm of one group: `round((x * factor) * w)`.
#[inline(always)]
pub(crate) fn rms_norm(x: &[f32], w: Option<&[f32]>, eps: f32, rounding: Rounding, y: &mut [f32]) {
    let factor = rms_factor(x, eps);
    match w {
        Some(w) => {
            for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
                *y = rounding.apply(x * factor * w);
            }
        }
        None => {
            for (y, x) in y.iter_mut().zip(x) {
                *y = rounding.apply(x * factor);
            }
        }
    }
}

/// Rotates the last 64 values of a head by a table row (32 cosines, 32 sines).
#[inline(always)]
pub(crate) fn rope(head: &mut [f32], table: &[f32], inverse: bool, rounding: Rounding) {
    let from = head.len() - 64;
    let (cos, sin) = table.split_at(32);
    for (pair, (c, s)) in head[from..].chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
        let s = if inverse { -s } else { *s };
        let (a, b) = (pair[0], pair[1]);
        pair[0] = rounding.apply(a.mul_add(*c, -(b * s)));
        pair[1] = rounding.apply(a.mul_add(s, b * c));
    }
}

/// Unscaled Walsh-Hadamard transform of 128 values in natural (Sylvester) order; butterflies of
/// distance 1, 2, 4, ... 64.
#[inline(always)]
pub(crate) fn hadamard_unscaled(x: &mut [f32; 128]) {
    let mut half = 1;
    while half < 128 {
        for block in x.chunks_exact_mut(2 * half) {
            let (low, high) = block.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
}

/// `bf16(H_128 x / sqrt(128))`.
#[inline(always)]
pub(crate) fn hadamard(x: &mut [f32; 128]) {
    hadamard_unscaled(x);
    for v in x {
        *v = quant::bf16_round(*v * 0.088_388_35);
    }
}

/// Rounds a transformed index query to the values that a key of the same type would hold.
#[inline(always)]
pub(crate) fn round_index(x: &mut [f32; 128], kind: IndexRounding) {
    match kind {
        IndexRounding::Fp4 => {
            for group in x.chunks_exact_mut(32) {
                quant::q4_round(group);
            }
        }
        IndexRounding::Fp8 => {
            let scale = quant::index_scale(quant::amax(x));
            for v in x {
                *v = quant::e4m3_round(*v / scale) * scale;
            }
        }
        IndexRounding::Bf16 | IndexRounding::None => {}
    }
}

/// One head of an index query: rotate, transform, round.
#[inline(always)]
pub(crate) fn index_query(head: &mut [f32; 128], table: &[f32], kind: IndexRounding) {
    if kind == IndexRounding::None {
        rope(head, table, false, Rounding::None);
    } else {
        rope(head, table, false, Rounding::Bf16);
        hadamard(head);
        round_index(head, kind);
    }
}

/// What the mHC maps give for `L` tokens.
pub(crate) struct HyperMaps<const L: usize> {
    pub(crate) pre: [[f32; L]; 4],
    pub(crate) post: [[f32; L]; 4],
    pub(crate) comb: [[f32; L]; 16],
}

/// mHC maps of `L` tokens from `z` (24 products already multiplied by the RMS factor): gates, row
/// softmax, and `iters` normalisations of which the first has no row step.
#[inline(always)]
pub(crate) fn hyper_maps<const L: usize>(
    z: &[[f32; L]; 24],
    base: &[f32],
    scale: &[f32],
    iters: u32,
    eps: f32,
) -> HyperMaps<L> {
    let mut maps = HyperMaps { pre: [[0.0; L]; 4], post: [[0.0; L]; 4], comb: [[0.0; L]; 16] };
    for j in 0..4 {
        for l in 0..L {
            maps.pre[j][l] = math::sigmoid(z[j][l].mul_add(scale[0], base[j])) + eps;
            maps.post[j][l] = 2.0 * math::sigmoid(z[4 + j][l].mul_add(scale[1], base[4 + j]));
        }
    }
    let c = &mut maps.comb;
    for i in 0..16 {
        for l in 0..L {
            c[i][l] = z[8 + i][l].mul_add(scale[2], base[8 + i]);
        }
    }
    for j in 0..4 {
        softmax_row(c, 4 * j, eps);
    }
    normalise(c, 1, 4, eps);
    for _ in 1..iters {
        normalise(c, 4, 1, eps);
        normalise(c, 1, 4, eps);
    }
    maps
}

#[inline(always)]
fn softmax_row<const L: usize>(c: &mut [[f32; L]; 16], at: usize, eps: f32) {
    for l in 0..L {
        let row = [c[at][l], c[at + 1][l], c[at + 2][l], c[at + 3][l]];
        let max = row.iter().fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m });
        let e = [
            math::exp(row[0] - max),
            math::exp(row[1] - max),
            math::exp(row[2] - max),
            math::exp(row[3] - max),
        ];
        let sum = e[0] + e[1] + e[2] + e[3];
        for k in 0..4 {
            c[at + k][l] = e[k] / sum + eps;
        }
    }
}

/// Divides each line of four by (its sum + eps). Line `i` begins at `i * outer`, its entries are
/// `inner` apart: (4, 1) for rows, (1, 4) for columns.
#[inline(always)]
fn normalise<const L: usize>(c: &mut [[f32; L]; 16], outer: usize, inner: usize, eps: f32) {
    for i in 0..4 {
        let at = i * outer;
        let mut sum = [0f32; L];
        for l in 0..L {
            let two = c[at][l] + c[at + inner][l];
            sum[l] = two + c[at + 2 * inner][l] + c[at + 3 * inner][l] + eps;
        }
        for k in 0..4 {
            for l in 0..L {
                c[at + k * inner][l] /= sum[l];
            }
        }
    }
}

/// `round(sum_j pre_j * X[j])`, j ascending, fused.
#[inline(always)]
pub(crate) fn hyper_collapse(pre: [f32; 4], streams: &[f32], rounding: Rounding, y: &mut [f32]) {
    let d = y.len();
    let (x0, rest) = streams.split_at(d);
    let (x1, rest) = rest.split_at(d);
    let (x2, x3) = rest.split_at(d);
    let x3 = &x3[..d];
    for i in 0..d {
        let acc = pre[2].mul_add(x2[i], pre[1].mul_add(x1[i], pre[0] * x0[i]));
        y[i] = rounding.apply(pre[3].mul_add(x3[i], acc));
    }
}

/// `X'[k] = round(post_k * o + sum_j comb[j][k] * X[j])`, j ascending, fused, in place.
#[inline(always)]
pub(crate) fn hyper_post(
    streams: &mut [f32],
    out: &[f32],
    post: &[f32],
    comb: &[f32],
    rounding: Rounding,
) {
    let d = out.len();
    let (x0, rest) = streams.split_at_mut(d);
    let (x1, rest) = rest.split_at_mut(d);
    let (x2, x3) = rest.split_at_mut(d);
    let x3 = &mut x3[..d];
    let (p, c): ([f32; 4], [f32; 16]) =
        (std::array::from_fn(|k| post[k]), std::array::from_fn(|i| comb[i]));
    for i in 0..d {
        let (o, a0, a1, a2, a3) = (out[i], x0[i], x1[i], x2[i], x3[i]);
        x0[i] = rounding.apply(mix(p[0] * o, [c[0], c[4], c[8], c[12]], [a0, a1, a2, a3]));
        x1[i] = rounding.apply(mix(p[1] * o, [c[1], c[5], c[9], c[13]], [a0, a1, a2, a3]));
        x2[i] = rounding.apply(mix(p[2] * o, [c[2], c[6], c[10], c[14]], [a0, a1, a2, a3]));
        x3[i] = rounding.apply(mix(p[3] * o, [c[3], c[7], c[11], c[15]], [a0, a1, a2, a3]));
    }
}

/// `acc + sum_j c_j * x_j`, j ascending, fused.
#[inline(always)]
fn mix(acc: f32, c: [f32; 4], x: [f32; 4]) -> f32 {
    let acc = c[1].mul_add(x[1], c[0].mul_add(x[0], acc));
    c[3].mul_add(x[3], c[2].mul_add(x[2], acc))
}

/// Gates of the head collapse: `sigmoid(z_j * scale + base_j) + eps`.
#[inline(always)]
pub(crate) fn head_gates(z: [f32; 4], base: &[f32], scale: f32, eps: f32) -> [f32; 4] {
    let gate = |j: usize| math::sigmoid(z[j].mul_add(scale, base[j])) + eps;
    [gate(0), gate(1), gate(2), gate(3)]
}

/// The gated product of an expert, into `gate`: `round((weight * silu(min(g, limit))) *
/// clamp(u, -limit, limit))`.
#[inline(always)]
pub(crate) fn gated(gate: &mut [f32], up: &[f32], weight: f32, limit: f32, rounding: Rounding) {
    for (g, u) in gate.iter_mut().zip(up) {
        let a = if *g > limit { limit } else { *g };
        let b = if *u > limit { limit } else { *u };
        let b = if b < -limit { -limit } else { b };
        *g = rounding.apply(weight * math::silu(a) * b);
    }
}

/// Compressed rows that the query at position `p`, token `t` of the step, attends to, ascending.
pub(crate) fn chosen_rows<'a>(
    selection: &Selection<'a>,
    t: usize,
    p: u32,
) -> Result<impl Iterator<Item = u32> + use<'a>, crate::KernelError> {
    let (all, list) = match selection {
        Selection::All { ratio } => ((p + 1) / ratio, &[][..]),
        Selection::Listed(rows) => {
            let k = rows.cols();
            (0, &rows.i32()?[t * k..(t + 1) * k])
        }
    };
    Ok((0..all).chain(list.iter().take_while(|r| **r >= 0).map(|r| *r as u32)))
}

/// Writes the `top_k` best rows in ascending order, then -1. Larger scores first, equal scores by
/// lower row, NaN last. `keys` is scratch.
///
/// The time is linear in rows: the least chosen key is found without sorting, and a second pass takes
/// what lies above it, and of its equals the first.
pub(crate) fn select_top_k(scores: &[f32], selected: &mut [i32], keys: &mut Vec<u32>) {
    let k = selected.len();
    if scores.len() <= k {
        for (i, s) in selected.iter_mut().enumerate() {
            *s = if i < scores.len() { i as i32 } else { -1 };
        }
        return;
    }
    keys.clear();
    // Ascending order of the complement is the order of choice.
    keys.extend(scores.iter().map(|s| !math::order_key(*s)));
    let least = *keys.select_nth_unstable(k - 1).1;
    let mut equals = keys[..k].iter().filter(|key| **key == least).count();
    let mut free = selected.iter_mut();
    for (i, score) in scores.iter().enumerate() {
        let key = !math::order_key(*score);
        if key < least || (key == least && equals > 0) {
            equals -= usize::from(key == least);
            let Some(place) = free.next() else { return };
            *place = i as i32;
        }
    }
}

/// Softmax terms of one query and head in place: `s` becomes `exp(s - max)`; returns the
/// denominator `sum e + exp(sink - max)`.
#[inline(always)]
pub(crate) fn softmax_terms(s: &mut [f32], sink: f32) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 8];
    let (chunks, rest) = s.as_chunks::<8>();
    for chunk in chunks {
        for l in 0..8 {
            lanes[l] = if chunk[l] > lanes[l] { chunk[l] } else { lanes[l] };
        }
    }
    let max = rest.iter().chain(&lanes).fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m });
    let (chunks, rest) = s.as_chunks_mut::<8>();
    for chunk in chunks {
        for x in chunk {
            *x = math::exp(*x - max);
        }
    }
    for x in rest {
        *x = math::exp(*x - max);
    }
    math::sum(s) + math::exp(sink - max)
}

/// One token of the router: chosen experts and their weights.
#[inline(always)]
pub(crate) fn route_weights(scores: &[f32], chosen: &[i32], scale: f32, weights: &mut [f32]) {
    let mut sum = 0.0;
    for (w, e) in weights.iter_mut().zip(chosen) {
        *w = scores[*e as usize];
        sum += *w;
    }
    for w in weights {
        *w = *w / sum * scale;
    }
}

/// The `chosen.len()` largest of score + bias, best first, ties to the lower expert.
pub(crate) fn choose_experts(scores: &[f32], bias: &[f32], chosen: &mut [i32]) {
    let key = |e: usize| (math::order_key(scores[e] + bias[e]), std::cmp::Reverse(e));
    for i in 0..chosen.len() {
        let free = (0..scores.len()).filter(|e| !chosen[..i].contains(&(*e as i32)));
        chosen[i] = free.max_by_key(|e| key(*e)).map_or(-1, |e| e as i32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(got: f32, want: f64) {
        assert!((f64::from(got) - want).abs() < 1e-6 * want.abs().max(1.0), "{got} {want}");
    }

    #[test]
    fn hyper_maps_equal_the_published_matrix() {
        let z = std::array::from_fn(|i| [(((7 * i + 3) % 11) as f32 - 5.0) / 4.0]);
        let base: Vec<f32> = (0..24).map(|i| (((5 * i + 1) % 7) as f32 - 3.0) / 8.0).collect();
        let m = hyper_maps::<1>(&z, &base, &[0.5, 1.0, 2.0], 20, 1e-6);
        let pre = [0.377_541_7, 0.731_059_6, 0.562_177_5, 0.377_541_7];
        let post = [1.302_709_7, 1.124_353_0, 0.537_882_8, 1.244_918_7];
        let comb = [
            0.274_609_8,
            0.146_535_8,
            0.512_061_4,
            0.066_792_0,
            0.470_657_1,
            0.251_144_5,
            0.003_587_3,
            0.274_610_1,
            0.251_144_7,
            0.134_014_9,
            0.468_306_1,
            0.146_533_3,
            0.003_587_4,
            0.468_303_8,
            0.016_044_3,
            0.512_063_6,
        ];
        m.pre.iter().zip(pre).for_each(|(g, w)| near(g[0], w));
        m.post.iter().zip(post).for_each(|(g, w)| near(g[0], w));
        m.comb.iter().zip(comb).for_each(|(g, w)| near(g[0], w));
        let (post, comb) = (m.post.map(|[v]| v), m.comb.map(|[v]| v));
        let mut streams = [1.0, 2.0, 3.0, 4.0];
        hyper_post(&mut streams, &[10.0], &post, &comb, Rounding::None);
        let want = [15.010_804_9, 14.167_614_7, 7.367_159_7, 15.553_053_1];
        streams.iter().zip(want).for_each(|(g, w)| near(*g, w));
    }

    #[test]
    fn lanes_of_the_maps_are_independent() {
        let one = |l: usize| -> [[f32; 1]; 24] {
            std::array::from_fn(|i| [((i * 13 + l * 7) % 17) as f32 / 5.0 - 1.6])
        };
        let eight: [[f32; 8]; 24] = std::array::from_fn(|i| std::array::from_fn(|l| one(l)[i][0]));
        let base = [0.1; 24];
        let all = hyper_maps::<8>(&eight, &base, &[1.0, 0.7, 1.3], 20, 1e-6);
        for l in 0..8 {
            let m = hyper_maps::<1>(&one(l), &base, &[1.0, 0.7, 1.3], 20, 1e-6);
            assert!((0..16).all(|i| all.comb[i][l].to_bits() == m.comb[i][0].to_bits()));
            assert!((0..4).all(|i| all.pre[i][l].to_bits() == m.pre[i][0].to_bits()));
            assert!((0..4).all(|i| all.post[i][l].to_bits() == m.post[i][0].to_bits()));
        }
    }

    #[test]
    fn top_k_equals_a_stable_sort_with_many_ties() {
        let mut keys = Vec::new();
        let mut state = 1u64;
        for k in [1usize, 2, 7, 64] {
            for n in [0, 1, k - 1, k, k + 1, 3 * k + 5, 300] {
                for levels in [1u64, 3, 1000] {
                    let scores: Vec<f32> = (0..n)
                        .map(|_| {
                            state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
                            ((state >> 33) % levels) as f32 - (levels / 2) as f32
                        })
                        .map(|s| if s == 0.0 && n % 2 == 0 { -0.0 } else { s })
                        .collect();
                    let mut got = vec![-7; k];
                    select_top_k(&scores, &mut got, &mut keys);
                    let mut order: Vec<usize> = (0..n).collect();
                    order.sort_by(|a, b| scores[*b].partial_cmp(&scores[*a]).unwrap());
                    let mut want: Vec<i32> = order.iter().take(k).map(|i| *i as i32).collect();
                    want.sort_unstable();
                    want.resize(k, -1);
                    assert_eq!(got, want, "k {k}, n {n}, levels {levels}");
                }
            }
        }
    }

    #[test]
    fn experts_are_chosen_best_first_with_ties_to_the_lower() {
        let mut chosen = [0; 4];
        choose_experts(
            &[1.0, 3.0, 2.0, 3.0, f32::NAN, 0.0],
            &[0.0, 0.0, 1.0, 0.0, 0.0, -5.0],
            &mut chosen,
        );
        assert_eq!(chosen, [1, 2, 3, 0]);
        let mut weights = [0.0; 2];
        route_weights(&[1.0, 3.0], &[1, 0], 1.5, &mut weights);
        assert_eq!(weights, [1.125, 0.375]);
    }

    #[test]
    fn rotation_keeps_length_and_is_undone_by_its_inverse() {
        let mut head: Vec<f32> = (0..128).map(|i| (i as f32 * 0.37).fract() - 0.5).collect();
        let before = head.clone();
        let table: Vec<f32> = (0..64)
            .map(|i| {
                let angle = (i % 32) as f32 * 0.7;
                if i < 32 { angle.cos() } else { angle.sin() }
            })
            .collect();
        rope(&mut head, &table, false, Rounding::None);
        assert_eq!(head[..64], before[..64]);
        assert!(head[66..].iter().zip(&before[66..]).any(|(a, b)| (a - b).abs() > 0.1));
        let (a, b) = (before[66], before[67]);
        near(head[66], f64::from(a) * 0.7f64.cos() - f64::from(b) * 0.7f64.sin());
        near(head[67], f64::from(a) * 0.7f64.sin() + f64::from(b) * 0.7f64.cos());
        rope(&mut head, &table, true, Rounding::None);
        head.iter().zip(&before).for_each(|(a, b)| near(*a, f64::from(*b)));
    }
}
