//! What the digest must notice, and that every way to compute it agrees.

use crate::common::small_geometry;
use kv_pool::{
    CacheKind, ChainHash, DigestStream, Fingerprint, IndexKeyType, Numerics, PageDigest, TagInput,
    copy_and_digest, digest, digest_parts, tag,
};
use proptest::prelude::*;
use std::collections::BTreeSet;

/// The definition, one word at a time and without any of the crate's code.
fn by_definition(bytes: &[u8]) -> PageDigest {
    const P: u64 = 0x9e37_79b9_7f4a_7c15;
    const Q: u64 = 0x9e37_79b1_85eb_ca87;
    fn table(seed: u64, n: u64) -> u64 {
        let z = seed.wrapping_add(P.wrapping_mul(n + 1));
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn mix(z: u64) -> u64 {
        let z = (z ^ (z >> 37)).wrapping_mul(0x1656_6791_9e37_79f9);
        z ^ (z >> 32)
    }
    fn fold(x: u64, y: u64) -> u64 {
        let product = u128::from(x) * u128::from(y);
        (product ^ (product >> 64)) as u64
    }
    let seed = 0x243f_6a88_85a3_08d3;
    let (mut low, mut high) = (0_u64, 0_u64);
    for (i, chunk) in (0_u64..).zip(bytes.chunks(1024)) {
        let mut a = [0_u64; 8];
        for (s, stripe) in (0_u64..).zip(chunk.chunks(64)) {
            for l in 0..8 {
                let byte = |b: usize| u64::from(stripe.get(8 * l + b).copied().unwrap_or(0));
                let v = (0..8).fold(0, |word, b| word | (byte(b) << (8 * b)));
                let k = v ^ table(seed, 8 * s + l as u64);
                a[l] = a[l].wrapping_add((k & 0xffff_ffff) * (k >> 32));
                a[l ^ 1] = a[l ^ 1].wrapping_add(v);
            }
        }
        let (p, q) = (i.wrapping_mul(P), i.wrapping_mul(Q));
        let (mut l, mut h) = (0_u64, 0_u64);
        for j in 0..4 {
            let key = |n: u64| table(seed ^ 1, n);
            let even = a[2 * j] ^ key(2 * j as u64).wrapping_add(p);
            let odd = a[2 * j + 1] ^ key(2 * j as u64 + 1).wrapping_sub(p);
            l = l.wrapping_add(fold(even, odd));
            let key = |n: u64| table(seed ^ 2, n);
            let front = a[j] ^ key(2 * j as u64).wrapping_sub(q);
            let back = a[j + 4] ^ key(2 * j as u64 + 1).wrapping_add(q);
            h = h.wrapping_add(fold(front, back));
        }
        low = low.wrapping_add(mix(l));
        high = high.wrapping_add(mix(h));
    }
    let n = bytes.len() as u64;
    low = low.wrapping_add(mix(high.wrapping_add(n.wrapping_mul(P))));
    high = high.wrapping_add(mix(low ^ n.wrapping_mul(Q)));
    let mut out = [0; 16];
    out[..8].copy_from_slice(&mix(low).to_le_bytes());
    out[8..].copy_from_slice(&mix(high).to_le_bytes());
    PageDigest(out)
}

fn bytes(len: usize, seed: u32) -> Vec<u8> {
    let mut state = seed | 1;
    let step = |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 11) as u8
    };
    (0..len).map(step).collect()
}

#[test]
fn every_length_agrees_with_the_definition() {
    for len in (0..2200).chain([4352, 8448, 37_376, 37_440]) {
        let page = bytes(len, len as u32 + 1);
        assert_eq!(digest(&page), by_definition(&page), "{len} bytes");
        let zeros = vec![0; len];
        assert_eq!(digest(&zeros), by_definition(&zeros), "{len} zeros");
    }
}

