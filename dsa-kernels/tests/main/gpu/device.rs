//! The device itself: copies, events, graphs, refusals.

use super::{STREAM, gpu};
use dsa_kernels::cuda::{DigestPages, PagePool};
use dsa_kernels::{Device, DeviceError, EventId, KernelError, MemSlice, Place, StreamId};

#[test]
fn copies_and_events_keep_their_order() {
    let Some(gpu) = gpu("copies_and_events_keep_their_order") else { return };
    let device = gpu.device();
    let host = device.alloc(Place::Host, 1 << 20).unwrap();
    let pinned = device.alloc(Place::Pinned, 1 << 20).unwrap();
    let on_device = device.alloc(Place::Device, 1 << 20).unwrap();
    let bytes: Vec<u8> = (0..1 << 20).map(|i: u32| (i * 7 + (i >> 9)) as u8).collect();
    host.write(0, &bytes).unwrap();
    let all = |mem: &dsa_kernels::Mem| MemSlice { mem: mem.clone(), offset: 0, len: 1 << 20 };
    device.copy(STREAM, &all(&on_device), &all(&host)).unwrap();
    let e = device.record(STREAM).unwrap();
    device.after(StreamId(1), e).unwrap();
    device.copy(StreamId(1), &all(&pinned), &all(&on_device)).unwrap();
    device.wait(StreamId(1)).unwrap();
    assert!(device.reached(e).unwrap());
    assert!(device.reached(e).unwrap(), "an event stays known once it is reached");
    assert!(device.reached(EventId(e.0 + 1)).is_err());
    let mut back = vec![0; 1 << 20];
    pinned.read(0, &mut back).unwrap();
    assert_eq!(back, bytes);
    // Overlapping ranges of one allocation.
    let part = |offset| MemSlice { mem: on_device.clone(), offset, len: 1000 };
    device.copy(STREAM, &part(10), &part(0)).unwrap();
    device.wait(STREAM).unwrap();
    on_device.read(10, &mut back[..1000]).unwrap();
    assert_eq!(back[..1000], bytes[..1000]);
}

#[test]
fn memory_starts_zeroed_and_is_bounded() {
    let Some(gpu) = gpu("memory_starts_zeroed_and_is_bounded") else { return };
    for place in [Place::Device, Place::Pinned] {
        let mem = gpu.device().alloc(place, 10_000).unwrap();
        let mut all = vec![1; 10_000];
        mem.read(0, &mut all).unwrap();
        assert!(all.iter().all(|b| *b == 0));
        assert!(mem.read(9_999, &mut [0; 2]).is_err());
        assert!(mem.write(u64::MAX, &[0]).is_err());
        assert_eq!((mem.len(), mem.place()), (10_000, place));
    }
    let device = gpu.device().alloc(Place::Device, 64).unwrap();
    assert!(device.load_word(0).is_err());
    assert!(matches!(
        gpu.device().alloc(Place::Device, 1 << 50),
        Err(DeviceError::Alloc { .. } | DeviceError::Driver { .. })
    ));
}

#[test]
fn a_graph_repeats_what_was_recorded() {
    let Some(gpu) = gpu("a_graph_repeats_what_was_recorded") else { return };
    let source = gpu.bytes(&[7; 4096]);
    let out = gpu.poisoned(16);
    let pool = PagePool { mem: &source.mem, base: 0, stride: 4096 };
    let digest =
        DigestPages { pool, page_bytes: 4096, index: None, count: 1, out: &out, refused: None };
    let graph = gpu.device().capture(STREAM, || gpu.kernels.digest_pages(STREAM, &digest)).unwrap();
    assert_eq!(gpu.read(&out), [0xff; 16], "recorded, not run");
    gpu.device().replay(STREAM, &graph).unwrap();
    let first = gpu.read(&out);
    source.mem.write(100, &[8]).unwrap();
    gpu.device().replay(STREAM, &graph).unwrap();
    assert_ne!(gpu.read(&out), first);
}

#[test]
fn host_memory_and_crooked_addresses_are_refused() {
    let Some(gpu) = gpu("host_memory_and_crooked_addresses_are_refused") else { return };
    let host = gpu.device().alloc(Place::Host, 8192).unwrap();
    let device = gpu.memory(8192);
    let out = gpu.poisoned(16);
    let digest = |mem, base, out| DigestPages {
        pool: PagePool { mem, base, stride: 4096 },
        page_bytes: 4096,
        index: None,
        count: 1,
        out,
        refused: None,
    };
    let error = |a: &DigestPages<'_>| gpu.kernels.digest_pages(STREAM, a).unwrap_err();
    assert!(matches!(error(&digest(&host, 0, &out)), KernelError::Memory { place: "host", .. }));
    assert!(matches!(error(&digest(&device, 8, &out)), KernelError::Argument { .. }));
    let short = MemSlice { len: 15, ..out.clone() };
    assert!(matches!(error(&digest(&device, 0, &short)), KernelError::Shape { found: 15, .. }));
    let crooked = MemSlice { mem: device.clone(), offset: 8, len: 16 };
    assert!(matches!(error(&digest(&device, 0, &crooked)), KernelError::Memory { align: 16, .. }));
    let stream = StreamId(99);
    assert!(gpu.kernels.digest_pages(stream, &digest(&device, 0, &out)).is_err());
}
