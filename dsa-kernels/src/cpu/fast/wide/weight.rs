//! Packed weights: panels of 16 columns, K-major, eight values of k a step.
//!
//! A step of a BF16 panel is four vectors of 16 lanes, one a column, each with two values of k. A
//! step of an FP8 panel is 128 codes and one of an FP4 panel 64 bytes, in the order in which the
//! decoder unpacks them. Codes are looked up in tables of 128 BF16 numbers that have the scale in
//! them: for FP8 a table for each scale, for FP4 one for each eight scales in a row, of which every
//! column of a panel takes its own.

use super::{LEAST_W, STEP, WIDTH};
use crate::cpu::pack;
use crate::ops::{WeightDesc, WeightFormat};
use crate::quant;

/// Values of k under one FP4 scale.
pub(super) const GROUP: usize = 32;

/// One cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Line(pub(super) [u8; 64]);

/// 128 BF16 numbers: upper bytes, then lower bytes. For FP8 those of all E4M3 magnitudes under one
/// scale, for FP4 those of all E2M1 codes under eight scales in a row.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Table(pub(super) [u8; 256]);

/// What BF16 weights are not looked up in.
static NO_TABLE: Table = Table([0; 256]);

#[derive(Debug)]
pub(super) enum Codes {
    Bf16,
    /// Tables, and the table of each block of 128 by 128.
    Fp8 {
        tables: Vec<Table>,
        of_block: Vec<u8>,
    },
    /// Tables, and for each panel and group of 32 its table and sixteen times the number of each
    /// column's scale in it.
    Fp4 {
        tables: Vec<Table>,
        of_group: Vec<(u8, [u8; WIDTH])>,
    },
}

/// A matrix packed for the products of this module.
#[derive(Debug)]
pub(crate) struct Wide {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) lines: Vec<Line>,
    pub(super) codes: Codes,
}

/// Packs a matrix, if all its values are BF16 numbers that are zero or large enough.
pub(crate) fn pack(desc: &WeightDesc<'_>) -> Option<Wide> {
    match desc.format {
        WeightFormat::Fp8Block128 => fp8(desc),
        WeightFormat::Fp4Group32 if desc.cols.is_multiple_of(32) => fp4(desc),
        _ => None,
    }
    .or_else(|| bf16(desc))
}

/// Where the code of column `lane` and value `k` of a step lies: vector of two values of k, and byte
/// (of a vector of bytes) or half (of a vector of halves) in it.
fn place(lane: usize, k: usize) -> (usize, usize) {
    (k / 2, 2 * lane + 1 - k % 2)
}

/// The byte of a line of 64 codes, two vectors of halves, that is unpacked to `place`.
fn byte(vector: usize, half: usize) -> usize {
    half / 8 * 16 + vector % 2 * 8 + half % 8
}

impl Wide {
    /// Lines of a step.
    pub(super) fn step_lines(&self) -> usize {
        match self.codes {
            Codes::Bf16 => 4,
            Codes::Fp8 { .. } => 2,
            Codes::Fp4 { .. } => 1,
        }
    }

    pub(super) fn steps(&self) -> usize {
        self.cols.div_ceil(STEP)
    }

    /// Lines of a panel.
    pub(super) fn panel_lines(&self) -> usize {
        self.steps() * self.step_lines()
    }

    /// Bytes that a product reads.
    pub(crate) fn bytes(&self) -> usize {
        let beside = match &self.codes {
            Codes::Bf16 => 0,
            Codes::Fp8 { tables, of_block } => size_of_val(&tables[..]) + of_block.len(),
            Codes::Fp4 { tables, of_group } => {
                size_of_val(&tables[..]) + size_of_val(&of_group[..])
            }
        };
        size_of_val(&self.lines[..]) + beside
    }

    fn empty(desc: &WeightDesc<'_>, codes: Codes) -> Self {
        let mut wide = Self { rows: desc.rows, cols: desc.cols, lines: Vec::new(), codes };
        let count = desc.rows.div_ceil(WIDTH) * wide.panel_lines();
        wide.lines = vec![Line([0; 64]); count];
        wide
    }

    /// First line of the step that has row `n` of the matrix and value `k`.
    fn line(&self, n: usize, k: usize) -> usize {
        n / WIDTH * self.panel_lines() + k / STEP * self.step_lines()
    }

