//! The fast implementation: AVX2 kernels over a thread team, with the bits of the reference.
//!
//! Without AVX2, FMA and F16C (found out at run time) every operation is the reference's.
#![expect(unsafe_code, reason = "SIMD kernels, and outputs filled by several threads")]

#[cfg(target_arch = "x86_64")]
mod attend;
#[cfg(target_arch = "x86_64")]
mod elementwise;
#[cfg(target_arch = "x86_64")]
mod gate;
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

use super::CpuReference;
use crate::error::KernelError;
use crate::ops::{
    Attend, Compress, Embed, HyperHead, HyperPost, HyperPre, IndexQuery, IndexSelect, Kernels,
    Linear, LoadRows, Moe, RmsNorm, Rope, RopeTable, Route, StoreRows, Weight, WeightDesc,
};
use team::Team;

/// Whether the vector kernels can run here.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_simd() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// Whether the vector kernels can run here.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn has_simd() -> bool {
    false
}

/// The fast implementation.
///
/// An operation uses the calling thread and the team's own threads, if it is large enough to gain
/// from them. Results do not depend on the number of threads, on how tokens are batched or cut into
/// chunks, or on whether the machine has the vector instructions. Several threads may call at once.
#[derive(Debug)]
pub struct CpuKernels {
    team: Team,
    simd: bool,
}

impl CpuKernels {
    /// Kernels on `threads` threads (at least one), of which the caller is one.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Self { team: Team::new(threads.max(1)), simd: has_simd() }
    }

    /// Threads that an operation may use.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.team.threads()
    }
}

/// Methods that go to the vector version if the machine can run it.
macro_rules! vector_or_reference {
    ($($name:ident($args:ident) => $path:path,)*) => {
        $(fn $name(&self, a: $args<'_>) -> Result<(), KernelError> {
            #[cfg(target_arch = "x86_64")]
            if self.simd {
                // SAFETY: `simd` says that the machine has AVX2, FMA and F16C, which is all that
                // these functions ask for.
                return unsafe { $path(&self.team, a) };
            }
            CpuReference.$name(a)
        })*
    };
}

impl Kernels for CpuKernels {
    fn pack(&self, desc: &WeightDesc<'_>) -> Result<Weight, KernelError> {
        #[cfg(target_arch = "x86_64")]
        if self.simd {
            return gemm::pack(desc);
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
        index_select(IndexSelect) => index::index_select,
        attend(Attend) => attend::attend,
        route(Route) => elementwise::route,
        moe(Moe) => moe::moe,
    }
}
