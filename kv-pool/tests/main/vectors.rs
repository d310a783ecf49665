//! Frozen values. `tests/vectors/make.py`, which shares no code with the crate, made them.

use crate::common::{check_snapshot, small_geometry};
use kv_pool::{
    CacheKind, ChainHash, Fingerprint, FingerprintInput, IndexKeyType, Namespace, Numerics,
    PageDigest, PlanEntry, PoolKind, TagInput, digest, plan_hash, tag,
};
use std::collections::BTreeMap;

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 131 + (i >> 8) * 17 + seed) as u8).collect()
}

fn array<const N: usize>(seed: usize) -> [u8; N] {
    pattern(N, seed).try_into().unwrap()
}

fn tokens(count: u32) -> Vec<u32> {
    (0..count).map(|i| i.wrapping_mul(2_654_435_761) >> 12).collect()
}

/// Name to value, as committed.
fn committed() -> BTreeMap<String, String> {
    let path = format!("{}/tests/vectors/vectors.txt", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let pairs = text.lines().map(|line| line.rsplit_once(' ').unwrap());
    pairs.map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

fn fingerprint(index: IndexKeyType) -> Fingerprint {
    let input = FingerprintInput {
        geometry: small_geometry(Numerics::Official, index),
        model_digest: array(1),
        tokenizer_digest: array(2),
        model_type: "deepseek_v4".to_string(),
    };
    input.fingerprint()
}

#[test]
fn geometry_texts_are_unchanged() {
    for index in IndexKeyType::ALL {
        let text = small_geometry(Numerics::Official, index).describe();
        check_snapshot(&format!("vectors/geometry_official_{index}.txt"), &text);
    }
    let text = small_geometry(Numerics::Reference, IndexKeyType::Fp4).describe();
    check_snapshot("vectors/geometry_reference_fp4.txt", &text);
}

#[test]
fn values_are_unchanged() {
    let mut actual = BTreeMap::new();
    let mut note = |name: String, value: String| assert!(actual.insert(name, value).is_none());
    for len in [0, 1, 7, 8, 63, 64, 65, 1023, 1024, 1025, 1168, 4352, 8448, 16_384, 37_376] {
        note(format!("digest {len}"), digest(&pattern(len, 3)).to_string());
        note(format!("digest zeros {len}"), digest(&vec![0; len]).to_string());
    }
    for kind in CacheKind::ALL {
        let input = TagInput {
            fingerprint: Fingerprint(array(4)),
            kind,
            layer: 0x0102,
            chain: ChainHash(array(5)),
            page_no: 0x0304_0506,
            rows: 61,
        };
        let value = tag(&PageDigest(array(6)), &input);
        note(format!("tag {}", kind as u8), value.to_string());
    }
    for (name, salt) in [("empty", &b""[..]), ("tenant", b"tenant")] {
        let namespace = Namespace::new(Fingerprint(array(7)), salt);
        note(format!("chain {name} root"), namespace.root().to_string());
        for (block, hash) in namespace.chain(&tokens(700)).into_iter().enumerate() {
            note(format!("chain {name} {block}"), hash.to_string());
        }
    }
    for index in IndexKeyType::ALL {
        note(format!("fingerprint official {index}"), fingerprint(index).to_string());
    }
    let entry = |page_no| PlanEntry {
        kind: CacheKind::C4Index,
        layer: 9,
        pool: PoolKind::Block,
        page_no,
        rows: 64,
        bytes: 8448,
    };
    for count in [0, 1, 100] {
        let plan: Vec<PlanEntry> = (0..count).map(entry).collect();
        note(format!("plan {count}"), Fingerprint(plan_hash(&plan)).to_string());
    }
    let committed = committed();
    for (name, value) in &actual {
        assert_eq!(committed.get(name), Some(value), "{name}");
    }
    assert_eq!(actual.len(), committed.len());
}
