//! `official` numerics against a second statement of DeepSeek's roundings, per index-key type.

use crate::harness::{
    BF16, FP4, FP8, Variant, argmax, assert_close, decode, distance, golden_bytes, golden_json,
    ids, prompts, session, session_of, tensor,
};
use crate::noise::noisy_model;
use dsv4_model::{LogitsWanted, Part, Probe, Session, Trace};
use safetensors::SafeTensors;

/// Two implementations may order equal-looking logits differently below this margin.
const TIE: f64 = 0.02;

/// Streams of the last 64 of 384 tokens, after each layer.
fn streams(mut session: Session) -> Vec<Vec<f32>> {
    let tokens = prompts()[4].0[..384].to_vec();
    let mut seq = session.open().unwrap();
    session.output_mut().trace = Some(Trace::default());
    session.prefill(&mut seq, &tokens, 384).unwrap();
    let trace = session.output_mut().trace.take().unwrap();
    (0..6)
        .map(|layer| {
            let entry = trace.of(layer, Probe::Streams).next().unwrap();
            entry.values[320 * entry.cols..].to_vec()
        })
        .collect()
}

/// FP8 rounding turns a last-bit difference of FP32 sums into a step of 6 % of an element, and from
/// layer to layer into percents of the streams. So the first layer is compared closely, most of its
/// tokens to the bit, and the others by what noise in the last bits does to this model itself.
fn streams_agree(variant: Variant, kind: &str) {
    let bytes = golden_bytes("official.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let found = streams(session(variant, 1, 512));
    let noisy = streams(session_of(noisy_model(variant), 1, 512));
    for (layer, (found, noisy)) in found.iter().zip(&noisy).enumerate() {
        let name = format!("{kind}.layers.{layer}.streams");
        let (_, want) = tensor(&file, &name);
        if layer == 0 {
            assert_close(&name, found, &want, 5e-3);
            let rows = found.chunks(1024).zip(want.chunks(1024));
            let equal = rows.filter(|(a, b)| distance(a, b) < 1e-6).count();
            assert!(equal >= 32, "{name}: {equal} of 64 tokens equal");
        } else {
            assert_close(&name, found, &want, 1.5 * distance(noisy, found));
        }
    }
}

fn continuations_agree(variant: Variant, kind: &str) {
    let bytes = golden_bytes("official.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let report = golden_json("official.json");
    let mut session = session(variant, 1, 8192);
    for (n, (tokens, greedy)) in prompts().iter().take(10).enumerate() {
        let mut seq = session.open().unwrap();
        let last = session.prefill(&mut seq, tokens, 512).unwrap().row(0).to_vec();
        let name = format!("{kind}.last.{n}");
        assert_close(&name, &last, &tensor(&file, &name).1, 8e-2);
        let found: Vec<u32> = decode(&mut session, &mut seq, last, greedy.len())
            .iter()
            .map(|row| argmax(row))
            .collect();
        session.close(seq).unwrap();
        let steps = &report[kind]["prompts"][n];
        let want = ids(&steps["argmax"]);
        // A tie may send the two on different ways; what follows it is not comparable.
        let Some(at) = (0..want.len()).find(|&i| found[i] != want[i]) else { continue };
        let margin = steps["margin"][at].as_f64().unwrap();
        assert!(
            margin < TIE,
            "{kind}: prompt {n} differs at step {at}, where the margin is {margin}"
        );
    }
}

/// Lost answers of some dialogues: right in FP32, wrong here; and how many were right in FP32.
fn lost_answers(session: &mut Session, dialogue: &serde_json::Value) -> (usize, usize) {
    let tokens = ids(&dialogue["ids"]);
    let mut best = Vec::with_capacity(tokens.len());
    let mut seq = session.open().unwrap();
    for chunk in tokens.chunks(512) {
        let part = Part { seq: &mut seq, tokens: chunk, logits: LogitsWanted::All };
        let out = session.step(&mut [part]).unwrap();
        best.extend((0..out.rows).map(|r| argmax(out.row(r))));
    }
    session.close(seq).unwrap();
    let spans = dialogue["spans"].as_array().unwrap();
    let right = dialogue["right"].as_array().unwrap();
    let (mut lost, mut total) = (0, 0);
    for (span, right) in spans.iter().zip(right) {
        if right.as_bool().unwrap() {
            let (a, b) = (ids(span)[0] as usize, ids(span)[1] as usize);
            total += 1;
            lost += usize::from(best[a - 1..b - 1] != tokens[a..b]);
        }
    }
    (lost, total)
}

/// Every `step`-th dialogue; the example `golden_full` takes all of them.
fn dialogues_survive(variant: Variant, kind: &str, step: usize) {
    let dialogues = golden_json("dialogues.json");
    let mut session = session(variant, 1, 8192);
    let (mut lost, mut total) = (0, 0);
    for dialogue in dialogues.as_array().unwrap().iter().step_by(step) {
        let (l, t) = lost_answers(&mut session, dialogue);
        lost += l;
        total += t;
    }
    assert!(total > 1000 / step, "{total} answers");
    assert!(lost * 100 <= total, "{kind}: {lost} of {total} answers lost by rounding");
}

#[test]
fn fp4_streams_agree() {
    streams_agree(FP4, "fp4");
}

#[test]
fn fp8_streams_agree() {
    streams_agree(FP8, "fp8");
}

#[test]
fn bf16_streams_agree() {
    streams_agree(BF16, "bf16");
}

#[test]
fn fp4_continuations_agree() {
    continuations_agree(FP4, "fp4");
}

#[test]
fn fp8_continuations_agree() {
    continuations_agree(FP8, "fp8");
}

#[test]
fn bf16_continuations_agree() {
    continuations_agree(BF16, "bf16");
}

#[test]
fn fp4_keeps_the_answers_of_every_third_dialogue() {
    dialogues_survive(FP4, "fp4", 3);
}

#[test]
fn fp8_keeps_the_answers_of_every_tenth_dialogue() {
    dialogues_survive(FP8, "fp8", 10);
}

#[test]
fn bf16_keeps_the_answers_of_every_tenth_dialogue() {
    dialogues_survive(BF16, "bf16", 10);
}
