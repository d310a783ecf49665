//! Greedy output is the same bit for bit alone or in company, whole or in chunks of any size, and
//! wherever its pages are.

use crate::harness::{
    BF16, FP4, FP8, REFERENCE, STEP, Variant, argmax, bits, decode, prompts, session,
};
use dsv4_model::{LogitsWanted, Part, Sequence, Session};

/// What a run leaves behind: logits of each greedy step, and all page bytes.
#[derive(PartialEq)]
struct Outcome {
    logits: Vec<Vec<u32>>,
    pages: Vec<u8>,
}

/// Text with facts far apart, so that the index chooses.
fn text(len: usize) -> Vec<u32> {
    prompts()[10].0[..len].to_vec()
}

fn page_bytes(session: &Session, seq: &Sequence) -> Vec<u8> {
    let mut bytes = Vec::new();
    for page in seq.table().all_pages() {
        session.memory().read_page(page.pool, page.index, &mut bytes).unwrap();
    }
    bytes
}

/// Runs one prompt alone in the given chunks, then `count` greedy steps.
fn alone(session: &mut Session, prompt: &[u32], chunks: &[usize], count: usize) -> Outcome {
    let mut seq = session.open().unwrap();
    let (mut rest, mut last) = (prompt, Vec::new());
    for &chunk in chunks {
        let (now, later) = rest.split_at(chunk);
        let logits = if later.is_empty() { LogitsWanted::Last } else { LogitsWanted::None };
        let out = session.step(&mut [Part { seq: &mut seq, tokens: now, logits }]).unwrap();
        last = out.row(0).to_vec();
        rest = later;
    }
    assert!(rest.is_empty());
    let logits = bits(&decode(session, &mut seq, last, count));
    let pages = page_bytes(session, &seq);
    session.close(seq).unwrap();
    Outcome { logits, pages }
}

fn chunks_of(len: usize, chunk: usize) -> Vec<usize> {
    (0..len.div_ceil(chunk)).map(|i| chunk.min(len - i * chunk)).collect()
}

/// Chunk lengths from a fixed sequence of numbers, many of them small.
fn mixed_chunks(len: usize, seed: u64) -> Vec<usize> {
    let (mut state, mut left, mut chunks) = (seed, len, Vec::new());
    while left > 0 {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let limit = [3, 7, 70, 300, 900][(state >> 40) as usize % 5];
        let chunk = (1 + (state >> 48) as usize % limit).min(left);
        chunks.push(chunk);
        left -= chunk;
    }
    chunks
}

fn assert_same(what: &str, found: &Outcome, want: &Outcome) {
    let step = found.logits.iter().zip(&want.logits).position(|(a, b)| a != b);
    assert_eq!(step, None, "{what}: logits differ from this step on");
    assert_eq!(found.logits.len(), want.logits.len(), "{what}");
    let byte = found.pages.iter().zip(&want.pages).position(|(a, b)| a != b);
    assert_eq!(byte, None, "{what}: pages differ from this byte on");
    assert_eq!(found.pages.len(), want.pages.len(), "{what}");
}

fn chunk_sizes_agree(variant: Variant, len: usize, sizes: &[usize]) {
    let prompt = text(len);
    let mut session = session(variant, 1, 4096);
    let want = alone(&mut session, &prompt, &[len], 6);
    for &size in sizes {
        let found = alone(&mut session, &prompt, &chunks_of(len, size), 6);
        assert_same(&format!("chunks of {size}"), &found, &want);
    }
}

#[test]
fn fp4_is_the_same_in_chunks_of_any_size() {
    chunk_sizes_agree(FP4, 1043, &[1, 3, 4, 63, 127, 128, 129, 1000]);
}

#[test]
fn fp8_is_the_same_in_chunks_of_any_size() {
    chunk_sizes_agree(FP8, 390, &[1, 63, 129]);
}

#[test]
fn bf16_is_the_same_in_chunks_of_any_size() {
    chunk_sizes_agree(BF16, 390, &[1, 63, 129]);
}

#[test]
fn reference_is_the_same_in_chunks_of_any_size() {
    chunk_sizes_agree(REFERENCE, 390, &[1, 63, 129]);
}

#[test]
fn prompts_around_every_border_are_the_same_in_mixed_chunks() {
    let borders = [1..=1, 3..=5, 127..=130, 255..=257, 383..=385, 511..=513, 2046..=2050];
    let mut session = session(FP4, 1, 4096);
    for len in borders.into_iter().flatten() {
        let prompt = text(len);
        let want = alone(&mut session, &prompt, &[len], 3);
        let chunks = mixed_chunks(len, len as u64);
        let found = alone(&mut session, &prompt, &chunks, 3);
        assert_same(&format!("{len} tokens in {} chunks", chunks.len()), &found, &want);
    }
}

/// A sequence of the crowd: its prompt, how it is cut, and what it has produced.
struct Member {
    seq: Sequence,
    prompt: Vec<u32>,
    chunk: usize,
    start_step: usize,
    logits: Vec<Vec<f32>>,
    wanted: usize,
}

