//! Page digest and page moves.

use super::{Gpu, POISON, STREAM, gpu, shuffled};
use dsa_kernels::cuda::{DigestPages, MovePages, PagePool};
use dsa_kernels::testing::Rng;
use dsa_kernels::{Device, Mem, Place};

const P: u64 = 0x9e37_79b9_7f4a_7c15;
const Q: u64 = 0x9e37_79b1_85eb_ca87;

fn split_mix(seed: u64, count: usize) -> Vec<u64> {
    (1..=count as u64)
        .map(|n| {
            let z = seed.wrapping_add(n.wrapping_mul(P));
            let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        })
        .collect()
}

fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 37)).wrapping_mul(0x1656_6791_9e37_79f9);
    z ^ (z >> 32)
}

fn fold(x: u64, y: u64) -> u64 {
    let product = u128::from(x) * u128::from(y);
    (product as u64) ^ ((product >> 64) as u64)
}

/// The definition of the page digest once more, word by word.
fn digest(bytes: &[u8]) -> [u8; 16] {
    let seed = 0x243f_6a88_85a3_08d3;
    let (stripe, low, high) =
        (split_mix(seed, 128), split_mix(seed ^ 1, 8), split_mix(seed ^ 2, 8));
    let (mut l, mut h) = (0u64, 0u64);
    for (i, chunk) in bytes.chunks(1024).enumerate() {
        let mut padded = chunk.to_vec();
        padded.resize(chunk.len().next_multiple_of(64), 0);
        let (mut product, mut plain) = ([0u64; 8], [0u64; 8]);
        for (n, word) in padded.as_chunks::<8>().0.iter().enumerate() {
            let v = u64::from_le_bytes(*word);
            let k = v ^ stripe[n];
            product[n % 8] = product[n % 8].wrapping_add((k & 0xffff_ffff).wrapping_mul(k >> 32));
            plain[n % 8] = plain[n % 8].wrapping_add(v);
        }
        let a: Vec<u64> = (0..8).map(|n| product[n].wrapping_add(plain[n ^ 1])).collect();
        let (p, q) = ((i as u64).wrapping_mul(P), (i as u64).wrapping_mul(Q));
        let (mut x, mut y) = (0u64, 0u64);
        for j in 0..4 {
            let first = a[2 * j] ^ low[2 * j].wrapping_add(p);
            x = x.wrapping_add(fold(first, a[2 * j + 1] ^ low[2 * j + 1].wrapping_sub(p)));
            let first = a[j] ^ high[2 * j].wrapping_sub(q);
            y = y.wrapping_add(fold(first, a[j + 4] ^ high[2 * j + 1].wrapping_add(q)));
        }
        (l, h) = (l.wrapping_add(mix(x)), h.wrapping_add(mix(y)));
    }
    let n = bytes.len() as u64;
    l = l.wrapping_add(mix(h.wrapping_add(n.wrapping_mul(P))));
    h = h.wrapping_add(mix(l ^ n.wrapping_mul(Q)));
    let mut out = [0; 16];
    out[..8].copy_from_slice(&mix(l).to_le_bytes());
    out[8..].copy_from_slice(&mix(h).to_le_bytes());
    out
}

/// The vectors that freeze the definition, as far as they are about digests of the pattern.
fn frozen() -> Vec<(usize, String)> {
    let text = include_str!("../../../../kv-pool/tests/vectors/vectors.txt");
    let lines = text.lines().filter_map(|line| line.strip_prefix("digest "));
    lines
        .filter_map(|line| {
            let (len, value) = line.split_once(' ')?;
            Some((len.parse().ok()?, value.to_owned()))
        })
        .collect()
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 131 + (i >> 8) * 17 + 3) as u8).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn random_bytes(rng: &mut Rng, count: usize) -> Vec<u8> {
    (0..count.div_ceil(8)).flat_map(|_| rng.bits().to_le_bytes()).take(count).collect()
}

#[test]
fn the_definition_here_is_the_frozen_one() {
    let frozen = frozen();
    assert!(frozen.len() > 10);
    for (len, value) in frozen {
        assert_eq!(hex(&digest(&pattern(len))), value, "{len} bytes");
    }
}

fn digests(gpu: &Gpu, mem: &Mem, stride: u64, bytes: u32, index: &[u32]) -> (Vec<u8>, u32) {
    let (out, refused) = (gpu.poisoned(16 * index.len()), gpu.u32s(&[0]));
    let list = gpu.u32s(index);
    let a = DigestPages {
        pool: PagePool { mem, base: 16, stride },
        page_bytes: bytes,
        index: Some(&list),
        count: index.len() as u32,
        out: &out,
        refused: Some(&refused),
    };
    gpu.kernels.digest_pages(STREAM, &a).unwrap();
    (gpu.read(&out), gpu.read_u32(&refused)[0])
}

