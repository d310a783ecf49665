//! Gated pooling over a range of channels, token by token, from and to a carry.
//!
//! Channels are independent, so a range of them is a unit of parallel work that cannot change a
//! result; tokens are always taken in order, so neither can the split into chunks.

use crate::device::Mem;
use crate::error::KernelError;
use crate::math;
use crate::ops::{CompressSeq, Pooling, Rounding};
use std::ops::Range;

/// Inputs of one call, as slices.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    pub(crate) kv: &'a [f32],
    pub(crate) gate: &'a [f32],
    pub(crate) ape: &'a [f32],
    pub(crate) dim: usize,
    pub(crate) carry: &'a Mem,
    pub(crate) rounding: Rounding,
}

/// Runs one sequence over `channels`, calls `emit(row, values)` for each window it completes, and
/// updates the carry.
#[inline(always)]
pub(crate) fn run(
    a: &Inputs<'_>,
    pooling: Pooling,
    seq: &CompressSeq,
    channels: Range<usize>,
    emit: impl FnMut(usize, &[f32]),
) -> Result<(), KernelError> {
    if seq.part.count == 0 {
        return Ok(());
    }
    match pooling {
        Pooling::C4 => c4(a, seq, channels, emit),
        Pooling::C128 => c128(a, seq, channels, emit),
    }
}

#[inline(always)]
fn read_floats(mem: &Mem, offset: u64, out: &mut [f32]) -> Result<(), KernelError> {
    let mut bytes = [0u8; 1024];
    for (i, part) in out.chunks_mut(256).enumerate() {
        let bytes = &mut bytes[..4 * part.len()];
        mem.read(offset + 1024 * i as u64, bytes)?;
        for (v, b) in part.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *v = f32::from_le_bytes(*b);
        }
    }
    Ok(())
}

#[inline(always)]
fn write_floats(mem: &Mem, offset: u64, values: &[f32]) -> Result<(), KernelError> {
    let mut bytes = [0u8; 1024];
    for (i, part) in values.chunks(256).enumerate() {
        let bytes = &mut bytes[..4 * part.len()];
        for (v, b) in part.iter().zip(bytes.as_chunks_mut::<4>().0) {
            *b = v.to_le_bytes();
        }
        mem.write(offset + 1024 * i as u64, bytes)?;
    }
    Ok(())
}

/// The running softmax: three rows of the carry.
#[inline(always)]
fn c128(
    a: &Inputs<'_>,
    seq: &CompressSeq,
    channels: Range<usize>,
    mut emit: impl FnMut(usize, &[f32]),
) -> Result<(), KernelError> {
    let n = channels.len();
    let at = |row: usize| seq.carry_offset + 4 * (row * a.dim + channels.start) as u64;
    let mut state = vec![0f32; 4 * n];
    let (max, rest) = state.split_at_mut(n);
    let (sum, rest) = rest.split_at_mut(n);
    let (weighted, out) = rest.split_at_mut(n);
    if !seq.part.start_pos.is_multiple_of(128) {
        read_floats(a.carry, at(0), max)?;
        read_floats(a.carry, at(1), sum)?;
        read_floats(a.carry, at(2), weighted)?;
    }
    let mut row = seq.first_row;
    for i in 0..seq.part.count {
        let slot = (seq.part.start_pos as usize + i) % 128;
        let from = (seq.part.first + i) * a.dim;
        let columns = from + channels.start..from + channels.end;
        let (kv, gate) = (&a.kv[columns.clone()], &a.gate[columns]);
        let ape = &a.ape[slot * a.dim + channels.start..slot * a.dim + channels.end];
        if slot == 0 {
            for c in 0..n {
                (max[c], sum[c], weighted[c]) = (gate[c] + ape[c], 1.0, kv[c]);
            }
        } else {
            c128_token(max, sum, weighted, (kv, gate, ape));
        }
        if slot == 127 {
            for c in 0..n {
                out[c] = a.rounding.apply(weighted[c] / sum[c]);
            }
            emit(row, out);
            row += 1;
        }
    }
    if seq.part.end_pos().is_multiple_of(128) {
        max.fill(0.0);
        sum.fill(0.0);
        weighted.fill(0.0);
    }
    write_floats(a.carry, at(0), max)?;
    write_floats(a.carry, at(1), sum)?;
    write_floats(a.carry, at(2), weighted)
}

/// Adds one token: the smaller of old maximum and new score is rescaled by `exp` of their
/// difference, the larger by exactly 1.
#[inline(always)]
fn c128_token(
    max: &mut [f32],
    sum: &mut [f32],
    weighted: &mut [f32],
    (kv, gate, ape): (&[f32], &[f32], &[f32]),
) {
    let n = max.len();
    let (sum, weighted) = (&mut sum[..n], &mut weighted[..n]);
    let (kv, gate, ape) = (&kv[..n], &gate[..n], &ape[..n]);
    for c in 0..n {
        let score = gate[c] + ape[c];
        let grows = score > max[c];
        let factor = math::exp(-(max[c] - score).abs());
        let keep = if grows { factor } else { 1.0 };
        let e = if grows { 1.0 } else { factor };
        max[c] = if grows { score } else { max[c] };
        sum[c] = sum[c].mul_add(keep, e);
        weighted[c] = weighted[c].mul_add(keep, e * kv[c]);
    }
}

