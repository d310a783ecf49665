//! DeepSeek-V4 (Flash, Pro and checkpoints of the same architecture): official checkpoints, the
//! forward pass over paged caches, sampling and tokenizer.
//!
//! The model neither owns nor schedules anything: a caller gives it a [`Batch`] of sequence parts,
//! page memory laid out by [`kv_pool::Geometry`], and a [`Workspace`]; [`Model::forward`] computes
//! the step, writes the new cache rows into the pages and returns logits. Prompts can be computed
//! in chunks of any size, beside sequences that decode, and give the same bits as computed whole.

pub mod batch;
pub mod caches;
pub mod config;
pub mod error;
pub mod forward;
mod layer;
pub mod load;
mod plan;
pub mod sample;
pub mod session;
pub mod text;
pub mod trace;
pub mod weights;
pub mod workspace;

pub use batch::{Batch, LogitsWanted, SeqSpan, StepOutput};
pub use caches::{CacheMem, PageMemory};
pub use error::{ForwardError, LoadError, SessionError};
pub use forward::Model;
pub use load::LoadOptions;
pub use session::{Part, Sequence, Session, SessionLimits};
pub use trace::{Probe, Trace, TraceEntry};
pub use workspace::Workspace;
