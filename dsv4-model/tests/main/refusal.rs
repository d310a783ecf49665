//! Batches that do not fit are refused before anything is written.

use crate::harness::{FP4, model};
use dsa_kernels::{CpuDevice, Place};
use dsv4_model::{
    Batch, CacheMem, ForwardError, LogitsWanted, PageMemory, SeqSpan, StepOutput, Trace, Workspace,
};
use kv_pool::PoolKind;

const POOLS: [PoolKind; 3] = [PoolKind::Block, PoolKind::Window, PoolKind::Carry];

struct Bench {
    ws: Workspace,
    memory: PageMemory,
}

impl Bench {
    fn new() -> Self {
        let model = model(FP4);
        let (device, geometry) = (CpuDevice::new(), model.geometry());
        let memory = PageMemory::new(&device, Place::Host, geometry, 4, 8, 2).unwrap();
        let ws = Workspace::new(model.config(), model.kernels(), 64, 2).unwrap();
        Self { ws, memory }
    }

    fn run(&mut self, seqs: Vec<SeqSpan>) -> Result<StepOutput, ForwardError> {
        let mut out = StepOutput::default();
        let mem = self.memory.cache_mem();
        model(FP4).forward(&mut self.ws, &Batch { seqs }, &mem, &mut out)?;
        Ok(out)
    }

    /// The refusal of a batch, after checking that no page changed.
    fn refusal(&mut self, seqs: Vec<SeqSpan>) -> ForwardError {
        let error = self.run(seqs).unwrap_err();
        let mut bytes = Vec::new();
        for pool in POOLS {
            for page in 0..self.memory.pages(pool) {
                self.memory.read_page(pool, page, &mut bytes).unwrap();
            }
        }
        assert!(bytes.iter().all(|&b| b == 0), "{error}: pages were written");
        error
    }
}

fn span(tokens: usize, start: u32) -> SeqSpan {
    let first = start.saturating_sub(127) / 64;
    let end = start + u32::try_from(tokens).unwrap();
    SeqSpan {
        tokens: vec![7; tokens],
        start,
        blocks: (0..end.div_ceil(256)).collect(),
        window_first: first,
        window: (0..end.div_ceil(64) - first).collect(),
        carry: 0,
        logits: LogitsWanted::Last,
    }
}

#[test]
fn sizes_are_limited() {
    let mut bench = Bench::new();
    assert!(matches!(bench.refusal(vec![]), ForwardError::EmptyBatch));
    assert!(matches!(bench.refusal(vec![span(0, 0)]), ForwardError::EmptySpan { seq: 0 }));
    let error = bench.refusal(vec![span(65, 0)]);
    assert!(matches!(error, ForwardError::TooLarge { what: "tokens", found: 65, limit: 64 }));
    let error = bench.refusal(vec![span(1, 0), span(1, 0), span(1, 0)]);
    assert!(matches!(error, ForwardError::TooLarge { what: "sequences", found: 3, limit: 2 }));
}

#[test]
fn tokens_and_positions_are_limited() {
    let mut bench = Bench::new();
    let mut bad = span(3, 0);
    bad.tokens[2] = 4096;
    let error = bench.refusal(vec![bad]);
    assert!(matches!(error, ForwardError::Token { seq: 0, token: 4096, vocab: 4096 }));
    let error = bench.refusal(vec![span(2, 65535)]);
    assert!(matches!(error, ForwardError::TooLong { seq: 0, end: 65537, limit: 65536 }));
    let far = SeqSpan { start: u32::MAX, ..span(64, 0) };
    assert!(matches!(bench.refusal(vec![far]), ForwardError::TooLong { .. }));
}

#[test]
fn pages_must_cover_what_the_step_reads_and_writes() {
    let mut bench = Bench::new();
    let short = SeqSpan { blocks: vec![0], ..span(1, 256) };
    let error = bench.refusal(vec![short]);
    assert!(matches!(error, ForwardError::Uncovered { pool: PoolKind::Block, .. }));
    let late = SeqSpan { window_first: 3, window: vec![0, 1], ..span(1, 300) };
    let error = bench.refusal(vec![late]);
    let ForwardError::Uncovered { pool, covered, needed, .. } = error else {
        panic!("{error}");
    };
    assert_eq!((pool, covered, needed), (PoolKind::Window, 192..320, 173..301));
    let none = SeqSpan { window: vec![], ..span(1, 0) };
    let error = bench.refusal(vec![none]);
    assert!(matches!(error, ForwardError::Uncovered { pool: PoolKind::Window, .. }));
    let far = SeqSpan { window_first: u32::MAX, ..span(1, 0) };
    assert!(matches!(bench.refusal(vec![far]), ForwardError::Uncovered { .. }));
}