    /// The table of panel `panel` and the group `group` of 32 values of k, and for FP4 what is added
    /// to the codes of each column.
    #[inline(always)]
    pub(super) fn table(&self, panel: usize, group: usize) -> (&Table, &[u8; WIDTH]) {
        match &self.codes {
            Codes::Bf16 => (&NO_TABLE, &[0; WIDTH]),
            Codes::Fp8 { tables, of_block } => {
                let block = panel * WIDTH / 128 * self.cols.div_ceil(128) + group / 4;
                (&tables[usize::from(of_block[block])], &[0; WIDTH])
            }
            Codes::Fp4 { tables, of_group } => {
                let (table, columns) = &of_group[panel * (self.cols / GROUP) + group];
                (&tables[usize::from(*table)], columns)
            }
        }
    }

    /// Element `k` of row `n`.
    pub(crate) fn value(&self, n: usize, k: usize) -> f32 {
        let (vector, half) = place(n % WIDTH, k % STEP);
        let at = self.line(n, k);
        match &self.codes {
            Codes::Bf16 => {
                let bytes = &self.lines[at + vector].0[2 * half..];
                quant::bf16_decode(u16::from_le_bytes([bytes[0], bytes[1]]))
            }
            Codes::Fp8 { .. } => {
                let code = self.lines[at + vector / 2].0[byte(vector, half)];
                self.looked_up(n, k, code & 0x7f, code & 0x80)
            }
            Codes::Fp4 { .. } => {
                let code = self.lines[at].0[byte(vector, half)] >> (4 * (vector / 2));
                self.looked_up(n, k, code & 15, 0)
            }
        }
    }

    fn looked_up(&self, n: usize, k: usize, code: u8, sign: u8) -> f32 {
        let (table, columns) = self.table(n / WIDTH, k / GROUP);
        let at = usize::from(code | columns[n % WIDTH]);
        quant::bf16_decode(u16::from_le_bytes([table.0[128 + at], table.0[at] | sign]))
    }
}

fn bf16(desc: &WeightDesc<'_>) -> Option<Wide> {
    let mut wide = Wide::empty(desc, Codes::Bf16);
    let mut row = vec![0.0; desc.cols];
    for n in 0..desc.rows {
        pack::dequantise_row(desc, n, &mut row);
        for (k, v) in row.iter().enumerate() {
            let code = quant::bf16_encode(*v);
            let is_same = quant::bf16_decode(code).to_bits() == v.to_bits();
            if !is_same || (v.abs() < LEAST_W && *v != 0.0) {
                return None;
            }
            let (vector, half) = place(n % WIDTH, k % STEP);
            let at = wide.line(n, k) + vector;
            wide.lines[at].0[2 * half..2 * half + 2].copy_from_slice(&code.to_le_bytes());
        }
    }
    Some(wide)
}

/// A table of these numbers, if all of them are NaN, zero or large enough for the products, and BF16.
fn table(value: impl Fn(u8) -> f32) -> Option<Table> {
    let mut table = Table([0; 256]);
    for code in 0..128u8 {
        let value = value(code);
        let bits = quant::bf16_encode(value);
        let is_same = quant::bf16_decode(bits) == value;
        if !value.is_nan() && (!is_same || (value.abs() < LEAST_W && value != 0.0)) {
            return None;
        }
        let [low, high] = bits.to_le_bytes();
        (table.0[usize::from(code)], table.0[128 + usize::from(code)]) = (high, low);
    }
    Some(table)
}

/// The number of `key` among `keys`, to which it and its table are added if it is new.
fn numbered<K: PartialEq>(
    (keys, tables): (&mut Vec<K>, &mut Vec<Table>),
    key: K,
    value: impl Fn(u8) -> f32,
) -> Option<u8> {
    let at = match keys.iter().position(|k| *k == key) {
        Some(at) => at,
        None => {
            tables.push(table(value)?);
            keys.push(key);
            keys.len() - 1
        }
    };
    u8::try_from(at).ok()
}

