//! The model on a GPU: with the exact kernels every logit has the CPU's bits. Without a device each test
//! is skipped by name with one line; `DSA_KERNELS` names the folder of the compiled kernels.

use crate::harness::{
    BF16, FP4, FP8, REFERENCE, STEP, Variant, argmax, checkpoint, model, prompts,
};
use dsa_kernels::cuda::{CudaDevice, CudaKernels, ExactKernels};
use dsa_kernels::{CpuDevice, Device, StreamId};
use dsv4_model::{LoadOptions, LogitsWanted, Model, Part, Session, SessionLimits};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// The GPU's kernels, or none where there is no GPU. Kernels that are there and don't load are a failure.
#[expect(clippy::print_stdout, reason = "a test that is skipped says so")]
fn kernels(test: &str) -> Option<Arc<CudaKernels>> {
    static KERNELS: OnceLock<Option<Arc<CudaKernels>>> = OnceLock::new();
    let kernels = KERNELS.get_or_init(|| {
        let folder = std::env::var_os("DSA_KERNELS").map_or_else(
            || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/kernels")),
            PathBuf::from,
        );
        let device = CudaDevice::open(0).ok()?;
        Some(Arc::new(CudaKernels::load(Arc::new(device), &folder).unwrap()))
    });
    if kernels.is_none() {
        println!("{test}: skipped, no GPU");
    }
    kernels.clone()
}

/// The same steps here and there: prompts of all lengths in chunks, then sequences together.
fn logits(model: Arc<Model>, device: &dyn Device) -> Vec<Vec<f32>> {
    let prompts = prompts();
    let cached_tokens = prompts.iter().map(|(ids, _)| ids.len() + 16).sum();
    let limits = SessionLimits { step_tokens: STEP, seqs: prompts.len(), cached_tokens };
    let mut session = Session::new(model, device, limits).unwrap();
    let (mut seqs, mut rows) = (Vec::new(), Vec::new());
    for (n, (ids, _)) in prompts.iter().enumerate() {
        let mut seq = session.open().unwrap();
        let chunk = [STEP, 256, 67][n % 3];
        rows.push(session.prefill(&mut seq, ids, chunk).unwrap().row(0).to_vec());
        seqs.push(seq);
    }
    let mut next: Vec<u32> = rows.iter().map(|row| argmax(row)).collect();
    for _ in 0..8 {
        let parts = seqs.iter_mut().zip(&next);
        let mut parts: Vec<Part<'_>> = parts
            .map(|(seq, token)| Part {
                seq,
                tokens: std::slice::from_ref(token),
                logits: LogitsWanted::Last,
            })
            .collect();
        let out = session.step(&mut parts).unwrap();
        let step: Vec<Vec<f32>> = (0..parts.len()).map(|n| out.row(n).to_vec()).collect();
        next = step.iter().map(|row| argmax(row)).collect();
        rows.extend(step);
    }
    rows
}

fn compare(test: &str, variant @ (numerics, index_key): Variant) {
    let Some(cuda) = kernels(test) else { return };
    let exact = Arc::new(ExactKernels::new(cuda, StreamId(0)).unwrap());
    let device = Arc::clone(exact.device());
    let options = LoadOptions { numerics, index_key, kernels: exact };
    let there = Arc::new(Model::load(&checkpoint(), options).unwrap());
    let (found, want) = (logits(there, &*device), logits(model(variant), &CpuDevice::new()));
    assert_eq!(found.len(), want.len());
    for (n, (found, want)) in found.iter().zip(&want).enumerate() {
        let differs = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
        let count = found.iter().zip(want).filter(|pair| differs(*pair)).count();
        assert_eq!(count, 0, "{test}: row {n}: {count} of {} logits differ", want.len());
    }
}

#[test]
fn official_numerics_with_fp4_index_keys_have_the_cpus_bits() {
    compare("official_numerics_with_fp4_index_keys_have_the_cpus_bits", FP4);
}

#[test]
fn official_numerics_with_fp8_index_keys_have_the_cpus_bits() {
    compare("official_numerics_with_fp8_index_keys_have_the_cpus_bits", FP8);
}

#[test]
fn official_numerics_with_bf16_index_keys_have_the_cpus_bits() {
    compare("official_numerics_with_bf16_index_keys_have_the_cpus_bits", BF16);
}

#[test]
fn reference_numerics_have_the_cpus_bits() {
    compare("reference_numerics_have_the_cpus_bits", REFERENCE);
}
