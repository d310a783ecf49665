//! The environment: which instructions to use.

use super::InstructionSet;
use crate::error::KernelError;

/// Environment variable with the name of an instruction set.
pub const VARIABLE: &str = "DSV4_CPU_INSTRUCTIONS";

/// The set that the environment names, else the best.
pub(super) fn instructions() -> Result<InstructionSet, KernelError> {
    match std::env::var_os(VARIABLE) {
        None => Ok(InstructionSet::best()),
        Some(name) => InstructionSet::named(&name.to_string_lossy()),
    }
}
