//! The canonical text of a geometry.

use super::row::RowFormat;
use super::{BLOCK_TOKENS, Geometry, ModelShape, SCHEMA_VERSION, WINDOW_PAGE_ROWS, tokens_per_row};
use crate::id::CacheKind;
use alloc::string::String;
use core::fmt::{self, Write};

pub(super) fn describe(geometry: &Geometry) -> String {
    let mut text = String::new();
    write(&mut text, geometry).expect("writing to a string cannot fail");
    text
}

fn write(text: &mut String, geometry: &Geometry) -> fmt::Result {
    // Taken apart by name: a new field does not compile until it is described.
    let Geometry { shape, numerics, index, layouts, sections, first_section: _ } = geometry;
    let ModelShape { layers, head_dim, rope_dim, index_head_dim, window_tokens } = shape;
    writeln!(text, "layout schema {SCHEMA_VERSION}")?;
    writeln!(text, "numerics {numerics}, index keys {index}")?;
    write!(text, "head {head_dim}, rotary {rope_dim} (last), index head {index_head_dim}, ")?;
    writeln!(text, "window {window_tokens}")?;
    writeln!(text, "block {BLOCK_TOKENS} tokens, window page {WINDOW_PAGE_ROWS} positions")?;
    write!(text, "layers {}:", layers.len())?;
    for layer in layers {
        write!(text, " {}", layer.name())?;
    }
    writeln!(text)?;
    for kind in CacheKind::ALL {
        let (Some(format), Some(pool)) = (geometry.row_format(kind), kind.pool()) else {
            writeln!(text, "cache {} {kind}: none", kind as u8)?;
            continue;
        };
        let layout = layouts[kind as usize];
        write!(
            text,
            "cache {} {kind}: pool {pool}, ratio {}, {} rows a page, row {} B {}, scales {} B {}, ",
            kind as u8,
            tokens_per_row(kind),
            layout.rows,
            layout.data_bytes,
            elements(format),
            layout.scale_bytes,
            scales(format),
        )?;
        write!(text, "order data scales padding, page {} B, layers", layout.page_bytes)?;
        for section in sections[pool as usize].iter().filter(|section| section.kind == kind) {
            write!(text, " {}", section.layer)?;
        }
        writeln!(text)?;
    }
    Ok(())
}

const fn elements(format: RowFormat) -> &'static str {
    match format {
        RowFormat::KvV4 => "(448 e4m3, 64 bf16 le rotated)",
        RowFormat::KvF32 | RowFormat::IndexF32 => "(f32 le)",
        RowFormat::IndexFp8 => "(e4m3)",
        RowFormat::IndexFp4 => "(e2m1 pairs, even low)",
        RowFormat::IndexBf16 => "(bf16 le)",
        RowFormat::C4CarryF32 => {
            "(f32 le: 4 closed [kv_a score_a], 3 open [kv_a kv_b score_a score_b])"
        }
        RowFormat::C128CarryF32 => "(f32 le: max, sum, weighted sum)",
    }
}

const fn scales(format: RowFormat) -> &'static str {
    match format {
        RowFormat::KvV4 => "(7 e8m0 per 64, 1 zero)",
        RowFormat::IndexFp8 => "(f32 le amax/448)",
        RowFormat::IndexFp4 => "(e8m0 per 32)",
        RowFormat::KvF32
        | RowFormat::IndexF32
        | RowFormat::IndexBf16
        | RowFormat::C4CarryF32
        | RowFormat::C128CarryF32 => "(none)",
    }
}