#[test]
fn any_flipped_bit_changes_it() {
    for base in [bytes(2500, 5), vec![0; 2500]] {
        let expected = digest(&base);
        let mut seen = BTreeSet::from([expected]);
        let mut page = base.clone();
        for bit in 0..8 * page.len() {
            page[bit / 8] ^= 1 << (bit % 8);
            assert!(seen.insert(digest(&page)), "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(digest(&page), expected);
    }
}

#[test]
fn truncation_and_extension_change_it() {
    for base in [bytes(3000, 9), vec![0; 3000]] {
        let all: BTreeSet<_> = (0..=base.len()).map(|len| digest(&base[..len])).collect();
        assert_eq!(all.len(), base.len() + 1);
    }
}

#[test]
fn any_two_swapped_units_change_it() {
    let base = bytes(8 * 1024, 77);
    for unit in [1, 4, 8, 64, 576, 1024] {
        let units = base.len() / unit;
        let pairs = (0..units.min(40)).flat_map(|a| (a + 1..units.min(40)).map(move |b| (a, b)));
        for (a, b) in pairs {
            let (a, b) = (a * unit..(a + 1) * unit, b * unit..(b + 1) * unit);
            if base[a.clone()] == base[b.clone()] {
                continue;
            }
            let mut page = base.clone();
            page[a.clone()].copy_from_slice(&base[b.clone()]);
            page[b.clone()].copy_from_slice(&base[a.clone()]);
            assert_ne!(digest(&page), digest(&base), "{a:?} and {b:?}");
        }
    }
}

#[test]
fn sparse_chunks_keep_their_place() {
    // One non-zero chunk in zeros: only its position differs.
    let mut seen = BTreeSet::new();
    for place in 0..64 {
        let mut page = vec![0; 64 * 1024];
        page[place * 1024] = 1;
        assert!(seen.insert(digest(&page)), "chunk {place}");
    }
}

#[test]
fn swapped_extents_and_zeroed_rows_change_it() {
    let geometry = small_geometry(Numerics::Official, IndexKeyType::Fp8);
    for kind in [CacheKind::Window, CacheKind::C4Kv, CacheKind::C4Index, CacheKind::C128Kv] {
        let layout = geometry.row_layout(kind);
        let page = bytes(layout.page_bytes as usize, 3);
        let parts = |page: &[u8], rows| -> Vec<Vec<u8>> {
            geometry.extents(kind, rows).iter().map(|e| page[e.range()].to_vec()).collect()
        };
        let of =
            |parts: &[Vec<u8>]| digest_parts(&parts.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let written = parts(&page, layout.rows - 1);
        assert_eq!(written.len(), 2);
        let expected = of(&written);
        let swapped: Vec<_> = written.iter().rev().cloned().collect();
        assert_ne!(of(&swapped), expected, "{kind}");
        for row in 0..layout.rows - 1 {
            let mut damaged = page.clone();
            let at = layout.data_offset(row) as usize;
            damaged[at..at + layout.data_bytes as usize].fill(0);
            assert_ne!(of(&parts(&damaged, layout.rows - 1)), expected, "{kind} row {row}");
            let mut damaged = page.clone();
            let at = layout.scale_offset(row) as usize;
            damaged[at..at + layout.scale_bytes as usize].fill(0);
            assert_ne!(of(&parts(&damaged, layout.rows - 1)), expected, "{kind} scale {row}");
        }
        // Rows that are not written are in no extent.
        let mut other = page.clone();
        let at = layout.data_offset(layout.rows - 1) as usize;
        other[at] ^= 1;
        assert_eq!(of(&parts(&other, layout.rows - 1)), expected);
    }
}

#[test]
fn the_tag_depends_on_every_part_of_the_identity() {
    let input = TagInput {
        fingerprint: Fingerprint([1; 16]),
        kind: CacheKind::C4Kv,
        layer: 2,
        chain: ChainHash([3; 32]),
        page_no: 4,
        rows: 5,
    };
    let content = digest(b"page");
    let mut seen = BTreeSet::from([tag(&content, &input)]);
    let mut note =
        |content: &PageDigest, input: &TagInput| assert!(seen.insert(tag(content, input)));
    note(&digest(b"Page"), &input);
    for byte in 0..16 {
        let mut other = input;
        other.fingerprint.0[byte] ^= 0x80;
        note(&content, &other);
    }
    for byte in 0..32 {
        let mut other = input;
        other.chain.0[byte] ^= 1;
        note(&content, &other);
    }
    for kind in CacheKind::ALL.into_iter().filter(|&kind| kind != input.kind) {
        note(&content, &TagInput { kind, ..input });
    }
    for bit in 0..16 {
        note(&content, &TagInput { layer: input.layer ^ (1 << bit), ..input });
    }
    for bit in 0..32 {
        note(&content, &TagInput { page_no: input.page_no ^ (1 << bit), ..input });
        note(&content, &TagInput { rows: input.rows ^ (1 << bit), ..input });
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn all_ways_agree(
        len in 0_usize..6000,
        seed: u32,
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
    ) {
        let page = bytes(len, seed);
        let expected = by_definition(&page);
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(len + 1)).collect();
        cuts.sort_unstable();
        let mut parts = vec![];
        let mut start = 0;
        for cut in cuts.into_iter().chain([len]) {
            parts.push(&page[start..cut]);
            start = cut;
        }
        prop_assert_eq!(digest_parts(&parts), expected);
        let mut stream = DigestStream::default();
        let mut seen = 0;
        for part in &parts {
            stream.update(part);
            seen += part.len();
            prop_assert_eq!(stream.finish(), digest(&page[..seen]));
        }
        let mut target = vec![0xaa; len];
        prop_assert_eq!(copy_and_digest(&mut target, &page), expected);
        prop_assert_eq!(target, page);
    }
}
