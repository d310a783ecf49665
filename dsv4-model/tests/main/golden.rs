//! `reference` numerics against vectors of the transformers implementation in FP32.

use crate::harness::{
    REFERENCE, argmax, assert_close, bits, checkpoint, decode, golden_bytes, prompts, session,
    session_of, tensor,
};
use dsa_kernels::cpu::{CpuKernels, InstructionSet};
use dsv4_model::{LoadOptions, LogitsWanted, Model, Part, Probe, Trace};
use kv_pool::{IndexKeyType, Numerics};
use safetensors::SafeTensors;
use std::sync::Arc;

/// Traces the 384 golden tokens, in steps of at most `chunk`.
fn traced(chunk: usize) -> Trace {
    let ids = prompts()[4].0[..384].to_vec();
    let mut session = session(REFERENCE, 1, 512);
    let mut seq = session.open().unwrap();
    session.output_mut().trace = Some(Trace::default());
    session.prefill(&mut seq, &ids, chunk).unwrap();
    session.output_mut().trace.take().unwrap()
}

/// All rows of a point, steps joined.
fn joined(trace: &Trace, layer: usize, probe: Probe) -> Vec<f32> {
    trace.of(layer, probe).flat_map(|e| e.values.iter().copied()).collect()
}

fn last_rows(values: &[f32], rows: usize, of: usize) -> &[f32] {
    let width = values.len() / of;
    &values[(of - rows) * width..]
}

fn compare_layers(trace: &Trace) {
    let bytes = golden_bytes("layers.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let probes = [
        ("streams", Probe::Streams, &[0, 1, 2, 3, 4, 5][..]),
        ("attn_in", Probe::AttnIn, &[0, 2, 3]),
        ("attn_out", Probe::AttnOut, &[0, 2, 3]),
        ("ffn_out", Probe::FfnOut, &[0, 2, 3]),
    ];
    for (name, probe, layers) in probes {
        for &layer in layers {
            let name = format!("layers.{layer}.{name}");
            let found = joined(trace, layer, probe);
            assert_close(&name, last_rows(&found, 64, 384), &tensor(&file, &name).1, 1e-4);
        }
    }
    for layer in 2..6 {
        let name = format!("layers.{layer}.compressed_kv");
        let found = joined(trace, layer, Probe::CompressedKv);
        assert_close(&name, &found, &tensor(&file, &name).1, 1e-4);
    }
}

fn compare_choice(trace: &Trace) {
    let bytes = golden_bytes("layers.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for layer in [2, 4] {
        let (shape, want) = tensor(&file, &format!("layers.{layer}.index_scores"));
        let (width, mut found, mut seen) = (shape[1], Vec::new(), Vec::new());
        let mut position = 0;
        for entry in trace.of(layer, Probe::IndexScores) {
            for row in entry.values.chunks(entry.cols) {
                let visible = (position + 1) / 4;
                assert!(row[visible..].iter().all(|&s| s == f32::NEG_INFINITY));
                found.extend_from_slice(&row[..visible]);
                seen.extend_from_slice(&want[position * width..position * width + visible]);
                position += 1;
            }
        }
        assert_eq!(position, 384);
        assert_close(&format!("layers.{layer}.index_scores"), &found, &seen, 1e-4);

        let (shape, want) = tensor(&file, &format!("layers.{layer}.selected"));
        let found = joined(trace, layer, Probe::Selected);
        for (position, (found, want)) in found.chunks(64).zip(want.chunks(shape[1])).enumerate() {
            let set = |rows: &[f32]| {
                let mut rows: Vec<f32> = rows.iter().copied().filter(|&r| r >= 0.0).collect();
                rows.sort_by(f32::total_cmp);
                rows
            };
            assert_eq!(set(found), set(want), "layer {layer}, position {position}");
        }
    }
}

#[test]
fn layers_agree_in_one_step() {
    let trace = traced(384);
    compare_layers(&trace);
    compare_choice(&trace);
}

#[test]
fn layers_agree_in_chunks() {
    let trace = traced(67);
    compare_layers(&trace);
    compare_choice(&trace);
}

/// Steps end behind every 256th position, so that the logits there can be compared on the way.
fn compare_prompt(n: usize, ids: &[u32], greedy: &[u32]) {
    let bytes = golden_bytes("logits.safetensors");
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (shape, every) = tensor(&file, &format!("every256.{n}"));
    let vocab = shape[1];
    let mut session = session(REFERENCE, 1, ids.len() + greedy.len());
    let mut seq = session.open().unwrap();
    for (k, want) in every.chunks(vocab).enumerate() {
        let tokens = &ids[seq.len()..=256 * k];
        let part = Part { seq: &mut seq, tokens, logits: LogitsWanted::Last };
        let out = session.step(&mut [part]).unwrap();
        assert_close(&format!("every256.{n} row {k}"), out.row(0), want, 1e-3);
    }
    let last = if seq.len() < ids.len() {
        let tokens = &ids[seq.len()..];
        let part = Part { seq: &mut seq, tokens, logits: LogitsWanted::Last };
        session.step(&mut [part]).unwrap().row(0).to_vec()
    } else {
        every[every.len() - vocab..].to_vec()
    };
    assert_close(&format!("last.{n}"), &last, &tensor(&file, &format!("last.{n}")).1, 1e-3);
    let rows = decode(&mut session, &mut seq, last, greedy.len());
    let tokens: Vec<u32> = rows.iter().map(|r| argmax(r)).collect();
    assert_eq!(tokens, greedy, "continuation of prompt {n}");
}

#[test]
fn logits_and_continuations_of_short_prompts_agree() {
    for (n, (ids, greedy)) in prompts().iter().enumerate().filter(|(_, p)| p.0.len() < 1500) {
        compare_prompt(n, ids, greedy);
    }
}

#[test]
fn logits_and_continuations_of_long_prompts_agree() {
    for (n, (ids, greedy)) in prompts().iter().enumerate().filter(|(_, p)| p.0.len() >= 1500) {
        compare_prompt(n, ids, greedy);
    }
}

/// Logits of all golden tokens after the prompts that `takes` takes, official numerics.
fn continuations(set: InstructionSet, takes: impl Fn(usize) -> bool) -> Vec<Vec<Vec<u32>>> {
    let kernels = Arc::new(CpuKernels::with_instructions(2, set).unwrap());
    let (numerics, index_key) = (Numerics::Official, IndexKeyType::Fp4);
    let model = Model::load(&checkpoint(), LoadOptions { numerics, index_key, kernels }).unwrap();
    let mut session = session_of(Arc::new(model), 1, 1024);
    let mut found = Vec::new();
    for (ids, greedy) in prompts().iter().filter(|p| takes(p.0.len())) {
        let mut seq = session.open().unwrap();
        let last = session.prefill(&mut seq, ids, 100).unwrap().row(0).to_vec();
        found.push(bits(&decode(&mut session, &mut seq, last, greedy.len())));
        session.close(seq).unwrap();
    }
    found
}

#[test]
fn every_instruction_set_gives_the_same_continuations() {
    let best = InstructionSet::best();
    for set in InstructionSet::ALL.into_iter().filter(|set| set.is_present() && *set != best) {
        // The portable one is the definition itself, and slow.
        let most = if set == InstructionSet::Portable { 100 } else { 800 };
        let takes = |len| len <= most;
        assert_eq!(continuations(set, takes), continuations(best, takes), "{set}");
    }
}
