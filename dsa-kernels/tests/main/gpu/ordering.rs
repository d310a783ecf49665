//! The ordering rule of the kernels (note 20): a launch that begins before the one in front has ended
//! must wait before it reads. Each link of the chain runs with a producer that holds back for two
//! milliseconds; then the consumer gives the right result, and the same consumer compiled without its
//! wait finds the poison and gives another one.
//!
//! The two builds lie beside the kernels, in folders with `-late` and `-without-wait` at the end of
//! their name (`cargo xtask kernels build --variant late`, `--variant without-wait`).

use super::{Gpu, STREAM, gpu, shuffled};
use dsa_kernels::cuda::*;
use dsa_kernels::ops::*;
use dsa_kernels::{Mem, MemSlice};
use std::path::PathBuf;
use std::sync::Arc;

const PAGES: usize = 20;
const ROWS: usize = 64 * PAGES;
const TOP_K: usize = 512;

/// The kernels of a variant, or a line that says that they are not there.
fn variant(gpu: &Gpu, test: &str, name: &str) -> Option<CudaKernels> {
    let mut folder = super::folder().into_os_string();
    folder.push(format!("-{name}"));
    let folder = PathBuf::from(folder);
    if !folder.exists() {
        println!("{test}: skipped, no {}", folder.display());
        return None;
    }
    Some(CudaKernels::load(Arc::clone(gpu.kernels.device()), &folder).unwrap())
}

/// A pool of `pages` pages of rows of `format`; unwritten rows hold NaN.
fn pool(gpu: &Gpu, format: RowFormat, pages: usize) -> (Mem, u64) {
    let row = format.data_bytes() + format.scale_bytes();
    let stride = (64 * row).next_multiple_of(576) as u64;
    (gpu.poisoned(pages * stride as usize).mem, stride)
}

fn cache(pool: &(Mem, u64), format: RowFormat) -> PagedCache<'_> {
    PagedCache { mem: &pool.0, base: 0, stride: pool.1, rows_per_page: 64, format }
}

/// The data of a step of one query token over `ROWS` rows.
struct Step {
    raw_rows: MemSlice,
    rows: MemSlice,
    table: MemSlice,
    targets: MemSlice,
    pages: MemSlice,
    visible: MemSlice,
    q: MemSlice,
    q_table: MemSlice,
    weights_in: MemSlice,
    codes: MemSlice,
    weights: MemSlice,
    scores: MemSlice,
    selected: MemSlice,
    keys: (Mem, u64),
    kv: (Mem, u64),
    attend_q: MemSlice,
    raw_positions: MemSlice,
    positions: MemSlice,
    first: MemSlice,
    window_pages: MemSlice,
    sinks: MemSlice,
    out: MemSlice,
    expanded: MemSlice,
    copy: MemSlice,
    list: MemSlice,
    digests: MemSlice,
}

/// Everything that a launch writes is poisoned.
fn step(gpu: &Gpu) -> Step {
    let rng = &mut gpu.rng(61);
    let targets: Vec<u32> = (0..ROWS as u32).flat_map(|i| [i / 64, i % 64]).collect();
    let kv = pool(gpu, RowFormat::KvV4, PAGES);
    let kv_rows = gpu.f32s(&rng.floats(ROWS * 512));
    let targets = gpu.u32s(&targets);
    let store = StoreDeviceRows {
        rows: &kv_rows,
        norm: None,
        table: None,
        rounding: Rounding::Bf16,
        cache: cache(&kv, RowFormat::KvV4),
        targets: &targets,
        count: ROWS as u32,
        refused: None,
    };
    gpu.kernels.store_device_rows(STREAM, &store).unwrap();
    let s = Step {
        raw_rows: gpu.f32s(&rng.floats(ROWS * 128)),
        rows: gpu.poisoned(ROWS * 512),
        table: gpu.f32s(&rng.floats(ROWS * 64)),
        targets,
        pages: gpu.u32s(&(0..PAGES as u32).collect::<Vec<_>>()),
        visible: gpu.u32s(&[ROWS as u32]),
        q: gpu.f32s(&rng.floats(64 * 128)),
        q_table: gpu.f32s(&rng.floats(64)),
        weights_in: gpu.f32s(&rng.floats(64)),
        codes: gpu.poisoned(64 * 128),
        weights: gpu.poisoned(64 * 4),
        scores: gpu.poisoned(ROWS * 4),
        selected: gpu.poisoned(TOP_K * 4),
        keys: pool(gpu, RowFormat::IndexFp8, PAGES),
        kv,
        attend_q: gpu.bf16s(&rng.bf16s(64 * 512)),
        raw_positions: gpu.u32s(&[4 * ROWS as u32 - 1; 8]),
        positions: gpu.poisoned(32),
        first: gpu.u32s(&[(4 * ROWS as u32 - 128) / 64]),
        window_pages: gpu.u32s(&shuffled(rng, 2)),
        sinks: gpu.f32s(&rng.floats(64)),
        out: gpu.poisoned(64 * 512 * 2),
        expanded: gpu.poisoned((PAGES + 2) * 64 * 1024),
        copy: gpu.poisoned(PAGES * 8448),
        list: gpu.u32s(&shuffled(rng, PAGES)),
        digests: gpu.poisoned(16 * PAGES),
    };
    gpu.device().wait(STREAM).unwrap();
    s
}

