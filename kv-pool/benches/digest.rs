//! Speed of the page digest beside a plain copy: `cargo bench -p kv-pool --bench digest`.
//!
//! Prints one `figure NAME VALUE UNIT` line each, the median of many passes over 8 MiB of pages
//! (more than a core's second-level cache) and over one page that stays in it. Without `--bench`,
//! as under `cargo test --benches`, it runs once and only checks the answers.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a bench reports on standard output")]

use kv_pool::{PageDigest, copy_and_digest, digest};
use std::hint::black_box;
use std::time::Instant;

const PAGE: usize = 37_440;

fn main() {
    let measured = std::env::args().any(|argument| argument == "--bench");
    let passes = if measured { 61 } else { 1 };
    for (suffix, pages, repeat) in [("", 224, 1), ("_cached", 1, 200)] {
        let source: Vec<u8> = (0..pages * PAGE).map(|i| (i * 31 + i / 251) as u8).collect();
        let mut target = vec![0_u8; source.len()];
        let expected: Vec<PageDigest> = source.chunks(PAGE).map(digest).collect();
        let repeat = if measured { repeat } else { 1 };
        let bytes = (source.len() * repeat) as f64;
        let report = |name: &str, mut pass: Box<dyn FnMut() + '_>| {
            let mut seconds: Vec<f64> = Vec::new();
            for _ in 0..passes {
                let start = Instant::now();
                for _ in 0..repeat {
                    pass();
                }
                seconds.push(start.elapsed().as_secs_f64());
            }
            seconds.sort_by(f64::total_cmp);
            let rate = bytes / seconds[passes / 2] / 1e9;
            println!("figure kv_pool.{name}{suffix}_gbps {rate:.2} GB/s");
        };
        report(
            "digest",
            Box::new(|| {
                for (page, expected) in black_box(&source).chunks(PAGE).zip(&expected) {
                    assert_eq!(digest(page), *expected);
                }
            }),
        );
        report(
            "copy_and_digest",
            Box::new(|| {
                let pages = black_box(&mut target).chunks_mut(PAGE);
                for ((target, source), expected) in pages.zip(source.chunks(PAGE)).zip(&expected) {
                    assert_eq!(copy_and_digest(target, source), *expected);
                }
            }),
        );
        assert!(target == source);
        target.fill(0);
        report("memcpy", Box::new(|| black_box(&mut target).copy_from_slice(black_box(&source))));
        assert!(target == source);
    }
}
