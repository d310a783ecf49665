//! The argument structs of `kernels/abi.h`, in Rust.
//!
//! A test compares names, types and order with the header; the hash of the header binds them to the
//! compiled kernels.

/// The header, as the kernels were compiled with it.
const HEADER: &str = include_str!("../../kernels/abi.h");

/// FNV-1a of the header, as `cargo xtask kernels build` computes it.
pub(super) const fn hash() -> u64 {
    let bytes = HEADER.as_bytes();
    let (mut hash, mut i) = (0xcbf2_9ce4_8422_2325u64, 0);
    while i < bytes.len() {
        hash = (hash ^ bytes[i] as u64).wrapping_mul(0x0100_0000_01b3);
        i += 1;
    }
    hash
}

/// A struct that a kernel takes by value.
pub(super) trait Arguments: Copy {}

/// Defines structs and, for the test, lists their fields.
macro_rules! structs {
    ($($(#[$meta:meta])* struct $name:ident { $($field:ident: $kind:ident,)* })*) => {
        $(
            $(#[$meta])*
            #[derive(Clone, Copy, Debug, Default)]
            #[repr(C)]
            pub(super) struct $name { $(pub(super) $field: $kind,)* }
            impl Arguments for $name {}
        )*
        #[cfg(test)]
        const FIELDS: &[(&str, &[(&str, &str)])] =
            &[$((stringify!($name), &[$((stringify!($field), stringify!($kind)),)*]),)*];
    };
}

/// A tensor map, written by the driver.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
pub(super) struct TensorMap {
    pub(super) opaque: [u64; 16],
}

structs! {
    struct Cache {
        base: u64,
        stride: u64,
        pages: u32,
        rows_per_page: u32,
    }
    struct DigestArgs {
        base: u64,
        stride: u64,
        index: u64,
        out: u64,
        refused: u64,
        bytes: u32,
        count: u32,
        pages: u32,
        warps_per_page: u32,
    }
    struct MoveArgs {
        source: u64,
        source_stride: u64,
        source_index: u64,
        target: u64,
        target_stride: u64,
        target_index: u64,
        refused: u64,
        reciprocal: u64,
        source_pages: u32,
        target_pages: u32,
        page_vectors: u32,
        count: u32,
    }
    struct StoreArgs {
        rows: u64,
        weight: u64,
        table: u64,
        targets: u64,
        refused: u64,
        cache: Cache,
        eps: f32,
        rounding: u32,
        count: u32,
        reserved: u32,
    }
    struct CompressArgs {
        kv: u64,
        gate: u64,
        ape: u64,
        carry: u64,
        seqs: u64,
        rows: u64,
        weight: u64,
        table: u64,
        targets: u64,
        refused: u64,
        carry_bytes: u64,
        cache: Cache,
        eps: f32,
        rounding: u32,
        dim: u32,
        count: u32,
        tokens: u32,
        rows_max: u32,
    }
    struct CompressSeq {
        carry_offset: u64,
        first: u32,
        count: u32,
        start_pos: u32,
        first_row: u32,
    }
    struct QueryArgs {
        q: u64,
        table: u64,
        weights: u64,
        codes: u64,
        weights_out: u64,
        tokens: u32,
        heads: u32,
    }
    struct ScoreArgs {
        keys_map: TensorMap,
        query_map: TensorMap,
        keys: u64,
        key_stride: u64,
        query: u64,
        weights: u64,
        pages: u64,
        visible: u64,
        scores: u64,
        selected: u64,
        scratch: u64,
        key_pages: u32,
        tokens: u32,
        tokens_per_seq: u32,
        pages_per_seq: u32,
        score_stride: u32,
        top_k: u32,
        capacity: u32,
        reserved: u32,
    }
    struct SelectArgs {
        scores: u64,
        visible: u64,
        selected: u64,
        tokens: u32,
        score_stride: u32,
        top_k: u32,
        reserved: u32,
    }
    struct AttendArgs {
        q: u64,
        positions: u64,
        window_pages: u64,
        window_first: u64,
        compressed_pages: u64,
        selected: u64,
        sinks: u64,
        out: u64,
        expanded: u64,
        window: Cache,
        compressed: Cache,
        tokens: u32,
        heads: u32,
        tokens_per_seq: u32,
        window_tokens: u32,
        window_pages_per_seq: u32,
        compressed_pages_per_seq: u32,
        top_k: u32,
        ratio: u32,
        scale: f32,
        reserved: u32,
    }
    struct Matrix {
        data: u64,
        scales: u64,
        rows: u32,
        cols: u32,
        format: u32,
        rounded: u32,
    }
    struct ExactEmbedArgs {
        ids: u64,
        out: u64,
        table: Matrix,
        tokens: u32,
        reserved: u32,
    }
    struct ExactHyperArgs {
        streams: u64,
        base: u64,
        scale: u64,
        post: u64,
        comb: u64,
        y: u64,
        maps: Matrix,
        hc_eps: f32,
        norm_eps: f32,
        iters: u32,
        rounding: u32,
        tokens: u32,
        hidden: u32,
    }
    struct ExactHyperPostArgs {
        streams: u64,
        out: u64,
        post: u64,
        comb: u64,
        tokens: u32,
        hidden: u32,
        rounding: u32,
        reserved: u32,
    }
    struct ExactNormArgs {
        x: u64,
        weight: u64,
        y: u64,
        groups: u32,
        dim: u32,
        eps: f32,
        rounding: u32,
    }
    struct ExactQuantArgs {
        x: u64,
        y: u64,
        rows: u32,
        cols: u32,
        part: u32,
        reserved: u32,
    }
    struct ExactLinearArgs {
        x: u64,
        y: u64,
        weight: Matrix,
        tokens: u32,
        groups: u32,
        rounding: u32,
        reserved: u32,
    }
    struct ExactRopeArgs {
        x: u64,
        table: u64,
        heads: u32,
        heads_per_row: u32,
        dim: u32,
        inverse: u32,
        rounding: u32,
        reserved: u32,
    }
    struct ExactScaleArgs {
        x: u64,
        count: u32,
        factor: f32,
    }
    struct ExactQueryArgs {
        q: u64,
        table: u64,
        heads: u32,
        heads_per_row: u32,
        kind: u32,
        reserved: u32,
    }
    struct ExactRowsArgs {
        rows: u64,
        targets: u64,
        cache: Cache,
        format: u32,
        count: u32,
    }
    struct ExactCompressArgs {
        kv: u64,
        gate: u64,
        ape: u64,
        carry: u64,
        seqs: u64,
        rows: u64,
        count: u32,
        dim: u32,
        rounding: u32,
        reserved: u32,
    }
    struct ExactToken {
        position: u32,
        window_first: u32,
        window_at: u32,
        rows_at: u32,
    }
    struct ExactScoreArgs {
        q: u64,
        w: u64,
        tokens: u64,
        pages: u64,
        scores: u64,
        keys: Cache,
        format: u32,
        count: u32,
        heads: u32,
        stride: u32,
    }
    struct ExactAttendArgs {
        q: u64,
        tokens: u64,
        pages: u64,
        selected: u64,
        sinks: u64,
        terms: u64,
        out: u64,
        window: Cache,
        rows: Cache,
        window_format: u32,
        rows_format: u32,
        count: u32,
        heads: u32,
        window_tokens: u32,
        ratio: u32,
        top_k: u32,
        terms_stride: u32,
        scale: f32,
        rounding: u32,
    }
    struct ExactRouteArgs {
        logits: u64,
        bias: u64,
        table: u64,
        ids: u64,
        experts: u64,
        weights: u64,
        tokens: u32,
        count: u32,
        k: u32,
        scale: f32,
    }
    struct ExactMoeArgs {
        x: u64,
        experts: u64,
        weights: u64,
        matrices: u64,
        inner: u64,
        out: u64,
        y: u64,
        tokens: u32,
        k: u32,
        hidden: u32,
        width: u32,
        count: u32,
        limit: f32,
        rounding: u32,
        reserved: u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Structs of the header with their fields.
    fn header() -> Vec<(String, Vec<(String, String)>)> {
        let mut structs: Vec<(String, Vec<(String, String)>)> = Vec::new();
        for line in HEADER.lines().map(str::trim) {
            if let Some(name) = line.strip_prefix("struct ").and_then(|l| l.strip_suffix(" {")) {
                structs.push((name.to_owned(), Vec::new()));
            } else if let Some((kind, field)) =
                line.strip_suffix(';').and_then(|l| l.split_once(' '))
                && let Some(last) = structs.last_mut()
                && !line.starts_with("typedef")
            {
                last.1.push((field.to_owned(), kind.to_owned()));
            }
        }
        structs.retain(|(name, _)| !name.starts_with("alignas"));
        structs
    }

    #[test]
    fn structs_are_those_of_the_header() {
        let own: Vec<(String, Vec<(String, String)>)> = FIELDS
            .iter()
            .map(|(name, fields)| {
                let fields = fields.iter().map(|(f, k)| ((*f).to_owned(), (*k).to_owned()));
                ((*name).to_owned(), fields.collect())
            })
            .collect();
        assert_eq!(own, header());
    }

    #[test]
    fn structs_have_no_padding() {
        assert_eq!(size_of::<Cache>(), 24);
        assert_eq!(size_of::<DigestArgs>(), 5 * 8 + 4 * 4);
        assert_eq!(size_of::<MoveArgs>(), 8 * 8 + 4 * 4);
        assert_eq!(size_of::<StoreArgs>(), 5 * 8 + 24 + 4 * 4);
        assert_eq!(size_of::<CompressArgs>(), 11 * 8 + 24 + 6 * 4);
        assert_eq!(size_of::<CompressSeq>(), 24);
        assert_eq!(size_of::<QueryArgs>(), 5 * 8 + 2 * 4);
        assert_eq!(size_of::<ScoreArgs>(), 384);
        assert_eq!(size_of::<SelectArgs>(), 3 * 8 + 4 * 4);
        assert_eq!(size_of::<AttendArgs>(), 9 * 8 + 2 * 24 + 10 * 4);
    }

    #[test]
    fn the_hash_follows_the_header() {
        assert_ne!(hash(), 0);
        assert!(HEADER.contains("struct DigestArgs"));
    }
}
