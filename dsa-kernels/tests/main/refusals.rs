//! Arguments that do not fit are errors with the numbers that matter, never panics.

use dsa_kernels::cpu::{CpuKernels, CpuReference};
use dsa_kernels::ops::*;
use dsa_kernels::testing::{Matrix, Pages, Rng, random_rows};
use dsa_kernels::{CpuDevice, Device, KernelError, Place, TensorMut, TensorRef};

fn both() -> [Box<dyn Kernels>; 2] {
    [Box::new(CpuReference), Box::new(CpuKernels::new(2))]
}

fn mat(data: &[f32], cols: usize) -> TensorRef<'_> {
    TensorRef::from_f32(data, data.len() / cols, cols).unwrap()
}

fn mat_mut(data: &mut [f32], cols: usize) -> TensorMut<'_> {
    let rows = data.len() / cols;
    TensorMut::from_f32(data, rows, cols).unwrap()
}

#[track_caller]
fn refused(result: Result<(), KernelError>, text: &str) {
    assert_eq!(result.unwrap_err().to_string(), text);
}

#[test]
fn rows_outside_of_the_cache() {
    for kernels in both() {
        let pages = Pages::new(&mut Rng::new(1), RowFormat::KvV4, 64, 64);
        let store = |page, row| {
            let values = vec![1.0; 512];
            let targets = [RowTarget { page, row }];
            let rows = mat(&values, 512);
            kernels.store_rows(StoreRows { rows, cache: pages.cache(), targets: &targets })
        };
        refused(store(2, 0), "store_rows: page 2, row 0 is outside of its cache");
        refused(store(u32::MAX, 0), "store_rows: page 4294967295, row 0 is outside of its cache");
        refused(store(0, 64), "store_rows: page 0, row 64 is outside of its cache");
        assert!(pages.bytes().iter().all(|b| *b == 0), "a refused store writes nothing");
        let mut out = vec![0.0; 512];
        let sources = [RowTarget { page: 9, row: 1 }];
        let rows = mat_mut(&mut out, 512);
        refused(
            kernels.load_rows(LoadRows { cache: pages.cache(), sources: &sources, rows }),
            "load_rows: page 9, row 1 is outside of its cache",
        );
        let mut cache = pages.cache();
        cache.stride = 64 * 584 - 1;
        let rows = mat_mut(&mut out, 512);
        refused(
            kernels.load_rows(LoadRows { cache, sources: &[RowTarget { page: 0, row: 0 }], rows }),
            "load_rows: the page stride is smaller than the rows of a page",
        );
    }
}

#[test]
fn attention_with_missing_or_wrong_rows() {
    let rng = &mut Rng::new(2);
    let window = random_rows(rng, RowFormat::KvV4, 64, 300);
    let far = random_rows(rng, RowFormat::KvV4, 64, 64);
    let q = rng.floats(2 * 512);
    for kernels in both() {
        let attend = |pages: &[u32], first_page_no, list: &[i32]| {
            let part = SeqPart { first: 0, count: 2, start_pos: 254 };
            let mut out = vec![0.0; 1024];
            kernels.attend(Attend {
                q: mat(&q, 512),
                window_cache: window.cache(),
                window: &[SeqWindow { part, first_page_no, pages }],
                window_tokens: 128,
                compressed: Some(CompressedRows {
                    cache: far.cache(),
                    seqs: &[SeqRows { part, pages: &far.list }],
                    selection: Selection::Listed(TensorRef::from_i32(list, 2, 2).unwrap()),
                }),
                sinks: &[0.0],
                scale: 1.0,
                rounding: Rounding::None,
                out: mat_mut(&mut out, 512),
            })
        };
        let (all, good) = (&window.list[..], [0, 63, 5, -1]);
        attend(all, 0, &good).unwrap();
        refused(attend(&all[..3], 0, &good), "attend: window pages is 3, 4 expected");
        refused(attend(all, 2, &good), "attend: the window pages begin behind the window");
        refused(attend(&[0, 1, 2, 77], 0, &good), "attend: page 77, row 0 is outside of its cache");
        refused(attend(all, 0, &[0, 64, 5, -1]), "attend: pages of a sequence is 1, 2 expected");
        refused(attend(all, 0, &[3, 3, 5, -1]), "attend: selected rows are not ascending");
        refused(attend(all, 0, &[-2, 3, 5, -1]), "attend: selected rows are not ascending");
        refused(
            attend(all, 0, &[-1, 3, 5, -1]),
            "attend: a selected row stands behind the end mark",
        );
    }
}

#[test]
fn index_select_with_too_few_pages() {
    let keys = random_rows(&mut Rng::new(3), RowFormat::IndexFp4, 64, 128);
    for kernels in both() {
        let select = |count: usize, start_pos, pages: &[u32]| {
            let (q, w, mut out) = (vec![0.0; count * 128], vec![0.0; count], vec![0; count * 4]);
            kernels.index_select(IndexSelect {
                q: mat(&q, 128),
                w: mat(&w, 1),
                keys: keys.cache(),
                seqs: &[SeqRows { part: SeqPart { first: 0, count, start_pos }, pages }],
                top_k: 4,
                selected: TensorMut::from_i32(&mut out, count, 4).unwrap(),
                scores: None,
            })
        };
        select(1, 259, &keys.list).unwrap();
        refused(
            select(1, 259, &keys.list[..1]),
            "index_select: pages of a sequence is 1, 2 expected",
        );
        refused(select(2, u32::MAX, &keys.list), "index_select: a position is beyond 2^31");
    }
}

