//! What can be wrong with a checkpoint.

use std::fmt;
use std::io;
use std::path::PathBuf;

use super::TensorInfo;
use crate::config::ConfigError;

/// A checkpoint that cannot be opened, read or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightError {
    /// The directory or its `config.json`.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No weights beside the config.
    #[error(
        "no weights in {}: neither model.safetensors.index.json nor model.safetensors",
        dir.display()
    )]
    NoWeights {
        /// Directory looked into.
        dir: PathBuf,
    },
    /// A file cannot be read.
    #[error("read {}: {source}", path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The index of shards is malformed.
    #[error("index {}: {what}", path.display())]
    Index {
        /// File.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// A shard of the index is not there.
    #[error("shard {} is missing; the index puts {tensors} tensors in it", path.display())]
    MissingShard {
        /// File.
        path: PathBuf,
        /// Tensors the index puts in it.
        tensors: usize,
    },
    /// A shard whose header and size do not agree, or that is no safetensors file.
    #[error("shard {}: {what}", path.display())]
    Header {
        /// File.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// Index and shard disagree about where a tensor is.
    #[error("tensor {name}: {what}")]
    Misplaced {
        /// Tensor.
        name: String,
        /// Where it is and should be.
        what: String,
    },
    /// An element type that no supported checkpoint has.
    #[error("tensor {name} has type {found}, supported: BF16, F32, F8_E4M3, F8_E8M0, I8 and I64")]
    Dtype {
        /// Tensor.
        name: String,
        /// Its type.
        found: String,
    },
    /// A name the source does not have.
    #[error("no tensor {name}")]
    Unknown {
        /// Tensor.
        name: String,
    },
    /// Tensors of a DSpark draft head.
    #[error(
        "tensor {name} belongs to a DSpark or 0731 checkpoint, which is not supported; supported: \
         the DeepSeek-V4 Flash and Pro checkpoints of April 2026"
    )]
    DSpark {
        /// First such tensor.
        name: String,
    },
    /// Tensors of DeepSeek-V4.1.
    #[error("tensor {name} belongs to DeepSeek-V4.1, another architecture, which is not supported")]
    V41 {
        /// First such tensor.
        name: String,
    },
    /// Names of another library.
    #[error(
        "tensor {name} has a name of a re-packed checkpoint; supported: DeepSeek's own names, such \
         as layers.0.attn.wkv.weight"
    )]
    Renamed {
        /// First such tensor.
        name: String,
    },
    /// Tensors that the config does not explain, or that it needs and are not there.
    #[error(
        "checkpoint does not fit its config.json: {} missing{missing}; {} unexpected{surplus}; \
         {} of another type or shape{misshaped}",
        missing.total, surplus.total, misshaped.total
    )]
    Inventory {
        /// Needed and not there.
        missing: NameList<String>,
        /// There and not explained.
        surplus: NameList<String>,
        /// There, but not as needed.
        misshaped: NameList<Misshaped>,
    },
}

/// A tensor of the wrong type or shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misshaped {
    /// Tensor.
    pub name: String,
    /// As found.
    pub found: TensorInfo,
    /// As needed.
    pub wanted: TensorInfo,
}

impl fmt::Display for Misshaped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}, needs {}", self.name, self.found, self.wanted)
    }
}

/// The first [`NameList::LIMIT`] findings of one kind, and how many there are in all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameList<T> {
    /// The first findings, in order.
    pub first: Vec<T>,
    /// Findings in all.
    pub total: usize,
}

impl<T> Default for NameList<T> {
    fn default() -> Self {
        Self { first: Vec::new(), total: 0 }
    }
}

impl<T> NameList<T> {
    /// Findings that are kept.
    pub const LIMIT: usize = 64;

    pub(super) fn push(&mut self, finding: T) {
        self.total += 1;
        if self.first.len() < Self::LIMIT {
            self.first.push(finding);
        }
    }
}

impl<T: fmt::Display> fmt::Display for NameList<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, finding) in self.first.iter().enumerate() {
            write!(f, "{}{finding}", if n == 0 { ": " } else { ", " })?;
        }
        match self.total - self.first.len() {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}
