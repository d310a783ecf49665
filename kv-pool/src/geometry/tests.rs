//! The published page sizes, and what must hold for every geometry.

use super::*;
use alloc::format;
use alloc::string::ToString;
use alloc::vec;

fn shape() -> ModelShape {
    use LayerKind::{C4, C128, Window};
    ModelShape {
        layers: vec![Window, Window, C4, C128, C4, C128],
        head_dim: 512,
        rope_dim: 64,
        index_head_dim: 128,
        window_tokens: 128,
    }
}

fn geometry(numerics: Numerics, index: IndexKeyType) -> Geometry {
    Geometry::new(shape(), numerics, index).expect("a defined shape")
}

#[test]
fn page_sizes_are_the_published_ones() {
    for (index, bytes) in
        [(IndexKeyType::Fp4, 4352), (IndexKeyType::Fp8, 8448), (IndexKeyType::Bf16, 16_384)]
    {
        let g = geometry(Numerics::Official, index);
        let sizes = CacheKind::ALL.map(|kind| g.page_bytes(kind));
        assert_eq!(sizes, [37_440, 37_440, bytes, 1728, 40_960, 10_240, 6144, 0]);
        let g = geometry(Numerics::Reference, index);
        let sizes = CacheKind::ALL.map(|kind| g.page_bytes(kind));
        assert_eq!(sizes, [131_072, 131_072, 32_768, 4096, 40_960, 10_240, 6144, 0]);
        let rows = CacheKind::ALL.map(|kind| g.rows_per_page(kind));
        assert_eq!(rows, [64, 64, 64, 2, 1, 1, 1, 0]);
    }
}

#[test]
fn v4_rows_lie_where_the_format_says() {
    let layout = geometry(Numerics::Official, IndexKeyType::Fp8).row_layout(CacheKind::C4Kv);
    assert_eq!((layout.data_bytes, layout.scale_bytes), (576, 8));
    assert_eq!((layout.data_offset(63), layout.scale_offset(0)), (63 * 576, 64 * 576));
    assert_eq!(layout.scale_offset(63), 64 * 576 + 63 * 8);
}

#[test]
fn extents_hold_exactly_the_rows() {
    for numerics in Numerics::ALL {
        for index in IndexKeyType::ALL {
            let g = geometry(numerics, index);
            for kind in CacheKind::ALL {
                let layout = g.row_layout(kind);
                for rows in 0..=layout.rows {
                    let mut expected = vec![false; layout.page_bytes as usize];
                    for row in 0..rows {
                        let at = layout.data_offset(row) as usize;
                        expected[at..at + layout.data_bytes as usize].fill(true);
                        let at = layout.scale_offset(row) as usize;
                        expected[at..at + layout.scale_bytes as usize].fill(true);
                    }
                    let mut covered = vec![false; layout.page_bytes as usize];
                    let extents = g.extents(kind, rows);
                    for extent in extents {
                        assert!(extent.len > 0);
                        assert!(!covered[extent.range()].contains(&true));
                        covered[extent.range()].fill(true);
                    }
                    assert!(covered == expected, "{kind} {rows}");
                    let bytes = rows * (layout.data_bytes + layout.scale_bytes);
                    assert_eq!(extents.bytes(), bytes);
                }
                if layout.rows > 0 {
                    assert_eq!(g.extents(kind, layout.rows).len(), 1);
                }
            }
        }
    }
}

#[test]
fn sections_are_layer_first_and_found_again() {
    let g = geometry(Numerics::Official, IndexKeyType::Fp4);
    let names = |pool| -> Vec<String> {
        g.sections(pool).iter().map(|s| format!("{}.{}", s.layer, s.kind)).collect()
    };
    let block = ["2.c4_kv", "2.c4_index", "3.c128_kv", "4.c4_kv", "4.c4_index", "5.c128_kv"];
    assert_eq!(names(PoolKind::Block), block);
    assert_eq!(names(PoolKind::Window).len(), 6);
    assert_eq!(names(PoolKind::Carry).len(), 6);
    for pool in PoolKind::ALL {
        for (position, section) in g.sections(pool).iter().enumerate() {
            assert_eq!(g.section(section.kind, section.layer), Some(position));
        }
    }
    for (kind, layer) in [
        (CacheKind::C4Kv, 0),
        (CacheKind::C4Kv, 3),
        (CacheKind::C128Kv, 4),
        (CacheKind::Window, 6),
        (CacheKind::Draft, 0),
    ] {
        assert_eq!(g.section(kind, layer), None, "{kind} {layer}");
    }
}

