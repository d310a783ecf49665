//! CPU implementations: [`CpuReference`] is the definition, [`CpuKernels`] the fast version with the
//! same bits.

mod body;
mod compress;
mod config;
mod fast;
mod instructions;
mod pack;
mod reference;
mod rows;

pub use config::VARIABLE as INSTRUCTIONS_VARIABLE;
pub use fast::CpuKernels;
#[cfg(any(test, feature = "testing"))]
pub(crate) use fast::bf16_peak;
pub use instructions::InstructionSet;
pub use reference::CpuReference;
