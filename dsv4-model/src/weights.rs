//! Where weights come from: the [`WeightSource`] trait, official checkpoints, and the list of
//! tensors a model is made of.

mod checkpoint;
mod error;
mod inventory;
mod mmap;

use std::borrow::Cow;
use std::fmt;

pub use checkpoint::Checkpoint;
pub use error::{Misshaped, NameList, WeightError};
pub use inventory::{
    ExpectedTensor, ExpertFormat, Inventory, check_inventory, draft_tensors, expected_tensors,
};

/// Element types that occur in DeepSeek-V4 checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WeightDtype {
    /// `BF16`.
    Bf16,
    /// `F32`.
    F32,
    /// `F8_E4M3`.
    F8E4M3,
    /// `F8_E8M0`: a power-of-two scale, `2^(byte - 127)`.
    F8E8M0,
    /// `I8`: two E2M1 codes, the even column in the low nibble.
    I8,
    /// `I64`.
    I64,
}

impl WeightDtype {
    /// Bytes of an element as stored; an I8 counts as one although it holds two codes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::F8E4M3 | Self::F8E8M0 | Self::I8 => 1,
            Self::Bf16 => 2,
            Self::F32 => 4,
            Self::I64 => 8,
        }
    }
}

impl fmt::Display for WeightDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "BF16",
            Self::F32 => "F32",
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E8M0 => "F8_E8M0",
            Self::I8 => "I8",
            Self::I64 => "I64",
        })
    }
}

/// Element type and shape of a tensor, row-major, `[out, in]` for matrices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type.
    pub dtype: WeightDtype,
    /// Sizes, outermost first.
    pub shape: Vec<u64>,
}

impl TensorInfo {
    /// Bytes of the whole tensor, or none if they exceed 64 bits.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        self.shape.iter().try_fold(self.dtype.bytes(), |bytes, &size| bytes.checked_mul(size))
    }
}

impl fmt::Display for TensorInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.shape)
    }
}

/// Something that tensors can be read from by their official names.
pub trait WeightSource: Send + Sync + fmt::Debug {
    /// All names, sorted.
    fn names(&self) -> Vec<String>;

    /// Type and shape, or none if there is no such tensor.
    fn info(&self, name: &str) -> Option<TensorInfo>;

    /// The tensor's bytes, row-major, little-endian; as many as its [`TensorInfo`] says.
    ///
    /// # Errors
    /// [`WeightError::Unknown`] if there is no such tensor, or what kept it from being read.
    fn read<'a>(&'a self, name: &str) -> Result<Cow<'a, [u8]>, WeightError>;
}