fn fp8(desc: &WeightDesc<'_>) -> Option<Wide> {
    let (mut tables, mut scales) = (Vec::new(), Vec::new());
    let mut number = |scale: u8| {
        let value = |code: u8| quant::e4m3_decode(code) * quant::e8m0_decode(scale);
        numbered((&mut scales, &mut tables), scale, value)
    };
    let of_block = desc.scales.iter().map(|scale| number(*scale)).collect::<Option<Vec<u8>>>()?;
    let mut wide = Wide::empty(desc, Codes::Fp8 { tables, of_block });
    for n in 0..desc.rows {
        for (k, code) in desc.data[n * desc.cols..][..desc.cols].iter().enumerate() {
            let (vector, half) = place(n % WIDTH, k % STEP);
            let at = wide.line(n, k) + vector / 2;
            wide.lines[at].0[byte(vector, half)] = *code;
        }
    }
    Some(wide)
}

fn fp4(desc: &WeightDesc<'_>) -> Option<Wide> {
    let groups = desc.cols / GROUP;
    let (mut tables, mut bases) = (Vec::new(), Vec::new());
    let mut of_group = Vec::with_capacity(desc.rows.div_ceil(WIDTH) * groups);
    for from in (0..desc.rows).step_by(WIDTH) {
        for g in 0..groups {
            let lanes = from..desc.rows.min(from + WIDTH);
            let (mut columns, scales) = ([0; WIDTH], lanes.map(|n| desc.scales[n * groups + g]));
            // A column's scale may lie up to seven above the least.
            let base = scales.clone().min()?;
            for (column, scale) in columns.iter_mut().zip(scales) {
                *column = u8::try_from(16 * u16::from(scale - base)).ok().filter(|c| *c < 128)?;
            }
            let value = |code: u8| {
                quant::e2m1_decode(code) * quant::e8m0_decode(base.saturating_add(code / 16))
            };
            of_group.push((numbered((&mut bases, &mut tables), base, value)?, columns));
        }
    }
    let mut wide = Wide::empty(desc, Codes::Fp4 { tables, of_group });
    for n in 0..desc.rows {
        for k in 0..desc.cols {
            let code = desc.data[(n * desc.cols + k) / 2] >> (4 * (k % 2)) & 15;
            let (vector, half) = place(n % WIDTH, k % STEP);
            let at = wide.line(n, k);
            wide.lines[at].0[byte(vector, half)] |= code << (4 * (vector / 2));
        }
    }
    Some(wide)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Matrix, Rng};

    #[test]
    fn every_element_of_a_packed_matrix_is_the_checkpoint_s() {
        let mut rng = Rng::new(5);
        for (format, rows, cols) in [
            (WeightFormat::Fp8Block128, 145, 200),
            (WeightFormat::Fp4Group32, 37, 96),
            (WeightFormat::Bf16, 20, 13),
        ] {
            let m = Matrix::random(&mut rng, format, rows, cols);
            let (data, scales) = (&m.data[..], &m.scales[..]);
            let desc = WeightDesc { format, rows, cols, data, scales, round_to_bf16: false };
            let wide = pack(&desc).unwrap();
            let mut row = vec![0.0; cols];
            for n in 0..rows {
                pack::dequantise_row(&desc, n, &mut row);
                for (k, want) in row.iter().enumerate() {
                    let got = wide.value(n, k);
                    assert_eq!(got.to_bits(), want.to_bits(), "{format:?} {n} {k}");
                }
            }
        }
    }

    #[test]
    fn numbers_that_the_products_would_flush_are_refused() {
        for (value, fits) in [(LEAST_W, true), (-LEAST_W, true), (LEAST_W / 2.0, false)] {
            let data: Vec<u8> = [1.0, value].iter().flat_map(|v: &f32| v.to_le_bytes()).collect();
            let format = WeightFormat::F32;
            let (data, scales) = (&data[..], &[][..]);
            let desc = WeightDesc { format, rows: 1, cols: 2, data, scales, round_to_bf16: false };
            assert_eq!(pack(&desc).is_some(), fits, "{value}");
        }
        let (rows, cols, scales) = (1, 1, &[127 - 50][..]);
        let format = WeightFormat::Fp8Block128;
        let desc = WeightDesc { format, rows, cols, data: &[1], scales, round_to_bf16: false };
        // Its table has numbers that are too small, and so has its only element.
        assert!(pack(&desc).is_none());
    }
}