#[test]
fn digests_have_the_bits_of_the_definition() {
    let Some(gpu) = gpu("digests_have_the_bits_of_the_definition") else { return };
    for (len, value) in frozen().into_iter().filter(|(len, _)| *len > 0) {
        let mut bytes = vec![POISON; 16];
        bytes.extend(pattern(len));
        let mem = gpu.bytes(&bytes).mem;
        let stride = len.next_multiple_of(16) as u64;
        assert_eq!(hex(&digests(gpu, &mem, stride, len as u32, &[0]).0), value, "{len} bytes");
    }
    let rng = &mut gpu.rng(1);
    for bytes in [1, 61, 69, 576, 1024, 1728, 4352, 8448, 16_384, 37_440, 100_001] {
        for count in [1, 2, 61, 576] {
            let stride = (bytes + rng.below(64)).next_multiple_of(16);
            let data = random_bytes(rng, 16 + stride * count);
            let mem = gpu.bytes(&data).mem;
            let index = shuffled(rng, count);
            let (got, refused) = digests(gpu, &mem, stride as u64, bytes as u32, &index);
            for (page, got) in index.iter().zip(got.chunks(16)) {
                let from = 16 + *page as usize * stride;
                assert_eq!(got, digest(&data[from..from + bytes]), "{bytes} x {count}, {page}");
            }
            assert_eq!(refused, 0);
        }
    }
}

#[test]
fn pages_outside_of_the_pool_are_counted_and_left_out() {
    let Some(gpu) = gpu("pages_outside_of_the_pool_are_counted_and_left_out") else { return };
    let mem = gpu.bytes(&random_bytes(&mut gpu.rng(2), 16 + 4 * 8448)).mem;
    let (got, refused) = digests(gpu, &mem, 8448, 8448, &[1, 4, u32::MAX, 3]);
    assert_eq!(refused, 2);
    assert_eq!(got[16..48], [POISON; 32]);
    assert!(got[..16].iter().any(|b| *b != POISON) && got[48..].iter().any(|b| *b != POISON));
}

/// Moves pages by both lists; pages named by neither keep what they had.
fn moves(gpu: &Gpu, rng: &mut Rng, from: Place, to: Place, bytes: usize, count: usize) {
    let pages = count + 3;
    let (source_stride, target_stride) = (bytes + 16 * rng.below(3), bytes + 16 * rng.below(3));
    let source = gpu.device().alloc(from, (pages * source_stride) as u64).unwrap();
    let target = gpu.device().alloc(to, (pages * target_stride) as u64).unwrap();
    let data = random_bytes(rng, pages * source_stride);
    source.write(0, &data).unwrap();
    let mut want = random_bytes(rng, pages * target_stride);
    target.write(0, &want).unwrap();
    let (mut source_index, mut target_index) = (shuffled(rng, pages), shuffled(rng, pages));
    source_index.truncate(count);
    target_index.truncate(count);
    for (s, t) in source_index.iter().zip(&target_index) {
        let (s, t) = (*s as usize * source_stride, *t as usize * target_stride);
        want[t..t + bytes].copy_from_slice(&data[s..s + bytes]);
    }
    // Two more entries that lead nowhere.
    source_index.extend([pages as u32, 0]);
    target_index.extend([0, u32::MAX]);
    let (source_list, target_list) = (gpu.u32s(&source_index), gpu.u32s(&target_index));
    let refused = gpu.u32s(&[0]);
    let a = MovePages {
        source: PagePool { mem: &source, base: 0, stride: source_stride as u64 },
        source_index: Some(&source_list),
        target: PagePool { mem: &target, base: 0, stride: target_stride as u64 },
        target_index: Some(&target_list),
        page_bytes: bytes as u32,
        count: source_index.len() as u32,
        refused: Some(&refused),
    };
    gpu.kernels.move_pages(STREAM, &a).unwrap();
    assert_eq!(gpu.read_u32(&refused)[0], 2, "{bytes} x {count}");
    let mut got = vec![0; want.len()];
    target.read(0, &mut got).unwrap();
    assert!(got == want, "{bytes} x {count}, {from:?} to {to:?}");
}

#[test]
fn pages_move_between_pools_of_all_places() {
    let Some(gpu) = gpu("pages_move_between_pools_of_all_places") else { return };
    let rng = &mut gpu.rng(3);
    let places = [Place::Device, Place::Pinned];
    for (from, to) in places.into_iter().flat_map(|f| places.map(|t| (f, t))) {
        for bytes in [32, 1728, 4352, 8448, 16_384, 37_440] {
            for count in [0, 1, 2, 61, 576] {
                moves(gpu, rng, from, to, bytes, count);
            }
        }
    }
}
