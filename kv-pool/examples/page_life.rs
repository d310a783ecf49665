//! One page from reservation to hand-off: `cargo run -p kv-pool --example page_life`.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "an example shows its results")]

use kv_pool::{
    FingerprintInput, Geometry, IndexKeyType, LayerKind, ModelShape, Namespace, Numerics, Owner,
    PagePool, PageRef, PoolKind, Proof, TagInput, digest_parts, handoff_plan, tag,
};

const PAGES: u32 = 8;
const TOKENS: u32 = 300;

/// What a prefill worker would offer of the block pool: each page's rows, bytes and tag.
fn print_tags(
    geometry: &Geometry,
    identity: &FingerprintInput,
    memory: &[u8],
    pages: &[PageRef],
) -> Result<(), Box<dyn std::error::Error>> {
    let tokens: Vec<u32> = (0..TOKENS).collect();
    let chain = Namespace::new(identity.fingerprint(), b"").chain(&tokens);
    for entry in handoff_plan(geometry, TOKENS, 0) {
        if entry.pool != PoolKind::Block {
            continue;
        }
        let section = geometry.section(entry.kind, entry.layer).ok_or("no such section")?;
        let index = pages[entry.page_no as usize].index;
        let page = geometry.page_offset(entry.pool, section, PAGES, index) as usize;
        let extents = geometry.extents(entry.kind, entry.rows);
        let bytes = &memory[page..page + geometry.page_bytes(entry.kind) as usize];
        let parts: Vec<&[u8]> = extents.iter().map(|extent| &bytes[extent.range()]).collect();
        let identity = TagInput {
            fingerprint: identity.fingerprint(),
            kind: entry.kind,
            layer: entry.layer,
            chain: chain[entry.page_no as usize],
            page_no: entry.page_no,
            rows: entry.rows,
        };
        let tag = tag(&digest_parts(&parts), &identity);
        println!(
            "layer {} {} block {}: {} rows, {} B, tag {tag}",
            entry.layer, entry.kind, entry.page_no, entry.rows, entry.bytes
        );
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let shape = ModelShape {
        layers: vec![LayerKind::Window, LayerKind::C4, LayerKind::C128],
        head_dim: 512,
        rope_dim: 64,
        index_head_dim: 128,
        window_tokens: 128,
    };
    let geometry = Geometry::new(shape, Numerics::Official, IndexKeyType::Fp8)?;
    let identity = FingerprintInput {
        geometry: geometry.clone(),
        model_digest: [1; 32],
        tokenizer_digest: [2; 32],
        model_type: "deepseek_v4".to_string(),
    };
    println!("{}", identity.describe());

    // The pool keeps the books; the bytes are ours.
    let mut memory = vec![0_u8; geometry.pool_bytes(PoolKind::Block, PAGES) as usize];
    let mut pool = PagePool::new(PoolKind::Block, PAGES);
    let sequence = Owner::Sequence(1);
    let pages = pool.reserve(TOKENS.div_ceil(kv_pool::BLOCK_TOKENS), sequence)?;
    for &page in &pages {
        pool.begin_fill(page)?;
        for section in 0..geometry.sections(PoolKind::Block).len() {
            let at = geometry.page_offset(PoolKind::Block, section, PAGES, page.index) as usize;
            memory[at] = 1; // A row of a forward pass would be written here.
        }
        pool.seal(page)?;
        pool.add_owner(page, Owner::RemoteReader(7))?;
    }

    print_tags(&geometry, &identity, &memory, &pages)?;

    // The sequence ends first; the pages stay until the peer has said that it is done.
    for &page in &pages {
        let left = pool.remove_owner(page, sequence, None)?;
        println!("{page} without its sequence: {left:?}");
        let proof = Some(Proof::PeerAcknowledged);
        let left = pool.remove_owner(page, Owner::RemoteReader(7), proof)?;
        println!("{page} after the acknowledgement: {left:?}");
    }
    for index in pool.drain_freed() {
        println!("page {index} is free, publish generation {}", pool.generation(index));
    }
    pool.audit()?;
    Ok(())
}
