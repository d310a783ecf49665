//! Blocks of DeepSeek-V4-Flash in device pools, with their names and pages.

use crate::{Outcome, Random};
use dsa_kernels::{CpuDevice, Mem};
use dsv4_server::glue::objects::{ObjectMemory, ObjectPages};
use dsv4_server::glue::pools::{PageCounts, Pools};
use hicache::{ObjectKey, Part};
use kv_pool::{
    ChainHash, Fingerprint, FingerprintInput, Geometry, IndexKeyType, LayerKind, ModelShape,
    Numerics, Owner, PageRef, PoolKind,
};
use std::sync::Arc;

/// The caches of DeepSeek-V4-Flash: 2 window layers, 21 of ratio 4, 20 of ratio 128.
fn geometry(index: IndexKeyType) -> Outcome<Geometry> {
    let mut layers = vec![LayerKind::Window; 2];
    layers.extend([LayerKind::C4, LayerKind::C128].into_iter().cycle().take(41));
    let shape =
        ModelShape { layers, head_dim: 512, rope_dim: 64, index_head_dim: 128, window_tokens: 128 };
    Ok(Geometry::new(shape, Numerics::Official, index)?)
}

/// Pools that hold so many blocks of random bytes, in pages of random order.
pub(crate) struct Blocks {
    pools: Pools,
    /// The real code under measurement.
    pub(crate) memory: ObjectMemory,
    /// Page and name of each block.
    pub(crate) blocks: Vec<(PageRef, ObjectKey)>,
    /// Meaning of the bytes, and the text that it follows from.
    pub(crate) fingerprint: Fingerprint,
    pub(crate) layout: String,
}

impl Blocks {
    pub(crate) fn new(index: IndexKeyType, count: u32) -> Outcome<Self> {
        let geometry = geometry(index)?;
        let counts = PageCounts { block: count, window: 1, carry: 1 };
        let input = FingerprintInput {
            geometry: geometry.clone(),
            model_digest: [0; 32],
            tokenizer_digest: [0; 32],
            model_type: "blocks of a bench".to_owned(),
        };
        let mut pools = Pools::new(Arc::new(geometry), &CpuDevice::default(), counts)?;
        let mut pages = pools.take(PoolKind::Block, count, Owner::Sequence(1))?;
        let mut random = Random(u64::from(count));
        random.shuffle(&mut pages);
        fill(pools.mem(PoolKind::Block), &mut random)?;
        let blocks = pages.into_iter().map(|page| (page, ObjectKey::block(name(&mut random))));
        let (fingerprint, layout) = (input.fingerprint(), input.describe());
        let memory = ObjectMemory::new(&pools, fingerprint);
        Ok(Self { memory, blocks: blocks.collect(), fingerprint, layout, pools })
    }

    /// Bytes from block to block of the pool.
    pub(crate) fn page_bytes(&self) -> u64 {
        self.pools.geometry().bytes_per_index(PoolKind::Block)
    }

    /// Bytes of a block that are moved: all but the padding of its pages.
    pub(crate) fn row_bytes(&self) -> usize {
        let geometry = self.pools.geometry();
        let rows = |kind| geometry.extents(kind, geometry.rows_per_page(kind)).bytes() as usize;
        geometry.sections(PoolKind::Block).iter().map(|section| rows(section.kind)).sum()
    }

    /// Bytes of a block's object.
    pub(crate) fn object_bytes(&self) -> usize {
        ObjectMemory::object_bytes(self.pools.geometry(), Part::Block) as usize
    }

    /// Sections of a block.
    pub(crate) fn sections(&self) -> usize {
        self.pools.geometry().sections(PoolKind::Block).len()
    }

    /// Memory of the pages.
    pub(crate) fn mem(&self) -> &Mem {
        self.pools.mem(PoolKind::Block)
    }

    /// Makes the object of a block.
    pub(crate) fn save(&self, number: usize, target: &mut [u8]) -> Outcome<()> {
        let (page, key) = self.blocks[number];
        Ok(self.memory.save(
            &ObjectPages::Block(page),
            key,
            number as u32 + 1,
            &Vec::new(),
            target,
        )?)
    }

    /// Brings the object of a block to its page, checked.
    pub(crate) fn load(&self, number: usize, source: &[u8]) -> Outcome<()> {
        let (page, key) = self.blocks[number];
        self.memory.load(source, key, number as u32 + 1, &ObjectPages::Block(page))?;
        Ok(())
    }
}

/// A name that no other block has.
pub(crate) fn name(random: &mut Random) -> ChainHash {
    let mut bytes = [0; 32];
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&random.next().to_le_bytes());
    }
    ChainHash(bytes)
}

/// Random bytes all over a pool but for the generations at its end, which nothing here reads.
fn fill(mem: &Mem, random: &mut Random) -> Outcome<()> {
    let mut piece = vec![0; 1 << 20];
    let mut at = 0;
    while at < mem.len() {
        let bytes = (mem.len() - at).min(piece.len() as u64);
        for word in piece.chunks_exact_mut(8) {
            word.copy_from_slice(&random.next().to_le_bytes());
        }
        mem.write(at, &piece[..bytes as usize])?;
        at += bytes;
    }
    Ok(())
}
