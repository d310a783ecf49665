//! Committed bytes of the formats.

use hicache::ObjectKey;
use hicache::store::format::{Header, Section, verify_object};
use kv_pool::{CacheKind, ChainHash, Fingerprint, PageTag};
use std::fmt::Write as _;

/// Rows of 32 bytes that are not all zero, as offset and bytes in hex.
const OBJECT_V1: &str = include_str!("../golden/object-v1.txt");

/// The object as it is made today.
fn made() -> (Header, Vec<u8>) {
    let fingerprint = Fingerprint(*b"golden layout 01");
    let key = ObjectKey::boundary(ChainHash(std::array::from_fn(|n| 3 * n as u8)));
    let section = |kind, layer, rows, page_no, bytes| {
        let tag = PageTag([0; 16]);
        Section { kind, layer, rows, page_no, bytes, tag }
    };
    let sections = vec![
        section(CacheKind::Window, 0, 2, 7, 96),
        section(CacheKind::C4Carry, 2, 8, 0, 45),
        section(CacheKind::C128Carry, 0x0103, 1, 0, 33),
    ];
    let mut header = Header { fingerprint, key, tokens: 0x0102_0300, sections };
    let mut bytes: Vec<u8> = (0..header.object_bytes()).map(|n| (n * n + 1) as u8).collect();
    header.seal(&mut bytes).unwrap();
    (header, bytes)
}

fn dump(bytes: &[u8]) -> String {
    let mut text = format!("bytes {}\n", bytes.len());
    for (number, row) in bytes.chunks(32).enumerate() {
        if row.iter().any(|&byte| byte != 0) {
            write!(text, "{:05}", 32 * number).unwrap();
            for (position, byte) in row.iter().enumerate() {
                let gap = if position % 8 == 0 { " " } else { "" };
                write!(text, "{gap}{byte:02x}").unwrap();
            }
            text.push('\n');
        }
    }
    text
}

fn load(text: &str) -> Vec<u8> {
    let (first, rows) = text.split_once('\n').unwrap();
    let mut bytes = vec![0; first.strip_prefix("bytes ").unwrap().parse().unwrap()];
    for row in rows.lines() {
        let (offset, hex) = row.split_once(' ').unwrap();
        let hex = hex.replace(' ', "");
        for (position, byte) in hex.as_bytes().chunks(2).enumerate() {
            let byte = u8::from_str_radix(std::str::from_utf8(byte).unwrap(), 16).unwrap();
            bytes[offset.parse::<usize>().unwrap() + position] = byte;
        }
    }
    bytes
}

#[test]
fn objects_of_version_1_still_load() {
    let bytes = load(OBJECT_V1);
    let header = verify_object(&bytes).unwrap();
    let (made, made_bytes) = made();
    assert_eq!(header, made);
    assert_eq!(dump(&bytes), OBJECT_V1);
    assert_eq!(dump(&made_bytes), OBJECT_V1, "other bytes need another version");
}

#[test]
fn every_single_bit_of_an_object_counts() {
    let mut bytes = load(OBJECT_V1);
    for bit in 0..bytes.len() * 8 {
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(verify_object(&bytes).is_err(), "bit {bit}");
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
    verify_object(&bytes).unwrap();
}
