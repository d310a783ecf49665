//! The instruction sets that the fast version knows.

use super::fast;
use crate::error::KernelError;
use std::fmt;

/// Instructions that the fast version uses. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum InstructionSet {
    /// Whatever the compiler takes for granted: the operations are the reference's.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 with BF16 products and byte permutations (Zen 4, Sapphire Rapids), beside AVX2.
    Avx512,
}

impl InstructionSet {
    /// All of them, the slowest first.
    pub const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512];

    /// The fastest that this machine has.
    #[must_use]
    pub fn best() -> Self {
        Self::ALL.into_iter().rfind(|set| set.is_present()).unwrap_or(Self::Portable)
    }

    /// Whether this machine has it.
    #[must_use]
    pub fn is_present(self) -> bool {
        match self {
            Self::Portable => true,
            Self::Avx2 => fast::has_avx2(),
            Self::Avx512 => fast::has_avx2() && fast::has_avx512(),
        }
    }

    /// `portable`, `avx2` or `avx512`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// The set of that [name](Self::name), if this machine has it.
    ///
    /// # Errors
    /// Another name, or a set that is not here.
    pub fn named(name: &str) -> Result<Self, KernelError> {
        let found = Self::ALL.into_iter().find(|set| set.name() == name && set.is_present());
        found.ok_or_else(|| KernelError::Instructions { name: name.to_owned() })
    }
}

impl fmt::Display for InstructionSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_found_by_its_name_where_it_is_present() {
        for set in InstructionSet::ALL {
            assert_eq!(InstructionSet::named(set.name()).ok(), set.is_present().then_some(set));
        }
        assert_eq!(
            InstructionSet::named("mmx").unwrap_err().to_string(),
            "no instruction set `mmx` on this machine: portable, avx2 and avx512 are known"
        );
        assert!(InstructionSet::best().is_present());
    }
}
