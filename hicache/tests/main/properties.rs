//! Random objects and random bytes.

use hicache::store::format::{Header, MAGIC, Section, verify_object};
use hicache::{ObjectKey, Part};
use kv_pool::{CacheKind, ChainHash, Fingerprint, PageTag, digest};
use proptest::prelude::*;

fn section() -> impl Strategy<Value = Section> {
    let kind = prop::sample::select(&CacheKind::ALL[..]);
    (kind, any::<u16>(), any::<u32>(), any::<u32>(), 0..700_u32).prop_map(
        |(kind, layer, rows, page_no, bytes)| {
            let tag = PageTag([0; 16]);
            Section { kind, layer, rows, page_no, bytes, tag }
        },
    )
}

/// A sealed object and its header.
fn object() -> impl Strategy<Value = (Header, Vec<u8>)> {
    let part = prop::sample::select(&Part::ALL[..]);
    let identity = (any::<[u8; 16]>(), any::<[u8; 32]>(), part, any::<u32>());
    (identity, prop::collection::vec(section(), 0..140), any::<u8>()).prop_map(
        |((fingerprint, chain, part, tokens), sections, seed)| {
            let key = ObjectKey { chain: ChainHash(chain), part };
            let mut header =
                Header { fingerprint: Fingerprint(fingerprint), key, tokens, sections };
            let mut bytes = vec![0; header.object_bytes() as usize];
            for (position, byte) in bytes.iter_mut().enumerate() {
                *byte = (position as u8).wrapping_mul(seed | 1) ^ seed;
            }
            header.seal(&mut bytes).unwrap();
            (header, bytes)
        },
    )
}

proptest! {
    #[test]
    fn an_object_reads_back((header, bytes) in object()) {
        prop_assert_eq!(verify_object(&bytes), Ok(header.clone()));
        prop_assert_eq!(Header::decode(&bytes), Ok(header));
    }

    #[test]
    fn any_flipped_bit_is_found((_, mut bytes) in object(), at in any::<prop::sample::Index>()) {
        let bit = at.index(bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(verify_object(&bytes).is_err(), "bit {}", bit);
    }

    #[test]
    fn another_length_is_found((_, mut bytes) in object(), at in any::<prop::sample::Index>()) {
        let mut longer = bytes.clone();
        longer.resize(bytes.len() + 1 + at.index(9000), 0);
        prop_assert!(verify_object(&longer).is_err());
        bytes.truncate(at.index(bytes.len()));
        prop_assert!(verify_object(&bytes).is_err());
    }

    #[test]
    fn any_bytes_are_answered(mut bytes in prop::collection::vec(any::<u8>(), 0..9000)) {
        prop_assert!(Header::decode(&bytes).is_err());
        // Further in: as a header by its first bytes.
        if bytes.len() >= 4096 {
            bytes[..8].copy_from_slice(&MAGIC);
            bytes[8..16].copy_from_slice(&[1, 0, 0, 0, 0, 16, 0, 0]);
            bytes[69..72].fill(0);
            bytes[68] %= 120;
            prop_assert!(verify_object(&bytes).is_err());
        }
    }

    /// Digests keep accidents out, not the rules behind them: with a digest that is right, too,
    /// whatever decodes encodes to the same bytes.
    #[test]
    fn what_decodes_is_canonical(
        (_, mut bytes) in object(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let header_bytes = Header::header_bytes(Header::decode(&bytes).unwrap().sections.len());
        for (at, value) in changes {
            bytes[at.index(header_bytes)] = value;
        }
        bytes[96..112].fill(0);
        let value = digest(&bytes[..header_bytes]);
        bytes[96..112].copy_from_slice(&value.0);
        if let Ok(header) = Header::decode(&bytes) {
            let mut again = vec![0xff; header_bytes];
            header.encode_into(&mut again).unwrap();
            prop_assert_eq!(&again[..], &bytes[..header_bytes]);
        }
        let _ = verify_object(&bytes);
    }
}
