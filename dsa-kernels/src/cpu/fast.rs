//! The fast implementation: vector kernels over a thread team, with the bits of the reference.
//!
//! With AVX-512 the matrix products and attention multiply BF16 numbers, everything else is compiled
//! for AVX2; without AVX2, FMA and F16C every operation is the reference's.
#![expect(unsafe_code, reason = "SIMD kernels, and outputs filled by several threads")]

#[cfg(target_arch = "x86_64")]
mod attend;
#[cfg(target_arch = "x86_64")]
mod elementwise;
#[cfg(target_arch = "x86_64")]
mod gate;
#[cfg(target_arch = "x86_64")]
mod gemm;
#[cfg(target_arch = "x86_64")]
mod index;
#[cfg(target_arch = "x86_64")]
mod moe;
#[cfg(target_arch = "x86_64")]
mod rows;
#[cfg_attr(
    not(target_arch = "x86_64"),
    expect(dead_code, reason = "only the vector kernels share work")
)]
mod team;
#[cfg(target_arch = "x86_64")]
mod wide;

use super::{CpuReference, InstructionSet, config};
use crate::error::KernelError;
use crate::ops::{
    Attend, Compress, Embed, HyperHead, HyperPost, HyperPre, IndexQuery, IndexSelect, Kernels,
    Linear, LoadRows, Moe, RmsNorm, Rope, RopeTable, Route, StoreRows, Weight, WeightDesc,
};
use team::Team;

/// Whether the machine has AVX2, FMA and F16C.
pub(crate) fn has_avx2() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Whether the machine has what the BF16 kernels need.
pub(crate) fn has_avx512() -> bool {
    #[cfg(target_arch = "x86_64")]
    return wide::is_present();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// BF16 operations a second of one thread that does nothing else, where there are such products.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn bf16_peak() -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: asked for just before.
    return has_avx512().then(|| unsafe { wide::peak() });
    #[cfg(not(target_arch = "x86_64"))]
    None
}

/// The fast implementation.
///
/// An operation uses the calling thread and the team's own threads, if it is large enough to gain
/// from them. Results do not depend on the number of threads, on how tokens are batched or cut into
/// chunks, or on the instructions that the machine has. Several threads may call at once.
#[derive(Debug)]
pub struct CpuKernels {
    team: Team,
    instructions: InstructionSet,
}

impl CpuKernels {
    /// Kernels on `threads` threads (at least one), of which the caller is one, with the best
    /// instructions that this machine has.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Self { team: Team::new(threads.max(1)), instructions: InstructionSet::best() }
    }

    /// As [`new`](Self::new), with the instructions that the environment names in
    /// [`INSTRUCTIONS_VARIABLE`](super::INSTRUCTIONS_VARIABLE).
    ///
    /// # Errors
    /// The name of no set, or of one that this machine has not.
    pub fn from_env(threads: usize) -> Result<Self, KernelError> {
        Ok(Self { instructions: config::instructions()?, ..Self::new(threads) })
    }

    /// As [`new`](Self::new), with these instructions.
    ///
    /// # Errors
    /// This machine has not got them.
    pub fn with_instructions(
        threads: usize,
        instructions: InstructionSet,
    ) -> Result<Self, KernelError> {
        let instructions = InstructionSet::named(instructions.name())?;
        Ok(Self { instructions, ..Self::new(threads) })
    }

    /// Threads that an operation may use.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    /// Instructions that operations use.
    #[must_use]
    pub fn instructions(&self) -> InstructionSet {
        self.instructions
    }
}

/// Methods that go to the vector version if the machine can run it.
macro_rules! vector_or_reference {
    ($($name:ident($args:ident) => $path:path,)*) => {
        $(fn $name(&self, a: $args<'_>) -> Result<(), KernelError> {
            #[cfg(target_arch = "x86_64")]
            if self.instructions >= InstructionSet::Avx2 {
                // SAFETY: the constructors saw that the machine has AVX2, FMA and F16C, which is all
                // that these functions ask for.
                return unsafe { $path(&self.team, a) };
            }
            CpuReference.$name(a)
        })*
    };
}

impl Kernels for CpuKernels {
    fn pack(&self, desc: &WeightDesc<'_>) -> Result<Weight, KernelError> {
        #[cfg(target_arch = "x86_64")]
        if self.instructions >= InstructionSet::Avx2 {
            return gemm::pack(desc, self.instructions);
        }
        CpuReference.pack(desc)
    }

    vector_or_reference! {
        embed(Embed) => elementwise::embed,
        hyper_pre(HyperPre) => elementwise::hyper_pre,
        hyper_post(HyperPost) => elementwise::hyper_post,
        hyper_head(HyperHead) => elementwise::hyper_head,
        rms_norm(RmsNorm) => elementwise::rms_norm,
        linear(Linear) => gemm::linear,
        rope_table(RopeTable) => elementwise::rope_table,
        rope(Rope) => elementwise::rope,
        index_query(IndexQuery) => elementwise::index_query,
        store_rows(StoreRows) => elementwise::store_rows,
        load_rows(LoadRows) => elementwise::load_rows,
        compress(Compress) => elementwise::compress,
        route(Route) => elementwise::route,
        moe(Moe) => moe::moe,
    }

    fn index_select(&self, a: IndexSelect<'_>) -> Result<(), KernelError> {
        #[cfg(target_arch = "x86_64")]
        if self.instructions >= InstructionSet::Avx2 {
            // SAFETY: the constructors saw that the machine has these instructions.
            return unsafe { index::index_select(&self.team, self.instructions, a) };
        }
        CpuReference.index_select(a)
    }

    fn attend(&self, a: Attend<'_>) -> Result<(), KernelError> {
        #[cfg(target_arch = "x86_64")]
        if self.instructions >= InstructionSet::Avx2 {
            // SAFETY: the constructors saw that the machine has these instructions.
            return unsafe { attend::attend(&self.team, self.instructions, a) };
        }
        CpuReference.attend(a)
    }
}