#[test]
fn pages_must_exist_and_have_one_writer() {
    let mut bench = Bench::new();
    for (span, pool) in [
        (SeqSpan { blocks: vec![4], ..span(1, 0) }, PoolKind::Block),
        (SeqSpan { window: vec![8], ..span(1, 0) }, PoolKind::Window),
        (SeqSpan { carry: 2, ..span(1, 0) }, PoolKind::Carry),
    ] {
        let error = bench.refusal(vec![span]);
        assert!(matches!(error, ForwardError::Page { pool: p, .. } if p == pool), "{error}");
    }
    let free = SeqSpan { blocks: vec![1], window: vec![1], carry: 1, ..span(1, 0) };
    for (other, pool) in [
        (SeqSpan { blocks: vec![0], ..free.clone() }, PoolKind::Block),
        (SeqSpan { window: vec![0], ..free.clone() }, PoolKind::Window),
        (SeqSpan { carry: 0, ..free.clone() }, PoolKind::Carry),
    ] {
        let error = bench.refusal(vec![span(1, 0), other]);
        let both = |e: &ForwardError| matches!(e, ForwardError::Shared { first: 0, second: 1, pool: p, page: 0 } if *p == pool);
        assert!(both(&error), "{error}");
    }
    // What only one of them writes may be read by both.
    assert_eq!(bench.run(vec![span(1, 0), free]).unwrap().rows, 2);
}

#[test]
fn memory_must_be_as_large_as_its_page_count_says() {
    let mut bench = Bench::new();
    let whole = bench.memory.clone();
    let mem = CacheMem { window_pages: 9, ..whole.cache_mem() };
    let batch = Batch { seqs: vec![span(1, 0)] };
    let mut out = StepOutput::default();
    let error = model(FP4).forward(&mut bench.ws, &batch, &mem, &mut out).unwrap_err();
    assert!(matches!(error, ForwardError::Memory { pool: PoolKind::Window, pages: 9, .. }));
}

#[test]
fn unwanted_logits_are_not_computed() {
    let mut bench = Bench::new();
    let first = SeqSpan { logits: LogitsWanted::None, ..span(5, 0) };
    let second = SeqSpan {
        blocks: vec![1],
        window: vec![1],
        carry: 1,
        logits: LogitsWanted::All,
        ..span(3, 0)
    };
    let out = bench.run(vec![first, second]).unwrap();
    assert_eq!((out.rows, out.logits.len()), (3, 3 * 4096));
    assert!(out.row(3).is_empty());
}

#[test]
fn buffers_do_not_grow_up_to_the_largest_step() {
    let mut bench = Bench::new();
    let before = bench.ws.bytes();
    let second = SeqSpan { blocks: vec![1], window: vec![1], carry: 1, ..span(31, 0) };
    assert_eq!(bench.run(vec![span(33, 0), second]).unwrap().rows, 2);
    assert_eq!(bench.ws.bytes(), before);
}

#[test]
fn forced_streams_must_fit_the_step() {
    let mut bench = Bench::new();
    let width = model(FP4).config().hidden_size * 4;
    for (layer, values) in [(0, 3 * width - 1), (5, width), (7, 3 * width)] {
        let forced = [(layer, vec![0.0; values])].into();
        let trace = Some(Trace { forced, ..Trace::default() });
        let mut out = StepOutput { trace, ..StepOutput::default() };
        let mem = bench.memory.cache_mem();
        let batch = Batch { seqs: vec![span(3, 0)] };
        let error = model(FP4).forward(&mut bench.ws, &batch, &mem, &mut out).unwrap_err();
        let ForwardError::Forced { layer: at, layers: 6, found, want } = error else {
            panic!("{error}")
        };
        assert_eq!((at, found, want), (layer, values, 3 * width));
    }
}