/// Rows of `n` channels: the last closed window as `[slot][kv A, score A]`, the open one as
/// `[slot][kv A, kv B, score A, score B]`.
struct C4State {
    n: usize,
    closed: Vec<f32>,
    open: Vec<f32>,
}

impl C4State {
    fn closed(&self, slot: usize, part: usize) -> &[f32] {
        &self.closed[(2 * slot + part) * self.n..][..self.n]
    }

    fn open(&self, slot: usize, part: usize) -> &[f32] {
        &self.open[(4 * slot + part) * self.n..][..self.n]
    }

    /// The open window becomes the closed one.
    fn close(&mut self) {
        let n = self.n;
        for slot in 0..4 {
            let (a, score) = (4 * slot * n, (4 * slot + 2) * n);
            self.closed[2 * slot * n..][..n].copy_from_slice(&self.open[a..a + n]);
            self.closed[(2 * slot + 1) * n..][..n].copy_from_slice(&self.open[score..score + n]);
        }
    }
}

#[inline(always)]
fn c4(
    a: &Inputs<'_>,
    seq: &CompressSeq,
    channels: Range<usize>,
    mut emit: impl FnMut(usize, &[f32]),
) -> Result<(), KernelError> {
    let n = channels.len();
    let (start, end) = (seq.part.start_pos as usize, seq.part.end_pos() as usize);
    let at = |row: usize| seq.carry_offset + 4 * (row * a.dim + channels.start) as u64;
    let mut state = C4State { n, closed: vec![0.0; 8 * n], open: vec![0.0; 16 * n] };
    if start >= 4 {
        for (row, values) in state.closed.chunks_exact_mut(n).enumerate() {
            read_floats(a.carry, at(row), values)?;
        }
    }
    for (row, values) in state.open.chunks_exact_mut(n).take(4 * (start % 4)).enumerate() {
        read_floats(a.carry, at(8 + row), values)?;
    }
    let mut out = vec![0f32; n];
    let mut row = seq.first_row;
    for pos in start..end {
        let slot = pos % 4;
        let from = (seq.part.first + pos - start) * 2 * a.dim;
        for (part, half) in [0, a.dim].into_iter().enumerate() {
            let columns = from + half + channels.start..from + half + channels.end;
            let ape_from = slot * 2 * a.dim + half;
            let ape = &a.ape[ape_from + channels.start..ape_from + channels.end];
            let (kv, gate) = (&a.kv[columns.clone()], &a.gate[columns]);
            state.open[(4 * slot + part) * n..][..n].copy_from_slice(kv);
            let score = &mut state.open[(4 * slot + 2 + part) * n..][..n];
            for ((s, g), p) in score.iter_mut().zip(gate).zip(ape) {
                *s = g + p;
            }
        }
        if slot == 3 {
            if pos >= 4 {
                pool::<8>(&state, a.rounding, &mut out);
            } else {
                pool::<4>(&state, a.rounding, &mut out);
            }
            emit(row, &out);
            row += 1;
            state.close();
        }
    }
    if end < 4 {
        state.closed.fill(0.0);
    }
    state.open[4 * (end % 4) * n..].fill(0.0);
    for (row, values) in state.closed.chunks_exact(n).enumerate() {
        write_floats(a.carry, at(row), values)?;
    }
    for (row, values) in state.open.chunks_exact(n).take(12).enumerate() {
        write_floats(a.carry, at(8 + row), values)?;
    }
    Ok(())
}

/// Softmax over the last `N` of eight slots (four A of the closed window, four B of the open one),
/// each sum in slot order.
#[inline(always)]
fn pool<const N: usize>(state: &C4State, rounding: Rounding, out: &mut [f32]) {
    let slot = |j: usize| {
        let j = j + 8 - N;
        if j < 4 {
            (state.closed(j, 0), state.closed(j, 1))
        } else {
            (state.open(j - 4, 1), state.open(j - 4, 3))
        }
    };
    let slots: [(&[f32], &[f32]); N] = std::array::from_fn(slot);
    let blocks = out.len() / 8 * 8;
    for c in (0..blocks).step_by(8) {
        pool_block::<8, N>(&slots, rounding, c, out);
    }
    for c in blocks..out.len() {
        pool_block::<1, N>(&slots, rounding, c, out);
    }
}

#[inline(always)]
fn pool_block<const L: usize, const N: usize>(
    slots: &[(&[f32], &[f32]); N],
    rounding: Rounding,
    c: usize,
    out: &mut [f32],
) {
    let lanes = |row: &[f32]| -> [f32; L] { std::array::from_fn(|l| row[c..c + L][l]) };
    let mut max = lanes(slots[0].1);
    for (_, score) in &slots[1..] {
        let s = lanes(score);
        for l in 0..L {
            max[l] = if s[l] > max[l] { s[l] } else { max[l] };
        }
    }
    let (mut sum, mut weighted) = ([0f32; L], [0f32; L]);
    for (kv, score) in slots {
        let (v, s) = (lanes(kv), lanes(score));
        let mut e = [0f32; L];
        for l in 0..L {
            e[l] = math::exp(s[l] - max[l]);
        }
        for l in 0..L {
            sum[l] += e[l];
            weighted[l] = e[l].mul_add(v[l], weighted[l]);
        }
    }
    for l in 0..L {
        out[c + l] = rounding.apply(weighted[l] / sum[l]);
    }
}