impl Member {
    /// Its next tokens at a step, none if it has not started or is done.
    fn next(&self, step: usize) -> Option<(Vec<u32>, bool)> {
        if step < self.start_step || self.logits.len() == self.wanted {
            return None;
        }
        if let Some(last) = self.logits.last() {
            return Some((vec![argmax(last)], true));
        }
        let done = self.seq.len();
        let end = self.prompt.len().min(done + self.chunk);
        Some((self.prompt[done..end].to_vec(), end == self.prompt.len()))
    }
}

/// One step of all members that have something to do; false when none has.
fn crowd_step(session: &mut Session, members: &mut [Member], step: usize) -> bool {
    let work: Vec<_> = members.iter().map(|m| m.next(step)).collect();
    let mut parts = Vec::new();
    for (member, work) in members.iter_mut().zip(&work) {
        if let Some((tokens, last)) = work {
            let logits = if *last { LogitsWanted::Last } else { LogitsWanted::None };
            parts.push(Part { seq: &mut member.seq, tokens, logits });
        }
    }
    if parts.is_empty() {
        return members.iter().any(|m| m.logits.len() < m.wanted);
    }
    let out = session.step(&mut parts).unwrap();
    let rows: Vec<Vec<f32>> = (0..out.rows).map(|r| out.row(r).to_vec()).collect();
    let mut rows = rows.into_iter();
    for (member, work) in members.iter_mut().zip(&work) {
        if work.as_ref().is_some_and(|w| w.1) {
            member.logits.push(rows.next().unwrap());
        }
    }
    assert!(rows.next().is_none());
    true
}

/// Prompts of different lengths that start and decode at different times.
fn crowd_agrees(variant: Variant, size: usize) {
    let source = text(4096);
    let mut session = session(variant, size, size * 512);
    let mut members: Vec<Member> = (0..size)
        .map(|n| Member {
            seq: session.open().unwrap(),
            prompt: source[n * 61..][..1 + (n * 37) % 420].to_vec(),
            chunk: [420, 64, 5, 131][n % 4],
            start_step: n % 7,
            logits: Vec::new(),
            wanted: 2 + n % 9,
        })
        .collect();
    let mut step = 0;
    while crowd_step(&mut session, &mut members, step) {
        step += 1;
    }
    let crowd: Vec<_> = members
        .into_iter()
        .map(|m| {
            let pages = page_bytes(&session, &m.seq);
            session.close(m.seq).unwrap();
            (m.prompt, Outcome { logits: bits(&m.logits), pages })
        })
        .collect();
    for (n, (prompt, found)) in crowd.iter().enumerate() {
        let want = alone(&mut session, prompt, &[prompt.len()], found.logits.len());
        assert_same(&format!("member {n} of the crowd"), found, &want);
    }
}

#[test]
fn fp4_is_the_same_among_thirty_two() {
    crowd_agrees(FP4, 32);
}

#[test]
fn fp8_is_the_same_among_twelve() {
    crowd_agrees(FP8, 12);
}

/// Moves between steps, while another sequence takes the pages left behind and those that leave
/// the window.
#[test]
fn moving_to_other_pages_changes_nothing() {
    let prompt = text(900);
    let mut session = session(FP4, 3, 3 * 1280);
    let want = alone(&mut session, &prompt, &[900], 8);

    let mut seq = session.open().unwrap();
    let mut other = session.open().unwrap();
    let mut last = Vec::new();
    for (n, chunk) in prompt.chunks(130).enumerate() {
        let part = Part { seq: &mut seq, tokens: chunk, logits: LogitsWanted::Last };
        last = session.step(&mut [part]).unwrap().row(0).to_vec();
        let before: Vec<_> = seq.table().all_pages().collect();
        session.relocate(&mut seq).unwrap();
        assert!(seq.table().all_pages().all(|page| !before.contains(&page)));
        let tokens = &prompt[n * 40..(n + 1) * 40];
        let part = Part { seq: &mut other, tokens, logits: LogitsWanted::None };
        session.step(&mut [part]).unwrap();
    }
    let mut rows = decode(&mut session, &mut seq, last, 4);
    session.relocate(&mut seq).unwrap();
    let last = rows.pop().unwrap();
    rows.extend(decode(&mut session, &mut seq, last, 5));
    let found = Outcome { logits: bits(&rows), pages: page_bytes(&session, &seq) };
    assert_same("moved sequence", &found, &want);
}

#[test]
fn window_pages_are_recycled() {
    let mut session = session(FP4, 1, 2048);
    let mut seq = session.open().unwrap();
    session.prefill(&mut seq, &text(1900), STEP).unwrap();
    assert_eq!(seq.table().window_first_no(), (1900 - 127) / 64);
    assert_eq!(seq.table().window().len(), 3);
    let mut rows = decode(&mut session, &mut seq, vec![0.0, 1.0], 140);
    assert!(seq.table().window().len() <= 3);
    assert!(rows.pop().unwrap().iter().all(|v| v.is_finite()));
}
