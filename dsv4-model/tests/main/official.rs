//! `official` numerics against a second statement of DeepSeek's roundings, per index-key type.

use crate::altered::{Change, altered_model};
use crate::harness::{
    BF16, FP4, FP8, Variant, argmax, assert_close, decode, distance, golden_bytes, golden_json,
    ids, model, prompts, session, session_of, tensor,
};
use dsv4_model::{LogitsWanted, Model, Part, Probe, Session, Trace};
use safetensors::SafeTensors;
use std::sync::Arc;

/// Two implementations may order equal-looking logits differently below this margin.
const TIE: f64 = 0.02;

/// Tokens of the traced prompt.
const TOKENS: usize = 384;
/// Values of a token's streams.
const WIDTH: usize = 1024;

/// Streams after each layer, the last `streams[n].len() / WIDTH` tokens of the traced prompt.
fn oracle_streams(kind: &str) -> Vec<Vec<f32>> {
    let bytes = golden_bytes("official.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    // The index comes into it in layer 2, so the first two layers do not depend on its keys.
    let of = |layer: usize| if layer < 2 { "fp4" } else { kind };
    (0..6).map(|n| tensor(&file, &format!("{}.layers.{n}.streams", of(n))).1).collect()
}

/// The last `count` values of a tensor.
fn last(values: &[f32], count: usize) -> &[f32] {
    &values[values.len() - count..]
}

/// Runs the traced prompt in steps of at most `chunk` tokens, with `inputs[n]`, if there are any,
/// forced as streams before layer n + 1, and returns the streams after each layer.
fn streams(model: Arc<Model>, inputs: &[Vec<f32>], chunk: usize) -> Vec<Vec<f32>> {
    let mut session = session_of(model, 1, 512);
    let mut seq = session.open().unwrap();
    let mut found = vec![Vec::new(); 6];
    for (n, tokens) in prompts()[4].0[..TOKENS].chunks(chunk).enumerate() {
        let at = n * chunk * WIDTH;
        let rows = |v: &Vec<f32>| v[at..at + tokens.len() * WIDTH].to_vec();
        let forced = inputs.iter().enumerate().map(|(n, v)| (n + 1, rows(v))).collect();
        session.output_mut().trace = Some(Trace { forced, ..Trace::default() });
        session.step(&mut [Part { seq: &mut seq, tokens, logits: LogitsWanted::None }]).unwrap();
        let trace = session.output_mut().trace.take().unwrap();
        for (layer, all) in found.iter_mut().enumerate() {
            all.extend_from_slice(&trace.of(layer, Probe::Streams).next().unwrap().values);
        }
    }
    found
}

/// Layers that fail to be near the oracle's: farther than the rounding's own noise by norm, or with
/// fewer tokens equal to the bit than a right rounding leaves. The streams are in BF16, so that sums
/// in another order give equal bits for most tokens, and a rounding left out for almost none.
fn far_layers(found: &[Vec<f32>], want: &[Vec<f32>]) -> Vec<(usize, f64, usize)> {
    let mut far = Vec::new();
    for (layer, (found, want)) in found.iter().zip(want).enumerate() {
        let found = last(found, want.len());
        let tokens = found.chunks(WIDTH).zip(want.chunks(WIDTH)).rev().take(64);
        let equal = tokens.filter(|(a, b)| a == b).count();
        let distance = distance(found, want);
        if distance > 5e-3 || equal < 24 {
            far.push((layer, distance, equal));
        }
    }
    far
}

/// Each layer on the oracle's inputs, all tokens and all layers of a model with FP4 index keys.
#[test]
fn fp4_layers_agree_on_equal_inputs() {
    let want = oracle_streams("fp4");
    let found = streams(model(FP4), &want[..5], TOKENS);
    let far = far_layers(&found, &want);
    assert!(far.is_empty(), "layer, distance, equal tokens of 64: {far:?}");
}

/// The layers with an index, of a model with keys of type `variant`, on inputs of the FP4 run; the
/// other layers have no index keys. Returns what is far from the oracle with keys of type `kind`.
fn far_on_equal_inputs(variant: Variant, kind: &str) -> Vec<(usize, f64, usize)> {
    let bytes = golden_bytes("official.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut want = oracle_streams("fp4");
    let found = streams(model(variant), &want[..5], 100);
    for layer in [2, 4] {
        want[layer] = tensor(&file, &format!("{kind}.layers.{layer}.forced")).1;
    }
    far_layers(&found, &want)
}

#[test]
fn fp8_layers_agree_on_equal_inputs() {
    let far = far_on_equal_inputs(FP8, "fp8");
    assert!(far.is_empty(), "layer, distance, equal tokens of 64: {far:?}");
}

#[test]
fn bf16_layers_agree_on_equal_inputs() {
    let far = far_on_equal_inputs(BF16, "bf16");
    assert!(far.is_empty(), "layer, distance, equal tokens of 64: {far:?}");
}

#[test]
fn keys_of_another_type_are_noticed() {
    for (variant, kind) in [(FP4, "fp8"), (FP4, "bf16"), (FP8, "bf16"), (BF16, "fp8")] {
        let far = far_on_equal_inputs(variant, kind);
        assert!(far.iter().any(|f| f.0 == 4), "{variant:?} passes for {kind}: {far:?}");
    }
}

#[test]
fn a_misplaced_rounding_is_noticed_in_each_layer_that_has_it() {
    let want = oracle_streams("fp4");
    let changes: [(Change, &[usize]); 10] = [
        (Change::Activations, &[0, 1, 2, 3, 4, 5]),
        (Change::ExpertActivations, &[0, 1, 2, 3, 4, 5]),
        (Change::Probabilities, &[0, 1, 2, 3, 4, 5]),
        (Change::Heads, &[0, 1, 2, 3, 4, 5]),
        (Change::Output, &[0, 1, 2, 3, 4, 5]),
        (Change::Collapsed, &[0, 1, 2, 3, 4, 5]),
        // The only C128 rows of layer 5 are three.
        (Change::Pooled, &[2, 3, 4]),
        (Change::Hadamard, &[2, 4]),
        (Change::IndexQueries, &[2, 4]),
        // Where a value of this text exceeds the limit.
        (Change::ExpertLimit, &[0, 2, 4, 5]),
    ];
    for (change, layers) in changes {
        let found = streams(altered_model(FP4, change), &want[..5], TOKENS);
        let far = far_layers(&found, &want);
        let noticed: Vec<usize> = far.iter().map(|f| f.0).collect();
        assert_eq!(noticed, layers, "{change:?}: layer, distance, equal tokens of 64: {far:?}");
    }
}

/// Running freely, a last-bit difference of FP32 sums becomes a step of 6 % of an element where it
/// moves an FP8 rounding, and percents of the streams within a few layers. So beyond the first
/// layer the distance is compared with what noise in the last bits does to this model itself.
fn streams_agree(variant: Variant, kind: &str) {
    let want = oracle_streams(kind);
    let found = streams(model(variant), &[], TOKENS);
    let noisy = streams(altered_model(variant, Change::Noise), &[], TOKENS);
    for (layer, (found, noisy)) in found.iter().zip(&noisy).enumerate() {
        let want = last(&want[layer], 64 * WIDTH);
        let (found, noisy) = (last(found, want.len()), last(noisy, want.len()));
        let limit = if layer == 0 { 5e-3 } else { 1.5 * distance(noisy, found) };
        assert_close(&format!("{kind}.layers.{layer}.streams"), found, want, limit);
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

/// Every `step`-th dialogue; the example `golden_full` takes all of them. The types differ in two
/// layers only, which are compared on their own above, so two of them get few dialogues.
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
fn fp4_keeps_the_answers_of_every_fourth_dialogue() {
    dialogues_survive(FP4, "fp4", 4);
}

#[test]
fn fp8_keeps_the_answers_of_every_twentieth_dialogue() {
    dialogues_survive(FP8, "fp8", 20);
}

#[test]
fn bf16_keeps_the_answers_of_every_twentieth_dialogue() {
    dialogues_survive(BF16, "bf16", 20);
}
