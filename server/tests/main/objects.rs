//! Objects of the cache tiers: the bytes of the pages go there and come back, or nothing does.

use dsa_kernels::CpuDevice;
use dsv4_server::glue::objects::{ObjectError, ObjectMemory, ObjectPages};
use dsv4_server::glue::pools::{PageCounts, Pools};
use hicache::store::format::verify_object;
use hicache::{ObjectKey, Part};
use kv_pool::{
    ChainHash, Fingerprint, Geometry, IndexKeyType, LayerKind, ModelShape, Numerics, Owner,
    PageRef, PoolKind,
};
use std::sync::Arc;

const LAYOUT: Fingerprint = Fingerprint([7; 16]);
const CHAIN: ChainHash = ChainHash([3; 32]);

fn geometry(index: IndexKeyType) -> Arc<Geometry> {
    let shape = ModelShape {
        layers: vec![LayerKind::Window, LayerKind::C4, LayerKind::C128, LayerKind::C4],
        head_dim: 512,
        rope_dim: 64,
        index_head_dim: 128,
        window_tokens: 128,
    };
    Arc::new(Geometry::new(shape, Numerics::Official, index).expect("a layout"))
}

fn pools(geometry: &Arc<Geometry>) -> Pools {
    let counts = PageCounts { block: 4, window: 6, carry: 3 };
    Pools::new(Arc::clone(geometry), &CpuDevice::new(), counts).expect("memory for a few pages")
}

/// Pages for an object, none of them the first of its pool.
fn take(pools: &mut Pools, part: Part) -> ObjectPages {
    let mut some = |kind, count| pools.take(kind, count, Owner::Sequence(1)).expect("free pages");
    match part {
        Part::Block => ObjectPages::Block(some(PoolKind::Block, 2)[1]),
        Part::Boundary => {
            let window = some(PoolKind::Window, 4);
            ObjectPages::Boundary {
                window: [window[3], window[1]],
                carry: some(PoolKind::Carry, 2)[1],
            }
        }
    }
}

/// The written rows of a page, cache by cache.
fn rows_of(pools: &Pools, page: PageRef) -> Vec<Vec<u8>> {
    let geometry = pools.geometry();
    let sections = geometry.sections(page.pool);
    let read = |section: &kv_pool::Section| {
        let offset = pools.offset(section.kind, section.layer, page).expect("a section");
        let rows = geometry.rows_per_page(section.kind);
        let mut bytes = vec![0; geometry.extents(section.kind, rows).bytes() as usize];
        pools.mem(page.pool).read(offset, &mut bytes).expect("inside the pool");
        bytes
    };
    sections.iter().map(read).collect()
}

/// Writes other bytes everywhere.
fn fill(pools: &Pools, pages: &ObjectPages, seed: u8) {
    for (n, page) in pages.iter().enumerate() {
        let geometry = pools.geometry();
        for section in geometry.sections(page.pool) {
            let offset = pools.offset(section.kind, section.layer, page).expect("a section");
            let rows = geometry.rows_per_page(section.kind);
            let len = geometry.extents(section.kind, rows).bytes() as usize;
            let byte = |at: usize| {
                (at as u8).wrapping_mul(31)
                    ^ (at >> 8) as u8
                    ^ seed
                    ^ (n as u8) << 5
                    ^ section.layer as u8
            };
            let bytes: Vec<u8> = (0..len).map(byte).collect();
            pools.mem(page.pool).write(offset, &bytes).expect("inside the pool");
        }
    }
}

fn key(part: Part) -> ObjectKey {
    ObjectKey { chain: CHAIN, part }
}

fn saved(pools: &Pools, pages: &ObjectPages, blocks: u32) -> Vec<u8> {
    let part = pages.part();
    let mut object = vec![0xAA; ObjectMemory::object_bytes(pools.geometry(), part) as usize];
    ObjectMemory::new(pools, LAYOUT)
        .save(pages, key(part), blocks, &Vec::new(), &mut object)
        .expect("sealed pages become an object");
    object
}

