//! Single rules of the byte format.

use hicache::ObjectKey;
use hicache::store::format::{
    FormatError, HEADER_BYTES_MAX, Header, OBJECT_BYTES_MAX, SECTIONS_MAX, Section, object_bytes,
    verify_object,
};
use hicache::testing::conformance::{FINGERPRINT, key, object};
use kv_pool::{CacheKind, ChainHash, Fingerprint, PageTag, TagInput, digest, tag};

/// Changes bytes of the header and makes its digest right again.
pub(crate) fn rewritten(change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut bytes = object(key(1), 0);
    change(&mut bytes);
    bytes[96..112].fill(0);
    let value = digest(&bytes[..4096]);
    bytes[96..112].copy_from_slice(&value.0);
    bytes
}

/// Makes a header say that it has a payload of so many bytes, all but a few in its first section.
pub(crate) fn says_bytes(header: &mut [u8], payload: u64) {
    let others: u32 = (1..3).map(|n| u32_at(header, 128 + n * 32 + 12)).sum();
    let first = u32::try_from(payload).unwrap() - others;
    header[128 + 12..128 + 16].copy_from_slice(&first.to_le_bytes());
    header[72..80].copy_from_slice(&payload.to_le_bytes());
}

fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(bytes[offset..offset + 4].try_into().unwrap())
}

#[test]
fn a_tag_is_that_of_the_hand_off() {
    let bytes = object(key(1), 0);
    let header = verify_object(&bytes).unwrap();
    assert_eq!(header.object_bytes(), bytes.len() as u64);
    let mut end = 4096;
    for (section, place) in header.places() {
        assert_eq!(place.start, end, "no gaps");
        end = place.end;
        let &Section { kind, layer, rows, page_no, .. } = section;
        let (fingerprint, chain) = (FINGERPRINT, key(1).chain);
        let input = TagInput { fingerprint, kind, layer, chain, page_no, rows };
        assert_eq!(section.tag, tag(&digest(&bytes[place]), &input));
    }
}

#[test]
fn every_rule_of_the_header_has_its_error() {
    let error = |change: fn(&mut [u8])| Header::decode(&rewritten(change)).unwrap_err();
    assert!(matches!(error(|b| b[0] = 0), FormatError::Magic { .. }));
    assert_eq!(error(|b| b[8] = 2), FormatError::Version { found: 2 });
    assert_eq!(error(|b| b[13] = 32), FormatError::HeaderBytes { found: 8192, wanted: 4096 });
    assert_eq!(error(|b| b[64] = 3), FormatError::UnknownPart { found: 3 });
    assert_eq!(error(|b| b[128] = 8), FormatError::UnknownKind { section: 0, found: 8 });
    for offset in [65, 67, 84, 95, 112, 127, 128 + 32 + 1, 128 + 3 * 32, 4095] {
        let bytes = rewritten(|b| b[offset] = 1);
        assert_eq!(Header::decode(&bytes), Err(FormatError::Reserved { offset }));
    }
    assert_eq!(error(|b| b[70] = 1), FormatError::Sections { found: 65_539 });
    let payload = error(|b| b[72] ^= 1);
    assert!(matches!(payload, FormatError::PayloadBytes { found, wanted } if found ^ wanted == 1));
    let most = rewritten(|b| says_bytes(b, OBJECT_BYTES_MAX - 4096));
    assert_eq!(Header::decode(&most).unwrap().object_bytes(), OBJECT_BYTES_MAX);
    let long = rewritten(|b| says_bytes(b, OBJECT_BYTES_MAX - 4095));
    let found = OBJECT_BYTES_MAX + 4096;
    assert_eq!(Header::decode(&long), Err(FormatError::TooLong { found }));
    let mut bytes = object(key(1), 0);
    bytes[81] ^= 1;
    assert!(matches!(Header::decode(&bytes), Err(FormatError::HeaderDigest { .. })));
    for (found, wanted) in [(0, 128), (127, 128), (128, 4096), (4095, 4096)] {
        let error = FormatError::Short { found, wanted };
        assert_eq!(Header::decode(&object(key(1), 0)[..found]), Err(error));
    }
}

