//! Page digests and moves.

use crate::{Bench, STREAM, floor_us, shuffled};
use dsa_kernels::cuda::{DigestPages, MovePages, PagePool};
use dsa_kernels::{Device, MemSlice, Place};

/// Index pages (FP8, BF16) and a page of 64 rows.
const PAGES: [u32; 3] = [8448, 16_384, 37_440];

pub(crate) fn run(b: &mut Bench) {
    for bytes in PAGES {
        digest(b, bytes, 32_768);
    }
    digest(b, 8448, 64);
    for bytes in PAGES {
        for (name, from, to, count) in [
            ("d2d", Place::Device, Place::Device, 32_768),
            ("h2d", Place::Pinned, Place::Device, 8192),
            ("d2h", Place::Device, Place::Pinned, 8192),
        ] {
            moves(b, &format!("page_move.{name}_{bytes}"), bytes, (from, to), count);
        }
    }
}

fn digest(b: &mut Bench, bytes: u32, count: u32) {
    let name = format!("page_digest.{bytes}x{count}");
    if !b.wants(&name) {
        return;
    }
    let total = bytes as usize * count as usize;
    let pages = b.random(total);
    let (index, out) =
        (b.u32s(&shuffled(&mut b.rng.clone(), count as usize)), b.random(16 * count as usize));
    let pool = PagePool { mem: &pages.mem, base: 0, stride: u64::from(bytes) };
    let a = DigestPages {
        pool,
        page_bytes: bytes,
        index: Some(&index),
        count,
        out: &out,
        refused: None,
    };
    let us = b.time(1, |_| b.kernels.digest_pages(STREAM, &a));
    b.report(&name, us, floor_us(total as f64, 0.0, 1.0));
    println!("figure {name}.rate {:.3} TB/s", total as f64 / us / 1e6);
}

/// Moves all pages of a pool in random order, beside one copy of the same bytes.
fn moves(b: &mut Bench, name: &str, bytes: u32, (from, to): (Place, Place), count: u32) {
    if !b.wants(name) {
        return;
    }
    let total = u64::from(bytes) * u64::from(count);
    let pool = |b: &mut Bench, place| {
        if place == Place::Device {
            return b.random(total as usize).mem;
        }
        let mem = b.device().alloc(place, total).expect("the machine has room");
        let block: Vec<u8> = (0..131_072).flat_map(|_| b.rng.bits().to_le_bytes()).collect();
        for offset in (0..total).step_by(block.len()) {
            let len = (total - offset).min(block.len() as u64) as usize;
            mem.write(offset, &block[..len]).expect("inside");
        }
        mem
    };
    let (source, target) = (pool(b, from), pool(b, to));
    let list = b.u32s(&shuffled(&mut b.rng.clone(), count as usize));
    let stride = u64::from(bytes);
    let a = |source_index, target_index| MovePages {
        source: PagePool { mem: &source, base: 0, stride },
        source_index,
        target: PagePool { mem: &target, base: 0, stride },
        target_index,
        page_bytes: bytes,
        count,
        refused: None,
    };
    let all = |mem: &dsa_kernels::Mem| MemSlice { mem: mem.clone(), offset: 0, len: total };
    let (whole_source, whole_target) = (all(&source), all(&target));
    let copy = b.time(1, |_| Ok(b.device().copy(STREAM, &whole_target, &whole_source)?));
    for (kind, moved) in [("gather", a(Some(&list), None)), ("scatter", a(None, Some(&list)))] {
        let us = b.time(1, |_| b.kernels.move_pages(STREAM, &moved));
        println!("figure {name}.{kind} {us:.2} us");
        println!("figure {name}.{kind}.of_copy {:.3} ratio", copy / us);
        println!("figure {name}.{kind}.rate {:.1} GB/s", total as f64 / us / 1e3);
        if let Some(peer) = b.peers.get(name) {
            println!("figure {name}.{kind}.vs_peer {:.3} ratio", us / peer);
        }
    }
}
