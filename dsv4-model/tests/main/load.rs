//! Loading: every tensor is read exactly once, and experts in FP8 compute what FP4 ones do.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking too")]

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use dsa_kernels::cpu::CpuKernels;
use dsv4_model::weights::{
    Checkpoint, ExpertFormat, TensorInfo, WeightDtype, WeightError, WeightSource, check_inventory,
    expected_tensors,
};
use dsv4_model::{LoadError, LoadOptions, LogitsWanted, Model, Part};

use crate::harness::{FP4, REFERENCE, Variant, checkpoint, model, prompts, session_of};

/// Counts the reads of each tensor; `hidden` is withheld.
#[derive(Debug)]
struct Counted {
    inner: Checkpoint,
    reads: Mutex<BTreeMap<String, u32>>,
    hidden: Option<&'static str>,
}

impl Counted {
    fn new(hidden: Option<&'static str>) -> Self {
        let inner = Checkpoint::open(&checkpoint()).unwrap();
        Self { inner, reads: Mutex::default(), hidden }
    }
}

impl WeightSource for Counted {
    fn names(&self) -> Vec<String> {
        let mut names = self.inner.names();
        names.retain(|name| Some(name.as_str()) != self.hidden);
        names
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        if self.hidden == Some(name) { None } else { self.inner.info(name) }
    }

    fn read<'a>(&'a self, name: &str) -> Result<Cow<'a, [u8]>, WeightError> {
        *self.reads.lock().unwrap().entry(name.to_owned()).or_default() += 1;
        self.inner.read(name)
    }
}

/// The same weights with routed experts re-encoded, without loss, as 128 x 128 FP8 blocks.
#[derive(Debug)]
struct Fp8Experts {
    inner: Checkpoint,
    forms: BTreeMap<String, TensorInfo>,
}

impl Fp8Experts {
    fn new() -> Self {
        let inner = Checkpoint::open(&checkpoint()).unwrap();
        let expected = expected_tensors(inner.config()).into_iter();
        let forms = expected.map(|t| (t.name.clone(), t.form(ExpertFormat::Fp8).clone())).collect();
        Self { inner, forms }
    }
}

impl WeightSource for Fp8Experts {
    fn names(&self) -> Vec<String> {
        self.inner.names()
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.forms.get(name).cloned()
    }

    fn read<'a>(&'a self, name: &str) -> Result<Cow<'a, [u8]>, WeightError> {
        let Some((at, part)) = name.rsplit_once('.') else { return self.inner.read(name) };
        if !name.contains(".experts.") {
            return self.inner.read(name);
        }
        let codes = self.inner.read(&format!("{at}.weight"))?;
        let scales = self.inner.read(&format!("{at}.scale"))?;
        let shape = self.forms[&format!("{at}.weight")].shape.clone();
        let (weight, scale) = to_fp8(&codes, &scales, shape[0] as usize, shape[1] as usize);
        Ok(Cow::Owned(if part == "weight" { weight } else { scale }))
    }
}

/// Code of each value that E4M3 has, by its bits.
fn e4m3_codes() -> BTreeMap<u32, u8> {
    let value = |code: u8| {
        let (sign, exponent) =
            (if code >> 7 == 1 { -1.0f32 } else { 1.0 }, i32::from(code >> 3 & 15));
        let fraction = f32::from(code & 7) / 8.0;
        let (significand, power) =
            if exponent == 0 { (fraction, -6) } else { (1.0 + fraction, exponent - 7) };
        sign * significand * 2f32.powi(power)
    };
    let codes = (0..=u8::MAX).filter(|code| code & 0x7f != 0x7f);
    codes.map(|code| (value(code).to_bits(), code)).collect()
}

/// Blocks take their largest scale, divided by 64 so that the largest FP4 value, 6, fits.
fn to_fp8(codes: &[u8], scales: &[u8], rows: usize, cols: usize) -> (Vec<u8>, Vec<u8>) {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let table = e4m3_codes();
    let scale_at = |r: usize, c: usize| scales[r * cols / 32 + c / 32];
    let mut blocks = vec![0u8; (rows / 128) * (cols / 128)];
    for r in 0..rows {
        for c in (0..cols).step_by(32) {
            let block = &mut blocks[r / 128 * (cols / 128) + c / 128];
            *block = (*block).max(scale_at(r, c) - 6);
        }
    }
    let mut weight = Vec::with_capacity(rows * cols);
    for r in 0..rows {
        for c in 0..cols {
            let pair = codes[(r * cols + c) / 2];
            let code = if c % 2 == 0 { pair & 15 } else { pair >> 4 };
            let sign = if code >> 3 == 1 { -1.0 } else { 1.0 };
            let block = blocks[r / 128 * (cols / 128) + c / 128];
            let power = i32::from(scale_at(r, c)) - i32::from(block);
            let value: f32 = sign * MAGNITUDES[usize::from(code & 7)] * 2f32.powi(power);
            weight.push(table[&value.to_bits()]);
        }
    }
    (weight, blocks)
}

fn load(source: &dyn WeightSource, (numerics, index_key): Variant) -> Result<Model, LoadError> {
    let config = Checkpoint::open(&checkpoint()).unwrap().config().clone();
    let options = LoadOptions { numerics, index_key, kernels: Arc::new(CpuKernels::new(1)) };
    Model::from_source(config, source, [0; 32], options)
}

#[test]
fn each_tensor_is_read_exactly_once() {
    let source = Counted::new(None);
    load(&source, FP4).unwrap();
    let reads = source.reads.into_inner().unwrap();
    let names: Vec<String> = reads.keys().cloned().collect();
    assert_eq!(names, source.inner.names());
    let again: Vec<_> = reads.iter().filter(|&(_, &times)| times != 1).collect();
    assert!(again.is_empty(), "{again:?}");
}

#[test]
fn an_incomplete_checkpoint_is_refused_before_anything_is_read() {
    let source = Counted::new(Some("layers.4.attn.indexer.wq_b.scale"));
    let error = load(&source, FP4).unwrap_err();
    let LoadError::Weights(WeightError::Inventory { missing, .. }) = &error else {
        panic!("{error:?}")
    };
    assert_eq!(missing.first, ["layers.4.attn.indexer.wq_b.scale"]);
    assert!(source.reads.lock().unwrap().is_empty());
}

#[test]
fn experts_in_fp8_compute_the_same_bits() {
    let source = Fp8Experts::new();
    let found = check_inventory(source.inner.config(), &source).unwrap();
    assert_eq!(found.experts, ExpertFormat::Fp8);
    let name = "layers.3.ffn.experts.9.w2.weight";
    assert_eq!(source.info(name).unwrap().dtype, WeightDtype::F8E4M3);
    let prompt = &prompts()[1].0;
    for variant in [REFERENCE, FP4] {
        let logits = |model: Arc<Model>| -> Vec<u32> {
            let mut session = session_of(model, 1, 1024);
            let mut seq = session.open().unwrap();
            let part = Part { seq: &mut seq, tokens: prompt, logits: LogitsWanted::All };
            let out = session.step(&mut [part]).unwrap();
            (0..prompt.len()).flat_map(|n| out.row(n).iter().map(|v| v.to_bits())).collect()
        };
        let in_fp8 = logits(Arc::new(load(&source, variant).unwrap()));
        assert!(in_fp8 == logits(model(variant)), "{variant:?}: logits differ");
    }
}
