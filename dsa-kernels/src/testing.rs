//! Seeded cases and a conformance suite for implementations of [`Kernels`].
//!
//! [`conformance`] runs every operation on odd and real shapes and compares the results bit for bit
//! with [`CpuReference`]; a NaN equals any NaN. It panics with operation, case and coordinate.

mod caches;
mod cases;

pub use caches::{Pages, random_rows};
pub use cases::conformance;

use crate::cpu::CpuReference;
use crate::ops::{Kernels, Weight, WeightDesc, WeightFormat};

/// Floating-point operations a second of `threads` threads that multiply BF16 numbers in registers
/// and do nothing else: what no matrix product here can surpass. `None` without such instructions.
#[must_use]
pub fn bf16_peak(threads: usize) -> Option<f64> {
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(crate::cpu::bf16_peak)).collect();
        all.into_iter().map(|thread| thread.join().ok().flatten()).sum()
    })
}

/// Small deterministic generator (splitmix64).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Generator with a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Integer below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }

    /// Float in `[-1, 1)`.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// `n` activations: mostly of ordinary size, some large, some zero.
    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n)
            .map(|_| {
                let x = self.unit();
                match self.below(32) {
                    0 => 0.0,
                    1 => x * 20.0,
                    2 => x * 1e-3,
                    _ => x,
                }
            })
            .collect()
    }

    /// `n` activations that are BF16 numbers.
    pub fn bf16s(&mut self, n: usize) -> Vec<f32> {
        self.floats(n).into_iter().map(crate::quant::bf16_round).collect()
    }
}

/// Owned checkpoint bytes of a random matrix.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// Element format.
    pub format: WeightFormat,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Element bytes.
    pub data: Vec<u8>,
    /// Scale bytes.
    pub scales: Vec<u8>,
}

impl Matrix {
    /// Random matrix with values of about `1 / sqrt(cols)`.
    #[must_use]
    pub fn random(rng: &mut Rng, format: WeightFormat, rows: usize, cols: usize) -> Self {
        let exponent = 127 - (cols.ilog2() / 2) as u8;
        let spread = 1.0 / (cols as f32).sqrt();
        let (data, scales) = match format {
            WeightFormat::Fp8Block128 => {
                let codes =
                    (0..rows * cols).map(|_| crate::quant::e4m3_encode(rng.unit())).collect();
                let blocks = rows.div_ceil(128) * cols.div_ceil(128);
                (codes, (0..blocks).map(|_| exponent - rng.below(3) as u8).collect())
            }
            WeightFormat::Fp4Group32 => {
                let codes = (0..rows * cols / 2).map(|_| rng.bits() as u8).collect();
                let groups = rows * cols.div_ceil(32);
                (codes, (0..groups).map(|_| exponent - 2 - rng.below(3) as u8).collect())
            }
            WeightFormat::Bf16 => {
                let bits = |x: f32| crate::quant::bf16_encode(x * spread).to_le_bytes();
                ((0..rows * cols).flat_map(|_| bits(rng.unit())).collect(), Vec::new())
            }
            WeightFormat::F32 => {
                let values = (0..rows * cols).flat_map(|_| (rng.unit() * spread).to_le_bytes());
                (values.collect(), Vec::new())
            }
        };
        Self { format, rows, cols, data, scales }
    }

    /// Packs it for an implementation.
    ///
    /// # Panics
    /// If the implementation refuses it.
    #[must_use]
    pub fn pack(&self, kernels: &dyn Kernels) -> Weight {
        let desc = WeightDesc {
            format: self.format,
            rows: self.rows,
            cols: self.cols,
            data: &self.data,
            scales: &self.scales,
            round_to_bf16: false,
        };
        kernels.pack(&desc).expect("a generated matrix has the sizes it states")
    }
}

/// Panics unless `got` has the bits of `want`; NaN equals NaN.
///
/// # Panics
/// On the first difference, with its place and both values.
pub fn same_bits(case: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{case}: lengths");
    let differs = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan());
    if let Some(at) = got.iter().zip(want).position(differs) {
        let count = got.iter().zip(want).filter(|pair| differs(*pair)).count();
        panic!(
            "{case}: element {at} of {} is {:e} ({:#010x}), {:e} ({:#010x}) expected; {count} differ",
            got.len(),
            got[at],
            got[at].to_bits(),
            want[at],
            want[at].to_bits()
        );
    }
}

/// Both implementations of a comparison.
pub(crate) struct Pair<'a> {
    pub(crate) tested: &'a dyn Kernels,
    pub(crate) reference: CpuReference,
}

impl Pair<'_> {
    /// Runs `run` on both and compares the outputs, which start poisoned with NaN.
    pub(crate) fn compare(
        &self,
        case: &str,
        outputs: &[usize],
        run: impl Fn(&dyn Kernels, &mut [Vec<f32>]),
    ) {
        let want = self.compare_any(case, outputs, run);
        for (i, w) in want.iter().enumerate() {
            assert!(!w.iter().any(|x| x.is_nan()), "{case}: output {i} was left unwritten");
        }
    }

    /// The same for results that may be NaN, which are returned.
    pub(crate) fn compare_any(
        &self,
        case: &str,
        outputs: &[usize],
        run: impl Fn(&dyn Kernels, &mut [Vec<f32>]),
    ) -> Vec<Vec<f32>> {
        let poisoned = || outputs.iter().map(|n| vec![f32::NAN; *n]).collect::<Vec<_>>();
        let (mut got, mut want) = (poisoned(), poisoned());
        run(&self.reference, &mut want);
        run(self.tested, &mut got);
        for (i, (g, w)) in got.iter().zip(&want).enumerate() {
            same_bits(&format!("{case}, output {i}"), g, w);
        }
        want
    }
}