/// Copies all pages of one memory to another.
fn moved(kernels: &CudaKernels, source: &MemSlice, target: &MemSlice, page_bytes: u32) {
    let pool = |mem| PagePool { mem, base: 0, stride: u64::from(page_bytes) };
    let a = MovePages {
        source: pool(&source.mem),
        source_index: None,
        target: pool(&target.mem),
        target_index: None,
        page_bytes,
        count: source.len as u32 / page_bytes,
        refused: None,
    };
    kernels.move_pages(STREAM, &a).unwrap();
}

impl Step {
    /// Brings the rows of index keys to where they are stored from.
    fn bring(&self, kernels: &CudaKernels) {
        moved(kernels, &self.raw_rows, &self.rows, 512);
    }

    /// Brings the position of the token.
    fn place(&self, kernels: &CudaKernels) {
        moved(kernels, &self.raw_positions, &self.positions, 32);
    }

    fn store(&self, kernels: &CudaKernels) {
        let a = StoreDeviceRows {
            rows: &self.rows,
            norm: None,
            table: Some(&self.table),
            rounding: Rounding::Bf16,
            cache: cache(&self.keys, RowFormat::IndexFp8),
            targets: &self.targets,
            count: ROWS as u32,
            refused: None,
        };
        kernels.store_device_rows(STREAM, &a).unwrap();
    }

    fn query(&self, kernels: &CudaKernels) {
        let a = QueryRows {
            q: &self.q,
            table: &self.q_table,
            weights: &self.weights_in,
            kind: IndexRounding::Fp8,
            codes: &self.codes,
            weights_out: &self.weights,
            tokens: 1,
            heads: 64,
        };
        kernels.query_rows(STREAM, &a).unwrap();
    }

    fn score(&self, kernels: &CudaKernels, path: ScorePath) {
        let keys = IndexKeys {
            cache: cache(&self.keys, RowFormat::IndexFp8),
            pages: &self.pages,
            pages_per_seq: PAGES as u32,
            visible: &self.visible,
            tokens_per_seq: 1,
            codes: &self.codes,
            weights: &self.weights,
            tokens: 1,
            path,
        };
        let a = ScoreRows { keys, scores: &self.scores, score_stride: ROWS as u32 };
        kernels.score_rows(STREAM, &a).unwrap();
    }

    fn select(&self, kernels: &CudaKernels) {
        let a = SelectRows {
            scores: &self.scores,
            score_stride: ROWS as u32,
            visible: &self.visible,
            tokens: 1,
            top_k: TOP_K as u32,
            selected: &self.selected,
        };
        kernels.select_rows(STREAM, &a).unwrap();
    }

    fn attend(&self, kernels: &CudaKernels, path: AttendPath) {
        let selection = DeviceSelection::Listed { rows: &self.selected, top_k: TOP_K as u32 };
        let (rows, pages) = (cache(&self.kv, RowFormat::KvV4), &self.pages);
        let pages_per_seq = PAGES as u32;
        let a = DeviceAttend {
            q: &self.attend_q,
            positions: &self.positions,
            window: rows,
            window_pages: &self.window_pages,
            window_first: &self.first,
            window_pages_per_seq: 2,
            window_tokens: 128,
            compressed: Some(DeviceRows { cache: rows, pages, pages_per_seq, selection }),
            sinks: &self.sinks,
            scale: 512f32.powf(-0.5),
            out: &self.out,
            tokens: 1,
            heads: 64,
            tokens_per_seq: 1,
            path,
            workspace: Some(&self.expanded),
        };
        kernels.attend_rows(STREAM, &a).unwrap();
    }

    /// Copies the pages of keys, in another order.
    fn copy(&self, kernels: &CudaKernels) {
        let a = MovePages {
            source: PagePool { mem: &self.keys.0, base: 0, stride: self.keys.1 },
            source_index: Some(&self.list),
            target: PagePool { mem: &self.copy.mem, base: 0, stride: 8448 },
            target_index: None,
            page_bytes: 8448,
            count: PAGES as u32,
            refused: None,
        };
        kernels.move_pages(STREAM, &a).unwrap();
    }

    fn digest(&self, kernels: &CudaKernels) {
        let a = DigestPages {
            pool: PagePool { mem: &self.copy.mem, base: 0, stride: 8448 },
            page_bytes: 8448,
            index: None,
            count: PAGES as u32,
            out: &self.digests,
            refused: None,
        };
        kernels.digest_pages(STREAM, &a).unwrap();
    }
}