#[test]
fn shapes_ids_and_experts() {
    let rng = &mut Rng::new(4);
    for kernels in both() {
        let m = Matrix::random(rng, WeightFormat::Bf16, 8, 16);
        let weight = &m.pack(&*kernels);
        let (x, mut y) = (vec![0.0; 32], vec![0.0; 16]);
        let linear = |x: TensorRef<'_>, groups, y: TensorMut<'_>| {
            let (quant, rounding) = (ActQuant::None, Rounding::None);
            kernels.linear(Linear { x, weight, groups, quant, rounding, y })
        };
        linear(mat(&x, 16), 1, mat_mut(&mut y, 8)).unwrap();
        refused(
            linear(mat(&x, 32), 1, mat_mut(&mut y[..8], 8)),
            "linear: x columns is 32, 16 expected",
        );
        refused(
            linear(mat(&x, 16), 3, mat_mut(&mut y, 8)),
            "linear: the number of groups does not divide the output",
        );
        let mut streams = vec![0.0; 64];
        let a = Embed { ids: &[8], table: weight, streams: mat_mut(&mut streams, 64) };
        refused(kernels.embed(a), "embed: a token id is outside of the table");
        let short = WeightDesc {
            format: WeightFormat::Fp4Group32,
            rows: 4,
            cols: 64,
            data: &[0; 128],
            scales: &[0; 7],
            round_to_bf16: false,
        };
        let error = kernels.pack(&short).map(|_| ()).unwrap_err();
        assert_eq!(error.to_string(), "pack: scale bytes is 7, 8 expected");
        let route = |table: &[u32]| {
            let (mut experts, mut weights) = (vec![0; 2], vec![0.0; 2]);
            kernels.route(Route {
                logits: mat(&x[..4], 4),
                choice: Choice::Hash { table, ids: &[1] },
                k: 2,
                scale: 1.0,
                experts: TensorMut::from_i32(&mut experts, 1, 2).unwrap(),
                weights: mat_mut(&mut weights, 2),
            })
        };
        route(&[0, 1, 2, 3]).unwrap();
        let text = "route: a token id or its experts are outside of the table";
        refused(route(&[0, 1, 2]), text);
        refused(route(&[0, 1, 2, 4]), text);
    }
}

#[test]
fn carry_outside_of_its_memory_and_sequences_that_overlap() {
    for kernels in both() {
        let carry = CpuDevice::new().alloc(Place::Host, c128_carry_bytes(8) as u64 + 8).unwrap();
        let compress = |parts: &[(usize, usize)], carry_offset| {
            let (kv, mut rows) = (vec![0.0; 4 * 8], vec![0.0; 8]);
            let seqs: Vec<_> = parts
                .iter()
                .map(|(first, count)| CompressSeq {
                    part: SeqPart { first: *first, count: *count, start_pos: 125 },
                    carry_offset,
                    first_row: 0,
                })
                .collect();
            kernels.compress(Compress {
                kv: mat(&kv, 8),
                gate: mat(&kv, 8),
                ape: &[0.0; 128 * 8],
                pooling: Pooling::C128,
                dim: 8,
                carry: &carry,
                seqs: &seqs,
                rounding: Rounding::None,
                rows: mat_mut(&mut rows, 8),
            })
        };
        compress(&[(0, 4)], 8).unwrap();
        refused(compress(&[(0, 4)], 9), "range 9+96 is outside of memory of 104 bytes");
        refused(compress(&[(0, 4)], 900), "range 900+0 is outside of memory of 104 bytes");
        let overlap = "compress: sequences overlap or are not in ascending order";
        refused(compress(&[(0, 2), (1, 1)], 0), overlap);
        refused(compress(&[(0, 5)], 0), "compress: tokens is 4, 5 expected");
    }
}

/// A weight that no implementation made.
#[derive(Debug)]
struct Foreign;

impl PackedWeight for Foreign {
    fn rows(&self) -> usize {
        4
    }

    fn cols(&self) -> usize {
        4
    }

    fn bytes(&self) -> usize {
        0
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

#[test]
fn weights_of_another_implementation() {
    let weight: Weight = std::sync::Arc::new(Foreign);
    let weight = &weight;
    for kernels in both() {
        let (x, mut y) = (vec![0.0; 4], vec![0.0; 4]);
        let (x, y) = (mat(&x, 4), mat_mut(&mut y, 4));
        let (quant, rounding) = (ActQuant::None, Rounding::None);
        refused(
            kernels.linear(Linear { x, weight, groups: 1, quant, rounding, y }),
            "linear: weight was packed by another implementation",
        );
        let mut streams = vec![0.0; 16];
        let a = Embed { ids: &[0], table: weight, streams: mat_mut(&mut streams, 16) };
        refused(kernels.embed(a), "embed: weight was packed by another implementation");
    }
}