#[test]
fn damage_is_named_by_cache_and_layer() {
    let mut bytes = object(key(1), 0);
    let header = Header::decode(&bytes).unwrap();
    let places: Vec<_> = header.places().map(|(section, place)| (*section, place)).collect();
    for (section, place) in places {
        bytes[place.start] ^= 1;
        let error = verify_object(&bytes).unwrap_err();
        let FormatError::Damaged { kind, layer, .. } = error else { panic!("{error}") };
        assert_eq!((kind, layer), (section.kind, section.layer));
        let text = error.to_string();
        assert!(text.starts_with(&format!("{kind} of layer {layer}, page 3,")), "{text}");
        bytes[place.start] ^= 1;
    }
    let last = bytes.len() - 1;
    bytes[last] = 1;
    assert_eq!(verify_object(&bytes), Err(FormatError::Padding { offset: last }));
    bytes[last] = 0;
    bytes.push(0);
    assert!(matches!(verify_object(&bytes), Err(FormatError::ObjectBytes { .. })));
    bytes.truncate(last - 4095);
    assert!(matches!(verify_object(&bytes), Err(FormatError::ObjectBytes { .. })));
}

#[test]
fn another_identity_is_named() {
    let header = verify_object(&object(key(2), 0)).unwrap();
    header.check_identity(&FINGERPRINT, &key(2)).unwrap();
    let other = Fingerprint([7; 16]);
    let error = header.check_identity(&other, &key(2)).unwrap_err();
    assert_eq!(error, FormatError::OtherFingerprint { found: FINGERPRINT, wanted: other });
    let wanted = ObjectKey::block(ChainHash([1; 32]));
    let error = header.check_identity(&FINGERPRINT, &wanted).unwrap_err();
    assert_eq!(error, FormatError::OtherChain { found: key(2).chain, wanted: wanted.chain });
    let error = header.check_identity(&FINGERPRINT, &ObjectKey::boundary(key(2).chain));
    assert_eq!(error.unwrap_err().to_string(), "object is a block, a boundary wanted");
}

#[test]
fn as_many_sections_as_may_be_fit() {
    let (kind, tag) = (CacheKind::Window, PageTag([0; 16]));
    let section = Section { kind, layer: 0, rows: 1, page_no: 0, bytes: 3, tag };
    let sections = vec![section; SECTIONS_MAX];
    let mut header = Header { fingerprint: FINGERPRINT, key: key(1), tokens: 1, sections };
    let mut bytes = vec![9; header.object_bytes() as usize];
    header.seal(&mut bytes).unwrap();
    assert_eq!(verify_object(&bytes), Ok(header.clone()));
    assert_eq!(Header::header_bytes(SECTIONS_MAX), HEADER_BYTES_MAX);
    header.sections.push(section);
    let error = FormatError::Sections { found: SECTIONS_MAX + 1 };
    assert_eq!(header.encode_into(&mut bytes), Err(error));
    header.sections.truncate(1);
    header.sections[0].bytes = u32::try_from(OBJECT_BYTES_MAX).unwrap();
    let error = FormatError::TooLong { found: OBJECT_BYTES_MAX + 4096 };
    assert_eq!(header.encode_into(&mut bytes), Err(error));
    header.sections[0].bytes = 3;
    assert!(matches!(header.seal(&mut bytes), Err(FormatError::ObjectBytes { .. })));
    let short = FormatError::Short { found: 4095, wanted: 4096 };
    assert_eq!(header.encode_into(&mut bytes[..4095]), Err(short));
    header.sections.clear();
    header.seal(&mut bytes[..4096]).unwrap();
    assert_eq!(verify_object(&bytes[..4096]), Ok(header), "an object of nothing");
    assert_eq!(object_bytes(1, 1), 8192);
    assert_eq!(object_bytes(0, 4096), 8192);
}

#[test]
fn only_the_header_is_written_into_a_header() {
    let bytes = object(key(1), 0);
    let header = Header::decode(&bytes).unwrap();
    let mut target = vec![0xff; 4096];
    header.encode_into(&mut target).unwrap();
    assert_eq!(target, bytes[..4096]);
    let mut whole = vec![0xff; bytes.len()];
    for (_, place) in header.places() {
        whole[place.clone()].copy_from_slice(&bytes[place]);
    }
    header.encode_into(&mut whole).unwrap();
    assert_eq!(whole, bytes);
}
