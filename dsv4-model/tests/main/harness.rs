//! What the scenarios share: the mini model in each numerics, golden files, greedy decoding.

use dsa_kernels::CpuDevice;
use dsa_kernels::Kernels;
use dsa_kernels::cpu::CpuKernels;
use dsa_kernels::quant;
use dsv4_model::{LoadOptions, LogitsWanted, Model, Part, Sequence, Session, SessionLimits};
use kv_pool::{IndexKeyType, Numerics};
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

/// A numerics and index-key type to test.
pub(crate) type Variant = (Numerics, IndexKeyType);

pub(crate) const REFERENCE: Variant = (Numerics::Reference, IndexKeyType::Bf16);
pub(crate) const FP4: Variant = (Numerics::Official, IndexKeyType::Fp4);
pub(crate) const FP8: Variant = (Numerics::Official, IndexKeyType::Fp8);
pub(crate) const BF16: Variant = (Numerics::Official, IndexKeyType::Bf16);

/// Most tokens of a step in these tests.
pub(crate) const STEP: usize = 2304;

pub(crate) fn checkpoint() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/dsv4-mini/checkpoint")
}

pub(crate) fn golden_bytes(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

pub(crate) fn golden_json(name: &str) -> serde_json::Value {
    serde_json::from_slice(&golden_bytes(name)).unwrap()
}

fn kernels() -> Arc<dyn Kernels> {
    static KERNELS: OnceLock<Arc<dyn Kernels>> = OnceLock::new();
    Arc::clone(KERNELS.get_or_init(|| Arc::new(CpuKernels::from_env(2).unwrap())))
}

/// The mini model, loaded once per variant.
pub(crate) fn model((numerics, index_key): Variant) -> Arc<Model> {
    static MODELS: Mutex<BTreeMap<String, Arc<Model>>> = Mutex::new(BTreeMap::new());
    let mut models = MODELS.lock().unwrap();
    let key = format!("{numerics} {index_key}");
    Arc::clone(models.entry(key).or_insert_with(|| {
        let options = LoadOptions { numerics, index_key, kernels: kernels() };
        Arc::new(Model::load(&checkpoint(), options).unwrap())
    }))
}

/// A session for `seqs` sequences and `tokens` cached tokens.
pub(crate) fn session(variant: Variant, seqs: usize, tokens: usize) -> Session {
    session_of(model(variant), seqs, tokens)
}

/// A session of any model.
pub(crate) fn session_of(model: Arc<Model>, seqs: usize, tokens: usize) -> Session {
    let limits = SessionLimits { step_tokens: STEP, seqs, cached_tokens: tokens };
    Session::new(model, &CpuDevice::new(), limits).unwrap()
}

/// Index of the largest value, the lowest of equals.
pub(crate) fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, v) in logits.iter().enumerate() {
        if *v > logits[best] {
            best = i;
        }
    }
    u32::try_from(best).unwrap()
}

/// Feeds `count` greedy tokens after `first` and returns all logits that chose one.
pub(crate) fn decode(
    session: &mut Session,
    seq: &mut Sequence,
    first: Vec<f32>,
    count: usize,
) -> Vec<Vec<f32>> {
    let mut rows = vec![first];
    while rows.len() < count {
        let token = argmax(rows.last().unwrap());
        let part = Part { seq: &mut *seq, tokens: &[token], logits: LogitsWanted::Last };
        rows.push(session.step(&mut [part]).unwrap().row(0).to_vec());
    }
    rows
}

/// Prompt ids and greedy continuation of the golden prompts.
pub(crate) fn prompts() -> Vec<(Vec<u32>, Vec<u32>)> {
    let rows = golden_json("prompts.json");
    let rows = rows.as_array().unwrap();
    rows.iter().map(|r| (ids(&r["ids"]), ids(&r["greedy"]))).collect()
}

pub(crate) fn ids(list: &serde_json::Value) -> Vec<u32> {
    let list = list.as_array().unwrap();
    list.iter().map(|v| u32::try_from(v.as_u64().unwrap()).unwrap()).collect()
}

/// Shape and values of a tensor in FP32 or BF16.
pub(crate) fn tensor(file: &SafeTensors<'_>, name: &str) -> (Vec<usize>, Vec<f32>) {
    let view = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    let data = view.data();
    let values = match view.dtype() {
        Dtype::F32 => data.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
        Dtype::BF16 => {
            let codes = data.as_chunks::<2>().0.iter();
            codes.map(|&b| quant::bf16_decode(u16::from_le_bytes(b))).collect()
        }
        other => panic!("{name} is {other:?}"),
    };
    (view.shape().to_vec(), values)
}

/// Norm of the difference by norm of the expected values.
pub(crate) fn distance(found: &[f32], want: &[f32]) -> f64 {
    assert_eq!(found.len(), want.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let pairs = found.iter().zip(want);
    let diff = norm(&mut pairs.map(|(&a, &b)| f64::from(a) - f64::from(b)));
    diff / norm(&mut want.iter().map(|&v| f64::from(v)))
}

pub(crate) fn assert_close(what: &str, found: &[f32], want: &[f32], limit: f64) {
    let d = distance(found, want);
    assert!(d <= limit, "{what}: relative distance {d:.3e}, at most {limit:.0e} allowed");
}

/// Bits of logits, for exact comparison.
pub(crate) fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|r| r.iter().map(|v| v.to_bits()).collect()).collect()
}