/// One link: what runs before it, the producer, the consumer, and what the consumer wrote.
struct Link {
    name: &'static str,
    before: fn(&Step, &CudaKernels),
    producer: fn(&Step, &CudaKernels),
    consumer: fn(&Step, &CudaKernels),
    output: fn(&Step) -> MemSlice,
}

/// Keys are stored, the query is there.
fn until_query(s: &Step, k: &CudaKernels) {
    s.bring(k);
    s.store(k);
    s.query(k);
}

fn until_score(s: &Step, k: &CudaKernels) {
    until_query(s, k);
    s.score(k, ScorePath::Best);
}

fn until_position(s: &Step, k: &CudaKernels) {
    until_score(s, k);
    s.place(k);
}

fn until_selection(s: &Step, k: &CudaKernels) {
    until_score(s, k);
    s.select(k);
}

const LINKS: [Link; 12] = [
    Link {
        name: "move, store",
        before: |_, _| {},
        producer: |s, k| s.bring(k),
        consumer: |s, k| s.store(k),
        output: |s| MemSlice { mem: s.keys.0.clone(), offset: 0, len: s.keys.0.len() },
    },
    Link {
        name: "store, score",
        before: |s, k| {
            s.bring(k);
            s.query(k);
        },
        producer: |s, k| s.store(k),
        consumer: |s, k| s.score(k, ScorePath::Best),
        output: |s| s.scores.clone(),
    },
    Link {
        name: "query, score by warps",
        before: |s, k| {
            s.bring(k);
            s.store(k);
        },
        producer: |s, k| s.query(k),
        consumer: |s, k| s.score(k, ScorePath::Warp),
        output: |s| s.scores.clone(),
    },
    Link {
        name: "score, select",
        before: until_query,
        producer: |s, k| s.score(k, ScorePath::Best),
        consumer: |s, k| s.select(k),
        output: |s| s.selected.clone(),
    },
    Link {
        name: "select, attend",
        before: until_position,
        producer: |s, k| s.select(k),
        consumer: |s, k| s.attend(k, AttendPath::Five),
        output: |s| s.out.clone(),
    },
    Link {
        name: "select, portable attend",
        before: until_position,
        producer: |s, k| s.select(k),
        consumer: |s, k| s.attend(k, AttendPath::Portable),
        output: |s| s.out.clone(),
    },
    Link {
        name: "select, attend to expanded rows",
        before: until_position,
        producer: |s, k| s.select(k),
        consumer: |s, k| s.attend(k, AttendPath::Expanded),
        output: |s| s.out.clone(),
    },
    Link {
        name: "move, attend",
        before: until_selection,
        producer: |s, k| s.place(k),
        consumer: |s, k| s.attend(k, AttendPath::Two),
        output: |s| s.out.clone(),
    },
    Link {
        name: "move, portable attend",
        before: until_selection,
        producer: |s, k| s.place(k),
        consumer: |s, k| s.attend(k, AttendPath::Portable),
        output: |s| s.out.clone(),
    },
    Link {
        name: "move, attend to expanded rows",
        before: until_selection,
        producer: |s, k| s.place(k),
        consumer: |s, k| s.attend(k, AttendPath::Expanded),
        output: |s| s.out.clone(),
    },
    Link {
        name: "store, move",
        before: |s, k| s.bring(k),
        producer: |s, k| s.store(k),
        consumer: |s, k| s.copy(k),
        output: |s| s.copy.clone(),
    },
    Link {
        name: "move, digest",
        before: |s, k| {
            s.bring(k);
            s.store(k);
        },
        producer: |s, k| s.copy(k),
        consumer: |s, k| s.digest(k),
        output: |s| s.digests.clone(),
    },
];

#[test]
fn a_kernel_without_its_wait_is_caught() {
    let test = "a_kernel_without_its_wait_is_caught";
    let Some(gpu) = gpu(test) else { return };
    let (Some(late), Some(without)) =
        (variant(gpu, test, "late"), variant(gpu, test, "without-wait"))
    else {
        return;
    };
    for link in &LINKS {
        let run = |producer: &CudaKernels, consumer: &CudaKernels| {
            let s = step(gpu);
            (link.before)(&s, &gpu.kernels);
            gpu.device().wait(STREAM).unwrap();
            (link.producer)(&s, producer);
            (link.consumer)(&s, consumer);
            gpu.read(&(link.output)(&s))
        };
        let want = run(&gpu.kernels, &gpu.kernels);
        assert!(run(&late, &gpu.kernels) == want, "{}: in order", link.name);
        let unordered = run(&late, &without);
        assert!(unordered != want, "{}: nothing was seen of the missing wait", link.name);
        println!("{}: caught", link.name);
    }
}
