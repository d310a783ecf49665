//! Index scores, selection, and both at once.

use crate::{Bench, FP8, STREAM, floor_us, shuffled};
use dsa_kernels::MemSlice;
use dsa_kernels::cuda::{
    IndexKeys, ScorePath, ScoreRows, SelectFused, SelectRows, fused_scratch_bytes,
};
use dsa_kernels::ops::{PagedCache, RowFormat};

pub(crate) fn run(b: &mut Bench) {
    for rows in [2048, 8192, 32_768, 131_072] {
        for batch in [1, 8, 64, 128] {
            select(b, rows, batch);
        }
    }
    for context in [8, 32, 128, 512] {
        for batch in [1, 8, 64, 128] {
            score(b, RowFormat::IndexFp8, context, batch);
        }
    }
    for format in [RowFormat::IndexFp4, RowFormat::IndexBf16] {
        score(b, format, 32, 1);
        score(b, format, 32, 64);
    }
}

fn select(b: &mut Bench, rows: u32, batch: u32) {
    let name = format!("select.b{batch}_r{rows}");
    if !b.wants(&name) {
        return;
    }
    let bytes = 4 * rows as usize * batch as usize;
    let sets = Bench::sets(bytes);
    let inputs: Vec<(MemSlice, MemSlice)> =
        (0..sets).map(|_| (b.floats(bytes / 4), b.random(4 * 512 * batch as usize))).collect();
    let visible = b.u32s(&vec![rows; batch as usize]);
    let us = b.time(sets, |set| {
        let (scores, selected) = &inputs[set];
        b.kernels.select_rows(
            STREAM,
            &SelectRows {
                scores,
                score_stride: rows,
                visible: &visible,
                tokens: batch,
                top_k: 512,
                selected,
            },
        )
    });
    b.report(&name, us, floor_us((bytes + 2048 * batch as usize) as f64, 0.0, 1.0));
}

/// Pages whose bytes are finite codes and scales; page tables in random order.
struct Input {
    keys: MemSlice,
    pages: MemSlice,
    codes: MemSlice,
    weights: MemSlice,
    scores: MemSlice,
    selected: MemSlice,
}

fn input(b: &mut Bench, format: RowFormat, rows: u32, batch: u32) -> Input {
    let (data, scales) = (64 * format.data_bytes(), 64 * format.scale_bytes());
    let count = (rows / 64 * batch) as usize;
    // 31 different pages, repeated: their values are what rows of this format hold.
    let mut block = Vec::new();
    for _ in 0..31 {
        match format {
            RowFormat::IndexFp8 => {
                block.extend(
                    (0..data).map(|_| (b.rng.bits() as u8 & 0x87) | ((b.rng.below(15) as u8) << 3)),
                );
                block.extend((0..64).flat_map(|_| (0.05 + 0.04 * b.rng.unit()).to_le_bytes()));
            }
            RowFormat::IndexFp4 => {
                block.extend((0..data).map(|_| b.rng.bits() as u8));
                block.extend((0..scales).map(|_| 124 + b.rng.below(4) as u8));
            }
            _ => block.extend(
                (0..data / 2)
                    .flat_map(|_| dsa_kernels::quant::bf16_encode(b.rng.unit()).to_le_bytes()),
            ),
        }
    }
    let heads = 64 * batch as usize;
    let codes: Vec<u8> = if format == RowFormat::IndexFp8 {
        (0..heads * 128)
            .map(|_| (b.rng.bits() as u8 & 0x87) | ((b.rng.below(15) as u8) << 3))
            .collect()
    } else {
        let value = |b: &mut Bench| dsa_kernels::quant::bf16_encode(b.rng.unit()).to_le_bytes();
        (0..heads * 128).flat_map(|_| value(b)).collect()
    };
    let pages = shuffled(&mut b.rng, count);
    Input {
        keys: b.filled(count * (data + scales), &block),
        pages: b.u32s(&pages),
        codes: b.bytes(&codes),
        weights: b.floats(heads),
        scores: b.random(4 * rows as usize * batch as usize),
        selected: b.random(4 * 512 * batch as usize),
    }
}

fn score(b: &mut Bench, format: RowFormat, context_k: u32, batch: u32) {
    let kind = match format {
        RowFormat::IndexFp8 => "",
        RowFormat::IndexFp4 => "_fp4",
        _ => "_bf16",
    };
    let case = format!("b{batch}_c{context_k}k");
    let names = [
        format!("score{kind}.{case}"),
        format!("fused{kind}.{case}"),
        format!("pair{kind}.{case}"),
    ];
    if !names.iter().any(|name| b.wants(name)) {
        return;
    }
    let rows = context_k * 256;
    let row_bytes = (format.data_bytes() + format.scale_bytes()) as u64;
    let key_bytes = u64::from(rows) * row_bytes * u64::from(batch);
    let sets = Bench::sets(key_bytes as usize);
    let inputs: Vec<Input> = (0..sets).map(|_| input(b, format, rows, batch)).collect();
    let visible = b.u32s(&vec![rows; batch as usize]);
    let scratch = b.bytes(&vec![0; fused_scratch_bytes(batch, rows / 64) as usize]);
    let keys = |set: usize| IndexKeys {
        cache: PagedCache {
            mem: &inputs[set].keys.mem,
            base: 0,
            stride: 64 * row_bytes,
            rows_per_page: 64,
            format,
        },
        pages: &inputs[set].pages,
        pages_per_seq: rows / 64,
        visible: &visible,
        tokens_per_seq: 1,
        codes: &inputs[set].codes,
        weights: &inputs[set].weights,
        tokens: batch,
        path: ScorePath::Best,
    };
    let score = |set: usize| {
        let a = ScoreRows { keys: keys(set), scores: &inputs[set].scores, score_stride: rows };
        b.kernels.score_rows(STREAM, &a)
    };
    let select = |set: usize| {
        let Input { scores, selected, .. } = &inputs[set];
        let a = SelectRows {
            scores,
            score_stride: rows,
            visible: &visible,
            tokens: batch,
            top_k: 512,
            selected,
        };
        b.kernels.select_rows(STREAM, &a)
    };
    let operations = 2.0 * 64.0 * 128.0 * f64::from(rows) * f64::from(batch);
    let score_bytes = 4.0 * f64::from(rows) * f64::from(batch);
    let query_bytes = f64::from(batch) * 64.0 * 132.0;
    let floor = |extra: f64| floor_us(key_bytes as f64 + query_bytes + extra, operations, FP8);
    b.report(&names[0], b.time(sets, score), floor(score_bytes));
    b.report(&names[2], b.time(sets, |set| score(set).and_then(|()| select(set))), floor(0.0));
    if b.kernels.fits_fused(batch, rows / 64) {
        let us = b.time(sets, |set| {
            let selected = &inputs[set].selected;
            let a = SelectFused { keys: keys(set), top_k: 512, selected, scratch: &scratch };
            b.kernels.select_fused(STREAM, &a)
        });
        b.report(&names[1], us, floor(2048.0 * f64::from(batch)));
    }
}