#[test]
fn pages_of_a_pool_never_overlap_and_fill_it() {
    let g = geometry(Numerics::Official, IndexKeyType::Fp4);
    for pool in PoolKind::ALL {
        for pages in [1, 3, 7] {
            let mut end = 0;
            for (position, section) in g.sections(pool).iter().enumerate() {
                let base = g.section_base(pool, position, pages);
                assert!(base >= end && base - end < 4096 && base.is_multiple_of(4096));
                for index in 0..pages {
                    let offset = g.page_offset(pool, position, pages, index);
                    assert_eq!(offset, base + u64::from(index * section.page_bytes));
                }
                end = base + u64::from(pages * section.page_bytes);
            }
            assert_eq!(g.pool_bytes(pool, pages), end.next_multiple_of(4096));
        }
    }
}

#[test]
fn flash_and_pro_block_bytes_match_sglang() {
    use LayerKind::{C4, C128, Window};
    let mut layers = vec![Window, Window];
    layers.extend([C4, C128].into_iter().cycle().take(41));
    let flash = ModelShape { layers, ..shape() };
    let g = Geometry::new(flash, Numerics::Official, IndexKeyType::Fp8).unwrap();
    assert_eq!(g.bytes_per_index(PoolKind::Block), 998_208);
    assert_eq!(g.sections(PoolKind::Block).len(), 62);
    let mut layers = vec![C128, C128];
    layers.extend([C4, C128].into_iter().cycle().take(59));
    let pro = ModelShape { layers, ..shape() };
    let g = Geometry::new(pro, Numerics::Official, IndexKeyType::Fp8).unwrap();
    assert_eq!(g.bytes_per_index(PoolKind::Block), 1_430_208);
    assert_eq!(g.sections(PoolKind::Block).len(), 91);
}

#[test]
fn undefined_shapes_are_refused() {
    let build = |change: fn(&mut ModelShape), numerics| {
        let mut shape = shape();
        change(&mut shape);
        Geometry::new(shape, numerics, IndexKeyType::Fp4).map(|_| ())
    };
    use Numerics::{Official, Reference};
    let no_layers = GeometryError::Layers { layers: 0, limit: 1024 };
    assert_eq!(build(|s| s.layers.clear(), Official), Err(no_layers));
    let many = GeometryError::Layers { layers: 1025, limit: 1024 };
    assert_eq!(build(|s| s.layers = vec![LayerKind::C4; 1025], Official), Err(many));
    let window = GeometryError::Window { window_tokens: 64 };
    assert_eq!(build(|s| s.window_tokens = 64, Reference), Err(window));
    assert!(build(|s| s.head_dim = 256, Official).is_err());
    assert!(build(|s| s.head_dim = 256, Reference).is_ok());
    assert!(build(|s| s.rope_dim = 520, Reference).is_err());
    assert!(build(|s| s.index_head_dim = 0, Reference).is_err());
    assert!(build(|s| s.head_dim = 1 << 31, Reference).is_err());
}

#[test]
fn names_parse_back() {
    for value in IndexKeyType::ALL {
        assert_eq!(value.to_string().parse(), Ok(value));
    }
    for value in Numerics::ALL {
        assert_eq!(value.to_string().parse(), Ok(value));
    }
    let error = "FP8".parse::<IndexKeyType>().unwrap_err();
    assert_eq!(error.to_string(), "unknown index key type \"FP8\", expected one of fp4, fp8, bf16");
}