#[test]
fn pages_come_back_as_they_went_for_every_index_key_type() {
    for index in IndexKeyType::ALL {
        for part in Part::ALL {
            let geometry = geometry(index);
            let (mut from, mut to) = (pools(&geometry), pools(&geometry));
            let source = take(&mut from, part);
            fill(&from, &source, 1);
            let object = saved(&from, &source, 9);
            let header = verify_object(&object).expect("whole by itself");
            assert_eq!((header.tokens, header.key), (9 * 256, key(part)));
            let target = take(&mut to, part);
            let memory = ObjectMemory::new(&to, LAYOUT);
            memory.verify(&object, key(part)).expect("right");
            let sealed = memory.load(&object, key(part), 9, &target).expect("right");
            assert_eq!(sealed.len(), target.iter().count(), "each page once");
            for (page, digests) in &sealed {
                assert_eq!(digests, &to.digests(*page).expect("a page"), "{index}, {page}");
            }
            for (went, came) in source.iter().zip(target.iter()) {
                assert_eq!(rows_of(&from, went), rows_of(&to, came), "{index}, {part:?}");
            }
        }
    }
}

/// The case that started this project: index keys of another size are no index keys.
#[test]
fn object_of_another_index_key_type_is_refused_by_name() {
    let (fp8, bf16) = (geometry(IndexKeyType::Fp8), geometry(IndexKeyType::Bf16));
    let (mut from, mut to) = (pools(&fp8), pools(&bf16));
    let source = take(&mut from, Part::Block);
    fill(&from, &source, 1);
    let mut object = saved(&from, &source, 1);
    // Even with as many bytes as are expected.
    object.resize(ObjectMemory::object_bytes(&bf16, Part::Block) as usize, 0);
    let target = take(&mut to, Part::Block);
    let memory = ObjectMemory::new(&to, LAYOUT);
    assert!(memory.load(&object, key(Part::Block), 1, &target).is_err());
    object.truncate(ObjectMemory::object_bytes(&fp8, Part::Block) as usize);
    let error = memory.load(&object, key(Part::Block), 1, &target).expect_err("other pages");
    let text = error.to_string();
    assert!(matches!(error, ObjectError::OtherPages { .. }), "{text}");
    assert!(text.contains("c4_index") && text.contains("8448") && text.contains("16384"), "{text}");
}

#[test]
fn object_of_another_prefix_layout_part_or_place_is_refused() {
    let geometry = geometry(IndexKeyType::Fp4);
    let mut pools = pools(&geometry);
    let source = take(&mut pools, Part::Block);
    fill(&pools, &source, 1);
    let object = saved(&pools, &source, 2);
    let memory = ObjectMemory::new(&pools, LAYOUT);
    let load = |memory: &ObjectMemory, key, blocks| memory.load(&object, key, blocks, &source);
    load(&memory, key(Part::Block), 2).expect("the right one");
    let other = ObjectKey::block(ChainHash([4; 32]));
    assert!(load(&memory, other, 2).is_err(), "another prefix");
    assert!(load(&memory, key(Part::Boundary), 2).is_err(), "another part");
    assert!(load(&memory, key(Part::Block), 3).is_err(), "another block of the prompt");
    let elsewhere = ObjectMemory::new(&pools, Fingerprint([8; 16]));
    assert!(load(&elsewhere, key(Part::Block), 2).is_err(), "another layout");
}

#[test]
fn every_damaged_byte_is_found_on_the_way_to_the_pages() {
    let geometry = geometry(IndexKeyType::Fp4);
    for part in Part::ALL {
        let mut pools = pools(&geometry);
        let source = take(&mut pools, part);
        fill(&pools, &source, 5);
        let object = saved(&pools, &source, 3);
        let payload_end = {
            let header = verify_object(&object).expect("whole");
            header.places().last().expect("a section").1.end
        };
        let memory = ObjectMemory::new(&pools, LAYOUT);
        for at in (0..payload_end).step_by(977).chain([0, payload_end - 1]) {
            let mut damaged = object.clone();
            damaged[at] ^= 0x10;
            let loaded = memory.load(&damaged, key(part), 3, &source);
            assert!(loaded.is_err(), "{part:?}, byte {at}");
            assert!(memory.verify(&damaged, key(part)).is_err(), "{part:?}, byte {at}");
        }
        memory.load(&object, key(part), 3, &source).expect("nothing was damaged");
    }
}
