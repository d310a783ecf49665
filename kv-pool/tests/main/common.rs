//! What several subjects use.

use kv_pool::{Geometry, IndexKeyType, LayerKind, ModelShape, Numerics};

/// Six layers of all kinds with DeepSeek-V4's head sizes.
pub(crate) fn small_geometry(numerics: Numerics, index: IndexKeyType) -> Geometry {
    use LayerKind::{C4, C128, Window};
    let shape = ModelShape {
        layers: vec![Window, Window, C4, C128, C4, C128],
        head_dim: 512,
        rope_dim: 64,
        index_head_dim: 128,
        window_tokens: 128,
    };
    Geometry::new(shape, numerics, index).unwrap()
}

/// Compares with a committed text; `KV_POOL_UPDATE=1` writes it instead.
pub(crate) fn check_snapshot(name: &str, actual: &str) {
    let path = format!("{}/tests/{name}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("KV_POOL_UPDATE").is_some() {
        std::fs::write(&path, actual).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap();
    for (number, (actual, expected)) in actual.lines().zip(expected.lines()).enumerate() {
        assert_eq!(actual, expected, "{name} line {}", number + 1);
    }
    assert_eq!(actual.lines().count(), expected.lines().count(), "lines of {name}");
}
