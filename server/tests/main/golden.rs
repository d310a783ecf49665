//! Committed bytes of what others read.

use dsv4_server::net::kv_events::wire::{Batch, BlockHash, KvEvent, Medium};
use kv_pool::ChainHash;
use std::sync::Arc;

/// Names of batches and their payloads in hex, written by `golden/make.py` with another encoder.
const KV_EVENTS: &str = include_str!("../golden/kv-events.txt");

fn hash(first: u8, rest: u8) -> BlockHash {
    let mut chain = [0xee; 32];
    chain[..8].fill(rest);
    chain[0] = first;
    BlockHash::from(&ChainHash(chain))
}

fn stored(
    hash: BlockHash,
    parent: Option<BlockHash>,
    token: impl Fn(u32) -> u32,
    medium: Medium,
) -> KvEvent {
    let tokens: Arc<[u32]> = (0..256).map(token).collect();
    KvEvent::Stored { hash, parent, tokens, medium }
}

fn removed(hashes: Vec<BlockHash>, medium: Medium) -> KvEvent {
    KvEvent::Removed { hashes, medium }
}

fn batches() -> [(&'static str, f64, Vec<KvEvent>); 3] {
    let tokens = |n| n * n * n % 129_280;
    let (first, second) = (hash(0xff, 7), hash(1, 2));
    let edges =
        [i64::from_be_bytes([0x80, 0, 0, 0, 0, 0, 0, 0]), -1, 0, 127, 128, 65_536, -32, -33];
    [
        ("cleared", 0.0, vec![KvEvent::Cleared]),
        (
            "stored",
            1_764_501_000.25,
            vec![
                stored(first, None, tokens, Medium::Device),
                stored(second, Some(first), |n| (1 << 31) + n, Medium::Host),
                stored(hash(0, 0), Some(second), tokens, Medium::Disk),
            ],
        ),
        (
            "removed",
            0.1,
            vec![
                removed((0..20).map(|n| hash(0x7f, n)).collect(), Medium::Device),
                removed(edges.map(BlockHash).to_vec(), Medium::Host),
                removed(vec![BlockHash(5)], Medium::Disk),
                KvEvent::Cleared,
            ],
        ),
    ]
}

#[test]
fn batches_of_kv_events_have_the_committed_bytes() {
    let mut lines = KV_EVENTS.lines();
    for (name, time_s, events) in batches() {
        let bytes = Batch { seq: 9, time_s, events }.encode();
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(lines.next().unwrap(), format!("{name} {hex}"));
    }
    assert_eq!(lines.next(), None);
}
